"""The commands `rebuild-ledger`, `rebuild-current` and `rebuild-all`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    as_json_option,
    by_option,
    deployment_of,
    dry_run_option,
    print_json,
    print_lines,
    print_needed_options,
    print_result,
    print_table,
)
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment

if TYPE_CHECKING:
    from highwater.declaration import Stream


@click.command("rebuild-ledger", cls=OperatorCommand)
@click.argument("stream")
@dry_run_option
@as_json_option
@deployment_of
def rebuild_ledger(deployment: Deployment, *, stream: str, dry_run: bool, as_json: bool) -> None:
    """Rebuild the plans of STREAM from the lake, into a ledger that holds none of it.

    For a ledger that was lost. Set DAGSTER_HOME, so that no key that Dagster knows is given to another slice.
    """
    from highwater.orchestration.operations.rebuilding import rebuild_from_lake

    declared = deployment.find_stream(stream)
    known = _list_dagster_keys(declared)
    lines: list[str] = []
    ledger, lake, kafka = deployment.open_ledger(), deployment.open_lake(), deployment.open_kafka()
    found = rebuild_from_lake(ledger, lake, kafka, declared, known, lines.append, dry_run=dry_run)
    plain = {"stream": stream, "written": not dry_run, "slices": [slice_.key for slice_ in found.slices]}
    print_result({**plain, "unread": [*found.unread]}, lines, as_json=as_json)
    print_needed_options("--yes", dry_run=dry_run, as_json=as_json)


@click.command("rebuild-current", cls=OperatorCommand)
@click.argument("stream")
@dry_run_option
@as_json_option
@deployment_of
def rebuild_current(deployment: Deployment, *, stream: str, dry_run: bool, as_json: bool) -> None:
    """Compute the table `current` of STREAM again from its events, while runs go on.

    For a table that was deleted or changed. Needs Spark, as runs do: SPARK_REMOTE, or a session in this process.
    """
    from highwater.orchestration.operations.rebuilding_current import build_difference_table, rebuild_from_events
    from highwater.orchestration.resources import use_session

    declared = deployment.find_stream(stream)
    lines: list[str] = []
    with use_session(deployment.settings) as spark:
        found = rebuild_from_events(deployment.open_work(declared, spark, lines.append), dry_run=dry_run)
    if as_json:
        names, rows = build_difference_table(found)
        samples = [dict(zip(names, row, strict=True)) for row in rows]
        print_json({"stream": stream, "written": not dry_run and not found.none, **vars(found), "samples": samples})
        return
    print_lines(lines[: len(found.lines)])
    if found.samples:
        print_table(*build_difference_table(found))
    print_lines(lines[len(found.lines) :])
    print_needed_options("--yes", dry_run=dry_run and not found.none, as_json=as_json)


@click.command("rebuild-all", cls=OperatorCommand)
@click.argument("stream")
@dry_run_option
@by_option
@click.option("--accepted-again", "resend", is_flag=True, help="Send all accepted events again.")
@as_json_option
@deployment_of
def rebuild_all(deployment: Deployment, *, stream: str, dry_run: bool, by: str, resend: bool, as_json: bool) -> None:
    """Start STREAM again from Kafka after ledger and lake are lost.

    Records on tiers, the parked topic and the topic of accepted events are read first, and not published again. Offsets
    that the main topic no longer holds are recorded as lost. Stop all sensors and runs first. Set DAGSTER_HOME, if that
    instance still exists.
    """
    from highwater.orchestration.operations.rebuilding_all import rebuild_from_kafka

    declared = deployment.find_stream(stream)
    known = _list_dagster_keys(declared)
    lines: list[str] = []
    ledger, lake, kafka = deployment.open_ledger(), deployment.open_lake(), deployment.open_kafka()
    found = rebuild_from_kafka(
        ledger, lake, kafka, declared, known, lines.append, dry_run=dry_run, by=by, resend=resend
    )
    losses = [{"partition": loss.partition, "range": str(loss.offsets)} for loss in found.losses]
    plain = {"stream": stream, "written": not dry_run, "copies": dict(found.copies), "losses": losses}
    print_result(plain, lines, as_json=as_json)
    print_needed_options("--yes --by NAME", dry_run=dry_run, as_json=as_json)


def _list_dagster_keys(stream: Stream) -> Sequence[str]:
    with dagster_instance() as instance:
        return [] if instance is None else instance.get_dynamic_partitions(stream.partitions_name)
