"""Checks the topics that a stream publishes to, and the producers of its topic, by the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from highwater.declaration import Stream
from highwater.errors import HighwaterError, TopicAbsentError
from highwater.producer_rules import LONGEST_TRANSACTION_MS, REPLICA_LAG_MS, ProducerFacts, check_producer
from highwater.resources.deleted_topics import read_state_if_exists
from highwater.resources.dlq_topics import FindVanishedError
from highwater.resources.kafka import Kafka
from highwater.resources.live_producer import list_own_producers
from highwater.resources.topic_facts import fetch_topic_facts
from highwater.topic_rules import Finding, Level, TopicFacts, check_max_message_bytes, check_published_topic


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


# Facts about the writers to a topic that a broker does not show.
OTHERS = "others"
NOT_SHOWN = Finding(
    "all of them",
    Level.UNKNOWN,
    "brokers show neither who writes to a topic nor how those are set",
    "",
    "highwater audit --producer FILE holds a producer's configuration against the rules",
)


def check_producers(
    kafka: Kafka, stream: Stream, others: Sequence[ProducerFacts], facts: TopicFacts | None
) -> tuple[dict[str, list[Finding]], list[HighwaterError]]:
    """For each producer what the rules say of it, and what keeps ours from being looked at.

    Args:
        kafka: the cluster; it is not asked.
        stream: the stream.
        others: producers that are not ours.
        facts: the topic's settings, for the brokers' own times; None if they could not be read.
    """
    try:
        own, problems = list_own_producers(kafka, stream), list[HighwaterError]()
    except HighwaterError as error:
        own, problems = [], [error]
    times = _select_broker_times(facts)
    found = {
        one.name: check_producer(replace(one, replica_lag_ms=times[0], longest_transaction_ms=times[1]))
        for one in [*own, *others]
    }
    return found if others else {**found, OTHERS: [NOT_SHOWN]}, problems


def _select_broker_times(facts: TopicFacts | None) -> tuple[int, int]:
    """The brokers' wait for a replica and their longest transaction, in milliseconds."""
    settings = (facts.broker_settings if facts else None) or {}
    lag, longest = settings.get("replica.lag.time.max.ms"), settings.get("transaction.max.timeout.ms")
    return int(lag.value) if lag else REPLICA_LAG_MS, int(longest.value) if longest else LONGEST_TRANSACTION_MS
