"""Test doubles for the topics and the consumer groups of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from highwater.errors import TopicAbsentError
from highwater.resources import dlq_topics
from highwater.resources.topic_state import PartitionState, TopicState
from tests.helpers.support import FakeSilentKafka

MAIN_SHAPE = dlq_topics.TopicShape(1, 1, {"max.message.bytes": "1000000", "min.insync.replicas": "1"})


class FakeNoGroups:
    """A cluster without consumer groups."""

    def list_group_names(self) -> list[str]:
        return []


@dataclass
class FakeTopics(FakeSilentKafka):
    """Topics of one partition: the ID of each, and its end."""

    there: dict[str, tuple[str, int]] = field(default_factory=dict)

    def list_topic_names(self) -> list[str]:
        return [*self.there]

    def read_topic_state(self, topic: str) -> TopicState:
        if topic not in self.there:
            near = "nearest names: orders.v2"
            raise TopicAbsentError(f"topic {topic!r} does not exist", found=near, remedy="create it")
        found, end = self.there[topic]
        return TopicState(topic, found, {0: PartitionState(0, end, end, 1)})

    def look_again(self, topic: str) -> TopicState:
        return self.read_topic_state(topic)

    def read_offsets_at(self, _: str, __: int, state: TopicState) -> dict[int, int]:
        return {p: seen.last_stable or 0 for p, seen in state.partitions.items()}

    def read(self, *_: object, **__: object) -> list[object]:
        return []
