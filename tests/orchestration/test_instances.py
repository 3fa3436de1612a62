"""A new Dagster instance, or two on one ledger: what they request, and where that is reported. Without Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from sqlalchemy import event

from highwater.orchestration.build import build_defs
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing import stream_ticks
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.helpers.breaking import open_repairing
from tests.helpers.lagging import FakeAgedTopics
from tests.helpers.repairing import FOUR, ONE, THREE, TWO, Repairing
from tests.helpers.support import make_stream

STREAM = make_stream("orders")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Repairing]:
    """Three older slices, the first two in raw, and one that this tick planned."""
    with open_repairing(tmp_path, in_raw=2) as made:
        yield made


def requested(world: Repairing) -> list[str]:
    keys = [one.key for one in (ONE, TWO, THREE, FOUR)]
    asked, lines = stream_ticks.select_keys_to_request(world.ledger, world.resources, STREAM, keys, [FOUR])
    left = len(keys) - len(asked)
    assert bool(left) == bool(lines)
    assert all(f"no key of {left} slices: the keys are added" in line for line in lines)
    return asked


def test_only_uncommitted_slices_unknown_to_dagster_are_requested(world: Repairing) -> None:
    """A run was requested for each slice of the history, and all were validated again by today's reference table."""
    assert requested(world) == [THREE.key, FOUR.key]
    world.ledger.exhausted_slices.add("orders", {THREE.key: 6}, datetime.now(UTC))
    assert requested(world) == [FOUR.key], "a person releases what repair gave up"


@pytest.mark.parametrize("how", ["not readable", "not mounted"])
def test_unavailable_lake_makes_no_slice_missing(world: Repairing, how: str) -> None:
    """I15: slices are not requested because nobody can see them; what was planned just now is."""
    if how == "not readable":
        for file in (Path(world.lake.build_table_path("orders", "raw")) / "_delta_log").glob("*.json"):
            file.write_text("no JSON")
    else:
        world.ledger.allocate_attempts([ONE.key])
        world.lake = Lake(str(Path(world.lake.root).parent / "elsewhere"))
    assert requested(world) == [FOUR.key]


def test_every_sensor_records_its_instance_for_each_stream(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deployments on one ledger did each other's work, and nothing reported it."""
    opened = SimpleNamespace(open=lambda: ledger)
    resources = {"kafka": opened, "lake": opened, "ledger": opened, "spark": opened}
    monkeypatch.setenv("DAGSTER_HOME", "/srv/dagster")
    ours = [one for one in build_defs(streams=[STREAM]).sensors or () if one.name not in {"alerts", "publisher"}]
    assert ours
    for number, sensor in enumerate(ours, 1):
        needed = {name: resources[name] for name in sensor.required_resource_keys}
        with dg.DagsterInstance.ephemeral() as instance, suppress(Exception):  # what the tick does then is no matter
            sensor.evaluate_tick(dg.build_sensor_context(instance=instance, resources=needed))
        found = ledger.instances.list_for_stream("orders")
        assert len(found) == number, sensor.name
        assert found[-1].place.endswith(":/srv/dagster")


def test_an_instance_of_many_streams_is_one_update_a_minute(ledger: Ledger) -> None:
    """100 idle streams were 100 deleted and 100 inserted rows a minute."""
    streams, now, counts = [f"s{n}" for n in range(100)], datetime.now(UTC), Counter[str]()
    ledger.instances.record(streams, "i", "here", now)

    def count(_: Any, __: Any, statement: str, *___: Any) -> None:
        counts[statement.split(maxsplit=1)[0]] += 1

    event.listen(ledger.database.engine, "before_cursor_execute", count)
    for seconds in range(20, 620, 20):
        ledger.instances.record(streams, "i", "here", now + timedelta(seconds=seconds))
    assert (counts["UPDATE"], counts["INSERT"], counts["DELETE"]) == (10, 0, 0)
    [one] = ledger.instances.list_for_stream("s99")
    assert (one.first_seen, one.last_seen) == (now, now + timedelta(minutes=10))
    ledger.instances.record([*streams, "new"], "i", "there", now + timedelta(minutes=11))
    [one] = ledger.instances.list_for_stream("s99")
    assert (one.place, one.first_seen) == ("there", now), "it is the same instance"
    ledger.instances.record(streams, "i", "there", now + timedelta(minutes=30))
    assert [one.first_seen for one in ledger.instances.list_for_stream("s99")] == [now + timedelta(minutes=30)]


def test_status_and_alert_report_two_instances_at_once(ledger: Ledger, tmp_path: Path) -> None:
    kafka, lake, now = cast("Any", FakeAgedTopics()), Lake(str(tmp_path / "lake")), datetime.now(UTC)

    def reported() -> tuple[list[str], int, bool]:
        status = read_stream_status(ledger, kafka, STREAM, {})
        lines = [line for line in status.lines if "is not alone" in line]
        assert [one["id"] for one in status.to_plain()["instances"]] == [one.id for one in status.instances]
        measured = alerts._measure_stream(ledger, kafka, lake, STREAM, [], [])
        [alert] = [one for one in measured if one.what == "Dagster instances"]
        assert ("stop the sensors" in alert.remedy) is alert.over
        assert all(one.id in alert.value for one in status.instances)
        return [one.id for one in status.instances], len(lines), alert.over

    def seen(name: str, minutes_ago: float) -> None:
        ledger.instances.record(["orders"], name, f"{name}.example:/dagster", now - timedelta(minutes=minutes_ago))

    seen("old", 3)
    assert reported() == ([], 0, False)
    seen("new", 2)
    assert reported() == ([], 0, False), "it may have replaced the old one"
    seen("old", 1)
    seen("new", 0)
    assert reported() == (["old", "new"], 2, True)
