"""The table `_commits` of a stream: which slices each table holds, by the commits that wrote them."""

# A commit carries its records in `userMetadata`, and `_commits` gets them after it. So a reader takes what `_commits`
# has, and from the table's Delta log the commits after it.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.commit_records import (
    CommitRecord,
    from_user_metadata,
    parse_batch_id,
    replaces_table,
    select_newest_records,
)
from highwater.errors import DependencyUnavailableError
from highwater.resources.delta import (
    add_actions,
    count_all_slice_rows,
    count_slice_rows,
    ensure_all_read,
    ensure_complete,
    list_slices_in_rows,
    open_table,
    query,
    quote_text,
    read_commit_info,
    read_transaction_version,
)
from highwater.slice_commits import SliceCommit

if TYPE_CHECKING:
    from deltalake import DeltaTable

TABLE = "_commits"
APP = "highwater"
_UNIX = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class TableSlices:
    """The slices that one version of a table holds.

    Args:
        records: the newest commit record by slice key.
        version: the table's version; -1 without a table.
        number: number of the last numbered commit in that version; 0 without a table.
        unrecorded: whether Delta's log has records that `_commits` lacks, of any slice.
    """

    records: Mapping[str, CommitRecord] = field(default_factory=dict)
    version: int = -1
    number: int = 0
    unrecorded: bool = False

    def find_attempt(self, key: str) -> int:
        """The attempt of a slice in the table; 0 for none."""
        return self.records[key].attempt if key in self.records else 0

    def find_version(self, key: str) -> int:
        """The version of the table in which a slice was committed; -1 for none."""
        return self.records[key].version if key in self.records else -1

    @property
    def attempts(self) -> dict[str, int]:
        """The attempts of all slices, by slice key."""
        return {key: record.attempt for key, record in self.records.items()}


class CommitTime(NamedTuple):
    """The version and time of a slice's commit.

    Args:
        rows: the slice's number of rows; None if neither the commit nor the table's log has it.
        at_ms: the time of the commit in milliseconds since 1970.
    """

    rows: int | None
    at_ms: int

    @property
    def at(self) -> datetime:
        """The time of the commit, in UTC."""
        return datetime.fromtimestamp(self.at_ms / 1000, UTC)


@dataclass(frozen=True)
class LogTail:
    """The entries of a table's Delta log after the last version that `_commits` has.

    Args:
        records: the commit records in them.
        restores: see `select_newest_records`.
        is_complete: Delta has cleaned none of the entries away.
        batches: the version that each batch committed, by its ID; also of a batch without slices.
    """

    records: Sequence[CommitRecord]
    restores: Mapping[int, int]
    is_complete: bool = True
    batches: Mapping[str, int] = field(default_factory=dict)


def read_committed_slices(
    opened: DeltaTable, keys: Collection[str] | None = None, *, short: bool = False
) -> TableSlices:
    """The slices that a table holds in the version that was opened.

    Args:
        opened: the table.
        keys: the slices that are asked for; all if None.
        short: without ranges and counts: lighter where all slices are asked for.

    Raises:
        DependencyUnavailableError: the lake could not be read, or `_commits` is gone; this is not the same as empty
            (I15).
    """
    wanted = None if keys is None else set(keys)
    where = "true" if wanted is None else f"slice IN ({', '.join(map(quote_text, wanted)) or 'NULL'})"
    return _read_committed_where(opened, where, lambda key: wanted is None or key in wanted, short=short)


def _read_committed_where(
    opened: DeltaTable, where: str, is_wanted: Callable[[str], bool], *, short: bool
) -> TableSlices:
    log = open_log(opened)
    last = read_last_recorded(log, opened)
    recorded, restores = _read_log_records(log, opened, where, short=short) if last >= 0 else ([], {})
    tail = read_tail(opened, last)
    if not tail.is_complete:
        ensure_no_gap(log, opened, last, tail.records)
    found = [*recorded, *(one for one in tail.records if is_wanted(one.slice_key))]
    return TableSlices(
        select_newest_records(opened.version(), found, {**restores, **tail.restores}),
        opened.version(),
        read_number(opened),
        unrecorded=bool(tail.records or tail.restores),
    )


