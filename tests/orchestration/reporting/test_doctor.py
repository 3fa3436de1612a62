"""The doctor tries everything, and what fails keeps nothing else from being tried."""

from __future__ import annotations

import errno
import io
import json
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dev.processes import LOOPBACK, free_port
from highwater.declaration import Accepted, Foreign
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError, PermanentError
from highwater.formats import Json
from highwater.orchestration.checking import topic_audit
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from highwater.orchestration.reporting import doctor
from highwater.resources.delta_rs_writes import remove_left_trials, try_storage
from highwater.resources.dlq_topics import ensure_dlq_topics
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.settings import Settings
from highwater.topic_rules import Setting
from tests.conftest import create_topic
from tests.helpers.lagging import Deployed
from tests.helpers.scene import Scene
from tests.helpers.support import customers, make_stream
from tests.helpers.topic_facts import SAFE, with_setting
from tests.helpers.written_tables import STREAM

if TYPE_CHECKING:
    from highwater.orchestration.deployment import Deployment
    from tests.conftest import TopicFactory


def settings(**environment: str) -> Settings:
    return Settings.from_environment(environment)


def test_a_lake_is_written_to_and_left_clean(tmp_path: Path) -> None:
    assert "can be written to" in doctor._check_lake(str(tmp_path / "not" / "yet" / "there"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DependencyUnavailableError, match="nothing can be written"):
        doctor._check_lake(str(tmp_path / "file"))


@pytest.mark.parametrize("call", ["write", "flush"])
def test_a_full_disk_is_found_and_leaves_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file fits on a full disk, and the remedy was about permissions."""

    class FullDisk(io.BytesIO):
        def write(self, data: object) -> int:
            return self.refuse() if call == "write" and len(cast("bytes", data)) > 4096 else 0

        def flush(self) -> None:
            if call == "flush" and not self.closed:
                self.refuse()

        def refuse(self) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: FullDisk())
    with pytest.raises(DependencyUnavailableError, match="No space left on device; remedy: free space there"):
        doctor._check_lake(str(tmp_path))


def test_a_killed_doctor_leaves_nothing_in_a_local_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file stayed there for ever."""
    seen: list[list[Path]] = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append([*tmp_path.iterdir()]))
    doctor._check_lake(str(tmp_path))
    assert seen == [[]], "a file that has no name ends with its process"


