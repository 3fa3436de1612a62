"""Open tables are used again: what the next holder sees, when it is opened from its log, and what a look costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.errors import DependencyUnavailableError
from highwater.resources import delta, table_pool
from highwater.resources.commit_log import read_number
from highwater.resources.delta import open_table, read_commit_info
from highwater.resources.delta_rs_writes import append_at
from highwater.resources.table_pool import HEAD_BYTES, TablePool, read_entry

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from dev.object_store import ObjectStore


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pool of the test's own, and the tables that were opened rather than used again."""
    found: list[str] = []
    real = delta._open

    def open_(path: str, version: int | None) -> DeltaTable:
        found.append(path)
        return real(path, version)

    monkeypatch.setattr(delta, "_open", open_)
    monkeypatch.setattr(table_pool, "POOL", TablePool())
    return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A table of one row."""
    where = str(tmp_path / "table")
    add(where, 0)
    return where


def rows(*numbers: int) -> pa.Table:
    import pyarrow as pa

    return pa.table({"n": [*numbers]})


def add(path: str, *numbers: int) -> None:
    """Another process adds rows."""
    from deltalake import write_deltalake

    write_deltalake(path, rows(*numbers), mode="append")


def look(path: str) -> list[int]:
    table = open_table(path)
    assert table is not None
    return sorted(row["n"] for row in delta.query(table, "SELECT n FROM t"))


def test_a_table_that_nobody_holds_is_brought_to_its_newest_version(path: str, opened: list[str]) -> None:
    for number in range(1, 13):  # with a checkpoint between
        assert look(path) == [*range(number)]
        add(path, number)
    assert look(path) == [*range(13)]
    assert opened == [path]


def test_who_holds_a_table_keeps_its_version(path: str, opened: list[str]) -> None:
    first = open_table(path)
    assert first is not None
    add(path, 1)
    assert look(path) == [0, 1]
    assert (first.version(), len(delta.query(first, "SELECT n FROM t"))) == (0, 1)
    assert opened == [path] * 2
    first.update_incremental()
    add(path, 2)
    assert first.version() == 1


def test_a_table_that_its_holder_brought_on_is_used_again(path: str, opened: list[str]) -> None:
    held = open_table(path)
    assert held is not None
    add(path, 1)
    held.update_incremental()
    assert append_at(held, rows(2))
    assert held.version() == 2
    del held
    assert look(path) == [0, 1, 2]
    assert opened == [path]


def test_a_table_after_a_write_of_another_kind_is_opened(path: str, opened: list[str]) -> None:
    held = open_table(path)
    assert held is not None
    held.delete("n = 0")
    del held
    assert look(path) == []
    assert opened == [path] * 2


def test_an_open_table_is_what_a_new_look_finds_whatever_was_committed(path: str, opened: list[str]) -> None:
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    numbered = CommitProperties(app_transactions=[Transaction("highwater", 7)])
    steps: list[Callable[[], object]] = [
        lambda: write_deltalake(path, rows(1, 2), mode="append", commit_properties=numbered),
        lambda: write_deltalake(path, pa.table({"n": [3], "m": ["x"]}), mode="append", schema_mode="merge"),
        lambda: DeltaTable(path).delete("n = 1"),
        lambda: DeltaTable(path).update(updates={"m": "'y'"}, predicate="n = 2"),
        lambda: DeltaTable(path).optimize.compact(max_concurrent_tasks=1),
        lambda: DeltaTable(path).alter.set_table_properties({"delta.appendOnly": "false"}),
        lambda: DeltaTable(path).create_checkpoint(),
        lambda: DeltaTable(path).restore(2),
        lambda: write_deltalake(path, pa.table({"k": ["z"]}), mode="overwrite", schema_mode="overwrite"),
        lambda: DeltaTable.create(path, pa.schema([("n", pa.int64())]), mode="overwrite"),
        lambda: add(path, 4),
        *[lambda: add(path, 5)] * 12,
    ]
    for step in steps:
        assert open_table(path) is not None
        step()
        found, new = open_table(path), DeltaTable(path)
        assert found is not None
        assert describe(found) == describe(new)
        del found
    assert opened == [path]


def describe(table: DeltaTable) -> dict[str, object]:
    return {
        "version": table.version(),
        "columns": table.schema().to_json(),
        "metadata": str(table.metadata()),
        "files": sorted(table.file_uris()),
        "statistics": sorted(delta.add_actions(table).to_pylist(), key=lambda one: str(one["path"])),
        "rows": sorted(delta.query(table, "SELECT * FROM t"), key=str),
        "number": read_number(table),
    }


def recreate(path: str, *commits: int) -> None:
    shutil.rmtree(path)
    for number in commits:
        add(path, number)


def restore(path: str, *commits: int) -> None:
    """Put a backup of the first two versions in the table's place, and write other rows after it."""
    backup = f"{path}-backup"
    shutil.copytree(path, backup)
    for entry in sorted(Path(backup, "_delta_log").glob("*.json"))[2:]:
        entry.unlink()
    shutil.rmtree(path)
    shutil.copytree(backup, path)
    for number in commits:
        add(path, number)


