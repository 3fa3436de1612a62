"""Rejected records as other systems write them, and the generations that they name."""

from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta

from highwater.declaration import Foreign
from highwater.envelope import Envelope, add_envelope
from highwater.foreign import MainLog, NamedOrigin
from highwater.plans import Generation, Loss
from highwater.slices import OffsetRange

DELAY = timedelta(minutes=5)
NOW = datetime(2026, 3, 1, tzinfo=UTC)
MS = int(NOW.timestamp() * 1000)


Headers = list[tuple[str, bytes | None]]


def connect(topic: str, partition: int, offset: int, **more: bytes) -> Headers:
    """What Kafka Connect's reporter adds, in its order."""
    reported = {
        "topic": topic.encode(),
        "partition": str(partition).encode(),
        "offset": str(offset).encode(),
        "connector.name": b"sink",
        "task.id": b"0",
        "stage": b"TASK_PUT",
        "exception.stacktrace": b"java.lang.RuntimeException\n\tat x",
        **more,
    }
    return [(f"__connect.errors.{name}", value) for name, value in reported.items()]


def streams(topic: str | None, partition: int, offset: int) -> Headers:
    """What the exception handlers of Kafka Streams add, in their order."""
    reported = {
        "exception": b"org.apache.kafka.common.errors.SerializationException: x",
        "message": None,
        "stacktrace": b"org.apache.kafka.common.errors.SerializationException: x\n\tat y",
        "topic": None if topic is None else topic.encode(),
        "partition": str(partition).encode(),
        "offset": str(offset).encode(),
    }
    return [(f"__streams.errors.{name}", value) for name, value in reported.items()]


def retryable(topic: str, partition: int, offset: int, timestamp: int = MS) -> Headers:
    """What Spring adds on the topics of `@RetryableTopic`: another prefix, and the attempts."""
    theirs = spring(topic, partition, offset, timestamp)
    renamed: Headers = [(name.replace("kafka_dlt-original-", "kafka_original-"), value) for name, value in theirs]
    return [*renamed, ("retry_topic-attempts", struct.pack(">i", 2)), ("kafka_exception-fqcn", b"java.lang.X")]


def spring(topic: str, partition: int, offset: int, timestamp: int = MS) -> Headers:
    """What Spring's recoverer adds: an int of 4 bytes, longs of 8, the highest byte first."""
    reported = {
        "topic": topic.encode(),
        "partition": struct.pack(">i", partition),
        "offset": struct.pack(">q", offset),
        "timestamp": struct.pack(">q", timestamp),
        "timestamp-type": b"CreateTime",
    }
    return [(f"kafka_dlt-original-{name}", value) for name, value in reported.items()]


def without(headers: Headers, part: str) -> Headers:
    return [header for header in headers if not header[0].endswith(part)]


def changed(headers: Headers, part: str, value: bytes | None) -> Headers:
    return [(name, value if name.endswith(part) else old) for name, old in headers]


TRACE: Headers = [("trace", b"t1"), ("trace", None)]
BIG = 2**40 + 5
# Headers, the type of the record's timestamp (0: its producer's), and what they name; the record's time is 77.
SOUND: dict[str, tuple[Headers, int, NamedOrigin]] = {
    "connect": (TRACE + connect("orders", 2, BIG), 0, NamedOrigin("orders", 2, BIG, 77)),
    "connect, and the broker's clock": (connect("orders", 2, 7), 1, NamedOrigin("orders", 2, 7, None)),
    "connect, after a second failure": (
        connect("orders", 2, 7) + connect("errors", 0, 1),
        0,
        NamedOrigin("orders", 2, 7, 77),
    ),
    "spring": (TRACE + spring("orders", 258, BIG), 0, NamedOrigin("orders", 258, BIG, MS)),
    "spring, after a second failure": (
        spring("o.r", 1, 7, 5) + spring("o.r-retry", 0, 1),
        0,
        NamedOrigin("o.r", 1, 7, 5),
    ),
    "spring, without a timestamp": (without(spring("orders", 1, 7), "timestamp"), 0, NamedOrigin("orders", 1, 7, None)),
    "spring, of a record without a time": (spring("orders", 1, 7, -1), 0, NamedOrigin("orders", 1, 7, None)),
    "spring, of a time that no table holds": (spring("orders", 1, 7, 2**62), 1, NamedOrigin("orders", 1, 7, None)),
    "spring, then connect": (spring("orders", 1, 7) + connect("orders.DLT", 0, 3), 0, NamedOrigin("orders", 1, 7, MS)),
    "connect, then spring": (connect("orders", 1, 7) + spring("errors", 0, 3), 0, NamedOrigin("orders", 1, 7, 77)),
    "streams": (TRACE + streams("orders", 2, BIG), 0, NamedOrigin("orders", 2, BIG, 77)),
    "streams, and the broker's clock": (streams("orders", 2, 7), 1, NamedOrigin("orders", 2, 7, None)),
    "streams, of a repartition topic": (
        streams("app-KSTREAM-AGGREGATE-0000000003-repartition", 0, 1),
        0,
        NamedOrigin("app-KSTREAM-AGGREGATE-0000000003-repartition", 0, 1, 77),
    ),
    "streams, then spring": (streams("orders", 1, 7) + spring("errors", 0, 3), 0, NamedOrigin("orders", 1, 7, 77)),
    "retryable": (TRACE + retryable("orders", 258, BIG), 0, NamedOrigin("orders", 258, BIG, MS)),
    "retryable, without a timestamp": (
        without(retryable("orders", 1, 7), "timestamp"),
        0,
        NamedOrigin("orders", 1, 7, None),
    ),
    "retryable, then spring": (retryable("orders", 1, 7, 5) + spring("o-dlt", 0, 3), 0, NamedOrigin("orders", 1, 7, 5)),
    "spring, then retryable": (spring("orders", 1, 7, 5) + retryable("o.DLT", 0, 3), 0, NamedOrigin("orders", 1, 7, 5)),
    "connect, then retryable": (
        connect("orders", 1, 7) + retryable("errors", 0, 3),
        0,
        NamedOrigin("orders", 1, 7, 77),
    ),
    "the greatest numbers": (spring("o", 2**31 - 1, 2**63 - 1), 0, NamedOrigin("o", 2**31 - 1, 2**63 - 1, MS)),
}


