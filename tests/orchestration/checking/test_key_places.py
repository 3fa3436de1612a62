"""Keys by the partitions that they are in, on tables that are written here, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dev.planted import plant
from highwater.orchestration.checking import key_places as module
from highwater.orchestration.checking.key_places import KeyPlaces, read_key_places
from highwater.partition_counts import PartitionCountPeriod, build_partition_count_periods
from highwater.partitioners import KeyPlaceReason, PartitionedBy, Partitioner
from highwater.plans import Generation
from highwater.resources.lake import Lake
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
NOW = datetime(2026, 3, 1, tzinfo=UTC)
MURMUR2, CRC32, _ = Partitioner


def a_slice(ordinal: int, partitions: int, generation: int = 0) -> Slice:
    ranges = dict.fromkeys(range(partitions), OffsetRange(0, 1))
    return Slice("orders", "orders", f"ID{generation}", generation, ordinal, ranges, NOW)


def a_generation(number: int, partitions: int) -> Generation:
    return Generation("orders", "orders", f"ID{number}", number, dict.fromkeys(range(partitions), 0), NOW)


class Raw:
    """A table raw, filled by producers that hash."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(str(folder))
        self.rows: list[dict[str, Any]] = []
        self.slices: list[Slice] = []

    def send(self, slice_: Slice, by: Partitioner, keys: Iterable[bytes | None], over: int | None = None) -> None:
        """Records of these keys in a slice, by a producer that knows a number of partitions; the whole slice."""
        self.slices = [*{one.key: one for one in [*self.slices, slice_]}.values()]
        for key in keys:
            partition = 0 if key is None else by.choose_partition(key, over or len(slice_.ranges))
            self.put(slice_, key, partition)

    def put(self, slice_: Slice, key: bytes | None, partition: int) -> None:
        place = {"partition": partition, "offset": len(self.rows), "generation": slice_.generation}
        self.rows.append({"slice": slice_.key, "topic": slice_.topic, "key": key, **place})

    def ask(self) -> KeyPlaces:
        import pyarrow as pa

        kinds = {"partition": pa.int32(), "offset": pa.int64(), "generation": pa.int32(), "key": pa.binary()}
        names = ["slice", "topic", "generation", "partition", "offset", "key"]
        schema = pa.schema([(name, kinds.get(name, pa.string())) for name in names])
        made, slice_commits = (
            pa.Table.from_pylist(self.rows, schema),
            [SliceCommit(slice_, 1, None) for slice_ in self.slices],
        )
        plant(self.lake.build_table_path("orders", "raw"), made, slice_commits, replace=True)
        return read_key_places(self.lake, STREAM, build_partition_count_periods(self.slices, []))


def keys(first: int, beyond: int) -> list[bytes]:
    return [b"order-%d" % number for number in range(first, beyond)]


def test_one_fleet_puts_no_key_in_two_partitions(tmp_path: Path) -> None:
    raw = Raw(tmp_path)
    raw.send(a_slice(0, 4), MURMUR2, [*keys(0, 300), None])
    raw.send(a_slice(1, 4), MURMUR2, keys(200, 400))
    found = raw.ask()
    assert (found.keys, found.several, found.warnings) == (400, 0, [])
    assert found.shares == {PartitionedBy(MURMUR2, 4): pytest.approx(1, abs=0.001)}


def test_two_fleets_are_reported_with_their_shares(tmp_path: Path) -> None:
    raw = Raw(tmp_path)
    theirs = keys(0, 60)
    raw.send(a_slice(0, 12), MURMUR2, keys(0, 2000))
    raw.send(a_slice(1, 12), CRC32, theirs)
    moved = [key for key in theirs if MURMUR2.choose_partition(key, 12) != CRC32.choose_partition(key, 12)]
    found = raw.ask()
    assert (found.keys, found.several) == (2000, len(moved))
    assert found.why[KeyPlaceReason.FLEETS] >= 0.9 * len(
        moved
    )  # of the others both places are murmur2's for other reasons
    assert found.fleets == [MURMUR2, CRC32]
    assert found.shares[PartitionedBy(CRC32, 12)] == pytest.approx(60 / 2060, abs=0.01)
    assert "2 fleets of producers hash differently, by murmur2 and CRC32" in found.warnings[0]
    [sample] = [row for row in found.samples if row["key"] == found.samples[0]["key"]]
    key = sample["key"].encode()
    assert (
        f"in {MURMUR2.choose_partition(key, 12)} from offset {theirs.index(key)} (orders@0000000, murmur2"
        in sample["places"]
    )
    assert (
        f"in {CRC32.choose_partition(key, 12)} from offset {2000 + theirs.index(key)} (orders@0000001, CRC32"
        in sample["places"]
    )


