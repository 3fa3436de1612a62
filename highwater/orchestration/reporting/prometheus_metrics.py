"""Measures every stream for Prometheus, and writes the numbers in its text format or in OpenMetrics; all are gauges."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from highwater.alerting import DEPLOYMENT
from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    HighwaterError,
    PermanentError,
    TemporaryError,
    TopicAbsentError,
)
from highwater.orchestration.checking.check_results import count_failing_slices, select_error_checks
from highwater.orchestration.checking.origin_counts import OriginEnds, count_ends
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.orchestration.dagster_home import Opened, ask_instance
from highwater.orchestration.reporting.audit import compute_committed_ends
from highwater.orchestration.reporting.consumer_lag import RecordAges, measure_unread_ages
from highwater.orchestration.reporting.health import SENSORS, fetch_heartbeats, fetch_last_ticks
from highwater.orchestration.reporting.plan_status import read_topic_status
from highwater.routing import build_tier_stream

if TYPE_CHECKING:
    from dagster import DagsterInstance
    from prometheus_client import Metric

    from highwater.declaration import Stream
    from highwater.orchestration.checking.check_rules import SliceAttempts
    from highwater.plans import Loss, Planned
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

T = TypeVar("T")
_Family = list[tuple[tuple[str, ...], float]]
# Failing checks by stream, heartbeats by daemon, ticks by sensor.
_Answered = tuple[dict[str, dict[str, int]], Mapping[str, float | None], Mapping[str, float]]

_PARTITION = ("stream", "topic", "partition")
# Name, labels and help of each; a name that ends with a unit has it in the text.
FAMILIES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "highwater_up": (("dependency",), "Whether the dependency answered; without it, its numbers are missing."),
    "highwater_planned_end_offset": (_PARTITION, "Where the next slice starts."),
    "highwater_committed_end_offset": (
        _PARTITION,
        "End of the slices that are complete in all tables, without a gap from the first one.",
    ),
    "highwater_last_stable_offset": (_PARTITION, "To where the partition can be read."),
    "highwater_lag_records": (
        _PARTITION,
        "Offsets up to the high watermark that are not planned: records, and markers of transactions among them.",
    ),
    "highwater_held_back_offsets": (_PARTITION, "Offsets of the lag from the first open transaction on."),
    "highwater_held_back_age_seconds": (_PARTITION, "Age of the first record of an open transaction, where known."),
    "highwater_oldest_unread_age_seconds": (_PARTITION, "Age of the oldest record that is not in raw, where known."),
    "highwater_slices": (("stream", "topic"), "Planned slices."),
    "highwater_slices_incomplete": (("stream", "topic"), "Planned slices that are not complete in all tables."),
    "highwater_stopped": (
        ("stream", "topic", "error"),
        "Partitions, or 1 for the topic, in which planning stopped until a person acts.",
    ),
    "highwater_origins": (("stream", "end", "topic"), "Records of the main topic by how they ended."),
    "highwater_origins_produced": (("stream",), "Records of the main topic in raw: the sum over all ends."),
    "highwater_origins_twice": (("stream",), "Rows of events beyond one for each record; anything but 0 is an error."),
    "highwater_held_slices": (("stream",), "Slices that records hold; later ones wait in raw."),
    "highwater_held_records": (("stream",), "Records that hold them."),
    "highwater_losses": (_PARTITION, "Recorded holes."),
    "highwater_lost_offsets": (_PARTITION, "Offsets in recorded holes."),
    "highwater_alerts_open": (("stream",), "Open alerts."),
    "highwater_alert_since_timestamp_seconds": (("stream", "alert"), "When an open alert began."),
    "highwater_failing_check_slices": (("stream", "check"), "Slices whose last execution of the check failed."),
    "highwater_daemon_heartbeat_timestamp_seconds": (("daemon",), "When a daemon of Dagster last reported."),
    "highwater_sensor_tick_timestamp_seconds": (("sensor",), "When the last tick of a running sensor began."),
    "highwater_stream_measured": (("stream",), "Whether all of the stream was measured; 0 after an error."),
    "highwater_collection_duration_seconds": ((), "How long these numbers took to measure."),
    "highwater_collection_timestamp_seconds": ((), "When these numbers were measured."),
}
_UNITS = ("seconds",)


@dataclass(eq=False)  # the library keeps collectors as keys
class MetricSamples:
    """The measured samples.

    Args:
        samples: by family's name the values of its labels, and the number.
        unavailable: why a dependency did not answer, by its name.
        failed: why something of a stream could not be measured, by the stream's name.
    """

    samples: dict[str, _Family] = field(default_factory=lambda: {name: [] for name in FAMILIES})
    unavailable: dict[str, HighwaterError] = field(default_factory=dict)
    failed: dict[str, HighwaterError] = field(default_factory=dict)

    @property
    def errors(self) -> list[HighwaterError]:
        """Every error that left numbers out."""
        return [*self.unavailable.values(), *self.failed.values()]

    def add(self, name: str, value: float | None, *labels: str | int) -> None:
        """One sample; unknown values are left out."""
        if value is not None:
            self.samples[name].append((tuple(map(str, labels)), value))

    def ask(self, dependency: str, question: Callable[[], T]) -> T | None:
        """The answer, or None; who did not answer once is asked no more: each question would wait for it again."""
        if dependency in self.unavailable:
            return None
        try:
            return question()
        except TemporaryError as error:
            self.unavailable[dependency] = error
        except ConfigurationError as error:
            if dependency != "ledger":
                raise  # of the lake and of Kafka it may be the fault of one stream
            self.unavailable[dependency] = error
        return None

    @property
    def text(self) -> str:
        """The numbers as OpenMetrics text."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.openmetrics.exposition import generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        return str(generate_latest(registry).decode())  # type: ignore[no-untyped-call]

    def collect(self) -> Iterable[Metric]:
        """The samples in the form that the library asks a collector for."""
        from prometheus_client.core import GaugeMetricFamily

        for name, (labels, about) in FAMILIES.items():
            unit = next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")
            family = GaugeMetricFamily(name, about, labels=labels, unit=unit)
            for values, number in self.samples[name]:
                family.add_metric(values, number)
            yield family


