"""Discards: records that a person decided to drop from the DLQ."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, insert, select
from sqlalchemy.engine import Connection

from highwater.plans import Discard
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.rows import build_discard, build_discard_row


class Discards(LedgerPart):
    """The discards of a ledger."""

    def add(self, stream: str, discards: Sequence[Discard]) -> int:
        """Record that a person discarded records; returns how many are new. A record keeps its first reason."""
        table = schema.discards

        def write(connection: Connection) -> int:
            rows = connection.execute(select(table).where(table.c.stream == stream))
            known = {build_discard(row).origin for row in rows}
            fresh = {discard.origin: discard for discard in discards if discard.origin not in known}
            if fresh:
                connection.execute(insert(table), [build_discard_row(stream, discard) for discard in fresh.values()])
            return len(fresh)

        return self._database.write_again(write) if discards else 0

    def read_last_discard_time(self, stream: str) -> datetime | None:
        """The last time at which a record of a stream was discarded, in UTC; None if none ever was."""
        table = schema.discards
        with self._database.reading() as connection:
            return connection.execute(
                select(func.max(table.c.discarded_at, type_=schema.UtcDateTime)).where(table.c.stream == stream)
            ).scalar()

    def count_and_last(self, stream: str) -> tuple[int, datetime | None]:
        """The number of discarded records of a stream, and when the last was, in UTC."""
        table = schema.discards
        totals = select(func.count(), func.max(table.c.discarded_at, type_=schema.UtcDateTime)).where(
            table.c.stream == stream
        )
        with self._database.reading() as connection:
            many, last = connection.execute(totals).one()
            return many, last

    def list_for_stream(self, stream: str, within: tuple[int, int] | None = None) -> list[Discard]:
        """The discards of a stream, oldest first.

        Args:
            stream: the stream's name.
            within: the first and the last offset of the origins; all if None.
        """
        table = schema.discards
        query = select(table).where(table.c.stream == stream).order_by(table.c.discarded_at)
        if within is not None:
            query = query.where(table.c.origin_offset.between(*within))
        return [build_discard(row) for row in self._database.read(query)]
