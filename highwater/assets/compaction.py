"""Compaction: small files of slices become larger ones, in the order of the declared columns."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from highwater.assets.commit import build_target, take_commit_turn
from highwater.errors import SupersededAttemptError, UnbalancedError
from highwater.resources.commit_log import read_committed_slices
from highwater.resources.delta import add_actions, query, quote_text, slice_is_one_of
from highwater.resources.numbered_commits import close_intents, commit_slices
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.resources.table_maintenance import list_files, read_slice_keys
from highwater.tables import BY_SLICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.maintenance import FileGroup


# Slices among others that stay are listed in the text of the predicate: the newest, so that it stays short.
MAX_SLICES = 20_000
_CHECK = "spark.databricks.delta.replaceWhere.constraintCheck.enabled"


def cluster_columns(stream: Stream, table: str) -> tuple[str, ...]:
    """The columns by which the rows of a table are ordered where its files are joined."""
    if table == "events":
        return stream.maintenance.cluster_by
    return ("partition", "offset") if table == "raw" else ("origin_partition", "origin_offset")


def compact(work: Work, table: str, group: FileGroup) -> bool:
    """Rewrite the rows of the slices in some small files into files of the size that readers expect.

    It is a numbered commit in the turn of the table's writers, and changes no row. A slice that has rows in other files
    too stays as it is: to move it would rewrite those.

    Args:
        work: the connections.
        table: one of the tables by slice.
        group: the files.

    Returns:
        Whether there was anything to rewrite.

    Raises:
        SupersededAttemptError: another writer replaced one of the files, or was first; nothing was written.
        UnbalancedError: the table has another number of rows than before.
        LeaseHeldError: other writers went on for too long; nothing was written.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable.
    """
    assert table in BY_SLICE, "the other tables have no column slice, or partitions of their own"
    with take_commit_turn(work, table) as lease, delta_errors(f"{table} of {work.stream.name}"):
        target = build_target(work, table)
        if work.ledger.intents.list_for_table(work.stream.name, table):
            close_intents(target)  # or this commit would take the number of one that a dead run left open
        opened = target.open_table()
        predicate, before = _find_movable_slices(opened, group), count_rows(opened)
        if predicate is None:
            return False
        seen = read_committed_slices(opened, [])
        group_rows = read_table_version(work.spark, target.path, seen.version).where(predicate)
        # A column that was declared since is not in the table before the next run.
        by = [name for name in cluster_columns(work.stream, table) if name in group_rows.columns] or ["slice"]
        parts = (
            group_rows.repartition(1)
            if group.target_files == 1
            else group_rows.repartitionByRange(group.target_files, *by)
        )
        ordered = parts.sortWithinPartitions(*by)

        def write(options: Mapping[str, str]) -> None:
            writer = ordered.write.format("delta").mode("overwrite").options(**options)
            with _skip_replace_check(work.spark):
                writer.option("replaceWhere", predicate).save(target.path)

        lease.check()
        version = commit_slices(target, seen, [], work.run, write).version
    ensure_same_rows(work, table, "joining files", before, version)
    return True


@contextmanager
def _skip_replace_check(spark: SparkSession) -> Iterator[None]:
    """Let a write that replaces slices not hold each new row against their list, by which the rows were read.

    Spark compares a row with one slice of the list after another there.
    """
    spark.conf.set(_CHECK, "false")
    try:
        yield
    finally:
        with suppress(Exception):  # the error of the write matters more; it ends the session
            spark.conf.unset(_CHECK)


def _find_movable_slices(opened: DeltaTable, group: FileGroup) -> str | None:
    """The condition of the slices in the files of a group that have no row in any other file; None for no slice.

    Raises:
        SupersededAttemptError: a file of the group is no longer the table's.
    """
    there = {file.path: file for file in list_files(opened)}
    if any(file.path not in there for file in group.files):
        raise SupersededAttemptError(
            f"files of {opened.table_uri} were replaced before they were joined",
            remedy="nothing to do: they are joined by the next maintenance",
        )
    group_paths = {file.path for file in group.files}
    first, last = min(file.first for file in group.files), max(file.last for file in group.files)
    beside = [
        file for file in there.values() if file.path not in group_paths and file.first <= last and file.last >= first
    ]
    if not beside:
        return f"slice >= {quote_text(first)} AND slice <= {quote_text(last)}"
    keys = sorted(read_slice_keys(opened, group.files) - read_slice_keys(opened, beside))
    return slice_is_one_of(keys[-MAX_SLICES:]) if keys else None


def ensure_same_rows(work: Work, table: str, rewrite: str, before: int, version: int) -> None:
    """Ensure that a version which wrote rows again has as many as the one before.

    Args:
        work: the lake and the stream.
        table: the table's name.
        rewrite: the kind of rewrite, for the error.
        before: the rows of the version before.
        version: the version to look at.

    Raises:
        UnbalancedError: it has another number of rows.
    """
    after = count_rows(work.lake.open_existing_table(work.stream.name, table, version))
    if after != before:
        raise UnbalancedError(
            f"{rewrite} of {table} of {work.stream.name} changed the number of its rows",
            stored=f"{before:,} rows in version {version - 1}",
            found=f"{after:,} rows in version {version}",
            remedy=f"run RESTORE TABLE delta.`{work.lake.build_table_path(work.stream.name, table)}` TO VERSION AS OF "
            f"{version - 1}, then report this defect with this text and the output of DESCRIBE HISTORY",
        )


def count_rows(opened: DeltaTable) -> int:
    """The rows of a table: by its log, or counted where somebody wrote a file without statistics."""
    counts = add_actions(opened)["num_records"].to_pylist()
    if None not in counts:
        return sum(counts)
    [row] = query(opened, "SELECT count(*) AS rows FROM t")
    return int(row["rows"])
