"""Maintenance of tables: nothing is lost by it, and what a retry may still read stays."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from assets.streams.orders import STREAM as ORDERS
from dev.spark_connect import SparkConnect
from highwater.assets import erasures_table, events, publication_log, publication_log_writer, published
from highwater.assets.origins import SEEN
from highwater.assets.raw_expiry import restore_rows
from highwater.assets.work import Work
from highwater.declaration import Maintenance, Retention
from highwater.erasing import ErasedCounts, Erasure
from highwater.errors import ConfigurationError, SupersededAttemptError
from highwater.maintenance import FEWEST_FILES, LONGEST_RUN, File, Horizon
from highwater.orchestration.operations import maintenance
from highwater.orchestration.operations.maintenance import compute_minimum_horizon, maintain
from highwater.orchestration.operations.raw_retention import retain
from highwater.resources import table_maintenance
from highwater.resources.delta import open_table
from highwater.resources.dlq_topics import TopicShape
from highwater.resources.kafka import Kafka
from highwater.resources.spark import close, prepare
from highwater.resources.spark_tables import read_table_version
from highwater.resources.table_maintenance import (
    join_small,
    list_partitions,
    list_removable_files,
    measure_stock,
    read_commit_times,
    remove_files,
)
from tests.helpers.accepted import Event, FakeTransactionLog, Tables
from tests.helpers.support import Bench, order_message, read_rows
from tests.helpers.world import COLUMNS, RETRIED, STREAM, World, schema_of

NOW = datetime.now(UTC)


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.write()
    return made


def work_of(world: World, **changes: Any) -> Work:
    nothing = cast("Any", None)  # a dry run does not ask Spark
    kafka = cast("Any", SimpleNamespace(list_group_names=list))
    return Work(replace(STREAM, **changes), [], nothing, world.lake, world.ledger, kafka, print)


def test_a_dry_run_reports_what_each_table_takes_and_changes_nothing(world: World) -> None:
    before = {name: world.rows[name] for name in world.rows}
    report = maintain(work_of(world), None, NOW, dry_run=True)
    assert [one.table for one in report.tables] == ["raw", "events", "rejects", "dlq", "current", "_commits"]
    raw = report.tables[0]
    folder = Path(world.lake.build_table_path("orders", "raw"))
    files = [file.stat().st_size for file in folder.rglob("*.parquet")]
    assert (raw.before.stored, raw.before.stored_bytes) == (len(files), sum(files))
    assert (raw.before.files, raw.before.bytes) == (len(files), sum(files)), "written once"
    assert "a dry run: nothing was changed" in report.lines
    assert "keys: DAGSTER_HOME is not set, so none was looked at" in report.lines
    assert {name: world.rows[name] for name in world.rows} == before


def test_a_horizon_that_a_run_may_outlast_is_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match="the longest run"):
        maintain(work_of(world, maintenance=Maintenance(horizon=timedelta(hours=12))), None, NOW, dry_run=False)


def test_runs_that_go_on_lengthen_what_the_horizon_must_exceed() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        assert compute_minimum_horizon(instance, NOW) == Horizon(LONGEST_RUN), "where Dagster has no limit"
        run = dg.DagsterRun(job_name="orders_slice", status=dg.DagsterRunStatus.NOT_STARTED)
        instance.add_run(run)
        instance.handle_new_event(_started(run))
        later = datetime.now(UTC) + timedelta(hours=9)
        found = compute_minimum_horizon(instance, later).run
        assert timedelta(hours=8.9) < found < timedelta(hours=9.1)


def _started(run: dg.DagsterRun) -> Any:
    from dagster import DagsterEvent, DagsterEventType, EventLogEntry

    event = DagsterEvent(event_type_value=DagsterEventType.RUN_START.value, job_name=run.job_name)
    return cast("Any", EventLogEntry)(
        user_message="",
        level=20,
        run_id=run.run_id,
        timestamp=datetime.now(UTC).timestamp(),
        error_info=None,
        job_name=run.job_name,
        dagster_event=event,
    )


def test_files_that_an_unfinished_retry_reads_are_not_removed(world: World) -> None:
    """Its rejects are still to be computed, from the version of events that its decision has seen."""
    counts = {**world.slice_commits["events"][RETRIED.key].counts, SEEN: 0}
    world.alter_slice_commit("events", RETRIED, attempt=3, counts=counts)
    world.write()
    long_ago = NOW + timedelta(days=7)  # as seen from then
    [events] = [one for one in maintain(work_of(world), None, long_ago, dry_run=True).tables if one.table == "events"]
    assert [RETRIED.key in note and "finish it first" in note for note in events.notes] == [True]
    [events] = [one for one in maintain(work_of(world), None, NOW, dry_run=True).tables if one.table == "events"]
    assert events.notes == [], "the horizon reaches farther back"
    world.alter_slice_commit("rejects", RETRIED, attempt=3)
    world.write()
    [events] = [one for one in maintain(work_of(world), None, long_ago, dry_run=True).tables if one.table == "events"]
    assert events.notes == [], "it is finished"


def test_files_that_an_unfinished_erasure_of_a_retired_retry_reads_are_not_removed(world: World) -> None:
    world.alter_slice_commit(
        "events", RETRIED, attempt=3, counts={**world.slice_commits["events"][RETRIED.key].counts, SEEN: 0}
    )
    world.write()
    world.ledger.retired.retire("orders", [RETRIED.key], NOW)
    number = world.ledger.erasures.add(Erasure("orders", "a" * 64, "asked for", "somebody", NOW))
    world.ledger.erasures.begin(number, [ErasedCounts(RETRIED.key, {}, {})])
    long_ago = NOW + timedelta(days=7)
    [events] = [one for one in maintain(work_of(world), None, long_ago, dry_run=True).tables if one.table == "events"]
    assert [RETRIED.key in note and "finish it first" in note for note in events.notes] == [True]


def test_a_table_without_a_jvm_is_joined_and_cleared(world: World) -> None:
    """As `metrics` is: the rows stay, and a file goes only when it is older than the horizon."""
    import pyarrow as pa
    from deltalake import write_deltalake

    path = world.lake.build_table_path("orders", "dlq")
    more = [{**row, "detail": "more"} for row in read_rows(path)[:1]]
    write_deltalake(path, pa.Table.from_pylist(more, schema_of(COLUMNS["dlq"])), mode="append")
    table = open_table(path)
    assert table is not None
    [part] = [one for one in list_partitions(table) if len(one.files) > 1]
    before, stock = sorted(map(str, read_rows(path, "true"))), measure_stock(table)
    join_small(table, [part.key])
    table.update_incremental()
    assert sorted(map(str, read_rows(path, "true"))) == before
    assert measure_stock(table).files == stock.files - 1
    assert measure_stock(table).stored == stock.stored + 1
    month = timedelta(days=30).total_seconds()
    for file in Path(path).rglob("*.parquet"):
        os.utime(file, (NOW.timestamp() - month,) * 2)
        (file.parent / f".{file.name}.crc").touch()
    for name, age in (("of one who died", month), ("of one who writes", 60)):
        there = Path(path) / "slice=x" / f"{name}.parquet"
        there.parent.mkdir(exist_ok=True)
        there.touch()
        os.utime(there, (NOW.timestamp() - age,) * 2)
    others = [Path(path) / name for name in ("deletion_vector_1.bin", "metadata/v1.metadata.json")]
    for there in others:  # the log names them as no file, while readers of the table need them
        there.parent.mkdir(exist_ok=True)
        there.touch()
        os.utime(there, (NOW.timestamp() - month,) * 2)
    assert remove_files(table, hours=168) == 1, "what was joined was removed from the table just now"
    assert {file.name for file in Path(path).glob("slice=x/*")} == {"of one who writes.parquet"}
    assert len(list_removable_files(table, hours=0)) == 3
    assert remove_files(table, hours=0) == 3
    assert all(there.exists() for there in others)
    found = measure_stock(table)
    assert (found.stored, found.stored_bytes) == (found.files, found.bytes)
    assert len([*Path(path).rglob(".*.crc")]) == found.files
    assert sorted(map(str, read_rows(path, "true"))) == before


def test_erasures_table_is_maintained_during_an_erasure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each night that takes old rows adds files to it, and its writers hold no lease."""
    monkeypatch.setattr(maintenance, "select_tables", lambda _: [])  # the others need Spark
    work = work_of(world)

    def erase(day: int) -> None:
        number = world.ledger.erasures.add(Erasure("orders", "age", f"day {day}", "maintenance", NOW - timedelta(day)))
        world.ledger.erasures.begin(number, [ErasedCounts(f"orders@{day:07}", {}, {"raw": day})])
        erasures_table.sync_with_ledger(world.ledger, world.lake, "orders")

    for day in range(FEWEST_FILES):
        erase(day)

    def beside(table: Any, keys: Any) -> None:
        erase(99)
        join_small(table, keys)

    monkeypatch.setattr(maintenance, "join_small", beside)
    report, commits = maintain(work, None, NOW, dry_run=False).tables
    assert (report.table, report.before.files, report.compacted) == ("erasures", FEWEST_FILES, 1)
    assert (commits.table, commits.compacted) == ("_commits", 0)
    table = world.lake.open_stream_table("orders", "erasures")
    assert table is not None
    assert measure_stock(table).files == 2, "all that were there, and what came meanwhile"
    reported = [(one.erasure.reason, [*one.slices]) for one in erasures_table.read(world.lake, "orders")]
    assert reported == [(f"day {day}", [f"orders@{day:07}"]) for day in (99, *reversed(range(FEWEST_FILES)))]


