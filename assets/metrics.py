"""Metrics: one row for each minute of event time, with sums by status and the mean of a moving hour.

What belongs here: the questions to the table of events, and the commit of the minutes that slices touched. What does
not: which minutes hang together, and the arithmetic (`highwater.minutes`).

A version of a key counts once, wherever its events stand: the earliest origin. So a slice computes again, from events,
the minutes of its rows, those of its rows before, and those that hold other contents of the same versions. One commit
writes them beside the proof; it takes the version after the one that was read or fails, so writers follow each other.
`docs/adr/` has the reasons and the figures. Nothing here needs a JVM.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from assets import events
from assets.commit import LEASE_SECONDS, Clock, Standing, require_newer
from assets.work import SliceReport, Work
from highwater.errors import SupersededAttemptError
from highwater.minutes import (
    HOUR_MINUTES,
    MEAN_DIGITS,
    Minute,
    Sums,
    batches,
    closed,
    day_of,
    hours,
    seen_by,
    spans,
    time_of,
)
from resources.lake import open_or_away, proofs_in, query, sizes, slice_is_one_of
from resources.small_tables import has_rows, opened, replace_partitions

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Metrics, Stream
    from highwater.proof import Proof

TABLE = "metrics"
TRIES = 5
# Events in one question, so that a run of any size is answered in some hundred megabytes.
MOST_EVENTS = 1_000_000
# Ranges in one question, and partitions in one: each is a branch that every file's statistics are held against.
MOST_SPANS = 100
MOST_PARTITIONS = 300
# What a page shows: so many of the newest minutes.
NEWEST = 30
# The longest bar of the plot.
BAR = 30
_MICROSECONDS = 60_000_000
_MINUTE = f"((us - ((us % {_MICROSECONDS}) + {_MICROSECONDS}) % {_MICROSECONDS}) / {_MICROSECONDS})"
# The rule of `assets.current`: of equal versions the earliest origin.
_EARLIEST = "origin_timestamp, origin_partition, origin_offset, origin_generation"


def scale_of(stream: Stream) -> int:
    """Digits of the amounts behind the point."""
    kind = stream.field_named(_declared(stream).amount).type
    return int(kind.rstrip(")").split(",")[1]) if kind.startswith("decimal") else 0


def statuses_of(stream: Stream) -> tuple[str, ...]:
    """The values by which events are counted."""
    return stream.field_named(_declared(stream).status).one_of


def schema(stream: Stream) -> pa.Schema:
    """The columns of the stream's table."""
    import pyarrow as pa

    minute, scale = pa.timestamp("us", "UTC"), scale_of(stream)
    amount = pa.decimal128(38, scale)
    by_status = [
        column
        for status in statuses_of(stream)
        for column in ((f"{status}_events", pa.int64()), (f"{status}_amount", amount))
    ]
    return pa.schema(
        [
            ("slice", pa.string()),
            ("minute", minute),
            ("events", pa.int64()),
            *by_status,
            ("hour_events", pa.int64()),
            ("hour_amount", amount),
            ("hour_mean", pa.decimal128(38, scale + MEAN_DIGITS)),
            ("linked", pa.list_(minute)),
            ("proof", pa.string()),
        ]
    )


def described(stream: Stream) -> str:
    """What the rows rest on beside events; a table of another description is made anew."""
    metrics = _declared(stream)
    return (
        f"{metrics.amount} by {metrics.status} ({', '.join(statuses_of(stream))}), {scale_of(stream)} digits; "
        f"mean of {', '.join(metrics.mean_of)} over {HOUR_MINUTES} minutes"
    )


def _declared(stream: Stream) -> Metrics:
    assert stream.metrics is not None, "a stream without metrics has no such table"
    return stream.metrics


def materialise(work: Work) -> list[SliceReport]:
    """Compute the minutes that the slices touched; a report for each slice, in their order.

    Raises:
        TemporaryError: events of a slice are not there yet.
        SupersededAttemptError: other writers were first again and again.
        DependencyAwayError: the lake is away; nothing was committed.
    """
    for tries in range(1, TRIES + 1):
        try:
            name = f"commit {work.stream.name}/{TABLE}"
            with work.ledger.lease(name, seconds=LEASE_SECONDS, wait=10 * LEASE_SECONDS) as lease:
                return _follow_events(work, lease.check)
        except SupersededAttemptError:
            if tries == TRIES:
                raise
    raise AssertionError("unreachable")


