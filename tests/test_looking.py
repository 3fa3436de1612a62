"""One wrong answer of a broker is no loss: a fault counts when two looks agree on it and every partition is led."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Limits
from highwater.errors import DependencyAwayError, HighwaterError, TemporaryError, TopicAbsentError, TopicVanishedError
from highwater.plans import Generation, Loss
from highwater.slices import OffsetRange, Slice
from orchestration.operating.acceptance import accept_loss
from orchestration.sensing.planning import Planner
from orchestration.telling.plan_status import topic_status
from resources.kafka import Kafka, PartitionState, TopicState
from resources.ledger import Ledger
from resources.vanished_topics import parked_lost

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = replace(ORDERS, topic="orders", limits=Limits())
UNLED = PartitionState(None, None, None, None)


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


class Looks(Kafka):
    """Shows what is given, one look after the other; the last of it from then on. None is an absent topic."""

    def __init__(self, *shown: TopicState | None) -> None:
        super().__init__("nowhere:1")
        self.shown = [*shown]

    def topic_state(self, topic: str) -> TopicState:
        found = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if found is None:
            raise TopicAbsentError(f"topic {topic} does not exist", remedy="create it")
        return found

    def look_again(self, topic: str) -> TopicState:
        return self.topic_state(topic)

    def topics(self) -> list[str]:
        return []

    def read(self, *_: Any, **__: Any) -> Any:
        return iter(())


@pytest.fixture
def planned(ledger: Ledger) -> Ledger:
    """Both partitions are planned to offset 40, and nothing is read yet."""
    generation = Generation("orders", "orders", "A", 0, {0: 0, 1: 0}, NOON)
    piece = Slice("orders", "orders", "A", 0, 0, {0: OffsetRange(0, 40), 1: OffsetRange(0, 40)}, NOON)
    assert ledger.open_generation(generation)
    assert ledger.add([piece], seen=generation)
    return ledger


def errors_of(ledger: Ledger, *shown: TopicState | None) -> list[HighwaterError]:
    """What a tick and the status show; they show the same."""
    try:
        tick = Planner(ledger, Looks(*shown)).tick(STREAM, NOON, dry=True)
        found: list[HighwaterError] = [*tick.errors.values()]
    except HighwaterError as error:
        found = [error]
    status = topic_status(Looks(*shown), STREAM, ledger.planned("orders", "orders"))
    assert [type(error) for error in status.errors] == [type(error) for error in found]
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_seen_once_is_none(planned: Ledger, name: str) -> None:
    """The first wrong answer was told with a command that destroys the plan."""
    for shown in ((FAULTS[name], WHOLE), (FAULTS[name], WHOLE, WHOLE)):
        assert [error for error in errors_of(planned, *shown) if not isinstance(error, TemporaryError)] == []
    [error] = errors_of(planned, FAULTS[name], FAULTS[name])
    assert "accept-loss" in error.remedy


@pytest.mark.parametrize("name", ["expired", "truncated", "a partition is gone", "recreated"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_fault_while_a_partition_has_no_leader_is_none(planned: Ledger, name: str, at: int) -> None:
    fault = FAULTS[name]
    assert fault is not None
    unled = replace(fault, partitions={**fault.partitions, 7: UNLED})
    shown = [unled, unled] if at == 0 else [fault, unled]
    assert [error for error in errors_of(planned, *shown) if not isinstance(error, TemporaryError)] == []


def test_looks_that_go_back_do_not_agree(planned: Ledger) -> None:
    assert errors_of(planned, topic(led(0, 30), led(0, 50)), topic(led(0, 20), led(0, 50))) == []
    [error] = errors_of(planned, topic(led(0, 20), led(0, 50)), topic(led(0, 30), led(0, 60)))
    assert error.found == "last stable offset 30"


def accept(ledger: Ledger, kafka: Kafka, *, dry: bool) -> list[str]:
    found = accept_loss(ledger, kafka, STREAM, lambda slices: slices, by="ann", now=NOON, dry=dry)
    return found.lines


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("name", ["expired", "truncated", "a partition is gone", "recreated"])
def test_nothing_is_accepted_by_one_look(planned: Ledger, name: str, dry: bool) -> None:
    """A person who followed the remedy recorded what a single wrong answer said."""
    fault = FAULTS[name]
    assert fault is not None
    unled = replace(fault, partitions={**fault.partitions, 7: UNLED})
    for shown in ((fault, WHOLE), (unled, unled), (fault, unled)):
        with pytest.raises(DependencyAwayError):
            accept(planned, Looks(*shown), dry=dry)
    assert (len(planned.generations("orders", "orders")), planned.losses()) == (1, [])
    assert accept(planned, Looks(fault, fault), dry=dry)
    assert bool(planned.losses() or len(planned.generations("orders", "orders")) > 1) is not dry


def test_an_expired_slice_is_not_lost_by_one_look(planned: Ledger) -> None:
    """No error of planning showed it: the plan goes on behind what retention took of a slice that is not read."""
    seen = topic(led(10, 50), led(0, 50))
    with pytest.raises(DependencyAwayError):
        accept(planned, Looks(seen, WHOLE), dry=False)
    accept(planned, Looks(seen, topic(led(20, 50), led(0, 50))), dry=False)
    assert [(one.partition, one.offsets) for one in planned.losses()] == [(0, OffsetRange(0, 20))]


def test_what_producers_write_between_the_looks_hinders_no_acceptance(planned: Ledger) -> None:
    accept(planned, Looks(topic(led(0, 20), led(0, 50)), topic(led(0, 30), led(0, 60))), dry=False)
    assert planned.generations("orders", "orders")[-1].starts == {0: 30, 1: 40}
    assert [(one.partition, one.offsets) for one in planned.losses()] == [(0, OffsetRange(30, 40))]


def test_a_loss_that_the_declaration_records_is_seen_twice(planned: Ledger) -> None:
    recording, expired = replace(STREAM, on_expired="record"), topic(led(45, 50), led(0, 50))
    Planner(planned, Looks(expired, WHOLE)).tick(recording, NOON)
    assert planned.losses() == []
    tick = Planner(planned, Looks(expired, expired)).tick(recording, NOON)
    assert [(type(one), one.offsets) for one in tick.losses] == [(Loss, OffsetRange(40, 45))]


def test_what_the_parked_topic_lost_is_seen_twice() -> None:
    held, lost = (replace(topic(led(0, end)), topic=STREAM.parked_topic) for end in (9, 2))
    assert parked_lost(Looks(lost, held), STREAM, 5) is None
    assert parked_lost(Looks(lost, lost), STREAM, 5) is not None


def test_a_topic_that_is_absent_once_is_not_gone(planned: Ledger) -> None:
    tick = Planner(planned, Looks(None, WHOLE)).tick(STREAM, NOON, dry=True)
    assert not tick.errors
    with pytest.raises(TopicVanishedError):
        Planner(planned, Looks(None, None)).tick(STREAM, NOON, dry=True)
