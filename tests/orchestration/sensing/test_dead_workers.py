"""Workers of runs: which live, which are gone, and what Dagster hears of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster import instance_for_test

from dev.processes import wait_until
from highwater.orchestration.resources import LedgerResource
from highwater.orchestration.sensing import dead_workers
from highwater.orchestration.sensing.dead_workers import (
    LOOK_AGAIN_SECONDS,
    end_runs_without_worker,
    select_runs_without_worker,
)
from highwater.orchestration.sensors import REPAIR_SECONDS
from highwater.orchestration.worker_leases import LEASE_SECONDS, build_lease_name, select_worker_leases
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.leases import RENEWALS_PER_TERM, Lease
from tests.helpers.support import make_stream

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
STREAM = make_stream("orders")
SETTINGS = {
    "concurrency": {"pools": {"default_limit": 1, "granularity": "op"}},
    "run_retries": {"enabled": True, "max_retries": 2, "retry_on_asset_or_op_failure": False},
}


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def test_a_run_is_without_a_worker_when_its_lease_ran_out_or_never_was() -> None:
    started = {"lives": at(-600), "dead": at(-600), "young": at(-59), "no longer young": at(-61)}
    assert select_runs_without_worker(started, {"lives"}, NOON) == ["dead", "no longer young"]
    assert select_runs_without_worker(started, {}, at(-540)) == []


def test_leases_of_workers_are_distinguished_from_others() -> None:
    leases = {"run orders/a-1": at(60), "commit orders/raw": at(60), "alerts": at(60), "highwater.orders": at(9)}
    assert select_worker_leases(leases) == {"a-1": at(60)}
    assert select_worker_leases({**leases, "run orders2/b": at(5)}, "orders") == {"a-1": at(60)}


@pytest.mark.parametrize(
    ("tags", "assets", "stream"),
    [
        ({"highwater/stream": "orders"}, [], "orders"),
        ({}, [["orders", "raw"], ["orders", "events"]], "orders"),
        ({}, [["orders", "raw"], ["payments", "raw"]], "__ASSET_JOB"),
    ],
)
def test_a_lease_names_stream_and_run(tags: dict[str, str], assets: list[list[str]], stream: str) -> None:
    run = dg.DagsterRun(
        job_name="__ASSET_JOB", tags=tags, asset_selection=frozenset(dg.AssetKey(path) for path in assets)
    )
    assert build_lease_name(run) == f"run {stream}/{run.run_id}"
    assert select_worker_leases({build_lease_name(run): NOON}) == {run.run_id: NOON}


def test_a_run_that_has_no_tag_yet_has_the_stream_of_its_configuration() -> None:
    run = dg.DagsterRun(job_name="erase", run_config={"stream": "orders"})
    assert build_lease_name(run) == f"run orders/{run.run_id}"


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with instance_for_test(overrides=SETTINGS, temp_dir=str(tmp_path)) as made:
        yield made


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks nobody waits here."""
    monkeypatch.setattr(dead_workers, "LOOK_AGAIN_SECONDS", 0)


def started(instance: dg.DagsterInstance, stream: str = "orders") -> str:
    """A run as its worker left it, with a place in the stream's pool."""
    run = dg.DagsterRun(job_name=f"{stream}_slice", tags={"highwater/stream": stream})
    instance.add_run(run)
    instance.report_dagster_event(
        dg.DagsterEvent("PIPELINE_START", run.job_name, message="RUN_START"), run_id=run.run_id
    )
    return run.run_id


def status(instance: dg.DagsterInstance, run: str) -> dg.DagsterRunStatus:
    found = instance.get_run_by_id(run)
    assert found is not None
    return found.status


