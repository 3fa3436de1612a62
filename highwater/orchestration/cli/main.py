"""The command `highwater`: what a person or a script asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from highwater.errors import HighwaterError
from highwater.orchestration.cli.audit import audit
from highwater.orchestration.cli.deciding import accept_rejects, release_hold, retry_slice
from highwater.orchestration.cli.decisions import decisions
from highwater.orchestration.cli.doctor import doctor
from highwater.orchestration.cli.erase import erase
from highwater.orchestration.cli.infer import infer
from highwater.orchestration.cli.init import init
from highwater.orchestration.cli.jars import fetch_jars
from highwater.orchestration.cli.ledger import ledger
from highwater.orchestration.cli.maintenance import maintain, recall_keys
from highwater.orchestration.cli.metrics import metrics
from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.cli.parked import discard_parked, reclaim, redrive_parked
from highwater.orchestration.cli.pause import pause, pause_tier, resume, resume_tier
from highwater.orchestration.cli.rebuild import rebuild_all, rebuild_current, rebuild_ledger
from highwater.orchestration.cli.serve_metrics import serve_metrics
from highwater.orchestration.cli.serve_spark import serve_spark
from highwater.orchestration.cli.terminal import (
    as_json_option,
    by_option,
    deployment_of,
    error_plain,
    error_text,
    exit_status,
    print_json,
    print_lines,
    print_table,
    with_dry_run_note,
)
from highwater.orchestration.cli.tracing import explain, locate
from highwater.orchestration.cli.try_stream import try_stream
from highwater.orchestration.deployment import Deployment, settings_of_process

if TYPE_CHECKING:
    from highwater.slices import Slice


class _Group(click.Group):
    """Ends every command's error in plain words and the right status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HighwaterError as error:
            click.echo(error_text(error), err=True)
            ctx.exit(exit_status(error))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--declarations",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the files of the streams, instead of HIGHWATER_STREAMS or the project's own.",
)
@click.version_option(package_name="highwater")
@click.pass_context
def main(context: click.Context, declarations: Path | None) -> None:
    """Kafka topics into Delta tables, slice by slice.

    Settings are read from the environment: HIGHWATER_HOME, HIGHWATER_LAKE, HIGHWATER_LEDGER_URL,
    HIGHWATER_KAFKA_BOOTSTRAP, HIGHWATER_KAFKA_CONFIG, HIGHWATER_ALERTS_URL, SPARK_REMOTE or HIGHWATER_SPARK_MASTER,
    DAGSTER_HOME. Exit status: 0 done, 2 something has to be fixed, 75 a service
    is away and trying again may help.
    """
    warn = partial(click.echo, err=True)
    context.obj = Deployment(settings_of_process(), declarations, warn)


@main.command()
@click.argument("stream")
@click.option("--commit", is_flag=True, help="Record the plan in the ledger; without it nothing is recorded.")
@as_json_option
@deployment_of
def plan(deployment: Deployment, stream: str, commit: bool, as_json: bool) -> None:  # noqa: FBT001 - click's flags
    """Cut the new offsets of STREAM's topic into slices; a dry run unless --commit is given."""
    from highwater.orchestration.sensing.topic_planner import Planner

    declared = deployment.stream(stream)
    tick = Planner(deployment.ledger(), deployment.kafka()).tick(declared, datetime.now(UTC), dry=not commit)
    if as_json:
        print_json(
            {
                "stream": stream,
                "recorded": commit,
                "slices": [_slice_plain(slice_) for slice_ in tick.slices],
                "lag": tick.lag,
                "skipped": {str(p): why for p, why in tick.skipped.items()},
                "errors": {str(p): error_plain(error) for p, error in tick.errors.items()},
            }
        )
    else:
        lines = tick.lines if commit else [*tick.lines, "a dry run: nothing was recorded; add --commit"]
        print_lines(lines)
    for error in tick.errors.values():
        raise error


