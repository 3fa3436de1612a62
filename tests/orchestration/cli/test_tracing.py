"""`explain` and `locate` before there is anything to read: each says what is missing. The full story is in test_dlq."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
import pytest

from dev.planted import plant
from dev.processes import LOOPBACK, free_port
from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.locating import find_stream, locate
from highwater.orchestration.run_tags import PURPOSE, RANGE_START
from highwater.plans import Loss
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import store_raw
from tests.helpers.fake_topics import FakeTopics
from tests.helpers.scene import Scene
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from tests.conftest import TopicFactory


def test_every_topic_of_a_stream_leads_to_it() -> None:
    orders, payments = make_stream("orders"), replace(make_stream("payments"), name="payments")
    for topic in ("payments", "payments.dlq.1", "payments.dlq.2", "payments.parked"):
        assert find_stream([orders, payments], topic) is payments
    with pytest.raises(ConfigurationError, match="no stream has a topic 'order'") as caught:
        find_stream([orders], "order")
    assert "orders.dlq.1, orders.dlq.2, orders.parked" in str(caught.value.found)


def test_an_offset_that_was_lost_is_no_gap_of_a_slice_that_was_read(tmp_path: Path) -> None:
    """Retention took a part of the slice before it was read: what was accepted as lost is reported as that."""
    stream, ledger = make_stream("orders"), Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    ledger.add([SLICE])
    ledger.record_loss([Loss("orders", "orders", 0, 0, OffsetRange(0, 4), "expired", "ann", datetime.now(UTC))])
    lake, nobody = Lake(str(tmp_path / "lake")), Kafka(f"{LOOPBACK}:{free_port()}")
    write_raw(lake, [5, 6, 7])
    ends = [locate(ledger, nobody, lake, stream, "orders", 0, offset)[0].end for offset in (3, 4, 5)]
    assert ends == ["lost", "gap", "unknown"]


def test_a_record_of_a_slice_whose_key_was_retired_is_found(tmp_path: Path) -> None:
    ledger, lake = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Lake(str(tmp_path / "lake"))
    ledger.add([SLICE])
    write_raw(lake, [5, 6, 7])
    ledger.retired.retire("orders", [SLICE.key], datetime.now(UTC))
    [found] = locate(ledger, cast("Any", None), lake, make_stream("orders"), "orders", 0, 5)
    assert found.slice_ is not None
    assert found.slice_.key == SLICE.key
    assert found.to_plain()["commits"] == {"raw": 1}
    assert "committed to raw by attempt 1" in found.lines


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("orders", "unplanned: no slice holds it, and the topic could not be looked at: Kafka at "),
        ("orders.parked", "unknown: orders.parked could not be read there: Kafka at "),
    ],
)
def test_a_broker_that_is_unavailable_is_no_answer(tmp_path: Path, topic: str, said: str) -> None:
    """A script took it for one: the status was 0."""
    scene = Scene(f"{LOOPBACK}:{free_port()}", "orders", tmp_path)
    reported = scene.run("locate", topic, "0", "5")
    assert reported.exit_code == EXIT_TEMPORARY, reported.output
    assert reported.stdout.startswith(said)
    assert reported.stderr.startswith("error: Kafka at ")
    plain = scene.run("locate", topic, "0", "5", "--json")
    assert plain.exit_code == EXIT_TEMPORARY
    assert json.loads(plain.stdout)[0]["end"] == said.partition(":")[0]


def test_absent_offsets_are_reported_as_absent(tmp_path: Path) -> None:
    """The end of the parked topic is not waited for as if a record had to come."""
    stream, ledger = make_stream("orders"), Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    lake, ends = Lake(str(tmp_path / "lake")), {"orders": ("A", 7), "orders.parked": ("B", 3)}

    def found(topic: str, partition: int, offset: int, *there: str) -> tuple[str, str]:
        kafka: Any = FakeTopics({name: ends[name] for name in there})
        [one] = locate(ledger, kafka, lake, stream, topic, partition, offset)
        assert one.unseen is None
        return one.end, one.text

    assert found("orders.parked", 0, 3, *ends) == ("unknown", "there is no such offset yet: the high watermark is 3")
    assert found("orders.parked", 9, 0, *ends) == ("unknown", "orders.parked has no partition 9")
    assert found("orders.parked", 0, 1, *ends) == ("unknown", "no record with a Highwater envelope at this offset")
    assert "does not exist" in found("orders.parked", 0, 1, "orders")[1]
    assert found("orders.dlq.1", 0, 1, "orders")[0] == "unplanned"


SLICE = Slice("orders", "orders", "AAAAAAAAAAAAAAAAAAAAAA", 0, 0, {0: OffsetRange(0, 9)}, datetime.now(UTC))


def write_raw(lake: Lake, offsets: list[int]) -> None:
    rows = [
        {"slice": SLICE.key, "partition": 0, "offset": n, "timestamp_ms": 0, "key": b"k", "value": b"{}"}
        for n in offsets
    ]
    store_raw(lake, SLICE, rows)


@pytest.mark.slow
def test_unread_offsets_are_reported_with_a_reason(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    scene = Scene(bootstrap, topic(partitions=2), tmp_path)
    scene.write(15)
    producer = scene.transaction()
    producer.produce(scene.topic, b"open", partition=0)
    producer.flush(30)
    scene.run("plan", "orders", "--yes")
    scene.ledger.record_loss(
        [Loss("orders", scene.topic, 0, 1, OffsetRange(3, 5), "expired", "ann", datetime.now(UTC))]
    )

    def end(partition: int, offset: int) -> tuple[str, str]:
        [found] = json.loads(scene.run("locate", scene.topic, str(partition), str(offset), "--json").output)
        return found["end"], found["text"]

    assert end(0, 3) == ("unread", "planned, and not in raw yet")
    assert end(0, 15) == ("unplanned", "an open transaction holds it back: the last stable offset is 15")
    assert end(1, 0) == ("unplanned", "there is no such offset yet: the high watermark is 0")
    assert end(1, 4) == ("lost", "expired, accepted by ann, generation 0")
    assert end(7, 0) == ("unplanned", f"{scene.topic} has no partition 7")
    assert "there is no such offset yet" in scene.run("locate", scene.topic, "0", "99").output
    assert scene.run("locate", "nobodys", "0", "0").exit_code == EXIT_PERMANENT
    producer.abort_transaction(30)

    [slice_] = scene.slices()
    shown = scene.run("explain", slice_.key)
    assert shown.exit_code == 0, shown.output
    assert "incomplete: raw, events, rejects, dlq, current still to be written" in shown.output
    assert "15 offsets" in shown.output
    assert scene.run("explain", f"{scene.topic}@0000009").exit_code == EXIT_PERMANENT
    assert scene.run("explain", "no-key").exit_code == EXIT_PERMANENT


def test_runs_and_checks_are_reported_where_dagster_is(tmp_path: Path) -> None:
    stream, ledger = make_stream("orders"), Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    ledger.add([SLICE])
    key = SLICE.key
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_run(dg.DagsterRun(job_name="orders_slice", tags={RANGE_START: key, PURPOSE: "repair"}))
        living, dead = (
            dg.DagsterRun(job_name="orders_slice", tags={RANGE_START: key}, status=dg.DagsterRunStatus.STARTED)
            for _ in range(2)
        )
        instance.add_run(living)
        instance.add_run(dead)
        instance.report_runless_asset_event(dg.AssetMaterialization(dg.AssetKey(["orders", "raw"]), partition=key))
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                asset_key=dg.AssetKey(["orders", "current"]), check_name="versions_in_order", passed=True, partition=key
            )
        )
        with ledger.lease(f"run orders/{living.run_id}", seconds=60):
            found = explain(ledger, Lake(str(tmp_path / "lake")), stream, key, lambda: nullcontext(instance))
    runs = {run.run: run for run in found.runs or ()}
    assert (runs[dead.run_id].worker, runs[living.run_id].worker[:12]) == ("no lease", "lease until ")
    others = [run for run in runs.values() if run.run not in {dead.run_id, living.run_id}]
    assert [(run.status, run.purpose, run.worker) for run in others] == [("NOT_STARTED", "repair", "")]
    assert dict(found.checks or {}) == {"versions_in_order": "succeeded"}


def test_leases_and_rejects_by_reason_are_reported(tmp_path: Path) -> None:
    import pyarrow as pa

    stream, ledger = make_stream("orders"), Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    lake = Lake(str(tmp_path / "lake"))
    slices = [
        Slice("orders", "orders", "AAAAAAAAAAAAAAAAAAAAAA", 0, n, {0: OffsetRange(9 * n, 9 * n + 9)}, datetime.now(UTC))
        for n in (0, 1)
    ]
    ledger.add(slices)
    key, other = (slice_.key for slice_ in slices)
    parked, tier = stream.parked_topic, stream.tier_topics[0]
    rows = [
        (key, "invalid", "status.one_of", parked),
        (key, "unresolved", None, tier),
        (key, "unresolved", None, tier),
        (other, "invalid", "status.one_of", parked),
    ]
    schema = pa.schema([(name, pa.string()) for name in ("slice", "reason", "rule", "next_topic")])
    found = [dict(zip(schema.names, row, strict=True)) for row in rows]
    plant(
        lake.build_table_path("orders", "rejects"), pa.Table.from_pylist(found, schema), [SliceCommit(slices[0], 1, 3)]
    )
    with (
        ledger.lease("commit orders/raw", seconds=60),
        ledger.lease("merge orders/current", seconds=60),
        ledger.lease("commit orders2/raw", seconds=60),
        ledger.lease("alerts", seconds=60),
    ):
        reported = explain(ledger, lake, stream, key, None)
    assert [(one.reason, one.rule, one.records, one.next_topic) for one in reported.rejects] == [
        ("invalid", "status.one_of", 1, parked),
        ("unresolved", None, 2, tier),
    ]
    assert list(reported.leases) == ["commit orders/raw", "merge orders/current"]
    assert all(0 < (ends - datetime.now(UTC)).total_seconds() <= 60 for ends in reported.leases.values())
    assert any(line.startswith("lease: 'merge orders/current' is held until") for line in reported.lines)
    rejects = [["invalid", "status.one_of", "1", parked], ["unresolved", "", "2", tier]]
    assert (["rejected because", "rule", "records", "goes to"], rejects) in reported.tables
    assert explain(ledger, lake, stream, key, None).leases == {}
