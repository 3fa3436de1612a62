"""The errors of a delivery: what is certain about the record, and the remedy."""

from __future__ import annotations

import pytest

from highwater.errors import RecordRefusedError, UndeliveredError
from highwater.resources import delivery
from highwater.resources.delivery import DeliveryEnd, classify_end
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import OnFailure, Record
from tests.helpers.fake_client import FakeClient, build_fault
from tests.helpers.producing import build_pairs, open_producer

# Errors by what is certain about the record.
ERRORS: dict[DeliveryEnd, str] = {
    DeliveryEnd.NOT_DELIVERED: "MSG_SIZE_TOO_LARGE _INVALID_ARG _KEY_SERIALIZATION _VALUE_SERIALIZATION _QUEUE_FULL "
    "_STATE INVALID_MSG INVALID_MSG_SIZE INVALID_REQUIRED_ACKS RECORD_LIST_TOO_LARGE INVALID_RECORD TOPIC_EXCEPTION "
    "UNSUPPORTED_COMPRESSION_TYPE UNSUPPORTED_FOR_MESSAGE_FORMAT",
    # In a report _UNKNOWN_PARTITION and _UNKNOWN_TOPIC end all that is queued for a topic, also what had been sent and
    # had no answer. The refusals of the second and third line may come after an attempt that was written, and whose
    # answer was lost. librdkafka gives _BAD_MSG for an answer that it cannot read.
    DeliveryEnd.UNKNOWN: "_UNKNOWN_PARTITION _UNKNOWN_TOPIC "
    "TOPIC_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED TRANSACTIONAL_ID_AUTHORIZATION_FAILED POLICY_VIOLATION "
    "SASL_AUTHENTICATION_FAILED _AUTHENTICATION INVALID_TIMESTAMP UNKNOWN_TOPIC_OR_PART "
    "LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION BROKER_NOT_AVAILABLE REPLICA_NOT_AVAILABLE NOT_ENOUGH_REPLICAS "
    "NETWORK_EXCEPTION KAFKA_STORAGE_ERROR FENCED_LEADER_EPOCH UNKNOWN_LEADER_EPOCH COORDINATOR_LOAD_IN_PROGRESS "
    "COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR CONCURRENT_TRANSACTIONS THROTTLING_QUOTA_EXCEEDED _TRANSPORT "
    "_ALL_BROKERS_DOWN _RETRY _RESOLVE _WAIT_COORD _TIMED_OUT_QUEUE "
    "_FATAL _FENCED _GAPLESS_GUARANTEE _INCONSISTENT INVALID_PRODUCER_EPOCH PRODUCER_FENCED "
    "OUT_OF_ORDER_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING UNSUPPORTED_VERSION "
    "INVALID_TXN_STATE _MSG_TIMED_OUT _PURGE_INFLIGHT _PURGE_QUEUE _TIMED_OUT REQUEST_TIMED_OUT _DESTROY _INTR "
    "_BAD_MSG NOT_ENOUGH_REPLICAS_AFTER_APPEND DUPLICATE_SEQUENCE_NUMBER UNKNOWN",
}
NAMES = [name for names in ERRORS.values() for name in names.split()]


@pytest.mark.parametrize(
    ("error", "end"),
    [(name, end) for end, names in ERRORS.items() for name in names.split()]
    + [("A_CODE_OF_THE_FUTURE", DeliveryEnd.UNKNOWN)],
)
def test_errors_are_classified_as_delivery_ends(error: str, end: DeliveryEnd) -> None:
    assert classify_end(error) is end


def test_every_name_that_is_certain_is_looked_at() -> None:
    assert {*ERRORS[DeliveryEnd.NOT_DELIVERED].split()} == delivery._SURE
    assert (classify_end(None), classify_end(delivery.NOT_SENT)) == (DeliveryEnd.DELIVERED, DeliveryEnd.NOT_DELIVERED)


