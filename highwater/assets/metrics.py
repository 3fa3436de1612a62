"""Metrics: one row for each minute of event time, with sums by status and the mean of a moving hour."""

# A version of a key counts once, at its earliest origin. So a slice computes three kinds of minutes again, from
# events: those of its rows, those of its earlier rows, and those with other contents of the same versions. One commit
# writes them with the slice commit. It takes the version after the one that was read, or fails: so writers follow
# each other. ADR 7 has the reasons and the figures. Nothing here needs a JVM.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from highwater.assets import events
from highwater.assets.commit import LEASE_SECONDS, Clock, CommittedSlices, build_turn_name, require_newer
from highwater.assets.minute_rows import (
    MAX_PARTITIONS,
    MICROSECONDS,
    MINUTES,
    StoredMinutes,
    build_row,
    build_schema,
    describe_inputs,
    draw_plot,
    find_scale,
    load_newest_minutes,
    require_metrics,
    select_measures,
    select_statuses,
)
from highwater.assets.work import SliceReport, Work
from highwater.batching import split_by_count
from highwater.errors import SupersededAttemptError
from highwater.minutes import (
    HOUR_MINUTES,
    Minute,
    Sums,
    build_spans,
    collect_linked_minutes,
    format_day,
    select_affected_minutes,
    split_minutes,
    sum_hours,
)
from highwater.resources.commit_log import has_records, read_slice_commits
from highwater.resources.commit_log_writer import replace_slices
from highwater.resources.delta import query, quote_column, slice_is_one_of
from highwater.resources.delta_rs_writes import open_or_create_table

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.slice_commits import SliceCommit

TABLE = "metrics"
TRIES = 5
# Events in one question, so that a run of any size is answered in some hundred megabytes.
MAX_EVENTS = 1_000_000
# Ranges in one question: each is a branch that every file's statistics are compared with.
MAX_SPANS = 100
_MINUTE = f"((us - ((us % {MICROSECONDS}) + {MICROSECONDS}) % {MICROSECONDS}) / {MICROSECONDS})"
# The rule of `highwater.assets.current`: of equal versions the earliest origin.
_EARLIEST = "origin_timestamp_ms, origin_partition, origin_offset, origin_generation"


def materialise(work: Work) -> list[SliceReport]:
    """Compute the minutes that the slices touched; a report for each slice, in their order.

    Raises:
        TemporaryError: events of a slice are not there yet.
        SupersededAttemptError: other writers were first again and again.
        DependencyUnavailableError: the lake is unavailable; nothing was committed.
    """
    for tries in range(1, TRIES + 1):
        try:
            name = build_turn_name(work.stream.name, TABLE)
            with work.ledger.lease(name, seconds=LEASE_SECONDS, wait=10 * LEASE_SECONDS) as lease:
                return _follow_events(work, lease.check)
        except SupersededAttemptError:
            if tries == TRIES:
                raise
    raise AssertionError("unreachable")


def _follow_events(work: Work, check: Callable[[], None]) -> list[SliceReport]:
    clock = Clock()
    path = work.lake.build_table_path(work.stream.name, TABLE)
    # Metrics first: a run that commits after this read has read events that are no older.
    table = open_or_create_table(
        path,
        build_schema(work.stream),
        describe_inputs(work.stream),
        partition_by=["slice"],
        # Not of amounts: delta-rs makes them floating-point numbers there, and readers would miss rows by those.
        configuration={"delta.dataSkippingStatsColumns": "minute,events"},
    )
    decided = events.require_upstream_commits(work, events.TABLE)
    source = work.lake.open_existing_table(work.stream.name, events.TABLE, decided.version)
    committed = CommittedSlices(read_slice_commits(table, work.keys), table.version())
    require_newer(decided.slice_commits, {key: committed.find_attempt(key) for key in work.keys})
    # A table without a row takes in all slices that were decided before it came.
    decisions = decided.slice_commits if has_records(table) else read_slice_commits(source)
    stale = {
        key: slice_commit
        for key, slice_commit in decisions.items()
        if committed.find_attempt(key) != slice_commit.attempt
    }
    notes = {key: "already followed the events" for key in work.keys if key not in stale}
    version, made = committed.version, _MetricsRows({}, ())
    if stale:
        with clock.phase("compute"):
            made = _Computation(work.stream, source, table).compute_changes(stale)
        with clock.phase("commit"):
            work.before_commit()
            check()
            version = _commit(work, table, made)
    slice_commits = {
        **committed.slice_commits,
        **{slice_commit.key: slice_commit for slice_commit in made.slice_commits},
    }
    return _build_reports(work, table, slice_commits, notes, clock, version)


