"""What of a topic no slice holds yet, and how old it is.

What belongs here: the offsets behind the planned ends, and the age of the oldest record among them. What does not:
cutting them (`orchestration.cutting`), or judging their age (`orchestration.alerts`, `highwater.topic_rules`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from highwater.errors import HighwaterError
from highwater.slices import OffsetRange
from orchestration.cutting import positions

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from resources.kafka import Kafka
    from resources.ledger import Ledger

# A record is read of so many partitions to know its age: those that lag most.
PARTITIONS_ASKED = 32
READ_SECONDS = 5.0


@dataclass(frozen=True)
class Ages:
    """How old the oldest unread records are.

    Args:
        by_partition: those that are known. Of a partition whose lag is markers of transactions alone there is none.
        sure: whether every partition could be asked.
    """

    by_partition: Mapping[int, timedelta]
    sure: bool

    @property
    def oldest(self) -> timedelta | None:
        """The greatest of them; None where there is none."""
        return max(self.by_partition.values(), default=None)


def unread_ages(ledger: Ledger, kafka: Kafka, stream: Stream, topic: str) -> Ages:
    """The ages of what the planner has not cut of a topic.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyAwayError: Kafka or the ledger is away.
    """
    state, planned = kafka.topic_state(topic), ledger.planned(stream.name, topic)
    # Planned ends of another topic under the same name say nothing of this one.
    same = planned is not None and planned.generation.topic_id == state.topic_id
    ends = positions(planned, state) if planned and same else {}
    waiting = {
        p: OffsetRange(begin, seen.last_stable)
        for p, seen in state.partitions.items()
        if seen.last_stable is not None and (begin := max(ends.get(p, 0), seen.log_start or 0)) < seen.last_stable
    }
    return _ages(kafka, topic, waiting, sure=all(seen.known for seen in state.partitions.values()))


def _ages(kafka: Kafka, topic: str, waiting: Mapping[int, OffsetRange], *, sure: bool) -> Ages:
    """The age of the first record of each range, of those partitions that lag most."""
    most = sorted(waiting, key=lambda p: -len(waiting[p]))[:PARTITIONS_ASKED]
    found = {}
    for partition in most:
        try:
            first = next(iter(kafka.read(topic, {partition: waiting[partition]}, seconds=READ_SECONDS)), None)
        except HighwaterError:
            sure = False
        else:
            found.update({} if first is None else {partition: age_of(first.timestamp()[1])})
    return Ages(found, sure)


def age_of(timestamp_ms: int) -> timedelta:
    """How long ago a record's timestamp is; 0 for one in the future, which a producer's clock may name."""
    return timedelta(milliseconds=max(time.time_ns() // 1_000_000 - max(timestamp_ms, 0), 0))
