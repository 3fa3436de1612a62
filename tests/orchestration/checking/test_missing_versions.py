"""Where a missing version may be: pure decisions, each version of a gap counted once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.orchestration.checking.missing_versions import (
    NOWHERE,
    TO_COME,
    UNDECIDED,
    DecidedRange,
    OpenReject,
    VersionGap,
    build_reaches,
    determine_gap_class,
    explain_gap,
    parse_version,
)
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def decided(*bounds: tuple[int, int], topic: str = "orders", generation: int = 0) -> list[SliceCommit]:
    return [
        SliceCommit(Slice("orders", topic, "A" * 22, generation, n, {0: OffsetRange(*ends)}, NOW), 1, 1)
        for n, ends in enumerate(bounds)
    ]


@pytest.mark.parametrize(
    ("bounds", "reach"),
    [
        ([(0, 10)], DecidedRange(0, 0)),
        ([(10, 20), (0, 10)], DecidedRange(0, 10)),
        ([(0, 10), (20, 30)], DecidedRange(20, 20)),
        ([(5, 10), (10, 30)], DecidedRange(5, 10, begin=5)),
        ([(0, 10), (15, 20), (20, 30), (30, 30)], DecidedRange(15, 20)),
    ],
)
def test_a_partition_is_decided_up_to_its_holes(bounds: list[tuple[int, int]], reach: DecidedRange) -> None:
    assert build_reaches(decided(*bounds), "orders") == {("orders", 0, 0): reach}


def test_tiers_decide_nothing_of_the_main_topic_and_generations_are_apart() -> None:
    found = build_reaches([*decided((0, 9), topic="orders.dlq.1"), *decided((0, 5), generation=1)], "orders")
    assert found == {("orders", 1, 0): DecidedRange(0, 0)}


def gap(offset: int, after: int, since: int = 2, until: int = 2) -> VersionGap:
    return VersionGap("", "k", since, until, "orders", 0, 0, offset, after)


@pytest.mark.parametrize(
    ("asked", "reach", "found"),
    [
        (gap(15, 5), DecidedRange(0, 20), NOWHERE),
        (gap(25, 5), DecidedRange(0, 20), TO_COME),
        (gap(15, 5), DecidedRange(10, 20), UNDECIDED),
        (gap(15, 9), DecidedRange(10, 20), NOWHERE),
        (gap(15, -1), DecidedRange(1, 20), UNDECIDED),
        (gap(15, -1), DecidedRange(0, 20), NOWHERE),
        (gap(15, 5), DecidedRange(40, 40), UNDECIDED),
    ],
)
def test_gaps_without_a_reject_are_classified_by_the_decided_offsets(
    asked: VersionGap, reach: DecidedRange, found: str
) -> None:
    assert determine_gap_class(asked, {("orders", 0, 0): reach}) == found
    other = replace(asked, topic="orders.foreign/legacy")
    assert determine_gap_class(other, {("orders", 0, 0): reach}) == UNDECIDED, (
        "its offsets are not those of the main topic"
    )


def test_gaps_in_an_undecided_partition_are_undecided() -> None:
    assert determine_gap_class(gap(15, 5), {}) == UNDECIDED


REJECTS = st.lists(
    st.builds(
        OpenReject, st.none() | st.integers(0, 8), st.just("t"), st.booleans(), st.none(), st.integers().map(str)
    ),
    max_size=8,
)


@given(st.integers(1, 5), st.integers(0, 4), REJECTS)
def test_every_version_of_a_gap_is_counted_once(since: int, more: int, rejects: Sequence[OpenReject]) -> None:
    asked = gap(15, 5, since, since + more)
    found = list(explain_gap(asked, rejects, {("orders", 0, 0): DecidedRange(0, 20)}))
    assert sum(count for *_, count in found) == len(asked)
    named = {reject.version for reject in rejects} & set(range(since, since + more + 1))
    nameless = sum(reject.version is None for reject in rejects)
    nowhere = sum(count for kind, _, _, count in found if kind == NOWHERE)
    assert nowhere == max(0, len(asked) - len(named) - nameless)


@pytest.mark.parametrize(
    ("value", "version"),
    [
        (b'{"version": 3}', 3),
        (b'{"version": 3, "status": 7}', 3),
        (b'{"version": "3"}', None),
        (b'{"version": true}', None),
        (b'{"version": 1.0}', None),
        (b"[3]", None),
        (b"7", None),
        (b"\xff", None),
        (b"", None),
        (b'{"version": 3, "deep": ' + b"[" * 100_000, None),
        (None, None),
    ],
)
def test_a_version_is_read_where_it_can_be(value: bytes | None, version: int | None) -> None:
    assert parse_version(value, "version") == version
