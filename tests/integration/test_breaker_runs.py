"""The breaker over runs of Dagster, on a real broker and a real Spark: records that the reference table lacks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from highwater.assets import events, raw
from highwater.declaration import Breaker
from highwater.errors import BreakerOpenError, RejectsOverLimitError
from highwater.orchestration.asset_keys import build_table_key
from highwater.resources.delta import query
from tests.helpers.runs import Runs, configure
from tests.helpers.support import Bench, customers, order_message

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

pytestmark = pytest.mark.slow


def offsets(bench: Bench, table: str, column: str) -> tuple[int, int]:
    """How many rows a table has of the only partition, and how many offsets; none lies beyond what was written."""
    counts = f"count(*) AS rows, count(DISTINCT {column}) AS offsets, max({column}) AS last"
    opened = bench.lake.open_stream_table("orders", table)
    assert opened is not None
    [found] = query(opened, f"SELECT {counts} FROM t")
    assert found["last"] == found["offsets"] - 1
    return found["rows"], found["offsets"]


@pytest.fixture
def bursting(bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench.stream = replace(bench.stream, breaker=Breaker(min_records=20))
    configure(bench, spark_server, monkeypatch)
    return bench


@pytest.mark.parametrize(("count", "each"), [(4, 40), pytest.param(20, 50_000, id="a million", marks=pytest.mark.long)])
def test_a_burst_opens_it_and_the_backlog_completes_when_the_cause_is_fixed(
    bursting: Bench, count: int, each: int
) -> None:
    """Half of the first slice is sound, nothing after it is."""
    bench, sound = bursting, each // 2
    slices = []
    for n, start in enumerate(range(0, count * each, each)):
        known = sound if n == 0 else 0
        bench.send(*[order_message(f"o{start + i}", 1, customer_id="c1" if i < known else "c9") for i in range(each)])
        slices.append(bench.plan(n, p0=(start, start + each)))
    keys = [slice_.key for slice_ in slices]
    raw.materialise(bench.work(*slices[:-1]))
    with pytest.raises(RejectsOverLimitError, match=f"{sound:,} of {each:,} records"):
        events.materialise(bench.work(*slices[:2]))
    circuit = bench.ledger.breakers.read_circuit("orders")
    assert circuit.state == "open"
    assert [one.slice_key for one in bench.ledger.breakers.list_refused("orders")] == keys[:2]
    with pytest.raises(BreakerOpenError):
        events.materialise(bench.work(*slices[2:-1]))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", keys)
        runs = Runs(bench, instance)
        assert runs.run(keys[-1:], raw_alone=True).success
        assert (runs.done("raw"), runs.done("events")) == ({keys[-1]}, set())
        assert offsets(bench, "raw", "offset") == (count * each,) * 2, "raw goes on: retention must not take it"
        assert bench.rows("events") == []
        assert [name for name in bench.kafka.list_topic_names() if name.startswith(f"{bench.stream.topic}.")] == [], (
            "no DLQ"
        )

        customers(bench.lake, ["c1", "c9"])
        cooled = replace(circuit, until=datetime.now(UTC))
        bench.ledger.breakers.update("orders", (), lambda *_: (cooled, ()))
        assert runs.run(keys[2:3]).success, "the probe"
        assert bench.ledger.breakers.read_circuit("orders").state == "closed"
        [record] = instance.fetch_materializations(build_table_key(bench.stream, "events"), limit=1).records
        assert "is the probe" in str(record.asset_materialization.metadata["breaker"].value)
    bench.materialise(*slices[:2], *slices[3:])
    assert bench.ledger.breakers.list_refused("orders") == []
    assert offsets(bench, "events", "origin_offset") == (count * each,) * 2
    assert bench.rows("rejects") == []
