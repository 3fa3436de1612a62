"""How far a stream is planned, and how far its topic is ahead.

What belongs here: the value that people and scripts are shown. What does not: printing it (`orchestration.cli`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from highwater.declaration import Stream
from highwater.errors import HighwaterError
from highwater.history import SOUND, History
from highwater.plans import Planned
from orchestration.cutting import partition_errors, positions, see_same_topic, skipped_partitions
from resources.history import look_back

if TYPE_CHECKING:
    from resources.kafka import Kafka, TopicState
    from resources.ledger import Ledger


@dataclass(frozen=True)
class PartitionStatus:
    """One partition: offsets are None where they are not known."""

    partition: int
    planned: int | None
    log_start: int | None
    last_stable: int | None
    high_watermark: int | None
    leader: int | None
    trouble: str | None

    @property
    def lag(self) -> int | None:
        """Offsets that could be planned and are not."""
        if self.last_stable is None:
            return None
        begun = self.planned if self.planned is not None else self.log_start or 0
        return max(self.last_stable - begun, 0)


@dataclass(frozen=True)
class StreamStatus:
    """One stream.

    Args:
        stream: its name.
        topic: its main topic.
        slices: planned slices of all its topics.
        generation: of the main topic; None if it was never planned.
        topic_id: the one that was planned.
        partitions: empty if the topic could not be looked at.
        errors: what keeps the topic, or a partition of it, from being planned.
    """

    stream: str
    topic: str
    slices: int
    generation: int | None
    topic_id: str | None
    partitions: Sequence[PartitionStatus] = ()
    errors: Sequence[HighwaterError] = ()

    @property
    def lag(self) -> int | None:
        """Offsets that wait; None if the topic could not be looked at."""
        if not self.partitions:
            return None
        return sum(one.lag or 0 for one in self.partitions)

    @property
    def lines(self) -> list[str]:
        """The stream in sentences."""
        planned = "never planned" if self.generation is None else f"generation {self.generation}"
        lag = "lag not known" if self.lag is None else f"lag {self.lag:,}"
        head = f"{self.stream}: topic {self.topic}, {planned}, {self.slices:,} slices, {lag}"
        return [head, *[f"  {type(error).__name__}: {error}" for error in self.errors]]

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns, and a row for each partition."""
        names = ["partition", "planned to", "log start", "last stable", "high watermark", "lag", "leader", "trouble"]
        rows = [
            [_shown(value) for value in (p.partition, p.planned, p.log_start, p.last_stable, p.high_watermark, p.lag)]
            + [_shown(p.leader), p.trouble or ""]
            for p in self.partitions
        ]
        return names, rows

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "stream": self.stream,
            "topic": self.topic,
            "topic_id": self.topic_id,
            "generation": self.generation,
            "slices": self.slices,
            "lag": self.lag,
            "partitions": [{**vars(one), "lag": one.lag} for one in self.partitions],
            "errors": [{"error": type(error).__name__, "text": str(error)} for error in self.errors],
        }


def stream_status(ledger: Ledger, kafka: Kafka, stream: Stream, counts: Mapping[tuple[str, str], int]) -> StreamStatus:
    """Look at a stream; a topic that cannot be looked at is an error in the status, not of the look.

    Raises:
        DependencyAwayError: the ledger is away.
    """
    planned = ledger.planned(stream.name, stream.topic)
    generation = planned.generation if planned else None
    partitions: list[PartitionStatus] = []
    errors: list[HighwaterError] = []
    try:
        state = kafka.topic_state(stream.topic)
        history = look_back(kafka, state, planned) if planned else SOUND
        partitions = _partitions(stream, planned, state, history)
        errors = _errors(stream, planned, state, history)
    except HighwaterError as error:
        errors.append(error)
    return StreamStatus(
        stream=stream.name,
        topic=stream.topic,
        slices=sum(count for (name, _), count in counts.items() if name == stream.name),
        generation=generation.number if generation else None,
        topic_id=generation.topic_id if generation else None,
        partitions=partitions,
        errors=errors,
    )


def _partitions(stream: Stream, planned: Planned | None, state: TopicState, history: History) -> list[PartitionStatus]:
    """The partitions as they stand; those of another topic under the same name have no planned ends."""
    same = planned if planned is not None and planned.generation.topic_id == state.topic_id else None
    ends = positions(same, state) if same else {}
    trouble: dict[int, str] = {}
    if same:
        trouble = {p: error.problem for p, error in partition_errors(stream, same, state, history.diverged).items()}
        trouble |= {**history.unsure, **skipped_partitions(same, state)}
    return [
        PartitionStatus(
            partition=p,
            planned=ends.get(p),
            log_start=seen.log_start,
            last_stable=seen.last_stable,
            high_watermark=seen.high_watermark,
            leader=seen.leader,
            trouble=trouble.get(p),
        )
        for p, seen in state.partitions.items()
    ]


def _errors(stream: Stream, planned: Planned | None, state: TopicState, history: History) -> list[HighwaterError]:
    if planned is None:
        return []
    try:
        see_same_topic(stream, planned, state)
    except HighwaterError as error:
        return [error]
    return list(partition_errors(stream, planned, state, history.diverged).values())


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)
