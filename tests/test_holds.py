"""The order of slices behind a held one, against a simple model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.envelope import Origin
from highwater.holds import HoldingRecords, find_obstacle
from highwater.orchestration.sensing.ordered_processing import (
    take_turn,
)
from highwater.orchestration.sensing.run_requests import PastRun, RepairRules
from highwater.resources.ledger import Ledger
from tests.helpers.holding import LATER, NOON

KEYS = [f"orders@{n:07d}" for n in range(8)]


@given(st.sets(st.sampled_from(KEYS)), st.sets(st.sampled_from(KEYS), min_size=1))
def test_a_slice_goes_into_a_table_only_behind_all_before_it(committed: set[str], run: set[str]) -> None:
    allowed = all(set(KEYS[: KEYS.index(key)]) <= committed | run for key in run)
    found = find_obstacle(KEYS, committed, run)
    assert (found is None) == allowed
    if found is not None:
        behind, first = found
        assert behind in run
        assert first not in committed | run
        assert first < behind


class World:
    """Slices in raw, events and current, and runs over them as the steps would go; `held` cannot be decided."""

    def __init__(self, count: int, order: Sequence[str]) -> None:
        self.keys, self.order = KEYS[:count], [key for key in order if key in KEYS[:count]]
        self.tables: dict[str, set[str]] = {"raw": set(), "events": set(), "current": set()}
        self.held: set[str] = set()
        self.runs: list[PastRun] = []
        self.now = NOON

    def run(self, keys: Sequence[str], *, raw_alone: bool = False, dies_after: str = "") -> None:
        self.runs.append(PastRun(frozenset(keys), self.now))
        for name, table in self.tables.items():
            if name != "raw" and (raw_alone or find_obstacle(self.keys, table, keys)):
                return
            for key in sorted(keys):
                if name == "events" and key not in table and key in self.held:
                    return
                table.add(key)
            if name == dies_after:
                return

    def lacking(self) -> dict[str, list[str]]:
        found = {key: [name for name, table in self.tables.items() if key not in table] for key in self.keys}
        return {key: names for key, names in found.items() if names}

    def repair(self, minutes: int = 1) -> None:
        """Some minutes later, what repair asks for."""
        self.now += timedelta(minutes=minutes)
        planned = dict.fromkeys(self.keys, NOON - timedelta(hours=1))
        runs = [one for one in self.runs if one.ended_at and self.now - one.ended_at < timedelta(days=1)]
        turn = take_turn(self.lacking(), planned, self.order, runs, self.held, self.now, RepairRules(), 3)
        assert not {*turn.keys} & (turn.raw_alone | turn.waiting)
        for key in turn.raw_alone:
            self.run([key], raw_alone=True)
        if turn.keys:
            self.run(turn.keys)

    def ensure_order(self) -> None:
        for name in ("events", "current"):
            assert self.tables[name] == set(self.keys[: len(self.tables[name])]), f"{name} has a hole"


STEP: st.SearchStrategy[tuple[str, set[str], str]] = st.one_of(
    st.tuples(st.just("run"), st.sets(st.sampled_from(KEYS), min_size=1), st.sampled_from(["", "raw", "events"])),
    st.tuples(st.just("hold"), st.sets(st.sampled_from(KEYS)), st.just("")),
    st.tuples(st.just("repair"), st.just(set()), st.just("")),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(1, 8), st.permutations(KEYS), st.lists(STEP, max_size=25), st.booleans())
def test_whatever_runs_nothing_passes_a_held_slice_and_all_completes_when_it_is_fixed(
    count: int,
    shuffled: list[str],
    steps: list[tuple[str, set[str], str]],
    odd: bool,
) -> None:
    """Keys that were lost and added again are in another order in Dagster."""
    world = World(count, shuffled if odd else KEYS)
    for what, keys, dies_after in steps:
        if what == "run":
            world.run([key for key in world.keys if key in keys], dies_after=dies_after)
        elif what == "hold":
            world.held = {key for key in keys if key not in world.tables["events"]}
        else:
            world.repair()
        world.ensure_order()
    held = min(world.held & set(world.keys), default=None)
    for _ in range(5 * len(world.keys)):  # the longest wait of each is an hour
        world.repair(minutes=20)
        world.ensure_order()
    behind = world.keys[world.keys.index(held) :] if held else []
    assert world.tables["raw"] == set(world.keys), "raw goes on"
    assert world.tables["current"] == set(world.keys) - set(behind), "what is before it completes"
    world.held = set()
    for _ in range(5 * len(world.keys)):
        world.repair(minutes=20)
        world.ensure_order()
    assert not world.lacking()


def turn(lacking: Mapping[str, Sequence[str]], runs: Sequence[PastRun] = (), **changes: Any) -> tuple[Any, ...]:
    asked: dict[str, Any] = {"planned_at": dict.fromkeys(lacking, NOON), "order": KEYS, "held": (), "now": LATER}
    found = take_turn(lacking, runs=runs, rules=RepairRules(), most=20, **{**asked, **changes})
    return [key[-1] for key in found.keys], {key[-1] for key in found.raw_alone}, {key[-1] for key in found.waiting}


def test_slices_that_were_only_read_go_on_together_and_one_that_failed_goes_alone() -> None:
    undecided, unread = ("events", "current"), ("raw", "events", "current")
    lacking = {KEYS[0]: undecided, KEYS[1]: undecided, KEYS[2]: unread, KEYS[4]: undecided}
    read = [PastRun(frozenset(KEYS[:2]), LATER)]
    assert turn(lacking, read) == (["0", "1", "2"], set(), {"4"}), "3 is whole, and no run takes it again"
    assert turn(lacking, [*read, PastRun(frozenset(KEYS[1:2]), LATER)])[0] == ["0"]
    assert turn(lacking, [PastRun(frozenset(KEYS[:1]), None)]) == ([], {"2"}, {"1", "4"})
    assert turn(lacking, [PastRun(frozenset(KEYS[2:3]), None)])[0] == ["0", "1"]
    assert turn(lacking, now=NOON) == ([], {"2"}, {"0", "1", "4"}), "the planner's request may be on its way"
    assert turn({}) == ([], set(), set())


def test_the_first_is_asked_for_again_and_again_a_held_one_every_ten_minutes() -> None:
    runs = [PastRun(frozenset(KEYS[:1]), NOON - timedelta(minutes=n)) for n in range(90)]
    lacking = {KEYS[0]: ("events",), KEYS[1]: ("events",)}
    for held, wait in ((KEYS[:1], 10), ((), 60)):
        soon, due = (NOON + timedelta(minutes=wait, seconds=s) for s in (-1, 0))
        assert turn(lacking, runs, held=held, now=soon) == ([], set(), {"0", "1"})
        assert turn(lacking, runs, held=held, now=due) == (["0"], set(), {"1"})


def test_a_hold_is_stored_whatever_its_record_is_named(either_url: str) -> None:
    """PostgreSQL refused a NUL in the name of a member: no attempt ended, and nobody could release the slice."""
    ledger, detail = Ledger(either_url), "no field is declared for a\0b"
    found = HoldingRecords.with_trimmed_detail(1, Origin("orders", 0, 0, 7), "schema", detail)
    ledger.holds.note("orders", KEYS[0], found, NOON)
    [hold] = ledger.holds.read_open("orders")
    assert hold.found.detail == "no field is declared for a\N{REPLACEMENT CHARACTER}b"
