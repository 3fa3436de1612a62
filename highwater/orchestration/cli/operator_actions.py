"""The command `operator-actions`: lists what operators did."""

from __future__ import annotations

import click

from highwater.orchestration.cli.terminal import as_json_option, deployment_of, print_json, print_table
from highwater.orchestration.deployment import Deployment


@click.command("operator-actions")
@click.argument("stream", required=False)
@click.option("--last", "most", type=click.IntRange(min=1), default=100, show_default=True, help="At most this number.")
@as_json_option
@deployment_of
def operator_actions(deployment: Deployment, *, stream: str | None, most: int, as_json: bool) -> None:
    """List the actions of operators on STREAM or on all streams: who, when and why; oldest first.

    An outcome other than `done` names the error. Without an outcome the action goes on, or its process died.
    """
    found = deployment.open_ledger().operator_actions.list_newest(stream, most)
    if as_json:
        print_json([one.to_plain() for one in found])
        return
    names = ["at (UTC)", "stream", "action", "by", "because", "asked", "through", "outcome"]
    rows = [
        [
            f"{one.at:%Y-%m-%d %H:%M:%S}",
            one.stream,
            one.action,
            one.by,
            one.because,
            " ".join(f"{name}={value}" for name, value in one.asked.items()),
            one.through,
            one.outcome or "",
        ]
        for one in found
    ]
    print_table(names, rows)