def ensure_no_gap(log: DeltaTable | None, opened: DeltaTable, last: int, others: Sequence[CommitRecord]) -> None:
    """Validate that no commit with rows is missing where Delta has cleaned log entries that `_commits` lacks.

    Entries of OPTIMIZE carry no records, so a gap alone is no error.

    Args:
        log: `_commits`.
        opened: the table.
        last: the last version of it in `_commits`.
        others: records that are known beside `_commits`.

    Raises:
        DependencyUnavailableError: the table has files of slices without a record, or no record at all.
    """
    recorded = _read_log_records(log, opened, "true", short=True)[0] if last >= 0 else []
    known = {record.slice_key for record in [*recorded, *others]}
    missing = sorted(list_slices_in_rows(opened) - known) if has_slice_column(opened) else []
    if missing or (not known and opened.file_uris()):
        raise DependencyUnavailableError(
            f"commit records of {opened.table_uri} are gone",
            stored=f"its log no longer has what follows version {last}, the last one in {TABLE}",
            found=f"files of {len(missing):,} slices without a record: {', '.join(missing[:5])}" if missing else None,
            remedy=f"restore {TABLE} beside the table, from the time of its newest commit; nothing is written before",
        )


def has_slice_column(opened: DeltaTable) -> bool:
    """Whether a table has slices in its column `slice`: that of `metrics` has days, and `current` has none."""
    return read_name(opened) != "metrics" and any(field.name == "slice" for field in opened.schema().fields)


def collect_slice_commits(found: TableSlices) -> dict[str, SliceCommit]:
    """The commit records of the slices, by slice key; `with_row_counts` counts the rows that no record has.

    A commit of rows that Spark counts while it writes them says nothing of their number; the record of it does.
    """
    return {
        key: one.slice_commit if one.slice_commit.rows is not None else replace(one.slice_commit, rows=one.rows)
        for key, one in found.records.items()
        if one.slice_commit is not None
    }


def read_slice_commits(table: DeltaTable, keys: Collection[str] | None = None) -> dict[str, SliceCommit]:
    """The commit records of slices of a table as it was opened, by slice key; of all when `keys` is None."""
    return collect_slice_commits(read_committed_slices(table, keys)) if keys is None or keys else {}


def with_row_counts(table: DeltaTable, slice_commits: Mapping[str, SliceCommit]) -> dict[str, SliceCommit]:
    """The slice commits, with the rows counted in the table where the commit was made before they were known."""
    unknown = [key for key, slice_commit in slice_commits.items() if slice_commit.rows is None]
    counted = count_slice_rows(table, unknown)
    return {**slice_commits, **{key: replace(slice_commits[key], rows=rows) for key, rows in counted.items()}}


def has_records(table: DeltaTable) -> bool:
    """Whether any commit of the table holds a slice."""
    return bool(read_committed_slices(table, short=True).records)


def read_slice_commits_since(table: DeltaTable, topic: str, since: str) -> dict[str, SliceCommit]:
    """`read_slice_commits` for the slices of a topic from a slice key on, by the order of the text; "" for all."""
    where = f"topic = {quote_text(topic)} AND slice >= {quote_text(since)}"
    found = _read_committed_where(
        table, where, lambda key: key.rpartition("@")[0] == topic and key >= since, short=False
    )
    return collect_slice_commits(found)


