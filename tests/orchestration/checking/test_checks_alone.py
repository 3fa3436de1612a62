"""All checks of a stream run by themselves, as the UI starts them: for one slice, and for a range of slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking import gap_checks
from highwater.orchestration.checking.check_results import check_keys
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from highwater.topic_rules import Setting
from tests.helpers.support import make_stream
from tests.helpers.world import FIRST, World

# Seconds of processor each.
pytestmark = pytest.mark.slow

STREAM = make_stream("orders", metrics=ORDERS.metrics)


class Scene:
    """A world's tables as Dagster sees them, without Spark."""

    def __init__(self, world: World, instance: dg.DagsterInstance) -> None:
        self.world, self.instance = world, instance
        world.write()
        instance.add_dynamic_partitions("orders_slices", world.keys)

    def run(self, **how: Any) -> dict[str, dict[str, bool]]:
        """The results of all checks, by name and slice, of a run that has no asset in it."""
        opened = {"kafka": self.world.topics, "ledger": self.world.ledger, "lake": self.world.lake}
        resources: dict[str, Any] = {name: SimpleNamespace(open=lambda one=one: one) for name, one in opened.items()}
        defs = build_defs(streams=[STREAM], resources=resources)
        wanted = frozenset(check_keys(STREAM))
        job = defs.resolve_implicit_global_asset_job_def().get_subset(
            asset_selection=frozenset(), asset_check_selection=wanted
        )
        done = job.execute_in_process(instance=self.instance, **how)
        assert done.success
        assert done.get_asset_materialization_events() == []
        found: dict[str, dict[str, bool]] = {key.name: {} for key in wanted}
        for one in done.get_asset_check_evaluations():
            if one.partition is not None:
                found[one.check_name][one.partition] = one.passed
        return found


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    def settings(*_: object) -> Mapping[str, Setting]:
        return {"cleanup.policy": Setting("delete", "DYNAMIC_TOPIC_CONFIG")}

    monkeypatch.setattr(gap_checks, "fetch_topic_settings", settings)
    with dg.DagsterInstance.ephemeral() as instance:
        yield Scene(World(tmp_path, 2, STREAM), instance)


def test_all_checks_run_alone_for_one_slice(scene: Scene) -> None:
    found = scene.run(partition_key=FIRST.key)
    assert found == {key.name: {FIRST.key: True} for key in check_keys(STREAM)}
    lacking = STREAM.checks.keys() - found.keys()
    assert lacking == {"events_published", "record_keys_as_declared"}, "it publishes nothing, and its keys are strict"


def test_all_checks_run_alone_for_a_range_and_report_each_slice(scene: Scene) -> None:
    """A fault of one slice is reported for it, and for no other."""
    [second] = [key for key in scene.world.keys if key.endswith("1")]
    scene.world.at("current", scene.world.copies[1], (1, 3)).update(version=7)
    scene.world.write()
    keys = scene.world.keys
    found = scene.run(tags={RANGE_START: keys[0], RANGE_END: keys[-1]})
    assert {name: sorted(by) for name, by in found.items()} == {name: sorted(keys) for name in found}
    wrong = {(name, key) for name, by in found.items() for key, passed in by.items() if not passed}
    assert wrong == {("current_follows_events", second)}
