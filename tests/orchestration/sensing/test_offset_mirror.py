"""The mirror's ticks: what the group holds after each, and what it cost to know.

Ledger and lake are real; the lake holds commit records, and rows of rejects alone. The group's coordinator is played
where no broker is needed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev.planted import plant
from dev.processes import wait_until
from highwater.declaration import Limits, Stream
from highwater.divergence import SOUND, Divergence
from highwater.errors import (
    DependencyUnavailableError,
    ForeignMemberError,
    LeaseHeldError,
    TopicAbsentError,
)
from highwater.mirroring import GroupOffset, MirrorMark
from highwater.orchestration.checking import slice_status
from highwater.orchestration.sensing import offset_mirror
from highwater.orchestration.sensing.stream_ticks import Tick
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.plans import Generation
from highwater.resources import consumer_groups
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import commit_current
from tests.helpers.support import Message, make_stream, send

if TYPE_CHECKING:
    from highwater.resources.consumer_groups import TopicAndPartition
    from tests.conftest import TopicFactory

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = make_stream("orders")
TIER = STREAM.tier_topics[0]


def prove(lake: Lake, stream: str, slices: Sequence[Slice], *tables: str, attempt: int = 1, rejects: int = 0) -> None:
    """Commit slices to tables of the lake, each with the same number of rejects."""
    import pyarrow as pa

    for table in tables:
        if table == "current":
            commit_current(lake, stream, {slice_.key: attempt for slice_ in slices})
            continue
        rows = rejects if table in {"rejects", "dlq"} else 0
        keys = [slice_.key for slice_ in slices] * rows
        data = pa.table({"slice": pa.array(keys, pa.string()), "retries": pa.array([0] * len(keys), pa.int32())})
        plant(lake.build_table_path(stream, table), data, [SliceCommit(slice_, attempt, rows) for slice_ in slices])


@dataclass
class FakeDeployment:
    """A cluster whose topics and group are values, and a ledger and a lake that are real."""

    folder: Path
    topics: dict[str, TopicState] = field(default_factory=dict)
    group: dict[TopicAndPartition, GroupOffset] = field(default_factory=dict)
    commits: list[Mapping[TopicAndPartition, tuple[int, MirrorMark]]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    divergence: Divergence = SOUND
    unavailable: bool = False

    def __post_init__(self) -> None:
        self.ledger = Ledger(f"sqlite:///{self.folder / 'ledger.sqlite'}")
        self.lake = Lake(str(self.folder / "lake"))

    def read_topic_state(self, topic: str) -> TopicState:
        if topic not in self.topics:
            raise TopicAbsentError("not there", remedy="none")
        return self.topics[topic]

    def held(
        self, kafka: object, name: str, places: Collection[TopicAndPartition]
    ) -> dict[TopicAndPartition, GroupOffset]:
        assert name == "highwater.orders"
        return {place: held for place, held in self.group.items() if place in places}

    def commit(self, kafka: object, name: str, offsets: Mapping[TopicAndPartition, tuple[int, MirrorMark]]) -> None:
        if self.unavailable:
            raise DependencyUnavailableError("away", remedy="none")
        self.commits.append(offsets)
        # As a broker keeps them: the mark goes through its written form.
        self.group |= {
            place: GroupOffset(offset, MirrorMark.from_json(mark.to_json()))
            for place, (offset, mark) in offsets.items()
        }

    def topic(self, end: int, *, name: str = "orders", topic_id: str = "a", partitions: int = 2) -> None:
        states = dict.fromkeys(range(partitions), PartitionState(0, end, end, 1, 0))
        self.topics[name] = TopicState(name, topic_id, states)

    def open(self, number: int = 0, *, name: str = "orders", topic_id: str = "a", **starts: int) -> None:
        found = {int(p[1:]): start for p, start in starts.items()} or {0: 0, 1: 0}
        assert self.ledger.topics.open_generation(Generation("orders", name, topic_id, number, found, NOW))

    def plan(self, *ordinals: int, name: str = "orders", topic_id: str = "a", generation: int = 0) -> list[Slice]:
        """Slices of ten offsets in each of two partitions, the first from offset 0 on."""
        slices = []
        for n in ordinals:
            ranges = dict.fromkeys((0, 1), OffsetRange(10 * n, 10 * n + 10))
            slices.append(Slice("orders", name, topic_id, generation, n, ranges, NOW + timedelta(seconds=n)))
        assert self.ledger.add(slices)
        return slices

    def settle(self, slices: Sequence[Slice], **changes: int) -> None:
        prove(self.lake, "orders", slices, "raw", "events", "rejects", **changes)

    def tick(self, now: datetime = NOW) -> list[str]:
        return [*self.look(now).lines]

    def look(self, now: datetime = NOW) -> Tick:
        return offset_mirror.tick(self.ledger, self, self.lake, STREAM, now)  # type: ignore[arg-type]

    def positions(self, topic: str = "orders") -> list[int | None]:
        return [held.offset if (held := self.group.get((topic, p))) else None for p in (0, 1)]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDeployment:
    made = FakeDeployment(tmp_path)
    made.topic(1_000_000)

    def settled(lake: Lake, stream: Stream, keys: Sequence[str]) -> set[str]:
        made.asked += keys
        return asking(lake, stream, keys)

    asking = slice_status.list_processed_slices
    monkeypatch.setattr(slice_status, "list_processed_slices", settled)
    monkeypatch.setattr(offset_mirror, "read_group_offsets", made.held)
    monkeypatch.setattr(offset_mirror, "commit", made.commit)
    monkeypatch.setattr(offset_mirror, "detect_divergence", lambda *_: made.divergence)
    return made


def test_slices_that_are_done_out_of_order_wait_for_those_before_them(played: FakeDeployment) -> None:
    assert "nothing is planned" in "; ".join(played.tick())
    assert played.group == {}
    played.open()
    zero, one, two = played.plan(0, 1, 2)
    played.tick()
    assert played.positions() == [0, 0]
    played.settle([two, one])
    played.tick()
    assert played.positions() == [0, 0]
    played.settle([zero])
    assert "done up to orders@0000002" in "; ".join(played.tick())
    assert played.positions() == [30, 30]
    assert f"{TIER}: nothing is planned yet" in played.tick()


def test_every_table_but_current_counts(played: FakeDeployment) -> None:
    """A reject that is decided and not published is in nobody's hands yet; `current` follows events at its own pace."""
    played.open()
    [slice_] = played.plan(0)
    for table, expected in [("raw", 0), ("events", 0), ("rejects", 0), ("dlq", 10)]:
        prove(played.lake, "orders", [slice_], table, rejects=3)
        reported = "; ".join(played.tick())
        assert played.positions() == [expected, expected], table
        assert ("orders@0000000 is not" in reported) == (expected == 0)


