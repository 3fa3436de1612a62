"""Repair: slices that failed or that Dagster and the lake disagree about are requested or reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from highwater.orchestration.asset_keys import TABLES, build_table_key
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.orchestration.sensing import dead_workers, repairing, stream_ticks
from highwater.orchestration.sensing.materialization_sync import read_missing_events
from highwater.orchestration.sensing.repairing import repair
from highwater.orchestration.sensing.resting_rounds import RestingStream
from highwater.orchestration.sensing.rounds import Cursor
from highwater.slices import Slice
from tests.helpers import holding
from tests.helpers.breaking import open_repairing
from tests.helpers.repairing import FOUR, ONE, THREE, TWO, Repairing, open_breaker
from tests.helpers.sensor_ticks import SOON, end_grace
from tests.helpers.support import make_stream
from tests.helpers.ticking import Ticking


@pytest.fixture
def planned(ticking: Callable[..., Ticking]) -> Ticking:
    """Planned slices; repair may request each that no run takes."""
    ours = ticking()
    ours.tick("planner")
    end_grace(ours)
    return ours


def test_a_run_in_flight_keeps_repair_away(planned: Ticking) -> None:
    ours = planned
    keys = ours.keys()
    ours.run(keys[:3], dg.DagsterRunStatus.STARTED)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [keys[3]]


def test_a_stream_whose_slices_all_have_runs_is_left_to_them(planned: Ticking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick looked at each stream of a full queue, and could decide nothing."""
    monkeypatch.setattr(repairing, "compute_longest_wait", lambda _, __, slices, most: most / len(slices))
    ours = planned
    keys, slices = ours.keys(), ours.ledger.list_slices("orders")
    ours.run(keys[1:], dg.DagsterRunStatus.STARTED)

    def look() -> tuple[int, timedelta | None]:
        requests = ours.tick("repair").run_requests
        rest = RestingStream.parse(Cursor.parse(ours.cursors["repair"]).streams.get("orders"))
        return len(requests), None if rest is None else rest.until - rest.since

    assert look() == (1, None), "one has no run"
    ours.run(keys[:1], dg.DagsterRunStatus.QUEUED)
    requests, wait = look()
    assert requests == 0
    assert wait is not None
    assert abs(wait - repairing.WORKING_REST / len(keys)) < timedelta(seconds=2), "all are unread"
    ours.fill(slices[:1], *[table.name for table in TABLES])
    ours.cursors["repair"] = None
    assert look() == (0, None), "Dagster lacks what one brought"
    assert look()[1] is not None, "and its run is under way"


@pytest.mark.parametrize("ordered", [False, True])
def test_what_needs_a_look_itself_gets_one_in_the_next_tick(
    ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairing, "compute_longest_wait", lambda _, __, ___, most: most)
    with open_repairing(tmp_path, holding.STREAM if ordered else make_stream("orders"), in_raw=0) as ours:

        def look() -> tuple[bool, timedelta | None]:
            begin = datetime.now(UTC)
            _, tick = ours.tick()
            return tick.idle, None if tick.until is None else round_to_minutes(tick.until - begin)

        assert look() == (False, None)
        run(ours, ONE)
        assert look() == (False, None), "three have no run"
        run(ours, TWO, THREE)
        assert look() == (False, None), "the last one has no run"
        run(ours, FOUR)
        assert look() == (False, timedelta(minutes=2)), "all have runs"
        open_breaker(ours.ledger)
        assert look() == (False, None), "the breaker's time ends without a run"


def test_pages_follow_each_other_in_ticks_where_nothing_is_left_to_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairing, "compute_longest_wait", lambda _, __, ___, most: most)
    monkeypatch.setattr(stream_ticks, "PAGE", 2)
    with open_repairing(tmp_path, slices=(ONE, TWO, THREE), in_raw=0) as ours:
        seen = repairing._look

        def look(*given: Any) -> Any:
            return replace(seen(*given), lacking={}, lost=[])

        monkeypatch.setattr(repairing, "_look", look)
        first = ours.tick()[1]
        assert (first.idle, first.until, first.cursor) == (False, None, TWO.key)
        last = repair(ours.instance, ours.resources, ours.stream, first.cursor)
        assert (last.idle, last.cursor) == (True, stream_ticks.OLDEST)


def test_what_dagster_got_since_the_look_is_not_reported_again(tmp_path: Path) -> None:
    with open_repairing(tmp_path, in_raw=2) as ours:
        there = read_attempts(ours.lake, ours.stream, [ONE.key, TWO.key])
        key = build_table_key(ours.stream, "raw")
        ours.instance.report_runless_asset_event(dg.AssetMaterialization(key, partition=ONE.key))
        found = read_missing_events(ours.instance, ours.lake, ours.stream, [ONE, TWO], there, {}, 10)
        assert [(event.asset_key, event.partition) for event in found] == [(key, TWO.key)]


