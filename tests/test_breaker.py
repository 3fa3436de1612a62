"""The stream's breaker against a simple model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.breaker import (
    LONGEST_PROBE,
    AttemptResult,
    Circuit,
    admit_slices,
    complete_probe,
    evaluate_slices,
    record_failure,
)
from highwater.declaration import Breaker
from tests.helpers.repairing import (
    NOON,
    STREAM,
    minutes,
)

RULES = Breaker()


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
        found = admit_slices(circuit, [key], now)
        assert (found is not None) == model.may(key, now)
        if found is None:
            continue
        circuit, first = found, {key} - seen
        if how == "fail":
            counted = circuit.closed and bool(first)
            circuit = record_failure(circuit, RULES, [key], first, "boom", now)
            model.break_down(key, now)
            seen |= {key} if counted else set()
        elif how != "killed":
            counted = circuit.closed
            circuit, refused = evaluate_slices(circuit, RULES, [AttemptResult(key, records, rejects)], first, now)
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
    before, _ = evaluate_slices(Circuit(), RULES, cases[:at], keys, NOON)
    one_by_one, refused_alone = before, list[str]()
    for case in cases[at:]:
        one_by_one, refused = evaluate_slices(one_by_one, RULES, [case], keys, NOON)
        refused_alone += refused
        if refused:
            break
    together, refused_together = evaluate_slices(before, RULES, cases[at:], keys, NOON)
    assert list(refused_together[:1]) == refused_alone
    assert together == one_by_one


def test_a_burst_opens_it_at_its_first_slice_whatever_came_before() -> None:
    sound = [AttemptResult(f"orders@{n:07d}", 200_000) for n in range(5)]
    circuit, _ = evaluate_slices(Circuit(), RULES, sound, {one.key for one in sound}, NOON)
    circuit, refused = evaluate_slices(
        circuit, RULES, [AttemptResult("orders@0000005", 200_000, 150_000)], {"orders@0000005"}, NOON
    )
    assert (circuit.state, refused) == ("open", ("orders@0000005",))
    assert "150,000 of 200,000 records of orders@0000005" in circuit.text


def test_many_small_slices_open_it_together_and_a_few_records_do_not() -> None:
    poison = [AttemptResult(f"orders@{n:07d}", 30, 30) for n in range(4)]
    keys = {one.key for one in poison}
    circuit, refused = evaluate_slices(Circuit(), RULES, poison[:3], keys, NOON)
    assert (circuit.state, refused) == ("closed", ())
    circuit, refused = evaluate_slices(circuit, RULES, poison[3:], keys, NOON)
    assert (circuit.state, refused) == ("open", ("orders@0000003",))


def test_an_old_slice_that_is_materialised_again_is_refused_and_opens_nothing() -> None:
    again = [AttemptResult("orders@0000001", 500, 400)]
    assert evaluate_slices(Circuit(), RULES, again, set(), NOON) == (Circuit(), ("orders@0000001",))
    both = [*again, AttemptResult("orders@0000002", 500)]
    assert evaluate_slices(Circuit(), RULES, both, {"orders@0000002"}, NOON) == (Circuit(), ("orders@0000001",)), (
        "none counts"
    )


def test_one_probe_after_the_cool_down_and_the_next_only_when_it_is_lost() -> None:
    circuit = Circuit(since=NOON, why="poison", until=NOON + minutes(5))
    assert admit_slices(circuit, ["a"], NOON + minutes(4.9)) is None
    assert admit_slices(circuit, ["a", "b"], NOON + minutes(5)) is None, "a run of several is no probe"
    probing = admit_slices(circuit, ["a"], NOON + minutes(5))
    assert probing is not None
    assert (probing.state, probing.probe) == ("half-open", "a")
    assert admit_slices(probing, ["b"], NOON + minutes(34)) is None
    assert admit_slices(probing, ["a"], NOON + minutes(34)) == probing, "its run may have been killed and come again"
    lost = admit_slices(probing, ["b"], NOON + minutes(36))
    assert lost is not None
    assert lost.probe == "b"
    again = record_failure(lost, RULES, ["b"], set(), "boom", NOON + minutes(40))
    assert (again.state, again.since, again.until) == ("open", NOON, NOON + minutes(50))


def test_persistent_failures_are_probed_less_often_but_twice_an_hour() -> None:
    circuit, now, waits = record_failure(Circuit(), Breaker(failures=1), ["a"], {"a"}, "boom", NOON), NOON, []
    for _ in range(6):
        assert circuit.until is not None
        waits.append(circuit.until - now)
        now = circuit.until
        probing = admit_slices(circuit, ["a"], now)
        assert probing is not None
        circuit = record_failure(probing, RULES, ["a"], set(), "boom", now)
    assert waits == [minutes(5), minutes(10), minutes(20), minutes(30), minutes(30), minutes(30)]
    assert complete_probe(replace(circuit, probe="a"), "a", now) == Circuit(since=now), "the count begins again"
    rare = Breaker(failures=1, cool_down=timedelta(hours=2))
    failed = record_failure(replace(circuit, probe="a"), rare, ["a"], set(), "boom", now)
    assert failed.until == now + timedelta(hours=2)


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
