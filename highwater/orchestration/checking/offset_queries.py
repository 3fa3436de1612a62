"""Queries for the offsets of slices in the tables, without a JVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import query_columns, slice_is_one_of
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# `dense_rank` and no row number: a row that is there twice must not tear its stretch apart.
_STRETCHES = """
SELECT slice, topic, generation, "partition", min("offset") AS first, max("offset") AS last, count(*) AS rows
FROM (SELECT slice, topic, generation, "partition", "offset",
        "offset" - dense_rank() OVER (PARTITION BY slice, topic, generation, "partition" ORDER BY "offset") AS stretch
      FROM raw WHERE {slices})
GROUP BY slice, topic, generation, "partition", stretch
"""


@dataclass
class RawRows:
    """The rows of one slice in raw, by their offsets.

    Args:
        held: for each partition the offsets that have a row.
        rows: how many rows there are.
        doubled: rows beyond one for each offset.
        outside: offsets that the slice's plan does not have, as `topic, generation, partition [start, end)`; rows
            without an offset among them.
    """

    held: dict[int, list[OffsetRange]] = field(default_factory=dict)
    rows: int = 0
    doubled: int = 0
    outside: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RawSlices:
    """Slices as raw holds them.

    Args:
        slices: the slices as they were planned.
        slice_commits: commits of the committed slices.
        rows: rows of the committed slices.
    """

    slices: Sequence[Slice]
    slice_commits: Mapping[str, SliceCommit] = field(default_factory=dict)
    rows: Mapping[str, RawRows] = field(default_factory=dict)


def read_raw_offsets(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> RawSlices:
    """The rows of slices in one version of raw.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    slices, raw = ledger.get(keys), lake.open_stream_table(stream.name, "raw")
    return (
        RawSlices(slices)
        if raw is None
        else RawSlices(slices, read_slice_commits(raw, keys), read_raw_rows(raw, slices))
    )


def read_raw_rows(raw: DeltaTable, slices: Sequence[Slice]) -> dict[str, RawRows]:
    """For each slice the offsets that raw has rows of.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    planned = {slice_.key: slice_ for slice_ in slices}
    found = {key: RawRows() for key in planned}
    stretches = query_columns({"raw": raw}, _STRETCHES.format(slices=slice_is_one_of(planned)))
    for key, topic, generation, partition, first, last, rows in zip(*stretches.values(), strict=True):
        slice_rows, slice_ = found[key], planned[key]
        slice_rows.rows += rows
        if first is None:
            slice_rows.outside.append(
                f"{topic}, generation {generation}, partition {partition}, {rows:,} without an offset"
            )
            continue
        stretch = OffsetRange(first, last + 1)
        slice_rows.doubled += rows - len(stretch)
        if (topic, generation) == (slice_.topic, slice_.generation):
            slice_rows.held.setdefault(partition, []).append(stretch)
            within = slice_.ranges.get(partition, OffsetRange(0, 0))
            if within.start <= stretch.start and stretch.end <= within.end:
                continue
        slice_rows.outside.append(f"{topic}, generation {generation}, partition {partition} [{first}, {last + 1})")
    return found
