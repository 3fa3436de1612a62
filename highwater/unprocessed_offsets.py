"""Offsets of the main topic that no slice has decided yet; no valid envelope on a tier can name them."""

# A record is published to the DLQ after its slice was decided. So whatever names another one was garbled on its way,
# and the slice that reads that origin will decide it by itself: accepted on the tier too, it would be in events twice
# (I5).

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from highwater.plans import Loss, Planned, subtract_losses
from highwater.slices import Slice, merge_ranges


class OffsetSpan(NamedTuple):
    """Offsets of a generation's partition from `start` up to `end` (None: all that follow)."""

    generation: int
    partition: int
    start: int
    end: int | None


@dataclass(frozen=True)
class Undecided:
    """Origins of the main topic that its slices read, or will read, and that none has decided.

    Args:
        newest: the newest generation's number: no record is of a later one.
        partitions: its planned partitions; no record of another one was read.
        spans: in these; they do not overlap.
    """

    newest: int
    partitions: frozenset[int]
    spans: Sequence[OffsetSpan]


def build_undecided(
    planned: Planned, waiting: Iterable[Slice], losses: Sequence[Loss], copied: Mapping[int, int] | None = None
) -> Undecided:
    """The offsets of the main topic without a decision.

    Nobody reads offsets that are recorded as lost, so their copies are all that remains of them.

    Args:
        planned: how far the newest generation is planned.
        waiting: slices that are planned, and not decided.
        losses: recorded holes.
        copied: by partition the offset before which records were published before a lost lake was restarted: of these
            nobody knows any more what was decided.
    """
    before, newest = copied or {}, planned.generation.number
    partitions = frozenset({*planned.ends, *before})
    tails = {p: max(planned.ends.get(p, 0), before.get(p, 0)) for p in sorted(partitions)}
    left = sorted((subtract_losses(slice_, losses) for slice_ in waiting), key=attrgetter("generation"))
    # A slice may have been planned meanwhile: it lies in the tail.
    spans = [
        OffsetSpan(generation, p, max(offsets.start, before.get(p, 0)), end)
        for generation, slices in groupby(left, key=attrgetter("generation"))
        for p, ranges in merge_ranges(slices).items()
        for offsets in ranges
        for end in [min(offsets.end, tails.get(p, offsets.end)) if generation == newest else offsets.end]
        if max(offsets.start, before.get(p, 0)) < end
    ]
    return Undecided(newest, partitions, [*spans, *(OffsetSpan(newest, p, start, None) for p, start in tails.items())])
