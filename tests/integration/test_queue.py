"""However many retries are due, they delay a new slice by one run at the most: by Dagster's own queue.

The queue's daemon decides here as it does in a deployment, with the limits of our dagster.yaml; no run is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster import instance_for_test

from highwater.orchestration.run_tags import PUBLISH, RETRY
from tests.helpers.run_queue import TIER, add_runs, list_dequeued

# Seconds of processor each.
pytestmark = pytest.mark.slow

# More than a page of the queue, 100, so that a new slice is on a later one than all of the first.
RETRIES = 110
OURS = yaml.safe_load((Path(__file__).parents[2] / "dagster.yaml").read_text())


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with instance_for_test(temp_dir=str(tmp_path), overrides={"concurrency": OURS["concurrency"]}) as made:
        yield made


def test_a_new_slice_goes_before_all_retries_that_wait(instance: dg.DagsterInstance) -> None:
    retries = add_runs(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    [main] = add_runs(instance, ["orders@0000000"], "plan", dg.DagsterRunStatus.QUEUED)
    first, *others = list_dequeued(instance)
    assert first == main, "it came last"
    assert len(others) == 1, "of all retries one runs beside it"
    assert others[0] in retries


def test_a_retry_that_runs_leaves_room_for_new_slices(instance: dg.DagsterInstance) -> None:
    add_runs(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    add_runs(instance, [f"{TIER}@9999999"], RETRY, dg.DagsterRunStatus.STARTED)
    mains = add_runs(instance, [f"orders@{n:07d}" for n in range(5)], "plan", dg.DagsterRunStatus.QUEUED)
    assert list_dequeued(instance) == mains[:2], "a stream has three places, retries one of them"


def test_where_all_places_are_taken_a_new_slice_is_next(instance: dg.DagsterInstance) -> None:
    """So it waits for one run at the most, whichever ends first."""
    add_runs(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    add_runs(instance, [f"{TIER}@9999999"], RETRY, dg.DagsterRunStatus.STARTED)
    running = add_runs(instance, ["orders@0000000", "orders@0000001"], "plan", dg.DagsterRunStatus.STARTED)
    [main] = add_runs(instance, ["orders@0000002"], "plan", dg.DagsterRunStatus.QUEUED)
    assert list_dequeued(instance) == []
    instance.report_run_canceled(instance.get_run_by_id(running[0]))  # type: ignore[arg-type]
    assert list_dequeued(instance) == [main]


@pytest.mark.parametrize("purpose", [RETRY, PUBLISH])
def test_a_backlog_that_runs_leaves_a_place_for_what_is_retried_or_published(
    instance: dg.DagsterInstance, purpose: str
) -> None:
    """However long it is: a retry that is due would wait for its end, and it may last for hours."""
    add_runs(instance, [f"orders@{n:07d}" for n in range(2)], "plan", dg.DagsterRunStatus.STARTED)
    add_runs(instance, [f"orders@{n:07d}" for n in range(2, RETRIES)], "repair", dg.DagsterRunStatus.QUEUED)
    key = f"{TIER}@0000000" if purpose == RETRY else "orders@0000000"
    wanted = add_runs(instance, [key], purpose, dg.DagsterRunStatus.QUEUED)
    assert list_dequeued(instance) == wanted
