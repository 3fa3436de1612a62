"""Queries over tables without a JVM: what sessions keep from one query to the next, and how an object store is read."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.errors import DependencyUnavailableError
from highwater.resources.delta import query, query_all

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from dev.object_store import ObjectStore


def write(path: str, *numbers: int, files: int = 1, rows: int = 1) -> DeltaTable:
    """A table with these numbers, as often as it is asked for, in each of some files."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    for _ in range(files):
        write_deltalake(path, pa.table({"n": [*numbers] * rows}), mode="append")
    return DeltaTable(path)


def add_up(table: DeltaTable) -> int:
    [row] = query(table, "SELECT sum(n) AS n FROM t")
    return int(row["n"])


def test_a_name_is_another_table_in_the_next_query(tmp_path: Path) -> None:
    tables = [write(str(tmp_path / f"{n}"), n) for n in range(3)]
    assert [add_up(table) for table in tables * 2] == [0, 1, 2] * 2
    joined = query_all({"a": tables[1], "b": tables[2]}, "SELECT a.n AS a, b.n AS b FROM a, b")
    assert joined == [{"a": 1, "b": 2}]


def test_a_table_is_read_in_the_version_that_was_opened(tmp_path: Path) -> None:
    old = write(str(tmp_path), 1)
    new = write(str(tmp_path), 2)
    assert [add_up(table) for table in (old, new, old)] == [1, 3, 1]


@pytest.mark.parametrize("wrong", ["SELECT nothing FROM t", "SELECT n / 0 FROM t", "no SQL"])
def test_a_query_that_fails_leaves_nothing_to_the_next_one(tmp_path: Path, wrong: str) -> None:
    table = write(str(tmp_path), 1)
    for _ in range(2):
        with pytest.raises(DependencyUnavailableError):
            query(table, wrong)
        assert add_up(table) == 1


def test_threads_ask_at_once_under_one_name(tmp_path: Path) -> None:
    tables = [write(str(tmp_path / f"{n}"), n, rows=1000) for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(add_up, tables * 25))
    assert found == [0, 1000, 2000, 3000] * 25


@pytest.mark.slow
def test_an_object_store_is_asked_once_for_the_end_of_a_file(store: ObjectStore, bucket: str) -> None:
    """There are the places of its columns; a check asks some ten queries over the same files."""
    table = write(f"{bucket}/table", 1, files=5)

    def count() -> int:
        before = len(store.requests())
        assert add_up(table) == 5
        return len(store.requests()) - before

    assert count() > 5
    assert count() == 5


@pytest.mark.slow
def test_files_of_an_object_store_are_read_side_by_side(tmp_path: Path, bucket: str) -> None:
    """Each file is some requests, so one after the other a thousand small files would take minutes."""
    for path, side_by_side in ((str(tmp_path), False), (f"{bucket}/table", True)):
        table = write(path, *range(20_000), files=3)
        plan = str(query(table, "EXPLAIN SELECT n FROM t WHERE n > 7"))
        assert ("16 groups" in plan) == side_by_side
        assert len(query(table, "SELECT n FROM t WHERE n > 7")) == 3 * (20_000 - 8)
