"""Dagster on PostgreSQL, configured by our dagster.yaml: directly, and through PgBouncer in transaction mode."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
import yaml

from dev import postgresql as servers
from dev.postgresql import Server
from tests import test_queue as queue

pytestmark = pytest.mark.slow

OURS = (Path(__file__).parents[1] / "dagster.yaml").read_text()
SLICES = dg.DynamicPartitionsDefinition(name="orders_slices")


@dg.asset(partitions_def=SLICES, pool="orders")
def table(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    return dg.MaterializeResult(metadata={"slice": context.partition_key})


@dg.asset_check(asset=table)
def whole() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


def configure(server: Server, database: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Write our dagster.yaml with the block that a person takes the comment signs off."""
    lines = OURS.splitlines()
    first = lines.index("# storage:")
    last = next(at for at in range(first, len(lines)) if not lines[at].startswith("#"))
    block = [line.removeprefix("# ") for line in lines[first:last]]
    assert yaml.safe_load("\n".join(block))["storage"]["postgres"]["postgres_db"]["port"] == 5432
    lines[first:last] = [line.replace("5432", str(server.port)) for line in block]
    (home / "dagster.yaml").write_text("\n".join(lines))
    named = {"USERNAME": servers.OWNER, "PASSWORD": "unused", "HOST": "127.0.0.1", "DB": database}
    for name, value in named.items():
        patch.setenv(f"DAGSTER_PG_{name}", value)


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
    retries = queue.add(instance, [f"{queue.TIER}@{n:07d}" for n in range(4)], queue.RETRY, dg.DagsterRunStatus.QUEUED)
    [main] = queue.add(instance, ["orders@0000000"], "plan", dg.DagsterRunStatus.QUEUED)
    first, *others = queue.dequeued(instance)
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
