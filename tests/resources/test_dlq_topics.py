"""DLQ topics get the right settings; a topic with other settings is reported with the command that fixes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from highwater.declaration import Accepted
from highwater.envelope import MAX_BYTES
from highwater.errors import ConfigurationError, DependencyUnavailableError, TopicAbsentError, TopicDriftError
from highwater.resources import dlq_topics
from highwater.resources.dlq_topics import (
    TopicShape,
    _create,
    _ensure_no_drift,
    add_partitions,
    check_accepted,
    ensure_accepted,
    ensure_dlq_topics,
    ensure_no_drift,
)
from highwater.resources.kafka import Kafka
from highwater.topic_rules import TopicFacts
from tests.conftest import create_topic, grow
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from tests.conftest import TopicFactory

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def stream(topic: TopicFactory) -> Stream:
    """A main topic with limits of its own, and a tier whose delay asks for more than the least retention."""
    name = topic(partitions=2, **{"max.message.bytes": "300000"})
    return replace(make_stream(name), tiers=(timedelta(seconds=10), timedelta(days=2)))


def config(bootstrap: str, topic: str) -> dict[str, str]:
    from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": bootstrap})  # one that is let go of drops the request under way
    entries: Any = admin.describe_configs([resource])[resource].result(60)
    return {name: entry.value for name, entry in entries.items()}


@pytest.mark.slow
def test_absent_topics_are_created_as_safe_as_the_main_topic(stream: Stream, bootstrap: str) -> None:
    kafka = Kafka(bootstrap)
    for _ in range(2):
        assert set(ensure_dlq_topics(kafka, stream)) == {*stream.tier_topics, stream.parked_topic}
    retention = {}
    for topic in (*stream.tier_topics, stream.parked_topic):
        found = config(bootstrap, topic)
        assert len(kafka.read_topic_state(topic).partitions) == 2
        assert (found["cleanup.policy"], found["message.timestamp.type"]) == ("delete", "LogAppendTime")
        assert int(found["max.message.bytes"]) == 300_000 + MAX_BYTES
        retention[topic] = int(found["retention.ms"])
    assert [*retention.values()] == [7 * DAY_MS, 20 * DAY_MS, -1]


def test_permanent_refusals_are_no_outage_of_the_cluster() -> None:
    """A policy of the cluster, for example; waiting fixes nothing."""
    for code in (KafkaError.POLICY_VIOLATION, KafkaError.INVALID_CONFIG):
        refused: Future[None] = Future()
        refused.set_exception(KafkaException(KafkaError(code, "no")))
        answers = SimpleNamespace(create_topics=lambda *_, refused=refused, **__: {"orders.parked": refused})
        kafka = cast("Kafka", SimpleNamespace(get_admin=lambda answers=answers: answers, bootstrap="broker:9092"))
        with pytest.raises(ConfigurationError, match="refuses to create it") as caught:
            _create(kafka, "orders.parked", TopicShape(2, 3, {"retention.ms": "-1", "cleanup.policy": "delete"}))
        command = "kafka-topics --bootstrap-server broker:9092 --create --topic orders.parked --partitions 2"
        settings = "--replication-factor 3 --config retention.ms=-1 --config cleanup.policy=delete"
        assert caught.value.remedy.endswith(f"{command} {settings}"), "a page had to be translated into it by hand"


DRIFTED: dict[str, tuple[int, dict[str, str], str]] = {
    "compacted": (2, {"cleanup.policy": "compact"}, "cleanup.policy=delete"),
    "the producer's clock": (2, {"message.timestamp.type": "CreateTime"}, "message.timestamp.type=LogAppendTime"),
    "a short retention": (2, {"retention.ms": "1000"}, f"retention.ms={7 * DAY_MS}"),
    "bounded bytes": (2, {"retention.bytes": "1000000"}, "retention.bytes=-1"),
    "small records": (2, {"max.message.bytes": "1000"}, f"max.message.bytes={300_000 + MAX_BYTES}"),
}


def partitions(bootstrap: str, topics: Iterable[str]) -> dict[str, int]:
    kafka = Kafka(bootstrap)
    return {topic: len(kafka.read_topic_state(topic).partitions) for topic in topics}


@pytest.mark.slow
def test_topics_follow_a_main_topic_that_grew(stream: Stream, bootstrap: str) -> None:
    """The DLQ stopped, one topic at a time, until a person had grown each of them."""
    kafka, stream = Kafka(bootstrap), replace(stream, publishes=Accepted(f"{stream.topic}.accepted"))
    ensure_dlq_topics(kafka, stream)
    ensure_accepted(kafka, stream)
    grow(bootstrap, stream.topic, 5)
    assert "grow to 5 partitions" in ensure_no_drift(kafka, stream)[0]
    assert check_accepted(kafka, stream) == "2 partitions: it grows to 5 with the next slice, which is allowed"
    assert partitions(bootstrap, stream.published_topics) == dict.fromkeys(stream.published_topics, 2), "only asked"
    with ThreadPoolExecutor(2) as runs:
        shapes = [*runs.map(lambda _: ensure_dlq_topics(Kafka(bootstrap), stream), range(2))]
    assert {shape.partitions for found in shapes for shape in found.values()} == {5}
    assert partitions(bootstrap, stream.published_topics) == dict.fromkeys(stream.published_topics, 5)
    assert check_accepted(kafka, stream) == "5 partitions, safe settings"
    grow(bootstrap, stream.topic, 6)
    assert ensure_accepted(kafka, stream).partitions == 6
    assert partitions(bootstrap, [stream.parked_topic]) == {stream.parked_topic: 6}


def test_partitions_are_added_only_where_two_looks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never removed again."""
    seen = iter([9, 2])
    description = lambda _: SimpleNamespace(partitions=[None] * next(seen))  # noqa: E731
    unavailable = lambda why: DependencyUnavailableError(str(why), remedy="wait")  # noqa: E731
    kafka: Any = SimpleNamespace(read_description=description, build_unavailable_error=unavailable)
    main = TopicShape(len(kafka.read_description("orders").partitions), 1, {})
    with pytest.raises(DependencyUnavailableError, match="changed while it was looked at"):
        add_partitions(kafka, make_stream("orders"), main, [])


