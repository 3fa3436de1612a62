"""Looks at real topics, reads over gaps, and the configuration of clients."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from dev.broker import EmbeddedBroker, Node
from dev.processes import LOOPBACK, free_port, wait_until
from dev.proxy import Proxy
from highwater.assets import raw
from highwater.errors import (
    ConfigurationError,
    DependencyAwayError,
    NothingFetchedError,
    OffsetsExpiredError,
    TopicAbsentError,
)
from highwater.resources.kafka import Kafka
from highwater.resources.record_reading import read_records
from highwater.resources.spark import translate_error
from highwater.resources.topic_state import PartitionState, TopicStates
from highwater.resources.transactions import build_publishing_properties
from highwater.slices import OffsetRange
from tests.conftest import create_topic
from tests.helpers.support import BOUNDED, make_bench, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TopicFactory = Callable[..., str]
SECRET = "hunter2-secret"


class Writer:
    """Writes transactions to partition 0 of a topic."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        from confluent_kafka import Producer

        self.topic = topic
        self.producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"{topic}-writer"})
        self.producer.init_transactions(30)

    def open(self, *values: str) -> None:
        self.producer.begin_transaction()
        for value in values:
            self.producer.produce(self.topic, value, partition=0)
        self.producer.flush(30)

    def commit(self) -> None:
        self.producer.commit_transaction(30)

    def abort(self) -> None:
        self.producer.abort_transaction(30)


def write(bootstrap: str, topic: str, count: int, partition: int = 0, timestamp: int = 0) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1})
    for number in range(count):
        producer.produce(topic, f"v{number}", partition=partition, timestamp=timestamp)
    assert producer.flush(30) == 0


def values(kafka: Kafka, topic: str, start: int, end: int) -> list[tuple[int, str]]:
    found = kafka.read(topic, {0: OffsetRange(start, end)}, seconds=10)
    return [(message.offset() or 0, (message.value() or b"").decode()) for message in found]


@pytest.fixture
def kafka(bootstrap: str) -> Kafka:
    return Kafka(bootstrap)


@pytest.mark.slow
def test_a_topic_is_seen_with_its_id_and_the_offsets_of_each_partition(
    kafka: Kafka, topic: TopicFactory, bootstrap: str
) -> None:
    name = topic(partitions=2)
    write(bootstrap, name, 3, partition=1)
    state = kafka.read_topic_state(name)
    assert state.topic == name
    assert len(state.topic_id) == 22
    assert state.partitions == {0: PartitionState(0, 0, 0, 1, 0), 1: PartitionState(0, 3, 3, 1, 0)}


@pytest.mark.slow
def test_all_topics_are_seen_together_as_each_is_seen_alone(kafka: Kafka, topic: TopicFactory, bootstrap: str) -> None:
    names = [topic(partitions=n) for n in (1, 2, 3)]
    write(bootstrap, names[1], 3, partition=1)
    write(bootstrap, names[2], 2, partition=2)
    assert kafka.read_topic_states([*names, f"{names[0]}.absent"]) == TopicStates(
        {name: kafka.read_topic_state(name) for name in names}
    )
    assert kafka.read_topic_states([]) == TopicStates({})


class Many:
    """A test double for the admin client of some topics with two partitions; a test says which answers are errors."""

    def poll(self, _: float) -> int:
        return 0

    def __init__(self, topics: Sequence[str], errors: Mapping[tuple[str, int], object]) -> None:
        self.topics, self.errors, self.asked = topics, errors, list[str]()

    def describe_topics(self, asked: Any, **_: Any) -> dict[str, Any]:
        self.asked.append("describe_topics")
        partitions = [SimpleNamespace(id=p, leader=SimpleNamespace(id=p + 1)) for p in (0, 1)]
        found = {name: SimpleNamespace(topic_id=name * 22, partitions=partitions) for name in self.topics}
        return {name: self._future(found.get(name, 3)) for name in asked.topic_names}

    def list_offsets(self, asked: dict[Any, Any], **_: Any) -> dict[Any, Any]:
        self.asked.append("list_offsets")
        found = SimpleNamespace(offset=7, leader_epoch=4)
        return {place: self._future(self.errors.get((place.topic, place.partition), found)) for place in asked}

    def _future(self, answer: object) -> Any:
        from confluent_kafka import KafkaError, KafkaException

        def result(_: float) -> Any:
            if isinstance(answer, int):
                raise KafkaException(KafkaError(answer))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(result=result)


