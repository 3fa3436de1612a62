"""Gaps: planned offsets without a record in raw, as ranges, and the recorded counts by explanation."""

# A reader of committed records skips aborted ones, a reader of uncommitted records sees them. Neither sees markers of
# transactions or compacted records, so on a compacted topic these two cannot be distinguished.

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from highwater.slices import OffsetRange

Ranges = Mapping[int, Sequence[OffsetRange]]
PartitionOffset = tuple[int, int]
# The policy of a topic whose settings the cluster does not let us read.
FORBIDDEN = "unknown"


@dataclass(frozen=True)
class Gaps:
    """The explanation of the gaps of a slice when it was first looked at; also that there were none.

    Args:
        digest: hash of the places, so that a later gap is distinguished from the recorded ones.
        aborted: seen by readers of uncommitted records alone.
        markers: seen by nobody, on a topic that was never compacted.
        markers_or_compacted: seen by nobody, on another topic.
        lost: their loss was accepted before the slice was read.
        unseen: Kafka held them no more, so nothing is known of them.
        cleanup_policy: the topic's policy at that time; None if it was not needed.
        looked_at: when, in UTC.
    """

    digest: str
    aborted: int
    markers: int
    markers_or_compacted: int
    lost: int
    unseen: int
    cleanup_policy: str | None
    looked_at: datetime

    @property
    def counts(self) -> dict[str, int]:
        """Gaps by explanation."""
        return {
            "aborted": self.aborted,
            "markers": self.markers,
            "markers_or_compacted": self.markers_or_compacted,
            "lost": self.lost,
            "unseen": self.unseen,
        }


def encode_range_lists(ranges: Ranges) -> dict[str, list[list[int]]]:
    """Ranges as plain values for JSON: by partition, each its start and its end."""
    return {str(p): [[one.start, one.end] for one in found] for p, found in sorted(ranges.items())}


def decode_range_lists(plain: Mapping[str, Sequence[Sequence[int]]]) -> dict[int, list[OffsetRange]]:
    """The inverse of `encode_range_lists`."""
    return {int(p): [OffsetRange(start, end) for start, end in found] for p, found in plain.items()}


def can_compact(cleanup_policy: str | None) -> bool:
    """Whether compaction may take records; where nobody may read the policy, it may."""
    return cleanup_policy is not None and (cleanup_policy == FORBIDDEN or "compact" in cleanup_policy)


def compute_gaps(planned: Mapping[int, OffsetRange], held: Ranges) -> dict[int, list[OffsetRange]]:
    """The offsets of the planned ranges that no held range covers, in ascending order."""
    found = {p: list(_subtract_ranges(offsets, sorted(held.get(p, ())))) for p, offsets in sorted(planned.items())}
    return {p: gaps for p, gaps in found.items() if gaps}


def _subtract_ranges(planned: OffsetRange, held: Iterable[OffsetRange]) -> Iterator[OffsetRange]:
    at = planned.start
    for offsets in held:
        if at < min(offsets.start, planned.end):
            yield OffsetRange(at, min(offsets.start, planned.end))
        at = max(at, offsets.end)
    if at < planned.end:
        yield OffsetRange(at, planned.end)


def clip_gaps(gaps: Ranges, bounds: Mapping[int, OffsetRange]) -> dict[int, list[OffsetRange]]:
    """The gaps within the bounds; a partition that has none has no gaps within them."""
    found = {
        p: [
            OffsetRange(max(gap.start, bounds[p].start), min(gap.end, bounds[p].end))
            for gap in ranges
            if max(gap.start, bounds[p].start) < min(gap.end, bounds[p].end)
        ]
        for p, ranges in gaps.items()
        if p in bounds
    }
    return {p: ranges for p, ranges in found.items() if ranges}


def count_offsets(gaps: Ranges) -> int:
    """The number of offsets in the gaps."""
    return sum(len(gap) for ranges in gaps.values() for gap in ranges)


def compute_digest(gaps: Ranges) -> str:
    """A digest of the places: as many bytes for one gap as for a million."""
    digest = sha256()
    for partition in sorted(gaps):
        for gap in gaps[partition]:
            digest.update(f"{partition}:{gap.start}-{gap.end};".encode())
    return digest.hexdigest()


def build_reads(gaps: Ranges, apart: int) -> list[dict[int, OffsetRange]]:
    """Reads that cover the gaps, each of one range a partition.

    Gaps less than `apart` offsets from each other are read as one: reading the records between them costs less than
    another consumer.
    """
    joined = {p: _merge_near_ranges(ranges, apart) for p, ranges in gaps.items()}
    most = max(map(len, joined.values()), default=0)
    return [{p: ranges[n] for p, ranges in joined.items() if n < len(ranges)} for n in range(most)]


def _merge_near_ranges(ascending: Sequence[OffsetRange], apart: int) -> list[OffsetRange]:
    found: list[OffsetRange] = []
    for gap in ascending:
        if found and gap.start - found[-1].end < apart:
            found[-1] = OffsetRange(found[-1].start, gap.end)
        else:
            found.append(gap)
    return found


def expand_ranges(gaps: Ranges) -> set[PartitionOffset]:
    """The single offsets of the gaps."""
    return {(p, offset) for p, ranges in gaps.items() for gap in ranges for offset in range(gap.start, gap.end)}


def merge_places(places: Collection[PartitionOffset]) -> dict[int, list[OffsetRange]]:
    """The inverse of `expand_ranges`."""
    found: dict[int, list[OffsetRange]] = {}
    for partition, offset in sorted(places):
        ranges = found.setdefault(partition, [])
        if ranges and ranges[-1].end == offset:
            ranges[-1] = OffsetRange(ranges[-1].start, offset + 1)
        else:
            ranges.append(OffsetRange(offset, offset + 1))
    return found
