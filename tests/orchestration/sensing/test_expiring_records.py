"""Unread records that retention is about to take are planned at once, and read before all others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from highwater.declaration import Alerts, Limits
from highwater.errors import DependencyUnavailableError
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.sensing import expiring_records as module
from highwater.orchestration.sensing import repairing
from highwater.orchestration.sensing.expiring_records import (
    compute_longest_wait,
    compute_margin,
    list_endangered_slices,
)
from highwater.orchestration.sensing.repairing import put_first
from highwater.orchestration.sensing.run_requests import build_first_requests, build_repair_requests
from highwater.orchestration.sensing.stream_ticks import build_run_requests
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.plans import Generation
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.slices import OffsetRange
from highwater.topic_rules import Setting
from tests.conftest import TopicFactory
from tests.helpers.breaking import open_repairing
from tests.helpers.repairing import FOUR, ONE, THREE, TWO, Repairing
from tests.helpers.scene import Scene
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
HOUR = timedelta(hours=1)
RAW = [build_table_key(STREAM, "raw")]


@pytest.mark.parametrize(
    ("hours", "declared", "alert", "stored", "expected"),
    [
        (24, 24, 12, 168, 24),
        (24, 6, 12, 168, 12),
        (24, 24, 12, 20, 15),
        (24, 0, 0, 168, 0),
    ],
    ids=["as declared", "not later than the alert", "a short retention", "switched off"],
)
def test_the_margin_leaves_time_before_the_alert(
    hours: int, declared: int, alert: int, stored: int, expected: int
) -> None:
    del hours
    limits, alerts = Limits(retention_margin=declared * HOUR), Alerts(retention_left=alert * HOUR)
    assert compute_margin(replace(STREAM, limits=limits, alerts=alerts), stored * HOUR) == expected * HOUR


class FakeHourlyTopic:
    """A topic whose record at offset n of each partition is 100 - n hours old."""

    def read_offsets_at(self, topic: str, timestamp_ms: int, state: object = None) -> dict[int, int]:
        if topic != "orders":
            raise DependencyUnavailableError("no leader", remedy="wait")
        age = timedelta(milliseconds=time.time_ns() // 1_000_000 - timestamp_ms)
        return dict.fromkeys((0, 1), round(100 - age / HOUR))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(str(90 * 3_600_000), {ONE.key}), ("-1", set()), (str(1_000 * 3_600_000), set()), (None, set())],
    ids=["some are", "kept for ever", "not yet", "may not be read"],
)
def test_a_slice_with_records_within_the_margin_is_endangered(
    monkeypatch: pytest.MonkeyPatch, stored: str | None, expected: set[str]
) -> None:
    """The margin of 24 h before 90 h are over: what is older than 66 h, below offset 34."""
    settings = None if stored is None else {"retention.ms": Setting(stored, "x")}
    monkeypatch.setattr(module, "fetch_topic_settings", lambda *_: settings)
    slices = [
        replace(slice_, ranges={0: OffsetRange(40, 40), 1: OffsetRange(start, start + 10)})
        for slice_, start in ((ONE, 33), (TWO, 34), (THREE, 90))
    ]
    unavailable = replace(FOUR, topic="orders.dlq.1", ranges={0: OffsetRange(0, 1)})
    kafka: Any = FakeHourlyTopic()
    assert list_endangered_slices(kafka, STREAM, [unavailable, *slices]) == expected, (
        "one that cannot be asked keeps back no other"
    )


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(10 * HOUR, timedelta(minutes=2)), (timedelta(minutes=8), timedelta(seconds=36)), (None, timedelta(minutes=2))],
    ids=["the most", "a tenth of the margin", "kept for ever"],
)
def test_unread_slices_are_looked_at_again_long_before_retention_takes_them(
    monkeypatch: pytest.MonkeyPatch, stored: timedelta | None, expected: timedelta
) -> None:
    kept = "-1" if stored is None else str(stored // timedelta(milliseconds=1))
    monkeypatch.setattr(module, "fetch_topic_settings", lambda *_: {"retention.ms": Setting(kept, "x")})
    kafka: Any = FakeHourlyTopic()
    assert compute_longest_wait(kafka, STREAM, [ONE, TWO], timedelta(minutes=2)) == expected
    assert compute_longest_wait(kafka, STREAM, [], timedelta(minutes=2)) == timedelta(minutes=2)


def test_endangered_slices_are_read_first_and_only_read() -> None:
    order = ["a", "b", "c", "d"]
    first, rest = (
        build_first_requests(order, order, 10, urgent=["b"])[0],
        build_first_requests(order, order, 10, urgent=["b"])[1:],
    )
    assert (first.keys, first.raw_alone, first.tags["dagster/priority"]) == (("b",), True, "1")
    assert [(one.keys, one.raw_alone, one.tags.get("dagster/priority")) for one in rest] == [
        (("a",), False, None),
        (("c", "d"), False, None),
    ]
    now = datetime.now(UTC)
    again = build_repair_requests(
        order, dict.fromkeys(order, 2), 10, now, main={"a", "b"}, urgent={"a", "d"}, alone={"a"}
    )
    assert [(one.keys, one.raw_alone, one.tags.get("dagster/priority")) for one in again] == [
        (("a",), True, "1"),
        (("d",), True, "1"),
        (("b",), False, None),
        (("c",), False, None),
    ]
    assert build_run_requests(STREAM, [first])[0].asset_selection == RAW


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Repairing]:
    with open_repairing(tmp_path, in_raw=1) as made:
        yield made


def test_repair_reads_what_is_endangered_whatever_it_waits_for(
    world: Repairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice that was exhausted, or waited for its next attempt, was left to retention."""
    asked: list[set[str]] = []

    def looked(_: object, __: object, slices: Any) -> frozenset[str]:
        asked.append({slice_.key for slice_ in slices})
        return frozenset({TWO.key, THREE.key})

    world.fail_often(TWO.key)
    world.tick()
    assert [one.slice_key for one in world.ledger.exhausted_slices.read_open("orders")] == [TWO.key]
    monkeypatch.setattr(repairing, "list_endangered_slices", looked)
    requests, _ = world.tick()
    assert asked == [{TWO.key, THREE.key, FOUR.key}], "what is in raw is out of danger"
    assert ([THREE.key], True, "repair") in requests
    assert not [keys for keys, _, _ in requests if TWO.key in keys], "a run of it ended just now"
    rules = replace(repairing.RULES, first_wait=timedelta(0))
    monkeypatch.setattr(repairing, "RULES", rules)
    requests, tick = world.tick()
    assert ([TWO.key, THREE.key], True, "repair") in requests or ([TWO.key], True, "repair") in requests
    assert "2 are read first, before retention takes them" in tick.message


