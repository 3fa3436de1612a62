"""A stream whose faults are reported and repaired through the commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from highwater import settings
from highwater.orchestration.build import build_defs
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from highwater.orchestration.sensing.run_requests import RepairRules
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.sensor_faults import SensorFault
from tests.helpers.crash_support import PARTITIONS, Deployment
from tests.helpers.support import read_rows

if TYPE_CHECKING:
    from click.testing import Result
    from dagster._core.definitions.sensor_definition import SensorExecutionData

    from dev.spark_connect import SparkConnect
    from tests.conftest import TopicFactory


MENDED, PERMANENT, TEMPORARY = 0, 2, 75


@dataclass
class Ours:
    """A deployment whose sensor is ticked, whose job is run and whose command is called by hand."""

    held: Deployment
    instance: dg.DagsterInstance
    defs: dg.Definitions

    @classmethod
    def on(cls, held: Deployment, instance: dg.DagsterInstance) -> Ours:
        return cls(held, instance, build_defs(streams=[held.stream]))

    def tick(self) -> SensorExecutionData:
        """A tick of the planner, as the daemon does it: keys first, then runs, which are left to `run`."""
        sensor = self.defs.get_repository_def().get_sensor_def("planner")
        with dg.build_sensor_context(instance=self.instance, resources=self.defs.resources) as context:
            result = sensor.evaluate_tick(context)
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
        return result

    def fault(self, stream: str = "orders") -> SensorFault | None:
        """Tick the planner; why it skips a stream."""
        self.tick()
        faults = Ledger(f"sqlite:///{self.held.home / 'ledger.sqlite'}").sensor_faults.list_all()
        return next((one for one in faults if (one.stream, one.sensor) == (stream, "planner")), None)

    def run(self, first: str, last: str | None = None, stream: str = "orders") -> dg.ExecuteInProcessResult:
        job = self.defs.resolve_job_def(f"{stream}_slice")
        tags = {RANGE_START: first, RANGE_END: last or first}
        return job.execute_in_process(instance=self.instance, tags=tags, raise_on_error=False)

    def taken(self, result: SensorExecutionData | None = None, stream: str = "orders") -> list[str]:
        """Tick, and run what the tick requests; returns the slices that were planned."""
        result = result or self.tick()
        for request in result.run_requests or []:
            self.took(request.tags[RANGE_START], request.tags[RANGE_END], stream)
        return [key for request in result.dynamic_partitions_requests or [] for key in request.partition_keys]

    def planned(self) -> list[str]:
        """Tick, and leave the runs: what a later run takes together with its own."""
        return [key for request in self.tick().dynamic_partitions_requests or [] for key in request.partition_keys]

    def took(self, first: str, last: str, stream: str = "orders") -> None:
        """Run a range of slices, which ends well."""
        done = self.run(first, last, stream)
        assert done.success, [event for event in done.all_events if event.is_failure]
        assert list_alarms(done) == []

    def repair(self) -> SensorExecutionData:
        """A tick of repair."""
        sensor = self.defs.get_repository_def().get_sensor_def("repair")
        with dg.build_sensor_context(instance=self.instance, resources=self.defs.resources) as context:
            return sensor.evaluate_tick(context)

    def repaired(self) -> None:
        """A tick of repair, and the runs that it requests."""
        assert self.taken(self.repair()) == [], "no new slices"

    def command(self, *arguments: str) -> Result:
        """The command `highwater`, on a declaration of the test's stream."""
        from click.testing import CliRunner

        from highwater.orchestration.cli.main import main

        folder = self.held.home / "streams"
        folder.mkdir(exist_ok=True)
        (folder / "orders.py").write_text(
            f"from tests.helpers.crash_support import build_stream\nSTREAM = build_stream({self.held.stream.topic!r})\n"
        )
        return CliRunner().invoke(main, ["--declarations", str(folder), *arguments])


def list_alarms(result: dg.ExecuteInProcessResult) -> list[tuple[str, str | None]]:
    """Checks that say that a table is wrong."""
    found = [
        event.asset_check_evaluation_data
        for event in result.all_events
        if event.event_type_value == "ASSET_CHECK_EVALUATION"
    ]
    return [
        (one.check_name, one.description)
        for one in found
        if not one.passed and one.severity is dg.AssetCheckSeverity.ERROR
    ]


def find_failure(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """What Dagster shows of the first step that failed for good: error, problem, stored, found, remedy."""
    event = next(event for event in result.all_events if event.is_step_failure)
    data = event.step_failure_data
    assert data.user_failure_data is not None, data.error
    return {name: str(value.value) for name, value in data.user_failure_data.metadata.items()}


def read_rows_by_place(held: Deployment) -> dict[tuple[int, int], tuple[bytes | None, bytes | None]]:
    rows = read_rows(str(held.path("raw")))
    assert len({(row["generation"], row["partition"], row["offset"]) for row in rows}) == len(rows)
    return {(row["partition"], row["offset"]): (row["key"], row["value"]) for row in rows}


def ensure_rows(held: Deployment, expected: Mapping[tuple[int, int], tuple[bytes | None, bytes | None]]) -> None:
    """Raw holds these records, each once."""
    assert read_rows_by_place(held) == expected


def ensure_decided(held: Deployment) -> None:
    """Hold events, rejects and current against raw, for topics that Kafka holds in part."""
    raw = {(r["generation"], r["partition"], r["offset"]): r["value"] for r in read_rows(str(held.path("raw")))}
    tables = {name: read_rows(str(held.path(name))) for name in ("events", "rejects", "current")}
    places = {name: [find_place(row) for row in rows] for name, rows in tables.items()}
    remaining = {place for place, value in raw.items() if value is not None}
    assert sorted(places["events"] + places["rejects"]) == sorted(remaining), "each record that is no tombstone, once"
    newest: dict[str, int] = {}
    for row in tables["events"]:
        newest[row["key"]] = max(row["version"], newest.get(row["key"], 0))
    found: dict[str, int] = {}
    for row in tables["current"]:
        found[row["key"]] = max(row["version"], found.get(row["key"], 0))
    assert found == newest


def find_place(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["origin_generation"], row["origin_partition"], row["origin_offset"]


def make_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps try a temporary error again once, and at once."""
    monkeypatch.setattr("highwater.orchestration.failures.TRIES_AGAIN", 1)
    monkeypatch.setattr("highwater.orchestration.failures.FIRST_WAIT", 0.05)
    # Repair asks at once for what the planner may still request, and for what failed just now.
    monkeypatch.setattr(
        "highwater.orchestration.sensing.repairing.RULES", RepairRules(grace=timedelta(), first_wait=timedelta())
    )


def make_held(
    topic: TopicFactory, bootstrap: str, spark_server: SparkConnect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Deployment:
    made = Deployment.make(
        topic(partitions=PARTITIONS), tmp_path, bootstrap, {settings.SPARK_REMOTE: spark_server.remote}
    )
    configure(made, monkeypatch)
    return made


def configure(held: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (settings.HOME, settings.KAFKA_BOOTSTRAP, settings.SPARK_REMOTE):
        monkeypatch.setenv(name, held.environment[name])