@pytest.mark.parametrize("commits", [[7], [7, 8, 9], [7, 8, 9, 10]], ids=["fewer", "as many", "more"])
@pytest.mark.parametrize(("change", "kept"), [(recreate, []), (restore, [0, 1])])
def test_another_table_at_the_path_is_opened(
    path: str, opened: list[str], change: Callable[..., None], kept: list[int], commits: list[int]
) -> None:
    """Its versions may go on where those of the former one ended."""
    add(path, 1)
    add(path, 2)
    assert look(path) == [0, 1, 2]
    change(path, *commits)
    assert look(path) == [*kept, *commits]
    assert opened == [path] * 2


def test_a_restored_table_is_opened_where_the_former_one_was_brought_on(path: str) -> None:
    add(path, 1)
    assert look(path) == [0, 1]
    add(path, 2)
    assert look(path) == [0, 1, 2]
    restore(path, 7, 8)
    assert look(path) == [0, 1, 7, 8]


def test_a_table_that_is_gone_is_absent(path: str) -> None:
    assert look(path) == [0]
    shutil.rmtree(path)
    assert open_table(path) is None


def test_a_table_that_may_not_be_read_is_not_shown_as_it_was(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(path) == [0]

    def refuse(*_: object, **__: object) -> bytes:
        raise OSError("refused")

    monkeypatch.setattr(table_pool, "read_entry", refuse)
    with pytest.raises(DependencyUnavailableError, match="could not be read"):
        open_table(path)


def test_a_version_is_used_again_where_it_is_the_one_that_is_open(path: str, opened: list[str]) -> None:
    add(path, 1)
    assert look(path) == [0, 1]
    for version, times in ((1, 1), (0, 2), (1, 2)):
        table = open_table(path, version)
        assert table is not None
        assert table.version() == version
        del table
        assert len(opened) == times


def test_tables_are_kept_for_a_while_and_not_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("highwater.resources.table_pool.time.monotonic", lambda: now[0])
    pool, paths = TablePool(size=2, idle_seconds=60), [str(tmp_path / f"{n}") for n in range(3)]
    from deltalake import DeltaTable

    for path in paths:
        add(path, 0)
        pool.lend(path, DeltaTable(path))
    assert [pool.take(path) is not None for path in paths] == [False, True, True]
    now[0] = 60.0
    assert pool.take(paths[1]) is not None
    now[0] = 120.1
    assert [pool.take(path) for path in paths] == [None] * 3


def test_a_table_with_too_many_files_leaves_its_room_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltalake import DeltaTable

    monkeypatch.setattr(table_pool, "LAST_TABLES", 1)
    pool, paths = TablePool(files=2), [str(tmp_path / f"{n}") for n in range(4)]
    for path in paths:
        add(path, 0)
    for number in (1, 2):
        add(paths[1], number)
    for path in paths:
        pool.lend(path, DeltaTable(path))
    assert [pool.take(path) is not None for path in paths] == [True, False, True, True], "the second has three files"
    pool.lend(paths[1], DeltaTable(paths[1]))
    assert pool.take(paths[1]) is not None, "whatever was used last is kept"
    assert [pool.take(path) is not None for path in paths] == [False, True, True, True], "two others have room"


def test_files_are_counted_while_a_table_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is looked at all the time is never opened again."""
    from deltalake import DeltaTable

    monkeypatch.setattr(table_pool, "LAST_TABLES", 1)
    monkeypatch.setattr(table_pool, "COUNTED_EVERY", 3)
    pool, grows, other = TablePool(files=3), str(tmp_path / "grows"), str(tmp_path / "other")
    for path in (grows, other):
        add(path, 0)
        pool.lend(path, DeltaTable(path))
    kept = []
    for number in range(1, 5):
        add(grows, number)
        kept.append(pool.take(grows) is not None)
        assert pool.take(other) is not None
    assert kept == [True, True, True, False], "four files were counted in version 3"


def test_the_number_of_a_table_is_known_where_its_log_was_cleaned_since(path: str) -> None:
    """Delta cleans entries that a checkpoint replaces; who opened the table before has not read them all."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    for number in (5, 6):
        properties = CommitProperties(app_transactions=[Transaction("highwater", number)])
        write_deltalake(path, rows(number), mode="append", commit_properties=properties)
    add(path, 1)
    table = open_table(path)
    assert table is not None
    DeltaTable(path).create_checkpoint()
    for version in range(table.version()):
        Path(path, f"_delta_log/{version:020d}.json").unlink()
    assert read_number(table) == 6
    add(path, 2)
    del table
    table = open_table(path)
    assert table is not None
    assert read_number(table) == 6


@pytest.mark.parametrize("long", [False, True])
def test_what_a_commit_says_of_itself_is_read_from_an_entry_of_any_length(path: str, long: bool) -> None:
    from deltalake import CommitProperties, write_deltalake

    said = "x" * (HEAD_BYTES if long else 10)
    properties = CommitProperties(custom_metadata={"userMetadata": said})
    write_deltalake(path, rows(1), mode="append", commit_properties=properties)
    table = open_table(path)
    assert table is not None
    for of in (1, 0):
        info = read_commit_info(table, of)
        assert info is not None
        assert info.get("userMetadata") == (said if of else None)
    assert read_commit_info(table, 2) is None
    assert len(read_entry(table, 1) or b"") == min(HEAD_BYTES, Path(path, f"_delta_log/{1:020d}.json").stat().st_size)


@pytest.mark.slow
def test_on_an_object_store_a_look_costs_two_requests(store: ObjectStore, bucket: str) -> None:
    """To open the table costs three times the number and more, one after the other."""
    where = f"{bucket}/table"
    for number in range(12):
        add(where, number)

    def count(action: Callable[[], object]) -> int:
        before = len(store.requests())
        action()
        return len(store.requests()) - before

    first = count(lambda: open_table(where))
    assert count(lambda: open_table(where)) == 2
    add(where, 12)
    with_one_more = count(lambda: open_table(where))
    assert 2 < with_one_more <= 8
    assert first >= 15
    assert count(lambda: open_table(where)) == 2


@pytest.mark.slow
def test_an_append_to_an_object_store_does_not_list_the_whole_log(store: ObjectStore, bucket: str) -> None:
    """Entries that are too old leave it with a checkpoint: a log of a month has hundreds of pages."""
    where = f"{bucket}/table"
    add(where, 0)
    for number in range(1, 12):
        before, table = len(store.requests()), open_table(where)
        assert table is not None
        assert append_at(table, rows(number))
        del table
        lists = [one for one in store.requests()[before:] if "list-type=2" in one and "start-after" not in one]
        assert len(lists) == (number == 9)
