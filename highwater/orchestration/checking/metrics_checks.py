"""The minutes of metrics compared with the events, by one query over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import TYPE_CHECKING, Any

from highwater.assets.minute_rows import MINUTES, build_schema, find_scale, require_metrics, select_statuses
from highwater.batching import split_by_count
from highwater.minutes import HOUR_MINUTES, MEAN_DIGITS, convert_to_time, format_day
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.orchestration.checking.plan_checks import find_commit_difference
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import query, quote_column, slice_is_one_of
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

FOLLOWS = "metrics_follow_events"
TABLE = "metrics"
# Ranges of time, and days, in one question: each is a branch that every file is compared with.
MAX_RANGES = 100
_US = 60_000_000
_MINUTE = f"(us - ((us % {_US}) + {_US}) % {_US}) / {_US}"
# Sums have 38 digits; a quotient of twice as many is rounded where no tie can come about.
_EXACT = Context(prec=80)
_LINKED = "arrow_cast(linked, 'List(Int64)') AS linked"
Row = Mapping[str, Any]


def check_metrics_follow_events(
    ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]
) -> dict[str, dict[str, CheckResult]]:
    """For each slice whether the minutes that it touches are what all events say of them, and are there once.

    A minute in which a slice has events that metrics do not follow yet is left out: that slice's run computes it.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    return {FOLLOWS: _check_metrics(ledger, lake, stream, keys)}


