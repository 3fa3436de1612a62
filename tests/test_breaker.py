"""The stream's breaker: against a simple model, in the ledger, in what is requested, and for the person who decides."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.assets import slice_classification
from highwater.assets.breaker_gate import ensure_admitted, ensure_within_limit
from highwater.assets.commit import CommittedSlices
from highwater.assets.work import Work
from highwater.breaker import LONGEST_PROBE, AttemptResult, Circuit, admit, complete_probe, fail, judge
from highwater.declaration import Breaker, OnReject
from highwater.declaration_parts import ON_REJECT
from highwater.errors import (
    BreakerOpenError,
    ConfigurationError,
    DependencyAwayError,
    PermanentError,
    RejectsOverLimitError,
    RetractionError,
    UnbalancedError,
    UnknownSliceError,
)
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.main import main
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing import stream_ticks
from highwater.orchestration.sensing.run_requests import PastRun, filter_counted_runs, select_last_tries, stop
from highwater.orchestration.sensing.step_breaker import report_to_breaker
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger, breakers
from highwater.resources.ledger.breakers import AcceptedReason, AcceptedSlice, Judgement
from highwater.slice_commits import SliceCommit
from highwater.slices import Slice
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
    opened,
)
from tests.helpers.written_tables import a_slice

RULES = Breaker()


# The rules, against a model


@dataclass
class Model:
    """The breaker as its page shows it, over the whole history, in the plainest words."""

    history: list[tuple[int, int, bool]] = field(default_factory=list)  # first attempts since it closed
    seen: set[str] = field(default_factory=set)
    open_until: datetime | None = None
    probe: str | None = None
    vain: int = 0  # probes since it opened

    def state(self) -> str:
        return "closed" if self.open_until is None else "half-open" if self.probe else "open"

    def may(self, key: str, now: datetime) -> bool:
        if self.open_until is None or self.probe == key:
            return True
        if now < self.open_until:
            return False
        self.probe, self.open_until = key, now + LONGEST_PROBE
        return True

    def decide(self, key: str, records: int, rejects: int, now: datetime) -> bool:
        """Whether it is refused."""
        if self.probe == key:
            refused = records >= 1 and rejects * 2 >= records
            if refused:
                self.trip(now)
            return refused
        if self.open_until is not None or key in self.seen:
            return records >= 100 and rejects * 2 >= records
        last = [*self.history, (records, rejects, False)]
        refused = False
        for many in (1, 2, 3, 4, 5):
            total, bad = (sum(one[at] for one in last[-many:]) for at in (0, 1))
            refused = refused or (total >= 100 and bad / total >= 0.5)
        if refused:
            self.trip(now)
        else:
            self.history = last
        self.seen.add(key)
        return refused

    def break_down(self, key: str, now: datetime) -> None:
        if self.probe == key:
            self.trip(now)
        elif self.open_until is None and key not in self.seen:
            self.history.append((0, 0, True))
            self.seen.add(key)
            if len(self.history) >= 3 and all(failed for _, _, failed in self.history[-3:]):
                self.trip(now)

    def finish(self, key: str) -> None:
        if self.probe == key:
            self.probe, self.open_until, self.vain = None, None, 0

    def trip(self, now: datetime) -> None:
        self.vain += self.open_until is not None
        wait = [5, 10, 20, 30][min(self.vain, 3)]
        self.history, self.probe, self.open_until = [], None, now + minutes(wait)


STEPS = st.tuples(
    st.integers(0, 9),  # the slice
    st.sampled_from(["sound", "poison", "some", "fail", "fail", "killed"]),
    st.sampled_from([5, 40, 60, 100, 1000]),
    st.sampled_from([0, 1, 4, 6, 40]),  # minutes that pass
)


@settings(deadline=None, max_examples=400)
@given(st.lists(STEPS, max_size=60))
def test_the_breaker_is_what_the_model_says(steps: list[tuple[int, str, int, int]]) -> None:
    model, circuit, seen, now = Model(), Circuit(), set[str](), NOON
    for number, how, records, passed in steps:
        now += minutes(passed)
        key, rejects = f"orders@{number:07d}", {"sound": 0, "poison": records, "some": records // 2 - 1}.get(how, 0)
        found = admit(circuit, [key], now)
        assert (found is not None) == model.may(key, now)
        if found is None:
            continue
        circuit, first = found, {key} - seen
        if how == "fail":
            counted = circuit.closed and bool(first)
            circuit = fail(circuit, RULES, [key], first, "boom", now)
            model.break_down(key, now)
            seen |= {key} if counted else set()
        elif how != "killed":
            counted = circuit.closed
            circuit, refused = judge(circuit, RULES, [AttemptResult(key, records, rejects)], first, now)
            assert bool(refused) == model.decide(key, records, rejects, now)
            seen |= {key} if counted else set()
            if not refused:
                circuit = complete_probe(circuit, key, now)
                model.finish(key)
        assert circuit.state == model.state()
        assert Circuit.from_plain(circuit.to_plain()) == circuit


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=12), st.data())
def test_slices_that_are_taken_together_are_judged_like_one_after_another(
    counts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Up to the first that is refused; with it the whole run is, and none of the sound ones counts."""
    cases = [AttemptResult(f"orders@{n:07d}", max(a, b), min(a, b)) for n, (a, b) in enumerate(counts)]
    keys = {case.key for case in cases}
    at = data.draw(st.integers(0, len(cases)))
    before, _ = judge(Circuit(), RULES, cases[:at], keys, NOON)
    one_by_one, refused_alone = before, list[str]()
    for case in cases[at:]:
        one_by_one, refused = judge(one_by_one, RULES, [case], keys, NOON)
        refused_alone += refused
        if refused:
            break
    together, refused_together = judge(before, RULES, cases[at:], keys, NOON)
    assert list(refused_together[:1]) == refused_alone
    assert together == one_by_one


