"""The whole stack on one machine, in the order in which its parts need each other."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from dev.broker import EmbeddedBroker
from dev.dagster_services import DEFINITIONS, UI_PORT, DagsterServices, prepare_home
from dev.processes import Child, ChildFailedError
from dev.registry import EmbeddedRegistry
from dev.server import Server, Service
from dev.spark_connect import SparkConnect
from dev.spark_local import SMALL_QUERIES, local_conf, write_conf_dir
from dev.spark_local import environment as spark_environment
from highwater import settings
from highwater.errors import ConfigurationError
from highwater.resources.object_store import build_s3a_conf, is_s3

DAGSTER_HOME = "DAGSTER_HOME"
# Read by the definitions: sensors start by themselves under the stack only.
SENSORS = "HIGHWATER_SENSORS"


class Stack(Service):
    """Broker, Spark, Dagster's webserver and daemon, as a context.

    Args:
        home: all local state of the stack.
        base: the environment that says what is configured instead of embedded; our own if left out.
        dagster: whether webserver and daemon are started.
        registry: whether a schema registry is started, which forgets its schemas when it ends.
        sensors: whether sensors and schedules run by themselves.
        ui_port: taken for Dagster's page when it is free.
        extra: further variables for every part.
        short_lived: whether Spark is to start quickly rather than to run fast for hours.
        definitions: the module that Dagster's code server loads.
        daemon: program and arguments of Dagster's daemon; Dagster's own if left out.
        on_broker: called when the broker answers and before Dagster's sensors look at it, to make topics and start
            what writes to them.

    Attributes:
        broker: the embedded broker, None when `HIGHWATER_KAFKA_BOOTSTRAP` names one.
        registry: the embedded schema registry, None where none is wanted or `HIGHWATER_SCHEMA_REGISTRY_URL` names one.
        spark: the embedded Connect server, None when `SPARK_REMOTE` or `HIGHWATER_SPARK_MASTER` names a Spark.
        dagster: webserver and daemon, None without them.
        env: the variables with which any process of ours joins the stack.
    """

    def __init__(
        self,
        home: Path,
        *,
        base: Mapping[str, str] | None = None,
        dagster: bool = True,
        registry: bool = False,
        sensors: bool = True,
        ui_port: int = UI_PORT,
        extra: Mapping[str, str] | None = None,
        short_lived: bool = False,
        definitions: str = DEFINITIONS,
        daemon: Sequence[str | Path] | None = None,
        on_broker: Callable[[Stack], None] | None = None,
    ) -> None:
        self._on_broker = on_broker
        self.home = home.absolute()
        base = os.environ if base is None else base
        self.broker = None if base.get(settings.KAFKA_BOOTSTRAP) else EmbeddedBroker(self.home)
        named = base.get(settings.SPARK_REMOTE) or base.get(settings.SPARK_MASTER)
        conf = {
            **(SMALL_QUERIES if short_lived else {}),
            **(build_s3a_conf(base) if is_s3(base.get(settings.LAKE, "")) else {}),
        }
        self.spark = None if named else SparkConnect(self.home, extra=conf)
        embeds_registry = registry and not settings.read_secret(base, settings.SCHEMA_REGISTRY_URL)
        self.registry = EmbeddedRegistry(self.home) if embeds_registry else None
        self._own_dagster_home = not base.get(DAGSTER_HOME)
        self.env = {**base, **self._variables(base, sensors=sensors), **(extra or {})}
        self.dagster = None
        if dagster:
            self.dagster = DagsterServices(self.home, self.env, ui_port=ui_port, module=definitions, daemon=daemon)
        self._opened = ExitStack()
        self._extra_children: list[Child] = []

    def _variables(self, base: Mapping[str, str], *, sensors: bool) -> dict[str, str]:
        found = {
            settings.HOME: str(self.home),
            DAGSTER_HOME: base.get(DAGSTER_HOME) or str(self.home / "dagster"),
            SENSORS: "running" if sensors else "stopped",
            # Log files are read while they are written.
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{base.get('PATH', '')}",
        }
        if self.broker:
            found[settings.KAFKA_BOOTSTRAP] = self.broker.bootstrap
        if self.spark:
            found[settings.SPARK_REMOTE] = self.spark.remote
        if self.registry:
            found[settings.SCHEMA_REGISTRY_URL] = self.registry.url
        return found

    @property
    def bootstrap(self) -> str:
        """The brokers, embedded or configured."""
        return self.env[settings.KAFKA_BOOTSTRAP]

    @property
    def webserver_url(self) -> str:
        """Dagster's page.

        Raises:
            ConfigurationError: the stack was made without Dagster.
        """
        if self.dagster is None:
            raise ConfigurationError("this stack has no webserver", remedy="make it with dagster=True")
        return self.dagster.url

    def start(self) -> None:
        """Start all parts and wait until they answer.

        Raises:
            ChildFailedError: a part ended, or did not answer in time.
            ConfigurationError: another stack runs in the home.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        self._opened.enter_context(_only_one(self.home))
        if self.dagster:
            prepare_home(Path(self.env[DAGSTER_HOME]), ours=self._own_dagster_home)
            self.dagster.touch.start()
        # The servers start side by side. Dagster's sensors ask the broker at once, so Dagster comes after it.
        for server in self._servers():
            server.launch()
        self._prepare_local_spark()
        if self.dagster:
            self.dagster.launch_code()
        if self.broker:
            self.broker.wait_ready()
        if self._on_broker:
            self._on_broker(self)
        if self.registry:
            self.registry.wait_ready()
        if self.dagster:
            self.dagster.launch()
        if self.spark:
            self.spark.wait_ready()
        if self.dagster:
            self.dagster.wait_ready()
        self._write_variables()

    def _servers(self) -> Sequence[Server]:
        return [server for server in (self.broker, self.spark, self.registry) if server is not None]

    def _prepare_local_spark(self) -> None:
        """A session in the run's own process finds Java, jars and settings by the environment."""
        if self.env.get(settings.SPARK_MASTER, "").startswith("local") and not self.spark:
            conf_dir = write_conf_dir(self.home, "local", local_conf(self.home))
            self.env.update(spark_environment(conf_dir, self.env))
            for child in self._children():
                child.environment.update(self.env)

    def run(self, name: str, command: Sequence[str | Path]) -> Child:
        """Start a further process that ends with the stack."""
        child = Child(name, command, logs=self.home / "logs", environment=self.env)
        self._extra_children.append(child)
        child.start()
        return child

    def supervise(self) -> list[str]:
        """Restart what of Dagster ended by itself; returns a sentence for each process.

        Raises:
            ChildFailedError: another part ended by itself, or one of Dagster's soon after its start.
        """
        self._require_alive()
        return self.dagster.restart_ended() if self.dagster else []

    def _require_alive(self) -> None:
        for part in self._servers():
            if not part.alive:
                raise ChildFailedError(f"{part.log.stem} ended", remedy=f"read {part.log}")
        for child in self._extra_children:
            if not child.alive and child.exit_status:
                raise ChildFailedError(
                    f"{child.name} ended with exit status {child.exit_status}",
                    found=f"the end of its log:\n{child.tail()}\n",
                    remedy=f"read {child.log}",
                )

    def _children(self) -> Iterable[Child]:
        services = [self.dagster.code, self.dagster.webserver, self.dagster.daemon] if self.dagster else []
        return [*(one for one in services if one is not None), *self._extra_children]

    def logs(self) -> list[Path]:
        """The log files of all parts."""
        return [*(server.log for server in self._servers()), *(child.log for child in self._children())]

    def _write_variables(self) -> None:
        # For a person's other terminal: `source .highwater/env` and the `highwater` command sees the stack.
        ours = (
            settings.HOME,
            settings.KAFKA_BOOTSTRAP,
            settings.SCHEMA_REGISTRY_URL,
            settings.SPARK_REMOTE,
            settings.SPARK_MASTER,
            DAGSTER_HOME,
        )
        lines = [f"export {name}={shlex.quote(self.env[name])}\n" for name in ours if name in self.env]
        (self.home / "env").write_text("".join(lines))

    def kill(self) -> None:
        """Services that did start are ended in good order."""
        self.stop()

    def stop(self) -> None:
        """End everything; each part even if another one would not end."""
        with self._opened:
            for server in self._servers():
                self._opened.callback(server.stop)
            if self.dagster:
                self._opened.callback(self.dagster.stop)
            for child in self._extra_children:
                self._opened.callback(child.stop)


class _only_one:  # noqa: N801 - used as a function
    """Holds the home for one stack.

    Raises:
        ConfigurationError: another stack runs in it.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / "stack.busy"
        self._file: TextIO | None = None

    def __enter__(self) -> None:
        self._file = self._path.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ConfigurationError(
                f"another stack runs in {self._path.parent}",
                remedy="end it with Ctrl-C, or set HIGHWATER_HOME to another folder",
            ) from error

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
