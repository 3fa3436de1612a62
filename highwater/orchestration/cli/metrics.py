"""The commands `metrics` and `serve-metrics`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import deployment_of, exit_status
from highwater.orchestration.dagster_home import dagster_instance
from highwater.orchestration.deployment import Deployment
from highwater.settings import DEFAULT_METRICS_LISTEN, METRICS_LISTEN, parse_metrics_listen

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.reporting.prometheus_metrics import MetricSamples


@click.command()
@click.argument("streams", nargs=-1)
@deployment_of
def metrics(deployment: Deployment, streams: Sequence[str]) -> None:
    """Print metrics of the named STREAMS, or of all, as OpenMetrics text for a scraper.

    With DAGSTER_HOME set it counts failing checks as well. Without a service the metrics that rest on it are left out
    and its highwater_up is 0. The text is valid all the same; the exit status is 75, or 2 where a person has to act.
    """
    from highwater.orchestration.reporting.prometheus_metrics import measure

    declared = [deployment.find_stream(name) for name in streams] or list(deployment.list_streams().values())
    found = measure(
        deployment.open_ledger(), deployment.open_kafka(), deployment.open_lake(), declared, dagster_instance
    )
    click.echo(found.text, nl=False)
    if found.errors:
        raise min(found.errors, key=exit_status)  # an error that needs a person comes first


def measure_streams(streams: Sequence[Stream]) -> MetricSamples:
    """Measure with the connections of the settings as they are now: secrets in files may have been replaced."""
    from highwater.orchestration.reporting import prometheus_metrics
    from highwater.orchestration.resources import KafkaResource, LakeResource, LedgerResource

    opened = LedgerResource().open(), KafkaResource().open(), LakeResource().open()
    return prometheus_metrics.measure(*opened, streams, dagster_instance)


@click.command("serve-metrics")
@click.option(
    "--listen",
    envvar=METRICS_LISTEN,
    default=DEFAULT_METRICS_LISTEN,
    show_default=True,
    help=f"Host and port; else {METRICS_LISTEN}. Port 0 takes a free one.",
)
@click.option(
    "--cache",
    "seconds",
    type=click.FloatRange(min=1),
    default=15.0,
    show_default=True,
    help="Seconds for which one measuring serves all scrapes.",
)
@deployment_of
def serve_metrics(deployment: Deployment, listen: str, seconds: float) -> None:
    """Serve /metrics for Prometheus and /health for probes over HTTP, until the process is ended.

    Streams are declared when it starts: start it again after a change. It has no login and shows no secrets.
    """
    from highwater.orchestration.reporting import health
    from highwater.orchestration.reporting.serving import HEALTH_SECONDS, CachedValue, build_application, open_server
    from highwater.orchestration.resources import LedgerResource

    host, port = parse_metrics_listen(listen)
    streams = [*deployment.list_streams().values()]
    open_ledger = LedgerResource().open
    open_ledger()  # settings that cannot be used are an error at once
    metrics = CachedValue(lambda: measure_streams(streams), seconds)
    state = CachedValue(lambda: health.examine(open_ledger, dagster_instance, datetime.now(UTC)), HEALTH_SECONDS)
    try:
        serving = open_server(host, port, build_application(metrics, state))
    except OSError as error:
        raise ConfigurationError(
            f"{listen} cannot be listened on",
            found=error.strerror,
            remedy=f"choose another port with --listen or {METRICS_LISTEN}",
        ) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a container ignores it otherwise
    with serving:
        click.echo(f"http://{listen.rpartition(':')[0]}:{serving.server_port}/metrics")
        serving.serve_forever()