BAD: dict[str, Headers] = {
    "nothing": [],
    "no headers of theirs": TRACE,
    "connect without a record": connect("", -1, -1),
    "connect without an offset": without(connect("orders", 0, 1), "offset"),
    "connect with a null": changed(connect("orders", 0, 1), "partition", None),
    "connect with bytes": changed(connect("orders", 0, 1), "offset", struct.pack(">q", 1)),
    "connect, garbled": changed(connect("orders", 0, 1), "offset", b" 1"),
    "connect, huge": changed(connect("orders", 0, 1), "offset", b"9" * 40),
    "connect, beyond a long": changed(connect("orders", 0, 1), "offset", str(2**63).encode()),
    "connect, partition beyond an int": connect("orders", 2**31, 1),
    "a topic that is none": connect("orders' OR 1=1", 0, 1),
    "a topic and a line": connect("orders\n", 0, 1),
    "a topic that is not UTF-8": changed(connect("orders", 0, 1), "topic", b"\xff\xfe"),
    "a topic of 250 letters": connect("o" * 250, 0, 1),
    "a null topic": changed(connect("orders", 0, 1), "topic", None),
    "spring with text": changed(spring("orders", 0, 1), "offset", b"1"),
    "spring, below 0": spring("orders", -1, 1),
    "spring, offset below 0": spring("orders", 0, -1),
    "spring, a long for an int": changed(spring("orders", 0, 1), "partition", struct.pack(">q", 0)),
    "spring, huge": changed(spring("orders", 0, 1), "offset", b"\x01" * 40),
    "spring, empty": changed(spring("orders", 0, 1), "partition", b""),
    "spring without a partition": without(spring("orders", 0, 1), "partition"),
    "streams, of a punctuation": streams(None, -1, -1),
    "streams with bytes": changed(streams("orders", 0, 1), "offset", struct.pack(">q", 1)),
    "streams without an offset": without(streams("orders", 0, 1), "offset"),
    "retryable with text": changed(retryable("orders", 0, 1), "partition", b"0"),
    "retryable, and the partition of the other family": [
        *without(retryable("orders", 0, 1), "partition"),
        ("kafka_dlt-original-partition", struct.pack(">i", 0)),
    ],
    "a bad first one": connect("", -1, -1) + spring("orders", 0, 1),
}


def generation(number: int, opened: int = 0, topic_id: str = "a", **starts: int | None) -> Generation:
    at = NOW + timedelta(hours=opened)
    return Generation("orders", "orders", topic_id, number, {int(p[1:]): s for p, s in starts.items()}, at)


def lost(number: int, partition: int, start: int, end: int) -> Loss:
    return Loss("orders", "orders", number, partition, OffsetRange(start, end), "expired", "ann", NOW)


HOUR = 3_600_000
ONE = MainLog([generation(0, p0=10, p1=0, p2=None)], [lost(0, 1, 20, 30)])
# Cut off at 40 after 50 was planned: a new generation of the same topic. Then it was recreated.
THREE = MainLog(
    [generation(0, p0=0, p1=0), generation(1, 10, p0=50, p1=40), generation(2, 20, "b", p0=0, p1=0)],
    [lost(0, 0, 5, 6)],
    {0: {0: 50, 1: 50}, 1: {0: 80, 1: 45}},
)


def enveloped(ms: int = 5, topic: str = "orders", own: Headers | None = None) -> Headers:
    """The headers of our own copy of a record that was published at a moment."""
    found = Envelope(topic, 0, 0, 7, ms, 1, "unresolved", "why", "orders@0000000", NOW)
    return add_envelope(found, own or [])


THEIRS = Foreign("orders.DLT", DELAY)
# Topic, headers and the type of the record's timestamp, which is 77; and when its original was published.
PUBLISHED: dict[str, tuple[str, Headers, int, int]] = {
    "a record of the main topic": ("orders", enveloped(), 0, 77),
    "a copy": ("orders.dlq.1", enveloped(), 0, 5),
    "a copy by the broker's clock": ("orders.dlq.1", enveloped(), 1, 5),
    "a copy that is older than its envelope says": ("orders.dlq.1", enveloped(99), 0, 77),
    "a copy with headers of another system": ("orders.dlq.1", enveloped(50, own=spring("o", 0, 1, 5)), 0, 50),
    "another stream's copy": ("orders.dlq.1", enveloped(topic="payments"), 0, 77),
    "no copy": ("orders.dlq.1", TRACE, 0, 77),
    "spring": (THEIRS.topic, spring("orders", 0, 1, 5), 0, 5),
    "spring, without an offset": (THEIRS.topic, without(spring("orders", 0, 1, 5), "offset"), 0, 77),
    "spring, without a timestamp": (THEIRS.topic, without(spring("orders", 0, 1), "timestamp"), 0, 77),
    "connect, and the broker's clock": (THEIRS.topic, connect("orders", 0, 1), 1, 77),
    "a copy on their topic": (THEIRS.topic, enveloped(own=spring("orders", 0, 1, 3)), 0, 5),
    "a bad copy on their topic": (THEIRS.topic, enveloped(topic="payments", own=spring("orders", 0, 1, 3)), 0, 77),
}
