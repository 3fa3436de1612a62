"""Runs of a bench's stream, as the sensors request them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.sensing.run_requests import Request
from highwater.orchestration.sensing.stream_ticks import build_run_requests
from tests.helpers.support import Bench

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect


class Runs:
    """Runs as the sensors request them."""

    def __init__(self, bench: Bench, instance: dg.DagsterInstance) -> None:
        self.bench, self.instance = bench, instance
        self.job = build_defs(streams=[bench.stream]).resolve_job_def("orders_slice")

    def run(
        self, keys: Sequence[str], *tables: str, raw_alone: bool = False, tries: bool = True
    ) -> dg.ExecuteInProcessResult:
        """A run as it is requested, or of these tables alone; with one try of each step where there are no more."""
        [asked] = build_run_requests(self.bench.stream, [Request(tuple(keys), raw_alone=raw_alone)])
        chosen = [build_table_key(self.bench.stream, table) for table in tables] or asked.asset_selection
        with pytest.MonkeyPatch.context() as patch:
            if not tries:
                patch.setattr("highwater.orchestration.failures.TRIES_AGAIN", 0)
            return self.job.execute_in_process(
                instance=self.instance, tags=asked.tags, asset_selection=chosen, raise_on_error=False
            )

    def done(self, table: str) -> set[str]:
        return set(self.instance.get_materialized_partitions(build_table_key(self.bench.stream, table)))


def find_failure_message(result: dg.ExecuteInProcessResult) -> str:
    """The message of the step that failed, with the error's name."""
    [error] = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
    assert error is not None
    return f"{error.message} {error.cause.message if error.cause else ''}"


def configure(bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs find the bench's services."""
    for name, value in {
        "HIGHWATER_LAKE": bench.lake.root,
        "HIGHWATER_LEDGER_URL": f"sqlite:///{bench.lake.root}/../ledger.sqlite",
        "HIGHWATER_KAFKA_BOOTSTRAP": bench.bootstrap,
        "SPARK_REMOTE": spark_server.remote,
    }.items():
        monkeypatch.setenv(name, value)
