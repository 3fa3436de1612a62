"""The offsets of the consumer group that mirrors the finished prefix, for ordinary tools (I12)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from highwater.plans import Generation, Planned
from highwater.slices import Slice


@dataclass(frozen=True)
class MirrorMark:
    """The metadata of a committed offset: the group itself shows what was mirrored, and when.

    Args:
        topic_id: ID of the offset's topic.
        last: the key of the last slice of the prefix; empty before the first one.
        identity: that slice's identity, since another ledger may have planned another slice under the same key.
        at: when it was committed, in UTC.
    """

    topic_id: str
    last: str
    identity: str
    at: datetime

    @classmethod
    def from_last_slice(cls, topic_id: str, last: Slice | None, at: datetime) -> MirrorMark:
        """The mark of a prefix that ends with this slice."""
        return cls(topic_id, last.key if last else "", last.identity if last else "", at)

    def to_json(self) -> str:
        """The written form: some hundred bytes, of the 4,096 that a broker takes by default."""
        return json.dumps({**vars(self), "at": self.at.isoformat()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> MirrorMark | None:
        """The inverse of `to_json`; None for what somebody else has written."""
        try:
            plain = json.loads(text or "")
            at = datetime.fromisoformat(plain["at"])
            return cls(plain["topic_id"], plain["last"], plain["identity"], at) if at.tzinfo else None
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class GroupOffset:
    """The group's offset of one partition, with our mark beside it if it was us who committed it."""

    offset: int
    mark: MirrorMark | None


def compute_finished_prefix(
    slices: Iterable[Slice], done: Collection[str], planned: Planned, generations: Iterable[Generation]
) -> dict[int, int]:
    """For each partition the offset before which everything is done, or recorded as lost.

    Slices tile, and what they leave out is a recorded loss: so that is where the first slice that is not done starts,
    and without one the planned end. If a later generation reuses offsets, they count as unread from its
    start on until all earlier slices are done.

    Args:
        slices: slices of the last planned topic, in their order; earlier ones are done.
        done: the keys of those that are done.
        planned: how far the topic is planned. It was read before `slices`, so that nothing is in it that is not there.
        generations: the topic's generations, read after `planned`.
    """
    topic_id = planned.generation.topic_id
    ordered = sorted((slice_ for slice_ in slices if slice_.topic_id == topic_id), key=lambda slice_: slice_.ordinal)
    first = next((slice_ for slice_ in ordered if slice_.key not in done), None)
    if first is None:
        found, number = dict(planned.ends), planned.generation.number
    else:
        found, number = {p: offsets.start for p, offsets in first.ranges.items()}, first.generation
    for later in generations:
        if later.number > number:
            starts = {p: start for p, start in later.starts.items() if start is not None}
            found = {p: min(offset, starts.get(p, offset)) for p, offset in found.items()}
    return found