def test_rejects_of_another_decision_do_not_count(played: FakeDeployment) -> None:
    played.open()
    [slice_] = played.plan(0)
    prove(played.lake, "orders", [slice_], "raw", "events", attempt=2)
    prove(played.lake, "orders", [slice_], "rejects", attempt=1)
    played.tick()
    assert played.positions() == [0, 0]


def test_nothing_is_written_while_nothing_changed_but_once_a_day(played: FakeDeployment) -> None:
    played.open()
    played.settle(played.plan(0, 1))
    played.tick()
    for hours in (1, 12, 22):
        assert played.tick(NOW + timedelta(hours=hours))[0] == "nothing changed"
    assert len(played.commits) == 1
    played.tick(NOW + timedelta(hours=23))
    assert [len(commit) for commit in played.commits] == [2, 2]
    assert played.tick(NOW + timedelta(hours=24))[0] == "nothing changed"
    played.tick(NOW + timedelta(hours=46))
    assert len(played.commits) == 3
    assert played.positions() == [20, 20]


def test_a_tick_looks_only_behind_what_is_known_to_be_done(played: FakeDeployment) -> None:
    played.open()
    played.settle(played.plan(*range(60)))
    played.plan(*range(60, 200))
    played.tick()
    assert played.positions() == [600, 600]
    assert len(played.asked) == 20 + 40 + 80
    played.asked.clear()
    look = played.look()
    assert (look.idle, look.until) == (False, NOW + offset_mirror.WORKING_REST), "until a run ends"
    assert played.asked == [f"orders@{n:07d}" for n in range(60, 80)], "what waits behind it is not looked at"


def test_a_long_way_is_gone_in_ticks(played: FakeDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_mirror, "MAX_PER_TICK", 30)
    played.open()
    played.settle(played.plan(*range(70)))
    was_committed = []
    for goes_on in (True, True, False, False):
        assert (played.look().until is None) == goes_on
        was_committed.append(played.positions()[0])
    assert was_committed == [300, 600, 700, 700]
    assert len(played.asked) == 70


def test_a_tick_that_dies_before_its_commit_is_made_up_for(played: FakeDeployment) -> None:
    played.open()
    played.settle(played.plan(0))
    played.unavailable = True
    with pytest.raises(DependencyUnavailableError):
        played.tick()
    played.unavailable = False
    played.tick()
    assert played.positions() == [10, 10]