def ensure_all_records_seen(table: DeltaTable) -> None:
    """Validate that a filtered query sees all rows of `_commits`: only then does the absence of a record mean anything.

    Raises:
        IncompleteReadError: the query sees fewer rows than the log of `_commits` counts (I15).
        DependencyUnavailableError: the storage could not be read.
    """
    log = open_log(table)
    if log is not None:
        [row] = query(log, "SELECT count(*) AS n FROM t WHERE version >= 0")
        ensure_all_read(log, row["n"])


def ensure_all_rows_seen(table: DeltaTable, keys: Collection[str] | None = None) -> None:
    """Validate that a filtered query sees all rows of slices, or of the table: only then does absence mean anything.

    Raises:
        IncompleteReadError: the query sees fewer rows than the commits of the slices, or the table's log, count; or
            not all commit records could be read (I15).
        DependencyUnavailableError: the storage could not be read.
    """
    if keys is None:
        list_slices_in_rows(table)
    else:
        ensure_complete(table, count_slice_rows(table, keys), read_recorded_rows(table, keys))


def read_recorded_rows(table: DeltaTable, keys: Collection[str]) -> dict[str, int]:
    """The rows of slices as they were counted at their commit, to compare with the rows that a query sees.

    A run that dies between its commit and the record of it leaves no count. Then all rows of the table are read: the
    table's log counts these.

    Args:
        table: as it was opened.
        keys: the slices; one without a commit is left out.

    Raises:
        IncompleteReadError: not all commit records could be read, or not all rows.
        DependencyUnavailableError: the storage could not be read.
    """
    ensure_all_records_seen(table)  # a missed record would take the evidence away together with the rows
    records = read_committed_slices(table, keys, short=True).records
    counted = count_all_slice_rows(table) if any(one.rows is None for one in records.values()) else {}
    return {key: counted.get(key, 0) if one.rows is None else one.rows for key, one in records.items()}


def read_slice_keys(table: DeltaTable) -> set[str]:
    """The keys of all slices in a table as it was opened."""
    return set(read_committed_slices(table, short=True).records)


