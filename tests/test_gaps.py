"""Gaps: where they are, how they are read, and on a real broker what explains them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.processes import wait_until
from highwater.gaps import (
    build_reads,
    can_compact,
    clip_gaps,
    compute_digest,
    compute_gaps,
    count_offsets,
    expand_ranges,
    merge_places,
)
from highwater.orchestration.checking.gap_checks import check_gaps_explained
from highwater.orchestration.checking.offset_queries import read_raw_offsets
from highwater.plans import Generation, Loss
from highwater.resources.lake import Lake
from highwater.slices import OffsetRange, Slice
from highwater.tiling import detect_tiling_faults
from tests.conftest import create_topic
from tests.helpers.commits import store_raw
from tests.helpers.scene import Scene
from tests.helpers.support import read_messages

if TYPE_CHECKING:
    from highwater.orchestration.checking.check_rules import CheckResult
    from tests.conftest import TopicFactory

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def ranges(*bounds: tuple[int, int]) -> list[OffsetRange]:
    return [OffsetRange(*one) for one in bounds]


@given(st.integers(0, 30), st.integers(0, 30), st.sets(st.integers(0, 60)))
def test_gaps_and_held_offsets_add_up_to_the_plan(start: int, size: int, held: set[int]) -> None:
    planned = set(range(start, start + size))
    found = compute_gaps({3: OffsetRange(start, start + size)}, merge_places({(3, offset) for offset in held}))
    assert expand_ranges(found) == {(3, offset) for offset in planned - held}
    assert count_offsets(found) == len(planned - held)
    assert merge_places(expand_ranges(found)) == found


@given(st.sets(st.integers(0, 200)), st.integers(1, 30))
def test_reads_cover_the_gaps_and_little_else(offsets: set[int], apart: int) -> None:
    gaps = merge_places({(0, offset) for offset in offsets})
    reads = [offset for read in build_reads(gaps, apart) for r in read.values() for offset in range(r.start, r.end)]
    assert len(reads) == len(set(reads)), "nothing is read twice"
    assert offsets <= set(reads)
    assert len(reads) <= len(offsets) + apart * len(gaps.get(0, []))


def test_gaps_far_apart_are_read_by_themselves_in_all_partitions_at_once() -> None:
    gaps = {0: ranges((1, 2), (5, 6), (100, 101)), 1: ranges((7, 8))}
    assert build_reads(gaps, 10) == [
        {0: OffsetRange(1, 6), 1: OffsetRange(7, 8)},
        {0: OffsetRange(100, 101)},
    ]


def test_bounds_cut_gaps() -> None:
    gaps = {0: ranges((0, 4), (6, 9)), 1: ranges((0, 1))}
    assert clip_gaps(gaps, {0: OffsetRange(2, 7)}) == {0: ranges((2, 4), (6, 7))}


def test_the_digest_reports_places_apart() -> None:
    same = [{0: ranges((1, 2)), 1: ranges((4, 6))}, {1: ranges((4, 6)), 0: ranges((1, 2))}]
    other = [{0: ranges((1, 2)), 1: ranges((4, 5))}, {0: ranges((4, 6)), 1: ranges((1, 2))}, {}]
    assert len({compute_digest(one) for one in same}) == 1
    assert len({compute_digest(one) for one in [*same, *other]}) == 4


@pytest.mark.parametrize(
    ("policy", "may"),
    [("delete", False), ("compact", True), ("compact,delete", True), ("unknown", True), (None, False)],
)
def test_cleanup_policies_that_can_compact(policy: str | None, may: bool) -> None:
    assert can_compact(policy) is may


def a_slice(ordinal: int, start: int, end: int, partition: int = 0) -> Slice:
    return Slice("orders", "orders", "A" * 22, 0, ordinal, {partition: OffsetRange(start, end)}, NOON)


def a_loss(start: int, end: int, **changes: Any) -> Loss:
    return replace(Loss("orders", "orders", 0, 0, OffsetRange(start, end), "expired", "ann", NOON), **changes)


OPENED = Generation("orders", "orders", "A" * 22, 0, {0: 5, 1: None}, NOON)
TILED: dict[str, tuple[list[Slice], list[Loss], list[tuple[int, int]]]] = {
    "one after another": ([a_slice(0, 5, 9), a_slice(1, 9, 9), a_slice(2, 9, 12)], [], []),
    "not from where planning began": ([a_slice(0, 7, 9)], [], [(5, 7)]),
    "a hole": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [], [(9, 11)]),
    "planned twice": ([a_slice(0, 5, 9), a_slice(1, 8, 12)], [], [(9, 8)]),
    "a hole that is a loss": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [a_loss(9, 11)], []),
    "a hole of two losses": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [a_loss(10, 11), a_loss(7, 10)], []),
    "a hole that is half a loss": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [a_loss(9, 10)], [(10, 11)]),
    "a hole that ends in a loss": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [a_loss(10, 11)], [(9, 11)]),
    "a loss elsewhere": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [a_loss(9, 11, partition=2)], [(9, 11)]),
    "a loss of another generation": ([a_slice(0, 5, 9), a_slice(1, 11, 12)], [a_loss(9, 11, generation=1)], [(9, 11)]),
    "a partition whose start was open": ([a_slice(0, 7, 9, 1)], [], []),
    "a partition that joined": ([a_slice(0, 0, 9, 2)], [], []),
    "a partition that joined amid": ([a_slice(0, 3, 9, 2)], [], [(0, 3)]),
}


@pytest.mark.parametrize("name", TILED)
def test_slices_tile_or_the_seam_is_named(name: str) -> None:
    slices, losses, expected = TILED[name]
    assert [(fault.expected, fault.found) for fault in detect_tiling_faults(slices, OPENED, losses)] == expected


def test_a_slice_is_compared_with_the_one_before_it() -> None:
    before = a_slice(0, 5, 9)
    assert detect_tiling_faults([a_slice(1, 9, 12)], OPENED, [], before) == []
    assert "[9, 10) is in no slice" in detect_tiling_faults([a_slice(1, 10, 12)], OPENED, [], before)[0].text


# A real broker


class Real:
    """A topic that is read by a plain consumer into raw."""

    def __init__(self, bootstrap: str, topic: str, folder: Path) -> None:
        self.scene, self.lake = Scene(bootstrap, topic, folder), Lake(str(folder / "lake"))

    def in_transaction(self, records: int, *, commit: bool) -> None:
        producer = self.scene.transaction()
        for _ in range(records):
            producer.produce(self.scene.topic, key=b"k", value=b"v", partition=0)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
        wait_until(self._stable, 30, "the marker")

    def _stable(self) -> bool:
        seen = self.scene.kafka.read_topic_state(self.scene.topic).partitions[0]
        return seen.last_stable == seen.high_watermark

    def plan(self) -> Slice:
        """All that is not planned yet, as one slice."""
        [slice_] = self.scene.tick(limits=replace(self.scene.stream.limits, max_offsets=10_000)).slices
        return slice_

    def read(self, slice_: Slice, *, without: int | None = None) -> list[int]:
        """What a consumer of its own sees of the slice goes into raw; returns the offsets."""
        read = [message.offset() or 0 for message in read_messages(self.scene.bootstrap, self.scene.topic)]
        found = [offset for offset in read if offset in slice_.ranges[0]]
        place = {"slice": slice_.key, "topic": self.scene.topic, "generation": 0, "partition": 0}
        store_raw(self.lake, slice_, [{**place, "offset": offset} for offset in found if offset != without])
        return found

    def result(self, slice_: Slice) -> CheckResult:
        found = read_raw_offsets(self.scene.ledger, self.lake, self.scene.stream, [slice_.key])
        return check_gaps_explained(self.scene.ledger, self.scene.kafka, self.scene.stream, found)[slice_.key]

    def counts(self, slice_: Slice) -> dict[str, int]:
        reported = self.result(slice_)
        assert reported.passed, reported.text
        return {name: count for name, count in reported.numbers.items() if count and name not in {"offsets", "gaps"}}


@pytest.mark.slow
def test_gaps_of_transactions_are_distinguished_and_retained(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    real = Real(bootstrap, topic(), tmp_path)
    real.scene.write(3)
    real.in_transaction(4, commit=True)
    real.in_transaction(5, commit=False)
    real.scene.write(1)
    # Three, four and a marker, five that were aborted and a marker, one.
    slice_ = real.plan()
    read = real.read(slice_, without=4)
    lacking = real.result(slice_)
    assert not lacking.passed
    assert [*lacking.samples] == [{"partition": 0, "start": 4, "end": 5}]

    assert set(real.read(slice_)) == {0, 1, 2, 3, 4, 5, 6, 14} == set(read)
    assert real.counts(slice_) == {"aborted": 5, "markers": 2}
    real.scene.delete_before(15)
    assert real.counts(slice_) == {"aborted": 5, "markers": 2}, "what was seen is kept"

    real.scene.write(2)
    real.in_transaction(1, commit=False)
    late = real.plan()
    real.read(late)
    real.scene.delete_before(18)
    reported = real.result(late)
    assert (reported.passed, reported.warning, reported.numbers["unseen"], reported.numbers["markers"]) == (
        False,
        True,
        1,
        1,
    )


@pytest.mark.slow
def test_gaps_of_a_compacted_topic_are_explained_and_a_lost_row_is_none(bootstrap: str, tmp_path: Path) -> None:
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    name = f"orders.compacted.{tmp_path.name}"
    create_topic(bootstrap, name, 1, config)
    real = Real(bootstrap, name, tmp_path)
    real.in_transaction(3, commit=False)
    real.in_transaction(3, commit=True)
    before = real.plan()
    read = real.read(before)
    # Compaction may have begun already: aborted records that are gone are no longer distinguished from markers.
    assert sum(real.counts(before).values()) == before.offsets - len(read)

    def gone() -> bool:
        real.in_transaction(1, commit=True)
        first = next(iter(real.scene.kafka.read(name, {0: OffsetRange(0, before.ranges[0].end + 2)})), None)
        return first is None or (first.offset() or 0) >= before.ranges[0].end

    wait_until(gone, 120, "compaction")
    slice_ = real.plan()
    read = real.read(slice_)
    reported = real.counts(slice_)
    assert set(reported) <= {"markers_or_compacted", "aborted"}
    assert reported["markers_or_compacted"] == len(set(range(slice_.ranges[0].start, slice_.ranges[0].end)) - set(read))

    real.read(slice_, without=read[-1])
    assert not real.result(slice_).passed