def test_a_burst_opens_it_at_its_first_slice_whatever_came_before() -> None:
    sound = [AttemptResult(f"orders@{n:07d}", 200_000) for n in range(5)]
    circuit, _ = judge(Circuit(), RULES, sound, {one.key for one in sound}, NOON)
    circuit, refused = judge(
        circuit, RULES, [AttemptResult("orders@0000005", 200_000, 150_000)], {"orders@0000005"}, NOON
    )
    assert (circuit.state, refused) == ("open", ("orders@0000005",))
    assert "150,000 of 200,000 records of orders@0000005" in circuit.text


def test_many_small_slices_open_it_together_and_a_few_records_do_not() -> None:
    poison = [AttemptResult(f"orders@{n:07d}", 30, 30) for n in range(4)]
    keys = {one.key for one in poison}
    circuit, refused = judge(Circuit(), RULES, poison[:3], keys, NOON)
    assert (circuit.state, refused) == ("closed", ())
    circuit, refused = judge(circuit, RULES, poison[3:], keys, NOON)
    assert (circuit.state, refused) == ("open", ("orders@0000003",))


def test_an_old_slice_that_is_materialised_again_is_refused_and_opens_nothing() -> None:
    again = [AttemptResult("orders@0000001", 500, 400)]
    assert judge(Circuit(), RULES, again, set(), NOON) == (Circuit(), ("orders@0000001",))
    both = [*again, AttemptResult("orders@0000002", 500)]
    assert judge(Circuit(), RULES, both, {"orders@0000002"}, NOON) == (Circuit(), ("orders@0000001",)), "none counts"


def test_one_probe_after_the_cool_down_and_the_next_only_when_it_is_lost() -> None:
    circuit = Circuit(since=NOON, why="poison", until=NOON + minutes(5))
    assert admit(circuit, ["a"], NOON + minutes(4.9)) is None
    assert admit(circuit, ["a", "b"], NOON + minutes(5)) is None, "a run of several is no probe"
    probing = admit(circuit, ["a"], NOON + minutes(5))
    assert probing is not None
    assert (probing.state, probing.probe) == ("half-open", "a")
    assert admit(probing, ["b"], NOON + minutes(34)) is None
    assert admit(probing, ["a"], NOON + minutes(34)) == probing, "its run may have been killed and come again"
    lost = admit(probing, ["b"], NOON + minutes(36))
    assert lost is not None
    assert lost.probe == "b"
    again = fail(lost, RULES, ["b"], set(), "boom", NOON + minutes(40))
    assert (again.state, again.since, again.until) == ("open", NOON, NOON + minutes(50))


def test_what_nothing_fixes_is_probed_less_and_less_often_and_still_twice_an_hour() -> None:
    circuit, now, waits = fail(Circuit(), Breaker(failures=1), ["a"], {"a"}, "boom", NOON), NOON, []
    for _ in range(6):
        assert circuit.until is not None
        waits.append(circuit.until - now)
        now = circuit.until
        probing = admit(circuit, ["a"], now)
        assert probing is not None
        circuit = fail(probing, RULES, ["a"], set(), "boom", now)
    assert waits == [minutes(5), minutes(10), minutes(20), minutes(30), minutes(30), minutes(30)]
    assert complete_probe(replace(circuit, probe="a"), "a", now) == Circuit(since=now), "the count begins again"
    rare = Breaker(failures=1, cool_down=timedelta(hours=2))
    assert fail(replace(circuit, probe="a"), rare, ["a"], set(), "boom", now).until == now + timedelta(hours=2)


# The state in the ledger


def test_the_state_is_one_for_all_processes_and_survives_them(ledger: Ledger, url: str) -> None:
    assert ledger.breakers.read_circuit("orders") == Circuit()
    opened(ledger)
    assert Ledger(url).breakers.read_circuit("orders") == OPEN
    assert Ledger(url).breakers.read_circuit("payments") == Circuit()


