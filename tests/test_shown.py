"""What Dagster is told of topics and slices of many partitions: it keeps all of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from highwater.slices import OffsetRange, Slice
from orchestration.metadata import MOST_SHOWN, offset_table
from orchestration.observation import Position, of_topic

MANY = 1000


def rows(table: Any) -> list[dict[str, Any]]:
    return [record.data for record in table.records]


def test_of_many_partitions_those_with_most_lag_are_shown_and_all_are_counted() -> None:
    found = of_topic([Position(p, planned=0, log_start=0, last_stable=p) for p in range(MANY)])
    shown = rows(found["positions"])
    assert [row["partition"] for row in shown] == [*range(MANY - MOST_SHOWN, MANY)]
    numbers: dict[str, Any] = {name: found[name] for name in ("lag", "partitions")}
    assert {name: one.value for name, one in numbers.items()} == {"lag": sum(range(MANY)), "partitions": MANY}


def test_of_a_slice_of_many_partitions_those_with_most_offsets_are_shown() -> None:
    ranges = {p: OffsetRange(0, MANY - p) for p in range(MANY)}
    shown = rows(offset_table(Slice("orders", "orders", "A", 0, 0, ranges, datetime.now(UTC))))
    assert [(row["partition"], row["offsets"]) for row in shown] == [(p, MANY - p) for p in range(MOST_SHOWN)]


def test_of_few_partitions_all_are_shown() -> None:
    assert len(rows(of_topic([Position(p, 0, 0, None) for p in range(MOST_SHOWN)])["positions"])) == MOST_SHOWN
