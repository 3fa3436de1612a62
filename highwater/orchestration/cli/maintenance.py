"""The commands `maintain` and `recall-keys`."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.terminal import (
    as_json_option,
    deployment_of,
    dry_run_option,
    print_json,
    print_lines,
    print_table,
)
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment

_NAMES = ("table", "files", "bytes", "stored files", "stored bytes", "compacted", "removed", "seconds")


@click.command()
@click.argument("stream")
@dry_run_option
@as_json_option
@deployment_of
def maintain(
    deployment: Deployment,
    stream: str,
    dry_run: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
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
    if as_json:
        keys = None if report.keys is None else {"live": report.keys.live, "retired": [*report.keys.retired]}
        tables = [{**one.row, "notes": [*one.notes]} for one in report.tables]
        retained = None if report.retained is None else report.retained.to_plain()
        found = {"tables": tables, "retention": retained, "keys": keys, "lines": report.lines}
        print_json({"stream": stream, "done": not dry_run, **found})
        return
    if report.tables:
        print_table([*_NAMES], [_build_row(one.row) for one in report.tables])
    print_lines(report.lines)


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
def recall_keys(
    deployment: Deployment,
    stream: str,
    first: str,
    last: str,
    dry_run: bool,  # noqa: FBT001 - click's flag
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """Bring the retired keys of STREAM from slice FIRST to LAST back to Dagster, for a backfill.

    Both are slices of one topic. They stay for seven days at least. Without DAGSTER_HOME the repair sensor adds them.
    """
    from highwater.orchestration.operations.key_retirement import recall

    declared = deployment.find_stream(stream)
    lines: list[str] = []
    with dagster_instance() as instance:
        now = datetime.now(UTC)
        keys = recall(instance, deployment.open_ledger(), declared, first, last, now, lines.append, dry_run=dry_run)
    if as_json:
        print_json({"stream": stream, "done": not dry_run, "keys": keys, "lines": lines})
    else:
        print_lines(lines)
