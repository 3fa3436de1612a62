"""A tick of the planner on a real broker, ledger and instance; the lake has commit records alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dev.processes import free_port
from highwater.orchestration.asset_keys import TABLES, build_table_key, build_topic_key
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing import stream_ticks
from highwater.resources.consumer_groups import read_group_offsets
from highwater.resources.kafka import Kafka
from tests.helpers.sensor_ticks import end_grace, fill_tiers, format_stored
from tests.helpers.support import BOUNDED, Message, send
from tests.helpers.ticking import Ticking


def test_a_backlog_becomes_keys_and_a_few_runs(ticking: Callable[..., Ticking]) -> None:
    ours = ticking()
    result = ours.tick("planner")
    planned = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
    assert len(planned) == 4
    assert ours.keys() == planned
    ranges = [
        (r.tags["dagster/asset_partition_range_start"], r.tags["dagster/asset_partition_range_end"])
        for r in result.run_requests
    ]
    assert ranges == [(planned[0], planned[2]), (planned[3], planned[3])]
    assert all(request.tags["highwater/stream"] == "orders" for request in result.run_requests)


def test_the_ledger_holds_the_plan_before_dagster_hears_of_it(ticking: Callable[..., Ticking]) -> None:
    """I1. The tick dies after the plan, as `evaluate` does here: nothing of its result reaches Dagster."""
    ours = ticking()
    ours.evaluate("planner")
    assert ours.keys() == []
    planned = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
    assert len(planned) == 4
    result = ours.tick("planner")
    assert ours.keys() == planned
    assert len(result.run_requests) == 2
    assert [slice_.key for slice_ in ours.ledger.list_slices("orders")] == planned


def test_records_wait_for_the_queued_runs_of_their_topic(ticking: Callable[..., Ticking]) -> None:
    """40 busy streams got a run each for every tick: the planner's took a minute, and each run took little."""
    ours = ticking()
    ours.run(["x"], dg.DagsterRunStatus.QUEUED, **{"highwater/main": "orders"})
    result = ours.tick("planner")
    assert (result.run_requests, ours.ledger.list_slices("orders")) == ([], [])
    assert "wait for room in the queue, where 1 runs wait" in str(result.skip_message)


@pytest.mark.parametrize(
    ("status", "tag"),
    [
        (dg.DagsterRunStatus.STARTED, "highwater/main"),
        (dg.DagsterRunStatus.QUEUED, "highwater/tier"),
        # A daemon that died created it and did not queue it.
        (dg.DagsterRunStatus.NOT_STARTED, "highwater/main"),
    ],
)
def test_other_runs_hold_nothing_back(ticking: Callable[..., Ticking], status: dg.DagsterRunStatus, tag: str) -> None:
    ours = ticking()
    ours.run(["x"], status, **{tag: "orders"})
    assert ours.tick("planner").run_requests


def test_a_tick_that_died_after_its_keys_leaves_the_runs_to_repair(ticking: Callable[..., Ticking]) -> None:
    ours = ticking()
    ours.evaluate("planner")
    keys = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
    ours.instance.add_dynamic_partitions("orders_slices", keys)
    assert not ours.tick("planner").run_requests
    assert not ours.tick("repair").run_requests, "the planner's request may be on its way"
    end_grace(ours)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [keys[0], keys[3]]
    assert {r.tags["highwater/purpose"] for r in requests} == {"repair"}


def test_losing_dagsters_database_loses_no_plan(ticking: Callable[..., Ticking], tmp_path: Path) -> None:
    ours = ticking()
    ours.tick("planner")
    before = ours.ledger.list_slices("orders")
    with dg.DagsterInstance.ephemeral() as empty:
        again = Ticking(ours.stream, empty, tmp_path)
        again.tick("planner")
        assert again.keys() == [slice_.key for slice_ in before]
    assert ours.ledger.list_slices("orders") == before


