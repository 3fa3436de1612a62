"""The schedule of a stream's daily audit."""

from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from highwater.declaration import Stream


def daily_audit(stream: "Stream", job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule `<stream>_audit_daily`, stopped until somebody starts it."""
    return dg.ScheduleDefinition(
        name=f"{stream.name}_audit_daily",
        job=job,
        cron_schedule="0 6 * * *",
        description=f"Audits {stream.name} every day at 6 UTC.",
    )
