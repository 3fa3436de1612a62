"""The command `jars`: what a Spark of this machine needs beside PySpark."""

from __future__ import annotations

from pathlib import Path

import click

from highwater.orchestration.cli.terminal import deployment_of
from highwater.orchestration.deployment import Deployment


@click.command("jars")
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), help="The folder; HIGHWATER_HOME by default.")
@deployment_of
def fetch_jars(deployment: Deployment, to: Path | None) -> None:
    """Fetch the jars of Delta, of the Kafka connector and of S3 into jars/spark of a folder.

    Each jar is compared with a recorded checksum. The log store for a lake on S3 comes from the package itself. Runs on
    a local master take the jars from HIGHWATER_HOME; a Spark server or a cluster gets a copy.
    """
    from highwater.resources.jars import ensure_jars
    from highwater.resources.object_store import copy_log_store

    place = ensure_jars("spark", to or deployment.settings.home)
    copy_log_store(place)
    click.echo(f"the jars are in {place}")
