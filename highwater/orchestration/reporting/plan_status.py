"""The planning status of a stream, and its distance to the end of the topic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.alerting import Alert
from highwater.breaker import CLOSED, Circuit
from highwater.declaration import Stream
from highwater.divergence import SOUND, Divergence
from highwater.errors import KAFKA, LAKE, HighwaterError, TopicAbsentError, TopicVanishedError
from highwater.holds import Hold
from highwater.instances import ONE_INSTANCE, Instance
from highwater.orchestration.checking.origin_counts import count_parked
from highwater.orchestration.dependencies import ensure_lake_there
from highwater.orchestration.operations import pending_reprocessing
from highwater.orchestration.operations.accepting_rejects import accepting_command
from highwater.orchestration.operations.pending_reprocessing import ReclaimedRecords, summary
from highwater.orchestration.reporting.consumer_lag import in_raw
from highwater.orchestration.reporting.publication_status import Behind, accepted_vanished, behind
from highwater.orchestration.reporting.stalled_work import expired_errors
from highwater.orchestration.sensing.due_times import Due, due_of
from highwater.orchestration.sensing.retries import plan_tier
from highwater.orchestration.sensing.slice_cutting import ensure_same_topic, positions, skipped_partitions, sure_errors
from highwater.orchestration.sensing.topic_inspection import compare_with_plan
from highwater.orchestration.worker_leases import living
from highwater.plans import Planned
from highwater.resources.deleted_topics import look_if_there, parked_lost, planned_topic_gone, state_of, vanished
from highwater.resources.guards import describe, open_error, resting
from highwater.resources.ledger.breakers import AcceptedReason, Judgement
from highwater.resources.ledger.exhausted_slices import ExhaustedSlice
from highwater.resources.ledger.pauses import Pause
from highwater.resources.ledger.sensor_faults import SensorFault
from highwater.wording import number

if TYPE_CHECKING:
    from highwater.resources.kafka import Kafka, TopicState
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# Hundreds of lines would hide the rest of the page; `--json` has all.
REFUSED_SHOWN = 5


# The sensor records every ten minutes that it measures (`highwater.alerting.REFRESH`).
UNMEASURED_FOR = timedelta(minutes=30)


@dataclass(frozen=True)
class PartitionStatus:
    """One partition: offsets are None where they are not known."""

    partition: int
    planned: int | None
    log_start: int | None
    last_stable: int | None
    high_watermark: int | None
    leader: int | None
    trouble: str | None

    @property
    def lag(self) -> int | None:
        """Offsets up to the high watermark that are not planned, those behind an open transaction among them."""
        if self.last_stable is None:
            return None
        begun = self.planned if self.planned is not None else self.log_start or 0
        return max(max(self.high_watermark or 0, self.last_stable) - begun, 0)

    @property
    def held_back(self) -> int:
        """Offsets of the lag that an open transaction keeps from being planned (I3)."""
        return 0 if self.last_stable is None else max((self.high_watermark or 0) - self.last_stable, 0)


@dataclass(frozen=True)
class DlqStatus:
    """A DLQ topic. What waits is counted in offsets, markers of transactions among them.

    Args:
        topic: its name.
        waiting: offsets that were not planned yet; on the parked topic all that it holds. None if it is not there yet.
        due: those of them that have waited long enough; None on the parked topic.
        error: why it could not be looked at, or cannot be planned.
        pause: since when its retries are paused; None if they are not.
        times: when what waits is due; None where nothing does, or that is not known.
    """

    topic: str
    waiting: int | None = None
    due: int | None = None
    error: HighwaterError | None = None
    pause: Pause | None = None
    times: Due | None = None

    @property
    def line(self) -> str:
        """The topic in a sentence."""
        if self.error is not None:
            return f"{self.topic}: {type(self.error).__name__}: {self.error}"
        if self.waiting is None:
            return f"{self.topic}: nothing was published to it yet"
        if self.due is None:
            return f"{self.topic}: {self.waiting:,} offsets wait for a person"
        due = f"{self.topic}: {self.waiting:,} offsets wait, {self.due:,} of them are due"
        if self.times is None:
            return due
        first, last = (f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in (self.times.next, self.times.all))
        return f"{due}; the first from {first} on, all by {last}"


@dataclass(frozen=True)
class Waiting:
    """The work that waits in the lake.

    Args:
        publication: how far accepted events are behind; None of a stream that sends none.
        reclaimed: slices to be reprocessed, since records of them were reclaimed from the DLQ.
        remedy: the command that does that; empty if there are none.
        parked: published records that wait on the parked topic for a person.
    """

    publication: Behind | None = None
    reclaimed: Sequence[ReclaimedRecords] = ()
    remedy: str = ""
    parked: int = 0

    @property
    def lines(self) -> list[str]:
        """The same in sentences."""
        lines = [] if self.publication is None else [self.publication.line]
        return [*lines, f"{summary(self.reclaimed)}; {self.remedy}"] if self.reclaimed else lines

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        publication = None if self.publication is None else self.publication.to_plain()
        return {
            "publication": publication,
            "reclaimed": [one.to_plain() for one in self.reclaimed],
            "reclaimed_remedy": self.remedy,
            "lake_error": None,
        }


@dataclass(frozen=True)
class StreamStatus:
    """One stream.

    Args:
        stream: its name.
        topic: its main topic.
        slices: planned slices of all its topics.
        generation: of the main topic; None if it was never planned.
        topic_id: the one that was planned.
        partitions: empty if the topic could not be looked at.
        errors: what keeps the topic, or a partition of it, from being planned, or planned slices from being read.
        dlq: the tiers, and the parked topic.
        alerts: those that are open.
        breaker: the stream's circuit breaker.
        refused: slices that were over its limit and are undecided.
        accepted_reasons: reasons for rejects that a person accepted: they open the breaker no more.
        accepting: the command that accepts the most frequent reason of the refused slices; None without one.
        dependencies: breakers of the stream's dependencies that are not closed, in sentences.
        holds: slices that records hold.
        exhausted_slices: slices that repair requests no more.
        waiting: the work that waits in the lake, or why that is unknown; None where it was not looked at.
        workers: runs of the stream whose worker gave a sign of life within the last minute, and when its lease runs out
            unless it is renewed.
        accepted: why the topic of accepted events cannot be published to, or looked at; None if it can, or was not.
        instances: Dagster instances that work on the stream at the same time; none where one alone does.
        faults: sensors that skip the stream until a person acts, and why.
        paused: the pauses of the stream and of its parts.
        measured_at: when the sensor of alerts last recorded that it measures the stream; None if it never did.
    """

    stream: str
    topic: str
    slices: int
    generation: int | None
    topic_id: str | None
    partitions: Sequence[PartitionStatus] = ()
    errors: Sequence[HighwaterError] = ()
    dlq: Sequence[DlqStatus] = ()
    alerts: Sequence[Alert] = ()
    breaker: Circuit = field(default_factory=Circuit)
    refused: Sequence[Judgement] = ()
    dependencies: Sequence[str] = ()
    holds: Sequence[Hold] = ()
    workers: Mapping[str, datetime] = field(default_factory=dict)
    waiting: Waiting | Exception | None = None
    exhausted_slices: Sequence[ExhaustedSlice] = ()
    accepted: HighwaterError | None = None
    instances: Sequence[Instance] = ()
    accepted_reasons: Sequence[AcceptedReason] = ()
    accepting: str | None = None
    measured_at: datetime | None = None
    faults: Sequence[SensorFault] = ()
    paused: Mapping[str, Pause] = field(default_factory=dict)

    @property
    def lag(self) -> int | None:
        """Offsets that wait; None if the topic could not be looked at."""
        if not self.partitions:
            return None
        return sum(one.lag or 0 for one in self.partitions)

    @property
    def held_back(self) -> int:
        """Offsets of the lag that open transactions keep from being planned."""
        return sum(one.held_back for one in self.partitions)

    @property
    def lines(self) -> list[str]:
        """The stream in sentences."""
        planned = "never planned" if self.generation is None else f"generation {self.generation}"
        lag = "lag not known" if self.lag is None else f"lag {self.lag:,}"
        lag += f", {self.held_back:,} of it held back by open transactions" if self.held_back else ""
        head = f"{self.stream}: topic {self.topic}, {planned}, {self.slices:,} slices, {lag}"
        errors = [f"  {type(error).__name__}: {error}" for error in self.errors]
        alerts = [
            f"  alert since {one.since:%Y-%m-%d %H:%M} UTC: {one.what}: {one.value}; {one.remedy}"
            for one in self.alerts
        ]
        refused = [
            f"  {one.slice_key} is refused: {one.rejects:,} of {one.records:,} records would be rejected; fix it, or "
            f"highwater accept-rejects {one.slice_key}"
            for one in self.refused[:REFUSED_SHOWN]
        ]
        if len(self.refused) > REFUSED_SHOWN:
            refused.append(f"  {len(self.refused) - REFUSED_SHOWN:,} more slices are refused")
        if self.accepting is not None:
            refused.append(f"  where nobody can fix the records of refused slices: {self.accepting}")
        refused += [
            f"  {one.text}; highwater accept-rejects {self.stream} --reason {one.reason} --revoke ends that"
            for one in self.accepted_reasons
        ]
        breakers = [f"  breaker {self.breaker.text}", *[f"  {text}" for text in self.dependencies]]
        holds = [f"  {one.text}; fix it, or highwater release-hold {one.slice_key}" for one in self.holds]
        exhausted = [
            f"  {one.text}; fix it, then materialise it, or highwater retry-slice {one.slice_key}"
            for one in self.exhausted_slices
        ]
        workers = [
            f"  run {run}: its worker lives, lease until {ends:%H:%M:%S} UTC" for run, ends in self.workers.items()
        ]
        errors += [] if self.accepted is None else [f"  {type(self.accepted).__name__}: {self.accepted}"]
        instances = [f"  Dagster instance {one.text} is not alone: {ONE_INSTANCE}" for one in self.instances]
        paused = [f"  {one.text}, highwater resume {self.stream} {part}".rstrip() for part, one in self.paused.items()]
        faults = [f"  {one.text}; {one.remedy}" for one in self.faults]
        lines = [
            *errors,
            *paused,
            *faults,
            *self._unmeasured,
            *instances,
            *breakers,
            *refused,
            *holds,
            *exhausted,
            *alerts,
            *workers,
        ]
        return [head, *lines, *[f"  {self._dlq_line(one)}" for one in self.dlq], *self._waits]

    @property
    def _unmeasured(self) -> list[str]:
        if self.measured_at is None or datetime.now(UTC) - self.measured_at < UNMEASURED_FOR:
            return []
        since = f"{self.measured_at:%Y-%m-%d %H:%M} UTC"
        return [f"  no alert was measured since {since}: see that Dagster's daemon and the sensor alerts run"]

    def _dlq_line(self, one: DlqStatus) -> str:
        paused = "" if one.pause is None else f"; {one.pause.text}, highwater resume-tier {self.stream} {one.topic}"
        return f"{one.line}{paused}"

    @property
    def _waits(self) -> list[str]:
        if isinstance(self.waiting, Exception):
            return [f"  what waits in the lake is not known: {_problem(self.waiting)}"]
        return [] if self.waiting is None else [f"  {text}" for text in self.waiting.lines]

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns, and a row for each partition."""
        names = ["partition", "planned to", "log start", "last stable", "high watermark", "lag", "held back"]
        names += ["leader", "trouble"]
        rows = [
            [str(p.partition)]
            + [number(value) for value in (p.planned, p.log_start, p.last_stable, p.high_watermark, p.lag)]
            + ["-" if p.last_stable is None else number(p.held_back)]
            + ["-" if p.leader is None else str(p.leader), p.trouble or ""]
            for p in self.partitions
        ]
        return names, rows

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "stream": self.stream,
            "topic": self.topic,
            "topic_id": self.topic_id,
            "generation": self.generation,
            "slices": self.slices,
            "lag": self.lag,
            "held_back": self.held_back,
            "partitions": [{**vars(one), "lag": one.lag, "held_back": one.held_back} for one in self.partitions],
            "errors": [_error_plain(error) for error in self.errors],
            "breaker": self.breaker.to_plain(),
            "refused": [
                {"slice": one.slice_key, "records": one.records, "rejects": one.rejects} for one in self.refused
            ],
            "accepted_reasons": [one.to_plain() for one in self.accepted_reasons],
            "accepting": self.accepting,
            "dependencies": list(self.dependencies),
            "holds": [one.to_plain() for one in self.holds],
            "exhausted_slices": [one.to_plain() for one in self.exhausted_slices],
            "instances": [one.to_plain() for one in self.instances],
            "sensor_faults": [one.to_plain() for one in self.faults],
            "paused": {part or "stream": one.to_plain() for part, one in self.paused.items()},
            "workers": {run: ends.isoformat() for run, ends in self.workers.items()},
            "alerts": [one.to_plain() for one in self.alerts],
            "alerts_measured_at": None if self.measured_at is None else self.measured_at.isoformat(),
            "dlq": [_dlq_plain(one) for one in self.dlq],
            "accepted_error": None if self.accepted is None else _error_plain(self.accepted),
            **_waiting_plain(self.waiting),
        }


