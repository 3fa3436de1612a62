"""Due times of the waiting records in a tier: of the next one, and of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from highwater.errors import HighwaterError
from highwater.routing import compute_longest_retry_delay, compute_retry_delay
from highwater.slices import OffsetRange, SliceKey

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.sensing.topic_planner import PlanningResult
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger

# At each end of the waiting offsets of a partition this many are read: the first and the last may be markers.
LOOKED_AT = 20
READ_SECONDS = 5.0


@dataclass(frozen=True)
class DueTimes:
    """The due times of waiting records.

    Args:
        next_due: when the first waiting record is due, by the delay of the slice that is planned next, in UTC.
        all_due: when all of them are due, at the latest, in UTC.
    """

    next_due: datetime
    all_due: datetime

    def to_plain(self) -> dict[str, str]:
        """Plain values for JSON."""
        return {"next_due": self.next_due.isoformat(), "all_due": self.all_due.isoformat()}


def read_due_times(ledger: Ledger, kafka: Kafka, stream: Stream, topic: str, tick: PlanningResult) -> DueTimes | None:
    """The due times of records that a tick without effect found waiting.

    None where nothing waits, where times could not be read, or where a producer's clock names a year beyond Python's
    times, as it may on another system's topic.

    Records are read from both ends of each partition, by two consumers however many there are.

    Args:
        ledger: the plans.
        kafka: is read.
        stream: the stream.
        topic: the tier, or another system's topic.
        tick: the slices that would be planned now.
    """
    planned = ledger.topics.read_planned_topic(stream.name, topic)
    starts = {p: r.start for p, r in tick.slices[0].ranges.items()} if tick.slices else tick.ends
    waits = {
        p: OffsetRange(start, seen.last_stable)
        for p, seen in tick.state.partitions.items()
        if seen.last_stable is not None and (start := starts.get(p, 0)) < seen.last_stable
    }
    if not waits:
        return None
    try:
        begin = {p: OffsetRange(r.start, min(r.start + LOOKED_AT, r.end)) for p, r in waits.items()}
        heads = _read_timestamps(kafka, topic, begin)
        tails = _read_timestamps(
            kafka, topic, {p: OffsetRange(max(r.start, r.end - LOOKED_AT), r.end) for p, r in waits.items()}
        )
        if not heads or not tails:
            return None  # they are all markers
        first, last = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (min(heads), max(tails)))
        following = SliceKey(topic, planned.next_ordinal if planned else 0)
        return compute_due_times(stream.delays[topic], following, first, last)
    except (HighwaterError, ValueError, OverflowError, OSError):
        return None


def _read_timestamps(kafka: Kafka, topic: str, ranges: Mapping[int, OffsetRange]) -> list[int]:
    """The times of the records in milliseconds since 1970; 0 of one that has none, or an earlier one."""
    return [max(message.timestamp()[1], 0) for message in kafka.read(topic, ranges, seconds=READ_SECONDS)]


def compute_due_times(delay: timedelta, following: SliceKey, first: datetime, last: datetime) -> DueTimes:
    """The due times of records of these times: the first in the next slice, the last in any slice."""
    return DueTimes(first + compute_retry_delay(delay, str(following)), last + compute_longest_retry_delay(delay))