def seen(topics: Sequence[str], errors: Mapping[tuple[str, int], object]) -> tuple[dict[str, list[int]], list[str]]:
    """By topic the partitions that are known, and the requests."""
    kafka, client = Kafka("nowhere:1"), Many(topics, errors)
    kafka._admin = client  # type: ignore[assignment]
    states = kafka.read_topic_states(["a", "b", "c"]).found
    return {
        name: [p for p, one in state.partitions.items() if one.known] for name, state in states.items()
    }, client.asked


REQUESTS = ["describe_topics", *["list_offsets"] * 3, "describe_topics"]


def test_a_broker_that_hangs_costs_its_partitions_only() -> None:
    """One answer that did not come made a topic unreadable, and three such looks let all topics alone for a minute."""
    timed_out = -185
    found, asked = seen(["a", "b"], {("a", 1): timed_out, ("b", 0): TimeoutError()})
    assert (found, asked) == ({"a": [0], "b": [1]}, REQUESTS)
    with pytest.raises(DependencyAwayError):
        seen(["a"], {("a", 0): timed_out, ("a", 1): TimeoutError()})


def test_a_topic_that_may_not_be_read_is_left_out() -> None:
    """A look at it alone gives the error."""
    not_authorized, without_leader = 29, 6
    assert seen(["a", "b", "c"], {("a", 1): not_authorized, ("c", 1): without_leader})[0] == {"b": [0, 1], "c": [0]}


class Answers:
    """A test double for the admin client of a topic with one partition: an answer of the brokers, or none."""

    def poll(self, _: float) -> int:
        return 0

    def __init__(self, **changes: Any) -> None:
        self.topic_id, self.partitions, self.epoch = "T" * 22, [SimpleNamespace(id=0, leader=SimpleNamespace(id=1))], 4
        self.start, self.high, self.stable, self.at = 5, 90, 80, 60
        vars(self).update(changes)

    def describe_topics(self, *_: Any, **__: Any) -> dict[str, Any]:
        found = SimpleNamespace(topic_id=self.topic_id, partitions=self.partitions)
        return {"orders": SimpleNamespace(result=lambda _: found)}

    def list_offsets(self, asked: dict[Any, Any], isolation_level: Any, **_: Any) -> dict[Any, Any]:
        from confluent_kafka import IsolationLevel
        from confluent_kafka.admin import OffsetSpec

        def answer(spec: Any) -> Any:
            specs: Any = OffsetSpec
            if spec._value == specs.earliest()._value:
                offset = self.start
            elif spec._value != specs.latest()._value:
                offset = self.at
            else:
                offset = self.stable if isolation_level == IsolationLevel.READ_COMMITTED else self.high
            return SimpleNamespace(offset=offset, leader_epoch=self.epoch)

        found = {place: answer(spec) for place, spec in asked.items()}
        return {place: SimpleNamespace(result=lambda _, one=one: one) for place, one in found.items()}


def answering(**changes: Any) -> Kafka:
    kafka, client = Kafka("nowhere:1"), Answers(**changes)
    kafka._admin = client  # type: ignore[assignment]
    return kafka


@pytest.mark.parametrize("name", ["start", "high", "stable"])
@pytest.mark.parametrize("offset", [-1, -2, -1001])
def test_an_offset_below_0_is_no_offset(name: str, offset: int) -> None:
    """While a leader is down, librdkafka answers -1001 without an error; it was reported as a truncation."""
    assert answering().read_topic_state("orders").partitions[0] == PartitionState(5, 80, 90, 1, 4)
    assert answering(**{name: offset}).read_topic_state("orders").partitions[0] == PartitionState(None, None, None, 1)


