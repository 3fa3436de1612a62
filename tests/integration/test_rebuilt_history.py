"""What was read stays true (I16) after a ledger that was lost: the lake keeps by what replaced history is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from dev.planted import plant
from highwater.assets import raw
from highwater.assets.work import Work
from highwater.divergence import Fingerprint, compute_digest
from highwater.errors import DependencyUnavailableError
from highwater.orchestration.operations import rebuilding
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.plans import Generation
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.fake_session import FakeSession
from tests.helpers.fake_topics import FakeNoGroups
from tests.helpers.replaced_history import FakeReplacedTopic, planned
from tests.helpers.support import make_stream, order_message

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.helpers.support import Bench

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = make_stream("orders")


def a_slice(ordinal: int, ranges: Mapping[int, tuple[int, int]], **changes: Any) -> Slice:
    spans = {p: OffsetRange(*span) for p, span in ranges.items()}
    return Slice("orders", "orders", "id", 0, ordinal, spans, NOON, **changes)


def mark(offset: int) -> Fingerprint:
    """Of the record that was there before it was replaced."""
    return Fingerprint(offset, compute_digest(1, b"k", b"old %d" % offset))


class FakeReplacedTopicWithoutGroups(FakeNoGroups, FakeReplacedTopic):
    """A replaced topic that no consumer group reads."""


class Deployed:
    """A lake in which raw holds slices, beside a ledger that knows nothing."""

    def __init__(self, folder: Path, kafka: Kafka) -> None:
        self.lake, self.ledger = Lake(str(folder / "lake")), Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.kafka = kafka

    def commit(self, *slices: Slice, past: bool = True) -> None:
        import pyarrow as pa

        none = pa.table({"slice": pa.array([], pa.string())})
        plant(
            self.lake.build_table_path("orders", "raw"),
            none,
            [SliceCommit(slice_, 1, None, past=past) for slice_ in slices],
        )

    def rebuild(self) -> list[str]:
        lines: list[str] = []
        rebuilding.rebuild_from_lake(self.ledger, self.lake, self.kafka, STREAM, [], lines.append, dry_run=False)
        return lines

    def materialise(self, *slices: Slice) -> Any:
        spark = cast("SparkSession", FakeSession())
        return raw.materialise(Work(STREAM, slices, spark, self.lake, self.ledger, self.kafka, print))


@pytest.fixture
def look_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of raw's work what comes before Spark: it gives the slices that keep their rows, with the reason."""
    monkeypatch.setattr(raw, "ensure_table", lambda *_: None)
    monkeypatch.setattr(raw, "commit_with_retries", lambda _, __, ___, stored, ____: stored)


def test_a_rebuilt_ledger_knows_the_epochs_and_the_last_records(tmp_path: Path) -> None:
    """The commit record of the slice that holds a record has its fingerprint, which counts for later plans too."""
    first = a_slice(0, {0: (0, 9), 1: (0, 4)}, epochs={0: 1, 1: 7}, fingerprints={0: mark(8), 1: mark(3)})
    second = a_slice(1, {0: (9, 20), 1: (4, 4)}, epochs={0: 2, 1: 7}, fingerprints={0: mark(19), 1: mark(3)})
    after = a_slice(3, {0: (25, 30), 1: (4, 4)}, epochs={0: 3, 1: 7}, fingerprints={0: mark(29), 1: mark(3)})
    deployed = Deployed(tmp_path, FakeReplacedTopicWithoutGroups("nowhere:1"))
    deployed.commit(first, second, after)
    deployed.rebuild()
    found = deployed.ledger.list_slices("orders")
    assert [(one.ordinal, one.epochs, one.fingerprints) for one in found] == [
        (0, first.epochs, first.fingerprints),
        (1, second.epochs, second.fingerprints),
        (2, after.epochs, second.fingerprints),  # never read: nothing in it is of a later epoch than what follows it
        (3, after.epochs, after.fingerprints),
    ]


def test_a_fingerprint_goes_into_no_other_generation() -> None:
    """There another record is under its offset, as a person accepted."""
    before = a_slice(0, {0: (0, 200), 1: (0, 4)}, epochs={0: 1, 1: 1}, fingerprints={0: mark(199), 1: mark(3)})
    ranges = {0: OffsetRange(100, 100), 1: OffsetRange(4, 9)}
    after = replace(before, ordinal=1, generation=1, ranges=ranges, fingerprints={1: mark(8)})
    found = rebuilding.rebuild_plans(STREAM, [before, after], {}, NOON)
    assert [one.fingerprints for one in found.slices] == [before.fingerprints, {1: mark(8)}]


def test_a_commit_record_without_a_past_is_read_and_named(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, FakeReplacedTopicWithoutGroups("nowhere:1"))
    deployed.commit(a_slice(0, {0: (0, 9)}, epochs={0: 1}), past=False)
    assert any("of 1 slices the commits hold no leader epochs" in line for line in deployed.rebuild())
    assert [one.epochs for one in deployed.ledger.list_slices("orders")] == [{}]


