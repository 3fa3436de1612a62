"""The table `_commits` of a stream, and numbered commits: an intent in the ledger, one write, one record.

A batch is written once, whatever becomes of its writer (I4). A writer looks at the table, and its commit takes the
next number as Delta's `txnVersion`. If any other numbered commit came since that look, Delta skips the write or fails
it: also the write of a dead run, of a process that stood still, and of a deployment with another ledger.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.commit_records import (
    CommitRecord,
    from_user_metadata,
    held_at,
    number_of,
    replaces_table,
    to_user_metadata,
)
from highwater.errors import SupersededAttemptError, UnknownSliceError
from resources.lake import commit_info, open_table, query, text_in_sql
from resources.small_tables import append
from resources.spark import close, delta_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from highwater.slices import Slice
    from resources.intents import Intent
    from resources.lake import Lake
    from resources.ledger import Ledger

TABLE = "_commits"
APP = "highwater"
_APP_ID = "spark.databricks.delta.write.txnAppId"
_APP_VERSION = "spark.databricks.delta.write.txnVersion"
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


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

    @property
    def attempts(self) -> dict[str, int]:
        """The attempts of all slices, by slice key."""
        return {key: record.attempt for key, record in self.records.items()}


@dataclass(frozen=True)
class _Tail:
    """The entries of a table's Delta log behind the last version that `_commits` has.

    Args:
        records: the commit records in them.
        restores: see `held_at`.
        is_complete: Delta has cleaned none of the entries away.
    """

    records: Sequence[CommitRecord]
    restores: Mapping[int, int]
    is_complete: bool = True


def committed(lake: Lake, stream: str, table: str, keys: Sequence[str] | None = None) -> Committed:
    """The slices that a table holds now, from `_commits` and from the log entries that `_commits` lacks.

    Args:
        lake: the tables.
        stream: the stream's name.
        table: the table's name.
        keys: the slices that are asked for; all if None.

    Raises:
        DependencyAwayError: the lake could not be read; this is not the same as empty (I15).
    """
    opened = lake.table(stream, table)
    if opened is None:
        return Committed()
    log = lake.table(stream, TABLE)
    mine = f"table_id = {text_in_sql(_id(opened))} AND version <= {opened.version()}"
    recorded, restores, last = _recorded(log, mine, keys)
    tail = _tail(opened, last)
    records = [*recorded, *tail.records]
    wanted = None if keys is None else set(keys)
    newest = held_at(
        opened.version(),
        (record for record in records if wanted is None or record.slice_key in wanted),
        {**restores, **tail.restores},
    )
    return Committed(newest, opened.version(), _number(opened))


def _number(opened: DeltaTable) -> int:
    """The number of the last numbered commit of a table, or where it has none, the time of its creation.

    So a table that was deleted and created again, in milliseconds since 1970, is ahead of every writer of the old one.
    """
    return int(opened.transaction_version(APP) or opened.metadata().created_time or 0)


def _recorded(
    log: DeltaTable | None, mine: str, keys: Sequence[str] | None
) -> tuple[list[CommitRecord], dict[int, int], int]:
    """Of `_commits` the records of some slices, the restores, and the last version of the table that it has."""
    if log is None:
        return [], {}, -1
    wanted = "true" if keys is None else f"slice IN ({', '.join(map(text_in_sql, keys)) or 'NULL'})"
    [last] = query(log, f"SELECT max(version) AS last FROM t WHERE {mine}")
    found = query(
        log,
        f"SELECT slice, attempt, rows, batch, run, version, restored_to FROM t WHERE {mine} AND "
        f"(restored_to IS NOT NULL OR {wanted})",
    )
    restores = {row["version"]: row["restored_to"] for row in found if row["restored_to"] is not None}
    records = [
        CommitRecord(row["slice"], row["attempt"], row["rows"], row["batch"], row["run"], row["version"])
        for row in found
        if row["restored_to"] is None
    ]
    return records, restores, -1 if last["last"] is None else int(last["last"])


def _tail(opened: DeltaTable, last: int) -> _Tail:
    records: list[CommitRecord] = []
    restores: dict[int, int] = {}
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
    return _Tail(records, restores, is_complete)


def _restored_version(opened: DeltaTable, at: int, parameters: Mapping[str, Any]) -> int:
    """The version that a `RESTORE` went back to; -1 where Delta's log no longer shows it.

    A RESTORE to a timestamp names no version. The version that it went back to has the same files.
    """
    if parameters.get("version") is not None:
        return int(parameters["version"])
    path = str(opened.table_uri)
    for version in range(at - 1, -1, -1):
        if commit_info(opened, version) is None:
            break
        if _files(path, version) == _files(path, at):
            return version
    return -1


def _files(path: str, version: int) -> set[str]:
    opened = open_table(path, version)
    return set() if opened is None else set(opened.file_uris())


def _id(opened: DeltaTable) -> str:
    return str(opened.metadata().id)


def complete(
    lake: Lake,
    ledger: Ledger,
    stream: str,
    table: str,
    written: Sequence[CommitRecord] = (),
    restores: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Add to `_commits` what the table's Delta log has and `_commits` lacks.

    Args:
        lake: the tables.
        ledger: gives the ranges of the slices.
        stream: the stream's name.
        table: the table's name.
        written: records of a commit whose rows are known, or which the log no longer has.
        restores: of such a commit, see `held_at`.

    Raises:
        DependencyAwayError: the lake could not be read or written.
    """
    opened = lake.table(stream, table)
    if opened is None:
        return
    _, _, last = _recorded(lake.table(stream, TABLE), f"table_id = {text_in_sql(_id(opened))}", ())
    tail = _tail(opened, last)
    known = {(record.slice_key, record.batch): record for record in written}
    records = [_with_rows(record, known) for record in tail.records]
    there = {record.batch for record in records}
    records += [record for record in written if record.batch not in there and record.version > last]
    going_back = {at: target for at, target in {**restores, **tail.restores}.items() if at > last}
    if not records and not going_back:
        return
    rows = [_row(table, _id(opened), record, _slice(ledger, record.slice_key)) for record in records]
    rows += [
        {"table": table, "table_id": _id(opened), "version": at, "restored_to": target}
        for at, target in going_back.items()
    ]
    import pyarrow as pa

    append(lake.path(stream, TABLE), pa.Table.from_pylist(rows, schema()))