def _dlq_plain(one: DlqStatus) -> dict[str, Any]:
    error = None if one.error is None else _error_plain(one.error)
    plain = {name: value for name, value in vars(one).items() if name != "times"}
    pause = None if one.pause is None else one.pause.to_plain()
    return {**plain, "error": error, "pause": pause, **times_plain(one.times)}


def times_plain(times: Due | None) -> dict[str, str | None]:
    """The due times of waiting records, as plain values for JSON."""
    return {"next_due": None, "all_due": None} if times is None else {**times.to_plain()}


def _waiting_plain(waiting: Waiting | Exception | None) -> dict[str, Any]:
    if isinstance(waiting, Exception):
        return {**Waiting().to_plain(), "lake_error": _error_plain(waiting)}
    return Waiting().to_plain() if waiting is None else waiting.to_plain()


def _problem(error: Exception) -> str:
    return error.problem if isinstance(error, HighwaterError) else f"{type(error).__name__}: {error}"


def _error_plain(error: Exception) -> dict[str, str]:
    return {"error": type(error).__name__, "text": str(error)}


def stream_status(
    ledger: Ledger,
    kafka: Kafka,
    stream: Stream,
    counts: Mapping[tuple[str, str], int],
    lake: Lake | None = None,
) -> StreamStatus:
    """Look at a stream; a topic that cannot be looked at is an error in the status, not of the look.

    The lake, if it is to be looked at, is asked beside Kafka: each takes its time alone.

    Raises:
        DependencyAwayError: the ledger is away.
    """
    if lake is None:
        return _stream_status(ledger, kafka, stream, counts)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(_waiting, ledger, lake, stream)
        found = _stream_status(ledger, kafka, stream, counts)
        # A broker that is away is waited for once.
        accepted = _accepted(ledger, kafka, lake, stream) if found.partitions else None
        expired = _expired(ledger, kafka, lake, stream) if found.partitions else []
        waiting_records = waiting.result()
        dlq = [_with_loss(kafka, stream, one, waiting_records) for one in found.dlq]
        return replace(found, errors=[*found.errors, *expired], waiting=waiting_records, accepted=accepted, dlq=dlq)


