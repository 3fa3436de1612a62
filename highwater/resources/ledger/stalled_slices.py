"""Slices that `repair` goes on requesting after six failed runs: ordered streams, or a service was unavailable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import IntegrityError

from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import read_slice_rows

_TABLE = schema.stalled_slices


@dataclass(frozen=True)
class StalledSlice:
    """A slice that runs leave undone again and again.

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
        query = select(_TABLE).where(_TABLE.c.stream == stream).order_by(_TABLE.c.since, _TABLE.c.slice_key)
        return [StalledSlice(row.slice_key, row.since, row.runs) for row in self._database.read(query)]

    def add(self, stream: str, runs: Mapping[str, int], now: datetime) -> None:
        """Record slices with the number of runs that left them undone; a known slice keeps its first record."""
        try:
            with self._database.writing() as connection:
                known = {row.slice_key for row in read_slice_rows(connection, _TABLE, [*runs])}
                rows = [
                    {"slice_key": key, "stream": stream, "since": now, "runs": count}
                    for key, count in runs.items()
                    if key not in known
                ]
                if rows:
                    connection.execute(insert(_TABLE), rows)
        except IntegrityError:
            return  # PostgreSQL: another tick was first

    def end(self, keys: Sequence[str]) -> None:
        """Forget slices that are done, or wait for something else by now."""
        with self._database.writing() as connection:
            for key in keys:
                connection.execute(delete(_TABLE).where(_TABLE.c.slice_key == key))