@pytest.mark.parametrize(("age", "left"), [(timedelta(minutes=59), 2), (timedelta(minutes=61), 0)])
def test_maintenance_removes_what_killed_doctors_left_in_a_store(
    age: timedelta, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path.as_uri()
    pq.write_table(pa.table({"n": [1]}), tmp_path / "beside.parquet")
    with monkeypatch.context() as killed:
        killed.setattr(
            "deltalake.fs.DeltaStorageHandler.delete_dir", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            try_storage(root)
    remove_left_trials(root, datetime.now(UTC) + age)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 1 + left
    assert tmp_path / "beside.parquet" in files


def test_what_cannot_be_removed_stops_no_maintenance(tmp_path: Path) -> None:
    remove_left_trials(f"s3a://{tmp_path.name}.invalid/lake", datetime.now(UTC))
    remove_left_trials(str(tmp_path / "not" / "there"), datetime.now(UTC))


def test_a_store_of_objects_is_written_to_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_storage", lambda _: try_storage(tmp_path.as_uri()))
    assert doctor._check_lake("gs://bucket/lake") == "gs://bucket/lake: a table was written, read and removed"
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize(("step", "done"), [("write_deltalake", "written"), ("DeltaTable", "read")])
def test_denied_store_operations_are_reported(
    step: str, done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("denied")

    monkeypatch.setattr(f"deltalake.{step}", refuse)
    with pytest.raises(DependencyUnavailableError, match=rf"could not be {done}; found: denied; remedy: .* may list"):
        try_storage(tmp_path.as_uri())


def test_denied_removal_from_a_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("denied")

    monkeypatch.setattr("deltalake.fs.DeltaStorageHandler.delete_dir", refuse)
    with pytest.raises(
        DependencyUnavailableError, match=r"could not be removed; found: denied; remedy: .* the rest at that place"
    ):
        try_storage(tmp_path.as_uri())


def test_a_store_that_nobody_serves_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"ENDPOINT_URL": f"http://{LOOPBACK}:{free_port()}", "ALLOW_HTTP": "true", "REGION": "nowhere"}
    for name, value in {**answers, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "planted"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(DependencyUnavailableError, match="did not answer a probe") as caught:
        doctor._check_lake("s3a://bucket/lake")
    assert "planted" not in str(caught.value)


def test_a_lake_that_no_spark_opens_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that is written on trial failed first, so that the scheme was not named."""
    written: list[str] = []
    monkeypatch.setattr(doctor, "try_storage", written.append)
    with pytest.raises(ConfigurationError, match="remedy: name the lake s3a://bucket/lake"):
        doctor._check_lake("s3://bucket/lake")
    assert written == []


def test_the_ledger_is_written_to_and_left_clean(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    assert doctor._check_ledger(cast("Deployment", SimpleNamespace(open_ledger=lambda: ledger))).endswith(
        "it can be written to"
    )
    assert ledger.read_leases() == {}


@pytest.mark.parametrize(("seconds", "text"), [(3600, "1:00:00 ahead"), (-7, "0:00:07 behind"), (4, "")])
def test_a_clock_that_differs_from_the_ledgers_is_an_error(seconds: int, text: str) -> None:
    """Retries came an hour late, and every connection was fine."""
    ledger = SimpleNamespace(measure_clock_skew=lambda: timedelta(seconds=seconds))
    asked = cast("Deployment", SimpleNamespace(open_ledger=lambda: ledger))
    if not text:
        assert "agrees" in doctor._check_clock(asked)
        return
    with pytest.raises(ConfigurationError, match=f"the database is {text}; remedy: synchronise"):
        doctor._check_clock(asked)


def test_two_dagster_instances_that_tick_at_the_same_time_are_an_error(tmp_path: Path) -> None:
    """Two deployments on one ledger did each other's work, and nothing named them."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    asked, stream = cast("Deployment", SimpleNamespace(open_ledger=lambda: ledger)), make_stream("orders")
    now = datetime.now(UTC)

    def seen(name: str, minutes_ago: float) -> None:
        ledger.instances.record(["orders"], name, f"{name}.example:/dagster", now - timedelta(minutes=minutes_ago))

    assert doctor._check_instances(asked, stream) == "no sensor ticked yet"
    seen("old", 9)
    seen("old", 4)
    seen("new", 3)
    assert doctor._check_instances(asked, stream).startswith("new (new.example:/dagster), last seen"), (
        "it replaced the old"
    )
    ledger.instances.record(["payments"], "other", "other.example:/dagster", now)
    seen("old", 2)
    with pytest.raises(ConfigurationError, match="2 Dagster instances work on orders at the same time") as caught:
        doctor._check_instances(asked, stream)
    assert "old.example:/dagster" in str(caught.value.found)
    assert "new.example:/dagster" in str(caught.value.found)
    assert "stop the sensors" in caught.value.remedy

    def unavailable() -> None:
        raise DependencyUnavailableError("no broker answers", remedy="wait")

    deployment = cast(
        "Deployment", SimpleNamespace(open_ledger=lambda: ledger, open_kafka=unavailable, open_lake=unavailable)
    )
    shown = {one.what: one.error for one in doctor._check_stream(deployment, stream)}
    assert isinstance(shown["Dagster instances of orders"], ConfigurationError), "whatever Kafka answers"
    # The new one goes on alone.
    seen("new", -4)
    later = now + timedelta(minutes=4)
    assert ledger.instances.list_concurrent("orders", later) == []
    # The old one comes back, long after; its first tick is no overlap, its second one is.
    ledger.instances.record(["orders"], "old", "old.example:/dagster", later + timedelta(minutes=1))
    assert ledger.instances.list_concurrent("orders", later + timedelta(minutes=1)) == []
    ledger.instances.record(["orders"], "new", "new.example:/dagster", later + timedelta(minutes=2))
    ledger.instances.record(["orders"], "old", "old.example:/dagster", later + timedelta(minutes=2))
    assert len(ledger.instances.list_concurrent("orders", later + timedelta(minutes=2))) == 2
    assert ledger.instances.list_concurrent("orders", later + timedelta(minutes=8)) == [], "both were stopped"


def test_options_that_spark_cannot_take_are_reported_before_the_first_read() -> None:
    """It was reported by the first run that read the topic, while planning went on."""
    kafka = Kafka("nowhere:1", {"plugin.library.paths": "planted"})
    with pytest.raises(ConfigurationError, match=r"plugin\.library\.paths") as caught:
        doctor._check_spark_options(cast("Deployment", SimpleNamespace(open_kafka=lambda: kafka)))
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HIGHWATER_LOG_FORMAT", "xml"),
        ("HIGHWATER_DOCS_URL", "docs"),
        ("HIGHWATER_METRICS_LISTEN", "9464"),
        ("HIGHWATER_SENSORS", "on"),
    ],
)
def test_a_variable_that_only_other_processes_read_is_tried_too(name: str, value: str) -> None:
    """Sensors stayed off, or the code server did not start, and the doctor was content."""
    assert doctor._check_process_settings({name: "", "HIGHWATER_SENSORS": "running"})
    with pytest.raises(ConfigurationError, match=f"{name} .*found: {value}"):
        doctor._check_process_settings({name: value})


def test_the_receiver_of_alerts_is_reached_and_reported_nothing() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        address = f"http://{LOOPBACK}:{server.getsockname()[1]}/planted"
        assert "nothing was posted" in doctor._check_receiver(address)
        taken, _ = server.accept()
        with taken:
            taken.settimeout(5)
            assert taken.recv(1) == b""
    for wrong in (f"http://{LOOPBACK}:{free_port()}/planted", "ftp://planted", "http://[planted", "http://h:planted/"):
        with pytest.raises(HighwaterError) as caught:
            doctor._check_receiver(wrong)
        assert "planted" not in str(caught.value)


def test_a_stream_with_schemas_needs_a_registry_that_answers() -> None:
    """Asked where one is configured or needed; what it has is counted, and its password is not reported."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'["orders-value"]'
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    assert doctor._needs_registry(make_stream("orders", value=Json(registry=True)))
    assert not doctor._needs_registry(make_stream("orders"))
    with pytest.raises(ConfigurationError, match="HIGHWATER_SCHEMA_REGISTRY_URL"):
        doctor._check_registry(settings())
    server = HTTPServer((LOOPBACK, 0), Answers)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://user:planted@{LOOPBACK}:{server.server_port}"
        assert doctor._check_registry(settings(HIGHWATER_SCHEMA_REGISTRY_URL=url)) == "1 subjects"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(DependencyUnavailableError) as caught:
        doctor._check_registry(settings(HIGHWATER_SCHEMA_REGISTRY_URL=url))
    assert "planted" not in str(caught.value)


def test_dagster_needs_its_home_and_its_file(tmp_path: Path) -> None:
    for environment in ({}, {"DAGSTER_HOME": str(tmp_path)}):
        with pytest.raises(ConfigurationError):
            doctor._check_dagster(environment)
    (tmp_path / "dagster.yaml").write_text("")
    assert "can be written to" in doctor._check_dagster({"DAGSTER_HOME": str(tmp_path)})
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.get_dynamic_partitions("highwater_doctor") == []


def test_storage_of_dagster_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    """Only that the file could be read was looked at."""
    broken = tmp_path / "planted"
    broken.write_text("no folder")
    storage = {"storage": {"sqlite": {"base_dir": str(broken / "planted")}}}
    (tmp_path / "dagster.yaml").write_text(json.dumps(storage))
    with pytest.raises(DependencyUnavailableError, match="cannot be written to") as caught:
        doctor._check_dagster({"DAGSTER_HOME": str(tmp_path)})
    assert str(broken) not in str(caught.value)


@pytest.mark.parametrize("text", ["strage: {}", "storage: [", "storage: {postgres: {postgres_url: {env: NOT_SET}}}"])
def test_storage_of_dagster_that_nobody_can_open_is_no_storage_that_is_unavailable(tmp_path: Path, text: str) -> None:
    (tmp_path / "dagster.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match="cannot be written to"):
        doctor._check_dagster({"DAGSTER_HOME": str(tmp_path)})


def test_a_rule_of_a_topic_that_is_broken_fails_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a warning without the command that fixes it, and the exit status was 0."""
    unclean = with_setting(SAFE, unclean_leader_election_enable="true", retention_bytes="9")
    monkeypatch.setattr(doctor, "_fetch_main_facts", lambda *_: unclean)
    monkeypatch.setattr(topic_audit, "fetch_topic_facts", lambda _, topic: replace(unclean, topic=topic))
    kafka = cast("Deployment", SimpleNamespace(open_kafka=lambda: None))
    stream = replace(make_stream("orders"), publishes=Accepted("orders.accepted"))
    found = {one.what: one for one in doctor._check_topic_rules(kafka, stream)}
    assert found.keys() == {
        "topic orders: retention by size",
        *(f"topic {name}: unclean election" for name in ("orders", *stream.published_topics)),
    }
    assert {"orders.parked", "orders.accepted"} < {*stream.published_topics}
    failed, warned = found["topic orders: unclean election"], found["topic orders: retention by size"]
    assert isinstance(failed.error, PermanentError)
    assert failed.row[0] == "failed"
    assert failed.row[3].endswith("--entity-name orders --add-config unclean.leader.election.enable=false")
    assert (warned.row[0], warned.row[3].endswith("retention.bytes=-1")) == ("warning", True)


def test_the_commands_that_allow_operations_are_whole() -> None:
    """They lacked the broker, and named placeholders for operation and topic."""
    text = doctor._build_acl_commands("broker:9092", {"orders": ["DESCRIBE", "READ"], "a": [], "b": ["WRITE"]})
    tool = "kafka-acls --bootstrap-server broker:9092 --add --allow-principal User:NAME"
    first = f"{tool} --operation Describe --operation Read --topic orders"
    assert text == f"{first}; {tool} --operation Write --topic b, with this user's name"


@pytest.mark.parametrize(
    ("retention", "state"), [(timedelta(minutes=30), "failed"), (timedelta(minutes=60), "warning"), (None, None)]
)
def test_retention_is_compared_with_the_age_of_what_is_unread(
    retention: timedelta | None, state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor took nothing for unread, so retention always sufficed."""
    deployed = Deployed(tmp_path)
    deployed.read(*range(6))  # the oldest unread record came 40 minutes ago
    milliseconds = -1 if retention is None else int(retention / timedelta(milliseconds=1))
    facts = with_setting(SAFE, retention_ms=str(milliseconds))
    monkeypatch.setattr(
        doctor,
        "fetch_topic_facts",
        lambda _, topic, oldest=None, *, age_known=True: replace(facts, oldest_unread=oldest, age_known=age_known),
    )
    monkeypatch.setattr(doctor, "check_published_topics", lambda *_: ({}, []))
    asked: Any = SimpleNamespace(
        open_ledger=lambda: deployed.ledger, open_kafka=lambda: deployed.kafka, open_lake=lambda: deployed.lake
    )
    found = {one.what: one.row[0] for one in doctor._check_topic_rules(asked, STREAM)}
    assert found.get("topic orders: retention") == state
    unplanned = replace(STREAM, name="new")
    assert list(doctor._check_topic_rules(asked, unplanned)) == [], "nobody is late before the first plan"


@pytest.mark.parametrize(
    ("stored", "warned"), [("2880001", False), ("2879999", True), ("-1", False), (None, False)], ids=str
)
def test_a_topic_of_another_system_that_keeps_less_than_its_delay_is_warned_of(
    stored: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of it went before they were due, and nothing reported it beforehand."""
    settings = {} if stored is None else {"retention.ms": Setting(stored, "DYNAMIC_TOPIC_CONFIG")}
    monkeypatch.setattr(doctor, "fetch_topic_settings", lambda *_: settings)
    monkeypatch.setattr(doctor, "has_broker_timestamps", lambda *_: False)
    kafka = SimpleNamespace(bootstrap="broker:9092", read_topic_state=lambda _: SimpleNamespace(partitions={0: None}))
    stream = replace(make_stream("orders"), foreign=(Foreign("connect.dlq", timedelta(minutes=20)),))
    found = doctor._check_foreign_topic(
        cast("Deployment", SimpleNamespace(open_kafka=lambda: kafka)), stream, "connect.dlq"
    )
    assert (found.warning, found.text.startswith("1 partitions, timestamps set by producers")) == (warned, True)
    if warned:
        assert found.text.endswith("it keeps a record for 0:48:00, which waits there for up to 0:24:00")
        assert found.remedy.endswith("--entity-name connect.dlq --add-config retention.ms=2880000")


def test_all_that_fails_is_reported_at_once(tmp_path: Path) -> None:
    result = Scene(f"{LOOPBACK}:{free_port()}", "orders", tmp_path).run("doctor", "--json")
    states = {row["tried"]: row["state"] for row in json.loads(result.stdout)}
    assert {name: states[name] for name in ("declarations", "ledger", "lake")} == dict.fromkeys(
        ("declarations", "ledger", "lake"), "ok"
    )
    assert {states[name] for name in ("Kafka", "topic orders", "reference table reference/customers")} == {"failed"}
    assert result.exit_code in {EXIT_PERMANENT, EXIT_TEMPORARY}
    remedies = {row["tried"]: row["remedy"] for row in json.loads(result.stdout) if row["state"] == "failed"}
    assert all(remedies.values())
    assert "security.protocol" in remedies["Kafka"], "a listener of another protocol does not answer either"


def test_a_configuration_that_is_refused_is_one_line_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", '{"enable.auto.commit": "true"}')
    result = Scene(f"{LOOPBACK}:{free_port()}", "orders", tmp_path).run("doctor", "--json")
    found = {row["tried"]: row for row in json.loads(result.stdout)}
    assert "enable.auto.commit" in found["Kafka"]["found"]
    assert found["ledger"]["state"] == "ok"
    assert "reference table reference/customers" in found
    assert result.exit_code == EXIT_PERMANENT


@pytest.mark.slow
def test_forbidden_and_wrong_broker_resources_are_reported(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> None:
    scene = Scene(bootstrap, topic(partitions=2), tmp_path)
    customers(Lake(str(tmp_path / "lake")))

    def states() -> dict[str, str]:
        return {row["tried"]: row["state"] for row in json.loads(scene.run("doctor", "--json").stdout)}

    assert (states()["transactions of orders"], states()["group highwater.orders"]) == ("ok", "ok")
    ensure_dlq_topics(scene.kafka, make_stream(scene.topic))
    found = states()
    expected = ("Kafka", f"topic {scene.topic}", "DLQ topics of orders", "transactions of orders")
    assert {found[name] for name in (*expected, "reference table reference/customers")} == {"ok"}
    assert found[f"topic {scene.topic}: replication"] == "warning"

    (tmp_path / "drifted").mkdir()
    drifted = Scene(bootstrap, topic(partitions=2), tmp_path / "drifted")
    create_topic(bootstrap, f"{drifted.topic}.parked", 1, {})
    reported = drifted.run("doctor").output
    assert "failed" in next(line for line in reported.splitlines() if "DLQ topics of orders" in line)
    assert "retention.ms=604800000" in reported
    assert "--add-config message.timestamp.type=LogAppendTime" in reported, "the command that fixes it"
