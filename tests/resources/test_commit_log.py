"""`_commits` and named commits: one write per batch, whatever becomes of its writer (I4)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.planted import plant
from highwater.assets import current, dlq, events, raw, rejects
from highwater.assets.commit import build_target
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
from highwater.errors import DependencyAwayError
from highwater.resources import commit_log, commit_log_writer, numbered_commits
from highwater.resources.commit_log_writer import complete
from highwater.resources.delta import query
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import commit_current
from tests.helpers.support import Bench, customers, order_message

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work
    from highwater.resources.ledger.intents import Intent

ONE, TWO = "orders@0000000", "orders@0000001"
SLICE = Slice("orders", "orders", "A" * 22, 0, 0, {0: OffsetRange(0, 9)}, datetime(2026, 3, 1, tzinfo=UTC))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def opened(lake: Lake, table: str, stream: str = "orders") -> DeltaTable:
    found = lake.open_stream_table(stream, table)
    assert found is not None
    return found


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
    complete(opened(lake, "current"))
    commit_current(lake, "orders", {TWO: 4})
    assert lake.load_commits("orders", "current").attempts == {ONE: 3, TWO: 4}
    assert lake.load_commits("orders", "current", [ONE]).attempts == {ONE: 3}
    complete(opened(lake, "current"))
    complete(opened(lake, "current"))
    rows = query(opened(lake, commit_log.TABLE), "SELECT slice, attempt, version FROM t ORDER BY version, slice")
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
    opened(lake, "current").restore(0)
    if recorded:
        complete(opened(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1}
    commit_current(lake, "orders", {TWO: 5})
    if recorded:
        complete(opened(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1, TWO: 5}


def test_a_commit_that_came_after_the_look_does_not_count(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records were taken from other versions when another commit came between opening the table and its log."""
    commit_current(lake, "orders", {ONE: 1})
    commit_current(lake, "orders", {TWO: 1})
    before = opened(lake, "current")
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
    at = between_commits()
    commit_current(lake, "orders", {ONE: 2}, rows_of("c"))
    opened(lake, "current").restore(0)
    if recorded:
        complete(opened(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1}
    opened(lake, "current").restore(at)
    if recorded:
        complete(opened(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {ONE: 1, TWO: 1}


def between_commits() -> datetime:
    """A moment after one commit and before the next, by the clock's milliseconds."""
    time.sleep(0.02)
    now = datetime.now(UTC)
    time.sleep(0.02)
    return now


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
    with pytest.raises(DependencyAwayError, match=f"1 slices without a record: {TWO}"):
        lake.load_commits("orders", table)


def rows_of(key: str) -> pa.Table:
    import pyarrow as pa

    return pa.table({"key": [key], "updated_by_slice": [ONE]})


@pytest.mark.parametrize("recorded", [False, True])
def test_a_table_that_was_replaced_holds_only_the_slices_of_that_commit(lake: Lake, recorded: bool) -> None:
    commit_current(lake, "orders", {ONE: 1, TWO: 1})
    if recorded:
        complete(opened(lake, "current"))
    commit_current(lake, "orders", {TWO: 2}, replace=True)
    assert lake.load_commits("orders", "current").attempts == {TWO: 2}
    assert lake.load_commits("orders", "current", [ONE]).attempts == {}
    complete(opened(lake, "current"))
    assert lake.load_commits("orders", "current").attempts == {TWO: 2}


def test_a_table_that_was_deleted_and_created_again_holds_nothing(lake: Lake) -> None:
    commit_current(lake, "orders", {ONE: 1})
    complete(opened(lake, "current"))
    shutil.rmtree(lake.build_table_path("orders", "current"))
    commit_current(lake, "orders", {TWO: 1})
    assert lake.load_commits("orders", "current").attempts == {TWO: 1}


def test_a_session_that_may_still_carry_a_number_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta would skip the second of its later writes to any other table, without an error."""

    class Conf(dict[str, str]):
        set = dict.__setitem__

        def unset(self, name: str) -> None:
            raise ConnectionError(name)

    session, closed = SimpleNamespace(conf=Conf()), list[object]()
    monkeypatch.setattr(numbered_commits, "close", closed.append)
    with (
        pytest.raises(ConnectionError),
        numbered_commits.session_options(cast("SparkSession", session), options_of(1, "records")),
    ):
        assert len(session.conf) == 3
    assert closed == [session]


# With Spark


@pytest.fixture
def planned(bench: Bench) -> Bench:
    """Two slices, each with a version of one order; neither is in `current`."""
    bench.send(order_message("o1", 1), order_message("o1", 2))
    for ordinal in range(2):
        slice_ = bench.plan(ordinal, p0=(ordinal, ordinal + 1))
        for stage in (raw, events, rejects, dlq):
            stage.materialise(bench.work(slice_))
    return bench


class Killed(BaseException):
    """A test double for the death of the process: nothing after it runs but the end of `with` blocks."""


def table_of(bench: Bench) -> DeltaTable:
    return opened(bench.lake, "current", bench.stream.name)


def number_in(bench: Bench) -> int:
    return bench.lake.load_commits(bench.stream.name, "current").number


def versions_of(bench: Bench) -> dict[str, int]:
    return {key: row["version"] for key, row in bench.current().items()}


def open_intents(bench: Bench) -> list[Intent]:
    return bench.ledger.intents.list_for_table(bench.stream.name, "current")


def killed_before_the_write(bench: Bench, monkeypatch: pytest.MonkeyPatch, slice_: Slice) -> Callable[[], None]:
    """Let a run of a slice die between its intent and its write; returns the write as it would come later."""
    late: list[Callable[[], None]] = []

    def die(work: Any, statement: str, options: Any) -> None:
        late.append(lambda: merge(work, statement, options))
        raise Killed

    merge = current._run_statement
    with monkeypatch.context() as patched:
        patched.setattr(current, "_run_statement", die)
        with pytest.raises(Killed):
            current.materialise(bench.work(slice_))
    [_] = open_intents(bench)
    return late[0]


def late_merge(bench: Bench, number: int) -> None:
    """The MERGE of a dead client, which the server carries out after all."""
    path = bench.lake.build_table_path(bench.stream.name, "current")
    with numbered_commits.session_options(bench.spark, options_of(number, "late")):
        bench.spark.sql(
            f"MERGE INTO delta.`{path}` t USING (SELECT 'o1' AS key) s ON t.key = s.key WHEN MATCHED THEN DELETE"
        ).collect()


def options_of(number: int, metadata: str) -> dict[str, str]:
    return {"txnAppId": commit_log.APP, "txnVersion": str(number), "userMetadata": metadata}


@pytest.mark.slow
def test_an_intent_of_a_killed_run_is_closed_and_its_late_write_is_skipped(
    planned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MERGE of a dead client that begins after the retry must not bring anything into the table."""
    bench, [first, _] = planned, planned.ledger.list_slices(planned.stream.name)
    killed_before_the_write(bench, monkeypatch, first)
    [intent] = open_intents(bench)
    number = parse_number(intent.user_metadata)
    assert number_in(bench) == number - 1
    current.close_open_intents(bench.work(first))
    assert open_intents(bench) == []
    assert number_in(bench) == number, "closed"
    before = table_of(bench).version()
    late_merge(bench, number)
    assert table_of(bench).version() == before, "the history has no entry of the late write"

    current.materialise(bench.work(first))
    before = table_of(bench).version()
    late_merge(bench, number)
    late_merge(bench, number + 1)
    assert table_of(bench).version() == before
    assert versions_of(bench) == {"o1": 1}


@pytest.mark.slow
def test_a_late_write_into_a_table_that_was_deleted_and_created_again_is_skipped(
    planned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)
    current.materialise(bench.work(first))
    late = killed_before_the_write(bench, monkeypatch, second)
    shutil.rmtree(bench.lake.build_table_path(bench.stream.name, "current"))
    current.materialise(bench.work(first))
    before = table_of(bench).version()
    late()
    assert table_of(bench).version() == before
    assert versions_of(bench) == {"o1": 1}


@pytest.mark.slow
def test_a_write_that_commits_while_it_is_closed_is_recorded(planned: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two commits: here the MERGE of the dead run, between the closer's look and its empty commit."""
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)
    late = killed_before_the_write(bench, monkeypatch, first)
    close, before = numbered_commits._take_number, table_of(bench).version()

    def meets(target: Any, number: int) -> None:
        late()
        close(target, number)

    monkeypatch.setattr(numbered_commits, "_take_number", meets)
    [report] = current.materialise(bench.work(first))
    assert report.note == "already followed the events"
    assert table_of(bench).version() == before + 1, "the empty commit was skipped"
    current.materialise(bench.work(second))
    assert versions_of(bench) == {"o1": 2}
    log = bench.lake.open_stream_table(bench.stream.name, commit_log.TABLE)
    assert log is not None
    found = query(log, "SELECT slice FROM t WHERE slice IS NOT NULL AND \"table\" = 'current' ORDER BY version")
    assert [row["slice"] for row in found] == [first.key, second.key]


@pytest.mark.slow
def test_a_write_whose_ledger_was_lost_meanwhile_commits_nothing(
    planned: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new ledger knows neither intent nor lease of the run that hung: the table alone can fence it."""
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)
    late = killed_before_the_write(bench, monkeypatch, second)
    lost = bench.ledger
    other = Ledger(f"sqlite:///{tmp_path / 'rebuilt.sqlite'}")
    other.add([first, second])
    other.allocate_attempts([first.key, second.key])
    bench.ledger = other
    bench.materialise(first, second)  # finishes both, as they were decided
    assert versions_of(bench) == {"o1": 2}
    customers(bench.lake, [])
    bench.materialise(first, second)  # materialised again: their events are rejects now
    assert versions_of(bench) == {}
    before = table_of(bench).version()
    late()
    assert table_of(bench).version() == before, "the write is not in the history"
    assert versions_of(bench) == {}
    bench.ledger = lost
    assert len(open_intents(bench)) == 1
    [report] = current.materialise(bench.work(second))
    assert report.note == "already followed the events"
    assert open_intents(bench) == []
    assert versions_of(bench) == {}


@pytest.mark.slow
@pytest.mark.parametrize("aged", [False, True])
def test_a_commit_whose_run_died_before_its_record_is_completed(
    planned: Bench, monkeypatch: pytest.MonkeyPatch, aged: bool
) -> None:
    """Also when Delta's log no longer has the entry: the number of the commit is in the checkpoint."""
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)

    _materialise_without_record(monkeypatch, current.materialise, bench.work(first))
    if aged:
        clean_log(bench)
    before = table_of(bench).version()
    if aged:
        with pytest.raises(DependencyAwayError, match="are gone"):
            bench.lake.load_commits(bench.stream.name, "current")
    [report] = current.materialise(bench.work(first))
    assert report.note == "already followed the events"
    assert report.delta_version == before, "nothing was written"
    assert open_intents(bench) == []
    current.materialise(bench.work(second))
    assert versions_of(bench) == {"o1": 2}
    log = bench.lake.open_stream_table(bench.stream.name, commit_log.TABLE)
    assert log is not None
    found = query(log, "SELECT slice, attempt, ranges, run FROM t WHERE \"table\" = 'current' ORDER BY slice")
    assert [(row["slice"], row["ranges"]) for row in found] == [
        (slice_.key, [{"partition": p, "start": r.start, "end": r.end} for p, r in slice_.ranges.items()])
        for slice_ in (first, second)
    ]


@pytest.mark.slow
def test_a_commit_without_record_and_intent_is_recorded_before_the_next_one(
    planned: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next commit may clean Delta's log of the entry, and a lost ledger knows no intent."""
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)
    _materialise_without_record(monkeypatch, current.materialise, bench.work(first))
    bench.ledger = Ledger(f"sqlite:///{tmp_path / 'rebuilt.sqlite'}")
    bench.ledger.add([first, second])
    bench.ledger.allocate_attempts([first.key, second.key])
    before, complete = table_of(bench).version(), commit_log_writer.complete

    def clean_first(*given: Any) -> None:
        if table_of(bench).version() > before:
            clean_log(bench)
        complete(*given)

    with monkeypatch.context() as patched:
        patched.setattr(commit_log_writer, "complete", clean_first)
        current.materialise(bench.work(second))
    assert {*bench.lake.load_commits(bench.stream.name, "current").records} == {first.key, second.key}
    [report] = current.materialise(bench.work(first))
    assert report.note == "already followed the events"


@pytest.mark.slow
def test_the_rows_of_a_commit_whose_run_died_are_counted(planned: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over `_commits` left them out for ever."""
    bench = planned
    bench.send(*[order_message(f"o{n}", 1) for n in range(3)])
    slice_ = bench.plan(2, p0=(2, 5))
    _materialise_without_record(monkeypatch, raw.materialise, bench.work(slice_))
    raw.materialise(bench.work(slice_))
    log = bench.lake.open_stream_table(bench.stream.name, commit_log.TABLE)
    assert log is not None
    counted = query(log, f"SELECT rows FROM t WHERE \"table\" = 'raw' AND slice = '{slice_.key}' ORDER BY version")
    assert [row["rows"] for row in counted] == [3, 3], "the attempt that died, and the one after it"


def _materialise_without_record(monkeypatch: pytest.MonkeyPatch, stage: Callable[[Work], object], work: Work) -> None:
    """Commit slices in a run that dies before their records are in `_commits`."""
    with monkeypatch.context() as patched:
        patched.setattr(commit_log_writer, "complete", _die)
        with pytest.raises(Killed):
            stage(work)


def _die(*_: Any) -> Any:
    raise Killed


def clean_log(bench: Bench) -> None:
    """Leave of the table's log a checkpoint and what is needed to read it, as Delta does with entries of 30 days."""
    from deltalake import write_deltalake

    # A commit without records of ours: the newest entry always stays.
    write_deltalake(table_of(bench), table_of(bench).to_pyarrow_table().slice(0, 0), mode="append")
    table_of(bench).create_checkpoint()
    log = Path(bench.lake.build_table_path(bench.stream.name, "current")) / "_delta_log"
    for version in range(table_of(bench).version()):
        (log / f"{version:020d}.json").unlink()


@pytest.mark.slow
def test_an_intent_without_a_write_is_no_record_where_the_log_was_cleaned(
    planned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice must not count as held: its rows are not there."""
    bench, [first, _] = planned, planned.ledger.list_slices(planned.stream.name)
    killed_before_the_write(bench, monkeypatch, first)
    clean_log(bench)
    [report] = current.materialise(bench.work(first))
    assert report.note is None
    assert versions_of(bench) == {"o1": 1}


@pytest.mark.slow
def test_a_writer_whose_intent_was_closed_looks_again(planned: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hung for longer than its lease finds its number taken, and commits nothing under it."""
    bench, [first, _] = planned, planned.ledger.list_slices(planned.stream.name)
    real = current._run_statement
    closed: list[int] = []

    def closed_meanwhile(work: Any, statement: str, options: Any) -> None:
        if not closed:
            closed.append(int(options["txnVersion"]))
            numbered_commits.close_intents(build_target(work, "current"))
        real(work, statement, options)

    monkeypatch.setattr(current, "_run_statement", closed_meanwhile)
    [report] = current.materialise(bench.work(first))
    assert report.note is None, "its second try committed"
    assert number_in(bench) == closed[0] + 1
    assert versions_of(bench) == {"o1": 1}


@pytest.mark.slow
def test_a_restored_current_is_brought_up_to_date(planned: Bench) -> None:
    """By version and by time; RESTORE reclaims rows, and neither the number of a commit nor its fence."""
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)
    path = bench.lake.build_table_path(bench.stream.name, "current")
    current.materialise(bench.work(first))
    then, at = table_of(bench), between_commits()
    current.materialise(bench.work(second))
    assert versions_of(bench) == {"o1": 2}
    for target in (f"VERSION AS OF {then.version()}", f"TIMESTAMP AS OF '{at:%Y-%m-%d %H:%M:%S.%f}'"):
        bench.spark.sql(f"RESTORE TABLE delta.`{path}` TO {target}").collect()
        assert versions_of(bench) == {"o1": 1}
        assert bench.lake.load_commits(bench.stream.name, "current").attempts.keys() == {first.key}
        before = table_of(bench).version()
        late_merge(bench, number_in(bench))
        assert table_of(bench).version() == before
        current.materialise(bench.work(first, second))
        assert versions_of(bench) == {"o1": 2}
        assert bench.failing() == {}
