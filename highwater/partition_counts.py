"""How many partitions a topic had, slice by slice, and under which identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from highwater.plans import Generation
from highwater.slices import Slice


@dataclass(frozen=True)
class Era:
    """Slices of a topic between two changes of its identity or of the number of its partitions.

    Args:
        generation: of the topic.
        topic_id: its ID.
        since: the first of the slices.
        ordinal: its ordinal.
        partitions: how many partitions the topic had when they were planned.
        planned_at: when the first of them was planned, in UTC.
        added: partitions that were added with it; 0 where a generation begins.
    """

    generation: int
    topic_id: str
    since: str
    ordinal: int
    partitions: int
    planned_at: datetime
    added: int = 0

    @property
    def text(self) -> str:
        """What began with it, in words."""
        if self.added:
            return f"{self.added:,} partitions were added"
        return f"generation {self.generation} began"


def eras(pieces: Iterable[Slice], generations: Iterable[Generation]) -> list[Era]:
    """The eras of a topic, the oldest first.

    Args:
        pieces: its slices.
        generations: its generations; they name partitions also before these have a position.
    """
    named = {one.number: _many(one.starts) for one in generations}
    found: list[Era] = []
    for piece in sorted(pieces, key=lambda one: one.ordinal):
        last = found[-1] if found and found[-1].generation == piece.generation else None
        many = max(_many(piece.ranges), named.get(piece.generation, 0), last.partitions if last else 0)
        if last is None or many > last.partitions:
            added = many - last.partitions if last else 0
            found.append(Era(piece.generation, piece.topic_id, piece.key, piece.ordinal, many, piece.planned_at, added))
    return found


def _many(partitions: Mapping[int, object]) -> int:
    return max(partitions, default=-1) + 1
