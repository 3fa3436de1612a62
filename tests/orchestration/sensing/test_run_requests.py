"""Which slices are requested, in which runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.orchestration.sensing.run_requests import (
    PastRun,
    RepairRules,
    Request,
    build_first_requests,
    build_repair_requests,
    decide_repair,
    group_neighbours,
    resolve_run_keys,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
RULES = RepairRules()


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def ended(*keys: str, ago: float) -> PastRun:
    return PastRun(frozenset(keys), NOON - minutes(ago))


@given(st.lists(st.integers(), unique=True, max_size=40), st.sets(st.integers()), st.integers(1, 7))
def test_ranges_hold_the_wanted_keys_and_nothing_else(numbers: list[int], wanted: set[int], most: int) -> None:
    order = [str(number) for number in numbers]
    chosen = {str(number) for number in wanted} | set(order[::2])
    groups = group_neighbours(order, chosen, most)
    assert [key for group in groups for key in group] == [key for key in order if key in chosen]
    for group in groups:
        assert 1 <= len(group) <= most
        start, end = order.index(group[0]), order.index(group[-1])
        assert tuple(order[start : end + 1]) == group


def test_a_backlog_becomes_few_runs() -> None:
    keys = [f"orders@{n:07d}" for n in range(45)]
    requests = build_first_requests(keys, keys, most=20)
    assert [len(request.keys) for request in requests] == [20, 20, 5]
    assert requests[0].tags["dagster/asset_partition_range_start"] == "orders@0000000"
    assert requests[0].tags["dagster/asset_partition_range_end"] == "orders@0000019"
    assert len({request.run_key for request in requests}) == 3


def test_a_run_key_carries_the_attempt_since_a_failed_run_keeps_its_own() -> None:
    assert Request(("a", "b"), 1).run_key != Request(("a", "b"), 2).run_key
    assert Request(("a", "b"), 1).run_key != Request(("a", "b"), 1, "repair").run_key


def test_repair_never_asks_by_a_run_key_that_was_used() -> None:
    """Attempts are remembered for a day; a slice that is lost again later would have been requested for nothing."""
    keys = {build_repair_requests(["a"], {"a": 1}, 1, NOON + day)[0].run_key for day in (minutes(0), minutes(1440))}
    assert len(keys) == 2


def test_a_range_holds_slices_of_one_attempt_only() -> None:
    requests = build_repair_requests(["a", "b", "c", "d"], {"a": 1, "b": 2, "c": 1, "d": 1}, 10, NOON)
    assert [(request.keys, request.run_number) for request in requests] == [(("a",), 1), (("c", "d"), 1), (("b",), 2)]


def test_a_slice_that_was_never_requested_is_asked_for_after_the_grace() -> None:
    missing = {"old": NOON - minutes(3), "young": NOON - minutes(1)}
    found = decide_repair(missing, [], NOON, RULES)
    assert found.due == {"old": 1}
    assert found.waiting == {"young": NOON + minutes(1)}


def test_a_slice_that_a_run_works_on_is_left_alone() -> None:
    runs = [ended("a", ago=90), PastRun(frozenset({"a", "b"}))]
    found = decide_repair({"a": NOON - minutes(100)}, runs, NOON, RULES)
    assert (found.due, found.in_flight) == ({}, ("a",))


@pytest.mark.parametrize(
    ("failures", "ago", "due"),
    [(1, 1.9, False), (1, 2.1, True), (2, 3.9, False), (2, 4.1, True), (4, 15.9, False), (4, 16.1, True)],
)
def test_each_failure_doubles_the_wait(failures: int, ago: float, due: bool) -> None:
    runs = [ended("a", ago=ago + 30 * n) for n in range(failures)]
    found = decide_repair({"a": NOON - minutes(500)}, runs, NOON, RULES)
    assert ("a" in found.due) is due
    assert due == (found.due.get("a") == failures + 1)


def test_a_slice_that_failed_too_often_waits_for_a_person() -> None:
    runs = [ended("a", ago=100 + n) for n in range(RULES.most_runs)]
    found = decide_repair({"a": NOON - minutes(500)}, runs, NOON, RULES)
    assert (found.due, found.exhausted_slices) == ({}, ("a",))


def test_the_waits_cover_an_outage_of_an_hour() -> None:
    waits = [RULES.wait(failures) for failures in range(1, RULES.most_runs)]
    assert sum(waits, timedelta()) == minutes(2 + 4 + 8 + 16 + 32)
    assert RULES.wait(50) == RULES.max_wait


def test_a_tick_asks_for_no_more_than_its_limit() -> None:
    missing = {str(n): NOON - minutes(60) for n in range(5)}
    found = decide_repair(missing, [], NOON, RepairRules(slices_per_tick=3))
    assert (list(found.due), found.held_back) == (["0", "1", "2"], ("3", "4"))


@pytest.mark.parametrize(
    ("tags", "named"),
    [
        ({"dagster/partition": "b"}, {"b"}),
        ({"dagster/asset_partition_range_start": "b", "dagster/asset_partition_range_end": "d"}, {"b", "c", "d"}),
        ({"dagster/asset_partition_range_start": "b", "dagster/asset_partition_range_end": "b"}, {"b"}),
        ({"dagster/asset_partition_range_start": "d", "dagster/asset_partition_range_end": "b"}, set()),
        ({"dagster/asset_partition_range_start": "gone", "dagster/asset_partition_range_end": "b"}, {"gone", "b"}),
        ({}, set()),
    ],
)
def test_the_slices_that_a_run_names(tags: dict[str, str], named: set[str]) -> None:
    order: Sequence[str] = ["a", "b", "c", "d"]
    assert resolve_run_keys(tags, order, {key: at for at, key in enumerate(order)}) == named
