"""Origins that other systems wrote: the headers of Kafka Connect, Kafka Streams and Spring on their DLQ records."""

# Kafka Connect (`DeadLetterQueueReporter`, with `errors.deadletterqueue.context.headers.enable`) and Kafka Streams
# (`errors.dead.letter.queue.topic.name`, KIP-1034) write topic, partition and offset as text in UTF-8, and give their
# record the timestamp of the original one. Spring (`DeadLetterPublishingRecoverer`) writes the topic as text, the
# partition as 4 bytes, offset and timestamp as 8 bytes, big-endian; its record has a time of its own. With
# `@RetryableTopic` Spring's names have another prefix and the same encodings. All of them append: a record that failed
# again has several headers of a name, and the first one is of the first failure.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from typing import NamedTuple

from highwater.declaration import Stream
from highwater.declaration_parts import TOPIC_NAME
from highwater.envelope import MAX_MILLISECONDS, ORIGIN_TOPIC, Envelope, KafkaHeader, Origin, open_envelope
from highwater.plans import Generation, Loss

# Prefixes of the header names. Numbers are text, and the time is the record's own one:
AS_TEXT = ("__connect.errors.", "__streams.errors.")
# Numbers are big-endian bytes, and the time has a header:
AS_BYTES = ("kafka_dlt-original-", "kafka_original-")
TOPIC, PARTITION, OFFSET, TIMESTAMP = "topic", "partition", "offset", "timestamp"
# The headers by which a system names the topic.
TOPICS = tuple(prefix + TOPIC for prefix in (*AS_TEXT, *AS_BYTES))

NUMBER = "[0-9]{1,19}"
MAX_PARTITION, MAX_OFFSET = 2**31 - 1, 2**63 - 1
# The timestamp of a record as its producer set it; else the broker did when it was appended.
BY_PRODUCER = 0


