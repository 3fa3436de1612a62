"""The planner on a real broker: each fault, its error with both values and remedy, and planning after it is fixed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from dev.broker import EmbeddedBroker
from dev.processes import wait_until
from highwater.alerting import Condition
from highwater.declaration import Limits, Start
from highwater.errors import (
    DependencyUnavailableError,
    OffsetsExpiredError,
    TopicAbsentError,
    TopicRecreatedError,
    TopicVanishedError,
)
from highwater.orchestration import observation
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from highwater.orchestration.operations.acceptance import accept_loss
from highwater.orchestration.reporting import alert_inputs, topic_conditions
from highwater.orchestration.reporting.plan_status import read_topic_status
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange
from tests.helpers.scene import Scene, offsets
from tests.helpers.support import BOUNDED

TopicFactory = Callable[..., str]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def scene(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> Scene:
    return Scene(bootstrap, topic(), tmp_path)


pytestmark = pytest.mark.slow


def test_an_empty_topic_is_pinned_and_nothing_is_planned(scene: Scene) -> None:
    tick = scene.tick()
    assert (tick.slices, tick.lines) == ((), [f"nothing new in {scene.topic}"])
    scene.write(3)
    assert len(scene.tick().slices) == 1
    scene.ensure_each_once(offsets(0, 0, 3))


@pytest.mark.parametrize(("start", "first"), [(Start.EARLIEST, 2), (Start.LATEST, 5)])
def test_a_cold_start_begins_where_the_declaration_says(scene: Scene, start: Start, first: int) -> None:
    scene.write(5)
    scene.delete_before(2)
    assert len(scene.tick(start=start).slices) == (1 if first < 5 else 0)
    scene.write(4)
    scene.tick(start=start)
    scene.ensure_each_once(offsets(0, first, 9))


def test_a_cold_start_at_a_time(scene: Scene) -> None:
    scene.write(5)
    time.sleep(0.01)
    since = datetime.now(UTC)
    time.sleep(0.01)
    scene.write(4)
    scene.tick(start=since.isoformat())
    scene.ensure_each_once(offsets(0, 5, 9))


def test_an_absent_topic_is_reported_with_the_nearest_name_and_planned_once_it_is_there(scene: Scene) -> None:
    existing, scene.stream = scene.topic, replace(scene.stream, topic=scene.topic + "x")
    with pytest.raises(TopicAbsentError) as caught:
        scene.tick()
    assert scene.topic in caught.value.problem
    assert existing in str(caught.value.found)
    assert "create the topic" in caught.value.remedy
    result = scene.run("plan", "orders")
    assert (result.exit_code, "TopicAbsent" in result.stderr) == (EXIT_PERMANENT, False)
    assert f"found:  nearest names: {existing}" in result.stderr
    scene.create()
    scene.tick()
    scene.write(2)
    scene.tick()
    scene.ensure_each_once(offsets(0, 0, 2))


def test_a_topic_that_vanished_is_reported_and_planned_again_when_its_successor_is_accepted(scene: Scene) -> None:
    scene.write(2)
    scene.tick()
    scene.admin.delete_topics([scene.topic])[scene.topic].result(30)
    wait_until(scene.absent, 30, "the topic's end")
    with pytest.raises(TopicVanishedError):
        scene.tick()
    scene.create()
    scene.write(1)
    with pytest.raises(TopicRecreatedError):
        scene.tick()
    assert scene.run("accept-loss", "orders", "--yes", "--by", "ann").exit_code == 0
    scene.tick()
    scene.ensure_each_once(offsets(0, 0, 2), offsets(0, 0, 1, generation=1))


def test_a_recreated_topic_is_not_planned_until_somebody_accepts_it(scene: Scene) -> None:
    """Where only offsets are compared, a new topic that has grown past the old offsets passes silently."""
    scene.write(3)
    [old] = scene.tick().slices
    scene.recreate()
    scene.write(8)
    new_id = scene.kafka.read_topic_state(scene.topic).topic_id
    with pytest.raises(TopicRecreatedError) as caught:
        scene.tick()
    assert (caught.value.stored, caught.value.found) == (f"topic ID {old.topic_id}", f"topic ID {new_id}")
    assert "highwater accept-loss orders" in caught.value.remedy
    dry = scene.run("accept-loss", "orders")
    assert (dry.exit_code, "nothing was recorded" in dry.output) == (0, True)
    with pytest.raises(TopicRecreatedError):
        scene.tick()
    assert scene.run("accept-loss", "orders", "--yes", "--by", "ann").exit_code == 0
    [new] = scene.tick().slices
    assert (new.generation, new.topic_id, new.ordinal) == (1, new_id, old.ordinal + 1)
    scene.ensure_each_once(offsets(0, 0, 3), offsets(0, 0, 8, generation=1))
    # The slice of the old topic was never read, so all of it is lost, and who accepted it is on record.
    [loss] = scene.ledger.list_losses("orders")
    assert (loss.generation, loss.offsets, loss.accepted_by) == (0, old.ranges[0], "ann")


def test_offsets_that_retention_took_stop_their_partition_alone(scene: Scene) -> None:
    scene.add_partitions(2)
    scene.write(3)
    scene.tick()
    scene.write(5)
    scene.write(2, partition=1)
    scene.delete_before(6)
    tick = scene.tick()
    error = tick.errors[0]
    assert isinstance(error, OffsetsExpiredError)
    assert (error.stored, error.found) == ("planned to offset 3", "log start offset 6")
    assert "highwater accept-loss orders --partition 0" in error.remedy
    assert str(error) in tick.lines
    scene.ensure_each_once(offsets(0, 0, 3), offsets(1, 0, 2))
    shown = scene.run("plan", "orders")
    assert (shown.exit_code, "log start offset 6" in shown.stderr) == (EXIT_PERMANENT, True)
    assert scene.run("accept-loss", "orders", "--partition", "0", "--yes", "--by", "ann").exit_code == 0
    scene.tick()
    scene.ensure_each_once(offsets(0, 0, 3), offsets(0, 6, 8), offsets(1, 0, 2))
    # Neither the hole before the plan nor what the unread slice lost of its range is silent.
    assert [(loss.offsets.start, loss.offsets.end) for loss in scene.ledger.list_losses("orders")] == [(3, 6), (0, 3)]


def test_a_stream_may_record_expired_offsets_by_itself(scene: Scene) -> None:
    scene.write(3)
    scene.tick(on_expired="record")
    scene.write(5)
    scene.delete_before(6)
    tick = scene.tick(on_expired="record")
    assert not tick.errors
    [loss] = scene.ledger.list_losses("orders")
    assert (loss.offsets.start, loss.offsets.end, loss.accepted_by) == (3, 6, "on_expired=record")
    scene.ensure_each_once(offsets(0, 0, 3), offsets(0, 6, 8))


def test_added_partitions_join_the_next_slice(scene: Scene) -> None:
    scene.write(2)
    scene.tick()
    scene.add_partitions(3)
    scene.write(4, partition=2)
    [joined] = scene.tick().slices
    assert {p: (r.start, r.end) for p, r in joined.ranges.items()} == {0: (2, 2), 1: (0, 0), 2: (0, 4)}
    scene.ensure_each_once(offsets(0, 0, 2), offsets(2, 0, 4))


def test_a_range_of_nothing_but_markers_is_planned_and_holds_nothing(scene: Scene) -> None:
    producer = scene.transaction()
    producer.produce(scene.topic, b"a", partition=0)
    producer.commit_transaction(30)
    scene.stable(2)
    scene.tick()
    for _ in range(2):
        producer.begin_transaction()
        producer.send_offsets_to_transaction([], _group_of_nobody(scene))
        producer.produce(scene.topic, b"gone", partition=0)
        producer.flush(30)
        producer.abort_transaction(30)
    scene.stable(6)
    [markers] = scene.tick().slices
    assert (markers.ranges[0].start, markers.ranges[0].end) == (2, 6)
    assert list(scene.kafka.read(scene.topic, markers.ranges)) == []
    scene.write(1)
    scene.tick()
    scene.ensure_each_once(offsets(0, 0, 7))


def _group_of_nobody(scene: Scene) -> Any:
    from confluent_kafka import Consumer

    return Consumer({"bootstrap.servers": scene.bootstrap, "group.id": "nobody"}).consumer_group_metadata()


def test_planning_stops_before_an_open_transaction(scene: Scene) -> None:
    scene.write(2)
    producer = scene.transaction()
    producer.produce(scene.topic, b"open", partition=0)
    producer.flush(30)
    scene.write(3)
    tick = scene.tick()
    assert tick.state.partitions[0] == PartitionState(0, 2, 6, 1, 0)
    scene.ensure_each_once(offsets(0, 0, 2))
    behind = f"4 offsets of {scene.topic} follow an open transaction"
    assert tick.lines[1:] == [behind]
    again = scene.tick()
    assert (again.slices, again.lines) == ((), [f"nothing new in {scene.topic}", behind])
    producer.commit_transaction(30)
    scene.stable(7)
    assert len(scene.tick().lines) == 1
    scene.ensure_each_once(offsets(0, 0, 7))


def test_a_ledger_that_is_locked_plans_nothing_and_goes_on_later(scene: Scene) -> None:
    scene.write(2)
    scene.tick()
    scene.write(2)
    scene.ledger = Ledger(scene.url, wait_seconds=0.5)
    with sa.create_engine(scene.url, poolclass=sa.NullPool).connect() as other:
        other.exec_driver_sql("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(DependencyUnavailableError) as caught:
            scene.tick()
        assert time.monotonic() - began < BOUNDED
        assert "ledger.sqlite" in caught.value.problem
        assert "locked" in str(caught.value.found)
        result = scene.run("plan", "orders", "--yes")
        assert (result.exit_code, "locked" in result.stderr) == (EXIT_TEMPORARY, True)
    scene.ensure_each_once(offsets(0, 0, 2))
    scene.tick()
    scene.ensure_each_once(offsets(0, 0, 4))


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(tmp_path / "kafka")
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def test_a_broker_that_is_unavailable_is_a_tick_that_fails_in_seconds(
    own_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    scene = Scene(own_broker.bootstrap, "orders", tmp_path)
    scene.create()
    wait_until(lambda: scene.kafka.read_topic_state("orders").partitions[0].known, 30, "a leader")
    scene.write(2)
    scene.tick()
    own_broker.kill()
    for kafka in (scene.kafka, Kafka(own_broker.bootstrap)):
        began = time.monotonic()
        with pytest.raises(DependencyUnavailableError) as caught:
            Planner(scene.ledger, kafka).tick(scene.stream, datetime.now(UTC))
        assert time.monotonic() - began < BOUNDED
        assert own_broker.bootstrap in caught.value.problem
    result = scene.run("plan", "orders", "--yes")
    assert (result.exit_code, own_broker.bootstrap in result.stderr) == (EXIT_TEMPORARY, True)
    scene.ensure_each_once(offsets(0, 0, 2))
    own_broker.start()
    wait_until(scene.all_led, 60, "the broker's return")
    scene.write(3)
    scene.tick()
    scene.ensure_each_once(offsets(0, 0, 5))


class FakeLeaderlessPartitions(Kafka):
    """A cluster that shows one partition without a leader: one broker alone cannot be brought to it.

    What it shows is what a cluster of three brokers was seen to show: no leader in the description, and `_NOENT` from
    `list_offsets` for that partition alone.
    """

    gone: set[int] = set()  # noqa: RUF012 - set by the test

    def read_topic_state(self, topic: str) -> TopicState:
        state = super().read_topic_state(topic)
        nothing = PartitionState(None, None, None, None)
        return replace(state, partitions={p: nothing if p in self.gone else s for p, s in state.partitions.items()})


@pytest.mark.parametrize("start", [Start.EARLIEST, Start.LATEST])
def test_a_partition_without_a_leader_is_named_and_caught_up_with(scene: Scene, start: Start) -> None:
    scene.add_partitions(2)
    kafka = FakeLeaderlessPartitions(scene.bootstrap)
    scene.kafka, kafka.gone = kafka, {1}
    tick = scene.tick(start=start)
    assert tick.skipped == {1: "no leader"}
    scene.write(3)
    scene.write(2, partition=1)
    tick = scene.tick(start=start)
    assert tick.skipped == {1: "no leader"}
    assert any("partition 1" in line and "no leader" in line for line in tick.lines)
    scene.ensure_each_once(offsets(0, 0, 3))
    kafka.gone = set()
    scene.tick(start=start)
    # Where its planning begins is decided when it is first seen: with `latest` its two records lie before that.
    begun = 2 if start is Start.LATEST else 0
    scene.ensure_each_once(offsets(0, 0, 3), offsets(1, begun, 2))
    kafka.gone = {1}
    scene.write(1)
    scene.write(1, partition=1)
    scene.tick(start=start)
    kafka.gone = set()
    scene.tick(start=start)
    scene.ensure_each_once(offsets(0, 0, 4), offsets(1, begun, 3))


def test_leaders_that_come_one_after_another_do_not_hold_up_the_others(scene: Scene) -> None:
    """Each look found one leader more, and the tick gave up as if other planners had been first each time."""

    class FakeSlowElections(FakeLeaderlessPartitions):
        def read_topic_state(self, topic: str) -> TopicState:
            state = super().read_topic_state(topic)
            self.gone = set(sorted(self.gone)[1:])
            return state

    scene.add_partitions(12)
    kafka = FakeSlowElections(scene.bootstrap)
    scene.kafka, kafka.gone = kafka, set(range(1, 12))
    scene.write(2)
    assert len(scene.tick().slices) == 1
    for _ in range(11):
        scene.tick()
    assert scene.tick().skipped == {}
    scene.ensure_each_once(offsets(0, 0, 2))


PLAN = """
    import sys, time
    from dataclasses import replace
    from datetime import UTC, datetime
    from assets.streams.orders import STREAM
    from highwater.declaration import Limits
    from highwater.errors import HighwaterError, TemporaryError
    from highwater.orchestration.sensing.topic_planner import Planner
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger

    bootstrap, url, topic, ticks = sys.argv[1:]
    stream = replace(STREAM, topic=topic, limits=Limits(max_offsets=5, slices_per_tick=3))
    planner = Planner(Ledger(url, wait_seconds=60), Kafka(bootstrap))
    print("ready", flush=True)
    planned = 0
    for _ in range(int(ticks)):
        try:
            planned += len(planner.tick(stream, datetime.now(UTC)).slices)
        except TemporaryError:
            pass  # another planner was first
    print(planned)
