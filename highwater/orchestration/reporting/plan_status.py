"""The planning status of a stream, and its distance to the end of the topic."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from highwater.alerting import DEPLOYMENT
from highwater.breaker import CLOSED
from highwater.declaration import Stream
from highwater.divergence import SOUND, Divergence
from highwater.errors import KAFKA, LAKE, HighwaterError, TopicAbsentError, TopicVanishedError
from highwater.orchestration.checking.origin_counts import count_parked
from highwater.orchestration.dependencies import ensure_lake_exists
from highwater.orchestration.operations import pending_reprocessing
from highwater.orchestration.operations.accepting_rejects import build_accept_command
from highwater.orchestration.reporting.consumer_lag import read_raw_slices
from highwater.orchestration.reporting.publication_status import find_accepted_vanished_error, measure_publication_lag
from highwater.orchestration.reporting.stalled_work import list_expired_errors
from highwater.orchestration.reporting.status_report import DlqStatus, PartitionStatus, StreamStatus, WaitingWork
from highwater.orchestration.sensing.due_times import read_due_times
from highwater.orchestration.sensing.retries import plan_tier
from highwater.orchestration.sensing.slice_cutting import (
    compute_positions,
    ensure_same_topic,
    select_skipped_partitions,
    select_sure_errors,
)
from highwater.orchestration.sensing.topic_inspection import compare_with_plan
from highwater.orchestration.worker_leases import select_worker_leases
from highwater.plans import Planned
from highwater.resources.deleted_topics import (
    build_vanished_error,
    find_parked_loss,
    find_vanished_error,
    read_state,
    read_state_if_exists,
)
from highwater.resources.dependency_guards import build_open_error, describe, is_cooling_down

if TYPE_CHECKING:
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState


def read_stream_status(
    ledger: Ledger,
    kafka: Kafka,
    stream: Stream,
    counts: Mapping[tuple[str, str], int],
    lake: Lake | None = None,
) -> StreamStatus:
    """Look at a stream; a topic that cannot be looked at is an error in the status, not of the look.

    The lake, if it is to be looked at, is asked beside Kafka: each takes its time alone.

    Raises:
        DependencyUnavailableError: the ledger is unavailable.
    """
    if lake is None:
        return _read_stream_status(ledger, kafka, stream, counts)
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(_load_waiting_work, ledger, lake, stream)
        found = _read_stream_status(ledger, kafka, stream, counts)
        # A broker that is unavailable is waited for once.
        accepted = _find_accepted_topic_error(ledger, kafka, lake, stream) if found.partitions else None
        expired = _list_expired_errors(ledger, kafka, lake, stream) if found.partitions else []
        waiting_records = waiting.result()
        dlq = [_with_loss(kafka, stream, one, waiting_records) for one in found.dlq]
        return replace(found, errors=[*found.errors, *expired], waiting=waiting_records, accepted=accepted, dlq=dlq)


def _list_expired_errors(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> list[HighwaterError]:
    """The reasons why planned slices cannot be read any more; empty where Kafka does not answer."""
    try:
        return [*list_expired_errors(ledger, kafka, stream, read_raw_slices(ledger, lake, stream))]
    except HighwaterError as error:
        return [error]


def _with_loss(kafka: Kafka, stream: Stream, one: DlqStatus, waiting_records: WaitingWork | Exception) -> DlqStatus:
    """The status of a DLQ topic, with the error that the parked topic lost what waits there."""
    if (
        one.topic != stream.parked_topic
        or one.error is not None
        or one.waiting is None
        or isinstance(waiting_records, Exception)
    ):
        return one
    try:
        return replace(one, error=find_parked_loss(kafka, stream, waiting_records.parked))
    except HighwaterError as error:
        return replace(one, error=error)


def _find_accepted_topic_error(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> HighwaterError | None:
    """The reason why accepted events cannot be sent to their topic, or it cannot be looked at.

    One request to Kafka where the topic is there, and none before anything was sent to it.
    """
    if stream.publishes is None:
        return None
    topic = stream.publishes.topic
    try:
        if not ledger.publications.read_for_slices([topic]):
            return None
        with suppress(TopicAbsentError):
            kafka.read_description(topic)
            return None
        if read_state_if_exists(kafka, topic) is not None:
            return None
        return find_accepted_vanished_error(ledger, lake, stream, topic)
    except HighwaterError as error:
        return error


def _load_waiting_work(ledger: Ledger, lake: Lake, stream: Stream) -> WaitingWork | Exception:
    row = ledger.breakers.read_dependency(LAKE)
    if is_cooling_down(row, datetime.now(UTC)):
        return build_open_error(row)  # storage that is unavailable is not waited for
    try:
        ensure_lake_exists(ledger, lake)
        found = pending_reprocessing.list_pending_slices(ledger, lake, stream)
        publication = measure_publication_lag(ledger, lake, stream)
        parked = count_parked(ledger, lake, stream, published=True)
        return WaitingWork(
            publication, found, pending_reprocessing.build_reprocess_command(stream, found) if found else "", parked
        )
    except Exception as error:  # noqa: BLE001 - what one table holds must not silence the rest of the status
        return error


def _read_stream_status(
    ledger: Ledger, kafka: Kafka, stream: Stream, counts: Mapping[tuple[str, str], int]
) -> StreamStatus:
    found = read_topic_status(kafka, stream, ledger.topics.read_planned_topic(stream.name, stream.topic))
    refused = ledger.breakers.list_refused(stream.name)
    alerts = [one for one in ledger.alerts.read_open().values() if one.ended is None]
    return replace(
        found,
        slices=sum(count for (name, _), count in counts.items() if name == stream.name),
        alerts=[one for one in alerts if one.stream == stream.name],
        deployment_alerts=[one for one in alerts if one.stream == DEPLOYMENT],
        breaker=ledger.breakers.read_circuit(stream.name),
        refused=refused,
        accepted_reasons=[*ledger.breakers.read_accepted_reasons(stream.name).values()],
        accepting=build_accept_command(ledger, stream, refused),
        dependencies=_describe_dependencies(ledger, stream),
        holds=ledger.holds.read_open(stream.name),
        exhausted_slices=ledger.exhausted_slices.read_open(stream.name),
        instances=ledger.instances.list_concurrent(stream.name, datetime.now(UTC)),
        workers=_load_workers(ledger, stream),
        measured_at=ledger.alerts.read_watch_times().get(stream.name),
        faults=[one for one in ledger.sensor_faults.list_all() if one.stream == stream.name],
        paused=ledger.paused.read_parts_by_stream(stream.name).get(stream.name, {}),
        # A broker that is unavailable is waited for once.
        dlq=_read_dlq_status(ledger, kafka, stream) if found.partitions else [],
    )


def read_topic_status(kafka: Kafka, stream: Stream, planned: Planned | None) -> StreamStatus:
    """Look at the stream's topic alone, or at the tier that it is on; what goes wrong is an error in the status."""
    generation = planned.generation if planned else None
    partitions: list[PartitionStatus] = []
    errors: list[HighwaterError] = []
    try:
        state, divergence = _compare_topic_with_plan(kafka, stream, planned)
        partitions = _build_partition_statuses(stream, planned, state, divergence)
        errors = _list_topic_errors(stream, planned, state, divergence)
    except TopicAbsentError as error:
        errors.append(build_vanished_error(stream, planned, error) if planned else error)
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


