"""The rows of metrics: their columns, how minutes are written and read, and what a person is shown of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.minutes import HOUR_MINUTES, MEAN_DIGITS, Minute, Sums, convert_to_time, format_day
from highwater.resources.delta import query, quote_column, slice_is_one_of

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Metrics, Stream

# Partitions in one question: each is a branch that every file is compared with.
MAX_PARTITIONS = 300
# A page shows this many of the newest minutes.
NEWEST = 30
# The longest bar of the plot.
BAR = 30
MICROSECONDS = 60_000_000
# In the commit record of a slice: the minutes of its events.
MINUTES = "minutes"
LINKED = "arrow_cast(linked, 'List(Int64)') AS linked"


def find_scale(stream: Stream) -> int:
    """Digits of the amounts after the decimal point."""
    kind = stream.find_field(require_metrics(stream).amount).type
    return int(kind.rstrip(")").split(",")[1]) if kind.startswith("decimal") else 0


def select_statuses(stream: Stream) -> tuple[str, ...]:
    """The values by which events are counted."""
    return tuple(str(value) for value in stream.find_field(require_metrics(stream).status).one_of)


def build_schema(stream: Stream) -> pa.Schema:
    """The columns of the stream's table."""
    import pyarrow as pa

    minute, scale = pa.timestamp("us", "UTC"), find_scale(stream)
    amount = pa.decimal128(38, scale)
    by_status = [
        column
        for status in select_statuses(stream)
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


def describe_inputs(stream: Stream) -> str:
    """The description of the rows' inputs beside events; a table of another description is recreated."""
    metrics = require_metrics(stream)
    return (
        f"{metrics.amount} by {metrics.status} ({', '.join(select_statuses(stream))}), {find_scale(stream)} digits; "
        f"mean of {', '.join(metrics.mean_of)} over {HOUR_MINUTES} minutes"
    )


def require_metrics(stream: Stream) -> Metrics:
    """The declared metrics of a stream that has the table."""
    assert stream.metrics is not None, "a stream without metrics has no such table"
    return stream.metrics


class StoredMinutes:
    """The minutes that are in the table, read a day at a time."""

    def __init__(self, stream: Stream, table: DeltaTable) -> None:
        self._stream = stream
        self._table = table
        self._days: dict[str, dict[int, Minute]] = {}

    def load_whole_days(self, minutes: Iterable[int]) -> dict[int, Minute]:
        """All minutes of the days in which these lie."""
        return self.load_days({format_day(minute) for minute in minutes})

    def load_days(self, wanted: Collection[str]) -> dict[int, Minute]:
        """All minutes of some days."""
        lacking = set(wanted) - self._days.keys()
        if lacking:
            self._days |= {day: {} for day in lacking}
            where = slice_is_one_of(sorted(lacking)) if len(lacking) <= MAX_PARTITIONS else "true"
            for row in query(self._table, f"SELECT {self._columns} FROM t WHERE {where}"):
                minute, found = _parse_minute(self._stream, row)
                if format_day(minute) in lacking:
                    self._days[format_day(minute)][minute] = found
        return {minute: found for day in wanted for minute, found in self._days[day].items()}

    def load_links(self, minutes: Collection[int]) -> dict[int, Collection[int]]:
        """The links of some minutes."""
        stored = self.load_whole_days(minutes)
        return {minute: stored[minute].linked for minute in minutes if minute in stored and stored[minute].linked}

    @property
    def _columns(self) -> str:
        names = [name for name in build_schema(self._stream).names if name not in {"slice", "minute", "linked"}]
        return ", ".join([*map(quote_column, names), "arrow_cast(minute, 'Int64') AS us", LINKED])


def _parse_minute(stream: Stream, row: Mapping[str, Any]) -> tuple[int, Minute]:
    by_status = {s: Sums(row[f"{s}_events"], row[f"{s}_amount"]) for s in select_statuses(stream) if row[f"{s}_events"]}
    hour = Sums(row["hour_events"], row["hour_amount"])
    linked = frozenset(us // MICROSECONDS for us in row["linked"] or ())
    return row["us"] // MICROSECONDS, Minute(row["events"], by_status, hour, linked)


def build_row(stream: Stream, day: str, minute: int, found: Minute) -> dict[str, Any]:
    """The row of `metrics` for a minute.

    Args:
        stream: the declaration.
        day: the day of the minute, the partition of the table.
        minute: minutes since 1970.
        found: its sums.
    """
    by_status = {status: found.by_status.get(status, Sums()) for status in select_statuses(stream)}
    return {
        "slice": day,
        "minute": minute * MICROSECONDS,
        "events": found.events,
        **{f"{status}_events": sums.events for status, sums in by_status.items()},
        **{f"{status}_amount": sums.amount for status, sums in by_status.items()},
        "hour_events": found.hour.events,
        "hour_amount": found.hour.amount,
        "hour_mean": found.hour.mean(find_scale(stream) + MEAN_DIGITS),
        "linked": [other * MICROSECONDS for other in sorted(found.linked)] or None,
    }


def load_newest_minutes(stream: Stream, table: DeltaTable) -> list[dict[str, Any]]:
    """The newest minutes, for a person: the latest first."""
    days = sorted({str(one["slice"]) for one in table.partitions()}, reverse=True)
    stored, found = StoredMinutes(stream, table), dict[int, Minute]()
    for day in days:
        found |= stored.load_days([day])
        if len(found) >= NEWEST:
            break
    return [_build_display_row(stream, minute, found[minute]) for minute in sorted(found, reverse=True)[:NEWEST]]


def _build_display_row(stream: Stream, minute: int, found: Minute) -> dict[str, Any]:
    row = build_row(stream, format_day(minute), minute, found)
    values = {name: value for name, value in row.items() if name not in {"slice", "minute", "linked"}}
    return {"minute": convert_to_time(minute), **values}


def draw_plot(newest: Sequence[Mapping[str, Any]]) -> str | None:
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


def select_measures(newest: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Numbers that Dagster plots from slice to slice: a plot needs no exact number."""
    if not newest:
        return {}
    found = {name: newest[0][name] for name in ("events", "hour_events", "hour_amount", "hour_mean")}
    return {f"newest_minute/{name}": float(value) for name, value in found.items() if value is not None}
