"""Commits with commit records, as tests write them without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from highwater.commit_records import CommitRecord, to_user_metadata

if TYPE_CHECKING:
    import pyarrow as pa

    from resources.lake import Lake


def commit_current(
    lake: Lake,
    stream: str,
    attempts: Mapping[str, int],
    rows: pa.Table | None = None,
    *,
    replace: bool = False,
    counted: Mapping[str, int | None] = MappingProxyType({}),
) -> list[CommitRecord]:
    """Commit slices to `current`: by slice the attempt, with rows where a test needs some.

    Returns:
        The records, with the events that the commit took into account, as `_commits` would have them.
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
    return records
