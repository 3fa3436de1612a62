"""Small files of slices are joined into larger ones; rows, commit records and later commits stay as they are."""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from highwater.assets import events, raw
from highwater.assets.compaction import compact
from highwater.commit_records import CommitRecord, to_user_metadata
from highwater.declaration import Field, Maintenance
from highwater.errors import SupersededAttemptError
from highwater.maintenance import REWRITTEN_BYTES, TARGET_BYTES, FileGroup
from highwater.orchestration.operations.maintenance import maintain
from highwater.orchestration.reporting.audit import audit
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.locating import locate
from highwater.resources.delta import add_actions, open_table
from highwater.resources.spark import close, prepare
from highwater.resources.table_maintenance import join_files, list_files
from tests.helpers.support import Bench, Message, order_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dev.spark_connect import SparkConnect
    from highwater.maintenance import File
    from highwater.slices import Slice

pytestmark = pytest.mark.slow


def small_files(bench: Bench, table: str) -> list[File]:
    opened = open_table(bench.lake.build_table_path(bench.stream.name, table))
    assert opened is not None
    return list_files(opened)


@pytest.fixture(scope="module")
def written(module_bench: Bench) -> Bench:
    """Four slices that one run each took: a file each. The later an event was sent, the earlier it happened."""
    module_bench.send(*[order_message(f"o{n}", 1, event_time=f"2026-03-{12 - n:02d}T10:00:00Z") for n in range(12)])
    for n in range(4):
        slice_ = module_bench.plan(n, p0=(3 * n, 3 * n + 3))
        raw.materialise(module_bench.work(slice_))
        events.materialise(module_bench.work(slice_))
    return module_bench


@pytest.fixture
def alone(written: Bench, tmp_path: Path) -> Bench:
    """The four slices, for a test that changes their tables."""
    return written.copy(tmp_path)


def list_slices(bench: Bench) -> list[Slice]:
    return bench.ledger.list_slices(bench.stream.name)


def by_slice(bench: Bench, table: str) -> list[tuple[Any, ...]]:
    return sorted((row["slice"], row.get("offset", row.get("origin_offset"))) for row in bench.rows(table))


def test_small_files_become_one_and_every_row_stays(alone: Bench) -> None:
    bench, slices = alone, list_slices(alone)
    before = {
        table: (by_slice(bench, table), bench.lake.load_slice_commits("orders", table, []))
        for table in ("raw", "events")
    }
    held = {table: bench.lake.load_commits("orders", table) for table in before}
    for table in before:
        files = small_files(bench, table)
        assert len(files) == len(slices)
        assert compact(bench.work(), table, FileGroup(tuple(files)))
        [file] = small_files(bench, table)
        assert (file.first, file.last) == (slices[0].key, slices[-1].key)
        assert by_slice(bench, table) == before[table][0]
        assert bench.lake.load_commits("orders", table).records == held[table].records

    # One of them is replaced afterwards, the others stay, and what was committed once is not committed again.
    raw.materialise(bench.work(slices[1]))
    assert by_slice(bench, "raw") == before["raw"][0]
    assert len(small_files(bench, "raw")) == 2
    assert bench.lake.load_commits("orders", "raw").find_attempt(slices[1].key) > held["raw"].find_attempt(
        slices[1].key
    )
    assert bench.lake.load_commits("orders", "raw").find_attempt(slices[0].key) == held["raw"].find_attempt(
        slices[0].key
    )
    with pytest.raises(SupersededAttemptError, match="were replaced"):
        compact(bench.work(), "raw", FileGroup(tuple(files)))


def test_rows_lie_in_the_order_of_the_declared_columns(alone: Bench) -> None:
    assert compact(alone.work(), "events", FileGroup(tuple(small_files(alone, "events"))))
    assert [row["key"] for row in alone.rows("events")] == [f"o{n}" for n in reversed(range(12))]


