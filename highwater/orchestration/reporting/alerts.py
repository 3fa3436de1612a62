"""One tick of the sensor `alerts`: evaluates the conditions of each stream, begins and ends alerts, and sends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from highwater.alerting import DEPLOYMENT, Alert, Condition, mark_reported, update_alerts, update_watch
from highwater.breaker import CLOSED
from highwater.errors import KAFKA, LAKE, HighwaterError, TemporaryError, TopicAbsentError
from highwater.orchestration.dependencies import build_kafka_guard, build_lake_guard, ensure_lake_exists
from highwater.orchestration.reporting.alert_conditions import CONDITIONS, DEPENDENCIES
from highwater.orchestration.reporting.alert_inputs import Evaluate, StreamInputs
from highwater.orchestration.reporting.stalled_work import describe_fault
from highwater.orchestration.sensing.rounds import rotate_streams
from highwater.resources import dependency_guards
from highwater.resources.dependency_guards import guard_dependencies

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

LEASE_SECONDS = 60.0
# Dagster ends a tick after 60 s. No measuring of a stream begins later than this; most take less than a second.
MEASURE_SECONDS = 30.0
Report = Callable[[Alert], None]
_DEFECT = "report this as a defect of Highwater, with the last tick of the sensor alerts"


@dataclass(frozen=True)
class TickResult:
    """The result of a tick.

    Args:
        lines: the actions, in sentences.
        begin: the stream that the next tick evaluates first.
        calm: streams that were measured whole, with nothing to report.
        alerting: streams that were measured whole, with something to report.
    """

    lines: list[str]
    begin: str = ""
    calm: Sequence[str] = ()
    alerting: Sequence[str] = ()


def tick(
    ledger: Ledger,
    kafka: Kafka,
    lake: Lake,
    streams: Sequence[Stream],
    report: Report,
    sensors: Callable[[], Iterable[Condition]] = tuple,
    begin: str = "",
    resting: Collection[str] = (),
) -> TickResult:
    """Measure all streams, and send the alerts that begin and end.

    If something is unavailable and cannot be measured, its alert stays as it is (I15), as do alerts of streams for
    which no time is left. An alert that cannot be sent is sent at a later tick; one that the receiver refuses delays no
    other. Two ticks at once follow each other.

    Args:
        ledger: has the open alerts and the lease of the tick; measured too.
        kafka, lake: measured.
        streams: all declared streams.
        report: sends an alert to the receiver.
        sensors: returns the conditions of sensors and of the whole deployment.
        begin: name of the stream to begin with, where the last tick ran out of time.
        resting: streams that are not measured now, since nothing of them changed.

    Raises:
        DependencyUnavailableError: the ledger is unavailable.
        LeaseHeldError: another tick is under way.
    """
    now = datetime.now(UTC)
    lines: list[str] = []
    with ledger.lease("alerts", seconds=LEASE_SECONDS, wait=0.0):
        due = [stream for stream in rotate_streams(streams, begin) if stream.name not in resting]
        measured, left = _measure_each(ledger, kafka, lake, due, lines)
        conditions = [*measured.conditions, *_measure_dependencies(ledger, streams), *sensors()]
        known = ledger.alerts.read_open()
        conditions += _close_undeclared_alerts(ledger, streams, known.values(), now)
        open_ = update_alerts(known, conditions, now)
        if open_ != known:
            ledger.alerts.record(open_)
        for alert in [alert for alert in open_.values() if alert.is_unreported]:
            try:
                report(alert)
            except TemporaryError as error:
                lines.append(str(error))
                break  # a receiver that does not answer is not asked again and again within one tick
            except HighwaterError as error:
                lines.append(f"not sent: {alert.stream} {alert.what}: {error}")
                continue
            open_ = mark_reported(open_, alert)
            ledger.alerts.record(open_)
            lines.append(f"sent: {alert.to_plain()['kind']} {alert.stream} {alert.what}: {alert.value}")
    if left:
        lines.append(f"{len(left)} streams are measured by the next tick, from {left[0].name} on")
    begin = left[0].name if left else ""
    return TickResult(lines or [f"{len(open_)} alerts are open"], begin, measured.calm, measured.alerting)


@dataclass
class _MeasuredStreams:
    """The conditions of streams; and those that were measured whole, without a condition that is met and with one."""

    conditions: list[Condition] = field(default_factory=list)
    calm: list[str] = field(default_factory=list)
    alerting: list[str] = field(default_factory=list)


def _measure_each(
    ledger: Ledger, kafka: Kafka, lake: Lake, streams: Sequence[Stream], lines: list[str]
) -> tuple[_MeasuredStreams, Sequence[Stream]]:
    """What was measured, and the streams for which no time was left."""
    deadline = time.monotonic() + MEASURE_SECONDS
    measured = _MeasuredStreams()
    for number, stream in enumerate(streams):
        if time.monotonic() > deadline:
            return measured, streams[number:]
        unknown, before = list[tuple[str, str]](), len(lines)
        found = [*_measure_stream(ledger, kafka, lake, stream, lines, unknown)]
        measured.conditions += [*found, _build_unmeasured_condition(stream, unknown)]
        if len(lines) == before:
            whole = measured.alerting if any(one.over for one in found) else measured.calm
            whole.append(stream.name)
    return measured, ()


def _build_unmeasured_condition(stream: Stream, why: Sequence[tuple[str, str]]) -> Condition:
    """A measurement that failed for a permanent reason, so that its alert cannot be measured."""
    faults, remedies = (dict.fromkeys(texts) for texts in zip(*why, strict=True)) if why else ({}, {})
    return Condition(
        stream.name,
        "not measured",
        "; ".join(faults) or "all is measured",
        "all is measured",
        bool(why),
        "; ".join(remedies) or "no action needed",
    )


def _measure_stream(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, lines: list[str], unknown: list[tuple[str, str]]
) -> Iterator[Condition]:
    inputs = StreamInputs(ledger, kafka, lake, stream)

    def build_guards(condition: Evaluate) -> list[dependency_guards.Guard]:
        names = DEPENDENCIES.get(condition, ())
        return [
            build_lake_guard(ledger, lake, stream) if name == LAKE else build_kafka_guard(ledger, kafka)
            for name in names
        ]

    for condition in CONDITIONS:
        try:
            with guard_dependencies(*build_guards(condition)):
                if LAKE in DEPENDENCIES.get(condition, ()):
                    ensure_lake_exists(ledger, lake)
                found = condition(inputs)
        except HighwaterError as error:
            lines.append(f"{stream.name}: not measured: {error}")
            # A dependency that is unavailable has a breaker, and an absent topic stops planning: both have alerts of
            # their own.
            if not isinstance(error, TemporaryError | TopicAbsentError):
                unknown.append(describe_fault(error))
        except Exception as error:  # noqa: BLE001 - what one stream holds must not silence the alerts of the others
            lines.append(f"{stream.name}: not measured: {type(error).__name__}")
            unknown.append((f"{_format_subject(condition)}: {type(error).__name__}", _DEFECT))
        else:
            if found is not None:
                yield found


def _format_subject(condition: Evaluate) -> str:
    """The subject of a measuring function in words: `parked records` for `_measure_parked_records`."""
    return condition.__name__.removeprefix("_").removeprefix("measure_").replace("_", " ")


def _list_dependencies(streams: Sequence[Stream]) -> list[str]:
    """The dependencies of these streams."""
    return [KAFKA, LAKE, *(stream.lookup.dependency for stream in streams if stream.lookup)]


def _close_undeclared_alerts(
    ledger: Ledger, streams: Sequence[Stream], alerts: Iterable[Alert], now: datetime
) -> list[Condition]:
    """Ends the alerts of streams and reference tables that no code location declares any more."""
    about = {alert: alert.what if alert.stream == DEPLOYMENT else alert.stream for alert in alerts}
    breakers = [f"circuit breaker of {name}"[:100] for name in _list_dependencies(streams)]
    found = update_watch(
        [*about.values()], [*(stream.name for stream in streams), *breakers], ledger.alerts.read_watch_times(), now
    )
    if found.added:
        ledger.alerts.watch(sorted(found.added), now)
    why = "nothing declares it any more: it was not measured for a day"
    return [Condition.not_applicable(one.stream, one.what, why) for one, name in about.items() if name in found.gone]


def _measure_dependencies(ledger: Ledger, streams: Sequence[Stream]) -> list[Condition]:
    """The breakers of the dependencies, which are the deployment's, not a stream's.

    The breaker of a reference table that no stream has any more never changes, since nobody asks for the table: it is
    left out.
    """
    names = _list_dependencies(streams)
    return [
        Condition(
            DEPLOYMENT,
            f"circuit breaker of {one.name}"[:100],
            dependency_guards.describe(one),
            "closed",
            one.state != CLOSED,
            f"bring {one.name} back; highwater doctor tries every connection",
        )
        for one in ledger.breakers.list_dependencies()
        if one.name in names
    ]
