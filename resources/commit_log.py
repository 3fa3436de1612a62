"""The table `_commits` of a stream, and named commits: an intent in the ledger, one write, one record.

A batch is written once, whatever becomes of its writer (I4). Delta takes the batch's name as `txnAppId`: the write
carries version 1, and closing an intent commits version 2, after which Delta skips the write or fails it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.commit_records import CommitRecord, from_user_metadata, to_user_metadata
from highwater.errors import SupersededAttemptError, UnknownSliceError
from resources.lake import query, reading, text_in_sql
from resources.small_tables import append
from resources.spark import delta_errors
from resources.spark_tables import last_version

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from highwater.slices import Slice
    from resources.lake import Lake
    from resources.ledger import Ledger

TABLE = "_commits"
WRITTEN, CLOSED = 1, 2
_APP_ID = "spark.databricks.delta.write.txnAppId"
_APP_VERSION = "spark.databricks.delta.write.txnVersion"
_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


@dataclass(frozen=True)
class Committed:
    """The slices that one version of a table holds.

    Args:
        records: the newest commit record by slice key.
        version: of the table; -1 where there is no table.
    """

    records: Mapping[str, CommitRecord] = field(default_factory=dict)
    version: int = -1

    def attempt(self, key: str) -> int:
        """The attempt of a slice in the table; 0 for none."""
        return self.records[key].attempt if key in self.records else 0

    @property
    def attempts(self) -> dict[str, int]:
        """The attempts of all slices, by slice key."""
        return {key: record.attempt for key, record in self.records.items()}


@dataclass(frozen=True)
class _Tail:
    """The entries of a table's Delta log behind the last version that `_commits` has."""

    records: Sequence[CommitRecord]
    restores: Mapping[int, int]


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
    records = sorted([*recorded, *tail.records], key=lambda record: record.version)
    for at, target in sorted({**restores, **tail.restores}.items()):
        records = [record for record in records if not target < record.version < at]
    wanted = None if keys is None else set(keys)
    newest = {record.slice_key: record for record in records if wanted is None or record.slice_key in wanted}
    return Committed(newest, opened.version())


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
    if opened.version() <= last:
        return _Tail([], {})
    with reading(str(opened.table_uri)):
        entries = opened.history(opened.version() - last)
    records: list[CommitRecord] = []
    restores: dict[int, int] = {}
    for entry in entries:
        version, at = int(entry["version"]), datetime.fromtimestamp(entry["timestamp"] / 1000, UTC)
        if version <= last:
            continue
        if entry.get("operation") == "RESTORE":
            restores[version] = int(entry["operationParameters"]["version"])
        records += from_user_metadata(entry.get("userMetadata"), version, at)
    return _Tail(records, restores)


def _id(opened: DeltaTable) -> str:
    return str(opened.metadata().id)


def complete(lake: Lake, ledger: Ledger, stream: str, table: str, written: Sequence[CommitRecord] = ()) -> None:
    """Add to `_commits` what the table's Delta log has and `_commits` lacks.

    Args:
        lake: the tables.
        ledger: gives the ranges of the slices.
        stream: the stream's name.
        table: the table's name.
        written: records of a commit whose rows are known, or which the log has no more.

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
    if not records and not tail.restores:
        return
    rows = [_row(table, _id(opened), record, _slice(ledger, record.slice_key)) for record in records]
    rows += [
        {"table": table, "table_id": _id(opened), "version": at, "restored_to": target}
        for at, target in tail.restores.items()
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
    """One table that named commits write.

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

    def state(self, batch: str) -> int | None:
        """`WRITTEN` or `CLOSED`; None where the batch has done nothing yet."""
        with reading(self.path):
            found = self.lake.table_at(self.stream, self.table).transaction_version(batch)
        return None if found is None else int(found)


def close_intents(target: Target) -> None:
    """Settle every open intent of a table: complete `_commits` where its write committed, close it where not.

    The caller holds the table's lease, so no live writer owns one of them.

    Raises:
        SupersededAttemptError: the write committed at the same moment; the caller looks again.
        DependencyAwayError: Spark, the ledger or the lake is away.
    """
    for intent in target.ledger.intents.of(target.stream, target.table):
        state = target.state(intent.batch)
        if state is None:
            with delta_errors(target.path):
                empty = target.spark.read.format("delta").load(target.path).limit(0)
                options = {"txnAppId": intent.batch, "txnVersion": str(CLOSED)}
                empty.write.format("delta").mode("append").options(**options).save(target.path)
        written = []
        if state == WRITTEN:
            version = target.lake.table_at(target.stream, target.table).version()
            records = from_user_metadata(intent.user_metadata, version, datetime.now(UTC))
            written = _unrecorded(target, records)
        complete(target.lake, target.ledger, target.stream, target.table, written)
        target.ledger.intents.remove(intent.batch)


def _unrecorded(target: Target, records: Sequence[CommitRecord]) -> list[CommitRecord]:
    """The records of a written batch, unless the table's log or `_commits` has them."""
    held = committed(target.lake, target.stream, target.table, [record.slice_key for record in records])
    newest = held.records
    return [
        record for record in records if record.slice_key not in newest or newest[record.slice_key].batch != record.batch
    ]


def commit(
    target: Target, attempts: Mapping[str, int], rows: Mapping[str, int | None], run: str, write: Callable[[], object]
) -> int:
    """Let one write commit some slices, under a name that Delta takes once.

    Args:
        target: the table; the caller holds its lease.
        attempts: by slice the attempt that the write holds.
        rows: by slice the events that it takes into account.
        run: the Dagster run.
        write: makes exactly one Delta commit, in the session of the target.

    Returns:
        The version of the table after the commit.

    Raises:
        SupersededAttemptError: another writer was first, or closed the intent; nothing was written.
        DependencyAwayError: Spark, the ledger or the lake is away. The intent stays, for whoever comes next.
    """
    batch = uuid.uuid4().hex
    records = [CommitRecord(key, attempt, rows.get(key), batch, run) for key, attempt in attempts.items()]
    metadata = to_user_metadata(records)
    target.ledger.intents.open(batch, target.stream, target.table, metadata, datetime.now(UTC))
    with delta_errors(target.path), _named(target.spark, batch, metadata):
        write()
        version = last_version(target.spark)
    if target.state(batch) != WRITTEN:
        raise SupersededAttemptError(
            f"another run closed batch {batch} of {target.stream}/{target.table} before its write committed",
            remedy="nothing: the slices are looked at again",
        )
    complete(target.lake, target.ledger, target.stream, target.table, [replace(r, version=version) for r in records])
    target.ledger.intents.remove(batch)
    return version


@contextmanager
def _named(spark: SparkSession, batch: str, metadata: str) -> Iterator[None]:
    """Commits of the session carry a name and records inside of the block; MERGE takes them from the session alone."""
    values = {_APP_ID: batch, _APP_VERSION: str(WRITTEN), _USER_METADATA: metadata}
    for name, value in values.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in values:
            spark.conf.unset(name)