def test_a_run_whose_worker_is_gone_fails_and_lets_go_of_its_pool(instance: dg.DagsterInstance, ledger: Ledger) -> None:
    dead, alive, others = started(instance), started(instance), started(instance, "payments")
    pools = instance.event_log_storage
    pools.initialize_concurrency_limit_to_default("orders_current")
    assert pools.claim_concurrency_slot("orders_current", dead, "step").is_claimed
    Lease(ledger.database, f"run orders/{dead}", seconds=-1).take()
    assert end_runs_without_worker(instance, ledger, [STREAM], datetime.now(UTC)) == [], "they began just now"
    Lease(ledger.database, f"run orders/{alive}", seconds=600).take()
    later = datetime.now(UTC) + timedelta(seconds=61)
    assert end_runs_without_worker(instance, ledger, [STREAM], later) == [dead]
    assert status(instance, dead) == dg.DagsterRunStatus.FAILURE
    assert [status(instance, run) for run in (alive, others)] == [dg.DagsterRunStatus.STARTED] * 2
    assert pools.get_concurrency_info("orders_current").active_slot_count == 0
    [reported] = [
        e for e in instance.all_logs(dead) if e.dagster_event and e.dagster_event.event_type_value == "PIPELINE_FAILURE"
    ]
    assert "its lease in the ledger ran out" in str(reported.dagster_event and reported.dagster_event.message)
    run = instance.get_run_by_id(dead)
    assert run is not None
    assert run.tags["dagster/will_retry"] == "true", "Dagster retries it as one whose worker died"
    assert end_runs_without_worker(instance, ledger, [STREAM], later) == []


