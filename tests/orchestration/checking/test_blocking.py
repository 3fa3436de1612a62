"""Checks that block: nothing downstream of what they judged is committed, in the same run and in later ones.

The stages are left out: what they would commit is planted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from assets.streams.payments import STREAM as PAYMENTS
from highwater.declaration import Severity
from highwater.declaration_parts import CAN_BLOCK, CHECK_SEVERITIES
from highwater.errors import BlockedError, DeclarationError
from highwater.orchestration import stream_assets
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking import checks
from highwater.orchestration.checking.blocking import ensure_not_blocked
from highwater.orchestration.checking.check_results import count_failing_slices
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.tables import select_stages
from tests.helpers.stage_runs import StageRuns
from tests.helpers.version_tables import FIRST, SECOND, event

# Seconds of processor each.
pytestmark = pytest.mark.slow

BLOCKS = replace(ORDERS, checks={"transitions_allowed": Severity.BLOCK})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageRuns]:
    with dg.DagsterInstance.ephemeral() as instance:
        found = StageRuns(tmp_path, instance)
        monkeypatch.setattr(stream_assets, "load_stage", found.stage)
        # Their tables are not planted; what they judge is judged elsewhere.
        left_out = {
            "offsets_accounted_for",
            "events_as_recorded",
            "slices_tile",
            "rejects_published",
            "metrics_follow_events",
        }
        stored = tuple(one for one in checks.CHECKS if not left_out & set(one.what))
        monkeypatch.setattr(checks, "CHECKS", stored)
        yield found


def test_blocking_check_stops_downstream_tables_of_this_and_later_runs(runs: StageRuns) -> None:
    every = select_stages(BLOCKS)
    assert runs.run(BLOCKS, FIRST)
    assert sorted(runs.taken) == sorted(every)
    runs.planted.events += [event(4, 1, "x", status="paid")]
    runs.planted.write()
    assert not runs.run(BLOCKS, FIRST)
    assert runs.taken == ["raw", "events"]
    assert runs.failed == ["orders_events_versions_along_offsets"], "what is downstream does not even begin"
    assert count_failing_slices(runs.instance, BLOCKS) == {"transitions_allowed": 1}
    for table in ("rejects", "dlq", "current", "metrics"):
        assert not runs.run(BLOCKS, FIRST, table)
        assert runs.taken == [], "Dagster's blocking ends with the run"
    assert runs.run(BLOCKS, SECOND), "another slice is not kept"
    assert runs.run(ORDERS, FIRST), "by another declaration it is a warning"
    assert sorted(runs.taken) == sorted(every)


def test_fixed_slices_block_no_more(runs: StageRuns) -> None:
    sound = list(runs.planted.events)
    runs.planted.events += [event(4, 1, "x", status="paid")]
    runs.planted.write()
    assert not runs.run(BLOCKS, FIRST)
    runs.planted.events = sound
    runs.planted.write()
    assert runs.run(BLOCKS, FIRST)
    assert count_failing_slices(runs.instance, BLOCKS) == {}


def test_a_warning_is_no_failing_check(runs: StageRuns) -> None:
    """One that is declared to be, and one of a check that is an error elsewhere: the first version may still come."""
    runs.planted.events += [event(4, 1, "x", status="paid"), event(5, 3, "y"), event(24, 2, "z")]
    runs.planted.write()
    runs.instance.add_dynamic_partitions("orders_slices", ["orders@0000002"])
    third = runs.planted.lake.load_slice_commits("orders", "events")["orders@0000002"]
    runs.ledger.add([third.slice_])
    assert runs.run(ORDERS, FIRST)
    assert runs.run(ORDERS, "orders@0000002")
    assert count_failing_slices(runs.instance, ORDERS) == {"no_version_missing": 1}


def test_declared_warnings_fail_on_request() -> None:
    """An audit follows the declaration; tests and soaks hold that no fault of the pipeline hides behind it."""
    wrong, mild, sound = CheckResult(False, "x"), CheckResult(False, "y", warning=True), CheckResult(True, "z")
    found = {"slices_tile": {"a": wrong, "b": sound, "c": mild}, "transitions_allowed": {"a": wrong, "c": mild}}
    hard, declared = ("slices_tile", "a", wrong), ("transitions_allowed", "a", wrong)
    assert [*checks.select_failures(ORDERS, found, warned=False)] == [hard]
    assert [*checks.select_failures(ORDERS, found, warned=True)] == [hard, declared]


@pytest.mark.parametrize(("severity", "blocks"), [("WARN", False), ("ERROR", True)])
def test_a_result_that_is_a_warning_blocks_nothing(runs: StageRuns, severity: str, blocks: bool) -> None:
    """Within a run Dagster lets it pass; a later run was kept by it."""
    reported = dg.AssetCheckEvaluation(
        asset_key=build_table_key(BLOCKS, "events"),
        check_name="transitions_allowed",
        passed=False,
        severity=dg.AssetCheckSeverity[severity],
        partition=FIRST,
    )
    runs.instance.report_runless_asset_event(reported)
    with pytest.raises(BlockedError) if blocks else nullcontext():
        ensure_not_blocked(runs.instance, BLOCKS, "rejects", [FIRST])


def test_every_check_that_can_block_is_built_into_the_job() -> None:
    """A check that needs what is downstream of its table would close a circle."""
    stream = replace(ORDERS, checks=dict.fromkeys(CAN_BLOCK, Severity.BLOCK))
    graph = build_defs(streams=[stream]).resolve_job_def("orders_slice").asset_layer.asset_graph
    assert {key.name for key in graph.asset_check_keys if graph.get(key).blocking} == CAN_BLOCK
    plain = build_defs(streams=[ORDERS]).resolve_job_def("orders_slice").asset_layer.asset_graph
    assert not [key for key in plain.asset_check_keys if plain.get(key).blocking]


def test_the_declaration_speaks_of_the_checks_that_there_are() -> None:
    assert set(CHECK_SEVERITIES) == {name for one in checks.CHECKS for name in one.what}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown check": ({"checks": {"versions": Severity.WARN}}, "checks: unknown check 'versions'"),
    "one that cannot block": ({"checks": {"no_version_missing": Severity.BLOCK}}, "no_version_missing cannot block"),
    "a first version of a time": ({"first_version": 1}, "first_version is for versions that"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_that_contradicts_itself_is_refused(name: str) -> None:
    changes, reported = WRONG[name]
    with pytest.raises(DeclarationError, match=reported):
        replace(PAYMENTS, **changes)
