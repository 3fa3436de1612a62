"""One tick of the sensor `repair`: request incomplete slices that no run works on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.breaker import end_cool_down
from highwater.errors import HighwaterError, UnknownSliceError
from highwater.orchestration.asset_keys import build_table_keys
from highwater.orchestration.checking import slice_status
from highwater.orchestration.dependencies import (
    build_lake_guard,
    ensure_kafka_awake,
    ensure_lake_exists,
    is_lookup_unavailable,
    read_recovery_time,
)
from highwater.orchestration.run_tags import PRIORITY, STREAM_TAG, URGENT_PRIORITY
from highwater.orchestration.sensing.expiring_records import compute_longest_wait, list_endangered_slices
from highwater.orchestration.sensing.materialization_sync import read_missing_events
from highwater.orchestration.sensing.ordered_processing import (
    format_turn_lines,
    open_holds,
    read_release_times,
    take_turn,
)
from highwater.orchestration.sensing.run_history import (
    list_dependency_failures,
    read_materialised_slices,
    read_past_runs,
)
from highwater.orchestration.sensing.run_requests import (
    RepairRules,
    build_probe_requests,
    build_repair_requests,
    decide_repair,
    filter_counted_runs,
    group_runs_by_slice,
    list_in_flight,
    resolve_run_keys,
    select_last_tries,
    select_urgent_keys,
    stop,
)
from highwater.orchestration.sensing.stream_ticks import OLDEST, PAGE, Tick, format_breaker_lines, read_next_page
from highwater.resources.dependency_guards import guard_dependencies
from highwater.routing import is_stream_topic

if TYPE_CHECKING:
    from highwater.breaker import Circuit
    from highwater.declaration import Stream
    from highwater.holds import Hold
    from highwater.orchestration.checking.check_rules import SliceAttempts
    from highwater.orchestration.sensing.ordered_processing import Turn
    from highwater.orchestration.sensing.run_requests import PastRun, Repair, Request, StoppedSlices
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.exhausted_slices import ExhaustedSlice, StalledSlice
    from highwater.slices import Slice

RULES = RepairRules()
# A run that somebody deletes while it is queued ends in no event: its slices are found after this time.
WORKING_REST = timedelta(minutes=2)


@dataclass(frozen=True)
class _ExaminedSlices:
    """The slices that a tick looks at, as ledger, lake and Dagster have them.

    Args:
        slices: by key: those that Dagster lacks first, then the page.
        main: slices of the main topic.
        there: the commits in the tables.
        lacking: incomplete slices, with the tables that lack them.
        left: incomplete slices of topics that the stream, as declared now, does not read.
        order: Dagster's keys in its order, then the lost ones.
        lost: keys that Dagster is to hold, and does not.
        retired: slices of the page whose keys were retired.
        unknown_keys: keys that Dagster holds, and by the ledger are no slices of the stream.
        exhausted_slices: the slices that were exhausted when the tick began, wherever the page is.
        stalled_slices: the slices that were left undone again and again when the tick began, likewise.
        materialised: for each table which of all these Dagster holds as materialised.
        cursor: where the next tick looks.
    """

    slices: Mapping[str, Slice]
    main: frozenset[str]
    there: SliceAttempts
    lacking: Mapping[str, tuple[str, ...]]
    left: Sequence[str]
    order: Sequence[str]
    lost: Sequence[str]
    retired: Collection[str]
    unknown_keys: Sequence[str]
    exhausted_slices: Sequence[ExhaustedSlice]
    stalled_slices: Sequence[StalledSlice]
    materialised: Mapping[str, frozenset[str]]
    cursor: str

    @property
    def unread(self) -> list[Slice]:
        """The slices that are not in raw."""
        return [self.slices[key] for key, tables in self.lacking.items() if "raw" in tables]

    def is_done(self, key: str) -> bool:
        """Whether a slice was looked at and is in all tables."""
        return key in self.slices and key not in self.lacking and key not in self.left


@dataclass(frozen=True)
class _SliceGates:
    """The states that keep slices from being decided, and the slices that pass all the same.

    Args:
        breaker: the stream's.
        unavailable: whether the breaker of the reference table is open.
        holds: the slices that are held.
        accepted: slices that a person lets through the breaker, and when.
        refused: slices that the breaker refused, the longest ago first.
        tried: when the last run ended that was to decide a slice.
    """

    breaker: Circuit
    unavailable: bool
    holds: Sequence[Hold]
    accepted: Mapping[str, datetime]
    refused: Sequence[str]
    tried: Mapping[str, datetime]


@dataclass(frozen=True)
class _RequestSplit:
    """The requested slices, and the others."""

    stopped: StoppedSlices
    turn: Turn
    repair: Repair
    requests: Sequence[Request]


def repair(instance: dg.DagsterInstance, resources: Any, stream: Stream, cursor: str | None) -> Tick:
    """Request incomplete slices that no run works on; report to Dagster materializations that it lost.

    Every tick asks the lake for the slices that Dagster lacks, and for the next page of all: so whatever ledger, lake
    and Dagster disagree on is found, and a tick costs the same after any number of slices.

    Raises:
        TemporaryError: the lake or the ledger is unavailable; nothing was decided.
    """
    now = datetime.now(UTC)
    ledger, lake = resources.ledger.open(), resources.lake.open()
    ensure_kafka_awake(ledger, now)
    seen = _look(instance, ledger, lake, stream, cursor, now)
    past = read_past_runs(instance, stream, seen.order, now)
    gate = _read_gates(ledger, lake, stream, seen, past, now)
    accepted = {**_read_accepted_refusals(ledger, stream, seen, gate.refused), **gate.accepted}
    released_slices = {
        **accepted,
        **read_release_times(ledger, seen.lacking),
        **ledger.exhausted_slices.read_release_times([*seen.lacking]),
    }
    floor = _find_floor(ledger, stream, gate.breaker)
    runs = filter_counted_runs(past, floor, released_slices)
    still = _update_exhausted_slices(ledger, seen, accepted, floor)
    urgent = list_endangered_slices(resources.kafka.open(), stream, seen.unread) if seen.unread else frozenset()
    decided = _decide(instance, stream, seen, gate, runs, still, urgent, now)
    first = put_first(instance, stream, seen.order, urgent)
    # Earlier ones are in the ledger, except those that a person released since this tick read it.
    if fresh := [key for key in decided.repair.exhausted_slices if key not in still]:
        ledger.exhausted_slices.add(
            stream.name, {key: one.ended for key, one in group_runs_by_slice(fresh, runs).items()}, now
        )
    stalled_slices = _record_stalled_slices(
        ledger, stream, seen, gate, decided, {*still, *decided.repair.exhausted_slices}, runs, now
    )
    forgotten, unreported = _collect_missing_events(instance, ledger, lake, stream, seen)
    lines = [
        *format_repair_lines(decided.repair, seen.lost, forgotten, seen.unknown_keys, seen.left),
        *format_stopped_lines(gate.breaker, decided.stopped, gate.unavailable),
        *format_turn_lines(decided.turn, gate.holds),
        *format_urgent_lines(urgent, first),
        *unreported,
        *(
            [f"{len(stalled_slices)} left undone by {RULES.most_runs} runs or more: {_format_keys(stalled_slices)}"]
            if stalled_slices
            else []
        ),
    ]
    # Whatever needs a further look has a line, but for slices of an ordered stream that wait for their turn.
    idle = not lines and not seen.lacking and not seen.lost and seen.cursor == OLDEST
    # Only slices that their runs work on, or will: repair has nothing to decide until one of these ends.
    is_left_to_runs = bool(seen.lacking) and seen.lacking.keys() <= list_in_flight(runs)
    has_other_lines = len(lines) > (1 if decided.repair.in_flight else 0)
    rests = is_left_to_runs and not has_other_lines and not seen.lost
    until = _compute_next_look(resources.kafka.open(), stream, seen, now) if rests else None
    return Tick(seen.lost, decided.requests, lines, events=forgotten, cursor=seen.cursor, idle=idle, until=until)


def _compute_next_look(kafka: Kafka, stream: Stream, seen: _ExaminedSlices, now: datetime) -> datetime | None:
    """When slices that runs work on are looked at again if none of these ends; None for the next tick."""
    try:
        return now + compute_longest_wait(kafka, stream, seen.unread, WORKING_REST)
    except HighwaterError:
        return None


def _collect_missing_events(
    instance: dg.DagsterInstance, ledger: Ledger, lake: Lake, stream: Stream, seen: _ExaminedSlices
) -> tuple[list[dg.AssetMaterialization], list[str]]:
    """Materialisations that Dagster lacks, and a line where they could not be made; slices are requested all the same.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    most = RULES.slices_per_tick * len(build_table_keys(stream))
    live = [slice_ for key, slice_ in seen.slices.items() if key not in seen.retired]
    try:
        with guard_dependencies(build_lake_guard(ledger, lake, stream)):
            return read_missing_events(instance, lake, stream, live, seen.there, seen.materialised, most), []
    except HighwaterError:
        raise
    except Exception as error:  # noqa: BLE001 - one slice's commit record must not end the repair of all others
        return [], [f"materialisations that Dagster lacks could not be added: {type(error).__name__}: {error}"]