def test_a_worker_that_reports_again_after_the_ledger_was_unavailable_keeps_its_run(
    instance: dg.DagsterInstance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the ledger is unavailable for more than a term all leases run out; the next tick ended every run."""
    dead, alive = started(instance), started(instance)
    leases = {run: Lease(ledger.database, f"run orders/{run}", seconds=-1) for run in (dead, alive)}
    for lease in leases.values():
        lease.take()
    waited: list[float] = []

    def beat(seconds: float) -> None:
        waited.append(seconds)
        leases[alive].seconds = 60
        leases[alive].take()

    monkeypatch.setattr(dead_workers, "LOOK_AGAIN_SECONDS", LOOK_AGAIN_SECONDS)
    monkeypatch.setattr(dead_workers, "time", SimpleNamespace(sleep=beat))
    later = datetime.now(UTC) + timedelta(seconds=61)
    assert end_runs_without_worker(instance, ledger, [STREAM], later) == [dead]
    assert status(instance, alive) == dg.DagsterRunStatus.STARTED
    assert waited == [LOOK_AGAIN_SECONDS]
    assert LOOK_AGAIN_SECONDS > LEASE_SECONDS / RENEWALS_PER_TERM, "every living worker has had its beat"


def starting(instance: dg.DagsterInstance) -> str:
    """A run that was launched just now, and whose worker has not begun."""
    run = dg.DagsterRun(job_name="orders_slice", tags={"highwater/stream": "orders"})
    instance.add_run(run)
    instance.report_dagster_event(dg.DagsterEvent("PIPELINE_STARTING", run.job_name), run_id=run.run_id)
    return run.run_id


def begin(instance: dg.DagsterInstance, run: str) -> None:
    event = dg.DagsterEvent("PIPELINE_START", "orders_slice", message="RUN_START")
    instance.report_dagster_event(event, run_id=run)


def test_a_run_whose_worker_was_killed_before_it_began_fails_after_a_restart(
    instance: dg.DagsterInstance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no lease that could run out, and counted as in flight until Dagster ended it after five minutes."""
    run, now = starting(instance), datetime.now(UTC)
    monkeypatch.setattr(dead_workers, "get_first_look_time", lambda: now + timedelta(seconds=30))
    assert end_runs_without_worker(instance, ledger, [STREAM], now + timedelta(seconds=55)) == [], "it may be young"
    assert end_runs_without_worker(instance, ledger, [STREAM], now + timedelta(seconds=65)) == [run]
    assert status(instance, run) == dg.DagsterRunStatus.FAILURE
    found = instance.get_run_by_id(run)
    assert found is not None
    assert found.tags["dagster/will_retry"] == "true", "Dagster retries it as one whose worker died"


def test_a_worker_that_is_slow_to_begin_keeps_its_run(
    instance: dg.DagsterInstance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a very busy machine a worker was seen to need a minute, and nothing says that it is the longest."""
    before = datetime.now(UTC)
    monkeypatch.setattr(dead_workers, "get_first_look_time", lambda: before)
    run, later = starting(instance), before + timedelta(seconds=290)
    assert end_runs_without_worker(instance, ledger, [STREAM], later) == []
    monkeypatch.setattr(dead_workers, "get_first_look_time", lambda: later)
    with monkeypatch.context() as patched:
        patched.setattr(dead_workers, "_can_be_asked", lambda _: True)
        assert end_runs_without_worker(instance, ledger, [STREAM], later) == [], "its launcher looks after it"
    with monkeypatch.context() as patched:
        patched.setattr(dead_workers, "time", SimpleNamespace(sleep=lambda _: begin(instance, run)))
        assert end_runs_without_worker(instance, ledger, [STREAM], later) == [], "it began between the two looks"
    assert status(instance, run) == dg.DagsterRunStatus.STARTED


def test_lease_tick_and_second_look_leave_a_minute_of_three() -> None:
    """A term of the lease, a tick and the second look leave a minute to Dagster's retry, the queue and the run."""
    assert LEASE_SECONDS + REPAIR_SECONDS + LOOK_AGAIN_SECONDS <= 120


def test_code_servers_remember_when_they_looked_first() -> None:
    assert dead_workers.get_first_look_time() == dead_workers.get_first_look_time() <= datetime.now(UTC)


def test_a_run_that_ends_while_it_is_looked_at_is_left_alone(
    instance: dg.DagsterInstance, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(instance)
    found = instance.get_run_by_id(run)
    assert found is not None

    def ending(*_: object) -> list[str]:
        instance.report_run_canceled(found)
        return [run]

    monkeypatch.setattr(dead_workers, "select_runs_without_worker", ending)
    assert end_runs_without_worker(instance, ledger, [STREAM], datetime.now(UTC)) == []
    assert status(instance, run) == dg.DagsterRunStatus.CANCELED


def test_a_worker_holds_its_lease_while_it_works_and_beyond_the_runs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of its steps and Dagster's record of it the run still counts as started."""
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    monkeypatch.setattr("highwater.orchestration.resources.LEASE_SECONDS", 1.5)
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    seen: list[list[str]] = []

    @dg.op(required_resource_keys={"ledger"})
    def work(context) -> None:  # type: ignore[no-untyped-def]  # Dagster reads the annotation, and knows no text
        wait_until(lambda: bool(select_worker_leases(ledger.read_leases())), 10, "the first sign of life")
        first = max(select_worker_leases(ledger.read_leases()).values())

        def renewed() -> bool:
            """Alive after the first term; the thread that renews may come late on a busy machine."""
            alive = list(select_worker_leases(ledger.read_leases()))
            if datetime.now(UTC) <= first or not alive:
                return False
            seen.append(alive)
            return True

        wait_until(renewed, 10, "a sign of life after the first term")

    @dg.job(resource_defs={"ledger": LedgerResource()}, executor_def=dg.in_process_executor)
    def job() -> None:
        work()

    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance)
    assert seen == [[result.run_id]]
    wait_until(lambda: not select_worker_leases(ledger.read_leases()), 10, "the lease's end")


def test_a_ledger_that_is_unavailable_does_a_worker_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    beat = Ledger(f"sqlite:///{tmp_path / 'file' / 'ledger.sqlite'}").build_heartbeat("run orders/x", 0.2)
    beat.start()
    time.sleep(0.3)
    beat.stop()


def test_old_leases_are_forgotten(ledger: Ledger) -> None:
    """Each run has a name of its own; without this the table would grow with every worker that dies."""
    Lease(ledger.database, "run orders/long ago", seconds=-100).take()
    Lease(ledger.database, "run orders/just now", seconds=-1).take()
    Lease(ledger.database, "run orders/held", seconds=60).take()
    ledger.forget_leases(50)
    with ledger.database.reading() as connection:
        names = {row.name for row in connection.exec_driver_sql("SELECT name FROM leases")}
    assert names == {"run orders/just now", "run orders/held"}
