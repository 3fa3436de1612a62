"""How many data files a slice has, and whether its records are gathered for them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from assets.raw import MOST_RECORDS_A_TASK, RECORDS_A_FILE, _Read, files_for
from highwater.slices import OffsetRange, Slice
from highwater.upkeep import FEWEST_FILES
from resources.spark_tables import READS_A_WRITER, TASKS, _laid_out


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
        ([100_000, 1], 1),
        ([200_000, 1], 2),
    ],
)
def test_a_slice_by_itself_has_a_file_a_task_and_one_of_several_a_file_for_every_100_000(
    records: list[int], files: int
) -> None:
    assert files_for(records) == files


@pytest.mark.parametrize("records", [[MOST_RECORDS_A_TASK * TASKS], [8 * RECORDS_A_FILE, 1]])
def test_what_a_slice_was_written_as_is_not_joined(records: list[int]) -> None:
    """The files would be rewritten for nothing, and kept twice for a week."""
    assert files_for(records) < FEWEST_FILES


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
    piece = Slice("orders", "orders", "A" * 22, 0, 0, ranges, datetime(2026, 3, 1, tzinfo=UTC))
    assert _Read(rows, {piece.key: piece}, again).tasks([piece.key]) == tasks


@pytest.mark.parametrize(
    ("files", "tasks", "alone", "way"),
    [
        (1, 24, True, "repartition"),
        (2, 4, True, "coalesce"),
        (2, 2 * READS_A_WRITER + 1, True, "repartition"),
        (8, 9, True, "coalesce"),
        (2, 4, False, "repartition"),
    ],
    ids=["small", "a few partitions", "many partitions", "large", "of several"],
)
def test_a_slice_is_gathered_where_a_writer_would_read_many_partitions_one_after_another(
    *, files: int, tasks: int, alone: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions: Any = Mock()
    monkeypatch.setattr("pyspark.sql.functions.xxhash64", functions)
    monkeypatch.setattr("pyspark.sql.functions.pmod", functions)
    monkeypatch.setattr("pyspark.sql.functions.lit", functions)
    rows: Any = Mock()
    _laid_out(rows, files, "offset", tasks, alone=alone)
    assert [call[0] for call in rows.method_calls] == [way]
