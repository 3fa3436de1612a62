"""A stream whose slices raw has in part, on a cluster that is a test double."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dev.planted import plant
from highwater.orchestration.reporting.consumer_lag import RecordAges, measure_unread_ages, read_raw_slices
from highwater.plans import Generation
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.written_tables import NOW, STREAM, TIER


@dataclass(frozen=True)
class FakeTimedMessage:
    """A test double for a record that came at this moment."""

    at: datetime

    def timestamp(self) -> tuple[int, int]:
        return 1, round(self.at.timestamp() * 1000)


class FakeAgedTopics:
    """Topics whose records are a minute older than the next one; the last one before offset 100 is a minute old."""

    def list_topic_names(self) -> list[str]:
        return ["orders", TIER]

    def read_topic_state(self, topic: str) -> TopicState:
        return TopicState(topic, "A", {p: PartitionState(0, 100, 100, 1) for p in (0, 1)})

    def read(self, _: str, ranges: Mapping[int, OffsetRange], **__: object) -> Iterator[Any]:
        now = datetime.now(UTC)
        return (FakeTimedMessage(now - timedelta(minutes=100 - r.start)) for r in ranges.values() if len(r))


class Deployed:
    """Slices of ten offsets of both partitions, planned up to offset 60; raw holds some of them."""

    def __init__(self, folder: Path, topic: str = "orders", slices: int = 6) -> None:
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.lake = Lake(str(folder / "lake"))
        self.topic = topic
        self.kafka: Any = FakeAgedTopics()
        self.ledger.topics.open_generation(Generation("orders", topic, "A", 0, {0: 0, 1: 0}, NOW))
        at = [OffsetRange(10 * n, 10 * n + 10) for n in range(slices)]
        self.slices = [Slice("orders", topic, "A", 0, n, {0: r, 1: r}, NOW) for n, r in enumerate(at)]
        self.ledger.add(self.slices)

    def read(self, *ordinals: int) -> None:
        import pyarrow as pa

        slices = [self.slices[n] for n in ordinals]
        self.ledger.allocate_attempts([slice_.key for slice_ in slices])
        none = pa.table({"slice": pa.array([], pa.string())})
        plant(self.lake.build_table_path("orders", "raw"), none, [SliceCommit(p, 1, 0) for p in slices])

    def ages(self) -> RecordAges:
        return measure_unread_ages(
            self.ledger, self.kafka, STREAM, self.topic, read_raw_slices(self.ledger, self.lake, STREAM)
        )
