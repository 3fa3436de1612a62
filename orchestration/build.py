"""Assembly: from declared streams to everything that Dagster sees.

What belongs here: putting the parts together. What does not: the parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import dagster as dg

from orchestration.checking.checks import stream_checks
from orchestration.jobs import audit_job, publish_job, slice_job
from orchestration.observation import topic_asset
from orchestration.operating.maintenance_job import maintenance_job, nightly
from orchestration.operating.operator_jobs import (
    acceptance_jobs,
    breaker_jobs,
    erasure_jobs,
    hold_jobs,
    key_jobs,
    parked_jobs,
    pause_jobs,
    rebuild_jobs,
    retry_jobs,
)
from orchestration.resources import default_resources
from orchestration.schedules import daily_audit, hourly
from orchestration.sensors import Ticking, alerts_sensor, published_sensor, stream_sensors
from orchestration.stream_assets import table_assets

if TYPE_CHECKING:
    from highwater.declaration import Stream

# Set by `make up` and `make demo`; in a user's own deployment sensors start stopped.
SENSORS = "HIGHWATER_SENSORS"


def build_defs(
    *,
    streams: Sequence[Stream] | None = None,
    resources: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    pace: float = 1.0,
) -> dg.Definitions:
    """All definitions; building them connects to nothing (I14).

    Args:
        streams: the streams; those declared in `assets/streams/` if None.
        resources: resources that take the place of the default ones, by name.
        environment: `HIGHWATER_SENSORS=running` in it lets sensors start by themselves.
        pace: a factor on the seconds between the ticks of planner, retries and publisher.
    """
    if streams is None:
        from assets.streams import load_streams

        streams = list(load_streams().values())
    ticking = Ticking(environment.get(SENSORS, "").lower() == "running", pace)
    with warnings.catch_warnings():
        # Backfill policies, observable topics and partitions of checks are marked so in Dagster 1.13, which is pinned;
        # the tests hold what we rely on.
        warnings.simplefilter("ignore", dg.BetaWarning)
        warnings.simplefilter("ignore", dg.PreviewWarning)
        parts = [_stream_defs(stream, ticking) for stream in streams]
    maintenance = maintenance_job(streams)
    shared = dg.Definitions(
        jobs=[maintenance],
        schedules=[nightly(maintenance)],
        sensors=[alerts_sensor(streams, ticking)],
        resources={**default_resources(), **(resources or {})},
        # Backfills run outside of the job, with this one: a step in a process of its own once committed 22 s after its
        # run was marked as failed.
        executor=dg.in_process_executor,
    )
    return dg.Definitions.merge(shared, *parts)


def _stream_defs(stream: Stream, ticking: Ticking) -> dg.Definitions:
    job, audit = slice_job(stream), audit_job(stream)
    publishing = publish_job(stream) if stream.publishes else None
    return dg.Definitions(
        assets=[topic_asset(stream), *table_assets(stream)],
        asset_checks=stream_checks(stream),
        jobs=[
            job,
            audit,
            *acceptance_jobs(stream),
            *parked_jobs(stream),
            *breaker_jobs(stream),
            *(hold_jobs(stream) if stream.ordered else ()),
            *retry_jobs(stream),
            *(pause_jobs(stream) if stream.delays else ()),
            *rebuild_jobs(stream),
            *key_jobs(stream),
            *erasure_jobs(stream),
            *([publishing] if publishing else []),
        ],
        sensors=[
            *stream_sensors(stream, job, ticking),
            *([published_sensor(stream, publishing, ticking)] if publishing else []),
        ],
        schedules=[hourly(stream, job), daily_audit(stream, audit)],
    )
