"""What was sent of slices, counted on the topics: a copy too many, and one that is not there, are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from highwater.assets import dlq, publication_log
from highwater.declaration import Accepted
from highwater.envelope import Envelope, KafkaHeader, Origin
from highwater.errors import TopicAbsentError
from highwater.orchestration.checking import sent_records
from highwater.orchestration.checking.sent_records import TopicRecords, compare_sent_records
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import make_stream
from tests.helpers.world import schema_of

if TYPE_CHECKING:
    from tests.conftest import TopicFactory

NOW = datetime.now(UTC).replace(microsecond=0)
ID = "A" * 22


@dataclass
class FakeTopicHeaders:
    """Topics of one partition, with the headers of their records."""

    records: dict[str, list[Sequence[KafkaHeader]]] = field(default_factory=dict)
    open: int = 0
    log_start: int = 0
    since: list[int] = field(default_factory=list)

    def others(self) -> None:
        """Let somebody else write to all of them."""
        for found in self.records.values():
            found.extend([[], [("h", None)]])

    def read_topic_state(self, topic: str) -> TopicState:
        if topic not in self.records:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        end = len(self.records[topic])
        return TopicState(topic, ID, {0: PartitionState(self.log_start, end - self.open, end, 1)})

    def read_offsets_at(self, topic: str, timestamp_ms: int, state: TopicState) -> dict[int, int]:
        self.since.append(timestamp_ms)
        return {p: seen.log_start or 0 for p, seen in state.partitions.items()}

    def read(self, topic: str, ranges: Mapping[int, OffsetRange]) -> Iterator[Any]:
        for headers in self.records[topic][ranges[0].start : ranges[0].end]:
            yield FakeHeadedMessage(headers)


@dataclass(frozen=True)
class FakeHeadedMessage:
    found: Sequence[KafkaHeader]

    def headers(self) -> Sequence[KafkaHeader]:
        return self.found


class Scene:
    """A slice with two rejects, on a tier and parked, and two events that were sent."""

    def __init__(self, folder: Path, topic: str = "orders") -> None:
        self.stream = make_stream(topic, publishes=Accepted(f"{topic}.accepted"))
        self.lake, self.topics = Lake(str(folder / "lake")), FakeTopicHeaders()
        self.slice_ = Slice("orders", topic, ID, 0, 0, {0: OffsetRange(0, 4)}, NOW - timedelta(minutes=1))
        self.tier, self.parked, self.accepted = (
            self.stream.tier_topics[0],
            self.stream.parked_topic,
            f"{topic}.accepted",
        )
        self.rejects = [self.read_reject(0, self.tier), self.read_reject(1, self.parked)]
        self.sent = [self.build_event(2, "sent", 0), self.build_event(3, "second delivery", 0)]
        self.topics.records = {
            self.tier: [self.envelope(0)],
            self.parked: [self.envelope(1)],
            self.accepted: [self.said(2)],
        }

    def origin(self, offset: int) -> dict[str, Any]:
        return {f"origin_{n}": v for n, v in Origin(self.stream.topic, 0, 0, offset)._asdict().items()}

    def read_reject(self, offset: int, topic: str) -> dict[str, Any]:
        return {"slice": self.slice_.key, **self.origin(offset), "next_topic": topic, "published_at": NOW}

    def build_event(self, offset: int, state: str, revision: int) -> dict[str, Any]:
        reported = {"state": state, "revision": revision, "published_at": NOW}
        return {"slice": self.slice_.key, **self.origin(offset), **reported}

    def envelope(self, offset: int, **changes: Any) -> list[KafkaHeader]:
        made = Envelope(self.stream.topic, 0, 0, offset, 0, 1, "unresolved", "why", self.slice_.key, NOW)
        return replace(made, **changes).to_headers()

    def said(self, offset: int, *more: KafkaHeader) -> list[KafkaHeader]:
        names = {name.replace("_", "."): value for name, value in self.origin(offset).items()}
        return [*((f"highwater.{name}", str(value).encode()) for name, value in names.items()), *more]

    def held(self, kafka: Kafka | None = None) -> list[TopicRecords]:
        import pyarrow as pa
        from deltalake import write_deltalake

        for table, rows, schema in (
            ("dlq", self.rejects, schema_of(dlq.COLUMNS)),
            ("published", self.sent, publication_log.build_schema()),
        ):
            made = pa.Table.from_pylist(rows, schema)
            write_deltalake(self.lake.build_table_path("orders", table), made, mode="overwrite", partition_by=["slice"])
        asked = kafka or cast("Kafka", self.topics)
        return compare_sent_records(asked, self.lake, self.stream, [self.slice_])

    def errors(self) -> dict[str, str]:
        return {one.topic: one.error.partition(": ")[2] for one in self.held() if one.error}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_records_sent_once_are_found_once(scene: Scene) -> None:
    assert [one.line for one in scene.held()] == [
        f"{topic}: 1 records were sent of these slices, each once"
        for topic in (scene.tier, scene.parked, scene.accepted)
    ]
    planned = scene.slice_.planned_at
    assert scene.topics.since == [round((planned - timedelta(hours=1)).timestamp() * 1000)] * 3


def test_records_reported_late_are_searched_from_their_plan_on(scene: Scene) -> None:
    """A run that dies after its transaction is finished by another, which writes the table hours later."""
    for row in (*scene.rejects, *scene.sent):
        row["published_at"] = NOW + timedelta(hours=9)
    assert scene.errors() == {}
    assert scene.topics.since[0] < scene.slice_.planned_at.timestamp() * 1000


Plant = Callable[[Scene], None]
DEFECTS: dict[str, tuple[Plant, dict[str, str]]] = {
    "a reject is on its tier twice": (
        lambda it: it.topics.records[it.tier].append(it.envelope(0)),
        {"orders.dlq.1": "1 records are there twice: orders partition 0 offset 0 by orders@0000000"},
    ),
    "a reject is parked twice": (
        lambda it: it.topics.records[it.parked].append(it.envelope(1)),
        {"orders.parked": "1 records are there twice: orders partition 0 offset 1 by orders@0000000"},
    ),
    "a reject was never published": (
        lambda it: it.topics.records[it.parked].clear(),
        {"orders.parked": "1 records were sent and are not there: orders partition 0 offset 1 by orders@0000000"},
    ),
    "an accepted event is there twice": (
        lambda it: it.topics.records[it.accepted].append(it.said(2)),
        {"orders.accepted": "1 records are there twice: orders partition 0 offset 2"},
    ),
    "an accepted event is not there": (
        lambda it: it.topics.records[it.accepted].clear(),
        {"orders.accepted": "1 records were sent and are not there: orders partition 0 offset 2"},
    ),
    "a row of what was sent names another origin": (
        lambda it: it.sent[0].update(origin_offset=17),
        {"orders.accepted": "1 records were sent and are not there: orders partition 0 offset 17"},
    ),
    # No defects
    "it was rejected again, and parked by the slice that did": (
        lambda it: it.topics.records[it.parked].append(it.envelope(1, slice_key="orders.dlq.1@0000000")),
        {},
    ),
    "it was reclaimed, and rejected again": (
        lambda it: it.topics.records[it.parked].append(it.envelope(1, reclaims=1)),
        {},
    ),
    "its content changed": (
        lambda it: it.topics.records[it.accepted].insert(0, it.said(2, ("highwater.revision", b"1"))),
        {},
    ),
    "others write to the topics": (
        lambda it: it.topics.others(),
        {},
    ),
    "it was sent before the lake was rebuilt": (
        lambda it: it.rejects[1].update(origin_offset=9, published_at=NOW - timedelta(days=1)),
        {},
    ),
    "a transaction is open": (lambda it: setattr(it.topics, "open", 1), {}),
    "retention took some": (lambda it: setattr(it.topics, "log_start", 1), {}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_is_reported_its_topic_and_no_other(scene: Scene, name: str) -> None:
    plant, expected = DEFECTS[name]
    plant(scene)
    assert scene.errors() == expected


def test_uncountable_topics_are_reported_without_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    del scene.topics.records[scene.tier]
    monkeypatch.setattr(sent_records, "MAX_RECORDS", 0)
    lines = [one.line for one in scene.held()]
    assert lines[0] == "orders.dlq.1: not counted: topic 'orders.dlq.1' does not exist"
    assert lines[1].startswith("orders.parked: not counted: 1 offsets since 20")
    assert scene.errors() == {}


@pytest.mark.slow
def test_a_second_copy_on_a_real_topic_is_reported(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    """Only records of committed transactions count."""
    from confluent_kafka import Producer

    from tests.conftest import create_topic

    scene = Scene(tmp_path, topic())
    for name in (scene.tier, scene.parked, scene.accepted):
        create_topic(bootstrap, name, 1, {})
    kafka = Kafka(bootstrap)

    def send(*names: str, commits: bool = True) -> None:
        producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"test.{scene.stream.topic}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        for name in names:
            for headers in scene.topics.records[name]:
                producer.produce(name, b"v", b"k", 0, headers=[*headers])
        producer.flush(30)
        producer.commit_transaction(30) if commits else producer.abort_transaction(30)

    send(scene.tier, scene.parked, scene.accepted)
    send(scene.tier, scene.accepted, commits=False)
    assert [one.line.rpartition(", ")[2] for one in scene.held(kafka)] == ["each once"] * 3
    send(scene.tier, scene.accepted)
    errors = {one.topic: len(one.doubled) for one in scene.held(kafka) if one.error}
    assert errors == {scene.tier: 1, scene.accepted: 1}
