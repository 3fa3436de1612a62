"""The sensors: planning, retries, repair and the mirror of each stream, and the alerts of all.

What belongs here: the shells that Dagster ticks. What does not: what a tick does (`orchestration.sensing.ticks`,
`orchestration.sensing.repairing`) and decides (`orchestration.sensing.requests`).
"""

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.errors import TemporaryError
from highwater.log_fields import fields
from orchestration.redaction import secret_values
from orchestration.resources import settings
from orchestration.sensing.mirror import mirror
from orchestration.sensing.publishing import publish
from orchestration.sensing.repairing import repair
from orchestration.sensing.ticks import Tick, plan, retry, run_requests
from orchestration.telling import alerts
from orchestration.telling.stopped import failing_sensors
from resources.webhook import post

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.alerting import Alert
    from highwater.declaration import Stream

# A slice waits so long at the most for being planned, beside its own limits.
PLANNER_SECONDS = 10
# What is due waits so long at the most for being planned.
RETRY_SECONDS = 10
# A worker that died is missed after a term of its lease, 60 s, this, and 20 s until the second look; its slices shall
# stand within three minutes.
REPAIR_SECONDS = 30
# Ordinary tools see what is done so long afterwards, at the most.
MIRROR_SECONDS = 30
# Events go out so long after their slice is done, at the most, beside the run itself.
PUBLISH_SECONDS = 20
# A stop raises an alert within a minute: this, five seconds until the daemon looks, and the measuring.
ALERT_SECONDS = 45
# A pace applies to shorter intervals than this. Repair, mirror and alerts were half of the demonstration's ticks and a
# quarter of its processor time, and nothing waits for them.
PACED_BELOW_SECONDS = 30


@dataclass(frozen=True)
class Ticking:
    """Whether and how often sensors tick.

    Args:
        running: whether they start by themselves.
        pace: a factor on the seconds between the ticks of planner, retries and publisher. The daemon looks every five
            seconds, whatever it is.
    """

    running: bool = False
    pace: float = 1.0

    @property
    def status(self) -> dg.DefaultSensorStatus:
        """How they start."""
        return dg.DefaultSensorStatus.RUNNING if self.running else dg.DefaultSensorStatus.STOPPED

    def seconds(self, usual: int) -> int:
        """Between two ticks, at the least."""
        return usual if usual >= PACED_BELOW_SECONDS else max(1, round(usual * self.pace))


def published_sensor(stream: "Stream", job: "UnresolvedAssetJobDefinition", ticking: Ticking) -> dg.SensorDefinition:
    """The sensor of a stream that publishes."""
    return _sensor(stream, job, PUBLISHER, ticking)


def stream_sensors(
    stream: "Stream", job: "UnresolvedAssetJobDefinition", ticking: Ticking
) -> list[dg.SensorDefinition]:
    """The sensors of a stream."""
    return [_sensor(stream, job, shell, ticking) for shell in SHELLS if stream.delays or not shell.of_tiers]


@dataclass(frozen=True)
class Shell:
    """One sensor of every stream.

    Args:
        name: the last part of the sensor's name.
        seconds: between two ticks, at the least.
        needs: the resources.
        act: does a tick; gets the stream and the sensor's cursor last.
        what: one sentence or two for the sensor's page.
        of_tiers: whether only streams whose records are retried have it.
    """

    name: str
    seconds: int
    needs: frozenset[str]
    act: Callable[[dg.DagsterInstance, Any, "Stream", str | None], Tick]
    what: Callable[["Stream"], str]
    of_tiers: bool = False


SHELLS = (
    Shell(
        "planner",
        PLANNER_SECONDS,
        frozenset({"kafka", "lake", "ledger"}),
        plan,
        lambda stream: f"Cuts what is new in {stream.topic} into slices, adds their keys and requests their runs.",
    ),
    Shell(
        "repair",
        REPAIR_SECONDS,
        frozenset({"kafka", "lake", "ledger"}),
        repair,
        lambda stream: (
            f"Requests slices of {stream.name} that the lake does not hold whole and no run is working on, and tells "
            "Dagster of those that the lake holds and Dagster forgot."
        ),
    ),
    Shell(
        "dlq_retries",
        RETRY_SECONDS,
        frozenset({"kafka", "lake", "ledger"}),
        retry,
        lambda stream: (
            f"Cuts what is due in {', '.join(stream.delays)} into slices and requests their runs, behind those of "
            "new slices."
        ),
        of_tiers=True,
    ),
    Shell(
        "mirror",
        MIRROR_SECONDS,
        frozenset({"kafka", "lake", "ledger"}),
        mirror,
        lambda stream: (
            f"Sets the consumer group {stream.group} to what of {stream.topic} and its tiers is done, so that ordinary "
            "tools see the lag. Nothing reads these offsets."
        ),
    ),
)

