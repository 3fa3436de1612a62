"""Properties of Kafka clients: refused where they weaken a guarantee, and translated for Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from highwater.assets import raw
from highwater.errors import (
    ConfigurationError,
)
from highwater.resources.kafka import Kafka
from highwater.resources.transactions import build_publishing_properties

SECRET = "hunter2-secret"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("acks", "1", "before every in-sync replica has it"),
        ("request.required.acks", "0", "before every in-sync replica has it"),
        ("enable.idempotence", "false", "write a record twice"),
        ("max.in.flight", "6", "keep the order of at most 5"),
        ("retries", "0", "a short outage uses them up"),
        ("queuing.strategy", "lifo", "overtake what was sent before it"),
        ("partitioner", "random", "another partition"),
        ("topic.partitioner", "random", "another partition"),
        ("topic.acks", "1", "before every in-sync replica has it"),
        ("topic.auto.offset.reset", "latest", "loses what it jumped over"),
        ("enable.auto.commit", "true", "committed with the output"),
        ("isolation.level", "read_uncommitted", "records of aborted transactions"),
        ("group.id", "mine", "consumers are assigned"),
        ("transactional.id", "mine", "an old producer is fenced"),
        ("auto.offset.reset", "latest", "loses what it jumped over"),
        ("allow.auto.create.topics", "true", "would be created"),
    ],
)
def test_a_property_that_weakens_a_guarantee_is_refused(name: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", {name: value})
    assert f"{name} must not be {value}: " in caught.value.problem
    assert reason in caught.value.problem
    assert value in str(caught.value.found)
    assert "HIGHWATER_KAFKA_CONFIG" in caught.value.remedy


SOUND = {
    "acks": "all",
    "enable.idempotence": "true",
    "max.in.flight": "1",
    "enable.auto.commit": "false",
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    "allow.auto.create.topics": "false",
}


def test_a_value_that_weakens_nothing_is_taken_and_reaches_those_whom_it_concerns() -> None:
    kafka = Kafka("broker:9092", SOUND)
    assert kafka.build_spark_options() == Kafka("broker:9092").build_spark_options()
    published = build_publishing_properties(kafka, "t")
    assert (published["acks"], published["max.in.flight.requests.per.connection"]) == ("all", "1")
    for name, value in SOUND.items():
        assert Kafka("broker:9092", {name: value}).get_admin() is not None


def test_an_idle_connection_of_a_transactional_client_ends_long_before_the_transaction() -> None:
    """A call waited for ten minutes for a coordinator that had died: librdkafka looks again when a connection ends."""
    published = build_publishing_properties(Kafka("broker:9092"), "t")
    assert 2 * int(published["connections.max.idle.ms"]) < int(published["transaction.timeout.ms"])
    given = build_publishing_properties(Kafka("broker:9092", {"connections.max.idle.ms": "5000"}), "t")
    assert given["connections.max.idle.ms"] == "5000"


def test_the_prefix_of_topics_changes_nothing() -> None:
    """librdkafka takes a topic's property with it and without: what both clients get is the same."""
    given = {"acks": "all", "partitioner": "murmur2_random", "message.timeout.ms": "130000", "compression.type": "zstd"}
    plain = Kafka("broker:9092", given)
    prefixed = Kafka("broker:9092", {f"topic.{name}": value for name, value in given.items()})
    assert prefixed.build_spark_options() == plain.build_spark_options()
    assert build_publishing_properties(prefixed, "t") == build_publishing_properties(plain, "t")
    assert prefixed.get_admin() is not None


def test_a_property_that_librdkafka_does_not_know_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", {"no.such.property": SECRET}).list_topic_names()
    assert "no.such.property" in str(caught.value)
    assert SECRET not in str(caught.value)


