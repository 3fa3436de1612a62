"""Values of what the ledger knows about a topic: generations, losses, planned ends, published slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from highwater.divergence import PlannedFacts
from highwater.envelope import Origin
from highwater.errors import InconsistentRecordError
from highwater.slices import OffsetRange, Slice

# Name of the acceptor for losses that the declaration lets Highwater record by itself.
RECORDED_BY_DECLARATION = "on_expired=record"


@dataclass(frozen=True)
class Generation:
    """One identity of a topic: from a cold start, or from an accepted recreation or truncation, to the next one.

    Args:
        stream: the stream that plans the topic.
        topic: the topic's name.
        topic_id: the pinned ID; another one under the same name is another topic (I11).
        number: 0, and one more for each accepted recreation or truncation.
        starts: for each partition the offset at which its planning began; None while that is not decided, because the
            partition had no leader when the generation was opened. A partition that is not named joined later: at 0.
        opened_at: when, in UTC.
        opened_by: `planner`, or the name of the person who accepted the change.
        first_ordinal: the ordinal of the generation's first slice, if nothing higher is known.
        revision: grows with everything that is planned or accepted; two writers never write over the same revision.
    """

    stream: str
    topic: str
    topic_id: str
    number: int
    starts: Mapping[int, int | None]
    opened_at: datetime
    opened_by: str = "planner"
    first_ordinal: int = 0
    revision: int = 0


@dataclass(frozen=True)
class Loss:
    """A recorded hole: offsets that will never be read, and who accepted that.

    Args:
        reason: `expired`, `truncated` or `recreated`, with what was found.
        accepted_by: a person's name, or `on_expired=record` where the declaration accepts it.
    """

    stream: str
    topic: str
    generation: int
    partition: int
    offsets: OffsetRange
    reason: str
    accepted_by: str
    recorded_at: datetime


def ensure_recordable(generations: Iterable[Generation], losses: Iterable[Loss], seen: Generation | None) -> None:
    """Validate ranges before they are recorded for good.

    Args:
        generations: to be opened.
        losses: to be recorded.
        seen: the generation that both were worked out from; None if there is none.

    Raises:
        InconsistentRecordError: an offset below 0, a topic without an ID, an empty loss, or another topic, stream or
            generation than the one before allows.
    """
    for one in generations:
        where = f"generation {one.number} of topic {one.topic}"
        below = {p: start for p, start in one.starts.items() if start is not None and start < 0}
        if below or one.number < 0 or not one.topic_id or min(one.starts, default=0) < 0:
            raise _build_inconsistent_error(where, f"topic ID {one.topic_id!r}, starts {dict(one.starts)}")
        if seen is not None and (one.stream, one.topic, one.number) != (seen.stream, seen.topic, seen.number + 1):
            raise _build_inconsistent_error(
                where, f"it follows generation {seen.number} of topic {seen.topic} of {seen.stream}"
            )
    for loss in losses:
        where = f"loss {loss.offsets} of topic {loss.topic} partition {loss.partition} generation {loss.generation}"
        if not len(loss.offsets) or loss.partition < 0 or loss.generation < 0:
            raise _build_inconsistent_error(where, "no offsets, or a number below 0")
        if seen is None:
            continue
        if (loss.stream, loss.topic) != (seen.stream, seen.topic) or loss.generation > seen.number:
            raise _build_inconsistent_error(
                where, f"it follows generation {seen.number} of topic {seen.topic} of {seen.stream}"
            )


def _build_inconsistent_error(what: str, found: str) -> InconsistentRecordError:
    return InconsistentRecordError(
        f"{what} cannot be recorded",
        found=found,
        remedy="nothing was recorded; report this as a defect of Highwater, with the output of `highwater status`",
    )


@dataclass(frozen=True)
class Planned:
    """The end of a topic's plans.

    Args:
        generation: the newest one.
        last: the newest slice of the topic, of any generation.
        ends: for each partition of the generation the offset at which the next slice starts.
    """

    generation: Generation
    last: Slice | None = None
    ends: Mapping[int, int] = field(default_factory=dict)

    @property
    def next_ordinal(self) -> int:
        """The ordinal of the next slice: never one that was used in any generation."""
        following = 0 if self.last is None else self.last.ordinal + 1
        return max(following, self.generation.first_ordinal)

    @property
    def recorded(self) -> dict[int, PlannedFacts]:
        """For each partition what its past must still agree with.

        Into a new generation of the same topic go the partitions that went on: what was accepted concerned others.
        """
        if self.last is None or self.last.topic_id != self.generation.topic_id:
            return {}
        if self.last.generation == self.generation.number:
            return self.last.recorded
        went_on = {p for p, r in self.last.ranges.items() if self.generation.starts.get(p) == r.end}
        return {p: was for p, was in self.last.recorded.items() if p in went_on}

    @property
    def undecided(self) -> frozenset[int]:
        """Partitions whose start was left open for want of a leader."""
        return frozenset(p for p, start in self.generation.starts.items() if start is None and p not in self.ends)

    @classmethod
    def from_generation(cls, generation: Generation, last: Slice | None, losses: Iterable[Loss]) -> Planned:
        """Work out the ends from the generation's starts, its newest slice and its losses."""
        ends = {p: start for p, start in generation.starts.items() if start is not None}
        if last is not None and last.generation == generation.number:
            ends.update({p: offsets.end for p, offsets in last.ranges.items()})
        for loss in losses:
            if loss.generation == generation.number:
                ends[loss.partition] = max(ends.get(loss.partition, 0), loss.offsets.end)
        return cls(generation, last, ends)


