"""The table `_commits` of a stream: which slices each table holds, by the commits that wrote them."""

# A commit carries its records in `userMetadata`, and `_commits` gets them after it. So a reader takes what `_commits`
# has, and from the table's Delta log the commits behind it.

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.commit_records import (
    CommitRecord,
    batch_of,
    from_user_metadata,
    held_at,
    replaces_table,
    to_user_metadata,
    with_slice_commit,
)
from highwater.errors import DependencyAwayError, SupersededAttemptError
from highwater.resources.delta import (
    add_actions,
    commit_info,
    ensure_all_read,
    ensure_complete,
    open_table,
    query,
    rows_by_slice,
    rows_of_all_slices,
    slices_in,
    text_in_sql,
)
from highwater.resources.small_tables import append_at, compact, create, replace_partitions
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.slices import Slice

TABLE = "_commits"
APP = "highwater"
# With this many small files of records, a look at all slices takes 0.1 s.
MOST_FILES = 100
# Each try takes some 50 ms; some ten writers of one stream's tables add to `_commits` at once at the most.
TRIES = 50
_UNIX = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Committed:
    """The slices that one version of a table holds.

    Args:
        records: the newest commit record by slice key.
        version: of the table; -1 where there is no table.
        number: of the last numbered commit in that version; 0 where there is no table.
    """

    records: Mapping[str, CommitRecord] = field(default_factory=dict)
    version: int = -1
    number: int = 0

    def attempt(self, key: str) -> int:
        """The attempt of a slice in the table; 0 for none."""
        return self.records[key].attempt if key in self.records else 0

    def version_of(self, key: str) -> int:
        """The version of the table in which a slice was committed; -1 for none."""
        return self.records[key].version if key in self.records else -1

    @property
    def attempts(self) -> dict[str, int]:
        """The attempts of all slices, by slice key."""
        return {key: record.attempt for key, record in self.records.items()}


class Written(NamedTuple):
    """The version and time of a slice's commit.

    Args:
        rows: of the slice; None where neither the commit nor the table's log has them.
        at_ms: the time of the commit in milliseconds since 1970.
    """

    rows: int | None
    at_ms: int

    @property
    def at(self) -> datetime:
        """The same moment, in UTC."""
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)


@dataclass(frozen=True)
class Tail:
    """The entries of a table's Delta log behind the last version that `_commits` has.

    Args:
        records: the commit records in them.
        restores: see `held_at`.
        is_complete: Delta has cleaned none of the entries away.
        batches: the version that each batch committed, by its ID; also of a batch without slices.
    """

    records: Sequence[CommitRecord]
    restores: Mapping[int, int]
    is_complete: bool = True
    batches: Mapping[str, int] = field(default_factory=dict)


def committed_in(opened: DeltaTable, keys: Collection[str] | None = None, *, short: bool = False) -> Committed:
    """The slices that a table holds in the version that was opened.

    Args:
        opened: the table.
        keys: the slices that are asked for; all if None.
        short: without ranges and counts: lighter where all slices are asked for.

    Raises:
        DependencyAwayError: the lake could not be read, or `_commits` is gone; this is not the same as empty (I15).
    """
    wanted = None if keys is None else set(keys)
    where = "true" if wanted is None else f"slice IN ({', '.join(map(text_in_sql, wanted)) or 'NULL'})"
    return _committed(opened, where, lambda key: wanted is None or key in wanted, short=short)


def _committed(opened: DeltaTable, where: str, is_wanted: Callable[[str], bool], *, short: bool) -> Committed:
    log = log_of(opened)
    last = last_recorded(log, opened)
    recorded, restores = _recorded(log, opened, where, short=short) if last >= 0 else ([], {})
    tail = tail_of(opened, last)
    if not tail.is_complete:
        _ensure_no_gap(log, opened, last, tail.records)
    found = [*recorded, *(one for one in tail.records if is_wanted(one.slice_key))]
    return Committed(
        held_at(opened.version(), found, {**restores, **tail.restores}), opened.version(), number_in(opened)
    )


