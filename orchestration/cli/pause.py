"""The commands `pause-tier` and `resume-tier`.

What belongs here: arguments and output. What does not: what is done (`orchestration.operating.pausing`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

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
from orchestration.operating.pausing import Asked, act


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        as_json_option,
        sure_option,
        click.argument("topic"),
        click.argument("stream"),
    ):
        command = option(command)
    return command


@click.command("pause-tier")
@by_option
@click.option("--because", default="", help="Why; goes into the record.")
@_options
@deployment_of
def pause_tier(deployment: Deployment, /, **asked: Any) -> None:
    """Plan nothing more of TOPIC, one whose records are retried, until it is resumed; other tiers of STREAM go on."""
    _act(deployment, resume=False, **asked)


@click.command("resume-tier")
@click.option("--by", default="", help="Who decides it; told, and not kept. Needed with --yes.")
@_options
@deployment_of
def resume_tier(deployment: Deployment, /, **asked: Any) -> None:
    """Plan what is due of TOPIC again, which was paused."""
    _act(deployment, resume=True, **asked)


def _act(deployment: Deployment, *, stream: str, topic: str, resume: bool, as_json: bool, **asked: Any) -> None:
    see_named(asked["by"], sure=asked["sure"])
    lines: list[str] = []
    wanted = Asked(topic, resume, **asked)
    found = act(deployment.ledger(), deployment.stream(stream), wanted, datetime.now(UTC), lines.append)
    if as_json:
        pause = None if found is None else found.to_plain()
        print_json({"stream": stream, "topic": topic, "was_paused": pause, "done": wanted.sure, "lines": lines})
        return
    print_lines(told_lines(lines, sure=wanted.sure))
