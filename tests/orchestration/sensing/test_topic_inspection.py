"""One wrong answer of a broker is no loss: a fault counts when two looks agree on it and every partition is led."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import raw, unreadable_slices
from highwater.assets.commit import CommittedSlices
from highwater.declaration import Limits
from highwater.errors import (
    DependencyUnavailableError,
    HighwaterError,
    OffsetsExpiredError,
    TemporaryError,
    TopicAbsentError,
    TopicRecreatedError,
    TopicTruncatedError,
    TopicVanishedError,
)
from highwater.orchestration.checking import topic_audit
from highwater.orchestration.operations import accepting_losses
from highwater.orchestration.operations.acceptance import Acceptance, accept_loss
from highwater.orchestration.reporting.plan_status import read_topic_status
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.plans import Generation, Loss
from highwater.resources import dlq_topics
from highwater.resources.deleted_topics import find_parked_loss
from highwater.resources.expired_offsets import list_expired_slices
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = replace(ORDERS, topic="orders", limits=Limits())
LEADERLESS = PartitionState(None, None, None, None)


def led(log_start: int, end: int) -> PartitionState:
    return PartitionState(log_start, end, end, 1)


def topic(*partitions: PartitionState, topic_id: str = "A") -> TopicState:
    return TopicState("orders", topic_id, dict(enumerate(partitions)))


WHOLE = topic(led(0, 50), led(0, 50))
FAULTS = {
    "expired": topic(led(45, 50), led(0, 50)),
    "truncated": topic(led(0, 30), led(0, 50)),
    "a partition is gone": topic(led(0, 50)),
    "recreated": topic(led(0, 50), led(0, 50), topic_id="B"),
    "absent": None,
}


class FakeTopicStates(Kafka):
    """Shows what is given, one look after the other; the last of it from then on. None is an absent topic."""

    def __init__(self, *shown: TopicState | None) -> None:
        super().__init__("nowhere:1")
        self.shown = [*shown]

    def read_topic_state(self, topic: str) -> TopicState:
        found = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if found is None:
            raise TopicAbsentError(f"topic {topic} does not exist", remedy="create it")
        return found

    def look_again(self, topic: str) -> TopicState:
        return self.read_topic_state(topic)

    def list_topic_names(self) -> list[str]:
        return []

    def read(self, *_: Any, **__: Any) -> Any:
        return iter(())


@pytest.fixture
def planned(ledger: Ledger) -> Ledger:
    """Both partitions are planned to offset 40, and nothing is read yet."""
    generation = Generation("orders", "orders", "A", 0, {0: 0, 1: 0}, NOON)
    slice_ = Slice("orders", "orders", "A", 0, 0, {0: OffsetRange(0, 40), 1: OffsetRange(0, 40)}, NOON)
    assert ledger.topics.open_generation(generation)
    assert ledger.add([slice_], seen=generation)
    return ledger


def errors_of(ledger: Ledger, *shown: TopicState | None) -> list[HighwaterError]:
    """What a tick and the status show; they show the same."""
    try:
        tick = Planner(ledger, FakeTopicStates(*shown)).tick(STREAM, NOON, dry_run=True)
        found: list[HighwaterError] = [*tick.errors.values()]
    except HighwaterError as error:
        found = [error]
    status = read_topic_status(FakeTopicStates(*shown), STREAM, ledger.topics.read_planned_topic("orders", "orders"))
    assert [type(error) for error in status.errors] == [type(error) for error in found]
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_seen_once_is_none(planned: Ledger, name: str) -> None:
    """The first wrong answer was reported with a command that destroys the plan."""
    for shown in ((FAULTS[name], WHOLE), (FAULTS[name], WHOLE, WHOLE)):
        assert [error for error in errors_of(planned, *shown) if not isinstance(error, TemporaryError)] == []
    [error] = errors_of(planned, FAULTS[name], FAULTS[name])
    assert "accept-loss" in error.remedy


@pytest.mark.parametrize("name", ["expired", "truncated", "a partition is gone", "recreated"])
@pytest.mark.parametrize("at", ["both", "first", "second"])
def test_a_fault_while_a_partition_has_no_leader_is_none(planned: Ledger, name: str, at: str) -> None:
    """While leaders are unavailable answers are wrong: neither look counts that lacks a leader."""
    fault = FAULTS[name]
    assert fault is not None
    leaderless = replace(fault, partitions={**fault.partitions, 7: LEADERLESS})
    shown = {"both": [leaderless, leaderless], "first": [leaderless, fault], "second": [fault, leaderless]}[at]
    assert [error for error in errors_of(planned, *shown) if not isinstance(error, TemporaryError)] == []


@pytest.mark.parametrize("name", ["expired", "truncated", "a partition is gone", "recreated"])
def test_a_topic_that_the_second_look_misses_is_not_gone(planned: Ledger, name: str) -> None:
    """One look saw the topic and one did not: the tick said to create it, and status to accept its loss."""
    shown = (
        FakeTopicStates(FAULTS[name], None),
        FakeTopicStates(FAULTS[name], None),
        FakeTopicStates(FAULTS[name], None),
    )
    with pytest.raises(DependencyUnavailableError):
        Planner(planned, shown[0]).tick(STREAM, NOON, dry_run=True)
    [error] = read_topic_status(shown[1], STREAM, planned.topics.read_planned_topic("orders", "orders")).errors
    assert isinstance(error, DependencyUnavailableError)
    with pytest.raises(DependencyUnavailableError):
        accept(planned, shown[2], dry_run=False)


def test_looks_that_go_back_do_not_agree(planned: Ledger) -> None:
    assert errors_of(planned, topic(led(0, 30), led(0, 50)), topic(led(0, 20), led(0, 50))) == []
    [error] = errors_of(planned, topic(led(0, 20), led(0, 50)), topic(led(0, 30), led(0, 60)))
    assert error.found == "last stable offset 30"


def accept(ledger: Ledger, kafka: Kafka, *, dry_run: bool) -> list[str]:
    found = accept_loss(ledger, kafka, STREAM, lambda slices: slices, by="ann", now=NOON, dry_run=dry_run)
    return found.lines


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["expired", "truncated", "a partition is gone", "recreated"])
def test_nothing_is_accepted_by_one_look(planned: Ledger, name: str, dry_run: bool) -> None:
    """A person who followed the remedy recorded what a single wrong answer said."""
    fault = FAULTS[name]
    assert fault is not None
    leaderless = replace(fault, partitions={**fault.partitions, 7: LEADERLESS})
    for shown in ((fault, WHOLE), (leaderless, leaderless), (fault, leaderless), (leaderless, fault)):
        with pytest.raises(DependencyUnavailableError):
            accept(planned, FakeTopicStates(*shown), dry_run=dry_run)
    assert (len(planned.topics.list_generations("orders", "orders")), planned.list_losses()) == (1, [])
    assert accept(planned, FakeTopicStates(fault, fault), dry_run=dry_run)
    assert bool(planned.list_losses() or len(planned.topics.list_generations("orders", "orders")) > 1) is not dry_run


def test_looks_that_go_back_accept_nothing(planned: Ledger) -> None:
    """Both looks showed a partition cut off; the second one at a lower offset, so that one of them was wrong."""
    with pytest.raises(DependencyUnavailableError, match="do not agree"):
        accept(planned, FakeTopicStates(topic(led(0, 30), led(0, 50)), topic(led(0, 20), led(0, 50))), dry_run=False)
    assert (len(planned.topics.list_generations("orders", "orders")), planned.list_losses()) == (1, [])


def test_an_expired_slice_is_not_lost_by_one_look(planned: Ledger) -> None:
    """No error of planning showed it: the plan goes on after what retention took of a slice that is not read."""
    seen = topic(led(10, 50), led(0, 50))
    with pytest.raises(DependencyUnavailableError):
        accept(planned, FakeTopicStates(seen, WHOLE), dry_run=False)
    accept(planned, FakeTopicStates(seen, topic(led(20, 50), led(0, 50))), dry_run=False)
    assert [(one.partition, one.offsets) for one in planned.list_losses()] == [(0, OffsetRange(0, 20))]


@pytest.mark.parametrize("fault", ["expired", "recreated"])
def test_what_a_run_reads_while_a_loss_is_worked_out_is_not_lost(planned: Ledger, fault: str) -> None:
    """Its records were in raw and among the losses: the sum of the audit was wrong for ever."""
    shown = topic(led(10, 50), led(0, 50)) if fault == "expired" else topic(led(0, 50), led(0, 50), topic_id="B")
    looks = list[bool]()

    def select_unread(slices: Sequence[Slice]) -> Sequence[Slice]:
        looks.append("commit orders/raw" in planned.read_leases())
        return slices if len(looks) == 1 else []

    arguments = planned, FakeTopicStates(shown, shown), STREAM, select_unread
    found = accept_loss(*arguments, by="ann", now=NOON, dry_run=False)
    assert (found.losses, planned.list_losses()) == ((), [])
    assert len(planned.topics.list_generations("orders", "orders")) == (1 if fault == "expired" else 2)
    assert looks == [False, True], "no run commits between the last look and the record"


def test_records_written_between_the_looks_do_not_prevent_acceptance(planned: Ledger) -> None:
    accept(planned, FakeTopicStates(topic(led(0, 20), led(0, 50)), topic(led(0, 30), led(0, 60))), dry_run=False)
    assert planned.topics.list_generations("orders", "orders")[-1].starts == {0: 30, 1: 40}
    assert [(one.partition, one.offsets) for one in planned.list_losses()] == [(0, OffsetRange(30, 40))]


def test_a_loss_that_the_declaration_records_is_seen_twice(planned: Ledger) -> None:
    recording, expired = replace(STREAM, on_expired="record"), topic(led(45, 50), led(0, 50))
    Planner(planned, FakeTopicStates(expired, WHOLE)).tick(recording, NOON)
    assert planned.list_losses() == []
    tick = Planner(planned, FakeTopicStates(expired, expired)).tick(recording, NOON)
    assert [(type(one), one.offsets) for one in tick.losses] == [(Loss, OffsetRange(40, 45))]


@pytest.mark.parametrize("at", ["both", "first", "second"])
def test_no_slice_expired_while_a_partition_has_no_leader(planned: Ledger, at: str) -> None:
    """A run recorded the loss of one partition for good, and status named `accept-loss`, while others had no leader."""
    slices = planned.list_slices("orders", "orders")
    fault, leaderless = topic(led(10, 50), led(0, 50)), topic(led(10, 50), LEADERLESS)
    shown = {"both": [leaderless, leaderless], "first": [leaderless, fault], "second": [fault, leaderless]}[at]
    assert list_expired_slices(FakeTopicStates(*shown), "orders", slices) == []
    assert [one.offsets for one in list_expired_slices(FakeTopicStates(fault, fault), "orders", slices)] == [
        {0: OffsetRange(0, 10)}
    ]


@pytest.mark.parametrize(
    ("changes", "in_raw", "second", "lost"),
    [
        ({"on_expired": "record"}, "never", "expired", True),
        ({"on_expired": "record"}, "never", "sound", False),
        ({"on_expired": "record"}, "never", "absent", False),
        ({"on_expired": "record"}, "before", "expired", False),
        ({"on_expired": "record"}, "meanwhile", "expired", False),
        ({}, "never", "expired", False),
    ],
    ids=[
        "recorded",
        "one look",
        "absent at the second look",
        "what raw holds is not lost",
        "another run reads it meanwhile",
        "a person decides",
    ],
)
def test_the_run_of_a_planned_slice_records_what_expired(
    planned: Ledger, changes: dict[str, Any], in_raw: str, second: str, lost: bool
) -> None:
    """Only what expired before it was planned was recorded: a planned slice failed until a person came."""
    [slice_], fault = planned.list_slices("orders", "orders"), topic(led(10, 50), led(0, 50))
    kafka = FakeTopicStates(fault, {"expired": fault, "sound": WHOLE, "absent": None}[second])
    stream: Any = replace(STREAM, **changes)
    held: Any = {slice_.key: None}
    lake = SimpleNamespace(load_slice_commits=lambda *_: held if in_raw == "meanwhile" else {})
    work: Any = SimpleNamespace(
        stream=stream, slices=[slice_], ledger=planned, kafka=kafka, lake=lake, log=lambda _: None
    )
    left = raw._load_slices_to_read(work, CommittedSlices(held if in_raw == "before" else {}, 0), ())
    found = [(one.partition, one.offsets, one.accepted_by) for one in planned.list_losses()]
    assert found == ([(0, OffsetRange(0, 10), "on_expired=record")] if lost else [])
    assert left[slice_.key].ranges == {0: OffsetRange(10 if lost else 0, 40), 1: OffsetRange(0, 40)}


SLICE_FAULTS = {
    "expired": (topic(led(10, 50), led(0, 50)), OffsetsExpiredError),
    "truncated": (topic(led(0, 30), led(0, 50)), TopicTruncatedError),
    "recreated": (topic(led(0, 50), led(0, 50), topic_id="B"), TopicRecreatedError),
    "absent": (None, TopicVanishedError),
}


@pytest.mark.parametrize("name", SLICE_FAULTS)
def test_a_run_fails_for_good_only_where_two_looks_agree(planned: Ledger, name: str) -> None:
    """One look failed the run of a slice that was never read, with a remedy that gives its records up."""
    (fault, error), [slice_] = SLICE_FAULTS[name], planned.list_slices("orders", "orders")

    def read(*shown: TopicState | None) -> None:
        work: Any = SimpleNamespace(stream=STREAM, slices=[slice_], ledger=planned, kafka=FakeTopicStates(*shown))
        unreadable_slices.list_unreadable_slices(
            work, {slice_.key: slice_}, cast("Any", SimpleNamespace(slice_commits={}))
        )

    with pytest.raises(error):
        read(fault, fault)
    if fault is None:
        read(fault, WHOLE)
        return
    leaderless = replace(fault, partitions={**fault.partitions, 7: LEADERLESS})
    for shown in ((fault, WHOLE), (fault, leaderless), (leaderless, fault), (fault, None)):
        with pytest.raises(DependencyUnavailableError):
            read(*shown)


def test_a_tier_that_is_absent_once_is_not_recreated(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accept-loss` of a tier that one broker did not know yet made it again, and recorded as lost what waits there."""
    [tier] = STREAM.tier_topics[:1]
    generation = Generation("orders", tier, "A", 0, {0: 0}, NOON)
    slice_ = Slice("orders", tier, "A", 0, 0, {0: OffsetRange(0, 40)}, NOON)
    assert ledger.topics.open_generation(generation)
    assert ledger.add([slice_], seen=generation)
    held = replace(topic(led(0, 50)), topic=tier)
    made: list[str] = []
    monkeypatch.setattr(accepting_losses, "recreate_topic", lambda *given: made.append(given[-1]))

    def accept_tier(*shown: TopicState | None) -> Acceptance:
        asked, lake = (
            accepting_losses.AcceptLossRequest(topic=tier, dry_run=False, by="ann"),
            Lake(str(tmp_path / "lake")),
        )
        return accepting_losses.accept_topic_losses(ledger, FakeTopicStates(*shown), lake, STREAM, asked, NOON)[0]

    assert accept_tier(None, held).nothing
    assert (made, ledger.list_losses(), len(ledger.topics.list_generations("orders", tier))) == ([], [], 1)
    accept_tier(None, None, replace(held, topic_id="B"))
    assert (made, [one.offsets for one in ledger.list_losses()]) == ([tier], [OffsetRange(0, 40)])


