"""The status of a stream: its partitions, its DLQ topics and the work that waits, as lines and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from highwater.alerting import Alert
from highwater.breaker import Circuit
from highwater.errors import HighwaterError
from highwater.holds import Hold
from highwater.instances import ONE_INSTANCE, Instance
from highwater.orchestration.operations.pending_reprocessing import ReclaimedRecords, describe_pending_slices
from highwater.orchestration.reporting.publication_status import PublicationLag
from highwater.orchestration.sensing.due_times import DueTimes
from highwater.resources.ledger.breakers import AcceptedReason, Judgement
from highwater.resources.ledger.exhausted_slices import ExhaustedSlice
from highwater.resources.ledger.pauses import Pause
from highwater.resources.ledger.sensor_faults import SensorFault
from highwater.wording import format_number

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
        """Offsets up to the high watermark that are not planned, those after an open transaction among them."""
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
    """A DLQ topic. Its waiting records are counted in offsets, transaction markers included.

    Args:
        topic: its name.
        waiting: offsets that were not planned yet; on the parked topic all that it holds. None if it is not there yet.
        due: number of waiting records that are due; None on the parked topic.
        error: why it could not be looked at, or cannot be planned.
        pause: since when its retries are paused; None if they are not.
        times: when what waits is due; None where nothing does, or that is not known.
    """

    topic: str
    waiting: int | None = None
    due: int | None = None
    error: HighwaterError | None = None
    pause: Pause | None = None
    times: DueTimes | None = None

    @property
    def line(self) -> str:
        """The topic in a sentence."""
        if self.error is not None:
            return f"{self.topic}: {type(self.error).__name__}: {self.error}"
        if self.waiting is None:
            return f"{self.topic}: nothing was published to it yet"
        if self.due is None:
            return f"{self.topic}: {self.waiting:,} offsets wait for a person, markers of transactions included"
        due = f"{self.topic}: {self.waiting:,} offsets wait, {self.due:,} of them are due"
        if self.times is None:
            return due
        first, last = (f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in (self.times.next_due, self.times.all_due))
        return f"{due}; the first from {first} on, all by {last}"


@dataclass(frozen=True)
class WaitingWork:
    """The work that waits in the lake.

    Args:
        publication: how far accepted events are behind; None of a stream that sends none.
        reclaimed: slices to be reprocessed, since records of them were reclaimed from the DLQ.
        remedy: the command that does that; empty if there are none.
        parked: published records that wait on the parked topic for a person.
    """

    publication: PublicationLag | None = None
    reclaimed: Sequence[ReclaimedRecords] = ()
    remedy: str = ""
    parked: int = 0

    @property
    def lines(self) -> list[str]:
        """The waiting work in sentences."""
        lines = [] if self.publication is None else [self.publication.line]
        return [*lines, f"{describe_pending_slices(self.reclaimed)}; {self.remedy}"] if self.reclaimed else lines

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
        generation: the main topic's generation; None if it was never planned.
        topic_id: the one that was planned.
        partitions: empty if the topic could not be looked at.
        errors: errors that stop the planning of the topic or a partition, or the reading of planned slices.
        dlq: the tiers, and the parked topic.
        alerts: the open alerts of the stream.
        deployment_alerts: the open alerts that concern all streams, such as that a sensor's ticks fail.
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
    waiting: WaitingWork | Exception | None = None
    exhausted_slices: Sequence[ExhaustedSlice] = ()
    accepted: HighwaterError | None = None
    instances: Sequence[Instance] = ()
    accepted_reasons: Sequence[AcceptedReason] = ()
    accepting: str | None = None
    measured_at: datetime | None = None
    faults: Sequence[SensorFault] = ()
    paused: Mapping[str, Pause] = field(default_factory=dict)
    deployment_alerts: Sequence[Alert] = ()

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
        alerts = [f"  {_format_alert(one)}" for one in self.alerts]
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
        return [head, *lines, *[f"  {self._format_dlq(one)}" for one in self.dlq], *self._waits]

    @property
    def deployment_lines(self) -> list[str]:
        """The open alerts of the deployment, in sentences."""
        return [f"{one.stream}: {_format_alert(one)}" for one in self.deployment_alerts]

    @property
    def _unmeasured(self) -> list[str]:
        if self.measured_at is None or datetime.now(UTC) - self.measured_at < UNMEASURED_FOR:
            return []
        since = f"{self.measured_at:%Y-%m-%d %H:%M} UTC"
        return [f"  no alert was measured since {since}: check that Dagster's daemon and the sensor alerts run"]

    def _format_dlq(self, one: DlqStatus) -> str:
        paused = "" if one.pause is None else f"; {one.pause.text}, highwater resume-tier {self.stream} {one.topic}"
        return f"{one.line}{paused}"

    @property
    def _waits(self) -> list[str]:
        if isinstance(self.waiting, Exception):
            return [f"  what waits in the lake is not known: {_describe_error(self.waiting)}"]
        return [] if self.waiting is None else [f"  {text}" for text in self.waiting.lines]

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """Names of columns, and a row for each partition."""
        names = ["partition", "planned to", "log start", "last stable", "high watermark", "lag", "held back"]
        names += ["leader", "trouble"]
        rows = [
            [str(p.partition)]
            + [format_number(value) for value in (p.planned, p.log_start, p.last_stable, p.high_watermark, p.lag)]
            + ["-" if p.last_stable is None else format_number(p.held_back)]
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
            "errors": [_to_plain_error(error) for error in self.errors],
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
            "alerts": [one.to_plain() for one in (*self.alerts, *self.deployment_alerts)],
            "alerts_measured_at": None if self.measured_at is None else self.measured_at.isoformat(),
            "dlq": [_to_plain_dlq(one) for one in self.dlq],
            "accepted_error": None if self.accepted is None else _to_plain_error(self.accepted),
            **_to_plain_waiting(self.waiting),
        }


def _format_alert(one: Alert) -> str:
    return f"alert since {one.since:%Y-%m-%d %H:%M} UTC: {one.what}: {one.value}; {one.remedy}"


def _to_plain_dlq(one: DlqStatus) -> dict[str, Any]:
    error = None if one.error is None else _to_plain_error(one.error)
    plain = {name: value for name, value in vars(one).items() if name != "times"}
    pause = None if one.pause is None else one.pause.to_plain()
    return {**plain, "error": error, "pause": pause, **to_plain_times(one.times)}


def to_plain_times(times: DueTimes | None) -> dict[str, str | None]:
    """The due times of waiting records, as plain values for JSON."""
    return {"next_due": None, "all_due": None} if times is None else {**times.to_plain()}


def _to_plain_waiting(waiting: WaitingWork | Exception | None) -> dict[str, Any]:
    if isinstance(waiting, Exception):
        return {**WaitingWork().to_plain(), "lake_error": _to_plain_error(waiting)}
    return WaitingWork().to_plain() if waiting is None else waiting.to_plain()


def _describe_error(error: Exception) -> str:
    return error.problem if isinstance(error, HighwaterError) else f"{type(error).__name__}: {error}"


def _to_plain_error(error: Exception) -> dict[str, str]:
    return {"error": type(error).__name__, "text": str(error)}
