"""Exactly once through runs that the daemon launches: workers are killed, and the slices end whole by themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from dev.kills import worker, works
from dev.processes import wait_until
from highwater import settings
from highwater.declaration import Limits
from tests.helpers import crash_support, deployment
from tests.helpers.crash_support import PARTITIONS, TABLES

if TYPE_CHECKING:
    from dagster._core.storage.dagster_run import DagsterRun

    from dev.dagster_services import DagsterServices
    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory

# The minute or two that a test takes was seen to become twenty on a machine with ten runnable processes a core.
pytestmark = [pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(1800)]

# Distinguishes a slice that comes from one that never does: 100 s were seen on a quiet machine of 2 cores.
LONGEST = 480

# What a run's only slice has when its worker is killed, one run each.
MOMENTS: tuple[tuple[str, ...], ...] = ((), ("raw",), ("raw", "events"), ("raw", "events", "rejects"), TABLES)


def started(instance: dg.DagsterInstance) -> list[DagsterRun]:
    return [*instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))]


def key_of(run: DagsterRun) -> str:
    return run.tags["dagster/asset_partition_range_start"]


@pytest.mark.parametrize(
    "moments", [pytest.param((), id="together"), pytest.param(MOMENTS, id="each", marks=pytest.mark.long)]
)
def test_workers_of_launched_runs_are_killed(
    topic: TopicFactory, bootstrap: str, spark_server: SparkConnect, tmp_path: Path, moments: Sequence[tuple[str, ...]]
) -> None:
    ours = deployment.Deployment.make(
        tmp_path,
        topic(partitions=PARTITIONS),
        bootstrap,
        spark_server.remote,
        Limits(max_offsets=80, slices_per_run=1),
        sensors=True,
    )
    held = crash_support.Deployment(ours.stream, tmp_path, bootstrap, {settings.SPARK_REMOTE: spark_server.remote})
    slices = len(moments) + 1
    held.send(72 * slices)
    held.abort()
    with deployment.Running(ours) as services, ours.instance() as instance:
        killed = [kill_when(instance, held, moment) for moment in moments]
        ensure_all_killed_together(services, instance, held)
        wait_until(lambda: settled(instance, ours, held), LONGEST, "the end of all runs")
        statuses = [instance.get_run_by_id(run) for run in killed]
        assert [run.status for run in statuses if run] == [dg.DagsterRunStatus.FAILURE] * len(moments)
    assert len(held.slices()) >= slices - 1
    held.check_whole()


def ensure_all_killed_together(
    services: DagsterServices, instance: dg.DagsterInstance, held: crash_support.Deployment
) -> None:
    """Worker, code server and daemon die at once; started again, the slice is committed without help.

    Nobody is left to report to Dagster that the worker died: such a run was started for ever, and its slices in flight.
    """
    planned = set(held.slices())
    held.send(72)
    run, pid = the_run_of(instance, held, planned)
    assert services.code is not None
    assert group_of(pid) == group_of(services.code.pid)
    services.daemon.kill()
    services.code.kill()
    wait_until(lambda: not works(pid), LONGEST, "the worker's end with its code server")
    assert not ended(instance, run)
    services.code.start()
    services.daemon.start()
    begin = time.monotonic()
    # The lease's minute, a tick of repair, Dagster's retry, a run; `test_dead_workers` holds the promised times.
    wait_until(lambda: is_committed(held, key_of(run), TABLES), LONGEST, f"the commit of {key_of(run)}")
    print(f"committed {time.monotonic() - begin:.0f} s after the start")  # noqa: T201 - for the test's log
    [found] = instance.get_run_records(dg.RunsFilter(run_ids=[run.run_id]))
    assert found.dagster_run.status == dg.DagsterRunStatus.FAILURE
    reported = [str(record.dagster_event and record.dagster_event.message) for record in instance.all_logs(run.run_id)]
    assert any("its lease in the ledger ran out" in text for text in reported)


def the_run_of(
    instance: dg.DagsterInstance, held: crash_support.Deployment, planned: set[str]
) -> tuple[DagsterRun, int]:
    """A run of a slice that was not planned before, and its worker, when `raw` has the slice and `events` has not."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        for run in started(instance):
            pid = worker(instance, run)
            if pid is not None and key_of(run) not in planned and key_of(run) in held.slice_commits("raw"):
                return run, pid
        time.sleep(0.3)
    raise AssertionError("no run took the new slice")


def group_of(pid: int | None) -> int:
    assert pid is not None
    return os.getpgid(pid)


def kill_when(instance: dg.DagsterInstance, held: crash_support.Deployment, moment: tuple[str, ...]) -> str:
    """Kill the worker of a run whose slice is in these tables; returns the run."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        for run in started(instance):
            pid = worker(instance, run)
            if pid is not None and "dagster/parent_run_id" not in run.tags and is_committed(held, key_of(run), moment):
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda run=run: ended(instance, run), LONGEST, f"the end of {run.run_id}")  # type: ignore[misc]
                return run.run_id
        time.sleep(0.3)
    raise AssertionError(f"no run came to {moment}")


def ended(instance: dg.DagsterInstance, run: DagsterRun) -> bool:
    found = instance.get_run_by_id(run.run_id)
    return found is not None and found.is_finished


def is_committed(held: crash_support.Deployment, key: str, tables: tuple[str, ...]) -> bool:
    return all(key in held.slice_commits(table) for table in reversed(tables))


def settled(instance: dg.DagsterInstance, ours: deployment.Deployment, held: crash_support.Deployment) -> bool:
    unfinished = [run for run in instance.get_runs() if not run.is_finished]
    return not unfinished and ours.materialised(instance) == set(held.slices())
