"""What was acknowledged is there, once and in order, whatever happens to the brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev.broker import EmbeddedBroker, EmbeddedCluster
from dev.processes import wait_until
from dev.proxy import LossyProxy
from highwater.assets import raw
from highwater.declaration import Limits
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Record
from tests.conftest import create_topic
from tests.helpers.support import Bench, make_bench, read_topic

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient
    from pyspark.sql import SparkSession

    from highwater.slices import Slice

pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(1800)]

RATE = 1000
TOPIC = "acknowledged"
PARTITIONS = 3
KEYS = 100


def place_of(bootstrap: str) -> dict[bytes, list[tuple[int, int]]]:
    """The place of each value, in the order of offsets."""
    found: dict[bytes, list[tuple[int, int]]] = {}
    for place, (_, value) in sorted(read_topic(bootstrap, TOPIC).items()):
        found.setdefault(value or b"", []).append(place)
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    """Its controller is apart: with two of three brokers unavailable, the third still learns that it is alone."""
    with EmbeddedCluster(tmp_path, controller_apart=True) as started:
        create_topic(started.bootstrap, TOPIC, PARTITIONS, {"min.insync.replicas": "2"}, replicas=3)
        yield started


class Sender(threading.Thread):
    """Sends at a rate until it is asked to stop, and keeps what was acknowledged."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[str] = []
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._brokers = bootstrap
        self.sent = 0
        self.began = 0.0

    @property
    def due(self) -> int:
        """A number of records should be sent by now."""
        return int((time.monotonic() - self.began) * RATE)

    def run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.failure = error

    def _send(self) -> None:
        producer = ReliableProducer(build_producer_properties(self._brokers, {"log_level": "0"}))
        self.began = time.monotonic()
        while not self.stopping.is_set():
            due = self.due
            while self.sent < due:
                key = b"k%d" % (self.sent % KEYS)
                producer.send(Record(TOPIC, key, b"%d" % self.sent), str(self.sent), self.acknowledged.append)
                self.sent += 1
            producer.poll(0.01)
        producer.close(300)


@pytest.mark.parametrize("unavailable", [2.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_brokers_fall_in_turn_and_no_acknowledged_record_is_lost_doubled_or_reordered(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path, unavailable: float
) -> None:
    """Leaders are killed in turn, then two of three replicas are unavailable for some seconds, then all brokers are
    down.

    Slices are planned and read meanwhile; together they equal the topic.
    """
    bench = make_bench(TOPIC, cluster.bootstrap, spark, tmp_path / "bench")
    sender = Sender(cluster.bootstrap)
    sender.start()
    for broker in cluster.brokers:
        time.sleep(unavailable / 2)
        assert broker.node.id in leaders(cluster), "a broker without partitions is no leader that falls"
        broker.kill()
        time.sleep(unavailable / 2)
        broker.start()
        wait_until(lambda: in_sync(cluster) == 3, 120, "all replicas in sync")
        take(bench)
    for broker in cluster.brokers[:2]:
        broker.kill()
    wait_until(lambda: in_sync(cluster) == 1, 120, "the third replica to be alone")
    before = len(sender.acknowledged)
    time.sleep(unavailable)
    assert len(sender.acknowledged) - before < RATE, "one replica of two is not enough for an acknowledgement"
    cluster.brokers[2].kill()
    time.sleep(unavailable)
    cluster.start()
    wait_until(lambda: in_sync(cluster) == 3, 120, "all replicas in sync")
    wait_until(lambda: sender.sent >= sender.due - RATE, 120, "the sender to catch up")
    sender.stopping.set()
    sender.join(400)
    assert sender.failure is None
    assert len(sender.acknowledged) == sender.sent
    assert sender.sent >= 5 * unavailable * RATE, "with a minute of no broker it sends for five"
    places = place_of(cluster.bootstrap)
    assert {int(value) for value in places} == {int(number) for number in sender.acknowledged}
    assert all(len(found) == 1 for found in places.values()), "a record occurs twice"
    for key in range(KEYS):
        ordered = [places[b"%d" % n][0] for n in range(key, sender.sent, KEYS)]
        assert ordered == sorted(ordered), "a key's records are out of order"
    take(bench)
    ensure_slices_equal(bench)


def take(bench: Bench) -> None:
    """Plan what the topic holds by now, and read it into raw."""
    stream = replace(bench.stream, limits=Limits(max_offsets=20_000, slices_per_tick=1000))
    slices: list[Slice] = []

    def planned() -> bool:
        tick = Planner(bench.ledger, bench.kafka).tick(stream, datetime.now(UTC))
        assert not tick.errors
        # While leadership moves back to a restarted broker, a partition has no leader, or one that does not answer yet.
        assert set(tick.skipped.values()) <= {"no leader", "no leader that answers"}
        slices.extend(tick.slices)
        return not tick.skipped

    wait_until(planned, 60, "a tick that every partition has a leader for")
    assert slices
    raw.materialise(bench.work(*slices))


def ensure_slices_equal(bench: Bench) -> None:
    """Raw has what the topic holds, record by record, each once."""
    rows = sorted((row["partition"], row["offset"], row["key"], row["value"]) for row in bench.rows("raw"))
    assert rows == sorted((*place, *content) for place, content in read_topic(bench.bootstrap, TOPIC).items())


def leaders(cluster: EmbeddedCluster) -> set[int]:
    return {p.leader for p in admin(cluster.bootstrap).list_topics(TOPIC, timeout=30).topics[TOPIC].partitions.values()}


def in_sync(cluster: EmbeddedCluster) -> int:
    from confluent_kafka import KafkaException

    try:
        topics = admin(cluster.bootstrap).list_topics(TOPIC, timeout=60).topics
    except KafkaException:
        return 0
    return min((len(p.isrs) for p in topics[TOPIC].partitions.values()), default=0)


def admin(bootstrap: str) -> AdminClient:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


@pytest.mark.parametrize("idempotent", [True, False])
def test_lost_answers_double_nothing_unless_idempotence_is_off(tmp_path: Path, idempotent: bool) -> None:
    """With idempotence off the same loss does double records, so the test is known to test something."""
    broker = EmbeddedBroker(tmp_path)
    with LossyProxy(broker.node.port, share=0.1) as proxy:
        broker.properties["advertised.listeners"] = f"PLAINTEXT://{proxy.address}"
        with broker:
            create_topic(broker.bootstrap, TOPIC, 1, {})
            found = build_producer_properties(proxy.address, {"linger.ms": "1", "log_level": "0"})
            # What the checked configuration refuses is put in after its back.
            found |= {} if idempotent else {"enable.idempotence": "false", "retries": "1000"}
            found |= {"batch.num.messages": "20", "reconnect.backoff.max.ms": "50", "reconnect.backoff.ms": "10"}
            producer = ReliableProducer(found)
            proxy.losing = True
            for n in range(4000):
                producer.send(Record(TOPIC, b"k", b"%d" % n), str(n))
                producer.poll(0.0005)
            producer.flush(120)
            proxy.losing = False
            counts = producer.close(60)
            assert counts.delivered == 4000
            assert proxy.lost >= 5
            places = place_of(broker.bootstrap)
            doubled = sum(len(committed) > 1 for committed in places.values())
            assert len(places) == 4000
            assert doubled == 0 if idempotent else doubled > 0
