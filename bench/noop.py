"""The shipped definitions beside an asset that does nothing, for `bench.latency`."""

import os
from pathlib import Path

import dagster as dg

from highwater.orchestration.build import build_defs

# The sensor asks for one run for each file in the folder of this name below the folder of the variable.
ASKED = "HIGHWATER_BENCH_ASKED"
NAME = os.environ.get("HIGHWATER_BENCH_NAME", "noop")
SLICES = dg.DynamicPartitionsDefinition(name=f"{NAME}_slices")


@dg.asset(name=NAME, partitions_def=SLICES)
def noop() -> None:
    """Nothing."""


job = dg.define_asset_job(f"{NAME}_job", [noop], executor_def=dg.in_process_executor)


@dg.sensor(name=f"{NAME}_sensor", job=job, minimum_interval_seconds=10, default_status=dg.DefaultSensorStatus.RUNNING)
def noop_sensor() -> dg.SensorResult:
    """Ask for a run for each file."""
    keys = sorted(file.name for file in Path(os.environ[ASKED], NAME).iterdir())
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=key, partition_key=key) for key in keys],
        dynamic_partitions_requests=[SLICES.build_add_request(keys)] if keys else [],
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Both, so that their runs load the same definitions."""
    peer = dg.Definitions(assets=[noop], jobs=[job], sensors=[noop_sensor])
    return dg.Definitions.merge(build_defs(environment=os.environ), peer)
