"""The jobs of operators are there once for all streams, and do what the commands of the same names do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.orchestration import failures
from highwater.orchestration.cli.main import main
from highwater.orchestration.operations import maintenance
from highwater.orchestration.operations.maintenance import Report, TableReport
from highwater.orchestration.operator_jobs import OPERATIONS
from highwater.orchestration.run_tags import AUDIT_PRIORITY
from highwater.resources.table_maintenance import TableSize
from tests.helpers.operator_calls import SAME, SLICE, Calls


def error_of(defs: dg.Definitions, job: str, config: Mapping[str, Any]) -> str:
    """What a run of the job failed with."""
    with dg.DagsterInstance.ephemeral() as instance:
        done = defs.resolve_job_def(job).execute_in_process(
            instance=instance, run_config=dict(config), raise_on_error=False
        )
        assert not done.success
        run = instance.get_run_by_id(done.run_id)
        assert run is not None
        [failure] = [event.step_failure_data for event in done.all_events if event.is_step_failure]
    assert failure.user_failure_data is not None
    return f"{failure.user_failure_data.description} [{run.tags.get('highwater/stream')}]"


def test_streams_share_the_jobs_of_operators(defs: dg.Definitions) -> None:
    """100 streams had 1,600 jobs."""
    jobs = {job.name for job in defs.get_repository_def().get_all_jobs() if not job.name.startswith("__")}
    shared = {act.__name__ for act in OPERATIONS} | {"maintenance"}
    assert jobs == {"orders_slice", "orders_publish", "others_slice"} | shared
    assert shared == {*SAME, "audit", "maintenance"}


@pytest.mark.parametrize("job", SAME)
def test_a_job_does_what_its_command_does(defs: dg.Definitions, calls: Calls, job: str) -> None:
    _, config, arguments = SAME[job]
    assert "called" in error_of(defs, job, {"stream": "orders", **config})
    assert "called" in CliRunner().invoke(main, [job.replace("_", "-"), *arguments]).output
    by_job, by_command = calls.seen
    assert by_job == by_command
    assert by_job["dry_run"] is True


@pytest.mark.parametrize("job", SAME)
def test_a_job_is_a_dry_run_unless_it_is_to_record(defs: dg.Definitions, job: str) -> None:
    schema = defs.resolve_job_def(job).config_mapping
    assert schema is not None
    fields = schema.config_schema.as_field().config_type.fields  # type: ignore[attr-defined]
    assert fields["dry_run"].default_value is True
    assert fields["stream"].is_required
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize("job", [*SAME, "audit"])
def test_an_unknown_stream_is_reported_with_the_declared_ones(defs: dg.Definitions, calls: Calls, job: str) -> None:
    config = SAME[job][1] if job in SAME else {}
    reported = error_of(defs, job, {**config, "stream": "order"})
    assert "no stream is named 'order'" in reported
    assert "declared are orders, others" in reported
    assert reported.endswith("[None]")
    assert calls.seen == []


def test_a_run_has_the_tag_of_its_stream(defs: dg.Definitions, calls: Calls) -> None:
    assert error_of(defs, "retry_slice", {"stream": "others", "slice": SLICE}).endswith("[others]")
    assert len(calls.seen) == 1


def test_every_stream_is_audited_once_a_day(defs: dg.Definitions) -> None:
    [schedule] = [one for one in defs.get_repository_def().schedule_defs if one.name == "audit_daily"]
    with dg.DagsterInstance.ephemeral() as instance:
        found = schedule.evaluate_tick(dg.build_schedule_context(instance)).run_requests or []
    assert [one.run_config for one in found] == [{"stream": "orders"}, {"stream": "others"}]
    assert [one.tags["highwater/stream"] for one in found] == ["orders", "others"]
    assert {one.tags["dagster/priority"] for one in found} == {AUDIT_PRIORITY}


# Maintenance


class FakeMaintenance:
    """A test double for maintenance of a stream."""

    def __init__(self) -> None:
        self.faults: dict[str, list[Exception]] = {}
        self.seen: list[tuple[str, bool]] = []

    def maintain(self, work: Any, *_: object, dry_run: bool) -> Report:
        name = work.stream.name
        self.seen.append((name, not dry_run))
        if self.faults.get(name):
            raise self.faults[name].pop(0)
        return Report([TableReport("raw", TableSize(1, 2, 3, 4), TableSize(1, 2, 3, 4), 0, 0, 0.0)], done=not dry_run)


@pytest.fixture
def maintained(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> FakeMaintenance:
    del calls  # its settings
    found = FakeMaintenance()
    monkeypatch.setattr(maintenance, "maintain", found.maintain)
    monkeypatch.setattr("highwater.orchestration.maintenance_job.wait_seconds", lambda _: 0.0)
    return found


def maintain(defs: dg.Definitions, **config: Any) -> tuple[bool, str, dict[str, int], dict[str, str]]:
    """Run the job: whether it succeeded, its error, observations of raw by stream, and tags."""
    with dg.DagsterInstance.ephemeral() as instance:
        done = defs.resolve_job_def("maintenance").execute_in_process(
            instance=instance, run_config=config, raise_on_error=False
        )
        seen = {
            name: len(instance.fetch_observations(dg.AssetKey([name, "raw"]), limit=9).records)
            for name in ("orders", "others")
        }
        run = instance.get_run_by_id(done.run_id)
        assert run is not None
        failed = [event.step_failure_data.user_failure_data for event in done.all_events if event.is_step_failure]
    return done.success, "".join(str(one and one.description) for one in failed), seen, dict(run.tags)


def test_maintenance_takes_every_stream_unless_some_are_named(
    defs: dg.Definitions, maintained: FakeMaintenance
) -> None:
    assert maintain(defs)[::2] == (True, {"orders": 1, "others": 1})
    assert maintained.seen == [("orders", True), ("others", True)]
    maintained.seen.clear()
    done, _, _, tags = maintain(defs, streams=["others"], dry_run=True)
    assert (done, tags["highwater/stream"]) == (True, "others")
    assert maintained.seen == [("others", False)]
    assert "declared are orders, others" in maintain(defs, streams=["order"])[1]


def test_a_stream_that_cannot_be_maintained_delays_no_other(defs: dg.Definitions, maintained: FakeMaintenance) -> None:
    """The run names every fault at its end."""
    maintained.faults = {
        "orders": [ConfigurationError("the horizon is too short", remedy="declare more")],
        "others": [KeyError("of ours")] * (1 + failures.TRIES_AGAIN),
    }
    done, error, seen, _ = maintain(defs)
    assert (done, seen) == (False, {"orders": 0, "others": 0})
    assert "maintenance failed for 2 of 2 streams" in error
    assert "orders: ConfigurationError: the horizon is too short" in error
    assert "others: KeyError: 'of ours'" in error
    maintained.faults = {"orders": [ConfigurationError("the horizon is too short", remedy="declare more")]}
    assert maintain(defs)[::2] == (False, {"orders": 0, "others": 1})


def test_temporary_errors_are_retried_for_their_stream_alone(defs: dg.Definitions, maintained: FakeMaintenance) -> None:
    maintained.faults = {"orders": [DependencyUnavailableError("Spark does not answer", remedy="start it")] * 2}
    done, _, seen, _ = maintain(defs)
    assert (done, seen) == (True, {"orders": 1, "others": 1})
    assert [name for name, _ in maintained.seen] == ["orders", "others", "orders", "orders"]


def test_an_error_of_maintenance_shows_no_secret(
    defs: dg.Definitions, maintained: FakeMaintenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", json.dumps({"sasl.password": "hunter22"}))
    maintained.faults = {"orders": [ConfigurationError("no login with hunter22", remedy="fix it")]}
    error = maintain(defs)[1]
    assert "no login with" in error
    assert "hunter22" not in error
