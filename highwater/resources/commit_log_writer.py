"""The writer of the table `_commits`: it adds what a table's Delta log has and `_commits` lacks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.commit_records import CommitRecord, to_user_metadata, with_slice_commit
from highwater.errors import SupersededAttemptError
from highwater.resources.commit_log import (
    build_log_path,
    ensure_no_gap,
    get_table_id,
    has_slice_column,
    read_last_recorded,
    read_name,
    read_tail,
)
from highwater.resources.delta import add_actions, count_all_slice_rows
from highwater.resources.delta_rs_writes import append_missing, compact, replace_rows_of_slices
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.slices import Slice

# With this many small files of records, a look at all slices takes 0.1 s.
MAX_FILES = 100


def add_missing_records(
    opened: DeltaTable,
    slices: Mapping[str, Slice] = MappingProxyType({}),
    written: Sequence[CommitRecord] = (),
    restores: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Add to `_commits` what the table's Delta log has and `_commits` lacks.

    Args:
        opened: the table, at its newest version.
        slices: slices whose commits do not carry their ranges.
        written: records of a commit whose rows are known, or which the log no longer has.
        restores: the restores of that commit, see `select_newest_records`.

    Raises:
        SupersededAttemptError: others wrote to `_commits` again and again.
        DependencyUnavailableError: the lake could not be read or written.
    """

    def find_missing(log: DeltaTable | None) -> pa.Table:
        import pyarrow as pa

        return pa.Table.from_pylist(_build_missing_rows(log, opened, slices, written, restores), build_schema())

    log, added = append_missing(build_log_path(opened), find_missing, partition_by=["table"])
    if log is not None and added:
        _join_files(log, read_name(opened))


def _join_files(log: DeltaTable, name: str) -> None:
    """Join the small files of one table's records when they are many: a look at all slices opens each of them."""
    file_count = add_actions(log)["partition.table"].to_pylist().count(name)
    if file_count > MAX_FILES:
        compact(log, [("table", "=", name)])


def _build_missing_rows(
    log: DeltaTable | None,
    opened: DeltaTable,
    slices: Mapping[str, Slice],
    written: Sequence[CommitRecord],
    restores: Mapping[int, int],
) -> list[dict[str, Any]]:
    """The rows that `_commits` lacks."""
    last = read_last_recorded(log, opened)
    tail = read_tail(opened, last)
    if not tail.is_complete:
        ensure_no_gap(log, opened, last, [*tail.records, *written])
    known = {(record.slice_key, record.batch): record for record in written}
    records = [_with_rows(record, known) for record in tail.records]
    there = {record.batch for record in records}
    records += [record for record in written if record.batch not in there and record.version > last]
    going_back = {at: target for at, target in {**restores, **tail.restores}.items() if at > last}
    if not going_back:  # else the table may hold other rows than these commits wrote
        records = _count_rows(opened, records)
    base = {"table": read_name(opened), "table_id": get_table_id(opened)}
    rows = [
        *(
            build_row(opened, one, None if one.slice_commit is not None else slices.get(one.slice_key))
            for one in records
        ),
        *({**base, "version": at, "restored_to": target} for at, target in going_back.items()),
    ]
    if last < opened.version() and opened.version() not in {row["version"] for row in rows}:
        # So the entry after it, such as one of OPTIMIZE, is not looked at again, and may be cleaned.
        rows.append({**base, "version": opened.version()})
    return rows


def _count_rows(opened: DeltaTable, records: Sequence[CommitRecord]) -> list[CommitRecord]:
    """The records; where a run died before it counted the rows of a slice, with those that are in the table."""
    newest = {record.slice_key: record for record in sorted(records, key=lambda record: record.version)}
    unknown = {key for key, one in newest.items() if one.rows is None and one.slice_commit is not None}
    if not unknown or not has_slice_column(opened):
        return [*records]
    counted = count_all_slice_rows(opened)
    return [
        replace(one, rows=counted.get(one.slice_key, 0))
        if one.slice_key in unknown and one is newest[one.slice_key]
        else one
        for one in records
    ]


def replace_slices(
    table: DeltaTable,
    rows: pa.Table,
    keys: Sequence[str],
    slice_commits: Sequence[SliceCommit],
    run: str,
    *,
    unlike: Sequence[str] = (),
) -> int:
    """Commit slices of a small table without a JVM, with their records.

    Args:
        table: as it was opened before anything was read that the rows rest on.
        rows: the new rows.
        keys: the values of `slice` that are replaced.
        slice_commits: one for each slice that the commit holds.
        run: the Dagster run.
        unlike: columns with hardly two equal rows.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another commit took the version; nothing was written.
        DependencyUnavailableError: the storage is unavailable.
    """
    base = CommitRecord("", 0, None, uuid.uuid4().hex, run)
    records = [with_slice_commit(base, slice_commit) for slice_commit in slice_commits]
    metadata = to_user_metadata(records, 0, batch=base.batch, run=run)
    add_missing_records(table)  # the write that follows may clean old entries of the log
    version = replace_rows_of_slices(table, rows, keys, metadata, unlike=unlike)
    table.update_incremental()
    with suppress(SupersededAttemptError):  # the table's log has the records, and the next run completes them
        add_missing_records(table)
    return version


def _with_rows(record: CommitRecord, known: Mapping[tuple[str, str], CommitRecord]) -> CommitRecord:
    found = known.get((record.slice_key, record.batch))
    return record if found is None else replace(record, rows=found.rows)


def build_row(opened: DeltaTable, record: CommitRecord, slice_: Slice | None = None) -> dict[str, Any]:
    """The row of `_commits` for a record of a table; the slice is needed where the record has no ranges."""
    slice_ = slice_ if record.slice_commit is None else record.slice_commit.slice_
    return {
        "table": read_name(opened),
        "table_id": get_table_id(opened),
        "version": record.version,
        "slice": record.slice_key,
        "topic": record.slice_key.rpartition("@")[0],
        "generation": None if slice_ is None else slice_.generation,
        "ranges": [] if slice_ is None else [*_build_ranges(slice_)],
        "attempt": record.attempt,
        "rows": record.rows,
        "batch": record.batch,
        "run": record.run,
        "committed_at": record.committed_at,
        "record": None if record.slice_commit is None else record.slice_commit.to_json(),
    }


def _build_ranges(slice_: Slice) -> Iterator[dict[str, int]]:
    return ({"partition": p, "start": r.start, "end": r.end} for p, r in slice_.ranges.items())


def build_schema() -> pa.Schema:
    """The columns of `_commits`."""
    import pyarrow as pa

    ranges = pa.list_(pa.struct([("partition", pa.int32()), ("start", pa.int64()), ("end", pa.int64())]))
    return pa.schema(
        [
            ("table", pa.string()),
            ("table_id", pa.string()),
            ("version", pa.int64()),
            ("slice", pa.string()),
            ("topic", pa.string()),
            ("generation", pa.int32()),
            ("ranges", ranges),
            ("attempt", pa.int32()),
            ("rows", pa.int64()),
            ("batch", pa.string()),
            ("run", pa.string()),
            ("committed_at", pa.timestamp("us", "UTC")),
            ("restored_to", pa.int64()),
            ("record", pa.string()),
        ]
    )
