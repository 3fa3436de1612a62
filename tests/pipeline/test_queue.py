"""However many retries are due, they delay a new slice by one run at the most: by Dagster's own queue.

The queue's daemon decides here as it does in a deployment, with the limits of our dagster.yaml; no run is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster import instance_for_test
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from highwater.orchestration.run_tags import PUBLISH, RETRY
from highwater.orchestration.sensing.run_requests import first_requests
from highwater.orchestration.sensing.stream_ticks import run_requests
from tests.support import make_stream

# Seconds of processor each.
pytestmark = pytest.mark.slow

STREAM = make_stream("orders")
TIER = STREAM.tier_topics[0]
# More than a page of the queue, 100, so that a new slice is on a later one than all of the first.
RETRIES = 110
# Whose code it is; a run without that is not queued.
_LOCATION = RegisteredCodeLocationOrigin("ours")
ORIGIN = RemoteJobOrigin(RemoteRepositoryOrigin(_LOCATION, "__repository__"), "orders_slice")
OURS = yaml.safe_load((Path(__file__).parents[2] / "dagster.yaml").read_text())


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with instance_for_test(temp_dir=str(tmp_path), overrides={"concurrency": OURS["concurrency"]}) as made:
        yield made


def add(instance: dg.DagsterInstance, keys: Sequence[str], purpose: str, status: dg.DagsterRunStatus) -> list[str]:
    """A run for each key, with the tags that a tick requests it by."""
    found = []
    for request in run_requests(STREAM, first_requests(keys, keys, 1, purpose)):
        run = dg.DagsterRun("orders_slice", tags=dict(request.tags), status=status, remote_job_origin=ORIGIN)
        instance.add_run(run)
        found.append(run.run_id)
    return found


def dequeued(instance: dg.DagsterInstance) -> list[str]:
    """What the queue would launch now, in its order."""
    daemon: Any = QueuedRunCoordinatorDaemon(interval_seconds=1)
    config: Any = instance.get_concurrency_config()
    return [run.run_id for run in daemon._get_runs_to_dequeue(instance, config, fixed_iteration_time=None)]


def test_a_new_slice_goes_before_all_retries_that_wait(instance: dg.DagsterInstance) -> None:
    retries = add(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    [main] = add(instance, ["orders@0000000"], "plan", dg.DagsterRunStatus.QUEUED)
    first, *others = dequeued(instance)
    assert first == main, "it came last"
    assert len(others) == 1, "of all retries one runs beside it"
    assert others[0] in retries


def test_a_retry_that_runs_leaves_room_for_new_slices(instance: dg.DagsterInstance) -> None:
    add(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    add(instance, [f"{TIER}@9999999"], RETRY, dg.DagsterRunStatus.STARTED)
    mains = add(instance, [f"orders@{n:07d}" for n in range(5)], "plan", dg.DagsterRunStatus.QUEUED)
    assert dequeued(instance) == mains[:2], "a stream has three places, retries one of them"


def test_where_all_places_are_taken_a_new_slice_is_next(instance: dg.DagsterInstance) -> None:
    """So it waits for one run at the most, whichever ends first."""
    add(instance, [f"{TIER}@{n:07d}" for n in range(RETRIES)], RETRY, dg.DagsterRunStatus.QUEUED)
    add(instance, [f"{TIER}@9999999"], RETRY, dg.DagsterRunStatus.STARTED)
    running = add(instance, ["orders@0000000", "orders@0000001"], "plan", dg.DagsterRunStatus.STARTED)
    [main] = add(instance, ["orders@0000002"], "plan", dg.DagsterRunStatus.QUEUED)
    assert dequeued(instance) == []
    instance.report_run_canceled(instance.get_run_by_id(running[0]))  # type: ignore[arg-type]
    assert dequeued(instance) == [main]


@pytest.mark.parametrize("purpose", [RETRY, PUBLISH])
def test_a_backlog_that_runs_leaves_a_place_for_what_is_retried_or_published(
    instance: dg.DagsterInstance, purpose: str
) -> None:
    """However long it is: a retry that is due would wait for its end, and it may last for hours."""
    add(instance, [f"orders@{n:07d}" for n in range(2)], "plan", dg.DagsterRunStatus.STARTED)
    add(instance, [f"orders@{n:07d}" for n in range(2, RETRIES)], "repair", dg.DagsterRunStatus.QUEUED)
    key = f"{TIER}@0000000" if purpose == RETRY else "orders@0000000"
    wanted = add(instance, [key], purpose, dg.DagsterRunStatus.QUEUED)
    assert dequeued(instance) == wanted