SPARK: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "plain": ({}, {}),
    "scram over tls": (
        {
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "SCRAM-SHA-512",
            "sasl.username": 'u"1',
            "sasl.password": "p\\2",
            "ssl.ca.location": "/etc/ca.pem",
        },
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
            'username="u\\"1" password="p\\\\2";',
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": "/etc/ca.pem",
        },
    ),
    "mutual tls, pkcs12": (
        {"ssl.keystore.location": "/etc/k.p12", "ssl.keystore.password": "secret"},
        {
            "kafka.ssl.keystore.type": "PKCS12",
            "kafka.ssl.keystore.location": "/etc/k.p12",
            "kafka.ssl.keystore.password": "secret",
        },
    ),
    "oidc": (
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.credentials.client.id": "me",
            "sasl.oauthbearer.client.credentials.client.secret": 's"1',
            "sasl.oauthbearer.scope": "a b",
            "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool=1",
            "sasl.oauthbearer.token.endpoint.url": "https://login/token",
            "sasl.oauthbearer.sub.claim.name": "azp",
            "https.ca.pem": "-----BEGIN\nCA",
        },
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "OAUTHBEARER",
            "kafka.sasl.login.callback.handler.class": "org.apache.kafka.common.security.oauthbearer."
            "OAuthBearerLoginCallbackHandler",
            "kafka.sasl.login.connect.timeout.ms": "10000",
            "kafka.sasl.login.read.timeout.ms": "10000",
            "kafka.sasl.oauthbearer.token.endpoint.url": "https://login/token",
            "kafka.sasl.oauthbearer.sub.claim.name": "azp",
            "kafka.sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
            'clientId="me" clientSecret="s\\"1" scope="a b" extension_logicalCluster="lkc-1" '
            'extension_identityPoolId="pool=1" ssl.truststore.type="PEM" '
            'ssl.truststore.certificates="-----BEGIN\\nCA";',
        },
    ),
    "amazon msk": (
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "AWS_MSK_IAM"},
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "AWS_MSK_IAM",
            "kafka.sasl.client.callback.handler.class": "software.amazon.msk.auth.iam.IAMClientCallbackHandler",
            "kafka.sasl.jaas.config": "software.amazon.msk.auth.iam.IAMLoginModule required;",
        },
    ),
    "kerberos by a keytab": (
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.kerberos.keytab": "/etc/me.keytab",
            "sasl.kerberos.principal": "me/host@REALM",
            "sasl.kerberos.kinit.cmd": "kinit",
        },
        {
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.kerberos.service.name": "kafka",
            "kafka.sasl.jaas.config": "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true "
            'storeKey=true keyTab="/etc/me.keytab" principal="me/host@REALM";',
        },
    ),
    "kerberos as the JVM has it": (
        {"security.protocol": "SASL_SSL", "sasl.mechanisms": "GSSAPI", "sasl.kerberos.service.name": "broker"},
        {
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "GSSAPI",
            "kafka.sasl.kerberos.service.name": "broker",
        },
    ),
    "values that are written otherwise": (
        {"connections.max.idle.ms": "0", "socket.receive.buffer.bytes": "0", "socket.send.buffer.bytes": "0"}
        | {"client.dns.lookup": "USE_ALL_DNS_IPS", "fetch.wait.max.ms": "0"},
        {
            "kafka.connections.max.idle.ms": "-1",
            "kafka.receive.buffer.bytes": "-1",
            "kafka.send.buffer.bytes": "-1",
            "kafka.client.dns.lookup": "use_all_dns_ips",
            "kafka.fetch.max.wait.ms": "0",
        },
    ),
    "what concerns librdkafka alone": ({"log_level": "3", "linger.ms": "5", "compression.type": "zstd"}, {}),
    "the same in both": (
        {"client.id": "c", "client.rack": "r", "fetch.max.bytes": "9", "fetch.wait.max.ms": "8"},
        {
            "kafka.client.id": "c",
            "kafka.client.rack": "r",
            "kafka.fetch.max.bytes": "9",
            "kafka.fetch.max.wait.ms": "8",
        },
    ),
}


@pytest.mark.parametrize("case", SPARK)
def test_spark_is_given_the_same_cluster(case: str) -> None:
    ours, theirs = SPARK[case]
    found = Kafka("a:1,b:2", ours).build_spark_options()
    always = {"kafka.bootstrap.servers": "a:1,b:2", "kafka.allow.auto.create.topics": "false"}
    assert found == {**always, **theirs}


@pytest.mark.parametrize(("config", "python", "java"), [({}, 10, "1"), ({"fetch.wait.max.ms": "8"}, "8", "8")])
def test_a_fetch_waits_as_long_as_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, str], python: object, java: str
) -> None:
    """Both clients were given it, and both overwrote it without a word."""

    monkeypatch.setattr("highwater.resources.kafka.open_client", lambda kind, found, given: found)
    kafka: Any = Kafka("a:1", config)
    assert kafka.open_reader()["fetch.wait.max.ms"] == python
    source = MagicMock()
    raw._read_ranges(SimpleNamespace(spark=source, kafka=kafka), "t", {})  # type: ignore[arg-type]
    asked = source.read.format.return_value.options.call_args.kwargs
    assert asked["kafka.fetch.max.wait.ms"] == java
    assert int(asked["kafka.max.poll.records"]) > 5_000, "Spark asks twice where the log ends after every poll"


def oidc(**changes: str) -> dict[str, str]:
    return {
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.token.endpoint.url": "https://login/token",
        **changes,
    }


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification"),
        ({"ssl.certificate.location": "/c.pem", "ssl.key.location": "/k.pem"}, "ssl.key.location"),
        ({"ssl.certificate.location": "/c.pem"}, "ssl.key.location"),
        ({"sasl.oauthbearer.config": SECRET}, "sasl.oauthbearer.config"),
        ({"sasl.mechanisms": "GSSAPI", "sasl.username": "u", "sasl.password": SECRET}, "GSSAPI"),
        ({"plugin.library.paths": SECRET}, "plugin.library.paths"),
        ({"sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.client.secret": SECRET}, "OAUTHBEARER"),
        (oidc(**{"sasl.oauthbearer.grant.type": "urn:ietf:params:oauth:grant-type:jwt-bearer"}), "OAUTHBEARER"),
        (oidc(**{"sasl.oauthbearer.token.endpoint.url": ""}), "lacks a property"),
        (oidc(**{"sasl.oauthbearer.extensions": SECRET}), "sasl.oauthbearer.extensions"),
        (oidc(**{"https.ca.location": "probe"}), "https.ca.location"),
        (oidc(**{"sasl.mechanisms": "PLAIN"}), "PLAIN"),
        # The names are OpenSSL's, those that Java knows are others.
        ({"ssl.cipher.suites": "ECDHE-RSA-AES256-GCM-SHA384"}, "ssl.cipher.suites"),
        ({"ssl.ca.location": "probe"}, "ssl.ca.location"),
        ({"ssl.ca.location": "/"}, "ssl.ca.location"),  # a folder, which Java does not read
    ],
)
def test_options_that_spark_cannot_take_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", config).build_spark_options()
    assert named in caught.value.problem
    assert SECRET not in str(caught.value)
    assert caught.value.remedy
