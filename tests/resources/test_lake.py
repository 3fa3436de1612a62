"""Slices read from the lake without a JVM."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dev.planted import plant
from highwater.assets.commit import ensure_table
from highwater.assets.work import Work
from highwater.commit_records import to_user_metadata
from highwater.errors import ConfigurationError, DependencyUnavailableError, SupersededAttemptError
from highwater.resources import commit_log, delta
from highwater.resources.commit_log import CommitTime, read_written
from highwater.resources.commit_log_writer import add_missing_records
from highwater.resources.delta import query
from highwater.resources.delta_rs_writes import create
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.numbered_commits import Target, commit_slices
from highwater.resources.spark_tables import create_table, read_column_name, split_columns
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

STREAM, TABLE = "orders", "raw"


def slice_(ordinal: int) -> Slice:
    return Slice(STREAM, "orders", "id", 0, ordinal, {0: OffsetRange(0, 9)}, datetime.now(UTC))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A table with a slice of three rows and one of none, whose commit records have no count of rows."""
    import pyarrow as pa

    slice_commits = [SliceCommit(slice_(n), attempt=1, rows=None) for n in range(2)]
    made = Lake(str(tmp_path))
    rows = pa.table({"slice": [slice_commits[0].key] * 3, "value": ["a", "b", "c"]})
    plant(made.build_table_path(STREAM, TABLE), rows, slice_commits, recorded=False)
    return made


