"""Ranges of a topic are read to their ends, or an error names what is missing."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dev.broker import EmbeddedBroker, Node
from dev.processes import LOOPBACK, wait_until
from dev.proxy import Proxy
from highwater.assets import raw
from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    NothingFetchedError,
    OffsetsExpiredError,
)
from highwater.resources.kafka import Kafka
from highwater.resources.record_reading import read_records
from highwater.resources.spark import translate_error
from highwater.slices import OffsetRange
from tests.conftest import create_topic
from tests.helpers.support import make_bench, order_message
from tests.helpers.topic_writes import Writer, read_values, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TopicFactory = Callable[..., str]


@pytest.fixture
def kafka(bootstrap: str) -> Kafka:
    return Kafka(bootstrap)


@pytest.mark.slow
def test_an_open_transaction_holds_the_last_stable_offset(kafka: Kafka, topic: TopicFactory, bootstrap: str) -> None:
    name = topic()
    write(bootstrap, name, 2)
    writer = Writer(bootstrap, name)
    writer.open("a", "b")
    state = kafka.read_topic_state(name).partitions[0]
    assert (state.last_stable, state.high_watermark) == (2, 4)
    writer.commit()
    # The marker is written after the commit is answered.
    wait_until(lambda: kafka.read_topic_state(name).partitions[0].last_stable == 5, 30, "the transaction's marker")


@pytest.mark.slow
def test_a_range_is_read_to_its_end_although_no_record_may_stand_there(
    kafka: Kafka, topic: TopicFactory, bootstrap: str
) -> None:
    """Waiting for the record at the end offset never ended where a marker was there."""
    name = topic()
    writer = Writer(bootstrap, name)
    for text, end in (("v0", writer.commit), ("aborted", writer.abort), ("v4", writer.commit)):
        writer.open(text)
        end()
    wait_until(lambda: kafka.read_topic_state(name).partitions[0].last_stable == 6, 30, "the last marker")
    # 0: v0, 1: marker, 2: aborted, 3: marker, 4: v4, 5: marker
    stored = {0: "v0", 4: "v4"}
    for start in range(6):
        for end_ in range(start, 7):
            expected = [(at, text) for at, text in stored.items() if start <= at < end_]
            assert read_values(kafka, name, start, end_) == expected


@pytest.mark.slow
def test_a_range_that_retention_took_is_distinguished_from_a_broker_that_is_unavailable(
    kafka: Kafka, topic: TopicFactory, bootstrap: str
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    name = topic()
    write(bootstrap, name, 5)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(name, 0, 3)]).values():
        future.result(30)
    assert read_values(kafka, name, 3, 5) == [(3, "v3"), (4, "v4")]
    with pytest.raises(OffsetsExpiredError) as caught:
        read_values(kafka, name, 2, 5)
    assert caught.value.stored == "[2, 5)"


class SlowFetchProxy(Proxy):
    """A broker that needs some milliseconds for a fetch, and answers with nothing when the client waits less.

    So do brokers 3.6 and 3.7 where a record is in tiered storage.
    """

    def __init__(self, broker_port: int, least_ms: int) -> None:
        super().__init__(broker_port)
        self.least_ms = least_ms
        self.empty = 0

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection((LOOPBACK, self._broker_port)) as broker:
            while request := _frame(client):
                answer = self._nothing(request)
                if answer is None:
                    broker.sendall(struct.pack(">i", len(request)) + request)
                    answer = _frame(broker)
                client.sendall(struct.pack(">i", len(answer)) + answer)

    def _nothing(self, request: bytes) -> bytes | None:
        """The empty answer to a fetch with a short wait; None for any other request."""
        kind, version, number, name = struct.unpack_from(">hhih", request)
        if kind != 1:
            return None
        # The name of the client, tagged fields from version 12 on, the replica's number before version 15.
        at = 10 + max(name, 0) + (version >= 12) + (4 if version < 15 else 0)
        [wait_ms] = struct.unpack_from(">i", request, at)
        if wait_ms >= self.least_ms:
            return None
        time.sleep(wait_ms / 1000)
        self.empty += 1
        head, no_topics = (b"\0", b"\1\0") if version >= 12 else (b"", b"\0" * 4)
        return struct.pack(">i", number) + head + struct.pack(">ihi", 0, 0, 0) + no_topics


def _frame(connection: socket.socket) -> bytes:
    """The next request or answer; empty after the last one."""

    def take(size: int) -> bytes:
        found = b""
        while len(found) < size and (more := connection.recv(size - len(found))):
            found += more
        return found

    size = take(4)
    return take(struct.unpack(">i", size)[0]) if size else b""


@pytest.mark.slow
def test_records_in_tiered_storage_are_read_by_both_clients(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With waits of 1 and 10 ms the broker answered every fetch with nothing, and nothing was ever read."""
    monkeypatch.setattr(raw, "PATIENCE_MS", "2000")
    monkeypatch.setattr(raw, "LONGEST_TIERED_FETCH_MS", "900")
    node = Node(1)
    advertised = SlowFetchProxy(node.port, least_ms=800)
    extra = {"advertised.listeners": f"PLAINTEXT://{advertised.address}"}
    with advertised, EmbeddedBroker(tmp_path / "broker", node=node, extra=extra) as broker:
        create_topic(broker.bootstrap, "tiered", 3, {})
        bench = make_bench("tiered", broker.bootstrap, spark, tmp_path / "bench")
        bench.send(*[order_message(f"o{n}", 1, n % 3) for n in range(9)])
        assert len([*bench.kafka.read("tiered", {p: OffsetRange(0, 3) for p in range(3)}, seconds=3)]) == 9
        assert advertised.empty, "the short wait is tried first"
        slice_ = bench.plan(0, p0=(0, 3), p1=(0, 3), p2=(0, 3))
        raw.materialise(bench.work(slice_))
        assert sorted((row["partition"], row["offset"]) for row in bench.rows("raw")) == [
            (p, offset) for p in range(3) for offset in range(3)
        ]
        before = advertised.empty
        configured = Kafka(broker.bootstrap, {"fetch.wait.max.ms": "900"})
        assert len([*configured.read("tiered", {0: OffsetRange(0, 3)}, seconds=3)]) == 3
        raw.materialise(bench.work(slice_, kafka=configured))
        assert advertised.empty == before, "what the configuration says is never undercut"


