"""The conditions of a stream's alerts, and which dependency each one needs; here a new alert is added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from highwater.alerting import Condition
from highwater.errors import KAFKA, LAKE, HighwaterError, TopicAbsentError, TopicVanishedError
from highwater.instances import ONE_INSTANCE
from highwater.orchestration.checking.origin_counts import count_parked
from highwater.orchestration.operations import pending_reprocessing
from highwater.orchestration.operations.accepting_rejects import build_accept_command
from highwater.orchestration.reporting.alert_inputs import SLICES, Evaluate, StreamInputs
from highwater.orchestration.reporting.publication_status import measure_publication_lag
from highwater.orchestration.reporting.stalled_work import (
    measure_expired_slices,
    measure_planning,
    measure_recorded_losses,
    measure_retry_planning,
    measure_unread_age,
)
from highwater.orchestration.reporting.topic_conditions import measure_open_transaction, measure_retention_left
from highwater.reject_reasons import BY_REASON, BY_RULE, format_count_name
from highwater.resources.deleted_topics import find_parked_loss, read_state
from highwater.resources.ledger.exhausted_slices import ExhaustedSlice, StalledSlice
from highwater.resources.ledger.pauses import ALL, RETRIES
from highwater.resources.topic_facts import has_broker_timestamps
from highwater.routing import compute_longest_retry_delay
from highwater.slice_commits import SliceCommit
from highwater.wording import format_duration


def _measure_reject_ratio(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    keys = [slice_.key for slice_ in inputs.ledger.list_slices(stream.name, stream.topic, newest=SLICES)]
    slice_commits = inputs.lake.load_slice_commits(stream.name, "events", keys).values()
    records, rejects = (
        sum(slice_commit.counts.get(name, 0) for slice_commit in slice_commits) for name in ("raw", "rejects")
    )
    if not records:
        return None
    limit = stream.alerts.reject_ratio
    return Condition(
        stream.name,
        "reject ratio",
        f"{rejects / records:.0%} of {records:,} records of the newest {len(keys)} slices",
        f"{limit:.0%}",
        rejects / records > limit,
        f"look at reasons and rules in {stream.name}/rejects ({_format_most_frequent(slice_commits)}); highwater audit "
        f"{stream.name} shows how the records ended",
    )


def _format_most_frequent(slice_commits: Collection[SliceCommit]) -> str:
    """The three most frequent kinds of rejects, by reason and by rule."""
    counts: Counter[str] = Counter()
    for slice_commit in slice_commits:
        counts.update({n: count for n, count in slice_commit.counts.items() if n.startswith((BY_REASON, BY_RULE))})
    return ", ".join(f"{format_count_name(n)} {count:,}" for n, count in counts.most_common(3) if count) or "none"


def _measure_parked_records(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    count, limit = inputs.parked, stream.alerts.parked
    return Condition(
        stream.name,
        "parked records",
        f"{count:,} wait for a person",
        f"{limit:,}",
        count > limit,
        f"highwater redrive-parked {stream.name} lists them, and with --yes sends them back; highwater discard-parked "
        f"{stream.name} discards them",
    )


def _measure_parked_topic(inputs: StreamInputs) -> Condition | None:
    stream, error = inputs.stream, None
    # A topic that holds as many as all that wait has those that are published, which need not be counted then.
    if inputs.parked and _find_parked_loss(inputs, inputs.parked):
        waiting = count_parked(inputs.ledger, inputs.lake, stream, published=True)
        error = _find_parked_loss(inputs, waiting) if waiting else None
    return Condition(
        stream.name,
        "parked topic",
        "it holds what waits for a person" if error is None else f"{error.problem}: {error.stored}, {error.found}",
        "nothing is lost",
        error is not None,
        "no action needed" if error is None else error.remedy,
    )


def _find_parked_loss(inputs: StreamInputs, waiting: int) -> HighwaterError | None:
    try:
        return find_parked_loss(inputs.kafka, inputs.stream, waiting)
    except TopicAbsentError:
        return _find_vanished_error(inputs, inputs.stream.parked_topic)


def _find_vanished_error(inputs: StreamInputs, topic: str) -> TopicVanishedError | None:
    """The error for a topic that was absent a moment ago; None where it may be absent.

    Raises:
        DependencyUnavailableError: Kafka or the ledger is unavailable, or the brokers disagree on whether the topic
            exists.
    """
    try:
        read_state(inputs.ledger, inputs.kafka, inputs.stream, topic)
    except TopicVanishedError as gone:
        return gone
    except TopicAbsentError:
        return None
    raise inputs.kafka.build_unavailable_error(f"one broker did not know topic {topic}, another one does")


def _measure_retry_age(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    if not stream.delays:
        return Condition.not_applicable(stream.name, "age of retries", "no tier is declared")
    try:
        found = [(*_measure_tier_lateness(inputs, topic), topic) for topic in stream.delays]
    except TopicVanishedError as error:
        return Condition(
            stream.name, "age of retries", error.problem, "no tier is gone", over=True, remedy=error.remedy
        )
    (late, _, topic), limit = max(found), stream.alerts.retries_late
    if late <= limit and not all(sure for _, sure, _ in found):
        return None
    return Condition(
        stream.name,
        "age of retries",
        f"the oldest retry, on {topic}, is {format_duration(late)} late" if late else "no retry is late",
        str(limit),
        late > limit,
        _retry_sooner(inputs, topic) if late > limit else "no action needed",
    )


def _retry_sooner(inputs: StreamInputs, topic: str) -> str:
    """The remedy for late retries of a topic: the end of its pause, or where to look."""
    name, pauses = inputs.stream.name, inputs.ledger.paused
    if (pause := pauses.read_for_stream(name).get(topic)) is not None:
        return f"{pause.text}: highwater resume-tier {name} {topic} ends that"
    parts = pauses.read_parts_by_stream(name).get(name, {})
    if (pause := parts.get(ALL) or parts.get(RETRIES)) is not None:
        return f"{pause.text}: highwater resume {name}{'' if ALL in parts else f' {RETRIES}'} ends that"
    waiting = inputs.measure_ages(topic).waiting
    planned = f"highwater explain {waiting[0]} shows why it is planned and not read; " if waiting else ""
    return f"{planned}check that the sensors dlq_retries and repair run; read their ticks and highwater status {name}"


def _measure_tier_lateness(inputs: StreamInputs, topic: str) -> tuple[timedelta, bool]:
    """The time for which a tier's oldest due record is not in raw; and whether all partitions could be asked.

    Raises:
        TopicVanishedError: the tier is not there any more.
        DependencyUnavailableError: Kafka or the ledger is unavailable.
    """
    stream = inputs.stream
    try:
        ages = inputs.measure_ages(topic)
        if topic in stream.foreign_topics and not has_broker_timestamps(inputs.kafka, topic):
            return timedelta(0), True  # what just came may bear the time of its first publication, days ago
    except TopicAbsentError:
        if (gone := _find_vanished_error(inputs, topic)) is not None:
            raise gone from None
        return timedelta(0), True  # nothing was published to it yet
    age = ages.oldest or timedelta(0)
    return max(age - compute_longest_retry_delay(stream.delays[topic]), timedelta(0)), ages.sure


def _measure_breaker(inputs: StreamInputs) -> Condition | None:
    """One alert, however many slices are refused, and however often probes close the breaker meanwhile."""
    stream = inputs.stream
    found, refused = inputs.ledger.breakers.read_circuit(stream.name), inputs.ledger.breakers.list_refused(stream.name)
    command = build_accept_command(inputs.ledger, stream, refused)
    each = "highwater accept-rejects lets one through as it is"
    return Condition(
        stream.name,
        "circuit breaker",
        found.text + (f"; {len(refused):,} slices are refused" if refused else ""),
        "closed, and no slice refused",
        not found.closed or bool(refused),
        f"fix the cause of rejects and failures; highwater status {stream.name} names refused slices, {each}"
        + (f"; where nobody can fix the records, {command} accepts all of them" if command else ""),
    )


def _measure_holds(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    found = inputs.ledger.holds.read_open(stream.name)
    return Condition(
        stream.name,
        "held",
        "; ".join(hold.text for hold in found) or "nothing is held",
        "nothing is held",
        bool(found),
        f"supply what the records lack, and the slice is processed; or highwater release-hold {found[0].slice_key} "
        "sends them to the DLQ"
        if found
        else "no action needed",
    )


def _measure_exhausted_slices(inputs: StreamInputs) -> Condition | None:
    name = inputs.stream.name
    found = inputs.ledger.exhausted_slices.read_open(name)
    key = found[0].slice_key if found else ""
    remedy = f"highwater explain {key} shows its runs: fix what they fail by, then materialise it, or "
    remedy = f"{remedy}highwater retry-slice {key}" if found else "no action needed"
    value, none = _describe_slices("exhausted", found)
    return Condition(name, "retries exhausted", value, none, bool(found), remedy)


def _measure_stalled_slices(inputs: StreamInputs) -> Condition | None:
    name = inputs.stream.name
    found = inputs.ledger.stalled_slices.read_open(name)
    remedy = f"highwater explain {found[0].slice_key if found else ''} shows its runs: fix what they fail by, and the "
    remedy += "sensor repair requests it within the hour, or materialise it"
    value, none = _describe_slices("stalled", found)
    return Condition(name, "stalled", value, none, bool(found), remedy if found else "no action needed")


def _describe_slices(state: str, slices: Sequence[ExhaustedSlice | StalledSlice]) -> tuple[str, str]:
    """The slices in a state, by their number and the first of them; and the words for none."""
    none = f"no slice is {state}"
    return (f"{len(slices):,} slices; {slices[0].text}" if slices else none), none


def _measure_instances(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    found = inputs.ledger.instances.list_concurrent(stream.name, datetime.now(UTC))
    return Condition(
        stream.name,
        "Dagster instances",
        "; ".join(one.text for one in found) or "one at the most",
        "one",
        bool(found),
        ONE_INSTANCE if found else "no action needed",
    )


def _measure_publication_age(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    now = datetime.now(UTC)
    found = measure_publication_lag(inputs.ledger, inputs.lake, stream)
    if found is None:
        return Condition.not_applicable(stream.name, "age of accepted events", "the stream sends none")
    late, limit = found.compute_age(now), stream.alerts.published_late
    return Condition(
        stream.name,
        "age of accepted events",
        f"the oldest that is not sent to {found.topic} was accepted {format_duration(late)} ago"
        if found.waits
        else "none waits to be sent",
        str(limit),
        late > limit,
        found.held_up or "no action needed",
    )


def _measure_reclaim_age(inputs: StreamInputs) -> Condition | None:
    stream = inputs.stream
    found, limit = (
        pending_reprocessing.list_pending_slices(inputs.ledger, inputs.lake, stream),
        stream.alerts.reclaimed_late,
    )
    age = datetime.now(UTC) - found[0].since if found else timedelta(0)
    records = sum(one.records for one in found)
    return Condition(
        stream.name,
        "reclaimed",
        f"{records:,} records of {len(found):,} slices wait to be reprocessed, the first for {format_duration(age)}"
        if found
        else "none waits to be reprocessed",
        str(limit),
        age > limit,
        pending_reprocessing.build_reprocess_command(stream, found) if found else "no action needed",
    )


CONDITIONS: tuple[Evaluate, ...] = (
    measure_planning,
    measure_retry_planning,
    measure_expired_slices,
    measure_unread_age,
    measure_recorded_losses,
    _measure_breaker,
    _measure_holds,
    _measure_exhausted_slices,
    _measure_stalled_slices,
    _measure_instances,
    _measure_reject_ratio,
    _measure_parked_records,
    _measure_parked_topic,
    _measure_retry_age,
    measure_retention_left,
    measure_open_transaction,
    _measure_publication_age,
    _measure_reclaim_age,
)
DEPENDENCIES: Mapping[Evaluate, Sequence[str]] = {
    measure_planning: (KAFKA,),
    measure_retry_planning: (KAFKA,),
    measure_expired_slices: (KAFKA,),
    _measure_reject_ratio: (LAKE,),
    _measure_parked_records: (LAKE,),
    _measure_parked_topic: (LAKE, KAFKA),
    _measure_retry_age: (KAFKA,),
    measure_retention_left: (KAFKA,),
    measure_open_transaction: (KAFKA,),
    _measure_publication_age: (LAKE,),
    _measure_reclaim_age: (LAKE,),
}
