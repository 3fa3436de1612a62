"""Offset ranges and slices as values: arithmetic, checks and their written forms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256

from highwater.divergence import Fingerprint, PlannedFacts
from highwater.errors import UnknownSliceError

ORDINAL_DIGITS = 7
_KEY = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249})@(?P<ordinal>[0-9]{7,})")


@dataclass(frozen=True, order=True)
class OffsetRange:
    """A half-open range of offsets of one Kafka partition: `start` is in it, `end` is not.

    Raises:
        ValueError: an offset below 0, or an end before the start.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"no offset range: {self}")

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"

    def __len__(self) -> int:
        """Offsets in the range. Records may be fewer: markers and compaction leave gaps."""
        return self.end - self.start

    def __contains__(self, offset: object) -> bool:
        return isinstance(offset, int) and self.start <= offset < self.end

    def is_followed_by(self, other: OffsetRange) -> bool:
        """Whether `other` goes on exactly where this range ends."""
        return self.end == other.start


@dataclass(frozen=True, order=True)
class SliceKey:
    """The name of a slice, written `<topic>@<ordinal>`; it is the Dagster partition key."""

    topic: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.ordinal:0{ORDINAL_DIGITS}d}"

    @classmethod
    def parse(cls, text: str) -> SliceKey:
        """Read a key.

        Raises:
            UnknownSliceError: the text is not a slice key.
        """
        match = _KEY.fullmatch(text)
        if match is None or str(cls(match["topic"], int(match["ordinal"]))) != text:
            raise UnknownSliceError(
                f"{text!r} is not a slice key",
                found=text,
                remedy="write <topic>@<ordinal of 7 digits>, for example orders@0000042",
            )
        return cls(match["topic"], int(match["ordinal"]))


@dataclass(frozen=True)
class Slice:
    """A planned slice: for each Kafka partition of one topic a half-open range; never changed.

    `generation` counts how often an operator accepted that the topic was recreated or truncated.
    `planned_at` is in UTC; `lag` counts the offsets that were left unplanned behind the slice then. `epochs` holds
    the leader epoch of each partition as it was planned (KIP-320), `fingerprints` the last record before its end (I16).
    None of them takes part in comparisons: they describe the moment of planning, not the slice.
    """

    stream: str
    topic: str
    topic_id: str
    generation: int
    ordinal: int
    ranges: Mapping[int, OffsetRange]
    planned_at: datetime
    lag: int | None = field(default=None, compare=False)
    epochs: Mapping[int, int] = field(default_factory=dict, compare=False)
    fingerprints: Mapping[int, Fingerprint] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> str:
        """The slice key in its written form."""
        return str(SliceKey(self.topic, self.ordinal))

    @property
    def offsets(self) -> int:
        """Offsets in the slice over all partitions: an upper bound of its records."""
        return sum(len(r) for r in self.ranges.values())

    @property
    def recorded(self) -> dict[int, PlannedFacts]:
        """For each partition what its past must still agree with."""
        return {p: PlannedFacts(r.end, self.epochs.get(p), self.fingerprints.get(p)) for p, r in self.ranges.items()}

    @property
    def identity(self) -> str:
        """The plan under the key; after a lost ledger another plan may get the same key."""
        return sha256(f"{self.topic_id} {self.encode_ranges_json()}".encode()).hexdigest()[:32]

    def encode_ranges_json(self) -> str:
        """The ranges as the ledger and the commits store them: `{"partition": [start, end]}`."""
        return json.dumps(encode_ranges(self.ranges), separators=(",", ":"))


def encode_ranges(ranges: Mapping[int, OffsetRange]) -> dict[str, list[int]]:
    """Ranges as plain values for JSON, ordered by partition."""
    return {str(p): [ranges[p].start, ranges[p].end] for p in sorted(ranges)}


def decode_ranges(plain: Mapping[str, Iterable[int]]) -> dict[int, OffsetRange]:
    """The inverse of `encode_ranges`."""
    return {int(p): OffsetRange(*bounds) for p, bounds in plain.items()}


def merge_ranges(slices: Iterable[Slice]) -> dict[int, list[OffsetRange]]:
    """For each partition the fewest ranges that cover the slices' ranges and nothing else.

    Empty ranges are dropped: there is nothing to read in them.
    """
    by_partition: dict[int, list[OffsetRange]] = {}
    for slice_ in slices:
        for partition, offsets in slice_.ranges.items():
            if len(offsets):
                by_partition.setdefault(partition, []).append(offsets)
    return {p: _join(sorted(ranges)) for p, ranges in by_partition.items()}


def _join(ordered: list[OffsetRange]) -> list[OffsetRange]:
    joined = [ordered[0]]
    for offsets in ordered[1:]:
        if joined[-1].is_followed_by(offsets):
            joined[-1] = OffsetRange(joined[-1].start, offsets.end)
        else:
            joined.append(offsets)
    return joined
