"""The slice commits that a table holds, whatever was restored, replaced or cleaned (I4)."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.planted import plant
from highwater.commit_records import (
    CommitRecord,
    build_spans,
    expand_spans,
    from_user_metadata,
    parse_number,
    replaces_table,
    select_newest_records,
    to_user_metadata,
)
from highwater.errors import DependencyUnavailableError
from highwater.resources import commit_log, numbered_commits
from highwater.resources.commit_log_writer import add_missing_records
from highwater.resources.delta import query
from highwater.resources.lake import Lake
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import commit_current
from tests.helpers.logged_commits import build_options, open_table, wait_between_commits

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


ONE, TWO = "orders@0000000", "orders@0000001"
SLICE = Slice("orders", "orders", "A" * 22, 0, 0, {0: OffsetRange(0, 9)}, datetime(2026, 3, 1, tzinfo=UTC))


@given(st.dictionaries(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60)), st.integers(1, 3)))
def test_spans_name_every_slice_with_its_attempt(attempts: dict[tuple[str, int], int]) -> None:
    by_key = {f"{topic}@{ordinal:07d}": attempt for (topic, ordinal), attempt in attempts.items()}
    assert expand_spans(build_spans(by_key)) == by_key


@given(
    st.lists(
        st.tuples(st.sampled_from(["commit", "replace", "restore", "foreign"]), st.integers(0, 3), st.integers(0, 30))
    )
)
def test_a_version_holds_what_its_commits_and_restores_left(steps: list[tuple[str, int, int]]) -> None:
    """A RESTORE to a version that an earlier RESTORE reclaimed brings its slices back."""
    states: list[dict[str, int]] = [{}]
    records: list[CommitRecord] = []
    restores: dict[int, int] = {}
    for version, (kind, slice_, place) in enumerate(steps, 1):
        key, state = f"a@{slice_:07d}", states[-1]
        if kind in {"commit", "replace"}:
            records.insert(place % (len(records) + 1), CommitRecord(key, version, None, "b", version=version))
            state = {key: version} if kind == "replace" else {**state, key: version}
        if kind == "replace":
            restores[version] = -1
        if kind == "restore":
            restores[version] = place % version
            state = states[place % version]
        states.append(state)
    for version, state in enumerate(states):
        assert {key: one.attempt for key, one in select_newest_records(version, records, restores).items()} == state


def test_records_come_back_from_user_metadata() -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    written = to_user_metadata([CommitRecord(ONE, 4, 10, "b", "run"), CommitRecord(TWO, 5, 20, "b", "run")], 3)
    assert from_user_metadata(written, 7, at) == [
        CommitRecord(ONE, 4, None, "b", "run", 7, at),
        CommitRecord(TWO, 5, None, "b", "run", 7, at),
    ]
    assert (parse_number(written), replaces_table(written)) == (3, False)
    assert from_user_metadata("somebody else's", 7, at) == []
    assert from_user_metadata(None, 7, at) == []
    with pytest.raises(ValueError, match="format 2"):
        from_user_metadata('{"highwater":{"format":2}}', 7, at)


def test_the_newest_commit_of_a_slice_counts_with_and_without_commits_table(lake: Lake) -> None:
    assert lake.load_commits("orders", "current").records == {}
    commit_current(lake, "orders", {ONE: 1, TWO: 1})
    commit_current(lake, "orders", {ONE: 3})
    assert lake.load_commits("orders", "current").attempts == {ONE: 3, TWO: 1}
    add_missing_records(open_table(lake, "current"))
    commit_current(lake, "orders", {TWO: 4})
    assert lake.load_commits("orders", "current").attempts == {ONE: 3, TWO: 4}
    assert lake.load_commits("orders", "current", [ONE]).attempts == {ONE: 3}
    add_missing_records(open_table(lake, "current"))
    add_missing_records(open_table(lake, "current"))
    rows = query(open_table(lake, commit_log.TABLE), "SELECT slice, attempt, version FROM t ORDER BY version, slice")
    assert [(row["slice"], row["attempt"], row["version"]) for row in rows] == [
        (ONE, 1, 0),
        (TWO, 1, 0),
        (ONE, 3, 1),
        (TWO, 4, 2),
    ], "each commit once"


@pytest.mark.parametrize("recorded", [False, True])
def test_a_restored_table_holds_what_it_held_then(lake: Lake, recorded: bool) -> None:
    """A slice whose commit a RESTORE reclaimed must be materialised again."""
    commit_current(lake, "orders", {ONE: 1})
    commit_current(lake, "orders", {ONE: 2, TWO: 1})
    open_table(lake, "current").restore(0)
    if recorded:
        add_missing_records(open_table(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1}
    commit_current(lake, "orders", {TWO: 5})
    if recorded:
        add_missing_records(open_table(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1, TWO: 5}


def test_a_commit_that_came_after_the_look_does_not_count(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records were taken from other versions when another commit came between opening the table and its log."""
    commit_current(lake, "orders", {ONE: 1})
    commit_current(lake, "orders", {TWO: 1})
    before = open_table(lake, "current")
    commit_current(lake, "orders", {ONE: 2})
    commit_current(lake, "orders", {})
    monkeypatch.setattr(Lake, "open_stream_table", lambda _, __, table: before if table == "current" else None)
    held = lake.load_commits("orders", "current")
    assert {key: (one.attempt, one.version) for key, one in held.records.items()} == {ONE: (1, 0), TWO: (1, 1)}
    assert held.version == 1


