"""Held slices in the steps of a run: refused, released, and waited for by the slices behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from highwater.assets import slice_classification
from highwater.assets.breaker_gate import ensure_admitted
from highwater.assets.commit import CommittedSlices
from highwater.assets.hold_gate import (
    FIRST,
    HOLDS,
    end_holds,
    ensure_none_held,
    list_slices_to_park,
    subtract_released_rejects,
)
from highwater.assets.work import Work
from highwater.envelope import ORIGIN
from highwater.errors import (
    OutOfTurnError,
    RejectsOverLimitError,
    SliceHeldError,
)
from highwater.orchestration.failures import NOT_TRIED_AGAIN
from highwater.orchestration.sensing.ordered_processing import (
    LOOK_BACK,
    ensure_in_turn,
)
from highwater.orchestration.sensing.step_breaker import report_to_breaker
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.routing import find_destination
from highwater.slices import Slice
from tests.helpers.commits import commit_empty
from tests.helpers.holding import FOUND, NOON, PARK, STREAM
from tests.helpers.repairing import ONE, OPEN, THREE, TWO, open_breaker
from tests.helpers.support import make_stream
from tests.helpers.written_tables import a_slice


def test_holding_records_are_rejected_only_when_their_slice_is_released() -> None:
    assert STREAM.ordered
    assert STREAM.holding == {"unresolved"}
    assert not make_stream("orders").ordered
    assert find_destination(STREAM, "unresolved", 0) == "orders.dlq.1"
    assert find_destination(STREAM, "unresolved", 0, park=True) == "orders.parked"
    assert find_destination(STREAM, "unresolved", 1, park=True) == "orders.dlq.2", "a tier has left the order"
    assert find_destination(STREAM, "unresolved", 2) == "orders.parked"
    assert find_destination(replace(STREAM, tiers=()), "unresolved", 0) == "orders.parked", "a hold needs no tier"
    assert (
        find_destination(STREAM, "malformed", 0, park=True)
        == find_destination(STREAM, "malformed", 0)
        == "orders.parked"
    )


@pytest.fixture
def work(ledger: Ledger, tmp_path: Path) -> Callable[..., Work]:
    """Work without Spark and Kafka."""

    def make(*slices: Slice, stream: Any = STREAM) -> Work:
        nothing: Any = None
        return Work(stream, slices, nothing, Lake(str(tmp_path / "lake")), ledger, nothing, lambda _: None)

    return make


def counted(*slices: Slice, detail: str = FOUND.detail) -> dict[str, dict[str, Any]]:
    first = {**dict(zip(ORIGIN, FOUND.origin, strict=True)), "reason": "unresolved", "detail": detail}
    return {one.key: {"raw": 10, "rejects": 4, HOLDS: 3, FIRST: first} for one in slices}


def test_a_slice_with_a_record_that_holds_fails_and_the_ledger_knows(ledger: Ledger, work: Callable[..., Work]) -> None:
    ensure_none_held(work(TWO), {}, {TWO.key: {"raw": 10, "rejects": 4, HOLDS: 0, FIRST: None}})
    assert ledger.holds.read_open("orders") == []
    for attempt in (1, 2):
        with pytest.raises(SliceHeldError) as raised:
            ensure_none_held(work(TWO), {}, counted(TWO))
        reported = str(raised.value)
        assert "orders@0000002 is held by 3 records, the first is orders partition 2 offset 41" in reported
        assert "unresolved: customer_id is not in reference/customers" in reported
        assert f"attempt {attempt}" in reported
        command = "highwater release-hold orders@0000002 sends them to orders.dlq.1, with --park to orders.parked"
        assert command in reported
    [hold] = ledger.holds.read_open("orders")
    assert (hold.slice_key, hold.found, hold.attempts) == (TWO.key, FOUND, 2)
    assert hold.since < hold.tried_at
    assert isinstance(raised.value, NOT_TRIED_AGAIN), "repair asks again, the step does not wait for it"
    end_holds(work(ONE))
    assert ledger.holds.read_open("orders") == [hold]
    end_holds(work(TWO))
    assert ledger.holds.read_for_slices([TWO.key]) == {}


def test_nothing_of_the_record_is_repeated(ledger: Ledger, work: Callable[..., Work]) -> None:
    with pytest.raises(SliceHeldError) as raised:
        ensure_none_held(work(TWO), {}, counted(TWO, detail="field amount is long, found JSON OBJECT<secret: STRING>"))
    assert "secret" not in str(raised.value)
    assert ledger.holds.read_open("orders")[0].found.detail == "field amount is long, found JSON OBJECT"


def test_committed_slices_are_refused_and_hold_no_others(ledger: Ledger, work: Callable[..., Work]) -> None:
    committed: Any = {TWO.key: None}
    with pytest.raises(SliceHeldError, match="its earlier decision stays"):
        ensure_none_held(work(TWO), committed, counted(TWO))
    assert ledger.holds.read_open("orders") == []


def test_a_released_slice_is_decided_and_its_records_are_not_the_breakers(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    for slice_ in (ONE, TWO):
        ledger.holds.note("orders", slice_.key, FOUND, NOON)
    assert ledger.holds.release(TWO.key, PARK)
    assert not ledger.holds.release(TWO.key, replace(PARK, by="bob")), "the first stays"
    assert not ledger.holds.release(THREE.key, PARK), "nothing holds it"
    ensure_none_held(work(TWO), {}, counted(TWO))
    with pytest.raises(SliceHeldError):
        ensure_none_held(work(ONE), {}, counted(ONE))
    assert list_slices_to_park(work(ONE, TWO)) == [TWO.key]
    assert subtract_released_rejects(counted(TWO), {TWO.key: {"raw": 10, "rejects": 4}}) == {
        TWO.key: {"raw": 10, "rejects": 1}
    }
    end_holds(work(ONE, TWO))
    found = ledger.holds.read_for_slices([ONE.key, TWO.key])
    assert {key: one.release for key, one in found.items()} == {TWO.key: PARK}, "who released it stays on record"
    assert "released by ann" in found[TWO.key].text


def test_each_table_is_refused_until_the_slice_before_is_committed_in_it(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    ledger.add([ONE, TWO, THREE])
    ours = work(TWO)
    commit_empty(ours.lake, [ONE, TWO, THREE], "raw")
    ensure_in_turn(ours, "raw")
    with pytest.raises(OutOfTurnError, match="orders@0000002 may not go into orders/events before orders@0000001"):
        ensure_in_turn(ours, "events")
    ensure_in_turn(work(ONE, TWO), "events")
    ensure_in_turn(replace(ours, stream=make_stream("orders")), "events")
    ensure_in_turn(work(a_slice(9, 10, STREAM.tier_topics[0])), "events")
    commit_empty(ours.lake, [ONE, TWO], "events")
    ensure_in_turn(ours, "events")
    with pytest.raises(OutOfTurnError):
        ensure_in_turn(ours, "rejects")
    commit_empty(ours.lake, [ONE], "rejects")
    ensure_in_turn(ours, "rejects")
    ensure_in_turn(ours, "dlq")
    with pytest.raises(OutOfTurnError, match="before orders@0000001"):
        ensure_in_turn(work(TWO, THREE), "current")
    ledger.holds.note("orders", ONE.key, FOUND, NOON)
    with pytest.raises(OutOfTurnError, match="orders@0000001 is held since"):
        ensure_in_turn(ours, "current")


def test_the_look_back_ends_and_sees_what_lies_within(ledger: Ledger, work: Callable[..., Work]) -> None:
    many = [a_slice(n, 100) for n in range(LOOK_BACK + 2)]
    ledger.add(many)
    ours = work(many[-1])
    commit_empty(ours.lake, many[1:-1], "raw", "events")
    ensure_in_turn(ours, "events")
    with pytest.raises(OutOfTurnError, match=f"before {many[0].key}"):
        ensure_in_turn(work(many[-2]), "events")


def decide(work: Work, messages: Mapping[str, Mapping[str, Any]]) -> None:
    """What the step of events asks before it commits, with the breaker's watch around it."""
    measured = {key: slice_classification._select_counts(row) for key, row in messages.items()}
    made: Any = SimpleNamespace(work=work, measured=measured, ensure_no_retraction=lambda keys: None)
    with report_to_breaker(work, "events", 0):
        slice_classification._ensure_decidable(made, CommittedSlices({}, -1), work.slices, messages)