def test_answers_that_contradict_each_other_or_name_nothing_are_none() -> None:
    assert answering(start=91).read_topic_state("orders").unled == [0]
    assert answering(epoch=-1).read_topic_state("orders").partitions[0].leader_epoch is None
    unled = [SimpleNamespace(id=0, leader=SimpleNamespace(id=-1))]
    assert answering(partitions=unled).read_topic_state("orders").partitions[0] == PartitionState(
        None, None, None, None
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"topic_id": "A" * 22},
        {"topic_id": ""},
        {"partitions": []},
        {"partitions": [SimpleNamespace(id=1, leader=None)]},
    ],
    ids=["no ID", "an empty ID", "no partition", "a partition is missing"],
)
def test_a_description_that_is_not_whole_is_no_description(changes: dict[str, Any]) -> None:
    """A topic without an ID passed for another topic, and one without its partitions had lost them."""
    with pytest.raises(DependencyAwayError):
        answering(**changes).read_topic_state("orders")


def test_a_time_behind_the_last_record_is_distinguished_from_no_answer() -> None:
    """-1 says that no record is as young, -1001 says nothing: all that waits on a tier passed for due."""
    found = {at: answering(at=at).read_offsets_at("orders", 1) for at in (60, 85, -1, -1001)}
    assert found == {60: {0: 60}, 85: {0: 80}, -1: {0: 80}, -1001: {}}


def test_the_second_look_comes_later_and_by_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("highwater.resources.kafka.LOOKS_APART", 7.0)
    monkeypatch.setattr("highwater.resources.kafka.time.sleep", slept.append)
    opened: list[Answers] = []

    def connect(*_: object, **__: object) -> Answers:
        opened.append(Answers())
        return opened[-1]

    monkeypatch.setattr("highwater.resources.kafka.open_client", connect)
    kafka = Kafka("nowhere:1")
    kafka.read_topic_state("orders")
    kafka.look_again("orders")
    assert (slept, len(opened)) == ([7.0], 2)


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
            assert values(kafka, name, start, end_) == expected


@pytest.mark.slow
def test_a_range_that_retention_took_is_distinguished_from_a_broker_that_is_away(
    kafka: Kafka, topic: TopicFactory, bootstrap: str
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    name = topic()
    write(bootstrap, name, 5)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(name, 0, 3)]).values():
        future.result(30)
    assert values(kafka, name, 3, 5) == [(3, "v3"), (4, "v4")]
    with pytest.raises(OffsetsExpiredError) as caught:
        values(kafka, name, 2, 5)
    assert caught.value.stored == "[2, 5)"


class Tiered(Proxy):
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
    advertised = Tiered(node.port, least_ms=800)
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


@pytest.mark.slow
def test_offsets_at_a_time(kafka: Kafka, topic: TopicFactory, bootstrap: str) -> None:
    name = topic(partitions=3)
    now = int(time.time() * 1000)  # retention would take records of long ago
    for ago in (3000, 2000, 1000):
        write(bootstrap, name, 2, timestamp=now - ago)
    write(bootstrap, name, 4, partition=1, timestamp=now - 3500)
    assert kafka.read_offsets_at(name, now - 2000) == {0: 2, 1: 4, 2: 0}
    assert kafka.read_offsets_at(name, now - 1999) == {0: 4, 1: 4, 2: 0}
    writer = Writer(bootstrap, name)
    writer.open("open")
    assert kafka.read_offsets_at(name, now - 999) == {0: 6, 1: 4, 2: 0}  # never past the last stable offset
    writer.abort()


@pytest.mark.slow
def test_an_absent_topic_is_reported_with_the_nearest_names(kafka: Kafka, topic: TopicFactory) -> None:
    name = topic()
    with pytest.raises(TopicAbsentError) as caught:
        kafka.read_topic_state(name + "x")
    assert repr(name + "x") in caught.value.problem
    assert name in str(caught.value.found)
    assert "create the topic" in caught.value.remedy


@pytest.fixture
def creating_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path, auto_create_topics=True) as broker:
        yield broker


