"""What a tick does, on a real broker, a real ledger and an instance of its own; the lake has commit records alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from dev.processes import free_port
from highwater.breaker import Circuit
from highwater.declaration import Limits
from highwater.orchestration.asset_keys import TABLES, build_table_key, build_topic_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing import dead_workers, repairing, stream_ticks
from highwater.orchestration.sensing.rounds import Cursor
from highwater.resources.groups import read_group_offsets
from highwater.resources.kafka import Kafka
from tests.conftest import create_topic
from tests.helpers.support import BOUNDED, Message, make_stream, send
from tests.helpers.ticking import Ticking

if TYPE_CHECKING:
    from tests.conftest import TopicFactory

SOON = timedelta(seconds=0)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as made:
        yield made


@pytest.fixture
def ticking(
    topic: TopicFactory,
    bootstrap: str,
    instance: dg.DagsterInstance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Ticking]:
    def make(records: int = 40, **limits: int) -> Ticking:
        name = topic(partitions=2)
        monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", bootstrap)
        monkeypatch.setenv("HIGHWATER_LEDGER_URL", f"sqlite:///{tmp_path / 'ledger.sqlite'}")
        monkeypatch.setenv("HIGHWATER_LAKE", str(tmp_path / "lake"))
        send(bootstrap, name, [Message(b"k", b"v", partition=n % 2) for n in range(records)])
        given: dict[str, Any] = {"max_offsets": 10, "slices_per_run": 3, **limits}
        stream = make_stream(name, limits=Limits(**given))
        return Ticking(stream, instance, tmp_path)

    return make


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


def test_a_tick_that_died_after_its_keys_leaves_the_runs_to_repair(ticking: Callable[..., Ticking]) -> None:
    ours = ticking()
    ours.evaluate("planner")
    keys = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
    ours.instance.add_dynamic_partitions("orders_slices", keys)
    assert not ours.tick("planner").run_requests
    assert not ours.tick("repair").run_requests, "the planner's request may be on its way"
    _later(ours)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [keys[0], keys[3]]
    assert {r.tags["highwater/purpose"] for r in requests} == {"repair"}


def _later(ours: Ticking) -> None:
    """Let the grace pass: slices look as if they had been planned an hour ago."""
    from sqlalchemy import create_engine, text

    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    with create_engine(ours.ledger.database.url).begin() as connection:
        connection.execute(text("UPDATE slices SET planned_at = :at"), {"at": _as_stored(hour_ago)})


def _as_stored(at: datetime) -> str:
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(sep=" ")


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
    _later(ours)
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
    tiers_of(ours, records=20)
    time.sleep(1.3)
    ours.tick("dlq_retries")
    _later(ours)
    whole, other = ours.ledger.list_slices("orders")
    ours.fill([whole], *[table.name for table in TABLES])
    with dg.DagsterInstance.ephemeral() as empty:
        again = Ticking(ours.stream, empty, tmp_path)
        assert _requested(again.tick("dlq_retries")) == [other.key]
        again.tick("repair")
        raw = empty.get_materialized_partitions(build_table_key(ours.stream, "raw"))
        assert (again.keys(), raw) == ([whole.key, other.key], {whole.key})


def test_a_new_instance_requests_nothing_of_history_while_the_lake_is_away(
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
            minute_ago = _as_stored(datetime.now(UTC) - timedelta(minutes=1))
            connection.execute(text("UPDATE instances SET last_seen = :at, first_seen = :at"), {"at": minute_ago})
        ours.tick("planner")
        again.tick("repair")
        both, reported, over = found()
        assert (len({*both}), reported, over) == (2, True, True)
        with create_engine(ours.ledger.database.url).begin() as connection:
            long_ago = _as_stored(datetime.now(UTC) - timedelta(minutes=6))
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


def test_a_broker_that_is_away_skips_the_tick_within_seconds(
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


def test_a_run_in_flight_keeps_repair_away(ticking: Callable[..., Ticking]) -> None:
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    keys = ours.keys()
    ours.run(keys[:3], dg.DagsterRunStatus.STARTED)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [keys[3]]


@pytest.mark.slow
def test_a_run_whose_worker_is_gone_is_ended_and_its_slices_are_asked_for(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker and code server killed together left it started for ever, and its slices in flight."""
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    monkeypatch.setattr(repairing, "RULES", replace(repairing.RULES, grace=SOON, first_wait=SOON))
    monkeypatch.setattr(dead_workers, "LEASE_SECONDS", 0.0)
    keys = ours.keys()
    ours.run(keys[:3], dg.DagsterRunStatus.STARTED)
    [run] = ours.instance.get_runs()
    with ours.ledger.lease(f"run orders/{run.run_id}", seconds=60):
        requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [keys[3]]
    ours.tick("repair")
    assert [run.status for run in ours.instance.get_runs()] == [dg.DagsterRunStatus.FAILURE]
    requests = ours.tick("repair").run_requests
    asked = {r.tags["dagster/asset_partition_range_start"]: r.tags["highwater/run_number"] for r in requests}
    assert asked == {keys[0]: "2", keys[3]: "1"}


