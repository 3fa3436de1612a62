"""The commands `plan`, which cuts the new offsets of a topic into slices, and `slices`, which lists them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from highwater.orchestration.cli.terminal import (
    DRY_RUN_NOTE,
    as_json_option,
    deployment_of,
    dry_run_option,
    print_json,
    print_lines,
    print_needed_options,
    print_table,
    to_plain_error,
)
from highwater.orchestration.deployment import Deployment

if TYPE_CHECKING:
    from highwater.slices import Slice


@click.command()
@click.argument("stream")
@dry_run_option
@as_json_option
@deployment_of
def plan(deployment: Deployment, *, stream: str, dry_run: bool, as_json: bool) -> None:
    """Cut the new offsets of STREAM's topic into slices; a dry run unless --yes is given."""
    from highwater.orchestration.sensing.topic_planner import Planner

    declared = deployment.find_stream(stream)
    found = Planner(deployment.open_ledger(), deployment.open_kafka()).tick(
        declared, datetime.now(UTC), dry_run=dry_run
    )
    if as_json:
        print_json(
            {
                "stream": stream,
                "recorded": not dry_run,
                "slices": [_describe_slice(slice_) for slice_ in found.slices],
                "lag": found.lag,
                "skipped": {str(p): why for p, why in found.skipped.items()},
                "errors": {str(p): to_plain_error(error) for p, error in found.errors.items()},
            }
        )
    else:
        print_lines([*found.lines, *([DRY_RUN_NOTE] if dry_run else [])])
        print_needed_options("--yes", dry_run=dry_run, as_json=as_json)
    for error in found.errors.values():
        raise error


@click.command()
@click.argument("stream")
@click.option("--topic", help="Only slices of this topic.")
@click.option("--after", help="Only slices planned after the one with this key.")
@click.option(
    "--last",
    "newest",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="The newest N slices, printed oldest first.",
)
@as_json_option
@deployment_of
def slices(
    deployment: Deployment, *, stream: str, topic: str | None, after: str | None, newest: int, as_json: bool
) -> None:
    """List planned slices of STREAM, oldest first."""
    declared = deployment.find_stream(stream)
    found = deployment.open_ledger().list_slices(declared.name, topic, after=after, newest=newest)
    if as_json:
        print_json([_describe_slice(slice_) for slice_ in found])
        return
    rows = [
        [
            slice_.key,
            slice_.generation,
            f"{slice_.planned_at:%Y-%m-%d %H:%M:%S}",
            f"{slice_.offsets:,}",
            _format_ranges(slice_),
        ]
        for slice_ in found
    ]
    print_table(["slice", "generation", "planned at (UTC)", "offsets", "ranges"], rows)


def _describe_slice(slice_: Slice) -> dict[str, Any]:
    from highwater.slices import encode_ranges

    return {
        "slice": slice_.key,
        "topic_id": slice_.topic_id,
        "generation": slice_.generation,
        "planned_at": slice_.planned_at.isoformat(),
        "offsets": slice_.offsets,
        "ranges": encode_ranges(slice_.ranges),
    }


def _format_ranges(slice_: Slice, most: int = 4) -> str:
    filled = [f"{p}: {r}" for p, r in sorted(slice_.ranges.items()) if len(r)]
    more = [f"and {len(filled) - most} more"] if len(filled) > most else []
    return " ".join([*filled[:most], *more])