@pytest.mark.slow
def test_no_request_of_ours_creates_a_topic_where_the_broker_would(
    creating_broker: EmbeddedBroker, spark: SparkSession
) -> None:
    from confluent_kafka.admin import AdminClient

    kafka = Kafka(creating_broker.bootstrap)
    admin = AdminClient({"bootstrap.servers": creating_broker.bootstrap})

    def topics() -> set[str]:
        return {name for name in admin.list_topics(timeout=60).topics if not name.startswith("__")}

    with pytest.raises(TopicAbsentError):
        kafka.read_topic_state("absent-state")
    assert kafka.read_topic_states(["absent-states"]) == TopicStates({})
    with pytest.raises(TopicAbsentError):
        kafka.read_offsets_at("absent-time", 0)
    with pytest.raises(DependencyAwayError):
        list(kafka.read("absent-read", {0: OffsetRange(0, 1)}, seconds=3))
    # Spark's driver asks for the ends by an admin client, which creates nothing; so no task comes to consume.
    short = {"kafka.default.api.timeout.ms": "4000", "kafka.request.timeout.ms": "3000"}
    options = {**kafka.build_spark_options(), **short}
    asked: Any = SimpleNamespace(spark=spark, kafka=SimpleNamespace(build_spark_options=lambda: options))
    with pytest.raises(Exception, match="UnknownTopicOrPartition"):
        raw._read_ranges(asked, "absent-spark", {0: OffsetRange(0, 1)}).collect()
    # A client that does ask for a topic by name, to learn whether this broker creates one, and how soon.
    admin.list_topics("control", timeout=60)
    wait_until(lambda: "control" in topics(), 30, "the control's topic")
    assert topics() == {"control"}


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


def test_who_may_not_use_a_group_still_reads() -> None:
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
    with pytest.raises(DependencyAwayError):
        reading(Report(KafkaError._TRANSPORT), record)


def test_a_broker_that_is_away_is_reported_within_seconds() -> None:
    kafka = Kafka(f"{LOOPBACK}:{free_port()}")
    began = time.monotonic()
    with pytest.raises(DependencyAwayError) as caught:
        kafka.read_topic_state("orders")
    assert time.monotonic() - began < BOUNDED
    assert kafka.bootstrap in caught.value.problem
    assert "HIGHWATER_KAFKA_BOOTSTRAP" in caught.value.remedy