@pytest.mark.parametrize("code", ["_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "TOPIC_AUTHORIZATION_FAILED"])
def test_refused_records_are_not_delivered_and_reported_errors_are_unknown(client: FakeClient, code: str) -> None:
    """A broker that wrongly lacks a topic ends records so that were written, and whose answer was lost."""
    ends: list[DeliveryEnd] = []
    producer = open_producer(OnFailure.GO_ON)
    for name in ("reported", "refused"):
        record = Record("t", b"k", name.encode())
        producer.send(record, name, on_outcome=lambda outcome: ends.append(outcome.end))
    client.ends, client.refusal = [build_fault(code)], build_fault(code)
    producer.poll()
    assert ends == [DeliveryEnd.UNKNOWN, DeliveryEnd.NOT_DELIVERED]
    assert (producer.counts.unknown, producer.counts.not_delivered) == (["reported"], ["refused"])


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("MSG_SIZE_TOO_LARGE", "send it smaller, or raise message.max.bytes"),
        ("_UNKNOWN_TOPIC", "create the topic"),
        ("_UNKNOWN_PARTITION", "name a partition that the topic has"),
        ("TOPIC_AUTHORIZATION_FAILED", "let the producer's user write"),
        ("_STATE", "begin a transaction first"),
        ("_INVALID_ARG", "fix what it is sent with"),
        ("_CRIT_SYS_RESOURCE", "fix what the error names"),
    ],
)
def test_a_refusal_says_what_helps_against_it(client: FakeClient, code: str, remedy: str) -> None:
    """Each said that the record was too large."""
    client.refusal = build_fault(code)
    with pytest.raises(RecordRefusedError, match=f"the words of {code}; found: {code}; remedy: {remedy}"):
        open_producer().send(Record("t", b"k", b"v"))


def test_a_client_that_is_done_for_good_refuses_with_counts_and_the_rest_still_ends(client: FakeClient) -> None:
    """A sender hears of it at once; what waits in the queue was not sent; what was under way nobody knows."""
    ends: dict[str, DeliveryEnd] = {}
    producer = open_producer()

    def send(name: str) -> None:
        record = Record("t", name.encode(), b"v")
        producer.send(record, name, on_outcome=lambda outcome: ends.update({name: outcome.end}))

    client.room = 2
    for name in ("under way", "fatal", "queued", "queued too"):
        send(name)
    client.refusal = build_fault("_FATAL", fatal=True)
    client.report(None)
    client.report(build_fault("_FATAL", fatal=True))
    producer.poll()
    assert ends == {
        "under way": DeliveryEnd.DELIVERED,
        "fatal": DeliveryEnd.UNKNOWN,
        "queued": DeliveryEnd.NOT_DELIVERED,
        "queued too": DeliveryEnd.NOT_DELIVERED,
    }
    with pytest.raises(UndeliveredError) as refused:
        send("later")
    shown = "the producer can send nothing more to t: the words of _FATAL; found: 4 sent: 1 delivered, 0 outstanding"
    assert str(refused.value).startswith(shown)
    assert "remedy: start a new producer" in str(refused.value)
    # The sender has the error, as with other refusals; but it is not the record's, so its key is not stopped for it.
    assert (producer.counts.sent, ("t", b"later") in producer.stopped) == (4, False)
    with pytest.raises(UndeliveredError) as at_end:
        producer.close(0)
    shown = "4 sent: 1 delivered, 0 outstanding, 2 NOT_SENT, 1 _FATAL, 1 of them unknown; "
    assert shown + "not delivered: queued, queued too; unknown: fatal; remedy: " in str(at_end.value)


def test_a_fatal_error_that_is_not_named_so_is_reported_as_one(client: FakeClient) -> None:
    client.refusal = build_fault("_FENCED", fatal=True)
    with pytest.raises(UndeliveredError, match="nothing more to t: the words of _FENCED; found: 0 sent"):
        open_producer().send_all("t", build_pairs(2))


def test_a_record_that_the_client_refuses_late_ends_as_not_delivered(
    nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited in the queue, so its sender is unknown by an exception."""
    producer = ReliableProducer(build_producer_properties(nobody, {"message.max.bytes": "2000"}), most_with_client=1)
    ends: list[DeliveryEnd] = []
    producer.send(Record("orders", None, b"v"), "first")
    producer.send(Record("orders", None, b"x" * 5000), "large", on_outcome=lambda outcome: ends.append(outcome.end))
    producer.send(Record("orders", None, b"v"), "third")
    monkeypatch.setattr(producer, "_most_with_client", 3)
    producer.poll()
    assert ends == [DeliveryEnd.NOT_DELIVERED]
    assert producer.counts.not_delivered == ["large"]
    with pytest.raises(UndeliveredError, match="not delivered: large; unknown: first, third"):
        producer.close(0.1)


def test_every_name_is_one_that_the_client_can_give() -> None:
    """A misspelled name would be classed as uncertain, in silence."""
    from confluent_kafka import KafkaError

    numbers = {value for name, value in vars(KafkaError).items() if isinstance(value, int)}
    given = {KafkaError(number).name() for number in numbers} | {KafkaError(number).name() for number in range(130)}
    assert {*NAMES, *delivery._SURE, *delivery._REMEDIES} <= given
    assert len(NAMES) == len(set(NAMES)), "a name has two ends"
