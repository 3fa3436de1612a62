"""The circuit breaker of a stream: when its slices may be decided."""

# Closed: slices are classified. A slice with too many rejects is refused and opens the breaker, and so do failures in
# a row. Open: no slice is classified until the cool-down ends. Then one slice is the probe: if it is classified, the
# breaker closes; if it is refused or fails, a cool-down of twice the length begins.

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from highwater.declaration import Breaker

CLOSED = "closed"
OPEN = "open"
HALF_OPEN = "half-open"
# Each probe that fails or is refused doubles the cool-down, up to this limit or the declared one if that is longer.
LONGEST_COOL_DOWN = timedelta(minutes=30)
# A probe that came to no end, because its process was killed and nobody took the slice up, makes room for another. The
# largest slices take minutes.
LONGEST_PROBE = timedelta(minutes=30)


@dataclass(frozen=True)
class AttemptResult:
    """The counted result of an attempt at a slice.

    Args:
        key: the slice.
        records: number of its raw records, tombstones included.
        rejects: number of records that were rejected, or would have been.
        failed: whether it ended in an error of another kind.
    """

    key: str
    records: int = 0
    rejects: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Circuit:
    """The state of a breaker.

    Args:
        window: the newest first attempts since it closed, the oldest first; empty while it is not closed.
        since: when it was opened, or closed last; None for one that never was anything but closed.
        why: the reason for opening; None while it is closed.
        until: when the cool-down ends, or when the probe counts as lost; None while it is closed.
        probe: the slice that is let through alone.
        lost: probes in a row that failed or were refused since it opened.
    """

    window: tuple[AttemptResult, ...] = ()
    since: datetime | None = None
    why: str | None = None
    until: datetime | None = None
    probe: str | None = None
    lost: int = 0

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        if self.until is None:
            return CLOSED
        return OPEN if self.probe is None else HALF_OPEN

    @property
    def closed(self) -> bool:
        """Whether slices are decided as they come."""
        return self.until is None

    def can_admit_probe(self, now: datetime) -> bool:
        """Whether the next slice that comes alone is let through."""
        return self.until is not None and now >= self.until

    @property
    def text(self) -> str:
        """The state in a sentence."""
        if self.until is None:
            records, rejects = (sum(getattr(one, name) for one in self.window) for name in ("records", "rejects"))
            failed = sum(one.failed for one in self.window)
            return (
                f"closed; of the last {len(self.window)} slices {rejects:,} of {records:,} records rejected, "
                f"{failed} failed"
            )
        what = f"{self.state} since {self.since:%Y-%m-%d %H:%M:%S} UTC: {self.why}"
        if self.probe is not None:
            return f"{what}; {self.probe} is the probe"
        return f"{what}; one slice is the probe from {self.until:%H:%M:%S} on"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "state": self.state,
            "window": [vars(one) for one in self.window],
            "since": None if self.since is None else self.since.isoformat(),
            "why": self.why,
            "until": None if self.until is None else self.until.isoformat(),
            "probe": self.probe,
            "lost": self.lost,
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Circuit:
        """The reverse of `to_plain`."""
        return cls(
            tuple(AttemptResult(**one) for one in plain["window"]),
            _parse_time(plain["since"]),
            plain["why"],
            _parse_time(plain["until"]),
            plain["probe"],
            plain.get("lost", 0),
        )


def _parse_time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def admit_slices(circuit: Circuit, keys: Sequence[str], now: datetime) -> Circuit | None:
    """Whether slices may be decided: the breaker afterwards, in which one may be the probe; None if they have to wait.

    Args:
        circuit: the breaker.
        keys: all slices of the main topic that a run is about to decide together.
        now: the time, in UTC.
    """
    if circuit.closed or not keys or list(keys) == [circuit.probe]:
        return circuit
    if len(keys) > 1 or not circuit.can_admit_probe(now):
        return None
    return replace(circuit, probe=keys[0], until=now + LONGEST_PROBE)


