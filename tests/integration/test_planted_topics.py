"""What happens to a topic, planted into a sound deployment: the audit names what turns red, and nothing else does.

The cluster is reported by plain values; the ledger and the tables are those of `tests.helpers.world`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from highwater.errors import DependencyUnavailableError, TopicAbsentError
from highwater.orchestration.checking import gap_checks
from highwater.orchestration.checking.offset_queries import read_raw_offsets
from highwater.orchestration.reporting import audit as audit_page
from highwater.orchestration.reporting.audit_report import Audit
from highwater.resources import topic_facts
from highwater.resources.kafka import Kafka
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange
from highwater.topic_rules import Level, Setting
from tests.helpers.topic_facts import OF_BROKER, SETTINGS
from tests.helpers.world import NOON, STREAM, TIER, FakeRecord, World

# Seconds of processor each.
pytestmark = pytest.mark.slow

BROKERS = [1, 2, 3]


@dataclass
class FakeThreeBrokers:
    """Three brokers that hold the topics of a world.

    Args:
        world: whose records are served.
        settings: of the main topic.
        parked: settings of the parked topic.
        in_sync: brokers that are.
        led: whether the main topic has a leader.
        more: partitions that were added.
        topic_id: of the main topic, if it was recreated: it is empty then.
        cut: how many records were cut off the end of partition 0.
        late: how many came that no slice holds.
        hidden: whether these may not be read.
    """

    world: World
    settings: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    parked: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    in_sync: list[int] = field(default_factory=lambda: list(BROKERS))
    led: bool = True
    more: int = 0
    topic_id: str | None = None
    cut: int = 0
    late: int = 0
    hidden: bool = False
    bootstrap: str = "broker:9092"

    def read_topic_state(self, topic: str) -> TopicState:
        if topic not in self.world.topics.ends:
            raise TopicAbsentError(f"topic {topic!r} does not exist", remedy="create it")
        found = self.world.topics.read_topic_state(topic)
        if topic != "orders":
            return found
        partitions = dict(found.partitions)
        end = (partitions[0].last_stable or 0) - self.cut + self.late
        partitions[0] = PartitionState(0, end, end, 1)
        partitions |= {max(partitions) + n: PartitionState(0, 0, 0, 1) for n in range(1, self.more + 1)}
        if self.topic_id:
            partitions = dict.fromkeys(partitions, PartitionState(0, 0, 0, 1))
        if not self.led:
            partitions[1] = PartitionState(None, None, None, None)
        return TopicState(topic, self.topic_id or found.topic_id, partitions)

    def look_again(self, topic: str) -> TopicState:
        return self.read_topic_state(topic)

    def read_offsets_at(self, topic: str, _: int, state: TopicState | None = None) -> dict[int, int]:
        """Nothing on the tiers is younger than any moment that is asked for."""
        seen = (state or self.read_topic_state(topic)).partitions
        return {p: one.last_stable for p, one in seen.items() if one.last_stable is not None}

    def read_description(self, topic: str) -> Any:
        replicas = [SimpleNamespace(id=number) for number in BROKERS]
        isr = [SimpleNamespace(id=number) for number in self.in_sync]
        leader = SimpleNamespace(id=1)
        return SimpleNamespace(
            partitions=[
                SimpleNamespace(id=p, replicas=replicas, isr=isr, leader=None if self._unled(topic, p) else leader)
                for p in self.read_topic_state(topic).partitions
            ]
        )

    def _unled(self, topic: str, partition: int) -> bool:
        return not self.led and (topic, partition) == ("orders", 1)

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], **changes: Any) -> Iterator[FakeRecord]:
        changes.pop("seconds", None)
        found = self.world.topics.read(topic, ranges, **changes)
        yield from (one for one in found if not self.cut or one.place != (0, 0))
        late = (0, self.world.topics.ends["orders"][0])
        if self.late and topic == "orders" and late[1] in ranges.get(0, ()):
            if self.hidden:
                raise DependencyUnavailableError("Kafka did not answer", found="not authorized", remedy="allow it")
            yield FakeRecord(late, {"timestamp": NOON, "key": b"k", "value": b"{}"})

    def reported(self, _: object, kind: Any, name: str) -> Mapping[str, Setting]:
        if kind.name == "BROKER":
            return OF_BROKER
        settings = {"orders": self.settings, STREAM.parked_topic: self.parked}.get(name, SETTINGS)
        return {name: Setting(value, "DYNAMIC_TOPIC_CONFIG") for name, value in settings.items()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeThreeBrokers:
    """A sound one, whose slices were looked at."""
    made = FakeThreeBrokers(World(tmp_path))
    world = made.world
    world.write()
    # DLQ topics have as many partitions as the main topic; records in a removed partition would be reported.
    ends = world.topics.ends
    world.topics.ends = {**ends, TIER: {**ends[TIER], 1: 0}, STREAM.parked_topic: {0: 1, 1: 0}}
    monkeypatch.setattr(topic_facts, "_list_brokers", lambda _: BROKERS)
    monkeypatch.setattr(topic_facts, "_fetch_settings", made.reported)
    # Our own producer is no part of a topic, and what slices sent is counted elsewhere.
    monkeypatch.setattr(audit_page, "check_producers", lambda *_: ({}, []))
    monkeypatch.setattr(audit_page, "compare_sent_records", lambda *_: [])
    held = read_raw_offsets(world.ledger, world.lake, STREAM, world.keys)
    found = gap_checks.check_gaps_explained(world.ledger, cast("Kafka", made), STREAM, held)
    assert all(result.passed for result in found.values())
    return made


def page(cluster: FakeThreeBrokers) -> Audit:
    """The audit as the command makes it."""
    world = cluster.world
    return audit_page.audit(
        world.ledger, cast("Kafka", cluster), world.lake, STREAM, records_of=len(world.slices), versions=True, keys=True
    )


def rules(found: Audit) -> dict[str, Level]:
    """The rules that are not kept."""
    return {one.rule: one.level for one in found.findings if one.level is not Level.OK}


def partitions(found: Audit) -> Sequence[Sequence[str]]:
    """What the page shows of each partition of the main topic."""
    [_, rows] = next(table[1:] for table in found.tables if table[0] == "Partitions")
    return rows


def test_a_sound_topic_has_no_error(cluster: FakeThreeBrokers) -> None:
    found = page(cluster)
    assert (found.errors, rules(found)) == ([], {})


Change = Callable[[FakeThreeBrokers], object]
ERROR, WARNING = Level.ERROR, Level.WARNING
DEFECTS: dict[str, tuple[Change, dict[str, Level], list[str]]] = {
    "min.insync lowered": (
        lambda it: it.settings.update({"min.insync.replicas": "1"}),
        {"min.insync.replicas": ERROR},
        ["min.insync.replicas: "],
    ),
    "unclean election on": (
        lambda it: it.settings.update({"unclean.leader.election.enable": "true"}),
        {"unclean election": ERROR},
        ["unclean election: "],
    ),
    "unclean election on for parked records": (
        lambda it: it.parked.update({"unclean.leader.election.enable": "true"}),
        {},
        ["orders.parked: unclean election: "],
    ),
    "a backlog that may not be read": (
        lambda it: vars(it).update(late=1, hidden=True),
        {"retention": Level.UNKNOWN},
        [],
    ),
    "retention below the backlog": (lambda it: setattr(it, "late", 1), {"retention": ERROR}, ["retention: "]),
    "a replica stopped": (lambda it: it.in_sync.remove(3), {"replicas in sync": WARNING}, []),
    "two replicas stopped": (
        lambda it: vars(it).update(in_sync=[1]),
        {"replicas in sync": ERROR},
        [f"{of}replicas in sync: writes with acks=all wait" for of in ("", f"{TIER}: ", f"{STREAM.parked_topic}: ")],
    ),
    "a partition added": (lambda it: setattr(it, "more", 1), {}, []),
    "recreated": (
        lambda it: setattr(it, "topic_id", "B" * 22),
        {},
        ["topic orders of stream orders was deleted and created again"],
    ),
    "truncated": (lambda it: setattr(it, "cut", 3), {}, ["topic orders partition 0 ends before "]),
    "a partition without a leader": (
        lambda it: setattr(it, "led", False),
        {"replicas in sync": ERROR, "retention": Level.UNKNOWN},
        ["replicas in sync: no leader for partitions 1"],
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_turns_its_line_red_and_no_other(cluster: FakeThreeBrokers, name: str) -> None:
    change, broken, errors = DEFECTS[name]
    change(cluster)
    found = page(cluster)
    assert rules(found) == broken
    # What is no error is reported all the same.
    assert [row[0] for row in partitions(found)] == [str(number) for number in range(2 + cluster.more)]
    assert len(found.errors) == len(errors), found.errors
    assert [text for text, begin in zip(found.errors, errors, strict=True) if not text.startswith(begin)] == []


def test_a_partition_that_was_added_is_reported_with_nothing_planned(cluster: FakeThreeBrokers) -> None:
    cluster.more = 1
    assert [row[:2] for row in partitions(page(cluster))] == [["0", "8"], ["1", "4"], ["2", "0"]]
