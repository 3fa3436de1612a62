"""`highwater serve-spark`: a Connect server that can commit to the lake of the deployment."""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from dev import paths
from dev.processes import LOOPBACK, Child, accepts, free_port, wait_until
from highwater.errors import ConfigurationError
from highwater.orchestration.cli.main import main
from highwater.resources import local_spark
from highwater.resources.jars import OWN_JAR
from highwater.resources.local_spark import SERVER, build_server_conf, parse_property
from highwater.resources.object_store import ensure_log_store
from highwater.resources.spark import STATIC_CONF, close, connect, delta_errors, prepare
from highwater.settings import Settings
from tests.helpers.support import read_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONFIGURED = {"SPARK_CONF_DIR": "/etc/spark"}


def conf_of(environment: dict[str, str]) -> dict[str, str]:
    return build_server_conf(Settings.from_environment(environment), environment)


def test_a_server_has_what_no_session_can_set() -> None:
    assert conf_of(CONFIGURED) == {"spark.app.name": "highwater", **STATIC_CONF}


def test_a_server_opens_the_store_that_the_variables_of_aws_name() -> None:
    """Servers of the compose file and of the chart had no address of the store, and no provider of credentials."""
    lake = {**CONFIGURED, "HIGHWATER_LAKE": "s3a://lake/x", "AWS_ENDPOINT_URL": "http://s3:5000"}
    found = {name.rpartition("s3a.")[2]: value for name, value in conf_of(lake).items() if "s3a" in name}
    assert set(found) == {
        "impl",
        "aws.credentials.provider",
        "endpoint",
        "path.style.access",
        "connection.ssl.enabled",
    }
    assert (found["endpoint"], found["connection.ssl.enabled"]) == ("http://s3:5000", "false")


def test_the_master_of_a_server_is_the_one_that_is_set() -> None:
    assert "spark.master" not in conf_of(CONFIGURED), "a folder of settings may name it"
    assert conf_of({"HIGHWATER_SPARK_MASTER": "spark://m:7077"})["spark.master"] == "spark://m:7077"


@pytest.mark.parametrize("text", ["spark.master", "=x", ""])
def test_a_property_without_a_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="NAME=VALUE"):
        parse_property(text)
    assert parse_property("spark.x=a=b") == ("spark.x", "a=b")


def test_the_process_becomes_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: began.append(words))
    for name, value in {"SPARK_REMOTE": "sc://other:1", "SPARK_CONF_DIR": str(tmp_path), "AWS_REGION": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    arguments = ["serve-spark", "--host", "0.0.0.0", "--conf", "spark.driver.memory=3g"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    [words] = began
    assert [words[1:3], words[-1]] == [["--class", SERVER], str(OWN_JAR)]
    assert {
        "spark.connect.grpc.binding.address=0.0.0.0",
        "spark.connect.grpc.binding.port=15002",
        "spark.driver.memory=3g",
    } <= set(words)
    assert Path(words[0]).is_file()
    assert not {"SPARK_REMOTE", "AWS_REGION"} & set(os.environ), "the server would be a client, or refuse the region"


def test_nothing_of_a_client_is_left(tmp_path: Path) -> None:
    environment = {"SPARK_REMOTE": "sc://x", "SPARK_CONNECT_MODE_ENABLED": "1", "JAVA_HOME": "/opt/java"}
    local_spark.prepare_environment(Settings.from_environment({"HIGHWATER_HOME": str(tmp_path)}), environment)
    assert environment == {"JAVA_HOME": "/opt/java"}


def count_compiled_classes(ui_port: int) -> int:
    """How many classes the server has generated and compiled, by its page."""
    with urllib.request.urlopen(f"http://{LOOPBACK}:{ui_port}/metrics/json") as page:
        [found] = [v for k, v in json.load(page)["histograms"].items() if k.endswith("CodeGenerator.compilationTime")]
    return int(found["count"])


def run_query(session: SparkSession) -> None:
    """A query for which Spark generates code, on the driver and in tasks."""
    assert session.range(100).where("id % 7 = 3").groupBy().sum("id").collect()[0][0] == 679


@pytest.mark.slow
def test_a_server_whose_port_is_taken_ends(tmp_path: Path) -> None:
    """With a status after which a service manager starts it again."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        conf = {"spark.master": "local[1]", "spark.ui.enabled": "false", "spark.driver.host": LOOPBACK}
        port = {"spark.connect.grpc.binding.port": str(taken.getsockname()[1])}
        command = local_spark.build_server_command({**conf, "spark.connect.grpc.binding.address": LOOPBACK, **port})
        environment = dict(os.environ)
        local_spark.prepare_environment(Settings.from_environment({"HIGHWATER_HOME": str(tmp_path)}), environment)
        server = Child("server", command, logs=tmp_path, environment=environment, cwd=tmp_path)
        server.start()
        try:
            assert server.wait(180) == 1, server.tail()
        finally:
            server.stop()
    assert "BindException" in server.log.read_text()


@pytest.mark.slow
def test_a_server_commits_to_a_lake_on_s3_and_its_sessions_share_generated_code(bucket: str, tmp_path: Path) -> None:
    """With nothing but the jars of `highwater jars` and the variables of the deployment."""
    home, port, ui_port = tmp_path / "home", free_port(), free_port()
    (home / "jars").mkdir(parents=True)
    (home / "jars" / "spark").symlink_to(paths.TOOLS / "jars" / "spark")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    deployment = {"HIGHWATER_HOME": str(home), "HIGHWATER_LAKE": bucket, "HIGHWATER_SPARK_MASTER": "local[2]"}
    empty = {"SPARK_REMOTE": "", "AWS_SESSION_TOKEN": "", "AWS_ROLE_ARN": ""}
    highwater = [sys.executable, "-m", "highwater.orchestration.cli.main"]
    command = [*highwater, "serve-spark", "--port", str(port), "--conf", f"spark.ui.port={ui_port}"]
    server = Child("server", command, logs=tmp_path, environment={**inherited, **deployment, **empty}, cwd=tmp_path)
    server.start()
    try:
        wait_until(lambda: accepts(port), 180, "the start of the server")
        session = prepare(connect(f"sc://127.0.0.1:{port}"))
        ensure_log_store(session, bucket)
        with delta_errors(bucket):
            session.range(3).write.format("delta").save(f"{bucket}/numbers")
        run_query(session)
        close(session)
        compiled = count_compiled_classes(ui_port)
        assert compiled > 0
        session = prepare(connect(f"sc://127.0.0.1:{port}"))
        run_query(session)
        close(session)
        assert count_compiled_classes(ui_port) == compiled, "by Spark's own server each session compiles them again"
    finally:
        server.stop()
    assert sorted(row["id"] for row in read_rows(f"{bucket}/numbers")) == [0, 1, 2]