@pytest.mark.parametrize("dry_run", [True, False])
def test_only_a_real_maintenance_removes_left_probes(
    world: World, monkeypatch: pytest.MonkeyPatch, *, dry_run: bool
) -> None:
    removed: list[list[str]] = []
    monkeypatch.setattr(maintenance, "select_tables", lambda _: [])
    monkeypatch.setattr(maintenance, "remove_left_probes", lambda folders, _: removed.append(folders))
    monkeypatch.setattr(maintenance, "remove_left_trials", lambda root, _: removed.append([root]))
    maintain(work_of(world), None, NOW, dry_run=dry_run)
    root = world.lake.root
    assert removed == ([] if dry_run else [[root, f"{root}/orders"], [root]])


def test_published_table_is_maintained_and_a_concurrent_sender_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch replaces the one before in a table of its own, whose old files never went."""
    import pyarrow as pa
    from deltalake import write_deltalake

    log, tables, topic_id = FakeTransactionLog(), Tables(tmp_path), "T" * 22
    monkeypatch.setattr(published, "Transactions", log)
    monkeypatch.setattr(Kafka, "list_group_names", lambda _: [])
    monkeypatch.setattr(published, "ensure_accepted", lambda *_: TopicShape(2, 1, {"max.message.bytes": "1000000"}))
    monkeypatch.setattr(published, "_fetch_topic_id", lambda *_: topic_id)
    monkeypatch.setattr("highwater.maintenance.FEWEST_FILES", 2)
    monkeypatch.setattr(maintenance, "to_whole_hours", lambda _: 0)
    monkeypatch.setattr(maintenance, "select_tables", lambda _: ["published"])  # the others need Spark
    slices = [tables.plan(n, p0=(n, n + 1)) for n in range(3)]
    for n, slice_ in enumerate(slices):
        tables.decide(slice_, [Event(0, n, f"o{n}")])
    for slice_ in slices[:2]:
        tables.publish(slice_)
    path = tables.lake.build_table_path("orders", "published")
    [row] = [one for one in read_rows(path) if one["slice"] == slices[0].key]
    write_deltalake(path, pa.Table.from_pylist([row], publication_log.build_schema()), mode="append")
    rows = sorted(map(str, read_rows(path, "true")))
    book = publication_log_writer.PublicationLog(tables.work(), topic_id)

    dry = maintain(tables.work(), None, NOW, dry_run=True).tables[:2]
    assert [(one.table, one.compacted, one.before.stored > one.before.files) for one in dry] == [
        ("published", 1, False),
        ("_sending", 0, True),
    ]
    settled, sending, commits = maintain(tables.work(), None, NOW, dry_run=False).tables
    assert (settled.compacted, settled.before.files, settled.after.files) == (1, 3, 1)
    assert (sending.compacted, sending.before.files, sending.after.files) == (0, 1, 1)
    assert (commits.table, commits.compacted > 0) == ("_commits", True)
    for done in (settled, sending, commits):
        assert done.after.stored == done.after.files, "what older versions held is gone"
    assert sorted(map(str, read_rows(path, "true"))) == rows
    numbered = {**row, "slice": slices[2].key, "number": 0}
    batch = publication_log.build_sending_schema().remove(
        publication_log.build_sending_schema().get_field_index("batch")
    )
    book.begin(pa.Table.from_pylist([numbered], batch), {slices[2].key: 1}, 9)
    with pytest.raises(SupersededAttemptError):
        book.write_down()
    tables.publish(slices[2])
    assert [record.place for record in log.records] == [(0, 0), (0, 1), (0, 2)]


def test_a_version_whose_entry_is_gone_has_no_time(world: World) -> None:
    table = open_table(world.lake.build_table_path("orders", "events"))
    assert table is not None
    found = read_commit_times(table, [0, -5])
    assert found[-5] is None
    assert found[0] is not None
    assert abs(found[0] - datetime.now(UTC)) < timedelta(minutes=10)


def test_the_time_of_a_version_is_its_own_where_another_commit_follows(tmp_path: Path) -> None:
    """A commit between opening the table and the look gave each version the time of the next one."""
    import pyarrow as pa
    from deltalake import write_deltalake

    path = str(tmp_path / "table")
    for number in range(3):
        write_deltalake(path, pa.table({"n": [number]}), mode="append")
    before, after = open_table(path, 1), open_table(path)
    assert before is not None
    assert after is not None
    right = {entry["version"]: entry["timestamp"] for entry in after.history()}
    found = read_commit_times(before, [0, 1])
    assert {version: at and at.timestamp() * 1000 for version, at in found.items()} == {
        version: pytest.approx(right[version]) for version in (0, 1)
    }


@pytest.mark.slow
def test_tables_are_maintained_beside_a_run(
    bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files become fewer, rows and commit records stay, an old version stays readable, and the checks stay green."""
    monkeypatch.setattr("highwater.assets.raw.MIN_RECORDS_PER_TASK", 1)  # so that a slice has several files
    monkeypatch.setattr("highwater.maintenance.FEWEST_FILES", 2)
    bench.stream = replace(bench.stream, metrics=ORDERS.metrics)
    bench.send(*[order_message(f"o{n}", 1) for n in range(9)])
    slices = [bench.plan(0, p0=(0, 6)), bench.plan(1, p0=(6, 8)), bench.plan(2, p0=(8, 9))]
    for slice_ in slices[:2]:
        bench.materialise(slice_)
    keys = [one.key for one in slices[:2]]
    before = {
        name: bench.lake.load_slice_commits("orders", name, keys) for name in ("raw", "events", "rejects", "metrics")
    }
    assert len(files_of(bench, "raw")) >= 4
    old = open_table(bench.lake.build_table_path("orders", "events"))
    assert old is not None
    run = threading.Thread(target=bench.materialise, args=slices[2:])
    run.start()
    # A commit's number is a setting of its session, so each needs its own.
    own = prepare(SparkSession.builder.remote(spark_server.remote).create())
    report = {one.table: one for one in maintain(replace(bench.work(), spark=own), None, NOW, dry_run=False).tables}
    run.join()
    close(own)
    assert report["raw"].compacted >= 2
    assert report["raw"].removed == 0
    for name in ("raw", "events"):
        assert [file for file in files_of(bench, name) if file.first <= keys[0] and file.last >= keys[1]]
        assert not [file for file in files_of(bench, name) if file.first == file.last and file.first in keys]
        assert commits_behind_checkpoint(bench, name) <= 2, "readers would read the long commit that joined the files"
    assert {name: bench.lake.load_slice_commits("orders", name, keys) for name in before} == before
    assert {bytes(row["key"]) for row in bench.rows("raw")} == {b"o%d" % n for n in range(9)}
    assert read_table_version(bench.spark, bench.lake.build_table_path("orders", "events"), old.version()).count() == 8

    # The same without the horizon: it is what kept the files of before.
    monkeypatch.setattr(maintenance, "to_whole_hours", lambda _: 0)
    report = {one.table: one for one in maintain(bench.work(), None, NOW, dry_run=False).tables}
    assert report["raw"].removed >= 4
    assert all(one.after.stored == one.after.files for one in report.values())
    assert bench.failing() == {}
    assert len(bench.current()) == 9

    # Rows of raw become old: the rest stays without them, until somebody needs them.
    bench.stream = replace(bench.stream, retention=Retention(raw=timedelta(days=1)))
    decided = bench.rows("events")
    with dg.DagsterInstance.ephemeral() as instance:
        found = retain(bench.work(), instance, NOW + timedelta(days=2), dry_run=False)
    assert found is not None
    assert found.rows == {one.key: one.offsets for one in slices}
    assert bench.rows("raw") == []
    assert bench.failing() == {}
    [remaining] = events.materialise(bench.work(slices[2]))
    assert "the decision stays: raw's retention deleted 1 rows" in str(remaining.note)
    assert restore_rows(bench.work(slices[0])) == [slices[0].key]
    bench.materialise(slices[1])
    assert {(row["slice"], row["offset"]) for row in bench.rows("raw")} == {
        (one.key, offset) for one in slices[:2] for offset in range(one.ranges[0].start, one.ranges[0].end)
    }
    again = {row["attempt"] for row in bench.rows("events") if row["slice"] == slices[1].key}
    assert again.isdisjoint(row["attempt"] for row in decided if row["slice"] == slices[1].key), "reprocessed"
    assert len(bench.rows("events")) == len(decided) == 9
    assert bench.failing() == {}
    assert len(bench.current()) == 9


def commits_behind_checkpoint(bench: Bench, name: str) -> int:
    log = Path(bench.lake.build_table_path("orders", name)) / "_delta_log"
    checkpoint = json.loads((log / "_last_checkpoint").read_text())["version"]
    return sum(int(one.stem) > checkpoint for one in log.glob("*.json"))


def files_of(bench: Bench, name: str) -> list[File]:
    table = open_table(bench.lake.build_table_path("orders", name))
    assert table is not None
    return table_maintenance.list_files(table)