def _ensure_no_gap(log: DeltaTable | None, opened: DeltaTable, last: int, others: Sequence[CommitRecord]) -> None:
    """Validate that no commit with rows is missing where Delta has cleaned log entries that `_commits` lacks.

    Entries of OPTIMIZE carry no records, so a gap alone is no error.

    Args:
        log: `_commits`.
        opened: the table.
        last: the last version of it in `_commits`.
        others: records that are known beside `_commits`.

    Raises:
        DependencyAwayError: the table has files of slices without a record, or no record at all.
    """
    recorded = _recorded(log, opened, "true", short=True)[0] if last >= 0 else []
    known = {record.slice_key for record in [*recorded, *others]}
    missing = sorted(slices_in(opened) - known) if _is_by_slice(opened) else []
    if missing or (not known and opened.file_uris()):
        raise DependencyAwayError(
            f"commit records of {opened.table_uri} are gone",
            stored=f"its log no longer has what follows version {last}, the last one in {TABLE}",
            found=f"files of {len(missing):,} slices without a record: {', '.join(missing[:5])}" if missing else None,
            remedy=f"restore {TABLE} beside the table, from the time of its newest commit; nothing is written before",
        )


def _is_by_slice(opened: DeltaTable) -> bool:
    """Whether a table has slices in its column `slice`: that of `metrics` has days, and `current` has none."""
    return _name(opened) != "metrics" and any(field.name == "slice" for field in opened.schema().fields)


def slice_commits_of(found: Committed) -> dict[str, SliceCommit]:
    """The commit records of the slices, by slice key; `sized` counts the rows that no record has.

    A commit of rows that Spark counts while it writes them says nothing of their number; the record of it does.
    """
    return {
        key: one.slice_commit if one.slice_commit.rows is not None else replace(one.slice_commit, rows=one.rows)
        for key, one in found.records.items()
        if one.slice_commit is not None
    }


def slice_commits_in(table: DeltaTable, keys: Collection[str] | None = None) -> dict[str, SliceCommit]:
    """The commit records of slices of a table as it was opened, by slice key; of all when `keys` is None."""
    return slice_commits_of(committed_in(table, keys)) if keys is None or keys else {}


def sized(table: DeltaTable, slice_commits: Mapping[str, SliceCommit]) -> dict[str, SliceCommit]:
    """The slice commits, with the rows counted in the table where the commit was made before they were known."""
    unknown = [key for key, slice_commit in slice_commits.items() if slice_commit.rows is None]
    counted = rows_by_slice(table, unknown)
    return {**slice_commits, **{key: replace(slice_commits[key], rows=rows) for key, rows in counted.items()}}


def has_records(table: DeltaTable) -> bool:
    """Whether any commit of the table holds a slice."""
    return bool(committed_in(table, short=True).records)


def slice_commits_from(table: DeltaTable, topic: str, since: str) -> dict[str, SliceCommit]:
    """`slice_commits_in` for the slices of a topic from a slice key on, by the order of the text; "" for all of it."""
    where = f"topic = {text_in_sql(topic)} AND slice >= {text_in_sql(since)}"
    found = _committed(table, where, lambda key: key.rpartition("@")[0] == topic and key >= since, short=False)
    return slice_commits_of(found)


def ensure_all_records_seen(table: DeltaTable) -> None:
    """Validate that a filtered query sees all rows of `_commits`: only then does the absence of a record mean anything.

    Raises:
        IncompleteReadError: the query sees fewer rows than the log of `_commits` counts (I15).
        DependencyAwayError: the storage could not be read.
    """
    log = log_of(table)
    if log is not None:
        [row] = query(log, "SELECT count(*) AS n FROM t WHERE version >= 0")
        ensure_all_read(log, row["n"])


def ensure_all_rows_seen(table: DeltaTable, keys: Collection[str] | None = None) -> None:
    """Validate that a filtered query sees all rows of slices, or of the table: only then does absence mean anything.

    Raises:
        IncompleteReadError: the query sees fewer rows than the commits of the slices, or the table's log, count; or
            not all commit records could be read (I15).
        DependencyAwayError: the storage could not be read.
    """
    if keys is None:
        slices_in(table)
    else:
        ensure_complete(table, rows_by_slice(table, keys), recorded_rows(table, keys))


