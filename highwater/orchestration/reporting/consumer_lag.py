"""Records of a topic that are not in raw, planned or not: how old the oldest is, which expired, which are held back."""

# Retention endangers a planned slice that is not read as much as offsets without a plan.

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from highwater.errors import HighwaterError
from highwater.orchestration.dependencies import build_lake_guard, ensure_lake_exists
from highwater.orchestration.sensing.slice_cutting import compute_positions
from highwater.plans import subtract_losses
from highwater.resources.dependency_guards import guard_dependencies
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import Message

    from highwater.declaration import Stream
    from highwater.plans import Planned
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState
    from highwater.slices import Slice

# A record is read from this many partitions to know its age: those where it is the oldest.
PARTITIONS_ASKED = 32
# Ages by which the oldest of more partitions are reported, from a second to half a century, in steps of a tenth.
AGES = [timedelta(seconds=1.1**n) for n in range(224)]
READ_SECONDS = 5.0
# At most this many of the oldest slices outside raw are looked at: 100,000 rows of the ledger would take seconds.
SLICES_ASKED = 1_000


@dataclass(frozen=True)
class HeldBackRecords:
    """The records that an open transaction holds back in a partition.

    Args:
        offset: offset of the first record of the transaction.
        offsets: from there to the high watermark.
        age: age of that record; None if it could not be read.
    """

    offset: int
    offsets: int
    age: timedelta | None


@dataclass(frozen=True)
class RecordAges:
    """The ages of the oldest unread records.

    Args:
        by_partition: the known ages. A partition whose lag is only transaction markers has none.
        sure: whether all partitions and the lake could be read; otherwise the ages are lower bounds. If more than
            `PARTITIONS_ASKED` partitions lag, only those with the oldest unread records were read.
        waiting: the oldest slices that are planned and not in raw.
        starts: for each partition that answered, where the part outside raw begins.
        held_back: records held back by open transactions, which are unread too.
        expired: unread offsets that retention deleted, and that are not recorded as lost.
    """

    by_partition: Mapping[int, timedelta]
    sure: bool
    waiting: Sequence[str] = ()
    starts: Mapping[int, int] = field(default_factory=dict)
    held_back: Mapping[int, HeldBackRecords] = field(default_factory=dict)
    expired: Mapping[int, OffsetRange] = field(default_factory=dict)

    @property
    def oldest(self) -> timedelta | None:
        """The greatest of them; None where there is none."""
        return max(self.by_partition.values(), default=None)


def read_raw_slices(ledger: Ledger, lake: Lake, stream: Stream) -> set[str] | None:
    """The slices that are in raw; None if the lake cannot be asked now."""
    try:
        with guard_dependencies(build_lake_guard(ledger, lake, stream)):
            ensure_lake_exists(ledger, lake)
            return lake.list_slice_keys(stream.name, "raw")
    except HighwaterError:
        return None


def measure_unread_ages(
    ledger: Ledger, kafka: Kafka, stream: Stream, topic: str, read: Collection[str] | None
) -> RecordAges:
    """The ages of a topic's records that are not in raw.

    Args:
        ledger: the plans.
        kafka: is looked at.
        stream: the stream.
        topic: its main topic, or one whose records are retried.
        read: the slices in raw. If that is not known, None: then those are unread that no attempt was made at.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyUnavailableError: Kafka or the ledger is unavailable.
    """
    state, planned = kafka.read_topic_state(topic), ledger.topics.read_planned_topic(stream.name, topic)
    # Planned ends of another topic under the same name say nothing of this one.
    same = planned if planned is not None and planned.generation.topic_id == state.topic_id else None
    unread, last = load_unread_slices(ledger, same, read) if same else ([], None)
    begins = _compute_unread_starts(state, same, unread, last)
    # Records that retention deleted cannot be read any more.
    starts = {p: max(start, state.partitions[p].log_start or 0) for p, start in begins.items()}
    waiting = {
        p: OffsetRange(start, seen.last_stable)
        for p, seen in state.partitions.items()
        if (start := starts.get(p)) is not None and seen.last_stable is not None and start < seen.last_stable
    }
    sure = read is not None and all(seen.known for seen in state.partitions.values())
    found = _measure_ages(kafka, state, waiting, [slice_.key for slice_ in unread], starts, sure=sure)
    held_back = _measure_held_back(kafka, state)
    known = {p: held.age for p, held in held_back.items() if held.age is not None}
    expired = {p: OffsetRange(begin, starts[p]) for p, begin in begins.items() if same and begin < starts[p]}
    return replace(
        found,
        by_partition={
            **found.by_partition,
            **{p: max(age, found.by_partition.get(p, age)) for p, age in known.items()},
        },
        sure=found.sure and len(known) == len(held_back),
        held_back=held_back,
        expired=expired,
    )


