"""What an envelope cannot name, since no slice of the main topic has decided it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.plans import Generation, Loss, Planned
from highwater.slices import OffsetRange, Slice
from highwater.unprocessed_offsets import Undecided, build_undecided

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def slice_(ordinal: int, generation: int = 1, **ranges: tuple[int, int]) -> Slice:
    taken = {int(name[1:]): OffsetRange(*bounds) for name, bounds in ranges.items()}
    return Slice("orders", "orders", "a", generation, ordinal, taken, NOW)


def lost(generation: int, partition: int, start: int, end: int) -> Loss:
    return Loss("orders", "orders", generation, partition, OffsetRange(start, end), "expired", "ann", NOW)


def planned(last: Slice | None, losses: list[Loss], **starts: int | None) -> Planned:
    opened = Generation("orders", "orders", "a", 1, {int(p[1:]): start for p, start in starts.items()}, NOW)
    return Planned.from_generation(opened, last, losses)


OLD, DONE, OPEN = slice_(0, 0, p0=(0, 40)), slice_(1, p0=(50, 60), p1=(0, 8)), slice_(2, p0=(60, 70), p1=(8, 8))
LOST = [lost(1, 0, 60, 63), lost(1, 0, 70, 75)]
# Of generation 0 one slice was never decided, of generation 1 the newest.
FOUND = build_undecided(planned(OPEN, LOST, p0=50, p1=0, p2=None), [OLD, OPEN], LOST)


def has_origin(undecided: Undecided, generation: int, partition: int, offset: int) -> bool:
    """Whether an origin is undecided, as the query in Spark selects it."""
    if generation > undecided.newest or (generation == undecided.newest and partition not in undecided.partitions):
        return True
    return any(
        (span.generation, span.partition) == (generation, partition)
        and span.start <= offset
        and (span.end is None or offset < span.end)
        for span in undecided.spans
    )


@pytest.mark.parametrize(
    ("origin", "early"),
    [
        ((0, 0, 39), True),
        ((0, 0, 40), False),  # decided, or never planned: its generation plans no more
        ((1, 0, 49), False),  # before the start of planning: read by none
        ((1, 0, 59), False),  # decided
        ((1, 0, 62), False),  # lost: its copies are all that there is of it
        ((1, 0, 63), True),
        ((1, 0, 74), False),
        ((1, 0, 75), True),  # not planned yet
        ((1, 1, 7), False),
        ((1, 1, 8), True),
        ((1, 2, 0), True),  # its start is not decided
        ((1, 9, 0), True),  # there is no such partition
        ((2, 0, 0), True),  # nor such a generation
        ((0, 9, 0), False),
    ],
)
def test_undecided_ranges_contain_an_origin(origin: tuple[int, int, int], *, early: bool) -> None:
    assert has_origin(FOUND, *origin) is early


def test_origins_published_before_the_lake_was_lost_are_unknown() -> None:
    """The stream was restarted: tiers may come before the main slices that read their origins again."""
    found = build_undecided(planned(OPEN, [], p0=50, p1=0), [DONE, OPEN], [], {0: 65, 1: 3, 2: 4})
    early = [offset for offset in range(50, 72) if has_origin(found, 1, 0, offset)]
    assert early == list(range(65, 72))
    assert [offset for offset in range(10) if has_origin(found, 1, 1, offset)] == list(range(3, 10))
    assert [offset for offset in range(6) if has_origin(found, 1, 2, offset)] == [4, 5]


RANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5)


@given(RANGES, st.sets(st.integers(0, 4)), st.dictionaries(st.just(0), st.integers(0, 12)), st.integers(0, 4))
def test_no_two_spans_hold_one_origin(
    gaps: list[tuple[int, int]], decided: set[int], copied: dict[int, int], seen: int
) -> None:
    """A second one would double the record; slices are planned meanwhile, and losses recorded."""
    slices, losses, at = list[Slice](), list[Loss](), 0
    for ordinal, (hole, length) in enumerate(gaps):
        losses += [lost(1, 0, at, at + hole)] if hole else []
        slices.append(slice_(ordinal, p0=(at + hole, at + hole + length)))
        at += hole + length
    last = slices[min(seen, len(slices) - 1)]
    waiting = [one for one in slices if one.ordinal not in decided]
    found: Undecided = build_undecided(planned(last, losses[: seen + 1], p0=0), waiting, losses, copied)
    for offset in range(at + 3):
        hits = [one for one in found.spans if one.start <= offset and (one.end is None or offset < one.end)]
        assert len(hits) <= 1
    assert all(one.end is None or one.start < one.end for one in found.spans)
