"""A hold over runs of Dagster, on a real broker and a real Spark: records that the reference table lacks."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import dagster as dg
import pytest

from highwater.commit_records import from_user_metadata
from highwater.holds import Release
from highwater.orchestration.asset_keys import build_table_key
from tests.helpers.holding import HOLDING
from tests.helpers.runs import Runs, configure, find_failure_message
from tests.helpers.support import Bench, customers, order_message, read_topic

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect

pytestmark = pytest.mark.slow

TABLES = ("events", "rejects", "dlq", "current")


@pytest.fixture
def holding(bench: Bench, spark_server: SparkConnect, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench.stream = replace(bench.stream, on_reject=HOLDING)
    configure(bench, spark_server, monkeypatch)
    return bench


def offsets(bench: Bench, table: str) -> list[int]:
    return sorted(row["origin_offset"] for row in bench.rows(table))


def decided_in_order(bench: Bench) -> list[str]:
    """The slices as they were committed to events, one commit each."""
    from deltalake import DeltaTable

    history = DeltaTable(bench.lake.build_table_path("orders", "events")).history()
    commits = [from_user_metadata(one.get("userMetadata"), 0, None) for one in reversed(history)]
    written = [records for records in commits if records]
    assert all(len(records) == 1 for records in written)
    return [records[0].slice_key for records in written]


def test_a_held_slice_keeps_back_what_follows_and_raw_goes_on(holding: Bench) -> None:
    """The first is sound, the second waits for a customer, of the third nobody knows the customer.

    Slices are requested together, as the planner and repair do it.
    """
    bench = holding
    named = {3: "late", 7: "nobody", 8: "nobody"}
    bench.send(*[order_message(f"o{n}", 1, customer_id=named.get(n, "c1")) for n in range(9)])
    slices = [bench.plan(n, p0=(3 * n, 3 * n + 3)) for n in range(3)]
    keys = [slice_.key for slice_ in slices]
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", keys)
        runs = Runs(bench, instance)
        reported = find_failure_message(runs.run(keys))
        assert f"SliceHeldError: {keys[1]} is held by 1 record," in reported
        assert f"{bench.stream.topic} partition 0 offset 3" in reported
        assert "unresolved: customer_id is not in reference/customers" in reported
        assert "late" not in reported, "nothing of the record is repeated"
        assert len(bench.rows("raw")) == 9, "raw goes on"
        assert offsets(bench, "events") == [0, 1, 2], "what is before it is committed, nothing behind it"
        reported = find_failure_message(runs.run(keys[2:], "events"))
        assert f"OutOfTurnError: {keys[2]} may not go into orders/events before {keys[1]}" in reported
        assert "is held since" in reported
        [hold] = bench.ledger.holds.read_open("orders")
        assert (hold.slice_key, hold.found.records, hold.found.reason) == (keys[1], 1, "unresolved")

        customers(bench.lake, ["c1", "late"])
        reported = find_failure_message(runs.run(keys, *TABLES))
        assert f"SliceHeldError: {keys[2]} is held by 2 records" in reported
        assert offsets(bench, "events") == [*range(6)]
        assert [one.slice_key for one in bench.ledger.holds.read_open("orders")] == [keys[2]]

        assert bench.ledger.holds.release(keys[2], Release(True, "ann", "test data", datetime.now(UTC)))
        result = runs.run(keys, *TABLES)
        assert result.success, find_failure_message(result)
        for table in TABLES:
            assert runs.done(table) == set(keys)
        [record] = instance.fetch_materializations(build_table_key(bench.stream, "events"), limit=1).records
        assert "nothing is held" in str(record.asset_materialization.metadata["held"].value)
    assert offsets(bench, "events") == [*range(7)]
    assert {(row["origin_offset"], row["next_topic"]) for row in bench.rows("rejects")} == {
        (offset, bench.stream.parked_topic) for offset in (7, 8)
    }
    assert len(read_topic(bench.bootstrap, bench.stream.parked_topic)) == 2
    assert read_topic(bench.bootstrap, bench.stream.tier_topics[0]) == {}
    assert set(bench.current()) == {f"o{n}" for n in range(7)}
    assert decided_in_order(bench) == keys
    assert bench.failing() == {}