@pytest.mark.usefixtures("look_before")
def test_history_that_was_replaced_is_noticed_behind_a_rebuilt_ledger(tmp_path: Path) -> None:
    """Every old slice passed for sound: it was read again over the only copy, and the planner went on after it."""
    below = a_slice(0, {0: (0, 90)}, epochs={0: 1}, fingerprints={0: Fingerprint(89, compute_digest(0, b"k", b"89"))})
    across = a_slice(1, {0: (90, 200)}, epochs={0: 1}, fingerprints={0: mark(199)})
    deployed = Deployed(tmp_path, FakeReplacedTopicWithoutGroups("nowhere:1"))
    deployed.commit(below, across)
    deployed.rebuild()
    read = {one.key: one for one in deployed.ledger.list_slices("orders")}
    stored = deployed.materialise(read[across.key])
    assert "other records occupy planned offsets" in stored[across.key]
    assert "records of a later epoch from offset 100" in stored[across.key]
    assert deployed.materialise(read[below.key]) == {}, "what it holds was not replaced"
    tick = Planner(deployed.ledger, deployed.kafka).tick(STREAM, NOON)
    assert (tick.slices, "other records occupy" in str(tick.errors[0])) == ((), True)


class FakeLeaderlessTopic(Kafka):
    """A topic whose partition 1 has no leader, and whose partition 0 lost what is before offset 5."""

    def read_topic_state(self, topic: str) -> TopicState:
        return TopicState(topic, "id", {0: PartitionState(5, 30, 30, 1, 1), 1: PartitionState(None, None, None, None)})


@pytest.mark.usefixtures("look_before")
def test_a_partition_without_a_leader_is_not_read_and_holds_up_no_other(tmp_path: Path) -> None:
    """Spark waited for one, which an unclean election gave it: other records were read that nobody had looked at."""
    both, other = a_slice(0, {0: (10, 20), 1: (0, 10)}), a_slice(1, {0: (20, 30), 1: (10, 10)})
    expired = a_slice(2, {0: (0, 9), 1: (10, 20)})
    deployed = Deployed(tmp_path, FakeLeaderlessTopic("nowhere:1"))
    deployed.ledger.topics.open_generation(Generation("orders", "orders", "id", 0, {0: 0, 1: 0}, NOON))
    with pytest.raises(DependencyUnavailableError, match="partitions 1 of orders have no leader") as caught:
        deployed.materialise(both)
    assert both.key in str(caught.value)
    assert caught.value.of is None, "Kafka as a whole is not unavailable"
    assert deployed.materialise(other) == {}
    # The loss of the expired one would be destructive to record: nothing is called lost while a leader is unavailable
    # (I15).
    with pytest.raises(DependencyUnavailableError, match="have no leader"):
        deployed.materialise(both, expired)
    deployed.commit(expired)
    stored = deployed.materialise(expired, other)
    assert [*stored] == [expired.key], "its rows stay, so nothing of it is read"


class FakeElectedCluster(Kafka):
    """The cluster after an election: all that it holds is of a later epoch, as if written again."""

    def read_topic_state(self, topic: str) -> TopicState:
        state = super().read_topic_state(topic)
        return replace(state, partitions={p: replace(one, leader_epoch=9) for p, one in state.partitions.items()})

    def read(self, topic: str, ranges: Mapping[int, OffsetRange], **asked: Any) -> Iterator[Any]:
        for message in super().read(topic, ranges, **asked):
            reported = {name: getattr(message, name)() for name in ("partition", "offset", "timestamp", "key", "value")}
            made = {**reported, "leader_epoch": 9}
            yield SimpleNamespace(**{name: partial(lambda found: found, value) for name, value in made.items()})


@pytest.mark.slow
def test_a_commit_of_raw_keeps_what_its_plan_recorded(bench: Bench, tmp_path: Path) -> None:
    """Written by Spark, read back, and enough to leave the rows of a slice whose records were replaced."""
    bench.send(order_message("o1", 1), order_message("o1", 2), order_message("o2", 1, partition=2))
    [slice_] = planned(bench)
    raw.materialise(bench.work(slice_))
    rows = bench.rows("raw")
    lost, bench.ledger = bench.ledger, Ledger(f"sqlite:///{tmp_path / 'another.sqlite'}")
    rebuilding.rebuild_from_lake(
        bench.ledger, bench.lake, bench.kafka, bench.stream, [], bench.log.append, dry_run=False
    )
    [found] = bench.ledger.list_slices("orders")
    assert slice_.fingerprints
    assert (found.epochs, found.fingerprints) == (slice_.epochs, slice_.fingerprints)
    assert lost.get([slice_.key]) == [found]
    [again] = raw.materialise(bench.work(found, kafka=FakeElectedCluster(bench.bootstrap)))
    assert "rows unchanged" in str(again.note)
    assert bench.rows("raw") == rows
    [sound] = raw.materialise(bench.work(found))
    assert (sound.note, sound.rows) == (None, 3)
