"""The entry point `highwater`: its group of commands, each from a module of this folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from highwater.errors import HighwaterError
from highwater.orchestration.cli.accepting import accept_divergence, accept_loss
from highwater.orchestration.cli.audit import audit
from highwater.orchestration.cli.code import serve_code
from highwater.orchestration.cli.doctor import doctor
from highwater.orchestration.cli.erase import erase
from highwater.orchestration.cli.infer import infer
from highwater.orchestration.cli.init import init
from highwater.orchestration.cli.ledger import ledger
from highwater.orchestration.cli.maintenance import maintain, recall_keys
from highwater.orchestration.cli.metrics import metrics, serve_metrics
from highwater.orchestration.cli.operator_actions import operator_actions
from highwater.orchestration.cli.parked import discard_parked, reclaim, redrive_parked
from highwater.orchestration.cli.pause import pause, pause_tier, resume, resume_tier
from highwater.orchestration.cli.planning import plan, slices
from highwater.orchestration.cli.rebuild import rebuild_all, rebuild_current, rebuild_ledger
from highwater.orchestration.cli.releasing import accept_rejects, release_hold, retry_slice
from highwater.orchestration.cli.spark import fetch_jars, serve_spark
from highwater.orchestration.cli.status import status
from highwater.orchestration.cli.terminal import exit_status, format_error
from highwater.orchestration.cli.tracing import explain, locate
from highwater.orchestration.cli.try_stream import try_stream
from highwater.orchestration.deployment import Deployment, read_process_settings


class _Group(click.Group):
    """Ends every command's error in plain words and the right status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HighwaterError as error:
            click.echo(format_error(error), err=True)
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
    is unavailable and trying again may help.
    """
    warn = partial(click.echo, err=True)
    context.obj = Deployment(read_process_settings(), declarations, warn)


for _command in (
    plan,
    slices,
    status,
    accept_loss,
    accept_divergence,
    audit,
    doctor,
    explain,
    locate,
    metrics,
    serve_code,
    serve_metrics,
    serve_spark,
    operator_actions,
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
