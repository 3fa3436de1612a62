"""Joining the small files of slices into larger ones, in the order of the declared columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from assets.commit import commit_turn, target_of
from highwater.errors import UnbalancedError
from highwater.tables import BY_SLICE
from highwater.upkeep import TARGET_BYTES
from resources.delta import rows_in, slice_is_one_of
from resources.numbered_commits import commit_slices
from resources.spark import delta_errors
from resources.spark_tables import rows_at
from resources.upkeep import slices_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assets.work import Work
    from highwater.declaration import Stream
    from highwater.upkeep import Group


def cluster_columns(stream: Stream, table: str) -> tuple[str, ...]:
    """The columns by which the rows of a table are ordered where its files are joined."""
    if table == "events":
        return stream.upkeep.cluster_by
    return ("partition", "offset") if table == "raw" else ("origin_partition", "origin_offset")


def merge(work: Work, table: str, group: Group) -> None:
    """Rewrite the rows of the slices in some small files into files of the size that readers expect.

    It is a numbered commit in the turn of the table's writers, and changes no row.

    Args:
        work: the connections.
        table: one of the tables by slice.
        group: the files.

    Raises:
        SupersededAttemptError: another writer was first; nothing was written.
        UnbalancedError: the table has another number of rows than before.
        LeaseHeldError: other writers went on for too long; nothing was written.
        DependencyAwayError: Spark, the ledger or the lake is away.
    """
    assert table in BY_SLICE, "the other tables have no column slice, or partitions of their own"
    with commit_turn(work, table) as lease, delta_errors(f"{table} of {work.stream.name}"):
        target = target_of(work, table)
        held = target.committed([])
        opened = work.lake.table_at(work.stream.name, table, held.version)
        keys, before = slices_of(opened, group.files), rows_in(opened)
        mine = rows_at(work.spark, target.path, held.version).where(slice_is_one_of(keys))
        by, files = cluster_columns(work.stream, table), math.ceil(group.bytes / TARGET_BYTES)
        gathered = mine.repartition(1) if files == 1 else mine.repartitionByRange(files, *by)
        ordered = gathered.sortWithinPartitions(*by)

        def write(options: Mapping[str, str]) -> None:
            writer = ordered.write.format("delta").mode("overwrite").options(**options)
            writer.option("replaceWhere", slice_is_one_of(keys)).option("dataChange", "false").save(target.path)

        lease.check()
        version = commit_slices(target, held, [], work.run, write)
    _ensure_same_rows(work, table, before, version)


def _ensure_same_rows(work: Work, table: str, before: int, version: int) -> None:
    after = rows_in(work.lake.table_at(work.stream.name, table, version))
    if after != before:
        raise UnbalancedError(
            f"joining files of {table} of {work.stream.name} changed the number of its rows",
            stored=f"{before:,} rows in version {version - 1}",
            found=f"{after:,} rows in version {version}",
            remedy=f"RESTORE the table to version {version - 1}, and report this",
        )
