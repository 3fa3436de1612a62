"""The ledger's tables, and how its database is opened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import URL, Connection, Dialect, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from highwater.errors import ConfigurationError, DependencyAwayError, HighwaterError
from highwater.portions import portions

VERSION = 10
# Any constant will do that nothing else in the database uses; the letters "highwate".
_ADVISORY_LOCK = 0x6869676877617465
_WRITES = "highwater_writes"
# SQLite takes 32,766 parameters in a statement, and some builds 999.
KEYS_A_STATEMENT = 500


class Utc(sa.TypeDecorator[datetime]):
    """A moment in UTC. SQLite forgets the zone, so it is stored without and given back with it."""

    impl = sa.DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.replace(tzinfo=UTC)


metadata = sa.MetaData()

versions = sa.Table("ledger_version", metadata, sa.Column("version", sa.Integer, primary_key=True))

slices = sa.Table(
    "slices",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("topic", sa.String(249), nullable=False),
    sa.Column("topic_id", sa.String(40), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("ordinal", sa.BigInteger, nullable=False),
    sa.Column("ranges", sa.JSON, nullable=False),
    sa.Column("planned_at", Utc, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, default=0),
    sa.Column("lag", sa.BigInteger),
    sa.Column("extra", sa.JSON, nullable=False),
    sa.UniqueConstraint("topic", "topic_id", "ordinal"),
    # The newest slice of a topic, and pages of slices in the order of their plan, are found without a scan.
    sa.Index("slices_of_topic", "stream", "topic", "ordinal", unique=True),
    sa.Index("slices_in_order", "stream", "planned_at", "topic", "ordinal"),
)

topics = sa.Table(
    "topics",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("topic", sa.String(249), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("topic_id", sa.String(40), nullable=False),
    sa.Column("starts", sa.JSON, nullable=False),
    sa.Column("opened_at", Utc, nullable=False),
    sa.Column("opened_by", sa.String(249), nullable=False),
    sa.Column("first_ordinal", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
)

losses = sa.Table(
    "losses",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("topic", sa.String(249), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("end", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("accepted_by", sa.String(249), nullable=False),
    sa.Column("recorded_at", Utc, nullable=False),
    sa.UniqueConstraint("stream", "topic", "generation", "partition", "start", "end"),
)

publications = sa.Table(
    "publications",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("sent", sa.BigInteger, nullable=False),
    sa.Column("published_at", Utc, nullable=False),
)


def _origin_of_stream() -> list[sa.Column[Any]]:
    """The columns by which a row is of one origin; of a table with nothing more, its key."""
    return [
        sa.Column("stream", sa.String(249), primary_key=True),
        sa.Column("origin_topic", sa.String(249), primary_key=True),
        sa.Column("origin_generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("origin_partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("origin_offset", sa.BigInteger, primary_key=True, autoincrement=False),
    ]


discards = sa.Table(
    "discards",
    metadata,
    *_origin_of_stream(),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("discarded_by", sa.String(249), nullable=False),
    sa.Column("discarded_at", Utc, nullable=False),
)

gaps = sa.Table(
    "gaps",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("topic_id", sa.String(40), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("aborted", sa.BigInteger, nullable=False),
    sa.Column("markers", sa.BigInteger, nullable=False),
    sa.Column("markers_or_compacted", sa.BigInteger, nullable=False),
    sa.Column("lost", sa.BigInteger, nullable=False),
    sa.Column("unseen", sa.BigInteger, nullable=False),
    sa.Column("cleanup_policy", sa.String(100)),
    sa.Column("looked_at", Utc, nullable=False),
    sa.Index("gaps_of_topic", "topic_id", "cleanup_policy"),
)

alerts = sa.Table(
    "alerts",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("what", sa.String(100), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("threshold", sa.Text, nullable=False),
    sa.Column("remedy", sa.Text, nullable=False),
    sa.Column("since", Utc, nullable=False),
    sa.Column("told", sa.Boolean, nullable=False),
    sa.Column("ended", Utc),
)

# What alerts are about, and when a tick last ran that measures it.
watched = sa.Table(
    "watched",
    metadata,
    sa.Column("name", sa.String(249), primary_key=True),
    sa.Column("at", Utc, nullable=False),
)

breakers = sa.Table(
    "breakers",
    metadata,
    sa.Column("name", sa.String(300), primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("value", sa.JSON, nullable=False),
)

judgements = sa.Table(
    "judgements",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("run", sa.String(64), nullable=False),
    sa.Column("records", sa.BigInteger, nullable=False),
    sa.Column("rejects", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.Boolean, nullable=False),
    sa.Column("refused", sa.Boolean, nullable=False),
    sa.Column("judged_at", Utc, nullable=False),
    sa.Index("judgements_refused", "stream", "refused"),
)

acceptances = sa.Table(
    "acceptances",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("accepted_by", sa.String(249), nullable=False),
    sa.Column("accepted_at", Utc, nullable=False),
)

# A person's decision that a reason for rejects opens the breaker no more, in the slices of the main topic from one on.
accepted_reasons = sa.Table(
    "accepted_reasons",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("reason", sa.String(40), primary_key=True),
    sa.Column("from_slice", sa.String(300), nullable=False),
    sa.Column("from_ordinal", sa.BigInteger, nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("accepted_by", sa.String(249), nullable=False),
    sa.Column("accepted_at", Utc, nullable=False),
    sa.Column("revoked_by", sa.String(249)),
    sa.Column("revoked_at", Utc),
)

# How many records of a judged slice were rejected for each reason that is not accepted.
judged_reasons = sa.Table(
    "judged_reasons",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("reason", sa.String(40), primary_key=True),
    sa.Column("rejects", sa.BigInteger, nullable=False),
)

# Dagster instances whose sensors ticked for a stream.
instances = sa.Table(
    "instances",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("instance_id", sa.String(100), primary_key=True),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("first_seen", Utc, nullable=False),
    sa.Column("last_seen", Utc, nullable=False),
)

holds = sa.Table(
    "holds",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("since", Utc, nullable=False),
    sa.Column("reason", sa.String(40), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("records", sa.BigInteger, nullable=False),
    sa.Column("origin_topic", sa.String(300), nullable=False),
    sa.Column("origin_generation", sa.Integer, nullable=False),
    sa.Column("origin_partition", sa.Integer, nullable=False),
    sa.Column("origin_offset", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("tried_at", Utc, nullable=False),
    sa.Column("released_at", Utc),
    sa.Column("released_by", sa.String(249)),
    sa.Column("because", sa.Text),
    sa.Column("park", sa.Boolean),
    sa.Index("holds_open", "stream", "released_at"),
)

given_up = sa.Table(
    "given_up",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("since", Utc, nullable=False),
    sa.Column("runs", sa.Integer, nullable=False),
    sa.Column("released_at", Utc),
    sa.Column("released_by", sa.String(249)),
    sa.Column("because", sa.Text),
    sa.Index("given_up_open", "stream", "released_at"),
)

in_vain = sa.Table(
    "in_vain",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False, index=True),
    sa.Column("since", Utc, nullable=False),
    sa.Column("runs", sa.Integer, nullable=False),
)

paused_topics = sa.Table(
    "paused_topics",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("topic", sa.String(249), primary_key=True),
    sa.Column("paused_at", Utc, nullable=False),
    sa.Column("paused_by", sa.String(249), nullable=False),
    sa.Column("because", sa.Text, nullable=False),
)

# Streams that a sensor skips, and why, until a person acts.
sensor_faults = sa.Table(
    "sensor_faults",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("sensor", sa.String(40), primary_key=True),
    sa.Column("since", Utc, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
    sa.Column("remedy", sa.Text, nullable=False),
)

# Who decided an action of an operator, when and why; keys of records are not among what was asked.
decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False, index=True),
    sa.Column("action", sa.String(40), nullable=False),
    sa.Column("asked", sa.JSON, nullable=False),
    sa.Column("decided_by", sa.String(249), nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("through", sa.String(249), nullable=False),
    sa.Column("decided_at", Utc, nullable=False),
    sa.Column("outcome", sa.String(100)),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String(300), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("until", sa.Float(53), nullable=False),
)

# An origin has a row for each time that it was taken back: the next one only after it was published anew.
reclaims = sa.Table(
    "reclaims",
    metadata,
    *_origin_of_stream(),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("act", sa.BigInteger, nullable=False),
    sa.Column("slice_key", sa.String(300), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("reclaimed_by", sa.String(249), nullable=False),
    sa.Column("reclaimed_at", Utc, nullable=False),
    sa.Index("reclaims_of_slice", "stream", "slice_key"),
    sa.Index("reclaims_by_act", "stream", "act"),
)

retired_keys = sa.Table(
    "retired_keys",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("retired_at", Utc, nullable=False),
    # A key that was brought back is live, and its row says since when.
    sa.Column("recalled_at", Utc),
    sa.Index("retired_keys_of_stream", "stream", "recalled_at"),
)

intents = sa.Table(
    "intents",
    metadata,
    sa.Column("batch", sa.String(64), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("table_name", sa.String(40), nullable=False),
    sa.Column("user_metadata", sa.Text, nullable=False),
    sa.Column("opened_at", Utc, nullable=False),
    sa.Index("intents_of_table", "stream", "table_name"),
)

erasures = sa.Table(
    "erasures",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("erased_by", sa.String(249), nullable=False),
    sa.Column("erased_at", Utc, nullable=False),
    sa.Index("erasures_of_stream", "stream", "digest"),
)

erased_slices = sa.Table(
    "erased_slices",
    metadata,
    sa.Column("erasure", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("places", sa.JSON, nullable=False),
    sa.Column("rows", sa.JSON, nullable=False),
    sa.Column("done_at", Utc),
    sa.Index("erased_slices_by_slice", "slice_key"),
)


def parse_url(text: str) -> URL:
    """Read the ledger's URL.

    Raises:
        ConfigurationError: it is none, or names a database that the ledger does not know. The text is not repeated: it
            may hold a password (I13).
    """
    remedy = "set HIGHWATER_LEDGER_URL to sqlite:////folder/ledger.sqlite or postgresql://user@host/database"
    try:
        url = make_url(text)
    except ArgumentError:
        raise ConfigurationError("the ledger's URL cannot be read", remedy=remedy) from None
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise ConfigurationError(f"the ledger knows no database {url.get_backend_name()!r}", remedy=remedy)
    if url.get_backend_name() == "sqlite" and url.database in {None, "", ":memory:"}:
        raise ConfigurationError("the ledger's SQLite database must be a file", remedy=remedy)
    return url


def shown(url: URL) -> str:
    """The URL without anything secret: no password, and no query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def open_engine(url: URL, wait_seconds: float) -> Engine:
    """An engine that connects when it is first used.

    Connections are not pooled: one costs 0.2 ms on SQLite, and a pooled one does not survive a fork.

    Args:
        url: the database.
        wait_seconds: how long a connection, or a lock of another process, is waited for.
    """
    sqlite = url.get_backend_name() == "sqlite"
    arguments: dict[str, Any] = {"timeout": wait_seconds} if sqlite else _postgresql_arguments(wait_seconds)
    engine = sa.create_engine(
        url,
        poolclass=sa.NullPool,
        connect_args=arguments,
        hide_parameters=True,
        json_serializer=_compact,
    )
    if sqlite:
        sa.event.listen(engine, "connect", _no_implicit_transactions)
        sa.event.listen(engine, "begin", _begin)
    return engine


