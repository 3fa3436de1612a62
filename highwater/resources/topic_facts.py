"""The facts of a topic in a cluster: replicas, settings and where they are set, and what this user may do (KIP-430)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from highwater.resources.broker_requests import ask_any_broker, describe_topics
from highwater.resources.kafka import Kafka
from highwater.resources.time_limits import limit_wait
from highwater.resources.topic_state import find_leader
from highwater.topic_rules import Setting, TopicFacts, merge_broker_settings

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

REQUEST_SECONDS = 10.0


def fetch_topic_facts(
    kafka: Kafka, topic: str, oldest_unread: timedelta | None = None, *, age_known: bool = True
) -> TopicFacts:
    """Ask the cluster for a topic.

    Args:
        kafka: the cluster.
        topic: its name.
        oldest_unread, age_known: facts for the rules about the age of unread records.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyUnavailableError: no broker answered in time.
    """
    from confluent_kafka.admin import ResourceType

    partitions = kafka.read_description(topic).partitions
    brokers = sorted(_list_brokers(kafka))
    holders = {broker.id for p in partitions for broker in p.replicas if broker.id >= 0}
    return TopicFacts(
        topic=topic,
        bootstrap=kafka.bootstrap,
        brokers=len(holders.union(brokers)),
        replicas={p.id: len(p.replicas) for p in partitions},
        in_sync={p.id: len(p.isr) for p in partitions},
        leaderless=frozenset(p.id for p in partitions if find_leader(p) is None),
        settings=fetch_topic_settings(kafka, topic),
        broker_settings=merge_broker_settings(
            {one: _fetch_settings(kafka, ResourceType.BROKER, str(one)) for one in brokers}
        ),
        oldest_unread=oldest_unread,
        age_known=age_known,
        assignment={p.id: [broker.id for broker in p.replicas] for p in partitions},
        broker_ids=brokers,
    )


def fetch_topic_settings(kafka: Kafka, topic: str) -> Mapping[str, Setting] | None:
    """The settings of a topic; None where the cluster forbids reading them.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyUnavailableError: no broker answered in time.
    """
    from confluent_kafka.admin import ResourceType

    return _fetch_settings(kafka, ResourceType.TOPIC, topic)


def has_broker_timestamps(kafka: Kafka, topic: str) -> bool:
    """Whether the broker sets the records' timestamps; False also where that may not be read.

    Raises:
        TopicAbsentError: there is no such topic.
        DependencyUnavailableError: no broker answered in time.
    """
    settings = fetch_topic_settings(kafka, topic)
    return settings is not None and settings["message.timestamp.type"].value == "LogAppendTime"


def _list_brokers(kafka: Kafka) -> list[int]:
    from confluent_kafka import KafkaException

    try:
        return list(kafka.get_admin().list_topics(timeout=limit_wait(REQUEST_SECONDS)).brokers)
    except KafkaException as error:
        raise kafka.build_unavailable_error(error) from error


def _fetch_settings(kafka: Kafka, kind: Any, name: str) -> Mapping[str, Setting] | None:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import ConfigResource, ConfigSource, ResourceType

    denied = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}
    ask = partial(_request_settings, resource=ConfigResource(kind, name))
    try:
        if kind == ResourceType.TOPIC:
            entries = ask_any_broker(kafka, ask, REQUEST_SECONDS)
        else:  # only the broker itself knows its settings
            entries = ask(kafka.get_admin(), limit_wait(REQUEST_SECONDS))
    except KafkaException as error:
        if error.args[0].code() in denied:
            return None
        if kind == ResourceType.TOPIC and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            kafka.read_description(name)  # raises if it is absent, unless it is just being made
        raise kafka.build_unavailable_error(error) from error
    except TimeoutError as error:
        raise kafka.build_unavailable_error(error) from error
    sources = {source.value: source.name for source in ConfigSource}
    return {
        name: Setting(str(entry.value), sources.get(int(entry.source), str(entry.source)))
        for name, entry in entries.items()
        if not entry.is_sensitive and entry.value is not None
    }


def _request_settings(admin: AdminClient, seconds: float, resource: Any) -> Any:
    try:
        return admin.describe_configs([resource], request_timeout=seconds)[resource].result(seconds + 1)
    finally:
        del admin


def fetch_allowed_operations(kafka: Kafka, topics: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each of these topics the operations that are allowed, such as `READ`.

    Absent and invisible topics are left out, and so are topics of brokers that do not answer that.

    Raises:
        DependencyUnavailableError: no broker answered in time.
    """
    from confluent_kafka import KafkaError, KafkaException

    if not topics:
        return {}
    hidden = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}
    ask = partial(describe_topics, topics=topics, include_authorized_operations=True)
    try:
        answers = ask_any_broker(kafka, ask, REQUEST_SECONDS)
    except (KafkaException, TimeoutError) as error:
        raise kafka.build_unavailable_error(error) from error
    found = {}
    for topic in topics:
        answer = answers[topic]
        if isinstance(answer, KafkaError):
            if answer.code() not in hidden:
                raise kafka.build_unavailable_error(answer)
        elif answer.authorized_operations is not None:
            found[topic] = frozenset(one.name for one in answer.authorized_operations)
    return found
