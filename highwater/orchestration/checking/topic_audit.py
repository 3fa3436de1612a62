"""Compares the topics that a stream publishes to with the rules that their likeness to the main topic leaves open."""

from __future__ import annotations

from highwater.declaration import Stream
from highwater.errors import HighwaterError, TopicAbsentError
from highwater.resources.deleted_topics import read_state_if_exists
from highwater.resources.dlq_topics import FindVanishedError
from highwater.resources.kafka import Kafka
from highwater.resources.topic_facts import fetch_topic_facts
from highwater.topic_rules import Finding, TopicFacts, check_max_message_bytes, check_published_topic


def check_published_topics(
    kafka: Kafka,
    stream: Stream,
    find_vanished_error: FindVanishedError = lambda _: None,
    main: TopicFacts | None = None,
) -> tuple[dict[str, list[Finding]], list[HighwaterError]]:
    """Check each of the topics that is there; the errors say why one could not be looked at.

    After the first that could not be, none is asked: a broker that is unavailable is waited for once.

    Args:
        kafka: is looked at.
        stream: the declaration.
        find_vanished_error: is asked of each topic that is absent, for the error that this is; None if it may be.
        main: the main topic, to compare the room of the DLQ's topics with it; without it that is not checked.
    """
    found: dict[str, list[Finding]] = {}
    errors: list[HighwaterError] = []
    try:
        for topic in stream.published_topics:
            try:
                facts = fetch_topic_facts(kafka, topic)
                found[topic] = check_published_topic(facts)
                found[topic] += [check_max_message_bytes(facts, main)] if main and topic in stream.dlq_topics else []
            except TopicAbsentError:
                if (error := find_vanished_error(topic)) is not None and read_state_if_exists(kafka, topic) is None:
                    errors.append(error)
    except HighwaterError as error:
        errors.append(error)
    return found, errors
