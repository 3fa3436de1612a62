"""Reading the records of offset ranges by an assigned consumer: its properties, its waits, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.errors import HighwaterError, OffsetsExpiredError
from highwater.resources.time_limits import limit_wait
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

# A consumer of ours is assigned, never subscribed, and never commits: Spark's commit is the only one (I12).
READER: Mapping[str, Any] = MappingProxyType(
    {
        "group.id": "highwater.reader",  # librdkafka demands one; nothing is ever committed under it
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
    }
)
# The broker holds a fetch at the log's end for 500 ms by default, and the end of a range often is there.
LONGEST_WAIT = "fetch.wait.max.ms"
WAITS: Mapping[str, Any] = MappingProxyType({LONGEST_WAIT: 10})
# A broker 3.6 or 3.7 answers with nothing when a fetch of tiered records takes longer than the wait. So a reader that
# got nothing waits longer.
MAX_WAIT_MS = 5_000


def list_fetch_waits(configured: Mapping[str, str], seconds: float) -> list[tuple[Mapping[str, Any], float]]:
    """The properties of the broker's wait for a fetch, and the seconds without a record until the next ones are tried.

    Args:
        configured: the properties that a person gave; a wait among them is used as it is.
        seconds: how long a reader waits for a record in all.
    """
    if LONGEST_WAIT in configured:
        return [({}, seconds)]
    # A range that ends with a marker ends only after a whole wait, so three of them fit into the patience.
    longest = min(MAX_WAIT_MS, int(1000 * seconds / 3))
    return [(WAITS, seconds / 2), ({LONGEST_WAIT: longest}, seconds)]


def read_records(
    consumer: Any,
    topic: str,
    open_: dict[int, OffsetRange],
    positions: dict[int, int],
    seconds: float,
    translate: Callable[[KafkaError], HighwaterError],
) -> Iterator[Message]:
    """Records of the ranges until all are read, or none came for some time.

    Args:
        consumer: is assigned the ranges.
        topic: the topic.
        open_: the ranges that are not read to their ends, by partition; it follows.
        positions: the next offset of each partition; it follows.
        seconds: how long to wait for a record.
        translate: makes the error for a fault that the broker reports.

    Raises:
        OffsetsExpiredError: a range starts before the log does, or after its end.
        ConfigurationError, DependencyUnavailableError: the broker reports a fault.
        OutOfTimeError: the tick's time is over.
    """
    from confluent_kafka import KafkaError, TopicPartition

    while open_:
        message = consumer.poll(limit_wait(seconds))
        if message is None:
            return
        error = message.error()
        if error and error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - the library's public name
            raise _build_expired_error(message, open_)
        if error and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            continue  # the client asks for a coordinator that a reader without commits has no use for
        if error and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - likewise
            raise translate(error)
        partition = message.partition()
        if not error and partition in open_ and message.offset() in open_[partition]:
            yield message
        at = positions[partition] = message.offset() + (0 if error else 1)
        if partition in open_ and at >= open_[partition].end:
            del open_[partition]
            consumer.incremental_unassign([TopicPartition(topic, partition)])


def _build_expired_error(message: Message, open_: Mapping[int, OffsetRange]) -> OffsetsExpiredError:
    requested = open_.get(message.partition() or 0)
    return OffsetsExpiredError(
        f"topic {message.topic()} partition {message.partition()} does not hold the offsets that were asked for",
        stored=f"{requested}" if requested else None,
        found=str(message.error()),
        remedy="retention deleted them, or the topic was truncated: run highwater status STREAM, then the "
        "accept-loss command that it prints for lost records",
    )
