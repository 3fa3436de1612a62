"""Offset ranges, slice keys and slices as values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.errors import UnknownSliceError
from highwater.plans import Loss, subtract_losses
from highwater.slices import OffsetRange, Slice, SliceKey, decode_ranges, encode_ranges, merge_ranges

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)

bounds = st.lists(st.integers(0, 60), min_size=2, max_size=2).map(sorted)
offset_ranges = bounds.map(lambda pair: OffsetRange(*pair))
range_maps = st.dictionaries(st.integers(0, 5), offset_ranges, max_size=6)


def a_slice(ranges: Mapping[int, OffsetRange], ordinal: int = 0, generation: int = 0) -> Slice:
    return Slice("orders", "orders", "Id", generation, ordinal, ranges, NOON)


def a_loss(partition: int, offsets: OffsetRange, generation: int = 0) -> Loss:
    return Loss("orders", "orders", generation, partition, offsets, "expired", "someone", NOON)


@given(offset_ranges, st.integers(-5, 70))
def test_a_range_is_half_open(offsets: OffsetRange, offset: int) -> None:
    assert (offset in offsets) == (offset in range(offsets.start, offsets.end))
    assert len(offsets) == len(range(offsets.start, offsets.end))


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (3, 2), (-2, -1)])
def test_a_range_that_runs_backwards_or_below_zero_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="no offset range"):
        OffsetRange(start, end)


@given(offset_ranges, offset_ranges)
def test_ranges_meet_where_one_ends_and_the_other_starts(one: OffsetRange, other: OffsetRange) -> None:
    assert one.is_followed_by(other) == (one.end == other.start)


@given(range_maps)
def test_ranges_survive_being_written(ranges: dict[int, OffsetRange]) -> None:
    written = json.loads(a_slice(ranges).encode_ranges_json())
    assert decode_ranges(written) == ranges
    assert list(encode_ranges(ranges)) == [str(p) for p in sorted(ranges)]


@given(st.lists(range_maps, max_size=6))
def test_merged_ranges_cover_the_same_offsets_with_the_fewest_ranges(all_ranges: list[dict[int, OffsetRange]]) -> None:
    # Slices do not overlap, so neither may what is merged here.
    taken: dict[int, set[int]] = {}
    slices = []
    for ranges in all_ranges:
        free = {p: r for p, r in ranges.items() if not taken.get(p, set()) & set(range(r.start, r.end))}
        slices.append(a_slice(free))
        for p, r in free.items():
            taken.setdefault(p, set()).update(range(r.start, r.end))
    merged = merge_ranges(slices)
    assert {p: {o for r in ranges for o in range(r.start, r.end)} for p, ranges in merged.items()} == {
        p: offsets for p, offsets in taken.items() if offsets
    }
    for joined in merged.values():
        assert all(one.end < following.start for one, following in pairwise(joined))


@given(st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True), st.integers(0, 99_999_999))
def test_a_slice_key_survives_being_written(topic: str, ordinal: int) -> None:
    key = SliceKey(topic, ordinal)
    assert SliceKey.parse(str(key)) == key


@pytest.mark.parametrize(
    "text",
    ["", "orders", "orders@1", "orders@00000001", "orders@-000001", "orders@0000001 ", "or'ders@0000001",
     "orders@0000001; DROP TABLE slices", "@0000001", "a@b@0000001",
     "orders@\u0660\u0660\u0660\u0660\u0660\u0660\u0661"],
)  # fmt: skip
def test_invalid_slice_keys_are_named_in_the_error(text: str) -> None:
    with pytest.raises(UnknownSliceError) as caught:
        SliceKey.parse(text)
    assert repr(text) in caught.value.problem
    assert caught.value.found == text
    assert "orders@0000042" in caught.value.remedy


def test_keys_of_more_than_seven_digits_have_one_form() -> None:
    assert str(SliceKey("orders", 10_000_000)) == "orders@10000000"
    with pytest.raises(UnknownSliceError):
        SliceKey.parse("orders@010000000")


@given(offset_ranges, bounds)
def test_a_slice_keeps_what_a_loss_at_its_border_leaves(offsets: OffsetRange, lost: list[int]) -> None:
    loss = OffsetRange(*lost)
    left = subtract_losses(a_slice({0: offsets}), [a_loss(0, loss)]).ranges[0]
    stored = set(range(offsets.start, offsets.end)) - set(range(loss.start, loss.end))
    amid = offsets.start < loss.start and loss.end < offsets.end and len(loss) > 0
    assert set(range(left.start, left.end)) == (set(range(offsets.start, offsets.end)) if amid else stored)


def test_a_loss_of_another_generation_takes_nothing() -> None:
    slice_ = a_slice({0: OffsetRange(0, 9)}, generation=1)
    assert subtract_losses(slice_, [a_loss(0, OffsetRange(0, 5))]).ranges == {0: OffsetRange(0, 9)}
