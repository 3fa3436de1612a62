"""The sensors: planner, retries, repair, offset mirror, publisher and alerts, each once for all streams."""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import dagster as dg

from highwater.errors import HighwaterError, TemporaryError
from highwater.log_fields import bind_log_fields
from highwater.orchestration.redaction import redact_error
from highwater.orchestration.reporting import alerts
from highwater.orchestration.reporting.stalled_work import (
    find_stopped_sensors,
    measure_schedules,
    measure_sensors,
    measure_skipped_streams,
    measure_stream_files,
)
from highwater.orchestration.resources import list_known_secrets, read_settings
from highwater.orchestration.sensing.planning_rounds import PlannerRound, RetriesRound
from highwater.orchestration.sensing.resting_rounds import RestingStreams, begin_mirror, begin_publisher, begin_repair
from highwater.orchestration.sensing.rounds import (
    BUDGET_SECONDS,
    LIMIT_SECONDS,
    MAX_RUNS,
    Cursor,
    Round,
    RoundContext,
    RoundResult,
    describe_problem,
    describe_remedy,
    find_first_unserved,
    limit_runs,
    visit_all,
)
from highwater.orchestration.sensing.run_history import describe_instance_place, read_instance_id
from highwater.orchestration.sensing.run_places import assign_places
from highwater.orchestration.sensing.stream_ticks import Tick, build_run_requests
from highwater.resources.ledger.pauses import ALL, PLANNER, PUBLISHER, RETRIES
from highwater.resources.ledger.sensor_faults import NAME_LENGTH, SensorFault
from highwater.resources.time_limits import limit_time
from highwater.resources.webhook import post

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from highwater.alerting import Alert
    from highwater.declaration import Stream
    from highwater.errors import DeclarationError
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.pauses import Pause
    from highwater.stream_files import Declarations

    Jobs = Mapping[str, UnresolvedAssetJobDefinition]

# The longest time before a tick plans new records; a slice's own limits come on top.
PLANNER_SECONDS = 10
# The longest time before a tick plans due records.
RETRY_SECONDS = 10
# A slice of a dead worker is committed within three minutes: 60 s until its lease ends, this interval, and 20 s until
# the second look.
REPAIR_SECONDS = 30
# The longest time before ordinary tools show that the slices of an ended run are done.
MIRROR_SECONDS = 30
# The longest time before a run is requested for the events of a slice that is done.
PUBLISH_SECONDS = 20
# A stop raises an alert within a minute: this interval, five seconds until the daemon looks, and the measuring.
ALERT_SECONDS = 45
# A stream without a condition to report is measured again after this time, or as soon as something of it changes. It
# takes 0.2 s, so 100 such streams take 4 s of each minute. The shortest thresholds are minutes.
ALERT_REST = timedelta(minutes=5)
# With a condition to report: when it ends otherwise than by a run, or another one begins, that is reported after this
# time and the interval.
ALERTING_REST = timedelta(minutes=2)
# A tick's message and its log name at most this number of streams; Dagster stores both.
STREAMS_SHOWN = 20
# A pace applies to shorter intervals than this. Repair, mirror and alerts were half of the demonstration's ticks and a
# quarter of its processor time, and nothing waits for them.
PACED_BELOW_SECONDS = 30


@dataclass(frozen=True)
class SensorTicking:
    """Whether and how often sensors tick.

    Args:
        running: whether they start by themselves.
        pace: a factor on the seconds between the ticks of planner, retries and publisher. The daemon looks every five
            seconds, in every case.
    """

    running: bool = False
    pace: float = 1.0

    @property
    def status(self) -> dg.DefaultSensorStatus:
        """The default status of the sensors."""
        return dg.DefaultSensorStatus.RUNNING if self.running else dg.DefaultSensorStatus.STOPPED

    def compute_interval(self, usual: int) -> int:
        """Between two ticks, at the least."""
        return usual if usual >= PACED_BELOW_SECONDS else max(1, round(usual * self.pace))


@dataclass(frozen=True)
class StreamsSensor:
    """One sensor of all streams.

    Args:
        name: the sensor's name.
        seconds: between two ticks, at the least.
        needs: the resources.
        begin: asks what the sensor asks once for all streams.
        description: for the sensor's page.
        paused_by: the pauses of a stream that stop the sensor's work on it.
    """

    name: str
    seconds: int
    needs: frozenset[str]
    begin: Callable[[RoundContext], Round]
    description: str
    paused_by: tuple[str, ...] = ()


