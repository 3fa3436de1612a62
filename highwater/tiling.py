"""Tiling of slices: each starts where the one before it ends, and a hole is a recorded loss (I2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from highwater.plans import Generation, Loss
from highwater.slices import OffsetRange, Slice


@dataclass(frozen=True)
class TilingFault:
    """A slice that does not begin where the plan before it ends.

    Args:
        slice_key: the slice.
        partition: the topic's partition.
        expected: where it had to begin.
        found: where it begins.
    """

    slice_key: str
    partition: int
    expected: int
    found: int

    @property
    def text(self) -> str:
        """The fault, in a sentence."""
        what = "planned twice" if self.found < self.expected else "in no slice, and not recorded as lost"
        low, high = sorted((self.expected, self.found))
        return f"{self.slice_key}: partition {self.partition} [{low}, {high}) is {what}"


def detect_tiling_faults(
    slices: Sequence[Slice], generation: Generation, losses: Iterable[Loss], before: Slice | None = None
) -> list[TilingFault]:
    """The places where slices do not tile.

    Args:
        slices: slices of one generation of one topic in the order of their ordinals, without one left out in between.
        generation: theirs; it says where its first slice begins.
        losses: recorded holes; those of other topics and generations do not count.
        before: the slice of the generation before the first of them; None if that is the generation's first.
    """
    holes = [
        loss
        for loss in losses
        if (loss.topic, loss.generation) == (generation.topic, generation.number) and loss.offsets
    ]
    # A partition that is not named joined later: at 0. One whose start was left open may begin anywhere.
    ends: dict[int, int | None] = dict(generation.starts)
    ends.update({p: offsets.end for p, offsets in before.ranges.items()} if before else {})
    found: list[TilingFault] = []
    for slice_ in slices:
        found += _detect_slice_faults(slice_, ends, holes)
        ends.update({p: offsets.end for p, offsets in slice_.ranges.items()})
    return found


def _detect_slice_faults(slice_: Slice, ends: dict[int, int | None], holes: Sequence[Loss]) -> Iterator[TilingFault]:
    for partition, offsets in sorted(slice_.ranges.items()):
        end = ends.get(partition, 0)
        if end is None or end == offsets.start:
            continue
        lost = [hole.offsets for hole in holes if hole.partition == partition]
        reached = _extend_over_losses(end, lost)
        if offsets.start < end or reached < offsets.start:
            yield TilingFault(slice_.key, partition, end if offsets.start < end else reached, offsets.start)


def _extend_over_losses(end: int, lost: Sequence[OffsetRange]) -> int:
    """The end of a plan after the losses that carry it on."""
    for offsets in sorted(lost):
        if offsets.start <= end:
            end = max(end, offsets.end)
    return end
