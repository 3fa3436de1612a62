"""Actions of operators in the ledger."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from highwater.operator_actions import OperatorAction
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart

_TABLE = schema.operator_actions


class OperatorActions(LedgerPart):
    """The actions of operators in a ledger."""

    def begin(self, action: OperatorAction) -> int:
        """Record an action before it begins; returns its number."""
        row = {
            "stream": action.stream,
            "action": action.action,
            "asked": dict(action.asked),
            "decided_by": action.by,
            "because": action.because,
            "through": action.through,
            "decided_at": action.at,
            "outcome": action.outcome,
        }
        with self._database.writing() as connection:
            key = connection.execute(insert(_TABLE).values(row)).inserted_primary_key
        assert key is not None  # one row was inserted
        return int(key[0])

    def end(self, number: int, outcome: str) -> None:
        """Record how an action ended."""
        with self._database.writing() as connection:
            connection.execute(update(_TABLE).where(_TABLE.c.id == number).values(outcome=outcome))

    def list_newest(self, stream: str | None = None, most: int = 100) -> list[OperatorAction]:
        """Actions, oldest first.

        Args:
            stream: only those of this stream.
            most: at most this number, the newest ones.
        """
        query = select(_TABLE).order_by(_TABLE.c.id.desc()).limit(most)
        if stream is not None:
            query = query.where(_TABLE.c.stream == stream)
        found = [
            OperatorAction(
                row.action,
                row.stream,
                row.asked,
                row.decided_by,
                row.because,
                row.through,
                row.decided_at,
                row.outcome,
            )
            for row in self._database.read(query)
        ]
        return found[::-1]