@pytest.mark.usefixtures("impatient")
def test_secrets_stay_inside() -> None:
    kafka = Kafka(
        f"{LOOPBACK}:{free_port()}",
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN", "sasl.username": "u"}
        | {"sasl.password": SECRET},
    )
    with pytest.raises(DependencyAwayError) as caught:
        kafka.read_topic_state("orders")
    chain: BaseException | None = caught.value
    texts = [repr(kafka), str(kafka)]
    while chain is not None:
        texts += [str(chain), repr(chain)]
        chain = chain.__cause__ or chain.__context__
    assert not [text for text in texts if SECRET in text]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("acks", "1", "before every in-sync replica has it"),
        ("request.required.acks", "0", "before every in-sync replica has it"),
        ("enable.idempotence", "false", "write a record twice"),
        ("max.in.flight", "6", "keep the order of at most 5"),
        ("retries", "0", "a short outage uses them up"),
        ("queuing.strategy", "lifo", "overtake what was sent before it"),
        ("partitioner", "random", "another partition"),
        ("topic.partitioner", "random", "another partition"),
        ("topic.acks", "1", "before every in-sync replica has it"),
        ("topic.auto.offset.reset", "latest", "loses what it jumped over"),
        ("enable.auto.commit", "true", "committed with the output"),
        ("isolation.level", "read_uncommitted", "records of aborted transactions"),
        ("group.id", "mine", "consumers are assigned"),
        ("transactional.id", "mine", "an old producer is fenced"),
        ("auto.offset.reset", "latest", "loses what it jumped over"),
        ("allow.auto.create.topics", "true", "would be created"),
    ],
)
def test_a_property_that_weakens_a_guarantee_is_refused(name: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", {name: value})
    assert f"{name} must not be {value}: " in caught.value.problem
    assert reason in caught.value.problem
    assert value in str(caught.value.found)
    assert "HIGHWATER_KAFKA_CONFIG" in caught.value.remedy


SOUND = {
    "acks": "all",
    "enable.idempotence": "true",
    "max.in.flight": "1",
    "enable.auto.commit": "false",
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    "allow.auto.create.topics": "false",
}


def test_a_value_that_weakens_nothing_is_taken_and_reaches_those_whom_it_concerns() -> None:
    kafka = Kafka("broker:9092", SOUND)
    assert kafka.build_spark_options() == Kafka("broker:9092").build_spark_options()
    published = build_publishing_properties(kafka, "t")
    assert (published["acks"], published["max.in.flight.requests.per.connection"]) == ("all", "1")
    for name, value in SOUND.items():
        assert Kafka("broker:9092", {name: value}).get_admin() is not None


def test_an_idle_connection_of_a_transactional_client_ends_long_before_the_transaction() -> None:
    """A call waited for ten minutes for a coordinator that had died: librdkafka looks again when a connection ends."""
    published = build_publishing_properties(Kafka("broker:9092"), "t")
    assert 2 * int(published["connections.max.idle.ms"]) < int(published["transaction.timeout.ms"])
    given = build_publishing_properties(Kafka("broker:9092", {"connections.max.idle.ms": "5000"}), "t")
    assert given["connections.max.idle.ms"] == "5000"


def test_the_prefix_of_topics_changes_nothing() -> None:
    """librdkafka takes a topic's property with it and without: what both clients get is the same."""
    given = {"acks": "all", "partitioner": "murmur2_random", "message.timeout.ms": "130000", "compression.type": "zstd"}
    plain = Kafka("broker:9092", given)
    prefixed = Kafka("broker:9092", {f"topic.{name}": value for name, value in given.items()})
    assert prefixed.build_spark_options() == plain.build_spark_options()
    assert build_publishing_properties(prefixed, "t") == build_publishing_properties(plain, "t")
    assert prefixed.get_admin() is not None


def test_a_property_that_librdkafka_does_not_know_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", {"no.such.property": SECRET}).list_topic_names()
    assert "no.such.property" in str(caught.value)
    assert SECRET not in str(caught.value)


SPARK: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "plain": ({}, {}),
    "scram over tls": (
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": 'u"1',
            "sasl.password": "p\\2",
            "ssl.ca.location": "/etc/ca.pem",
        },
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
            'username="u\\"1" password="p\\\\2";',
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": "/etc/ca.pem",
        },
    ),
    "mutual tls, pkcs12": (
        {"ssl.keystore.location": "/etc/k.p12", "ssl.keystore.password": "secret"},
        {
            "kafka.ssl.keystore.type": "PKCS12",
            "kafka.ssl.keystore.location": "/etc/k.p12",
            "kafka.ssl.keystore.password": "secret",
        },
    ),
    "oidc": (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.credentials.client.id": "me",
            "sasl.oauthbearer.client.credentials.client.secret": 's"1',
            "sasl.oauthbearer.scope": "a b",
            "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool=1",
            "sasl.oauthbearer.token.endpoint.url": "https://login/token",
            "sasl.oauthbearer.sub.claim.name": "azp",
            "https.ca.pem": "-----BEGIN\nCA",
        },
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "kafka.sasl.login.callback.handler.class": "org.apache.kafka.common.security.oauthbearer."
            "OAuthBearerLoginCallbackHandler",
            "kafka.sasl.login.connect.timeout.ms": "10000",
            "kafka.sasl.login.read.timeout.ms": "10000",
            "kafka.sasl.oauthbearer.token.endpoint.url": "https://login/token",
            "kafka.sasl.oauthbearer.sub.claim.name": "azp",
            "kafka.sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
            'clientId="me" clientSecret="s\\"1" scope="a b" extension_logicalCluster="lkc-1" '
            'extension_identityPoolId="pool=1" ssl.truststore.type="PEM" '
            'ssl.truststore.certificates="-----BEGIN\\nCA";',
        },
    ),
    "amazon msk": (
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "AWS_MSK_IAM"},
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "AWS_MSK_IAM",
            "kafka.sasl.client.callback.handler.class": "software.amazon.msk.auth.iam.IAMClientCallbackHandler",
            "kafka.sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;",
        },
    ),
    "kerberos by a keytab": (
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.kerberos.keytab": "/etc/me.keytab",
            "sasl.kerberos.principal": "me/host@REALM",
            "sasl.kerberos.kinit.cmd": "kinit",
        },
        {
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.kerberos.service.name": "kafka",
            "kafka.sasl.jaas.config": "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true "
            'storeKey=true keyTab="/etc/me.keytab" principal="me/host@REALM";',
        },
    ),
    "kerberos as the JVM has it": (
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "GSSAPI", "sasl.kerberos.service.name": "broker"},
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "GSSAPI",
            "kafka.sasl.kerberos.service.name": "broker",
        },
    ),
    "values that are written otherwise": (
        {"connections.max.idle.ms": "0", "socket.receive.buffer.bytes": "0", "socket.send.buffer.bytes": "0"}
        | {"client.dns.lookup": "USE_ALL_DNS_IPS", "fetch.wait.max.ms": "0"},
        {
            "kafka.connections.max.idle.ms": "-1",
            "kafka.receive.buffer.bytes": "-1",
            "kafka.send.buffer.bytes": "-1",
            "kafka.client.dns.lookup": "use_all_dns_ips",
            "kafka.fetch.max.wait.ms": "0",
        },
    ),
    "what concerns librdkafka alone": ({"log_level": "3", "linger.ms": "5", "compression.type": "zstd"}, {}),
    "the same in both": (
        {"client.id": "c", "client.rack": "r", "fetch.max.bytes": "9", "fetch.wait.max.ms": "8"},
        {
            "kafka.client.id": "c",
            "kafka.client.rack": "r",
            "kafka.fetch.max.bytes": "9",
            "kafka.fetch.max.wait.ms": "8",
        },
    ),
}


