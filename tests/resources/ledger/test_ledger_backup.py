"""Backups of the ledger: every row comes back, into SQLite or PostgreSQL; and what `verify` says of a ledger."""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from dev.processes import wait_until
from highwater.errors import ConfigurationError
from highwater.orchestration.checking.ledger_comparison import compare
from highwater.orchestration.cli.main import main
from highwater.plans import Loss
from highwater.resources.ledger import Ledger, revisions, schema
from highwater.resources.ledger.backup import ROWS_AT_ONCE, back_up, list_problems, restore
from highwater.resources.ledger.database import Database
from highwater.slices import OffsetRange
from tests.helpers.world import FIRST, World

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
# More than one batch of rows.
MANY = ROWS_AT_ONCE + 3


def value(column: sa.Column[Any], number: int) -> Any:
    kinds: list[tuple[type, Any]] = [
        (schema.UtcDateTime, NOON + timedelta(seconds=number)),
        (sa.Boolean, number % 2 == 0),
        (sa.JSON, {"0": [number, None, "ä"]}),
        (sa.Float, number + 0.25),
        (sa.BigInteger, 2**40 + number),
        (sa.Integer, number + 1),
        (sa.String, f"{column.name} ä {number}"),
    ]
    return next(made for kind, made in kinds if isinstance(column.type, kind))


def fill(url: str) -> dict[str, int]:
    """Rows in every table, with a value in every column but the numbers that the database gives."""
    database, counts = Database(url, 5.0), {}
    with database.writing() as connection:
        for table in schema.metadata.sorted_tables:
            if table is schema.revisions:
                continue
            counts[table.name] = MANY if table is schema.slices else 3
            columns = [column for column in table.columns if column is not table.autoincrement_column]
            rows = [{c.name: value(c, number) for c in columns} for number in range(counts[table.name])]
            connection.execute(table.insert(), rows)
    return counts


def contents(url: str) -> dict[str, list[tuple[Any, ...]]]:
    with Database(url, 5.0).reading() as connection:
        return {
            table.name: sorted(tuple(map(repr, row)) for row in connection.execute(sa.select(table)))
            for table in schema.metadata.sorted_tables
            if table is not schema.revisions
        }


def test_a_backup_holds_every_row_and_is_restored(each_url: str, tmp_path: Path) -> None:
    counts, file = fill(each_url), tmp_path / "backup.sqlite"
    assert back_up(Database(each_url, 5.0), file) == counts
    assert [path.name for path in tmp_path.glob("backup*")] == ["backup.sqlite"], "one file, no log beside it"
    restored = f"sqlite:///{tmp_path / 'restored.sqlite'}"
    assert restore(file, Database(restored, 5.0)) == counts
    assert contents(restored) == contents(each_url)
    assert list_problems(Database(restored, 5.0)) == []


@pytest.mark.slow
def test_a_backup_moves_a_ledger_to_a_server(pgbouncer: Callable[[], str], sqlite_url: str, tmp_path: Path) -> None:
    counts, url = fill(sqlite_url), pgbouncer()
    back_up(Database(sqlite_url, 5.0), tmp_path / "backup.sqlite")
    assert restore(tmp_path / "backup.sqlite", Database(url, 5.0)) == counts
    assert contents(url) == contents(sqlite_url)
    loss = Loss("orders", "orders", 0, 0, OffsetRange(900, 901), "expired", "ann", NOON)
    assert Ledger(url).record_loss([loss]), "its number is a new one"
    assert list_problems(Database(url, 5.0)) == []


def test_a_backup_is_of_one_moment(each_url: str, tmp_path: Path) -> None:
    """Each transaction of the writer adds a row to two tables; a copy has as many of both."""
    database, done = Database(each_url, 5.0), threading.Event()

    def write() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            with database.writing() as connection:
                connection.execute(schema.leases.insert().values(name=f"l{number}", owner="o", until=1.0))
                connection.execute(schema.watched.insert().values(name=f"w{number}", at=NOON))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_until(lambda: _count(database, schema.watched) > 5, 30, "the writer to write")
        copies = [back_up(Database(each_url, 5.0), tmp_path / f"{number}.sqlite") for number in range(3)]
    finally:
        done.set()
        writer.join()
    assert all(copy["leases"] == copy["watched"] > 5 for copy in copies)


def _count(database: Database, table: sa.Table) -> int:
    with database.reading() as connection:
        return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())


@pytest.mark.slow
def test_numbers_of_an_empty_table_begin_with_one(
    postgresql: Callable[[], str], sqlite_url: str, tmp_path: Path
) -> None:
    Ledger(sqlite_url).count_slices()
    url = postgresql()
    back_up(Database(sqlite_url, 5.0), tmp_path / "backup.sqlite")
    restore(tmp_path / "backup.sqlite", Database(url, 5.0))
    Ledger(url).record_loss([Loss("orders", "orders", 0, 0, OffsetRange(0, 1), "expired", "ann", NOON)])
    with Database(url, 5.0).reading() as connection:
        assert connection.execute(sa.select(schema.losses.c.id)).scalars().all() == [1]


