"""The command `doctor`."""

from __future__ import annotations

import os

import click

from highwater.orchestration.cli.terminal import as_json_option, deployment_of, exit_status, print_json, print_table
from highwater.orchestration.deployment import Deployment

NAMES = ("state", "tried", "found", "remedy")


@click.command()
@as_json_option
@deployment_of
@click.pass_context
def doctor(context: click.Context, deployment: Deployment, *, as_json: bool) -> None:
    """Try every connection, permission and setting once, and print the remedy of each that fails."""
    from highwater.orchestration.reporting.doctor import examine

    found = list(examine(deployment, deployment.settings, os.environ))
    if as_json:
        print_json([dict(zip(NAMES, one.row, strict=True)) for one in found])
    else:
        print_table(NAMES, [one.row for one in found])
    errors = [one.error for one in found if one.error is not None]
    if errors:
        context.exit(min(map(exit_status, errors)))
