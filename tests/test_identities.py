"""Each way to log in, against a real listener, by both clients: librdkafka and Spark's reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.resources.kafka import Kafka
from highwater.slices import OffsetRange
from tests.conftest import create_topic
from tests.identities import CLIENT_ID, PASSWORD, SCOPE, Authority, Listening, TokenServer
from tests.support import Message, send

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
    log = kafka.topic_state("orders").log()
    assert log == {0: OffsetRange(0, len(VALUES))}
    return [message.value() or b"" for message in kafka.read("orders", log)]


def by_spark(spark: SparkSession, kafka: Kafka) -> list[bytes]:
    """The values of the topic, by Spark's reader."""
    asked = {"subscribe": "orders", "startingOffsets": "earliest", **kafka.spark_options()}
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
    return two_files(listening, home, mine.encrypted("of the key"), mine.certificate) | {
        "ssl.key.password": "of the key"
    }


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