def _with_rows(record: CommitRecord, known: Mapping[tuple[str, str], CommitRecord]) -> CommitRecord:
    found = known.get((record.slice_key, record.batch))
    return record if found is None else replace(record, rows=found.rows)


def _slice(ledger: Ledger, key: str) -> Slice | None:
    try:
        return ledger.get([key])[0]
    except UnknownSliceError:
        return None


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
        ]
    )


def _row(table: str, table_id: str, record: CommitRecord, piece: Slice | None) -> dict[str, Any]:
    ranges = (
        [] if piece is None else [{"partition": p, "start": r.start, "end": r.end} for p, r in piece.ranges.items()]
    )
    return {
        "table": table,
        "table_id": table_id,
        "version": record.version,
        "slice": record.slice_key,
        "topic": record.slice_key.rpartition("@")[0],
        "generation": None if piece is None else piece.generation,
        "ranges": ranges,
        "attempt": record.attempt,
        "rows": record.rows,
        "batch": record.batch,
        "run": record.run,
        "committed_at": record.committed_at,
    }


@dataclass(frozen=True)
class Target:
    """One table that numbered commits write.

    Args:
        spark: the session that writes and closes.
        lake: the tables.
        ledger: holds the intents.
        stream: the stream's name.
        table: the table's name.
    """

    spark: SparkSession
    lake: Lake
    ledger: Ledger
    stream: str
    table: str

    @property
    def path(self) -> str:
        """Where the table is."""
        return self.lake.path(self.stream, self.table)

    def opened(self) -> DeltaTable:
        """The table as it is now, without a JVM."""
        return self.lake.table_at(self.stream, self.table)