def _follow_events(work: Work, check: Callable[[], None]) -> list[SliceReport]:
    clock = Clock()
    path = work.lake.path(work.stream.name, TABLE)
    # Metrics first: whoever commits after what was read here has read events that are no older.
    table = opened(path, schema(work.stream), described(work.stream))
    decided = events.require(work, events.TABLE)
    source = open_or_away(work.lake.path(work.stream.name, events.TABLE))
    source.load_as_version(decided.version)
    standing = Standing(proofs_in(table, work.keys), table.version())
    require_newer(decided.proofs, {key: standing.attempt(key) for key in work.keys})
    # A table without a row takes in all slices that were decided before it came.
    decisions = decided.proofs if has_rows(table) else proofs_in(source)
    stale = {key: proof for key, proof in decisions.items() if standing.attempt(key) != proof.attempt}
    notes = {key: "already followed the events" for key in work.keys if key not in stale}
    version, made = -1, _Made({}, {})
    if stale:
        with clock.phase("compute"):
            made = _Computation(work.stream, source, table).made(stale, standing.proofs)
        with clock.phase("commit"):
            work.before_commit()
            check()
            version = _commit(work.stream, table, made)
    for key in sorted(notes):
        work.log(f"{key}: {notes[key]}")
    proofs = {**standing.proofs, **{proof.key: proof for proof in made.proofs}}
    newest = _newest(work.stream, open_or_away(path))
    return [
        SliceReport(
            piece=piece,
            attempt=proofs[piece.key].attempt,
            rows=proofs[piece.key].rows or 0,
            delta_version=version,
            counts=dict(proofs[piece.key].counts),
            seconds=dict(clock.seconds),
            note=notes.get(piece.key),
            samples=newest,
            plot=_drawn(newest),
            measures=_measures(newest),
        )
        for piece in work.slices
    ]


@dataclass(frozen=True)
class _Made:
    """What a commit writes.

    Args:
        days: for each day that changed all of its minutes.
        touched: for each slice its proof and the minutes of its events.
    """

    days: Mapping[str, Mapping[int, Minute]]
    touched: Mapping[str, tuple[Proof, Collection[int]]]

    @property
    def proofs(self) -> list[Proof]:
        return [proof for proof, _ in self.touched.values()]


class _Stored:
    """The minutes that stand in the table, read a day at a time."""

    def __init__(self, stream: Stream, table: DeltaTable) -> None:
        self._stream = stream
        self._table = table
        self._days: dict[str, dict[int, Minute]] = {}

    def days_of(self, minutes: Iterable[int]) -> dict[int, Minute]:
        """All minutes of the days in which these lie."""
        return self.on({day_of(minute) for minute in minutes})

    def on(self, wanted: Collection[str]) -> dict[int, Minute]:
        """All minutes of some days."""
        lacking = set(wanted) - self._days.keys()
        if lacking:
            self._days |= {day: {} for day in lacking}
            where = slice_is_one_of(sorted(lacking)) if len(lacking) <= MOST_PARTITIONS else "true"
            for row in query(self._table, f"SELECT {self._columns} FROM t WHERE proof IS NULL AND {where}"):
                minute, found = _minute(self._stream, row)
                if day_of(minute) in lacking:
                    self._days[day_of(minute)][minute] = found
        return {minute: found for day in wanted for minute, found in self._days[day].items()}

    def linked(self, minutes: Collection[int]) -> dict[int, Collection[int]]:
        """The links of some minutes."""
        stored = self.days_of(minutes)
        return {minute: stored[minute].linked for minute in minutes if minute in stored and stored[minute].linked}

    @property
    def _columns(self) -> str:
        names = [name for name in schema(self._stream).names if name not in {"slice", "minute", "linked", "proof"}]
        return ", ".join([*map(_quoted, names), "arrow_cast(minute, 'Int64') AS us", _LINKED])


_LINKED = "arrow_cast(linked, 'List(Int64)') AS linked"


