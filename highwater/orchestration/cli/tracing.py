"""Commands that follow one slice or one record: `explain` and `locate`."""

from __future__ import annotations

import click

from highwater.orchestration.cli.terminal import as_json_option, deployment_of, print_json, print_lines, print_table
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment


@click.command()
@click.argument("slice_key", metavar="SLICE")
@as_json_option
@deployment_of
def explain(deployment: Deployment, *, slice_key: str, as_json: bool) -> None:
    """Print all facts about SLICE: plan, commits, rejects, publication, leases, and its runs and checks.

    Runs and checks need DAGSTER_HOME. If Dagster does not answer, the rest is still printed, and the exit
    status is 75, or 2 if a person has to fix that.
    """
    from highwater.orchestration.reporting.explaining import explain as explain_slice
    from highwater.orchestration.reporting.locating import find_stream
    from highwater.slices import SliceKey

    stream = find_stream(deployment.list_streams().values(), SliceKey.parse(slice_key).topic)
    found = explain_slice(deployment.open_ledger(), deployment.open_lake(), stream, slice_key, dagster_instance)
    if as_json:
        print_json(found.to_plain())
    else:
        print_lines(found.lines)
        for names, rows in found.tables:
            click.echo()
            print_table(names, rows)
    if found.dagster_error is not None:
        raise found.dagster_error


@click.command()
@click.argument("topic")
@click.argument("partition", type=click.IntRange(min=0))
@click.argument("offset", type=click.IntRange(min=0))
@as_json_option
@deployment_of
def locate(deployment: Deployment, *, topic: str, partition: int, offset: int, as_json: bool) -> None:
    """Follow the record at OFFSET of PARTITION of TOPIC: its slice, its row in raw, and how its origin ended.

    TOPIC is a main topic, a tier or a parked topic. If Kafka is needed and unavailable, the known facts are still
    printed, and the exit status is 75.
    """
    from highwater.orchestration.reporting.locating import find_stream
    from highwater.orchestration.reporting.locating import locate as locate_record

    stream = find_stream(deployment.list_streams().values(), topic)
    found = locate_record(
        deployment.open_ledger(), deployment.open_kafka(), deployment.open_lake(), stream, topic, partition, offset
    )
    if as_json:
        print_json([one.to_plain() for one in found])
    else:
        for one in found:
            print_lines(one.lines)
    for one in found:
        if one.unseen is not None:
            raise one.unseen