def test_partitions_that_were_added_are_no_second_fleet(tmp_path: Path) -> None:
    """The slice that is the first to know of them holds records from before too."""
    raw = Raw(tmp_path)
    raw.send(a_slice(0, 4), MURMUR2, keys(0, 500))
    raw.send(a_slice(1, 6), MURMUR2, keys(500, 600), over=4)
    raw.send(a_slice(1, 6), MURMUR2, keys(0, 300))
    found = raw.ask()
    moved = [key for key in keys(0, 300) if MURMUR2.choose_partition(key, 4) != MURMUR2.choose_partition(key, 6)]
    assert (found.several, found.why) == (len(moved), {KeyPlaceReason.ADDED: len(moved)})
    assert (found.fleets, found.warnings) == ([MURMUR2], [])
    assert {choice.partitions for choice in found.shares if choice} == {4, 6}


def test_a_producer_that_names_partitions_itself_is_reported(tmp_path: Path) -> None:
    raw = Raw(tmp_path)
    first = a_slice(0, 12)
    raw.send(first, MURMUR2, keys(0, 200))
    odd = next(key for key in keys(0, 200) if 11 not in {one.choose_partition(key, 12) for one in Partitioner})
    raw.put(first, odd, 11)
    found = raw.ask()
    assert (found.several, found.why) == (1, {KeyPlaceReason.OTHER: 1})
    assert "1 are in several partitions though none was added" in found.warnings[0]


def test_a_key_of_another_generation_is_another_key(tmp_path: Path) -> None:
    raw = Raw(tmp_path)
    raw.send(a_slice(0, 4), MURMUR2, keys(0, 100))
    raw.send(a_slice(1, 7, generation=1), MURMUR2, keys(0, 100))
    found = raw.ask()
    assert (found.keys, found.several) == (200, 0)


def test_key_ranges_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Raw(tmp_path)
    raw.send(a_slice(0, 12), MURMUR2, keys(0, 300))
    raw.send(a_slice(1, 12), CRC32, keys(0, 50))
    whole = raw.ask()
    monkeypatch.setattr(module, "RECORDS_AT_ONCE", 60)
    in_ranges = raw.ask()
    assert replace(in_ranges, samples=()) == replace(whole, samples=())
    assert {row["key"] for row in in_ranges.samples} <= {key.decode() for key in keys(0, 50)}


def test_a_key_that_is_no_text_is_shown(tmp_path: Path) -> None:
    raw = Raw(tmp_path)
    first = a_slice(0, 12)
    raw.send(first, MURMUR2, [b"\xff'\x00"])
    raw.put(first, b"\xff'\x00", (MURMUR2.choose_partition(b"\xff'\x00", 12) + 1) % 12)
    assert [row["key"] for row in raw.ask().samples] == ["0xff2700"]


def test_without_a_table_there_are_no_keys(tmp_path: Path) -> None:
    assert (
        read_key_places(Lake(str(tmp_path)), STREAM, [PartitionCountPeriod(0, "ID0", "orders@0000000", 0, 4, NOW)])
        == KeyPlaces()
    )


def test_eras_follow_partitions_and_generations() -> None:
    slices = [a_slice(0, 4), a_slice(1, 4), a_slice(2, 6), a_slice(4, 3, generation=1)]
    found = build_partition_count_periods(slices[::-1], [a_generation(0, 4), a_generation(1, 5)])
    assert [(period.since, period.generation, period.partitions, period.added) for period in found] == [
        ("orders@0000000", 0, 4, 0),
        ("orders@0000002", 0, 6, 2),
        ("orders@0000004", 1, 5, 0),
    ]
    assert [period.text for period in found] == [
        "generation 0 began",
        "2 partitions were added",
        "generation 1 began",
    ]
