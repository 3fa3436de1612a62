"""The ledger's database: its schema is ensured at the first use, and before each transaction that writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import Row, Select, Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import IntegrityError

from highwater.errors import LeaseHeldError
from highwater.resources.ledger import creation, revisions
from highwater.resources.ledger.engine import (
    open_engine,
    parse_url,
    read_slice_rows,
    redact_url,
    transaction,
    translate_errors,
)

T = TypeVar("T")
TRIES = 5


class Database:
    """The ledger's database. An instance connects at its first use, which creates missing tables.

    Args:
        url: an SQLAlchemy URL of SQLite or PostgreSQL.
        wait_seconds: the longest wait for a connection, or for a lock of another process.

    Raises:
        ConfigurationError: the URL cannot be used.
    """

    def __init__(self, url: str, wait_seconds: float) -> None:
        self.url = parse_url(url)
        self.wait_seconds = wait_seconds

    def __repr__(self) -> str:
        return f"Database({self.shown!r})"

    @property
    def shown(self) -> str:
        """The URL without anything secret."""
        return redact_url(self.url)

    @cached_property
    def unchecked(self) -> Engine:
        """The engine, without a check of the database's schema."""
        return open_engine(self.url, self.wait_seconds)

    @cached_property
    def engine(self) -> Engine:
        """The engine of a database whose schema this code can use.

        Raises:
            ConfigurationError: the schema is older or newer than this code can use, or cannot be created.
            DependencyUnavailableError: the database cannot be reached, or stayed locked.
        """
        with translate_errors(self.unchecked):
            creation.prepare(self.unchecked, self.wait_seconds)
        return self.unchecked

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that reads."""
        return transaction(self.engine, writes=False)

    def read(self, query: Select[Any]) -> Iterator[Row[Any]]:
        """The rows of one query, in a transaction of its own, which ends behind the last row."""
        with self.reading() as connection:
            yield from connection.execute(query)

    def read_slices(self, table: Table, keys: Sequence[str]) -> Iterator[Row[Any]]:
        """The rows of slices, in a transaction of its own, which ends behind the last row."""
        with self.reading() as connection:
            yield from read_slice_rows(connection, table, keys)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes.

        Raises:
            ConfigurationError: the schema was changed since, and this code must not write into it.
        """
        with transaction(self.engine, writes=True) as connection:
            # An upgrade takes this table for itself first. So it ends before this statement, or waits for this commit.
            revisions.ensure_usable(revisions.read_stored_revision(connection), self.shown)
            yield connection

    def write_again(self, write: Callable[[Connection], T]) -> T:
        """Run a transaction that inserts what it does not find, and run it again where another writer was first.

        PostgreSQL lets another transaction insert the same row between the look and the insert.

        Raises:
            LeaseHeldError: others were first again and again; nothing was written.
        """
        for _ in range(TRIES):
            try:
                with self.writing() as connection:
                    return write(connection)
            except IntegrityError:
                continue
        raise LeaseHeldError(
            f"other processes wrote the same rows of the ledger {self.shown} first, {TRIES} times",
            remedy="nothing was written; try again",
        )


class LedgerPart:
    """Some tables of the ledger.

    Args:
        database: the ledger's.

    Every method may raise DependencyUnavailableError: the database cannot be reached or stayed locked; or
    LedgerRefusedError: it refuses a value. Nothing was written.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
