"""The table of intents: open one, list them, close one. Only `resources/numbered_commits.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, insert, select

from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart


@dataclass(frozen=True)
class Intent:
    """One numbered commit that was begun.

    Args:
        batch: its name.
        user_metadata: the commit records, as the commit carries them.
        opened_at: when, in UTC.
    """

    batch: str
    user_metadata: str
    opened_at: datetime


class Intents(LedgerPart):
    """The open intents of a deployment."""

    def open(self, batch: str, stream: str, table: str, user_metadata: str, now: datetime) -> None:
        """Record an intent; the write that follows carries its name.

        Args:
            batch: its name, never used before.
            stream: the stream's name.
            table: the table's name.
            user_metadata: the commit records.
            now: in UTC.
        """
        values = {"batch": batch, "stream": stream, "table_name": table, "user_metadata": user_metadata}
        with self._database.writing() as connection:
            connection.execute(insert(schema.intents).values(**values, opened_at=now))

    def list_for_table(self, stream: str, table: str) -> list[Intent]:
        """The open intents of a table, oldest first."""
        columns = schema.intents.c
        query = select(schema.intents).where(columns.stream == stream, columns.table_name == table)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(columns.opened_at, columns.batch))
            return [Intent(row.batch, row.user_metadata, row.opened_at) for row in rows]

    def close(self, batch: str) -> None:
        """Delete an intent whose commit ended; one that is closed already is no error."""
        with self._database.writing() as connection:
            connection.execute(delete(schema.intents).where(schema.intents.c.batch == batch))
