"""The jobs of a stream that take slices through its tables, and that audit it.

What belongs here: the jobs. What does not: when they run, those of operators (`orchestration.operating.operator_jobs`),
or what an audit looks at (`orchestration.checking.audit`).
"""

from typing import TYPE_CHECKING

import dagster as dg

from orchestration.failures import told_to_dagster
from orchestration.sensing.requests import PUBLISH, PURPOSE
from orchestration.stream_assets import (
    PUBLISHED,
    STREAM_TAG,
    publish_job_name,
    slice_job_name,
    table_key,
    table_keys,
)

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.declaration import Stream


# Slices that the daily audit reads from Kafka once more: minutes of records, at the limits of a slice.
RECORDS_OF = 10


def slice_job(stream: "Stream") -> "UnresolvedAssetJobDefinition":
    """The job `<stream>_slice`, with the checks of its tables.

    It runs in one process: its steps share one Spark session, and no step outlives its run.
    """
    return dg.define_asset_job(
        slice_job_name(stream),
        selection=dg.AssetSelection.assets(*table_keys(stream)),
        description=f"Takes slices of {stream.name} through {', '.join(key.path[-1] for key in table_keys(stream))}.",
        executor_def=dg.in_process_executor,
        tags={STREAM_TAG: stream.name},
    )


def publish_job(stream: "Stream") -> "UnresolvedAssetJobDefinition":
    """The job `<stream>_publish`, of streams that publish: it sends accepted events, without Spark."""
    return dg.define_asset_job(
        publish_job_name(stream),
        selection=dg.AssetSelection.assets(table_key(stream, PUBLISHED.name)),
        description=f"Sends the accepted events of slices of {stream.name}; a slice waits for those before it.",
        executor_def=dg.in_process_executor,
        tags={STREAM_TAG: stream.name, PURPOSE: PUBLISH},
    )


def audit_job(stream: "Stream") -> dg.JobDefinition:
    """The job `<stream>_audit`: the page of `highwater audit`, on the asset of events; it fails if that has errors."""
    command = f"highwater audit {stream.name} --versions --keys --records {RECORDS_OF}"
    about = f"`{command}` as a run; the page is an observation of {stream.name}/events."

    @dg.op(
        name=f"{stream.name}_audit_op",
        description=about,
        config_schema={
            "records": dg.Field(
                dg.Noneable(int),
                default_value=RECORDS_OF,
                description="So many of the newest slices are read from Kafka once more; 0 or null for none.",
            )
        },
        required_resource_keys={"kafka", "ledger", "lake"},
        out=dg.Out(dg.Nothing),
    )
    def look(context: dg.OpExecutionContext) -> None:
        with told_to_dagster(context.retry_number, lambda: None):
            _audit(context, stream, max(0, context.op_config["records"] or 0))

    @dg.job(
        name=f"{stream.name}_audit",
        description=about,
        executor_def=dg.in_process_executor,
        tags={STREAM_TAG: stream.name},
    )
    def job() -> None:
        look()

    return job


def _audit(context: dg.OpExecutionContext, stream: "Stream", records_of: int) -> None:
    from orchestration.checking.audit import audit, outcome
    from orchestration.checking.check_results import failing_checks

    page = audit(
        context.resources.ledger.open(),
        context.resources.kafka.open(),
        context.resources.lake.open(),
        stream,
        failing_checks(context.instance, stream),
        records_of=records_of,
        versions=True,
        keys=True,
    )
    ends = page.ends
    metadata: dict[str, int | dg.MarkdownMetadataValue] = {
        "audit": dg.MetadataValue.md(page.markdown),
        "errors": len(page.errors),
        "slices not whole": len(page.unfinished),
        "accepted": ends.accepted,
        "waiting": sum(ends.waiting.values()),
        "parked": ends.parked,
        "discarded": ends.discarded,
    }
    context.log_event(dg.AssetObservation(table_key(stream, "events"), metadata=metadata))
    for line in page.head:
        context.log.info(line)
    remedy = f"the page on {stream.name}/events names each, with its remedy; docs/operations.md explains them"
    if (error := outcome([page], remedy)) is not None:
        raise error
