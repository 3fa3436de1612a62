"""The stages on a real broker, Spark and Delta: one copy of everything, whatever is repeated, in any order."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING, Any

import pytest

from highwater.assets import (
    commit,
    current,
    dlq,
    events,
    metrics,
    raw,
    rejects,
    slice_classification,
    unreadable_slices,
)
from highwater.assets.classified import SharedFrames
from highwater.assets.commit import Clock, CommittedSlices
from highwater.declaration import Field
from highwater.errors import (
    DependencyAwayError,
    OffsetsExpiredError,
    SupersededAttemptError,
    TopicRecreatedError,
    UnbalancedError,
)
from highwater.resources.commit_log import APP
from highwater.resources.commit_log import TABLE as COMMITS
from highwater.resources.lake import Lake
from highwater.resources.spark import ADAPTIVE, close, prepare
from highwater.resources.spark_tables import TASKS, build_known_rows, create_table, write_slices
from highwater.routing import find_destination
from highwater.slice_commits import SliceCommit
from tests.conftest import create_topic
from tests.helpers.bench_records import abort_transaction
from tests.helpers.support import (
    ORDERS,
    STAGES,
    Bench,
    Message,
    customers,
    jobs_tagged,
    make_bench,
    make_stream,
    order,
    order_message,
    read_rows,
    read_topic,
    rest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from dev.spark_connect import SparkConnect
    from highwater.assets.work import SliceReport, Work
    from highwater.slices import Slice

pytestmark = pytest.mark.slow


def origins(rows: list[dict[str, object]]) -> set[tuple[object, object]]:
    return {(row["origin_partition"], row["origin_offset"]) for row in rows}


def sound(order_id: str) -> bytes:
    return json.dumps(order(order_id, 1)).encode()


def without(name: str) -> bytes:
    return json.dumps({k: v for k, v in order("o1", 1).items() if k != name}).encode()


BAD_VALUES = {
    "field missing": without("amount"),
    "not JSON": b"nope",
    "two documents": sound("o1") + sound("o1"),
    "trailing word": sound("o1") + b" x",
    "trailing bracket": sound("o1") + b"]",
    "an array's end and another document": sound("o1") + b"]" + sound("o1"),
    "another element": sound("o1") + b"," + sound("o1"),
    "a comma": sound("o1") + b",",
    "an array": b"[1]",
    "null": b"null",
    "a field twice": b'{"order_id": "o1", "order_id": "o1"}',
    "not UTF-8": b'{"order_id": "\xff"}',
    "empty": b"",
}
BAD_FIELDS: dict[str, dict[str, object]] = {
    "field null": {"customer_id": None},
    "string for integer": {"version": "1"},
    "fraction for integer": {"version": 1.5},
    "beyond 32 bits": {"version": 2**31},
    "number for string": {"customer_id": 7},
    "string for decimal": {"amount": "1.00"},
    "three decimals": {"amount": 1.005},
    "beyond 12 digits": {"amount": 12345678901.12},
    "time without a zone": {"event_time": "2026-03-01T10:00:00"},
    "no such day": {"event_time": "2026-02-30T10:00:00Z"},
    "a number for a time": {"event_time": 1},
    "a line break behind the time": {"event_time": "2026-03-01T10:00:00Z\n"},
    "digits after the microsecond": {"event_time": "2026-03-01T10:00:00.1234567Z"},
    "digits of a nanosecond": {"event_time": "2026-03-01T10:00:00.000000001Z"},
    "key of another order": {"order_id": "o2"},
}


NOTHING = "nothing but the marker of a transaction"
RECORDS = {
    "bytes": [
        order_message("o1", 1),
        Message(None, b"no key"),
        Message(b"o2", None, partition=1),
        Message(b"\xff\xfe", b"\x00\x01", partition=1, headers=[("a", b"1"), ("a", b"2")]),
    ],
    "split": [
        order_message("o3", 1),
        order_message("o3", 2, customer_id="nobody"),
        order_message("o3", 3, status="lost"),
        order_message("o3", 4, amount="12"),
        Message(b"o3", None),
    ],
    "bad": [
        *[Message(b"o1", value) for value in BAD_VALUES.values()],
        *[Message(b"o1", json.dumps(order("o1", 1) | changes).encode()) for changes in BAD_FIELDS.values()],
        Message(b"o1", json.dumps({**order("o1", 1), "amount": None}).encode()),
        Message(None, sound("o1")),
    ],
    "sound": [
        order_message("o4", 1, amount=0),
        order_message("o4", 2, amount=9999999999.99),
        order_message("o4", 3, event_time="2026-03-01T12:00:00.123456+02:00"),
        order_message("o4", 4, further={"nested": [1]}),
        order_message("ö", 1),
        order_message("zeros", 1, event_time="2026-03-01T12:00:00.123450000+02:00"),
    ],
    NOTHING: [],
}


@dataclass
class Taken:
    """Slices that one run took together, by the records that they are about; looked at, and left as they are."""

    bench: Bench
    slices: dict[str, Slice]
    reports: dict[str, list[SliceReport]]

    def rows(self, table: str, about: str) -> list[dict[str, Any]]:
        return [row for row in self.bench.rows(table) if row["slice"] == self.slices[about].key]

    def counts(self, about: str) -> Mapping[str, int]:
        """What the decision on a slice came to."""
        return self.reports["events"][[*self.slices].index(about)].counts


@pytest.fixture(scope="module")
def taken(bootstrap: str, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Taken:
    topic = f"orders.taken.{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, topic, 3, {})
    bench = make_bench(topic, bootstrap, spark, tmp_path_factory.mktemp("taken"))
    slices, ends = {}, [0, 0, 0]
    for ordinal, (about, messages) in enumerate(RECORDS.items()):
        begins, ends = ends, [end + sum(m.partition == p for m in messages) for p, end in enumerate(ends)]
        if about == NOTHING:
            abort_transaction(bench, partition=2)
            ends[2] += 2
        bench.send(*messages)
        slices[about] = bench.plan(ordinal, **{f"p{p}": span for p, span in enumerate(zip(begins, ends, strict=True))})
    return Taken(bench, slices, bench.materialise(*slices.values()))


def test_raw_holds_every_record_of_the_topic_byte_by_byte(taken: Taken) -> None:
    rows = taken.bench.rows("raw")
    found = {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in rows}
    assert found == read_topic(taken.bench.bootstrap, taken.bench.stream.topic)
    assert len(rows) == len(found)
    headers = next(r["headers"] for r in rows if (r["partition"], r["offset"]) == (1, 1))
    assert headers == [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]


def test_a_partition_that_holds_most_records_is_read_by_many_tasks(
    bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "MIN_RECORDS_PER_TASK", 100)
    bench.send(*[order_message(f"o{n}", 1, partition=0 if n % 10 else n // 10 % 2 + 1) for n in range(1000)])
    assert most_tasks(bench, spark_server, bench.plan(0, p0=(0, 900), p1=(0, 50), p2=(0, 50))) >= TASKS
    assert len(bench.rows("raw")) == 1000
    assert files_of_raw(bench) == TASKS, "each task that read wrote a file"


def test_a_small_slice_is_one_file_and_slices_of_one_run_are_gathered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(*[order_message(f"o{n}", 1, partition=n % 3) for n in range(300)])
    raw.materialise(bench.work(bench.plan(0, p0=(0, 100), p1=(0, 100), p2=(0, 100))))
    assert files_of_raw(bench) == 1
    monkeypatch.setattr(raw, "MIN_RECORDS_PER_TASK", 10)
    monkeypatch.setattr(raw, "RECORDS_PER_FILE", 400)
    bench.send(*[order_message(f"o{n}", 2, partition=0) for n in range(1500)])
    raw.materialise(bench.work(bench.plan(1, p0=(100, 1100)), bench.plan(2, p0=(1100, 1600))))
    assert len(bench.rows("raw")) == 1800
    assert 1 + 2 <= files_of_raw(bench) <= 1 + 3 + 3, "not one for each of the eight tasks that read them"


def files_of_raw(bench: Bench) -> int:
    """The data files of the table as it is."""
    return len(bench.lake.open_stream_table(bench.stream.name, "raw").file_uris())


def most_tasks(bench: Bench, server: SparkConnect, slice_: Slice) -> int:
    """The most tasks of any stage that takes the slice into raw."""
    mark = f"Session_{bench.spark.session_id}_"  # type: ignore[attr-defined]
    before = {job["jobId"] for job in jobs_tagged(server, mark)}
    raw.materialise(bench.work(slice_))
    [application] = rest(server, "applications")
    mine = {at for job in jobs_tagged(server, mark) if job["jobId"] not in before for at in job["stageIds"]}
    stages = rest(server, f"applications/{application['id']}/stages")
    tasks: list[int] = [stage["numTasks"] for stage in stages if stage["stageId"] in mine]
    return max(tasks)


def test_a_second_try_of_a_run_keeps_what_the_first_committed(bench: Bench) -> None:
    """The answer to the commit was lost; a re-execution is another run, and reads again."""
    bench.send(*[order_message(f"o{n}", 1) for n in range(9)])
    first, second = bench.plan(0, p0=(0, 4)), bench.plan(1, p0=(4, 9))

    def seen(run: str, *slices: Slice) -> tuple[list[int], int]:
        reports = raw.materialise(bench.work(*slices, run=run))
        assert [report.rows for report in reports] == [len(slice_.ranges[0]) for slice_ in slices]
        return [report.attempt for report in reports], bench.lake.open_stream_table(bench.stream.name, "raw").version()

    attempts, version = seen("a run", first)
    assert seen("a run", first) == (attempts, version)
    assert seen("a run", first, second) == ([1, 1], version + 1)
    assert seen("another", first, second) == ([2, 2], version + 2)
    assert len(bench.rows("raw")) == 9


def test_every_slice_repeated_in_any_order_is_there_once(bench: Bench) -> None:
    """The later slice is taken first: older versions that arrive late change nothing of what is current."""
    bench.send(*[order_message(f"o{n % 5}", n // 5 + 1, partition=n % 2) for n in range(40)])
    bench.send(
        order_message("x", 2, 2, amount=2), order_message("x", 1, 2, amount=1), order_message("x", 2, 2, amount=3)
    )
    spans = [((0, 10), (0, 1)), ((10, 20), (1, 3))]
    slices = [bench.plan(n, p0=span, p1=span, p2=late) for n, (span, late) in enumerate(spans)]
    for slice_ in (slices[1], slices[0], slices[1]):
        bench.materialise(slice_)
    assert len(bench.rows("raw")) == 43
    assert origins(bench.rows("events")) == set(read_topic(bench.bootstrap, bench.stream.topic))
    row = bench.current().pop("x")
    assert (row["version"], str(row["amount"]), row["updated_by_slice"]) == (2, "2.00", slices[0].key)
    assert {key: row["version"] for key, row in bench.current().items()} == {f"o{n}": 8 for n in range(5)} | {"x": 2}


def test_the_split_is_conserved_and_reported_by_reason(taken: Taken) -> None:
    begin = taken.slices["split"].ranges[0].start
    assert {row["origin_offset"] - begin for row in taken.rows("events", "split")} == {0}
    rejects = taken.rows("rejects", "split")
    reported = {row["origin_offset"] - begin: (row["reason"], row["permanent"], row["next_topic"]) for row in rejects}
    topic = taken.bench.stream.topic
    assert reported == {
        1: ("unresolved", False, f"{topic}.dlq.1"),
        2: ("invalid", True, f"{topic}.parked"),
        3: ("malformed", True, f"{topic}.parked"),
    }
    counts = taken.counts("split")
    assert (counts["raw"], counts["events"], counts["rejects"], counts["tombstones"]) == (5, 1, 3, 1)


def test_whatever_is_not_exactly_the_declared_record_is_malformed(taken: Taken) -> None:
    begin, names = taken.slices["bad"].ranges[0].start, [*BAD_VALUES, *BAD_FIELDS, "amount null", "no key"]
    reasons = {names[row["origin_offset"] - begin]: row["reason"] for row in taken.rows("rejects", "bad")}
    assert reasons == dict.fromkeys(names, "malformed")


def test_a_time_that_no_column_holds_says_so(taken: Taken) -> None:
    """It was cut to microseconds in silence: where a time is the version, two of a key became a conflict."""
    details = Counter(row["detail"] for row in taken.rows("rejects", "bad"))
    assert details["field event_time has digits after the microsecond"] == 2
    # no zone, no such day, a line break
    assert details["field event_time does not fit timestamp"] == 3


def test_sound_variants_are_events(taken: Taken) -> None:
    rows = sorted(taken.rows("events", "sound"), key=lambda row: row["origin_offset"])
    assert len(rows) == len(RECORDS["sound"])
    assert str(rows[1]["amount"]) == "9999999999.99"
    assert rows[2]["event_time"] == datetime(2026, 3, 1, 10, 0, 0, 123456, tzinfo=UTC)
    assert rows[4]["key"] == "ö"
    assert rows[5]["event_time"] == datetime(2026, 3, 1, 10, 0, 0, 123450, tzinfo=UTC)


def test_a_range_run_is_one_commit_a_table_with_every_slice_commit(taken: Taken) -> None:
    bench, slices = taken.bench, [*taken.slices.values()]
    assert bench.versions("current") == 1
    assert bench.lake.load_commits(bench.stream.name, "current").records.keys() == {slice_.key for slice_ in slices}
    for stage in ("raw", "events", "rejects"):
        assert bench.versions(stage) == 1
        assert set(bench.lake.load_slice_commits(bench.stream.name, stage)) == {slice_.key for slice_ in slices}
        marks = read_rows(bench.lake.build_table_path(bench.stream.name, COMMITS), f"\"table\" = '{stage}'")
        assert Counter(row["slice"] for row in marks) == Counter({slice_.key: 1 for slice_ in slices})
    history = bench.lake.open_stream_table(bench.stream.name, "raw").history(1)[0]
    said = json.loads(history["userMetadata"])["highwater"]
    assert [(s["slice"], s["ranges"]) for s in said["records"]] == [
        (slice_.key, {str(p): [span.start, span.end] for p, span in slice_.ranges.items()}) for slice_ in slices
    ]
    assert len(bench.lake.open_stream_table(bench.stream.name, "raw").file_uris()) == 1


def test_a_slice_without_any_record_is_committed_and_proved(taken: Taken) -> None:
    """A range that holds only transaction markers has no rows; its slice commit is committed all the same."""
    assert taken.rows("raw", NOTHING) == []
    slice_ = taken.slices[NOTHING]
    slice_commit = taken.bench.lake.load_slice_commits(taken.bench.stream.name, "raw", [slice_.key])[slice_.key]
    assert (slice_commit.rows, slice_commit.slice_.ranges) == (0, slice_.ranges)


def test_current_follows_events_and_repeats_nothing(taken: Taken) -> None:
    before = taken.bench.versions("current")
    reports = current.materialise(taken.bench.work(*taken.slices.values()))
    assert {report.note for report in reports} == {"already followed the events"}
    assert taken.bench.versions("current") == before


def test_current_shows_what_its_commit_wrote_and_how_fresh_it_is(taken: Taken) -> None:
    rows = taken.bench.rows("current")
    brought = {row["updated_by_slice"] for row in rows}
    for report in taken.reports["current"]:
        assert report.measures["write/rows_inserted"] == len(rows)
        assert report.measures["write/rows_copied"] == 0
        assert report.measures["write/bytes"] > 0
        # The events happened before they were sent.
        assert ("freshness_seconds" in report.measures) == (report.counts["events"] > 0)
        if report.slice_.key in brought:
            times = [row["event_time"] for row in taken.bench.rows("events") if row["slice"] == report.slice_.key]
            since = datetime.now(UTC).timestamp() - max(times).timestamp() - report.measures["freshness_seconds"]
            assert 0 <= since < 3_600, "the age of the newest event, a while ago"


def test_a_late_starter_cannot_overwrite_a_younger_commit(taken: Taken) -> None:
    """A query whose Connect client was killed once committed 12 s later, after the retry; replaceWhere is no fence."""
    bench, slice_ = taken.bench, taken.slices["bytes"]
    before = taken.rows("raw", "bytes")
    attempt = next(report.attempt for report in taken.reports["raw"] if report.slice_ == slice_)
    late = bench.spark.createDataFrame([], raw.COLUMNS)
    usual = bench.spark.conf.get(ADAPTIVE)
    work, slice_commit, looked = bench.work(slice_), SliceCommit(slice_, 9, 0), CommittedSlices({}, -1)
    with pytest.raises(SupersededAttemptError, match=f"found: attempt {attempt}"):
        commit.commit_rows(work, "raw", late, [slice_commit], looked, files=1, spread="offset", tasks=1)
    held = bench.lake.load_commits(bench.stream.name, "raw")
    options = {"txnAppId": APP, "txnVersion": str(held.number), "userMetadata": "late"}
    path = bench.lake.build_table_path(bench.stream.name, "raw")
    write_slices(path, late, [slice_.key], options, replace=True, files=1, spread="offset", tasks=1)
    assert bench.lake.load_commits(bench.stream.name, "raw").version == held.version, "Delta skips the write"
    assert taken.rows("raw", "bytes") == before
    assert bench.spark.conf.get(ADAPTIVE) == usual, "queries that follow are planned as before"


def test_two_runs_of_a_slice_that_commit_at_once_leave_one_copy(
    bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked when neither has committed: one commits, the other takes its commit over."""
    from pyspark.sql import SparkSession

    met: set[tuple[int, str]] = set()
    both_there = Barrier(2)
    commit_turn = commit.commit_turn

    def together(work: Work, table: str) -> Any:
        if (id(work.spark), table) not in met:
            met.add((id(work.spark), table))
            both_there.wait(300)
        return commit_turn(work, table)

    for module in ("commit", "rejects"):
        monkeypatch.setattr(f"highwater.assets.{module}.commit_turn", together)
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
    assert origins(bench.rows("events")) == {(0, 0), (0, 2)}
    reported = sorted((r["origin_offset"], r["reason"]) for r in bench.rows("rejects"))
    assert reported == [(1, "unresolved"), (3, "unresolved")]
    assert set(bench.current()) == {"o0", "o2"}
    bench.materialise(*slices)
    assert origins(bench.rows("events")) == {(0, 0), (0, 2)}, "what was published is left to the DLQ"
    assert origins(bench.rows("rejects")) == {(0, 1), (0, 3)}


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


