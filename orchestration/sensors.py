"""The sensors of a stream: planning, retries, and repair.

What belongs here: the shells that Dagster ticks. What does not: what a tick does (`orchestration.ticks`) and decides
(`orchestration.requests`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import dagster as dg

from highwater.errors import TemporaryError
from orchestration.ticks import Tick, plan, repair, retry, run_requests

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.declaration import Stream

# A slice waits so long at the most for being planned, beside its own limits.
PLANNER_SECONDS = 10
# What is due waits so long at the most for being planned.
RETRY_SECONDS = 10
REPAIR_SECONDS = 60


def stream_sensors(
    stream: "Stream", job: "UnresolvedAssetJobDefinition", *, running: bool
) -> list[dg.SensorDefinition]:
    """The sensors of a stream; they start stopped unless `running`."""
    status = dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED
    found = [_planner(stream, job, status), _repair(stream, job, status)]
    return [*found, _retries(stream, job, status)] if stream.tiers else found


def _planner(
    stream: "Stream", job: "UnresolvedAssetJobDefinition", status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{stream.name}_planner",
        job=job,
        minimum_interval_seconds=PLANNER_SECONDS,
        default_status=status,
        description=f"Cuts what is new in {stream.topic} into slices, adds their keys and requests their runs.",
        required_resource_keys={"kafka", "ledger"},
    )
    def planner(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return _result(context, stream, lambda: plan(context.instance, context.resources, stream, context.cursor))

    return planner


def _retries(
    stream: "Stream", job: "UnresolvedAssetJobDefinition", status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{stream.name}_dlq_retries",
        job=job,
        minimum_interval_seconds=RETRY_SECONDS,
        default_status=status,
        description=(
            f"Cuts what is due in {', '.join(stream.tier_topics)} into slices and requests their runs, behind those of "
            "new slices."
        ),
        required_resource_keys={"kafka", "ledger"},
    )
    def retries(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return _result(context, stream, lambda: retry(context.instance, context.resources, stream))

    return retries


def _repair(
    stream: "Stream", job: "UnresolvedAssetJobDefinition", status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{stream.name}_repair",
        job=job,
        minimum_interval_seconds=REPAIR_SECONDS,
        default_status=status,
        description=(
            f"Requests slices of {stream.name} that the lake does not hold whole and no run is working on, and tells "
            "Dagster of those that the lake holds and Dagster forgot."
        ),
        required_resource_keys={"lake", "ledger"},
    )
    def mend(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return _result(context, stream, lambda: repair(context.instance, context.resources, stream, context.cursor))

    return mend


def _result(context: dg.SensorEvaluationContext, stream: "Stream", act: Callable[[], Tick]) -> dg.SensorResult:
    """A tick as Dagster takes it; a dependency that is away is a reason to skip, never an empty look (I15)."""
    try:
        tick = act()
    except TemporaryError as error:
        return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
    for line in tick.lines:
        context.log.info(line)
    partitions = dg.DynamicPartitionsDefinition(name=stream.partitions_name)
    return dg.SensorResult(
        run_requests=run_requests(stream, tick.requests),
        skip_reason=None if tick.requests else tick.message,
        cursor=tick.cursor,
        dynamic_partitions_requests=[partitions.build_add_request(tick.keys)] if tick.keys else [],
        asset_events=tick.events,
    )
