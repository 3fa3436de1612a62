"""The ends of a record's delivery, and the end that each of Kafka's errors means."""

# `KafkaError.retriable()` does not separate temporary from permanent errors: it is false for NOT_ENOUGH_REPLICAS,
# LEADER_NOT_AVAILABLE and `_MSG_TIMED_OUT`. Sources: Kafka's protocol guide (error codes), librdkafka's rdkafka.h and
# INTRODUCTION.md, and rd_kafka_err_action and rd_kafka_handle_Produce_error in its rdkafka_request.c.

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class DeliveryEnd(Enum):
    """The outcome of a record."""

    DELIVERED = "delivered"
    NOT_DELIVERED = "not delivered"
    """No broker has it, for sure: sending it again cannot double it."""
    UNKNOWN = "unknown"
    """A broker may have it: sending it again may double it, not sending it may lose it."""


# A report is about the last attempt alone. Each attempt meets these refusals: they lie in the record, in its request or
# in the topic's name. Another may come after an attempt that was written and whose answer was lost: a permission was
# revoked meanwhile, or the record grew too old for its topic. `_AUTHENTICATION` ends requests that are under way, when
# the client has to log in again. And one answer of a broker that wrongly lacks a topic or a partition ends all records
# queued for it, including those that return to the queue without an answer (rd_kafka_topic_set_notexists, and
# RD_KAFKA_OP_PARTITION_LEAVE in rdkafka_broker.c).
_SURE = frozenset(
    {"MSG_SIZE_TOO_LARGE", "_INVALID_ARG", "_KEY_SERIALIZATION", "_VALUE_SERIALIZATION", "_QUEUE_FULL", "_STATE"}
    | {"INVALID_MSG", "INVALID_MSG_SIZE", "INVALID_RECORD", "INVALID_REQUIRED_ACKS", "RECORD_LIST_TOO_LARGE"}
    | {"TOPIC_EXCEPTION", "UNSUPPORTED_COMPRESSION_TYPE", "UNSUPPORTED_FOR_MESSAGE_FORMAT"}
)
# Our own words for a record that the client never got, and for one that it never reported.
NOT_SENT, UNREPORTED = "NOT_SENT", "UNREPORTED"


# Remedies for records that the client refused.
_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "MSG_SIZE_TOO_LARGE": "send it smaller, or raise message.max.bytes here and max.message.bytes of the topic",
        **dict.fromkeys(
            ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"), "create the topic, or fix its name; then open a new producer"
        ),
        "TOPIC_EXCEPTION": "fix the topic's name",
        "TOPIC_AUTHORIZATION_FAILED": "let the producer's user write to the topic; then open a new producer",
        "_UNKNOWN_PARTITION": "name a partition that the topic has, or none",
        "_STATE": "begin a transaction first: a producer with a transactional.id sends nothing outside of one",
        "_INVALID_ARG": "fix what it is sent with: its partition, headers or timestamp",
    }
)


def find_remedy(error: str) -> str:
    """The remedy for a record that the client refused with an error, by librdkafka's name of it."""
    return _REMEDIES.get(error, "fix what the error names, in the record or the configuration; then send it again")


def classify_end(error: str | None) -> DeliveryEnd:
    """The outcome of a record by the error of its delivery report, None for none.

    Only a refusal that every attempt meets is sure. `_PURGE_QUEUE` is none: a record whose answer was lost goes back
    into the client's queue. An error that is temporary in itself comes as a record's last word when time ran out, and
    an attempt before it may have been written.
    """
    if error is None:
        return DeliveryEnd.DELIVERED
    return DeliveryEnd.NOT_DELIVERED if error == NOT_SENT or error in _SURE else DeliveryEnd.UNKNOWN
