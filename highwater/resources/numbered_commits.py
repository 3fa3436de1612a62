"""Numbered commits: an intent in the ledger, one write, its records in `_commits`, the intent closed (I4)."""

# A writer looks at the table, and its commit takes the next number as Delta's `txnVersion`. If any other numbered
# commit came since that look, Delta skips the write or fails it. This also stops late writes of dead or hung runs, and
# of a deployment with another ledger.

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.commit_records import CommitRecord, from_user_metadata, parse_number, replaces_table, to_user_metadata
from highwater.errors import SupersededAttemptError, UnknownSliceError
from highwater.resources import commit_log, commit_log_writer
from highwater.resources.commit_log import APP, TableSlices, get_table_id, read_number
from highwater.resources.delta import count_slice_rows, query, quote_text, read_commit_metrics, translate_read_errors
from highwater.resources.spark import close, delta_errors

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.intents import Intent
    from highwater.slices import Slice

_SESSION = {
    "txnAppId": "spark.databricks.delta.write.txnAppId",
    "txnVersion": "spark.databricks.delta.write.txnVersion",
    "userMetadata": "spark.databricks.delta.commitInfo.userMetadata",
}


class NumberedCommit(NamedTuple):
    """What a table has after a commit.

    Args:
        version: the version of the table.
        rows: by slice key, counted in the table after the write; none for records without a slice commit.
        metrics: what the commit wrote, as Delta's log says it; empty without a commit.
    """

    version: int
    rows: Mapping[str, int]
    metrics: Mapping[str, Any] = MappingProxyType({})


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
        """The path of the table."""
        return self.lake.build_table_path(self.stream, self.table)

    def open_table(self) -> DeltaTable:
        """The table as it is now, without a JVM."""
        return self.lake.open_existing_table(self.stream, self.table)

    def reopen_table(self, opened: DeltaTable | None) -> DeltaTable:
        """The table as it is now; of one that is open only what came since is read, not the list of all its files."""
        if opened is None:
            return self.open_table()
        with translate_read_errors(self.path):
            opened.update_incremental()
        return opened


def close_intents(target: Target) -> None:
    """Close every open intent of a table: first its records go to `_commits` if its write committed.

    If not, an empty commit takes its number, so that the write never commits later.

    The caller holds the lease of the table's commits.

    Raises:
        SupersededAttemptError: the write committed at the same moment; the caller looks again.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable.
    """
    for intent in target.ledger.intents.list_for_table(target.stream, target.table):
        opened = target.open_table()
        written = _recover_commit_records(intent, opened)
        restores = {opened.version(): -1} if written and replaces_table(intent.user_metadata) else {}
        _complete(target, opened, written, restores)
        # The next numbered commit fences the write as well, so nothing is lost by a crash between these two.
        target.ledger.intents.close(intent.batch)
        if not written and read_number(opened) < parse_number(intent.user_metadata):
            _take_number(target, parse_number(intent.user_metadata))


def _take_number(target: Target, number: int) -> None:
    """Commit nothing under a number, so that Delta skips or fails a later write under it."""
    with delta_errors(target.path):
        empty = target.spark.read.format("delta").load(target.path).limit(0)
        options = {"txnAppId": APP, "txnVersion": str(number)}
        empty.write.format("delta").mode("append").options(**options).save(target.path)


def _recover_commit_records(intent: Intent, opened: DeltaTable) -> list[CommitRecord]:
    """The records of an intent whose write committed and whose entry Delta has cleaned from the log; else none.

    `add_missing_records` finds all others in the log. Only the intent's own write, or the empty commit that closes it,
    can use its number. So if the table is at that number and the entry is gone, the write committed.
    """
    log = commit_log.open_log(opened)
    tail = commit_log.read_tail(opened, commit_log.read_last_recorded(log, opened))
    if tail.is_complete or read_number(opened) < parse_number(intent.user_metadata):
        return []
    condition = f"table_id = {quote_text(get_table_id(opened))} AND batch = {quote_text(intent.batch)}"
    if log is not None and query(log, f"SELECT 1 FROM t WHERE {condition} LIMIT 1"):
        return []
    return from_user_metadata(intent.user_metadata, opened.version(), datetime.now(UTC))


