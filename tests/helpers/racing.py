"""Writes of another connection between two statements of a transaction: PostgreSQL allows them, SQLite does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from highwater.resources.ledger import Ledger


def write_before(ledger: Ledger, words: tuple[str, ...], write: Callable[[], object]) -> list[object]:
    """Let another connection write once, before the ledger's first statement that begins with one of some words.

    Args:
        ledger: its statements are watched.
        words: `DELETE FROM holds`, for example.
        write: writes by another connection.

    Returns:
        What the write returned, once it has happened.
    """
    done: list[object] = []

    @sa.event.listens_for(ledger.database.engine, "before_cursor_execute")
    def write_first(_: Any, __: Any, statement: str, *more: Any) -> None:
        del more
        if statement.startswith(words) and not done:
            done.append(None)
            done[0] = write()

    return done
