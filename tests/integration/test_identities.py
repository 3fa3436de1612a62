"""Each way to log in, against a real listener, by both clients: librdkafka and Spark's reader."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from highwater import settings
from highwater.errors import DependencyUnavailableError
from highwater.orchestration.resources import KafkaResource
from highwater.resources.kafka import Kafka
from highwater.resources.kafka_logins import escape_jaas_value
from highwater.resources.transactions import Transactions
from highwater.slices import OffsetRange
from tests.conftest import create_topic
from tests.helpers.identities import CLIENT_ID, CLIENT_SECRET, PASSWORD, SCOPE, Authority, Listening, TokenServer
from tests.helpers.spark_pages import fetch_page, list_answers
from tests.helpers.support import Message, fetch_rest, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dev.spark_connect import SparkConnect


pytestmark = pytest.mark.slow

VALUES = [b"one", b"two", b"three"]


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    """The broker, with records in `orders`."""
    home, authority = tmp_path_factory.mktemp("identities"), Authority("tests")
    with TokenServer(authority).serving(home) as tokens, Listening(home, authority, tokens) as found:
        create_topic(found.broker.bootstrap, "orders", 1, {})
        send(found.broker.bootstrap, "orders", [Message(b"k", value) for value in VALUES])
        found.set_scram(PASSWORD)
        yield found


def by_librdkafka(kafka: Kafka) -> list[bytes]:
    """The values of the topic, after a look at it by the admin client."""
    log = kafka.read_topic_state("orders").list_offset_ranges()
    assert log == {0: OffsetRange(0, len(VALUES))}
    return [message.value() or b"" for message in kafka.read("orders", log)]


def by_spark(spark: SparkSession, kafka: Kafka) -> list[bytes]:
    """The values of the topic, by Spark's reader."""
    asked = {"subscribe": "orders", "startingOffsets": "earliest", **kafka.build_spark_options()}
    read = spark.read.format("kafka").options(**asked).load().select("offset", "value")
    return [bytes(row.value) for row in sorted(read.collect(), key=lambda row: int(row.offset))]


def two_files(listening: Listening, home: Path, key: str, certificate: str) -> dict[str, str]:
    (home / "key.pem").write_text(key)
    (home / "certificate.pem").write_text(certificate)
    return listening.certificate(key_location=home / "key.pem", certificate_location=home / "certificate.pem")


def _two_files(listening: Listening, home: Path) -> dict[str, str]:
    mine = listening.authority.issue("client")
    return two_files(listening, home, mine.pkcs8, mine.certificate)


def _behind_a_password(listening: Listening, home: Path) -> dict[str, str]:
    mine = listening.authority.issue("client")
    key = mine.written(pkcs8=True, password="of the key")
    return two_files(listening, home, key, mine.certificate) | {"ssl.key.password": "of the key"}


def _pkcs1(listening: Listening, home: Path) -> dict[str, str]:
    mine = listening.authority.issue("client")
    return two_files(listening, home, mine.written(pkcs8=False), mine.certificate)


def _one_file(listening: Listening, home: Path) -> dict[str, str]:
    mine, both = listening.authority.issue("client"), home / "both.pem"
    both.write_text(mine.pkcs8 + mine.certificate)
    return listening.certificate(key_location=both, certificate_location=both)


def _in_the_setting(listening: Listening, home: Path) -> dict[str, str]:
    del home
    mine = listening.authority.issue("client")
    return listening.certificate(key_pem=mine.pkcs8, certificate_pem=mine.certificate)


LOGINS: Mapping[str, Callable[[Listening, Path], dict[str, str]]] = {
    "PLAIN": lambda listening, _: listening.password("PLAIN"),
    "SCRAM-SHA-256": lambda listening, _: listening.password("SCRAM-SHA-256"),
    "SCRAM-SHA-512": lambda listening, _: listening.password("SCRAM-SHA-512"),
    "OIDC": lambda listening, _: listening.oidc(),
    "a certificate and its key in two files": _two_files,
    "a key behind a password": _behind_a_password,
    "a key in PKCS#1": _pkcs1,
    "a certificate and its key in one file": _one_file,
    "a certificate and its key in the setting": _in_the_setting,
}


@pytest.mark.parametrize("login", LOGINS)
def test_one_setting_lets_both_clients_in(
    login: str, listening: Listening, spark: SparkSession, tmp_path: Path
) -> None:
    config = LOGINS[login](listening, tmp_path)
    kafka = Kafka(listening.sasl if "sasl.mechanisms" in config else listening.mutual, config)
    assert by_librdkafka(kafka) == VALUES
    asked = len(listening.tokens.asked)
    assert by_spark(spark, kafka) == VALUES
    if login == "OIDC":
        assert {*listening.tokens.asked} == {(200, CLIENT_ID, SCOPE)}
        assert len(listening.tokens.asked) > asked, "Spark's client logs in by itself"


