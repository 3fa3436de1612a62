"""Commits with commit records, as tests write them without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace as replaced
from types import MappingProxyType
from typing import TYPE_CHECKING

from highwater.commit_records import CommitRecord, to_user_metadata
from highwater.resources.commit_log import complete
from highwater.resources.numbered_commits import PlannedSlices

if TYPE_CHECKING:
    import pyarrow as pa

    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger


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
    properties, path = CommitProperties(custom_metadata=metadata), lake.path(stream, "current")
    if replace:
        write_deltalake(path, rows, mode="overwrite", commit_properties=properties)
    else:
        write_deltalake(path, rows, mode="append", commit_properties=properties)
    if records:
        slices = {} if ledger is None else PlannedSlices(ledger)
        version = lake.table_at(stream, "current").version()
        complete(lake.table_at(stream, "current"), slices, [replaced(one, version=version) for one in records])
