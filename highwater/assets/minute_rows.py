"""The rows of metrics: their columns, how minutes are written and read, and what a person is shown of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.minutes import HOUR_MINUTES, MEAN_DIGITS, Minute, Sums, day_of, time_of
from highwater.resources.delta import query, quoted, slice_is_one_of

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Metrics, Stream

# Partitions in one question: each is a branch that every file is compared with.
MOST_PARTITIONS = 300
# A page shows this many of the newest minutes.
NEWEST = 30
# The longest bar of the plot.
BAR = 30
MICROSECONDS = 60_000_000
# In the commit record of a slice: the minutes of its events.
MINUTES = "minutes"
LINKED = "arrow_cast(linked, 'List(Int64)') AS linked"


def scale_of(stream: Stream) -> int:
    """Digits of the amounts behind the point."""
    kind = stream.field_named(declared(stream).amount).type
    return int(kind.rstrip(")").split(",")[1]) if kind.startswith("decimal") else 0


def statuses_of(stream: Stream) -> tuple[str, ...]:
    """The values by which events are counted."""
    return tuple(str(value) for value in stream.field_named(declared(stream).status).one_of)


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
        ]
    )


def described(stream: Stream) -> str:
    """The description of the rows' inputs beside events; a table of another description is recreated."""
    metrics = declared(stream)
    return (
        f"{metrics.amount} by {metrics.status} ({', '.join(statuses_of(stream))}), {scale_of(stream)} digits; "
        f"mean of {', '.join(metrics.mean_of)} over {HOUR_MINUTES} minutes"
    )


def declared(stream: Stream) -> Metrics:
    assert stream.metrics is not None, "a stream without metrics has no such table"
    return stream.metrics


class StoredMinutes:
    """The minutes that are in the table, read a day at a time."""

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
            for row in query(self._table, f"SELECT {self._columns} FROM t WHERE {where}"):
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
        names = [name for name in schema(self._stream).names if name not in {"slice", "minute", "linked"}]
        return ", ".join([*map(quoted, names), "arrow_cast(minute, 'Int64') AS us", LINKED])


def _minute(stream: Stream, row: Mapping[str, Any]) -> tuple[int, Minute]:
    by_status = {s: Sums(row[f"{s}_events"], row[f"{s}_amount"]) for s in statuses_of(stream) if row[f"{s}_events"]}
    hour = Sums(row["hour_events"], row["hour_amount"])
    linked = frozenset(us // MICROSECONDS for us in row["linked"] or ())
    return row["us"] // MICROSECONDS, Minute(row["events"], by_status, hour, linked)


def row_of(stream: Stream, day: str, minute: int, found: Minute) -> dict[str, Any]:
    by_status = {status: found.by_status.get(status, Sums()) for status in statuses_of(stream)}
    return {
        "slice": day,
        "minute": minute * MICROSECONDS,
        "events": found.events,
        **{f"{status}_events": sums.events for status, sums in by_status.items()},
        **{f"{status}_amount": sums.amount for status, sums in by_status.items()},
        "hour_events": found.hour.events,
        "hour_amount": found.hour.amount,
        "hour_mean": found.hour.mean(scale_of(stream) + MEAN_DIGITS),
        "linked": [other * MICROSECONDS for other in sorted(found.linked)] or None,
    }


def newest_of(stream: Stream, table: DeltaTable) -> list[dict[str, Any]]:
    """The newest minutes, for a person: the latest first."""
    days = sorted({str(one["slice"]) for one in table.partitions()}, reverse=True)
    stored, found = StoredMinutes(stream, table), dict[int, Minute]()
    for day in days:
        found |= stored.on([day])
        if len(found) >= NEWEST:
            break
    return [_plain_row(stream, minute, found[minute]) for minute in sorted(found, reverse=True)[:NEWEST]]


def _plain_row(stream: Stream, minute: int, found: Minute) -> dict[str, Any]:
    row = row_of(stream, day_of(minute), minute, found)
    values = {name: value for name, value in row.items() if name not in {"slice", "minute", "linked"}}
    return {"minute": time_of(minute), **values}


def drawn(newest: Sequence[Mapping[str, Any]]) -> str | None:
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


def measures_of(newest: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers that Dagster plots from slice to slice: a plot needs no exact number."""
    if not newest:
        return {}
    found = {name: newest[0][name] for name in ("events", "hour_events", "hour_amount", "hour_mean")}
    return {f"newest_minute/{name}": float(value) for name, value in found.items() if value is not None}