def _look(
    instance: dg.DagsterInstance, ledger: Ledger, lake: Lake, stream: Stream, cursor: str | None, now: datetime
) -> _ExaminedSlices:
    order = list(instance.get_dynamic_partitions(stream.partitions_name))
    page, cursor = read_next_page(ledger, stream, cursor)
    retired = ledger.retired.list_retired([slice_.key for slice_ in page])
    lost = _select_lost_keys([slice_ for slice_ in page if slice_.key not in retired], order, now)
    exhausted, stalled_slices = (
        ledger.exhausted_slices.read_open(stream.name),
        ledger.stalled_slices.read_open(stream.name),
    )
    # An exhausted or stalled slice that somebody materialised since is done, wherever the page is.
    known_keys = {one.slice_key for one in exhausted[:PAGE]} | {one.slice_key for one in stalled_slices[:PAGE]}
    looked_after = ledger.get(sorted(known_keys))
    keys = [*order, *(slice_.key for slice_ in (*looked_after, *page))]
    materialised = read_materialised_slices(instance, stream, keys)
    unknown_keys, unmaterialised = _read_unmaterialised(ledger, stream, order, materialised.values())
    slices = {slice_.key: slice_ for slice_ in (*unmaterialised, *looked_after, *page)}
    with guard_dependencies(build_lake_guard(ledger, lake, stream)):
        ensure_lake_exists(ledger, lake)
        there = slice_status.read_attempts(lake, stream, list(slices))
    lacking = {key: tables for key in slices if (tables := there.select_missing_tables(key))}
    left = [key for key in lacking if not is_stream_topic(stream, slices[key].topic)]
    lacking = {key: tables for key, tables in lacking.items() if is_stream_topic(stream, slices[key].topic)}
    # A slice that the lake has lost since needs its key again.
    damaged = [key for key in lacking if key in retired]
    if damaged:
        ledger.retired.recall(damaged, now)
        lost += [key for key in damaged if key not in set(order)]
    main = frozenset(key for key, slice_ in slices.items() if slice_.topic == stream.topic)
    return _ExaminedSlices(
        slices,
        main,
        there,
        lacking,
        left,
        [*order, *lost],
        lost,
        retired,
        unknown_keys,
        exhausted,
        stalled_slices,
        materialised,
        cursor,
    )


