"""How many data files a commit writes, and whether its records are gathered for them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from highwater.assets.raw import MAX_RECORDS_PER_TASK, RECORDS_PER_FILE, _KafkaRows, compute_file_count
from highwater.maintenance import FEWEST_FILES, TARGET_BYTES, File, group_files_to_merge
from highwater.resources.spark_tables import (
    READS_PER_WRITER,
    TASKS,
    _compute_murmur3,
    _repartition_rows,
    compute_partition_numbers,
)
from highwater.slices import OffsetRange, Slice


@pytest.mark.parametrize(
    ("records", "files"),
    [
        ([], 1),
        ([0], 1),
        ([40_000], 1),
        ([40_001], 2),
        ([200_000], 5),
        ([400_000], 8),
        ([2_000_000], 8),
        ([2_000_001], 9),
        ([5_000] * 20, 1),
        ([99_999, 1], 1),
        ([100_000, 1], 2),
        ([100_000] * 20, 20),
        ([0, 0], 1),
    ],
)
def test_a_slice_by_itself_has_a_file_a_task_and_several_together_a_file_for_every_100_000(
    records: list[int], files: int
) -> None:
    """Twenty small slices are one file: a file for each would be what maintenance joins again."""
    assert compute_file_count(records) == files


@pytest.mark.parametrize("records", [[MAX_RECORDS_PER_TASK * TASKS], [8 * RECORDS_PER_FILE - 1, 1]])
def test_the_files_of_one_commit_wait_for_those_of_others(records: list[int]) -> None:
    """Joined by themselves, they would be rewritten for little, and again with their neighbours."""
    count, key = compute_file_count(records), "orders@0000000"
    assert count > 1
    small = [File(f"{number}.parquet", TARGET_BYTES // 8 - 1, key, key) for number in range(FEWEST_FILES)]
    assert group_files_to_merge(small[:count]) == []
    assert [len(group.files) for group in group_files_to_merge(small)] == [FEWEST_FILES]


@pytest.mark.parametrize(
    ("ranges", "again", "tasks"),
    [
        ({p: OffsetRange(0, 2_000) for p in range(24)} | {24: OffsetRange(5, 5)}, None, 24),
        ({0: OffsetRange(10, 200_010)}, None, 5),
        ({0: OffsetRange(10, 200_010)}, {"key": 1}, 1),
    ],
    ids=["many partitions", "one partition", "held by Spark"],
)
def test_a_partition_is_read_by_a_task_or_more(
    ranges: Mapping[int, OffsetRange], again: Mapping[str, int] | None, tasks: int
) -> None:
    rows: Any = Mock()
    slice_ = Slice("orders", "orders", "A" * 22, 0, 0, ranges, datetime(2026, 3, 1, tzinfo=UTC))
    assert _KafkaRows(rows, {slice_.key: slice_}, again).count_tasks([slice_.key]) == tasks


class FakeDataFrame:
    """A test double for a DataFrame; records how its rows are spread over files."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def repartition(self, *by: Any) -> FakeDataFrame:
        self.calls.append(("repartition", *by))
        return self

    def coalesce(self, files: int) -> FakeDataFrame:
        self.calls.append(("coalesce", files))
        return self


HASHED = ("hash", "offset")


@pytest.mark.parametrize(
    ("files", "tasks", "slices", "way"),
    [
        (0, 24, 20, []),
        (1, 24, 1, [("repartition", 1)]),
        (1, 24, 20, [("repartition", 1)]),
        (2, 4, 1, [("coalesce", 2)]),
        (2, 2 * READS_PER_WRITER + 1, 1, [("repartition", 2, HASHED)]),
        (8, 9, 1, [("coalesce", 8)]),
        (2, 4, 20, [("repartition", 2, "neighbours of 20")]),
        (9, 24, 2, [("repartition", 9, "neighbours of 2")]),
    ],
    ids=[
        "as it is spread",
        "small",
        "many small ones",
        "a few partitions",
        "many partitions",
        "large",
        "of several",
        "of several large ones",
    ],
)
def test_a_commit_gathers_its_rows_where_a_writer_would_read_many_partitions_one_after_another(
    files: int, tasks: int, slices: int, way: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several slices go to one file for each declared size, and by value: a task that runs again sends each
    row where it went before.
    """
    monkeypatch.setattr("pyspark.sql.functions.xxhash64", lambda column: ("hash", column))
    monkeypatch.setattr(
        "highwater.resources.spark_tables._build_file_key", lambda files, spread, keys: f"neighbours of {len(keys)}"
    )
    rows: Any = FakeDataFrame()
    _repartition_rows(rows, files, "offset", tasks, [f"orders@{n:07d}" for n in range(slices)])
    assert rows.calls == way


@pytest.mark.parametrize(("number", "reported"), [(0, 933211791), (1, -559580957)])
def test_a_number_is_hashed_as_spark_hashes_it(number: int, reported: int) -> None:
    """The values are those of `SELECT hash(0), hash(1)`."""
    assert _compute_murmur3(number) == reported


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_each_partition_has_a_number_that_is_sent_there(count: int) -> None:
    assert [_compute_murmur3(number) % count for number in compute_partition_numbers(count)] == list(range(count))