def test_a_backfill_outside_of_the_job_counts_as_work_too(ticking: Callable[..., Ticking]) -> None:
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    keys = ours.keys()
    run = dg.DagsterRun(
        job_name="__ASSET_JOB",
        asset_selection=frozenset({build_table_key(ours.stream, "raw")}),
        tags={"dagster/partition": keys[0]},
        status=dg.DagsterRunStatus.STARTING,
    )
    ours.instance.add_run(run)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [keys[1]]


def test_what_the_lake_holds_and_dagster_forgot_is_reported_and_not_asked_for(
    ticking: Callable[..., Ticking],
) -> None:
    """Repair asks the lake, not only run records."""
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    slices = ours.ledger.list_slices("orders")
    ours.fill(slices[:2], *[table.name for table in TABLES])
    result = ours.tick("repair")
    assert [r.tags["dagster/asset_partition_range_start"] for r in result.run_requests] == [slices[2].key]
    for table in TABLES:
        stored = ours.instance.get_materialized_partitions(build_table_key(ours.stream, table.name))
        assert stored == {slice_.key for slice_ in slices[:2]}
    again = ours.tick("repair")
    assert not again.asset_events


def test_what_dagster_forgot_is_reported_as_the_run_reported_it(ticking: Callable[..., Ticking]) -> None:
    """It once had its offsets and its attempt alone, which leaves holes in every plot."""
    ours = ticking(records=10)
    ours.tick("planner")
    _later(ours)
    [slice_] = ours.ledger.list_slices("orders")
    first, last = 1_780_000_000_000_000, 1_780_000_060_000_000
    span = {"first_event_us": first, "last_event_us": last}
    ours.fill([slice_], "raw", rows=10)
    ours.fill([slice_], "events", rows=7, rejects_malformed=2, **span)
    ours.fill([slice_], "current", rows=7)
    ours.fill([slice_], "rejects", "dlq", rows=2)
    reported = {event.asset_key.path[-1]: event.metadata for event in ours.tick("repair").asset_events}
    assert {table: one["dagster/partition_row_count"].value for table, one in reported.items()} == {
        "raw": 10,
        "events": 7,
        "rejects": 2,
        "dlq": 2,
        "current": 7,
    }
    for metadata in reported.values():
        assert metadata["attempt"].value == 1
        assert metadata["partitions"].value == 2
        assert metadata["lag_at_planning"].value == slice_.lag
        assert metadata["delta_version"].value == 0
    for table in ("events", "current"):
        assert reported[table]["rejects/malformed"].value == 2
        assert reported[table]["event_span_seconds"].value == 60.0


