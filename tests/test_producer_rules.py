"""The rules for producers: by client and version what each calls ok, a warning, an error, or unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.producer_files import parse_producer_facts, parse_version
from highwater.producer_rules import UNTOLD, Client, ProducerFacts, Version, check_producer
from highwater.resources.kafka import Kafka
from highwater.resources.live_producer import list_own_producers, read_producer_facts
from highwater.resources.producer_properties import build_producer_properties
from highwater.topic_rules import Finding, Level
from tests.helpers.scene import Scene
from tests.helpers.support import make_stream

JAVA, LIBRDKAFKA = Client.JAVA, Client.LIBRDKAFKA
NEWEST: dict[Client, Version] = {JAVA: (4, 1), LIBRDKAFKA: (2, 16)}
IN_FLIGHT = "max.in.flight.requests.per.connection"


def found(client: Client, version: Version | None, **properties: str) -> dict[str, Finding]:
    """Findings by rule; `_` in a name means a dot."""
    named = {name.replace("_", "."): value for name, value in properties.items()}
    return {one.rule: one for one in check_producer(ProducerFacts("theirs", client, version, named, ours=True))}


def levels(found: dict[str, Finding]) -> dict[str, Level]:
    return {rule: one.level for rule, one in found.items() if one.level is not Level.OK}


@pytest.mark.parametrize(
    ("client", "version", "expected"),
    [
        (JAVA, (4, 1), {}),
        (JAVA, (3, 0, 1), {}),
        # KAFKA-13598: acks=all came, idempotence did not.
        (JAVA, (3, 0, 0), {"idempotence": Level.WARNING, "requests in flight": Level.WARNING}),
        (JAVA, (3, 1, 0), {"idempotence": Level.WARNING, "requests in flight": Level.WARNING}),
        (JAVA, (3, 1, 1), {}),
        (JAVA, (2, 8), {"acks": Level.ERROR, "idempotence": Level.WARNING, "requests in flight": Level.WARNING}),
        (
            JAVA,
            (2, 0),
            {"acks": Level.ERROR, "idempotence": Level.WARNING, "requests in flight": Level.WARNING}
            | {"retries": Level.ERROR, "delivery timeout": Level.UNKNOWN},
        ),
        (
            LIBRDKAFKA,
            (2, 16),
            {"idempotence": Level.WARNING, "requests in flight": Level.WARNING, "partitioner": Level.WARNING},
        ),
        (
            LIBRDKAFKA,
            (1, 5, 0),
            {"idempotence": Level.WARNING, "requests in flight": Level.WARNING, "partitioner": Level.WARNING}
            | {"retries": Level.WARNING, "request timeout": Level.WARNING},
        ),
    ],
)
def test_a_client_without_settings(client: Client, version: Version, expected: dict[str, Level]) -> None:
    assert levels(found(client, version)) == expected


def test_rules_that_depend_on_the_version_are_unknown_without_it() -> None:
    reported = found(JAVA, None)
    unknown = {"client", "acks", "idempotence", "requests in flight", "retries", "delivery timeout"}
    assert levels(reported) == dict.fromkeys(unknown, Level.UNKNOWN)
    assert "1 before, all from 3.0" in reported["acks"].where


@pytest.mark.parametrize(
    ("client", "properties", "rule", "level", "value"),
    [
        (JAVA, {"acks": "0"}, "acks", Level.ERROR, "socket"),
        (JAVA, {"acks": "1"}, "idempotence", Level.WARNING, "off"),
        (JAVA, {"retries": "0"}, "retries", Level.ERROR, "0:"),
        (JAVA, {"retries": "3", "enable_idempotence": "true"}, "retries", Level.WARNING, "3:"),
        (JAVA, {"acks": "1", "enable_idempotence": "true"}, "idempotence", Level.ERROR, "acks=1: the client refuses"),
        (JAVA, {IN_FLIGHT: "6", "enable_idempotence": "true"}, "idempotence", Level.ERROR, "refuses"),
        (JAVA, {IN_FLIGHT: "6"}, "requests in flight", Level.WARNING, "overtaken"),
        (JAVA, {"enable_idempotence": "false", IN_FLIGHT: "1"}, "requests in flight", Level.OK, "1"),
        (JAVA, {"delivery_timeout_ms": "30000"}, "delivery timeout", Level.WARNING, "30,000 ms"),
        (JAVA, {"partitioner_ignore_keys": "true"}, "partitioner", Level.ERROR, "ignored"),
        (JAVA, {"partitioner_class": "org.apache.kafka.RoundRobinPartitioner"}, "partitioner", Level.ERROR, "ignored"),
        (JAVA, {"partitioner_class": "com.example.Own"}, "partitioner", Level.UNKNOWN, "com.example.Own"),
        (JAVA, {"transactional_id": "t", "transaction_timeout_ms": "900001"}, "transactions", Level.ERROR, "900,000"),
        (LIBRDKAFKA, {"request_required_acks": "1"}, "acks", Level.ERROR, "1:"),
        (LIBRDKAFKA, {"message_timeout_ms": "0"}, "delivery timeout", Level.WARNING, "ever"),
        (LIBRDKAFKA, {"message_send_max_retries": "2"}, "retries", Level.WARNING, "2:"),
        (LIBRDKAFKA, {"request_timeout_ms": "5000"}, "request timeout", Level.WARNING, "5,000 ms"),
        (LIBRDKAFKA, {"partitioner": "random"}, "partitioner", Level.ERROR, "no key"),
        (LIBRDKAFKA, {"topic_partitioner": "random"}, "partitioner", Level.ERROR, "no key"),
        (LIBRDKAFKA, {"topic_request_required_acks": "1"}, "acks", Level.ERROR, "1:"),
        (JAVA, {"topic_acks": "1"}, "acks", Level.OK, "all"),  # to Java it is unknown, and does nothing
        (LIBRDKAFKA, {"partitioner": "murmur2"}, "partitioner", Level.OK, "murmur2"),
        (LIBRDKAFKA, {"queuing_strategy": "lifo"}, "queuing", Level.ERROR, "lifo"),
        (LIBRDKAFKA, {"transactional_id": "t"}, "idempotence", Level.OK, "on"),
    ],
)
def test_each_rule(client: Client, properties: dict[str, str], rule: str, level: Level, value: str) -> None:
    reported = found(client, NEWEST[client], **properties)[rule]
    assert (reported.level, value in reported.value) == (level, True), reported
    assert (reported.remedy == "") is (level is Level.OK)


def test_brokers_own_times_count() -> None:
    facts = ProducerFacts("theirs", LIBRDKAFKA, (2, 16), {"request.timeout.ms": "5000"}, replica_lag_ms=4000)
    assert {one.rule: one.level for one in check_producer(facts)}["request timeout"] is Level.OK


JAVA_FILE = r"""
# a comment
! another
producer.key.serializer = org.apache.kafka.common.serialization.StringSerializer
producer.acks : 1
producer.sasl.jaas.config=org.apache.kafka.Login required \
    password="planted";
