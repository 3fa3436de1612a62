"""The embedded Kafka: one KRaft broker, or several that form one cluster, on the loopback address."""

from __future__ import annotations

import os
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dev import class_archives, jars
from dev.java import find_java
from dev.processes import LOOPBACK, Child, ChildFailedError, accepts, free_port
from dev.server import Server, Service

HEAP_MB = 512
# Seen: 4 s on a quiet machine of 2 cores, 15 s on one that runs several JVMs.
START_SECONDS = 90.0

_LOGGING = """rootLogger.level=info
rootLogger.appenderRefs=out
rootLogger.appenderRef.out.ref=out
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d{ISO8601} %p %m (%c)%n
"""


@dataclass(frozen=True)
class Node:
    """One member of the cluster: its id and its two ports on the loopback address."""

    id: int
    port: int = field(default_factory=free_port)
    controller_port: int = field(default_factory=free_port)

    @property
    def voter(self) -> str:
        """The broker's entry in the list of voters."""
        return f"{self.id}@{LOOPBACK}:{self.controller_port}"


def properties(node: Node, cluster: Sequence[Node], data: Path, *, auto_create_topics: bool) -> dict[str, str]:
    """The broker's configuration.

    Args:
        node: whose configuration it is.
        cluster: all members, `node` among them.
        data: where its logs lie.
        auto_create_topics: whether asking for an absent topic creates it, as a broker does by default.
    """
    replicas = str(min(3, len(cluster)))
    in_sync = str(max(1, min(3, len(cluster)) - 1))
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.id),
        "controller.quorum.voters": ",".join(n.voter for n in cluster),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{LOOPBACK}:{node.port},CONTROLLER://{LOOPBACK}:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{node.port}",
        "log.dirs": str(data),
        "auto.create.topics.enable": str(auto_create_topics).lower(),
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        # The defaults of 50 and 50 cost seconds at every start of a small machine.
        "offsets.topic.num.partitions": "5",
        "transaction.state.log.num.partitions": "5",
        # A consumer group of one member need not wait three seconds for others.
        "group.initial.rebalance.delay.ms": "0",
        # A killed broker that starts again is let in when its earlier session has run out: 9 s by default.
        "broker.session.timeout.ms": "5000",
        "broker.heartbeat.interval.ms": "1000",
        # The default looks every five minutes: tests that truncate by retention would wait for it.
        "log.retention.check.interval.ms": "1000",
        "log.initial.task.delay.ms": "500",
        "log.cleaner.backoff.ms": "500",
        # One thread each is enough for what one machine writes, and keeps the JVM small.
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.dedupe.buffer.size": str(8 * 1024 * 1024),
    }