@pytest.mark.parametrize("offset", [0, 15, 500])
def test_offsets_set_by_others_are_corrected(played: FakeDeployment, offset: int) -> None:
    played.open()
    played.settle(played.plan(0, 1))
    played.tick()
    for p in (0, 1):
        played.group["orders", p] = GroupOffset(offset, None)
    assert "somebody else had set partitions 0, 1" in "; ".join(played.tick())
    assert played.positions() == [20, 20]
    played.group["orders", 1] = GroupOffset(offset, None)
    played.tick()
    assert played.positions() == [20, 20]
    played.group.clear()
    played.tick()
    assert played.positions() == [20, 20]


def test_a_mark_of_another_ledger_is_not_believed(played: FakeDeployment) -> None:
    """A new deployment on an old topic: the group says that a slice is done which here is planned otherwise."""
    played.open()
    zero, _ = played.plan(0, 1)
    other = replace(zero, ordinal=1, ranges=dict.fromkeys((0, 1), OffsetRange(10, 900)))
    unknown = replace(zero, ordinal=7)
    for slice_, offset in ((other, 900), (unknown, 900), (other, 0)):
        played.group = {
            ("orders", p): GroupOffset(offset, MirrorMark.from_last_slice("a", slice_, NOW)) for p in (0, 1)
        }
        played.tick()
        assert played.positions() == [0, 0]
        assert {held.mark for held in played.group.values()} == {MirrorMark.from_last_slice("a", None, NOW)}


def test_an_accepted_divergence_takes_the_group_back(played: FakeDeployment) -> None:
    played.open()
    played.settle(played.plan(0, 1))
    played.tick()
    # Reported by the records before anybody accepts it, and by a log that ends too early.
    played.divergence = Divergence(diverged={0: 13})
    played.tick()
    assert played.positions() == [13, 20]
    played.divergence = SOUND
    played.topic(17)
    played.tick()
    assert played.positions() == [17, 17]
    played.open(1, p0=13, p1=17)
    played.topic(100)
    played.tick()
    assert played.positions() == [13, 17]
    ranges = {0: OffsetRange(13, 100), 1: OffsetRange(17, 100)}
    slice_ = Slice("orders", "orders", "a", 1, 2, ranges, NOW + timedelta(seconds=3))
    assert played.ledger.add([slice_])
    played.tick()
    assert played.positions() == [13, 17]
    played.settle([slice_])
    played.tick()
    assert played.positions() == [100, 100]


def test_a_partition_that_cannot_be_compared_is_left_as_it_is(played: FakeDeployment) -> None:
    played.open()
    played.settle(played.plan(0))
    played.tick()
    played.settle(played.plan(1))
    played.divergence = Divergence(unsure={0: "no answer"})
    look = played.look()
    assert "not compared now: partitions 0" in "; ".join(look.lines)
    assert (look.idle, look.until) == (False, None), "the next tick compares it"
    assert played.positions() == [10, 20]
    played.divergence = SOUND
    leaderless = PartitionState(None, None, None, None)
    played.topics["orders"] = TopicState("orders", "a", {0: leaderless, 1: PartitionState(0, 99, 99, 1, 0)})
    played.tick()
    assert played.positions() == [10, 20]
    played.topic(99)
    played.asked.clear()
    played.tick()
    assert played.positions() == [20, 20]
    assert played.asked == [], "of two marks the newer one says what is done"


def test_a_recreated_topic_is_never_ahead(played: FakeDeployment) -> None:
    """A cluster drops a topic's offsets with it; those that were committed in the same moment are reclaimed."""
    played.open()
    played.settle(played.plan(0, 1)[:1])
    played.tick()
    played.topic(50, topic_id="b")
    assert "is not the topic that was planned" in "; ".join(played.tick())
    assert played.positions() == [0, 0]
    written = len(played.commits)
    played.tick()
    assert len(played.commits) == written
    played.group["orders", 1] = GroupOffset(33, None)
    played.tick()
    assert played.positions() == [0, 33], "what another one committed on a topic that we know nothing of stays"
    played.open(1, topic_id="b", p0=0, p1=0)
    played.tick()
    assert played.positions() == [0, 0]
    played.settle(played.plan(2, topic_id="b", generation=1))
    played.tick()
    assert played.positions() == [30, 30]


def test_a_topic_that_is_gone_keeps_no_other_one_waiting(played: FakeDeployment) -> None:
    played.open()
    played.open(name=TIER)
    played.topic(1_000, name=TIER)
    played.settle(played.plan(0))
    played.settle(played.plan(0, 1, name=TIER))
    played.tick()
    assert (played.positions(), played.positions(TIER)) == ([10, 10], [20, 20])
    del played.topics["orders"]
    played.settle(played.plan(2, name=TIER))
    assert "orders: is not there" in played.tick()
    assert played.positions(TIER) == [30, 30]