def test_another_column_is_the_order_in_files_and_between_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that filter by it skip files, by Delta's statistics: it had none."""
    by, fields = "@size-1", (*bench.stream.fields, Field("@size-1", "integer"))
    bench.stream = replace(bench.stream, fields=fields, maintenance=Maintenance(cluster_by=(by, "key")))
    sizes = {f"o{n}": 5 * n % 12 // 2 for n in range(12)}
    bench.send(*[order_message(key, 1, **{by: size}) for key, size in sizes.items()])
    slices = [bench.plan(n, p0=(6 * n, 6 * n + 6)) for n in range(2)]
    raw.materialise(bench.work(*slices))
    for slice_ in slices:
        events.materialise(bench.work(slice_))
    group = FileGroup(tuple(small_files(bench, "events")))
    monkeypatch.setattr("highwater.maintenance.TARGET_BYTES", group.bytes // 2)
    assert compact(bench.work(), "events", group)
    path = bench.lake.build_table_path("orders", "events")
    files = add_actions(DeltaTable(path)).select(["path", f"min.{by}", f"max.{by}"]).to_pylist()
    first, second = sorted(files, key=lambda file: file[f"min.{by}"])
    assert first[f"max.{by}"] < second[f"min.{by}"]
    found = [pq.read_table(f"{path}/{file['path']}", columns=["key"])["key"].to_pylist() for file in (first, second)]
    assert [*found[0], *found[1]] == sorted(sizes, key=lambda key: (sizes[key], key))
    assert min(map(len, found)) > 1


def test_rows_of_raw_lie_in_the_order_of_the_topic(bench: Bench) -> None:
    """A partition after the other, where each slice has offsets of both."""
    bench.send(*[order_message(f"o{n}", 1, partition=n % 2) for n in range(8)])
    slices = [bench.plan(n, p0=(2 * n, 2 * n + 2), p1=(2 * n, 2 * n + 2)) for n in range(2)]
    for slice_ in slices:
        raw.materialise(bench.work(slice_))
    assert compact(bench.work(), "raw", FileGroup(tuple(small_files(bench, "raw"))))
    found = [(row["partition"], row["offset"]) for row in bench.rows("raw")]
    assert found == [(partition, offset) for partition in range(2) for offset in range(4)]


def test_rows_beyond_one_file_become_several_ordered_files(alone: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, slices = alone, list_slices(alone)
    group, rows = FileGroup(tuple(small_files(bench, "raw"))), by_slice(bench, "raw")
    monkeypatch.setattr("highwater.maintenance.TARGET_BYTES", group.bytes // 2)
    assert compact(bench.work(), "raw", group)
    first, second = sorted(small_files(bench, "raw"), key=lambda file: file.first)
    assert (first.first, second.last, first.last <= second.first) == (slices[0].key, slices[-1].key, True)
    assert by_slice(bench, "raw") == rows


def test_a_slice_that_has_rows_in_a_large_file_too_stays_where_it_is(alone: Bench) -> None:
    bench, slices = alone, list_slices(alone)
    first, second, third, _ = sorted(small_files(bench, "raw"), key=lambda file: file.first)
    assert compact(bench.work(), "raw", FileGroup((first, second)))
    [large] = [file for file in small_files(bench, "raw") if file.first != file.last]
    raw.materialise(bench.work(slices[0]))
    [again] = [file for file in small_files(bench, "raw") if file.first == file.last == slices[0].key]
    rows = by_slice(bench, "raw")
    assert compact(bench.work(), "raw", FileGroup((again, third)))
    assert by_slice(bench, "raw") == rows
    left = {(file.first, file.last) for file in small_files(bench, "raw")}
    untouched = slices[3].key, slices[3].key
    assert left == {(slices[1].key, slices[1].key), (slices[0].key, slices[2].key), untouched}
    assert large.path not in {file.path for file in small_files(bench, "raw")}, "its row of the first slice is gone"


def test_slices_of_one_run_lie_beside_each_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for a slice opens few files; a large slice is in several of them."""
    monkeypatch.setattr("highwater.assets.raw.RECORDS_PER_FILE", 4)
    bench.send(*[order_message(f"o{n}", 1) for n in range(24)])
    slices = [bench.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(6)]
    raw.materialise(bench.work(*slices))
    files = sorted(small_files(bench, "raw"), key=lambda file: file.first)
    assert [(file.first, file.last) for file in files] == [(slices[n].key, slices[n + 1].key) for n in (0, 2, 4)], (
        "two slices a file"
    )
    large = [bench.plan(6, p0=(12, 22)), bench.plan(7, p0=(22, 24))]
    raw.materialise(bench.work(*large))
    of_large = [file for file in small_files(bench, "raw") if file.first <= large[0].key <= file.last]
    assert len(of_large) >= 2
    assert by_slice(bench, "raw") == sorted((one.key, n) for one in [*slices, *large] for n in offsets(one))


def offsets(slice_: Slice) -> range:
    return range(slice_.ranges[0].start, slice_.ranges[0].end)


def test_a_merge_closes_what_a_dead_run_left_open(alone: Bench) -> None:
    """The number of its write is taken by nobody else: who finds the number in the table takes it for committed."""
    bench, slices = alone, list_slices(alone)
    held = bench.lake.load_commits("orders", "raw", [])
    dead = CommitRecord("orders@0000099", 1, 5, "dead")
    metadata = to_user_metadata([dead], held.number + 1)
    bench.ledger.intents.open("dead", "orders", "raw", metadata, datetime.now(UTC))
    rows = by_slice(bench, "raw")
    assert compact(bench.work(), "raw", FileGroup(tuple(small_files(bench, "raw"))))
    assert bench.ledger.intents.list_for_table("orders", "raw") == []
    found = bench.lake.load_commits("orders", "raw")
    assert set(found.records) == {slice_.key for slice_ in slices}
    assert found.number == held.number + 2, "one closed the dead run's write, one is the merge's"
    assert by_slice(bench, "raw") == rows


def test_a_table_that_is_restored_to_before_a_merge_is_whole(alone: Bench) -> None:
    bench, slices = alone, list_slices(alone)
    before, rows = bench.lake.load_commits("orders", "raw"), by_slice(bench, "raw")
    assert compact(bench.work(), "raw", FileGroup(tuple(small_files(bench, "raw"))))
    path = bench.lake.build_table_path("orders", "raw")
    DeltaTable(path).restore(before.version)
    assert by_slice(bench, "raw") == rows
    assert bench.lake.load_commits("orders", "raw").records == before.records
    raw.materialise(bench.work(slices[0]))
    assert by_slice(bench, "raw") == rows


@pytest.mark.parametrize("point", ["before the write", "before it is recorded"])
def test_a_merge_that_dies_changes_nothing_and_the_next_goes_on(
    alone: Bench, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    class KilledError(Exception):
        pass

    def die(*_: object, **__: object) -> None:
        raise KilledError

    bench = alone
    rows, records = by_slice(bench, "raw"), bench.lake.load_commits("orders", "raw").records
    group = FileGroup(tuple(small_files(bench, "raw")))
    place = {
        "before the write": "highwater.assets.compaction._skip_replace_check",
        "before it is recorded": "highwater.resources.numbered_commits._complete",
    }
    with monkeypatch.context() as patched:
        patched.setattr(place[point], die)
        with pytest.raises(KilledError):
            compact(bench.work(), "raw", group)
    assert by_slice(bench, "raw") == rows
    assert len(bench.ledger.intents.list_for_table("orders", "raw")) == 1
    again = FileGroup(tuple(small_files(bench, "raw")))
    compact(bench.work(), "raw", again)
    assert bench.ledger.intents.list_for_table("orders", "raw") == []
    assert (by_slice(bench, "raw"), bench.lake.load_commits("orders", "raw").records) == (rows, records)
    assert len(small_files(bench, "raw")) == 1


def test_a_backfill_of_fifty_slices_goes_on_beside_steady_appends(bench: Bench) -> None:
    """Writers take turns: none gets a conflict, and each goes on while the others do."""
    old, appends = 50, 3
    bench.send(*[order_message(f"o{n}", 1) for n in range(1000)])
    slices = [bench.plan(n, p0=(n, n + 1)) for n in range(old)]
    raw.materialise(bench.work(*slices))
    ended, lock, ordinals = threading.Event(), threading.Lock(), iter(range(old, 1000))

    def append(_: int) -> list[Slice]:
        found: list[Slice] = []
        while not ended.is_set():
            with lock:
                n = next(ordinals)
            found.append(bench.plan(n, p0=(n, n + 1)))
            raw.materialise(bench.work(found[-1]))
        return found

    with ThreadPoolExecutor(appends) as pool:
        futures = [pool.submit(append, n) for n in range(appends)]
        try:
            for slice_ in slices[::10]:  # one slice of a batch, again and again, and then all of them
                [report] = raw.materialise(bench.work(slice_))
                assert report.note is None
            reports = raw.materialise(bench.work(*slices))
        finally:
            ended.set()
        added = [future.result() for future in futures]
    assert [report.note for report in reports] == [None] * old
    assert all(len(mine) >= 2 for mine in added), "a writer starved"
    everything = [*slices, *(slice_ for mine in added for slice_ in mine)]
    assert by_slice(bench, "raw") == sorted((slice_.key, slice_.ranges[0].start) for slice_ in everything)


def test_a_backfill_through_current_goes_on_beside_appends_of_another_session(
    bench: Bench, spark_server: SparkConnect
) -> None:
    """Single slices and all of them at once, while keys of the same slices get new versions: nobody gets a conflict."""
    old, bad = 6, 2

    def read_sent(offset: int) -> tuple[str, int] | None:
        return None if offset % old == bad else (f"o{offset % old}", 1 + offset // old)

    sent = [read_sent(offset) for offset in range(20 * old)]
    bench.send(*[order_message(*one) if one else Message(b"bad", b"no JSON") for one in sent])
    slices = [bench.plan(n, p0=(n, n + 1)) for n in range(old)]
    bench.materialise(*slices)
    ended, session = threading.Event(), prepare(SparkSession.builder.remote(spark_server.remote).create())
    other = replace(bench, spark=session, log=[])

    def append() -> list[Slice]:
        found: list[Slice] = []
        while not ended.is_set():
            n = old + len(found)
            found.append(other.plan(n, p0=(n, n + 1)))
            other.materialise(found[-1])
        return found

    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(append)
        try:
            reports = [bench.materialise(*again) for again in (slices[:1], slices, slices[3:5])]
        finally:
            ended.set()
        added = appending.result()
    close(session)
    assert [one.note for report in reports for name in ("raw", "events", "current") for one in report[name]] == [
        None
    ] * 27
    assert len(added) >= 2, "the writer of new slices starved"
    everything = [(slice_.key, slice_.ranges[0].start) for slice_ in (*slices, *added)]
    accepted = {place: one for place in everything if (one := read_sent(place[1])) is not None}
    rejected = [place for place in everything if place not in accepted]
    assert {name: by_slice(bench, name) for name in ("raw", "events", "rejects", "dlq")} == {
        "raw": everything, "events": [*accepted], "rejects": rejected, "dlq": rejected
    }  # fmt: skip
    highest = {key: max(version for name, version in accepted.values() if name == key) for key, _ in accepted.values()}
    assert {key: row["version"] for key, row in bench.current().items()} == highest
    assert bench.failing() == {}


def test_small_files_of_a_table_without_slices_become_one_and_large_ones_stay(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `current`: Spark would rewrite every file below a gigabyte."""
    path = str(tmp_path / "current")
    write_deltalake(path, pa.table({"key": [str(uuid.uuid4()) for _ in range(3_000)]}))
    [large] = DeltaTable(path).file_uris()
    for name, bytes_ in (("REWRITTEN_BYTES", 1), ("TARGET_BYTES", 2)):
        monkeypatch.setattr(f"highwater.resources.table_maintenance.{name}", bytes_ * Path(large).stat().st_size)
    for number in range(3):
        write_deltalake(path, pa.table({"key": [f"k{number}"]}), mode="append")
    rows = sorted(DeltaTable(path).to_pyarrow_table()["key"].to_pylist())

    join_files(bench.spark, path)

    after = DeltaTable(path)
    assert (len(after.file_uris()), large in after.file_uris()) == (2, True)
    assert sorted(after.to_pyarrow_table()["key"].to_pylist()) == rows


def test_files_of_17_mib_of_current_become_files_of_the_target(bench: Bench) -> None:
    """Only files below 16 MiB were joined: hundreds of this size stayed for ever."""
    path, values = bench.lake.build_table_path("orders", "current"), 170
    for number in range(8):
        rows = {
            "key": [f"{number} {n}" for n in range(values)],
            "value": [os.urandom(2**20 // 10) for _ in range(values)],
        }
        write_deltalake(path, pa.table(rows), mode="append")
    before = sorted(DeltaTable(path).to_pyarrow_table(columns=["key"])["key"].to_pylist())

    report, _ = maintain(bench.work(), None, datetime.now(UTC), dry_run=False).tables

    assert (report.table, report.before.files, report.compacted) == ("current", 8, 1)
    assert report.before.bytes > TARGET_BYTES
    sizes = sorted(add_actions(DeltaTable(path))["size_bytes"].to_pylist())
    assert (len(sizes), REWRITTEN_BYTES < sizes[-1] <= TARGET_BYTES) == (2, True)
    assert sorted(DeltaTable(path).to_pyarrow_table(columns=["key"])["key"].to_pylist()) == before
    again, _ = maintain(bench.work(), None, datetime.now(UTC), dry_run=False).tables
    assert again.compacted == 0


def test_every_record_is_found_after_all_tables_were_compacted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain`, `locate` and `audit` read the compacted tables and `_commits` as they read the small files."""
    broken = Message(b"o1", b"no JSON")
    bench.send(order_message("o0", 1), broken, order_message("o1", 1), broken, order_message("o0", 2))
    slices = [bench.plan(n, p0=(n, n + 1)) for n in range(5)]
    for slice_ in slices:
        bench.materialise(slice_)
    before = report_all(bench, slices)
    monkeypatch.setattr("highwater.maintenance.FEWEST_FILES", 2)
    report = maintain(bench.work(), None, datetime.now(UTC), dry_run=False)
    joined = {one.table for one in report.tables if one.compacted}
    assert joined == {"raw", "events", "rejects", "dlq", "current", "_commits"}
    assert report_all(bench, slices) == before
    ends = [one["end"] for one in before["located"]]
    assert ends == ["accepted", "parked", "accepted", "parked", "accepted"]
    assert before["audit"]["ends"]["parked"] == 2


# Without `partitions`, where the ages of records grow.
ACCOUNT = ("errors", "unfinished", "ends", "losses", "failing_now", "tiling_faults", "orphan_slices")


def report_all(bench: Bench, slices: Sequence[Slice]) -> dict[str, Any]:
    """Each slice, the end of each offset and the account of all; without times, and samples in the order of files."""
    where = bench.ledger, bench.kafka, bench.lake, bench.stream
    located = [one for offset in range(len(slices)) for one in locate(*where, bench.stream.topic, 0, offset)]
    page = audit(*where, records_of=len(slices), versions=True).to_plain()
    return {
        "explained": [explain(bench.ledger, bench.lake, bench.stream, one.key).to_plain() for one in slices],
        "located": [one.to_plain() for one in located],
        "audit": {name: page[name] for name in ACCOUNT},
    }