def run(repairing: Repairing, *slices: Slice) -> None:
    for slice_ in slices:
        tags = {"dagster/partition": slice_.key, "highwater/stream": "orders"}
        repairing.instance.add_run(dg.DagsterRun("orders_slice", tags=tags, status=dg.DagsterRunStatus.STARTED))


def round_to_minutes(lasts: timedelta) -> timedelta:
    return timedelta(minutes=round(lasts / timedelta(minutes=1)))


@pytest.mark.slow
def test_a_run_whose_worker_is_gone_is_ended_and_its_slices_are_asked_for(
    planned: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker and code server killed together left it started for ever, and its slices in flight."""
    ours = planned
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


def test_a_backfill_outside_of_the_job_counts_as_work_too(planned: Ticking) -> None:
    ours = planned
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


def test_slices_only_the_lake_holds_are_reported_and_not_requested(
    planned: Ticking,
) -> None:
    """Repair asks the lake, not only run records."""
    ours = planned
    slices = ours.ledger.list_slices("orders")
    ours.fill(slices[:2], *[table.name for table in TABLES])
    result = ours.tick("repair")
    assert [r.tags["dagster/asset_partition_range_start"] for r in result.run_requests] == [slices[2].key]
    for table in TABLES:
        stored = ours.instance.get_materialized_partitions(build_table_key(ours.stream, table.name))
        assert stored == {slice_.key for slice_ in slices[:2]}
    again = ours.tick("repair")
    assert not again.asset_events


def test_forgotten_materializations_are_reported_as_by_the_run(ticking: Callable[..., Ticking]) -> None:
    """It once had its offsets and its attempt alone, which leaves holes in every plot."""
    ours = ticking(records=10)
    ours.tick("planner")
    end_grace(ours)
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
    planned: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tick of repair failed by it from then on, so that nothing of the stream was requested again."""
    ours = planned
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
    planned: Ticking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be done failed those that were requested with it, until all of them were exhausted."""
    ours = planned
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


def test_slices_reprocessed_since_the_merge_are_reported_without_new_numbers(
    ticking: Callable[..., Ticking],
) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    end_grace(ours)
    [slice_] = ours.ledger.list_slices("orders")
    ours.fill([slice_], "raw", "current", rows=3)
    ours.fill([slice_], "events", rows=7, attempt=2, rejects_malformed=2)
    reported = {event.asset_key.path[-1]: event.metadata for event in ours.tick("repair").asset_events}
    assert (reported["current"]["attempt"].value, reported["events"]["attempt"].value) == (1, 2)
    assert "rejects/malformed" not in reported["current"]


def test_a_slice_whose_rejects_do_not_follow_its_events_is_asked_for(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    end_grace(ours)
    slices = ours.ledger.list_slices("orders")
    ours.fill(slices, "raw", "rejects")
    ours.fill(slices, "events", "current", attempt=2)
    requests = ours.tick("repair").run_requests
    assert [r.tags["dagster/asset_partition_range_start"] for r in requests] == [slices[0].key]


def test_a_lake_that_cannot_be_read_is_not_an_empty_one(planned: Ticking) -> None:
    """I15: repair skips with the reason; it neither reports nor requests."""
    ours = planned
    slices = ours.ledger.list_slices("orders")
    ours.fill(slices, "raw")
    log = Path(ours.lake.build_table_path("orders", "raw")) / "_delta_log"
    for file in log.glob("*.json"):
        file.write_text("no JSON")
    result = ours.tick("repair")
    assert not result.run_requests
    assert "lake could not be read" in result.skip_message


def test_slices_lost_by_the_lake_are_requested(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    end_grace(ours)
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
    end_grace(ours)
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
    end_grace(ours)
    ours.instance.add_dynamic_partitions("orders_slices", ["orders@' OR 1=1"])
    context = ours.evaluate("repair")
    assert len(context.run_requests) == 1
    lines = repairing.repair(ours.instance, SimpleNamespace(**(ours.defs.resources or {})), ours.stream, None).lines
    assert "1 no slices of the stream by the ledger, delete their keys from Dagster: orders@' OR 1=1" in lines


def test_a_key_of_another_stream_is_named_and_not_requested(ticking: Callable[..., Ticking]) -> None:
    """Its runs can only fail, and repair once asked for them until it gave up."""
    ours = ticking(records=10)
    ours.tick("planner")
    end_grace(ours)
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