def test_what_another_run_decided_is_classified_again(bench: Bench) -> None:
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


def test_rejects_that_do_not_add_up_with_the_decision_fail_the_slice(bench: Bench) -> None:
    """Somebody takes an event out between the decision and its rejects: the record would be both lost and a reject."""
    bench.send(order_message("o1", 1), order_message("o2", 1, amount="x"))
    slice_ = bench.plan(0, p0=(0, 2))
    for stage in (raw, events):
        stage.materialise(bench.work(slice_))
    bench.lake.open_stream_table(bench.stream.name, "events").delete("key = 'o1'")
    with pytest.raises(UnbalancedError) as caught:
        rejects.materialise(bench.work(slice_))
    assert (caught.value.stored, caught.value.found) == (1, 2)
    table = bench.lake.open_stream_table(bench.stream.name, "events")
    table.restore(table.version() - 1)
    rejects.materialise(bench.work(slice_))
    assert origins(bench.rows("events")) == {(0, 0)}
    assert origins(bench.rows("rejects")) == {(0, 1)}


def test_a_split_that_does_not_add_up_is_reprocessed(bench: Bench) -> None:
    """Each run took it over and failed as the one before, from events on too, as the remedy said."""
    bench.send(order_message("o1", 1), order_message("o2", 1, amount="x"))
    slice_ = bench.plan(0, p0=(0, 2))
    for stage in (raw, events):
        stage.materialise(bench.work(slice_))
    bench.lake.open_stream_table(bench.stream.name, "events").delete("key = 'o1'")
    with pytest.raises(UnbalancedError, match="reprocessed"):
        rejects.materialise(bench.work(slice_))
    assert bench.materialise(slice_)["events"][0].note is None
    assert origins(bench.rows("events")) == {(0, 0)}
    assert origins(bench.rows("rejects")) == {(0, 1)}
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
    assert origins(bench.rows("events")) == {(0, 0)}
    assert origins(bench.rows("rejects")) == {(0, 1)}


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
    assert origins(bench.rows("events")) == {(0, 0), (0, 1)}
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


