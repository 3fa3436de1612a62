"""The facts about a stream that the conditions of its alerts read once a tick."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from highwater.alerting import Condition
from highwater.orchestration.checking.origin_counts import count_parked
from highwater.orchestration.reporting.consumer_lag import RecordAges, measure_unread_ages, read_raw_slices

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# The reject ratio covers this many slices, the newest ones.
SLICES = 20


@dataclass(frozen=True)
class StreamInputs:
    """A stream, its clients, and the facts about it that one tick reads once."""

    ledger: Ledger
    kafka: Kafka
    lake: Lake
    stream: Stream

    @cached_property
    def in_raw(self) -> Collection[str] | None:
        """The slices that are in raw, read once; None if the lake cannot be asked now."""
        return read_raw_slices(self.ledger, self.lake, self.stream)

    @cached_property
    def parked(self) -> int:
        """The number of records that wait for a person, counted once.

        Raises:
            DependencyUnavailableError: the lake is unavailable.
        """
        return count_parked(self.ledger, self.lake, self.stream)

    def measure_ages(self, topic: str) -> RecordAges:
        """The offsets of a topic that are not in raw, read once.

        Raises:
            TopicAbsentError: there is no such topic.
            DependencyUnavailableError: Kafka or the ledger is unavailable.
        """
        if topic not in self._ages:
            self._ages[topic] = measure_unread_ages(self.ledger, self.kafka, self.stream, topic, self.in_raw)
        return self._ages[topic]

    @cached_property
    def _ages(self) -> dict[str, RecordAges]:
        return {}


Evaluate = Callable[[StreamInputs], Condition | None]
