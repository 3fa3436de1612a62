"""The command `metrics`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from highwater.orchestration.cli.terminal import deployment_of
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment


@click.command()
@click.argument("streams", nargs=-1)
@deployment_of
def metrics(deployment: Deployment, streams: Sequence[str]) -> None:
    """Print where the named STREAMS or all stand as OpenMetrics text, for a scraper.

    With DAGSTER_HOME set it counts failing checks as well. What is away leaves out what rests on it and has
    highwater_up 0: the text is whole all the same, and the exit status is 75.
    """
    from highwater.orchestration.reporting.open_metrics import measure

    declared = [deployment.stream(name) for name in streams] or list(deployment.streams().values())
    found = measure(deployment.ledger(), deployment.kafka(), deployment.lake(), declared, dagster_instance)
    click.echo(found.text, nl=False)
    for error in found.away.values():
        raise error
