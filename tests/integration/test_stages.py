"""The stages on a real broker, Spark and Delta: one copy of everything, whatever is repeated, in any order."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from highwater.assets import (
    commit,
    current,
    raw,
    small_slices,
)
from highwater.assets.commit import CommittedSlices
from highwater.errors import (
    SupersededAttemptError,
)
from highwater.resources.commit_log import APP
from highwater.resources.commit_log import TABLE as COMMITS
from highwater.resources.spark import ADAPTIVE
from highwater.resources.spark_tables import TASKS, write_slices
from highwater.slice_commits import SliceCommit
from tests.helpers.bench_records import abort_transaction
from tests.helpers.staged import BAD_VALUES, select_origins, sound
from tests.helpers.support import (
    Bench,
    Message,
    fetch_rest,
    list_tagged_jobs,
    order,
    order_message,
    read_rows,
    read_topic,
)

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect
    from highwater.assets.work import SliceReport
    from highwater.slices import Slice


pytestmark = pytest.mark.slow


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
def taken(module_bench: Bench) -> Taken:
    bench = module_bench
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


def test_few_events_and_rejects_are_appended_without_spark(taken: Taken) -> None:
    assert list_engines(taken.bench, "raw") == ["Apache-Spark"]
    assert list_engines(taken.bench, "events") == ["delta-rs"]
    assert list_engines(taken.bench, "rejects") == ["delta-rs"]


def test_what_a_process_must_not_hold_is_appended_by_spark(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for keys, values, and headers of rejects; those of events are not fetched."""
    headers: list[tuple[str, str | bytes | None]] = [("name", b"1" * 50), ("", None)]
    brought = (order_message("o1", 1), Message(b"o2", b"x", headers=headers), Message(None, b"y"))
    size = sum(len(part or b"") for message in brought for part in (message.key, message.value)) + len("name") + 50
    for ordinal, (limit, engine) in enumerate([(size, "delta-rs"), (size - 1, "Apache-Spark")]):
        monkeypatch.setattr(small_slices, "MAX_BYTES", limit)
        bench.send(*brought)
        slice_ = bench.plan(ordinal, p0=(3 * ordinal, 3 * ordinal + 3))
        bench.materialise(slice_)
        for table in ("events", "rejects"):
            assert list_engines(bench, table)[-1] == engine
            assert sum(row["slice"] == slice_.key for row in bench.rows(table)) == (1 if table == "events" else 2)
    rows = [[row["headers"] for row in bench.rows("rejects") if row["key"] == b"o2"] for _ in range(2)]
    assert rows[0] == rows[1] == [[{"key": "name", "value": b"1" * 50}, {"key": "", "value": None}]] * 2


def list_engines(bench: Bench, table: str) -> list[str]:
    """What made the commits of slices of a table, the last one last."""
    history = DeltaTable(bench.lake.build_table_path(bench.stream.name, table)).history()
    mine = [commit for commit in history[::-1] if "highwater" in (commit.get("userMetadata") or "")]
    return [re.split("[:/]", commit["engineInfo"])[0] for commit in mine]


def files_of_raw(bench: Bench) -> int:
    """The data files of the table as it is."""
    return len(bench.lake.open_stream_table(bench.stream.name, "raw").file_uris())


def most_tasks(bench: Bench, server: SparkConnect, slice_: Slice) -> int:
    """The most tasks of any stage that takes the slice into raw."""
    mark = f"Session_{bench.spark.session_id}_"  # type: ignore[attr-defined]
    before = {job["jobId"] for job in list_tagged_jobs(server, mark)}
    raw.materialise(bench.work(slice_))
    [application] = fetch_rest(server, "applications")
    mine = {at for job in list_tagged_jobs(server, mark) if job["jobId"] not in before for at in job["stageIds"]}
    stages = fetch_rest(server, f"applications/{application['id']}/stages")
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
    assert select_origins(bench.rows("events")) == set(read_topic(bench.bootstrap, bench.stream.topic))
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