def test_a_slice_that_cannot_be_shown_keeps_no_other_from_repair(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tick of repair failed by it from then on, so that nothing of the stream was requested again."""
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    slices = ours.ledger.list_slices("orders")
    last = {"first_event_us": 0, "last_event_us": 253_402_300_799_999_999}
    ours.fill(slices[:1], *[table.name for table in TABLES], **last)
    assert len(ours.tick("repair").asset_events) == len(TABLES)

    def fail(*_: object) -> None:
        raise ValueError("year 10000 is out of range")

    monkeypatch.setattr(repairing, "read_missing_events", fail)
    found = ours.tick("repair").run_requests
    assert [request.tags["dagster/asset_partition_range_start"] for request in found] == [slices[1].key]


def test_a_slice_that_fails_again_and_again_is_asked_for_by_itself(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be done failed those that were requested with it, until all of them were exhausted."""
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    monkeypatch.setattr(repairing, "RULES", replace(repairing.RULES, grace=SOON, first_wait=SOON))
    keys = ours.keys()
    ends = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
    wanted = []
    for _ in range(3):
        requests = ours.tick("repair").run_requests
        wanted.append(sorted(tuple(request.tags[end] for end in ends) for request in requests))
        ours.run(keys[:3], dg.DagsterRunStatus.FAILURE)
    together = [(keys[0], keys[2]), (keys[3], keys[3])]
    assert wanted == [together, together, [(key, key) for key in keys]]


def test_what_was_reprocessed_since_it_was_folded_is_reported_without_the_new_numbers(
    ticking: Callable[..., Ticking],
) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    _later(ours)
    [slice_] = ours.ledger.list_slices("orders")
    ours.fill([slice_], "raw", "current", rows=3)
    ours.fill([slice_], "events", rows=7, attempt=2, rejects_malformed=2)
    reported = {event.asset_key.path[-1]: event.metadata for event in ours.tick("repair").asset_events}
    assert (reported["current"]["attempt"].value, reported["events"]["attempt"].value) == (1, 2)
    assert "rejects/malformed" not in reported["current"]


def test_a_slice_whose_rejects_do_not_follow_its_events_is_asked_for(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    _later(ours)
    slices = ours.ledger.list_slices("orders")
    ours.fill(slices, "raw", "rejects")
    ours.fill(slices, "events", "current", attempt=2)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [slices[0].key]


def test_a_lake_that_cannot_be_read_is_not_an_empty_one(ticking: Callable[..., Ticking]) -> None:
    """I15: repair skips with the reason; it neither reports nor requests."""
    ours = ticking()
    ours.tick("planner")
    _later(ours)
    slices = ours.ledger.list_slices("orders")
    ours.fill(slices, "raw")
    log = Path(ours.lake.build_table_path("orders", "raw")) / "_delta_log"
    for file in log.glob("*.json"):
        file.write_text("no JSON")
    result = ours.tick("repair")
    assert not result.run_requests
    assert "lake could not be read" in result.skip_message


def test_what_dagster_holds_and_the_lake_lost_is_asked_for(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    _later(ours)
    [slice_] = ours.ledger.list_slices("orders")
    for table in TABLES:
        key = build_table_key(ours.stream, table.name)
        ours.instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=slice_.key))
    assert len(ours.tick("repair").run_requests) == 1


def test_repair_compares_all_slices_in_turn(ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cost must not grow with the number of slices, and yet nothing stays unseen."""
    monkeypatch.setattr(stream_ticks, "PAGE", 3)
    ours = ticking(records=80)
    ours.evaluate("planner")
    _later(ours)
    keys = [slice_.key for slice_ in ours.ledger.list_slices("orders")]
    assert len(keys) == 8
    seen = []
    for _ in range(3):
        ours.tick("repair")
        seen.append(len(ours.keys()))
    assert seen == [3, 6, 8]
    assert Cursor.parse(ours.cursors["repair"]).streams == {"orders": stream_ticks.OLDEST}


def test_a_key_that_somebody_added_by_hand_is_named_and_holds_nothing_up(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    _later(ours)
    ours.instance.add_dynamic_partitions("orders_slices", ["orders@' OR 1=1"])
    context = ours.evaluate("repair")
    assert len(context.run_requests) == 1
    lines = repairing.repair(ours.instance, SimpleNamespace(**(ours.defs.resources or {})), ours.stream, None).lines
    assert "1 no slices of the stream by the ledger, delete their keys from Dagster: orders@' OR 1=1" in lines


def test_a_key_of_another_stream_is_named_and_not_requested(ticking: Callable[..., Ticking]) -> None:
    """Its runs can only fail, and repair once asked for them until it gave up."""
    ours = ticking(records=10)
    ours.tick("planner")
    _later(ours)
    [own] = ours.ledger.list_slices("orders")
    foreign = replace(own, stream="payments", topic="payments")
    assert ours.ledger.add([foreign])
    ours.instance.add_dynamic_partitions("orders_slices", [foreign.key])
    resources = SimpleNamespace(**(ours.defs.resources or {}))
    tick = repairing.repair(ours.instance, resources, ours.stream, None)
    assert [request.keys for request in tick.requests] == [(own.key,)]
    assert f"1 no slices of the stream by the ledger, delete their keys from Dagster: {foreign.key}" in tick.lines


def test_a_cursor_that_cannot_be_read_does_no_harm(ticking: Callable[..., Ticking]) -> None:
    ours = ticking()
    ours.cursors = {"planner": "no JSON", "repair": Cursor(streams={"orders": "orders@9999999"}).to_json()}
    assert ours.tick("planner").run_requests
    ours.tick("repair")


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


def wait_for(ours: Ticking, *delays: timedelta) -> None:
    """Let the stream have tiers of these delays."""
    ours.stream = replace(ours.stream, tiers=delays)
    ours.defs = build_defs(streams=[ours.stream])


def tiers_of(ours: Ticking, records: int) -> None:
    """Let the stream have tiers of seconds, the first of them with records whose time the broker sets."""
    wait_for(ours, timedelta(seconds=1), timedelta(seconds=2))
    kafka = Kafka(os.environ["HIGHWATER_KAFKA_BOOTSTRAP"])
    create_topic(kafka.bootstrap, ours.stream.tier_topics[0], 2, {"message.timestamp.type": "LogAppendTime"})
    send(kafka.bootstrap, ours.stream.tier_topics[0], [Message(b"k", b"v", partition=n % 2) for n in range(records)])


def test_what_is_due_in_a_tier_becomes_slices_whose_runs_stand_behind_new_ones(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    tiers_of(ours, records=20)
    # By delays of hours: a machine that hangs lets records of one second be due at once.
    wait_for(ours, timedelta(hours=1), timedelta(hours=2))
    assert ours.tick("dlq_retries").run_requests == [], "nothing has waited long enough"
    wait_for(ours, timedelta(seconds=1), timedelta(seconds=2))
    time.sleep(1.3)
    result = ours.tick("dlq_retries")
    [request] = result.run_requests
    first = ours.stream.tier_topics[0]
    assert ours.keys() == [f"{ours.stream.topic}@0000000", f"{first}@0000000", f"{first}@0000001"]
    assert request.tags["dagster/asset_partition_range_start"] == f"{first}@0000000"
    assert (request.tags["dagster/priority"], request.tags["highwater/tier"]) == ("-1", "orders")
    assert ours.tick("planner").run_requests == [], "the planner leaves the tiers' slices alone"
    again = ours.tick("dlq_retries")
    assert again.run_requests == []
    assert "nothing to do" in str(again.skip_message), "the second tier is not there"


def test_no_tier_is_cut_while_a_run_of_one_waits_in_the_queue(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    tiers_of(ours, records=10)
    time.sleep(1.3)
    ours.run(["x"], dg.DagsterRunStatus.NOT_STARTED, **{"highwater/tier": "orders"})
    result = ours.tick("dlq_retries")
    assert result.run_requests == []
    assert "wait in the queue" in str(result.skip_message)
    assert ours.ledger.list_slices("orders") == []


def test_repair_asks_for_slices_of_tiers_in_runs_of_their_own(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    tiers_of(ours, records=10)
    time.sleep(1.3)
    ours.tick("dlq_retries")
    monkeypatch.setattr(repairing, "RULES", replace(repairing.RULES, grace=SOON))
    asked = {r.tags["dagster/asset_partition_range_start"]: r.tags for r in ours.tick("repair").run_requests}
    main, tier = ours.keys()
    assert set(asked) == {main, tier}
    assert asked[tier]["highwater/tier"] == "orders"
    assert "highwater/tier" not in asked[main]
    assert "dagster/priority" not in asked[main]


def test_while_the_breaker_is_open_slices_are_planned_and_read_and_no_more(ticking: Callable[..., Ticking]) -> None:
    """Retention must not take what Kafka could still give."""
    ours = ticking(records=20)
    later = Circuit(since=datetime.now(UTC), why="poison", until=datetime.now(UTC) + timedelta(hours=1))
    ours.ledger.breakers.update("orders", (), lambda *_: (later, ()))
    raw = [build_table_key(ours.stream, "raw")]
    planned = ours.tick("planner")
    assert [request.asset_selection for request in planned.run_requests] == [raw]
    tiers_of(ours, records=10)
    time.sleep(1.3)
    retried = ours.tick("dlq_retries")
    assert [request.asset_selection for request in retried.run_requests] == [raw]
    assert len(ours.keys()) == 3
    [record] = ours.instance.fetch_observations(build_topic_key(ours.stream), limit=1).records
    assert "open since" in str(record.asset_observation.metadata["breaker"].value)
    assert not ours.tick("planner").run_requests
    assert "Slices are taken into raw" in str(ours.tick("planner").skip_message)
