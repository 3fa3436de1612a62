"""The state of a topic and of its partitions, from the answers of brokers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from highwater.errors import DependencyUnavailableError
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka.admin import TopicDescription

# How librdkafka writes the ID of a topic that the broker did not name: 16 bytes of zero in Base64.
NO_TOPIC_ID = "A" * 22


@dataclass(frozen=True)
class PartitionState:
    """One partition as Kafka showed it; the offsets are None where it had no leader to ask.

    Args:
        log_start: the log start offset, the first that can be read.
        last_stable: the last stable offset: before it no transaction is open (I3).
        high_watermark: the offset after the last record that all in-sync replicas hold.
        leader: the broker that leads the partition.
        leader_epoch: how often its leader changed, at the end of the log (KIP-320).
    """

    log_start: int | None
    last_stable: int | None
    high_watermark: int | None
    leader: int | None
    leader_epoch: int | None = None

    @property
    def known(self) -> bool:
        """Whether the partition could be asked."""
        return self.log_start is not None and self.last_stable is not None

    @property
    def held_back(self) -> int:
        """Offsets from the first record of an open transaction on: they cannot be planned yet (I3)."""
        if self.high_watermark is None or self.last_stable is None:
            return 0
        return max(0, self.high_watermark - self.last_stable)


@dataclass(frozen=True)
class TopicState:
    """A topic as Kafka showed it."""

    topic: str
    topic_id: str
    partitions: Mapping[int, PartitionState]

    @property
    def leaderless_partitions(self) -> list[int]:
        """The partitions that could not be asked."""
        return [p for p, seen in sorted(self.partitions.items()) if not seen.known]

    def list_offset_ranges(self) -> dict[int, OffsetRange]:
        """The offsets of each partition, up to its last stable offset.

        Raises:
            DependencyUnavailableError: a partition could not be asked.
        """
        found = {}
        for partition, seen in self.partitions.items():
            if seen.log_start is None or seen.last_stable is None:
                raise DependencyUnavailableError(
                    f"partition {partition} of {self.topic} could not be asked",
                    found="it has no leader, or its broker did not answer",
                    remedy="try again when `highwater status` shows a leader for each partition; nothing was written",
                )
            found[partition] = OffsetRange(seen.log_start, seen.last_stable)
        return found


@dataclass(frozen=True)
class TopicStates:
    """Several topics as Kafka showed them.

    Args:
        found: the topics that could be asked, by name.
        denied: topics that this user may not describe; whether they exist is unknown.
    """

    found: Mapping[str, TopicState]
    denied: frozenset[str] = frozenset()


def is_whole(found: TopicDescription) -> bool:
    """Whether a description has the topic's ID, and partitions from 0 on without a gap: an answer without is none."""
    numbers = {p.id for p in found.partitions}
    return str(found.topic_id) not in {"", NO_TOPIC_ID} and bool(numbers) and numbers == set(range(len(numbers)))


def find_id_and_leaders(found: TopicDescription) -> tuple[str, dict[int, int | None]]:
    """The ID of a described topic, and the leader of each partition; None for one without a leader."""
    return str(found.topic_id), {p.id: find_leader(p) for p in sorted(found.partitions, key=lambda p: p.id)}


def find_leader(partition: Any) -> int | None:
    """The broker that leads a described partition; None without one."""
    leader = partition.leader
    return None if leader is None or leader.id < 0 else int(leader.id)


def build_partition_state(leader: int | None, start: Any, stable: Any, high: Any) -> PartitionState:
    """A partition as these answers show it; nothing is known of one that lacks an answer, or whose answers disagree."""
    if start is None or stable is None or high is None or start.offset > high.offset:
        return PartitionState(None, None, None, leader)
    return PartitionState(start.offset, stable.offset, high.offset, leader, _find_leader_epoch(stable))


def _find_leader_epoch(answer: Any) -> int | None:
    """The leader epoch of an answer; None where the broker did not name one, which is written -1."""
    epoch = answer.leader_epoch
    return None if epoch is None or epoch < 0 else int(epoch)
