"""Commits with commit records, as tests write them without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dev.planted import plant
from highwater.assets.client_reads import build_record_schema
from highwater.commit_records import CommitRecord, to_user_metadata
from highwater.resources.commit_log_writer import add_missing_records
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.numbered_commits import PlannedSlices
from highwater.slice_commits import SliceCommit
from highwater.slices import Slice

if TYPE_CHECKING:
    import pyarrow as pa


def commit_current(
    lake: Lake,
    stream: str,
    attempts: Mapping[str, int],
    rows: pa.Table | None = None,
    *,
    replace: bool = False,
    counted: Mapping[str, int | None] = MappingProxyType({}),
    ledger: Ledger | None = None,
) -> None:
    """Commit slices to `current`: by slice the attempt, with rows where a test needs some.

    Args:
        lake: the tables.
        stream: the stream's name.
        attempts: by slice.
        rows: of the table.
        replace: whether rows and records replace all that the table has.
        counted: by slice the events that the commit took into account.
        ledger: has the ranges of the slices.
    """
    import pyarrow as pa
    from deltalake import CommitProperties, write_deltalake

    batch = uuid.uuid4().hex
    records = [CommitRecord(key, attempt, counted.get(key), batch) for key, attempt in attempts.items()]
    if rows is None:
        rows = pa.table({"key": pa.array([], pa.string()), "updated_by_slice": pa.array([], pa.string())})
    metadata = {"userMetadata": to_user_metadata(records, 0, replaces=replace)} if records else {}
    properties, path = CommitProperties(custom_metadata=metadata), lake.build_table_path(stream, "current")
    if replace:
        write_deltalake(path, rows, mode="overwrite", commit_properties=properties)
    else:
        write_deltalake(path, rows, mode="append", commit_properties=properties)
    if records:
        slices = {} if ledger is None else PlannedSlices(ledger)
        version = lake.open_existing_table(stream, "current").version()
        add_missing_records(
            lake.open_existing_table(stream, "current"), slices, [replaced(one, version=version) for one in records]
        )


def commit_empty(lake: Lake, slices: Sequence[Slice], *tables: str) -> None:
    """Commit slices without rows to tables of the lake."""
    import pyarrow as pa

    rows = pa.table({"slice": pa.array([], pa.string())})
    for table in tables:
        if table == "current":
            commit_current(lake, "orders", {s.key: 1 for s in slices})
        else:
            plant(lake.build_table_path("orders", table), rows, [SliceCommit(s, 1, 0, {"rejects": 0}) for s in slices])


def store_raw(lake: Lake, slice_: Slice, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa

    schema = pa.schema([("slice", pa.string()), ("generation", pa.int32()), *build_record_schema()])
    slice_commit = SliceCommit(slice_, 1, len(rows))
    plant(lake.build_table_path("orders", "raw"), pa.Table.from_pylist(rows, schema), [slice_commit], replace=True)