def close_intents(target: Target) -> None:
    """Settle every open intent of a table: complete `_commits` where its write committed, close it where not.

    The caller holds the table's lease, and in a lake that takes one driver the lock of its commits.

    Raises:
        SupersededAttemptError: the write committed at the same moment; the caller looks again.
        DependencyAwayError: Spark, the ledger or the lake is away.
    """
    for intent in target.ledger.intents.of(target.stream, target.table):
        opened = target.opened()
        written = _written(target, intent, opened)
        restores = {opened.version(): -1} if written and replaces_table(intent.user_metadata) else {}
        complete(target.lake, target.ledger, target.stream, target.table, written, restores)
        # The next numbered commit fences the write as well, so nothing is lost by a crash between these two.
        target.ledger.intents.remove(intent.batch)
        if not written and _number(opened) < number_of(intent.user_metadata):
            _close(target, number_of(intent.user_metadata))


def _close(target: Target, number: int) -> None:
    """Take a number with an empty commit, so that a write under it never commits."""
    with delta_errors(target.path):
        empty = target.spark.read.format("delta").load(target.path).limit(0)
        options = {"txnAppId": APP, "txnVersion": str(number)}
        empty.write.format("delta").mode("append").options(**options).save(target.path)


def _written(target: Target, intent: Intent, opened: DeltaTable) -> list[CommitRecord]:
    """The records of an intent whose write committed and whose entry Delta has cleaned from the log; else none.

    `complete` finds all others in the log. Nobody else takes the number of an open intent, so a table that has it holds
    the write, or what closed it moments ago: then the log has the entry.
    """
    log = target.lake.table(target.stream, TABLE)
    mine = f"table_id = {text_in_sql(_id(opened))}"
    _, _, last = _recorded(log, mine, ())
    is_recorded = log is not None and query(log, f"SELECT 1 FROM t WHERE {mine} AND batch = '{intent.batch}' LIMIT 1")
    tail = _tail(opened, last)
    if is_recorded or tail.is_complete or _number(opened) < number_of(intent.user_metadata):
        return []
    return from_user_metadata(intent.user_metadata, opened.version(), datetime.now(UTC))


def commit_slices(
    target: Target,
    held: Committed,
    attempts: Mapping[str, int],
    rows: Mapping[str, int | None],
    run: str,
    write: Callable[[], object],
    *,
    replaces: bool = False,
) -> int:
    """Let one write commit some slices, unless another numbered commit came since the table was looked at.

    Args:
        target: the table; the caller holds its lease.
        held: the table as the caller looked at it; what the write holds rests on this look.
        attempts: by slice the attempt that the write holds.
        rows: by slice the events that it takes into account.
        run: the Dagster run.
        write: makes exactly one Delta commit, in the session of the target.
        replaces: the write replaces the whole table.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another writer was first, or closed the intent; nothing was written.
        DependencyAwayError: Spark, the ledger or the lake is away. The intent stays, for whoever comes next.
    """
    batch, number = uuid.uuid4().hex, held.number + 1
    records = [CommitRecord(key, attempt, rows.get(key), batch, run) for key, attempt in attempts.items()]
    metadata = to_user_metadata(records, number, replaces=replaces)
    target.ledger.intents.open(batch, target.stream, target.table, metadata, datetime.now(UTC))
    with delta_errors(target.path), _numbered(target.spark, number, metadata):
        write()
    version = next((one.version for one in _tail(target.opened(), held.version).records if one.batch == batch), None)
    if version is None:
        raise SupersededAttemptError(
            f"another run committed to {target.stream}/{target.table} since this one looked at it",
            stored=f"number {number}",
            found=f"batch {batch} is not in the table's log",
            remedy="nothing: the slices are looked at again",
        )
    complete(target.lake, target.ledger, target.stream, target.table, [replace(r, version=version) for r in records])
    target.ledger.intents.remove(batch)
    return version


@contextmanager
def _numbered(spark: SparkSession, number: int, metadata: str) -> Iterator[None]:
    """Commits of the session carry number and records inside the block; MERGE takes them from the session alone."""
    values = {_APP_ID: APP, _APP_VERSION: str(number), _USER_METADATA: metadata}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        try:
            for name in values:
                spark.conf.unset(name)
        except Exception:
            # Of two later writes to another table Delta would skip the second, if they still carried the number.
            close(spark)
            raise
