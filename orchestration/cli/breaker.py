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
from orchestration.operating.accepting_rejects import Asked, AskedReasons, accept_reasons, act


@click.command("accept-rejects")
@click.argument("slices", metavar="SLICE... | STREAM", nargs=-1, required=True)
@click.option("--reason", "reasons", multiple=True, help="Accept this reason for all slices of STREAM; repeatable.")
@click.option("--from", "from_slice", default="", help="With --reason: the first slice of STREAM's topic.")
@click.option("--revoke", is_flag=True, help="With --reason: let such rejects open the breaker again.")
@click.option("--because", default="", help="Why; goes into the record.")
@by_option
@sure_option
@as_json_option
@deployment_of
def accept_rejects(
    deployment: Deployment,
    slices: tuple[str, ...],
    reasons: tuple[str, ...],
    from_slice: str,
    revoke: bool,  # noqa: FBT001 - click's flag
    because: str,
    by: str,
    sure: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """Let each SLICE through the circuit breaker as it is: its rejects are published, however many they are.

    For records that nothing will mend. The slices are decided whatever the breaker's state is, and do not change it.

    With --reason, accept rejects for that reason in all slices of STREAM from a slice on: they open the breaker no
    more, and other reasons still do.
    """
    see_named(by, sure=sure)
    lines: list[str] = []
    if reasons:
        if len(slices) != 1 or revoke == bool(from_slice):
            raise click.UsageError("--reason needs one STREAM, and either --from SLICE or --revoke")
        ask = AskedReasons(reasons, from_slice, revoke, sure, by, because)
        accept_reasons(deployment.ledger(), deployment.stream(slices[0]), ask, datetime.now(UTC), lines.append)
        if as_json:
            print_json({"stream": slices[0], "reasons": list(reasons), "done": sure, "lines": lines})
            return
        print_lines(told_lines(lines, sure=sure))
        return
    if from_slice or revoke:
        raise click.UsageError("--from and --revoke need --reason")
    asked = Asked(slices, sure, by, because)
    fresh = act(deployment.ledger(), deployment.streams(), asked, datetime.now(UTC), lines.append)
    if as_json:
        print_json({"slices": list(slices), "done": sure, "fresh": fresh, "lines": lines})
        return
    print_lines(told_lines(lines, sure=sure))