def test_a_token_by_a_function_serves_every_client_of_librdkafka(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for Amazon MSK, whose tokens only Amazon's brokers take: here they are those of our token server."""
    asked: list[str] = []

    def generate(region: str) -> tuple[str, int]:
        asked.append(region)
        return listening.tokens.token(), int(1000 * (time.time() + listening.tokens.seconds))

    provider = SimpleNamespace(generate_auth_token=generate)
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", SimpleNamespace(MSKAuthTokenProvider=provider))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    secured = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(listening.ca)}
    kafka = Kafka(listening.sasl, {**secured, "sasl.mechanisms": "AWS_MSK_IAM"})
    assert by_librdkafka(kafka) == VALUES
    with Transactions(kafka, "highwater.pub.tests", "orders") as transactions:
        assert transactions.mark() is None
    assert {*asked} == {"eu-west-1"}
    assert len(asked) >= 3, "the admin client, the consumer and the producer log in by themselves"


def test_a_password_in_a_file_is_changed_without_a_restart(
    listening: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kafka.json"
    file.write_text(json.dumps(listening.password("SCRAM-SHA-512")) + "\n")
    monkeypatch.setenv(settings.KAFKA_BOOTSTRAP, listening.sasl)
    monkeypatch.setenv(f"{settings.KAFKA_CONFIG}_FILE", str(file))
    assert by_librdkafka(KafkaResource().open()) == VALUES
    listening.set_scram("the next one")
    try:
        file.write_text(json.dumps(listening.password("SCRAM-SHA-512", "the next one")) + "\n")
        assert by_librdkafka(KafkaResource().open()) == VALUES
    finally:
        listening.set_scram(PASSWORD)


def test_a_certificate_is_replaced_without_a_restart(
    listening: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka reads it once: the client of a process went on with the older one."""
    stranger, mine = Authority("strangers").issue("client"), listening.authority.issue("client")
    config = two_files(listening, tmp_path, stranger.pkcs8, stranger.certificate)
    monkeypatch.setenv(settings.KAFKA_BOOTSTRAP, listening.mutual)
    monkeypatch.setenv(settings.KAFKA_CONFIG, json.dumps(config))
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 2.0)
    with pytest.raises(DependencyUnavailableError, match="did not answer"):
        KafkaResource().open().list_topic_names()
    two_files(listening, tmp_path, mine.pkcs8, mine.certificate)
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 60.0)
    assert by_librdkafka(KafkaResource().open()) == VALUES


def test_no_secret_of_a_login_is_shown(
    listening: Listening,
    spark: SparkSession,
    spark_server: SparkConnect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The client secret of OIDC, right and wrong, and the content of the file of a key (I13)."""
    monkeypatch.setattr("highwater.resources.kafka.REQUEST_SECONDS", 2.0)
    right, wrong = Kafka(listening.sasl, listening.oidc()), Kafka(listening.sasl, listening.oidc("planted-wrong"))
    mine = listening.authority.issue("client")
    by_certificate = Kafka(listening.mutual, two_files(listening, tmp_path, mine.pkcs8, mine.certificate))
    for kafka in (right, by_certificate):
        assert by_spark(spark, kafka) == VALUES
    with pytest.raises(DependencyUnavailableError) as caught:
        wrong.list_topic_names()
    assert "invalid_client" in str(caught.value.found), "what the token endpoint answered"
    assert settings.KAFKA_CONFIG in str(caught.value.remedy)
    with pytest.raises(Exception, match=r"(?i)authentication|login|token") as caught_in_spark:
        by_spark(spark, wrong)
    seen = {"our error": f"{caught.value!r} {caught.value} {wrong!r}", "Spark's error": str(caught_in_spark.value)}
    seen["Spark's log"] = spark_server.log.read_text(errors="replace")
    seen |= {f"page {path}": fetch_page(spark_server, path) for path in ("environment", "SQL", "jobs", "connect")}
    seen |= {f"answer {path}": json.dumps(fetch_rest(spark_server, path)) for path in list_answers(spark_server)}
    seen["output"], seen["standard error"] = capfd.readouterr()
    assert any("kafka" in text for name, text in seen.items() if name.startswith("answer")), "queries are there"
    assert (401, CLIENT_ID, SCOPE) in listening.tokens.asked
    secrets = [CLIENT_SECRET, escape_jaas_value(CLIENT_SECRET), "planted-wrong", *mine.pkcs8.splitlines()[1:4]]
    assert not [(name, secret) for name, text in seen.items() for secret in secrets if secret in text]
