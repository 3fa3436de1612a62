"""The job `maintenance` and its schedule: `highwater maintain` of all streams, every night.

What belongs here: the job, the schedule, and the report as Dagster shows it. What does not: what is done
(`orchestration.operating.maintaining`).
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg

from highwater.log_fields import fields
from orchestration.failures import told_to_dagster
from orchestration.stream_assets import table_key, work_of

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from orchestration.operating.maintaining import Report

NAME = "maintenance"


def maintenance_job(streams: Sequence["Stream"]) -> dg.JobDefinition:
    """The job `maintenance`: one step a stream, one after another; one that fails holds up no other."""
    steps = [_step(stream) for stream in streams]

    @dg.job(
        name=NAME,
        description="`highwater maintain` of every stream: joins files, removes old ones and old rows, retires keys.",
        executor_def=dg.in_process_executor,
    )
    def job() -> None:
        for step in steps:
            step()

    return job


def nightly(job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule `maintenance`, stopped until somebody starts it."""
    return dg.ScheduleDefinition(
        name=NAME, job=job, cron_schedule="0 3 * * *", description="Maintains all streams every day at 3 UTC."
    )


def _step(stream: "Stream") -> dg.OpDefinition:
    @dg.op(
        name=f"{stream.name}_{NAME}",
        description=f"`highwater maintain {stream.name}`; the report is an observation of each table.",
        config_schema={
            "dry_run": dg.Field(bool, default_value=False, description="Only show what would be done."),
        },
        required_resource_keys={"kafka", "ledger", "lake", "spark"},
        out=dg.Out(dg.Nothing),
    )
    def maintain(context: dg.OpExecutionContext) -> None:
        with told_to_dagster(context.retry_number, context.resources.spark.interrupt), fields(stream=stream.name):
            _maintain(context, stream)

    return maintain


def _maintain(context: dg.OpExecutionContext, stream: "Stream") -> None:
    from orchestration.operating.maintaining import act

    report = act(work_of(context, stream), context.instance, datetime.now(UTC), sure=not context.op_config["dry_run"])
    for line in report.lines:
        context.log.info(line)
    _observe(context, stream, report)


def _observe(context: dg.OpExecutionContext, stream: "Stream", report: "Report") -> None:
    """Each table's numbers on its asset, where they plot from night to night."""
    gone = {} if report.retained is None else report.retained.numbers
    for one in report.tables:
        numbers = {name: value for name, value in one.row.items() if name != "table"}
        numbers |= gone if one.table == "raw" else {}
        notes = {"notes": "\n".join(one.notes)} if one.notes else {}
        metadata = {f"maintenance/{name}": value for name, value in {**numbers, **notes}.items()}
        context.log_event(dg.AssetObservation(table_key(stream, one.table), metadata=metadata))
    if report.keys is not None:
        context.add_output_metadata({"live keys": report.keys.live, "retired keys": len(report.keys.retired)})