def _compare_topic_with_plan(kafka: Kafka, stream: Stream, planned: Planned | None) -> tuple[TopicState, Divergence]:
    try:
        state = kafka.read_topic_state(stream.topic)
    except TopicAbsentError:
        # A planned topic is called gone after two looks.
        if planned is None or (again := read_state_if_exists(kafka, stream.topic)) is None:
            raise
        state = again
    return (state, SOUND) if planned is None else compare_with_plan(kafka, stream, planned, state)


def _load_workers(ledger: Ledger, stream: Stream) -> dict[str, datetime]:
    return select_worker_leases(ledger.read_leases(), stream.name)


def _describe_dependencies(ledger: Ledger, stream: Stream) -> list[str]:
    names = {KAFKA, LAKE, *([stream.lookup.dependency] if stream.lookup else [])}
    return [describe(one) for one in ledger.breakers.list_dependencies() if one.name in names and one.state != CLOSED]


def _read_dlq_status(ledger: Ledger, kafka: Kafka, stream: Stream) -> list[DlqStatus]:
    paused = ledger.paused.read_for_stream(stream.name)
    tiers = [
        replace(_read_tier_status(ledger, kafka, stream, topic), pause=paused.get(topic)) for topic in stream.delays
    ]
    return [*tiers, _read_parked_status(ledger, kafka, stream)]


def _read_tier_status(ledger: Ledger, kafka: Kafka, stream: Stream, topic: str) -> DlqStatus:
    try:
        tick = plan_tier(ledger, kafka, stream, topic, datetime.now(UTC), dry_run=True)
    except TopicAbsentError:
        return DlqStatus(topic, error=find_vanished_error(ledger, stream, topic))
    except HighwaterError as error:
        return DlqStatus(topic, error=error)
    due = sum(slice_.offsets for slice_ in tick.slices)
    # This dry run cuts all due offsets; later ones are not due.
    later = sum(max(0, (seen.last_stable or 0) - tick.ends.get(p, 0)) for p, seen in tick.state.partitions.items())
    stopped = next(iter(tick.errors.values()), None)
    return DlqStatus(topic, due + later, due, stopped, times=read_due_times(ledger, kafka, stream, topic, tick))


def _read_parked_status(ledger: Ledger, kafka: Kafka, stream: Stream) -> DlqStatus:
    try:
        state = read_state(ledger, kafka, stream, stream.parked_topic)
    except TopicVanishedError as error:
        return DlqStatus(stream.parked_topic, error=error)
    except TopicAbsentError:
        return DlqStatus(stream.parked_topic)
    except HighwaterError as error:
        return DlqStatus(stream.parked_topic, error=error)
    held = sum((seen.last_stable or 0) - (seen.log_start or 0) for seen in state.partitions.values())
    return DlqStatus(stream.parked_topic, held)


def _build_partition_statuses(
    stream: Stream, planned: Planned | None, state: TopicState, divergence: Divergence
) -> list[PartitionStatus]:
    """The partitions as they are; those of another topic under the same name have no planned ends."""
    same = planned if planned is not None and planned.generation.topic_id == state.topic_id else None
    ends = compute_positions(same, state) if same else {}
    trouble: dict[int, str] = {}
    if same:
        trouble = {p: error.problem for p, error in select_sure_errors(stream, same, state, divergence).items()}
        trouble |= {**divergence.unsure, **select_skipped_partitions(same, state)}
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


def _list_topic_errors(
    stream: Stream, planned: Planned | None, state: TopicState, divergence: Divergence
) -> list[HighwaterError]:
    if planned is None:
        return []
    try:
        ensure_same_topic(stream, planned, state)
    except HighwaterError as error:
        return [error]
    return list(select_sure_errors(stream, planned, state, divergence).values())