def read_written(table: DeltaTable) -> dict[str, CommitTime]:
    """The rows of each slice, and when it was committed.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    records = read_committed_slices(table, short=True).records
    unknown = [key for key, one in records.items() if one.rows is None]
    rows = count_slice_rows(table, unknown)
    return {
        key: CommitTime(one.rows if one.rows is not None else rows[key], _to_milliseconds(one.committed_at))
        for key, one in records.items()
    }


def _to_milliseconds(moment: datetime | None) -> int:
    return 0 if moment is None else round((moment - _UNIX).total_seconds() * 1000)


def read_number(opened: DeltaTable) -> int:
    """The number of the last numbered commit of a table, or where it has none, the time of its creation.

    So a table that was deleted and created again, in milliseconds since 1970, is ahead of every writer of the old one.
    """
    return read_transaction_version(opened, APP) or int(opened.metadata().created_time or 0)


def get_table_id(opened: DeltaTable) -> str:
    """The ID of a table; one that was deleted and created again has another."""
    return str(opened.metadata().id)


def open_log(opened: DeltaTable) -> DeltaTable | None:
    """The table `_commits` beside a table; None if it was never created."""
    return open_table(build_log_path(opened))


def build_log_path(opened: DeltaTable) -> str:
    """The path of `_commits` beside a table."""
    return f"{str(opened.table_uri).rstrip('/').rpartition('/')[0]}/{TABLE}"


def read_name(opened: DeltaTable) -> str:
    """The name of an opened table: the last part of its path."""
    return str(opened.table_uri).rstrip("/").rpartition("/")[2]


def read_last_recorded(log: DeltaTable | None, opened: DeltaTable) -> int:
    """The last version of a table that `_commits` has, by the statistics of its files; -1 for none."""
    if log is None:
        return -1
    actions = add_actions(log)
    columns = ("partition.table", "min.table_id", "max.table_id", "max.version")
    mine, last, is_sure = get_table_id(opened), -1, set(columns) <= {*actions.column_names}
    rows = zip(*(actions[name].to_pylist() for name in columns), strict=True) if is_sure else ()
    for table, least, greatest, version in rows:
        if None in {least, greatest, version}:
            is_sure = False  # somebody wrote the file without statistics
        elif table == read_name(opened) and least <= mine <= greatest:
            # In a file of several IDs the greatest version may be another table's.
            is_sure &= least == greatest
            last = max(last, version)
    if is_sure:
        return last
    [row] = query(log, f"SELECT max(version) AS last FROM t WHERE {_is_of(opened)}")
    return -1 if row["last"] is None else int(row["last"])


def build_slices_query(opened: DeltaTable) -> tuple[dict[str, DeltaTable], str]:
    """The slices that a table holds or held, up to the version that was opened, as a part of another query.

    Returns:
        The tables that the query reads, by their names in it, and the query, whose one column is `slice`.
    """
    log = open_log(opened)
    tail = read_tail(opened, read_last_recorded(log, opened)).records
    rows = ", ".join(f"({quote_text(one.slice_key)})" for one in tail) or "(NULL)"
    behind = f"SELECT column1 AS slice FROM (VALUES {rows}) WHERE column1 IS NOT NULL"
    if log is None:
        return {}, behind
    condition = f"slice IS NOT NULL AND {_is_of(opened)} AND version <= {opened.version()}"
    return {"k": log}, f"SELECT slice FROM k WHERE {condition} UNION {behind}"


def _is_of(opened: DeltaTable) -> str:
    return f'"table" = {quote_text(read_name(opened))} AND table_id = {quote_text(get_table_id(opened))}'


def _read_log_records(
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
    return [_build_record(row) for row in found if row["slice"] is not None], restores


def _build_record(row: Mapping[str, Any]) -> CommitRecord:
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


def read_tail(opened: DeltaTable, last: int) -> LogTail:
    """The commits of a table after a version, by its Delta log."""
    records: list[CommitRecord] = []
    restores: dict[int, int] = {}
    batches: dict[str, int] = {}
    is_complete = True
    for version in range(opened.version(), last, -1):
        entry = read_commit_info(opened, version)
        if entry is None:  # Delta cleans a log from its beginning
            is_complete = False
            break
        metadata = entry.get("userMetadata")
        if entry.get("operation") == "RESTORE":
            restores[version] = _find_restored_version(opened, version, entry["operationParameters"])
        if replaces_table(metadata):
            restores[version] = -1
        at = datetime.fromtimestamp(entry["timestamp"] / 1000, UTC) if "timestamp" in entry else None
        records += from_user_metadata(metadata, version, at)
        batches[parse_batch_id(metadata)] = version
        if "REPLACE TABLE" in str(entry.get("operation")):
            restores[version] = -1
            break  # the table has another ID since, and no row from before
    return LogTail(records, restores, is_complete, batches)


def _find_restored_version(opened: DeltaTable, at: int, parameters: Mapping[str, Any]) -> int:
    """The version that a `RESTORE` went back to.

    A RESTORE to a timestamp names no version. The version that it went back to has the same files.

    Raises:
        DependencyUnavailableError: Delta's log no longer shows it.
    """
    if parameters.get("version") is not None:
        return int(parameters["version"])
    path = str(opened.table_uri)
    for version in range(at - 1, -1, -1):
        if read_commit_info(opened, version) is None:
            break
        if _list_files(path, version) == _list_files(path, at):
            return version
    raise DependencyUnavailableError(
        f"version {at} of {path} restored an older version, which cannot be found",
        stored=f"RESTORE to {parameters.get('datetime') or parameters.get('timestamp')}",
        found="that version is not in the table's log any more",
        remedy="restore the table again, VERSION AS OF a version that its log has; then run highwater maintain",
    )


def _list_files(path: str, version: int) -> set[str]:
    opened = open_table(path, version)
    return set() if opened is None else set(opened.file_uris())