def _postgresql_arguments(wait_seconds: float) -> dict[str, Any]:
    milliseconds = int(wait_seconds * 1000)
    return {
        "connect_timeout": max(2, round(wait_seconds)),  # libpq takes whole seconds, 2 at least
        "application_name": "highwater",
        "options": f"-c lock_timeout={milliseconds} -c statement_timeout={4 * milliseconds}",
    }


def _compact(plain: object) -> str:
    import json

    return json.dumps(plain, separators=(",", ":"))


def _no_implicit_transactions(connection: Any, record: object) -> None:
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
    with told(engine), engine.connect().execution_options(**{_WRITES: writes}) as connection, connection.begin():
        yield connection


def rows_of(connection: Connection, table: sa.Table, keys: Sequence[str]) -> Iterator[Any]:
    """The rows of slices, however many, in a table that has a column `slice_key`."""
    for some in portions(keys, KEYS_A_STATEMENT):
        yield from connection.execute(sa.select(table).where(table.c.slice_key.in_(some)))


def create(engine: Engine, wait_seconds: float) -> None:
    """Create what is missing; any number of processes may do so at once.

    Raises:
        ConfigurationError: the database was written by a newer version, or cannot be written.
        DependencyAwayError: the database cannot be reached, or stayed locked.
    """
    with told(engine):
        if _stored_version(engine) != VERSION:
            _create(engine, wait_seconds)