def test_a_probe_that_is_held_closes_the_breaker_if_the_rest_of_it_is_sound(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    """Retries of tiers hung until somebody released the hold, and the slice itself for a cool-down more."""
    open_breaker(ledger, replace(OPEN, probe=ONE.key))
    with pytest.raises(SliceHeldError):
        decide(work(ONE), counted(ONE))
    assert ledger.breakers.read_circuit("orders").closed
    assert [hold.slice_key for hold in ledger.holds.read_open("orders")] == [ONE.key]
    with pytest.raises(SliceHeldError):
        decide(work(ONE), counted(ONE))
    assert ledger.breakers.read_circuit("orders").window == (), "it says nothing of the stream"
    ensure_admitted(work(a_slice(9, 10, STREAM.tier_topics[0])), [a_slice(9, 10, STREAM.tier_topics[0])])
    assert ledger.holds.release(ONE.key, PARK)
    ensure_admitted(work(ONE), [ONE])


def test_a_probe_that_is_held_and_over_the_limit_begins_the_cool_down_again(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    open_breaker(ledger, replace(OPEN, probe=ONE.key))
    poison = {key: {**numbers, "rejects": 9} for key, numbers in counted(ONE).items()}
    with pytest.raises(RejectsOverLimitError, match="6 of 10 records of orders@0000001"):
        decide(work(ONE), poison)
    circuit = ledger.breakers.read_circuit("orders")
    assert (circuit.state, circuit.probe, circuit.lost) == ("open", None, 1)
    assert [hold.slice_key for hold in ledger.holds.read_open("orders")] == [ONE.key], "a person sees both"


def test_a_hold_of_another_slice_leaves_the_breaker_as_it_is(ledger: Ledger, work: Callable[..., Work]) -> None:
    half_open = replace(OPEN, probe=TWO.key)
    open_breaker(ledger, half_open)
    with pytest.raises(SliceHeldError):
        decide(work(ONE), counted(ONE))
    assert ledger.breakers.read_circuit("orders") == half_open
