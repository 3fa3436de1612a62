"""Topics of retries: where a reject goes, which tier a topic is, how tiers are planned, the delay with jitter."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256

from highwater.declaration import OnReject, Start, Stream
from highwater.errors import ConfigurationError

# Slices that failed together do not come back together: each waits up to this part of its delay longer.
RETRY_JITTER = 0.2
_TIER = re.compile(r"\.dlq\.[0-9]+$")


def find_destination(stream: Stream, reason: str, retries: int, *, park: bool = False) -> str:
    """The topic that a rejected record goes to.

    A record that holds its slice is rejected when a person releases the slice. A record on a tier has left the order of
    the main topic, so it holds nothing there, and is retried.

    Args:
        stream: its declaration.
        reason: why it was rejected.
        retries: how often it was tried before: 0 for a record of the main topic, n for one that was read from tier n.
        park: whether the person who released its slice parks what held it.
    """
    how = stream.on_reject[reason]
    parked = how == OnReject.PARK or (how == OnReject.HOLD and park and retries == 0)
    if parked or retries >= len(stream.tiers):
        return stream.parked_topic
    return stream.tier_topics[retries]


def find_tier(stream: Stream, topic: str) -> int:
    """The number of a tier: 1 for the first; 0 for the main topic, and for any other.

    A record that another system rejected counts as rejected once, like a record on the first tier.
    """
    if topic in stream.foreign_topics:
        return 1
    return stream.tier_topics.index(topic) + 1 if topic in stream.tier_topics else 0


def format_topic_option(stream: Stream, topic: str) -> str:
    """The arguments of a command, beside the stream's name, that select this topic; empty for a main topic."""
    return f" --topic {topic}" if topic in stream.foreign_topics or _TIER.search(topic) else ""


def build_stream_of_topic(stream: Stream, topic: str | None) -> Stream:
    """The stream as the planner sees it when it plans this one of its topics.

    Raises:
        ConfigurationError: it is neither its main topic nor one whose records are retried.
    """
    if topic is None or topic == stream.topic:
        return stream
    if topic not in stream.delays:
        raise ConfigurationError(
            f"{topic} is no topic that is planned for stream {stream.name}",
            found=f"planned are {', '.join([stream.topic, *stream.delays])}",
            remedy="name one of them, or none for the main topic",
        )
    return build_tier_stream(stream, topic)


def is_stream_topic(stream: Stream, topic: str) -> bool:
    """Whether slices of this topic are the stream's to materialise, as it is declared now.

    A tier that was taken out of the declaration is one of ours: its records carry our envelope, so its planned slices
    are processed as before. Without the declaration nothing distinguishes a topic of another system from a tier, nor a
    main topic that was renamed, and records without our envelope would be parked as malformed.
    """
    tier = topic.startswith(stream.topic) and _TIER.fullmatch(topic, len(stream.topic)) is not None
    return tier or topic in (stream.topic, *stream.foreign_topics)


def build_tier_stream(stream: Stream, topic: str) -> Stream:
    """The stream as the planner sees it when it plans retries: another topic, read from its beginning at once.

    It publishes nothing: that events were accepted before the first retry is planned is no sign of a lost ledger.
    """
    limits = replace(stream.limits, min_offsets=1)
    return replace(stream, topic=topic, start=Start.EARLIEST, limits=limits, publishes=None)


def compute_retry_delay(delay: timedelta, slice_key: str) -> timedelta:
    """The wait of the records of a tier's slice: the delay, and up to a fifth more by the slice's key.

    All records of a slice wait alike, so the records that are due are one range of offsets, found by one question to
    the broker.
    """
    return delay * (1 + RETRY_JITTER * _compute_jitter(slice_key))


def compute_longest_retry_delay(delay: timedelta) -> timedelta:
    """The longest wait of a tier's records: the delay with all of the jitter."""
    return delay * (1 + RETRY_JITTER)


def _compute_jitter(slice_key: str) -> float:
    """A number from 0 up to 1, the same for the same key on every machine."""
    return int.from_bytes(sha256(slice_key.encode()).digest()[:4], "big") / 2**32