def test_of_many_that_come_at_once_one_is_the_probe(url: str, ledger: Ledger) -> None:
    opened(ledger)
    probes: list[str] = []

    def come(key: str) -> None:
        def decide(circuit: Circuit, _: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
            found = admit(circuit, [key], NOON + minutes(6))
            if found is None:
                raise BreakerOpenError("open", remedy="wait")
            return found, ()

        try:
            Ledger(url, wait_seconds=30).breakers.update("orders", (), decide)
        except BreakerOpenError:
            return
        probes.append(key)

    comers = [threading.Thread(target=come, args=(f"orders@{n:07d}",)) for n in range(8)]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join()
    assert [ledger.breakers.read_circuit("orders").probe] == probes


def test_a_change_that_another_made_first_is_recreated(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL nothing locks the row while the change is worked out: the revision shows it."""
    opened(ledger)
    with ledger.database.writing() as connection:
        assert breakers._keep(connection, "stream orders", Circuit(since=NOON), 1)
        assert not breakers._keep(connection, "stream orders", OPEN, 1)
    seen: list[Circuit] = []
    stored, first = breakers._keep, iter([False])
    monkeypatch.setattr(breakers, "_keep", lambda *given: next(first, True) and stored(*given))

    def decide(circuit: Circuit, _: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
        seen.append(circuit)
        return replace(circuit, window=(*circuit.window, AttemptResult("a", 1))), ()

    ledger.breakers.update("orders", (), decide)
    assert len(seen) == 2
    assert ledger.breakers.read_circuit("orders") == Circuit((AttemptResult("a", 1),), since=NOON)


# What a run may decide


@pytest.fixture
def work(ledger: Ledger, tmp_path: Path) -> Callable[..., Work]:
    """Work without Spark and Kafka: the breaker is asked before either is touched."""

    def make(*slices: Slice, run: str = "run", **rules: Any) -> Work:
        nothing: Any = None
        stream = replace(STREAM, breaker=Breaker(**rules))
        lake = Lake(str(tmp_path / "lake"))
        return Work(stream, slices, nothing, lake, ledger, nothing, lambda _: None, run=run)

    return make


def counted(**slices: tuple[int, int]) -> dict[str, dict[str, int]]:
    """The numbers of a split: raw records and rejects, by the slice's ordinal."""
    return {f"orders@{int(name[1:]):07d}": {"raw": raw, "rejects": rejects} for name, (raw, rejects) in slices.items()}


RETRIED = a_slice(1, 100, STREAM.tier_topics[0])


def test_a_slice_over_the_limit_is_refused_with_all_of_its_run(ledger: Ledger, work: Callable[..., Work]) -> None:
    ours = work(ONE, TWO)
    with pytest.raises(RejectsOverLimitError, match="120 of 200 records of orders@0000002") as raised:
        ensure_within_limit(ours, [TWO, ONE], {}, counted(s1=(300, 3), s2=(200, 120)))
    assert "none of the 2 slices" in str(raised.value)
    assert "highwater accept-rejects orders@0000002" in str(raised.value)
    assert ledger.breakers.read_circuit("orders").state == "open"
    assert [one.slice_key for one in ledger.breakers.list_refused("orders")] == [TWO.key]
    assert ledger.breakers.read_judgements([ONE.key]) == {}, (
        "a sound slice of a refused run is judged when it is decided"
    )


def test_while_it_is_open_nothing_is_decided_but_the_probe(ledger: Ledger, work: Callable[..., Work]) -> None:
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, counted(s1=(100, 100)))
    for slices in ([TWO], [TWO, THREE], [RETRIED]):
        with pytest.raises(BreakerOpenError, match="100 of 100 records of orders@0000001"):
            ensure_admitted(work(*slices), slices)
    ensure_admitted(work(ONE), [])
    opened(ledger, replace(OPEN, until=datetime.now(UTC)))
    with pytest.raises(BreakerOpenError):
        ensure_admitted(work(RETRIED), [RETRIED])
    ensure_admitted(work(TWO), [TWO])
    assert ledger.breakers.read_circuit("orders").probe == TWO.key
    with pytest.raises(BreakerOpenError):
        ensure_admitted(work(THREE), [THREE])
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(TWO), [TWO], {}, counted(s2=(3, 2)))
    found = ledger.breakers.read_circuit("orders")
    assert (found.state, found.since) == ("open", NOON), "few records are judged, since the last ones were rejected"


def test_only_first_attempts_count(ledger: Ledger, work: Callable[..., Work]) -> None:
    """Neither what comes back through a tier, nor what is materialised again, nor a step's next try."""
    ensure_within_limit(work(RETRIED), [RETRIED], {}, {RETRIED.key: {"raw": 500, "rejects": 500}})
    committed = {ONE.key: SliceCommit(ONE, 1, 400, {"rejects": 0})}
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], committed, counted(s1=(500, 400)))
    for _ in range(3):
        ensure_within_limit(work(TWO), [TWO], {}, counted(s2=(99, 40)))
    found = ledger.breakers.read_circuit("orders")
    assert found.window == (AttemptResult(TWO.key, 99, 40),)
    assert found.closed