class FakeRefusingCluster:
    """A cluster with a main topic of 9 partitions whose other topics have 5, and that refuses to grow some of them."""

    bootstrap = "here:9092"

    def __init__(self, refused: Mapping[str, int]) -> None:
        self.refused, self.partitions = refused, dict[str, int]()
        self.asked: list[bool] = []

    def read_description(self, topic: str) -> Any:
        many = self.partitions.get(topic, 9 if topic == "orders" else 5)
        return SimpleNamespace(partitions=[SimpleNamespace(leader=1)] * many)

    def get_admin(self) -> Any:
        return self

    def create_partitions(self, new: list[Any], *, validate_only: bool, **_: object) -> dict[str, Future[None]]:
        self.asked.append(validate_only)
        found: dict[str, Future[None]] = {}
        for one in new:
            answer = found[one.topic] = Future()
            if one.topic in self.refused:
                answer.set_exception(KafkaException(KafkaError(self.refused[one.topic], "no")))
                continue
            answer.set_result(None)
            if not validate_only:
                self.partitions[one.topic] = one.new_total_count
        return found

    def build_unavailable_error(self, error: object) -> DependencyUnavailableError:
        return DependencyUnavailableError(str(error), remedy="wait")


@pytest.mark.parametrize("only_asked", [True, False])
def test_one_error_names_the_command_for_each_topic_that_may_not_be_grown(only_asked: bool) -> None:
    """The error named one topic, and the next one when that was grown by hand; the others grow meanwhile."""
    stream = replace(make_stream("orders"), publishes=Accepted("orders.accepted"))
    [first, *others] = stream.published_topics
    denied = {first: KafkaError.TOPIC_AUTHORIZATION_FAILED, others[-1]: KafkaError.POLICY_VIOLATION}
    kafka: Any = FakeRefusingCluster(denied)
    with pytest.raises(TopicDriftError) as caught:
        add_partitions(kafka, stream, TopicShape(9, 1, {}), [first], only_asked=only_asked)
    commands = re.findall(
        r"kafka-topics --bootstrap-server here:9092 --alter --topic (\S+) --partitions 9", str(caught.value)
    )
    assert commands == [*denied]
    assert f"{first}: 5, TOPIC_AUTHORIZATION_FAILED" in str(caught.value.found)
    assert kafka.partitions == ({} if only_asked else dict.fromkeys(others[:-1], 9))
    assert kafka.asked == [only_asked]


