"""Maintenance of a stream: join small files, remove old files, rows and keys; as a command and a job."""

# All of it is safe beside runs: files are compacted by commits like any others, which take turns with those of runs or,
# in tables without slices, give way; and no file goes that a run or an unfinished retry may read.

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.assets import client_reads, discards_table, dlq_marks, erasures_table
from highwater.assets.commit import LEASE_SECONDS, build_turn_name
from highwater.assets.compaction import compact
from highwater.assets.foreign import DLQ_SEEN
from highwater.assets.metrics import TABLE as METRICS
from highwater.assets.origins import SEEN
from highwater.assets.publication_log import SENDING
from highwater.assets.publication_log import TABLE as PUBLISHED
from highwater.batching import split_by_count
from highwater.errors import LeaseHeldError, SupersededAttemptError
from highwater.maintenance import (
    LONGEST_RUN,
    MAX_BYTES,
    MERGE_PASSES,
    PARTITIONS_PER_COMMIT,
    RUN_RETRIES,
    Horizon,
    group_files_to_merge,
    select_partitions_to_compact,
    to_whole_hours,
)
from highwater.orchestration.dependencies import ensure_lake_exists
from highwater.orchestration.operations.key_retirement import PAGE, RetirementOutcome, retire
from highwater.orchestration.operations.old_runs import OldRuns, delete_runs
from highwater.orchestration.operations.raw_retention import RetentionOutcome, retain
from highwater.resources.catalog import build_catalog_name, register
from highwater.resources.commit_log import TABLE as COMMITS
from highwater.resources.commit_log_writer import add_missing_records
from highwater.resources.delta_rs_writes import remove_left_trials
from highwater.resources.numbered_commits import PlannedSlices
from highwater.resources.object_store import remove_left_probes
from highwater.resources.table_maintenance import (
    TableSize,
    join_files,
    join_small,
    list_files,
    list_partitions,
    list_removable_files,
    measure_stock,
    read_commit_times,
    remove_files,
)
from highwater.tables import BY_SLICE, select_tables

if TYPE_CHECKING:
    import dagster as dg
    from deltalake import DeltaTable

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake

WITHOUT_A_JVM = (METRICS, PUBLISHED, SENDING, erasures_table.TABLE, discards_table.TABLE, COMMITS)
# Tables that unfinished decisions read at an old version, with the number in their slice commits that names it.
READ_LATER = {"events": SEEN, "dlq": DLQ_SEEN}


@dataclass(frozen=True)
class TableReport:
    """The outcome for a table, or the preview.

    Args:
        table: its name.
        before: the size before; in a dry run the same as after.
        after: the size now.
        compacted: small files of slices that were compacted, or partitions of other tables whose small files were.
        removed: files that were removed from storage.
        seconds: how long it took.
        notes: sentences for the operator.
    """

    table: str
    before: TableSize
    after: TableSize
    compacted: int
    removed: int
    seconds: float
    notes: Sequence[str] = ()

    @property
    def row(self) -> dict[str, Any]:
        """The outcome as names and values."""
        return {
            "table": self.table,
            "files": self.before.files,
            "files_after": self.after.files,
            "bytes": self.before.bytes,
            "bytes_after": self.after.bytes,
            "stored_files": self.before.stored,
            "stored_files_after": self.after.stored,
            "stored_bytes": self.before.stored_bytes,
            "stored_bytes_after": self.after.stored_bytes,
            "compacted": self.compacted,
            "removed": self.removed,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True)
class Report:
    """The actions of maintenance, or the preview.

    Args:
        tables: reports of the stream's existing tables, upstream first.
        keys: the result for Dagster's keys; None if Dagster was not asked.
        runs: the result for Dagster's old runs; None where Dagster was not asked, or all stay.
        done: whether it was done.
        retained: the result for expired rows; None for a stream without retention.
        groups: the result for consumer groups of publications, in a sentence.
        catalog: the result for the catalog, in a sentence; empty without one.
    """

    tables: Sequence[TableReport] = ()
    keys: RetirementOutcome | None = None
    runs: OldRuns | None = None
    done: bool = False
    retained: RetentionOutcome | None = None
    groups: str = ""
    catalog: str = ""

    @property
    def lines(self) -> list[str]:
        """The sentences beside the table."""
        notes = [f"{one.table}: {note}" for one in self.tables for note in one.notes]
        keys = ["keys: DAGSTER_HOME is not set, so none was looked at"] if self.keys is None else self.keys.lines
        rows = [] if self.retained is None else self.retained.lines
        runs = [] if self.runs is None else [self.runs.line]
        others = [text for text in (self.groups, self.catalog) if text]
        return [*notes, *rows, *keys, *runs, *others, *([] if self.done else ["a dry run: nothing was changed"])]