def test_a_partition_that_is_not_there_is_not_committed(played: FakeDeployment) -> None:
    played.open()
    played.settle(played.plan(0))
    played.topic(100, partitions=1)
    played.tick()
    assert played.positions() == [10, None]


def test_two_ticks_at_once_follow_each_other(played: FakeDeployment) -> None:
    with played.ledger.lease("highwater.orders", seconds=30), pytest.raises(LeaseHeldError):
        played.tick()


# On a real broker


class Real:
    """A stream on a real broker with a group of its own; the planner plans slices, the test commits them."""

    def __init__(self, bootstrap: str, topic: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        # Streams of other tests on this broker are named `orders`, and so are their groups.
        self.stream = replace(make_stream(topic, limits=Limits(max_offsets=10)), name="mirrored")
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.lake = Lake(str(folder / "lake"))
        self.kafka = Kafka(bootstrap)

    def plan(self) -> list[Slice]:
        return list(Planner(self.ledger, self.kafka).tick(self.stream, datetime.now(UTC)).slices)

    def settle(self, slices: Sequence[Slice], *tables: str, rejects: int = 0) -> None:
        prove(self.lake, self.stream.name, slices, *(tables or ("raw", "events", "rejects")), rejects=rejects)

    def tick(self) -> list[str]:
        return [*offset_mirror.tick(self.ledger, self.kafka, self.lake, self.stream, datetime.now(UTC)).lines]

    def held(self) -> dict[TopicAndPartition, int]:
        places = [(self.stream.topic, p) for p in (0, 1)]
        return {
            place: held.offset
            for place, held in consumer_groups.read_group_offsets(self.kafka, self.stream.group, places).items()
        }

    def delete_group(self) -> None:
        self.kafka.get_admin().delete_consumer_groups([self.stream.group])[self.stream.group].result(30)

    def tool(self) -> dict[tuple[str, int], tuple[int, int]]:
        """What Kafka's own tool shows of the group: offset and lag by topic and partition."""
        from dev import jars
        from dev.java import find_java

        jars.ensure("tools")
        path = os.pathsep.join((jars.class_path("broker"), jars.class_path("tools")))
        done = subprocess.run(
            [
                *[str(find_java(os.environ).executable), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path],
                "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
                *["--bootstrap-server", self.bootstrap, "--describe", "--offsets", "--group", self.stream.group],
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
        [head] = [cells for cells in lines if cells[:2] == ["GROUP", "TOPIC"]]
        rows = [dict(zip(head, cells, strict=False)) for cells in lines if cells[0] == self.stream.group]
        return {(row["TOPIC"], int(row["PARTITION"])): (int(row["CURRENT-OFFSET"]), int(row["LAG"])) for row in rows}


@contextmanager
def consuming(real: Real) -> Iterator[None]:
    """Somebody who took the stream's group for one to consume in."""
    from confluent_kafka import Consumer

    config = {"bootstrap.servers": real.bootstrap, "group.id": real.stream.group, "client.id": "nosy"}
    consumer = Consumer({**config, "enable.auto.commit": False})
    consumer.subscribe([real.stream.topic])

    def assigned() -> bool:
        consumer.poll(0.2)
        return bool(consumer.assignment())

    try:
        wait_until(assigned, 30, "the consumer's assignment")
        yield
    finally:
        consumer.close()


@pytest.mark.slow
def test_kafkas_own_tool_shows_the_lag_and_a_foreign_member_is_reported(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    real = Real(bootstrap, topic(partitions=2), tmp_path)
    name = real.stream.topic
    send(bootstrap, name, [Message(b"k", b"v", partition=n % 2) for n in range(40)])
    zero, one, two, three = real.plan()
    real.settle([zero, two])
    real.settle([one], rejects=2)
    real.tick()
    assert real.tool() == {(name, 0): (5, 15), (name, 1): (5, 15)}, "the rejects of the second one are not published"
    real.settle([one], "dlq", rejects=2)
    real.tick()
    assert real.tool() == {(name, 0): (15, 5), (name, 1): (15, 5)}
    assert real.tick()[0] == "nothing changed"

    real.settle([three])
    with consuming(real):
        with pytest.raises(ForeignMemberError) as caught:
            real.tick()
        assert "nosy at 127.0.0.1" in str(caught.value.found)
        assert real.held() == {(name, 0): 15, (name, 1): 15}
    real.tick()
    assert real.held() == {(name, 0): 20, (name, 1): 20}
    real.delete_group()
    assert real.held() == {}
    real.tick()
    assert real.held() == {(name, 0): 20, (name, 1): 20}
    real.delete_group()  # other tests see which groups there are
