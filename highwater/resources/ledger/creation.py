"""The ledger's schema at the first use of a database, and its upgrade by migrations."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from highwater.resources.ledger import revisions, schema
from highwater.resources.ledger.engine import build_unusable_error, redact_url, transaction, translate_errors
from highwater.resources.ledger.revisions import Revision, StoredRevision

# Any constant will do that nothing else in the database uses; the letters "highwate".
_ADVISORY_LOCK = 0x6869676877617465
# Dagster's storage has a table `alembic_version`, and may be in the same database.
VERSION_TABLE = "ledger_alembic_version"
MIGRATIONS = Path(__file__).with_name("migrations")
_version = sa.Table(VERSION_TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


def prepare(engine: Engine, wait_seconds: float) -> None:
    """Create the tables in an empty database, and ensure that those of another one can be used.

    A SQLite database of an older schema is upgraded where all the missing revisions are additive: that can harm no
    other process. Any number of processes may do this at once.

    Raises:
        ConfigurationError: the schema cannot be used, or the database cannot be written.
        DependencyUnavailableError: the database cannot be reached, or stayed locked.
    """
    found = find(engine)
    if found is None:
        _create(engine, wait_seconds)
        return
    missing = revisions.select_missing_revisions(found)
    if missing and engine.dialect.name == "sqlite" and all(one.additive for one in missing):
        _upgrade(engine)
        return
    revisions.ensure_usable(found, redact_url(engine.url))


def find(engine: Engine) -> StoredRevision | None:
    """The schema's revision; None where the database holds no ledger."""
    if engine.dialect.name == "sqlite" and not Path(str(engine.url.database)).exists():
        return None
    with transaction(engine, writes=False) as connection:
        return _found(connection)


def _found(connection: Connection) -> StoredRevision | None:
    inspector = sa.inspect(connection)
    if inspector.has_table(schema.revisions.name):
        return revisions.read_stored_revision(connection)
    return StoredRevision(0, 0) if inspector.has_table(schema.slices.name) else None


def upgrade(engine: Engine, wait_seconds: float) -> list[Revision]:
    """Create the schema, or apply the missing migrations, all in one transaction; returns what was applied.

    Writers wait meanwhile, and see the new schema before they write.

    Raises:
        ConfigurationError: a newer Highwater changed the schema, or the role may not change it.
        DependencyUnavailableError: the database cannot be reached, or a writer held its lock for too long.
    """
    with translate_errors(engine):
        found = find(engine)
        if found is None:
            _create(engine, wait_seconds)
            return [*revisions.REVISIONS]
        if revisions.select_missing_revisions(found):
            return _upgrade(engine)
        revisions.ensure_usable(found, redact_url(engine.url))
        return []


def _create(engine: Engine, wait_seconds: float) -> None:
    if engine.dialect.name == "sqlite":
        _make_file(engine, wait_seconds)
    with transaction(engine, writes=True) as connection:
        _lock(connection)
        if _found(connection) is None:
            schema.metadata.create_all(connection)
            _version.create(connection)
            connection.execute(_version.insert().values(version_num=build_name(revisions.get_code_revision())))
            record(connection, revisions.REVISIONS)


def _upgrade(engine: Engine) -> list[Revision]:
    from alembic import command
    from alembic.config import Config

    with transaction(engine, writes=True) as connection:
        _lock(connection)
        found = _found(connection) or StoredRevision(0, 0)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        return revisions.select_missing_revisions(found)


def _lock(connection: Connection) -> None:
    """Keep other processes from the schema, and writers from the tables, until the transaction ends."""
    if connection.dialect.name == "sqlite":
        return  # BEGIN IMMEDIATE did
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
    if sa.inspect(connection).has_table(schema.revisions.name):
        connection.exec_driver_sql(f"LOCK TABLE {schema.revisions.name} IN ACCESS EXCLUSIVE MODE")
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")  # an index over a large table takes its time


def build_name(number: int) -> str:
    """A revision's name in its file."""
    return f"{number:04}"


def record(connection: Connection, applied: tuple[Revision, ...]) -> None:
    """Record that revisions were applied, for processes that do not know them."""
    now = datetime.now(UTC)
    rows = [{"number": one.number, "additive": one.additive, "applied_at": now} for one in applied]
    connection.execute(schema.revisions.insert(), rows)


def _make_file(engine: Engine, wait_seconds: float) -> None:
    """The folder, and write-ahead logging: readers and a writer do not wait for each other."""
    path = Path(str(engine.url.database))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise build_unusable_error(engine, error.strerror or str(error)) from error
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
