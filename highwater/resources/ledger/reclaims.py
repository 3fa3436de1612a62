"""Reclaims in the ledger: which origins were reclaimed from the DLQ, by whom, and in which order."""

# One command is one act. A decision keeps the number of the last act that it saw, and its rejects are computed as of
# that act, whatever came since. Acts are numbered in sequence, since recording one needs the lease of the stream's
# retries (`highwater.assets.events`).

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, func, insert, select

from highwater.batching import split_by_count
from highwater.envelope import Origin
from highwater.reclaims import Reclaim
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart

# SQLite takes 32,766 parameters in a statement, and a row has 11.
ROWS_PER_STATEMENT = 1_000


class ReclaimAct(NamedTuple):
    """The records that one command reclaimed of one slice.

    Args:
        number: the act, 1 or more.
        records: how many of the slice's origins it reclaimed; it takes each back once.
        at: when, in UTC.
        by: the person's name.
    """

    number: int
    records: int
    at: datetime
    by: str


class Reclaims(LedgerPart):
    """The reclaims of all streams."""

    def read_last_act_number(self, stream: str) -> int:
        """The number of the last act; 0 if nothing was ever reclaimed."""
        table = schema.reclaims
        query = select(func.coalesce(func.max(table.c.act), 0)).where(table.c.stream == stream)
        with self._database.reading() as connection:
            return int(connection.execute(query).scalar_one())

    def read_acts_by_slice(self, stream: str) -> dict[str, list[ReclaimAct]]:
        """For each slice with reclaimed records the acts, in their order; one query for all."""
        table = schema.reclaims
        totals = func.count(), func.min(table.c.reclaimed_at), func.min(table.c.reclaimed_by)
        query = select(table.c.slice_key, table.c.act, *totals).where(table.c.stream == stream)
        query = query.group_by(table.c.slice_key, table.c.act).order_by(table.c.act)
        found: dict[str, list[ReclaimAct]] = {}
        for key, *act in self._database.read(query):
            found.setdefault(key, []).append(ReclaimAct(*act))
        return found

    def list_for_stream(self, stream: str, *, acts: int | None = None, slice_key: str | None = None) -> list[Reclaim]:
        """The reclaims of a stream, in the order in which they were made.

        Args:
            stream: the stream's name.
            acts: only the first acts, up to this number.
            slice_key: only what this slice of the main topic reprocesses.
        """
        table = schema.reclaims
        query = select(table).where(table.c.stream == stream)
        query = query if acts is None else query.where(table.c.act <= acts)
        query = query if slice_key is None else query.where(table.c.slice_key == slice_key)
        return [_build_reclaim(row) for row in self._database.read(query.order_by(table.c.act))]

    def add(self, stream: str, reclaims: Sequence[Reclaim], *, after: int = 0) -> None:
        """Record one act, all of it or nothing.

        Args:
            stream: the stream's name.
            reclaims: the records to reclaim.
            after: the highest number that a decision of these slices saw: a ledger that was rebuilt counts again.

        Raises:
            IntegrityError: an origin was reclaimed under the same number before.
        """
        table = schema.reclaims
        newest = select(func.coalesce(func.max(table.c.act), 0)).where(table.c.stream == stream)
        with self._database.writing() as connection:
            act = max(int(connection.execute(newest).scalar_one()), after) + 1
            for some in split_by_count(reclaims, ROWS_PER_STATEMENT):
                connection.execute(insert(table), [build_reclaim_row(stream, act, one) for one in some])


def build_reclaim_row(stream: str, act: int, one: Reclaim) -> dict[str, Any]:
    """The row of an origin that was reclaimed by this act, 1 or more."""
    return {
        "stream": stream,
        **{f"origin_{name}": value for name, value in one.origin._asdict().items()},
        "number": one.number,
        "act": act,
        "slice_key": one.slice_key,
        "reason": one.reason,
        "reclaimed_by": one.reclaimed_by,
        "reclaimed_at": one.reclaimed_at,
    }


def _build_reclaim(row: Row[Any]) -> Reclaim:
    origin = Origin(row.origin_topic, row.origin_generation, row.origin_partition, row.origin_offset)
    return Reclaim(origin, row.slice_key, row.number, row.reason, row.reclaimed_by, row.reclaimed_at)