@pytest.mark.parametrize("home", ["new", "lost a key"])
def test_history_that_dagster_lacks_is_reported_and_not_requested(
    ticking: Callable[..., Ticking], tmp_path: Path, home: str
) -> None:
    """The planner requested a run for each slice that a new instance lacked: all were validated again."""
    ours = ticking(records=60, slices_per_run=10)
    ours.tick("planner")
    end_grace(ours)
    slices = ours.ledger.list_slices("orders")
    keys = [slice_.key for slice_ in slices]
    assert len(keys) == 6
    ours.fill(slices[:3], *[table.name for table in TABLES])
    ours.fill(slices[3:4], "raw")
    ours.ledger.exhausted_slices.add("orders", {keys[4]: 6}, datetime.now(UTC))
    with dg.DagsterInstance.ephemeral() as empty:
        again = Ticking(ours.stream, empty, tmp_path)
        if home == "lost a key":
            # A person deleted the newest keys in the UI; one of their slices is complete.
            empty.add_dynamic_partitions("orders_slices", keys[:2])
        planned = again.tick("planner")
        assert again.keys() == keys
        assert _requested(planned) == [keys[5]], "nobody began it; repair requests the one that is half done"
        repaired = again.tick("repair")
        again.run([keys[5]], dg.DagsterRunStatus.STARTED)
        for table in TABLES:
            stored = empty.get_materialized_partitions(build_table_key(ours.stream, table.name))
            assert stored == {slice_.key for slice_ in slices[: 4 if table.name == "raw" else 3]}
        assert keys[3] in _requested(repaired)
        assert not {*keys[:3], keys[4]} & {*_requested(repaired)}
        assert not again.tick("planner").run_requests


def _requested(result: Any) -> list[str]:
    """The slices at the ends of the requested ranges."""
    ends = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
    return sorted({request.tags[end] for request in result.run_requests for end in ends})


def test_retries_that_dagster_lacks_are_reported_and_not_requested(
    ticking: Callable[..., Ticking], tmp_path: Path
) -> None:
    """The sensor of retries requested them again as the planner did."""
    ours = ticking(records=10)
    fill_tiers(ours, records=20)
    time.sleep(1.3)
    ours.tick("dlq_retries")
    end_grace(ours)
    whole, other = ours.ledger.list_slices("orders")
    ours.fill([whole], *[table.name for table in TABLES])
    with dg.DagsterInstance.ephemeral() as empty:
        again = Ticking(ours.stream, empty, tmp_path)
        assert _requested(again.tick("dlq_retries")) == [other.key]
        again.tick("repair")
        raw = empty.get_materialized_partitions(build_table_key(ours.stream, "raw"))
        assert (again.keys(), raw) == ([whole.key, other.key], {whole.key})


def test_a_new_instance_requests_nothing_of_history_while_the_lake_is_unavailable(
    ticking: Callable[..., Ticking], tmp_path: Path
) -> None:
    """I15: a lake that cannot be read is not one that lacks the slices; new slices are planned and read meanwhile."""
    ours = ticking(records=20)
    ours.tick("planner")
    ours.fill(ours.ledger.list_slices("orders"), "raw")
    for file in (Path(ours.lake.build_table_path("orders", "raw")) / "_delta_log").glob("*.json"):
        file.write_text("no JSON")
    send(os.environ["HIGHWATER_KAFKA_BOOTSTRAP"], ours.stream.topic, [Message(b"k", b"v", partition=0)] * 10)
    with dg.DagsterInstance.ephemeral() as empty:
        again = Ticking(ours.stream, empty, tmp_path)
        planned = again.tick("planner")
        keys = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
        assert again.keys() == keys
        assert _requested(planned) == keys[2:]


def test_two_instances_on_one_ledger_are_noticed_and_one_that_replaces_another_is_none(
    ticking: Callable[..., Ticking], tmp_path: Path
) -> None:
    """Nobody knew that two deployments did the same work."""
    from sqlalchemy import create_engine, text

    def found() -> tuple[list[str], bool, bool]:
        status = read_stream_status(ours.ledger, kafka, ours.stream, {})
        [alert] = [
            one
            for one in alerts._measure_stream(ours.ledger, kafka, ours.lake, ours.stream, [], [])
            if "inst" in one.what
        ]
        reported = any("is not alone" in line for line in status.lines)
        assert bool(status.to_plain()["instances"]) is reported
        assert ("stop the sensors" in alert.remedy) is alert.over
        return [one.id for one in status.instances], reported, alert.over

    ours = ticking()
    kafka = Kafka(os.environ["HIGHWATER_KAFKA_BOOTSTRAP"])
    ours.tick("planner")
    assert found() == ([], False, False)
    with dg.DagsterInstance.ephemeral() as other:
        again = Ticking(ours.stream, other, tmp_path)
        again.tick("repair")
        assert found() == ([], False, False), "the first one may have been stopped before"
        with create_engine(ours.ledger.database.url).begin() as connection:
            minute_ago = format_stored(datetime.now(UTC) - timedelta(minutes=1))
            connection.execute(text("UPDATE instances SET last_seen = :at, first_seen = :at"), {"at": minute_ago})
        ours.tick("planner")
        again.tick("repair")
        both, reported, over = found()
        assert (len({*both}), reported, over) == (2, True, True)
        with create_engine(ours.ledger.database.url).begin() as connection:
            long_ago = format_stored(datetime.now(UTC) - timedelta(minutes=6))
            mine = {"at": long_ago, "id": both[0]}
            connection.execute(text("UPDATE instances SET last_seen = :at WHERE instance_id = :id"), mine)
        assert found() == ([], False, False), "the first one was stopped"


