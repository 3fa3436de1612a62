"""Assembly: from declared streams to everything that Dagster sees."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.orchestration.checking.checks import build_stream_checks
from highwater.orchestration.jobs import IN_PROCESS, build_slice_job, publish_job
from highwater.orchestration.maintenance_job import build_maintenance_job, build_nightly_schedule
from highwater.orchestration.observation import build_topic_asset
from highwater.orchestration.operator_jobs import audit_daily, build_operator_jobs
from highwater.orchestration.resources import default_resources
from highwater.orchestration.sensors import SensorTicking, build_alerts_sensor, build_stream_sensors
from highwater.orchestration.stream_assets import build_table_assets
from highwater.settings import SENSORS
from highwater.stream_files import Declarations, read_streams

if TYPE_CHECKING:
    from highwater.declaration import Stream


def build_defs(
    *,
    streams: Declarations | Sequence[Stream] | None = None,
    resources: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    pace: float = 1.0,
) -> dg.Definitions:
    """All definitions; building them connects to nothing (I14).

    Args:
        streams: the streams, or what `read_streams` found in a folder; the project's streams folder if None.
        resources: resources that take the place of the default ones, by name.
        environment: `HIGHWATER_SENSORS=running` in it lets sensors start by themselves.
        pace: a factor on the seconds between the ticks of planner, retries and publisher.
    """
    found = read_streams() if streams is None else streams
    every = [*found.streams.values()] if isinstance(found, Declarations) else found
    return dg.Definitions.merge(
        build_shared_defs(found, resources=resources, environment=environment, pace=pace),
        *map(build_stream_defs, every),
    )


def build_shared_defs(
    found: Declarations | Sequence[Stream],
    *,
    resources: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    pace: float = 1.0,
) -> dg.Definitions:
    """The definitions that are there once for all streams: jobs, sensors, schedules, resources; see `build_defs`."""
    files = found if isinstance(found, Declarations) else None
    streams = [*found.streams.values()] if isinstance(found, Declarations) else found
    # `make up` and `make demo` set it; in a user's own deployment sensors start stopped.
    ticking = SensorTicking(environment.get(SENSORS, "").lower() == "running", pace)
    by_name = {stream.name: stream for stream in streams}
    with ignore_dagster_warnings():
        slices = {stream.name: build_slice_job(stream) for stream in streams}
        publishing = {stream.name: publish_job(stream) for stream in streams if stream.publishes}
        sensors = build_stream_sensors(streams, slices, publishing, ticking, files)
    maintenance, operators = build_maintenance_job(by_name), build_operator_jobs(by_name)
    [audit] = [job for job in operators if job.name == "audit"]
    return dg.Definitions(
        jobs=[maintenance, *operators, *slices.values(), *publishing.values()],
        schedules=[build_nightly_schedule(maintenance), audit_daily(by_name, audit)],
        sensors=[*sensors, build_alerts_sensor(streams, ticking, files)],
        resources={**default_resources(), **(resources or {})},
        # Backfills run outside of the job, with this one: a step in a process of its own once committed 22 s after its
        # run was marked as failed.
        executor=IN_PROCESS,
    )


def build_stream_defs(stream: Stream) -> dg.Definitions:
    """The assets and checks of one stream."""
    with ignore_dagster_warnings():
        return dg.Definitions(
            assets=[build_topic_asset(stream), *build_table_assets(stream)],
            asset_checks=build_stream_checks(stream),
        )


@contextmanager
def ignore_dagster_warnings() -> Iterator[None]:
    """Dagster's marks on its own features are not shown.

    Backfill policies, observable topics and partitions of checks are marked so in Dagster 1.13, which is pinned; the
    tests hold what we rely on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)
        warnings.simplefilter("ignore", dg.PreviewWarning)
        yield
