"""The large tables of the benchmarks are sound: nothing that looks at them finds an error, and all faults are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from assets.streams.orders import STREAM
from bench import tables
from highwater.orchestration.checking import contents, follower_checks, origin_checks
from highwater.orchestration.checking.key_places import read_key_places
from highwater.orchestration.checking.offset_queries import read_raw_offsets
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.checking.plan_checks import check_offsets_as_planned, list_all_tiling_faults
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.orchestration.checking.version_checks import check_stream_versions, check_version_gaps, check_versions
from highwater.partition_counts import build_partition_count_periods
from highwater.partitioners import PartitionedBy, Partitioner
from highwater.resources.commit_log import read_slice_commits, read_written
from highwater.resources.delta import count_logged_rows
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.table_maintenance import list_files
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice


def test_nothing_finds_an_error_in_a_sound_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of 40 keys in five slices; each fault once in 25 records."""
    for name, value in {"LIVING": 40, "FAULT_EVERY": 25, "SLICES_PER_COMMIT": 2}.items():
        monkeypatch.setattr(tables, name, value)
    lake, ledger = Lake(str(tmp_path / "lake")), Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    maker = tables.Maker(STREAM, lake, ledger, "A" * 22, 360, 75)
    maker.write()
    faults = sum(number % 25 in {tables.TWICE, tables.MALFORMED} for number in range(360))
    malformed = sum(number % 25 == tables.MALFORMED for number in range(360))
    assert maker.records == 360 + faults

    ends = count_ends(ledger, lake, STREAM)
    assert (ends.produced, ends.accepted, ends.parked, ends.error) == (
        maker.records,
        360 + faults - malformed,
        malformed,
        None,
    )
    found = check_stream_versions(lake, STREAM)
    assert {name: result.text for name, result in found.items() if not result.passed} == {}
    assert found["one_content_a_version"].numbers["second_deliveries"] == faults - malformed

    slices = ledger.list_slices(STREAM.name)
    committed = read_attempts(lake, STREAM)
    assert list_all_tiling_faults(ledger, STREAM, slices) == []
    assert [slice_.key for slice_ in slices if committed.select_missing_tables(slice_.key)] == []
    keys = [slice_.key for slice_ in slices if slice_.topic == STREAM.topic]
    checks = {
        "as planned": check_offsets_as_planned(read_raw_offsets(ledger, lake, STREAM, keys)),
        "accounted": origin_checks.check_offsets_accounted(ledger, lake, STREAM, keys),
        "recorded": contents.check_events_as_recorded(ledger, lake, STREAM, keys),
        "follows": follower_checks.check_current_follows_events(lake, STREAM, keys),
        **check_versions(lake, STREAM, keys),
        **check_version_gaps(lake, STREAM, keys),
    }
    assert {(name, key): one.text for name, by in checks.items() for key, one in by.items() if not one.passed} == {}

    places = read_key_places(
        lake, STREAM, build_partition_count_periods([p for p in slices if p.topic == STREAM.topic], [])
    )
    assert places.several == 0
    assert next(iter(places.shares)) == PartitionedBy(Partitioner.CRC32, tables.PARTITIONS)


def test_a_long_log_has_a_record_and_a_file_of_each_slice(tmp_path: Path) -> None:
    """What `status` opens, and no more."""
    slice_ = Slice("orders", "orders", "A" * 22, 0, 0, {0: OffsetRange(0, 1)}, tables.BEGIN)
    slices = [replace(slice_, ordinal=n) for n in range(250)]
    path = str(tmp_path / "events")
    tables.write_log(path, slices)
    table = DeltaTable(path)
    expected = {one.key: tables.ROWS_PER_FILE for one in slices}
    assert {key: one.rows for key, one in read_written(table).items()} == expected
    assert [(file.first, file.last) for file in sorted(list_files(table), key=lambda file: file.first)] == [
        (one.key, one.key) for one in slices
    ]
    assert count_logged_rows(table) == len(slices) * tables.ROWS_PER_FILE
    last = slices[-3:]
    assert read_slice_commits(table, [one.key for one in last]) == {
        one.key: SliceCommit(one, 1, tables.ROWS_PER_FILE) for one in last
    }