def test_a_table_is_opened_without_a_question_whether_it_is_there(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an object store that is one request more, for each table that a run looks at."""
    asked: list[str] = []

    def is_table(path: str) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(delta, "is_table", is_table)
    assert lake.open_stream_table(STREAM, TABLE) is not None
    assert asked == []
    assert lake.open_stream_table(STREAM, "events") is None
    assert asked == [lake.build_table_path(STREAM, "events")]


def test_a_table_that_is_created_during_the_look_is_opened(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa

    def is_table(path: str) -> bool:
        create(path, pa.schema([("slice", pa.string())]), description="another")
        return True

    monkeypatch.setattr(delta, "is_table", is_table)
    assert lake.open_stream_table(STREAM, "events") is not None


def test_a_version_whose_entries_were_cleaned_away_is_not_an_absent_table(lake: Lake) -> None:
    """For either delta-rs has the same error."""
    from deltalake import DeltaTable

    path = lake.build_table_path(STREAM, TABLE)
    table = DeltaTable(path)
    before = table.version()
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    table.create_checkpoint()
    for entry in range(before + 1):
        Path(path, f"_delta_log/{entry:020d}.json").unlink()
    assert delta.open_table(path, before + 1) is not None
    with pytest.raises(DependencyUnavailableError):
        delta.open_table(path, before)


def test_a_table_with_deletion_vectors_is_refused(lake: Lake) -> None:
    """Somebody may enable them by hand: an erased key would stay in the files, and row counts of the log are wrong."""
    from deltalake import DeltaTable

    table = DeltaTable(lake.build_table_path(STREAM, TABLE))

    def read_opened(stream: str, name: str) -> object:
        return lake.load_commits_and_version(stream, name, None, DeltaTable(lake.build_table_path(stream, name)))

    for value in ("true", "false"):
        table.alter.set_table_properties({"delta.enableDeletionVectors": value}, raise_if_not_exists=False)
        for open_ in (lake.open_stream_table, lake.open_existing_table, read_opened):
            if value == "false":
                assert open_(STREAM, TABLE) is not None
                continue
            with pytest.raises(ConfigurationError, match="has deletion vectors") as refused:
                open_(STREAM, TABLE)
            assert "REORG TABLE" in str(refused.value.remedy)


def rows_of(lake: Lake) -> list[int | None]:
    keys = [slice_(n).key for n in range(2)]
    found = lake.load_slice_commits(STREAM, TABLE, keys)
    assert [lake.count_slice_rows(STREAM, TABLE, [key]) for key in keys] == [{key: found[key].rows} for key in keys]
    assert lake.list_slices_in_rows(STREAM, TABLE) == {keys[0]}
    assert lake.list_slice_keys(STREAM, TABLE) == {*keys}
    return [found[key].rows for key in keys]


def test_rows_are_counted_where_a_commit_record_has_none(lake: Lake) -> None:
    assert rows_of(lake) == [3, 0]


def test_a_slice_of_several_files_has_the_rows_of_all_and_the_time_of_its_commit(lake: Lake) -> None:
    """Also where a file has rows of several slices."""
    import pyarrow as pa

    path, keys = lake.build_table_path(STREAM, TABLE), [slice_(n).key for n in range(2)]
    assert [written_of(path, key).rows for key in keys] == [3, 0]
    log = Path(path) / "_delta_log" / f"{0:020d}.json"
    [committed] = [action["commitInfo"] for action in actions_of(log) if "commitInfo" in action]
    plant(path, pa.table({"slice": [*keys] * 2, "value": ["d", "e", "f", "g"]}), recorded=False)
    assert written_of(path, keys[0]) == CommitTime(5, committed["timestamp"])
    assert written_of(path, keys[1]).rows == 2


@pytest.mark.parametrize("keys", [None, [slice_(0).key]], ids=["of all slices", "of one"])
def test_rows_that_were_counted_at_the_commit_are_not_counted_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, keys: list[str] | None
) -> None:
    """The query would have every slice of the table in its text, and its count would be compared with itself."""
    opened = lake.open_existing_table(STREAM, TABLE)
    add_missing_records(opened)
    log = commit_log.open_log(opened)
    assert log is not None
    log.update(updates={"rows": "7"}, predicate=f"slice = '{slice_(0).key}'")
    log.update(updates={"rows": "0"}, predicate=f"slice = '{slice_(1).key}'")
    monkeypatch.setattr(commit_log, "count_slice_rows", lambda _, unknown: dict.fromkeys(unknown, -1))
    assert lake.load_slice_commits(STREAM, TABLE, keys)[slice_(0).key].rows == 7


def written_of(path: str, key: str) -> CommitTime:
    from deltalake import DeltaTable

    return read_written(DeltaTable(path))[key]


def actions_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def write_actions(log: Path, actions: Iterable[dict[str, Any]]) -> None:
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))


def test_rows_are_counted_where_a_file_has_no_statistics(lake: Lake) -> None:
    log = Path(lake.build_table_path(STREAM, TABLE)) / "_delta_log" / f"{0:020d}.json"
    actions = actions_of(log)
    for action in actions:
        action.get("add", {}).pop("stats", None)
    write_actions(log, actions)
    assert rows_of(lake) == [3, 0]


def test_a_table_is_read_as_a_version_has_it_and_one_that_is_gone_is_not_empty(lake: Lake) -> None:
    import shutil

    from deltalake import write_deltalake

    newest = lake.open_existing_table(STREAM, TABLE)
    write_deltalake(newest, newest.to_pyarrow_table(), mode="append")
    assert [lake.open_existing_table(STREAM, TABLE, version).version() for version in (0, 1, None)] == [0, 1, 1]
    assert [len(query(lake.open_existing_table(STREAM, TABLE, n), "SELECT 1 FROM t")) for n in (0, 1)] == [3, 6]
    with pytest.raises(DependencyUnavailableError):
        lake.open_existing_table(STREAM, TABLE, 2)
    shutil.rmtree(lake.build_table_path(STREAM, TABLE))
    for version in (0, None):
        with pytest.raises(DependencyUnavailableError, match="the table raw of orders is gone"):
            lake.open_existing_table(STREAM, TABLE, version)


def test_a_list_of_columns_is_split_outside_of_brackets() -> None:
    columns = "slice STRING, amount DECIMAL(12,2), headers ARRAY<STRUCT<key: STRING, value: BINARY>>, `a``b, c` INT"
    found = split_columns(columns.replace("b, c", "b"))
    assert found == [
        "slice STRING",
        "amount DECIMAL(12,2)",
        "headers ARRAY<STRUCT<key: STRING, value: BINARY>>",
        "`a``b` INT",
    ]
    assert [read_column_name(column) for column in [*found, "`Odd name` INT"]] == [
        "slice",
        "amount",
        "headers",
        "a`b",
        "odd name",
    ]


@pytest.mark.parametrize("said", ["FIELD_ALREADY_EXISTS", "DELTA_DUPLICATE_COLUMNS_FOUND.ADDING_COLUMNS"])
def test_a_column_that_another_run_adds_at_the_same_moment_is_no_error(lake: Lake, said: str) -> None:
    path = lake.build_table_path(STREAM, TABLE)
    asked: list[str] = []

    class FakeSparkBehindOthers:
        """Spark, where another run is ahead by one column at the first statement."""

        def sql(self, statement: str) -> None:
            asked.append(statement)
            if len(asked) == 1:
                _add_column(path, "first")
                raise RuntimeError(f"[{said}] found")
            _add_column(path, "second")

    columns = "slice STRING, first STRING, second STRING"
    create_table(FakeSparkBehindOthers(), path, columns, ["slice"])  # type: ignore[arg-type]
    assert [statement.split("COLUMNS ")[1] for statement in asked] == [
        "(first STRING, second STRING)",
        "(second STRING)",
    ]


def test_an_error_of_a_change_that_nobody_else_makes_is_reported(lake: Lake) -> None:
    class FakeRefusingSpark:
        """Spark, which refuses the statement."""

        def sql(self, statement: str) -> None:
            raise RuntimeError("no space")

    path, columns = lake.build_table_path(STREAM, TABLE), "slice STRING, first STRING"
    with pytest.raises(RuntimeError, match="no space"):
        create_table(FakeRefusingSpark(), path, columns, ["slice"])  # type: ignore[arg-type]


def test_one_of_many_concurrent_drivers_creates_the_table(tmp_path: Path) -> None:
    """A second one would give the table another identity; a driver that committed meanwhile would get a conflict."""
    from deltalake import DeltaTable

    paths, many = [str(tmp_path / str(number)) for number in range(60)], 3
    restarted = multiprocessing.get_context("spawn")
    together = restarted.Barrier(many)
    makers = [restarted.Process(target=_make_together, args=(paths, together)) for _ in range(many)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(120)
    assert [maker.exitcode for maker in makers] == [0] * many
    assert {DeltaTable(path).version() for path in paths} == {0}


def _make_together(paths: list[str], together: Barrier) -> None:
    import pyarrow as pa

    for path in paths:
        together.wait(60)
        create(path, pa.schema([("slice", pa.string())]), description="what it rests on")


def test_a_table_is_handed_on_as_it_was_opened_if_nothing_was_committed_since(lake: Lake, tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    nothing: Any = None
    work = Work(make_stream("orders"), (), nothing, lake, ledger, nothing, print)
    opened = ensure_table(work, TABLE, "slice STRING, value STRING", ["slice"])
    assert opened is not None
    keys = [slice_(n).key for n in range(2)]
    found = lake.load_commits_and_version(STREAM, TABLE, keys, opened)
    assert found == lake.load_commits_and_version(STREAM, TABLE, keys)
    assert set(found[0]) == set(keys)
    ledger.intents.open("batch", STREAM, TABLE, to_user_metadata([], 7, batch="batch", run=""), datetime.now(UTC))
    with ledger.lease("commit orders/raw", seconds=60, wait=0.0):  # its owner may commit at any moment
        assert ensure_table(work, TABLE, "slice STRING, value STRING", ["slice"]) is None


def test_a_commit_to_a_table_that_was_created_again_meanwhile_is_superseded(lake: Lake, tmp_path: Path) -> None:
    """The table that was open before still ends where the deleted one ended."""
    ledger, path = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Path(lake.build_table_path(STREAM, TABLE))
    nothing: Any = None
    target = Target(nothing, lake, ledger, STREAM, TABLE)
    opened = target.open_table()
    seen = commit_log.read_committed_slices(opened, [])

    def write(_: object) -> None:
        import pyarrow as pa

        shutil.rmtree(path)
        create(str(path), pa.schema([("slice", pa.string())]), description="another")

    with pytest.raises(SupersededAttemptError, match="another run committed"):
        commit_slices(target, seen, [], "run", write, opened=opened)
    assert len(ledger.intents.list_for_table(STREAM, TABLE)) == 1, "the next run closes it"


def test_a_table_that_lacks_nothing_asks_nothing_of_spark(lake: Lake) -> None:
    nothing: Any = None
    path = lake.build_table_path(STREAM, TABLE)
    assert create_table(nothing, path, "slice STRING", ["slice"]) is not None
    _add_column(path, "first")
    assert create_table(nothing, path, "slice STRING, first STRING", ["slice"]) is not None


def _add_column(path: str, name: str) -> None:
    from deltalake import DeltaTable, Field
    from deltalake.schema import PrimitiveType

    DeltaTable(path).alter.add_columns([Field(name, PrimitiveType("string"))])
