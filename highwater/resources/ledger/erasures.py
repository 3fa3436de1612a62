"""Erased keys and expired rows by slice, in the ledger; a slice that is read again leaves the erased records out."""

# The offsets of the erased records are kept, and of their key only a digest: so a slice that is read again leaves them
# out, and the checks know what its gaps are.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.engine import Connection

from highwater.erasing import BY_AGE, ErasedCounts, Erasure, RecordedErasure
from highwater.gaps import Ranges, decode_range_lists, encode_range_lists
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import read_slice_rows

_KEYS, _SLICES = schema.erasures, schema.erased_slices


class Erasures(LedgerPart):
    """The erasures of a ledger, and what each removed from each slice."""

    def list_for_stream(self, stream: str) -> list[Erasure]:
        """All erasures of a stream, oldest first."""
        query = select(_KEYS).where(_KEYS.c.stream == stream).order_by(_KEYS.c.id)
        return [
            Erasure(row.stream, row.digest, row.reason, row.erased_by, row.erased_at, row.id)
            for row in self._database.read(query)
        ]

    def add(self, erasure: Erasure) -> int:
        """Record an erasure; returns its number. From now on no reader takes the older records of the key."""
        with self._database.writing() as connection:
            return _insert(connection, erasure)

    def add_missing(self, recorded: Sequence[RecordedErasure]) -> None:
        """Record erasures that the ledger does not know, as after a backup was restored; of slices that it knows."""
        taken = sorted({key for one in recorded for key in one.slices})

        def write(connection: Connection) -> None:
            planned = {row.slice_key for row in read_slice_rows(connection, schema.slices, taken)}
            restore(
                connection,
                [
                    replace(one, slices={key: it for key, it in one.slices.items() if key in planned})
                    for one in recorded
                ],
            )

        self._database.write_again(write)

    def list_recorded(self, stream: str, *, of_keys: bool = False) -> list[RecordedErasure]:
        """All erasures of a stream with what they took, oldest first.

        Args:
            stream: its name.
            of_keys: only erasures of keys, since expired rows have an entry for each slice, for ever.
        """
        mine = _SLICES.c.erasure == _KEYS.c.id
        query = select(_SLICES).join(_KEYS, mine).where(_KEYS.c.stream == stream).order_by(_SLICES.c.slice_key)
        if of_keys:
            query = query.where(_KEYS.c.digest != BY_AGE)
        taken: dict[int, dict[str, ErasedCounts]] = {}
        # The slices first: one that is begun in between belongs to an erasure that is read then.
        for row in self._database.read(query):
            taken.setdefault(row.erasure, {})[row.slice_key] = _build_erased(row)
        return [
            RecordedErasure(one, taken.get(one.number, {}))
            for one in self.list_for_stream(stream)
            if not (of_keys and one.by_age)
        ]

    def read_for_slices(self, keys: Sequence[str]) -> dict[str, list[ErasedCounts]]:
        """The erasures of slices, by slice; slices without any are left out."""
        found: dict[str, list[ErasedCounts]] = {}
        for row in sorted(self._database.read_slices(_SLICES, keys), key=lambda row: int(row.erasure)):
            found.setdefault(row.slice_key, []).append(_build_erased(row))
        return found

    def read_for_key(self, stream: str, digest: str) -> dict[str, list[ErasedCounts]]:
        """The records that every erasure of a key took, by slice."""
        mine = _SLICES.c.erasure == _KEYS.c.id
        query = select(_SLICES).join(_KEYS, mine).where(_KEYS.c.stream == stream, _KEYS.c.digest == digest)
        found: dict[str, list[ErasedCounts]] = {}
        for row in self._database.read(query.order_by(_SLICES.c.slice_key, _SLICES.c.erasure)):
            found.setdefault(row.slice_key, []).append(_build_erased(row))
        return found

    def begin(self, number: int, slices: Sequence[ErasedCounts]) -> None:
        """Record the rows that an erasure is about to remove from slices; an earlier record stays."""

        def write(connection: Connection) -> None:
            for one in slices:
                if not _is_recorded(connection, number, one.slice_key):
                    connection.execute(insert(_SLICES).values(_build_row(number, one)))

        self._database.write_again(write)

    def record_excluded(self, number: int, slice_key: str, places: Ranges, now: datetime) -> None:
        """Record that records were never taken into raw, since they were erased before the slice was read."""
        self.begin(number, [ErasedCounts(slice_key, places, {}, now)])

    def mark_done(self, slices: Sequence[str], digest: str, now: datetime) -> None:
        """Record that all rows of the key are gone from slices."""
        mine = select(_KEYS.c.id).where(_KEYS.c.digest == digest)
        with self._database.writing() as connection:
            for key in slices:
                open_ = update(_SLICES).where(
                    _SLICES.c.slice_key == key, _SLICES.c.done_at.is_(None), _SLICES.c.erasure.in_(mine)
                )
                connection.execute(open_.values(done_at=now))


def _is_recorded(connection: Connection, number: int, slice_key: str) -> bool:
    query = select(_SLICES.c.erasure).where(_SLICES.c.erasure == number, _SLICES.c.slice_key == slice_key)
    return connection.execute(query).first() is not None


def _build_erased(row: Any) -> ErasedCounts:
    return ErasedCounts(row.slice_key, decode_range_lists(row.places), row.rows, row.done_at, row.erasure)


def _build_row(number: int, one: ErasedCounts) -> dict[str, Any]:
    places = encode_range_lists(one.places)
    return {
        "erasure": number,
        "slice_key": one.slice_key,
        "places": places,
        "rows": dict(one.rows),
        "done_at": one.done_at,
    }


def restore(connection: Connection, recorded: Sequence[RecordedErasure]) -> None:
    """Write erasures that another ledger knew; those that this one knows stay as they are here."""
    for one in recorded:
        mine = one.erasure
        same = (_KEYS.c.stream == mine.stream, _KEYS.c.digest == mine.digest, _KEYS.c.erased_at == mine.erased_at)
        number = connection.execute(select(_KEYS.c.id).where(*same)).scalar()
        if number is None:
            number = _insert(connection, mine)
        fresh = [
            _build_row(number, erased)
            for erased in one.slices.values()
            if not _is_recorded(connection, number, erased.slice_key)
        ]
        if fresh:
            connection.execute(insert(_SLICES), fresh)


def _insert(connection: Connection, erasure: Erasure) -> int:
    values = {name: value for name, value in vars(erasure).items() if name != "number"}
    return int(connection.execute(insert(_KEYS).values(values).returning(_KEYS.c.id)).scalar_one())
