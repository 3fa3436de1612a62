"""Which offsets of a topic a sample reads: as many of each partition, from its beginning and its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from highwater.slices import OffsetRange

Part = Literal["beginning", "end"]


def shares(sizes: Mapping[int, int], count: int) -> dict[int, int]:
    """How many records each partition gives, so that the smallest shares are as large as possible.

    Args:
        sizes: the offsets of each partition.
        count: the records wanted in all.
    """
    found = dict.fromkeys(sizes, 0)
    left = count
    open_ = sorted((size, partition) for partition, size in sizes.items() if size)
    while open_ and left:
        size, partition = open_.pop(0)
        each = -(-left // (len(open_) + 1))  # rounded up, so that no record is left over
        found[partition] = min(size, each)
        left -= found[partition]
    return found


def halves(share: int) -> dict[Part, int]:
    """How many records of a share are from the beginning and from the end."""
    return {"beginning": share - share // 2, "end": share // 2}


def window(log: OffsetRange, width: int, part: Part) -> OffsetRange:
    """The offsets at one end of a partition's log."""
    if part == "beginning":
        return OffsetRange(log.start, min(log.end, log.start + width))
    return OffsetRange(max(log.start, log.end - width), log.end)