_ALL_THREE = frozenset({"kafka", "lake", "ledger"})
PLANNER_SHELL = StreamsSensor(
    "planner",
    PLANNER_SECONDS,
    _ALL_THREE,
    PlannerRound,
    "Cuts new records of every stream's topic into slices, adds their keys and requests their runs.",
    (PLANNER, ALL),
)
RETRIES_SHELL = StreamsSensor(
    "dlq_retries",
    RETRY_SECONDS,
    _ALL_THREE,
    RetriesRound,
    "Cuts due records of every stream's tiers into slices and requests their runs, after those of new slices.",
    (RETRIES, ALL),
)
REPAIR_SHELL = StreamsSensor(
    "repair",
    REPAIR_SECONDS,
    _ALL_THREE,
    begin_repair,
    "Requests slices that the lake does not hold whole and no run is working on. Reports to Dagster the slices that "
    "the lake holds and Dagster forgot.",
    (ALL,),
)
MIRROR_SHELL = StreamsSensor(
    "offset_mirror",
    MIRROR_SECONDS,
    _ALL_THREE,
    begin_mirror,
    "Sets each stream's consumer group `highwater.<stream>` to the slices that are done, so that ordinary tools show "
    "the lag. Nothing reads these offsets.",
)
PUBLISHER_SHELL = StreamsSensor(
    "publisher",
    PUBLISH_SECONDS,
    frozenset({"lake", "ledger"}),
    begin_publisher,
    "Requests `<stream>/published` for the slices that are done, without a gap from the first one on: one run of a "
    "stream at a time sends their events.",
    (PUBLISHER, ALL),
)
SHELLS = (PLANNER_SHELL, RETRIES_SHELL, REPAIR_SHELL, MIRROR_SHELL, PUBLISHER_SHELL)


def build_stream_sensors(
    streams: Sequence["Stream"],
    slice_jobs: "Jobs",
    publish_jobs: "Jobs",
    ticking: SensorTicking,
    files: "Declarations | None" = None,
) -> list[dg.SensorDefinition]:
    """The five sensors that work on streams.

    Args:
        streams: all streams.
        slice_jobs: by stream the job that takes its slices through its tables.
        publish_jobs: by stream the job that sends its events, of streams that publish.
        ticking: whether and how often they tick.
        files: the stream files. The planner records those with a fault.
    """
    tiered = [stream for stream in streams if stream.delays]
    publishing = [stream for stream in streams if stream.name in publish_jobs]
    jobs = [*slice_jobs.values()]
    return [
        _build_sensor(PLANNER_SHELL, streams, jobs, ticking, files),
        _build_sensor(RETRIES_SHELL, tiered, [slice_jobs[stream.name] for stream in tiered], ticking),
        _build_sensor(REPAIR_SHELL, streams, jobs, ticking),
        _build_sensor(MIRROR_SHELL, streams, [], ticking),
        _build_sensor(PUBLISHER_SHELL, publishing, [*publish_jobs.values()], ticking),
    ]