def test_of_a_slice_that_is_materialised_again_only_new_rejects_count(work: Callable[..., Work]) -> None:
    """Its published rejects stay rejects: they flood nothing again."""
    committed = {ONE.key: SliceCommit(ONE, 1, 50, {"rejects": 400})}
    ensure_within_limit(work(ONE), [ONE], committed, counted(s1=(500, 450)))


def test_an_accepted_slice_passes_and_changes_nothing(ledger: Ledger, work: Callable[..., Work]) -> None:
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, counted(s1=(100, 100)))
    before = ledger.breakers.read_circuit("orders")
    assert ledger.breakers.accept("orders", [AcceptedSlice(ONE.key, "test data", "ann", NOON)]) == 1
    again = AcceptedSlice(ONE.key, "again", "bob", NOON + minutes(1))
    assert ledger.breakers.accept("orders", [again]) == 0
    assert ledger.breakers.read_accepted_slices([ONE.key, TWO.key]) == {ONE.key: again}, (
        "what is given again counts from then"
    )
    ensure_admitted(work(ONE), [ONE])
    ensure_within_limit(work(ONE), [ONE], {}, counted(s1=(100, 100)))
    assert ledger.breakers.read_circuit("orders") == before
    assert ledger.breakers.list_refused("orders") == []
    with pytest.raises(BreakerOpenError, match="orders@0000002 may not"):
        ensure_admitted(work(ONE, TWO), [ONE, TWO])


def test_a_committed_slice_is_no_probe(ledger: Ledger, work: Callable[..., Work]) -> None:
    """A backfill that was requested while it was half-open became the probe, and showed nothing about new records."""
    ready = replace(OPEN, until=datetime.now(UTC))
    opened(ledger, ready)
    with pytest.raises(BreakerOpenError):
        ensure_admitted(work(ONE), [ONE], {ONE.key})
    assert ledger.breakers.read_circuit("orders") == ready
    ensure_admitted(work(TWO), [TWO], {ONE.key})
    assert ledger.breakers.read_circuit("orders").probe == TWO.key


