"""The job of a stream: one run takes slices through all of its tables.

What belongs here: the job. What does not: when it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from orchestration.stream_assets import STREAM_TAG, table_keys

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.declaration import Stream


def slice_job(stream: Stream) -> UnresolvedAssetJobDefinition:
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
