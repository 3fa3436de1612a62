"""Retention: which slices lose their rows of raw by age, and why others keep them."""

# A slice loses all of its rows or none; its commit stays and shows how many went. The age counts from the newest
# record and from the plan, whichever is later. So rows of a backlog that was read late stay for the full age, and a
# producer with a slow clock costs no rows.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from highwater.erasing import AGED, to_microseconds
from highwater.slice_commits import SliceCommit

# In the slice commit of raw: the version of the table that holds the rows which expired.
AGED_FROM = "aged_from"
# One maintenance takes at most this many slices, oldest first: a backlog takes some nights.
MAX_SLICES = 2_000


def count_expired_rows(slice_commit: SliceCommit) -> int:
    """The number of rows of a slice's records in raw that expired; 0 where they are there."""
    return slice_commit.counts.get(AGED, 0)


def count_records(slice_commit: SliceCommit) -> int:
    """The number of records of a slice in raw: rows that are there, and those that expired."""
    return (slice_commit.rows or 0) + count_expired_rows(slice_commit)


def select_planned_before(planned: Mapping[str, datetime], age: timedelta, now: datetime) -> list[str]:
    """The slices that were planned longer ago than the age, the oldest first."""
    return sorted((key for key, at in planned.items() if now - at > age), key=lambda key: (planned[key], key))


@dataclass(frozen=True)
class RetentionFacts:
    """The facts about slices by which rows of raw stay, however old they are.

    Args:
        in_unfinished_runs: slices that an unfinished run or backfill names.
        complete: slices that are complete in all tables and, of a stream that publishes its events, are sent.
        in_dlq: slices that read or rejected a record which waits in a tier or is parked: it may be reclaimed, and
            where it is parked by reference it is in raw alone.
        reclaimed_slices: slices whose records were reclaimed from the DLQ, and that are not reprocessed yet.
    """

    in_unfinished_runs: Collection[str] = ()
    complete: Collection[str] = ()
    in_dlq: Collection[str] = ()
    reclaimed_slices: Collection[str] = ()

    def find_reason(self, key: str) -> str | None:
        """The reason why a slice keeps its rows; None if nothing keeps them."""
        if key in self.in_unfinished_runs:
            return "named by unfinished runs or backfills"
        if key not in self.complete:
            return "incomplete in some table"
        if key in self.reclaimed_slices:
            return "reclaimed from the DLQ and not reprocessed yet"
        if key in self.in_dlq:
            return "with records that wait in a tier or are parked"
        return None


def select_free_slices(wanted: Sequence[str], needed: RetentionFacts) -> tuple[list[str], dict[str, int]]:
    """The slices whose rows nothing keeps, in their order, and how many stay for what reason."""
    found, retained = list[str](), dict[str, int]()
    for key in wanted:
        why = needed.find_reason(key)
        if why is None:
            found.append(key)
        else:
            retained[why] = retained.get(why, 0) + 1
    return found, retained


def select_old_slices(keys: Sequence[str], newest_ms: Mapping[str, int], age: timedelta, now: datetime) -> list[str]:
    """The slices whose newest record was published longer ago than the age; one without rows has none to lose.

    Args:
        keys: the slices, in any order; the order is preserved.
        newest_ms: for each slice with rows the greatest timestamp among them, in milliseconds since 1970.
        age: how long rows are kept.
        now: in UTC.
    """
    oldest = to_microseconds(now - age)
    return [key for key in keys if key in newest_ms and newest_ms[key] * 1000 < oldest]
