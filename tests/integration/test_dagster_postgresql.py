"""Dagster on PostgreSQL, configured by our dagster.yaml: directly, and through PgBouncer in transaction mode."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
import yaml

from dev import postgresql as servers
from dev.dagster_services import DagsterServices
from dev.postgresql import Server
from dev.processes import accepts, free_port, wait_until
from highwater.orchestration.run_tags import RETRY
from highwater.resources.ledger import Ledger
from tests.helpers.run_queue import TIER, add_runs, list_dequeued

pytestmark = pytest.mark.slow

OURS = (Path(__file__).parents[2] / "dagster.yaml").read_text()
SLICES = dg.DynamicPartitionsDefinition(name="orders_slices")


@dg.asset(partitions_def=SLICES, pool="orders")
def table(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(metadata={"slice": context.partition_key})


@dg.asset_check(asset=table)
def whole() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


def configure(server: Server, database: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Write our dagster.yaml with the block that a person takes the comment signs off."""
    text = servers.dagster_storage(OURS, server.port)
    assert yaml.safe_load(text)["storage"]["postgres"]["postgres_db"]["port"] == server.port
    (home / "dagster.yaml").write_text(text)
    for name, value in servers.dagster_variables(database).items():
        patch.setenv(name, value)


@pytest.fixture(params=["postgresql_server", "pgbouncer_server"])
def instance(
    request: pytest.FixtureRequest, postgresql_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    with postgresql_server.databases() as create:
        configure(request.getfixturevalue(request.param), create(), tmp_path, monkeypatch)
        with dg.DagsterInstance.from_config(str(tmp_path)) as made:
            yield made


def test_a_run_and_all_that_it_records_is_stored(instance: dg.DagsterInstance) -> None:
    keys = [f"orders@{n:07d}" for n in range(3)]
    instance.add_dynamic_partitions("orders_slices", keys)
    assert instance.get_dynamic_partitions("orders_slices") == keys, "in the order in which they were added"
    dg.materialize([table, whole], instance=instance, partition_key=keys[1], tags={"highwater/stream": "orders"})
    assert instance.get_materialized_partitions(dg.AssetKey("table")) == {keys[1]}
    event = instance.get_latest_materialization_event(dg.AssetKey("table"))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["slice"].value == keys[1]
    [run] = instance.get_runs(dg.RunsFilter(tags={"highwater/stream": "orders"}))
    assert run.status == dg.DagsterRunStatus.SUCCESS
    check = instance.event_log_storage.get_latest_asset_check_execution_by_key([whole.check_key])[whole.check_key]
    assert str(check.status.value) == "SUCCEEDED"


def test_the_queue_keeps_our_limits(instance: dg.DagsterInstance) -> None:
    retries = add_runs(instance, [f"{TIER}@{n:07d}" for n in range(4)], RETRY, dg.DagsterRunStatus.QUEUED)
    [main] = add_runs(instance, ["orders@0000000"], "plan", dg.DagsterRunStatus.QUEUED)
    first, *others = list_dequeued(instance)
    assert first == main
    assert len(others) == 1
    assert others[0] in retries


def test_a_pool_has_one_place(instance: dg.DagsterInstance) -> None:
    storage = instance.event_log_storage
    storage.initialize_concurrency_limit_to_default("orders")
    first, second = (storage.claim_concurrency_slot("orders", run, "step") for run in ("a", "b"))
    assert (first.is_claimed, second.is_claimed) == (True, False)
    storage.free_concurrency_slots_for_run("a")
    assert storage.claim_concurrency_slot("orders", "b", "step").is_claimed


# A sensor requests a run, which writes to the ledger as a step of ours does.
PLANNING = """
import dagster as dg
from datetime import UTC, datetime
from highwater.orchestration.resources import LedgerResource
from highwater.slices import OffsetRange, Slice


@dg.op(required_resource_keys={"ledger"})
def plan(context):
    planned = Slice("orders", "orders", "A", 0, 0, {0: OffsetRange(0, 5)}, datetime.now(UTC))
    assert context.resources.ledger.open().add([planned])


@dg.job
def planning():
    plan()


@dg.sensor(job=planning, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def planner(context):
    return dg.RunRequest(run_key="once")


defs = dg.Definitions(jobs=[planning], sensors=[planner], resources={"ledger": LedgerResource()})
"""


def test_daemon_code_server_and_worker_share_pgbouncer_with_the_ledger(
    postgresql_server: Server, pgbouncer_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's daemon launches the sensor's run; storage and ledger are one database, in transaction mode."""
    (tmp_path / "planning.py").write_text(PLANNING)
    home = tmp_path / "dagster"
    home.mkdir()
    with postgresql_server.databases() as create:
        database = create()
        url = pgbouncer_server.url(database)
        configure(pgbouncer_server, database, home, monkeypatch)
        variables = {"DAGSTER_HOME": str(home), "HIGHWATER_LEDGER_URL": url}
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **variables, "PYTHONPATH": path}
        services = DagsterServices(tmp_path, environment, ui_port=free_port(), module="planning")
        try:
            services.touch.start()
            services.launch_code()
            assert services.code is not None
            services.code.wait_healthy(lambda: accepts(services._code_port), 120)
            services._launch(services.daemon)
            with dg.DagsterInstance.from_config(str(home)) as instance:
                ended = dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE])
                wait_until(lambda: instance.get_runs_count(ended) > 0, 120, "the end of the run")
                [run] = instance.get_runs()
                assert run.status == dg.DagsterRunStatus.SUCCESS, services.daemon.tail()
        finally:
            services.stop()
        ledger = Ledger(url)
        assert ledger.count_slices() == {("orders", "orders"): 1}


def test_a_webserver_leaves_its_timeout_on_connections_that_others_get(
    postgresql_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the page gives the webserver another address. With one connection it is the next client that gets it."""
    with servers.pgbouncer(postgresql_server, pool_size=1) as bouncer, postgresql_server.databases() as create:
        database = create()
        configure(bouncer, database, tmp_path, monkeypatch)
        with dg.DagsterInstance.from_config(str(tmp_path)) as made:
            assert timeout(bouncer, database) == "0"
            storage: Any = made.run_storage
            storage.optimize_for_webserver(statement_timeout=15_000, pool_recycle=3600, max_overflow=20)
            assert made.get_runs() == []
            assert timeout(bouncer, database) == "15s"


def timeout(server: Server, database: str) -> object:
    with sa.create_engine(server.url(database), poolclass=sa.NullPool).connect() as connection:
        return connection.exec_driver_sql("SHOW statement_timeout").scalar_one()
