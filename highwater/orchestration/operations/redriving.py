"""Sending parked records back to the first tier: whole, also those that are parked by reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.assets.dlq_marks import PREFIX, SEPARATOR
from highwater.assets.parked_references import OriginalRecord, read_original
from highwater.batching import split_by_size
from highwater.envelope import Envelope, Place, add_envelope, open_envelope
from highwater.errors import ConfigurationError, RecordTooLargeError, UnbalancedError
from highwater.message_size import SizeLimits, build_too_large_error, measure_message
from highwater.resources.dlq_topics import ensure_dlq_topics
from highwater.resources.producer_records import Record
from highwater.resources.transactions import PublicationMark, Transactions

if TYPE_CHECKING:
    from confluent_kafka import Message

    from highwater.declaration import Stream
    from highwater.resources.dlq_topics import FindVanishedError
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.slices import OffsetRange

# One transaction holds so much at the most: it lasts seconds, and memory is bounded.
RECORDS_PER_TRANSACTION = 1_000
BYTES_PER_TRANSACTION = 16 * 1024 * 1024
# At most this many of the remaining records are named.
NAMED = 10


class _SentBack(NamedTuple):
    name: str
    record: Record
    size: int


@dataclass
class _NotSent:
    """Records that could not be sent back: one too large by name and size, one that raw lacks by name and place."""

    large: list[tuple[str, int]] = field(default_factory=list)
    lost: list[tuple[str, Place]] = field(default_factory=list)

    def raise_for(self, stream: str, topic: str, client: int, bootstrap: str) -> None:
        if self.large:
            error = build_too_large_error([(topic, size) for _, size in self.large], client, bootstrap)
            names = _format_names([f"{name}: {size:,} bytes" for name, size in self.large])
            lost = f"; and raw does not hold {_format_names([name for name, _ in self.lost])}" if self.lost else ""
            raise RecordTooLargeError(
                f"{len(self.large):,} records stay parked, since {topic} does not take them; the others were sent",
                found=f"{names}; the producer sends {client:,} bytes at the most{lost}",
                remedy=f"{error.remedy}; then send them back again. Those of the main topic may be reclaimed instead, "
                f"where the cause is fixed: highwater reclaim {stream}; or discarded: highwater discard-parked "
                f"{stream}",
            )
        if self.lost:
            raise UnbalancedError(
                f"{len(self.lost):,} records that are parked by reference stay parked; the others were sent",
                stored=_format_names([f"{name} at {p.topic}[{p.partition}]@{p.offset}" for name, p in self.lost]),
                found="raw holds nothing there",
                remedy="materialise raw of their slices again, or restore it; what was erased, or is gone for good, is "
                f"discarded: highwater discard-parked {stream}",
            )


def _format_names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def redrive(
    kafka: Kafka,
    lake: Lake,
    stream: Stream,
    wanted: Collection[tuple[int, int]],
    ends: Mapping[int, OffsetRange],
    find_vanished_error: FindVanishedError,
) -> Iterator[int]:
    """Send records back to the first tier, as they are, in transactions; yields how many are sent so far.

    Of two concurrent calls one is fenced and fails. A call that dies is repeated: its records are sent twice, and count
    once.

    Args:
        kafka: the cluster.
        lake: holds the records that are parked by reference.
        stream: its declaration.
        wanted: partition and offset of the records on the parked topic.
        ends: to where it is read.
        find_vanished_error: the error that it is that a DLQ topic is absent; None if it may be created.

    Raises:
        ConfigurationError: the stream has no tier.
        TopicDriftError: a DLQ topic has unsafe settings.
        TopicVanishedError: one is not there any more; it is not created again.
        RecordTooLargeError: the tier does not take some of them, which stay parked; all others were sent.
        UnbalancedError: raw does not hold some that are parked by reference; all others were sent.
        SupersededAttemptError: another one sends the same stream's records back.
        DependencyUnavailableError: Kafka or the lake is unavailable.
    """
    if not stream.tiers:
        raise ConfigurationError(
            f"{stream.name} has no tier to which parked records could be sent back",
            remedy="declare one: tiers=(timedelta(seconds=10),) in the stream's file",
        )
    if not wanted:
        return
    topics, to = ensure_dlq_topics(kafka, stream, find_vanished_error), stream.tier_topics[0]
    size_limits = {topic: shape.max_message_bytes for topic, shape in topics.items()}
    name, sent, stay = f"{PREFIX}redrive{SEPARATOR}{stream.name}", 0, _NotSent()
    with Transactions(kafka, name, stream.parked_topic, most_bytes=min(size_limits.values())) as transactions:
        transactions.mark()
        limits = SizeLimits(size_limits, transactions.most_bytes, transactions.compresses)
        found = _filter_by_size(
            _read_whole_records(kafka, lake, stream, wanted, ends, topics[to].partitions, stay), limits, stay
        )
        for batch in split_by_size(found, lambda one: one.size, RECORDS_PER_TRANSACTION, BYTES_PER_TRANSACTION):
            sent += _send_batch(transactions, batch, stay, sent)
            yield sent
        stay.raise_for(stream.name, to, transactions.most_bytes, kafka.bootstrap)


def _read_whole_records(
    kafka: Kafka,
    lake: Lake,
    stream: Stream,
    wanted: Collection[tuple[int, int]],
    ends: Mapping[int, OffsetRange],
    partitions: int,
    stay: _NotSent,
) -> Iterator[_SentBack]:
    """The records, whole; those that raw lacks stay."""
    for message in kafka.read(stream.parked_topic, ends):
        if (message.partition(), message.offset()) not in wanted:
            continue
        envelope = open_envelope(extract_headers(message))
        assert envelope is not None, "only records with one were chosen"
        value: Any = message.value()
        found: OriginalRecord | None = OriginalRecord(extract_key(message), value, extract_headers(message))
        name = f"{envelope.topic}[{envelope.partition}]@{envelope.offset}"
        if envelope.reference is not None:
            found = read_original(lake, stream, envelope.reference.place)
            if found is None:
                stay.lost.append((name, envelope.reference.place))
        if found is not None:
            yield _build_redrive_record(name, stream.tier_topics[0], envelope, found, partitions)


def _build_redrive_record(
    name: str, topic: str, envelope: Envelope, found: OriginalRecord, partitions: int
) -> _SentBack:
    # One more try, whatever its number of attempts: if it fails again it is parked again.
    headers = add_envelope(replace(envelope, reference=None), found.headers)
    record = Record(topic, found.key, found.value, headers, partition=envelope.partition % partitions)
    return _SentBack(name, record, measure_message(found.key, found.value, headers))


def extract_headers(message: Message) -> list[tuple[str, Any]]:
    """A record's headers."""
    found: Any = message.headers()
    return list(found or [])


def extract_key(message: Message) -> bytes | None:
    """A record's key."""
    found: Any = message.key()
    return found if found is None or isinstance(found, bytes) else str(found).encode()


def _filter_by_size(found: Iterator[_SentBack], limits: SizeLimits, stay: _NotSent) -> Iterator[_SentBack]:
    for one in found:
        if limits.can_send_whole(one.record.topic, one.size):
            yield one
        else:
            stay.large.append((one.name, one.size))


def _send_batch(transactions: Transactions, batch: list[_SentBack], stay: _NotSent, before: int) -> int:
    """Send a batch, without records that are refused for their size; returns how many were sent."""
    while batch:
        try:
            # Nobody goes on from the mark.
            transactions.commit([one.record for one in batch], PublicationMark(1, before + len(batch)))
        except RecordTooLargeError as error:
            refused = {id(record) for record in error.refused}
            stay.large += [(one.name, one.size) for one in batch if id(one.record) in refused]
            batch = [one for one in batch if id(one.record) not in refused]
        else:
            break
    return len(batch)