def _complete(target: Target, opened: DeltaTable, written: Sequence[CommitRecord], restores: Mapping[int, int]) -> None:
    commit_log_writer.add_missing_records(opened, PlannedSlices(target.ledger), written, restores)


class PlannedSlices(dict[str, "Slice"]):
    """Slices by key, as the ledger has them; asked for the commits that do not carry their ranges."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def get(self, key: str, default: Slice | None = None) -> Slice | None:  # type: ignore[override]
        """The slice, or the default where the ledger does not know it."""
        try:
            return self._ledger.get([key])[0]
        except UnknownSliceError:
            return default


def commit_slices(
    target: Target,
    seen: TableSlices,
    records: Sequence[CommitRecord],
    run: str,
    write: Callable[[Mapping[str, str]], object],
    *,
    replaces: bool = False,
    opened: DeltaTable | None = None,
) -> NumberedCommit:
    """Let one write commit some slices, unless another numbered commit came since the table was looked at.

    Args:
        target: the table; the caller holds the lease of its commits.
        seen: the table as the caller looked at it; what the write holds rests on this look.
        records: by slice what the write holds; batch, run and version are set here.
        run: the Dagster run.
        write: makes exactly one Delta commit, by Spark or by delta-rs, with the options that it is given.
        replaces: the write replaces the whole table.
        opened: the table as it was opened for `seen`, for this function alone from now on; opened again if None.

    Returns:
        The version of the table after the commit, the rows of the slices, and what Delta says that it wrote.

    Raises:
        SupersededAttemptError: another writer was first, or closed the intent; nothing was written.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable. The intent stays for the next run.
    """
    if seen.unrecorded:  # the write that follows may clean old entries of the log
        _complete(target, target.open_table(), [], {})
    batch, number = uuid.uuid4().hex, seen.number + 1
    records = [replace(one, batch=batch, run=run) for one in records]
    metadata = to_user_metadata(records, number, batch=batch, run=run, replaces=replaces)
    target.ledger.intents.open(batch, target.stream, target.table, metadata, datetime.now(UTC))
    with delta_errors(target.path):
        write({"txnAppId": APP, "txnVersion": str(number), "userMetadata": metadata})
    opened = target.reopen_table(opened)
    version = commit_log.read_tail(opened, seen.version).batches.get(batch)
    if version is None:
        if read_number(opened) >= number:  # the write never commits any more
            target.ledger.intents.close(batch)
        raise SupersededAttemptError(
            f"another run committed to {target.stream}/{target.table} since this one looked at it",
            stored=f"number {number}",
            found=f"batch {batch} is not in the table's log",
            remedy="nothing to do: the slices are looked at again",
        )
    rows = count_slice_rows(opened, [one.slice_key for one in records if one.slice_commit is not None])
    written = [replace(one, version=version, rows=rows.get(one.slice_key, one.rows)) for one in records]
    # The commit is done; without its records the intent stays, and the next run completes them.
    with suppress(SupersededAttemptError):
        _complete(target, opened, written, {})
        target.ledger.intents.close(batch)
    return NumberedCommit(version, rows, read_commit_metrics(opened, version))


@contextmanager
def session_options(spark: SparkSession, options: Mapping[str, str]) -> Iterator[None]:
    """Commits of the session carry the options inside the block; MERGE takes them from the session alone."""
    for name, value in options.items():
        spark.conf.set(_SESSION[name], value)
    try:
        yield
    finally:
        try:
            for name in options:
                spark.conf.unset(_SESSION[name])
        except Exception:
            # If two later writes to another table still carried the number, Delta would skip the second.
            close(spark)
            raise
