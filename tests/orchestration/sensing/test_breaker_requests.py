"""The runs that sensors request while a stream's breaker is not closed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from highwater.breaker import Circuit
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.sensing import stream_ticks
from highwater.orchestration.sensing.run_requests import PastRun, filter_counted_runs, select_last_tries, stop
from highwater.resources.ledger.breakers import AcceptedSlice, Judgement
from tests.helpers.commits import commit_empty
from tests.helpers.repairing import (
    FOUR,
    HALF,
    NOON,
    ONE,
    OPEN,
    STREAM,
    THREE,
    TWO,
    UNDECIDED,
    UNREAD,
    Repairing,
    minutes,
    open_breaker,
)


def stopped(circuit: Circuit, now: datetime = NOON, **changes: Any) -> tuple[set[str], set[str], str | None]:
    asked: dict[str, Any] = {
        "lacking": {"a": UNDECIDED, "b": UNDECIDED, "c": UNREAD, "d": HALF, "t": UNDECIDED},
        "main": {"a", "b", "c", "d"},
        "accepted": (),
        "refused": (),
        "busy": (),
        **changes,
    }
    found = stop(circuit, now=now, **asked)
    return set(found.waiting), set(found.raw_alone), found.probe


def test_closed_it_stops_nothing() -> None:
    assert stopped(Circuit(since=NOON)) == (set(), set(), None)


def test_open_it_stops_what_is_to_be_decided_and_lets_raw_and_finishing_be() -> None:
    assert stopped(OPEN) == ({"a", "b", "t"}, {"c"}, None)
    assert stopped(OPEN, accepted={"b"}) == ({"a", "t"}, {"c"}, None)


def test_the_probe_is_a_slice_of_the_topic_that_was_refused_never_or_longest_ago() -> None:
    later = NOON + minutes(5)
    assert stopped(OPEN, later)[2] == "a"
    assert stopped(OPEN, later, refused=["a"])[2] == "b"
    assert stopped(OPEN, later, refused=["b", "a"])[2] == "b"
    assert stopped(OPEN, later, busy={"a"})[2] is None, "its run is on the way; no second one is sent"
    assert stopped(OPEN, later, lacking={"t": UNDECIDED, "c": UNREAD})[2] is None


def test_a_slice_that_fails_takes_its_turn_behind_those_that_nobody_tried() -> None:
    """It is never refused, so it was every probe for as long as it failed, and sound slices waited after it."""
    later = NOON + minutes(5)
    assert stopped(OPEN, later, tried={"a": NOON})[2] == "b"
    assert stopped(OPEN, later, tried={"a": NOON, "b": NOON - minutes(1)})[2] == "b"
    assert stopped(OPEN, later, tried={"a": NOON - minutes(1), "b": NOON})[2] == "a"
    assert stopped(OPEN, later, tried={"a": NOON, "b": NOON}, refused=["a"])[2] == "b", "of one run the sound one"
    assert stopped(OPEN, later, exhausted={"a"}, tried={"b": NOON})[2] == "b"
    assert stopped(OPEN, later, exhausted={"a", "b"})[2] == "a", "there is no other"


def test_only_runs_that_were_to_decide_are_tries() -> None:
    def run(keys: str, ended: datetime | None, *, raw_alone: bool = False) -> PastRun:
        return PastRun(frozenset(keys), ended, raw_alone=raw_alone)

    early = NOON - minutes(1)
    runs = [run("ab", NOON), run("b", early), run("c", NOON, raw_alone=True), run("d", None), run("e", early)]
    assert select_last_tries(runs) == {"a": NOON, "b": NOON, "e": early}


def test_a_probe_that_comes_to_no_end_makes_room_for_another() -> None:
    """One that killed its worker each time was requested again and again, and no other was."""
    lost = replace(OPEN, probe="a", until=NOON + minutes(30))
    assert stopped(lost, NOON + minutes(29))[2] == "a"
    assert stopped(lost, NOON + minutes(30))[2] == "b"
    assert stopped(lost, NOON + minutes(30), busy={"a"})[2] == "b", "its run hangs"
    assert stopped(lost, NOON + minutes(30), lacking={"a": UNDECIDED})[2] == "a"


def test_a_probe_whose_run_was_lost_is_requested_again() -> None:
    probing = replace(OPEN, probe="b", until=NOON + minutes(30))
    assert stopped(probing)[2] == "b"
    assert stopped(probing, busy={"b"})[2] is None
    assert stopped(probing, lacking={"a": UNDECIDED, "b": HALF})[2] is None


def test_runs_from_before_the_breaker_closed_count_no_more() -> None:
    runs = [PastRun(frozenset("ab"), NOON - minutes(1)), PastRun(frozenset("ab"), NOON), PastRun(frozenset("c"))]
    assert filter_counted_runs(runs, None, {}) == runs
    assert filter_counted_runs(runs, NOON, {}) == runs[1:]
    assert filter_counted_runs(runs, None, {"a": NOON}) == [PastRun(frozenset("b"), NOON - minutes(1)), *runs[1:]]


def test_repair_stops_what_is_in_raw_and_reads_on(repairing: Repairing) -> None:
    open_breaker(repairing.ledger, replace(OPEN, until=datetime.now(UTC) + minutes(5)))
    requests, tick = repairing.tick()
    assert requests == [([FOUR.key], True, "repair")]
    [run] = stream_ticks.build_run_requests(STREAM, tick.requests)
    assert run.asset_selection == [build_table_key(STREAM, "raw")]
    assert "the breaker is open since 2026-03-01 12:00:00 UTC: poison" in tick.message
    assert "3 wait for the breaker" in tick.message


def test_repair_asks_for_one_probe_and_then_for_the_rest(repairing: Repairing) -> None:
    open_breaker(repairing.ledger)
    requests, _ = repairing.tick()
    assert requests == [([FOUR.key], True, "repair"), ([ONE.key], False, "probe")]
    open_breaker(repairing.ledger, Circuit(since=datetime.now(UTC)))
    refused = Judgement(TWO.key, "orders", "run", NOON, 100, 100, refused=True)
    repairing.ledger.breakers.update("orders", [TWO.key], lambda circuit, _: (circuit, [refused]))
    requests, _ = repairing.tick()
    asked = sorted(keys for keys, raw_alone, _ in requests if not raw_alone)
    assert asked == [[ONE.key], [TWO.key], [THREE.key, FOUR.key]], "a slice that was refused shares no run"


@pytest.mark.parametrize("exhausted", [True, False], ids=["exhausted", "failed"])
def test_a_slice_that_fails_whatever_is_fixed_is_not_every_probe(repairing: Repairing, exhausted: bool) -> None:
    """The breaker opened by failures stayed open for as long as the oldest slice failed."""
    if exhausted:
        repairing.fail_often(ONE.key)
        repairing.tick()
    else:
        repairing.fail(ONE.key)
    assert [one.slice_key for one in repairing.ledger.exhausted_slices.read_open("orders")] == (
        [ONE.key] if exhausted else []
    )
    repairing.read(TWO.key)
    probes = []
    for _ in range(6):
        open_breaker(repairing.ledger)
        probes += [key for keys, _, purpose in repairing.tick()[0] if purpose == "probe" for key in keys]
        repairing.fail(probes[-1])
    rest = [TWO.key, THREE.key] if exhausted else [TWO.key, THREE.key, ONE.key]
    assert probes == [*rest, *rest, *rest][:6]


def test_repair_closes_what_has_no_slice_left_to_probe(repairing: Repairing) -> None:
    """What kept it open was let through, and nothing comes in: retries would wait for ever."""
    commit_empty(repairing.lake, [ONE, TWO, THREE, FOUR], "raw", "events")
    open_breaker(repairing.ledger, replace(OPEN, until=datetime.now(UTC) + minutes(5)))
    repairing.tick()
    assert not repairing.ledger.breakers.read_circuit("orders").closed, "not before it has cooled down"
    open_breaker(repairing.ledger)
    repairing.tick()
    assert repairing.ledger.breakers.read_circuit("orders").closed


def test_repair_asks_for_an_accepted_slice_however_often_it_failed(repairing: Repairing) -> None:
    open_breaker(repairing.ledger, replace(OPEN, until=datetime.now(UTC) + minutes(5)))
    repairing.fail_often(ONE.key)
    accepted = AcceptedSlice(ONE.key, "test data", "ann", datetime.now(UTC) + timedelta(seconds=1))
    repairing.ledger.breakers.accept("orders", [accepted])
    assert ([ONE.key], False, "repair") in repairing.tick()[0]


def test_repair_asks_for_all_when_it_closed_however_often_they_failed(repairing: Repairing) -> None:
    """Six probes that fail in half an hour used up what a day allows."""
    repairing.fail_often(ONE.key)
    open_breaker(repairing.ledger, Circuit(since=datetime.now(UTC) + timedelta(seconds=1)))
    assert repairing.tick()[0] == [([ONE.key, TWO.key, THREE.key, FOUR.key], False, "repair")]


def test_the_planner_and_retries_ask_for_raw_alone_while_it_is_open() -> None:
    from highwater.orchestration.sensing.run_requests import build_first_requests

    [request] = build_first_requests(["a", "b"], ["a", "b"], 20, raw_alone=True)
    [run] = stream_ticks.build_run_requests(STREAM, [request])
    assert run.asset_selection == [build_table_key(STREAM, "raw")]
    assert stream_ticks.build_run_requests(STREAM, build_first_requests(["a"], ["a"], 20))[0].asset_selection is None
