"""Detects whether an election of an unclean leader replaced records that are planned, by what Kafka holds there now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from highwater.batching import split_by_count
from highwater.divergence import SOUND, Divergence, Fingerprint, PlannedFacts, SeenRecord, compute_digest, has_diverged
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import Message

    from highwater.plans import Planned
    from highwater.resources.kafka import Kafka
    from highwater.resources.topic_state import PartitionState, TopicState

# Markers, aborted and compacted records are passed over: so far back, in offsets, a record is looked for.
MAX_BACK = 4096
_STEP = 16
# A sensor's tick shall end within seconds: longer than this no answer is waited for.
LOOK_SECONDS = 3.0
# Limits for one tick after an election of many leaders: partitions compared together, and their time.
PARTITIONS_PER_LOOK = 100
COMPARE_SECONDS = 15.0


def read_fingerprints(kafka: Kafka, topic: str, ranges: Mapping[int, OffsetRange]) -> dict[int, Fingerprint]:
    """The last record of each range; left out where none can be seen, or Kafka does not answer in time."""
    try:
        found = _read_last_records(kafka, topic, ranges)
    except HighwaterError:
        return {}  # the epoch shows it as well; the next plan has a fingerprint again
    return {p: Fingerprint(seen.offset, seen.digest) for p, seen in found.items()}


def detect_divergence(
    kafka: Kafka, state: TopicState, planned: Planned, *, seconds: float = COMPARE_SECONDS
) -> Divergence:
    """Compare a planned topic with its plan; one that was recreated is another topic, and is not compared."""
    if state.topic_id != planned.generation.topic_id:
        return SOUND
    return find_divergence(kafka, state, planned.recorded, seconds=seconds)


def find_divergence(
    kafka: Kafka, state: TopicState, recorded: Mapping[int, PlannedFacts], *, seconds: float = COMPARE_SECONDS
) -> Divergence:
    """Compare Kafka with the recorded history; costs nothing while no leader changed.

    Args:
        kafka: is read.
        state: the topic as it was seen just now.
        recorded: by partition.
        seconds: no further look begins after so long; the partitions that are left are unsure then.

    Raises:
        ConfigurationError: this user may not read the topic.
    """
    with_new_leader = {p: was for p, was in recorded.items() if has_new_leader(was, state.partitions.get(p))}
    # Partitions with new records come first, since their records wait for the answer.
    ordered = sorted(with_new_leader, key=lambda p: (state.partitions[p].last_stable or 0) <= with_new_leader[p].end)
    deadline = time.monotonic() + seconds
    others: list[int] = []
    diverged: dict[int, int] = {}
    unsure: dict[int, str] = {}
    for looked_at in split_by_count(ordered, PARTITIONS_PER_LOOK):
        some = {p: with_new_leader[p] for p in looked_at}
        try:
            _ensure_time(deadline)
            others += _list_replaced_partitions(kafka, state, some)
        except ConfigurationError:
            raise  # a person must allow or correct something: to try again does not help
        except HighwaterError as error:
            reason = f"a leader was elected since the last plan, and its log could not be compared: {error.problem}"
            unsure.update(dict.fromkeys(some, reason))
    # The searches come last: the partitions that are sound need not wait for them.
    for p in others:
        try:
            diverged[p] = _search_epoch_end(kafka, state, p, with_new_leader[p], deadline)
        except ConfigurationError:
            raise
        except HighwaterError as error:
            unsure[p] = f"other records occupy planned offsets; from where could not be found: {error.problem}"
    return Divergence(diverged, unsure)


def locate_divergence(
    kafka: Kafka, topic: str, partition: int, sound: OffsetRange, marks: Iterable[Fingerprint]
) -> int:
    """The offset at which a log parts from the plan, as older plans show it.

    After two unclean elections, records may exist below the place that epochs show which no plan has seen: such
    records are older than the compared plan. Behind the newest matching mark, none is missed; records that exist and
    were read before come a second time, in the new generation.

    Args:
        kafka: is read.
        topic: the topic.
        partition: one of its partitions.
        sound: the matching part of the log, up to where epochs show that it parts.
        marks: marks of its plans, the newest first.

    Raises:
        DependencyUnavailableError: a record could not be read.
    """
    found = sound.end
    for mark in marks:
        if mark.offset >= sound.end:
            continue
        if mark.offset < sound.start:
            break
        at = {partition: OffsetRange(mark.offset, mark.offset + 1)}
        message = next(kafka.read(topic, at, seconds=LOOK_SECONDS), None)
        if message is None:
            continue  # compaction removed it, which shows nothing
        if _build_seen_record(message).digest == mark.digest:
            return found if found == sound.end else mark.offset + 1
        found = mark.offset
    return found if found == sound.end else sound.start


def _ensure_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise DependencyUnavailableError(
            "the comparison with the plan took too long", remedy="nothing to do: the next one goes on"
        )


def _list_replaced_partitions(
    kafka: Kafka, state: TopicState, with_new_leader: Mapping[int, PlannedFacts]
) -> list[int]:
    """The partitions where other records occupy planned offsets, by the record at the mark and by the last one."""
    marks, wholes = {}, {}
    for p, was in with_new_leader.items():
        seen = state.partitions[p]
        log_start, end = seen.log_start or 0, min(was.end, seen.last_stable or 0)
        wholes[p] = OffsetRange(min(log_start, end), end)
        if was.fingerprint is not None and log_start <= was.fingerprint.offset < end:
            marks[p] = OffsetRange(was.fingerprint.offset, was.fingerprint.offset + 1)
    found: dict[int, list[SeenRecord]] = {}
    for message in kafka.read(state.topic, marks, seconds=LOOK_SECONDS):
        found.setdefault(message.partition() or 0, []).append(_build_seen_record(message))
    for p, last in _read_last_records(kafka, state.topic, wholes).items():
        found.setdefault(p, []).append(last)
    return [p for p, was in with_new_leader.items() if has_diverged(was, found.get(p, ()))]


def has_new_leader(was: PlannedFacts, seen: PartitionState | None) -> bool:
    """Whether a leader was elected since a partition was planned, so that its records may have been replaced."""
    if seen is None or seen.log_start is None or seen.last_stable is None or was.epoch is None:
        return False
    return seen.leader_epoch is not None and seen.leader_epoch != was.epoch and seen.log_start < was.end


def _read_last_records(kafka: Kafka, topic: str, ranges: Mapping[int, OffsetRange]) -> dict[int, SeenRecord]:
    found: dict[int, SeenRecord] = {}
    left, back = {p: offsets for p, offsets in ranges.items() if len(offsets)}, 1
    while left and back <= MAX_BACK:
        windows = {p: OffsetRange(max(offsets.start, offsets.end - back), offsets.end) for p, offsets in left.items()}
        for message in kafka.read(topic, windows, seconds=LOOK_SECONDS):
            found[message.partition() or 0] = _build_seen_record(message)  # in the order of offsets: the last one stays
        left = {p: offsets for p, offsets in left.items() if p not in found and windows[p].start > offsets.start}
        back *= _STEP
    return found


def _build_seen_record(message: Message) -> SeenRecord:
    epoch = message.leader_epoch()
    return SeenRecord(
        offset=message.offset() or 0,
        digest=compute_digest(message.timestamp()[1], message.key(), message.value()),
        epoch=epoch if epoch is not None and epoch >= 0 else None,
    )


def _search_epoch_end(kafka: Kafka, state: TopicState, partition: int, was: PlannedFacts, deadline: float) -> int:
    """The offset after the last record that was written in the recorded epoch or before: a binary search."""
    seen = state.partitions[partition]
    low, high = seen.log_start or 0, min(was.end, seen.last_stable or 0)
    end = high
    while low < high:
        _ensure_time(deadline)
        middle = (low + high) // 2
        first = next(kafka.read(state.topic, {partition: OffsetRange(middle, end)}, seconds=LOOK_SECONDS), None)
        found = None if first is None else _build_seen_record(first)
        if found is None or (found.epoch or 0) > (was.epoch or 0):
            high = middle
        else:
            low = found.offset + 1
    # Batches of old formats carry no epoch; then the record that differs is all that is known.
    return low if low < end or was.fingerprint is None else was.fingerprint.offset
