"""The settings and the command line of a Spark Connect server; `highwater serve-spark` starts it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from highwater.errors import ConfigurationError
from highwater.resources.local_spark import build_jars_conf, set_java
from highwater.resources.object_store import build_s3a_conf, is_s3
from highwater.resources.spark import STATIC_CONF
from highwater.settings import SPARK_MASTER, SPARK_REMOTE, Settings

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
# Either would make the server a client of another one.
_OF_CLIENTS = (SPARK_REMOTE, "SPARK_CONNECT_MODE_ENABLED")


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
    return [str(program), "--class", SERVER, *options, "spark-internal"]


def prepare_environment(settings: Settings, environment: MutableMapping[str, str]) -> None:
    """Let the environment of the process be that of a server.

    Raises:
        ConfigurationError: no suited Java was found.
    """
    set_java(environment, settings.home)
    for name in _OF_CLIENTS:
        environment.pop(name, None)
