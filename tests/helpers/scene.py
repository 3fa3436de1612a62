"""A stream that is planned on a real broker, with the hands to break it: for tests of the planner and the command."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner, Result

from assets.streams.orders import STREAM as ORDERS
from dev.processes import wait_until
from highwater.declaration import Limits
from highwater.errors import DependencyUnavailableError, HighwaterError, TopicAbsentError
from highwater.orchestration.cli.main import main
from highwater.orchestration.sensing.topic_planner import Planner, PlanningResult
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.slices import Slice

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient


class Scene:
    """A stream on a topic of its own, a ledger of its own, and the hands to break them."""

    def __init__(self, bootstrap: str, topic: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        self.url = f"sqlite:///{folder / 'ledger.sqlite'}"
        self.stream = replace(ORDERS, topic=topic, limits=Limits(max_offsets=10))
        self.ledger = Ledger(self.url)
        self.kafka = Kafka(bootstrap)

    @property
    def topic(self) -> str:
        return self.stream.topic

    @cached_property  # a client that is let go of drops the requests under way
    def admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def tick(self, **changes: Any) -> PlanningResult:
        return Planner(self.ledger, self.kafka).tick(replace(self.stream, **changes), datetime.now(UTC))

    def write(self, count: int, partition: int = 0) -> None:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 1})
        for number in range(count):
            producer.produce(self.topic, f"v{number}", partition=partition)
        assert producer.flush(30) == 0

    def delete_before(self, offset: int, partition: int = 0) -> None:
        """What retention does, at once."""
        from confluent_kafka import TopicPartition

        for future in self.admin.delete_records([TopicPartition(self.topic, partition, offset)]).values():
            future.result(30)

    def recreate(self, partitions: int = 1) -> None:
        before = self.kafka.read_topic_state(self.topic).topic_id
        self.admin.delete_topics([self.topic])[self.topic].result(30)
        wait_until(self.absent, 30, "the topic's end")
        self.create(partitions)
        assert self.kafka.read_topic_state(self.topic).topic_id != before

    def create(self, partitions: int = 1) -> None:
        from confluent_kafka.admin import NewTopic

        self.admin.create_topics([NewTopic(self.topic, partitions, 1)])[self.topic].result(30)
        wait_until(self.all_led, 30, "the new topic")

    def absent(self) -> bool:
        try:
            self.kafka.read_topic_state(self.topic)
        except TopicAbsentError:
            return True
        except DependencyUnavailableError:
            return False
        return False

    def add_partitions(self, total: int) -> None:
        from confluent_kafka.admin import NewPartitions

        self.admin.create_partitions([NewPartitions(self.topic, total)])[self.topic].result(30)
        wait_until(lambda: len(self.kafka.read_topic_state(self.topic).partitions) == total, 30, "the new partitions")

    def transaction(self) -> Any:
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": f"{self.topic}-t"})
        producer.init_transactions(30)
        producer.begin_transaction()
        return producer

    def stable(self, offset: int) -> None:
        wait_until(
            lambda: self.kafka.read_topic_state(self.topic).partitions[0].last_stable == offset, 30, "the marker"
        )

    def slices(self) -> list[Slice]:
        return self.ledger.list_slices(self.stream.name)

    def count(self) -> Counter[tuple[int, int, int]]:
        """How often each offset (generation, partition, offset) is planned."""
        return Counter(
            (s.generation, p, o) for s in self.slices() for p, r in s.ranges.items() for o in range(r.start, r.end)
        )

    def run(self, *arguments: str) -> Result:
        """The command on this scene."""
        declarations = self.folder / "declarations"
        declarations.mkdir(exist_ok=True)
        (declarations / "orders.py").write_text(
            f"from tests.helpers.support import make_stream\nSTREAM = make_stream({self.topic!r})\n"
        )
        environment = {
            "HIGHWATER_HOME": str(self.folder),
            "HIGHWATER_LEDGER_URL": self.url,
            "HIGHWATER_KAFKA_BOOTSTRAP": self.bootstrap,
        }
        return CliRunner().invoke(main, ["--declarations", str(declarations), *arguments], env=environment)

    def ensure_each_once(self, *expected: set[tuple[int, int, int]]) -> None:
        """Assert that exactly these offsets are planned, each once."""
        assert self.count() == Counter(set().union(*expected))

    def all_led(self) -> bool:
        """Whether the broker answers for every partition."""
        try:
            return all(p.known for p in self.kafka.read_topic_state(self.topic).partitions.values())
        except HighwaterError:
            return False


def offsets(partition: int, start: int, end: int, generation: int = 0) -> set[tuple[int, int, int]]:
    """Offsets as `Scene.count` names them."""
    return {(generation, partition, offset) for offset in range(start, end)}
