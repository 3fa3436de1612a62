"""The command `accept-rejects`.

What belongs here: arguments and output. What does not: what is done (`orchestration.operating.accepting_rejects`).
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
from orchestration.operating.accepting_rejects import Asked, act


@click.command("accept-rejects")
@click.argument("slices", metavar="SLICE...", nargs=-1, required=True)
@click.option("--because", default="", help="Why; goes into the record.")
@by_option
@sure_option
@as_json_option
@deployment_of
def accept_rejects(
    deployment: Deployment,
    slices: tuple[str, ...],
    because: str,
    by: str,
    sure: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """Let each SLICE through the circuit breaker as it is: its rejects are published, however many they are.

    For records that nothing will mend. The slices are decided whatever the breaker's state is, and do not change it.
    """
    see_named(by, sure=sure)
    lines: list[str] = []
    asked = Asked(slices, sure, by, because)
    fresh = act(deployment.ledger(), deployment.streams(), asked, datetime.now(UTC), lines.append)
    if as_json:
        print_json({"slices": list(slices), "done": sure, "fresh": fresh, "lines": lines})
        return
    print_lines(told_lines(lines, sure=sure))