def recorded_rows(table: DeltaTable, keys: Collection[str]) -> dict[str, int]:
    """The rows of slices as they were counted at their commit, to compare with the rows that a query sees.

    A run that dies between its commit and the record of it leaves no count. Then all rows of the table are read: the
    table's log counts these.

    Args:
        table: as it was opened.
        keys: the slices; one without a commit is left out.

    Raises:
        IncompleteReadError: not all commit records could be read, or not all rows.
        DependencyAwayError: the storage could not be read.
    """
    ensure_all_records_seen(table)  # a missed record would take the evidence away together with the rows
    records = committed_in(table, keys, short=True).records
    counted = rows_of_all_slices(table) if any(one.rows is None for one in records.values()) else {}
    return {key: counted.get(key, 0) if one.rows is None else one.rows for key, one in records.items()}


def held_in(table: DeltaTable) -> set[str]:
    """The keys of all slices in a table as it was opened."""
    return set(committed_in(table, short=True).records)


def written(table: DeltaTable) -> dict[str, Written]:
    """The rows of each slice, and when it was committed.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    records = committed_in(table, short=True).records
    unknown = [key for key, one in records.items() if one.rows is None]
    rows = rows_by_slice(table, unknown)
    return {
        key: Written(one.rows if one.rows is not None else rows[key], _milliseconds(one.committed_at))
        for key, one in records.items()
    }


def _milliseconds(moment: datetime | None) -> int:
    return 0 if moment is None else round((moment - _UNIX).total_seconds() * 1000)


def number_in(opened: DeltaTable) -> int:
    """The number of the last numbered commit of a table, or where it has none, the time of its creation.

    So a table that was deleted and created again, in milliseconds since 1970, is ahead of every writer of the old one.
    """
    return int(opened.transaction_version(APP) or opened.metadata().created_time or 0)


def id_of(opened: DeltaTable) -> str:
    """The ID of a table; one that was deleted and created again has another."""
    return str(opened.metadata().id)


def log_of(opened: DeltaTable) -> DeltaTable | None:
    """The table `_commits` beside a table; None if it was never created."""
    return open_table(log_path(opened))


def log_path(opened: DeltaTable) -> str:
    """The path of `_commits` beside a table."""
    return f"{str(opened.table_uri).rstrip('/').rpartition('/')[0]}/{TABLE}"


def _name(opened: DeltaTable) -> str:
    return str(opened.table_uri).rstrip("/").rpartition("/")[2]


def last_recorded(log: DeltaTable | None, opened: DeltaTable) -> int:
    """The last version of a table that `_commits` has, by the statistics of its files; -1 for none."""
    if log is None:
        return -1
    actions = add_actions(log)
    columns = ("partition.table", "min.table_id", "max.table_id", "max.version")
    mine, last, is_sure = id_of(opened), -1, set(columns) <= {*actions.column_names}
    rows = zip(*(actions[name].to_pylist() for name in columns), strict=True) if is_sure else ()
    for table, least, greatest, version in rows:
        if None in {least, greatest, version}:
            is_sure = False  # somebody wrote the file without statistics
        elif table == _name(opened) and least <= mine <= greatest:
            # In a file of several IDs the greatest version may be another table's.
            is_sure &= least == greatest
            last = max(last, version)
    if is_sure:
        return last
    [row] = query(log, f"SELECT max(version) AS last FROM t WHERE {_is_of(opened)}")
    return -1 if row["last"] is None else int(row["last"])


def slices_in_sql(opened: DeltaTable) -> tuple[dict[str, DeltaTable], str]:
    """The slices that a table holds or held, up to the version that was opened, as a part of another query.

    Returns:
        The tables that the query reads, by their names in it, and the query, whose one column is `slice`.
    """
    log = log_of(opened)
    tail = tail_of(opened, last_recorded(log, opened)).records
    rows = ", ".join(f"({text_in_sql(one.slice_key)})" for one in tail) or "(NULL)"
    behind = f"SELECT column1 AS slice FROM (VALUES {rows}) WHERE column1 IS NOT NULL"
    if log is None:
        return {}, behind
    mine = f"slice IS NOT NULL AND {_is_of(opened)} AND version <= {opened.version()}"
    return {"k": log}, f"SELECT slice FROM k WHERE {mine} UNION {behind}"


def _is_of(opened: DeltaTable) -> str:
    return f'"table" = {text_in_sql(_name(opened))} AND table_id = {text_in_sql(id_of(opened))}'


def _recorded(
    log: DeltaTable | None, opened: DeltaTable, where: str, *, short: bool
) -> tuple[list[CommitRecord], dict[int, int]]:
    """The records of some slices in `_commits`, and the restores."""
    if log is None:
        return [], {}
    found = query(
        log,
        f"SELECT slice, attempt, rows, batch, run, version, restored_to, arrow_cast(committed_at, 'Int64') AS us, "
        f"{'NULL' if short else 'record'} AS record FROM t "
        f"WHERE {_is_of(opened)} AND version <= {opened.version()} AND (restored_to IS NOT NULL OR {where})",
    )
    restores = {row["version"]: row["restored_to"] for row in found if row["restored_to"] is not None}
    return [_record(row) for row in found if row["slice"] is not None], restores


def _record(row: Mapping[str, Any]) -> CommitRecord:
    return CommitRecord(
        row["slice"],
        row["attempt"],
        row["rows"],
        row["batch"],
        row["run"],
        row["version"],
        None if row["us"] is None else datetime.fromtimestamp(row["us"] / 1_000_000, UTC),
        None if row["record"] is None else SliceCommit.from_json(row["record"]),
    )


def tail_of(opened: DeltaTable, last: int) -> Tail:
    """The commits of a table behind a version, by its Delta log."""
    records: list[CommitRecord] = []
    restores: dict[int, int] = {}
    batches: dict[str, int] = {}
    is_complete = True
    for version in range(opened.version(), last, -1):
        entry = commit_info(opened, version)
        if entry is None:  # Delta cleans a log from its beginning
            is_complete = False
            break
        metadata = entry.get("userMetadata")
        if entry.get("operation") == "RESTORE":
            restores[version] = _restored_version(opened, version, entry["operationParameters"])
        if replaces_table(metadata):
            restores[version] = -1
        at = datetime.fromtimestamp(entry["timestamp"] / 1000, UTC) if "timestamp" in entry else None
        records += from_user_metadata(metadata, version, at)
        batches[batch_of(metadata)] = version
        if "REPLACE TABLE" in str(entry.get("operation")):
            restores[version] = -1
            break  # the table has another ID since, and no row from before
    return Tail(records, restores, is_complete, batches)


def _restored_version(opened: DeltaTable, at: int, parameters: Mapping[str, Any]) -> int:
    """The version that a `RESTORE` went back to.

    A RESTORE to a timestamp names no version. The version that it went back to has the same files.

    Raises:
        DependencyAwayError: Delta's log no longer shows it.
    """
    if parameters.get("version") is not None:
        return int(parameters["version"])
    path = str(opened.table_uri)
    for version in range(at - 1, -1, -1):
        if commit_info(opened, version) is None:
            break
        if _files(path, version) == _files(path, at):
            return version
    raise DependencyAwayError(
        f"which version of {path} its version {at} restored is no longer known",
        stored=f"RESTORE to {parameters.get('datetime') or parameters.get('timestamp')}",
        found="that version is not in the table's log any more",
        remedy="restore the table again, VERSION AS OF a version that its log has; then run highwater maintain",
    )


def _files(path: str, version: int) -> set[str]:
    opened = open_table(path, version)
    return set() if opened is None else set(opened.file_uris())


def complete(
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
        restores: of such a commit, see `held_at`.

    Raises:
        SupersededAttemptError: others wrote to `_commits` again and again.
        DependencyAwayError: the lake could not be read or written.
    """
    import pyarrow as pa

    for tries in range(1, TRIES + 1):
        log = log_of(opened)
        rows = _lacking(log, opened, slices, written, restores)
        if not rows:
            return
        if log is None:
            create(log_path(opened), schema(), partition_by=["table"])
        # A writer that hung since its look does not add a record a second time.
        elif append_at(log, pa.Table.from_pylist(rows, schema())):
            _join_files(log, _name(opened))
            return
        else:
            time.sleep(random.uniform(0, 0.05 * tries))  # noqa: S311 - spreads the waiting, hides nothing
    raise SupersededAttemptError(
        f"{TABLE} beside {opened.table_uri}: other writers were first {TRIES} times",
        remedy="nothing: the table has the rows, and the next run adds the records",
    )


