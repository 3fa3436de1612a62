"""The commands `accept-loss` and `accept-divergence`: planning continues after offsets that are gone or changed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    DRY_RUN_NOTE,
    add_options,
    as_json_option,
    by_option,
    deployment_of,
    dry_run_option,
    print_json,
    print_lines,
    print_needed_options,
)
from highwater.orchestration.deployment import Deployment

_acceptance_options = add_options(
    click.argument("stream"),
    click.option(
        "--partition", "partitions", type=click.IntRange(min=0), multiple=True, help="Only this partition; repeatable."
    ),
    dry_run_option,
    by_option,
    click.option("--topic", help="Tier, or foreign DLQ topic, instead of the main topic."),
    as_json_option,
)


@click.command("accept-loss", cls=OperatorCommand)
@_acceptance_options
@deployment_of
def accept_loss(deployment: Deployment, /, **options: Any) -> None:
    """Accept that offsets of STREAM's topic are gone, so that planning continues after them.

    Records the hole, and opens a new generation of a topic that was recreated or truncated.
    """
    _accept(deployment, divergence=False, **options)


@click.command("accept-divergence", cls=OperatorCommand)
@_acceptance_options
@deployment_of
def accept_divergence(deployment: Deployment, /, **options: Any) -> None:
    """Accept that other records occupy planned offsets of STREAM's topic than before.

    An unclean leader election does that. Planning continues where the log differs from the plan, as a new generation.
    Rows of the old history stay in the lake, and their generation distinguishes them. Offsets that expired are left to
    accept-loss.
    """
    _accept(deployment, divergence=True, **options)


def _accept(
    deployment: Deployment,
    *,
    divergence: bool,
    stream: str,
    topic: str | None,
    partitions: tuple[int, ...],
    dry_run: bool,
    by: str,
    as_json: bool,
) -> None:
    from highwater.orchestration.operations.accepting_losses import AcceptLossRequest, accept_topic_losses

    request = AcceptLossRequest(topic, set(partitions) or None, divergence, dry_run, by)
    connections = deployment.open_ledger(), deployment.open_kafka(), deployment.open_lake()
    found, lines = accept_topic_losses(*connections, deployment.find_stream(stream), request, datetime.now(UTC))
    if as_json:
        print_json({"stream": stream, "recorded": not dry_run and not found.nothing, "lines": lines})
        return
    if found.nothing:
        print_lines([f"nothing of {stream} is lost: there is nothing to accept"])
        return
    print_lines([*lines, DRY_RUN_NOTE if dry_run else "recorded"])
    print_needed_options("--yes --by NAME", dry_run=dry_run, as_json=as_json)
