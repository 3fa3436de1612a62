"""Retired keys: slices whose partition keys maintenance took from Dagster, so that nobody adds them again."""

# Only the key goes: data, plan and slice commits stay. A key that a person brings back keeps its row, with the time.

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, func, insert, select, update

from highwater.batching import split_by_count
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import KEYS_PER_STATEMENT

_TABLE = schema.retired_keys


class RetiredKeys(LedgerPart):
    """The marks of a ledger."""

    def list_retired(self, keys: Sequence[str]) -> set[str]:
        """The keys that are retired now."""
        if not keys:
            return set()
        return {row.slice_key for row in self._database.read_slices(_TABLE, keys) if row.recalled_at is None}

    def count(self, stream: str) -> int:
        """The number of keys of a stream that are retired now."""
        query = select(func.count()).where(_TABLE.c.stream == stream, _TABLE.c.recalled_at.is_(None))
        with self._database.reading() as connection:
            return int(connection.execute(query).scalar_one())

    def read_recall_times(self, stream: str) -> dict[str, datetime]:
        """The keys of a stream that were brought back, and when."""
        query = select(_TABLE).where(_TABLE.c.stream == stream, _TABLE.c.recalled_at.is_not(None))
        return {row.slice_key: row.recalled_at for row in self._database.read(query)}

    def retire(self, stream: str, keys: Sequence[str], now: datetime) -> None:
        """Mark keys as retired; one that was brought back before is retired again."""

        def write(connection: Connection) -> None:
            for some in split_by_count(keys, KEYS_PER_STATEMENT):
                connection.execute(delete(_TABLE).where(_TABLE.c.slice_key.in_(some)))
                rows = [{"slice_key": key, "stream": stream, "retired_at": now} for key in some]
                connection.execute(insert(_TABLE), rows)

        self._database.write_again(write)

    def recall(self, keys: Sequence[str], now: datetime) -> None:
        """Mark retired keys as brought back; other keys are ignored."""
        with self._database.writing() as connection:
            for some in split_by_count(keys, KEYS_PER_STATEMENT):
                statement = update(_TABLE).where(_TABLE.c.slice_key.in_(some), _TABLE.c.recalled_at.is_(None))
                connection.execute(statement.values(recalled_at=now))