class NamedOrigin(NamedTuple):
    """The origin that foreign headers name; `timestamp` (ms since 1970) is None where it cannot be known."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None


def parse_foreign_origin(headers: Iterable[KafkaHeader], timestamp: int, timestamp_type: int) -> NamedOrigin | None:
    """The origin that the headers of a record on a foreign topic name; None where they name none.

    If several systems wrote headers, those of the first one count. `highwater.assets.foreign` is its Spark form.

    Args:
        headers: all of the record's.
        timestamp: the record's own one on the foreign topic, in milliseconds since 1970.
        timestamp_type: 0 where a producer set it.
    """
    first: dict[str, bytes] = {}
    for name, value in headers:
        first.setdefault(name, value or b"")
    prefix = next((name.removesuffix(TOPIC) for name in first if name in TOPICS), "")
    if prefix in AS_TEXT:
        partition = _from_text(first.get(prefix + PARTITION), MAX_PARTITION)
        offset = _from_text(first.get(prefix + OFFSET), MAX_OFFSET)
        time: int | None = timestamp if timestamp_type == BY_PRODUCER else None
    else:
        partition = _from_bytes(first.get(prefix + PARTITION), 4)
        offset = _from_bytes(first.get(prefix + OFFSET), 8)
        time = _from_bytes(first.get(prefix + TIMESTAMP), 8)
    topic = _parse_topic(first[prefix + TOPIC]) if prefix else None
    if topic is None or partition is None or offset is None:
        return None
    return NamedOrigin(topic, partition, offset, time if time is not None and 0 <= time <= MAX_MILLISECONDS else None)


def find_publication_time(
    stream: Stream, topic: str, headers: Sequence[KafkaHeader], timestamp: int, timestamp_type: int
) -> int:
    """When a record was first published, in milliseconds since 1970: a copy on a DLQ topic is as old as its original.

    `highwater.assets.origins.build_publication_time` is its Spark form.

    Args:
        stream: its declaration.
        topic: the topic that holds the record; headers count on DLQ topics alone.
        headers: all of the record's.
        timestamp: the record's own one, in milliseconds since 1970.
        timestamp_type: 0 where a producer set it.
    """
    if topic == stream.topic:
        return timestamp
    named: Envelope | NamedOrigin | None = open_envelope(headers, stream.is_origin)
    if topic in stream.foreign_topics and all(name != ORIGIN_TOPIC for name, _ in headers):
        named = parse_foreign_origin(headers, timestamp, timestamp_type)
    return timestamp if named is None or named.timestamp is None else min(timestamp, named.timestamp)


def _parse_topic(value: bytes) -> str | None:
    text = value.decode(errors="replace")
    return text if re.fullmatch(TOPIC_NAME, text) else None


def _from_text(value: bytes | None, most: int) -> int | None:
    text = (value or b"").decode(errors="replace")
    return int(text) if re.fullmatch(NUMBER, text) and int(text) <= most else None


def _from_bytes(value: bytes | None, length: int) -> int | None:
    if value is None or len(value) != length or value[0] > 0x7F:
        return None
    return int.from_bytes(value, "big")


class UnreadSpan(NamedTuple):
    """Offsets of the main topic, from `start` up to `end` (None: all that follow), that a generation did not read.

    `reader` is the later generation whose slices read them; None where none ever does.
    """

    generation: int
    partition: int
    start: int
    end: int | None
    reader: int | None


@dataclass(frozen=True)
class MainLog:
    """The slices of the main topic that read an offset, or will read it, by plans, losses and accepted events.

    An offset that a slice covers counts as read even without a row: compaction removed the record in favour of a newer
    one of its key, or its transaction was aborted.

    Args:
        generations: the main topic's generations, oldest first.
        losses: its recorded holes.
        ends: for each generation but the newest one, by partition, where its plan ended.
    """

    generations: Sequence[Generation]
    losses: Sequence[Loss] = ()
    ends: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def find_open_offset(self, timestamp: int | None, appended: int) -> int | None:
        """The generation that was open at a time; None where that cannot be known.

        Records that were in the topic when it was first planned have the first generation, at any age.

        Args:
            timestamp: the original record's timestamp, in ms since 1970; None if unknown.
            appended: timestamp of the later record on the foreign topic.
        """
        moment = appended if timestamp is None else timestamp
        open_ = [one.number for one in self.generations[:1]]
        open_ += [one.number for one in self.generations[1:] if to_milliseconds(one.opened_at) <= moment]
        return open_[-1] if open_ and (timestamp is not None or len(open_) == 1) else None

    def find_reader(self, generation: int, partition: int, offset: int) -> int | None:
        """The generation whose slices read an offset that was published in a generation; None if none ever does."""
        if partition not in self._collect_partitions():
            return generation
        later = [one for one in self.generations if one.number >= generation]
        for this, following in zip_longest(later, later[1:]):
            if offset < (this.starts.get(partition) or 0) or self._is_lost(this.number, partition, offset):
                return None
            if following is None or offset < self.ends.get(this.number, {}).get(partition, 0):
                return this.number
            if following.topic_id != this.topic_id:
                return None  # the tail of a log that is gone, or the new one before that was accepted
        return None

    def _is_lost(self, generation: int, partition: int, offset: int) -> bool:
        return any(
            (loss.generation, loss.partition) == (generation, partition) and offset in loss.offsets
            for loss in self.losses
        )

    def compute_unread_spans(self) -> list[UnreadSpan]:
        """All offsets that their own generation did not read: what `reader` says, as ranges that do not overlap."""
        return [
            span
            for one in self.generations
            for p in sorted(self._collect_partitions())
            for span in self._compute_partition_spans(one.number, p)
        ]

    def _collect_partitions(self) -> set[int]:
        """The partitions with a record in the ledger: others joined later, at 0."""
        named = {p for one in self.generations for p in one.starts}
        return named | {p for ends in self.ends.values() for p in ends} | {loss.partition for loss in self.losses}

    def _compute_partition_spans(self, generation: int, partition: int) -> Iterator[UnreadSpan]:
        lost = [loss.offsets for loss in self.losses if loss.partition == partition]
        bounds = {0, *(one.starts.get(partition) or 0 for one in self.generations)}
        bounds |= {ends.get(partition, 0) for ends in self.ends.values()}
        bounds |= {bound for offsets in lost for bound in (offsets.start, offsets.end)}
        for start, end in zip_longest(ordered := sorted(bounds), ordered[1:]):
            reader = self.find_reader(generation, partition, start)
            if reader != generation:
                yield UnreadSpan(generation, partition, start, end, reader)


def to_milliseconds(moment: datetime) -> int:
    """A moment in milliseconds since 1970."""
    return int(moment.timestamp() * 1000)


def resolve_origin(stream: Stream, log: MainLog, found: NamedOrigin, appended: int) -> Origin:
    """The identity of a record that other systems sent: an origin of the main topic, or one in the namespace.

    Args:
        stream: its declaration.
        log: offsets that slices of the main topic read.
        found: the origin that the headers name.
        appended: the record's own timestamp on the foreign topic, in milliseconds since 1970.
    """
    generation = log.find_open_offset(found.timestamp, appended) if found.topic == stream.topic else None
    reader = None if generation is None else log.find_reader(generation, found.partition, found.offset)
    if reader is None:
        return Origin(stream.namespace + found.topic, 0, found.partition, found.offset)
    return Origin(found.topic, reader, found.partition, found.offset)