PUBLISHER = Shell(
    "published",
    PUBLISH_SECONDS,
    frozenset({"lake", "ledger"}),
    publish,
    lambda stream: (
        f"Requests {stream.name}/published for the slices that are done, without a gap from the first one on: "
        f"one run at a time sends their events to {stream.publishes.topic if stream.publishes else ''}."
    ),
)


def _sensor(
    stream: "Stream", job: "UnresolvedAssetJobDefinition", shell: Shell, ticking: Ticking
) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"{stream.name}_{shell.name}",
        job=job,
        minimum_interval_seconds=ticking.seconds(shell.seconds),
        default_status=ticking.status,
        description=shell.what(stream),
        required_resource_keys=set(shell.needs),
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        def act() -> Tick:
            record_instance(context.instance, context.resources, stream)
            return shell.act(context.instance, context.resources, stream, context.cursor)

        return _result(context, stream, act)

    return tick


def record_instance(instance: dg.DagsterInstance, resources: Any, stream: "Stream") -> None:
    """Record in the ledger that this Dagster instance works on a stream: two at the same time repeat each other's work.

    Raises:
        DependencyAwayError: the ledger is away.
    """
    from dagster._core.storage.runs import SqlRunStorage

    place = f"{socket.gethostname()}:{os.environ.get('DAGSTER_HOME', '')}"
    storage = instance.run_storage
    # A storage that is no SQL database has no ID; hosts and folders differ then.
    instance_id = storage.get_run_storage_id() if isinstance(storage, SqlRunStorage) else place
    resources.ledger.open().instances.record(stream.name, instance_id, place, datetime.now(UTC))


def _result(context: dg.SensorEvaluationContext, stream: "Stream", act: Callable[[], Tick]) -> dg.SensorResult:
    """A tick as Dagster takes it; a dependency that is away is a reason to skip, never an empty look (I15)."""
    with fields(stream=stream.name):
        try:
            tick = act()
        except TemporaryError as error:
            context.log.warning(str(error))
            return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
        for line in tick.lines:
            context.log.info(line)
        if tick.error is not None:
            for event in tick.events:
                context.instance.report_runless_asset_event(event)
            raise tick.error
    partitions = dg.DynamicPartitionsDefinition(name=stream.partitions_name)
    return dg.SensorResult(
        run_requests=run_requests(stream, tick.requests),
        skip_reason=None if tick.requests else tick.message,
        cursor=tick.cursor,
        dynamic_partitions_requests=[partitions.build_add_request(tick.keys)] if tick.keys else [],
        asset_events=tick.events,
    )


def alerts_sensor(streams: Sequence["Stream"], ticking: Ticking) -> dg.SensorDefinition:
    """The sensor `alerts` of all streams; it requests no run."""

    @dg.sensor(
        name="alerts",
        minimum_interval_seconds=ticking.seconds(ALERT_SECONDS),
        default_status=ticking.status,
        description="Measures all streams against their thresholds, and tells what begins and what ends.",
        required_resource_keys={"kafka", "ledger", "lake"},
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        connections = context.resources
        try:
            lines = alerts.tick(
                connections.ledger.open(),
                connections.kafka.open(),
                connections.lake.open(),
                streams,
                _teller(context),
                lambda: failing_sensors(context.instance, _sensors_of(streams), secret_values(settings())),
            )
        except TemporaryError as error:
            lines = [str(error)]
        for line in lines:
            context.log.info(line)
        return dg.SkipReason("; ".join(lines))

    return tick


def _sensors_of(streams: Sequence["Stream"]) -> list[tuple["Stream", str]]:
    return [(stream, f"{stream.name}_{shell.name}") for stream in streams for shell in (*SHELLS, PUBLISHER)]


def _teller(context: dg.SensorEvaluationContext) -> Callable[["Alert"], None]:
    """Tells the receiver that is configured; without one the sensor's log."""
    url = settings().alerts_url
    if url is not None:
        return lambda alert: post(url, alert.to_plain())

    def log(alert: "Alert") -> None:
        with fields(stream=alert.stream, alert=alert.what):
            context.log.warning(json.dumps(alert.to_plain()))

    return log