class EmbeddedBroker(Server):
    """One broker. Use it as a context, or call `start` and `stop`.

    Args:
        home: holds its data (`kafka-<id>`) and its log file; what is there already is served again.
        node: its ports, free ones if left out.
        cluster: all members of its cluster, only itself if left out.
        cluster_id: must be equal for all members.
        auto_create_topics: whether asking for an absent topic creates it.
        heap_mb: the JVM's heap in MiB.
        extra: further properties of the broker.
        java_options: beside its own; those that use the archive of its classes if None.
    """

    def __init__(
        self,
        home: Path,
        *,
        node: Node | None = None,
        cluster: Sequence[Node] = (),
        cluster_id: str | None = None,
        auto_create_topics: bool = False,
        heap_mb: int = HEAP_MB,
        extra: Mapping[str, str] | None = None,
        java_options: Sequence[str] | None = None,
    ) -> None:
        self.node = node or Node(1)
        self.home = home / f"kafka-{self.node.id}"
        super().__init__(
            home / "logs" / f"{self.home.name}.log", [self.node.port, self.node.controller_port], START_SECONDS
        )
        self.cluster_id = cluster_id or _new_cluster_id()
        self.properties = {
            **properties(self.node, cluster or [self.node], self.home / "data", auto_create_topics=auto_create_topics),
            **(extra or {}),
        }
        self._heap_mb = heap_mb
        self._java_options = java_options

    @property
    def bootstrap(self) -> str:
        """The address for `bootstrap.servers`."""
        return f"{LOOPBACK}:{self.node.port}"

    def _make_child(self) -> Child:
        jars.ensure("broker")
        java = find_java(os.environ)
        settings = self._write_settings()
        base: list[str | Path] = [
            java.executable,
            f"-Xmx{self._heap_mb}m",
            # One JVM among several on a small machine: fewer threads, less memory than G1.
            "-XX:+UseSerialGC",
            # It mostly copies bytes: the second compiler costs more than it gives back within minutes.
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={self.home / 'log4j2.properties'}",
            "-cp",
            jars.class_path("broker"),
        ]
        self._format(base, settings)
        ours = class_archives.options("broker", java) if self._java_options is None else self._java_options
        command = [base[0], *ours, *base[1:], "kafka.Kafka", settings]
        return Child(self.log.stem, command, logs=self.log.parent)

    def _write_settings(self) -> Path:
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "log4j2.properties").write_text(_LOGGING)
        settings = self.home / "server.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in self.properties.items()))
        return settings

    def _format(self, base: Sequence[str | Path], settings: Path) -> None:
        if (self.home / "data" / "meta.properties").is_file():
            return
        done = subprocess.run(
            [*base, "kafka.tools.StorageTool", "format", "-t", self.cluster_id, "-c", settings],
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        if done.returncode:
            raise ChildFailedError(
                f"no storage for the broker in {self.home}",
                found=(done.stdout + done.stderr)[-2000:],
                remedy="check that the folder may be written",
            )

    def _answers(self) -> bool:
        if self.properties["process.roles"] == "controller":
            return accepts(self.node.controller_port)
        if not accepts(self.node.port):
            return False
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        # Without a logger librdkafka writes each refused connection to our standard error.
        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        try:
            return any(b.id == self.node.id for b in client.list_topics(timeout=2).brokers.values())
        except KafkaException:
            return False


class EmbeddedCluster(Service):
    """Several brokers that form one cluster; each can be killed and started again by itself.

    Args:
        home: holds the data of all.
        size: how many; three are what replication factor 3 and elections need.
        heap_mb: the heap of each in MiB; 300 was enough for three.
        extra: further properties of every broker.
        controller_apart: a process more is the only controller. It elects leaders and takes replicas out of sync with
            all brokers but one unavailable; brokers that are controllers themselves have no quorum then.
    """

    def __init__(
        self,
        home: Path,
        size: int = 3,
        *,
        heap_mb: int = 300,
        extra: Mapping[str, str] | None = None,
        controller_apart: bool = False,
    ) -> None:
        nodes = [Node(number) for number in range(1, size + 1)]
        apart = Node(size + 1) if controller_apart else None
        cluster_id = _new_cluster_id()

        def member(node: Node, more: Mapping[str, str]) -> EmbeddedBroker:
            given = {**more, **(extra or {})}
            return EmbeddedBroker(home, node=node, cluster=nodes, cluster_id=cluster_id, heap_mb=heap_mb, extra=given)

        self.brokers = [member(node, {} if apart is None else _led_by(apart, node)) for node in nodes]
        self._apart = [] if apart is None else [member(apart, _leads_alone(apart))]

    @property
    def bootstrap(self) -> str:
        """The addresses of all."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    def start(self) -> None:
        """Start all that do not run, and wait until each answers.

        Raises:
            ChildFailedError: one ended, or did not answer in time.
        """
        unavailable = [broker for broker in (*self._apart, *self.brokers) if not broker.alive]
        for broker in unavailable:
            broker.launch()
        for broker in unavailable:
            broker.wait_ready()

    def stop(self) -> None:
        """Kill all: a controller that ends in good order waits for a quorum that is ending too."""
        self.kill()

    def kill(self) -> None:
        """SIGKILL to each."""
        for broker in (*self.brokers, *self._apart):
            broker.kill()


def _led_by(controller: Node, node: Node) -> dict[str, str]:
    return {
        "process.roles": "broker",
        "controller.quorum.voters": controller.voter,
        "listeners": f"PLAINTEXT://{LOOPBACK}:{node.port}",
    }


def _leads_alone(node: Node) -> dict[str, str]:
    return {
        "process.roles": "controller",
        "controller.quorum.voters": node.voter,
        "listeners": f"CONTROLLER://{LOOPBACK}:{node.controller_port}",
        "advertised.listeners": f"CONTROLLER://{LOOPBACK}:{node.controller_port}",
    }


def _new_cluster_id() -> str:
    """An ID as Kafka itself makes them: the storage tool would take one that begins with a dash for an option."""
    while (made := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made