def test_what_was_sent_is_asked_of_every_slice_and_before_the_breaker(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    """A slice whose events the lake lost does not be there, and the breaker kept how it would have been split."""
    asked: list[Sequence[str]] = []

    def ensure_no_retraction(keys: Sequence[str]) -> None:
        asked.append(keys)
        raise RetractionError("sent", remedy="fix the rule")

    messages = counted(s1=(100, 100), s2=(100, 0))
    committed = CommittedSlices({TWO.key: SliceCommit(TWO, 1, 100, {"rejects": 0})}, 0)
    made: Any = SimpleNamespace(work=work(ONE, TWO), measured=messages, ensure_no_retraction=ensure_no_retraction)
    with pytest.raises(RetractionError):
        slice_classification._ensure_decidable(made, committed, [ONE, TWO], messages)
    assert asked == [[ONE.key, TWO.key]]
    assert ledger.breakers.read_judgements([ONE.key, TWO.key]) == {}
    assert ledger.breakers.read_circuit("orders") == Circuit()


def fails(work: Work, error: Exception, tries: int = 3, table: str = "events") -> None:
    with pytest.raises(type(error)), report_to_breaker(work, table, tries):
        raise error


def test_three_failures_in_a_row_open_it(ledger: Ledger, work: Callable[..., Work]) -> None:
    broken = UnbalancedError("rows were changed", remedy="restore them")
    fails(work(ONE), broken, tries=0)
    fails(work(ONE), broken, tries=0)
    fails(work(TWO), ValueError("secret"), tries=2)
    assert len(ledger.breakers.read_circuit("orders").window) == 1, (
        "a failed slice counts once, a try that is not the last not"
    )
    fails(work(TWO), ValueError("secret"))
    ensure_within_limit(work(THREE, run="another"), [THREE], {}, counted(s3=(10, 0)))
    fails(work(THREE, run="another"), broken, table="dlq")
    found = ledger.breakers.read_circuit("orders")
    assert found.state == "open", "it failed in the run of its first attempt, though after its decision"
    assert "3 runs up to orders@0000003 failed in a row" in found.text


def test_a_run_of_several_slices_is_one_failure(ledger: Ledger, work: Callable[..., Work]) -> None:
    """One error of a backlog's run opened it at once."""
    slices = [a_slice(n, 100) for n in range(1, 10)]
    broken = UnbalancedError("rows were changed", remedy="restore them")
    for number, at in enumerate((0, 3, 6)):
        assert ledger.breakers.read_circuit("orders").closed
        some = slices[at : at + 3]
        for table in ("rejects", "dlq"):  # tried again in the same run, after its decision
            messages = {slice_.key: {"raw": 10, "rejects": 0} for slice_ in some}
            ensure_within_limit(work(*some, run=f"run {number}"), some, {}, messages)
            fails(work(*some, run=f"run {number}"), broken, table=table)
    found = ledger.breakers.read_circuit("orders")
    assert found.state == "open"
    assert f"3 runs up to {slices[-1].key} failed in a row" in found.text


def test_what_says_nothing_of_the_stream_is_no_failure(ledger: Ledger, work: Callable[..., Work]) -> None:
    away = DependencyAwayError("the reference table is away", remedy="wait")
    for slice_ in (ONE, TWO, THREE, FOUR):
        fails(work(slice_), away)
        fails(work(slice_), RetractionError("events were sent, and would be rejected", remedy="fix the rule"))
        fails(work(slice_), PermanentError("expired", remedy="look"), table="raw")
    ensure_within_limit(work(ONE), [ONE], {}, counted(s1=(10, 0)))
    fails(work(ONE, run="a backfill"), PermanentError("broken", remedy="look"))
    found = ledger.breakers.read_circuit("orders")
    assert found.closed
    assert not any(one.failed for one in found.window)


def test_a_slice_committed_before_there_was_a_breaker_is_no_first_attempt(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    ours = work(ONE, failures=1)
    commit_empty(ours.lake, [ONE], "events")
    fails(ours, PermanentError("broken", remedy="look"))
    assert ledger.breakers.read_circuit("orders") == Circuit()


def test_the_probe_closes_it_when_it_is_committed_in_all_tables(ledger: Ledger, work: Callable[..., Work]) -> None:
    ours = work(ONE)
    opened(ledger, replace(OPEN, probe=ONE.key))
    commit_empty(ours.lake, [ONE], "raw", "events")
    for table in ("events", "rejects", "current"):
        with report_to_breaker(ours, table, 0):
            commit_empty(ours.lake, [ONE], *([table] if table != "events" else []))
        assert ledger.breakers.read_circuit("orders").closed == (table == "current")


def test_a_probe_that_fails_begins_the_cool_down_again_whatever_failed(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    opened(ledger, replace(OPEN, probe=ONE.key))
    fails(work(ONE), DependencyAwayError("Spark is away", remedy="wait"), tries=2)
    assert ledger.breakers.read_circuit("orders").probe == ONE.key, "the step is tried again"
    fails(work(ONE), DependencyAwayError("Spark is away", remedy="wait"))
    found = ledger.breakers.read_circuit("orders")
    assert found.probe is None
    assert not found.can_admit_probe(datetime.now(UTC))
    assert "the probe orders@0000001 failed: Spark is away" in found.text


# Requests


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


@pytest.fixture
def repairing(tmp_path: Path) -> Any:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        made = Repairing(tmp_path, instance, [ONE, TWO, THREE, FOUR])
        commit_empty(made.lake, [ONE, TWO, THREE], "raw")
        yield made


def test_repair_stops_what_is_in_raw_and_reads_on(repairing: Repairing) -> None:
    opened(repairing.ledger, replace(OPEN, until=datetime.now(UTC) + minutes(5)))
    requests, tick = repairing.tick()
    assert requests == [([FOUR.key], True, "repair")]
    [run] = stream_ticks.build_run_requests(STREAM, tick.requests)
    assert run.asset_selection == [build_table_key(STREAM, "raw")]
    assert "the breaker is open since 2026-03-01 12:00:00 UTC: poison" in tick.message
    assert "3 wait for the breaker" in tick.message


def test_repair_asks_for_one_probe_and_then_for_the_rest(repairing: Repairing) -> None:
    opened(repairing.ledger)
    requests, _ = repairing.tick()
    assert requests == [([FOUR.key], True, "repair"), ([ONE.key], False, "probe")]
    opened(repairing.ledger, Circuit(since=datetime.now(UTC)))
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
        opened(repairing.ledger)
        probes += [key for keys, _, purpose in repairing.tick()[0] if purpose == "probe" for key in keys]
        repairing.fail(probes[-1])
    rest = [TWO.key, THREE.key] if exhausted else [TWO.key, THREE.key, ONE.key]
    assert probes == [*rest, *rest, *rest][:6]


def test_repair_closes_what_has_no_slice_left_to_probe(repairing: Repairing) -> None:
    """What kept it open was let through, and nothing comes in: retries would wait for ever."""
    commit_empty(repairing.lake, [ONE, TWO, THREE, FOUR], "raw", "events")
    opened(repairing.ledger, replace(OPEN, until=datetime.now(UTC) + minutes(5)))
    repairing.tick()
    assert not repairing.ledger.breakers.read_circuit("orders").closed, "not before it has cooled down"
    opened(repairing.ledger)
    repairing.tick()
    assert repairing.ledger.breakers.read_circuit("orders").closed


def test_repair_asks_for_an_accepted_slice_however_often_it_failed(repairing: Repairing) -> None:
    opened(repairing.ledger, replace(OPEN, until=datetime.now(UTC) + minutes(5)))
    repairing.fail_often(ONE.key)
    accepted = AcceptedSlice(ONE.key, "test data", "ann", datetime.now(UTC) + timedelta(seconds=1))
    repairing.ledger.breakers.accept("orders", [accepted])
    assert ([ONE.key], False, "repair") in repairing.tick()[0]


def test_repair_asks_for_all_when_it_closed_however_often_they_failed(repairing: Repairing) -> None:
    """Six probes that fail in half an hour used up what a day allows."""
    repairing.fail_often(ONE.key)
    opened(repairing.ledger, Circuit(since=datetime.now(UTC) + timedelta(seconds=1)))
    assert repairing.tick()[0] == [([ONE.key, TWO.key, THREE.key, FOUR.key], False, "repair")]


def test_the_planner_and_retries_ask_for_raw_alone_while_it_is_open() -> None:
    from highwater.orchestration.sensing.run_requests import build_first_requests

    [request] = build_first_requests(["a", "b"], ["a", "b"], 20, raw_alone=True)
    [run] = stream_ticks.build_run_requests(STREAM, [request])
    assert run.asset_selection == [build_table_key(STREAM, "raw")]
    assert stream_ticks.build_run_requests(STREAM, build_first_requests(["a"], ["a"], 20))[0].asset_selection is None


# What a person sees and decides


def test_the_breaker_is_an_alert_while_it_is_not_closed(ledger: Ledger) -> None:
    nothing: Any = None
    closed = alert_conditions._measure_breaker(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    opened(ledger)
    open_ = alert_conditions._measure_breaker(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    assert closed is not None
    assert open_ is not None
    assert (closed.over, open_.over) == (False, True)
    assert "open since 2026-03-01 12:00:00 UTC: poison" in open_.value
    assert alert_conditions._measure_breaker in alert_conditions.CONDITIONS


@pytest.mark.usefixtures("impatient")
def test_status_reports_the_state_and_the_refused_slices(ledger: Ledger, work: Callable[..., Work]) -> None:
    from dev.processes import LOOPBACK, free_port

    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, counted(s1=(100, 60)))
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    assert any("breaker open since" in line for line in status.lines)
    assert any("orders@0000001 is refused: 60 of 100" in line for line in status.lines)
    plain = status.to_plain()
    assert plain["breaker"]["state"] == "open"
    assert plain["refused"] == [{"slice": ONE.key, "records": 100, "rejects": 60}]


def test_a_person_lets_a_slice_through_under_a_name(ledger: Ledger, url: str, work: Callable[..., Work]) -> None:
    ledger.add([ONE, TWO])
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(ONE), [ONE], {}, counted(s1=(100, 60)))
    environment = {"HIGHWATER_LEDGER_URL": url}

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["accept-rejects", *arguments], env=environment)

    dry = run(ONE.key)
    assert dry.exit_code == 0, dry.output
    assert "refused" in dry.output
    assert "60 of 100 records" in dry.output
    assert ledger.breakers.read_accepted_slices([ONE.key]) == {}
    assert "needs the name of the person" in run(ONE.key, "--yes", "--by", "").output
    assert run("orders@0000099", "--yes", "--by", "ann").exit_code == 2
    done_ = run(ONE.key, TWO.key, "--yes", "--by", "ann", "--because", "test data")
    assert done_.exit_code == 0, done_.output
    found = ledger.breakers.read_accepted_slices([ONE.key, TWO.key])
    assert {key: (one.accepted_by, one.because) for key, one in found.items()} == {
        ONE.key: ("ann", "test data"),
        TWO.key: ("ann", "test data"),
    }


def split(key: str, raw: int, **reasons: int) -> dict[str, dict[str, int]]:
    """The numbers of a split of one slice."""
    by_reason = {f"rejects_{reason}": count for reason, count in reasons.items()}
    return {key: {"raw": raw, "rejects": sum(reasons.values()), **by_reason}}


def accept(ledger: Ledger, *reasons: str, from_slice: str = TWO.key, **asked: Any) -> list[str]:
    from highwater.orchestration.operations.accepting_rejects import AcceptReasonsRequest, accept_reasons

    lines: list[str] = []
    given = {"from_slice": from_slice, "dry_run": False, "by": "ann", "because": "foreign keys", **asked}
    accept_reasons(ledger, STREAM, AcceptReasonsRequest(reasons, **given), NOON, lines.append)
    return lines


def test_an_accepted_reason_opens_the_breaker_no_more_and_others_do(ledger: Ledger, work: Callable[..., Work]) -> None:
    """Each slice of a stream that nobody could fix needed a person, and a probe that was refused again."""
    ledger.add([ONE, TWO, THREE, FOUR])
    accept(ledger, "malformed")
    ensure_within_limit(work(TWO), [TWO], {}, split(TWO.key, 200, malformed=200))
    ensure_within_limit(work(THREE), [THREE], {}, split(THREE.key, 300, malformed=200, invalid=10))
    assert ledger.breakers.read_circuit("orders").closed
    with pytest.raises(RejectsOverLimitError, match="60 of 100 records of orders@0000004") as raised:
        ensure_within_limit(work(FOUR), [FOUR], {}, split(FOUR.key, 1_100, malformed=1_000, invalid=60))
    assert "records rejected for malformed do not count" in str(raised.value)
    assert ledger.breakers.read_circuit("orders").state == "open"
    # The slice before the first accepted one is judged as before.
    with pytest.raises(RejectsOverLimitError, match="200 of 200 records of orders@0000001"):
        ensure_within_limit(work(ONE), [ONE], {}, split(ONE.key, 200, malformed=200))


def test_of_a_slice_that_is_materialised_again_new_rejects_of_other_reasons_count(
    ledger: Ledger, work: Callable[..., Work]
) -> None:
    ledger.add([TWO])
    accept(ledger, "malformed")
    before = {TWO.key: SliceCommit(TWO, 1, 0, {"rejects": 150, "rejects_malformed": 100, "rejects_invalid": 50})}
    ensure_within_limit(work(TWO), [TWO], before, split(TWO.key, 300, malformed=150, invalid=124))
    with pytest.raises(RejectsOverLimitError, match="75 of 150 records"):
        ensure_within_limit(work(TWO), [TWO], before, split(TWO.key, 300, malformed=150, invalid=125))


def test_a_revoked_reason_opens_the_breaker_again(ledger: Ledger, work: Callable[..., Work]) -> None:
    ledger.add([TWO, THREE])
    accept(ledger, "malformed")
    assert accept(ledger, "malformed", revoke=True, from_slice="", by="bob")[-1] == "malformed: revoked"
    assert accept(ledger, "malformed", revoke=True, from_slice="")[-1] == "malformed: it was not accepted"
    with pytest.raises(RejectsOverLimitError):
        ensure_within_limit(work(THREE), [THREE], {}, split(THREE.key, 200, malformed=200))
    accept(ledger, "malformed", by="cat")
    assert ledger.breakers.read_accepted_reasons("orders")["malformed"].accepted_by == "cat"


@pytest.mark.usefixtures("impatient")
def test_many_refused_slices_are_one_alert_with_one_command(ledger: Ledger, work: Callable[..., Work]) -> None:
    """Status and alert named a command for each slice, and the alert ended with each probe that was sound."""
    from dev.processes import LOOPBACK, free_port

    nothing: Any = None
    slices = [a_slice(n, 200) for n in range(1, 41)]
    ledger.add(slices)
    command = "highwater accept-rejects orders --reason malformed --from orders@0000001"

    def breaker() -> Any:
        return alert_conditions._measure_breaker(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))

    for slice_ in slices:
        with pytest.raises(RejectsOverLimitError):
            ensure_within_limit(work(slice_), [slice_], {}, split(slice_.key, 200, malformed=150, invalid=20))
    found = breaker()
    assert (found.what, found.over) == ("circuit breaker", True)
    assert "40 slices are refused" in found.value
    assert f"{command} accepts all of them" in found.remedy
    ledger.breakers.update("orders", (), lambda *_: (Circuit(since=NOON), ()))
    assert breaker().over, "a probe that is sound fixes none of those that are refused"

    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    lines = [line for line in status.lines if "refuse" in line]
    assert len(lines) == 7, "five slices, how many more there are, and the command for all"
    assert lines[-1].endswith(command)
    assert len(status.to_plain()["refused"]) == 40

    ledger.breakers.update("orders", (), lambda *_: (replace(OPEN, until=NOON + minutes(30), lost=5), ()))
    accept(ledger, "malformed", from_slice="orders@0000001")
    assert ledger.breakers.read_circuit("orders").can_admit_probe(NOON), "the cool-down of before ends"
    for slice_ in slices:
        ensure_within_limit(work(slice_), [slice_], {}, split(slice_.key, 200, malformed=150, invalid=20))
    ledger.breakers.update("orders", (), lambda *_: (Circuit(since=NOON), ()))
    assert not breaker().over
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    [line] = [line for line in status.lines if "are accepted" in line]
    assert "rejects for malformed are accepted from orders@0000001 on, by ann at 2026-03-01 12:00 UTC: foreign" in line
    assert "--reason malformed --revoke ends that" in line
    assert status.to_plain()["accepted_reasons"][0]["because"] == "foreign keys"


def _judged(judged: Judgement, circuit: Circuit, _: object) -> tuple[Circuit, list[Judgement]]:
    return circuit, [judged]


def test_a_slice_that_was_abandoned_is_requested_when_its_reason_is_accepted(repairing: Repairing) -> None:
    for refused in (ONE, TWO):
        repairing.fail_often(refused.key)
        judged = Judgement(refused.key, "orders", "run", NOON, 200, 200, refused=True, reasons={"malformed": 200})
        repairing.ledger.breakers.update("orders", (), partial(_judged, judged))
    assert repairing.tick()[0] == [([THREE.key, FOUR.key], False, "repair")]
    accepted = AcceptedReason("malformed", TWO.key, TWO.ordinal, "", "ann", datetime.now(UTC) + timedelta(seconds=1))
    repairing.ledger.breakers.accept_reason("orders", accepted)
    asked = sorted(keys for keys, _, _ in repairing.tick()[0])
    assert asked == [[TWO.key], [THREE.key, FOUR.key]], "the first one comes before the slice that was named"


@pytest.mark.parametrize(
    ("reasons", "asked", "reported"),
    [
        (["mangled"], {}, "rejects for mangled cannot be accepted"),
        (["unresolved"], {}, "rejects for unresolved cannot be accepted"),
        (["malformed"], {"from_slice": ""}, "no first slice is named"),
        (["malformed"], {"from_slice": RETRIED.key}, "is no slice of orders"),
        (["malformed"], {"from_slice": "orders@0000099"}, "orders@0000099"),
        (["malformed"], {"by": ""}, "needs the name of the person"),
    ],
)
def test_a_reason_that_cannot_be_accepted_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, reasons: list[str], asked: dict[str, Any], reported: str
) -> None:
    """`unresolved` holds slices here: these wait whatever the breaker does."""
    holding = {**ON_REJECT, "unresolved": OnReject.HOLD}
    monkeypatch.setattr("tests.test_breaker.STREAM", replace(STREAM, on_reject=holding))
    ledger.add([TWO, RETRIED])
    with pytest.raises((ConfigurationError, UnknownSliceError), match=reported):
        accept(ledger, *reasons, **asked)
    assert ledger.breakers.read_accepted_reasons("orders") == {}


