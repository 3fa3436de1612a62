"""Admin requests that any broker can answer: where one hangs, another one is asked."""

# librdkafka sends such a request to the broker that the last metadata named as controller. With KRaft that may be any
# broker with a session, and a broker that hangs has one until it ends.

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from highwater.resources.offset_requests import list_timeout_codes
from highwater.resources.time_limits import limit_wait

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient, TopicDescription

    from highwater.resources.kafka import Kafka

T = TypeVar("T")
# A broker that answers does so within milliseconds; one that is far away, after a login, within a second.
FIRST_SECONDS = 1.5
# Ten metadata that name one of two brokers name the same one ten times in 1 of 500 cases.
MAX_METADATA = 10


def ask_any_broker(kafka: Kafka, ask: Callable[[AdminClient, float], T], seconds: float) -> T:
    """The answer to a request, which goes to another broker where none comes.

    Args:
        kafka: the cluster.
        ask: makes the request and waits for its answer this many seconds at most.
        seconds: the wait for the last broker that is asked; for those before it 1.5 s at most.

    Raises:
        KafkaException: the request was refused, or no broker answered in time.
        TimeoutError: no broker answered in time.
        OutOfTimeError: the tick's time is over.
    """
    from confluent_kafka import KafkaException

    try:
        return ask(kafka.get_admin(), limit_wait(min(FIRST_SECONDS, seconds)))
    except (KafkaException, TimeoutError) as error:
        # A new client has no connection to the broker that hangs, so another one answers its metadata.
        if not _is_timeout(error) or kafka.drop_admin():
            raise
    first = _choose_broker(kafka)
    if first is not None:
        try:
            return ask(kafka.get_admin(), limit_wait(min(FIRST_SECONDS, seconds)))
        except (KafkaException, TimeoutError) as error:
            if not _is_timeout(error):
                raise
        _choose_broker(kafka, other_than=first)
    return ask(kafka.get_admin(), limit_wait(seconds))


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or error.args[0].code() in list_timeout_codes()


def _choose_broker(kafka: Kafka, other_than: int | None = None) -> int | None:
    """Read metadata until it names another controller, to which requests go then; None where no broker answers."""
    from confluent_kafka import KafkaException

    named, end = other_than, time.monotonic() + FIRST_SECONDS
    for _ in range(MAX_METADATA):
        try:
            named = kafka.get_admin().list_topics(timeout=limit_wait(FIRST_SECONDS)).controller_id
        except KafkaException:
            return None
        if named != other_than or time.monotonic() > end:
            break
    return named


def list_topics(admin: AdminClient, seconds: float) -> list[str]:
    """The names of all topics.

    Raises:
        KafkaException: the broker did not answer in time.
    """
    try:
        return sorted(admin.list_topics(timeout=seconds).topics)
    finally:
        del admin


def describe_topics(
    admin: AdminClient, seconds: float, topics: Collection[str], **options: bool
) -> dict[str, TopicDescription | KafkaError]:
    """The descriptions of topics, or the errors with which they were refused; the client takes the options.

    Raises:
        KafkaException, TimeoutError: the broker did not answer in time.
    """
    from confluent_kafka import TopicCollection

    try:
        futures = admin.describe_topics(TopicCollection(sorted(topics)), request_timeout=seconds, **options)
        return {topic: _wait(future, seconds) for topic, future in futures.items()}
    finally:
        del admin  # a client that an error's traceback holds would go on connecting


def _wait(future: Any, seconds: float) -> TopicDescription | KafkaError:
    from confluent_kafka import KafkaException

    try:
        found: TopicDescription = future.result(seconds + 1)
    except KafkaException as error:
        if _is_timeout(error):
            raise
        refused: KafkaError = error.args[0]
        return refused
    return found