def measure(
    ledger: Ledger,
    kafka: Kafka,
    lake: Lake,
    streams: Sequence[Stream],
    dagster: Opened,
) -> MetricSamples:
    """Measure the streams; an error leaves out what rests on it, and nothing else (I15).

    Args:
        ledger, kafka, lake: the connections.
        streams: the streams.
        dagster: opens the instance; it gives None where there is none to ask.
    """
    begun = time.monotonic()
    found = MetricSamples()
    for stream in streams:
        try:
            _measure_stream(found, ledger, kafka, lake, stream)
        except HighwaterError as error:
            found.failed[stream.name] = error
        except Exception as error:  # noqa: BLE001 - a defect in one stream hides no number of the others
            found.failed[stream.name] = PermanentError(
                f"stream {stream.name} could not be measured",
                found=type(error).__name__,
                remedy=f"report this as a defect of Highwater, with the output of highwater status {stream.name}",
            )
        found.add("highwater_stream_measured", stream.name not in found.failed, stream.name)
    _measure_alerts(found, ledger, DEPLOYMENT)
    dependencies = ["ledger", "kafka", "lake", *(["dagster"] if _measure_dagster(found, dagster, streams) else [])]
    for dependency in dependencies:
        found.add("highwater_up", dependency not in found.unavailable, dependency)
    found.add("highwater_collection_duration_seconds", time.monotonic() - begun)
    found.add("highwater_collection_timestamp_seconds", time.time())
    return found


