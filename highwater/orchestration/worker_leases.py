"""The leases of runs' workers, as readers of the ledger find them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.orchestration.run_tags import STREAM_TAG

if TYPE_CHECKING:
    import dagster as dg

# The last sign of life counts for so long. Four beats fit in: a worker on a machine that hangs for 45 s lives.
LEASE_SECONDS = 60.0
# Prefix of the names of these leases.
KIND = "run "


def select_worker_leases(leases: Mapping[str, datetime], stream: str = "") -> dict[str, datetime]:
    """The leases of workers, of one stream or of all: by run id when each runs out unless it is renewed."""
    begin = f"{KIND}{stream}/" if stream else KIND
    return {name.rpartition("/")[2]: ends for name, ends in leases.items() if name.startswith(begin)}


def build_lease_name(run: dg.DagsterRun) -> str:
    """The lease of a run's worker, `run <stream>/<run id>`; the job replaces a stream that the run does not name.

    A run names its stream by its tag, by its configuration, or by assets that are all of one stream.
    """
    streams = {key.path[0] for key in run.asset_selection or ()}
    named = run.tags.get(STREAM_TAG) or run.run_config.get("stream")
    stream = named or (streams.pop() if len(streams) == 1 else run.job_name)
    return f"{KIND}{stream}/{run.run_id}"
