"""The jobs of each stream, and how a job of one op is built."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.orchestration.asset_keys import (
    PUBLISHED,
    build_publish_job_name,
    build_slice_job_name,
    build_table_key,
    build_table_keys,
)
from highwater.orchestration.run_tags import PUBLISH, PURPOSE, STREAM_TAG

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.declaration import Stream


# Its configuration is not offered: that would be a twelfth of each job in Dagster's snapshot of the definitions.
IN_PROCESS = dg.in_process_executor.configured({}, name="in_process")


def build_slice_job(stream: "Stream") -> "UnresolvedAssetJobDefinition":
    """The job `<stream>_slice`, with the checks of its tables.

    It runs in one process: its steps share one Spark session, and no step outlives its run.
    """
    keys = build_table_keys(stream)
    return dg.define_asset_job(
        build_slice_job_name(stream),
        selection=dg.AssetSelection.assets(*keys),
        description=f"Takes slices of {stream.name} through {', '.join(key.path[-1] for key in keys)}.",
        executor_def=IN_PROCESS,
        tags={STREAM_TAG: stream.name},
    )


def publish_job(stream: "Stream") -> "UnresolvedAssetJobDefinition":
    """The job `<stream>_publish`, of streams that publish: it sends accepted events, without Spark."""
    return dg.define_asset_job(
        build_publish_job_name(stream),
        selection=dg.AssetSelection.assets(build_table_key(stream, PUBLISHED.name)),
        description=f"Sends the accepted events of slices of {stream.name}; a slice waits for those before it.",
        executor_def=IN_PROCESS,
        tags={STREAM_TAG: stream.name, PURPOSE: PUBLISH},
    )


def build_one_op_job(
    name: str,
    about: str,
    config: type[dg.Config],
    body: Callable[[dg.OpExecutionContext, Any], None],
    *,
    spark: bool,
) -> dg.JobDefinition:
    """A job of one op whose run configuration is the fields of a class, without the level of ops.

    Args:
        name: the name of the job.
        about: its description.
        config: the class of the configuration.
        body: the function of a run, which gets the configuration as an instance of the class.
        spark: whether it needs Spark.
    """
    op, schema = f"{name}_op", config.to_fields_dict()

    @dg.op(
        name=op,
        config_schema=schema,
        required_resource_keys={"kafka", "ledger", "lake", *(["spark"] if spark else [])},
        out=dg.Out(dg.Nothing),
    )
    def run(context: dg.OpExecutionContext) -> None:
        body(context, config(**context.op_config))

    @dg.job(
        name=name,
        description=about,
        executor_def=IN_PROCESS,
        config=dg.ConfigMapping(lambda given: {"ops": {op: {"config": given}}}, config_schema=schema),
    )
    def job() -> None:
        run()

    return job
