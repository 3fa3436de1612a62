"""Consumer groups from outside; `tests/orchestration/sensing/test_offset_mirror.py` has them on a real broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from highwater.errors import ConfigurationError, DependencyUnavailableError, ForeignMemberError, HighwaterError
from highwater.mirroring import MirrorMark
from highwater.resources import consumer_groups
from highwater.resources.kafka import Kafka

GROUP = "highwater.orders"
MARK = MirrorMark("a", "orders@0000003", "i", datetime(2026, 1, 1, tzinfo=UTC))
OFFSETS = {("orders", 0): (7, MARK), ("orders", 1): (9, MARK)}


def fault(name: str) -> KafkaError:
    return KafkaError(getattr(KafkaError, name))


class FakeConsumer:
    """A consumer whose coordinator answers as it is scripted, the last answer for ever.

    Args:
        script: per request the name of an error, or None. `silent` is no answer.
        of_partition: the error is one of the second partition, not of the request.
    """

    def __init__(self, *script: str | None, of_partition: bool = False) -> None:
        self.script = list(script)
        self.of_partition = of_partition
        self.wanted: list[Any] = []
        self.closed = 0
        self.on_commit: Callable[[Any, Any], None] = lambda *_: None
        self.pending: list[tuple[Any, Any]] = []

    def _next(self, asked: list[Any]) -> tuple[KafkaError | None, list[Any]]:
        self.wanted.append(asked)
        name = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        found = fault(name) if name else None
        answers = [
            SimpleNamespace(
                topic=one.topic,
                partition=one.partition,
                offset=one.offset,
                metadata=one.metadata,
                error=found if self.of_partition and n == 1 else None,
            )
            for n, one in enumerate(asked)
        ]
        return (None if self.of_partition else found), answers

    def committed(self, asked: list[Any], _: float) -> list[Any]:
        found, answers = self._next(asked)
        if found is not None:
            raise KafkaException(found)
        return answers

    def commit(self, *, offsets: list[Any], asynchronous: bool) -> None:
        assert asynchronous, "the client's own wait has no limit"
        if self.script[0] == "silent":
            self.wanted.append(offsets)
            return
        self.pending.append(self._next(offsets))

    def poll(self, _: float) -> None:
        if self.pending:
            self.on_commit(*self.pending.pop())

    def close(self) -> None:
        self.closed += 1


class FakeGroupCoordinator(Kafka):
    """A cluster with this consumer; its admin client may not be asked, as it can abort the process."""

    def __init__(self, consumer: FakeConsumer) -> None:
        super().__init__("nowhere:1")
        self.consumer = consumer

    def open_reader(self, **changes: Any) -> Any:
        assert changes["group.id"] == GROUP
        self.consumer.on_commit = changes.get("on_commit", self.consumer.on_commit)
        return self.consumer

    def get_admin(self) -> Any:
        raise AssertionError("the admin client was asked")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_groups, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(consumer_groups, "COORDINATOR_SECONDS", 0.05)
    monkeypatch.setattr(consumer_groups, "REQUEST_SECONDS", 0.05)


def test_a_partition_without_a_committed_offset_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client writes -1001 for it, which is no position; 0 is one."""
    consumer = FakeConsumer(None)
    offsets = {0: -1001, 1: 0, 2: -1, 3: 7}
    answers = [
        SimpleNamespace(topic="orders", partition=p, offset=o, error=None, metadata="") for p, o in offsets.items()
    ]
    monkeypatch.setattr(consumer, "committed", lambda *_: answers)
    found = consumer_groups.read_group_offsets(FakeGroupCoordinator(consumer), GROUP, [("orders", p) for p in offsets])
    assert {place: one.offset for place, one in found.items()} == {("orders", 1): 0, ("orders", 3): 7}


def test_offsets_are_committed_with_their_marks_by_a_consumer() -> None:
    consumer = FakeConsumer(None)
    consumer_groups.commit(FakeGroupCoordinator(consumer), GROUP, OFFSETS)
    [wanted] = consumer.wanted
    found = {(one.topic, one.partition): (one.offset, MirrorMark.from_json(one.metadata)) for one in wanted}
    assert found == OFFSETS
    assert consumer.closed == 1


def ask(kafka: Kafka) -> None:
    consumer_groups.read_group_offsets(kafka, GROUP, OFFSETS)


def commit(kafka: Kafka) -> None:
    consumer_groups.commit(kafka, GROUP, OFFSETS)


@pytest.mark.parametrize("request_", [ask, commit])
@pytest.mark.parametrize("of_partition", [False, True])
def test_a_coordinator_that_moves_is_asked_again(request_: Callable[[Kafka], None], *, of_partition: bool) -> None:
    consumer = FakeConsumer("COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR", None, of_partition=of_partition)
    request_(FakeGroupCoordinator(consumer))
    assert len(consumer.wanted) == 3


@pytest.mark.parametrize("request_", [ask, commit])
@pytest.mark.parametrize("of_partition", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GROUP_AUTHORIZATION_FAILED", ConfigurationError),
        ("TOPIC_AUTHORIZATION_FAILED", ConfigurationError),
        ("NOT_COORDINATOR", DependencyUnavailableError),
        ("COORDINATOR_LOAD_IN_PROGRESS", DependencyUnavailableError),
        ("UNKNOWN_TOPIC_OR_PART", DependencyUnavailableError),
        ("_WAIT_COORD", DependencyUnavailableError),
    ],
)
def test_refusals_of_the_coordinator_are_translated(
    name: str, kind: type[HighwaterError], request_: Callable[[Kafka], None], *, of_partition: bool
) -> None:
    """The names as a broker of 4.3 was seen to answer them, and the client's own."""
    consumer = FakeConsumer(name, of_partition=of_partition)
    with pytest.raises(HighwaterError) as caught:
        request_(FakeGroupCoordinator(consumer))
    assert type(caught.value) is kind
    assert name in str(caught.value)
    assert GROUP in str(caught.value)
    assert consumer.closed == len(consumer.wanted) or request_ is ask


@pytest.mark.parametrize("name", ["UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS"])
@pytest.mark.parametrize("members", [("nosy at 10.0.0.9",), ()])
def test_members_are_named_where_they_are_the_reason(
    name: str, members: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has left since is no reason to report a success: nothing was committed."""
    monkeypatch.setattr(consumer_groups, "read_group", lambda *_: consumer_groups.ConsumerGroup(members))
    with pytest.raises(ForeignMemberError) as caught:
        consumer_groups.commit(FakeGroupCoordinator(FakeConsumer(name)), GROUP, OFFSETS)
    assert not members or caught.value.found == members[0]


def test_a_commit_without_an_answer_ends() -> None:
    consumer = FakeConsumer("silent")
    with pytest.raises(DependencyUnavailableError):
        consumer_groups.commit(FakeGroupCoordinator(consumer), GROUP, OFFSETS)
    assert (len(consumer.wanted), consumer.closed) == (1, 1)