def _join_files(log: DeltaTable, name: str) -> None:
    """Join the small files of one table's records when they are many: a look at all slices opens each of them."""
    log.update_incremental()
    mine = add_actions(log)["partition.table"].to_pylist().count(name)
    if mine > MOST_FILES:
        compact(log, [("table", "=", name)])


def _lacking(
    log: DeltaTable | None,
    opened: DeltaTable,
    slices: Mapping[str, Slice],
    written: Sequence[CommitRecord],
    restores: Mapping[int, int],
) -> list[dict[str, Any]]:
    """The rows that `_commits` lacks."""
    last = last_recorded(log, opened)
    tail = tail_of(opened, last)
    if not tail.is_complete:
        _ensure_no_gap(log, opened, last, [*tail.records, *written])
    known = {(record.slice_key, record.batch): record for record in written}
    records = [_with_rows(record, known) for record in tail.records]
    there = {record.batch for record in records}
    records += [record for record in written if record.batch not in there and record.version > last]
    going_back = {at: target for at, target in {**restores, **tail.restores}.items() if at > last}
    base = {"table": _name(opened), "table_id": id_of(opened)}
    rows = [
        *(row_of(opened, one, None if one.slice_commit is not None else slices.get(one.slice_key)) for one in records),
        *({**base, "version": at, "restored_to": target} for at, target in going_back.items()),
    ]
    if last < opened.version() and opened.version() not in {row["version"] for row in rows}:
        # So the entry behind it, such as one of OPTIMIZE, is not looked at again, and may be cleaned.
        rows.append({**base, "version": opened.version()})
    return rows


