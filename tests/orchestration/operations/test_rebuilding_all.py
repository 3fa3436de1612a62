"""A stream restarted from Kafka: nothing is on a topic twice, under an old name, or hidden."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dev.processes import wait_until
from highwater import envelope
from highwater.assets import discards_table
from highwater.assets import published as accepted
from highwater.assets.dlq_copies import may_have_copies
from highwater.assets.erasures_table import sync_with_ledger
from highwater.declaration import Accepted
from highwater.envelope import Envelope, Origin
from highwater.erasing import ErasedCounts, Erasure
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.mirroring import MirrorMark
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.operations.rebuilding_all import (
    CopyFacts,
    build_new_generations,
    compute_generation_number,
    rebuild_from_kafka,
)
from highwater.orchestration.sensing.retries import plan_tier
from highwater.orchestration.sensing.topic_planner import Planner, _ensure_never_published
from highwater.plans import Discard
from highwater.resources.consumer_groups import commit
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange, Slice
from tests.conftest import create_topic
from tests.helpers.bench_records import due, published, read_content
from tests.helpers.scene import Scene, offsets
from tests.helpers.support import Bench, Message, customers, make_stream, order_message, read_topic, send

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from tests.conftest import TopicFactory

STREAM = make_stream("orders")
NOW = datetime(2026, 3, 1, tzinfo=UTC)
TIER = STREAM.tier_topics[0]


def state(topic: str, **partitions: tuple[int, int]) -> TopicState:
    """A topic: `state("orders", p0=(log start, last stable offset))`."""
    return TopicState(
        topic, "A" * 22, {int(n[1:]): PartitionState(start, end, end, 1) for n, (start, end) in partitions.items()}
    )


def copy(slice_key: str, generation: int = 0, partition: int = 0, offset: int = 0, ms: int = 7) -> Envelope:
    return Envelope("orders", generation, partition, offset, ms, 1, "malformed", "", slice_key, NOW)


def test_offsets_missing_from_the_log_are_losses_except_on_a_tier() -> None:
    states = {"orders": state("orders", p0=(5, 9), p1=(0, 3)), TIER: state(TIER, p0=(2, 4))}
    generations, losses = build_new_generations(STREAM, states, {"orders": 41, TIER: 7}, 3, "ann", NOW)
    reported = [(one.topic, one.number, dict(one.starts), one.first_ordinal, one.opened_by) for one in generations]
    assert reported == [("orders", 3, {0: 0, 1: 0}, 42, "ann"), (TIER, 0, {0: 2}, 8, "ann")]
    assert [(loss.topic, loss.generation, loss.partition, loss.offsets, loss.accepted_by) for loss in losses] == [
        ("orders", 3, 0, OffsetRange(0, 5), "ann")
    ]
    assert (
        build_new_generations(STREAM, {"orders": state("orders", p0=(0, 1))}, {}, 0, "ann", NOW)[0][0].first_ordinal
        == 0
    )


def test_copies_report_of_slices_and_of_the_newest_origins() -> None:
    seen = CopyFacts()
    for one in (copy("orders@0000004", offset=5), copy("orders@0000002", offset=9, ms=8), copy(f"{TIER}@0000001")):
        seen.add(STREAM.parked_topic, one, "orders")
    seen.add(TIER, replace(copy("no key", generation=2), topic="orders.foreign/x"), "orders")
    assert seen.slices == {"orders": 4, TIER: 1}
    assert seen.newest == {(0, 0): (9, 8)}
    assert dict(seen.count) == {STREAM.parked_topic: 3, TIER: 1}


@pytest.mark.parametrize(
    ("newest", "number"),
    [
        ({}, 0),
        ({(2, 0): (3, 70), (1, 0): (4, 99)}, 2),
        ({(2, 0): (3, 71)}, 3),
        ({(2, 0): (9, 70)}, 3),
        ({(2, 0): (0, 71)}, 2),
        ({(2, 5): (3, 70)}, 3),
    ],
    ids=["no copies", "the same record", "another record there", "behind the end", "expired", "no such partition"],
)
def test_a_log_that_holds_other_records_is_another_generation(
    newest: Mapping[tuple[int, int], tuple[int, int]], number: int
) -> None:
    """Its offsets would be taken for those of the records that the copies name."""
    record = SimpleNamespace(timestamp=lambda: (1, 70))
    kafka: Any = SimpleNamespace(read=lambda topic, ranges: [record])
    assert compute_generation_number(kafka, state("orders", p0=(1, 9)), newest) == number


def test_only_slices_of_what_was_there_look_for_copies() -> None:
    slice_ = Slice("orders", "orders", "A" * 22, 0, 0, {0: OffsetRange(5, 9), 1: OffsetRange(3, 3)}, NOW)
    assert may_have_copies([slice_], {"orders": {"0": 6}})
    assert not may_have_copies([slice_], {"orders": {"0": 5, "1": 9}, TIER: {"0": 99}})


def test_the_command_restarts_a_stream(topic: TopicFactory, bootstrap: str, tmp_path: Path) -> None:
    scene = Scene(bootstrap, topic(), tmp_path)
    scene.write(10)
    scene.delete_before(4)
    mark = MirrorMark(
        scene.kafka.read_topic_state(scene.topic).topic_id, f"{scene.topic}@0000006", "of the lost ledger", NOW
    )
    commit(scene.kafka, scene.stream.group, {(scene.topic, 0): (9, mark)})
    lost, erasure = (
        Ledger(f"sqlite:///{tmp_path / 'lost.sqlite'}"),
        Erasure("orders", "e" * 64, "asked for", "bob", NOW),
    )
    number = lost.erasures.add(erasure)
    lost.erasures.begin(number, [ErasedCounts(f"{scene.topic}@0000008", {0: [OffsetRange(0, 1)]})])
    discarded = Discard(Origin(scene.topic, 0, 0, 5), "test data", "bob", NOW)
    lost.discards.add("orders", [discarded])
    for follow in (sync_with_ledger, discards_table.sync_with_ledger):
        follow(lost, Lake(str(tmp_path / "lake")), "orders")  # these tables alone were restored from a copy
    dry = scene.run("rebuild-all", "orders")
    assert dry.exit_code == 0, dry.output
    assert "6 offsets are planned again, from ordinal 9 on" in dry.output
    assert "partition 0: [0, 4) is recorded as lost" in dry.output
    assert "a dry run: nothing was written\nto do it, add --yes --by NAME\n" in dry.output
    assert scene.ledger.topics.list_generations("orders", scene.topic) == []
    nobody = scene.run("rebuild-all", "orders", "--yes", "--by", "")
    assert (nobody.exit_code, "--by NAME" in nobody.output) == (EXIT_PERMANENT, True)
    done = scene.run("rebuild-all", "orders", "--yes", "--by", "ann")
    assert done.exit_code == 0, done.output
    assert [(loss.offsets, loss.accepted_by) for loss in scene.ledger.list_losses("orders")] == [
        (OffsetRange(0, 4), "ann")
    ]
    assert [replace(one, number=0) for one in scene.ledger.erasures.list_for_stream("orders")] == [erasure]
    assert scene.ledger.discards.list_for_stream("orders") == [discarded]
    assert scene.ledger.erasures.read_for_key("orders", "e" * 64) == {}, "of slices that are gone nothing is left to do"
    scene.tick()
    scene.ensure_each_once(offsets(0, 4, 10))
    assert [slice_.ordinal for slice_ in scene.slices()] == [9], "behind the last known one"
    again = scene.run("rebuild-all", "orders", "--yes", "--by", "ann")
    assert (again.exit_code, "the ledger knows orders" in again.output) == (EXIT_PERMANENT, True)


def test_a_lost_ledger_is_not_taken_for_a_new_stream(topic: TopicFactory, bootstrap: str, tmp_path: Path) -> None:
    """Its rejects would be published a second time."""
    scene = Scene(bootstrap, topic(), tmp_path)
    scene.write(3)
    create_topic(bootstrap, scene.stream.parked_topic, 1, {})
    assert scene.run("plan", "orders").exit_code == 0, "nothing was published"
    send(bootstrap, scene.stream.parked_topic, [Message(b"k", b"v")])
    with pytest.raises(ConfigurationError, match="its rejects were published before") as caught:
        scene.tick()
    assert "highwater rebuild-all orders" in caught.value.remedy
    assert scene.run("rebuild-all", "orders", "--yes", "--by", "ann").exit_code == 0
    assert len(scene.tick().slices) == 1


def test_a_topic_that_cannot_be_asked_is_not_taken_for_an_empty_one() -> None:
    def without_leader(topic: str) -> TopicState:
        return TopicState(topic, "A" * 22, {0: PartitionState(None, None, None, None)})

    kafka: Any = SimpleNamespace(read_topic_state=without_leader)
    with pytest.raises(DependencyUnavailableError, match="could not be asked"):
        _ensure_never_published(kafka, STREAM)


def test_a_lost_ledger_is_known_by_the_events_that_were_sent(
    topic: TopicFactory, bootstrap: str, tmp_path: Path
) -> None:
    """A stream that rejected nothing has no copies on its DLQ; what others wrote to the accepted topic is no sign."""
    scene = Scene(bootstrap, topic(), tmp_path)
    accepted_topic = topic("accepted", partitions=2)
    scene.stream = replace(scene.stream, publishes=Accepted(accepted_topic))
    scene.write(3)
    send(bootstrap, accepted_topic, [Message(b"k", b"v"), Message(b"k", b"v", 1, [("by", b"another program")])])
    planner = Planner(scene.ledger, scene.kafka)
    assert planner.tick(scene.stream, NOW, dry_run=True).slices, "nothing was published"
    key = f"{scene.topic}@0000000"
    send(bootstrap, accepted_topic, [Message(b"k", b"v", 1, [(envelope.SLICE, key)])])
    with pytest.raises(ConfigurationError, match="its accepted events were published before") as caught:
        scene.tick()
    assert caught.value.found == f"records of {key} on {accepted_topic}"


@pytest.fixture
def lost(bench: Bench) -> Iterator[Bench]:
    """A stream whose records wait one second, then two; in the end every check of what is whole passes."""
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1), timedelta(seconds=2)))
    yield bench
    assert bench.failing() == {}


def first_life(bench: Bench) -> None:
    """Records accepted at once, from each tier, fixed, parked, and a tombstone."""
    topic = bench.stream.topic
    bench.send(
        order_message("o1", 1),
        order_message("o2", 1, customer_id="late"),
        order_message("o3", 1, customer_id="later"),
        order_message("o4", 1, customer_id="never"),
        Message(b"o5", b"garbled", 0),
        Message(b"o6", None, 0),
        order_message("o1", 2, partition=1),
        order_message("o7", 1, partition=2),
        order_message("o8", 1, partition=2),
    )
    bench.materialise(bench.plan(0, p0=(0, 6), p1=(0, 1), p2=(0, 2)))
    customers(bench.lake, ["c1", "late"])
    bench.materialise(*due(bench, 1))
    # A person fixes one, and lets its attempts count from 1 again.
    [(_, key, _, headers)] = [one for one in published(bench.bootstrap, f"{topic}.dlq.2") if one[1] == b"o4"]
    fixed = {**dict(headers), envelope.ATTEMPT: b"1"}
    tier = replace(bench, stream=replace(bench.stream, topic=f"{topic}.dlq.1"))
    tier.send(Message(key, order_message("o4", 1).value, 0, [*fixed.items()]))
    customers(bench.lake, ["c1", "late", "later"])
    bench.materialise(*due(bench, 2), *due(bench, 1))


def publish(bench: Bench) -> dict[str, int]:
    """Send the events of all slices; by slice how many were sent now."""
    slices = bench.ledger.list_slices("orders")
    return {one.slice_.key: one.counts["sent_now"] for one in accepted.materialise(bench.work(*slices))}


def on_accepted(bench: Bench) -> list[tuple[int, int, str | None, str | None]]:
    """What a foreign reader finds there, by partition in its order: offset, why it is late, and its revision."""
    assert bench.stream.publishes is not None
    found = []
    for partition, _, _, headers in published(bench.bootstrap, bench.stream.publishes.topic):
        reported = {name: (value or b"").decode() for name, value in headers}
        offset = int(reported[envelope.ORIGIN_OFFSET])
        found.append((partition, offset, reported.get(envelope.LATE), reported.get(envelope.REVISION)))
    return sorted(found, key=lambda one: one[0])


def left_under_way(bench: Bench) -> Producer:
    """The producer of a run of the old deployment that still goes on, in the midst of a transaction."""
    from confluent_kafka import Producer

    assert bench.stream.publishes is not None
    topic = bench.stream.publishes.topic
    producer = Producer({"bootstrap.servers": bench.bootstrap, "transactional.id": f"highwater.pub.{topic}"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"x", b"k", 0)
    producer.flush(60)
    return producer


def lose_all(bench: Bench, home: Path) -> list[str]:
    """Go on with an empty ledger and an empty lake, restarted; returns what the command said."""
    bench.ledger, bench.lake = Ledger(f"sqlite:///{home / 'ledger.sqlite'}"), Lake(str(home / "lake"))
    customers(bench.lake, ["c1", "late", "later"])
    lines: list[str] = []
    rebuild_from_kafka(bench.ledger, bench.lake, bench.kafka, bench.stream, [], lines.append, dry_run=False, by="ann")
    return lines


def plan_all(bench: Bench) -> list[Slice]:
    """Slices of all that is on the topic and its tiers."""
    now = datetime.now(UTC) + timedelta(minutes=1)
    slices = [*Planner(bench.ledger, bench.kafka).tick(bench.stream, now).slices]
    for name in bench.stream.tier_topics:
        slices += plan_tier(bench.ledger, bench.kafka, bench.stream, name, now).slices
    return slices


@pytest.mark.slow
@pytest.mark.parametrize("corrected", [False, pytest.param(True, marks=pytest.mark.long)])
def test_accepted_events_are_not_sent_again_when_all_is_lost(lost: Bench, tmp_path: Path, *, corrected: bool) -> None:
    """Their topic alone shows which were sent: these stay, new ones follow, and what changed is a revision."""
    from confluent_kafka import KafkaException

    bench = lost
    bench.stream = replace(bench.stream, publishes=Accepted(f"{bench.stream.topic}.accepted"))
    first_life(bench)
    assert sum(publish(bench).values()) == 7
    before = on_accepted(bench)
    assert sorted(one[:2] for one in before) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1)]
    under_way = left_under_way(bench)
    bench.send(order_message("o9", 1, partition=1), order_message("o10", 1, partition=1, customer_id="new"))

    said = lose_all(bench, tmp_path / "second")
    assert "7 accepted events are sent, and are not sent again while their content stays the same" in said
    assert not [line for line in said if "may be sent again" in line]
    with pytest.raises(KafkaException):
        under_way.commit_transaction(60)
    bench.materialise(*plan_all(bench))
    assert sum(publish(bench).values()) == 1
    late = (1, 2, "retried", None)
    customers(bench.lake, ["c1", "late", "later", "new"])
    bench.materialise(*due(bench, 1))
    assert sum(publish(bench).values()) == 1
    assert sum(publish(bench).values()) == 0
    second = on_accepted(bench)
    assert second == sorted([*before, (1, 1, None, None), late], key=lambda one: one[0])
    if not corrected:
        return

    fields = [replace(one, type="decimal(12,3)") if one.name == "amount" else one for one in bench.stream.fields]
    bench.stream = replace(bench.stream, fields=tuple(fields))
    lose_all(bench, tmp_path / "third")
    customers(bench.lake, ["c1", "late", "later", "new"])
    bench.materialise(*plan_all(bench))
    assert sum(publish(bench).values()) == 9
    third = Counter(on_accepted(bench)) - Counter(second)
    assert third == Counter((p, n, "corrected", "1") for p, n, _, _ in second)


@pytest.mark.slow
def test_all_is_lost_and_comes_back_from_kafka(lost: Bench, tmp_path: Path) -> None:
    from confluent_kafka import TopicPartition

    bench = lost
    first_life(bench)
    topics = [bench.stream.topic, *bench.stream.tier_topics, bench.stream.parked_topic]
    held = {name: read_topic(bench.bootstrap, name) for name in topics}
    assert [len(held[name]) for name in topics] == [9, 4, 2, 2]
    events, current, ends = (
        read_content(bench, "events"),
        bench.current(),
        count_ends(bench.ledger, bench.lake, bench.stream),
    )
    assert len(events) == 7
    assert (ends.accepted, ends.parked, ends.tombstones, ends.error) == (7, 1, 1, None)
    bench.kafka.get_admin().delete_records([TopicPartition(bench.stream.topic, 2, 1)])
    wait_until(
        lambda: bench.kafka.read_topic_state(bench.stream.topic).partitions[2].log_start == 1, 30, "the deletion"
    )

    bench.ledger, bench.lake = Ledger(f"sqlite:///{tmp_path / 'again.sqlite'}"), Lake(str(tmp_path / "again"))
    customers(bench.lake, ["c1", "late", "later"])
    lines: list[str] = []
    found = rebuild_from_kafka(
        bench.ledger, bench.lake, bench.kafka, bench.stream, [], lines.append, dry_run=False, by="ann"
    )
    assert found.copies == {topics[1]: 4, topics[2]: 2, topics[3]: 2}
    [loss] = bench.ledger.list_losses("orders")
    assert (loss.partition, loss.offsets, loss.accepted_by) == (2, OffsetRange(0, 1), "ann")
    with pytest.raises(ConfigurationError, match="the ledger knows orders"):
        rebuild_from_kafka(
            bench.ledger, bench.lake, bench.kafka, bench.stream, [], lines.append, dry_run=False, by="ann"
        )

    slices = plan_all(bench)
    assert [slice_.key for slice_ in slices] == [f"{name}@0000001" for name in topics[:3]]
    bench.materialise(*slices)
    assert held == {name: read_topic(bench.bootstrap, name) | gone(held, name, topics[0]) for name in topics}
    gone_origin = (topics[0], 0, 2, 0)
    assert read_content(bench, "events") == {origin: row for origin, row in events.items() if origin != gone_origin}
    without_slice = [
        {key: {n: v for n, v in row.items() if n != "updated_by_slice"} for key, row in rows.items() if key != "o7"}
        for rows in (current, bench.current())
    ]
    assert without_slice[0] == without_slice[1]
    again = count_ends(bench.ledger, bench.lake, bench.stream)
    assert again.error is None
    assert again == replace(ends, produced=ends.produced - 1, accepted=ends.accepted - 1)


def gone(held: Mapping[str, Mapping[Any, Any]], name: str, main: str) -> dict[Any, Any]:
    """The record that the topic no longer holds."""
    return {(2, 0): held[name][2, 0]} if name == main else {}
