"""Tables that tests and benchmarks write without Spark, with the commit records that the stages would have left."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING

from highwater.commit_records import CommitRecord, to_user_metadata, with_slice_commit
from highwater.resources.commit_log_writer import add_missing_records
from highwater.resources.delta import open_table

if TYPE_CHECKING:
    import pyarrow as pa

    from highwater.slice_commits import SliceCommit


def plant(
    path: str,
    rows: pa.Table,
    slice_commits: Iterable[SliceCommit] = (),
    *,
    replace: bool = False,
    recorded: bool = True,
) -> None:
    """Commit rows with the records of slices; the table is created if it is absent.

    Args:
        path: the table.
        rows: the rows; `metrics` is partitioned by `slice`, its days.
        slice_commits: one for each slice that the commit holds.
        replace: the rows and records replace all that the table has.
        recorded: whether `_commits` has the records too, and not the table's log alone.
    """
    from deltalake import CommitProperties, write_deltalake

    base = CommitRecord("", 0, None, uuid.uuid4().hex)
    records = [with_slice_commit(base, slice_commit) for slice_commit in slice_commits]
    metadata = {"userMetadata": to_user_metadata(records, 0, batch=base.batch, replaces=replace)}
    properties = CommitProperties(custom_metadata=metadata)
    by = ["slice"] if path.rpartition("/")[2] == "metrics" else None
    if replace:
        write_deltalake(
            path, rows, mode="overwrite", schema_mode="overwrite", partition_by=by, commit_properties=properties
        )
    else:
        write_deltalake(path, rows, mode="append", schema_mode="merge", partition_by=by, commit_properties=properties)
    opened = open_table(path)
    if recorded and opened is not None:
        add_missing_records(opened)
