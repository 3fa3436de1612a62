"""`_commits` and named commits: one write per batch, whatever becomes of its writer (I4)."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assets import current, dlq, events, raw, rejects
from highwater.commit_records import (
    CommitRecord,
    attempts_of,
    from_user_metadata,
    spans_of,
    to_user_metadata,
)
from resources import commit_log
from resources.commit_log import committed, complete
from resources.lake import Lake, query
from resources.ledger import Ledger
from tests.commits import commit_current
from tests.support import Bench, order_message

if TYPE_CHECKING:
    from deltalake import DeltaTable

ONE, TWO = "orders@0000000", "orders@0000001"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def opened(lake: Lake, table: str) -> DeltaTable:
    found = lake.table("orders", table)
    assert found is not None
    return found


@given(st.dictionaries(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60)), st.integers(1, 3)))
def test_spans_name_every_slice_with_its_attempt(attempts: dict[tuple[str, int], int]) -> None:
    by_key = {f"{topic}@{ordinal:07d}": attempt for (topic, ordinal), attempt in attempts.items()}
    assert attempts_of(spans_of(by_key)) == by_key


def test_records_come_back_from_user_metadata() -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    written = to_user_metadata([CommitRecord(ONE, 4, 10, "b", "run"), CommitRecord(TWO, 5, 20, "b", "run")])
    assert from_user_metadata(written, 7, at) == [
        CommitRecord(ONE, 4, None, "b", "run", 7, at),
        CommitRecord(TWO, 5, None, "b", "run", 7, at),
    ]
    assert from_user_metadata("somebody else's", 7, at) == []
    assert from_user_metadata(None, 7, at) == []
    with pytest.raises(ValueError, match="format 2"):
        from_user_metadata('{"highwater":{"format":2}}', 7, at)


def test_the_newest_commit_of_a_slice_counts_with_and_without_commits_table(lake: Lake, ledger: Ledger) -> None:
    assert committed(lake, "orders", "current").records == {}
    commit_current(lake, "orders", {ONE: 1, TWO: 1})
    commit_current(lake, "orders", {ONE: 3})
    assert committed(lake, "orders", "current").attempts == {ONE: 3, TWO: 1}
    complete(lake, ledger, "orders", "current")
    commit_current(lake, "orders", {TWO: 4})
    assert committed(lake, "orders", "current").attempts == {ONE: 3, TWO: 4}
    assert committed(lake, "orders", "current", [ONE]).attempts == {ONE: 3}
    complete(lake, ledger, "orders", "current")
    complete(lake, ledger, "orders", "current")
    rows = query(opened(lake, commit_log.TABLE), "SELECT slice, attempt, version FROM t ORDER BY version, slice")
    assert [(row["slice"], row["attempt"], row["version"]) for row in rows] == [
        (ONE, 1, 0),
        (TWO, 1, 0),
        (ONE, 3, 1),
        (TWO, 4, 2),
    ], "each commit once"


@pytest.mark.parametrize("recorded", [False, True])
def test_a_restored_table_holds_what_it_held_then(lake: Lake, ledger: Ledger, recorded: bool) -> None:
    """A slice whose commit a RESTORE took back must be materialised again."""
    commit_current(lake, "orders", {ONE: 1})
    commit_current(lake, "orders", {ONE: 2, TWO: 1})
    opened(lake, "current").restore(0)
    if recorded:
        complete(lake, ledger, "orders", "current")
    assert committed(lake, "orders", "current").attempts == {ONE: 1}
    commit_current(lake, "orders", {TWO: 5})
    if recorded:
        complete(lake, ledger, "orders", "current")
    assert committed(lake, "orders", "current").attempts == {ONE: 1, TWO: 5}


def test_a_table_that_was_deleted_and_created_again_holds_nothing(lake: Lake, ledger: Ledger) -> None:
    commit_current(lake, "orders", {ONE: 1})
    complete(lake, ledger, "orders", "current")
    shutil.rmtree(lake.path("orders", "current"))
    commit_current(lake, "orders", {TWO: 1})
    assert committed(lake, "orders", "current").attempts == {TWO: 1}


# With Spark


@pytest.fixture
def planned(bench: Bench) -> Bench:
    """Two slices, each with a version of one order; neither is in `current`."""
    bench.send(order_message("o1", 1), order_message("o1", 2))
    for ordinal in range(2):
        piece = bench.plan(ordinal, p0=(ordinal, ordinal + 1))
        for stage in (raw, events, rejects, dlq):
            stage.materialise(bench.work(piece))
    return bench


class Killed(BaseException):
    """Stands for the death of the process: nothing after it runs but the end of `with` blocks."""


def killed_before_the_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a run of the first slice die between its intent and its write; returns the name of its batch."""

    def die(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(commit_log, "_named", die)
        with pytest.raises(Killed):
            current.materialise(bench.work(bench.ledger.slices(bench.stream.name)[0]))
    [intent] = bench.ledger.intents.of(bench.stream.name, "current")
    return intent.batch


@pytest.mark.slow
def test_an_intent_of_a_killed_run_is_closed_and_its_late_write_is_skipped(
    planned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MERGE of a dead client that begins after the retry must not bring anything into the table."""
    bench, [first, _] = planned, planned.ledger.slices(planned.stream.name)
    batch = killed_before_the_write(bench, monkeypatch)
    current.materialise(bench.work(first))
    assert bench.ledger.intents.of(bench.stream.name, "current") == []
    table = bench.lake.table(bench.stream.name, "current")
    assert table is not None
    assert table.transaction_version(batch) == commit_log.CLOSED
    before = table.version()

    path = bench.lake.path(bench.stream.name, "current")
    with commit_log._named(bench.spark, batch, "late"):
        bench.spark.sql(
            f"MERGE INTO delta.`{path}` t USING (SELECT 'o1' AS key) s ON t.key = s.key WHEN MATCHED THEN DELETE"
        ).collect()
    table.update_incremental()
    assert table.version() == before, "the history has no entry of the late write"
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 1}


@pytest.mark.slow
@pytest.mark.parametrize("aged", [False, True])
def test_a_commit_whose_run_died_before_its_record_is_completed(
    planned: Bench, monkeypatch: pytest.MonkeyPatch, aged: bool
) -> None:
    """Also when Delta's log has the entry no more: the name of the batch outlives it in the checkpoint."""
    bench, [first, second] = planned, planned.ledger.slices(planned.stream.name)

    def die(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(commit_log, "complete", die)
        with pytest.raises(Killed):
            current.materialise(bench.work(first))
    if aged:
        table = bench.lake.table(bench.stream.name, "current")
        assert table is not None
        table.create_checkpoint()
        for version in range(table.version()):
            (Path(bench.lake.path(bench.stream.name, "current")) / "_delta_log" / f"{version:020d}.json").unlink()
    before = committed(bench.lake, bench.stream.name, "current").version
    [report] = current.materialise(bench.work(first))
    assert report.note == "already followed the events"
    assert report.delta_version == before, "nothing was written"
    assert bench.ledger.intents.of(bench.stream.name, "current") == []
    current.materialise(bench.work(second))
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 2}
    log = bench.lake.table(bench.stream.name, commit_log.TABLE)
    assert log is not None
    found = query(log, "SELECT slice, attempt, ranges, run FROM t WHERE \"table\" = 'current' ORDER BY slice")
    assert [(row["slice"], row["ranges"]) for row in found] == [
        (piece.key, [{"partition": p, "start": r.start, "end": r.end} for p, r in piece.ranges.items()])
        for piece in (first, second)
    ]


@pytest.mark.slow
def test_a_writer_whose_intent_was_closed_looks_again(planned: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stood still for longer than its lease finds its batch closed, and commits nothing under it."""
    bench, [first, _] = planned, planned.ledger.slices(planned.stream.name)
    real = commit_log._named
    closed: list[str] = []

    def closed_meanwhile(spark: Any, batch: str, metadata: str) -> Any:
        if not closed:
            closed.append(batch)
            commit_log.close_intents(current.target(bench.work(first)))
        return real(spark, batch, metadata)

    monkeypatch.setattr(commit_log, "_named", closed_meanwhile)
    [report] = current.materialise(bench.work(first))
    assert report.note is None, "its second try committed"
    table = bench.lake.table(bench.stream.name, "current")
    assert table is not None
    assert table.transaction_version(closed[0]) == commit_log.CLOSED
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 1}