def test_a_commit_without_information_hides_no_other(lake: Lake) -> None:
    """Delta leaves it to the writer whether a commit says anything of itself."""
    commit_current(lake, "orders", {ONE: 1})
    log = Path(lake.build_table_path("orders", "current")) / "_delta_log"
    (log / f"{1:020d}.json").write_text(json.dumps({"txn": {"appId": "another", "version": 1}}) + "\n")
    commit_current(lake, "orders", {TWO: 1})
    found = lake.load_commits("orders", "current").records
    assert {key: one.version for key, one in found.items()} == {ONE: 0, TWO: 2}


@pytest.mark.parametrize("recorded", [False, True])
def test_a_restore_of_a_restore_brings_slices_back(lake: Lake, recorded: bool) -> None:
    """By time: Delta's log does not name the version."""
    commit_current(lake, "orders", {ONE: 1}, rows_of("a"))
    commit_current(lake, "orders", {TWO: 1}, rows_of("b"))
    at = wait_between_commits()
    commit_current(lake, "orders", {ONE: 2}, rows_of("c"))
    open_table(lake, "current").restore(0)
    if recorded:
        add_missing_records(open_table(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1}
    open_table(lake, "current").restore(at)
    if recorded:
        add_missing_records(open_table(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1, TWO: 1}


def clean_planted_log(path: str) -> None:
    """Leave of a table's log what Delta leaves after 30 days, where `_commits` lacks an entry that held no slice."""
    from deltalake import DeltaTable, write_deltalake

    for _ in range(2):
        write_deltalake(path, DeltaTable(path).to_pyarrow_table().slice(0, 0), mode="append")
    table = DeltaTable(path)
    table.create_checkpoint()
    for version in range(table.version()):
        (Path(path) / "_delta_log" / f"{version:020d}.json").unlink()


@pytest.mark.parametrize("table", ["raw", "metrics", "published"])
def test_an_entry_that_was_cleaned_hides_no_slice_where_each_has_a_record(lake: Lake, table: str) -> None:
    """The days of `metrics` were taken for slices without a record."""
    import pyarrow as pa

    path = lake.build_table_path("orders", table)
    day_or_slice = "2026-03-01" if table == "metrics" else ONE
    plant(path, pa.table({"slice": [day_or_slice], "value": ["a"]}), [SliceCommit(SLICE, 1, 1)])
    clean_planted_log(path)
    assert lake.load_commits("orders", table).attempts == {ONE: 1}


@pytest.mark.parametrize("table", ["raw", "published"])
def test_rows_of_a_slice_without_a_record_are_an_error_where_an_entry_was_cleaned(lake: Lake, table: str) -> None:
    """The entry may have been the slice's commit."""
    import pyarrow as pa

    path = lake.build_table_path("orders", table)
    plant(path, pa.table({"slice": [ONE, TWO], "value": ["a", "b"]}), [SliceCommit(SLICE, 1, 1)])
    clean_planted_log(path)
    with pytest.raises(DependencyUnavailableError, match=f"1 slices without a record: {TWO}"):
        lake.load_commits("orders", table)


def rows_of(key: str) -> pa.Table:
    import pyarrow as pa

    return pa.table({"key": [key], "updated_by_slice": [ONE]})


@pytest.mark.parametrize("recorded", [False, True])
def test_a_table_that_was_replaced_holds_only_the_slices_of_that_commit(lake: Lake, recorded: bool) -> None:
    commit_current(lake, "orders", {ONE: 1, TWO: 1})
    if recorded:
        add_missing_records(open_table(lake, "current"))
    commit_current(lake, "orders", {TWO: 2}, replace=True)
    assert lake.load_commits("orders", "current").attempts == {TWO: 2}
    assert lake.load_commits("orders", "current", [ONE]).attempts == {}
    add_missing_records(open_table(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {TWO: 2}


def test_a_table_that_was_deleted_and_created_again_holds_nothing(lake: Lake) -> None:
    commit_current(lake, "orders", {ONE: 1})
    add_missing_records(open_table(lake, "current"))
    shutil.rmtree(lake.build_table_path("orders", "current"))
    commit_current(lake, "orders", {TWO: 1})
    assert lake.load_commits("orders", "current").attempts == {TWO: 1}


def test_a_session_that_may_still_carry_a_number_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta would skip the second of its later writes to any other table, without an error."""

    class FakeStuckConf(dict[str, str]):
        set = dict.__setitem__

        def unset(self, name: str) -> None:
            raise ConnectionError(name)

    session, closed = SimpleNamespace(conf=FakeStuckConf()), list[object]()
    monkeypatch.setattr(numbered_commits, "close", closed.append)
    with (
        pytest.raises(ConnectionError),
        numbered_commits.session_options(cast("SparkSession", session), build_options(1, "records")),
    ):
        assert len(session.conf) == 3
    assert closed == [session]
