"""References: records that are parked by where they are in raw, since no topic took them whole."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.envelope import Envelope, KafkaHeader, Place, ValueReference, build_headers
from highwater.errors import UnbalancedError
from highwater.resources.delta import query, slice_is_one_of, stream_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake

_PLACE = 'topic, generation, partition, "offset"'


class OriginalRecord(NamedTuple):
    """A record as it was read."""

    key: bytes | None
    value: bytes | None
    headers: list[KafkaHeader]


def read_original(lake: Lake, stream: Stream, place: Place) -> OriginalRecord | None:
    """The record at a place in raw; None if there is none.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    table = lake.open_stream_table(stream.name, "raw")
    if table is None:
        return None
    topic = place.topic.replace("'", "''")
    where = (
        f'partition = {place.partition} AND "offset" = {place.offset} '
        f"AND topic = '{topic}' AND generation = {place.generation}"
    )
    found = query(table, f"SELECT key, value, headers FROM t WHERE {where}")
    return build_original(found[0]) if found else None


def find_place(lake: Lake, stream: Stream, envelope: Envelope, wanted: OriginalRecord) -> Place:
    """The place at which the slice that rejected a record read it.

    On the main topic that is its origin. On a tier the origin is elsewhere, and several copies may be alike: any will
    do.

    Raises:
        UnbalancedError: raw does not hold it.
        DependencyUnavailableError: the lake could not be read.
    """
    if read_original(lake, stream, origin := Place(*envelope.origin)) == wanted:
        return origin
    table = lake.open_stream_table(stream.name, "raw")
    size = "coalesce(octet_length(encode(value, 'hex')), 0) / 2"
    where = f"{slice_is_one_of([envelope.slice_key])} AND {size} = {len(wanted.value or b'')}"
    sql = f"SELECT {_PLACE}, key, value, headers FROM t WHERE {where} ORDER BY {_PLACE}"
    for row in () if table is None else stream_rows(table, sql):
        if build_original(row) == wanted:
            return Place(row["topic"], row["generation"], row["partition"], row["offset"])
    raise UnbalancedError(
        f"{envelope.slice_key}: raw does not hold the record of a reject",
        stored=f"a reject of {envelope.topic}[{envelope.partition}]@{envelope.offset}",
        found="no record in raw with its key, value and headers",
        remedy="restore raw, or materialise it again for this slice, then request the slice again",
    )


def find_value_reference(found: OriginalRecord) -> ValueReference | None:
    """The reference that a record from a tier carries where it is one itself: somebody sent it there as it was."""
    if found.value:
        return None
    return ValueReference.from_headers({name: (value or b"").decode(errors="replace") for name, value in found.headers})


def build_original(row: Mapping[str, Any]) -> OriginalRecord:
    """The record that a row of raw or of rejects holds."""
    return OriginalRecord(row["key"], row["value"], build_headers(row))


def build_originals(rows: pa.Table) -> Iterator[OriginalRecord]:
    """The records that many rows hold: column by column, a record's headers cut from those of all."""
    import pyarrow.compute as pc

    lists = rows["headers"].combine_chunks()
    pairs = [*zip(*(pc.struct_field(lists.flatten(), name).to_pylist() for name in ("key", "value")), strict=True)]
    ends = accumulate(pc.fill_null(pc.list_value_length(lists), 0).to_pylist(), initial=0)
    headers = (pairs[start:end] for start, end in pairwise(ends))
    return map(OriginalRecord._make, zip(rows["key"].to_pylist(), rows["value"].to_pylist(), headers, strict=True))
