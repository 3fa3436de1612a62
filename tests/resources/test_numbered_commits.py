"""Commits by numbered intents: a killed writer's late write is skipped or recorded (I4)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from highwater.assets import current, dlq, events, raw, rejects, small_merge
from highwater.assets.commit import build_target
from highwater.commit_records import (
    parse_number,
)
from highwater.errors import DependencyUnavailableError
from highwater.resources import commit_log, commit_log_writer, numbered_commits
from highwater.resources.delta import query
from highwater.resources.ledger import Ledger
from highwater.slices import Slice
from tests.helpers.logged_commits import build_options, open_table, wait_between_commits
from tests.helpers.support import Bench, customers, order_message

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.assets.work import Work
    from highwater.resources.ledger.intents import Intent


@pytest.fixture(scope="module")
def written(module_bench: Bench) -> Bench:
    """Two slices, each with a version of one order; neither is in `current`."""
    # The last three are for a slice that one test alone plans.
    module_bench.send(order_message("o1", 1), order_message("o1", 2), *[order_message(f"o{n}", 1) for n in range(3)])
    for ordinal in range(2):
        slice_ = module_bench.plan(ordinal, p0=(ordinal, ordinal + 1))
        for stage in (raw, events, rejects, dlq):
            stage.materialise(module_bench.work(slice_))
    return module_bench


@pytest.fixture(params=["spark", "delta-rs"])
def planned(written: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Bench:
    """The two slices, for a test that changes their tables; `current` is merged by one of the two engines."""
    if request.param == "spark":
        monkeypatch.setattr(small_merge, "find_winners", lambda *_, **__: None)
    return written.copy(tmp_path)


# What happens to a write; it gets the write, and the options of its commit.
Around = Callable[[Callable[[], object], Mapping[str, str]], object]


def patch_writes(patched: pytest.MonkeyPatch, around: Around) -> None:
    """Put something around the writes of `current`, by either engine."""

    def write(real: Callable[..., object], *given: Any) -> object:
        return around(partial(real, *given), given[-1])

    for module, name in ((current, "_run_statement"), (small_merge, "merge")):
        patched.setattr(module, name, partial(write, vars(module)[name]))


class Killed(BaseException):
    """A test double for the death of the process: nothing after it runs but the end of `with` blocks."""


def table_of(bench: Bench) -> DeltaTable:
    return open_table(bench.lake, "current", bench.stream.name)


def number_in(bench: Bench) -> int:
    return bench.lake.load_commits(bench.stream.name, "current").number


def versions_of(bench: Bench) -> dict[str, int]:
    return {key: row["version"] for key, row in bench.current().items()}


def open_intents(bench: Bench) -> list[Intent]:
    return bench.ledger.intents.list_for_table(bench.stream.name, "current")


def killed_before_the_write(bench: Bench, monkeypatch: pytest.MonkeyPatch, slice_: Slice) -> Callable[[], object]:
    """Let a run of a slice die between its intent and its write; returns the write as it would come later."""
    late: list[Callable[[], object]] = []

    def die(write: Callable[[], object], _: Mapping[str, str]) -> None:
        late.append(write)
        raise Killed

    with monkeypatch.context() as patched:
        patch_writes(patched, die)
        with pytest.raises(Killed):
            current.materialise(bench.work(slice_))
    [_] = open_intents(bench)
    return late[0]


def late_merge(bench: Bench, number: int) -> None:
    """The MERGE of a dead client, which the server carries out after all."""
    path = bench.lake.build_table_path(bench.stream.name, "current")
    with numbered_commits.session_options(bench.spark, build_options(number, "late")):
        bench.spark.sql(
            f"MERGE INTO delta.`{path}` t USING (SELECT 'o1' AS key) s ON t.key = s.key WHEN MATCHED THEN DELETE"
        ).collect()


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
        with pytest.raises(DependencyUnavailableError, match="are gone"):
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
    before, complete = table_of(bench).version(), commit_log_writer.add_missing_records

    def clean_first(*given: Any) -> None:
        if table_of(bench).version() > before:
            clean_log(bench)
        complete(*given)

    with monkeypatch.context() as patched:
        patched.setattr(commit_log_writer, "add_missing_records", clean_first)
        current.materialise(bench.work(second))
    assert {*bench.lake.load_commits(bench.stream.name, "current").records} == {first.key, second.key}
    [report] = current.materialise(bench.work(first))
    assert report.note == "already followed the events"


@pytest.mark.slow
def test_the_rows_of_a_commit_whose_run_died_are_counted(planned: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over `_commits` left them out for ever."""
    bench, slice_ = planned, planned.plan(2, p0=(2, 5))
    _materialise_without_record(monkeypatch, raw.materialise, bench.work(slice_))
    raw.materialise(bench.work(slice_))
    log = bench.lake.open_stream_table(bench.stream.name, commit_log.TABLE)
    assert log is not None
    counted = query(log, f"SELECT rows FROM t WHERE \"table\" = 'raw' AND slice = '{slice_.key}' ORDER BY version")
    assert [row["rows"] for row in counted] == [3, 3], "the attempt that died, and the one after it"