@dataclass
class _Task:
    """One table in hand."""

    work: Work
    name: str
    table: DeltaTable
    hours: int
    outlived: Mapping[str, str]
    dry_run: bool
    notes: list[str] = field(default_factory=list)
    compacted: int = 0

    @property
    def path(self) -> str:
        return self.work.lake.build_table_path(self.work.stream.name, self.name)


def maintain(work: Work, instance: dg.DagsterInstance | None, now: datetime, *, dry_run: bool) -> Report:
    """Maintain a stream, or report what that would come to.

    Args:
        work: the connections; its slices do not matter. Its `log` gets progress.
        instance: Dagster's instance; without it no key is retired, and runs are not known.
        now: in UTC.
        dry_run: do nothing; only report what would be done.

    Raises:
        ConfigurationError: the declared horizon is shorter than what a run may need; nothing was done.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable; what was done by then stays.
    """
    stream, rule = work.stream, compute_minimum_horizon(instance, now)
    rule.ensure_enough(stream.maintenance.horizon)
    ensure_lake_exists(work.ledger, work.lake)
    if not dry_run:
        # Erasures that checks found since, that older versions wrote, or that a restored ledger lacks.
        erasures_table.sync_with_ledger(work.ledger, work.lake, stream.name)
        discards_table.sync_with_ledger(work.ledger, work.lake, stream.name)
        client_reads.remove_left_over(work.lake, stream.name)
        remove_left_probes(_list_probe_folders(work.lake, stream), now)
        remove_left_trials(work.lake.root, now)
    later = _read_later(work)
    found = []
    for name in (*select_tables(stream), SENDING, erasures_table.TABLE, discards_table.TABLE, COMMITS):
        table = work.lake.open_stream_table(stream.name, name)
        if table is None:
            continue
        if not dry_run and name in select_tables(stream):
            add_missing_records(table, PlannedSlices(work.ledger))  # a run may have died before it did
        times = read_commit_times(table, [*later.get(name, {}).values()])
        read = {key: times[version] for key, version in later.get(name, {}).items()}
        outlived = rule.select_outlived_slices(stream.maintenance.horizon, read, now)
        task = _Task(work, name, table, to_whole_hours(stream.maintenance.horizon), outlived, dry_run)
        found.append(_maintain_table(task))
        if not dry_run and name in select_tables(stream):
            # Entries without records may be cleaned from now on.
            add_missing_records(task.table, PlannedSlices(work.ledger))
    retained = retain(work, instance, now, dry_run=dry_run)
    keys = retire(instance, work.ledger, work.lake, stream, now, dry_run=dry_run) if instance else None
    runs = delete_runs(instance, stream, now, dry_run=dry_run) if instance else None
    groups, catalog = dlq_marks.clean_up(work, dry_run=dry_run), _register_in_catalog(work, found, dry_run=dry_run)
    return Report(found, keys, runs, not dry_run, retained, groups, catalog)


def _list_probe_folders(lake: Lake, stream: Stream) -> list[str]:
    """Where object stores are probed: by Python beside a table, by Spark beside the first commit to one."""
    tables = [lake.build_table_path(stream.name, name) for name in select_tables(stream)]
    return [lake.root, f"{lake.root}/{stream.name}", *(f"{path}/_delta_log" for path in tables)]


def _register_in_catalog(work: Work, found: Sequence[TableReport], *, dry_run: bool) -> str:
    """Register the tables that a person reads, where the catalog lacks them."""
    if work.lake.catalog is None or dry_run:
        return ""
    names = [one.table for one in found if one.table in (*select_tables(work.stream), COMMITS)]
    paths = {
        build_catalog_name(work.stream.name, name): work.lake.build_table_path(work.stream.name, name) for name in names
    }
    fresh = register(work.spark, work.lake.catalog, paths)
    return f"registered in {work.lake.catalog}: {', '.join(fresh)}" if fresh else ""


def compute_minimum_horizon(instance: dg.DagsterInstance | None, now: datetime) -> Horizon:
    """The least horizon, by Dagster's settings and the age of the oldest run that goes on."""
    if instance is None:
        return Horizon()
    from dagster import RunsFilter
    from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES

    longest = timedelta(seconds=instance.run_monitoring_max_runtime_seconds) or LONGEST_RUN
    oldest = instance.get_run_records(RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES), limit=1, ascending=True)
    ages = [now - datetime.fromtimestamp(one.start_time, UTC) for one in oldest if one.start_time is not None]
    return Horizon(max([longest, *ages]), max(instance.run_retries_max_retries, RUN_RETRIES))


