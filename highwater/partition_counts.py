"""The partition counts of a topic, slice by slice, with the topic's identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from highwater.plans import Generation
from highwater.slices import Slice


@dataclass(frozen=True)
class PartitionCountPeriod:
    """Slices of a topic between two changes of its identity or of the number of its partitions.

    Args:
        generation: the topic's generation.
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
        """The event that began the period, in words."""
        if self.added:
            return f"{self.added:,} partitions were added"
        return f"generation {self.generation} began"


def build_partition_count_periods(
    slices: Iterable[Slice], generations: Iterable[Generation]
) -> list[PartitionCountPeriod]:
    """The periods of a topic, the oldest first.

    Args:
        slices: its slices.
        generations: its generations; they name partitions also before these have a position.
    """
    named = {one.number: _count_partitions(one.starts) for one in generations}
    found: list[PartitionCountPeriod] = []
    for slice_ in sorted(slices, key=lambda one: one.ordinal):
        last = found[-1] if found and found[-1].generation == slice_.generation else None
        many = max(_count_partitions(slice_.ranges), named.get(slice_.generation, 0), last.partitions if last else 0)
        if last is None or many > last.partitions:
            added = many - last.partitions if last else 0
            found.append(
                PartitionCountPeriod(
                    slice_.generation, slice_.topic_id, slice_.key, slice_.ordinal, many, slice_.planned_at, added
                )
            )
    return found


def _count_partitions(partitions: Mapping[int, object]) -> int:
    return max(partitions, default=-1) + 1
