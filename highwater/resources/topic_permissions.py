"""The operations on topics that a cluster permits this user, from the cluster itself (KIP-430); reads no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from highwater.resources.kafka import Kafka

REQUEST_SECONDS = 10.0


def fetch_allowed_operations(kafka: Kafka, topics: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each of these topics the operations that are allowed, such as `READ`.

    Absent and invisible topics are left out, and so are topics of brokers that do not answer that.

    Raises:
        DependencyUnavailableError: no broker answered in time.
    """
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    if not topics:
        return {}
    hidden = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED}
    admin = kafka.get_admin()
    futures = admin.describe_topics(
        TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=REQUEST_SECONDS
    )
    found = {}
    try:
        for topic, future in futures.items():
            try:
                answer: Any = future.result(REQUEST_SECONDS + 1)
            except KafkaException as error:
                if error.args[0].code() not in hidden:
                    raise
            else:
                if answer.authorized_operations is not None:
                    found[topic] = frozenset(one.name for one in answer.authorized_operations)
    except (KafkaException, TimeoutError) as error:
        raise kafka.build_unavailable_error(error) from error
    finally:
        del admin
    return found
