"""The ledger's schema: created, upgraded, and refused by code that does not know it, before anything is written."""

from __future__ import annotations

import shutil
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from dev.postgresql import Server
from dev.processes import wait_until
from highwater.errors import ConfigurationError
from highwater.resources.ledger import Ledger, creation, revisions, schema
from highwater.resources.ledger.database import Database
from highwater.slices import OffsetRange, Slice

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
FIRST, SECOND = (Slice("orders", "orders", "A", 0, n, {0: OffsetRange(5 * n, 5 * n + 5)}, NOON) for n in range(2))


def upgrade(url: str) -> list[int]:
    database = Database(url, 5.0)
    return [one.number for one in creation.upgrade(database.unchecked, 5.0)]


def differences(url: str) -> list[object]:
    """What Alembic would have to change for the tables to be as the code has them."""
    ours = {*schema.metadata.tables, creation.VERSION_TABLE}
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        # Without the callback Alembic would call each foreign table one to be dropped.
        options = {"version_table": creation.VERSION_TABLE, "include_name": lambda n, k, _: k != "table" or n in ours}
        found: list[object] = compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata)
    return found


def rows(url: str, statement: str) -> list[tuple[object, ...]]:
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(statement)]


def execute(url: str, *statements: str) -> None:
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def of_before_revisions(url: str) -> None:
    """Make a ledger as it was before there were migrations, with a plan and without two of today's tables."""
    Ledger(url).add([FIRST])
    execute(
        url,
        *(f"DROP TABLE {name}" for name in ("publications", "gaps", "ledger_revisions", creation.VERSION_TABLE)),
        "CREATE TABLE ledger_version (version INTEGER PRIMARY KEY)",
        "INSERT INTO ledger_version VALUES (8)",
    )


Newer = Callable[[bool], AbstractContextManager[None]]


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Newer:
    """Code with one revision more; whatever runs outside of the block is the older code."""

    @contextmanager
    def made(additive: bool) -> Iterator[None]:
        folder = tmp_path / "newer"
        shutil.copytree(creation.MIGRATIONS, folder)
        number = revisions.get_code_revision() + 1
        change = "op.add_column('slices', sa.Column('note', sa.Text()))"
        if not additive:
            change = "op.execute('ALTER TABLE slices RENAME COLUMN topic_id TO id_of_topic')"
        (folder / "versions" / f"r{number:04}_newer.py").write_text(
            textwrap.dedent(
                f"""
                import sqlalchemy as sa
                from alembic import op

                revision, down_revision = "{number:04}", "{number - 1:04}"

                def upgrade():
                    {change}
                """
            )
        )
        with monkeypatch.context() as patch:
            patch.setattr(creation, "MIGRATIONS", folder)
            patch.setattr(revisions, "REVISIONS", (*revisions.REVISIONS, revisions.Revision(number, additive)))
            yield

    return made