def subtract_losses(slice_: Slice, losses: Iterable[Loss]) -> Slice:
    """The slice without the offsets that are recorded as lost: what a slice that was never read can still take.

    A loss cuts from the start (retention) or from the end (truncation) of a range; one that lies amid a range cannot
    be taken out of it, and leaves it whole.
    """
    ranges = dict(slice_.ranges)
    for loss in losses:
        if (loss.topic, loss.generation) == (slice_.topic, slice_.generation) and loss.partition in ranges:
            ranges[loss.partition] = _cut(ranges[loss.partition], loss.offsets)
    return replace(slice_, ranges=ranges)


def _cut(offsets: OffsetRange, lost: OffsetRange) -> OffsetRange:
    if max(offsets.start, lost.start) >= min(offsets.end, lost.end):
        return offsets  # they have nothing in common
    if lost.start <= offsets.start:
        return OffsetRange(min(lost.end, offsets.end), offsets.end)
    if offsets.end <= lost.end:
        return OffsetRange(offsets.start, lost.start)
    return offsets


def find_overtaking_generation(slice_: Slice, generations: Iterable[Generation]) -> tuple[int, Generation] | None:
    """The first partition whose offsets a later generation of the same topic counts again, with that generation.

    After a truncation other records occupy the slice's offsets, from where the later generation begins.
    """
    for later in generations:
        if later.number <= slice_.generation or later.topic_id != slice_.topic_id:
            continue
        for partition, offsets in sorted(slice_.ranges.items()):
            start = later.starts.get(partition)
            if len(offsets) and start is not None and offsets.end > start:
                return partition, later
    return None


def decode_starts(plain: Mapping[str, int | None]) -> dict[int, int | None]:
    """Starts as the ledger stores them, with the partitions as numbers."""
    return {int(partition): start for partition, start in plain.items()}


@dataclass(frozen=True)
class PublicationRecord:
    """The ledger's record of a publication: of a slice's rejects, or of accepted events to their topic.

    Args:
        attempt: attempt of the decision that they belong to.
        sent: how many of them, in the order of their origins.
        published_at: when the last of them was committed, in UTC.
    """

    attempt: int
    sent: int
    published_at: datetime


@dataclass(frozen=True)
class Discard:
    """A parked record that a person discarded: the end of its origin.

    Args:
        origin: the record's identity.
        reason: why, in the person's words.
        discarded_by: the person's name.
        discarded_at: when, in UTC.
    """

    origin: Origin
    reason: str
    discarded_by: str
    discarded_at: datetime
