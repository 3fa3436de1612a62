"""Steps that every stage shares: create its table, commit slices or take over another run's commit, report (I4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from highwater.assets import small_writes
from highwater.assets.work import SliceReport, Work
from highwater.commit_records import CommitRecord, with_slice_commit
from highwater.errors import HighwaterError, LeaseHeldError, SupersededAttemptError
from highwater.log_fields import bind_log_fields
from highwater.resources.catalog import build_catalog_name, register
from highwater.resources.commit_log import read_committed_slices
from highwater.resources.delta import ADDED_BYTES, count_slice_rows
from highwater.resources.numbered_commits import NumberedCommit, Target, close_intents, commit_slices
from highwater.resources.object_store import has_exclusive_log_store
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import create_table, read_table_version, write_slices
from highwater.tables import COMMENTS

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

    from highwater.resources.commit_log import TableSlices
    from highwater.resources.ledger.leases import Lease
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# Conflicts with writers of other slices (compaction, a change of the table) pass; five tries are 1 + 2 + 4 + 8 s.
TRIES = 5
# A driver that died holding the lease blocks others for this many seconds.
LEASE_SECONDS = 60


@dataclass
class Clock:
    """Seconds by phase, for the metadata of a run."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under a name, which its log lines carry."""
        begin = time.monotonic()
        try:
            with bind_log_fields(phase=name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin


@dataclass(frozen=True)
class CommittedSlices:
    """The slice commits that a table held when it was read.

    Args:
        slice_commits: by slice key.
        version: the version of the table; who reads rows that belong to these slice commits reads this version.
    """

    slice_commits: Mapping[str, SliceCommit]
    version: int

    @classmethod
    def read(cls, work: Work, table: str, opened: DeltaTable | None = None) -> CommittedSlices:
        """Look at the table now, or as it was opened."""
        return cls(*work.lake.load_commits_and_version(work.stream.name, table, work.keys, opened))

    def find_attempt(self, key: str) -> int:
        """The attempt that the table held; 0 for none."""
        return self.slice_commits[key].attempt if key in self.slice_commits else 0


class RowsToCommit(Protocol):
    """Rows of some slices, ready to be committed."""

    @property
    def spread(self) -> str:
        """The column that spreads a slice over files."""

    @property
    def few(self) -> bool:
        """Whether the memory of this process can hold the rows."""

    def build_slice_commit(self, slice_: Slice, attempt: int) -> SliceCommit:
        """The slice commit that goes with a slice's rows."""

    def count_files(self, keys: Sequence[str]) -> int:
        """Data files at the most, when these slices are committed together."""

    def count_tasks(self, keys: Sequence[str]) -> int:
        """The number of tasks that read the rows of these slices; 1 where Spark holds them."""

    def find_refusal(self, slice_: Slice, committed: SliceCommit | None) -> str | None:
        """The reason why the slice keeps its committed rows, or None if its new rows may replace them."""

    def select_rows(self, attempts: Mapping[str, int]) -> DataFrame:
        """The rows of the slices that are named with their attempts, with the table's columns."""

    def around_commit(self, keys: Sequence[str]) -> AbstractContextManager[Callable[[], None]]:
        """A context held while slices are committed; it yields the check to make just before the commit."""

    def release(self) -> None:
        """Let go of what Spark holds for the batch."""


Prepare = Callable[[Work, "Sequence[Slice]", Clock], RowsToCommit]


def commit_with_retries(
    work: Work,
    table: str,
    committed: CommittedSlices,
    skipped: Mapping[str, str],
    prepare: Prepare,
) -> list[SliceReport]:
    """Commit every slice that is not kept, or take over the commit of the run that was first.

    Args:
        work: the slices and the connections.
        table: the table's name.
        committed: the slice commits that the table held when `skipped` was decided.
        skipped: slices that stay unchanged, with the reason.
        prepare: makes the rows of some slices.

    Raises:
        SupersededAttemptError: other writers were first again and again.
    """
    clock, notes = Clock(), dict(skipped)
    pending = [slice_ for slice_ in work.slices if slice_.key not in notes]
    if not pending:
        return build_reports(work, table, committed.slice_commits, notes, clock, NumberedCommit(committed.version, {}))
    batch = prepare(work, pending, clock)
    try:
        notes.update(_find_refusals(batch, pending, committed))
        final, done = _commit_or_take_over(work, table, committed, batch, notes, clock)
    finally:
        release_quietly(batch.release, work)
    return build_reports(work, table, final, notes, clock, done)


def _find_refusals(batch: RowsToCommit, pending: Sequence[Slice], committed: CommittedSlices) -> dict[str, str]:
    found = {slice_.key: batch.find_refusal(slice_, committed.slice_commits.get(slice_.key)) for slice_ in pending}
    return {key: reason for key, reason in found.items() if reason is not None}


def _commit_or_take_over(
    work: Work, table: str, committed: CommittedSlices, batch: RowsToCommit, notes: dict[str, str], clock: Clock
) -> tuple[Mapping[str, SliceCommit], NumberedCommit]:
    """Commit what has no note yet; slices that others committed meanwhile get a note instead."""
    seen = committed
    for tries in range(1, TRIES + 1):
        pending = [slice_ for slice_ in work.slices if slice_.key not in notes]
        if not pending:
            return seen.slice_commits, NumberedCommit(seen.version, {})
        try:
            with clock.phase("commit"):
                slice_commits, done = _commit(work, table, seen, batch, pending)
        except SupersededAttemptError:
            seen = CommittedSlices.read(work, table)
            taken = _describe_takeovers(pending, committed, seen)
            notes.update(taken)
            if not taken and tries == TRIES:
                raise
            if not taken:
                time.sleep(2 ** (tries - 1))
        else:
            return {**seen.slice_commits, **slice_commits}, done
    raise SupersededAttemptError(
        f"{table} of {', '.join(work.keys)}: other writers were first {TRIES} times",
        remedy="lower max_concurrent_runs in dagster.yaml, or move other writers of this table to another time; "
        "then request the slices again",
    )


def _describe_takeovers(pending: Sequence[Slice], before: CommittedSlices, now: CommittedSlices) -> dict[str, str]:
    return {
        slice_.key: f"attempt {now.find_attempt(slice_.key)} of another run was first and is taken over"
        for slice_ in pending
        if now.find_attempt(slice_.key) != before.find_attempt(slice_.key)
    }


def _commit(
    work: Work, table: str, seen: CommittedSlices, batch: RowsToCommit, pending: Sequence[Slice]
) -> tuple[dict[str, SliceCommit], NumberedCommit]:
    keys = [slice_.key for slice_ in pending]
    attempts = work.ledger.allocate_attempts(keys)
    slice_commits = {slice_.key: batch.build_slice_commit(slice_, attempts[slice_.key]) for slice_ in pending}
    work.log(f"{table}: committing {len(keys)} slices")
    with batch.around_commit(keys) as ensure_held, take_commit_turn(work, table):
        work.before_commit()
        ensure_held()
        done = commit_rows(
            work,
            table,
            batch.select_rows(attempts),
            list(slice_commits.values()),
            seen,
            files=batch.count_files(keys),
            spread=batch.spread,
            tasks=batch.count_tasks(keys),
            few=batch.few,
        )
    return slice_commits, done


def commit_rows(
    work: Work,
    table: str,
    rows: DataFrame | None,
    slice_commits: Sequence[SliceCommit],
    committed: CommittedSlices,
    *,
    files: int,
    spread: str,
    tasks: int | None = None,
    few: bool = False,
) -> NumberedCommit:
    """Commit slices: their rows replace exactly these slices, in one Delta commit that carries the slice commits (I4).

    The caller holds the turn of the table's commits.

    Args:
        work: the connections.
        table: the table's name.
        rows: the rows, with the table's columns; None if there are none.
        slice_commits: one for each slice.
        committed: the slices in the table when the caller looked: the rows rest on this look.
        files, spread, tasks: as of `write_slices`.
        few: whether the memory of this process can hold the rows.

    Returns:
        As `commit_slices`.

    Raises:
        SupersededAttemptError: another attempt committed since that look; nothing was written.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable.
    """
    target, keys = build_target(work, table), [slice_commit.key for slice_commit in slice_commits]
    if work.ledger.intents.list_for_table(work.stream.name, table):
        close_intents(target)
    opened = target.open_table()
    seen = read_committed_slices(opened, keys)
    ensure_unchanged(table, committed, seen, keys)
    # Without rows to replace Delta need not look for any. That there are none, records and a look must say both.
    replace = any(one.rows != 0 for one in seen.records.values()) or any(count_slice_rows(opened, keys).values())
    with delta_errors(target.path):
        by_delta_rs = not replace and (rows is None or few) and has_exclusive_log_store(work.spark, work.lake.root)

    def write(options: Mapping[str, str]) -> None:
        if by_delta_rs and small_writes.append(opened, rows, options):
            return
        # Under the same number: if delta-rs or another writer committed after all, Delta skips it.
        made = read_table_version(work.spark, target.path, opened.version()).limit(0) if rows is None else rows
        write_slices(target.path, made, keys, options, replace=replace, files=files, spread=spread, tasks=tasks)

    base = CommitRecord("", 0, None, batch="")
    records = [with_slice_commit(base, slice_commit) for slice_commit in slice_commits]
    return commit_slices(target, seen, records, work.run, write, opened=opened)


def ensure_unchanged(table: str, committed: CommittedSlices, seen: TableSlices, keys: Sequence[str]) -> None:
    """Validate that nobody committed the slices since the caller looked.

    Raises:
        SupersededAttemptError: one is not.
    """
    for key in keys:
        if seen.find_attempt(key) != committed.find_attempt(key) or seen.find_version(key) > committed.version:
            raise SupersededAttemptError(
                f"another attempt at {key} in {table} was first",
                stored=f"attempt {committed.find_attempt(key)}, version {committed.version} of the table",
                found=f"attempt {seen.find_attempt(key)}, committed in version {seen.find_version(key)}",
                remedy="nothing to do: its commit is taken over",
            )


def build_target(work: Work, table: str) -> Target:
    """A table of the stream, as numbered commits write it."""
    return Target(work.spark, work.lake, work.ledger, work.stream.name, table)


def require_newer(decisions: Mapping[str, SliceCommit], committed: Mapping[str, int]) -> None:
    """Ensure that no decision is older than what follows it already: another run decided since we looked.

    Raises:
        SupersededAttemptError: one is.
    """
    for key, attempt in committed.items():
        if attempt > decisions[key].attempt:
            raise SupersededAttemptError(
                f"{key} was reprocessed meanwhile",
                stored=f"attempt {attempt}",
                found=f"attempt {decisions[key].attempt}",
                remedy="nothing to do: the decision is looked at again",
            )


def release_quietly(release: Callable[[], object], work: Work) -> None:
    """Release what Spark holds. A session that died released it already, and its error matters more."""
    try:
        release()
    except Exception as error:  # noqa: BLE001 - whatever Spark says of a session that is gone
        work.log(f"Spark could not release cached rows: {type(error).__name__}")


def take_commit_turn(work: Work, table: str, wait: float = 10 * LEASE_SECONDS) -> AbstractContextManager[Lease]:
    """Writers of one table take turns, so that none has to write again because another one was first.

    The turn is not the fence: a writer that outlives it finds its number taken.
    """
    return work.ledger.lease(build_turn_name(work.stream.name, table), seconds=LEASE_SECONDS, wait=wait)


def build_turn_name(stream: str, table: str) -> str:
    """Name of the lock that the writers of a stream's table share."""
    return f"commit {stream}/{table}"


def ensure_table(
    work: Work, table: str, columns: str, searched: Sequence[str], properties: Mapping[str, str] = MappingProxyType({})
) -> DeltaTable | None:
    """Create a table of the stream if it is absent, or add what columns it lacks.

    The intents that dead runs left open are closed, so that the caller's first read finds their records.

    Returns:
        The table as it was opened; None where something may have been committed since.
    """
    path = work.lake.build_table_path(work.stream.name, table)
    of_stream = {"highwater.stream": work.stream.name, "highwater.owner": work.stream.owner}
    opened = create_table(
        work.spark,
        path,
        columns,
        searched,
        comment=COMMENTS.get(table),
        properties={**of_stream, **properties},
    )
    if opened is None and work.lake.catalog is not None:
        _register(work, table, work.lake.catalog)
    if work.ledger.intents.list_for_table(work.stream.name, table):
        # A run at work on the table, or one that just committed, leaves nothing open.
        with suppress(LeaseHeldError, SupersededAttemptError), take_commit_turn(work, table, wait=0.0):
            close_intents(build_target(work, table))
        return None
    return opened


def _register(work: Work, table: str, catalog: str) -> None:
    """Register a new table. A catalog that is unavailable fails no slice: maintenance registers missing tables."""
    name = build_catalog_name(work.stream.name, table)
    try:
        register(work.spark, catalog, {name: work.lake.build_table_path(work.stream.name, table)})
    except HighwaterError as error:
        work.log(f"{catalog}.{name} is not registered: {error}; the next maintenance tries it again")


def build_reports(
    work: Work,
    table: str,
    slice_commits: Mapping[str, SliceCommit],
    notes: Mapping[str, str],
    clock: Clock,
    done: NumberedCommit,
) -> list[SliceReport]:
    """A report for each slice, in their order, with the rows that the table has now.

    Args:
        work: the slices and the connections.
        table: the table's name.
        slice_commits: the table's slice commits, by slice.
        notes: for slices that stay unchanged, the reason.
        clock: seconds by phase.
        done: the commit; without one, the version that holds the slices. Slices without a count in it are counted now.
    """
    left = [key for key in work.keys if key not in done.rows]
    rows = {**work.lake.count_slice_rows(work.stream.name, table, left), **done.rows}
    cost = measure_write_cost(done)
    found = [
        build_report(slice_, slice_commits[slice_.key], rows.get(slice_.key), done.version, clock, notes)
        for slice_ in work.slices
    ]
    found = [one if one.note is not None else replace(one, measures=cost) for one in found]
    log_reports(work, found, clock)
    return found


def log_reports(work: Work, found: Sequence[SliceReport], clock: Clock) -> None:
    """Log what a stage committed, with its rate, and the slices that it left as they were."""
    if done := [report.rows for report in found if report.note is None]:
        seconds = max(sum(clock.seconds.values()), 1e-9)
        work.log(f"committed {len(done)} slices, {sum(done):,} rows, {sum(done) / seconds:,.0f} rows/s")
    for report in found:
        if report.note is not None:
            work.log(f"{report.slice_.key}: {report.note}")


# Operation metrics of a commit in Delta's log, by Spark and by delta-rs, by the names under which Dagster plots them.
_COST = {
    "write/rows_inserted": ("numTargetRowsInserted", "num_target_rows_inserted"),
    "write/rows_updated": ("numTargetRowsUpdated", "num_target_rows_updated"),
    "write/rows_deleted": ("numTargetRowsDeleted", "num_target_rows_deleted"),
    "write/rows_copied": ("numTargetRowsCopied", "numCopiedRows", "num_target_rows_copied"),
    "write/bytes": ("numTargetBytesAdded", "numOutputBytes", ADDED_BYTES),
    "write/files": ("numTargetFilesAdded", "numFiles", "num_target_files_added", "num_added_files"),
}


def measure_write_cost(done: NumberedCommit) -> dict[str, float]:
    """The files and bytes that a commit wrote for all its slices; empty where Delta does not say."""
    return {name: float(done.metrics[key]) for name, keys in _COST.items() for key in keys if key in done.metrics}


def build_report(
    slice_: Slice, slice_commit: SliceCommit, rows: int | None, version: int, clock: Clock, notes: Mapping[str, str]
) -> SliceReport:
    """The report of a slice: its commit record, with the rows that the table has; those of the record if None."""
    return SliceReport(
        slice_=slice_,
        attempt=slice_commit.attempt,
        rows=(slice_commit.rows if rows is None else rows) or 0,
        delta_version=version,
        counts=dict(slice_commit.counts),
        seconds=dict(clock.seconds),
        note=notes.get(slice_.key),
    )
