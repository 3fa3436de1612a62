"""Events against the records that they were made of, field by field, by a parser that shares no code with the pipeline.

What belongs here: the comparison, for slices of the main topic. What does not: whether raw is what Kafka holds
(`orchestration.completeness`), and which records are events (`orchestration.origin_checks`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from assets.parsing import field_columns
from resources.lake import query_all, slice_is_one_of

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from resources.lake import Lake

SAMPLES = 5
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)


def unlike_their_records(lake: Lake, stream: Stream, keys: Sequence[str]) -> list[str]:
    """For each of the slices that has such events a sentence; slices of tiers are left out.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    tables = {name: lake.table(stream.name, name) for name in ("raw", "events")}
    there = {name: table for name, table in tables.items() if table is not None}
    mine = [key for key in keys if key.startswith(f"{stream.topic}@")]
    if len(there) < len(tables):
        return []
    columns = _columns(stream)
    chosen = ", ".join(f"{_as_told(kind, column)} AS c{at}" for at, (_, column, kind) in enumerate(columns))
    found = []
    for key in mine:  # one at a time: its values are held
        rows = query_all(there, _PAIRS.format(chosen=chosen, slices=slice_is_one_of([key])))
        unlike = [row for row in rows if not _alike(columns, row)]
        if unlike:
            places = ", ".join(f"partition {r['p']} offset {r['o']}" for r in unlike[:SAMPLES])
            found.append(f"{key}: {len(unlike):,} events have other fields than their records in raw: {places}")
    return found


_PAIRS = """
SELECT origin_partition AS p, origin_offset AS o, r.value AS value, {chosen}
FROM events e JOIN raw r ON e.slice = r.slice AND origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE e.proof IS NULL AND r.proof IS NULL AND r.value IS NOT NULL AND e.{slices} AND r.{slices}
ORDER BY origin_partition, origin_offset
"""


def _columns(stream: Stream) -> list[tuple[str, str, str]]:
    """Field, column and type of all that a record tells."""
    kinds = {one.name: one.type for one in stream.fields}
    named = {one.name: one.name for one in field_columns(stream)}
    pairs = [*named.items(), (stream.version, "version"), (stream.event_time, "event_time")]
    return [(name, column, kinds[name]) for name, column in pairs]


def _as_told(kind: str, column: str) -> str:
    """A time as a number: a producer's clock may name a year that Python's times do not know."""
    quoted = 'e."' + column.replace('"', '""') + '"'
    return f"arrow_cast({quoted}, 'Int64')" if kind == "timestamp" else quoted


def _alike(columns: Sequence[tuple[str, str, str]], row: Mapping[str, Any]) -> bool:
    """Whether an event has its record's fields; of a field that the stream has gained since it has none."""
    try:
        record = json.loads(row["value"], parse_float=Decimal)
    except ValueError:
        return False  # what is no JSON is no event
    return all(
        row[f"c{at}"] is None or _equal(kind, record.get(name), row[f"c{at}"])
        for at, (name, _, kind) in enumerate(columns)
    )


def _equal(kind: str, value: Any, told: Any) -> bool:
    if kind == "timestamp":
        try:
            return bool((datetime.fromisoformat(value) - _BEGIN) // timedelta(microseconds=1) == told)
        except (TypeError, ValueError):
            return isinstance(value, str)  # Spark reads more forms and years than Python: not to be compared
    return bool(value == told)  # a number of JSON equals a decimal by its value