def test_command_and_job_accept_a_reason_for_a_stream(
    ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.add([ONE])
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["accept-rejects", *arguments])

    ask = ("orders", "--reason", "malformed", "--from", ONE.key)
    dry = run(*ask)
    assert (dry.exit_code, "add --yes --by NAME" in dry.output) == (0, True), dry.output
    assert ledger.breakers.read_accepted_reasons("orders") == {}
    assert run(*ask, "--yes", "--by", "ann").exit_code == 0
    assert [*ledger.breakers.read_accepted_reasons("orders")] == ["malformed"]
    assert run("orders", "--reason", "malformed", "--revoke", "--yes", "--by", "ann").exit_code == 0
    assert ledger.breakers.read_accepted_reasons("orders") == {}
    for wrong in (("orders", "--reason", "malformed"), (*ask, "--revoke"), (ONE.key, "--from", ONE.key)):
        assert run(*wrong).exit_code == 2
    job = build_defs(streams=[STREAM]).get_job_def("accept_rejects")
    asked = {
        "stream": "orders",
        "reasons": ["invalid"],
        "from_slice": ONE.key,
        "dry_run": False,
        "by": "bob",
        "because": "test data",
    }
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=asked).success
    assert ledger.breakers.read_accepted_reasons("orders")["invalid"].accepted_by == "bob"


