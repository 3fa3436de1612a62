"""Holds: the order of slices against a simple model, the ledger, what is requested, and the person who decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

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
from highwater.declaration import Stream
from highwater.envelope import ORIGIN
from highwater.errors import (
    ConfigurationError,
    OutOfTurnError,
    RejectsOverLimitError,
    SliceHeldError,
    UnknownSliceError,
)
from highwater.holds import Release, find_obstacle
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.main import main
from highwater.orchestration.failures import NOT_TRIED_AGAIN
from highwater.orchestration.metadata import build_hold_metadata
from highwater.orchestration.operations.releasing_holds import ReleaseRequest, release_slice
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.reporting.prometheus_metrics import MetricSamples, _measure_holds
from highwater.orchestration.sensing import stream_ticks
from highwater.orchestration.sensing.ordered_processing import (
    LOOK_BACK,
    ensure_in_turn,
    format_hold_lines,
    must_wait_for_earlier,
    take_turn,
)
from highwater.orchestration.sensing.run_requests import PastRun, RepairRules
from highwater.orchestration.sensing.step_breaker import report_to_breaker
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import Judgement
from highwater.routing import find_destination
from highwater.slices import Slice
from tests.helpers.commits import commit_empty
from tests.helpers.holding import FOUND, STREAM
from tests.helpers.repairing import FOUR, ONE, OPEN, THREE, TWO, Repairing, opened
from tests.helpers.support import FakeSilentKafka, make_stream
from tests.helpers.written_tables import a_slice

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=7)
PARK = Release(park=True, by="ann", because="unknown customer", at=LATER)


# Where records go


def test_what_holds_is_rejected_only_when_its_slice_is_released() -> None:
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


# The order, against a model


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


# In the steps


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


def test_what_is_committed_already_is_refused_and_holds_nobody(ledger: Ledger, work: Callable[..., Work]) -> None:
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
    opened(ledger, replace(OPEN, probe=ONE.key))
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
    opened(ledger, replace(OPEN, probe=ONE.key))
    poison = {key: {**numbers, "rejects": 9} for key, numbers in counted(ONE).items()}
    with pytest.raises(RejectsOverLimitError, match="6 of 10 records of orders@0000001"):
        decide(work(ONE), poison)
    circuit = ledger.breakers.read_circuit("orders")
    assert (circuit.state, circuit.probe, circuit.lost) == ("open", None, 1)
    assert [hold.slice_key for hold in ledger.holds.read_open("orders")] == [ONE.key], "a person sees both"


def test_a_hold_of_another_slice_leaves_the_breaker_as_it_is(ledger: Ledger, work: Callable[..., Work]) -> None:
    half_open = replace(OPEN, probe=TWO.key)
    opened(ledger, half_open)
    with pytest.raises(SliceHeldError):
        decide(work(ONE), counted(ONE))
    assert ledger.breakers.read_circuit("orders") == half_open


# Requests


@pytest.fixture
def repairing(tmp_path: Path) -> Any:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        made = Repairing(tmp_path, instance, [ONE, TWO, THREE, FOUR], STREAM)
        commit_empty(made.lake, [ONE, TWO, THREE], "raw")
        yield made


def test_repair_asks_for_the_first_and_what_follows_it_in_one_run(repairing: Repairing) -> None:
    assert repairing.tick()[0] == [([ONE.key, TWO.key, THREE.key, FOUR.key], False, "repair")]


def test_repair_asks_for_a_held_slice_alone_and_reads_on(repairing: Repairing) -> None:
    repairing.ledger.holds.note("orders", ONE.key, FOUND, NOON)
    requests, tick = repairing.tick()
    assert sorted(requests) == [([ONE.key], False, "repair"), ([FOUR.key], True, "repair")]
    assert "orders@0000001 is held since 2026-03-01 12:00:00 UTC by 3 records" in tick.message
    assert "2 wait for their turn" in tick.message
    repairing.fail_often(ONE.key)
    requests, tick = repairing.tick()
    assert requests == [([FOUR.key], True, "repair")], "its next attempt is not due"
    assert "the next is asked for at" in tick.message
    assert "exhausted" not in tick.message
    soon = datetime.now(UTC) + timedelta(seconds=1)
    assert repairing.ledger.holds.release(ONE.key, replace(PARK, at=soon))
    assert repairing.tick()[0] == [([ONE.key, TWO.key, THREE.key, FOUR.key], False, "repair")]


def test_repair_ends_the_hold_of_a_slice_that_was_decided(repairing: Repairing) -> None:
    """The run that decided it may have been killed before it said so."""
    repairing.ledger.holds.note("orders", ONE.key, FOUND, NOON)
    commit_empty(repairing.lake, [ONE], "events")
    repairing.tick()
    assert repairing.ledger.holds.read_open("orders") == []


def test_the_probe_of_the_breaker_is_the_first_in_its_turn(repairing: Repairing) -> None:
    """Elsewhere one that was never refused would be tried before it."""
    refused = Judgement(ONE.key, "orders", "run", NOON, 100, 100, refused=True)
    repairing.ledger.breakers.update("orders", [ONE.key], lambda circuit, _: (circuit, [refused]))
    opened(repairing.ledger)
    assert ([ONE.key], False, "probe") in repairing.tick()[0]
    commit_empty(repairing.lake, [ONE], "events", "rejects", "current")
    assert ([TWO.key], False, "probe") in repairing.tick()[0]


def test_the_planner_asks_for_raw_alone_behind_what_is_not_done(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.add([ONE, TWO])
    planned = SimpleNamespace(slices=[TWO], lines=[], errors={}, skipped={}, state=None)
    monkeypatch.setattr("highwater.orchestration.sensing.topic_planner.Planner.tick", lambda *_, **__: planned)
    monkeypatch.setattr(stream_ticks, "_with_observation", lambda tick, *_: tick)
    resources = SimpleNamespace(
        ledger=SimpleNamespace(open=lambda: ledger), kafka=SimpleNamespace(open=FakeSilentKafka)
    )
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        instance.add_dynamic_partitions("orders_slices", [ONE.key])

        def raw_alone(stream: Stream = STREAM) -> bool:
            [request] = stream_ticks.plan_stream(instance, resources, stream).requests
            assert request.keys == (TWO.key,)
            return request.raw_alone

        assert raw_alone()
        assert not raw_alone(make_stream("orders"))
        done = dg.AssetMaterialization(build_table_key(STREAM, "current"), partition=ONE.key)
        instance.report_runless_asset_event(done)
        assert not raw_alone()
        ledger.holds.note("orders", ONE.key, FOUND, NOON)
        assert raw_alone()
        assert not must_wait_for_earlier(instance, ledger, STREAM, [ONE.key], []), "the first of all"


# What a person sees and decides


def test_a_hold_is_reported_everywhere(ledger: Ledger, tmp_path: Path) -> None:
    from dev.processes import LOOPBACK, free_port

    nothing: Any = None
    measured = alert_conditions._measure_holds(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    assert measured is not None
    assert not measured.over
    assert alert_conditions._measure_holds in alert_conditions.CONDITIONS
    assert build_hold_metadata(STREAM, [])["held"].value == "nothing is held"
    assert build_hold_metadata(make_stream("orders"), []) == {}
    ledger.add([TWO])
    hold = ledger.holds.note("orders", TWO.key, FOUND, NOON)
    text = (
        "orders@0000002 is held since 2026-03-01 12:00:00 UTC by 3 records, the first is orders partition 2 offset 41, "
        "unresolved: customer_id is not in reference/customers; attempt 1 at 12:00:00"
    )
    measured = alert_conditions._measure_holds(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    assert measured is not None
    assert (measured.over, measured.value) == (True, text)
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    assert f"  {text}; fix it, or highwater release-hold orders@0000002" in status.lines
    [plain] = status.to_plain()["holds"]
    assert plain["first_origin"] == {"topic": "orders", "generation": 0, "partition": 2, "offset": 41}
    assert (plain["slice"], plain["records"], plain["attempts"], plain["release"]) == (TWO.key, 3, 1, None)
    explained = explain(ledger, Lake(str(tmp_path / "lake")), STREAM, TWO.key, None)
    assert text in explained.lines
    assert explained.to_plain()["hold"] == plain
    found = MetricSamples()
    _measure_holds(found, ledger, STREAM)
    assert found.samples["highwater_held_slices"] == [(("orders",), 1)]
    assert found.samples["highwater_held_records"] == [(("orders",), 3)]
    assert build_hold_metadata(STREAM, [hold])["held"].value == text
    assert any(text in line for line in format_hold_lines([hold]))


def test_a_person_releases_a_slice_under_a_name(ledger: Ledger, url: str) -> None:
    from highwater.stream_files import load_streams

    ledger.add([ONE, TWO])
    assert "orders" in load_streams()
    ledger.holds.note("orders", TWO.key, FOUND, NOON)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["release-hold", *arguments], env={"HIGHWATER_LEDGER_URL": url})

    dry = run(TWO.key)
    assert dry.exit_code == 0, dry.output
    assert "orders@0000002 is held since" in dry.output
    assert "would go to orders.dlq.1" in dry.output
    assert [hold.release for hold in ledger.holds.read_open("orders")] == [None]
    assert "needs the name of the person" in run(TWO.key, "--yes", "--by", "").output
    assert run("orders@0000099", "--yes", "--by", "ann").exit_code == 2
    assert "orders@0000001 is not held" in run(ONE.key, "--yes", "--by", "ann").output
    done = run(TWO.key, "--park", "--yes", "--by", "ann", "--because", "unknown customer", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["done"] is True
    released = ledger.holds.read_for_slices([TWO.key])[TWO.key].release
    assert released is not None
    assert (released.park, released.by, released.because) == (True, "ann", "unknown customer")
    assert "was released before" in run(TWO.key, "--yes", "--by", "bob").output


def test_the_job_does_what_the_command_does(ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.add([ONE])
    ledger.holds.note("orders", ONE.key, FOUND, NOON)
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)
    job = build_defs(streams=[STREAM]).get_job_def("release_hold")
    asked = {"stream": "orders", "slice": ONE.key, "dry_run": False, "by": "ann", "because": "test data", "park": True}
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=asked).success
    released = ledger.holds.read_for_slices([ONE.key])[ONE.key].release
    assert released is not None
    assert (released.by, released.park) == ("ann", True)


def test_a_release_names_the_breaker_that_the_slice_waits_for(ledger: Ledger) -> None:
    ledger.add([ONE, TWO])
    said: list[str] = []
    for slice_ in (ONE, TWO):
        ledger.holds.note("orders", slice_.key, FOUND, NOON)
        asked = ReleaseRequest(slice_.key, dry_run=False, by="ann")
        release_slice(ledger, {"orders": STREAM}, asked, NOON, lambda line: said.append(str(line)))
        assert ("waits for the breaker of orders" in said[-1]) == (slice_ == TWO)
        opened(ledger)


def test_what_cannot_be_released_is_reported(ledger: Ledger) -> None:
    ledger.add([ONE])
    for asked, stream, error in (
        (ReleaseRequest(ONE.key, dry_run=False), "orders", ConfigurationError),
        (ReleaseRequest(ONE.key), "payments", ConfigurationError),
        (ReleaseRequest("orders@0000009"), "orders", UnknownSliceError),
    ):
        with pytest.raises(error):
            release_slice(ledger, {stream: STREAM}, asked, NOON, lambda _: None)