def _minute(stream: Stream, row: Mapping[str, Any]) -> tuple[int, Minute]:
    by_status = {s: Sums(row[f"{s}_events"], row[f"{s}_amount"]) for s in statuses_of(stream) if row[f"{s}_events"]}
    hour = Sums(row["hour_events"], row["hour_amount"])
    linked = frozenset(us // _MICROSECONDS for us in row["linked"] or ())
    return row["us"] // _MICROSECONDS, Minute(row["events"], by_status, hour, linked)


class _Computation:
    """The minutes that slices touched, computed from one version of events."""

    def __init__(self, stream: Stream, source: DeltaTable, table: DeltaTable) -> None:
        self._stream = stream
        self._source = source
        self._table = table
        self._stored = _Stored(stream, table)
        self._links: defaultdict[int, set[int]] = defaultdict(set)

    def made(self, stale: Mapping[str, Proof], standing: Mapping[str, Proof]) -> _Made:
        """All that is to be written for the slices; `standing` has the proofs of those that the table holds already."""
        weights: defaultdict[int, int] = defaultdict(int)
        touched = {}
        for part in _parts(stale):
            by_slice = self._minutes_of(part)
            self._look_up(part)
            for key in part:
                own = by_slice.get(key, {})
                for minute, count in own.items():
                    weights[minute] += count
                touched[key] = (replace(stale[key], rows=len(own)), [*own])
        before = self._before([key for key in stale if key in standing])
        affected = closed({*weights, *before, *self._links}, self._linked)
        return _Made(self._days(affected, self._values(affected, weights)), touched)

    def _minutes_of(self, keys: Collection[str]) -> dict[str, dict[int, int]]:
        """The minutes of the slices' events, with their number."""
        found: defaultdict[str, dict[int, int]] = defaultdict(dict)
        asked = (
            f"SELECT slice, {_MINUTE} AS minute, count(*) AS events FROM ({_events(slice_is_one_of(keys))}) "
            "GROUP BY slice, minute"
        )
        for row in _rows(self._source, asked):
            found[row["slice"]][row["minute"]] = row["events"]
        return found

    def _look_up(self, keys: Collection[str]) -> None:
        """Note which minutes hold other contents of the versions that the slices bring: they hang together.

        A second delivery of the same content has the same time, so it stands in a minute that is computed anyway.
        """
        asked = f"""
            WITH mine AS (SELECT DISTINCT key, version, {_MINUTE} AS minute FROM ({_events(slice_is_one_of(keys))})),
                 whole AS (SELECT key, version, {_MINUTE} AS minute FROM ({_events()}))
            SELECT DISTINCT mine.minute AS minute, whole.minute AS other
            FROM whole JOIN mine ON whole.key = mine.key AND whole.version = mine.version
            WHERE whole.minute <> mine.minute"""
        for row in _rows(self._source, asked):
            self._links[row["minute"]].add(row["other"])
            self._links[row["other"]].add(row["minute"])

    def _before(self, keys: Collection[str]) -> set[int]:
        """The minutes of the events that the slices had when they were last computed."""
        if not keys:
            return set()
        asked = f"SELECT {_LINKED} FROM t WHERE proof IS NOT NULL AND {slice_is_one_of(keys)}"
        return {us // _MICROSECONDS for row in _rows(self._table, asked) for us in row["linked"] or ()}

    def _linked(self, minutes: Collection[int]) -> dict[int, Collection[int]]:
        stored = self._stored.linked(minutes)
        return {m: {*stored.get(m, ()), *self._links.get(m, ())} for m in minutes if m in stored or m in self._links}

    def _values(self, affected: Collection[int], weights: Mapping[int, int]) -> dict[int, Minute]:
        """What the minutes hold now; those without events are left out."""
        stored, links = self._stored.days_of(affected), self._linked(affected)
        weighed = {m: weights.get(m, 0) + (stored[m].events if m in stored else 0) for m in affected}
        found: dict[int, Minute] = {}
        for part in batches(weighed, links, MOST_EVENTS):
            sums: defaultdict[int, dict[str | None, Sums]] = defaultdict(dict)
            for row in _rows(self._source, self._summed(part)):
                if row["minute"] in part:
                    sums[row["minute"]][row["status"]] = Sums(row["events"], row["amount"] or Decimal(0))
            for minute, by_status in sums.items():
                known = {status: by_status[status] for status in statuses_of(self._stream) if status in by_status}
                count = sum(one.events for one in by_status.values())
                found[minute] = Minute(count, known, linked=frozenset(links.get(minute, ())))
        return found

    def _summed(self, minutes: Collection[int]) -> str:
        """The question for the sums of minutes: each version of a key once, the one of the earliest origin."""
        metrics = _declared(self._stream)
        status = _quoted(metrics.status)
        # An integer is summed as a decimal, which cannot overflow.
        amount = (
            _quoted(metrics.amount) if scale_of(self._stream) else f"CAST({_quoted(metrics.amount)} AS DECIMAL(28,0))"
        )
        within = " OR ".join(
            f"(event_time >= {_timestamp(start)} AND event_time < {_timestamp(end)})"
            for start, end in spans(minutes, MOST_SPANS)
        )
        return f"""
            SELECT minute, status, count(*) AS events, sum(amount) AS amount
            FROM (SELECT {_MINUTE} AS minute, {status} AS status, {amount} AS amount,
                         row_number() OVER (PARTITION BY key, version ORDER BY {_EARLIEST}) AS place
                  FROM ({_events(f"({within})", f"{_EARLIEST}, {status}, {_quoted(metrics.amount)}")}))
            WHERE place = 1 GROUP BY minute, status"""

    def _days(self, affected: Collection[int], values: Mapping[int, Minute]) -> dict[str, dict[int, Minute]]:
        """The days that differ from what stands, after the hours that saw a changed minute are summed again."""
        reach = {m + by for m in affected for by in (1 - HOUR_MINUTES, 0, HOUR_MINUTES - 1)}
        stored = self._stored.days_of(reach)
        now = {minute: found for minute, found in stored.items() if minute not in affected} | dict(values)
        sums = hours(now, seen_by(affected, now), _declared(self._stream).mean_of)
        now |= {minute: replace(now[minute], hour=hour) for minute, hour in sums.items()}
        days = {day_of(m) for m in now.keys() | stored.keys() if now.get(m) != stored.get(m)}
        found: dict[str, dict[int, Minute]] = {day: {} for day in days}
        for minute in sorted(now):
            if day_of(minute) in found:
                found[day_of(minute)][minute] = now[minute]
        return found


def _parts(stale: Mapping[str, Proof]) -> list[list[str]]:
    """The slices in parts that are looked up together."""
    found: list[list[str]] = []
    room = 0
    for key, proof in stale.items():
        weight = proof.rows or 0
        if not found or weight > room or len(found[-1]) == MOST_PARTITIONS:
            found.append([])
            room = MOST_EVENTS
        found[-1].append(key)
        room -= weight
    return found


def _events(where: str = "true", more: str = "slice") -> str:
    us = "arrow_cast(event_time, 'Int64') AS us"
    return f"SELECT key, version, {us}, {more} FROM t WHERE proof IS NULL AND {where}"


def _timestamp(minute: int) -> str:
    return f"arrow_cast({minute * _MICROSECONDS}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _rows(table: DeltaTable, asked: str) -> Iterable[Mapping[str, Any]]:
    return query(table, asked)


def _commit(stream: Stream, table: DeltaTable, made: _Made) -> int:
    import pyarrow as pa

    columns = schema(stream)
    rows = [_row(stream, day, m, found) for day, minutes in made.days.items() for m, found in minutes.items()]
    rows += [
        {"slice": key, "proof": proof.to_json(), "linked": [m * _MICROSECONDS for m in sorted(minutes)]}
        for key, (proof, minutes) in made.touched.items()
    ]
    return replace_partitions(
        table, pa.Table.from_pylist(rows, columns), sorted({*made.days, *made.touched}), made.proofs
    )


def _row(stream: Stream, day: str, minute: int, found: Minute) -> dict[str, Any]:
    by_status = {status: found.by_status.get(status, Sums()) for status in statuses_of(stream)}
    return {
        "slice": day,
        "minute": minute * _MICROSECONDS,
        "events": found.events,
        **{f"{status}_events": sums.events for status, sums in by_status.items()},
        **{f"{status}_amount": sums.amount for status, sums in by_status.items()},
        "hour_events": found.hour.events,
        "hour_amount": found.hour.amount,
        "hour_mean": found.hour.mean(scale_of(stream) + MEAN_DIGITS),
        "linked": [other * _MICROSECONDS for other in sorted(found.linked)] or None,
    }


def _newest(stream: Stream, table: DeltaTable) -> list[dict[str, Any]]:
    """The newest minutes, for a person: the latest first."""
    days = sorted({day for day in sizes(table) if "@" not in day}, reverse=True)
    stored, found = _Stored(stream, table), dict[int, Minute]()
    for day in days:
        found |= stored.on([day])
        if len(found) >= NEWEST:
            break
    return [_told(stream, minute, found[minute]) for minute in sorted(found, reverse=True)[:NEWEST]]


def _told(stream: Stream, minute: int, found: Minute) -> dict[str, Any]:
    row = _row(stream, day_of(minute), minute, found)
    told = {name: value for name, value in row.items() if name not in {"slice", "minute", "linked"}}
    return {"minute": time_of(minute), **told}


def _drawn(newest: Sequence[Mapping[str, Any]]) -> str | None:
    """The newest minutes as bars, the latest below."""
    if not newest:
        return None
    most = max(row["events"] for row in newest)
    lines = [
        f"{row['minute']}  {'█' * max(1, round(BAR * row['events'] / most)):<{BAR}}  {row['events']:>9,}"
        f"  {'-' if row['hour_mean'] is None else row['hour_mean']}"
        for row in reversed(newest)
    ]
    head = f"{'minute (UTC)':<16}  {'events':<{BAR}}  {'':>9}  mean of the hour"
    return "\n".join(["```text", head, *lines, "```"])


def _measures(newest: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What Dagster plots from slice to slice: a plot needs no exact number."""
    if not newest:
        return {}
    found = {name: newest[0][name] for name in ("events", "hour_events", "hour_amount", "hour_mean")}
    return {f"newest_minute/{name}": float(value) for name, value in found.items() if value is not None}
