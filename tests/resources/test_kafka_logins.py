"""Keys, tokens and files of logins, without a broker."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from dev.processes import LOOPBACK, free_port
from highwater import settings
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.orchestration.redaction import select_secret_values
from highwater.orchestration.resources import KafkaResource, list_known_secrets
from highwater.resources.kafka import Kafka
from highwater.resources.kafka_logins import build_librdkafka_login
from highwater.resources.kafka_tls import build_java_keys
from highwater.resources.schema_registry import build_schema_finder
from highwater.settings import Settings
from tests.helpers.identities import Authority, Identity

PHRASE = "phrase-of-the-key"


@pytest.fixture(scope="module")
def mine() -> Identity:
    return Authority("tests").issue("client")


def keys(place: Path, key: str, certificate: str) -> dict[str, str]:
    (place / "key.pem").write_text(key)
    (place / "certificate.pem").write_text(certificate)
    return {
        "ssl.key.location": str(place / "key.pem"),
        "ssl.certificate.location": str(place / "certificate.pem"),
        "ssl.key.password": PHRASE,
    }


@pytest.mark.parametrize("kind", ["pkcs1", "pkcs1 behind a password", "pkcs8", "pkcs8 behind a password"])
@pytest.mark.parametrize("together", [False, True], ids=["two files", "one file"])
def test_java_is_given_any_key_that_librdkafka_reads(
    kind: str, mine: Identity, tmp_path: Path, *, together: bool
) -> None:
    """Java reads PKCS#8 alone, and Java 17 no key that OpenSSL 3 encrypted: Spark failed, librdkafka did not."""
    key = mine.written(pkcs8=kind.startswith("pkcs8"), password=PHRASE if "password" in kind else None)
    config = keys(tmp_path, key, mine.certificate)
    if together:
        (tmp_path / "key.pem").write_text(mine.certificate + key)
        config["ssl.certificate.location"] = config["ssl.key.location"]
    if kind == "pkcs8":
        config.pop("ssl.key.password")
    found = build_java_keys(config)
    if together and kind == "pkcs8":
        assert found == {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(tmp_path / "key.pem")}
        return
    given = load_pem_private_key(found.pop("ssl.keystore.key").encode(), None)
    assert given.private_numbers() == mine.key.private_numbers()
    assert found == {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": mine.certificate.strip(),
    }, "neither the password nor the key goes with the certificate"


@pytest.mark.parametrize("password", [None, "another-one"])
def test_a_key_that_cannot_be_read_is_named_without_its_content(
    password: str | None, mine: Identity, tmp_path: Path
) -> None:
    config = keys(tmp_path, key := mine.written(pkcs8=True, password=PHRASE), mine.certificate)
    config |= {} if password is None else {"ssl.key.password": password}
    if password is None:
        config.pop("ssl.key.password")
    with pytest.raises(ConfigurationError, match=r"the private key of ssl\.key\.location cannot be read") as caught:
        Kafka("broker:9092", config).build_spark_options()
    assert "openssl pkcs8 -topk8" in str(caught.value.remedy)
    assert "BEGIN ENCRYPTED PRIVATE KEY" in str(caught.value.found)
    assert not [line for line in [*key.splitlines()[1:-1], password or PHRASE] if line in str(caught.value)]


