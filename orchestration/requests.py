"""Which slices are requested, in which runs: decisions over plain values.

What belongs here: cutting keys into ranges, run keys and tags, and what repair asks for again. What does not: Dagster's
instance, the ledger or the lake; the sensors read those and hand the values in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

RANGE_START = "dagster/asset_partition_range_start"
RANGE_END = "dagster/asset_partition_range_end"
PARTITION = "dagster/partition"
ATTEMPT = "highwater/attempt"
PURPOSE = "highwater/purpose"
PRIORITY = "dagster/priority"
# Runs of tiers stand behind what is new: however many are due, a new slice waits for one run at the most.
TIER_PRIORITY = "-1"
RETRY = "retry"


@dataclass(frozen=True)
class Request:
    """A run to be requested: slices that are neighbours in Dagster's order of keys.

    Args:
        keys: the slices, in Dagster's order, which is the order of insertion.
        attempt: 1 for the first run of these slices; one more for each run of the last day that left them undone.
        purpose: who asks: `plan`, `retry` or `repair`.
        at: when repair asks, in UTC.
        tier: whether they are slices of tiers.
    """

    keys: tuple[str, ...]
    attempt: int = 1
    purpose: str = "plan"
    at: datetime | None = None
    tier: bool = False

    @property
    def run_key(self) -> str:
        """Stays used for ever, also when its run fails: so it carries the attempt, and the minute in which repair asks.

        Without the minute a slice that is lost again after a day, when the attempts of before are forgotten, would be
        asked for by a key that is used, and Dagster would leave it silently.
        """
        when = "" if self.at is None else f" {self.at:%Y-%m-%dT%H:%M}"
        return f"{self.keys[0]}..{self.keys[-1]} {self.purpose} {self.attempt}{when}"

    @property
    def tags(self) -> dict[str, str]:
        """The tags that make it a run over a range, one slice included."""
        return {
            RANGE_START: self.keys[0],
            RANGE_END: self.keys[-1],
            ATTEMPT: str(self.attempt),
            PURPOSE: self.purpose,
            **({PRIORITY: TIER_PRIORITY} if self.tier else {}),
        }


def neighbours(order: Sequence[str], wanted: Collection[str], most: int) -> list[tuple[str, ...]]:
    """Cut the wanted keys into ranges of Dagster's order that hold nothing else.

    Args:
        order: keys in Dagster's order; a range means everything between its ends in it.
        wanted: the keys to be covered; keys that are not in `order` are left out.
        most: keys in one range at the most.
    """
    groups: list[tuple[str, ...]] = []
    group: list[str] = []
    for key in order:
        if key in wanted:
            group.append(key)
        if group and (key not in wanted or len(group) == most):
            groups.append(tuple(group))
            group = []
    return [*groups, tuple(group)] if group else groups


def first_requests(order: Sequence[str], new: Collection[str], most: int, purpose: str = "plan") -> list[Request]:
    """The runs for slices that were never requested."""
    return [Request(keys, purpose=purpose, tier=purpose == RETRY) for keys in neighbours(order, new, most)]


@dataclass(frozen=True)
class PastRun:
    """A run that named slices.

    Args:
        keys: what it named, its range resolved.
        ended_at: when it ended, in UTC; None while it is in flight, as also a failed run is that Dagster will retry by
            itself.
    """

    keys: frozenset[str]
    ended_at: datetime | None = None


@dataclass(frozen=True)
class RepairRules:
    """How often and how soon repair asks again.

    Args:
        attempts: runs in a day that may leave a slice undone before a person has to look. With the waits below the
            sixth follows 62 minutes after the first: an outage of an hour heals by itself.
        first_wait: after the first run that left it undone; doubled after each further one.
        longest_wait: no wait is longer.
        grace: a slice younger than this is left to the planner, whose request may be on its way.
        slices_a_tick: slices that one tick asks for at the most.
    """

    attempts: int = 6
    first_wait: timedelta = timedelta(minutes=2)
    longest_wait: timedelta = timedelta(hours=1)
    grace: timedelta = timedelta(minutes=2)
    slices_a_tick: int = 200

    def wait(self, ended: int) -> timedelta:
        """How long after the last of so many runs the next attempt waits."""
        doublings = min(max(ended - 1, 0), 20)  # beyond that a timedelta overflows
        return min(self.first_wait * float(2**doublings), self.longest_wait)


@dataclass(frozen=True)
class Repair:
    """What repair decided of the slices that are not done.

    Args:
        due: slices to ask for now, with the attempt.
        in_flight: slices that a run is working on or will.
        waiting: slices whose next attempt is not due, with the time it is.
        given_up: slices that too many runs left undone: a person has to look, or a day has to pass.
        held_back: slices that are due and above the tick's limit.
    """

    due: Mapping[str, int] = field(default_factory=dict)
    in_flight: tuple[str, ...] = ()
    waiting: Mapping[str, datetime] = field(default_factory=dict)
    given_up: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()


@dataclass
class _History:
    in_flight: bool = False
    ended: int = 0
    last_end: datetime | None = None


def decide_repair(
    missing: Mapping[str, datetime], runs: Iterable[PastRun], now: datetime, rules: RepairRules
) -> Repair:
    """Which of the missing slices are asked for again.

    Args:
        missing: slices that are planned and not done, with the time of their plan, oldest first.
        runs: runs of the last day that named slices, in any order. One that succeeded counts like one that failed: it
            too left the slice undone, be it that it took one table only, or that the lake lost the rows since.
        now: the time, in UTC.
        rules: caps and waits.
    """
    histories = _histories(missing, runs)
    due: dict[str, int] = {}
    waiting: dict[str, datetime] = {}
    in_flight, given_up, held_back = [], [], []
    for key, planned_at in missing.items():
        history = histories[key]
        due_at = _due_at(history, planned_at, rules)
        if history.in_flight:
            in_flight.append(key)
        elif history.ended >= rules.attempts:
            given_up.append(key)
        elif due_at > now:
            waiting[key] = due_at
        elif len(due) < rules.slices_a_tick:
            due[key] = history.ended + 1
        else:
            held_back.append(key)
    return Repair(due, tuple(in_flight), waiting, tuple(given_up), tuple(held_back))


def _histories(keys: Iterable[str], runs: Iterable[PastRun]) -> dict[str, _History]:
    histories = {key: _History() for key in keys}
    for run in runs:
        for key in run.keys & histories.keys():
            history = histories[key]
            if run.ended_at is None:
                history.in_flight = True
            else:
                history.ended += 1
                history.last_end = max(history.last_end or run.ended_at, run.ended_at)
    return histories


def _due_at(history: _History, planned_at: datetime, rules: RepairRules) -> datetime:
    if history.last_end is None:
        return planned_at + rules.grace
    return history.last_end + rules.wait(history.ended)


def repair_requests(
    order: Sequence[str], due: Mapping[str, int], most: int, now: datetime, main: Collection[str] | None = None
) -> list[Request]:
    """The runs that ask for slices again; a range holds slices of one attempt number, all of tiers or none.

    Args:
        order: all keys in Dagster's order.
        due: the slices to ask for, with the attempt.
        most: slices in one run at the most.
        now: the time, in UTC.
        main: those that are slices of the main topic; all of them if None.
    """
    found = []
    for attempt in sorted(set(due.values())):
        wanted = {key for key, number in due.items() if number == attempt}
        tiers = set() if main is None else {key for key in wanted if key not in main}
        for tier, keys in ((False, wanted - tiers), (True, tiers)):
            found += [Request(group, attempt, "repair", now, tier) for group in neighbours(order, keys, most)]
    return found


def keys_named(tags: Mapping[str, str], order: Sequence[str], position: Mapping[str, int]) -> frozenset[str]:
    """The slices that a run's tags name.

    Args:
        tags: the run's tags.
        order: all keys in Dagster's order.
        position: where each key stands in `order`.
    """
    if PARTITION in tags:
        return frozenset({tags[PARTITION]})
    start, end = position.get(tags.get(RANGE_START, "")), position.get(tags.get(RANGE_END, ""))
    if start is None or end is None:
        return frozenset(tags[name] for name in (RANGE_START, RANGE_END) if name in tags)
    return frozenset(order[start : end + 1])