def test_narrow_topics_are_grown_before_anything_is_published_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run ended with an error until a person had grown the topics."""
    wanted, narrow, wide = TopicShape(9, 1, {}), TopicShape(5, 1, {}), TopicShape(9, 1, {"grown": "yes"})
    there, asked = [{"orders.dlq.1": narrow, "orders.parked": wanted}, {"orders.dlq.1": wide}], list[object]()
    monkeypatch.setattr(dlq_topics, "_read_existing_shapes", lambda *_: there.pop(0))
    monkeypatch.setattr(dlq_topics, "add_partitions", lambda *given: asked.append(given[2:]))
    grown = dlq_topics._grow_narrow_topics(
        cast("Kafka", None), make_stream("orders"), wanted, ["orders.dlq.1", "orders.parked"]
    )
    assert (grown, asked) == ({"orders.dlq.1": wide}, [(wanted, ["orders.dlq.1", "orders.parked"])])
    there.append({"orders.parked": wanted})
    dlq_topics._grow_narrow_topics(cast("Kafka", None), make_stream("orders"), wanted, ["orders.parked"])
    assert len(asked) == 1, "those that are wide enough are left as they are"


def test_topics_that_another_run_grew_or_that_cannot_be_asked_now_are_no_drift() -> None:
    stream = make_stream("orders")
    kafka: Any = FakeRefusingCluster(dict.fromkeys(stream.published_topics, KafkaError.INVALID_PARTITIONS))
    add_partitions(kafka, stream, TopicShape(9, 1, {}), [], only_asked=True)
    kafka = FakeRefusingCluster(dict.fromkeys(stream.published_topics, KafkaError.NOT_CONTROLLER))
    with pytest.raises(DependencyUnavailableError, match="could not be grown"):
        add_partitions(kafka, stream, TopicShape(9, 1, {}), [])


def test_every_drift_of_every_topic_is_in_one_error(stream: Stream, bootstrap: str) -> None:
    """Each was reported when the one before it was fixed."""
    for tier in stream.tier_topics:
        create_topic(bootstrap, tier, 2, {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"})
    with pytest.raises(TopicDriftError) as caught:
        ensure_dlq_topics(Kafka(bootstrap), stream)
    for tier in stream.tier_topics:
        for setting in ("cleanup.policy=delete", "message.timestamp.type=LogAppendTime"):
            assert f"--entity-name {tier} --add-config {setting}" in caught.value.remedy


@pytest.mark.parametrize("name", DRIFTED)
def test_a_topic_that_is_set_up_otherwise_is_reported_with_its_remedy(
    stream: Stream, bootstrap: str, name: str
) -> None:
    partitions, changes, command = DRIFTED[name]
    tier = stream.tier_topics[0]
    sound = {
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": str(7 * DAY_MS),
        "max.message.bytes": str(300_000 + MAX_BYTES),
    }
    create_topic(bootstrap, tier, partitions, {**sound, **changes})
    with pytest.raises(TopicDriftError, match=tier) as caught:
        ensure_dlq_topics(Kafka(bootstrap), stream)
    assert command.format(topic=tier) in caught.value.remedy
    assert caught.value.found is not None


@pytest.mark.parametrize(
    ("changes", "stored", "found", "command"),
    [
        ({"replicas": 1}, "wanted replication factor 3, as the main topic has", "1", '"replicas":[2,1,3]'),
        (
            {"config": {"min.insync.replicas": "1"}},
            "wanted min.insync.replicas=2 or more",
            "min.insync.replicas=1",
            "--add-config min.insync.replicas=2",
        ),
    ],
    ids=["fewer replicas", "fewer in-sync replicas"],
)
def test_a_topic_that_is_less_safe_than_the_main_topic_is_reported(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], stored: str, found: str, command: str
) -> None:
    """One broker has no second replica, so the shapes are given here."""
    facts = TopicFacts(
        topic="orders.dlq.1",
        bootstrap="broker:9092",
        brokers=3,
        replicas={0: 1},
        in_sync={0: 1},
        leaderless=frozenset(),
        settings=None,
        broker_settings=None,
        assignment={0: [2]},
        broker_ids=[1, 2, 3],
    )
    monkeypatch.setattr("highwater.resources.dlq_topics.fetch_topic_facts", lambda *_: facts)
    wanted = TopicShape(2, 3, {"min.insync.replicas": "2"})
    kafka: Any = SimpleNamespace(bootstrap="broker:9092")
    _ensure_no_drift(kafka, "orders.dlq.1", wanted, replace(wanted, replicas=4, config={"min.insync.replicas": "3"}))
    with pytest.raises(TopicDriftError, match=r"orders\.dlq\.1") as caught:
        _ensure_no_drift(kafka, "orders.dlq.1", wanted, replace(wanted, **changes))
    assert (caught.value.stored, caught.value.found) == (stored, found)
    assert command in caught.value.remedy


def test_more_than_is_needed_is_no_drift(stream: Stream, bootstrap: str) -> None:
    more = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1", "max.message.bytes": "9000000"}
    create_topic(bootstrap, stream.tier_topics[0], 5, more)
    ensure_dlq_topics(Kafka(bootstrap), stream)


def test_nothing_is_created_for_a_main_topic_that_is_gone(bootstrap: str) -> None:
    kafka = Kafka(bootstrap)
    with pytest.raises(TopicAbsentError):
        ensure_dlq_topics(kafka, make_stream("orders.never.made"))
    assert not [topic for topic in kafka.list_topic_names() if topic.startswith("orders.never.made")]
