"""A broker with an authorizer and a user with some permissions: missing ones are reported and stop nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from dev.broker import EmbeddedBroker
from dev.processes import LOOPBACK, free_port, wait_until
from highwater.declaration import Accepted
from highwater.errors import ConfigurationError, DependencyUnavailableError, TopicDriftError
from highwater.orchestration.reporting import doctor
from highwater.resources.dlq_topics import check_accepted, ensure_accepted, ensure_dlq_topics, ensure_no_drift
from highwater.resources.kafka import Kafka
from highwater.resources.producer_records import Record
from highwater.resources.topic_facts import fetch_allowed_operations, fetch_topic_facts
from highwater.resources.transactions import PublicationMark, Transactions
from highwater.topic_rules import Level, check_topic, describe_endurance
from tests.conftest import create_topic, grow
from tests.helpers.support import make_stream, order_message, send

pytestmark = pytest.mark.slow
PASSWORD = "not-a-secret"
LOGIN = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanisms": "PLAIN",
    "sasl.username": "limited",
    "sasl.password": PASSWORD,
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A broker by two addresses: at the first nobody is asked and all is allowed, at the second one is `limited`."""
    second, name = f"{LOOPBACK}:{free_port()}", "listener.name.guarded"
    broker = EmbeddedBroker(tmp_path_factory.mktemp("guarded"))
    known = broker.properties
    known["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    known["super.users"] = "User:ANONYMOUS"
    known["listeners"] += f",GUARDED://{second}"
    known["advertised.listeners"] += f",GUARDED://{second}"
    known["listener.security.protocol.map"] = "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,GUARDED:SASL_PLAINTEXT"
    known[f"{name}.sasl.enabled.mechanisms"] = "PLAIN"
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    known[f"{name}.plain.sasl.jaas.config"] = f'{login} required user_limited="{PASSWORD}";'
    broker.start()
    yield broker.bootstrap, second
    broker.stop()


def allow(bootstrap: str, kind: str, name: str, *operations: str) -> None:
    """Let the limited user do something with all whose names begin so, and wait until the broker knows."""
    from confluent_kafka.admin import (
        AclBinding,
        AclBindingFilter,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    rules = [
        AclBinding(
            ResourceType[kind],
            name,
            ResourcePatternType.PREFIXED,
            "User:limited",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    admin = AdminClient({"bootstrap.servers": bootstrap})  # it lives until its answers are there
    for future in admin.create_acls(rules).values():
        future.result(60)
    # The controller has answered; the broker's authorizer follows the log of metadata.
    every = cast("Any", AclBindingFilter)(  # whose stubs want a principal and a host
        ResourceType[kind], name, ResourcePatternType.PREFIXED, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    wait_until(lambda: {*rules} <= {*admin.describe_acls(every).result(60)}, 60, f"the ACLs of {name}")


def test_forbidden_settings_are_reported(guarded: tuple[str, str]) -> None:
    free, address = guarded
    stream = replace(make_stream("orders"), publishes=Accepted("orders.accepted"))
    for topic in ("orders", stream.parked_topic, "orders.accepted"):
        create_topic(free, topic, 1, {})
    send(free, "orders", [order_message("o1", 1)])
    kafka = Kafka(address, LOGIN)
    deployment: Any = cast("Any", SimpleNamespace(open_kafka=lambda: kafka))
    allow(free, "TOPIC", "orders", "READ", "DESCRIBE")

    facts = fetch_topic_facts(kafka, "orders")
    assert (facts.settings, facts.broker_settings) == (None, None)
    unknown = {one.rule for one in check_topic(facts) if one.level is Level.UNKNOWN}
    assert {"min.insync.replicas", "unclean election", "retention", "auto-creation"} <= unknown
    assert "is unknown" in describe_endurance(facts)

    assert fetch_allowed_operations(kafka, ["orders", "orders.absent"]) == {"orders": {"READ", "DESCRIBE"}}
    assert doctor._check_reading(deployment, "orders") == "a record of partition 0 was read"
    with pytest.raises(ConfigurationError) as caught:
        doctor._check_permissions(deployment, stream)
    assert caught.value.found == f"not allowed: WRITE on {stream.parked_topic}; WRITE on orders.accepted"
    allowing = f"kafka-acls --bootstrap-server {address} --add --allow-principal User:NAME --operation Write --topic"
    assert (
        caught.value.remedy
        == "; ".join(f"{allowing} {topic}" for topic in (stream.parked_topic, "orders.accepted"))
        + ", with this user's name"
    )
    with pytest.raises(ConfigurationError):
        doctor._check_transactions(deployment, stream)

    allow(free, "TRANSACTIONAL_ID", "highwater.pub.", "WRITE", "DESCRIBE")
    allow(free, "GROUP", "highwater.pub.", "READ", "DESCRIBE")
    record = Record("orders.accepted", b"k", b"v")
    with pytest.raises(ConfigurationError, match="forbids this user a topic"), transactions(kafka, "orders") as sending:
        sending.commit([record], PublicationMark(1, 1))
    allow(free, "TOPIC", "orders.", "WRITE")
    with transactions(kafka, "orders") as sending:
        sending.commit([record], PublicationMark(1, 1))
    text = doctor._check_permissions(deployment, stream)
    assert text.endswith(f"not there yet, or not to be seen: {', '.join(sorted(stream.tier_topics))}")
    assert "may be used" in doctor._check_transactions(deployment, stream)
    allow(free, "TOPIC", "orders", "DESCRIBE_CONFIGS")
    assert fetch_topic_facts(kafka, "orders").settings is not None


def transactions(kafka: Kafka, topic: str) -> Transactions:
    return Transactions(kafka, "highwater.pub.test", topic)


def test_the_mark_needs_the_right_to_read_its_topic(guarded: tuple[str, str]) -> None:
    free, address = guarded
    kafka = Kafka(address, LOGIN)
    stream = replace(make_stream("orders"), publishes=Accepted("unread.accepted"))
    create_topic(free, "unread.accepted", 1, {})
    allow(free, "TOPIC", "unread.accepted", "WRITE", "DESCRIBE")
    allow(free, "TRANSACTIONAL_ID", "highwater.pub.", "WRITE", "DESCRIBE")
    allow(free, "GROUP", "highwater.pub.", "READ", "DESCRIBE")
    deployment: Any = cast("Any", SimpleNamespace(open_kafka=lambda: kafka))
    with pytest.raises(ConfigurationError) as caught:
        doctor._check_permissions(deployment, stream)
    assert "READ on unread.accepted" in str(caught.value.found)
    with (
        pytest.raises(ConfigurationError, match="forbids this user a topic"),
        transactions(kafka, "unread.accepted") as sending,
    ):
        sending.commit([Record("unread.accepted", b"k", b"v")], PublicationMark(1, 1))


def test_the_cause_of_a_failed_transaction_is_named_whatever_call_meets_it() -> None:
    """A call that was under way learns only that the transaction's state is wrong."""
    from confluent_kafka import KafkaError, KafkaException

    found = transactions(Kafka(f"{LOOPBACK}:1"), "orders")
    late, cause = (
        KafkaException(KafkaError(code)) for code in (KafkaError._STATE, KafkaError.TOPIC_AUTHORIZATION_FAILED)
    )
    found._producer = MagicMock(begin_transaction=MagicMock(side_effect=cause))
    assert "forbids this user a topic" in str(found._translate_error(late))
    found._producer = MagicMock(begin_transaction=MagicMock(side_effect=late))
    assert isinstance(found._translate_error(late), DependencyUnavailableError)
    found._producer = MagicMock()
    assert isinstance(found._translate_error(late), DependencyUnavailableError)
    assert found._producer.abort_transaction.called, "what the question began is ended"


def test_a_transaction_that_is_longer_than_the_broker_allows_is_no_broker_unavailable(guarded: tuple[str, str]) -> None:
    kafka = Kafka(guarded[0], {"transaction.timeout.ms": "3600000"})
    with (
        pytest.raises(ConfigurationError, match=r"does not allow transactions of 3600000 ms") as caught,
        transactions(kafka, "__consumer_offsets"),
    ):
        pass
    assert "or raise transaction.max.timeout.ms on the brokers" in str(caught.value.remedy)


def test_a_topic_whose_name_collides_is_no_broker_unavailable(guarded: tuple[str, str]) -> None:
    free, _ = guarded
    create_topic(free, "clash", 1, {})
    create_topic(free, "clash_parked", 1, {})
    with pytest.raises(ConfigurationError, match=r"takes no topic of the name clash\.parked"):
        ensure_dlq_topics(Kafka(free), make_stream("clash"))


def test_topics_are_created_and_grown_where_that_is_allowed(guarded: tuple[str, str]) -> None:
    free, address = guarded
    kafka = Kafka(address, LOGIN)
    bills = replace(make_stream("bills"), publishes=Accepted("bills.accepted"))
    create_topic(free, "bills", 1, {})
    with pytest.raises(ConfigurationError, match="topic bills may not be used by this user"):
        kafka.read_topic_state("bills")
    create_topic(free, "visible", 1, {})
    allow(free, "TOPIC", "visible", "READ", "DESCRIBE")
    seen = kafka.read_topic_states(["bills", "visible"])
    assert ({*seen.found}, {*seen.denied}) == ({"visible"}, {"bills"})
    allow(free, "TOPIC", "bills", "DESCRIBE", "DESCRIBE_CONFIGS")
    for look in (ensure_no_drift, check_accepted):
        with pytest.raises(ConfigurationError, match="is not there, and may not be created"):
            look(kafka, bills)
    allow(free, "TOPIC", "bills.", "CREATE")
    assert (ensure_no_drift(kafka, bills)[1], "which is allowed" in check_accepted(kafka, bills)) == (False, True)
    assert [topic for topic in kafka.list_topic_names() if topic.startswith("bills")] == ["bills"]

    allow(free, "TOPIC", "bills.", "DESCRIBE", "DESCRIBE_CONFIGS")
    ensure_dlq_topics(kafka, bills)
    ensure_accepted(kafka, bills)
    grow(free, "bills", 3)
    for ask in (ensure_dlq_topics, ensure_accepted, ensure_no_drift, check_accepted):
        with pytest.raises(TopicDriftError, match="may not be grown") as narrow:
            ask(kafka, bills)
        for topic in bills.published_topics:
            assert f"kafka-topics --bootstrap-server {address} --alter --topic {topic} --partitions 3" in (
                narrow.value.remedy
            )
    allow(free, "TOPIC", "bills.parked", "ALTER")
    with pytest.raises(TopicDriftError) as narrow:
        ensure_dlq_topics(kafka, bills)
    assert "bills.parked" not in narrow.value.remedy, "it was grown"
    allow(free, "TOPIC", "bills.", "ALTER")
    ensure_dlq_topics(kafka, bills)
    assert {len(kafka.read_topic_state(topic).partitions) for topic in bills.published_topics} == {3}