def _measure_held_back(kafka: Kafka, state: TopicState) -> dict[int, HeldBackRecords]:
    """The records that open transactions hold back, read by one consumer: the first is at the last stable offset."""
    held = {p: seen for p, seen in state.partitions.items() if seen.last_stable is not None and seen.held_back}
    firsts = {p: OffsetRange(seen.last_stable or 0, (seen.last_stable or 0) + 1) for p, seen in held.items()}
    ages: dict[int | None, timedelta] = {}
    with suppress(HighwaterError):
        for message in kafka.read(state.topic, firsts, seconds=READ_SECONDS, committed=False) if firsts else ():
            if (age := compute_age(message)) is not None:
                ages[message.partition()] = age
    return {p: HeldBackRecords(seen.last_stable or 0, seen.held_back, ages.get(p)) for p, seen in held.items()}


def load_unread_slices(
    ledger: Ledger, planned: Planned, read: Collection[str] | None
) -> tuple[list[Slice], Slice | None]:
    """The oldest slices of a topic that are not in raw, without recorded losses.

    And the last that was looked at, if there are more.
    """
    topic = planned.generation
    tried = ledger.read_attempts(topic.stream, topic.topic, topic.topic_id)
    # No attempt commits before the ledger gave it a number.
    keys = [key for key, number in tried.items() if (not number if read is None else key not in read)]
    losses = ledger.list_losses(topic.stream, topic.topic) if keys else []
    looked_at = ledger.get(keys[:SLICES_ASKED])
    left = [subtract_losses(slice_, losses) for slice_ in looked_at]
    return [slice_ for slice_ in left if slice_.offsets], looked_at[-1] if len(keys) > SLICES_ASKED else None


def _compute_unread_starts(
    state: TopicState, planned: Planned | None, unread: Sequence[Slice], last: Slice | None
) -> dict[int, int]:
    """For each partition where the first of these slices begins that has some of it; else where the plan ends."""
    ends = compute_positions(planned, state) if planned else {}
    if last is not None:  # nothing is known of a partition after it
        ends |= {p: offsets.end for p, offsets in last.ranges.items()}
    first: dict[int, int] = {}
    for slice_ in unread:
        for partition, offsets in slice_.ranges.items():
            if len(offsets):
                first[partition] = min(first.get(partition, offsets.start), offsets.start)
    known = {p: seen for p, seen in state.partitions.items() if seen.known}
    return {p: first.get(p, ends.get(p, seen.log_start or 0)) for p, seen in known.items()}


def _measure_ages(
    kafka: Kafka,
    state: TopicState,
    waiting: Mapping[int, OffsetRange],
    slices: Sequence[str],
    starts: Mapping[int, int],
    *,
    sure: bool,
) -> RecordAges:
    """The age of the first record of each range; of very many those of the oldest."""
    partitions = list(waiting) if len(waiting) <= PARTITIONS_ASKED else _list_oldest_partitions(kafka, state, waiting)
    found = {}
    for partition in partitions:
        try:
            first = next(iter(kafka.read(state.topic, {partition: waiting[partition]}, seconds=READ_SECONDS)), None)
        except HighwaterError:
            sure = False
        else:
            age = None if first is None else compute_age(first)
            found.update({} if age is None else {partition: age})
            sure &= first is None or age is not None
    # One with markers alone may have taken the place of one with a record.
    sure &= len(partitions) == len(waiting) or len(found) == len(partitions)
    return RecordAges(found, sure, slices, starts)


def _list_oldest_partitions(kafka: Kafka, state: TopicState, waiting: Mapping[int, OffsetRange]) -> list[int]:
    """At most this many partitions, among them that of the oldest record; of several as old, to a tenth, some.

    The broker is asked nine times at the most where each partition was at some time. A record with a producer's wrong
    clock
    may make later ones look younger, but they are safe for as long: retention deletes whole segments from the first one
    on, each by its latest timestamp.
    """
    now = time.time_ns() // 1_000_000

    @cache
    def list_older_partitions(age: timedelta) -> list[int]:
        at = kafka.read_offsets_at(state.topic, max(now - age // timedelta(milliseconds=1), 0), state)
        return [p for p, unread in waiting.items() if p not in at or unread.start < at[p]]

    first = bisect_left(AGES, x=True, key=lambda age: len(list_older_partitions(age)) <= PARTITIONS_ASKED)
    few = list_older_partitions(AGES[first]) if first < len(AGES) else []
    many = list_older_partitions(AGES[first - 1]) if first else [*waiting]
    return [*dict.fromkeys([*few, *many])][:PARTITIONS_ASKED]


def compute_age(message: Message) -> timedelta | None:
    """The age of a record's timestamp; 0 for one in the future, which a producer's clock may name.

    None for a record without a timestamp, which Kafka reports as -1.
    """
    from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

    kind, timestamp_ms = message.timestamp()
    if kind == TIMESTAMP_NOT_AVAILABLE:
        return None
    return timedelta(milliseconds=max(time.time_ns() // 1_000_000 - max(timestamp_ms, 0), 0))
