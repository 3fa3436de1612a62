"""Alerts: the measures of each stream, and one tick that begins, ends and sends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING

from highwater.alerting import DEPLOYMENT, Alert, Measure, after, mark_reported, watch
from highwater.breaker import CLOSED
from highwater.errors import KAFKA, LAKE, HighwaterError, TemporaryError, TopicAbsentError, TopicVanishedError
from highwater.instances import ONE_INSTANCE
from highwater.orchestration.checking.origin_counts import count_parked
from highwater.orchestration.dependencies import ensure_lake_there, kafka_guard, lake_guard
from highwater.orchestration.operations import pending_reprocessing
from highwater.orchestration.operations.accepting_rejects import accepting_command
from highwater.orchestration.reporting.consumer_lag import Ages, in_raw, unread_ages
from highwater.orchestration.reporting.publication_status import behind
from highwater.orchestration.reporting.stalled_work import (
    losses_recorded,
    planning_stopped,
    retries_stopped,
    slices_expired,
    slices_waiting,
)
from highwater.orchestration.sensing.rounds import streams_from
from highwater.resources import guards
from highwater.resources.deleted_topics import parked_lost, state_of
from highwater.resources.guards import guarded
from highwater.resources.topic_facts import stamped_by_broker, topic_settings
from highwater.routing import JITTER
from highwater.topic_rules import no_age_ends, retention, size_limit
from highwater.wording import span

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# The reject ratio covers this many slices, the newest ones.
SLICES = 20
LEASE_SECONDS = 60.0
# Dagster ends a tick after 60 s. No measuring of a stream begins later than this; most take less than a second.
MEASURE_SECONDS = 30.0
Report = Callable[[Alert], None]


@dataclass(frozen=True)
class StreamInputs:
    """A stream, its clients, and the facts about it that one tick reads once."""

    ledger: Ledger
    kafka: Kafka
    lake: Lake
    stream: Stream

    @cached_property
    def in_raw(self) -> Collection[str] | None:
        """The slices that are in raw, read once; None if the lake cannot be asked now."""
        return in_raw(self.ledger, self.lake, self.stream)

    @cached_property
    def parked(self) -> int:
        """The number of records that wait for a person, counted once.

        Raises:
            DependencyAwayError: the lake is away.
        """
        return count_parked(self.ledger, self.lake, self.stream)

    def ages(self, topic: str) -> Ages:
        """The offsets of a topic that are not in raw, read once.

        Raises:
            TopicAbsentError: there is no such topic.
            DependencyAwayError: Kafka or the ledger is away.
        """
        if topic not in self._ages:
            self._ages[topic] = unread_ages(self.ledger, self.kafka, self.stream, topic, self.in_raw)
        return self._ages[topic]

    @cached_property
    def _ages(self) -> dict[str, Ages]:
        return {}


Measuring = Callable[[StreamInputs], Measure | None]


@dataclass(frozen=True)
class TickResult:
    """The result of a tick.

    Args:
        lines: what was done, in sentences.
        begin: the stream that the next tick measures first.
        calm: streams that were measured whole, with nothing to report.
    """

    lines: list[str]
    begin: str = ""
    calm: Sequence[str] = ()


def tick(
    ledger: Ledger,
    kafka: Kafka,
    lake: Lake,
    streams: Sequence[Stream],
    report: Report,
    sensors: Callable[[], Iterable[Measure]] = tuple,
    begin: str = "",
    resting: Collection[str] = (),
) -> TickResult:
    """Measure all streams, and send the alerts that begin and end.

    What cannot be measured, because something is away, leaves its alert as it is (I15), and so do streams for which no
    time is left. An alert that cannot be sent is sent at a later tick; one that the receiver refuses delays no other.
    Two ticks at once follow each other.

    Args:
        ledger, kafka, lake: are asked.
        streams: the streams.
        report: sends an alert to the receiver.
        sensors: measures the sensors.
        begin: the stream to begin with.
        resting: streams that are not measured now, since nothing of them changed.

    Raises:
        DependencyAwayError: the ledger is away.
        LeaseHeldError: another tick is under way.
    """
    now = datetime.now(UTC)
    lines: list[str] = []
    with ledger.lease("alerts", seconds=LEASE_SECONDS, wait=0.0):
        due = [stream for stream in streams_from(streams, begin) if stream.name not in resting]
        measures, calm, left = _measure_each(ledger, kafka, lake, due, lines)
        measures += [*_dependencies(ledger, streams), *sensors()]
        known = ledger.alerts()
        measures += _gone(ledger, streams, known.values(), now)
        open_ = after(known, measures, now)
        if open_ != known:
            ledger.record_alerts(open_)
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
            ledger.record_alerts(open_)
            lines.append(f"sent: {alert.to_plain()['kind']} {alert.stream} {alert.what}: {alert.value}")
    if left:
        lines.append(f"{len(left)} streams are measured by the next tick, from {left[0].name} on")
    return TickResult(lines or [f"{len(open_)} alerts are open"], left[0].name if left else "", calm)


def _measure_each(
    ledger: Ledger, kafka: Kafka, lake: Lake, streams: Sequence[Stream], lines: list[str]
) -> tuple[list[Measure], list[str], Sequence[Stream]]:
    """The measures of streams, the streams without a condition, and the streams for which no time was left."""
    deadline = time.monotonic() + MEASURE_SECONDS
    measures: list[Measure] = []
    calm: list[str] = []
    for number, stream in enumerate(streams):
        if time.monotonic() > deadline:
            return measures, calm, streams[number:]
        unknown, before = list[str](), len(lines)
        found = [*_measured(ledger, kafka, lake, stream, lines, unknown)]
        measures += [*found, _not_measured(stream, unknown)]
        if len(lines) == before and not any(one.over for one in found):
            calm.append(stream.name)
    return measures, calm, ()


def _not_measured(stream: Stream, why: Sequence[str]) -> Measure:
    """A measurement that failed for a permanent reason, so that its alert cannot be measured."""
    return Measure(
        stream.name,
        "not measured",
        "; ".join(dict.fromkeys(why)) or "all is measured",
        "all is measured",
        bool(why),
        "see the ticks of the sensor alerts" if why else "nothing is to be done",
    )


def _measured(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, lines: list[str], unknown: list[str]
) -> Iterator[Measure]:
    inputs = StreamInputs(ledger, kafka, lake, stream)

    def guards_of(measure: Measuring) -> list[guards.Guard]:
        names = DEPENDENCIES.get(measure, ())
        return [lake_guard(ledger, lake, stream) if name == LAKE else kafka_guard(ledger, kafka) for name in names]

    for measure in MEASURES:
        try:
            with guarded(*guards_of(measure)):
                if LAKE in DEPENDENCIES.get(measure, ()):
                    ensure_lake_there(ledger, lake)
                found = measure(inputs)
        except HighwaterError as error:
            lines.append(f"{stream.name}: not measured: {error.problem}")
            # A dependency that is away has a breaker, and an absent topic stops planning: both have alerts of their
            # own.
            if not isinstance(error, TemporaryError | TopicAbsentError):
                unknown.append(error.problem)
        except Exception as error:  # noqa: BLE001 - what one stream holds must not silence the alerts of the others
            lines.append(f"{stream.name}: not measured: {type(error).__name__}")
            unknown.append(f"{measure.__name__.strip('_')}: {type(error).__name__}")
        else:
            if found is not None:
                yield found


def _reject_ratio(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    keys = [slice_.key for slice_ in inputs.ledger.slices(stream.name, stream.topic, newest=SLICES)]
    slice_commits = inputs.lake.committed(stream.name, "events", keys).values()
    records, rejects = (
        sum(slice_commit.counts.get(name, 0) for slice_commit in slice_commits) for name in ("raw", "rejects")
    )
    if not records:
        return None
    limit = stream.alerts.reject_ratio
    return Measure(
        stream.name,
        "reject ratio",
        f"{rejects / records:.0%} of {records:,} records of the newest {len(keys)} slices",
        f"{limit:.0%}",
        rejects / records > limit,
        f"look at the reasons in {stream.name}/rejects; highwater audit {stream.name} shows how the records ended",
    )


def _parked(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    count, limit = inputs.parked, stream.alerts.parked
    return Measure(
        stream.name,
        "parked records",
        f"{count:,} wait for a person",
        f"{limit:,}",
        count > limit,
        f"highwater redrive-parked {stream.name} lists them, sends them back; discard-parked gives them up",
    )


def _parked_topic(inputs: StreamInputs) -> Measure | None:
    stream, error = inputs.stream, None
    # A topic that holds as many as all that wait has those that are published, which need not be counted then.
    if inputs.parked and _lost_on_parked(inputs, inputs.parked):
        waiting = count_parked(inputs.ledger, inputs.lake, stream, published=True)
        error = _lost_on_parked(inputs, waiting) if waiting else None
    return Measure(
        stream.name,
        "parked topic",
        "it holds what waits for a person" if error is None else f"{error.problem}: {error.stored}, {error.found}",
        "nothing is lost",
        error is not None,
        "nothing is to be done" if error is None else error.remedy,
    )


def _lost_on_parked(inputs: StreamInputs, waiting: int) -> HighwaterError | None:
    try:
        return parked_lost(inputs.kafka, inputs.stream, waiting)
    except TopicAbsentError:
        return _gone_topic(inputs, inputs.stream.parked_topic)


def _gone_topic(inputs: StreamInputs, topic: str) -> TopicVanishedError | None:
    """The error for a topic that was absent a moment ago; None where it may be absent.

    Raises:
        DependencyAwayError: Kafka or the ledger is away, or the brokers disagree on whether the topic exists.
    """
    try:
        state_of(inputs.ledger, inputs.kafka, inputs.stream, topic)
    except TopicVanishedError as gone:
        return gone
    except TopicAbsentError:
        return None
    raise inputs.kafka.away(f"one broker did not know topic {topic}, another one does")


def _late_retries(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    if not stream.delays:
        return Measure.of_nothing(stream.name, "age of retries", "no tier is declared")
    try:
        found = [_lateness(inputs, topic) for topic in stream.delays]
    except TopicVanishedError as error:
        return Measure(stream.name, "age of retries", error.problem, "no tier is gone", over=True, remedy=error.remedy)
    late, limit = max(late for late, _ in found), stream.alerts.retries_late
    if late <= limit and not all(sure for _, sure in found):
        return None
    return Measure(
        stream.name,
        "age of retries",
        f"the oldest retry is {span(late)} late",
        str(limit),
        late > limit,
        f"see that the sensors dlq_retries and repair run, and what their ticks and highwater status {stream.name} say",
    )


def _lateness(inputs: StreamInputs, topic: str) -> tuple[timedelta, bool]:
    """The time for which a tier's oldest due record is not in raw; and whether all partitions could be asked.

    Raises:
        TopicVanishedError: the tier is not there any more.
        DependencyAwayError: Kafka or the ledger is away.
    """
    stream = inputs.stream
    try:
        ages = inputs.ages(topic)
        if topic in stream.foreign_topics and not stamped_by_broker(inputs.kafka, topic):
            return timedelta(0), True  # what just came may bear the time of its first publication, days ago
    except TopicAbsentError:
        if (gone := _gone_topic(inputs, topic)) is not None:
            raise gone from None
        return timedelta(0), True  # nothing was published to it yet
    age = ages.oldest or timedelta(0)
    return max(age - stream.delays[topic] * (1 + JITTER), timedelta(0)), ages.sure


@dataclass(frozen=True)
class _Left:
    """The time for which a topic still keeps its oldest unread record.

    Args:
        topic: its name.
        left: None if it takes none for its age.
        limit: below it there is something to warn of.
        ages: the ages of the unread records.
        size: `retention.bytes`, if that is limited: it may take the record at any time.
    """

    topic: str
    left: timedelta | None
    limit: timedelta
    ages: Ages
    size: int | None

    @property
    def margin(self) -> timedelta:
        """Below 0 it is to be reported."""
        return timedelta.max if self.left is None else self.left - self.limit

    @property
    def by_size(self) -> str:
        """The limit by size."""
        return "" if self.size is None else f"; retention.bytes={self.size} of {self.topic} may take it before"


def _retention_left(inputs: StreamInputs) -> Measure | None:
    """The topic in most danger, among the main topic and every topic whose records are retried."""
    stream = inputs.stream
    found = _all_left(inputs)
    if gone := next((one for one in found if one.ages.expired), None):
        lost = "; ".join(f"partition {p}: {offsets}" for p, offsets in sorted(gone.ages.expired.items()))
        return Measure(
            stream.name,
            "retention before unread records",
            f"retention deleted unread records of {gone.topic}: {lost}",
            str(gone.limit),
            over=True,
            remedy=f"highwater status {stream.name} names the command that records the loss; raise retention.ms of "
            f"{gone.topic}, and see what kept the records from being read",
        )
    worst = min(found, key=lambda one: one.margin, default=None)
    known = any(one.topic == stream.topic for one in found) and all(one.ages.sure for one in found)
    if worst is None or (worst.margin >= timedelta(0) and not known):
        return None
    if worst.left is None:
        sizes = ", ".join(f"retention.bytes={one.size} of {one.topic}" for one in found if one.size is not None)
        why = f"no age ends a record; when {sizes} takes one is not known" if sizes else "the topics keep all"
        return Measure.of_nothing(stream.name, "retention before unread records", why)
    return Measure(
        stream.name,
        "retention before unread records",
        f"{span(worst.left)} until retention takes the oldest unread record of {worst.topic}{worst.by_size}",
        str(worst.limit),
        worst.margin < timedelta(0),
        _read_sooner(stream, worst),
    )


def _all_left(inputs: StreamInputs) -> list[_Left]:
    found = []
    for topic in (inputs.stream.topic, *inputs.stream.delays):
        try:
            found += [one] if (one := _left(inputs, topic)) is not None else []
        except TopicAbsentError:
            if topic == inputs.stream.topic:
                raise
            # Nothing was published to it yet; if it is gone, the age of retries shows it.
    return found


def _open_transaction(inputs: StreamInputs) -> Measure | None:
    """The open transaction that holds records back for longest, by the limit of its topic."""
    stream = inputs.stream
    held = [(topic, p, found) for topic in _topics(inputs) for p, found in inputs.ages(topic).held_back.items()]
    if not held:
        return Measure.of_nothing(stream.name, "open transaction", "none holds records back")
    limits = {topic: _held_back_limit(inputs, topic) for topic, _, _ in held}
    known = [(found.age, topic, p, found) for topic, p, found in held if found.age is not None]
    if not known:
        return None
    age, topic, partition, found = max(known, key=lambda one: one[0] - limits[one[1]])
    place = f"--topic {topic} --partition {partition}"
    tool = f"kafka-transactions --bootstrap-server {inputs.kafka.bootstrap}"
    return Measure(
        stream.name,
        "open transaction",
        f"{topic} partition {partition}: {found.offsets:,} offsets from offset {found.offset} on are held back by "
        f"a transaction whose first record is {span(age)} old",
        str(limits[topic]),
        age > limits[topic],
        f"{tool} describe-producers {place} names the producer ID: end that producer. If nobody runs it any more: "
        f"{tool} abort {place} --start-offset {found.offset}",
    )


def _topics(inputs: StreamInputs) -> list[str]:
    """The main topic, and those retried topics that exist; the age of retries reports a missing one."""
    found = [inputs.stream.topic]
    for topic in inputs.stream.delays:
        with suppress(TopicAbsentError):
            inputs.ages(topic)
            found.append(topic)
    return found


def _held_back_limit(inputs: StreamInputs, topic: str) -> timedelta:
    retained_for = retention(topic_settings(inputs.kafka, topic))
    limit = inputs.stream.alerts.held_back
    return limit if retained_for is None else min(limit, retained_for / 2)


def _left(inputs: StreamInputs, topic: str) -> _Left | None:
    """None where the settings of the topic may not be read."""
    settings = topic_settings(inputs.kafka, topic)
    retained_for, size = retention(settings), size_limit(settings)
    if retained_for is None:
        if not no_age_ends(settings):
            return None
        # A limit by size may have taken records all the same.
        expired = {} if size is None else inputs.ages(topic).expired
        return _Left(topic, None, timedelta(0), Ages({}, sure=True, expired=expired), size)
    ages = inputs.ages(topic)
    # Where a topic keeps less than the threshold at all, half of what it keeps is what there is to warn of.
    limit = min(inputs.stream.alerts.retention_left, retained_for / 2)
    return _Left(topic, retained_for - (ages.oldest or timedelta(0)), limit, ages, size)


def _read_sooner(stream: Stream, worst: _Left) -> str:
    waiting = worst.ages.waiting
    planned = f"highwater explain {waiting[0]} shows why it is planned and not read, or " if waiting else ""
    runs = f"the sensor planner runs, that {stream.name} is not paused,"
    if worst.topic != stream.topic:
        runs = f"the sensor dlq_retries runs, that neither {stream.name} nor {worst.topic} is paused,"
    return f"{planned}see that {runs} and what its ticks say, or raise retention.ms of {worst.topic}"


def _breaker(inputs: StreamInputs) -> Measure | None:
    """One alert, however many slices are refused, and however often probes close the breaker meanwhile."""
    stream = inputs.stream
    found, refused = inputs.ledger.breakers.circuit(stream.name), inputs.ledger.breakers.refused(stream.name)
    command = accepting_command(inputs.ledger, stream, refused)
    each = "highwater accept-rejects lets one through as it is"
    return Measure(
        stream.name,
        "circuit breaker",
        found.text + (f"; {len(refused):,} slices are refused" if refused else ""),
        "closed, and no slice refused",
        not found.closed or bool(refused),
        f"fix the cause of rejects and failures; highwater status {stream.name} names refused slices, {each}"
        + (f"; where nobody can fix the records, {command} accepts all of them" if command else ""),
    )


def _held(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    found = inputs.ledger.holds.open(stream.name)
    return Measure(
        stream.name,
        "held",
        "; ".join(hold.text for hold in found) or "nothing is held",
        "nothing is held",
        bool(found),
        "fix what the records lack, and the slice is decided; highwater release-hold lets it go on without them",
    )


def _exhausted(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    found = inputs.ledger.exhausted_slices.open(stream.name)
    return Measure(
        stream.name,
        "retries exhausted",
        f"{len(found):,} slices; {found[0].text}" if found else "no slice is exhausted",
        "no slice is exhausted",
        bool(found),
        f"highwater explain {found[0].slice_key} shows its runs: fix what they fail by, then materialise it, or "
        f"highwater retry-slice {found[0].slice_key}"
        if found
        else "nothing is to be done",
    )


def _stalled(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    found = inputs.ledger.stalled_slices.open(stream.name)
    return Measure(
        stream.name,
        "stalled",
        f"{len(found):,} slices; {found[0].text}" if found else "no slice is tried again and again",
        "no slice is tried again and again",
        bool(found),
        f"highwater explain {found[0].slice_key} shows its runs: fix what they fail by, and the sensor repair "
        "requests it within the hour, or materialise it"
        if found
        else "nothing is to be done",
    )


def _instances(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    found = inputs.ledger.instances.live_together(stream.name, datetime.now(UTC))
    return Measure(
        stream.name,
        "Dagster instances",
        "; ".join(one.text for one in found) or "one at the most",
        "one",
        bool(found),
        ONE_INSTANCE if found else "nothing is to be done",
    )


def _published_late(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    now = datetime.now(UTC)
    found = behind(inputs.ledger, inputs.lake, stream)
    if found is None:
        return Measure.of_nothing(stream.name, "age of accepted events", "the stream sends none")
    late, limit = found.age(now), stream.alerts.published_late
    return Measure(
        stream.name,
        "age of accepted events",
        f"the oldest that is not sent to {found.topic} was accepted {span(late)} ago"
        if found.waits
        else "none waits to be sent",
        str(limit),
        late > limit,
        found.held_up or "nothing is to be done",
    )


def _reclaimed_late(inputs: StreamInputs) -> Measure | None:
    stream = inputs.stream
    found, limit = pending_reprocessing.waiting(inputs.ledger, inputs.lake, stream), stream.alerts.reclaimed_late
    age = datetime.now(UTC) - found[0].since if found else timedelta(0)
    records = sum(one.records for one in found)
    return Measure(
        stream.name,
        "reclaimed",
        f"{records:,} records of {len(found):,} slices wait to be reprocessed, the first for {span(age)}"
        if found
        else "none waits to be reprocessed",
        str(limit),
        age > limit,
        pending_reprocessing.remedy(stream, found) if found else "nothing is to be done",
    )


def _asked_by(streams: Sequence[Stream]) -> list[str]:
    """The dependencies of these streams."""
    return [KAFKA, LAKE, *(stream.lookup.dependency for stream in streams if stream.lookup)]


def _gone(ledger: Ledger, streams: Sequence[Stream], alerts: Iterable[Alert], now: datetime) -> list[Measure]:
    """Ends the alerts of streams and reference tables that no code location declares any more."""
    about = {alert: alert.what if alert.stream == DEPLOYMENT else alert.stream for alert in alerts}
    breakers = [f"circuit breaker of {name}"[:100] for name in _asked_by(streams)]
    found = watch([*about.values()], [*(stream.name for stream in streams), *breakers], ledger.watched(), now)
    if found.added:
        ledger.watch(sorted(found.added), now)
    why = "nothing declares it any more: it was not measured for a day"
    return [Measure.of_nothing(one.stream, one.what, why) for one, name in about.items() if name in found.gone]


def _dependencies(ledger: Ledger, streams: Sequence[Stream]) -> list[Measure]:
    """The breakers of the dependencies, which are the deployment's, not a stream's.

    That of a reference table which no stream has any more stays as it is for ever, since nobody asks for the table.
    """
    names = _asked_by(streams)
    return [
        Measure(
            DEPLOYMENT,
            f"circuit breaker of {one.name}"[:100],
            guards.describe(one),
            "closed",
            one.state != CLOSED,
            f"bring {one.name} back; highwater doctor tries every connection",
        )
        for one in ledger.breakers.dependencies()
        if one.name in names
    ]


MEASURES: tuple[Measuring, ...] = (
    planning_stopped,
    retries_stopped,
    slices_expired,
    slices_waiting,
    losses_recorded,
    _breaker,
    _held,
    _exhausted,
    _stalled,
    _instances,
    _reject_ratio,
    _parked,
    _parked_topic,
    _late_retries,
    _retention_left,
    _open_transaction,
    _published_late,
    _reclaimed_late,
)
DEPENDENCIES: Mapping[Measuring, Sequence[str]] = {
    planning_stopped: (KAFKA,),
    retries_stopped: (KAFKA,),
    slices_expired: (KAFKA,),
    _reject_ratio: (LAKE,),
    _parked: (LAKE,),
    _parked_topic: (LAKE, KAFKA),
    _late_retries: (KAFKA,),
    _retention_left: (KAFKA,),
    _open_transaction: (KAFKA,),
    _published_late: (LAKE,),
    _reclaimed_late: (LAKE,),
}
