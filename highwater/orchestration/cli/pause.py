"""The commands `pause`, `resume`, `pause-tier` and `resume-tier`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    add_options,
    as_json_option,
    because_option,
    by_option,
    deployment_of,
    dry_run_option,
    print_decision,
)
from highwater.orchestration.deployment import Deployment
from highwater.orchestration.operations.pausing import (
    PauseRequest,
    TierPauseRequest,
    pause_or_resume,
    pause_or_resume_tier,
)
from highwater.resources.ledger.pauses import ALL, PARTS

_topic_options = add_options(click.argument("stream"), click.argument("topic"), dry_run_option, as_json_option)
_part_options = add_options(
    click.argument("stream"),
    click.argument("part", type=click.Choice(PARTS), required=False),
    dry_run_option,
    as_json_option,
)


@click.command("pause", cls=OperatorCommand)
@by_option
@because_option
@_part_options
@deployment_of
def pause(deployment: Deployment, /, **options: Any) -> None:
    """Request no run of STREAM and plan nothing of it, or let one PART of it wait, until it is resumed.

    Other streams go on, and so do runs that were requested before.
    """
    _pause_or_resume(deployment, resume=False, **options)


@click.command("resume", cls=OperatorCommand)
@by_option
@_part_options
@deployment_of
def resume(deployment: Deployment, /, **options: Any) -> None:
    """End the pause of STREAM and of all its parts, or of one PART."""
    _pause_or_resume(deployment, resume=True, **options)


@click.command("pause-tier", cls=OperatorCommand)
@by_option
@because_option
@_topic_options
@deployment_of
def pause_tier(deployment: Deployment, /, **options: Any) -> None:
    """Plan nothing more of TOPIC, one whose records are retried, until it is resumed; other tiers of STREAM go on."""
    _pause_or_resume_tier(deployment, resume=False, **options)


@click.command("resume-tier", cls=OperatorCommand)
@by_option
@_topic_options
@deployment_of
def resume_tier(deployment: Deployment, /, **options: Any) -> None:
    """Plan the due offsets of TOPIC again, which was paused."""
    _pause_or_resume_tier(deployment, resume=True, **options)


def _pause_or_resume(
    deployment: Deployment, *, stream: str, part: str | None, resume: bool, as_json: bool, **options: Any
) -> None:
    lines: list[str] = []
    request = PauseRequest(part or ALL, resume, **options)
    found = pause_or_resume(
        deployment.open_ledger(), deployment.find_stream(stream), request, datetime.now(UTC), lines.append
    )
    paused = {name or "stream": one.to_plain() for name, one in found.items()}
    plain = {"stream": stream, "part": part or None, "was_paused": paused}
    print_decision(plain, lines, dry_run=request.dry_run, as_json=as_json)


def _pause_or_resume_tier(
    deployment: Deployment, *, stream: str, topic: str, resume: bool, as_json: bool, **options: Any
) -> None:
    lines: list[str] = []
    request = TierPauseRequest(topic, resume, **options)
    found = pause_or_resume_tier(
        deployment.open_ledger(), deployment.find_stream(stream), request, datetime.now(UTC), lines.append
    )
    plain = {"stream": stream, "topic": topic, "was_paused": found and found.to_plain()}
    print_decision(plain, lines, dry_run=request.dry_run, as_json=as_json)