def _expired(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> list[HighwaterError]:
    """The reasons why planned slices cannot be read any more; empty where Kafka does not answer."""
    try:
        return [*expired_errors(ledger, kafka, stream, in_raw(ledger, lake, stream))]
    except HighwaterError as error:
        return [error]


def _with_loss(kafka: Kafka, stream: Stream, one: DlqStatus, waiting_records: Waiting | Exception) -> DlqStatus:
    """The status of a DLQ topic, with the error that the parked topic lost what waits there."""
    if (
        one.topic != stream.parked_topic
        or one.error is not None
        or one.waiting is None
        or isinstance(waiting_records, Exception)
    ):
        return one
    try:
        return replace(one, error=parked_lost(kafka, stream, waiting_records.parked))
    except HighwaterError as error:
        return replace(one, error=error)


def _accepted(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> HighwaterError | None:
    """The reason why accepted events cannot be sent to their topic, or it cannot be looked at.

    One request to Kafka where the topic is there, and none before anything was sent to it.
    """
    if stream.publishes is None:
        return None
    topic = stream.publishes.topic
    try:
        if not ledger.publications([topic]):
            return None
        with suppress(TopicAbsentError):
            kafka.description(topic)
            return None
        if look_if_there(kafka, topic) is not None:
            return None
        return accepted_vanished(ledger, lake, stream, topic)
    except HighwaterError as error:
        return error


def _waiting(ledger: Ledger, lake: Lake, stream: Stream) -> Waiting | Exception:
    row = ledger.breakers.dependency(LAKE)
    if resting(row, datetime.now(UTC)):
        return open_error(row)  # storage that is away is not waited for
    try:
        ensure_lake_there(ledger, lake)
        found = pending_reprocessing.waiting(ledger, lake, stream)
        publication = behind(ledger, lake, stream)
        parked = count_parked(ledger, lake, stream, published=True)
        return Waiting(publication, found, pending_reprocessing.remedy(stream, found) if found else "", parked)
    except Exception as error:  # noqa: BLE001 - what one table holds must not silence the rest of the status
        return error


def _stream_status(ledger: Ledger, kafka: Kafka, stream: Stream, counts: Mapping[tuple[str, str], int]) -> StreamStatus:
    found = topic_status(kafka, stream, ledger.planned(stream.name, stream.topic))
    refused = ledger.breakers.refused(stream.name)
    return replace(
        found,
        slices=sum(count for (name, _), count in counts.items() if name == stream.name),
        alerts=[one for one in ledger.alerts().values() if one.stream == stream.name and one.ended is None],
        breaker=ledger.breakers.circuit(stream.name),
        refused=refused,
        accepted_reasons=[*ledger.breakers.accepted_reasons(stream.name).values()],
        accepting=accepting_command(ledger, stream, refused),
        dependencies=_dependencies(ledger, stream),
        holds=ledger.holds.open(stream.name),
        exhausted_slices=ledger.exhausted_slices.open(stream.name),
        instances=ledger.instances.live_together(stream.name, datetime.now(UTC)),
        workers=_workers(ledger, stream),
        measured_at=ledger.watched().get(stream.name),
        faults=[one for one in ledger.sensor_faults.all() if one.stream == stream.name],
        paused=ledger.paused.parts(stream.name).get(stream.name, {}),
        # A broker that is away is waited for once.
        dlq=_dlq(ledger, kafka, stream) if found.partitions else [],
    )


def topic_status(kafka: Kafka, stream: Stream, planned: Planned | None) -> StreamStatus:
    """Look at the stream's topic alone, or at the tier that it is on; what goes wrong is an error in the status."""
    generation = planned.generation if planned else None
    partitions: list[PartitionStatus] = []
    errors: list[HighwaterError] = []
    try:
        state, divergence = _compared_with_plan(kafka, stream, planned)
        partitions = _partitions(stream, planned, state, divergence)
        errors = _errors(stream, planned, state, divergence)
    except TopicAbsentError as error:
        errors.append(planned_topic_gone(stream, planned, error) if planned else error)
    except HighwaterError as error:
        errors.append(error)
    return StreamStatus(
        stream=stream.name,
        topic=stream.topic,
        slices=0,
        generation=generation.number if generation else None,
        topic_id=generation.topic_id if generation else None,
        partitions=partitions,
        errors=errors,
    )


def _compared_with_plan(kafka: Kafka, stream: Stream, planned: Planned | None) -> tuple[TopicState, Divergence]:
    try:
        state = kafka.topic_state(stream.topic)
    except TopicAbsentError:
        # A planned topic is called gone after two looks.
        if planned is None or (again := look_if_there(kafka, stream.topic)) is None:
            raise
        state = again
    return (state, SOUND) if planned is None else compare_with_plan(kafka, stream, planned, state)


def _workers(ledger: Ledger, stream: Stream) -> dict[str, datetime]:
    return living(ledger.leases(), stream.name)


def _dependencies(ledger: Ledger, stream: Stream) -> list[str]:
    names = {KAFKA, LAKE, *([stream.lookup.dependency] if stream.lookup else [])}
    return [describe(one) for one in ledger.breakers.dependencies() if one.name in names and one.state != CLOSED]


def _dlq(ledger: Ledger, kafka: Kafka, stream: Stream) -> list[DlqStatus]:
    paused = ledger.paused.of(stream.name)
    tiers = [replace(_tier(ledger, kafka, stream, topic), pause=paused.get(topic)) for topic in stream.delays]
    return [*tiers, _parked(ledger, kafka, stream)]


def _tier(ledger: Ledger, kafka: Kafka, stream: Stream, topic: str) -> DlqStatus:
    try:
        tick = plan_tier(ledger, kafka, stream, topic, datetime.now(UTC), dry=True)
    except TopicAbsentError:
        return DlqStatus(topic, error=vanished(ledger, stream, topic))
    except HighwaterError as error:
        return DlqStatus(topic, error=error)
    due = sum(slice_.offsets for slice_ in tick.slices)
    # This dry run cuts all due offsets; later ones are not due.
    later = sum(max(0, (seen.last_stable or 0) - tick.ends.get(p, 0)) for p, seen in tick.state.partitions.items())
    stopped = next(iter(tick.errors.values()), None)
    return DlqStatus(topic, due + later, due, stopped, times=due_of(ledger, kafka, stream, topic, tick))


def _parked(ledger: Ledger, kafka: Kafka, stream: Stream) -> DlqStatus:
    try:
        state = state_of(ledger, kafka, stream, stream.parked_topic)
    except TopicVanishedError as error:
        return DlqStatus(stream.parked_topic, error=error)
    except TopicAbsentError:
        return DlqStatus(stream.parked_topic)
    except HighwaterError as error:
        return DlqStatus(stream.parked_topic, error=error)
    held = sum((seen.last_stable or 0) - (seen.log_start or 0) for seen in state.partitions.values())
    return DlqStatus(stream.parked_topic, held)


def _partitions(
    stream: Stream, planned: Planned | None, state: TopicState, divergence: Divergence
) -> list[PartitionStatus]:
    """The partitions as they are; those of another topic under the same name have no planned ends."""
    same = planned if planned is not None and planned.generation.topic_id == state.topic_id else None
    ends = positions(same, state) if same else {}
    trouble: dict[int, str] = {}
    if same:
        trouble = {p: error.problem for p, error in sure_errors(stream, same, state, divergence).items()}
        trouble |= {**divergence.unsure, **skipped_partitions(same, state)}
    return [
        PartitionStatus(
            partition=p,
            planned=ends.get(p),
            log_start=seen.log_start,
            last_stable=seen.last_stable,
            high_watermark=seen.high_watermark,
            leader=seen.leader,
            trouble=trouble.get(p),
        )
        for p, seen in state.partitions.items()
    ]


def _errors(stream: Stream, planned: Planned | None, state: TopicState, divergence: Divergence) -> list[HighwaterError]:
    if planned is None:
        return []
    try:
        ensure_same_topic(stream, planned, state)
    except HighwaterError as error:
        return [error]
    return list(sure_errors(stream, planned, state, divergence).values())
