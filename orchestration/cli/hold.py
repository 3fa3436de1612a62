"""The command `release-hold`.

What belongs here: arguments and output. What does not: what is done (`orchestration.operating.releasing_holds`).
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
from orchestration.operating.releasing_holds import Asked, act


@click.command("release-hold")
@click.argument("slice_key", metavar="SLICE")
@click.option("--park", is_flag=True, help="Park the records that hold it; without it they go to the first tier.")
@click.option("--because", default="", help="Why; goes into the record.")
@by_option
@sure_option
@as_json_option
@deployment_of
def release_hold(
    deployment: Deployment,
    slice_key: str,
    park: bool,  # noqa: FBT001 - click's flag
    because: str,
    by: str,
    sure: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """Let SLICE go on although records hold it, and with it all that wait behind it.

    The records that hold it are rejected: they go to the first tier, where the stream has tiers, or with --park to the
    parked topic.
    """
    see_named(by, sure=sure)
    lines: list[str] = []
    asked = Asked(slice_key, park, sure, by, because)
    hold = act(deployment.ledger(), deployment.streams(), asked, datetime.now(UTC), lines.append)
    if as_json:
        print_json({"hold": hold.to_plain(), "done": sure, "lines": lines})
        return
    print_lines(told_lines(lines, sure=sure))
