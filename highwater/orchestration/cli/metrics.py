"""The command `metrics`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from highwater.orchestration.cli.terminal import deployment_of, exit_status
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment


@click.command()
@click.argument("streams", nargs=-1)
@deployment_of
def metrics(deployment: Deployment, streams: Sequence[str]) -> None:
    """Print metrics of the named STREAMS, or of all, as OpenMetrics text for a scraper.

    With DAGSTER_HOME set it counts failing checks as well. Without a service the metrics that rest on it are left out
    and its highwater_up is 0. The text is valid all the same; the exit status is 75, or 2 where a person has to act.
    """
    from highwater.orchestration.reporting.prometheus_metrics import measure

    declared = [deployment.find_stream(name) for name in streams] or list(deployment.list_streams().values())
    found = measure(
        deployment.open_ledger(), deployment.open_kafka(), deployment.open_lake(), declared, dagster_instance
    )
    click.echo(found.text, nl=False)
    if found.errors:
        raise min(found.errors, key=exit_status)  # an error that needs a person comes first
