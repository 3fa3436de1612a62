"""The state of real topics: identity, offsets and leaders, and errors where a broker does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dev.broker import EmbeddedBroker
from dev.processes import LOOPBACK, free_port, wait_until
from highwater.assets import raw
from highwater.errors import (
    DependencyUnavailableError,
    TopicAbsentError,
)
from highwater.resources.kafka import Kafka
from highwater.resources.offset_requests import OffsetQuery
from highwater.resources.topic_state import PartitionState, TopicStates
from highwater.slices import OffsetRange
from tests.helpers.support import BOUNDED
from tests.helpers.topic_writes import Writer, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TopicFactory = Callable[..., str]


SECRET = "hunter2-secret"


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


class FakeTopicsAdmin:
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
    kafka, client = Kafka("nowhere:1"), FakeTopicsAdmin(topics, errors)
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
    with pytest.raises(DependencyUnavailableError):
        seen(["a"], {("a", 0): timed_out, ("a", 1): TimeoutError()})


def test_answers_that_do_not_come_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partition was waited for after the one before it: 100 of them took minutes."""
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 0.1)
    monkeypatch.setattr("highwater.resources.offset_requests.LEADERS_SECONDS", 0.0)
    kafka = Kafka("nowhere:1")
    silent = SimpleNamespace(list_offsets=lambda asked, **_: {place: Future() for place in asked}, poll=lambda _: 0)
    for ask in (
        lambda: kafka._read_offsets([("a", p) for p in range(100)], OffsetQuery.HIGH, OffsetQuery.STABLE),
        lambda: kafka._read_topic_offsets("a", [*range(100)], OffsetQuery.HIGH, OffsetQuery.STABLE),
    ):
        kafka._admin = silent  # type: ignore[assignment]
        began = time.monotonic()
        with pytest.raises(DependencyUnavailableError):
            ask()
        assert time.monotonic() - began < 10


def test_a_topic_that_may_not_be_read_is_left_out() -> None:
    """A look at it alone gives the error."""
    not_authorized, without_leader = 29, 6
    assert seen(["a", "b", "c"], {("a", 1): not_authorized, ("c", 1): without_leader})[0] == {"b": [0, 1], "c": [0]}


class FakeTopicAdmin:
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
    kafka, client = Kafka("nowhere:1"), FakeTopicAdmin(**changes)
    kafka._admin = client  # type: ignore[assignment]
    return kafka


@pytest.mark.parametrize("name", ["start", "high", "stable"])
@pytest.mark.parametrize("offset", [-1, -2, -1001])
def test_an_offset_below_0_is_no_offset(name: str, offset: int) -> None:
    """While a leader is down, librdkafka answers -1001 without an error; it was reported as a truncation."""
    assert answering().read_topic_state("orders").partitions[0] == PartitionState(5, 80, 90, 1, 4)
    assert answering(**{name: offset}).read_topic_state("orders").partitions[0] == PartitionState(None, None, None, 1)


def test_answers_that_contradict_each_other_or_name_nothing_are_none() -> None:
    assert answering(start=91).read_topic_state("orders").leaderless_partitions == [0]
    assert answering(epoch=-1).read_topic_state("orders").partitions[0].leader_epoch is None
    leaderless = [SimpleNamespace(id=0, leader=SimpleNamespace(id=-1))]
    assert answering(partitions=leaderless).read_topic_state("orders").partitions[0] == PartitionState(
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
    with pytest.raises(DependencyUnavailableError):
        answering(**changes).read_topic_state("orders")


def test_a_time_behind_the_last_record_is_distinguished_from_no_answer() -> None:
    """-1 says that no record is as young, -1001 says nothing: all that waits on a tier passed for due."""
    found = {at: answering(at=at).read_offsets_at("orders", 1) for at in (60, 85, -1, -1001)}
    assert found == {60: {0: 60}, 85: {0: 80}, -1: {0: 80}, -1001: {}}


def test_the_second_look_comes_later_and_by_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("highwater.resources.kafka.LOOKS_APART", 7.0)
    monkeypatch.setattr("highwater.resources.kafka.time.sleep", slept.append)
    opened: list[FakeTopicAdmin] = []

    def connect(*_: object, **__: object) -> FakeTopicAdmin:
        opened.append(FakeTopicAdmin())
        return opened[-1]

    monkeypatch.setattr("highwater.resources.kafka.open_client", connect)
    kafka = Kafka("nowhere:1")
    kafka.read_topic_state("orders")
    kafka.look_again("orders")
    assert (slept, len(opened)) == ([7.0], 2)


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
    with pytest.raises(DependencyUnavailableError):
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


def test_a_broker_that_is_unavailable_is_reported_within_seconds() -> None:
    kafka = Kafka(f"{LOOPBACK}:{free_port()}")
    began = time.monotonic()
    with pytest.raises(DependencyUnavailableError) as caught:
        kafka.read_topic_state("orders")
    assert time.monotonic() - began < BOUNDED
    assert kafka.bootstrap in caught.value.problem
    assert "HIGHWATER_KAFKA_BOOTSTRAP" in caught.value.remedy


def test_secrets_stay_inside() -> None:
    kafka = Kafka(
        f"{LOOPBACK}:{free_port()}",
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "PLAIN", "sasl.username": "u"}
        | {"sasl.password": SECRET},
    )
    with pytest.raises(DependencyUnavailableError) as caught:
        kafka.read_topic_state("orders")
    chain: BaseException | None = caught.value
    texts = [repr(kafka), str(kafka)]
    while chain is not None:
        texts += [str(chain), repr(chain)]
        chain = chain.__cause__ or chain.__context__
    assert not [text for text in texts if SECRET in text]
