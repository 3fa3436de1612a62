"""Conditions of alerts about work that stopped: planning, expired slices, losses, sensors and schedules that fail."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from highwater.alerting import DEPLOYMENT, Condition
from highwater.errors import HighwaterError, OffsetsExpiredError, PermanentError, TopicAbsentError
from highwater.orchestration.reporting.consumer_lag import load_unread_slices
from highwater.orchestration.sensing.retries import plan_tier
from highwater.orchestration.sensing.topic_planner import Planner, PlanningResult
from highwater.plans import RECORDED_BY_DECLARATION
from highwater.resources.expired_offsets import list_expired_slices
from highwater.resources.ledger.pauses import ALL, RETRIES
from highwater.routing import format_topic_option
from highwater.wording import format_duration

if TYPE_CHECKING:
    from dagster import DagsterInstance, DagsterRun
    from dagster._core.scheduler.instigation import InstigatorState, InstigatorTick

    from highwater.declaration import Stream
    from highwater.orchestration.reporting.alert_inputs import StreamInputs
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.sensor_faults import SensorFault
    from highwater.slices import Slice
    from highwater.stream_files import Declarations

# An alert names at most this number of faults; `highwater status` has all of them.
MAX_FAULTS = 3
# A sensor's ticks may fail now and then: a code server starts, a connection breaks. This many in a row do not pass.
TICKS = 3
# A fault that the next ticks do not find any more raises no alert: three ticks of the slowest sensor but one.
FAULT_LASTS = timedelta(minutes=1)
# The schedules, each with its job.
SCHEDULES: Mapping[str, str] = MappingProxyType({"maintenance": "maintenance", "audit_daily": "audit"})
# The last runs of a schedule are looked for among this many of its job's, and one more for each stream.
SCHEDULED_RUNS = 20
# The alert of a loss that a declaration records ends so long after the last one.
LOSS_REPORTED_FOR = timedelta(days=1)


def measure_planning(inputs: StreamInputs) -> Condition:
    """The planning of the main topic, tried without recording anything."""
    stream = inputs.stream
    try:
        faults = _describe_faults(Planner(inputs.ledger, inputs.kafka).tick(stream, datetime.now(UTC), dry_run=True))
    except PermanentError as error:
        faults = [describe_fault(error)]
    found = _build_texts(stream, faults)
    return Condition(stream.name, "planning", found.value, "it goes on", found.over, found.remedy)


def measure_retry_planning(inputs: StreamInputs) -> Condition:
    """The planning of the topics whose records are retried; a vanished tier has the alert `age of retries`."""
    stream, faults = inputs.stream, list[tuple[str, str]]()
    if inputs.ledger.paused.read_parts_by_stream(stream.name).get(stream.name, {}).keys() & {RETRIES, ALL}:
        return Condition.not_applicable(stream.name, "planning of retries", "a person paused it")
    paused = inputs.ledger.paused.read_for_stream(stream.name)
    begun = inputs.ledger.topics.read_planned_topic(stream.name, stream.topic) is not None
    for topic in stream.delays if begun else stream.tier_topics:
        if topic in paused:
            continue
        try:
            faults += _describe_faults(
                plan_tier(inputs.ledger, inputs.kafka, stream, topic, datetime.now(UTC), dry_run=True)
            )
        except TopicAbsentError:
            continue
        except PermanentError as error:
            faults.append(describe_fault(error))
    found = _build_texts(stream, faults)
    return Condition(stream.name, "planning of retries", found.value, "it goes on", found.over, found.remedy)


def _describe_faults(tick: PlanningResult) -> list[tuple[str, str]]:
    """The errors that keep partitions from being planned, with their remedies."""
    skipped = [
        (f"{tick.state.topic} partition {p}: {why}", "check that every partition has a leader")
        for p, why in tick.skipped.items()
    ]
    return [*map(describe_fault, tick.errors.values()), *skipped]


def describe_fault(error: HighwaterError) -> tuple[str, str]:
    """An error as an alert shows it: the fault with its values, and the remedy."""
    values = [f"{name}: {value}" for name, value in (("stored", error.stored), ("found", error.found)) if value]
    return "; ".join([error.problem, *values]), error.remedy


class _AlertTexts(NamedTuple):
    """The texts of an alert about some faults."""

    value: str
    over: bool
    remedy: str


def _build_texts(stream: Stream, faults: Sequence[tuple[str, str]]) -> _AlertTexts:
    if not faults:
        return _AlertTexts("no fault", over=False, remedy="no action needed")
    first = [text for text, _ in faults[:MAX_FAULTS]]
    more = [f"and {len(faults) - MAX_FAULTS:,} more"] if len(faults) > MAX_FAULTS else []
    remedies = dict.fromkeys(remedy for _, remedy in faults[:MAX_FAULTS])
    shown = f"highwater status {stream.name} shows every partition"
    return _AlertTexts("; ".join([*first, *more]), over=True, remedy="; ".join([*remedies, shown]))


def list_expired_errors(
    ledger: Ledger, kafka: Kafka, stream: Stream, read: Collection[str] | None
) -> list[OffsetsExpiredError]:
    """The errors of topics with planned slices that lost offsets before they were read, one for each topic.

    A stream that records expired offsets by itself has none: the next run of such a slice records the loss.

    Args:
        ledger: the plans.
        kafka: is looked at.
        stream: the stream.
        read: the slices in raw. If that is not known, None: then those are unread that no attempt was made at.

    Raises:
        DependencyUnavailableError: Kafka or the ledger is unavailable.
    """
    found = []
    for topic in (stream.topic, *stream.delays) if stream.on_expired == "stop" else ():
        planned = ledger.topics.read_planned_topic(stream.name, topic)
        unread, _ = load_unread_slices(ledger, planned, read) if planned is not None else ([], None)
        try:
            expired = list_expired_slices(kafka, topic, unread)
        except TopicAbsentError:
            continue  # planning reports it
        if expired:
            first = expired[0]
            many = sum(len(offsets) for one in expired for offsets in one.offsets.values())
            accept = f"highwater accept-loss {stream.name}{format_topic_option(stream, topic)}"
            found.append(
                OffsetsExpiredError(
                    f"{len(expired):,} planned slices of {topic}, from {first.slice_.key} on, lost {many:,} offsets "
                    "before they were read",
                    stored=_format_ranges(first.slice_.ranges.items(), first.offsets),
                    found=f"deleted: {_format_ranges(first.offsets.items(), first.offsets)}",
                    remedy=f"{accept} shows the loss, and with --yes --by NAME records it; then each slice takes "
                    f"what is left of it. Raise retention.ms of {topic}",
                )
            )
    return found


def _format_ranges(ranges: Iterable[tuple[int, object]], of: Collection[int]) -> str:
    return ", ".join(f"{p}: {offsets}" for p, offsets in sorted(ranges) if p in of)


def measure_expired_slices(inputs: StreamInputs) -> Condition:
    """Planned slices that lost offsets before they were read."""
    errors = list_expired_errors(inputs.ledger, inputs.kafka, inputs.stream, inputs.in_raw)
    found = _build_texts(inputs.stream, [*map(describe_fault, errors)])
    return Condition(inputs.stream.name, "expired slices", found.value, "none", found.over, found.remedy)


def measure_unread_age(inputs: StreamInputs) -> Condition | None:
    """The wait of the oldest planned slice to be read, since its plan: for example because the run queue is stuck.

    None while the lake cannot be asked.
    """
    stream, limit, now = inputs.stream, inputs.stream.alerts.unread_late, datetime.now(UTC)
    if inputs.in_raw is None:
        return None
    unread: list[Slice] = []
    for topic in (stream.topic, *stream.delays):
        planned = inputs.ledger.topics.read_planned_topic(stream.name, topic)
        unread += load_unread_slices(inputs.ledger, planned, inputs.in_raw)[0][:1] if planned is not None else []
    first = min(unread, key=lambda slice_: slice_.planned_at, default=None)
    age = now - first.planned_at if first is not None else timedelta(0)
    return Condition(
        stream.name,
        "age of unread slices",
        f"{first.key} was planned {format_duration(age)} ago and is not read"
        if first
        else "every planned slice is read",
        str(limit),
        age > limit,
        f"highwater explain {first.key} lists its runs: check that Dagster's run queue moves, and that the sensor "
        "repair is switched on"
        if first
        else "no action needed",
    )


def measure_recorded_losses(inputs: StreamInputs) -> Condition:
    """The losses of the last day that the declaration lets Highwater record by itself."""
    stream, since = inputs.stream, datetime.now(UTC) - LOSS_REPORTED_FOR
    found = [
        loss
        for loss in inputs.ledger.list_losses(stream.name)
        if loss.accepted_by == RECORDED_BY_DECLARATION and loss.recorded_at >= since
    ]
    many = sum(len(loss.offsets) for loss in found)
    return Condition(
        stream.name,
        "recorded losses",
        f"{many:,} offsets, last of {found[-1].topic} partition {found[-1].partition}: {found[-1].offsets}, "
        f"{found[-1].reason}"
        if found
        else "none was recorded within a day",
        "no loss within a day",
        bool(found),
        f"nothing brings them back: {stream.name} declares on_expired='record'. Raise retention.ms, or see why reading "
        f"was late; highwater audit {stream.name} lists all losses"
        if found
        else "no action needed",
    )


def measure_sensors(
    instance: DagsterInstance, sensors: Iterable[str], secrets: Collection[str] = ()
) -> list[Condition]:
    """A condition for each sensor: whether its last ticks failed one after another.

    Dagster keeps failed ticks, and also those of a sensor whose process timed out or could not be loaded; nothing but
    its page shows them. A tick that skips a stream does not fail (`measure_skipped_streams`).

    Args:
        instance: Dagster's instance.
        sensors: the sensors' names.
        secrets: values that no alert repeats.
    """
    states: dict[str, list[InstigatorState]] = {}
    for state in _list_states(instance, "SENSOR"):
        states.setdefault(state.instigator_name, []).append(state)
    return [_measure_sensor(instance, name, states.get(name, ()), secrets) for name in sensors]


def _list_states(instance: DagsterInstance, kind: str) -> Sequence[InstigatorState]:
    """The states that Dagster has of all sensors, or schedules; none for an instance in memory."""
    from dagster._core.definitions.run_request import InstigatorType

    if instance.schedule_storage is None:
        return ()
    return instance.all_instigator_state(instigator_type=InstigatorType(kind))


def _measure_sensor(
    instance: DagsterInstance, name: str, states: Sequence[InstigatorState], secrets: Collection[str]
) -> Condition:
    from dagster._core.scheduler.instigation import TickStatus

    ended = [TickStatus.FAILURE, TickStatus.SKIPPED, TickStatus.SUCCESS]
    ticks = [
        instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=TICKS, statuses=ended)
        for state in states
        if state.is_running
    ]
    # A code location that was renamed leaves the state of its sensor behind.
    last = max((some for some in ticks if some), key=lambda some: some[0].timestamp, default=[])
    failing = len(last) == TICKS and all(tick.status == TickStatus.FAILURE for tick in last)
    return Condition(
        DEPLOYMENT,
        f"sensor {name}",
        f"its last {TICKS} ticks failed: {_format_tick_error(last[0], secrets)}" if failing else "it ticks",
        f"{TICKS} failed ticks in a row",
        failing,
        f"no stream is served by {name}: see its ticks in Dagster" if failing else "no action needed",
    )


def measure_schedules(instance: DagsterInstance, streams: Collection[str]) -> list[Condition]:
    """A condition for each schedule that is switched on: whether the last run of its job failed.

    Runs of one stream count by stream. A dry run does not count, nor a maintenance of some streams only.

    Args:
        instance: Dagster's instance.
        streams: the names of the streams.
    """
    running = {state.instigator_name for state in _list_states(instance, "SCHEDULE") if state.is_running}
    return [
        _measure_schedule(instance, name, job, streams)
        if name in running
        else Condition.not_applicable(DEPLOYMENT, f"schedule {name}", "it is switched off")
        for name, job in SCHEDULES.items()
    ]


def _measure_schedule(instance: DagsterInstance, name: str, job: str, streams: Collection[str]) -> Condition:
    last = _list_last_runs(instance, job, streams)
    failed = {stream: run for stream, run in last.items() if not run.is_success}
    shown = [f"{run.run_id[:8]}{f' of {stream}' if stream else ''}" for stream, run in [*failed.items()][:MAX_FAULTS]]
    more = [f"{len(failed) - MAX_FAULTS:,} more"] if len(failed) > MAX_FAULTS else []
    return Condition(
        DEPLOYMENT,
        f"schedule {name}",
        f"the last run of {job} failed: {', '.join([*shown, *more])}" if failed else "no last run failed",
        "no last run failed",
        bool(failed),
        f"open the run in Dagster and follow its error, then launch {job} again" if failed else "no action needed",
    )


def _list_last_runs(instance: DagsterInstance, job: str, streams: Collection[str]) -> dict[str, DagsterRun]:
    """The newest ended run of a job by the stream that it is about; the name is empty for all streams."""
    from dagster import DagsterRunStatus, RunsFilter

    ended = [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE]
    found: dict[str, DagsterRun] = {}
    for run in instance.get_runs(RunsFilter(job_name=job, statuses=ended), limit=SCHEDULED_RUNS + len(streams)):
        stream = str(run.run_config.get("stream", ""))
        if run.run_config.get("dry_run") or run.run_config.get("streams") or (stream and stream not in streams):
            continue
        found.setdefault(stream, run)
    return found


def find_stopped_sensors(instance: DagsterInstance, sensors: Collection[str]) -> set[str]:
    """The sensors that are switched off in every code location that has them.

    Args:
        instance: Dagster's instance.
        sensors: the sensors' names.
    """
    states = _list_states(instance, "SENSOR")
    known = {state.instigator_name for state in states} & {*sensors}
    return known - {state.instigator_name for state in states if state.is_running}


def measure_skipped_streams(
    ledger: Ledger, streams: Iterable[Stream], sensors: Sequence[str], now: datetime, stopped: Collection[str] = ()
) -> list[Condition]:
    """A condition for each stream and sensor: whether the sensor skips the stream because of a fault.

    Args:
        ledger: has the faults that ticks found.
        streams: the streams.
        sensors: the sensors' names.
        now: the time, in UTC.
        stopped: the sensors that are switched off: their last faults are no alerts any more.

    Raises:
        DependencyUnavailableError: the ledger is unavailable.
    """
    faults = {(one.stream, one.sensor): one for one in ledger.sensor_faults.list_all()}
    return [
        Condition.not_applicable(stream.name, f"sensor {sensor}", "it is switched off")
        if sensor in stopped
        else _build_skip_condition(stream, sensor, faults.get((stream.name, sensor)), now)
        for stream in streams
        for sensor in sensors
    ]


def _build_skip_condition(stream: Stream, sensor: str, fault: SensorFault | None, now: datetime) -> Condition:
    over = fault is not None and now - fault.since >= FAULT_LASTS
    return Condition(
        stream.name,
        f"sensor {sensor}",
        fault.text if fault is not None else f"{sensor} serves it",
        f"no fault for {format_duration(FAULT_LASTS)}",
        over,
        fault.remedy if fault is not None and over else "no action needed",
    )


def measure_stream_files(files: Declarations | None) -> Condition:
    """The condition whether every stream file can be read.

    Args:
        files: the stream files; None where the definitions were made without files.
    """
    lines = [] if files is None else files.describe_faults()
    return Condition(
        DEPLOYMENT,
        "stream files",
        "; ".join(lines) or "every stream file was read",
        "no file with a fault",
        bool(lines),
        "fix the files; the streams of all others are served" if lines else "no action needed",
    )


def _format_tick_error(tick: InstigatorTick, secrets: Collection[str]) -> str:
    from highwater.orchestration.redaction import redact_secrets

    error = tick.error
    while error is not None and error.cause is not None:
        error = error.cause
    return redact_secrets(" ".join(error.message.split()), secrets)[:500] if error else "no error is known"