def test_the_queued_runs_of_what_is_endangered_are_put_first(world: Repairing) -> None:
    """They followed all that had been requested before them."""
    repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "highwater")
    origin = RemoteJobOrigin(repository, "orders_slice")
    order, runs = [ONE.key, TWO.key, THREE.key, FOUR.key], {}
    for name, keys, status in (
        ("waits", (TWO.key, THREE.key), dg.DagsterRunStatus.QUEUED),
        ("other", (FOUR.key, FOUR.key), dg.DagsterRunStatus.QUEUED),
        ("runs", (TWO.key, THREE.key), dg.DagsterRunStatus.STARTED),
    ):
        ends = dict(zip(("start", "end"), keys, strict=True))
        tags = {f"dagster/asset_partition_range_{end}": key for end, key in ends.items()}
        run = dg.DagsterRun(
            "orders_slice", tags={**tags, "highwater/stream": "orders"}, status=status, remote_job_origin=origin
        )
        world.instance.add_run(run)
        runs[name] = run.run_id
    assert put_first(world.instance, STREAM, order, {THREE.key}) == [runs["waits"]]
    assert put_first(world.instance, STREAM, order, {THREE.key}) == [], "once"
    priorities = {name: world.instance.get_run_by_id(run_id) for name, run_id in runs.items()}
    assert {name: run and run.tags.get("dagster/priority") for name, run in priorities.items()} == {
        "waits": "1",
        "other": None,
        "runs": None,
    }


class FakeSmallTopic(FakeHourlyTopic):
    """Three such records in each partition."""

    def read_topic_state(self, topic: str) -> TopicState:
        return TopicState(topic, "A", {p: PartitionState(0, 3, 3, 1) for p in (0, 1)})

    def read(self, *_: object, **__: object) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("queued_runs", [0, 3])
@pytest.mark.parametrize(("stored", "planned"), [(120, True), (130, False)])
def test_records_that_expire_within_the_margin_are_planned_at_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, stored: int, planned: bool, queued_runs: int
) -> None:
    """Six records of 98 to 100 hours wait for four more: of a topic that keeps 120 h they have less than a day.

    They are not left to a queue either.
    """
    monkeypatch.setattr(
        module, "fetch_topic_settings", lambda *_: {"retention.ms": Setting(str(stored * 3_600_000), "x")}
    )
    now = datetime.now(UTC)
    ledger.topics.open_generation(Generation("orders", "orders", "A", 0, {0: 0, 1: 0}, now))
    limits = Limits(max_offsets=100, min_offsets=10, max_wait=2 * HOUR, retention_margin=24 * HOUR)
    kafka: Any = FakeSmallTopic()
    tick = Planner(ledger, kafka).tick(replace(STREAM, limits=limits), now, queued_runs=queued_runs)
    assert bool(tick.slices) == planned
    assert [slice_.offsets for slice_ in ledger.list_slices("orders")] == [6] * planned


@pytest.mark.slow
def test_the_planner_does_not_wait_for_more_while_retention_is_about_to_take_what_there_is(
    bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    """Records of 50 minutes, of a topic that keeps an hour, waited for company until they were gone."""
    from confluent_kafka import Producer

    scene = Scene(bootstrap, topic(**{"retention.ms": "3600000"}), tmp_path)
    waiting = Limits(max_offsets=10, min_offsets=5, max_wait=timedelta(hours=2))
    alerts = Alerts(retention_left=timedelta(minutes=1))
    producer = Producer({"bootstrap.servers": bootstrap})
    at = time.time_ns() // 1_000_000 - 50 * 60_000
    producer.produce(scene.topic, b"v", partition=0, timestamp=at)
    assert producer.flush(30) == 0
    tick = scene.tick(limits=replace(waiting, retention_margin=HOUR / 12), alerts=alerts)
    assert (tick.slices, "1 offsets wait for 5" in tick.lines[0]) == ((), True)
    assert len(scene.tick(limits=replace(waiting, retention_margin=HOUR / 4), alerts=alerts).slices) == 1
    scene.ensure_each_once({(0, 0, 0)})
