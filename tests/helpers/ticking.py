"""The sensors of a stream, ticked by a test instead of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from dev.planted import plant
from highwater.declaration import Stream
from highwater.orchestration.build import build_defs
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import Slice
from tests.helpers.commits import commit_current
from tests.helpers.run_queue import ORIGIN


class Ticking:
    """A stream's sensors, ticked by hand as the daemon would: keys first, then events, then runs."""

    def __init__(self, stream: Stream, instance: dg.DagsterInstance, root: Path) -> None:
        self.stream = stream
        self.instance = instance
        self.defs = build_defs(streams=[stream])
        self.ledger = Ledger(f"sqlite:///{root / 'ledger.sqlite'}")
        self.lake = Lake(str(root / "lake"))
        self.cursors: dict[str, str | None] = {}

    def evaluate(self, name: str) -> Any:
        sensor = self.defs.get_repository_def().get_sensor_def(name)
        context = dg.build_sensor_context(
            instance=self.instance, cursor=self.cursors.get(name), resources=self.defs.resources
        )
        with context as opened:
            return sensor.evaluate_tick(opened)

    def tick(self, name: str) -> Any:
        result = self.evaluate(name)
        self.cursors[name] = result.cursor
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
        for event in result.asset_events:
            self.instance.report_runless_asset_event(event)
        return result

    def keys(self) -> list[str]:
        return list(self.instance.get_dynamic_partitions(self.stream.partitions_name))

    def run(self, keys: Sequence[str], status: dg.DagsterRunStatus, **tags: str) -> None:
        """A run record as the daemon leaves it."""
        range_ = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
        run = dg.DagsterRun(
            job_name=f"{self.stream.name}_slice",
            tags={**range_, "highwater/stream": self.stream.name, **tags},
            status=status,
            remote_job_origin=ORIGIN,
        )
        self.instance.add_run(run)

    def fill(self, slices: Sequence[Slice], *tables: str, attempt: int = 1, rows: int = 0, **counts: int) -> None:
        """Commit slices to tables of the lake, each with the same number of rows."""
        import pyarrow as pa

        slice_commits = [SliceCommit(s, attempt, rows, counts) for s in slices]
        keys = [s.key for s in slices] * rows
        table_rows = pa.table({"slice": pa.array(keys, pa.string()), "n": pa.array(range(len(keys)), pa.int64())})
        for table in tables:
            if table == "current":
                commit_current(self.lake, self.stream.name, {s.key: attempt for s in slices})
                continue
            plant(self.lake.build_table_path(self.stream.name, table), table_rows, slice_commits)
