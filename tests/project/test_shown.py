"""The metadata in Dagster of topics and slices of many partitions: it keeps all of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from highwater.assets.work import SliceReport
from highwater.orchestration.metadata import MAX_SHOWN, build_offset_table, build_slice_metadata
from highwater.orchestration.observation import PlanningPosition, build_topic_metadata
from highwater.slices import OffsetRange, Slice

MANY = 1000


def rows(table: Any) -> list[dict[str, Any]]:
    return [record.data for record in table.records]


def test_many_partitions_show_those_with_most_lag_and_count_all() -> None:
    found = build_topic_metadata([PlanningPosition(p, planned=0, log_start=0, last_stable=p) for p in range(MANY)])
    shown = rows(found["positions"])
    assert [row["partition"] for row in shown] == [*range(MANY - MAX_SHOWN, MANY)]
    numbers: dict[str, Any] = {name: found[name] for name in ("lag", "partitions")}
    assert {name: one.value for name, one in numbers.items()} == {"lag": sum(range(MANY)), "partitions": MANY}


def test_slice_of_many_partitions_shows_those_with_most_offsets() -> None:
    ranges = {p: OffsetRange(0, MANY - p) for p in range(MANY)}
    shown = rows(build_offset_table(Slice("orders", "orders", "A", 0, 0, ranges, datetime.now(UTC))))
    assert [(row["partition"], row["offsets"]) for row in shown] == [(p, MANY - p) for p in range(MAX_SHOWN)]


def test_few_partitions_are_all_shown() -> None:
    assert (
        len(rows(build_topic_metadata([PlanningPosition(p, 0, 0, None) for p in range(MAX_SHOWN)])["positions"]))
        == MAX_SHOWN
    )


def reported(partitions: int, **changes: Any) -> SliceReport:
    slice_ = Slice("orders", "orders", "A", 0, 7, {p: OffsetRange(0, 1) for p in range(partitions)}, datetime.now(UTC))
    return SliceReport(slice_, attempt=1, rows=10, delta_version=3, **changes)


def test_metadata_names_the_command_that_shows_the_other_offsets() -> None:
    many, few = build_slice_metadata(reported(MANY)), build_slice_metadata(reported(MAX_SHOWN))
    assert (many["partitions"].value, few["partitions"].value) == (MANY, MAX_SHOWN)
    assert "highwater explain 'orders@0000007' shows all 1,000" in str(many["partitions_shown"].value)
    assert "partitions_shown" not in few


def test_seconds_plot_alike_whatever_the_size_of_the_range() -> None:
    """Each slice of a range once had the seconds of the whole run."""
    alone = build_slice_metadata(reported(1, seconds={"read": 1.5}))
    among = build_slice_metadata(reported(1, seconds={"read": 30.0}), together=20)
    assert alone["seconds/read"].value == among["seconds/read"].value == 1.5
    assert (alone["slices_in_run"].value, among["slices_in_run"].value) == (1, 20)
    assert "slices_in_run" not in build_slice_metadata(reported(1)), "of what took no time here"


# Seconds since 1970 that are exact, where the year is one that Python's times have.
MOMENTS = {
    "the last microsecond": (253_402_300_799_999_999, 253_402_300_799.0),
    "the first microsecond": (-62_135_596_800_000_000, -62_135_596_800.0),
    "year 10000, from before it was rejected": (253_402_300_800_000_000, "253402300800000000 microseconds since 1970"),
    "any number": (2**63 - 1, f"{2**63 - 1} microseconds since 1970"),
}


@pytest.mark.parametrize(("us", "shown"), MOMENTS.values(), ids=MOMENTS.keys())
def test_an_event_of_any_year_is_shown(us: int, shown: float | str) -> None:
    """The last microsecond of 9999 was rounded into a year that is none: the run failed, and each tick of repair."""
    found = build_slice_metadata(reported(1, counts={"first_event_us": us, "last_event_us": us}))
    assert (found["first_event"].value, found["last_event"].value) == (shown, shown)
    assert found["event_span_seconds"].value == 0.0
    assert "metadata_error" not in found


def test_unreadable_metadata_of_a_slice_is_replaced_by_the_error() -> None:
    found = build_slice_metadata(reported(1, counts={"raw": "many"}))
    assert "orders@0000007" in str(found["metadata_error"].value)
    assert found["attempt"].value == 1
