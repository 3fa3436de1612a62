"""The schedule of a stream: planning every hour, for those who want hourly runs.

What belongs here: the schedules. What does not: planning, which is one function for sensor and schedule
(`orchestration.sensing.ticks`).
"""

from typing import TYPE_CHECKING

import dagster as dg

from highwater.errors import TemporaryError
from highwater.log_fields import fields
from orchestration.sensing.ticks import plan_and_add, run_requests

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.declaration import Stream


def hourly(stream: "Stream", job: "UnresolvedAssetJobDefinition") -> dg.ScheduleDefinition:
    """The schedule `<stream>_hourly`, stopped until somebody starts it; then the planner's sensor is to be stopped."""

    @dg.schedule(
        name=f"{stream.name}_hourly",
        job=job,
        cron_schedule="0 * * * *",
        description=f"Plans {stream.topic} every hour and requests what was planned. Instead of {stream.name}_planner.",
        required_resource_keys={"kafka", "lake", "ledger"},
    )
    def plan(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        try:
            tick = plan_and_add(context.instance, context.resources, stream)
        except TemporaryError as error:
            return dg.SkipReason(str(error))
        with fields(stream=stream.name):
            for line in tick.lines:
                context.log.info(line)
        if tick.error is not None:
            raise tick.error
        return run_requests(stream, tick.requests) or dg.SkipReason(tick.message)

    return plan
