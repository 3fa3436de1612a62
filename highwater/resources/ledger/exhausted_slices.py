"""Slices in the ledger that runs leave undone: exhausted ones, which a person releases, and stalled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import read_slice_rows

_EXHAUSTED, _STALLED = schema.exhausted_slices, schema.stalled_slices


@dataclass(frozen=True)
class ExhaustedSlice:
    """A slice that is requested no more by itself.

    Args:
        slice_key: the slice.
        since: when it was exhausted, in UTC.
        runs: how many left it undone within a day before.
        released_at: when a person let it be tried again, in UTC; None while it is exhausted.
    """

    slice_key: str
    since: datetime
    runs: int
    released_at: datetime | None = None

    @property
    def text(self) -> str:
        """The exhausted slice in a sentence."""
        return f"{self.slice_key} is exhausted since {self.since:%Y-%m-%d %H:%M} UTC, {self.runs} runs left it undone"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        released = None if self.released_at is None else self.released_at.isoformat()
        return {"slice": self.slice_key, "since": self.since.isoformat(), "runs": self.runs, "released_at": released}


class ExhaustedSlices(LedgerPart):
    """The slices of a deployment that were exhausted."""

    def read_open(self, stream: str) -> list[ExhaustedSlice]:
        """The slices of a stream that are exhausted now, the longest ago first."""
        query = select(_EXHAUSTED).where(_EXHAUSTED.c.stream == stream, _EXHAUSTED.c.released_at.is_(None))
        return [
            _build_exhausted_slice(row)
            for row in self._database.read(query.order_by(_EXHAUSTED.c.since, _EXHAUSTED.c.slice_key))
        ]

    def read_for_slices(self, keys: Sequence[str]) -> dict[str, ExhaustedSlice]:
        """The records of these slices, including released ones."""
        return {row.slice_key: _build_exhausted_slice(row) for row in self._database.read_slices(_EXHAUSTED, keys)}

    def read_release_times(self, keys: Sequence[str]) -> dict[str, datetime]:
        """The slices that a person lets be tried again, and since when."""
        return {key: one.released_at for key, one in self.read_for_slices(keys).items() if one.released_at is not None}

    def add(self, stream: str, runs: Mapping[str, int], now: datetime) -> None:
        """Record slices as exhausted, with the number of their runs; an exhausted slice keeps its first record."""
        try:
            with self._database.writing() as connection:
                known = {row.slice_key: row.released_at for row in read_slice_rows(connection, _EXHAUSTED, [*runs])}
                released = {key: at for key, at in known.items() if at is not None}
                for key, at in released.items():  # not a release of this moment
                    connection.execute(
                        delete(_EXHAUSTED).where(_EXHAUSTED.c.slice_key == key, _EXHAUSTED.c.released_at == at)
                    )
                if fresh := [key for key in runs if key not in known or key in released]:
                    rows = [{"slice_key": key, "stream": stream, "since": now, "runs": runs[key]} for key in fresh]
                    connection.execute(insert(_EXHAUSTED), rows)
        except IntegrityError:
            return  # PostgreSQL: another tick was first, or a release; the next tick looks again

    def end(self, keys: Sequence[str]) -> None:
        """Forget slices that are done, or whose failures count no more; what a person released stays as a record."""
        with self._database.writing() as connection:
            for key in keys:
                connection.execute(
                    delete(_EXHAUSTED).where(_EXHAUSTED.c.slice_key == key, _EXHAUSTED.c.released_at.is_(None))
                )

    def release(self, key: str, *, by: str, because: str, now: datetime) -> bool:
        """Record that a person lets a slice be tried again; False if it is not exhausted."""
        statement = update(_EXHAUSTED).where(_EXHAUSTED.c.slice_key == key, _EXHAUSTED.c.released_at.is_(None))
        with self._database.writing() as connection:
            values = {"released_at": now, "released_by": by, "because": because}
            return connection.execute(statement.values(values)).rowcount == 1

    def release_any(self, stream: str, key: str, *, by: str, because: str, now: datetime) -> None:
        """Record that a person lets a slice be tried again, whether it is exhausted or not."""
        if self.release(key, by=by, because=because, now=now):
            return
        row = {"slice_key": key, "stream": stream, "since": now, "runs": 0}
        row |= {"released_at": now, "released_by": by, "because": because}
        try:
            with self._database.writing() as connection:
                connection.execute(delete(_EXHAUSTED).where(_EXHAUSTED.c.slice_key == key))
                connection.execute(insert(_EXHAUSTED), [row])
        except IntegrityError:
            return  # PostgreSQL: another person was first


def _build_exhausted_slice(row: Any) -> ExhaustedSlice:
    return ExhaustedSlice(row.slice_key, row.since, row.runs, row.released_at)


@dataclass(frozen=True)
class StalledSlice:
    """A slice that `repair` goes on requesting after six failed runs: ordered streams, or a service was unavailable.

    Args:
        slice_key: the slice.
        since: when that was noticed, in UTC.
        runs: how many had left it undone within a day before.
    """

    slice_key: str
    since: datetime
    runs: int

    @property
    def text(self) -> str:
        """The stalled slice in a sentence."""
        return (
            f"{self.slice_key} was left undone by {self.runs} runs until {self.since:%Y-%m-%d %H:%M} UTC, and is "
            "still requested"
        )


class StalledSlices(LedgerPart):
    """The slices of a deployment that many runs left undone and that are still requested."""

    def read_open(self, stream: str) -> list[StalledSlice]:
        """The stalled slices of a stream, the longest ago first."""
        query = select(_STALLED).where(_STALLED.c.stream == stream).order_by(_STALLED.c.since, _STALLED.c.slice_key)
        return [StalledSlice(row.slice_key, row.since, row.runs) for row in self._database.read(query)]

    def add(self, stream: str, runs: Mapping[str, int], now: datetime) -> None:
        """Record slices with the number of runs that left them undone; a known slice keeps its first record."""
        try:
            with self._database.writing() as connection:
                known = {row.slice_key for row in read_slice_rows(connection, _STALLED, [*runs])}
                rows = [
                    {"slice_key": key, "stream": stream, "since": now, "runs": count}
                    for key, count in runs.items()
                    if key not in known
                ]
                if rows:
                    connection.execute(insert(_STALLED), rows)
        except IntegrityError:
            return  # PostgreSQL: another tick was first

    def end(self, keys: Sequence[str]) -> None:
        """Forget slices that are done, or wait for something else by now."""
        with self._database.writing() as connection:
            for key in keys:
                connection.execute(delete(_STALLED).where(_STALLED.c.slice_key == key))