def _measure_stream(found: MetricSamples, ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> None:
    # The lake before the plan: a slice that is committed in between appears at worst as incomplete.
    committed = found.ask("lake", lambda: read_attempts(lake, stream))
    slices = found.ask("ledger", lambda: ledger.list_slices(stream.name))
    losses = found.ask("ledger", lambda: ledger.list_losses(stream.name))
    for view in (stream, *(build_tier_stream(stream, topic) for topic in stream.delays)):
        _measure_slices(found, view, slices, committed)
        planned = _load_plan(found, ledger, view)
        _measure_plan_ends(found, view, planned, slices, committed)
        # A tier that is not there yet has had no reject.
        read = None if committed is None else committed.raw
        _measure_topic(found, ledger, kafka, view, planned, read, expected=view is stream or planned is not None)
    _measure_losses(found, stream, losses)
    _measure_holds(found, ledger, stream)
    _measure_alerts(found, ledger, stream.name)
    if "ledger" not in found.unavailable:  # it knows what was exhausted
        ends = found.ask("lake", lambda: count_ends(ledger, lake, stream))
        _measure_origin_ends(found, stream, ends)


def _measure_slices(
    found: MetricSamples, view: Stream, slices: Sequence[Slice] | None, committed: SliceAttempts | None
) -> None:
    if slices is None:
        return
    topic_keys = [slice_.key for slice_ in slices if slice_.topic == view.topic]
    found.add("highwater_slices", len(topic_keys), view.name, view.topic)
    if committed is not None:
        open_ = sum(bool(committed.select_missing_tables(key)) for key in topic_keys)
        found.add("highwater_slices_incomplete", open_, view.name, view.topic)


def _load_plan(found: MetricSamples, ledger: Ledger, view: Stream) -> Planned | None:
    return found.ask("ledger", lambda: ledger.topics.read_planned_topic(view.name, view.topic))


def _measure_plan_ends(
    found: MetricSamples,
    view: Stream,
    planned: Planned | None,
    slices: Sequence[Slice] | None,
    committed: SliceAttempts | None,
) -> None:
    """Measure the planned and committed offsets of the topic."""
    if planned is None:
        return
    for partition, end in planned.ends.items():
        found.add("highwater_planned_end_offset", end, view.name, view.topic, partition)
    if slices is not None and committed is not None:
        for partition, end in compute_committed_ends(planned, slices, committed).items():
            found.add("highwater_committed_end_offset", end, view.name, view.topic, partition)


def _measure_topic(
    found: MetricSamples,
    ledger: Ledger,
    kafka: Kafka,
    view: Stream,
    planned: Planned | None,
    read: Collection[str] | None,
    *,
    expected: bool,
) -> None:
    """Measure the end offsets of the topic, and count the errors that keep it from being planned."""
    if "kafka" in found.unavailable:
        return
    status = read_topic_status(kafka, view, planned)
    for error in status.errors:
        if isinstance(error, TemporaryError):
            found.unavailable["kafka"] = error
    stops = Counter(type(error).__name__ for error in status.errors if _needs_operator(error, expected=expected))
    for kind, number in stops.items():
        found.add("highwater_stopped", number, view.name, view.topic, kind)
    for one in status.partitions:
        found.add("highwater_last_stable_offset", one.last_stable, view.name, view.topic, one.partition)
    if "ledger" in found.unavailable:
        return  # without the plan the unread part is unknown
    for one in status.partitions:
        found.add("highwater_lag_records", one.lag, view.name, view.topic, one.partition)
        if one.last_stable is not None:
            found.add("highwater_held_back_offsets", one.held_back, view.name, view.topic, one.partition)
    if read is not None and status.partitions:  # without the lake nobody knows what of the plan is unread
        _measure_ages(
            found, found.ask("kafka", lambda: measure_unread_ages(ledger, kafka, view, view.topic, read)), view
        )


def _measure_ages(found: MetricSamples, ages: RecordAges | None, view: Stream) -> None:
    for partition, age in ages.by_partition.items() if ages else ():
        found.add("highwater_oldest_unread_age_seconds", age.total_seconds(), view.name, view.topic, partition)
    for partition, held in ages.held_back.items() if ages else ():
        if held.age is not None:
            seconds = held.age.total_seconds()
            found.add("highwater_held_back_age_seconds", seconds, view.name, view.topic, partition)


def _needs_operator(error: HighwaterError, *, expected: bool) -> bool:
    """Whether an error waits for a person."""
    return not isinstance(error, TemporaryError) and (expected or not isinstance(error, TopicAbsentError))


def _measure_losses(found: MetricSamples, stream: Stream, losses: Sequence[Loss] | None) -> None:
    number: Counter[tuple[str, int]] = Counter()
    offsets: Counter[tuple[str, int]] = Counter()
    for loss in losses or ():
        number[loss.topic, loss.partition] += 1
        offsets[loss.topic, loss.partition] += len(loss.offsets)
    for (topic, partition), count in sorted(number.items()):
        found.add("highwater_losses", count, stream.name, topic, partition)
        found.add("highwater_lost_offsets", offsets[topic, partition], stream.name, topic, partition)


def _measure_holds(found: MetricSamples, ledger: Ledger, stream: Stream) -> None:
    holds = found.ask("ledger", lambda: ledger.holds.read_open(stream.name))
    if holds is not None:
        found.add("highwater_held_slices", len(holds), stream.name)
        found.add("highwater_held_records", sum(hold.found.records for hold in holds), stream.name)


def _measure_alerts(found: MetricSamples, ledger: Ledger, stream: str) -> None:
    alerts = found.ask("ledger", ledger.alerts.read_open)
    if alerts is None:
        return
    open_ = [alert for alert in alerts.values() if alert.stream == stream and alert.ended is None]
    found.add("highwater_alerts_open", len(open_), stream)
    for alert in open_:
        found.add("highwater_alert_since_timestamp_seconds", alert.since.timestamp(), stream, alert.what)


def _measure_origin_ends(found: MetricSamples, stream: Stream, ends: OriginEnds | None) -> None:
    if ends is None:
        return
    counted = {
        ("accepted", ""): ends.accepted,
        ("tombstone", ""): ends.tombstones,
        **{("waiting", tier): ends.waiting.get(tier, 0) for tier in stream.tier_topics},
        **{("stranded", tier): 0 for tier in stream.tier_topics},
        **{("stranded", tier): count for tier, count in ends.stranded.items()},
        ("parked", stream.parked_topic): ends.parked,
        ("discarded", ""): ends.discarded,
        ("reclaimed", ""): ends.reclaimed,
        ("rejected", ""): ends.unpublished,
        ("undecided", ""): ends.undecided,
    }
    for (end, topic), count in counted.items():
        found.add("highwater_origins", count, stream.name, end, topic)
    found.add("highwater_origins_produced", ends.produced, stream.name)
    found.add("highwater_origins_twice", ends.twice, stream.name)


def _measure_dagster(found: MetricSamples, opened: Opened, streams: Sequence[Stream]) -> bool:
    """Count failing checks, and note when daemons and sensors last worked; False where there is no instance to ask."""

    def ask(instance: DagsterInstance) -> _Answered:
        failing = {stream.name: count_failing_slices(instance, stream) for stream in streams}
        return failing, fetch_heartbeats(instance), fetch_last_ticks(instance, SENSORS)

    answered, error = ask_instance(opened, ask)
    if error is not None:
        # The other numbers are known, and whether they are taken is not to hang on why these are not.
        found.unavailable["dagster"] = DependencyUnavailableError(error.problem, found=error.found, remedy=error.remedy)
        return True
    if answered is None:
        return False
    failing, beats, ticks = answered
    for stream in streams:
        for name in select_error_checks(stream):
            found.add("highwater_failing_check_slices", failing[stream.name].get(name, 0), stream.name, name)
    for daemon, at in beats.items():
        found.add("highwater_daemon_heartbeat_timestamp_seconds", at, daemon)
    for sensor, at in ticks.items():
        found.add("highwater_sensor_tick_timestamp_seconds", at, sensor)
    return True
