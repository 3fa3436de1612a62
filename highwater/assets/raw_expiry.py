"""Rows of raw that expire by age: the commit that removes them, and the one that restores them."""

# The slice commit stays, with the number of rows that went and the version of the table that holds them. Everything
# downstream stays as it was decided: it is valid without raw.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from highwater.assets import raw
from highwater.assets.commit import CommittedSlices, commit_rows, take_commit_turn
from highwater.balancing import combine_pairwise
from highwater.erasing import AGED
from highwater.resources.delta import slice_is_one_of
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.retention import AGED_FROM, count_expired_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.assets.work import Work
    from highwater.slice_commits import SliceCommit


def expire_rows(work: Work, recorded: Mapping[str, int]) -> list[str]:
    """Commit slices without their rows; returns those that lost them.

    A slice with another number of rows than was recorded was read again meanwhile, and keeps them.

    Args:
        work: the slices.
        recorded: for each how many rows the ledger says it loses.

    Raises:
        SupersededAttemptError: another writer was first; nothing was written.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable; nothing was written.
    """
    committed = CommittedSlices.read(work, raw.TABLE)
    same = [
        key
        for key in work.keys
        if key in committed.slice_commits and committed.slice_commits[key].rows == recorded[key]
    ]
    if not same:
        return []
    attempts = work.ledger.allocate_attempts(same)
    slice_commits = [
        _build_expired_commit(committed.slice_commits[key], attempts[key], committed.version) for key in same
    ]
    _commit(work, committed, work.spark.createDataFrame([], raw.COLUMNS), slice_commits, records=())
    return same


def _build_expired_commit(committed: SliceCommit, attempt: int, version: int) -> SliceCommit:
    counts = {**committed.counts, AGED: committed.rows or 0, AGED_FROM: version}
    return replace(committed, attempt=attempt, rows=None, counts=counts)


def restore_rows(work: Work) -> list[str]:
    """Commit slices with the rows that expired, from the version that holds them; returns these slices.

    Raises:
        SupersededAttemptError: another writer was first; nothing was written.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable, or the files are gone; nothing was
            written.
    """
    committed = CommittedSlices.read(work, raw.TABLE)
    expired_commits = {
        key: slice_commit for key, slice_commit in committed.slice_commits.items() if AGED_FROM in slice_commit.counts
    }
    if not expired_commits:
        return []
    attempts = work.ledger.allocate_attempts([*expired_commits])
    slice_commits = [
        _build_restored_commit(slice_commit, attempts[key]) for key, slice_commit in expired_commits.items()
    ]
    with delta_errors(f"the rows of {', '.join(expired_commits)} that expired"):
        _commit(
            work,
            committed,
            _read_expired_rows(work, expired_commits),
            slice_commits,
            records=[*map(count_expired_rows, expired_commits.values())],
        )
    return [*expired_commits]


def _build_restored_commit(committed: SliceCommit, attempt: int) -> SliceCommit:
    counts = {name: count for name, count in committed.counts.items() if name not in {AGED, AGED_FROM}}
    return replace(committed, attempt=attempt, rows=None, counts=counts)


def _read_expired_rows(work: Work, slice_commits: Mapping[str, SliceCommit]) -> DataFrame:
    from pyspark.sql import DataFrame as Frame

    versions: dict[int, list[str]] = {}
    for key, slice_commit in slice_commits.items():
        versions.setdefault(slice_commit.counts[AGED_FROM], []).append(key)
    path = work.lake.build_table_path(work.stream.name, raw.TABLE)
    frames = [
        read_table_version(work.spark, path, version).where(slice_is_one_of(keys)) for version, keys in versions.items()
    ]
    return combine_pairwise(Frame.unionByName, frames)


def _commit(
    work: Work,
    committed: CommittedSlices,
    rows: DataFrame,
    slice_commits: Sequence[SliceCommit],
    *,
    records: Sequence[int],
) -> None:
    with take_commit_turn(work, raw.TABLE):
        work.before_commit()
        commit_rows(
            work, raw.TABLE, rows, slice_commits, committed, files=raw.compute_file_count(records), spread="offset"
        )
