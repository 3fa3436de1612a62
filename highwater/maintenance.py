"""Maintenance: which files to compact, how old a file must be to be removed, and which keys to retire."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from highwater.errors import ConfigurationError

# `run_monitoring.max_runtime_seconds` and `run_retries.max_retries` of the shipped dagster.yaml.
LONGEST_RUN = timedelta(hours=6)
RUN_RETRIES = 2
# A commit waits ten terms of a minute for its lease, and a merge into `current` waits as long for another one.
LONGEST_LEASES = timedelta(minutes=20)

# What readers of Parquet expect of a file.
TARGET_BYTES = 128 * 1024 * 1024
# Smaller files are joined, larger ones stay.
REWRITTEN_BYTES = TARGET_BYTES // 2
# This many small files are joined, whatever their size. A slice that a run takes by itself is written as eight files at
# the most, up to two million offsets.
FEWEST_FILES = 9
# Partitions in one OPTIMIZE, whose names are in its text; and what one maintenance rewrites of a table at the most.
PARTITIONS_PER_COMMIT = 100
MAX_BYTES = 20 * 1024**3
# A recalled key stays for so long, whatever else would retire it: that is time for a backfill.
RECALLED_FOR = timedelta(days=7)


@dataclass(frozen=True)
class Horizon:
    """The least age of a file that is removed.

    Args:
        run: how long a run may go on, or the oldest one has gone on already.
        retries: how often a run is restarted when its worker died; a query of the first may still go on in Spark.
        leases: how long a commit may wait for its turn.
    """

    run: timedelta = LONGEST_RUN
    retries: int = RUN_RETRIES
    leases: timedelta = LONGEST_LEASES

    @property
    def least(self) -> timedelta:
        """The shortest horizon that no run can outlast."""
        return self.run * (1 + self.retries) + self.leases

    @property
    def arithmetic(self) -> str:
        """The arithmetic of `least`, in words."""
        return (
            f"{format_hours(self.run)} of the longest run x (1 + {self.retries} retries) + {format_hours(self.leases)} "
            f"of waiting for leases = {format_hours(self.least)}"
        )

    def ensure_enough(self, horizon: timedelta) -> None:
        """Ensure that no run and no retry needs a file that is older than the horizon.

        Raises:
            ConfigurationError: one might.
        """
        if horizon < self.least:
            raise ConfigurationError(
                "the horizon of maintenance is shorter than what a run may need",
                stored=format_hours(horizon),
                found=self.arithmetic,
                remedy="declare a longer horizon in the stream's Maintenance, or shorten "
                "run_monitoring.max_runtime_seconds",
            )

    def select_outlived_slices(
        self, horizon: timedelta, read: Mapping[str, datetime | None], now: datetime
    ) -> dict[str, str]:
        """Slices whose unfinished retry reads an old version of the table that files removed now might belong to.

        Args:
            horizon: the age from which on files are removed.
            read: unfinished slices, with the time of the version that they read; None where it is not known.
            now: in UTC.
        """
        found = {}
        for key, at in sorted(read.items()):
            if at is None:
                found[key] = "reads a version whose time is not known"
            elif now - at + self.least > horizon:
                found[key] = (
                    f"reads a version of {format_hours(now - at)} ago: with {format_hours(self.least)} for its run "
                    f"that is more than the horizon of {format_hours(horizon)}"
                )
        return found


def format_hours(time: timedelta) -> str:
    """A time in hours, as it is reported."""
    return f"{time / timedelta(hours=1):.4g} h"


def to_whole_hours(time: timedelta) -> int:
    """The next whole hour, which is what delta-rs takes."""
    return math.ceil(time / timedelta(hours=1))


@dataclass(frozen=True)
class TablePartition:
    """A partition of a table by its log.

    Args:
        key: the value of `slice`; empty for a table without partitions.
        files: the sizes of its files, in bytes.
    """

    key: str
    files: tuple[int, ...]

    @property
    def small(self) -> tuple[int, ...]:
        """The sizes of those that are joined."""
        return tuple(size for size in self.files if size < REWRITTEN_BYTES)


def select_partitions_to_compact(parts: Iterable[TablePartition]) -> list[str]:
    """The partitions whose files are joined: those with the most small files first, within what one maintenance does.

    A file never holds two partitions. The first one is joined whatever its size: it would grow for ever otherwise.
    """
    found: list[str] = []
    total = 0
    for part in sorted(parts, key=lambda part: (-len(part.small), part.key)):
        rewritten = sum(part.small)
        if is_worth_joining(len(part.small), rewritten) and (not found or total + rewritten <= MAX_BYTES):
            found.append(part.key)
            total += rewritten
    return found


def is_worth_joining(files: int, size: int) -> bool:
    """Whether small files are joined: they are many, or become a file that is joined no more."""
    return files >= FEWEST_FILES or size >= TARGET_BYTES


# A group ends at this number of files or at the target size, but for the rest of its last slice. Writers wait for it.
FILES_PER_GROUP = 5_000
MAX_GROUP_FILES = 2 * FILES_PER_GROUP
MAX_GROUP_BYTES = 8 * TARGET_BYTES
# How often one maintenance joins what it joined: five thousand files of a kilobyte are five megabytes.
MERGE_PASSES = 3


@dataclass(frozen=True)
class File:
    """A data file of a table of slices, by the table's log.

    Args:
        path: as the log has it.
        size: in bytes.
        first: the least slice in it.
        last: the greatest.
    """

    path: str
    size: int
    first: str
    last: str


@dataclass(frozen=True)
class FileGroup:
    """Small files that are joined by one commit."""

    files: tuple[File, ...]

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(file.size for file in self.files)

    @property
    def target_files(self) -> int:
        """How many files they become."""
        return max(1, round(self.bytes / TARGET_BYTES))


def group_files_to_merge(files: Iterable[File]) -> list[FileGroup]:
    """The small files that are joined, slices beside each other together.

    A group ends between two slices where it can: a slice with files in two groups could not be moved. The last group of
    few files waits until there are more.
    """
    small = sorted((file for file in files if file.size < REWRITTEN_BYTES), key=lambda file: (file.first, file.path))
    found: list[FileGroup] = []
    mine: list[File] = []
    size, last = 0, ""
    for file in small:
        enough = size >= TARGET_BYTES or len(mine) >= FILES_PER_GROUP
        if enough and (file.first > last or size >= MAX_GROUP_BYTES or len(mine) >= MAX_GROUP_FILES):
            found.append(FileGroup(tuple(mine)))
            mine, size, last = [], 0, ""
        mine.append(file)
        size, last = size + file.size, max(last, file.last)
    return [*found, FileGroup(tuple(mine))] if is_worth_joining(len(mine), size) else found


@dataclass(frozen=True)
class LiveKey:
    """A live key of Dagster.

    Args:
        key: the slice key.
        planned_at: when the slice was planned, in UTC.
        recalled_at: when a person brought it back; None if nobody did.
    """

    key: str
    planned_at: datetime
    recalled_at: datetime | None = None


def select_candidates(live: Sequence[LiveKey], newest: int, longest: timedelta | None, now: datetime) -> list[str]:
    """The keys that are retired if their slices are complete and nobody names them, the oldest first.

    Args:
        live: the live keys, in any order.
        newest: how many of the youngest plans stay; recalled ones stay beside them.
        longest: keys planned longer ago are retired as well; None for no limit.
        now: in UTC.
    """
    recalled = {one.key for one in live if one.recalled_at is not None and now - one.recalled_at < RECALLED_FOR}
    ordered = sorted((one for one in live if one.key not in recalled), key=lambda one: (one.planned_at, one.key))
    beyond = max(len(ordered) - newest, 0)
    return [
        one.key
        for at, one in enumerate(ordered)
        if at < beyond or (longest is not None and now - one.planned_at > longest)
    ]


def select_keys_to_retire(
    wanted: Sequence[str], complete: Collection[str], named: Collection[str]
) -> tuple[list[str], dict[str, int]]:
    """The candidates that are retired, and how many stay for what reason.

    Args:
        wanted: the candidates.
        complete: slices that are complete in all tables.
        named: keys that an unfinished run or backfill names.
    """
    skipped = {"named by unfinished runs or backfills": 0, "not complete": 0}
    found = []
    for key in wanted:
        if key in named:
            skipped["named by unfinished runs or backfills"] += 1
        elif key not in complete:
            skipped["not complete"] += 1
        else:
            found.append(key)
    return found, {why: count for why, count in skipped.items() if count}
