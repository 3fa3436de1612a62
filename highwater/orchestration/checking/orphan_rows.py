"""Rows of a stream's tables that belong to no slice of the ledger: no check of a slice sees them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from highwater.assets.publication_log import TABLE as PUBLISHED
from highwater.declaration import Stream
from highwater.resources.commit_log import read_slice_keys
from highwater.resources.delta import list_slices_in_rows, query
from highwater.resources.lake import Lake

# The partitions of `metrics` are days: its check compares their rows with the events of all slices.
_BY_SLICE = ("raw", "events", "rejects", "dlq", PUBLISHED)
NAMED = 5


def read_table_slices(lake: Lake, stream: Stream) -> dict[str, set[str]]:
    """For each table the slices that its rows name.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    found: dict[str, set[str]] = {}
    for name in _BY_SLICE:
        table = lake.open_stream_table(stream.name, name)
        if table is None:
            continue
        found[name] = read_slice_keys(table) | list_slices_in_rows(table)
    if current := lake.open_stream_table(stream.name, "current"):
        rows = query(current, "SELECT DISTINCT updated_by_slice AS slice FROM t")
        found["current"] = {str(row["slice"]) for row in rows}
    return found


def describe_orphan_slices(there: Mapping[str, Collection[str]], planned: Collection[str], stream: str) -> list[str]:
    """Rows that the tables hold of slices that were never planned, in sentences.

    Args:
        there: from `read_table_slices`, looked at before the plan: whatever is committed was planned before.
        planned: the keys of all slices.
        stream: its name.
    """
    found = {name: sorted(set(keys).difference(planned)) for name, keys in there.items()}
    return [
        f"{name} holds rows of {len(keys):,} slices that the ledger does not know: {', '.join(keys[:NAMED])}; remedy: "
        f"highwater rebuild-ledger {stream} if plans were lost; else find out who wrote them, and delete them"
        for name, keys in found.items()
        if keys
    ]