consumer.group.id=x
"""


def test_files_of_both_clients_are_read(tmp_path: Path) -> None:
    java = parse_producer_facts("app.properties", JAVA_FILE)
    assert (java.client, java.set("acks"), java.set("group.id")) == (JAVA, "1", None)
    assert java.set("sasl.jaas.config") == 'org.apache.kafka.Login required password="planted";'
    assert "planted" not in repr(java)
    plain = {"message.timeout.ms": 60000, "enable.idempotence": True, "request.required.acks": -1}
    other = parse_producer_facts("app.json", json.dumps(plain))
    assert (other.client, other.set("delivery.timeout.ms"), other.idempotence.text) == (LIBRDKAFKA, "60000", "true")
    assert levels({one.rule: one for one in check_producer(other)}).keys() >= {name for name, _ in UNTOLD}


def test_a_file_with_the_prefix_of_topics_reports_librdkafka() -> None:
    assert parse_producer_facts("x", "topic.message.timeout.ms=60000").client is LIBRDKAFKA


def test_a_file_that_reports_no_client_asks_for_it() -> None:
    with pytest.raises(ConfigurationError, match="--client"):
        parse_producer_facts("x", "acks=all")
    assert parse_producer_facts("x", "acks=all", JAVA).client is JAVA
    with pytest.raises(ConfigurationError, match="begins as JSON") as caught:
        parse_producer_facts("x", '{"sasl.password": "planted"')
    assert "planted" not in str(caught.value)
    for text in ('["acks", "all"]', '{"acks": {"x": 1}}'):
        with pytest.raises(ConfigurationError, match="no flat object"):
            parse_producer_facts("x", text)
    with pytest.raises(ConfigurationError):
        parse_version("newest")
    assert parse_version("3.6.1") == (3, 6, 1)


def test_our_producer_is_asked_what_it_is() -> None:
    """By the client itself: a property under another name, and its effect, are found."""
    secret = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "u"}
    [ours] = list_own_producers(Kafka("127.0.0.1:1", {**secret, "sasl.password": "planted"}), make_stream("orders"))
    reported = {one.rule: one for one in check_producer(ours)}
    assert {one.level for one in reported.values()} == {Level.OK}
    assert reported["partitioner"].value == "murmur2_random"
    assert reported["acks"].where == "set"
    assert "planted" not in str(dict(ours.properties))
    plain = read_producer_facts(
        "weak", {**build_producer_properties("127.0.0.1:1"), "enable.idempotence": "false", "acks": "1"}
    )
    assert {one.rule: one.level for one in check_producer(plain)}["acks"] is Level.ERROR
    with pytest.raises(ConfigurationError, match="refuses"):
        read_producer_facts(
            "impossible", {"bootstrap.servers": "127.0.0.1:1", "enable.idempotence": "true", "acks": "1"}
        )


def test_the_command_refuses_a_file_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "app.properties").write_text("linger.ms=5\n")
    result = Scene("127.0.0.1:1", "orders", tmp_path).run("audit", "--producer", str(tmp_path / "app.properties"))
    assert result.exit_code == EXIT_PERMANENT
    assert "--client java" in result.output
    (tmp_path / "app.properties").write_bytes(b"client.id=\xff\n")
    result = Scene("127.0.0.1:1", "orders", tmp_path).run("audit", "--producer", str(tmp_path / "app.properties"))
    assert (result.exit_code, "not text in UTF-8" in result.output) == (EXIT_PERMANENT, True)
    assert "give the file" in Scene("127.0.0.1:1", "orders", tmp_path).run("audit", "--client", "java").output
