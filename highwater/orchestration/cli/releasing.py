"""The commands `accept-rejects`, `release-hold` and `retry-slice`: a person lets slices go on."""

from __future__ import annotations

from collections.abc import Callable
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
from highwater.orchestration.operations import accepting_rejects, releasing_holds, retrying_slices

_Log = Callable[[str], object]


def _add_decision_options(command: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """The options of a decision; prints the lines of the command, or with `--json` what it returns."""

    def decide(deployment: Deployment, /, *, as_json: bool, **options: Any) -> None:
        lines: list[str] = []
        plain = command(deployment, lines.append, **options)
        print_decision(plain, lines, dry_run=options["dry_run"], as_json=as_json)

    decide.__doc__ = command.__doc__
    return add_options(because_option, by_option, dry_run_option, as_json_option)(deployment_of(decide))


@click.command("release-hold", cls=OperatorCommand)
@click.argument("slice_key", metavar="SLICE")
@click.option("--park", is_flag=True, help="Park the records that hold it; without it they go to the first tier.")
@_add_decision_options
def release_hold(deployment: Deployment, log: _Log, **options: Any) -> dict[str, Any]:
    """Release a held SLICE, so that it and later slices are processed.

    The records that hold it are rejected: they go to the first tier, where the stream has tiers, or with --park to the
    parked topic.
    """
    request = releasing_holds.ReleaseRequest(**options)
    hold = releasing_holds.release_slice(
        deployment.open_ledger(), deployment.list_streams(), request, datetime.now(UTC), log
    )
    return {"hold": hold.to_plain()}


@click.command("retry-slice", cls=OperatorCommand)
@click.argument("slice_key", metavar="SLICE")
@_add_decision_options
def retry_slice(deployment: Deployment, log: _Log, **options: Any) -> dict[str, Any]:
    """Let repair, or the publisher, try SLICE again after all its attempts failed."""
    request = retrying_slices.RetryRequest(**options)
    found = retrying_slices.release_for_retries(
        deployment.open_ledger(), deployment.list_streams(), request, datetime.now(UTC), log
    )
    return {"exhausted_slice": found and found.to_plain()}


@click.command("accept-rejects", cls=OperatorCommand)
@click.argument("slices", metavar="SLICE... | STREAM", nargs=-1, required=True)
@click.option("--reason", "reasons", multiple=True, help="Accept this reason for all slices of STREAM; repeatable.")
@click.option("--from", "from_slice", default="", help="With --reason: the first slice of STREAM's topic.")
@click.option("--revoke", is_flag=True, help="With --reason: let such rejects open the breaker again.")
@_add_decision_options
def accept_rejects(
    deployment: Deployment,
    log: _Log,
    *,
    slices: tuple[str, ...],
    reasons: tuple[str, ...],
    from_slice: str,
    revoke: bool,
    **options: Any,
) -> dict[str, Any]:
    """Let each SLICE pass the circuit breaker: any number of rejects is published.

    For records that nothing will fix. The slices are classified in every state of the breaker, and do not change it.

    With --reason, accept rejects for that reason in all slices of STREAM from a slice on: they open the breaker no
    more, and other reasons still do.
    """
    now = datetime.now(UTC)
    if reasons:
        if len(slices) != 1 or revoke == bool(from_slice):
            raise click.UsageError("--reason needs one STREAM, and either --from SLICE or --revoke")
        by_reason = accepting_rejects.AcceptReasonsRequest(reasons, from_slice, revoke, **options)
        accepting_rejects.accept_reasons(
            deployment.open_ledger(), deployment.find_stream(slices[0]), by_reason, now, log
        )
        return {"stream": slices[0], "reasons": list(reasons)}
    if from_slice or revoke:
        raise click.UsageError("--from and --revoke need --reason")
    request = accepting_rejects.AcceptSlicesRequest(slices, **options)
    fresh = accepting_rejects.accept_slices(deployment.open_ledger(), deployment.list_streams(), request, now, log)
    return {"slices": list(slices), "fresh": fresh}