"""


@pytest.mark.parametrize("ticks", [30, pytest.param(200, marks=pytest.mark.long)])
def test_two_planners_at_once_plan_each_offset_once(scene: Scene, ticks: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PLAN), scene.bootstrap, scene.url, scene.topic, str(ticks)]
    planners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    written = Counter[int]()
    partitions, rounds = 1, 0
    while any(planner.poll() is None for planner in planners):
        for partition in range(partitions):
            scene.write(7, partition)
            written[partition] += 7
        rounds += 1
        if rounds % 4 == 0 and partitions < 6:
            partitions += 1
            scene.add_partitions(partitions)
            wait_until(scene.all_led, 30, "leaders")
    outputs = [planner.communicate(timeout=300)[0].split() for planner in planners]
    assert [planner.returncode for planner in planners] == [0, 0]
    while scene.tick().slices:
        pass
    scene.ensure_each_once(*[offsets(p, 0, count) for p, count in written.items()])
    slices = scene.slices()
    assert [slice_.ordinal for slice_ in slices] == list(range(len(slices)))
    by_planner = [int(output[-1]) for output in outputs]
    assert min(by_planner) > 0, "one of them did all the work, so nothing was tried"
    assert partitions > 1


def test_a_plan_is_not_stored_over_a_loss_that_was_accepted_meanwhile(scene: Scene) -> None:
    """A planner that looked before a loss was accepted must not store a plan over it."""
    scene.write(4)
    scene.tick()
    seen = scene.ledger.topics.read_planned_topic("orders", scene.topic)
    assert seen is not None
    scene.recreate()
    accept_loss(scene.ledger, scene.kafka, scene.stream, list, by="ann", now=datetime.now(UTC), dry_run=False)
    old = scene.slices()[0]
    assert not scene.ledger.add([replace(old, ordinal=1)], seen=seen.generation)


def test_waiting_for_more_records_ends_by_itself(scene: Scene) -> None:
    limits = Limits(max_offsets=10, min_offsets=5, max_wait=timedelta(seconds=1))
    scene.tick(limits=limits)
    scene.write(2)
    tick = scene.tick(limits=replace(limits, max_wait=timedelta(minutes=9)))
    assert (tick.slices, tick.result.waiting is not None) == ((), True)
    wait_until(lambda: bool(scene.tick(limits=limits).slices), 30, "the end of the longest wait")
    scene.ensure_each_once(offsets(0, 0, 2))


def test_records_behind_a_hanging_transaction_are_reported_before_and_after_retention(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    """The lag was 0 and nothing was reported, and retention deleted what had never been read."""
    scene = Scene(bootstrap, topic(**{"retention.ms": "12000"}), tmp_path)
    scene.stream = replace(scene.stream, tiers=())
    scene.tick()
    open_ = scene.transaction()
    open_.produce(scene.topic, "never ended", partition=0)
    open_.flush(30)
    scene.write(99)
    wait_until(lambda: scene.kafka.read_topic_state(scene.topic).partitions[0].high_watermark == 100, 30, "the records")

    def asked() -> alert_inputs.StreamInputs:
        return alert_inputs.StreamInputs(scene.ledger, scene.kafka, Lake(str(tmp_path / "lake")), scene.stream)

    assert scene.tick().slices == ()
    status = read_topic_status(scene.kafka, scene.stream, scene.ledger.topics.read_planned_topic("orders", scene.topic))
    assert (status.lag, status.held_back) == (100, 100)
    assert "lag 100, 100 of it held back by open transactions" in status.lines[0]
    look = observation.build_topic_metadata(observation.observe_positions(scene.kafka, scene.ledger, scene.stream))
    assert (look["lag"].value, look["held_back"].value) == (100, 100)

    def reported() -> list[Condition]:
        found = [topic_conditions.measure_open_transaction(asked()), topic_conditions.measure_retention_left(asked())]
        return [one for one in found if one is not None and one.over]

    wait_until(lambda: len(reported()) == 2, 30, "the alerts")
    transaction, retention = reported()
    assert scene.kafka.read_topic_state(scene.topic).partitions[0].log_start == 0, "they come before retention does"
    assert transaction.value.startswith(f"{scene.topic} partition 0: 100 offsets from offset 0 on are held back")
    assert f"abort --topic {scene.topic} --partition 0 --start-offset 0" in transaction.remedy
    assert "until retention takes the oldest unread record" in retention.value
    wait_until(lambda: scene.kafka.read_topic_state(scene.topic).partitions[0].log_start == 100, 60, "retention")
    [gone] = reported()
    assert gone.value == f"retention deleted unread records of {scene.topic}: partition 0: [0, 100)"
    assert isinstance(scene.tick().errors[0], OffsetsExpiredError)
    accept_loss(scene.ledger, scene.kafka, scene.stream, list, by="ann", now=datetime.now(UTC), dry_run=False)
    assert [(one.partition, one.offsets) for one in scene.ledger.list_losses()] == [(0, OffsetRange(0, 100))]
    assert reported() == []
    assert not scene.tick().errors
