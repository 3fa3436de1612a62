"""The runs that sensors request around a held slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest

from highwater.declaration import Stream
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.sensing import stream_ticks
from highwater.orchestration.sensing.ordered_processing import (
    must_wait_for_earlier,
)
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import Judgement
from tests.helpers.breaking import open_repairing
from tests.helpers.commits import commit_empty
from tests.helpers.holding import FOUND, NOON, PARK, STREAM
from tests.helpers.repairing import FOUR, ONE, THREE, TWO, Repairing, open_breaker
from tests.helpers.support import FakeSilentKafka, make_stream


@pytest.fixture
def repairing(tmp_path: Path) -> Iterator[Repairing]:
    with open_repairing(tmp_path, STREAM) as made:
        yield made


def test_repair_asks_for_the_first_and_what_follows_it_in_one_run(repairing: Repairing) -> None:
    assert repairing.tick()[0] == [([ONE.key, TWO.key, THREE.key, FOUR.key], False, "repair")]


def test_repair_asks_for_a_held_slice_alone_and_reads_on(repairing: Repairing) -> None:
    repairing.ledger.holds.note("orders", ONE.key, FOUND, NOON)
    requests, tick = repairing.tick()
    assert sorted(requests) == [([ONE.key], False, "repair"), ([FOUR.key], True, "repair")]
    assert "orders@0000001 is held since 2026-03-01 12:00:00 UTC by 3 records" in tick.message
    assert "2 wait for their turn" in tick.message
    repairing.fail_often(ONE.key)
    requests, tick = repairing.tick()
    assert requests == [([FOUR.key], True, "repair")], "its next attempt is not due"
    assert "the next is asked for at" in tick.message
    assert "exhausted" not in tick.message
    soon = datetime.now(UTC) + timedelta(seconds=1)
    assert repairing.ledger.holds.release(ONE.key, replace(PARK, at=soon))
    assert repairing.tick()[0] == [([ONE.key, TWO.key, THREE.key, FOUR.key], False, "repair")]


def test_repair_ends_the_hold_of_a_slice_that_was_decided(repairing: Repairing) -> None:
    """The run that decided it may have been killed before it said so."""
    repairing.ledger.holds.note("orders", ONE.key, FOUND, NOON)
    commit_empty(repairing.lake, [ONE], "events")
    repairing.tick()
    assert repairing.ledger.holds.read_open("orders") == []


def test_the_probe_of_the_breaker_is_the_first_in_its_turn(repairing: Repairing) -> None:
    """Elsewhere one that was never refused would be tried before it."""
    refused = Judgement(ONE.key, "orders", "run", NOON, 100, 100, refused=True)
    repairing.ledger.breakers.update("orders", [ONE.key], lambda circuit, _: (circuit, [refused]))
    open_breaker(repairing.ledger)
    assert ([ONE.key], False, "probe") in repairing.tick()[0]
    commit_empty(repairing.lake, [ONE], "events", "rejects", "current")
    assert ([TWO.key], False, "probe") in repairing.tick()[0]


def test_the_planner_asks_for_raw_alone_behind_what_is_not_done(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.add([ONE, TWO])
    planned = SimpleNamespace(slices=[TWO], lines=[], errors={}, skipped={}, state=None)
    monkeypatch.setattr("highwater.orchestration.sensing.topic_planner.Planner.tick", lambda *_, **__: planned)
    monkeypatch.setattr(stream_ticks, "_with_observation", lambda tick, *_: tick)
    resources = SimpleNamespace(
        ledger=SimpleNamespace(open=lambda: ledger), kafka=SimpleNamespace(open=FakeSilentKafka)
    )
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        instance.add_dynamic_partitions("orders_slices", [ONE.key])

        def raw_alone(stream: Stream = STREAM) -> bool:
            [request] = stream_ticks.plan_stream(instance, resources, stream).requests
            assert request.keys == (TWO.key,)
            return request.raw_alone

        assert raw_alone()
        assert not raw_alone(make_stream("orders"))
        done = dg.AssetMaterialization(build_table_key(STREAM, "current"), partition=ONE.key)
        instance.report_runless_asset_event(done)
        assert not raw_alone()
        ledger.holds.note("orders", ONE.key, FOUND, NOON)
        assert raw_alone()
        assert not must_wait_for_earlier(instance, ledger, STREAM, [ONE.key], []), "the first of all"
