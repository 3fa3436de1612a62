"""The command `retry-slice`.

What belongs here: arguments and output. What does not: what is done (`orchestration.operating.retrying_slices`).
"""

from __future__ import annotations

from datetime import UTC, datetime

import click

from orchestration.cli.terminal import (
    Deployment,
    as_json_option,
    by_option,
    deployment_of,
    print_json,
    print_lines,
    see_named,
    sure_option,
    told_lines,
)
from orchestration.operating.retrying_slices import Asked, act


@click.command("retry-slice")
@click.argument("slice_key", metavar="SLICE")
@click.option("--because", default="", help="Why; goes into the record.")
@by_option
@sure_option
@as_json_option
@deployment_of
def retry_slice(
    deployment: Deployment,
    slice_key: str,
    because: str,
    by: str,
    sure: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """Let SLICE be requested again that was given up after its last attempt, by repair or by publication."""
    see_named(by, sure=sure)
    lines: list[str] = []
    asked = Asked(slice_key, sure, by, because)
    found = act(deployment.ledger(), deployment.streams(), asked, datetime.now(UTC), lines.append)
    if as_json:
        print_json({"given_up": found and found.to_plain(), "done": sure, "lines": lines})
        return
    print_lines(told_lines(lines, sure=sure))
