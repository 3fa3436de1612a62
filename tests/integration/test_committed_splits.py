"""The split of a slice into events and rejects: computed once, and the same after another run, a death or a retry."""

from __future__ import annotations

import shutil
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING, Any

import pytest

from highwater.assets import (
    commit,
    current,
    events,
    raw,
    rejects,
    slice_classification,
)
from highwater.assets.classified import SharedFrames
from highwater.assets.commit import CommittedSlices
from highwater.assets.concurrent_stages import ConcurrentStages
from highwater.errors import (
    SupersededAttemptError,
    UnbalancedError,
)
from highwater.resources.spark import close, prepare
from highwater.slice_commits import SliceCommit
from tests.helpers.staged import BAD_VALUES, select_origins
from tests.helpers.support import (
    Bench,
    Message,
    customers,
    order_message,
    read_topic,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dev.spark_connect import SparkConnect
    from highwater.assets.work import SliceReport, Work


pytestmark = pytest.mark.slow


def test_two_runs_of_a_slice_that_commit_at_once_leave_one_copy(
    bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked when neither has committed: one commits, the other takes its commit over."""
    from pyspark.sql import SparkSession

    met: set[tuple[int, str]] = set()
    both_there = Barrier(2)
    take_commit_turn = commit.take_commit_turn

    def together(work: Work, table: str) -> Any:
        if (id(work.spark), table) not in met:
            met.add((id(work.spark), table))
            both_there.wait(300)
        return take_commit_turn(work, table)

    for module in ("commit", "rejects"):
        monkeypatch.setattr(f"highwater.assets.{module}.take_commit_turn", together)
    bench.send(order_message("o1", 1), order_message("o2", 1, customer_id="c2"), Message(b"o3", b"garbled"))
    slice_ = bench.plan(0, p0=(0, 3))
    other = prepare(SparkSession.builder.remote(spark_server.remote).create())
    works = [bench.work(slice_), bench.work(slice_, spark=other)]

    def run(materialise: Callable[[Work], list[SliceReport]], work: Work) -> SliceReport:
        try:
            [report] = materialise(work)
        except BaseException:
            both_there.abort()  # the other one would wait for a run that is over
            raise
        return report

    for stage in (raw, events, rejects, current):
        with ThreadPoolExecutor(2) as both:
            ended = [both.submit(run, stage.materialise, work) for work in works]
        notes = [one.result().note for one in sorted(ended, key=_waited)]
        assert sorted(note is None for note in notes) == [False, True], (stage.TABLE, notes)
        assert bench.versions(stage.TABLE) == 1
    close(other)
    assert len(met) == 2 * len((raw, events, rejects)), "no run took over without trying"
    bench.materialise(slice_)
    ensure_one_copy(bench)


def _waited(run: Future[SliceReport]) -> bool:
    """Whether a run only failed because the other one did."""
    return isinstance(run.exception(), BrokenBarrierError)


def ensure_one_copy(bench: Bench) -> None:
    """Of three records, whose first is sound."""
    assert sorted(row["offset"] for row in bench.rows("raw")) == [0, 1, 2]
    assert [row["origin_offset"] for row in bench.rows("events")] == [0]
    assert sorted(row["origin_offset"] for row in bench.rows("rejects")) == [1, 2]
    assert [(row["key"], row["version"]) for row in bench.rows("current")] == [("o1", 1)]
    for topic in (bench.stream.tier_topics[0], bench.stream.parked_topic):
        assert len(read_topic(bench.bootstrap, topic)) == 1


def test_a_second_run_takes_over_the_split_although_the_reference_changed(bench: Bench) -> None:
    """Run one decided that c2 is unknown and died: before the rejects of a slice, and before current of another."""
    customers(bench.lake, ["c1"])
    bench.send(*[order_message(f"o{n}", 1, customer_id=f"c{n % 2 + 1}") for n in range(4)])
    slices = [bench.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(2)]
    raw.materialise(bench.work(*slices))
    events.materialise(bench.work(*slices))
    rejects.materialise(bench.work(slices[1]))
    customers(bench.lake, ["c1", "c2"])
    reports = bench.materialise(*slices)
    assert "taken over" in str(reports["events"][0].note)
    assert "current still to be written" in str(reports["events"][1].note)
    assert select_origins(bench.rows("events")) == {(0, 0), (0, 2)}
    reported = sorted((r["origin_offset"], r["reason"]) for r in bench.rows("rejects"))
    assert reported == [(1, "unresolved"), (3, "unresolved")]
    assert set(bench.current()) == {"o0", "o2"}
    bench.materialise(*slices)
    assert select_origins(bench.rows("events")) == {(0, 0), (0, 2)}, "what was published is left to the DLQ"
    assert select_origins(bench.rows("rejects")) == {(0, 1), (0, 3)}


def test_a_record_is_classified_once_in_a_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejects come from the frame of the events, and equal what raw gives to a run that begins after them."""
    bench.send(*[Message(b"o1", value) for value in BAD_VALUES.values()], order_message("o2", 1, customer_id="late"))
    bench.send(order_message("o3", 1), Message(b"o4", None))
    slice_ = bench.plan(0, p0=(0, len(BAD_VALUES) + 3))

    def refused(*_: object) -> None:
        raise AssertionError("records are classified a second time")

    with monkeypatch.context() as patched:
        patched.setattr(rejects, "parse_records", refused)
        bench.materialise(slice_)
    rows = bench.rows("rejects")
    assert len(rows) == len(BAD_VALUES) + 1
    drop = {"first_failed_at"}
    one, two = ([{**row, **dict.fromkeys(drop)} for row in found] for found in (rows, bench.rejects_from_raw(slice_)))
    assert sorted(one, key=repr) == sorted(two, key=repr)


def test_rejects_beside_current_are_those_of_a_run_step_by_step(bench: Bench, spark_server: SparkConnect) -> None:
    """Each commit has its own number and record: those of the MERGE are settings of its session."""
    from pyspark.sql import SparkSession

    second = prepare(SparkSession.builder.remote(spark_server.remote).create())
    slices = []
    for n in range(3):
        values = [Message(b"o1", value) for value in BAD_VALUES.values()]
        bench.send(*values, *[order_message(f"o{key}", n + 1) for key in range(4)])
        count = len(values) + 4
        slices.append(bench.plan(n, p0=(n * count, (n + 1) * count)))
        work = bench.work(slices[-1], classified=SharedFrames())
        raw.materialise(work)
        events.materialise(work)
        stages = ConcurrentStages()
        stages.start("rejects", rejects.materialise, work)
        [report] = current.materialise(replace(work, spark=second))
        assert report.note is None
        found = stages.take("rejects", work)
        assert found is not None
        assert [(one.rows, one.note) for one in found] == [(len(values), None)]
    close(second)
    assert {key: row["version"] for key, row in bench.current().items()} == {f"o{key}": 3 for key in range(4)}
    assert (bench.versions("rejects"), bench.versions("current")) == (3, 3)
    notes = {table: {str(one.note) for one in reports} for table, reports in bench.materialise(*slices).items()}
    assert (notes["rejects"], notes["current"]) == ({"already followed the decision"}, {"already followed the events"})
    drop = dict.fromkeys(["first_failed_at"])
    beside, alone = (
        [{**row, **drop} for row in rows] for rows in (bench.rows("rejects"), bench.rejects_from_raw(*slices))
    )
    assert sorted(beside, key=repr) == sorted(alone, key=repr)


def test_slices_decided_by_another_run_are_classified_again(bench: Bench) -> None:
    bench.send(order_message("o1", 1, amount="twelve"), order_message("o2", 1), order_message("o3", 1))
    slice_ = bench.plan(0, p0=(0, 3))
    mine = bench.work(slice_, classified=SharedFrames())
    for stage in (raw, events):
        stage.materialise(mine)
    assert len(bench.rows("events")) == 2
    # Somebody else's run decides the slice before this one's rejects follow: no customer is known to it.
    shutil.rmtree(bench.lake.build_table_path(bench.stream.name, events.TABLE))
    customers(bench.lake, ["nobody"])
    [theirs] = events.materialise(bench.work(slice_))
    assert theirs.attempt > 1
    [report] = rejects.materialise(mine)
    assert (report.attempt, report.rows, report.note) == (theirs.attempt, 3, None)
    assert Counter(row["reason"] for row in bench.rows("rejects")) == {"malformed": 1, "unresolved": 2}


def test_rejects_are_what_the_decision_left_although_events_were_reprocessed(bench: Bench) -> None:
    """Another run's decision comes between the look at the slice commits and the query."""
    customers(bench.lake, ["c1", "c2"])
    bench.send(order_message("o1", 1), order_message("o2", 1, customer_id="c2"), Message(b"o3", b"garbled"))
    slice_ = bench.plan(0, p0=(0, 3))
    work = bench.work(slice_)
    bench.materialise(slice_)
    seen = CommittedSlices.read(work, "events")
    customers(bench.lake, [])
    events.materialise(work)
    assert bench.rows("events") == []
    follows, _ = rejects._build_rows(
        work,
        [*seen.slice_commits.values()],
        CommittedSlices.read(work, "raw").version,
        seen.version,
        CommittedSlices({}, -1),
    )
    found = [row["origin_offset"] for row in follows.collect()]
    assert found == [2], "what the later decision dropped is no reject of the earlier one"


def test_raw_that_changed_since_the_decision_makes_no_rejects(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    raw.materialise(bench.work(slice_))
    seen = CommittedSlices.read(bench.work(slice_), "raw")
    decision = SliceCommit(slice_, 1, 0, {"raw": 2, "rejects": 1})
    with pytest.raises(SupersededAttemptError, match="another number of records"):
        rejects._ensure_conserved(seen, [decision])


@pytest.fixture(scope="module")
def lacking(module_bench: Bench) -> Bench:
    """A slice with one event and one reject by its decision, whose event somebody deleted before its rejects."""
    module_bench.send(order_message("o1", 1), order_message("o2", 1, amount="x"))
    slice_ = module_bench.plan(0, p0=(0, 2))
    for stage in (raw, events):
        stage.materialise(module_bench.work(slice_))
    module_bench.lake.open_stream_table(module_bench.stream.name, "events").delete("key = 'o1'")
    return module_bench


@pytest.fixture
def unbalanced(lacking: Bench, tmp_path: Path) -> Bench:
    """The slice, for a test that changes its tables."""
    return lacking.copy(tmp_path)


def test_rejects_that_do_not_add_up_with_the_decision_fail_the_slice(unbalanced: Bench) -> None:
    """The record of the deleted event would be both lost and a reject."""
    bench, [slice_] = unbalanced, unbalanced.ledger.list_slices(unbalanced.stream.name)
    with pytest.raises(UnbalancedError) as caught:
        rejects.materialise(bench.work(slice_))
    assert (caught.value.stored, caught.value.found) == (1, 2)
    table = bench.lake.open_stream_table(bench.stream.name, "events")
    table.restore(table.version() - 1)
    rejects.materialise(bench.work(slice_))
    assert select_origins(bench.rows("events")) == {(0, 0)}
    assert select_origins(bench.rows("rejects")) == {(0, 1)}


def test_a_split_that_does_not_add_up_is_reprocessed(unbalanced: Bench) -> None:
    """Each run took it over and failed as the one before, from events on too, as the remedy said."""
    bench, [slice_] = unbalanced, unbalanced.ledger.list_slices(unbalanced.stream.name)
    with pytest.raises(UnbalancedError, match="reprocessed"):
        rejects.materialise(bench.work(slice_))
    assert bench.materialise(slice_)["events"][0].note is None
    assert select_origins(bench.rows("events")) == {(0, 0)}
    assert select_origins(bench.rows("rejects")) == {(0, 1)}
    assert bench.failing() == {}


def test_a_decision_is_of_one_version_of_the_reference_however_often_it_is_computed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run's commit to raw makes Spark compute again what it holds: it judged by a customer that came meanwhile.

    So events were written that their slice commit did not count, and no run could finish the slice.
    """
    bench.send(order_message("o1", 1), order_message("o2", 1, customer_id="c2"), order_message("o3", 1))
    slice_, other = bench.plan(0, p0=(0, 2)), bench.plan(1, p0=(2, 3))
    raw.materialise(bench.work(slice_))
    see: Callable[..., None] = slice_classification._ensure_decidable

    def meanwhile(*given: object) -> None:
        see(*given)
        customers(bench.lake, ["c1", "c2"])
        raw.materialise(bench.work(other))

    monkeypatch.setattr(slice_classification, "_ensure_decidable", meanwhile)
    [report] = events.materialise(bench.work(slice_))
    assert (report.rows, report.counts["events"], report.counts["rejects"]) == (1, 1, 1)
    rejects.materialise(bench.work(slice_))
    assert select_origins(bench.rows("events")) == {(0, 0)}
    assert select_origins(bench.rows("rejects")) == {(0, 1)}


def test_events_that_are_not_as_many_as_were_measured_fail_the_slice_until_it_is_reprocessed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(order_message("o1", 1), order_message("o2", 1))
    slice_ = bench.plan(0, p0=(0, 2))
    raw.materialise(bench.work(slice_))
    whole: Callable[..., Any] = slice_classification.ClassifiedSlices.select_rows
    with monkeypatch.context() as patch:
        patch.setattr(
            slice_classification.ClassifiedSlices, "select_rows", lambda *given: whole(*given).where("key = 'o1'")
        )
        with pytest.raises(UnbalancedError, match="reprocessed") as caught:
            events.materialise(bench.work(slice_))
    assert (caught.value.stored, caught.value.found) == (2, 1)
    bench.materialise(slice_)
    assert select_origins(bench.rows("events")) == {(0, 0), (0, 1)}
    assert bench.failing() == {}


def test_a_run_that_was_overtaken_takes_the_committed_split(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    raw.materialise(bench.work(slice_))
    decide: Callable[..., object] = slice_classification.classify_slices

    def overtaken(*given: object) -> object:
        monkeypatch.setattr(events, "classify_slices", decide)
        events.materialise(bench.work(slice_))
        return decide(*given)

    monkeypatch.setattr(events, "classify_slices", overtaken)
    report = events.materialise(bench.work(slice_))[0]
    assert "another run was first" in str(report.note)
    assert bench.versions("events") == 1
    rejects.materialise(bench.work(slice_))
    slice_commits = [
        bench.lake.load_slice_commits(bench.stream.name, table)[slice_.key] for table in ("events", "rejects")
    ]
    assert slice_commits[0].attempt == slice_commits[1].attempt == report.attempt


def test_slice_taken_by_another_run_is_not_written_with_its_batch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(order_message("o1", 1), order_message("o2", 1))
    theirs, mine = bench.plan(0, p0=(0, 1)), bench.plan(1, p0=(1, 2))
    read = raw._read

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(raw, "_read", read)
        raw.materialise(bench.work(theirs))
        return read(*given)

    monkeypatch.setattr(raw, "_read", overtaken)
    taken_over, written = raw.materialise(bench.work(theirs, mine))
    assert "another run was first" in str(taken_over.note)
    assert written.note is None
    assert sorted((row["slice"], row["offset"]) for row in bench.rows("raw")) == [(theirs.key, 0), (mine.key, 1)]
