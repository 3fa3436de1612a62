"""The slices to request, and their runs: decisions over plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from highwater.breaker import Circuit
from highwater.orchestration.run_tags import (
    PARTITION,
    PRIORITY,
    PROBE,
    PUBLISH,
    PURPOSE,
    RANGE_END,
    RANGE_START,
    RETRY,
    RUN_NUMBER,
    URGENT_PRIORITY,
)

NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Request:
    """A run to be requested: slices that are neighbours in Dagster's order of keys.

    Args:
        keys: the slices, in Dagster's order, which is the order of insertion.
        run_number: 1 for the first run of these slices; one more for each run of the last day that left them undone.
        purpose: the requester: `plan`, `retry`, `repair`, `probe` or `publish`.
        at: when repair asks, in UTC.
        tier: whether they are slices of tiers.
        raw_alone: whether they are only to be read from Kafka, not decided: the stream's breaker is not closed, or
            they are urgent.
        urgent: whether retention is about to take their records.
        place: the place in Dagster's queue, from 0.
    """

    keys: tuple[str, ...]
    run_number: int = 1
    purpose: str = "plan"
    at: datetime | None = None
    tier: bool = False
    raw_alone: bool = False
    urgent: bool = False
    place: int = 0

    @property
    def takes_turn(self) -> bool:
        """Whether it is for slices of the main topic that wait for their turn among those of all streams."""
        return not self.tier and not self.urgent and self.purpose not in (PROBE, PUBLISH)

    @property
    def run_key(self) -> str:
        """A key that stays used, also when its run fails: it has the run number, and the minute in which repair asks.

        Without the minute a slice that is lost again after a day, when the runs of before are forgotten, would be
        asked for by a key that is used, and Dagster would leave it silently.
        """
        when = "" if self.at is None else f" {self.at:%Y-%m-%dT%H:%M}"
        return f"{self.keys[0]}..{self.keys[-1]} {self.purpose} {self.run_number}{when}"

    @property
    def tags(self) -> dict[str, str]:
        """The tags that make it a run over a range, one slice included."""
        priority = URGENT_PRIORITY if self.urgent else str(-self.place)
        return {
            RANGE_START: self.keys[0],
            RANGE_END: self.keys[-1],
            RUN_NUMBER: str(self.run_number),
            PURPOSE: self.purpose,
            **({} if priority == "0" else {PRIORITY: priority}),
        }


def group_neighbours(order: Sequence[str], wanted: Collection[str], most: int) -> list[tuple[str, ...]]:
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


def build_first_requests(
    order: Sequence[str],
    new: Collection[str],
    most: int,
    purpose: str = "plan",
    *,
    raw_alone: bool = False,
    urgent: Collection[str] = (),
) -> list[Request]:
    """The runs for slices that were never requested; those of urgent ones come first, and only read them."""
    tier, first = purpose == RETRY, set(urgent) & set(new)
    return [
        *[
            Request(k, purpose=purpose, tier=tier, raw_alone=True, urgent=True)
            for k in group_neighbours(order, first, most)
        ],
        *[
            Request(keys, purpose=purpose, tier=tier, raw_alone=raw_alone)
            for keys in group_neighbours(order, set(new) - first, most)
        ],
    ]


@dataclass(frozen=True)
class PastRun:
    """A run that named slices.

    Args:
        keys: the slices that it named, with ranges resolved.
        ended_at: when it ended, in UTC; None while it is in flight, as also a failed run is that Dagster will retry by
            itself.
        run_id: Dagster's.
        raw_alone: whether it was only to read them from Kafka, not to decide them.
        by_hand: whether no sensor asked for it: decided slices may be reprocessed.
    """

    keys: frozenset[str]
    ended_at: datetime | None = None
    run_id: str = ""
    raw_alone: bool = False
    by_hand: bool = False


@dataclass(frozen=True)
class RepairRules:
    """The number and the waits of repair's requests.

    Args:
        most_runs: runs in a day that may leave a slice undone before it is exhausted. With the waits below the sixth
            follows 62 minutes after the first: an outage of an hour heals by itself.
        first_wait: after the first run that left it undone; doubled after each further one.
        max_wait: no wait is longer.
        tries_together: runs that may leave a slice undone beside others; then it is asked for by itself, so that one
            slice that cannot be done keeps no other undone.
        grace: a slice younger than this is left to the planner, whose request may be on its way.
        slices_per_tick: slices that one tick asks for at the most.
    """

    most_runs: int = 6
    first_wait: timedelta = timedelta(minutes=2)
    max_wait: timedelta = timedelta(hours=1)
    tries_together: int = 2
    grace: timedelta = timedelta(minutes=2)
    slices_per_tick: int = 200

    def wait(self, ended: int) -> timedelta:
        """The wait before the next run after this many runs."""
        doublings = min(max(ended - 1, 0), 20)  # beyond that a timedelta overflows
        return min(self.first_wait * float(2**doublings), self.max_wait)


@dataclass(frozen=True)
class Repair:
    """Repair's plan for the slices that are not done.

    Args:
        due: slices to ask for now, with the number of the run.
        in_flight: slices that a run is working on or will.
        waiting: slices whose next run is not due, with the time it is.
        exhausted_slices: slices that too many runs left undone. Repair leaves them until a person releases them,
            publication until those runs are a day old.
        held_back: slices that are due and above the tick's limit.
    """

    due: Mapping[str, int] = field(default_factory=dict)
    in_flight: tuple[str, ...] = ()
    waiting: Mapping[str, datetime] = field(default_factory=dict)
    exhausted_slices: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()


@dataclass
class SliceRuns:
    """The runs of the last day for a slice: how many ended and left it undone."""

    in_flight: bool = False
    ended: int = 0
    last_end: datetime | None = None


def decide_repair(
    missing: Mapping[str, datetime],
    runs: Iterable[PastRun],
    now: datetime,
    rules: RepairRules,
    exhausted: Collection[str] = (),
    patient: Collection[str] = (),
) -> Repair:
    """The missing slices to request again.

    Args:
        missing: slices that are planned and not done, with the time of their plan, oldest first.
        runs: runs of the last day that named slices, in any order. A successful run counts like a
            failed one: it too left the slice undone, by writing one table only, or because the lake lost the rows.
        now: the time, in UTC.
        rules: caps and waits.
        exhausted: slices that were exhausted before, and that nobody released.
        patient: slices that are never exhausted, however many runs left them undone.
    """
    known = group_runs_by_slice(missing, runs)
    due: dict[str, int] = {}
    waiting: dict[str, datetime] = {}
    in_flight, over, held_back = [], [], []
    for key, planned_at in missing.items():
        past = known[key]
        due_at = _compute_due_time(past, planned_at, rules)
        if past.in_flight:
            in_flight.append(key)
        elif key in exhausted or (past.ended >= rules.most_runs and key not in patient):
            over.append(key)
        elif due_at > now:
            waiting[key] = due_at
        elif len(due) < rules.slices_per_tick:
            due[key] = past.ended + 1
        else:
            held_back.append(key)
    return Repair(due, tuple(in_flight), waiting, tuple(over), tuple(held_back))


def group_runs_by_slice(keys: Iterable[str], runs: Iterable[PastRun]) -> dict[str, SliceRuns]:
    """The runs of the last day for each slice."""
    found = {key: SliceRuns() for key in keys}
    for run in runs:
        for key in run.keys & found.keys():
            past = found[key]
            if run.ended_at is None:
                past.in_flight = True
            else:
                past.ended += 1
                past.last_end = max(past.last_end or run.ended_at, run.ended_at)
    return found


def _compute_due_time(past: SliceRuns, planned_at: datetime, rules: RepairRules) -> datetime:
    if past.last_end is None:
        return planned_at + rules.grace
    return past.last_end + rules.wait(past.ended)


def select_urgent_keys(
    endangered: Collection[str], repair: Repair, known: Mapping[str, SliceRuns], now: datetime, wait: timedelta
) -> set[str]:
    """Endangered slices to be read now, whatever they waited for: only a run that ended just now is waited out.

    Args:
        endangered: slices that are not in raw, and that retention is about to take records of.
        repair: the other decisions on them.
        known: the results of their runs.
        now: the time, in UTC.
        wait: after a run that left one undone.
    """

    def is_due(key: str) -> bool:
        last = known[key].last_end
        return key in repair.due or last is None or last + wait <= now

    return {key for key in endangered if not known[key].in_flight and is_due(key)}


def filter_counted_runs(
    runs: Iterable[PastRun], floor: datetime | None, accepted: Mapping[str, datetime]
) -> list[PastRun]:
    """The runs without those that count no more: what kept their slices undone was a breaker, or is accepted since.

    Args:
        runs: runs that named slices.
        floor: when a breaker closed last, the stream's or that of a dependency; None if none ever did.
        accepted: slices that a person lets through, with the time.
    """
    found = []
    for run in runs:
        ended = run.ended_at
        if ended is None:
            found.append(run)
        elif floor is None or ended >= floor:
            remaining_keys = frozenset(key for key in run.keys if key not in accepted or ended >= accepted[key])
            found.append(replace(run, keys=remaining_keys))
    return found


@dataclass(frozen=True)
class StoppedSlices:
    """The slices that are not done, split by a breaker that is not closed.

    Args:
        waiting: slices that are in raw and wait for their decision.
        raw_alone: slices that are still to be read from Kafka, and no more.
        probe: the slice that is to be decided now; None if none is.
    """

    waiting: frozenset[str] = frozenset()
    raw_alone: frozenset[str] = frozenset()
    probe: str | None = None


def stop(
    circuit: Circuit,
    lacking: Mapping[str, Collection[str]],
    main: Collection[str],
    accepted: Collection[str],
    refused: Sequence[str],
    busy: Collection[str],
    now: datetime,
    *,
    unavailable: bool = False,
    tried: Mapping[str, datetime] = MappingProxyType({}),
    exhausted: Collection[str] = (),
) -> StoppedSlices:
    """Stop the slices whose decision the breaker does not allow; what was decided before is finished.

    The probe is the oldest slice that no run tried to decide, if there is one; else the one whose last try is the
    longest ago, whether it was refused, failed or lost its worker. So a slice that always fails keeps back no other.
    Exhausted slices come last, and so does a probe that came to no end in its time.

    Args:
        circuit: the breaker.
        lacking: slices that are not done, the oldest first, with the tables that they are not in.
        main: the slices of the main topic.
        accepted: slices that a person lets through.
        refused: slices that were refused, the longest ago first.
        busy: slices that runs are working on or will.
        now: the time, in UTC.
        unavailable: whether the breaker of the reference table is open, so that nothing can be decided.
        tried: when the last run ended that was to decide a slice, of those that had one.
        exhausted: slices that were exhausted.
    """
    if circuit.closed and not unavailable:
        return StoppedSlices()
    passing = () if unavailable else accepted
    undecided = [key for key, tables in lacking.items() if "events" in tables and key not in passing]
    waiting = [key for key in undecided if "raw" not in lacking[key]]
    if unavailable:
        candidates: list[str] = []
    elif circuit.can_admit_probe(now):
        known = {key: at for at, key in enumerate(refused, 1)}  # a refusal counts for longer than its run is remembered

        def rank(key: str) -> tuple[bool, bool, datetime, int]:
            return key in exhausted, key == circuit.probe, tried.get(key, NEVER), known.get(key, 0)

        candidates = sorted((key for key in waiting if key in main), key=rank)[:1]
    else:
        candidates = [key for key in waiting if key == circuit.probe]
    probe = next((key for key in candidates if key not in busy), None)
    return StoppedSlices(frozenset(waiting), frozenset(undecided) - frozenset(waiting), probe)


def select_last_tries(runs: Iterable[PastRun]) -> dict[str, datetime]:
    """The end of the last run that was to decide each slice; slices that no run of the last day was to are left out."""
    found: dict[str, datetime] = {}
    for run in runs:
        if run.ended_at is not None and not run.raw_alone:
            found.update({key: max(run.ended_at, found.get(key, run.ended_at)) for key in run.keys})
    return found


def build_probe_requests(probe: str | None, now: datetime) -> list[Request]:
    """The run for the breaker's probe, alone through all tables."""
    return [] if probe is None else [Request((probe,), purpose=PROBE, at=now)]