def replace_slices(
    table: DeltaTable,
    rows: pa.Table,
    partitions: Sequence[str],
    slice_commits: Sequence[SliceCommit],
    run: str,
    *,
    unlike: Sequence[str] = (),
) -> int:
    """Commit slices of a small table without a JVM, with their records.

    Args:
        table: as it was opened before anything was read that the rows rest on.
        rows: the new rows.
        partitions: the values of `slice` that are replaced.
        slice_commits: one for each slice that the commit holds.
        run: the Dagster run.
        unlike: columns with hardly two equal rows.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another commit took the version; nothing was written.
        DependencyAwayError: the storage is away.
    """
    base = CommitRecord("", 0, None, uuid.uuid4().hex, run)
    records = [with_slice_commit(base, slice_commit) for slice_commit in slice_commits]
    metadata = to_user_metadata(records, 0, batch=base.batch, run=run)
    complete(table)  # the write that follows may clean old entries of the log
    version = replace_partitions(table, rows, partitions, metadata, unlike=unlike)
    table.update_incremental()
    with suppress(SupersededAttemptError):  # the table's log has the records, and the next run completes them
        complete(table)
    return version


def _with_rows(record: CommitRecord, known: Mapping[tuple[str, str], CommitRecord]) -> CommitRecord:
    found = known.get((record.slice_key, record.batch))
    return record if found is None else replace(record, rows=found.rows)


def row_of(opened: DeltaTable, record: CommitRecord, slice_: Slice | None = None) -> dict[str, Any]:
    """The row of `_commits` for a record of a table; the slice is needed where the record has no ranges."""
    slice_ = slice_ if record.slice_commit is None else record.slice_commit.slice_
    return {
        "table": _name(opened),
        "table_id": id_of(opened),
        "version": record.version,
        "slice": record.slice_key,
        "topic": record.slice_key.rpartition("@")[0],
        "generation": None if slice_ is None else slice_.generation,
        "ranges": [] if slice_ is None else [*_ranges(slice_)],
        "attempt": record.attempt,
        "rows": record.rows,
        "batch": record.batch,
        "run": record.run,
        "committed_at": record.committed_at,
        "record": None if record.slice_commit is None else record.slice_commit.to_json(),
    }


def _ranges(slice_: Slice) -> Iterator[dict[str, int]]:
    return ({"partition": p, "start": r.start, "end": r.end} for p, r in slice_.ranges.items())


def schema() -> pa.Schema:
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
