"""The commands `jars` and `serve-spark`: Spark on a machine that has PySpark alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from highwater.orchestration.cli.terminal import deployment_of
from highwater.orchestration.deployment import Deployment

PORT = 15002


@click.command("serve-spark")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="The port to listen on.")
@click.option("--conf", "given", multiple=True, metavar="NAME=VALUE", help="A property of Spark; repeatable.")
@deployment_of
def serve_spark(deployment: Deployment, host: str, port: int, given: Sequence[str]) -> None:
    """Serve Spark Connect, for SPARK_REMOTE of the other processes, until the process is ended.

    The server has Delta's settings, and those of a lake on S3 from AWS's variables. Its master is
    HIGHWATER_SPARK_MASTER. A local one takes the jars of `highwater jars`, unless SPARK_CONF_DIR is set. It has no
    login.
    """
    from highwater.resources import local_spark

    properties = dict(map(local_spark.parse_property, given))
    listening = {"spark.connect.grpc.binding.address": host, "spark.connect.grpc.binding.port": str(port)}
    conf = local_spark.build_server_conf(deployment.settings, os.environ) | listening | properties
    local_spark.prepare_environment(deployment.settings, os.environ)
    command = local_spark.build_server_command(conf)
    os.execv(command[0], command)  # noqa: S606 - the process becomes the server, so its signals reach it


@click.command("jars")
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="The folder; HIGHWATER_HOME by default.")
@deployment_of
def fetch_jars(deployment: Deployment, to: Path | None) -> None:
    """Fetch the jars of Delta, of the Kafka connector and of S3 into jars/spark of a folder.

    Each jar is compared with a recorded checksum. Our log stores for Delta come from the package itself. Runs on
    a local master take the jars from HIGHWATER_HOME; a Spark server or a cluster gets a copy.
    """
    from highwater.resources.jars import copy_own_jar, ensure_jars

    place = ensure_jars("spark", to or deployment.settings.home)
    copy_own_jar(place)
    click.echo(f"the jars are in {place}")
