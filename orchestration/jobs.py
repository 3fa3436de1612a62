"""The jobs of a stream: one takes slices through all of its tables, two record what an operator accepts.

What belongs here: the jobs. What does not: when they run, or what an acceptance comes to (`orchestration.acceptance`).
"""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.errors import ConfigurationError
from orchestration.failures import told_to_dagster
from orchestration.stream_assets import STREAM_TAG, table_keys

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.declaration import Stream


def slice_job(stream: "Stream") -> "UnresolvedAssetJobDefinition":
    """The job `<stream>_slice`, with the checks of its tables.

    It runs in one process: its steps share one Spark session, and no step outlives its run.
    """
    return dg.define_asset_job(
        f"{stream.name}_slice",
        selection=dg.AssetSelection.assets(*table_keys(stream)),
        description=f"Takes slices of {stream.name} through {', '.join(key.path[-1] for key in table_keys(stream))}.",
        executor_def=dg.in_process_executor,
        tags={STREAM_TAG: stream.name},
    )


_ASKED: dict[str, Any] = {
    "record": dg.Field(bool, default_value=False, description="Record it; without it only what would be is shown."),
    "by": dg.Field(str, default_value="", description="Who accepts it; goes into the record."),
    "topic": dg.Field(str, default_value="", description="The tier that is meant; the main topic if empty."),
    "partitions": dg.Field([int], default_value=[], description="Only these partitions; all if empty."),
}


def acceptance_jobs(stream: "Stream") -> list[dg.JobDefinition]:
    """`<stream>_accept_loss` and `<stream>_accept_divergence`: the commands of the same names, in the UI."""
    return [_acceptance_job(stream, "accept_loss"), _acceptance_job(stream, "accept_divergence")]


def _acceptance_job(stream: "Stream", name: str) -> dg.JobDefinition:
    about = f"`highwater {name.replace('_', '-')} {stream.name}` as a run; a dry run unless `record` is set."

    @dg.op(
        name=f"{stream.name}_{name}_op",
        description=about,
        config_schema=_ASKED,
        required_resource_keys={"kafka", "ledger", "lake"},
        out=dg.Out(dg.Nothing),
    )
    def accept(context: dg.OpExecutionContext) -> None:
        with told_to_dagster(context.retry_number, lambda: None):
            _accept(context, stream, divergence=name == "accept_divergence")

    @dg.job(
        name=f"{stream.name}_{name}",
        description=about,
        executor_def=dg.in_process_executor,
        tags={STREAM_TAG: stream.name},
    )
    def job() -> None:
        accept()

    return job


def _accept(context: dg.OpExecutionContext, stream: "Stream", *, divergence: bool) -> None:
    from highwater.routing import named
    from orchestration import acceptance

    asked = context.op_config
    if asked["record"] and not asked["by"]:
        raise ConfigurationError(
            "nobody is named who accepts it", remedy="set `by` in the run's configuration to a person's name"
        )
    found = acceptance.accept_loss(
        context.resources.ledger.open(),
        context.resources.kafka.open(),
        named(stream, asked["topic"] or None),
        acceptance.never_read(context.resources.lake.open(), stream),
        by=asked["by"] or "nobody yet",
        now=datetime.now(UTC),
        partitions=set(asked["partitions"]) or None,
        dry=not asked["record"],
        divergence=divergence,
    )
    for line in found.lines or ["there is nothing to accept"]:
        context.log.info(line)
    recorded = asked["record"] and not found.nothing
    context.log.info("recorded" if recorded else "nothing was recorded")
