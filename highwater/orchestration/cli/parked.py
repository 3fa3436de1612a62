"""The commands for dead-lettered records: `redrive-parked`, `discard-parked` and `reclaim`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from highwater.errors import UnknownSliceError
from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    add_options,
    as_json_option,
    by_option,
    deployment_of,
    dry_run_option,
    print_needed_options,
    print_result,
)
from highwater.orchestration.deployment import Deployment
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from highwater.orchestration.operations.parked import Parked, ParkedSelection

_MOMENT = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"])


def _validate_slice_keys(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """A text that is no slice key is reported; it would mean no record, which looks like success."""
    try:
        return tuple(str(SliceKey.parse(text)) for text in texts)
    except UnknownSliceError as error:
        raise click.BadParameter(str(error)) from error


def _add_selection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the common options of the commands; those that choose records are passed as one `ParkedSelection`."""

    @wraps(command)
    def call_with_choice(
        *,
        reasons: tuple[str, ...],
        rules: tuple[str, ...],
        slices: tuple[str, ...],
        keys: tuple[str, ...],
        since: datetime | None,
        until: datetime | None,
        **options: Any,
    ) -> None:
        from highwater.orchestration.operations.parked import ParkedSelection

        command(
            choice=ParkedSelection(reasons, rules, slices, keys, _convert_to_utc(since), _convert_to_utc(until)),
            **options,
        )

    return add_options(
        click.argument("stream"),
        click.option("--reason", "reasons", multiple=True, help="Only what was rejected for this reason; repeatable."),
        click.option("--rule", "rules", multiple=True, help="Only invalid records that this rule refused; repeatable."),
        click.option(
            "--slice",
            "slices",
            multiple=True,
            callback=_validate_slice_keys,
            help="Only what this slice rejected; repeatable.",
        ),
        click.option("--key", "keys", multiple=True, help="Only records with this key; repeatable."),
        click.option(
            "--since", type=_MOMENT, help="Parked, or for reclaim last published to the DLQ, then or later (UTC)."
        ),
        click.option(
            "--until", type=_MOMENT, help="Parked, or for reclaim last published to the DLQ, before then (UTC)."
        ),
        click.option("--limit", "most", type=click.IntRange(min=1), help="At most N matching records, oldest first."),
        dry_run_option,
        by_option,
        as_json_option,
    )(call_with_choice)


@click.command("redrive-parked", cls=OperatorCommand)
@_add_selection_options
@deployment_of
def redrive_parked(deployment: Deployment, /, **options: Any) -> None:
    """Send parked records of STREAM back to its first tier, for one more try each.

    May be repeated: a record keeps its origin, and is accepted once.
    """
    _redrive_or_discard(deployment, because=None, **options)


@click.command("discard-parked", cls=OperatorCommand)
@click.option("--because", default="", help="Why they are discarded; goes into the record. Needed with --yes.")
@_add_selection_options
@deployment_of
def discard_parked(deployment: Deployment, /, **options: Any) -> None:
    """Discard parked records of STREAM. The ledger records your name and the reason."""
    _redrive_or_discard(deployment, **options)


@click.command("reclaim", cls=OperatorCommand)
@click.option("--on", multiple=True, help="Only what was published to this topic last; repeatable.")
@click.option("--because", default="", help="Why they are reclaimed; goes into the record. Needed with --yes.")
@_add_selection_options
@deployment_of
def reclaim(deployment: Deployment, /, *, stream: str, as_json: bool, choice: ParkedSelection, **options: Any) -> None:
    """Remove records of STREAM from its DLQ, so that a backfill of their slices classifies them again.

    The option --slice also means the slice of the main topic that read them. Copies on the tiers and the parked topic
    count no more from then on.
    """
    from highwater.orchestration.operations.reclaiming import ReclaimRequest, reclaim_records

    lines: list[str] = []
    found = reclaim_records(
        deployment.open_ledger(),
        deployment.open_lake(),
        deployment.find_stream(stream),
        ReclaimRequest(choice, **options),
        lines.append,
    )
    plain = {"stream": stream, "done": not options["dry_run"], "meant": found.to_plain(), "slices": found.slices}
    print_result(plain, lines, as_json=as_json, table=found.table)
    print_needed_options("--yes --by NAME --because TEXT", dry_run=options["dry_run"], as_json=as_json)


def _redrive_or_discard(
    deployment: Deployment, *, stream: str, as_json: bool, choice: ParkedSelection, **options: Any
) -> None:
    from highwater.orchestration.operations.parked import ParkedRequest, redrive_or_discard

    lines: list[str] = []
    found = redrive_or_discard(
        deployment.open_ledger(),
        deployment.open_kafka(),
        deployment.open_lake(),
        deployment.find_stream(stream),
        ParkedRequest(choice, **options),
        lines.append,
    )
    plain = {"stream": stream, "done": not options["dry_run"], "meant": _to_plain(found)}
    print_result(plain, lines, as_json=as_json, table=found.table)
    reason = "" if options["because"] is None else " --because TEXT"
    print_needed_options(f"--yes --by NAME{reason}", dry_run=options["dry_run"], as_json=as_json)


def _convert_to_utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(tzinfo=UTC)


def _to_plain(found: Parked) -> list[dict[str, Any]]:
    return [{"origin": origin._asdict(), **asdict(one)} for origin, one in sorted(found.waiting.items())]
