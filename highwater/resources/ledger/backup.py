"""Backups of a ledger: one SQLite file with all tables, from any kind of database."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from highwater.errors import ConfigurationError, HighwaterError, IncompleteReadError
from highwater.resources.ledger import creation, revisions, schema
from highwater.resources.ledger.database import Database
from highwater.resources.ledger.engine import transaction, translate_errors

# The largest row, a slice of 1,000 partitions, has about 30 kB: 500 of them take 15 MB.
ROWS_AT_ONCE = 500
_TABLES = [table for table in schema.metadata.sorted_tables if table is not schema.revisions]


def back_up(database: Database, file: Path) -> dict[str, int]:
    """Copy a ledger into a file, as it is at one moment, while others write; returns the rows of each table.

    Args:
        database: the ledger's.
        file: the file, which must not exist.

    Raises:
        ConfigurationError: the file exists or cannot be written, or there is no ledger of this code's schema.
        IncompleteReadError: the copy does not hold all rows.
        DependencyUnavailableError: the database cannot be reached.
    """
    if file.exists():
        raise ConfigurationError(f"{file} exists", remedy="name a file that does not; a backup replaces no other one")
    _ensure_current(database)
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        copied = _copy_of_sqlite(database, partial) if _is_sqlite(database) else _copy_of_server(database, partial)
        partial.rename(file)
    except (OSError, sqlite3.Error) as error:
        raise ConfigurationError(
            f"no backup could be written to {file}", found=str(error), remedy="name a file in a folder with room"
        ) from error
    return copied


def restore(file: Path, database: Database) -> dict[str, int]:
    """Copy a backup into an empty database, all or none; returns the rows of each table.

    Args:
        file: the backup.
        database: SQLite or PostgreSQL; the backup may be from either.

    Raises:
        ConfigurationError: the file is no backup of this code's schema, or the database holds a ledger with rows.
        IncompleteReadError: the copy would not hold all rows; nothing was written.
        DependencyUnavailableError: the database cannot be reached.
    """
    source = Database(f"sqlite:///{file.absolute()}", database.wait_seconds)
    _ensure_current(source)
    with transaction(source.unchecked, writes=False) as reading, database.writing() as writing:
        if filled := [name for name, count in _count_rows(writing).items() if count]:
            raise ConfigurationError(
                f"the ledger {database.shown} holds rows already",
                stored=f"rows in {', '.join(filled[:5])}",
                remedy="point HIGHWATER_LEDGER_URL at an empty database; nothing was written",
            )
        return _copy(reading, writing)


def _ensure_current(database: Database) -> None:
    with translate_errors(database.unchecked):
        found = creation.find(database.unchecked)
    if found is None:
        raise ConfigurationError(
            f"there is no ledger in {database.shown}", remedy="name the database, or the file, that holds one"
        )
    if found.head != revisions.get_code_revision():
        raise ConfigurationError(
            f"{database.shown} has another schema than this Highwater",
            stored=f"schema revision {found.head}",
            found=f"this Highwater copies schema revision {revisions.get_code_revision()}",
            remedy="use the Highwater that wrote it, or point HIGHWATER_LEDGER_URL to it for highwater ledger upgrade",
        )


def _is_sqlite(database: Database) -> bool:
    return database.url.get_backend_name() == "sqlite"


def _copy_of_sqlite(database: Database, file: Path) -> dict[str, int]:
    source = sqlite3.connect(str(database.url.database), timeout=database.wait_seconds)
    with closing(source), closing(sqlite3.connect(file)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")  # one file, without a write-ahead log beside it
    copy = Database(f"sqlite:///{file.absolute()}", database.wait_seconds)
    with transaction(copy.unchecked, writes=False) as connection:
        return _count_rows(connection)


def _copy_of_server(database: Database, file: Path) -> dict[str, int]:
    copy = Database(f"sqlite:///{file.absolute()}", database.wait_seconds)
    with translate_errors(database.engine), database.engine.connect() as connection:
        # Every table as of the first statement's moment.
        reading = connection.execution_options(isolation_level="REPEATABLE READ")
        with reading.begin(), copy.writing() as writing:
            copied = _copy(reading, writing)
    copy.unchecked.dispose()
    with closing(sqlite3.connect(file)) as target:
        target.execute("PRAGMA journal_mode=DELETE")
    return copied


def _copy(reading: Connection, writing: Connection) -> dict[str, int]:
    expected = _count_rows(reading)
    for table in _TABLES:
        found = reading.execute(sa.select(table).execution_options(yield_per=ROWS_AT_ONCE))
        for rows in found.mappings().partitions():
            writing.execute(table.insert(), [dict(row) for row in rows])
        _continue_numbers(writing, table)
    copied = _count_rows(writing)
    if copied != expected:
        differing = {name: (expected[name], copied[name]) for name in expected if expected[name] != copied[name]}
        raise IncompleteReadError(
            "the copy of the ledger does not hold all rows",
            stored=f"rows before and after, by table: {differing}",
            remedy="nothing was written; see IncompleteReadError in the runbook",
        )
    return copied


def _continue_numbers(connection: Connection, table: sa.Table) -> None:
    """Let PostgreSQL number new rows after those that were copied."""
    column = table.autoincrement_column
    if connection.dialect.name != "postgresql" or column is None:
        return
    sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
    newest = sa.select(sa.func.max(column)).scalar_subquery()
    # Without rows the third argument is false: the first number is then 1 itself.
    connection.execute(sa.select(sa.func.setval(sequence, sa.func.coalesce(newest, 1), newest.is_not(None))))


def _count_rows(connection: Connection) -> dict[str, int]:
    count = sa.select(sa.func.count())
    return {table.name: int(connection.execute(count.select_from(table)).scalar_one()) for table in _TABLES}


def list_problems(database: Database) -> list[str]:
    """Faults of the database itself, in sentences: its revision, its schema, and SQLite's own check of the file.

    Raises:
        DependencyUnavailableError: the database cannot be reached.
    """
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with translate_errors(database.unchecked):
        found = creation.find(database.unchecked)
    if found is None:
        return [f"there is no ledger in {database.shown}; remedy: highwater ledger upgrade creates an empty one"]
    try:
        revisions.ensure_usable(found, database.shown)
    except HighwaterError as error:
        return [str(error)]
    ours = {*schema.metadata.tables}
    options = {
        "version_table": creation.VERSION_TABLE,
        "include_name": lambda name, kind, _: kind != "table" or name in ours,
    }
    with transaction(database.unchecked, writes=False) as connection:
        faults = []
        if found.head == revisions.get_code_revision():
            context = MigrationContext.configure(connection, opts=options)
            differences = compare_metadata(context, schema.metadata)
            faults = [f"the schema differs from revision {found.head}: {one}" for one in differences]
        if _is_sqlite(database):
            said = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
            faults += [f"SQLite finds its file damaged: {one}" for one in said if one != "ok"]
    return faults
