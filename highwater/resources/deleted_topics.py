"""The state of a stream's topic; an absent one was never planned or published to, or it vanished (I11)."""

# A topic that vanished is never recreated by itself: what waited on it would be forgotten silently.

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from highwater.errors import OffsetsExpiredError, TopicAbsentError, TopicVanishedError
from highwater.resources.dlq_topics import ensure_dlq_topics
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.routing import format_topic_option

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.plans import Planned
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger

# Brokers hear of a new topic one after another, within a second as a rule.
HEARD_SECONDS = 10.0
LOOK_EVERY = 0.1
# The ID of a topic that is still to be made; no real ID has a blank.
TO_BE_MADE = "one that is given when it is made"


def read_state(ledger: Ledger, kafka: Kafka, stream: Stream, topic: str) -> TopicState:
    """The state of a topic of the stream now.

    A broker that has just started may not know a topic yet: a topic is called gone after two looks.

    Raises:
        TopicVanishedError: it was planned, or published to, and is not there any more.
        TopicAbsentError: it is not there, and never was as far as the ledger knows.
        DependencyUnavailableError: Kafka or the ledger is unavailable.
    """
    try:
        return kafka.read_topic_state(topic)
    except TopicAbsentError as error:
        gone = find_vanished_error(ledger, stream, topic, error)
        if gone is None:
            raise
        if (again := read_state_if_exists(kafka, topic)) is not None:
            return again
        raise gone from None


def read_state_if_exists(kafka: Kafka, topic: str) -> TopicState | None:
    """Look again at a topic that was absent a moment ago; None if it is absent still.

    Raises:
        DependencyUnavailableError: no broker answered in time.
    """
    try:
        return kafka.look_again(topic)
    except TopicAbsentError:
        return None


def find_vanished_error(
    ledger: Ledger, stream: Stream, topic: str, absent: TopicAbsentError | None = None
) -> TopicVanishedError | None:
    """The error for a topic of the stream that is missing.

    None if it was never planned, and of the parked topic if nothing was ever published to it, as far as the ledger
    knows: that is how they begin.

    Args:
        ledger: holds the plans.
        stream: the stream.
        topic: the topic.
        absent: Kafka's error; for a main topic it has similar names.
    """
    if topic == stream.parked_topic:
        return _build_parked_error(stream) if ledger.publications.has_published_rejects(stream.name) else None
    planned = ledger.topics.read_planned_topic(stream.name, topic)
    return None if planned is None else build_vanished_error(stream, planned, absent)


def build_vanished_error(
    stream: Stream, planned: Planned, absent: TopicAbsentError | None = None
) -> TopicVanishedError:
    """The error for a planned topic that is missing."""
    topic = planned.generation.topic
    ends = ", ".join(f"{p}: {end}" for p, end in sorted(planned.ends.items()))
    accept, found = f"highwater accept-loss {stream.name}{format_topic_option(stream, topic)}", "no such topic"
    if topic == stream.topic:
        found += f"; {absent.found}" if absent is not None and absent.found else ""
        remedy = (
            "check that HIGHWATER_KAFKA_BOOTSTRAP names the right cluster, and restore the topic. A recreated topic is "
            f"another topic: create it only if the old one is lost for good; then {accept} records the loss"
        )
    elif topic in stream.tier_topics:
        remedy = f"restore it; else {accept} recreates it, and shows how what waited there is reprocessed from raw"
    else:
        remedy = f"ask its owner to restore it; if they recreate it, {accept}; else take it out of the declaration"
    return TopicVanishedError(
        f"topic {topic} of stream {stream.name} is gone",
        stored=f"topic ID {planned.generation.topic_id}, planned to {ends}",
        found=found,
        remedy=remedy,
    )


def _build_parked_error(stream: Stream) -> TopicVanishedError:
    topic = stream.parked_topic
    return TopicVanishedError(
        f"topic {topic} of stream {stream.name} is gone",
        stored="records were published to the topics of the DLQ",
        found="no such topic",
        remedy="restore it; else create it, as docs/dlq.md says it must be, and highwater reclaim "
        f"{stream.name} --on {topic} reclaims what was parked there",
    )


def find_parked_loss(kafka: Kafka, stream: Stream, waiting: int) -> OffsetsExpiredError | None:
    """The error for a parked topic with fewer records than wait there.

    Two looks must agree on it. A log that merely begins after 0 is no proof: records of an erased key may be deleted
    there, and a topic that lost some stays so when they come back.

    Args:
        kafka: is asked for the topic.
        stream: the declaration.
        waiting: published records that wait on it by the tables, counted before.

    Raises:
        TopicAbsentError: it is not there.
        DependencyUnavailableError: no broker answered in time.
    """
    found = _find_loss(stream, kafka.read_topic_state(stream.parked_topic), waiting)
    return found and _find_loss(stream, kafka.look_again(stream.parked_topic), waiting)


def _find_loss(stream: Stream, state: TopicState, waiting: int) -> OffsetsExpiredError | None:
    topic, seen = state.topic, state.partitions
    spans = {
        p: (one.log_start, one.high_watermark)
        for p, one in sorted(seen.items())
        if one.log_start is not None and one.high_watermark is not None
    }
    # Up to the high watermark: records after an open transaction are published as well.
    held = sum(end - start for start, end in spans.values())
    if len(spans) < len(seen) or held >= waiting:
        return None
    logs = ", ".join(f"{p}: [{start}, {end})" for p, (start, end) in spans.items())
    return OffsetsExpiredError(
        f"topic {topic} of stream {stream.name} lost records that wait for a person",
        stored=f"{waiting:,} wait there by the tables",
        found=f"{held:,} offsets; its log holds {logs}",
        remedy=f"highwater reclaim {stream.name} --on {topic} reclaims what was parked there, to be reprocessed "
        "from raw; ensure that nothing deletes from the topic: docs/dlq.md says how it must be set up",
    )


def topic_exists(kafka: Kafka, topic: str) -> bool:
    """Whether a topic is there.

    Raises:
        DependencyUnavailableError: no broker answered in time.
    """
    try:
        kafka.read_topic_state(topic)
    except TopicAbsentError:
        return False
    return True


def read_created_state(kafka: Kafka, stream: Stream, topic: str) -> TopicState:
    """The future state of a tier that is to be recreated: as many partitions as the main topic has, and nothing."""
    partitions = kafka.read_topic_state(stream.topic).partitions
    return TopicState(topic, TO_BE_MADE, {p: PartitionState(0, 0, 0, None) for p in partitions})


def recreate_topic(ledger: Ledger, kafka: Kafka, stream: Stream, topic: str) -> None:
    """Make a tier again that vanished.

    Raises:
        TopicVanishedError: another of the stream's DLQ topics vanished too.
        TopicDriftError, TopicAbsentError, ConfigurationError, DependencyUnavailableError: as `ensure_dlq_topics`.
    """
    ensure_dlq_topics(kafka, stream, lambda name: None if name == topic else find_vanished_error(ledger, stream, name))
    deadline = time.monotonic() + HEARD_SECONDS
    while not topic_exists(kafka, topic) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)