def _create(engine: Engine, wait_seconds: float) -> None:
    if engine.dialect.name == "sqlite":
        _make_file(engine, wait_seconds)
    with transaction(engine, writes=True) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
        # Every version so far only added tables.
        metadata.create_all(connection)
        if connection.execute(sa.select(versions.c.version)).first() is None:
            connection.execute(versions.insert().values(version=VERSION))
        else:
            connection.execute(versions.update().values(version=VERSION))


def _stored_version(engine: Engine) -> int | None:
    path = engine.url.database
    if engine.dialect.name == "sqlite" and not Path(str(path)).exists():
        return None
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table(versions.name):
            return None
        found: int | None = connection.execute(sa.select(versions.c.version)).scalar()
    if found is not None and found > VERSION:
        raise ConfigurationError(
            f"the ledger {shown(engine.url)} was written by a newer Highwater",
            stored=f"schema version {found}",
            found=f"this Highwater knows schema version {VERSION}",
            remedy="install the newer Highwater",
        )
    return found


def _make_file(engine: Engine, wait_seconds: float) -> None:
    """The folder, and write-ahead logging: readers and a writer do not wait for each other."""
    path = Path(str(engine.url.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(engine, error.strerror or str(error)) from error
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("COMMIT")  # the mode cannot be changed within a transaction
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                connection.exec_driver_sql("BEGIN")
            return
        except DBAPIError as error:
            # The change of the mode does not wait for another process that is making it, as other statements do.
            if "locked" not in str(error.orig) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@contextmanager
def told(engine: Engine) -> Iterator[None]:
    """Say database errors in our words; `IntegrityError` passes, since callers tell by it that another was first."""
    try:
        yield
    except (HighwaterError, sa.exc.IntegrityError):
        raise
    except SQLAlchemyError as error:
        raise _translated(engine, error) from None  # the chain would repeat statement and address


# What SQLite says when waiting does not help.
_UNUSABLE = ("readonly", "unable to open", "not a database", "malformed", "no such column", "permission denied")


def _translated(engine: Engine, error: SQLAlchemyError) -> HighwaterError:
    reason = _first_line(error)
    password = engine.url.password
    if password:
        reason = reason.replace(str(password), "***")
    if engine.dialect.name == "sqlite" and any(sign in reason for sign in _UNUSABLE):
        return _unusable(engine, reason)
    return DependencyAwayError(
        f"the ledger {shown(engine.url)} does not answer",
        found=reason,
        remedy="look for a process that holds its lock, or whether its server runs; nothing was decided, so try again",
    )


def _first_line(error: SQLAlchemyError) -> str:
    text = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    return next(iter(text.strip().splitlines()), type(error).__name__)


def _unusable(engine: Engine, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"the ledger {shown(engine.url)} cannot be used",
        found=reason,
        remedy="make its folder and file writable for this user, or set HIGHWATER_LEDGER_URL to another database",
    )