def test_a_backup_replaces_no_file_and_no_ledger(sqlite_url: str, tmp_path: Path) -> None:
    fill(sqlite_url)
    file = tmp_path / "backup.sqlite"
    back_up(Database(sqlite_url, 5.0), file)
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match="exists"):
        back_up(Database(sqlite_url, 5.0), file)
    assert file.read_bytes() == before
    with pytest.raises(ConfigurationError, match="holds rows already"):
        restore(file, Database(sqlite_url, 5.0))


def test_a_file_that_is_no_backup_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    target = tmp_path / "target.sqlite"
    for file in (tmp_path / "absent.sqlite", tmp_path / "other.sqlite"):
        if file.name == "other.sqlite":
            sqlite3.connect(file).execute("CREATE TABLE other (x INTEGER)")
        with pytest.raises(ConfigurationError, match="no ledger"):
            restore(file, Database(f"sqlite:///{target}", 5.0))
    assert not (tmp_path / "absent.sqlite").exists()
    assert not target.exists()


def test_a_backup_of_another_schema_is_refused(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(sqlite_url)
    back_up(Database(sqlite_url, 5.0), tmp_path / "backup.sqlite")
    newer = revisions.Revision(revisions.get_code_revision() + 1, additive=True)
    monkeypatch.setattr(revisions, "REVISIONS", (*revisions.REVISIONS, newer))
    with pytest.raises(ConfigurationError, match="another schema"):
        restore(tmp_path / "backup.sqlite", Database(f"sqlite:///{tmp_path / 'target.sqlite'}", 5.0))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Tables and ledger that agree; the decisions are of attempt 2."""
    made = World(tmp_path)
    made.write()
    for _ in range(2):
        made.ledger.allocate_attempts(made.keys)
    return made


def test_a_ledger_that_agrees_with_the_lake_is_as_it_should_be(world: World) -> None:
    assert compare(world.ledger, world.lake, world.stream) == []


def test_a_ledger_without_a_committed_slice_is_found(world: World) -> None:
    with world.ledger.database.writing() as connection:
        connection.execute(schema.slices.delete().where(schema.slices.c.slice_key == FIRST.key))
    found = compare(world.ledger, world.lake, world.stream)
    assert any(FIRST.key in line and "rebuild-ledger" in line for line in found)


def test_a_ledger_that_is_older_than_the_lake_is_found(world: World) -> None:
    """It would give out an attempt number a second time."""
    with world.ledger.database.writing() as connection:
        connection.execute(schema.slices.update().where(schema.slices.c.slice_key == FIRST.key).values(attempt=1))
    [line] = compare(world.ledger, world.lake, world.stream)
    assert f"1 slices were committed under attempts that the ledger did not issue: {FIRST.key}" in line
    assert "has attempt 2 of the first, the ledger issued 1" in line


def test_a_plan_that_was_changed_is_found(world: World) -> None:
    ranges = {str(partition): [r.start, r.end + 1] for partition, r in FIRST.ranges.items()}
    with world.ledger.database.writing() as connection:
        connection.execute(schema.slices.update().where(schema.slices.c.slice_key == FIRST.key).values(ranges=ranges))
    [line] = compare(world.ledger, world.lake, world.stream)
    assert FIRST.key in line
    wider = replace(FIRST, ranges={p: OffsetRange(r.start, r.end + 1) for p, r in FIRST.ranges.items()})
    assert f"the ledger says {wider.offsets} offsets" in line
    assert f"raw {FIRST.offsets} of" in line


def test_the_commands_work_on_the_ledger_of_the_settings(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", str(world.ledger.database.url))
    monkeypatch.setenv("HIGHWATER_LAKE", world.lake.root)
    file, restored = str(tmp_path / "backup.sqlite"), f"sqlite:///{tmp_path / 'restored.sqlite'}"

    def run(*words: str) -> tuple[int, Any]:
        done = CliRunner().invoke(main, ["ledger", *words, "--json"])
        return done.exit_code, json.loads(done.stdout) if done.stdout else done.stderr

    assert run("upgrade") == (0, {"applied": [], "revision": revisions.get_code_revision()})
    assert run("backup", file)[1]["rows"]["slices"] == len(world.slices)
    assert run("verify", "orders") == (0, {"schema": [], "orders": []})
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", restored)
    status, found = run("verify", "orders")
    assert (status, "no ledger" in found["schema"][0]) == (2, True)
    assert run("upgrade") == (
        0,
        {"applied": [n.number for n in revisions.REVISIONS], "revision": revisions.get_code_revision()},
    )
    status, found = run("verify", "orders")
    assert (status, found["schema"]) == (2, [])
    assert any("slices that the ledger does not know" in line for line in found["orders"])
    assert run("restore", file)[0] == 0
    assert run("verify", "orders") == (0, {"schema": [], "orders": []})
    assert run("restore", file)[0] == 2
