"""Runs in Dagster's queue, and the runs that its daemon would launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon

from highwater.declaration import Stream
from highwater.orchestration.sensing.run_places import assign_places
from highwater.orchestration.sensing.run_requests import build_first_requests
from highwater.orchestration.sensing.stream_ticks import Tick, build_run_requests
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
TIER = STREAM.tier_topics[0]
# The code location of a run; a run without one is not queued.
_LOCATION = RegisteredCodeLocationOrigin("ours")
ORIGIN = RemoteJobOrigin(RemoteRepositoryOrigin(_LOCATION, "__repository__"), "orders_slice")


def add_runs(
    instance: dg.DagsterInstance,
    keys: Sequence[str],
    purpose: str,
    status: dg.DagsterRunStatus,
    stream: Stream = STREAM,
) -> list[str]:
    """A run for each key, with the tags that a tick requests it by."""
    found = []
    tick = Tick(requests=build_first_requests(keys, keys, 1, purpose))
    for request in build_run_requests(stream, assign_places(instance, {stream.name: tick})[stream.name].requests):
        run = dg.DagsterRun("orders_slice", tags=dict(request.tags), status=status, remote_job_origin=ORIGIN)
        instance.add_run(run)
        found.append(run.run_id)
    return found


def list_dequeued(instance: dg.DagsterInstance) -> list[str]:
    """Runs that the queue would launch now, in its order."""
    daemon: Any = QueuedRunCoordinatorDaemon(interval_seconds=1)
    config: Any = instance.get_concurrency_config()
    return [run.run_id for run in daemon._get_runs_to_dequeue(instance, config, fixed_iteration_time=None)]
