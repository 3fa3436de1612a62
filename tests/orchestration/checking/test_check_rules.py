"""What the checks decide."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from highwater.orchestration.checking.check_rules import (
    CountedRows,
    SliceAttempts,
    build_conservation_result,
    check_order,
)
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice

SLICE = Slice("orders", "orders", "id", 0, 4, {0: OffsetRange(10, 22)}, datetime(2026, 3, 1, tzinfo=UTC))
RAW = SliceCommit(SLICE, 1, 10)
EVENTS = SliceCommit(SLICE, 3, 6, {"events": 6, "tombstones": 1, "superseded": 1})
REJECTS = SliceCommit(SLICE, 3, 2)


SLICE_COMMITS: dict[str, SliceCommit | None] = {"raw": RAW, "events": EVENTS, "rejects": REJECTS}
ROWS = {"raw": CountedRows(10), "events": CountedRows(6, {3}), "rejects": CountedRows(2, {3})}


def test_a_slice_whose_records_are_each_in_one_place_is_accounted_for() -> None:
    result = build_conservation_result(SLICE_COMMITS, ROWS)
    assert result.passed
    assert result.text == "10 raw = 6 events + 2 rejects + 1 tombstones + 1 superseded"
    assert result.numbers["gaps"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rejects": replace(REJECTS, rows=1)}, "10 raw, and 9 in"),
        ({"rejects": replace(REJECTS, rows=3)}, "10 raw, and 11 in"),
        ({"rejects": replace(REJECTS, attempt=2)}, "rejects belong to attempt 2, events to attempt 3"),
        ({"raw": replace(RAW, rows=13)}, "raw holds 13 rows for 12 offsets"),
        ({"events": replace(EVENTS, slice_=replace(SLICE, ranges={}))}, "different offsets"),
        ({"raw": None}, "not in raw"),
        ({"events": None, "rejects": None}, "not in events, rejects"),
    ],
)
def test_a_slice_that_is_not_accounted_for(changes: dict[str, SliceCommit | None], said: str) -> None:
    result = build_conservation_result({**SLICE_COMMITS, **changes}, ROWS)
    assert not result.passed
    assert said in result.text


@pytest.mark.parametrize("table", ["raw", "events", "rejects"])
@pytest.mark.parametrize("change", [-1, 1])
def test_rows_that_went_or_came_after_the_commit_are_seen(table: str, change: int) -> None:
    result = build_conservation_result(
        SLICE_COMMITS, {**ROWS, table: replace(ROWS[table], rows=ROWS[table].rows + change)}
    )
    assert not result.passed
    assert f"the commit of {table} recorded" in result.text


@pytest.mark.parametrize("table", ["events", "rejects"])
@pytest.mark.parametrize(("attempts", "passed"), [((), True), ({3}, True), ({2, 3}, False), ({4}, False)])
def test_rows_are_of_the_attempt_of_their_commit(table: str, attempts: set[int], passed: bool) -> None:
    """Rows that name none, from before there was the column, are no error."""
    result = build_conservation_result(SLICE_COMMITS, {**ROWS, table: replace(ROWS[table], attempts=attempts)})
    assert result.passed == passed
    assert passed or f"the commit of {table} is of attempt 3, and rows are of attempt" in result.text


def test_current_must_not_lag_behind_a_slice() -> None:
    assert check_order(5, 0, 0).passed
    assert not check_order(5, 1, 0).passed
    assert not check_order(5, 0, 1).passed


@pytest.mark.parametrize(
    ("attempts", "lacking"),
    [
        (SliceAttempts({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}, {"a": 2}), ()),
        (SliceAttempts({}, {}, {}, {}, {}), ("raw", "events", "rejects", "dlq", "current")),
        (SliceAttempts({"a": 1}, {"a": 2}, {"a": 1}, {"a": 1}, {"a": 2}), ("rejects", "dlq")),
        (SliceAttempts({"a": 1}, {"a": 2}, {"a": 2}, {}, {"a": 2}), ("dlq",)),
        (SliceAttempts({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}, {"a": 1}), ("current",)),
        (SliceAttempts({"a": 1}, {}, {}, {}, {}), ("events", "rejects", "dlq", "current")),
        (SliceAttempts({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}, {"a": 2}, {"a": 2}), ()),
        (SliceAttempts({"a": 1}, {"a": 2}, {"a": 2}, {"a": 2}, {"a": 2}, {"a": 1}), ("metrics",)),
    ],
)
def test_a_slice_is_done_when_every_table_follows_its_decision(
    attempts: SliceAttempts, lacking: tuple[str, ...]
) -> None:
    assert attempts.select_missing_tables("a") == lacking