def _read_gates(
    ledger: Ledger, lake: Lake, stream: Stream, seen: _ExaminedSlices, runs: Sequence[PastRun], now: datetime
) -> _SliceGates:
    undecided = {key for key, tables in seen.lacking.items() if "events" in tables}
    breaker, unavailable = ledger.breakers.read_circuit(stream.name), is_lookup_unavailable(ledger, lake, stream)
    if breaker.can_admit_probe(now) and not undecided & seen.main:
        breaker = ledger.breakers.update(stream.name, (), lambda circuit, _: (end_cool_down(circuit, now), ()))
    holds = open_holds(ledger, stream, seen.slices.keys() - undecided - {*seen.left})
    accepted = {key: one.accepted_at for key, one in ledger.breakers.read_accepted_slices(list(seen.lacking)).items()}
    refused = [one.slice_key for one in ledger.breakers.list_refused(stream.name)]
    return _SliceGates(breaker, unavailable, holds, accepted, refused, select_last_tries(runs))


def _read_accepted_refusals(
    ledger: Ledger, stream: Stream, seen: _ExaminedSlices, refused: Collection[str]
) -> dict[str, datetime]:
    """Refused slices with rejects whose reason a person accepted, and when: their failed runs count no more."""
    reasons = ledger.breakers.read_accepted_reasons(stream.name).values()
    found: dict[str, datetime] = {}
    for key in seen.lacking.keys() & {*refused} & seen.main:
        times = [one.accepted_at for one in reasons if seen.slices[key].ordinal >= one.from_ordinal]
        if times:
            found[key] = max(times)
    return found