def test_a_file_without_a_certificate_or_key_is_named(mine: Identity, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ssl\.certificate\.location holds no certificate"):
        build_java_keys(keys(tmp_path, mine.pkcs8, mine.pkcs8))
    with pytest.raises(ConfigurationError, match=r"ssl\.key\.location cannot be read"):
        build_java_keys(keys(tmp_path, mine.certificate, mine.certificate))


def token(config: dict[str, Any]) -> Any:
    return build_librdkafka_login({"sasl.mechanisms": "AWS_MSK_IAM", **config})["oauth_cb"]("")


@pytest.mark.parametrize(
    ("addresses", "variables", "region"),
    [
        ("b-1.demo.a1b2c3.c2.kafka.eu-west-1.amazonaws.com:9098", {"AWS_REGION": "us-east-1"}, "eu-west-1"),
        ("boot-a1b2.c1.kafka-serverless.us-west-2.amazonaws.com:9098", {}, "us-west-2"),
        ("b-1.demo.a1b2c3.c2.kafka.cn-north-1.amazonaws.com.cn:9098", {}, "cn-north-1"),
        ("kafka.inside:9098", {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-2"}, "us-east-1"),
        ("kafka.inside:9098", {"AWS_DEFAULT_REGION": "us-east-2"}, "us-east-2"),
    ],
)
def test_a_token_for_amazon_msk_is_of_the_region_of_the_cluster(
    addresses: str, variables: dict[str, str], region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = SimpleNamespace(generate_auth_token=lambda asked: (f"token of {asked}", 1_700_000_000_123))
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", SimpleNamespace(MSKAuthTokenProvider=provider))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert token({"bootstrap.servers": addresses}) == (f"token of {region}", 1_700_000_000.123)


def test_amazon_msk_without_its_package_or_a_region_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", None)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    config = {"security.protocol": "SASL_SSL", "sasl.mechanisms": "AWS_MSK_IAM"}
    with pytest.raises(ConfigurationError, match="aws-msk-iam-sasl-signer-python, which is not installed"):
        Kafka("broker:9092", config).list_topic_names()
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="needs the cluster's region") as caught:
        Kafka("broker:9092", config).list_topic_names()
    assert caught.value.remedy == "set AWS_REGION"


def test_credentials_that_are_unavailable_are_no_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waited for 10 s, and its error said neither what was missing nor that it may be back later."""

    def fails(_: str) -> None:
        raise OSError("no credentials")

    provider = SimpleNamespace(generate_auth_token=fails)
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", SimpleNamespace(MSKAuthTokenProvider=provider))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    with pytest.raises(DependencyUnavailableError, match="OSError: no credentials"):
        Kafka("broker:9092", {"security.protocol": "SASL_SSL", "sasl.mechanisms": "AWS_MSK_IAM"}).list_topic_names()


def test_kerberos_without_a_library_for_it_says_so() -> None:
    """The wheels of confluent-kafka have none; a library that has one only finds no ticket here."""
    with pytest.raises(ConfigurationError) as caught:
        Kafka("broker:9092", {"security.protocol": "SASL_SSL"}).list_topic_names()
    assert "GSSAPI" in str(caught.value.remedy)
    assert "docs/security.md" in str(caught.value.remedy)


def replaced(file: Path, text: str) -> None:
    """As Kubernetes and agents replace a file: another one takes its name."""
    other = file.with_suffix(".next")
    other.write_text(text)
    other.replace(file)


def test_a_client_is_made_again_when_its_login_or_a_file_of_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code server ticks for months: it went on with a certificate that had expired, until it was restarted."""
    ca, file = tmp_path / "ca.pem", tmp_path / "kafka.json"
    ca.write_text("one")
    config = {"ssl.ca.location": str(ca), "sasl.password": "planted-first"}
    file.write_text(json.dumps(config) + "\n")
    monkeypatch.setenv(f"{settings.KAFKA_CONFIG}_FILE", str(file))
    first = KafkaResource().open()
    assert KafkaResource().open() is first, "a client has threads of its own"
    replaced(ca, "two")
    second = KafkaResource().open()
    assert second is not first
    replaced(file, json.dumps(config | {"sasl.password": "planted-second"}))
    third = KafkaResource().open()
    assert third is not second
    assert third.build_client_config()["sasl.password"] == "planted-second"
    assert {"planted-first", "planted-second"} <= list_known_secrets(), "a client of the first one may still be open"
    file.unlink()
    assert "planted-first" in list_known_secrets(), "what cannot be read any more is a secret still"


def test_a_registry_client_is_made_again_when_its_certificate_is_replaced(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text("one")
    found = Settings.from_environment(
        {
            "HIGHWATER_SCHEMA_REGISTRY_URL": "https://registry:8081",
            "HIGHWATER_SCHEMA_REGISTRY_CONFIG": json.dumps({"ssl.ca.location": str(ca)}),
        }
    )
    first = build_schema_finder(found.schema_registry_url, found.schema_registry_config)
    assert build_schema_finder(found.schema_registry_url, found.schema_registry_config) is first, "it remembers schemas"
    replaced(ca, "two")
    assert build_schema_finder(found.schema_registry_url, found.schema_registry_config) is not first


def test_secrets_of_every_login_are_hidden_in_what_dagster_stores() -> None:
    """In the form of a JAAS configuration too: a quote in a secret was written otherwise there, and was shown."""
    secrets = {
        "sasl.oauthbearer.client.secret": 'planted"one',
        "sasl.oauthbearer.client.credentials.client.secret": "planted\\two",
        "sasl.password": "planted-three",
        "ssl.key.pem": "planted-four",
        "ssl.key.password": "planted-five",
    }
    found = Settings.from_environment({settings.KAFKA_CONFIG: json.dumps(secrets)})
    assert {*secrets.values(), 'planted\\"one', "planted\\\\two"} <= select_secret_values(found)


def test_a_login_that_fails_is_named_beside_the_request_that_nobody_answered() -> None:
    """It said that the brokers are to be looked at, which were well: the token endpoint was unavailable."""
    endpoint = f"http://{LOOPBACK}:{free_port()}/token"
    config = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": PHRASE,
        "sasl.oauthbearer.token.endpoint.url": endpoint,
    }
    with pytest.raises(DependencyUnavailableError) as caught:
        Kafka(f"{LOOPBACK}:{free_port()}", config).list_topic_names()
    assert "Could not connect to server" in str(caught.value.found)
    assert settings.KAFKA_CONFIG in str(caught.value.remedy)
    assert PHRASE not in str(caught.value)
    plain = Kafka(f"{LOOPBACK}:{free_port()}")
    with pytest.raises(DependencyUnavailableError) as caught:
        plain.list_topic_names()
    assert settings.KAFKA_BOOTSTRAP in str(caught.value.remedy)
