"""Slices of tiers: cut when they are due, and requested behind new ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from highwater.breaker import Circuit
from highwater.orchestration.asset_keys import build_table_key, build_topic_key
from highwater.orchestration.sensing import repairing
from highwater.orchestration.sensing.run_places import TURNS_BEFORE_RETRIES
from tests.helpers.sensor_ticks import SOON, fill_tiers, set_tiers
from tests.helpers.ticking import Ticking


def test_due_records_of_a_tier_become_slices_with_lower_priority(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    fill_tiers(ours, records=20)
    # By delays of hours: a machine that hangs lets records of one second be due at once.
    set_tiers(ours, timedelta(hours=1), timedelta(hours=2))
    assert ours.tick("dlq_retries").run_requests == [], "nothing has waited long enough"
    set_tiers(ours, timedelta(seconds=1), timedelta(seconds=2))
    time.sleep(1.3)
    result = ours.tick("dlq_retries")
    [request] = result.run_requests
    first = ours.stream.tier_topics[0]
    assert ours.keys() == [f"{ours.stream.topic}@0000000", f"{first}@0000000", f"{first}@0000001"]
    assert request.tags["dagster/asset_partition_range_start"] == f"{first}@0000000"
    assert request.tags["highwater/tier"] == "orders"
    assert request.tags["dagster/priority"] == str(1 - TURNS_BEFORE_RETRIES), "the first place is 0"
    assert ours.tick("planner").run_requests == [], "the planner leaves the tiers' slices alone"
    again = ours.tick("dlq_retries")
    assert again.run_requests == []
    assert "nothing to do" in str(again.skip_message), "the second tier is not there"


def test_no_tier_is_cut_while_a_run_of_one_waits_in_the_queue(ticking: Callable[..., Ticking]) -> None:
    ours = ticking(records=10)
    fill_tiers(ours, records=10)
    time.sleep(1.3)
    ours.run(["x"], dg.DagsterRunStatus.QUEUED, **{"highwater/tier": "orders"})
    result = ours.tick("dlq_retries")
    assert result.run_requests == []
    assert "wait in the queue" in str(result.skip_message)
    assert ours.ledger.list_slices("orders") == []


def test_a_run_that_nobody_queued_holds_no_tier_back(ticking: Callable[..., Ticking]) -> None:
    """A daemon that died created it: the tiers of its stream were never planned again."""
    ours = ticking(records=10)
    fill_tiers(ours, records=10)
    time.sleep(1.3)
    ours.run(["x"], dg.DagsterRunStatus.NOT_STARTED, **{"highwater/tier": "orders"})
    assert ours.tick("dlq_retries").run_requests


def test_repair_asks_for_slices_of_tiers_in_runs_of_their_own(
    ticking: Callable[..., Ticking], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ticking(records=10)
    ours.tick("planner")
    fill_tiers(ours, records=10)
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
    fill_tiers(ours, records=10)
    time.sleep(1.3)
    retried = ours.tick("dlq_retries")
    assert [request.asset_selection for request in retried.run_requests] == [raw]
    assert len(ours.keys()) == 3
    [record] = ours.instance.fetch_observations(build_topic_key(ours.stream), limit=1).records
    assert "open since" in str(record.asset_observation.metadata["breaker"].value)
    assert not ours.tick("planner").run_requests
    assert "Slices are taken into raw" in str(ours.tick("planner").skip_message)
