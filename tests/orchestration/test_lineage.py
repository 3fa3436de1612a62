"""OpenLineage: the events of a step as a receiver gets them, and a receiver that is unavailable or hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openlineage.client.serde import Serde

from dev.paths import REPOSITORY
from dev.processes import LOOPBACK, free_port
from highwater.assets.work import SliceReport
from highwater.errors import BreakerOpenError
from highwater.orchestration import lineage, lineage_events
from highwater.orchestration.asset_keys import BY_NAME
from highwater.orchestration.lineage import emit_lineage
from highwater.orchestration.lineage_events import LineageStep, build_delta_dataset, build_kafka_dataset
from highwater.resources import lineage as sending
from highwater.resources.lineage import Sender, is_configured
from tests.helpers.lineage_receiver import DEADLINE, FIRST, RUN, Receiver, a_slice, is_valid, receiving, work


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as found:
        for name in ("OPENLINEAGE_CONFIG", "OPENLINEAGE_NAMESPACE", "OPENLINEAGE_DISABLED"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("OPENLINEAGE_URL", found.url)
        # The client writes them.
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TRANSPORTS__DEFAULT_HTTP__URL", found.url)
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TRANSPORTS__DEFAULT_HTTP__TYPE", "http")
        yield found


@pytest.fixture
def sender(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Sender:
    del receiver
    made = Sender(sending._connect, wait_seconds=DEADLINE)
    monkeypatch.setattr(lineage, "get_sender", lambda: made)
    return made


RETRIED = a_slice("orders.dlq.1", 3, p0=(2, 3))


def values_of(facet: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facet.items() if not name.startswith("_")}


def test_a_step_begins_and_completes_with_its_offsets_rows_and_version(receiver: Receiver, sender: Sender) -> None:
    with emit_lineage(work(FIRST, RETRIED), BY_NAME["raw"], "orders_slice") as report:
        report([SliceReport(FIRST, 1, 9, 16), SliceReport(RETRIED, 2, 1, 17)])
    assert sender.close()
    start, complete = receiver.events
    assert is_valid(start)
    assert is_valid(complete)
    assert [one["eventType"] for one in (start, complete)] == ["START", "COMPLETE"]
    assert start["run"]["runId"] == complete["run"]["runId"]
    for event in (start, complete):
        assert (event["job"]["namespace"], event["job"]["name"]) == ("highwater", "orders/raw")
        parent = event["run"]["facets"]["parent"]
        assert (parent["run"]["runId"], parent["job"]["name"]) == (RUN, "orders_slice")
        main, tier = event["inputs"]
        assert (main["namespace"], main["name"]) == ("kafka://kafka-1:9093", "orders")
        assert values_of(main["inputFacets"]["highwater_offsets"]) == {
            "slices": [
                {
                    "slice": "orders@0000000",
                    "topic": "orders",
                    "generation": 0,
                    "ranges": [{"partition": 0, "start": 0, "end": 10}, {"partition": 1, "start": 5, "end": 7}],
                }
            ],
            "rangesLeftOut": 0,
        }
        assert tier["name"] == "orders.dlq.1"
        assert len(tier["inputFacets"]["highwater_offsets"]["slices"]) == 1
        [table] = event["outputs"]
        assert (table["namespace"], table["name"]) == ("file", "/mnt/lake/orders/raw")
        assert table["facets"]["storage"]["storageLayer"] == "delta"
    assert "outputStatistics" not in start["outputs"][0].get("outputFacets", {})
    assert complete["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 10
    assert complete["outputs"][0]["facets"]["version"]["datasetVersion"] == "17"
    after = complete["run"]["facets"]["highwater_slices"]["slices"]
    assert [(one["slice"], one["attempt"], one["rows"]) for one in after] == [
        ("orders@0000000", 1, 9),
        ("orders.dlq.1@0000003", 2, 1),
    ]


@pytest.mark.parametrize(
    ("table", "inputs", "outputs"),
    [
        ("events", ["lake/orders/raw", "lake/reference/customers"], ["lake/orders/events"]),
        ("rejects", ["lake/orders/raw", "lake/orders/events"], ["lake/orders/rejects"]),
        (
            "dlq",
            ["lake/orders/rejects"],
            ["lake/orders/dlq", "orders.dlq.1", "orders.dlq.2", "orders.dlq.3", "orders.parked"],
        ),
        ("current", ["lake/orders/events"], ["lake/orders/current"]),
        ("metrics", ["lake/orders/events", "lake/orders/current"], ["lake/orders/metrics"]),
        ("published", ["lake/orders/events", "lake/orders/dlq"], ["lake/orders/published", "orders.accepted"]),
    ],
)
def test_a_table_is_made_from_the_tables_above_it(table: str, inputs: list[str], outputs: list[str]) -> None:
    event = LineageStep.from_work(work(FIRST, root="s3a://bucket/lake"), BY_NAME[table], "orders_slice").build_event(
        "START"
    )
    assert [one.name for one in event.inputs or []] == inputs
    assert [one.name for one in event.outputs or []] == outputs
    assert {one.namespace for one in event.inputs or []} == {"s3://bucket"}
    assert is_valid(Serde.to_dict(event))


def test_a_step_that_fails_says_by_which_error_and_nothing_of_its_text(receiver: Receiver, sender: Sender) -> None:
    """The text of an error may repeat a value of a record, or an address with a login."""
    with pytest.raises(BreakerOpenError), emit_lineage(work(FIRST), BY_NAME["events"], "orders_slice"):
        raise BreakerOpenError("hunter2", remedy="hunter2")
    with pytest.raises(ValueError, match="hunter2"), emit_lineage(work(FIRST), BY_NAME["events"], "orders_slice"):
        raise ValueError("hunter2")
    with pytest.raises(KeyboardInterrupt), emit_lineage(work(FIRST), BY_NAME["events"], "orders_slice"):
        raise KeyboardInterrupt
    assert sender.close()
    assert all(map(is_valid, receiver.events))
    states = [event["eventType"] for event in receiver.events]
    assert states == ["START", "FAIL", "START", "FAIL", "START", "ABORT"]
    messages = [event["run"]["facets"]["errorMessage"]["message"] for event in receiver.events[1::2]]
    assert messages == ["BreakerOpenError: see docs/runbook.md#breakeropenerror", "ValueError", "KeyboardInterrupt"]
    assert "hunter2" not in json.dumps(receiver.events)
    assert len({event["run"]["runId"] for event in receiver.events}) == 3


def test_a_receiver_that_hangs_holds_up_no_step(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver answers nothing until the step is long over, and the process ends without its answer."""
    receiver.answering.clear()
    made = Sender(sending._connect, wait_seconds=0.05)
    monkeypatch.setattr(lineage, "get_sender", lambda: made)
    with emit_lineage(work(FIRST), BY_NAME["raw"], "orders_slice") as report:
        receiver.wait_for(1)
        report([SliceReport(FIRST, 1, 9, 0)])
    assert not made.close()
    assert len(receiver.events) == 1
    assert "2 OpenLineage events were not delivered within 0.05 s" in caplog.text