def _check_metrics(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    # Metrics first: events are then at least as new, and the attempt shows a slice that was decided in between.
    metrics, events = lake.open_stream_table(stream.name, TABLE), lake.open_stream_table(stream.name, "events")
    if metrics is None or events is None:
        return dict.fromkeys(keys, CheckResult(passed=False, text="there is no table of events, or none of metrics"))
    decided, made = read_slice_commits(events, keys), _read_metrics_commits(metrics, keys)
    settled = [key for key in keys if key in decided and key in made and decided[key].attempt == made[key].attempt]
    there = _read_event_minutes(events, slice_is_one_of(settled)) if settled else {}
    touched = {key: made[key].minutes | there.get(key, set()) for key in settled}
    compared = _compare_minutes(stream, metrics, events, {minute for found in touched.values() for minute in found})
    others = {
        slice_.key: find_commit_difference(slice_, made[slice_.key].slice_commit, TABLE, len(there.get(slice_.key, ())))
        for slice_ in ledger.get(settled)
    }
    return {
        key: _build_result(touched[key], compared, others[key])
        if key in touched
        else _build_behind_result(decided.get(key), made.get(key))
        for key in keys
    }


@dataclass(frozen=True)
class _ComparedMinutes:
    """The minutes that were compared: the faults of some, and minutes that may yet change."""

    wrong: Mapping[int, str]
    moving: Collection[int] = ()


def _build_behind_result(decided: SliceCommit | None, made: _StoredMetrics | None) -> CheckResult:
    if decided is None or made is None:
        text = f"the slice is not in {'events' if decided is None else TABLE}"
    else:
        text = f"metrics follow attempt {made.attempt}, events are of attempt {decided.attempt}"
    return CheckResult(passed=False, text=text)


def _build_result(touched: Collection[int], compared: _ComparedMinutes, problem: str | None) -> CheckResult:
    wrong = {minute: compared.wrong[minute] for minute in sorted(touched) if minute in compared.wrong}
    moving = sum(minute in compared.moving for minute in touched)
    numbers = {"minutes": len(touched), "unlike": len(wrong), "not_settled": moving}
    later = f"; {moving:,} wait for slices that metrics do not follow yet" if moving else ""
    texts = [problem] if problem else []
    texts += [f"{len(wrong):,} of {len(touched):,} minutes are not as the events say"] if wrong else []
    text = "; ".join(texts) or f"the {len(touched):,} minutes of the slice are as the events say"
    samples = [{"minute": convert_to_time(minute), "problem": unlike} for minute, unlike in wrong.items()]
    return CheckResult(passed=not texts, text=text + later, numbers=numbers, samples=samples[:SAMPLES])


@dataclass(frozen=True)
class _StoredMetrics:
    """The metrics of a slice: the commit that they follow, and the minutes that its events had then."""

    slice_commit: SliceCommit
    minutes: set[int]

    @property
    def attempt(self) -> int:
        """The attempt that they follow."""
        return self.slice_commit.attempt


def _read_metrics_commits(metrics: DeltaTable, keys: Sequence[str]) -> dict[str, _StoredMetrics]:
    found = read_slice_commits(metrics, keys)
    return {key: _StoredMetrics(slice_commit, {*slice_commit.extra[MINUTES]}) for key, slice_commit in found.items()}


def _read_event_minutes(events: DeltaTable, where: str) -> dict[str, set[int]]:
    """By slice the minutes of some events; one whose time somebody took away has none."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    there = f"event_time IS NOT NULL AND {where}"
    times = f"SELECT slice, arrow_cast(event_time, 'Int64') AS us FROM t WHERE {there}"
    for row in query(events, f"SELECT DISTINCT slice, {_MINUTE} AS minute FROM ({times})"):
        found[row["slice"]].add(row["minute"])
    return found


def _compare_minutes(
    stream: Stream, metrics: DeltaTable, events: DeltaTable, minutes: Collection[int]
) -> _ComparedMinutes:
    """First among the events of those hours; where that differs, among all events of their keys and all slices."""
    if not minutes:
        return _ComparedMinutes({})
    stored = _read_stored_minutes(stream, metrics, minutes)
    wrong = _find_minute_problems(stream, stored, _EventsQuery(stream, minutes).run(events), minutes)
    # Most often a slice was decided a moment ago; its events in those hours show it.
    moving = _select_affected_minutes(wrong, _read_unfollowed_minutes(metrics, events, wrong)) if wrong else set()
    left = wrong.keys() - moving
    if not left:
        return _ComparedMinutes({}, moving)
    decided, made = read_slice_commits(events), read_slice_commits(metrics)
    again = [
        key for key, slice_commit in made.items() if key not in decided or decided[key].attempt != slice_commit.attempt
    ]
    late = [*decided.keys() - made.keys(), *again]
    totals = _EventsQuery(stream, left, whole=True, late=late).run(events)
    more = _select_affected_minutes(left, totals.moving | (_read_previous_minutes(metrics, again) if again else set()))
    return _ComparedMinutes(_find_minute_problems(stream, stored, totals, left - more), moving | more)


def _select_affected_minutes(minutes: Collection[int], unsettled: Collection[int]) -> set[int]:
    """The minutes whose hour holds one of the others."""
    return {m for m in minutes if any(at in unsettled for at in range(m - HOUR_MINUTES + 1, m + 1))}


def _read_unfollowed_minutes(metrics: DeltaTable, events: DeltaTable, minutes: Collection[int]) -> set[int]:
    """The minutes, in the hours of some, of events of slices that metrics do not follow."""
    near: defaultdict[str, set[int]] = defaultdict(set)
    for within in _build_time_conditions(minutes):
        for key, found in _read_event_minutes(events, within).items():
            near[key] |= found
    if not near:
        return set()
    decided, made = read_slice_commits(events, [*near]), read_slice_commits(metrics, [*near])
    late = [
        key for key, slice_commit in decided.items() if key not in made or made[key].attempt != slice_commit.attempt
    ]
    return {minute for key in late for minute in near[key]}


def _read_previous_minutes(metrics: DeltaTable, keys: Sequence[str]) -> set[int]:
    """The minutes of events that slices had before they were reprocessed, and those with the same versions."""
    found = {minute for made in _read_metrics_commits(metrics, keys).values() for minute in made.minutes}
    rows = query(metrics, f"SELECT arrow_cast(minute, 'Int64') AS us, {_LINKED} FROM t")
    return found | {row["us"] // _US for row in rows if any(us // _US in found for us in row["linked"] or ())}


@dataclass(frozen=True)
class _EventTotals:
    """The number and amount of events for each minute and status, and the minutes that metrics do not follow."""

    sums: Mapping[int, Mapping[str | None, tuple[int, Decimal]]]
    moving: set[int]


@dataclass(frozen=True)
class _EventsQuery:
    """A query of events for the totals of minutes.

    Args:
        stream: the stream.
        minutes: the requested minutes, and the hours that end with them.
        whole: whether versions of the same keys at other times take part: a version counts once, wherever it occurs.
        late: slices that metrics do not follow.
    """

    stream: Stream
    minutes: Collection[int]
    whole: bool = False
    late: Sequence[str] = ()

    def run(self, events: DeltaTable) -> _EventTotals:
        sums: defaultdict[int, dict[str | None, tuple[int, Decimal]]] = defaultdict(dict)
        moving = set()
        for within in _build_time_conditions(self.minutes):
            for row in query(events, self._build_sql(within)):
                if row["events"]:
                    sums[row["minute"]][row["status"]] = (row["events"], row["amount"] or Decimal(0))
                if row["late"]:
                    moving.add(row["minute"])
        return _EventTotals(sums, moving)

    def _build_sql(self, within: str) -> str:
        metrics = require_metrics(self.stream)
        # An integer is summed as a decimal, which cannot overflow.
        amount = (
            quote_column(metrics.amount)
            if find_scale(self.stream)
            else f"CAST({quote_column(metrics.amount)} AS DECIMAL(28,0))"
        )
        among = f"key IN (SELECT key FROM t WHERE {within})" if self.whole else within
        late = slice_is_one_of(self.late) if self.late else "false"
        return f"""
            SELECT minute, status, count(*) FILTER (WHERE place = 1) AS events,
                   sum(amount) FILTER (WHERE place = 1) AS amount, max(late) AS late
            FROM (SELECT {_MINUTE} AS minute, status, amount, inside,
                         row_number() OVER (PARTITION BY key, version ORDER BY origin_timestamp_ms, origin_partition,
                                            origin_offset, origin_generation) AS place,
                         max(late) OVER (PARTITION BY key, version) AS late
                  FROM (SELECT key, version, arrow_cast(event_time, 'Int64') AS us,
                               {quote_column(metrics.status)} AS status, {amount} AS amount,
                               {within} AS inside, CASE WHEN {late} THEN 1 ELSE 0 END AS late,
                               origin_timestamp_ms, origin_partition, origin_offset, origin_generation
                        FROM t WHERE {among}))
            WHERE inside GROUP BY minute, status"""


def _build_time_conditions(minutes: Collection[int]) -> list[str]:
    """The SQL conditions, each for one question, of the events of these minutes and of the hours that end with them.

    No minute is in two of them.
    """
    ranges: list[list[int]] = []
    for minute in sorted(minutes):
        if ranges and minute - HOUR_MINUTES < ranges[-1][1]:
            ranges[-1][1] = minute + 1
        else:
            ranges.append([minute - HOUR_MINUTES + 1, minute + 1])
    conditions = [
        f"(event_time >= {_format_time(start)} AND event_time < {_format_time(end)})" for start, end in ranges
    ]
    return [f"({' OR '.join(some)})" for some in split_by_count(conditions, MAX_RANGES)]


def _format_time(minute: int) -> str:
    return f"arrow_cast({minute * _US}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _read_stored_minutes(stream: Stream, metrics: DeltaTable, minutes: Collection[int]) -> dict[int, list[Row]]:
    """The rows of these minutes."""
    days = sorted({format_day(minute) for minute in minutes})
    where = slice_is_one_of(days) if len(days) <= MAX_RANGES else "true"
    names = [name for name in build_schema(stream).names if name not in {"slice", "minute", "linked"}]
    columns = ", ".join(["slice", "arrow_cast(minute, 'Int64') AS us", *map(quote_column, names)])
    found: dict[int, list[Row]] = {minute: [] for minute in minutes}
    for row in query(metrics, f"SELECT {columns} FROM t WHERE {where}"):
        minute = row["us"] // _US
        if minute in found:
            found[minute].append(row)
    return found


def _find_minute_problems(
    stream: Stream, stored: Mapping[int, Sequence[Row]], totals: _EventTotals, minutes: Collection[int]
) -> dict[int, str]:
    found = {
        minute: _find_problem(stored[minute], _build_expected_row(stream, totals.sums, minute)) for minute in minutes
    }
    return {minute: problem for minute, problem in found.items() if problem}


def _find_problem(rows: Sequence[Row], expected: Row | None) -> str | None:
    if expected is None:
        return "a row, and no event" if rows else None
    if len(rows) != 1:
        return "several rows" if rows else "events, and no row"
    wrong = [f"{name} is {rows[0][name]}, not {value}" for name, value in expected.items() if rows[0][name] != value]
    return ", ".join(wrong) or None


def _build_expected_row(
    stream: Stream, sums: Mapping[int, Mapping[str | None, tuple[int, Decimal]]], minute: int
) -> dict[str, Any] | None:
    """The row of a minute; None without events."""
    if minute not in sums:
        return None
    row: dict[str, Any] = {"slice": format_day(minute), "us": minute * _US}
    row["events"] = sum(events for events, _ in sums[minute].values())
    for status in select_statuses(stream):
        row[f"{status}_events"], row[f"{status}_amount"] = sums[minute].get(status, (0, Decimal(0)))
    hour = [sums[at] for at in range(minute - HOUR_MINUTES + 1, minute + 1) if at in sums]
    counted = [one[status] for one in hour for status in require_metrics(stream).mean_of if status in one]
    events, amount = sum(events for events, _ in counted), Decimal(0)
    for _, more in counted:
        amount = _EXACT.add(amount, more)
    unit = Decimal(1).scaleb(-find_scale(stream) - MEAN_DIGITS)
    mean = _EXACT.divide(amount, events).quantize(unit, ROUND_HALF_UP, _EXACT) if events else None
    return {**row, "hour_events": events, "hour_amount": amount, "hour_mean": mean}