def _materialise_without_record(monkeypatch: pytest.MonkeyPatch, stage: Callable[[Work], object], work: Work) -> None:
    """Commit slices in a run that dies before their records are in `_commits`."""
    with monkeypatch.context() as patched:
        patched.setattr(commit_log_writer, "add_missing_records", _die)
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
    closed: list[int] = []

    def closed_meanwhile(write: Callable[[], object], options: Mapping[str, str]) -> None:
        if not closed:
            closed.append(int(options["txnVersion"]))
            numbered_commits.close_intents(build_target(bench.work(first), "current"))
        write()

    patch_writes(monkeypatch, closed_meanwhile)
    [report] = current.materialise(bench.work(first))
    assert report.note is None, "its second try committed"
    assert number_in(bench) == closed[0] + 1
    assert versions_of(bench) == {"o1": 1}


@pytest.mark.slow
def test_a_merge_that_delta_rs_refuses_is_left_to_spark(
    written: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next try would be refused again, and the stream's table would stay behind for ever."""
    bench = written.copy(tmp_path)
    [first, second] = bench.ledger.list_slices(bench.stream.name)

    def refuse(*_: Any) -> None:
        raise DependencyUnavailableError("delta-rs cannot plan it", remedy="none")

    with monkeypatch.context() as patched:
        patched.setattr(small_merge, "merge", refuse)
        with pytest.raises(DependencyUnavailableError, match="cannot plan it"):
            current.materialise(bench.work(first))
        current.materialise(bench.work(first))
    assert versions_of(bench) == {"o1": 1}
    assert open_intents(bench) == []
    current.materialise(bench.work(second))
    assert versions_of(bench) == {"o1": 2}


@pytest.mark.slow
def test_only_a_merge_of_spark_has_a_session_of_its_own(planned: Bench, request: pytest.FixtureRequest) -> None:
    """To open one takes longer than to merge a small slice without it."""
    [first, _] = planned.ledger.list_slices(planned.stream.name)
    opened: list[str] = []

    def open_session() -> Any:
        opened.append("session")
        return planned.spark

    current.materialise(planned.work(first, open_own_session=open_session))
    assert versions_of(planned) == {"o1": 1}
    assert opened == (["session"] if "[spark]" in request.node.name else [])


@pytest.mark.slow
def test_a_restored_current_is_brought_up_to_date(planned: Bench) -> None:
    """By version and by time; RESTORE reclaims rows, and neither the number of a commit nor its fence."""
    bench, [first, second] = planned, planned.ledger.list_slices(planned.stream.name)
    path = bench.lake.build_table_path(bench.stream.name, "current")
    current.materialise(bench.work(first))
    then, at = table_of(bench), wait_between_commits()
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
