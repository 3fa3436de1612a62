"""Ledger, lake and Dagster's home lost together: an empty Dagster rebuilds the stream by its sensor and runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.operations.rebuilding_all import rebuild_from_kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.helpers.bench_records import read_content
from tests.helpers.support import Bench, Message, customers, order_message, read_topic
from tests.helpers.ticking import Ticking

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

pytestmark = pytest.mark.slow

PLANNER = "planner"
TABLES = ("raw", "events", "rejects", "dlq", "current")


@contextmanager
def deployed(bench: Bench, home: Path) -> Iterator[Ticking]:
    """A deployment that has only Kafka left: Dagster's home, a ledger and a lake in one empty folder."""
    (home / "dagster").mkdir(parents=True)
    bench.lake, bench.ledger = Lake(str(home / "lake")), Ledger(f"sqlite:///{home / 'ledger.sqlite'}")
    customers(bench.lake, ["c1"])
    with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.local_temp(str(home / "dagster")) as instance:
        patch.setenv("HIGHWATER_LAKE", bench.lake.root)
        patch.setenv("HIGHWATER_LEDGER_URL", f"sqlite:///{home / 'ledger.sqlite'}")
        yield Ticking(bench.stream, instance, home)


def take(deployment: Ticking) -> list[str]:
    """Let the planner plan, and run what it asks for; the keys that Dagster has then."""
    job = deployment.defs.resolve_job_def("orders_slice")
    for asked in deployment.tick(PLANNER).run_requests:
        chosen: Any = asked.asset_selection
        result = job.execute_in_process(instance=deployment.instance, tags=asked.tags, asset_selection=chosen)
        assert result.success
    return deployment.keys()


def test_dagsters_home_is_lost_with_all_the_rest(
    bench: Bench, spark_server: SparkConnect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", bench.bootstrap)
    monkeypatch.setenv("SPARK_REMOTE", spark_server.remote)
    parked = bench.stream.parked_topic
    bench.send(order_message("o1", 1), Message(b"o2", b"garbled", 0), order_message("o1", 2), order_message("o3", 1))
    with deployed(bench, tmp_path / "first") as first:
        assert take(first) == [f"{bench.stream.topic}@0000000"]
        events, current, sent = read_content(bench, "events"), bench.current(), read_topic(bench.bootstrap, parked)
        assert (len(events), len(sent)) == (3, 1)
    bench.send(order_message("o3", 2))

    with deployed(bench, tmp_path / "second") as second:
        assert not second.tick(PLANNER).run_requests
        [fault] = bench.ledger.sensor_faults.list_all()
        assert "its rejects were published before" in fault.problem
        assert second.keys() == []
        rebuild_from_kafka(bench.ledger, bench.lake, bench.kafka, bench.stream, [], print, dry_run=False, by="ann")
        [key] = take(second)
        assert key == f"{bench.stream.topic}@0000001", "no key of before is used again"
        held = [
            set(second.instance.get_materialized_partitions(build_table_key(bench.stream, name))) for name in TABLES
        ]
        assert held == [{key}] * len(TABLES)
        assert take(second) == [key], "nothing is left to plan"

    after = read_content(bench, "events")
    assert {origin: after[origin] for origin in events} == events
    assert [row["key"] for origin, row in after.items() if origin not in events] == ["o3"]
    now = bench.current()
    assert {key: row["version"] for key, row in now.items()} == {
        **{k: r["version"] for k, r in current.items()},
        "o3": 2,
    }
    assert read_topic(bench.bootstrap, parked) == sent, "no second copy"
    assert bench.failing() == {}