def _build_sensor(
    shell: StreamsSensor,
    streams: Sequence["Stream"],
    jobs: "Sequence[UnresolvedAssetJobDefinition]",
    ticking: SensorTicking,
    files: "Declarations | None" = None,
) -> dg.SensorDefinition:
    @dg.sensor(
        name=shell.name,
        jobs=jobs,
        minimum_interval_seconds=ticking.compute_interval(shell.seconds),
        default_status=ticking.status,
        description=shell.description,
        required_resource_keys=set(shell.needs),
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        with limit_time(LIMIT_SECONDS):
            return _evaluate(context, shell, streams, files)

    return tick


def _evaluate(
    context: dg.SensorEvaluationContext, shell: StreamsSensor, streams: Sequence["Stream"], files: "Declarations | None"
) -> dg.SensorResult:
    """One tick over all streams; a dependency that is unavailable is a reason to skip, never an empty look (I15)."""
    deadline = time.monotonic() + BUDGET_SECONDS
    now, cursor = datetime.now(UTC), Cursor.parse(context.cursor)
    try:
        ledger: Ledger = context.resources.ledger.open()
        record_instance(context.instance, ledger, streams)
        paused = _read_pauses(ledger, shell, {stream.name for stream in streams})
        known = {one.stream: one for one in ledger.sensor_faults.list_all() if one.sensor == shell.name}
        active = [stream for stream in streams if stream.name not in paused]
        round_ = shell.begin(RoundContext(context.instance, context.resources, active, cursor.streams, now))
    except TemporaryError as error:
        context.log.warning(str(error))
        return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
    visits = visit_all(round_, active, cursor, known.keys(), deadline)
    unread = {} if files is None else index_file_faults(files)
    visits.faults |= unread
    faults, ticks = _build_faults(shell, known, visits, now), limit_runs(visits.ticks, MAX_RUNS)
    unserved = find_first_unserved(visits.ticks, ticks) or round_.begin
    after = replace(visits.cursor, begin=unserved or visits.cursor.begin)
    ticks = assign_places(context.instance, ticks)
    read = [] if files is None else [one for one in known if is_in(files, one) and one not in unread]
    lines = [*round_.lines, *_record(ledger, shell, known, faults, [*visits.served, *paused, *read])]
    _log(context, ticks, visits, faults)
    return _build_result(streams, ticks, _format_message(streams, paused, visits, faults, ticks, lines), after)


def index_file_faults(files: "Declarations") -> "dict[str, DeclarationError]":
    """The faults of stream files by the name under which the ledger has them: the end of the file's path."""
    return {str(file)[-NAME_LENGTH:]: error for file, error in files.faults.items()}


def is_in(files: "Declarations", name: str) -> bool:
    """Whether a fault in the ledger is one of a file in this folder of streams."""
    folder, _, file = name.rpartition("/")
    return file.endswith(".py") and str(files.folder).endswith(folder)


def record_instance(instance: dg.DagsterInstance, ledger: "Ledger", streams: Sequence["Stream"]) -> None:
    """Record in the ledger that this Dagster instance works on the streams: two at the same time repeat their work.

    Raises:
        DependencyUnavailableError: the ledger is unavailable.
    """
    names = [stream.name for stream in streams]
    ledger.instances.record(names, read_instance_id(instance), describe_instance_place(), datetime.now(UTC))


def _read_pauses(ledger: "Ledger", shell: StreamsSensor, streams: Collection[str]) -> "dict[str, Pause]":
    """The pauses that stop a sensor's work on these streams, by stream."""
    if not shell.paused_by:
        return {}
    return {
        name: next(parts[part] for part in shell.paused_by if part in parts)
        for name, parts in ledger.paused.read_parts_by_stream().items()
        if name in streams and parts.keys() & {*shell.paused_by}
    }


def _build_faults(
    shell: StreamsSensor, known: "Mapping[str, SensorFault]", visits: RoundResult, now: datetime
) -> "dict[str, SensorFault]":
    """The faults of a round by stream; one that lasts has the time of its first tick."""
    secrets = list_known_secrets()
    found = {}
    for name, error in visits.faults.items():
        shown = error if isinstance(error, HighwaterError) else redact_error(error, secrets)
        since = known[name].since if name in known else now
        found[name] = SensorFault(name, shell.name, since, describe_problem(shown), describe_remedy(error, shell.name))
    return found


def _record(
    ledger: "Ledger",
    shell: StreamsSensor,
    known: "Mapping[str, SensorFault]",
    faults: "Mapping[str, SensorFault]",
    sound: Sequence[str],
) -> list[str]:
    """Record which streams the sensor skips, for status and alerts; returns a line where the ledger is unavailable."""
    changed = [fault for name, fault in faults.items() if known.get(name) != fault]
    try:
        ledger.sensor_faults.replace(shell.name, changed, [name for name in sound if name in known])
    except HighwaterError as error:
        return [f"faults could not be recorded: {error}"]
    return []


def _log(
    context: dg.SensorEvaluationContext,
    ticks: Mapping[str, Tick],
    visits: RoundResult,
    faults: "Mapping[str, SensorFault]",
) -> None:
    secrets = list_known_secrets()
    for name, tick in ticks.items():
        with bind_log_fields(stream=name):
            for line in tick.lines:
                context.log.info("%s: %s", name, line)
    for name, reason in visits.skipped.items():
        with bind_log_fields(stream=name):
            context.log.warning("%s: %s", name, reason)
    for name, fault in faults.items():
        error = visits.faults[name]
        defect = None if isinstance(error, HighwaterError) else redact_error(error, secrets)
        with bind_log_fields(stream=name):
            context.log.error("%s: %s; remedy: %s", name, fault.problem, fault.remedy, exc_info=defect)


def _format_message(
    streams: Sequence["Stream"],
    paused: "Mapping[str, Pause]",
    visits: RoundResult,
    faults: "Mapping[str, SensorFault]",
    ticks: Mapping[str, Tick],
    lines: Sequence[str],
) -> str:
    """The tick in one text, beginning with faults that need a person."""
    texts = [
        *lines,
        *[f"{name}: {one.problem}; remedy: {one.remedy}" for name, one in faults.items()],
        *[f"{name}: {reason}" for name, reason in visits.skipped.items()],
        *[pause.text for pause in paused.values()],
        *[f"{name}: {tick.message}" for name, tick in ticks.items() if tick.lines],
    ]
    left = [f"{len(visits.left)} streams are left to the next tick, from {visits.left[0]} on"] if visits.left else []
    more = [f"and {len(texts) - STREAMS_SHOWN} more, see the tick's log"] if len(texts) > STREAMS_SHOWN else []
    return "; ".join([*texts[:STREAMS_SHOWN], *more, *left]) or f"{len(streams)} streams: nothing to do"


def _build_result(
    streams: Sequence["Stream"], ticks: Mapping[str, Tick], message: str, cursor: Cursor
) -> dg.SensorResult:
    """The ticks of all streams as Dagster takes them."""
    declared = {stream.name: stream for stream in streams}
    requests = [one for name, tick in ticks.items() for one in build_run_requests(declared[name], tick.requests)]
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else message,
        cursor=cursor.to_json(),
        dynamic_partitions_requests=[
            dg.DynamicPartitionsDefinition(name=declared[name].partitions_name).build_add_request([*tick.keys])
            for name, tick in ticks.items()
            if tick.keys
        ],
        asset_events=[event for tick in ticks.values() for event in tick.events],
    )


