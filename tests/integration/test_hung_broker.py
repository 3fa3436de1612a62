"""A planner's tick over several streams while one of three brokers hangs: it costs its own partitions only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from dev.broker import EmbeddedBroker, EmbeddedCluster
from dev.processes import wait_until
from highwater.declaration import Stream
from highwater.orchestration.build import build_defs
from highwater.orchestration.sensing.rounds import LIMIT_SECONDS
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.conftest import create_topic
from tests.helpers.support import make_stream

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(900)]

NAMES = ("first", "second", "third")
PARTITIONS = 3
# Longer than the test: the broker that hangs leads its partitions all the time, and metadata name it as controller.
SESSION_MS = 300_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Each partition has one replica: the broker that hangs leads one of each topic, and nobody takes over."""
    extra = {"broker.session.timeout.ms": str(SESSION_MS)}
    with EmbeddedCluster(tmp_path, controller_apart=True, extra=extra) as started:
        for name in NAMES:
            create_topic(started.bootstrap, name, PARTITIONS, {"min.insync.replicas": "1"})
        yield started


class Deployment:
    """The planner of some streams, ticked as the daemon does."""

    def __init__(self, root: Path, instance: dg.DagsterInstance, bootstrap: str, streams: Sequence[Stream]) -> None:
        self.instance, self.streams, self.cursor = instance, streams, ""
        self.ledger, self.kafka = Ledger(f"sqlite:///{root / 'ledger.sqlite'}"), Kafka(bootstrap)
        resources = {"ledger": self.ledger, "kafka": self.kafka, "lake": Lake(str(root / "lake"))}
        opened = {name: SimpleNamespace(open=lambda one=one: one) for name, one in resources.items()}
        self.defs = build_defs(streams=streams, resources=opened)

    def tick(self) -> float:
        """Let the sensor tick; returns how long it took, in seconds."""
        sensor, began = self.defs.get_repository_def().get_sensor_def("planner"), time.monotonic()
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, resources=self.defs.resources
        ) as context:
            result = sensor.evaluate_tick(context)
        took = time.monotonic() - began
        self.cursor = result.cursor or ""
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
        return took

    def planned(self) -> dict[tuple[str, int], int]:
        found = {
            stream.name: self.ledger.topics.read_planned_topic(stream.name, stream.topic) for stream in self.streams
        }
        return {(name, p): end for name, one in found.items() if one is not None for p, end in one.ends.items()}

    def leaders(self) -> dict[tuple[str, int], int]:
        topics = self.kafka.get_admin().list_topics(timeout=30).topics
        return {(name, p): one.leader for name in NAMES for p, one in topics[name].partitions.items()}


@contextmanager
def hanging(broker: EmbeddedBroker) -> Iterator[None]:
    assert broker.pid is not None
    os.killpg(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(broker.pid, signal.SIGCONT)


def send(bootstrap: str, many: int) -> None:
    """Send this number of records to each partition."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "log_level": 0})
    for name in NAMES:
        for partition in range(PARTITIONS):
            for _ in range(many):
                producer.produce(name, b"{}", partition=partition)
    assert producer.flush(60) == 0


def test_a_broker_that_hangs_stops_its_own_partitions_only(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Descriptions of topics come from one broker. A tick planned nothing at all where that was the one that hung.

    Each broker hangs in turn, so that one of them is the broker that the client asks.
    """
    streams = [replace(make_stream(name), name=name) for name in NAMES]
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        ours = Deployment(tmp_path, instance, cluster.bootstrap, streams)
        sent = 0

        def all_planned() -> bool:
            ours.tick()
            return ours.planned() == dict.fromkeys(leaders, sent)

        leaders = ours.leaders()
        wait_until(all_planned, 60, "the first plan")
        for broker in cluster.brokers:
            send(cluster.bootstrap, 5)
            before, sent = sent, sent + 5
            with hanging(broker):
                took = ours.tick()
            expected = {place: before if leader == broker.node.id else sent for place, leader in leaders.items()}
            assert {*expected.values()} == {before, sent}, "each broker leads some partitions, and others lead the rest"
            assert ours.planned() == expected, f"broker {broker.node.id} hung"
            assert took < LIMIT_SECONDS
            wait_until(all_planned, 60, "the partitions of the broker that hung")
        assert ours.ledger.list_losses() == []
        assert ours.ledger.sensor_faults.list_all() == []