def test_the_topic_is_observed_with_its_lag(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(slices_per_tick=1)
    ours.tick("planner")
    [record] = ours.instance.fetch_observations(build_topic_key(ours.stream), limit=5).records
    metadata = record.asset_observation.metadata
    assert metadata["lag"].value == 30
    rows = [row.data for row in metadata["positions"].records]
    ends = {"last_stable": 20, "high_watermark": 20, "held_back": 0}
    assert rows == [{"partition": p, "planned": 5, "log_start": 0, "lag": 15, **ends} for p in (0, 1)]


def test_the_group_follows_what_is_done(ticking: Callable[..., Ticking]) -> None:
    """The sensor as Dagster ticks it; `test_offset_mirror` has what it does."""
    ours = ticking()
    ours.tick("planner")
    ours.fill(ours.ledger.list_slices("orders")[:2], "raw", "events", "rejects")
    result = ours.tick("offset_mirror")
    assert not result.run_requests
    assert "orders@0000002 is not" in result.skip_message.replace(f"{ours.stream.topic}@", "orders@")
    places = [(ours.stream.topic, p) for p in (0, 1)]
    found = read_group_offsets(Kafka(os.environ["HIGHWATER_KAFKA_BOOTSTRAP"]), "highwater.orders", places)
    assert [one.offset for one in found.values()] == [10, 10]


def test_a_broker_that_is_unavailable_skips_the_tick_within_seconds(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ticking()
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", f"127.0.0.1:{free_port()}")
    began = time.monotonic()
    result = ours.tick("planner")
    assert time.monotonic() - began < BOUNDED, "Dagster ends a tick after a minute"
    assert not result.run_requests
    assert "did not answer" in result.skip_message
    assert ours.ledger.list_slices("orders") == []


def test_an_absent_topic_fails_the_tick_and_names_the_nearest(ticking: Callable[..., Ticking], tmp_path: Path) -> None:
    ours = ticking()
    other = Ticking(replace(ours.stream, topic=ours.stream.topic[:-1]), ours.instance, tmp_path)
    result = other.tick("planner")
    assert not result.run_requests
    [fault] = other.ledger.sensor_faults.list_all()
    assert (fault.stream, fault.sensor) == ("orders", "planner")
    assert "does not exist" in fault.problem
    assert ours.stream.topic in fault.problem
    assert fault.problem in result.skip_message


def test_two_ticks_at_once_plan_each_offset_once(
    ticking: Callable[..., Ticking], bootstrap: str, tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    ours = ticking(records=200)
    # On disk, as a deployment has it: two threads lock each other out of a database in memory.
    with dg.DagsterInstance.local_temp(str(tmp_path)) as ours.instance, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: ours.evaluate("planner"), range(6)))
    offsets = [
        (partition, offset)
        for slice_ in ours.ledger.list_slices("orders")
        for partition, r in slice_.ranges.items()
        for offset in range(r.start, r.end)
    ]
    assert sorted(offsets) == [(p, n) for p in (0, 1) for n in range(100)]
    assert Kafka(bootstrap, {}).read_topic_state(ours.stream.topic).partitions[0].last_stable == 100


def test_the_planner_looks_back_until_dagster_holds_what_it_sees(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a tick must not grow with the number of slices, and a crash may leave many keys to be added."""
    monkeypatch.setattr(stream_ticks, "LOOK_BACK", 1)
    ours = ticking(records=80)
    ours.evaluate("planner")
    keys = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
    ours.tick("planner")
    assert ours.keys() == keys
    assert len(ours.keys()) == 8
