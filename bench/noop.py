"""The shipped definitions beside an asset that does nothing, for `bench.latency`."""

import os
from pathlib import Path

import dagster as dg

from highwater.orchestration.build import build_defs

# The sensor asks for one run for each file in this folder.
ASKED = "HIGHWATER_BENCH_ASKED"
SLICES = dg.DynamicPartitionsDefinition(name="noop_slices")


@dg.asset(partitions_def=SLICES)
def noop() -> None:
    """Nothing."""


job = dg.define_asset_job("noop_job", [noop], executor_def=dg.in_process_executor)


@dg.sensor(job=job, minimum_interval_seconds=10, default_status=dg.DefaultSensorStatus.RUNNING)
def noop_sensor() -> dg.SensorResult:
    """Ask for a run for each file."""
    keys = sorted(file.name for file in Path(os.environ[ASKED]).iterdir())
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=key, partition_key=key) for key in keys],
        dynamic_partitions_requests=[SLICES.build_add_request(keys)] if keys else [],
    )


@dg.definitions
def defs() -> dg.Definitions:
    """Both in one code location, so that their runs wait for one queue and start in the same way."""
    peer = dg.Definitions(assets=[noop], jobs=[job], sensors=[noop_sensor])
    return dg.Definitions.merge(build_defs(environment=os.environ), peer)
