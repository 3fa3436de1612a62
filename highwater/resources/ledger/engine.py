"""The connection, transactions and errors of the ledger's database."""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from highwater.batching import split_by_count
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError, LedgerRefusedError

# SQLite takes 32,766 parameters in a statement, and some builds 999.
KEYS_PER_STATEMENT = 500
# A run uses one connection, and another one for a moment when its lease is renewed.
POOL_SIZE = 2
# A code server ticks in eight threads (`dagster.yaml`); four may renew a lease at the same time: 2 + 10 = 12.
POOL_OVERFLOW = 10
_WRITES = "highwater_writes"


def parse_url(text: str) -> URL:
    """Read the ledger's URL.

    Raises:
        ConfigurationError: it is none, or names a database or a driver that the ledger does not know. The text is not
            repeated: it may hold a password (I13).
    """
    remedy = "set HIGHWATER_LEDGER_URL to sqlite:////folder/ledger.sqlite or postgresql://user@host/database"
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # the second of a port that is no number
        raise ConfigurationError("the ledger's URL cannot be read", remedy=remedy) from None
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise ConfigurationError(f"the ledger knows no database {url.get_backend_name()!r}", remedy=remedy)
    if url.get_driver_name() not in {"pysqlite", "psycopg2"}:
        raise ConfigurationError(
            f"the ledger knows no driver {url.get_driver_name()!r}", remedy=f"{remedy}, without a driver after +"
        )
    if url.get_backend_name() == "sqlite" and url.database in {None, "", ":memory:"}:
        raise ConfigurationError("the ledger's SQLite database must be a file", remedy=remedy)
    return url


def redact_url(url: URL) -> str:
    """The URL without anything secret: no password, and no query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def open_engine(url: URL, wait_seconds: float) -> Engine:
    """An engine that connects when it is first used.

    SQLite's connections are not pooled, since one costs 0.2 ms. PostgreSQL's are, at most 12 in a process. Nothing
    outlives a transaction on a connection, so that PgBouncer may give each transaction another one.

    Args:
        url: the database.
        wait_seconds: the longest wait for a connection, or for a lock of another process.
    """
    common: dict[str, Any] = {"hide_parameters": True, "json_serializer": _compact}
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"timeout": wait_seconds}, **common)
        sa.event.listen(engine, "connect", _disable_implicit_begin)
        sa.event.listen(engine, "begin", _begin)
        return engine
    engine = sa.create_engine(
        url,
        pool_size=POOL_SIZE,
        max_overflow=POOL_OVERFLOW,
        pool_timeout=wait_seconds,
        pool_pre_ping=True,
        pool_use_lifo=True,  # a connection that is seldom used stays unused, so that the server may close it
        connect_args={
            "connect_timeout": max(2, round(wait_seconds)),  # libpq takes whole seconds, 2 at least
            "application_name": "highwater",
        },
        **common,
    )
    sa.event.listen(engine, "begin", functools.partial(_bound, int(wait_seconds * 1000)))
    _leave_to_parent(engine)
    return engine


def _bound(milliseconds: int, connection: Connection) -> None:
    """Set how long this transaction may wait. It ends with the transaction, as PgBouncer needs it."""
    connection.exec_driver_sql(
        f"SET LOCAL lock_timeout = {milliseconds}; SET LOCAL statement_timeout = {4 * milliseconds}"
    )


@functools.cache
def _get_pooled_engines() -> weakref.WeakSet[Engine]:
    """The engines with a pool; a process that is forked off begins with empty pools."""
    engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    def begin_empty() -> None:
        for engine in engines:
            engine.dispose(close=False)  # the sockets are the parent's, and stay open there

    os.register_at_fork(after_in_child=begin_empty)
    return engines


def _leave_to_parent(engine: Engine) -> None:
    _get_pooled_engines().add(engine)


def _compact(plain: object) -> str:
    import json

    return json.dumps(plain, separators=(",", ":"))


def _disable_implicit_begin(connection: Any, record: object) -> None:
    """Python's sqlite3 begins transactions by rules of its own; `_begin` does it instead."""
    del record
    connection.isolation_level = None