def _build_reports(
    work: Work,
    table: DeltaTable,
    slice_commits: Mapping[str, SliceCommit],
    notes: Mapping[str, str],
    clock: Clock,
    version: int,
) -> list[SliceReport]:
    for key in sorted(notes):
        work.log(f"{key}: {notes[key]}")
    newest = load_newest_minutes(work.stream, table)
    return [
        SliceReport(
            slice_=slice_,
            attempt=slice_commits[slice_.key].attempt,
            rows=slice_commits[slice_.key].rows or 0,
            delta_version=version,
            counts=dict(slice_commits[slice_.key].counts),
            seconds=dict(clock.seconds),
            note=notes.get(slice_.key),
            samples=newest,
            plot=draw_plot(newest),
            measures=select_measures(newest),
        )
        for slice_ in work.slices
    ]


@dataclass(frozen=True)
class _MetricsRows:
    """The rows and slice commits of a commit.

    Args:
        days: for each day that changed all of its minutes.
        slice_commits: the commit of each slice, with the minutes of its events.
    """

    days: Mapping[str, Mapping[int, Minute]]
    slice_commits: Sequence[SliceCommit]


class _Computation:
    """The minutes that slices touched, computed from one version of events."""

    def __init__(self, stream: Stream, source: DeltaTable, table: DeltaTable) -> None:
        self._stream = stream
        self._source = source
        self._table = table
        self._stored = StoredMinutes(stream, table)
        self._links: defaultdict[int, set[int]] = defaultdict(set)

    def compute_changes(self, stale: Mapping[str, SliceCommit]) -> _MetricsRows:
        """All that is to be written for the slices."""
        weights: defaultdict[int, int] = defaultdict(int)
        slice_commits = []
        for key, own in self._count_events_by_minute([*stale]).items():
            for minute, count in own.items():
                weights[minute] += count
            slice_commits.append(replace(stale[key], rows=len(own), extra={MINUTES: sorted(own)}))
        affected = self._collect_affected_minutes({*weights, *self._load_earlier_minutes([*stale])}, weights)
        return _MetricsRows(
            self._compute_changed_days(affected, self._compute_minutes(affected, weights)), slice_commits
        )

    def _count_events_by_minute(self, keys: Sequence[str]) -> dict[str, dict[int, int]]:
        """The minutes of each slice's events, with their number."""
        found: dict[str, dict[int, int]] = {key: {} for key in keys}
        for some in split_by_count(keys, MAX_PARTITIONS):
            events_query = _build_events_query(slice_is_one_of(some))
            sql = f"SELECT slice, {_MINUTE} AS minute, count(*) AS events FROM ({events_query}) GROUP BY slice, minute"
            for row in query(self._source, sql):
                found[row["slice"]][row["minute"]] = row["events"]
        return found

    def _collect_affected_minutes(self, begin: Collection[int], weights: Mapping[int, int]) -> set[int]:
        """The minutes and all minutes connected with them, by current events or by the table's earlier state.

        The earlier state matters for versions that are gone: nothing else leads to the versions that count instead.
        """
        found: set[int] = set()
        fresh = collect_linked_minutes(begin, self._load_links)
        while fresh:
            found |= fresh
            for part in split_minutes(self._estimate_events(fresh, weights), {}, MAX_EVENTS):
                self._look_up(part)
            fresh = collect_linked_minutes(fresh, self._load_links) - found
        return found

    def _look_up(self, minutes: Collection[int]) -> None:
        """Note which other minutes hold events of the versions that are in these: what counts is decided among them.

        A second delivery of the same content has the same time, so it is in a minute that is computed anyway.
        """
        in_minutes = _build_events_query(_build_time_filter(minutes))
        sql = f"""
            WITH mine AS (SELECT DISTINCT key, version, {_MINUTE} AS minute FROM ({in_minutes})),
                 whole AS (SELECT key, version, {_MINUTE} AS minute FROM ({_build_events_query()}))
            SELECT DISTINCT mine.minute AS minute, whole.minute AS other
            FROM mine JOIN whole ON whole.key = mine.key AND whole.version = mine.version
            WHERE whole.minute <> mine.minute"""
        for row in query(self._source, sql):
            if row["minute"] in minutes:
                self._links[row["minute"]].add(row["other"])

    def _load_earlier_minutes(self, keys: Collection[str]) -> set[int]:
        """The minutes of the events that the slices had when they were last computed."""
        return {
            minute
            for slice_commit in read_slice_commits(self._table, keys).values()
            for minute in slice_commit.extra[MINUTES]
        }

    def _load_links(self, minutes: Collection[int]) -> dict[int, Collection[int]]:
        stored = self._stored.load_links(minutes)
        return {m: {*stored.get(m, ()), *self._links.get(m, ())} for m in minutes if m in stored or m in self._links}

    def _estimate_events(self, minutes: Collection[int], weights: Mapping[int, int]) -> dict[int, int]:
        """The events of each minute, as far as they are known before they are asked for."""
        stored = self._stored.load_whole_days(minutes)
        return {m: weights.get(m, 0) + (stored[m].events if m in stored else 0) for m in minutes}

    def _compute_minutes(self, affected: Collection[int], weights: Mapping[int, int]) -> dict[int, Minute]:
        """The present values of the minutes; those without events are left out."""
        found: dict[int, Minute] = {}
        for part in split_minutes(self._estimate_events(affected, weights), self._links, MAX_EVENTS):
            sums: defaultdict[int, dict[str | None, Sums]] = defaultdict(dict)
            for row in query(self._source, self._build_sums_query(part)):
                if row["minute"] in part:
                    sums[row["minute"]][row["status"]] = Sums(row["events"], row["amount"] or Decimal(0))
            for minute, by_status in sums.items():
                known = {status: by_status[status] for status in select_statuses(self._stream) if status in by_status}
                count = sum(one.events for one in by_status.values())
                found[minute] = Minute(count, known, linked=frozenset(self._links.get(minute, ())))
        return found

    def _build_sums_query(self, minutes: Collection[int]) -> str:
        """The question for the sums of minutes: each version of a key once, the one of the earliest origin."""
        metrics = require_metrics(self._stream)
        status = quote_column(metrics.status)
        events = _build_events_query(
            _build_time_filter(minutes), f"{_EARLIEST}, {status}, {quote_column(metrics.amount)}"
        )
        # An integer is summed as a decimal, which cannot overflow.
        amount = (
            quote_column(metrics.amount)
            if find_scale(self._stream)
            else f"CAST({quote_column(metrics.amount)} AS DECIMAL(28,0))"
        )
        return f"""
            SELECT minute, status, count(*) AS events, sum(amount) AS amount
            FROM (SELECT {_MINUTE} AS minute, {status} AS status, {amount} AS amount,
                         row_number() OVER (PARTITION BY key, version ORDER BY {_EARLIEST}) AS place
                  FROM ({events}))
            WHERE place = 1 GROUP BY minute, status"""

    def _compute_changed_days(
        self, affected: Collection[int], values: Mapping[int, Minute]
    ) -> dict[str, dict[int, Minute]]:
        """The days that differ from the table, after the hours with a changed minute are summed again."""
        reach = {m + by for m in affected for by in (1 - HOUR_MINUTES, 0, HOUR_MINUTES - 1)}
        stored = self._stored.load_whole_days(reach)
        now = {minute: found for minute, found in stored.items() if minute not in affected} | dict(values)
        sums = sum_hours(now, select_affected_minutes(affected, now), require_metrics(self._stream).mean_of)
        now |= {minute: replace(now[minute], hour=hour) for minute, hour in sums.items()}
        days = {format_day(m) for m in now.keys() | stored.keys() if now.get(m) != stored.get(m)}
        found: dict[str, dict[int, Minute]] = {day: {} for day in days}
        for minute in sorted(now):
            if format_day(minute) in found:
                found[format_day(minute)][minute] = now[minute]
        return found


def _build_time_filter(minutes: Collection[int]) -> str:
    """The events of the minutes, and of minutes between them where they are many."""
    ranges = (
        f"(event_time >= {_format_timestamp(start)} AND event_time < {_format_timestamp(end)})"
        for start, end in build_spans(minutes, MAX_SPANS)
    )
    return f"({' OR '.join(ranges)})"


def _build_events_query(where: str = "true", more: str = "slice") -> str:
    us = "arrow_cast(event_time, 'Int64') AS us"
    return f"SELECT key, version, {us}, {more} FROM t WHERE {where}"


def _format_timestamp(minute: int) -> str:
    return f"arrow_cast({minute * MICROSECONDS}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _commit(work: Work, table: DeltaTable, made: _MetricsRows) -> int:
    import pyarrow as pa

    stream = work.stream
    rows = [build_row(stream, day, m, found) for day, minutes in made.days.items() for m, found in minutes.items()]
    return replace_slices(
        table, pa.Table.from_pylist(rows, build_schema(stream)), sorted(made.days), made.slice_commits, work.run
    )
