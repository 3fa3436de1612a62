"""Decisions of operators in the ledger."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from highwater.decisions import Decision
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart

_TABLE = schema.decisions


class Decisions(LedgerPart):
    """The decisions of a ledger."""

    def begin(self, decision: Decision) -> int:
        """Record a decision before its action begins; returns its number."""
        row = {
            "stream": decision.stream,
            "action": decision.action,
            "asked": dict(decision.asked),
            "decided_by": decision.by,
            "because": decision.because,
            "through": decision.through,
            "decided_at": decision.at,
            "outcome": decision.outcome,
        }
        with self._database.writing() as connection:
            key = connection.execute(insert(_TABLE).values(row)).inserted_primary_key
        assert key is not None  # one row was inserted
        return int(key[0])

    def end(self, number: int, outcome: str) -> None:
        """Record how the action of a decision ended."""
        with self._database.writing() as connection:
            connection.execute(update(_TABLE).where(_TABLE.c.id == number).values(outcome=outcome))

    def newest(self, stream: str | None = None, most: int = 100) -> list[Decision]:
        """Decisions, oldest first.

        Args:
            stream: only those of this stream.
            most: at most this number, the newest ones.
        """
        query = select(_TABLE).order_by(_TABLE.c.id.desc()).limit(most)
        if stream is not None:
            query = query.where(_TABLE.c.stream == stream)
        with self._database.reading() as connection:
            found = [
                Decision(
                    row.action,
                    row.stream,
                    row.asked,
                    row.decided_by,
                    row.because,
                    row.through,
                    row.decided_at,
                    row.outcome,
                )
                for row in connection.execute(query)
            ]
        return found[::-1]
