"""The commands `maintain` and `recall-keys`."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    as_json_option,
    deployment_of,
    dry_run_option,
    print_needed_options,
    print_result,
)
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment

_NAMES = ("table", "files", "bytes", "stored files", "stored bytes", "compacted", "removed", "seconds")


@click.command()
@click.argument("stream")
@dry_run_option
@as_json_option
@deployment_of
def maintain(deployment: Deployment, *, stream: str, dry_run: bool, as_json: bool) -> None:
    """Compact small files of STREAM's tables, delete old files and old rows of raw, retire old keys.

    Runs may go on meanwhile.

    Needs Spark, as runs do: SPARK_REMOTE, or a session in this process. Set DAGSTER_HOME, so that keys are looked at
    and slices that runs work on are left alone.
    """
    from highwater.orchestration.operations.maintenance import maintain
    from highwater.orchestration.resources import use_session

    declared = deployment.find_stream(stream)
    log: list[str] = []
    with use_session(deployment.settings) as spark, dagster_instance() as instance:
        report = maintain(
            deployment.open_work(declared, spark, log.append), instance, datetime.now(UTC), dry_run=dry_run
        )
    keys = report.keys and {"live": report.keys.live, "retired": [*report.keys.retired]}
    tables = [{**one.row, "notes": [*one.notes]} for one in report.tables]
    plain = {"stream": stream, "done": not dry_run, "tables": tables, "keys": keys}
    plain |= {"retention": report.retained and report.retained.to_plain()}
    table = [*_NAMES], [_build_row(one.row) for one in report.tables]
    print_result(plain, report.lines, as_json=as_json, table=table)
    print_needed_options("--yes", dry_run=dry_run, as_json=as_json)


def _build_row(row: dict[str, object]) -> list[str]:
    """Before and after in one cell where they differ."""

    def format_cell(name: str) -> str:
        before, after = row[name], row[f"{name}_after"]
        return f"{before:,}" if before == after else f"{before:,} > {after:,}"

    both = [format_cell(name) for name in ("files", "bytes", "stored_files", "stored_bytes")]
    return [str(row["table"]), *both, *[str(row[name]) for name in ("compacted", "removed", "seconds")]]


@click.command("recall-keys", cls=OperatorCommand)
@click.argument("stream")
@click.argument("first")
@click.argument("last")
@dry_run_option
@as_json_option
@deployment_of
def recall_keys(deployment: Deployment, *, stream: str, first: str, last: str, dry_run: bool, as_json: bool) -> None:
    """Bring the retired keys of STREAM from slice FIRST to LAST back to Dagster, for a backfill.

    Both are slices of one topic. They stay for seven days at least. Without DAGSTER_HOME the repair sensor adds them.
    """
    from highwater.orchestration.operations.key_retirement import recall

    declared = deployment.find_stream(stream)
    lines: list[str] = []
    with dagster_instance() as instance:
        now = datetime.now(UTC)
        keys = recall(instance, deployment.open_ledger(), declared, first, last, now, lines.append, dry_run=dry_run)
    print_result({"stream": stream, "done": not dry_run, "keys": keys}, lines, as_json=as_json)
    print_needed_options("--yes", dry_run=dry_run, as_json=as_json)