def list_in_flight(runs: Iterable[PastRun]) -> frozenset[str]:
    """Slices that runs are working on or will."""
    return frozenset(key for run in runs if run.ended_at is None for key in run.keys)


def build_repair_requests(
    order: Sequence[str],
    due: Mapping[str, int],
    most: int,
    now: datetime,
    main: Collection[str] | None = None,
    raw_alone: Collection[str] = (),
    alone: Collection[str] = (),
    urgent: Collection[str] = (),
) -> list[Request]:
    """The runs that ask for slices again; a range holds slices of one run number, all of tiers or none.

    Args:
        order: all keys in Dagster's order.
        due: the slices to ask for, with the number of the run.
        most: slices in one run at the most.
        now: the time, in UTC.
        main: the slices of the main topic; all slices if None.
        raw_alone: slices that are only to be read from Kafka.
        alone: slices with a run of their own, since a failure of one would stop the others of its run.
        urgent: slices whose records retention is about to delete; they are only read, before all others.
    """
    found = []
    for run_number in sorted(set(due.values())):
        groups: dict[tuple[bool, bool, bool, str], set[str]] = {}
        for key in (key for key, number in due.items() if number == run_number):
            tier = main is not None and key not in main
            first = key in urgent
            kind = not first, tier, first or key in raw_alone, key if key in alone and not first else ""
            groups.setdefault(kind, set()).add(key)
        for (later, tier, raw, _), keys in sorted(groups.items()):
            found += [
                Request(group, run_number, "repair", now, tier, raw_alone=raw, urgent=not later)
                for group in group_neighbours(order, keys, most)
            ]
    return found


def resolve_run_keys(tags: Mapping[str, str], order: Sequence[str], position: Mapping[str, int]) -> frozenset[str]:
    """The slices that a run's tags name.

    Args:
        tags: the run's tags.
        order: all keys in Dagster's order.
        position: where each key is in `order`.
    """
    if PARTITION in tags:
        return frozenset({tags[PARTITION]})
    start, end = position.get(tags.get(RANGE_START, "")), position.get(tags.get(RANGE_END, ""))
    if start is None or end is None:
        return frozenset(tags[name] for name in (RANGE_START, RANGE_END) if name in tags)
    return frozenset(order[start : end + 1])