def test_the_job_does_what_the_command_does(ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.add([ONE])
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)
    job = build_defs(streams=[STREAM]).get_job_def("accept_rejects")
    asked = {"stream": "orders", "slices": [ONE.key], "dry_run": False, "by": "ann", "because": "test data"}
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=asked).success
    assert ledger.breakers.read_accepted_slices([ONE.key])[ONE.key].accepted_by == "ann"


def test_what_cannot_be_accepted_is_reported(ledger: Ledger) -> None:
    from highwater.orchestration.operations.accepting_rejects import AcceptSlicesRequest, accept_slices

    ledger.add([ONE])
    for asked, stream, error in (
        (AcceptSlicesRequest([ONE.key], dry_run=False), "orders", ConfigurationError),
        (AcceptSlicesRequest([]), "orders", ConfigurationError),
        (AcceptSlicesRequest([ONE.key]), "payments", ConfigurationError),
        (AcceptSlicesRequest(["orders@0000009"]), "orders", UnknownSliceError),
    ):
        with pytest.raises(error):
            accept_slices(ledger, [stream], asked, NOON, lambda _: None)


@pytest.mark.parametrize(
    "rules",
    [
        {"reject_ratio": 0.0},
        {"reject_ratio": 1.1},
        {"min_records": 0},
        {"slices": 0},
        {"failures": 0},
        {"cool_down": minutes(-1)},
    ],
)
def test_limits_that_make_no_sense_are_refused(rules: dict[str, Any]) -> None:
    from highwater.errors import DeclarationError

    with pytest.raises(DeclarationError, match="breaker"):
        replace(STREAM, breaker=Breaker(**rules))