@pytest.mark.parametrize("case", SPARK)
def test_spark_is_given_the_same_cluster(case: str) -> None:
    ours, theirs = SPARK[case]
    found = Kafka("a:1,b:2", ours).build_spark_options()
    always = {"kafka.bootstrap.servers": "a:1,b:2", "kafka.allow.auto.create.topics": "false"}
    assert found == {**always, **theirs}


@pytest.mark.parametrize(("config", "python", "java"), [({}, 10, "1"), ({"fetch.wait.max.ms": "8"}, "8", "8")])
def test_a_fetch_waits_as_long_as_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, str], python: object, java: str
) -> None:
    """Both clients were given it, and both overwrote it without a word."""
    from highwater.assets import raw

    monkeypatch.setattr("highwater.resources.kafka.open_client", lambda kind, found, given: found)
    kafka: Any = Kafka("a:1", config)
    assert kafka.open_reader()["fetch.wait.max.ms"] == python
    source = MagicMock()
    raw._read_ranges(SimpleNamespace(spark=source, kafka=kafka), "t", {})  # type: ignore[arg-type]
    asked = source.read.format.return_value.options.call_args.kwargs
    assert asked["kafka.fetch.max.wait.ms"] == java
    assert int(asked["kafka.max.poll.records"]) > 5_000, "Spark asks twice where the log ends after every poll"


def oidc(**changes: str) -> dict[str, str]:
    return {
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": "https://login/token",
        **changes,
    }


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification"),
        ({"ssl.certificate.location": "/c.pem", "ssl.key.location": "/k.pem"}, "ssl.key.location"),
        ({"ssl.certificate.location": "/c.pem"}, "ssl.key.location"),
        ({"sasl.oauthbearer.config": SECRET}, "sasl.oauthbearer.config"),
        ({"sasl.mechanisms": "GSSAPI", "sasl.username": "u", "sasl.password": SECRET}, "GSSAPI"),
        ({"plugin.library.paths": SECRET}, "plugin.library.paths"),
        ({"sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.client.secret": SECRET}, "OAUTHBEARER"),
        (oidc(**{"sasl.oauthbearer.grant.type": "urn:ietf:params:oauth:grant-type:jwt-bearer"}), "OAUTHBEARER"),
        (oidc(**{"sasl.oauthbearer.token.endpoint.url": ""}), "lacks a property"),
        (oidc(**{"sasl.oauthbearer.extensions": SECRET}), "sasl.oauthbearer.extensions"),
        (oidc(**{"https.ca.location": "probe"}), "https.ca.location"),
        (oidc(**{"sasl.mechanisms": "PLAIN"}), "PLAIN"),
        # The names are OpenSSL's, those that Java knows are others.
        ({"ssl.cipher.suites": "ECDHE-RSA-AES256-GCM-SHA384"}, "ssl.cipher.suites"),
        ({"ssl.ca.location": "probe"}, "ssl.ca.location"),
        ({"ssl.ca.location": "/"}, "ssl.ca.location"),  # a folder, which Java does not read
    ],
)
def test_what_spark_cannot_be_given_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", config).build_spark_options()
    assert named in caught.value.problem
    assert SECRET not in str(caught.value)
    assert caught.value.remedy