def test_a_receiver_that_is_unavailable_fails_no_step(
    receiver: Receiver, sender: Sender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del receiver
    unavailable = f"http://user:hunter2@{LOOPBACK}:{free_port()}"
    monkeypatch.setenv("OPENLINEAGE_URL", unavailable)
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", unavailable)
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", '{"total": 0}')
    with emit_lineage(work(FIRST), BY_NAME["raw"], "orders_slice") as report:
        report([SliceReport(FIRST, 1, 9, 0)])
    assert sender.close()
    assert caplog.text.count("an OpenLineage event was not delivered: ConnectionError") == 2
    assert "hunter2" not in caplog.text


@pytest.mark.slow
def test_a_process_delivers_its_last_events_when_it_ends(receiver: Receiver) -> None:
    """The thread that sends ends with its process, which is long before the client is even imported."""
    program = """
from highwater.assets.work import SliceReport
from highwater.orchestration.lineage import emit_lineage
from highwater.orchestration.stream_assets import BY_NAME
from tests.helpers.lineage_receiver import FIRST, work

with emit_lineage(work(FIRST), BY_NAME["raw"], "orders_slice") as report:
    report([SliceReport(FIRST, 1, 9, 0)])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE, cwd=REPOSITORY)
    assert [event["eventType"] for event in receiver.events] == ["START", "COMPLETE"]


def test_an_event_that_cannot_be_made_fails_no_step(
    receiver: Receiver, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise ValueError

    monkeypatch.setattr(lineage_events, "_to_plain_slices", broken)
    with emit_lineage(work(FIRST), BY_NAME["raw"], "orders_slice") as report:
        report([SliceReport(FIRST, 1, 9, 0)])
    assert sender.close()
    assert receiver.events == []


def test_without_a_transport_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "get_sender", lambda: None)
    monkeypatch.setattr(lineage, "_build_step", None)
    with emit_lineage(work(FIRST), BY_NAME["raw"], "orders_slice") as report:
        report([SliceReport(FIRST, 1, 9, 0)])


def test_openlineages_own_variables_and_files_switch_it_on(tmp_path: Path) -> None:
    url = {"OPENLINEAGE_URL": "http://lineage:5000"}
    assert not is_configured({}, tmp_path, tmp_path)
    assert is_configured(url, tmp_path, tmp_path)
    assert is_configured({"OPENLINEAGE__TRANSPORT__TYPE": "console"}, tmp_path, tmp_path)
    assert not is_configured({**url, "OPENLINEAGE_DISABLED": "True"}, tmp_path, tmp_path)
    assert not is_configured({"OPENLINEAGE_CONFIG": str(tmp_path / "none.yml")}, tmp_path, tmp_path)
    (tmp_path / "openlineage.yml").write_text("transport: {type: console}\n")
    assert is_configured({}, tmp_path, tmp_path / "home")
    assert not is_configured({}, tmp_path / "home", tmp_path)
    (tmp_path / ".openlineage").mkdir()
    (tmp_path / ".openlineage" / "openlineage.yml").write_text("transport: {type: console}\n")
    assert is_configured({}, tmp_path / "home", tmp_path)


def test_a_file_names_another_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, config = tmp_path / "events", tmp_path / "lineage.yml"
    config.write_text(f"transport: {{type: file, log_file_path: {log}, append: true}}\n")
    monkeypatch.setenv("OPENLINEAGE_CONFIG", str(config))
    made = Sender(sending._connect, wait_seconds=DEADLINE)
    made.send(LineageStep.from_work(work(FIRST), BY_NAME["raw"], "orders_slice").build_event("START"))
    assert made.close()
    assert json.loads(log.read_text())["eventType"] == "START"


def test_a_file_without_a_transport_prints_no_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "lineage.yml"
    config.write_text("facets: {}\n")
    monkeypatch.setenv("OPENLINEAGE_CONFIG", str(config))
    assert sending._connect() is None
    assert capsys.readouterr().out == ""


def test_an_event_is_bounded() -> None:
    wide = a_slice("orders", 1, **{f"p{n}": (0, 1) for n in range(900)})
    again = a_slice("orders", 2, **{f"p{n}": (1, 2) for n in range(900)})
    event = Serde.to_dict(LineageStep.from_work(work(wide, again), BY_NAME["raw"], "orders_slice").build_event("START"))
    facet = event["inputs"][0]["inputFacets"]["highwater_offsets"]
    assert [len(one["ranges"]) for one in facet["slices"]] == [900, 100]
    assert facet["rangesLeftOut"] == 800


@pytest.mark.parametrize(
    ("path", "namespace", "name"),
    [
        ("/mnt/lake/orders/raw", "file", "/mnt/lake/orders/raw"),
        ("file:///mnt/lake/orders/raw", "file", "/mnt/lake/orders/raw"),
        ("s3a://bucket/lake/orders/raw", "s3://bucket", "lake/orders/raw"),
        ("s3://key:hunter2@bucket/orders/raw", "s3://bucket", "orders/raw"),
        (
            "abfss://lake@account.dfs.core.windows.net/orders/raw",
            "abfss://lake@account.dfs.core.windows.net",
            "orders/raw",
        ),
        ("gs://bucket/lake/orders/raw", "gs://bucket", "lake/orders/raw"),
        ("hdfs://namenode:8020/lake/orders/raw", "hdfs://namenode:8020", "/lake/orders/raw"),
        ("hdfs://cluster/lake/orders/raw", "hdfs://cluster:8020", "/lake/orders/raw"),
        ("dbfs://key:hunter2@place/lake/orders/raw", "dbfs://place", "/lake/orders/raw"),
    ],
)
def test_a_table_has_the_name_that_openlineage_gives_its_place(path: str, namespace: str, name: str) -> None:
    found = build_delta_dataset(path)
    assert (found.get_namespace(), found.get_name()) == (namespace, name)


@pytest.mark.parametrize(
    ("bootstrap", "namespace"),
    [
        ("kafka-1:9093,kafka-2:9093", "kafka://kafka-1:9093"),
        (" kafka-1 , kafka-2:9093", "kafka://kafka-1:9092"),
        ("SASL_SSL://kafka-1:9093", "kafka://kafka-1:9093"),
        ("[::1]:9093", "kafka://[::1]:9093"),
        ("[::1]", "kafka://[::1]:9092"),
    ],
)
def test_a_topic_has_the_name_that_openlineage_gives_it(bootstrap: str, namespace: str) -> None:
    found = build_kafka_dataset(bootstrap, "orders")
    assert (found.get_namespace(), found.get_name()) == (namespace, "orders")
