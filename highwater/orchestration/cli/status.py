"""The command `status`: how far each stream is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from highwater.orchestration.cli.terminal import (
    as_json_option,
    deployment_of,
    exit_status,
    print_json,
    print_lines,
    print_table,
)
from highwater.orchestration.deployment import Deployment

if TYPE_CHECKING:
    from highwater.orchestration.reporting.status_report import StreamStatus


@click.command()
@click.argument("streams", nargs=-1)
@as_json_option
@deployment_of
def status(deployment: Deployment, *, streams: Sequence[str], as_json: bool) -> None:
    """Show how far the topics are planned, and accepted events are sent, for the named STREAMS or all."""
    from highwater.orchestration.reporting.plan_status import read_stream_status

    declared = [deployment.find_stream(name) for name in streams] or list(deployment.list_streams().values())
    ledger, kafka, lake = deployment.open_ledger(), deployment.open_kafka(), deployment.open_lake()
    counts = ledger.count_slices()
    found: list[StreamStatus] = [read_stream_status(ledger, kafka, stream, counts, lake) for stream in declared]
    if as_json:
        print_json([one.to_plain() for one in found])
    else:
        print_lines([*dict.fromkeys(line for one in found for line in one.deployment_lines)])
        for one in found:
            print_lines(one.lines)
            if one.partitions:
                print_table(*one.table)
    all_errors = [error for one in found for error in (*one.errors, *(dlq.error for dlq in one.dlq), one.accepted)]
    if errors := [error for error in all_errors if error is not None]:
        # Faults that need a person come before those that pass.
        raise min(errors, key=exit_status)