def _read_later(work: Work) -> dict[str, dict[str, int]]:
    """For each table the slices of tiers that are decided and incomplete, with the version that they still read.

    Retired slices were complete and still are, unless an erasure has not finished them.
    """
    stream, found = work.stream, {name: dict[str, int]() for name in READ_LATER}
    keys = [slice_.key for topic in stream.delays for slice_ in work.ledger.list_slices(stream.name, topic)]
    retired = work.ledger.retired.list_retired(keys)
    lost = work.ledger.erasures.read_for_slices([*retired])
    opened = {key for key, all_ in lost.items() if any(one.done_at is None for one in all_)}
    for some in split_by_count([key for key in keys if key not in retired or key in opened], PAGE):
        decided, rejects = (work.lake.load_slice_commits(stream.name, name, some) for name in ("events", "rejects"))
        for key, slice_commit in decided.items():
            follows = key in rejects and rejects[key].attempt == slice_commit.attempt
            for name, number in READ_LATER.items():
                if not follows and slice_commit.counts.get(number, -1) >= 0:
                    found[name][key] = slice_commit.counts[number]
    return found


def _maintain_table(task: _Task) -> TableReport:
    begin, before = time.monotonic(), measure_stock(task.table)
    if task.name in WITHOUT_A_JVM:
        _try_maintenance_step(task, lambda: _join_small(task))
    elif task.name in BY_SLICE:
        _try_maintenance_step(task, lambda: _merge(task))
    else:
        _try_maintenance_step(task, lambda: _join(task))
    task.table.update_incremental()
    if not task.dry_run and task.compacted:
        # The commit that replaced many files names each of them, and every reader would read it again.
        task.table.create_checkpoint()
    removed = _remove(task)
    after = before if task.dry_run else measure_stock(task.table)
    seconds = time.monotonic() - begin
    task.work.log(f"{task.name}: maintained in {seconds:.1f} s")
    return TableReport(task.name, before, after, task.compacted, removed, seconds, task.notes)


def _try_maintenance_step(task: _Task, step: Callable[[], None]) -> None:
    """A step that gives way to writers: it may be left to another day."""
    try:
        step()
    except (SupersededAttemptError, LeaseHeldError) as error:
        task.notes.append(f"gave way to another writer: {error.problem}")


def _join(task: _Task) -> None:
    """Join the small files of a table without partitions."""
    if select_partitions_to_compact(list_partitions(task.table)):
        if not task.dry_run:
            join_files(task.work.spark, task.path)
        task.compacted += 1


def _merge(task: _Task) -> None:
    """Join small files of slices, a group of neighbours at a time: writers take their turns in between.

    Thousands of tiny files become small ones, which are compacted again.
    """
    rewritten = 0
    for _ in range(MERGE_PASSES):
        before = task.compacted
        for group in group_files_to_merge(list_files(task.table)):
            if rewritten + group.bytes > MAX_BYTES:
                return
            if task.dry_run or compact(task.work, task.name, group):
                task.compacted += len(group.files)
                rewritten += group.bytes
        if task.dry_run or task.compacted == before:
            return
        task.table.update_incremental()


def _remove(task: _Task) -> int:
    """Remove old files, unless an unfinished retry may read one of them; how many were, or would be, removed."""
    for key, why in task.outlived.items():
        task.notes.append(f"no file was removed: {key} {why}; finish it first")
    if task.outlived:
        return 0
    return len(list_removable_files(task.table, task.hours)) if task.dry_run else remove_files(task.table, task.hours)


def _join_small(task: _Task) -> None:
    """A table that is written without a JVM: its writers wait, as they do for each other.

    A run that publishes opened its table before; its next commit finds another version, and the run is tried again.
    """
    name = build_turn_name(task.work.stream.name, task.name)
    wait = nullcontext() if task.dry_run else task.work.ledger.lease(name, LEASE_SECONDS, wait=10 * LEASE_SECONDS)
    with wait as lease:
        task.table.update_incremental()
        for some in split_by_count(select_partitions_to_compact(list_partitions(task.table)), PARTITIONS_PER_COMMIT):
            if lease is not None:
                lease.check()
                join_small(task.table, some)
            task.compacted += len(some)
