"""A topic whose history was replaced, and plans of its slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

from highwater.declaration import Limits
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.kafka import Kafka
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import Bench


def seen(log_start: int, stable: int, *, epoch: int) -> PartitionState:
    return PartitionState(log_start, stable, stable, 1, epoch)


def topic(*partitions: PartitionState) -> TopicState:
    return TopicState("orders", "id", dict(enumerate(partitions)))


class FakeReplacedTopic(Kafka):
    """A cluster in whose one partition other records are from offset 100 on, of a later epoch; it ends at 250."""

    log_start: int = 0

    def read_topic_state(self, topic: str) -> TopicState:
        return TopicState(topic, "id", {0: seen(self.log_start, 250, epoch=3)})

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], **_: object) -> Iterator[Any]:
        for offset in range(ranges[0].start, ranges[0].end) if 0 in ranges else ():
            reported = {"partition": 0, "offset": offset, "leader_epoch": 1 if offset < 100 else 3}
            made = {**reported, "timestamp": (1, 0), "key": b"k", "value": b"%d" % offset}
            yield SimpleNamespace(**{name: partial(lambda found: found, value) for name, value in made.items()})


def planned(bench: Bench) -> tuple[Slice, ...]:
    stream = replace(bench.stream, limits=Limits(min_offsets=1))
    return Planner(bench.ledger, bench.kafka).tick(stream, datetime.now(UTC)).slices
