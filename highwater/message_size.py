"""The size of a record against its topic's limit, and references that leave parts out: pure functions."""

# A broker holds a whole batch against the topic's `max.message.bytes`, as it comes, so after compression. librdkafka
# holds a record against its `message.max.bytes` before compression, with the largest framing there is
# (`rd_kafka_msg_max_wire_size`). One number serves for both: a record alone in its batch, with that framing.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from highwater.envelope import KEY, MAX_BYTES, OWN_HEADERS, VALUE, KafkaHeader
from highwater.errors import RecordTooLargeError

# The head of a batch, the framing of a record and of each of its headers, at the most (magic 2: varints of 5 or 10
# bytes, two lengths a header).
BATCH, RECORD, HEADER = 61, 36, 10
# In this order: a value is seldom needed to find a record again, the key nearly always.
_CHOICES: tuple[tuple[str, ...], ...] = ((VALUE,), (VALUE, OWN_HEADERS), (VALUE, OWN_HEADERS, KEY))


def measure_message(key: bytes | None, value: bytes | None, headers: Iterable[KafkaHeader]) -> int:
    """The size of a record alone in its batch, not compressed: exact, or up to some 10 bytes a header too much."""
    return BATCH + RECORD + len(key or b"") + len(value or b"") + measure_headers(headers)


def measure_headers(headers: Iterable[KafkaHeader]) -> int:
    """The bytes that headers add to the size of a record."""
    return sum(HEADER + len(name.encode()) + len(content or b"") for name, content in headers)


@dataclass(frozen=True)
class SizeLimits:
    """The size limits of topics and the producer.

    Args:
        topics: `max.message.bytes` of each topic.
        client: `message.max.bytes` of the producer.
        compresses: whether the producer compresses: then only the broker knows whether a record fits.
    """

    topics: Mapping[str, int]
    client: int
    compresses: bool = False

    @property
    def everywhere(self) -> int:
        """The largest size that every topic admits."""
        return self.client if self.compresses else min(self.client, *self.topics.values())

    def can_send_whole(self, topic: str, size: int) -> bool:
        """Whether a record of this size is to be sent to a topic whole; one that is compressed may be refused yet."""
        return size <= self.client and (self.compresses or size <= self.topics[topic])

    def select_left_out(
        self, topic: str, key: bytes | None, own: Sequence[KafkaHeader], envelope: Sequence[KafkaHeader]
    ) -> tuple[str, ...]:
        """The fewest parts of a record to leave out so that the rest of it surely fits.

        Args:
            topic: where to.
            key: the record's.
            own: its own headers.
            envelope: the headers of a reference that leaves out everything: no other envelope is longer.

        Raises:
            RecordTooLargeError: the topic does not even take the envelope.
        """
        most = min(self.client, self.topics[topic])
        for parts in _CHOICES:
            headers = envelope if OWN_HEADERS in parts else [*own, *envelope]
            if measure_message(None if KEY in parts else key, None, headers) <= most:
                return parts
        raise build_too_large_error(
            [(topic, measure_message(None, None, envelope))], self.client, size_limits=self.topics
        )


def format_config_command(bootstrap: str, topic: str, setting: str) -> str:
    """The command that sets something of a topic."""
    return (
        f"kafka-configs --bootstrap-server {bootstrap} --alter --entity-type topics --entity-name {topic} "
        f"--add-config {setting}"
    )


def build_too_large_error(
    sizes: Iterable[tuple[str, int]],
    client: int,
    bootstrap: str = "BROKERS",
    size_limits: Mapping[str, int] | None = None,
) -> RecordTooLargeError:
    """The error of records that are not taken, with what would let them through.

    Args:
        sizes: topic and size of each record.
        client: `message.max.bytes` of the producer.
        bootstrap: for the command.
        size_limits: `max.message.bytes` of the topics, where it is known: a topic with enough of it gets no command.
    """
    given = [*sizes]
    largest = {topic: max(size for other, size in given if other == topic) for topic, _ in given}
    sizes_text = ", ".join(f"{topic}: {size:,} bytes" for topic, size in sorted(largest.items()))
    small = {topic: size for topic, size in sorted(largest.items()) if size > (size_limits or {}).get(topic, 0)}
    fixes = [
        format_config_command(bootstrap, topic, f"max.message.bytes={max(size, MAX_BYTES)}")
        for topic, size in small.items()
    ]
    if (most := max(largest.values(), default=0)) > client:
        fixes.append(f"raise message.max.bytes in HIGHWATER_KAFKA_CONFIG from {client} to {most}")
    return RecordTooLargeError(
        f"{len(given):,} records are too large for their topic" if len(given) > 1 else "a record is too large",
        found=f"with key and headers at the most {sizes_text}; the producer sends {client:,} at the most",
        remedy="; ".join(fixes),
    )