def evaluate_slices(
    circuit: Circuit, rules: Breaker, cases: Sequence[AttemptResult], first: Collection[str], now: datetime
) -> tuple[Circuit, tuple[str, ...]]:
    """The outcome of slices that are decided together: the breaker afterwards, and the slices that are refused.

    If one is refused, all of them are left undecided, and those that are sound are not counted.

    Only first attempts count, while the breaker is closed: they are judged together with those before them, and open
    it. All others are judged by themselves: an old slice that is materialised again says nothing of what comes in now.
    The probe is judged however few its records are, since so far they were rejected.

    Args:
        circuit: the breaker.
        rules: its limits.
        cases: the slices, in the order of their plan.
        first: the slices with their first attempt.
        now: the time, in UTC.
    """
    window, refused, why = circuit.window, [], None
    for case in cases:
        counted = circuit.closed and case.key in first and why is None
        if counted:
            window = (*window, case)[-_compute_window_length(rules) :]
        over = select_over_limit(
            window if counted else (case,), rules, 1 if case.key == circuit.probe else rules.min_records
        )
        if not over:
            continue
        refused.append(case.key)
        if counted or case.key == circuit.probe:
            why = _describe_shares(over)
    if why is not None:
        return open_circuit(circuit, rules, why, now), tuple(refused)
    return (circuit if refused else replace(circuit, window=window)), tuple(refused)


def select_over_limit(window: Sequence[AttemptResult], rules: Breaker, least: int) -> Sequence[AttemptResult]:
    """The fewest of the newest slices that are over the limit together; none if they are not.

    The newest by itself, it and the one before, and so on: sound slices of before do not hide a burst, and few records
    in each do not either.
    """
    for many in range(1, min(len(window), rules.slices) + 1):
        newest = window[-many:]
        records, rejects = sum(one.records for one in newest), sum(one.rejects for one in newest)
        if records >= least and rejects >= rules.reject_ratio * records:
            return newest
    return ()


def _describe_shares(over: Sequence[AttemptResult]) -> str:
    records, rejects = sum(one.records for one in over), sum(one.rejects for one in over)
    where = over[-1].key if len(over) == 1 else f"the {len(over)} slices up to {over[-1].key}"
    return f"{rejects:,} of {records:,} records of {where} were rejected"


def record_failure(
    circuit: Circuit, rules: Breaker, keys: Sequence[str], first: Collection[str], what: str, now: datetime
) -> Circuit:
    """The breaker after a run failed by an error of its own: one failure, however many slices it took.

    The one error of the batch names at most one slice, and says nothing about the others.

    Args:
        circuit: the breaker.
        rules: its limits.
        keys: the slices of the run, in the order of their plan.
        first: the slices with their first attempt.
        what: the error in a few words.
        now: the time, in UTC.
    """
    if circuit.probe in keys:
        return open_circuit(circuit, rules, f"the probe {circuit.probe} failed: {what}", now)
    counted = [key for key in keys if key in first]
    if not circuit.closed or not counted:
        return circuit
    others = [one for one in circuit.window if one.key not in counted]
    window = [*others, AttemptResult(counted[-1], failed=True)][-_compute_window_length(rules) :]
    last = window[-rules.failures :]
    if len(last) == rules.failures and all(one.failed for one in last):
        return open_circuit(
            circuit, rules, f"{len(last)} runs up to {last[-1].key} failed in a row, the last: {what}", now
        )
    return replace(circuit, window=tuple(window))


def open_circuit(circuit: Circuit, rules: Breaker, why: str, now: datetime) -> Circuit:
    """The breaker after what it may not bear; one that was open goes on with its first moment, and waits longer."""
    lost = 0 if circuit.closed else circuit.lost + 1
    longest = max(rules.cool_down, LONGEST_COOL_DOWN)
    wait = min(rules.cool_down * 2 ** min(lost, 20), longest)  # beyond that a timedelta overflows
    return Circuit(since=now if circuit.closed else circuit.since, why=why, until=now + wait, lost=lost)


def complete_probe(circuit: Circuit, key: str, now: datetime) -> Circuit:
    """The breaker after a slice is committed in all tables, or only its hold is in its way: the probe closes it."""
    return Circuit(since=now) if circuit.probe == key else circuit


def end_cool_down(circuit: Circuit, now: datetime) -> Circuit:
    """The breaker when its cool-down is over and no slice waits that could be the probe: closed.

    A person let the refused slices pass, or they were decided before it opened. The next slice is judged as always,
    and retries, which never are the probe, wait no longer.
    """
    return Circuit(since=now) if circuit.can_admit_probe(now) else circuit


def _compute_window_length(rules: Breaker) -> int:
    return max(rules.slices, rules.failures)