def _update_exhausted_slices(
    ledger: Ledger, seen: _ExaminedSlices, accepted: Mapping[str, datetime], floor: datetime | None
) -> set[str]:
    """The slices that stay exhausted; done slices, and slices whose failures count no more, are forgotten."""

    def is_resolved(one: ExhaustedSlice) -> bool:
        return seen.is_done(one.slice_key) or any(
            at is not None and one.since < at for at in (floor, accepted.get(one.slice_key))
        )

    ended = {one.slice_key for one in seen.exhausted_slices if is_resolved(one)}
    if ended:
        ledger.exhausted_slices.end(sorted(ended))
    return {one.slice_key for one in seen.exhausted_slices} - ended


def _record_stalled_slices(
    ledger: Ledger,
    stream: Stream,
    seen: _ExaminedSlices,
    gate: _SliceGates,
    decided: _RequestSplit,
    exhausted: Collection[str],
    runs: Sequence[PastRun],
    now: datetime,
) -> list[str]:
    """Record and return the stalled slices: they failed as often as exhausted ones, and are still requested.

    A slice stalls if it is the first of a stream that decides in order, or if its last run missed a dependency that has
    no breaker. Held slices, and those that wait for the stream's breaker, do not stall: they have alerts of their own.
    A stalled slice stays one until it is done, is held or waits, also when its runs are older than a day. A slice that
    a run works on does not become one: that run may decide what was held.
    """
    others = {*exhausted, *(one.slice_key for one in gate.holds)}
    over = [one for one in seen.stalled_slices if one.slice_key in others or seen.is_done(one.slice_key)]
    if over:
        ledger.stalled_slices.end([one.slice_key for one in over])
    known = group_runs_by_slice((key for key in seen.lacking if key not in others | decided.stopped.waiting), runs)
    fresh = {key: one.ended for key, one in known.items() if one.ended >= RULES.most_runs and not one.in_flight}
    if fresh:
        ledger.stalled_slices.add(stream.name, fresh, now)
    return [*fresh]


def _decide(
    instance: dg.DagsterInstance,
    stream: Stream,
    seen: _ExaminedSlices,
    gate: _SliceGates,
    runs: Sequence[PastRun],
    exhausted: Collection[str],
    endangered_keys: Collection[str],
    now: datetime,
) -> _RequestSplit:
    lacking, main = seen.lacking, seen.main
    in_order = sorted(main & lacking.keys(), key=lambda key: seen.slices[key].ordinal) if stream.ordered else []
    probes = set(in_order[:1]) if stream.ordered else main
    stopped = stop(
        gate.breaker,
        lacking,
        probes,
        gate.accepted,
        gate.refused,
        list_in_flight(runs),
        now,
        unavailable=gate.unavailable,
        tried=gate.tried,
        exhausted=exhausted,
    )
    undone = {key: lacking[key] for key in in_order} if gate.breaker.closed and not gate.unavailable else {}
    planned_at = {key: seen.slices[key].planned_at for key in lacking}
    # A slice that is blocked would keep those from going on that were asked for with it.
    most = 1 if stream.blocks else stream.limits.slices_per_run
    turn = take_turn(undone, planned_at, seen.order, runs, [one.slice_key for one in gate.holds], now, RULES, most)
    others = lacking.keys() - stopped.waiting - (undone.keys() - turn.raw_alone)
    missing = {key: at for key, at in planned_at.items() if key in others}
    found = decide_repair(missing, runs, now, RULES, exhausted)
    if fresh := [key for key in found.exhausted_slices if key not in exhausted]:
        found = decide_repair(missing, runs, now, RULES, exhausted, list_dependency_failures(instance, fresh, runs))
    raw_alone = stopped.raw_alone | turn.raw_alone
    known = group_runs_by_slice(endangered_keys, runs)
    urgent = select_urgent_keys(endangered_keys, found, known, now, RULES.first_wait) - {*turn.keys, stopped.probe}
    due = {**{key: known[key].ended + 1 for key in urgent}, **found.due}
    # One slice that cannot be done fails the run of all: after some tries each goes by itself.
    failing = {key for key, number in found.due.items() if number > RULES.tries_together}
    alone = failing | {*gate.refused}
    again = build_repair_requests(seen.order, due, most, now, main, raw_alone=raw_alone, alone=alone, urgent=urgent)
    return _RequestSplit(
        stopped, turn, found, [*turn.build_requests(now), *again, *build_probe_requests(stopped.probe, now)]
    )