class Slow:
    """A consumer of a broker that answers a fetch with nothing when it may not wait for 800 ms."""

    def __init__(self, wait_ms: int) -> None:
        self.wait_ms = wait_ms
        self.records = [Report()] if wait_ms >= 800 else []

    def assign(self, _: object) -> None:
        pass

    def poll(self, _: float) -> Any:
        return self.records.pop() if self.records else None

    def incremental_unassign(self, _: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("configured", "seconds", "waits"), [(None, 3, [10, 1000]), (None, 60, [10, 5000]), ("900", 3, [900])]
)
def test_a_reader_that_got_nothing_waits_longer(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, seconds: float, waits: list[int]
) -> None:
    """With a wait of 10 ms brokers 3.6 and 3.7 answered with nothing of tiered storage, however often they were asked.

    The last wait fits three times into the patience, and what a person configured is used as it is.
    """
    kafka, opened = Kafka("nowhere:1", {} if configured is None else {"fetch.wait.max.ms": configured}), list[int]()

    def open_(_: object, config: dict[str, Any], **__: object) -> Slow:
        opened.append(int(config["fetch.wait.max.ms"]))
        return Slow(opened[-1])

    monkeypatch.setattr("highwater.resources.kafka.open_client", open_)
    assert [message.offset() for message in kafka.read("orders", {0: OffsetRange(7, 8)}, seconds=seconds)] == [7]
    assert opened == waits


@pytest.mark.parametrize("configured", [None, "900"])
def test_spark_reads_again_with_the_long_wait_where_kafka_gave_nothing(
    monkeypatch: pytest.MonkeyPatch, configured: str | None
) -> None:
    """With a wait of 1 ms nothing of tiered storage was ever read.

    A wait that is configured is never undercut, and Spark's own patience ends such a read, not our short one.
    """
    asked: list[tuple[str | None, str | None]] = []
    kafka = Kafka("nowhere:1", {} if configured is None else {"fetch.wait.max.ms": configured})
    work: Any = SimpleNamespace(kafka=kafka, log=lambda _: None)

    def commit(_: object, __: object, ___: object, ____: object, read: Any) -> list[Any]:
        # Of both, as `_read_ranges` puts them together.
        options = {**read.args[2], **kafka.build_spark_options()}
        wait = options.get("kafka.fetch.max.wait.ms")
        asked.append((wait, options.get("kafkaConsumer.pollTimeoutMs")))
        if int(wait or 500) < 2000:
            reported = "java.util.concurrent.TimeoutException: Cannot fetch record for offset 5 in 10000 milliseconds"
            error = translate_error(
                "topic orders", f"SparkException: task failed\nCaused by: {reported}\n\tat Consumer"
            )
            assert isinstance(error, NothingFetchedError)
            raise error
        return []

    monkeypatch.setattr(raw, "commit_with_retries", commit)
    nothing: Any = {}
    if configured:
        with pytest.raises(NothingFetchedError):
            raw._commit_from_spark(work, nothing, nothing, nothing)
        assert asked == [(configured, None)]
        return
    assert raw._commit_from_spark(work, nothing, nothing, nothing) == []
    assert asked == [("1", raw.PATIENCE_MS), ("5000", None)]


class Report:
    """A test double for a message, or for an error in the place of one."""

    def __init__(self, code: int | None = None) -> None:
        from confluent_kafka import KafkaError

        self._error = None if code is None else KafkaError(code)

    def error(self) -> Any:
        return self._error

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7


def test_users_without_access_to_groups_can_read() -> None:
    """The client asks for a group's coordinator although nothing is committed; its error comes amid records."""
    from confluent_kafka import KafkaError

    def reading(*reported: Report) -> list[Any]:
        left = [*reported]
        consumer = SimpleNamespace(poll=lambda _: left.pop(0), incremental_unassign=lambda _: None)
        return [
            *read_records(
                consumer,
                "orders",
                {0: OffsetRange(7, 8)},
                {0: 7},
                1,
                partial(Kafka("127.0.0.1:1")._translate_error, "orders"),
            )
        ]

    record = Report()
    assert reading(Report(KafkaError.GROUP_AUTHORIZATION_FAILED), record) == [record]
    with pytest.raises(ConfigurationError, match=r"allow the user of \S+ to describe and to read topic orders"):
        reading(Report(KafkaError.TOPIC_AUTHORIZATION_FAILED), record)
    with pytest.raises(DependencyUnavailableError):
        reading(Report(KafkaError._TRANSPORT), record)