def test_of_two_slices_read_together_the_one_that_another_run_took_is_not_written(
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


def test_rows_stay_when_kafka_no_longer_holds_them(bench: Bench) -> None:
    bench.send(order_message("o1", 1), order_message("o1", 2), order_message("o1", 3))
    slice_ = bench.plan(0, p0=(0, 3))
    raw.materialise(bench.work(slice_))
    delete_before(bench, 2)
    report = raw.materialise(bench.work(slice_))[0]
    assert "rows unchanged" in str(report.note)
    assert report.rows == 3
    assert len(bench.rows("raw")) == 3


def test_expired_offsets_that_were_never_read_are_an_error_with_both_values(bench: Bench) -> None:
    bench.send(order_message("o1", 1), order_message("o1", 2), order_message("o1", 3))
    slice_ = bench.plan(0, p0=(0, 3))
    delete_before(bench, 2)
    with pytest.raises(OffsetsExpiredError) as caught:
        raw.materialise(bench.work(slice_))
    assert (caught.value.stored, caught.value.found) == ("[0, 3)", "log start offset 2")
    assert "accept-loss" in caught.value.remedy
    assert bench.rows("raw") == []


def after_the_look(patch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    """Let something happen to the topic between the look at it and Spark's read."""
    look: Callable[..., object] = unreadable_slices.list_unreadable_slices

    def looked(*given: object) -> object:
        found = look(*given)
        patch.setattr(raw, "list_unreadable_slices", look)
        lose()
        return found

    patch.setattr(raw, "list_unreadable_slices", looked)


def test_offsets_that_expire_while_they_are_read_are_reported_as_those_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark named neither slice nor values, and the command without stream and partition, for good."""
    bench.send(*[order_message("o1", n) for n in range(1, 7)])
    never_read, read_before = bench.plan(0, p0=(0, 3)), bench.plan(1, p0=(3, 6))
    after_the_look(monkeypatch, lambda: delete_before(bench, 2))
    with pytest.raises(OffsetsExpiredError) as caught:
        raw.materialise(bench.work(never_read))
    assert (caught.value.stored, caught.value.found) == ("[0, 3)", "log start offset 2")
    assert never_read.key in str(caught.value)
    assert f"highwater accept-loss {bench.stream.name} --partition 0" in caught.value.remedy
    assert bench.rows("raw") == []
    raw.materialise(bench.work(read_before))
    after_the_look(monkeypatch, lambda: delete_before(bench, 5))
    [report] = raw.materialise(bench.work(read_before))
    assert "rows unchanged" in str(report.note)
    assert len(bench.rows("raw")) == 3


def delete_before(bench: Bench, offset: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    for future in admin.delete_records([TopicPartition(bench.stream.topic, 0, offset)]).values():
        future.result(30)


def test_a_recreated_topic_is_not_read_as_the_planned_one(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    other = type(slice_)(**{**vars(slice_), "topic_id": "AAAAAAAAAAAAAAAAAAAAAA"})
    with pytest.raises(TopicRecreatedError) as caught:
        raw.materialise(bench.work(other))
    assert caught.value.stored == "AAAAAAAAAAAAAAAAAAAAAA"
    assert caught.value.found == slice_.topic_id


def test_a_reference_table_that_is_away_makes_no_reject(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    raw.materialise(bench.work(slice_))
    shutil.rmtree(bench.lake.build_reference_path("reference/customers"))
    with pytest.raises(DependencyAwayError, match="reference/customers"):
        events.materialise(bench.work(slice_))
    assert bench.rows("events") == []
    customers(bench.lake, ["c1"])
    events.materialise(bench.work(slice_))
    assert origins(bench.rows("events")) == {(0, 0)}


def test_a_slice_that_is_materialised_again_recomputes_its_keys(bench: Bench) -> None:
    """What a slice had brought must leave `current` with its events, and the next best version must come back."""
    customers(bench.lake, ["c1", "c2"])
    bench.send(
        order_message("o1", 1),
        order_message("o1", 3, customer_id="c2"),
        order_message("o1", 2),
        order_message("o2", 1, customer_id="c2"),
    )
    slices = [bench.plan(0, p0=(0, 1)), bench.plan(1, p0=(1, 2)), bench.plan(2, p0=(2, 3)), bench.plan(3, p0=(3, 4))]
    bench.materialise(*slices)
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 3, "o2": 1}
    customers(bench.lake, ["c1"])  # c2 is forgotten: the slices of version 3 and of o2 now hold no event
    bench.materialise(slices[1], slices[3])
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 2}
    assert bench.failing() == {}


def test_current_holds_the_winners_of_the_events_after_every_step(bench: Bench) -> None:
    """Late slices, equal versions with other contents, and slices that lose events when they are materialised again."""
    every = ("c1", "c2", "c3")
    versions = [("o1", 2, "c2"), ("o2", 3, "c3"), ("o1", 1, "c1"), ("o2", 3, "c1"), ("o1", 3, "c3"), ("o3", 1, "c2")]
    versions += [("o2", 1, "c1"), ("o1", 3, "c1"), ("o3", 2, "c2"), ("o2", 2, "c2"), ("o1", 2, "c1"), ("o3", 1, "c2")]
    states = {1: "placed", 2: "paid", 3: "refunded"}
    bench.send(*[order_message(key, n, customer_id=of, status=states[n]) for key, n, of in versions])
    slices = [bench.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(6)]
    merged: set[str] = set()
    steps = (
        ((4, 1), every),
        ((2,), every),
        ((2, 0), ("c1", "c2")),
        ((4, 5), ("c1", "c2")),
        ((3, 0), ("c1",)),
        ((1, 4), ("c1",)),
    )
    for ordinals, known in steps:
        customers(bench.lake, known)
        bench.materialise(*[slices[n] for n in ordinals])
        merged |= {slices[n].key for n in ordinals}
        best: dict[str, tuple[int, int]] = {}
        for row in bench.rows("events"):
            assert row["slice"] in merged
            mine = (row["version"], -row["origin_offset"])  # a later offset has no earlier time
            best[row["key"]] = max(mine, best.get(row["key"], mine))
        held = {key: (row["version"], -row["origin_offset"]) for key, row in bench.current().items()}
        assert held == best, (ordinals, known)
    assert held.keys() == {"o1", "o2", "o3"}
    assert bench.failing() == {}


def test_a_table_is_made_where_one_that_made_it_was_killed(spark: SparkSession, tmp_path: Path) -> None:
    """It left the folder of the log, in which Spark would make no table any more."""
    path = tmp_path / "raw"
    (path / "_delta_log").mkdir(parents=True)
    (path / "_delta_log" / ".00000000000000000000.json.tmp").write_text("half")
    create_table(spark, str(path), raw.COLUMNS, raw.STATISTICS_COLUMNS, nullcontext)
    assert spark.read.format("delta").load(str(path)).count() == 0
    assert [*read_rows(str(path))] == []


def test_as_many_tiers_as_anybody_declares_are_reported_by_reason(spark: SparkSession) -> None:
    stream = make_stream("orders", tiers=tuple(timedelta(seconds=n + 1) for n in range(60)))
    rows = [(reason, retries) for reason in stream.on_reject for retries in range(62)]
    asked = spark.createDataFrame(rows, "reason STRING, retries INT").select(
        "*", rejects._build_next_topic(stream).alias("to")
    )
    assert [row["to"] for row in asked.collect()] == [find_destination(stream, *row) for row in rows]


def test_an_older_decision_does_not_replace_what_follows_a_newer_one(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    older = {slice_.key: SliceCommit(slice_, 1, 0, {"rejects": 0})}
    with pytest.raises(SupersededAttemptError, match="reprocessed"):
        rejects._follow_decision(
            bench.work(slice_),
            CommittedSlices(older, 0),
            CommittedSlices({slice_.key: SliceCommit(slice_, 2, 0)}, 0),
            Clock(),
        )


def test_the_slice_commit_outlives_the_log_of_the_table(bench: Bench, tmp_path: Path) -> None:
    """Delta cleans its log up after 30 days; nothing may depend on what history() still shows."""
    bench.send(*[order_message(f"o{n}", 1) for n in range(5)])
    slices: list[Slice] = [bench.plan(n, p0=(n, n + 1)) for n in range(5)]
    path = Path(bench.lake.build_table_path(bench.stream.name, "raw"))
    raw.materialise(bench.work(slices[0]))
    # Each tenth commit would write one.
    bench.spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    for slice_ in slices[1:3]:
        raw.materialise(bench.work(slice_))
    aged = age(path / "_delta_log", timedelta(days=40))
    for slice_ in slices[3:]:
        raw.materialise(bench.work(slice_))
    left = {file.name for file in (path / "_delta_log").iterdir()}
    assert len(aged - left) >= 4, "Delta removed what was older than its retention"
    assert not any(slice_commit.key in text for slice_commit in slices[:2] for text in said_in(path / "_delta_log"))
    # Nobody has seen a table of this path: Spark, too, has nothing but what is left of the log.
    shutil.copytree(bench.lake.root, tmp_path / "aged")
    bench.lake = Lake(str(tmp_path / "aged"))
    assert set(bench.lake.load_slice_commits(bench.stream.name, "raw")) == {slice_.key for slice_ in slices}
    [again] = raw.materialise(bench.work(slices[0]))
    assert (again.attempt, again.note) == (2, None)
    path = Path(bench.lake.build_table_path(bench.stream.name, "raw"))
    for slice_, attempt in ((slices[0], 2), (slices[1], 1)):
        late, slice_commit = bench.spark.createDataFrame([], raw.COLUMNS), SliceCommit(slice_, 9, 0)
        looked = CommittedSlices({slice_.key: SliceCommit(slice_, attempt - 1, 0)}, 0)
        with pytest.raises(SupersededAttemptError, match=f"found: attempt {attempt}"):
            commit.commit_rows(
                bench.work(slice_), "raw", late, [slice_commit], looked, files=1, spread="offset", tasks=1
            )
    assert sorted((row["offset"], row["slice"]) for row in bench.rows("raw")) == [
        (n, slice_.key) for n, slice_ in enumerate(slices)
    ]


def age(folder: Path, by: timedelta) -> set[str]:
    """Let the files be older, by the time that a clean-up goes by; their names."""
    files = [*folder.iterdir()]
    for file in files:
        then = file.stat().st_mtime - by.total_seconds()
        os.utime(file, (then, then))
    return {file.name for file in files}


def said_in(log: Path) -> list[str]:
    return [file.read_text() for file in log.glob("*.json")]


def test_a_field_that_is_added_to_a_stream_becomes_a_column(bench: Bench) -> None:
    """Also where two runs meet it at once; the rows of before have null in it."""
    bench.send(order_message("o1", 1), order_message("o2", 1, note="seen"), order_message("o3", 1, note="too"))
    bench.materialise(bench.plan(0, p0=(0, 1)))
    fields = (*bench.stream.fields, Field("note", "string"))
    bench.stream = replace(bench.stream, fields=fields)
    later = [bench.plan(1, p0=(1, 2)), bench.plan(2, p0=(2, 3))]
    for slice_ in later:
        raw.materialise(bench.work(slice_))
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda slice_: events.materialise(bench.work(slice_)), later))
    for stage in (rejects, dlq, current):
        stage.materialise(bench.work(*later))
    assert {row["key"]: row["note"] for row in bench.rows("events")} == {"o1": None, "o2": "seen", "o3": "too"}
    assert {key: row["note"] for key, row in bench.current().items()} == {"o1": None, "o2": "seen", "o3": "too"}


@pytest.mark.long
def test_runs_that_began_before_a_field_was_added_write_on(bench: Bench) -> None:
    """One of them materialises a slice again: it must not take the new column from rows of other slices."""
    older = bench.stream
    note = replace(older, fields=(*older.fields, Field("note", "string")))
    both_fields = replace(note, fields=(*note.fields, Field("remark", "string")))
    bench.send(*[order_message(f"o{n}", 1, note=f"n{n}", remark=f"r{n}") for n in range(4)])
    slices = [bench.plan(n, p0=(n, n + 1)) for n in range(4)]
    bench.stream = note
    bench.materialise(*slices[:2])
    bench.stream = older
    bench.materialise(slices[0])
    assert {row["key"]: row["note"] for row in bench.rows("events")} == {"o0": None, "o1": "n1"}
    assert {key: row["note"] for key, row in bench.current().items()} == {"o0": None, "o1": "n1"}

    works = [replace(bench.work(slices[2]), stream=older), replace(bench.work(slices[3]), stream=both_fields)]
    for stage in STAGES:
        with ThreadPoolExecutor(2) as both:
            list(both.map(stage.materialise, works))
    expected = {"o0": (None, None), "o1": ("n1", None), "o2": (None, None), "o3": ("n3", "r3")}
    assert {row["key"]: (row["note"], row["remark"]) for row in bench.rows("events")} == expected
    assert {key: (row["note"], row["remark"]) for key, row in bench.current().items()} == expected
    assert bench.failing() == {}


def test_metrics_follow_every_decision_and_are_read_by_spark(bench: Bench) -> None:
    """A customer is forgotten: the slice reclaims what it said, and the other's copy counts from then on."""
    from decimal import Decimal

    bench.stream = replace(bench.stream, metrics=ORDERS.metrics)
    customers(bench.lake, ["c1", "c2"])
    first, copy = order_message("o1", 2, amount=10), order_message("o1", 2, amount=10, customer_id="c2")
    bench.send(copy, order_message("o2", 2, amount=3.25), first)
    slices = [bench.plan(0, p0=(0, 2)), bench.plan(1, p0=(2, 3))]
    bench.materialise(*slices)
    assert paid_minutes(bench) == [(2, Decimal("13.25"), 2, Decimal("6.625000"))]
    customers(bench.lake, ["c1"])
    bench.materialise(slices[0])
    assert paid_minutes(bench) == [(2, Decimal("13.25"), 2, Decimal("6.625000"))]
    assert origins(bench.rows("events")) == {(0, 1), (0, 2)}
    # Decided again, and killed before metrics: the decision stays until they follow.
    customers(bench.lake, ["c2"])
    events.materialise(bench.work(slices[1]))
    rejects.materialise(bench.work(slices[1]))
    dlq.materialise(bench.work(slices[1]))
    current.materialise(bench.work(slices[1]))
    [report] = events.materialise(bench.work(slices[1]))
    assert "metrics still to be written" in str(report.note)
    metrics.materialise(bench.work(slices[1]))
    assert paid_minutes(bench) == [(1, Decimal("3.25"), 1, Decimal("3.250000"))]


def paid_minutes(bench: Bench) -> list[tuple[object, ...]]:
    rows = bench.spark.read.format("delta").load(bench.lake.build_table_path(bench.stream.name, "metrics"))
    return [tuple(row) for row in rows.select("paid_events", "paid_amount", "hour_events", "hour_mean").collect()]


def test_a_field_may_have_every_name_that_a_declaration_takes(bench: Bench) -> None:
    name = "@odd-Größe_1"
    bench.stream = replace(bench.stream, fields=(*bench.stream.fields, Field(name, "string", one_of=("x",))))
    bench.send(
        order_message("o1", 1, 0, **{name: "x"}), order_message("o2", 1, 0, **{name: "y"}), order_message("o3", 1)
    )
    bench.materialise(bench.plan(0, p0=(0, 3)))
    assert {key: row[name] for key, row in bench.current().items()} == {"o1": "x"}
    assert [row["detail"] for row in bench.rows("rejects")] == [f"unknown {name}", f"field {name} is missing"]
    assert not bench.failing()


def test_rows_that_are_known_come_as_they_were_given(spark: SparkSession) -> None:
    """Into a table goes what was planned, whatever is in it; a value that fits nowhere is an error, and no null."""
    columns = "slice STRING, start BIGINT"
    rows = [('it\'s \\ "a" :rows\n\u00e9\U0001f600', 2**63 - 1), ("", -1)]
    assert [tuple(row) for row in build_known_rows(spark, columns, rows).collect()] == rows
    assert build_known_rows(spark, columns, []).collect() == []
    with pytest.raises(Exception, match=r"(?i)malformed"):
        build_known_rows(spark, columns, [("beyond", 2**63)]).collect()
