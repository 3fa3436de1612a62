"""Slices without rows are committed by delta-rs alone, and where it would not do what Spark does, by Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from dev.planted import plant
from highwater.assets import commit, small_writes
from highwater.assets.commit import CommittedSlices, commit_rows, measure_write_cost
from highwater.assets.work import Work
from highwater.errors import SupersededAttemptError
from highwater.resources.commit_log import read_number
from highwater.resources.delta_rs_writes import append_no_rows, create
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.object_store import FILE_LOG_STORE_SETTING
from highwater.slice_commits import SliceCommit
from tests.helpers.fake_session import FakeConf, FakeSession
from tests.helpers.logged_commits import build_options
from tests.helpers.support import make_stream
from tests.helpers.written_tables import a_slice

if TYPE_CHECKING:
    from highwater.resources.numbered_commits import NumberedCommit

SCHEMA = pa.schema([("slice", pa.string()), ("reason", pa.string())])


class Committing:
    """The table `rejects`, and commits of its slices; `by_spark` holds the slices whose commit Spark was asked for."""

    def __init__(self, home: Path) -> None:
        self.lake = Lake(str(home / "lake"))
        self.ledger = Ledger(f"sqlite:///{home / 'ledger.sqlite'}")
        self.path = self.lake.build_table_path("orders", "rejects")
        self.conf = FakeConf(FakeSession().conf)
        self.by_spark: list[str] = []
        create(self.path, SCHEMA, configuration={"delta.dataSkippingStatsColumns": "slice,reason"})

    def work(self, ordinal: int) -> Work:
        session, unused = FakeSession(), cast("Any", None)
        session.conf = self.conf
        slice_ = a_slice(ordinal, 10)
        self.ledger.add([slice_])
        return Work(make_stream("orders"), [slice_], cast("Any", session), self.lake, self.ledger, unused, print)

    def commit(self, ordinal: int, attempt: int = 1) -> NumberedCommit:
        work = self.work(ordinal)
        [slice_] = work.slices
        return commit_rows(
            work,
            "rejects",
            None,
            [SliceCommit(slice_, attempt, 0, {"rejects": 0})],
            CommittedSlices.read(work, "rejects"),
            files=0,
            spread="slice",
        )

    def attempts(self) -> dict[str, int]:
        found = self.lake.load_slice_commits("orders", "rejects")
        assert all(one.rows == 0 for one in found.values())
        return {key: one.attempt for key, one in found.items()}


@pytest.fixture
def committing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Committing:
    made = Committing(tmp_path)
    watch_spark(made, monkeypatch)
    return made


def watch_spark(made: Committing, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, rows: object, keys: list[str], options: Mapping[str, str], **_: object) -> None:
        made.by_spark += keys
        if read_number(DeltaTable(path)) < int(options["txnVersion"]):
            append_no_rows(DeltaTable(path), options)

    class Rows:
        def limit(self, _: int) -> Rows:
            return self

    monkeypatch.setattr(commit, "read_table_version", lambda *_: Rows())
    monkeypatch.setattr(commit, "write_slices", write)


def test_slices_without_rows_are_recorded_and_no_file_is_written(committing: Committing) -> None:
    before = read_number(DeltaTable(committing.path))
    # Entries and checkpoints, which are written with every tenth.
    done = [committing.commit(ordinal) for ordinal in range(21)]
    assert committing.attempts() == {a_slice(ordinal, 10).key: 1 for ordinal in range(21)}
    assert [one.version for one in done] == [*range(1, 22)]
    assert {one.rows[a_slice(ordinal, 10).key] for ordinal, one in enumerate(done)} == {0}
    opened = DeltaTable(committing.path)
    assert read_number(opened) == before + 21
    assert opened.file_uris() == []
    assert [*Path(committing.path).glob("*.parquet")] == []
    assert measure_write_cost(done[0]) == {"write/bytes": 0, "write/files": 0}
    assert committing.ledger.intents.list_for_table("orders", "rejects") == []
    assert committing.by_spark == []


def test_another_attempt_without_rows_follows_the_first(committing: Committing) -> None:
    committing.commit(0)
    committing.commit(0, attempt=2)
    assert committing.attempts() == {a_slice(0, 10).key: 2}
    assert committing.by_spark == []


def test_nothing_is_committed_after_another_numbered_commit(
    committing: Committing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run commits between the look at the table and the commit."""
    key = a_slice(0, 10).key

    def append_late(table: DeltaTable, options: Mapping[str, str]) -> bool:
        newest = DeltaTable(committing.path)
        append_no_rows(newest, build_options(read_number(newest) + 1, "{}"))
        return append_no_rows(table, options)

    monkeypatch.setattr(small_writes, "append_no_rows", append_late)
    with pytest.raises(SupersededAttemptError, match="another run committed to orders/rejects"):
        committing.commit(0)
    assert DeltaTable(committing.path).version() == 1
    assert committing.ledger.intents.list_for_table("orders", "rejects") == []
    monkeypatch.setattr(small_writes, "append_no_rows", append_no_rows)
    committing.commit(0)
    assert committing.attempts() == {key: 1}


def test_a_commit_of_another_program_hinders_nobody(committing: Committing, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a number comes between the look at the table and the commit, which Spark then makes."""

    def append_late(table: DeltaTable, options: Mapping[str, str]) -> bool:
        DeltaTable(committing.path).alter.set_table_description("orders that failed")
        return append_no_rows(table, options)

    monkeypatch.setattr(small_writes, "append_no_rows", append_late)
    assert committing.commit(0).version == 2
    assert committing.by_spark == [a_slice(0, 10).key]
    assert committing.ledger.intents.list_for_table("orders", "rejects") == []


def remove_log_store(made: Committing) -> None:
    del made.conf[FILE_LOG_STORE_SETTING]


def add_rows(made: Committing) -> None:
    slice_ = a_slice(0, 10)
    rows = pa.table([[slice_.key], ["invalid"]], schema=SCHEMA)
    plant(made.path, rows, [SliceCommit(slice_, 1, 1, {"rejects": 1})])


def add_property(made: Committing) -> None:
    DeltaTable(made.path).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})


@pytest.mark.parametrize("prepare", [remove_log_store, add_rows, add_property])
def test_spark_commits_what_delta_rs_would_not(committing: Committing, prepare: Callable[[Committing], None]) -> None:
    """A log store that replaces entries, rows that go, and a property that delta-rs does not follow."""
    prepare(committing)
    committing.commit(0, attempt=2)
    assert committing.by_spark == [a_slice(0, 10).key]