def build_alerts_sensor(
    streams: Sequence["Stream"], ticking: SensorTicking, files: "Declarations | None" = None
) -> dg.SensorDefinition:
    """The sensor `alerts` of all streams; it requests no run."""

    @dg.sensor(
        name="alerts",
        minimum_interval_seconds=ticking.compute_interval(ALERT_SECONDS),
        default_status=ticking.status,
        description="Measures all streams against their thresholds, and reports what begins and what ends.",
        required_resource_keys={"kafka", "ledger", "lake"},
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        connections, cursor, now = context.resources, Cursor.parse(context.cursor), datetime.now(UTC)
        names = [shell.name for shell in SHELLS]
        stopped = find_stopped_sensors(context.instance, names)
        try:
            ledger = connections.ledger.open()
            rests = RestingStreams(RoundContext(context.instance, connections, streams, cursor.streams, now))
            faulty = {one.stream for one in ledger.sensor_faults.list_all()}
            resting = {s.name for s in streams if rests.is_at_rest(s.name) and s.name not in faulty}
            with limit_time(LIMIT_SECONDS):
                done = alerts.tick(
                    ledger,
                    connections.kafka.open(),
                    connections.lake.open(),
                    streams,
                    _build_alert_sender(context),
                    sensors=lambda: [
                        *measure_sensors(context.instance, names, list_known_secrets()),
                        *measure_schedules(context.instance, [stream.name for stream in streams]),
                        *measure_skipped_streams(ledger, streams, names, now, stopped),
                        measure_stream_files(files),
                    ],
                    begin=cursor.begin,
                    resting=resting,
                )
        except TemporaryError as error:
            context.log.info(str(error))
            return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
        for line in done.lines:
            context.log.info(line)
        lefts = {name: cursor.streams[name] for name in resting}
        lefts |= {name: rests.begin(name, ALERT_REST) for name in done.calm}
        lefts |= {name: rests.rest_until(name, now + ALERTING_REST) for name in done.alerting}
        return dg.SensorResult(skip_reason="; ".join(done.lines), cursor=Cursor(done.begin, "", lefts).to_json())

    return tick


def _build_alert_sender(context: dg.SensorEvaluationContext) -> Callable[["Alert"], None]:
    """Sends alerts to the configured receiver; without one to the sensor's log."""
    url = read_settings().alerts_url
    if url is not None:
        return lambda alert: post(url, alert.to_plain())

    def log(alert: "Alert") -> None:
        with bind_log_fields(stream=alert.stream, alert=alert.what):
            context.log.warning(json.dumps(alert.to_plain()))

    return log
