"""A tick that ends with an error shows all that it found first: lines, lag, and the errors of all partitions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster import instance_for_test

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Limits
from highwater.errors import (
    DependencyUnavailableError,
    OffsetsExpiredError,
    PermanentError,
    TopicTruncatedError,
    TopicVanishedError,
)
from highwater.orchestration.asset_keys import build_topic_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.sensing import retries, stream_ticks
from highwater.plans import Generation
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.pauses import Pause
from highwater.resources.topic_state import PartitionState, TopicState, TopicStates
from highwater.slices import OffsetRange, Slice
from tests.helpers.repairing import OPEN
from tests.helpers.written_tables import NOW

STREAM = replace(ORDERS, limits=Limits())
FIRST, SECOND, *_ = STREAM.tier_topics


class FakeExpiredTopic:
    """Of the topic two partitions lost what was planned next, and one what was planned last."""

    def read_topic_state(self, topic: str) -> TopicState:
        expired, whole = PartitionState(7, 9, 9, 1), PartitionState(0, 5, 5, 1)
        states = [expired, expired, PartitionState(0, 3, 3, 1), whole, whole]
        return TopicState(topic, "A", dict(enumerate(states)))

    def read_topic_states(self, topics: Collection[str]) -> TopicStates:
        return TopicStates({topic: self.read_topic_state(topic) for topic in topics})

    def look_again(self, topic: str) -> TopicState:
        return self.read_topic_state(topic)

    def list_topic_names(self) -> list[str]:
        return ["orders"]

    def read(self, *_: object, **__: object) -> list[object]:
        return []


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    made.topics.open_generation(Generation("orders", "orders", "A", 0, dict.fromkeys(range(5), 0), NOW))
    made.add([Slice("orders", "orders", "A", 0, 0, {p: OffsetRange(0, 5) for p in range(5)}, NOW)])
    made.breakers.update("orders", (), lambda *_: (OPEN, ()))
    return made


@pytest.fixture
def instance(ledger: Ledger, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with instance_for_test(temp_dir=str(tmp_path)) as made:
        made.add_dynamic_partitions(STREAM.partitions_name, [slice_.key for slice_ in ledger.list_slices("orders")])
        yield made


def opened(**given: object) -> dict[str, Any]:
    return {name: SimpleNamespace(open=lambda one=one: one) for name, one in given.items()}


def evaluated(instance: dg.DagsterInstance, resources: dict[str, Any], cursor: str | None = None) -> Any:
    """A tick of the planner, with its events recorded as the daemon does it."""
    built = build_defs(streams=[STREAM], resources=resources)
    sensor = built.get_repository_def().get_sensor_def("planner")
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources=built.resources) as context:
        result = sensor.evaluate_tick(context)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    return result


def test_partitions_that_stopped_are_reported_together_and_behind_all_else(
    ledger: Ledger, instance: dg.DagsterInstance, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first error alone was reported; the lag, the others and the breaker were not."""
    resources = opened(ledger=ledger, kafka=FakeExpiredTopic())
    result, logged = evaluated(instance, resources), capfd.readouterr().err
    [fault] = ledger.sensor_faults.list_all()
    assert "the breaker is open" in logged
    assert (fault.stream, fault.sensor) == ("orders", "planner")
    assert all(part in result.skip_message for part in (fault.problem, fault.remedy))
    for partition in (0, 1, 2):
        assert f"partition {partition}" in fault.problem
    assert fault.problem.startswith("PermanentError: 3 faults: ")
    assert fault.problem.count("planned to offset 5") == 3
    assert fault.problem.endswith("found: log start offset 7; log start offset 7; last stable offset 3")
    assert all(f"--partition {partition}" in fault.remedy for partition in (0, 1))
    [seen] = instance.fetch_observations(build_topic_key(STREAM), limit=5).records
    found = {name: value.value for name, value in seen.asset_observation.metadata.items()}
    assert found["lag"] == 8
    assert str(found["left_out"]).count("partition ") >= 3
    tick = stream_ticks.plan_stream(instance, SimpleNamespace(**resources), STREAM)
    assert any(line.startswith("the breaker is open") for line in tick.lines)
    assert evaluated(instance, resources, result.cursor).asset_events == [], "observed once a minute"
    assert ledger.sensor_faults.list_all() == [fault], "a fault that lasts has the time of its first tick"


def test_one_partition_that_stopped_is_reported_as_it_is() -> None:
    one = OffsetsExpiredError("gone", stored=1, found=2, remedy="accept it")
    assert stream_ticks.merge_errors([one]) is one
    two = stream_ticks.merge_errors([one, OffsetsExpiredError("gone too", stored=3, found=4, remedy="accept it")])
    assert type(two) is OffsetsExpiredError
    assert str(two) == "2 faults: gone; gone too; stored: 1; 3; found: 2; 4; remedy: accept it"
    assert type(stream_ticks.merge_errors([one, TopicTruncatedError("cut", remedy="look")])) is PermanentError


def test_tiers_that_stopped_are_reported_together_and_behind_what_is_paused(
    ledger: Ledger, instance: dg.DagsterInstance
) -> None:
    from tests.helpers.fake_topics import FakeTopics

    stream = replace(STREAM, tiers=tuple(timedelta(seconds=n) for n in (10, 20, 30)))
    for topic in stream.tier_topics:
        ledger.topics.open_generation(Generation("orders", topic, "A", 0, {0: 0}, NOW))
    ledger.paused.pause("orders", Pause(stream.tier_topics[2], NOW, "ann", "a test"))
    tick = stream_ticks.plan_retries(instance, SimpleNamespace(**opened(ledger=ledger, kafka=FakeTopics())), stream)
    assert isinstance(tick.error, TopicVanishedError)
    assert all(f"topic {topic} of stream orders is gone" in tick.error.problem for topic in (FIRST, SECOND))
    assert all(f"--topic {topic}" in tick.error.remedy for topic in (FIRST, SECOND))
    assert any("is paused by ann" in line for line in tick.lines)


def test_planned_slices_of_a_tier_are_requested_while_a_later_tier_is_unavailable(
    ledger: Ledger, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and runs were dropped with the tick, and waited for repair."""
    stream = replace(STREAM, tiers=tuple(timedelta(seconds=n) for n in (10, 20)))
    slice_ = Slice("orders", FIRST, "A", 0, 0, {0: OffsetRange(0, 5)}, NOW)
    unavailable = [SECOND]

    def plan_tier(ledger: Ledger, _: object, __: object, topic: str, *___: object, **____: object) -> Any:
        if topic in unavailable:
            raise DependencyUnavailableError("partition 1 could not be asked", remedy="wait")
        ledger.add([slice_])
        return SimpleNamespace(slices=[slice_], lines=[], errors={}, skipped={})

    ledger.topics.open_generation(Generation("orders", FIRST, "A", 0, {0: 0}, NOW))
    monkeypatch.setattr(retries, "plan_tier", plan_tier)
    monkeypatch.setattr(stream_ticks, "list_endangered_slices", lambda *_: set())
    resources = SimpleNamespace(**opened(ledger=ledger, kafka=FakeExpiredTopic(), lake=Lake("/nowhere")))
    tick = stream_ticks.plan_retries(instance, resources, stream)
    assert (list(tick.keys), len(tick.requests), tick.idle) == ([slice_.key], 1, False)
    assert any(line.startswith(f"{SECOND} is planned by a later tick: partition 1") for line in tick.lines)
    unavailable.append(FIRST)
    with pytest.raises(DependencyUnavailableError):
        stream_ticks.plan_retries(instance, resources, stream)