def _find_floor(ledger: Ledger, stream: Stream, breaker: Circuit) -> datetime | None:
    """Runs that ended before count no more: what they failed by was a breaker, which closed since."""
    times = [breaker.since if breaker.closed else None, read_recovery_time(ledger, stream)]
    return max((at for at in times if at is not None), default=None)


def _read_unmaterialised(
    ledger: Ledger, stream: Stream, order: Sequence[str], materialised: Iterable[frozenset[str]]
) -> tuple[list[str], list[Slice]]:
    """Keys of no slice of the stream, and slices that Dagster lacks in one of its tables, the oldest first."""
    done = frozenset.intersection(*materialised)
    keys = [key for key in order if key not in done][:PAGE]
    try:
        found = ledger.get(keys)
    except UnknownSliceError:
        found = ledger.list_slices(stream.name)
    planned = {slice_.key: slice_ for slice_ in found if slice_.stream == stream.name}
    return [key for key in keys if key not in planned], [planned[key] for key in keys if key in planned]


def _select_lost_keys(page: Sequence[Slice], order: Sequence[str], now: datetime) -> list[str]:
    """Slices whose keys Dagster lacks; the youngest are left to the planner, whose keys may be on their way."""
    known = set(order)
    return [slice_.key for slice_ in page if slice_.key not in known and now - slice_.planned_at >= RULES.grace]


def put_first(instance: dg.DagsterInstance, stream: Stream, order: Sequence[str], keys: Collection[str]) -> list[str]:
    """Let the queued runs of these slices start before all others; returns the IDs of runs that were not first yet."""
    if not keys:
        return []
    position = {key: at for at, key in enumerate(order)}
    queued = dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED], tags={STREAM_TAG: stream.name})
    found = []
    for run in instance.get_runs(queued):
        if run.tags.get(PRIORITY) != URGENT_PRIORITY and resolve_run_keys(run.tags, order, position) & set(keys):
            instance.add_run_tags(run.run_id, {PRIORITY: URGENT_PRIORITY})
            found.append(run.run_id)
    return found


def format_urgent_lines(urgent: Collection[str], first: Sequence[str]) -> list[str]:
    """Lines of a tick about requests for records that retention is about to take."""
    read = (
        [f"{len(urgent)} are read first, before retention takes them: {_format_keys(sorted(urgent))}"] if urgent else []
    )
    return [*read, *([f"{len(first)} queued runs of these were put first"] if first else [])]


def format_dead_worker_lines(ended: Sequence[str]) -> list[str]:
    """The runs that ended with their worker, for the tick's log."""
    return [f"{len(ended)} runs failed, their worker is gone: {_format_keys(ended)}"] if ended else []


def format_repair_lines(
    found: Repair,
    lost: Sequence[str],
    forgotten: Sequence[dg.AssetMaterialization],
    unknown_keys: Sequence[str],
    left: Sequence[str],
) -> list[str]:
    """Lines of a tick about requests of repair."""
    keys_by_state = {
        "keys added again": lost,
        "requested again": list(found.due),
        "due and above the limit of a tick": found.held_back,
        "being worked on": found.in_flight,
        "waiting for the next attempt": list(found.waiting),
        f"exhausted after {RULES.most_runs} runs, look at them": found.exhausted_slices,
        "reported to Dagster again": sorted({event.partition or "" for event in forgotten}),
        "no slices of the stream by the ledger, delete their keys from Dagster": unknown_keys,
        "not done, and of topics that the declaration does not name, they are left": left,
    }
    return [f"{len(keys)} {what}: {_format_keys(keys)}" for what, keys in keys_by_state.items() if keys]


def format_stopped_lines(breaker: Circuit, stopped: StoppedSlices, rests: bool) -> list[str]:  # noqa: FBT001 - a value, no mode
    """Lines of a tick about slices that repair did not request because of the breaker."""
    probe = [] if stopped.probe is None else [f"requested as the breaker's probe: {stopped.probe}"]
    waiting = [f"{len(stopped.waiting)} wait for the breaker"] if stopped.waiting else []
    return [*format_breaker_lines(breaker, rests), *probe, *waiting]


def _format_keys(keys: Sequence[str]) -> str:
    return ", ".join(keys) if len(keys) <= 5 else f"{', '.join(keys[:3])} .. {keys[-1]}"
