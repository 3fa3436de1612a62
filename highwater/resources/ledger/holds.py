"""Holds in the ledger: slices that records keep back, and who released them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.engine import Connection

from highwater.envelope import Origin
from highwater.holds import Hold, HoldingRecords, Release
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import read_slice_rows


class Holds(LedgerPart):
    """The holds of a deployment."""

    def read_for_slices(self, keys: Sequence[str]) -> dict[str, Hold]:
        """The holds of these slices, the released ones among them."""
        with self._database.reading() as connection:
            return _read_holds(connection, keys)

    def read_open(self, stream: str) -> list[Hold]:
        """The slices of a stream that are held and nobody released, the oldest hold first."""
        table = schema.holds
        query = select(table).where(table.c.stream == stream, table.c.released_at.is_(None))
        return [_build_hold(row) for row in self._database.read(query.order_by(table.c.since, table.c.slice_key))]

    def list_held_streams(self) -> set[str]:
        """The streams with a held slice."""
        table = schema.holds
        query = select(table.c.stream).where(table.c.released_at.is_(None)).distinct()
        with self._database.reading() as connection:
            return set(connection.execute(query).scalars())

    def note(self, stream: str, key: str, found: HoldingRecords, now: datetime) -> Hold:
        """Record that an attempt found the slice held; the first time of it stays.

        Raises:
            LeaseHeldError: others noted the same slice again and again.
        """

        def write(connection: Connection) -> Hold:
            if not _count_attempt(connection, key, found, now):
                first = Hold(key, stream, now, found, 1, now)
                connection.execute(insert(schema.holds).values(_build_row(first)))
            return _read_holds(connection, [key])[key]

        return self._database.write_again(write)

    def end(self, keys: Sequence[str]) -> int:
        """Forget the holds of slices that are decided, how many; those that a person released stay as a record."""
        table = schema.holds
        open_ = [key for key, hold in self.read_for_slices(keys).items() if hold.release is None]
        if open_:
            with self._database.writing() as connection:
                for key in open_:
                    connection.execute(delete(table).where(table.c.slice_key == key, table.c.released_at.is_(None)))
        return len(open_)

    def release(self, key: str, release: Release) -> bool:
        """Record that a person releases a slice; False if it is not held, or was released before, which stays."""
        table = schema.holds
        values = {
            "released_at": release.at,
            "released_by": release.by,
            "because": release.because,
            "park": release.park,
        }
        held = (table.c.slice_key == key) & table.c.released_at.is_(None)
        with self._database.writing() as connection:
            return connection.execute(update(table).where(held).values(values)).rowcount == 1


def _read_holds(connection: Connection, keys: Sequence[str]) -> dict[str, Hold]:
    return {row.slice_key: _build_hold(row) for row in read_slice_rows(connection, schema.holds, keys)}


def _count_attempt(connection: Connection, key: str, found: HoldingRecords, now: datetime) -> bool:
    """Update a hold after another attempt; False if there is none. A release, even of this moment, stays."""
    table = schema.holds
    values = {**_build_columns(found), "attempts": table.c.attempts + 1, "tried_at": now}
    return connection.execute(update(table).where(table.c.slice_key == key).values(values)).rowcount == 1


def _build_row(hold: Hold) -> dict[str, Any]:
    return {
        "slice_key": hold.slice_key,
        "stream": hold.stream,
        "since": hold.since,
        **_build_columns(hold.found),
        "attempts": hold.attempts,
        "tried_at": hold.tried_at,
    }


def _build_columns(found: HoldingRecords) -> dict[str, Any]:
    return {
        "reason": found.reason,
        "detail": found.detail,
        "records": found.records,
        **{f"origin_{name}": value for name, value in found.origin._asdict().items()},
    }


def _build_hold(row: Any) -> Hold:
    origin = Origin(row.origin_topic, row.origin_generation, row.origin_partition, row.origin_offset)
    released = row.released_at is not None
    return Hold(
        slice_key=row.slice_key,
        stream=row.stream,
        since=row.since,
        found=HoldingRecords(row.records, origin, row.reason, row.detail),
        attempts=row.attempts,
        tried_at=row.tried_at,
        release=Release(row.park, row.released_by, row.because, row.released_at) if released else None,
    )