def _begin(connection: Connection) -> None:
    """A writer takes the write lock at once: one that takes it later may fail at once, without any wait."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def transaction(engine: Engine, *, writes: bool) -> Iterator[Connection]:
    """A transaction, with database errors in our words."""
    with (
        translate_errors(engine),
        engine.connect().execution_options(**{_WRITES: writes}) as connection,
        connection.begin(),
    ):
        yield connection


def read_slice_rows(connection: Connection, table: sa.Table, keys: Sequence[str]) -> Iterator[Any]:
    """The rows of slices, however many, in a table that has a column `slice_key`."""
    for some in split_by_count(keys, KEYS_PER_STATEMENT):
        yield from connection.execute(sa.select(table).where(table.c.slice_key.in_(some)))


@contextmanager
def translate_errors(engine: Engine) -> Iterator[None]:
    """Translate database errors; `IntegrityError` passes, since callers handle it as a lost race."""
    try:
        yield
    except (HighwaterError, sa.exc.IntegrityError):
        raise
    except SQLAlchemyError as error:
        raise _translate_error(engine, error) from None  # the chain would repeat statement and address


# By the words of libpq, PostgreSQL or SQLite: the state of the database, and the remedy. All may pass without a change
# here: a password is rotated, a standby is promoted, a disk is emptied.
_UNAVAILABLE = (
    (
        re.compile(
            r"authentication failed|no password supplied|role \".*\" does not exist|not permitted to log in|pg_hba"
        ),
        "refuses the login",
        "correct the login in HIGHWATER_LEDGER_URL, or let the server accept it",
    ),
    (
        re.compile(r"database \".*\" does not exist"),
        "does not exist",
        "correct HIGHWATER_LEDGER_URL, or create the database as docs/deployment/postgresql.md says",
    ),
    (
        re.compile(r"read-only transaction|during recovery"),
        "takes no writes",
        "let HIGHWATER_LEDGER_URL lead to the primary server, or end default_transaction_read_only",
    ),
    (
        re.compile(r"too many (?:connections|clients)|remaining connection slots"),
        "has no free connection",
        "raise max_connections, or put PgBouncer in between, as docs/deployment/postgresql.md says",
    ),
    (
        re.compile(r"QueuePool limit"),
        "has no free connection in this process",
        "wait for the other work of this process",
    ),
    (
        re.compile(r"No space left|disk is full|could not extend file|disk I/O error"),
        "cannot write to its disk",
        "free or repair the disk of the database",
    ),
    (
        re.compile(r"support SSL|SSL error|certificate"),
        "accepts no connection with these settings of TLS",
        "correct sslmode and certificates in HIGHWATER_LEDGER_URL",
    ),
    (
        re.compile(r"connection to server|could not translate host name|closed the connection|has been closed"),
        "does not answer",
        "start its server, or correct host and port in HIGHWATER_LEDGER_URL",
    ),
)
_LOCKED = ("does not answer", "look for a process that holds its lock, or whether its server runs")
# SQLite's words where waiting does not help.
_UNUSABLE = ("readonly", "unable to open", "not a database", "malformed", "permission denied")
# The errors that the same statement meets again: of a value, of the statement's text, of what the server cannot do.
_REFUSALS = (sa.exc.DataError, sa.exc.ProgrammingError, sa.exc.NotSupportedError)
# SQLSTATE 54: a value is beyond a limit of the server, such as the size of an index's row; an `OperationalError`.
_LIMIT_EXCEEDED = "54"


def _translate_error(engine: Engine, error: SQLAlchemyError) -> HighwaterError:
    reason = _extract_first_line(error)
    password = engine.url.password
    if password:
        reason = reason.replace(str(password), "***")
    if _is_schema_incomplete(error, reason):
        return ConfigurationError(
            f"the ledger {redact_url(engine.url)} has another schema than this process knows",
            found=reason,
            remedy="restart this process with the Highwater that upgraded it; highwater ledger verify says more",
        )
    if engine.dialect.name == "sqlite" and any(sign in reason for sign in _UNUSABLE):
        return build_unusable_error(engine, reason)
    if "permission denied" in reason:
        return ConfigurationError(
            f"the role may not do this in the ledger {redact_url(engine.url)}",
            found=reason,
            remedy="grant its rights (docs/deployment/postgresql.md), or let the owner run highwater ledger upgrade",
        )
    if "invalid dsn" in reason:
        return ConfigurationError(
            f"the client of the ledger {redact_url(engine.url)} refuses its address",
            found=reason,
            remedy="correct the part of HIGHWATER_LEDGER_URL after `?`: libpq's documentation has the names",
        )
    if _is_refused(error):
        return LedgerRefusedError(
            f"the ledger {redact_url(engine.url)} refuses a value or a statement",
            found=f"{type(error).__name__}: {reason}",
            remedy="nothing was written: shorten or correct the value; if it is none of yours, report this as a defect",
        )
    state, remedy = next((texts for signs, *texts in _UNAVAILABLE if signs.search(reason)), _LOCKED)
    return DependencyUnavailableError(
        f"the ledger {redact_url(engine.url)} {state}",
        found=reason,
        remedy=f"{remedy}; nothing was decided, so try again",
    )


def _is_schema_incomplete(error: SQLAlchemyError, reason: str) -> bool:
    """Whether a table or a column is missing; a server that lacks the whole database says so in another error."""
    absent = isinstance(error, sa.exc.ProgrammingError) and "does not exist" in reason
    return absent or "no such column" in reason or "no such table" in reason


def _is_refused(error: SQLAlchemyError) -> bool:
    """Whether the database, or the type of a column, refuses a value or the statement, so that a retry cannot help."""
    if isinstance(error, DBAPIError):
        is_over_limit = str(getattr(error.orig, "pgcode", None)).startswith(_LIMIT_EXCEEDED)
        return (isinstance(error, _REFUSALS) or is_over_limit) and not error.connection_invalidated
    # A value that cannot be converted for its column; nothing was sent.
    return isinstance(error, sa.exc.StatementError) and isinstance(error.orig, TypeError | ValueError)


def _extract_first_line(error: SQLAlchemyError) -> str:
    text = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    return next(iter(text.strip().splitlines()), type(error).__name__)


def build_unusable_error(engine: Engine, reason: str) -> ConfigurationError:
    """The error of a database file that cannot be used."""
    return ConfigurationError(
        f"the ledger {redact_url(engine.url)} cannot be used",
        found=reason,
        remedy="make its folder and file writable for this user, or set HIGHWATER_LEDGER_URL to another database",
    )