def test_each_revision_has_its_migration_in_order() -> None:
    config = Config()
    config.set_main_option("script_location", str(creation.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    scripts = [*ScriptDirectory.from_config(config).walk_revisions()][::-1]
    assert [script.revision for script in scripts] == [creation.build_name(one.number) for one in revisions.REVISIONS]
    assert [one.number for one in revisions.REVISIONS] == [*range(1, len(scripts) + 1)]


def test_a_first_use_makes_what_the_migrations_make(each_url: str, tmp_path: Path) -> None:
    Ledger(each_url).count_slices()
    assert differences(each_url) == []
    assert upgrade(each_url) == []
    assert rows(each_url, f"SELECT * FROM {creation.VERSION_TABLE}") == [
        (creation.build_name(revisions.get_code_revision()),)
    ]


def test_the_migrations_make_the_tables_of_the_code(each_url: str) -> None:
    """From a database that has one table alone, so that each of the others is a migration's."""
    engine = Database(each_url, 5.0).unchecked
    if engine.dialect.name == "sqlite":
        Path(str(engine.url.database)).parent.mkdir()
    with engine.begin() as connection:
        schema.slices.create(connection)
    assert upgrade(each_url) == [one.number for one in revisions.REVISIONS]
    assert differences(each_url) == []
    assert rows(each_url, "SELECT number FROM ledger_revisions ORDER BY number") == [
        (n.number,) for n in revisions.REVISIONS
    ]
    assert Ledger(each_url).add([FIRST])


def test_a_comparison_sees_a_column_that_is_missing(sqlite_url: str) -> None:
    Ledger(sqlite_url).count_slices()
    execute(sqlite_url, "ALTER TABLE topics DROP COLUMN opened_by")
    assert "opened_by" in str(differences(sqlite_url))


def test_a_sqlite_ledger_from_before_revisions_goes_on(sqlite_url: str) -> None:
    of_before_revisions(sqlite_url)
    again = Ledger(sqlite_url)
    assert again.get([FIRST.key]) == [FIRST]
    assert again.add([SECOND])
    assert differences(sqlite_url) == []
    assert not sa.inspect(sa.create_engine(sqlite_url)).has_table("ledger_version")


@pytest.mark.slow
def test_a_ledger_on_a_server_from_before_revisions_asks_for_the_upgrade(postgresql: Callable[[], str]) -> None:
    url = postgresql()
    of_before_revisions(url)
    with pytest.raises(ConfigurationError) as caught:
        Ledger(url).count_slices()
    assert "highwater ledger upgrade" in caught.value.remedy
    assert upgrade(url) == [1]
    assert Ledger(url).get([FIRST.key]) == [FIRST]
    assert differences(url) == []


def test_an_old_process_goes_on_beside_an_additive_revision(each_url: str, newer: Newer) -> None:
    old = Ledger(each_url)
    assert old.add([FIRST])
    with newer(True):
        assert upgrade(each_url) == [revisions.get_code_revision()]
        assert Ledger(each_url).get([FIRST.key]) == [FIRST]
    assert old.add([SECOND])
    assert Ledger(each_url).get([SECOND.key]) == [SECOND], "an old process that begins later"


def test_an_old_process_writes_nothing_into_a_schema_it_does_not_know(each_url: str, newer: Newer) -> None:
    old = Ledger(each_url)
    assert old.add([FIRST])
    with newer(False):
        upgrade(each_url)
    for process in (old, Ledger(each_url)):  # one that ran during the upgrade, and one that begins later
        with pytest.raises(ConfigurationError) as caught:
            process.add([SECOND])
        assert f"writers must know revision {revisions.get_code_revision() + 1}" in str(caught.value.stored)
        assert f"knows schema revision {revisions.get_code_revision()}" in str(caught.value.found)
        assert "newer Highwater" in caught.value.remedy
    assert rows(each_url, "SELECT slice_key FROM slices") == [(FIRST.key,)]
    with pytest.raises(ConfigurationError, match="another schema") as caught:
        old.get([FIRST.key])
    assert "restart this process" in caught.value.remedy


def test_a_revision_that_breaks_stays_one_behind_a_later_additive_one(sqlite_url: str, newer: Newer) -> None:
    old = Ledger(sqlite_url)
    old.count_slices()
    with newer(False):
        upgrade(sqlite_url)
    later = revisions.get_code_revision() + 2
    execute(sqlite_url, f"INSERT INTO ledger_revisions VALUES ({later}, true, '2026-03-01 12:00:00.000000')")
    with pytest.raises(ConfigurationError):
        old.add([FIRST])


def test_newer_code_asks_for_the_upgrade_of_a_server(each_url: str, newer: Newer) -> None:
    """On SQLite too, where the revision breaks what older processes do."""
    Ledger(each_url).add([FIRST])
    with newer(False):
        with pytest.raises(ConfigurationError) as caught:
            Ledger(each_url).add([SECOND])
        assert "highwater ledger upgrade" in caught.value.remedy
        assert rows(each_url, "SELECT slice_key FROM slices") == [(FIRST.key,)]
        assert upgrade(each_url) == [revisions.get_code_revision()]


def test_newer_code_applies_an_additive_revision_to_sqlite_by_itself(sqlite_url: str, newer: Newer) -> None:
    Ledger(sqlite_url).add([FIRST])
    with newer(True):
        assert Ledger(sqlite_url).get([FIRST.key]) == [FIRST]
        assert rows(sqlite_url, "SELECT note FROM slices") == [(None,)]


@pytest.mark.slow
def test_newer_code_leaves_a_server_to_the_command(postgresql: Callable[[], str], newer: Newer) -> None:
    url = postgresql()
    Ledger(url).add([FIRST])
    with newer(True), pytest.raises(ConfigurationError, match="older"):
        Ledger(url).count_slices()


def test_an_upgrade_that_fails_changes_nothing(each_url: str, newer: Newer) -> None:
    Ledger(each_url).add([FIRST])
    with newer(False):
        migration = next(creation.MIGRATIONS.glob("versions/*_newer.py"))
        migration.write_text(f"{migration.read_text()}    raise ZeroDivisionError\n")
        with pytest.raises(ZeroDivisionError):
            upgrade(each_url)
    assert differences(each_url) == []
    assert Ledger(each_url).add([SECOND])


def _waiting(server: Server, url: str) -> bool:
    name = url.rsplit("/", 1)[1]
    asked = (
        f"SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database WHERE NOT granted AND datname = '{name}'"
    )
    return rows(server.url("postgres"), asked) != [(0,)]


@pytest.mark.slow
def test_an_upgrade_waits_for_a_writer(postgresql: Callable[[], str], postgresql_server: Server, newer: Newer) -> None:
    url = postgresql()
    old = Ledger(url)
    old.count_slices()
    applied: list[int] = []
    with newer(False):
        thread = threading.Thread(target=lambda: applied.extend(upgrade(url)))
        known = revisions.REVISIONS
        with old.database.engine.connect() as connection, connection.begin():
            connection.execute(sa.select(schema.revisions))  # as each transaction that writes begins
            thread.start()
            wait_until(lambda: _waiting(postgresql_server, url), 5, "the upgrade to wait")
            connection.exec_driver_sql("INSERT INTO watched VALUES ('planner', '2026-03-01')")
        thread.join()
    assert applied == [known[-1].number]
    assert rows(url, "SELECT name FROM watched") == [("planner",)]


@pytest.mark.slow
def test_a_writer_waits_for_an_upgrade_and_then_refuses(
    postgresql: Callable[[], str], postgresql_server: Server
) -> None:
    url = postgresql()
    old = Ledger(url)
    old.count_slices()
    refused: list[ConfigurationError] = []

    def write() -> None:
        try:
            old.add([FIRST])
        except ConfigurationError as error:
            refused.append(error)

    thread = threading.Thread(target=write)
    with old.database.engine.connect() as connection, connection.begin():
        creation._lock(connection)
        creation.record(connection, (revisions.Revision(revisions.get_code_revision() + 1, additive=False),))
        thread.start()
        wait_until(lambda: _waiting(postgresql_server, url), 4, "the writer to wait")
    thread.join()
    assert len(refused) == 1
    assert rows(url, "SELECT * FROM slices") == []