def test_publication_takes_no_topic_for_gone_by_one_look() -> None:
    """A broker that did not know a topic yet ended the publication of rejects, with a remedy that gives records up."""
    vanished = TopicVanishedError("orders.parked is gone", remedy="create it")
    with pytest.raises(DependencyUnavailableError):
        dlq_topics._ensure_none_vanished(FakeTopicStates(WHOLE), ["orders.parked"], lambda _: vanished)
    with pytest.raises(TopicVanishedError):
        dlq_topics._ensure_none_vanished(FakeTopicStates(None), ["orders.parked"], lambda _: vanished)


def test_the_audit_takes_no_topic_for_gone_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    vanished = TopicVanishedError("it is gone", remedy="create it")

    def absent(_: object, name: str) -> None:
        raise TopicAbsentError(f"topic {name} does not exist", remedy="create it")

    monkeypatch.setattr(topic_audit, "fetch_topic_facts", absent)
    assert topic_audit.check_published_topics(FakeTopicStates(WHOLE), STREAM, lambda _: vanished)[1] == []
    errors = topic_audit.check_published_topics(FakeTopicStates(None), STREAM, lambda _: vanished)[1]
    assert errors == [vanished] * len(STREAM.published_topics)


def test_loss_of_the_parked_topic_needs_two_looks() -> None:
    held, lost = (replace(topic(led(0, end)), topic=STREAM.parked_topic) for end in (9, 2))
    assert find_parked_loss(FakeTopicStates(lost, held), STREAM, 5) is None
    assert find_parked_loss(FakeTopicStates(lost, lost), STREAM, 5) is not None


def test_a_topic_that_is_absent_once_is_not_gone(planned: Ledger) -> None:
    tick = Planner(planned, FakeTopicStates(None, WHOLE)).tick(STREAM, NOON, dry_run=True)
    assert not tick.errors
    with pytest.raises(TopicVanishedError):
        Planner(planned, FakeTopicStates(None, None)).tick(STREAM, NOON, dry_run=True)