@main.command()
@click.argument("stream")
@click.option("--topic", help="Only slices of this topic.")
@click.option("--after", help="Only slices planned after the one with this key.")
@click.option(
    "--last", "newest", type=click.IntRange(min=1), default=20, show_default=True, help="At most N, newest first."
)
@as_json_option
@deployment_of
def slices(
    deployment: Deployment,
    stream: str,
    topic: str | None,
    after: str | None,
    newest: int,
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """List planned slices of STREAM, oldest first."""
    declared = deployment.stream(stream)
    found = deployment.ledger().slices(declared.name, topic, after=after, newest=newest)
    if as_json:
        print_json([_slice_plain(slice_) for slice_ in found])
        return
    rows = [
        [
            slice_.key,
            slice_.generation,
            f"{slice_.planned_at:%Y-%m-%d %H:%M:%S}",
            f"{slice_.offsets:,}",
            _ranges(slice_),
        ]
        for slice_ in found
    ]
    print_table(["slice", "generation", "planned at (UTC)", "offsets", "ranges"], rows)


def _acceptance_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of both commands of acceptance."""
    for option in (
        as_json_option,
        click.option("--topic", help="The tier that is meant, instead of the main topic."),
        by_option,
        click.option("--dry-run", "dry", is_flag=True, help="Only show what would be recorded; the default."),
        click.option("--yes", "sure", is_flag=True, help="Record it. Without it only what would be recorded is shown."),
        click.option(
            "--partition", "partitions", type=click.IntRange(min=0), multiple=True, help="Only this one; repeatable."
        ),
        click.argument("stream"),
    ):
        command = option(command)
    return command


@main.command("accept-loss", cls=OperatorCommand)
@_acceptance_options
@deployment_of
def accept_loss(deployment: Deployment, /, **options: Any) -> None:
    """Accept that offsets of STREAM's topic are gone, so that planning goes on behind them.

    Records the hole, and opens a new generation of a topic that was recreated or cut off.
    """
    _accept(deployment, divergence=False, **options)


@main.command("accept-divergence", cls=OperatorCommand)
@_acceptance_options
@deployment_of
def accept_divergence(deployment: Deployment, /, **options: Any) -> None:
    """Accept that other records occupy planned offsets of STREAM's topic than before.

    An unclean leader election does that. Planning goes on where the log differs from the plan, as a new generation.
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
    sure: bool,
    dry: bool,
    by: str,
    as_json: bool,
) -> None:
    if sure and dry:
        raise click.UsageError("--yes and --dry-run contradict each other")
    from highwater.orchestration.operations.accepting_losses import AcceptLossRequest, accept_losses

    request = AcceptLossRequest(topic, set(partitions) or None, divergence, sure, by)
    connections = deployment.ledger(), deployment.kafka(), deployment.lake()
    found, lines = accept_losses(*connections, deployment.stream(stream), request, datetime.now(UTC))
    if as_json:
        print_json({"stream": stream, "recorded": sure and not found.nothing, "lines": lines})
        return
    if found.nothing:
        print_lines([f"nothing of {stream} is lost: there is nothing to accept"])
        return
    print_lines(with_dry_run_note([*lines, "recorded"] if sure else lines, sure=sure))


@main.command()
@click.argument("streams", nargs=-1)
@as_json_option
@deployment_of
def status(deployment: Deployment, streams: Sequence[str], as_json: bool) -> None:  # noqa: FBT001 - click's flag
    """Show how far the topics are planned, and accepted events are sent, for the named STREAMS or all."""
    from highwater.orchestration.reporting.plan_status import stream_status
    from highwater.orchestration.reporting.status_report import StreamStatus

    declared = [deployment.stream(name) for name in streams] or list(deployment.streams().values())
    ledger, kafka, lake = deployment.ledger(), deployment.kafka(), deployment.lake()
    counts = ledger.counts()
    found: list[StreamStatus] = [stream_status(ledger, kafka, stream, counts, lake) for stream in declared]
    if as_json:
        print_json([one.to_plain() for one in found])
    else:
        for one in found:
            print_lines(one.lines)
            if one.partitions:
                print_table(*one.table)
    all_errors = [error for one in found for error in (*one.errors, *(dlq.error for dlq in one.dlq), one.accepted)]
    if errors := [error for error in all_errors if error is not None]:
        # Faults that need a person come before those that pass.
        raise min(errors, key=exit_status)


def _slice_plain(slice_: Slice) -> dict[str, Any]:
    from highwater.slices import ranges_to_plain

    return {
        "slice": slice_.key,
        "topic_id": slice_.topic_id,
        "generation": slice_.generation,
        "planned_at": slice_.planned_at.isoformat(),
        "offsets": slice_.offsets,
        "ranges": ranges_to_plain(slice_.ranges),
    }


def _ranges(slice_: Slice, most: int = 4) -> str:
    filled = [f"{p}: {r}" for p, r in sorted(slice_.ranges.items()) if len(r)]
    more = [f"and {len(filled) - most} more"] if len(filled) > most else []
    return " ".join([*filled[:most], *more])


for _command in (
    audit,
    doctor,
    explain,
    locate,
    metrics,
    serve_metrics,
    serve_spark,
    decisions,
    redrive_parked,
    discard_parked,
    reclaim,
    accept_rejects,
    release_hold,
    retry_slice,
    pause,
    resume,
    pause_tier,
    resume_tier,
    ledger,
    rebuild_ledger,
    rebuild_current,
    rebuild_all,
    maintain,
    recall_keys,
    erase,
    infer,
    try_stream,
    init,
    fetch_jars,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
