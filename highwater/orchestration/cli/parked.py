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
    as_json_option,
    by_option,
    deployment_of,
    dry_run_option,
    print_json,
    print_lines,
    print_table,
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


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the common options of the commands; those that choose records are passed as one `ParkedSelection`."""

    @wraps(command)
    def call_with_choice(
        *,
        reasons: tuple[str, ...],
        slices: tuple[str, ...],
        keys: tuple[str, ...],
        since: datetime | None,
        until: datetime | None,
        **options: Any,
    ) -> None:
        from highwater.orchestration.operations.parked import ParkedSelection

        command(
            choice=ParkedSelection(reasons, slices, keys, _convert_to_utc(since), _convert_to_utc(until)), **options
        )

    for option in (
        as_json_option,
        by_option,
        dry_run_option,
        click.option("--limit", "most", type=click.IntRange(min=1), help="At most N matching records, oldest first."),
        click.option(
            "--until", type=_MOMENT, help="Parked, or for reclaim last published to the DLQ, before then (UTC)."
        ),
        click.option(
            "--since", type=_MOMENT, help="Parked, or for reclaim last published to the DLQ, then or later (UTC)."
        ),
        click.option("--key", "keys", multiple=True, help="Only records with this key; repeatable."),
        click.option(
            "--slice",
            "slices",
            multiple=True,
            callback=_validate_slice_keys,
            help="Only what this slice rejected; repeatable.",
        ),
        click.option("--reason", "reasons", multiple=True, help="Only what was rejected for this reason; repeatable."),
        click.argument("stream"),
    ):
        call_with_choice = option(call_with_choice)
    return call_with_choice


@click.command("redrive-parked", cls=OperatorCommand)
@_options
@deployment_of
def redrive_parked(deployment: Deployment, /, **options: Any) -> None:
    """Send parked records of STREAM back to its first tier, for one more try each.

    May be repeated: a record keeps its origin, and is accepted once.
    """
    _redrive_or_discard(deployment, because=None, **options)


@click.command("discard-parked", cls=OperatorCommand)
@click.option("--because", default="", help="Why they are discarded; goes into the record. Needed with --yes.")
@_options
@deployment_of
def discard_parked(deployment: Deployment, /, **options: Any) -> None:
    """Discard parked records of STREAM. The ledger records your name and the reason."""
    _redrive_or_discard(deployment, **options)


@click.command("reclaim", cls=OperatorCommand)
@click.option("--on", multiple=True, help="Only what was published to this topic last; repeatable.")
@click.option("--because", default="", help="Why they are reclaimed; goes into the record. Needed with --yes.")
@_options
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
    plain = {
        "stream": stream,
        "done": not options["dry_run"],
        "lines": lines,
        "meant": found.to_plain(),
        "slices": found.slices,
    }
    _print(plain if as_json else None, found.table, lines)


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
    plain = {"stream": stream, "done": not options["dry_run"], "lines": lines, "meant": _to_plain(found)}
    _print(plain if as_json else None, found.table, lines)


def _print(plain: object, table: tuple[list[str], list[list[str]]], lines: list[str]) -> None:
    """As JSON where there is something for it; else the table, if it has rows, and the lines."""
    if plain is not None:
        print_json(plain)
        return
    if table[1]:
        print_table(*table)
    print_lines(lines)


def _convert_to_utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(tzinfo=UTC)


def _to_plain(found: Parked) -> list[dict[str, Any]]:
    return [{"origin": origin._asdict(), **asdict(one)} for origin, one in sorted(found.waiting.items())]
