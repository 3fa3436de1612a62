"""The reliable producer: what it refuses, and that no record's end stays untold."""

from __future__ import annotations

import contextlib
import gc
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest

import highwater.resources.producer
from highwater.errors import ConfigurationError, KeyStoppedError, RecordRefusedError, UndeliveredError
from highwater.resources import delivery
from highwater.resources.delivery import DeliveryEnd, ErrorKind, classify_end, find_error_kind
from highwater.resources.producer import MAX_WITH_CLIENT, ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import OnFailure, Outcome, Record
from highwater.resources.several_clients import SeveralClients, find_client_index
from tests.conftest import TopicFactory, create_topic
from tests.helpers.fake_client import FakeClient, fault
from tests.helpers.support import read_topic

if TYPE_CHECKING:
    from dev.broker import EmbeddedBroker


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The client of the next producer."""
    found = FakeClient()
    monkeypatch.setattr("confluent_kafka.Producer", lambda _: found)
    return found


def producing(policy: OnFailure = OnFailure.STOP_KEY) -> ReliableProducer:
    return ReliableProducer(build_producer_properties("nobody:1"), on_failure=policy)


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing answers, and nothing can begin to while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_defaults_wait_for_all_replicas_once_and_in_order_for_a_day() -> None:
    found = build_producer_properties("b:9092")
    assert found["acks"] == "all"
    assert found["enable.idempotence"] == "true"
    assert found["max.in.flight.requests.per.connection"] == "5"
    assert found["delivery.timeout.ms"] == "86400000"
    assert found["partitioner"] == "murmur2_random"
    assert found["allow.auto.create.topics"] == "false"


def test_a_transactional_producer_waits_no_longer_than_its_transaction() -> None:
    found = build_producer_properties(
        "b:9092", {"transaction.timeout.ms": "30000", "delivery.timeout.ms": "200000"}, transactional_id="t"
    )
    assert found["transactional.id"] == "t"
    assert found["delivery.timeout.ms"] == "30000"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("request.required.acks", "0"),
        ("enable.idempotence", "false"),
        ("max.in.flight", "6"),
        ("max.in.flight.requests.per.connection", "100"),
        ("retries", "0"),
        ("message.send.max.retries", "3"),
        ("message.timeout.ms", "5000"),
        ("delivery.timeout.ms", "0"),
        ("delivery.report.only.error", "true"),
        ("allow.auto.create.topics", "true"),
        ("enable.gapless.guarantee", "true"),
        ("queuing.strategy", "lifo"),
        ("partitioner", "consistent_random"),
        # librdkafka takes properties of topics under such names too.
        ("topic.partitioner", "random"),
        ("topic.message.timeout.ms", "5000"),
        ("topic.request.required.acks", "1"),
    ],
)
def test_a_property_that_weakens_is_refused_with_its_value_and_a_reason(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        build_producer_properties("b:9092", {name: value})
    text = str(refused.value)
    assert f"{name} must not be {value}: " in text
    assert "remedy: take " in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "-1"),
        ("max.in.flight", "1"),
        ("message.timeout.ms", "200000"),
        ("compression.type", "zstd"),
        ("topic.acks", "-1"),
        ("topic.message.timeout.ms", "200000"),
    ],
)
def test_a_property_that_does_not_weaken_is_taken_under_one_name(name: str, value: str) -> None:
    found = build_producer_properties("b:9092", {name: value})
    assert value in found.values()
    assert not {"message.timeout.ms", "max.in.flight", "topic.acks", "topic.message.timeout.ms"} & found.keys()


@pytest.mark.parametrize("name", ["topic.metadata.refresh.interval.ms", "topic.metadata.propagation.max.ms"])
def test_a_property_whose_own_name_begins_like_that_of_topics_keeps_it(nobody: str, name: str) -> None:
    found = build_producer_properties(nobody, {name: "1000"})
    assert found[name] == "1000"
    ReliableProducer(found).close(0)


def test_outstanding_records_are_named_when_nobody_answers(nobody: str) -> None:
    producer = ReliableProducer(build_producer_properties(nobody))
    for n in range(3):
        producer.send(Record("orders", b"k", str(n).encode()))
    with pytest.raises(UndeliveredError, match=r"without a report after 0.2 s: 3 of orders; unknown: 0, 1, 2"):
        producer.close(0.2)


def test_close_leaves_nothing_in_a_queue_and_every_record_has_an_end(nobody: str) -> None:
    producer = ReliableProducer(build_producer_properties(nobody), most_with_client=2)
    ends: list[DeliveryEnd] = []
    for n in range(3):
        producer.send(Record("orders", b"k", b"v"), f"id-{n}", on_outcome=lambda outcome: ends.append(outcome.end))
    with pytest.raises(UndeliveredError, match="not delivered: id-2; unknown: id-0, id-1"):
        producer.close(0.1)
    counts = producer.counts
    assert (counts.sent, counts.delivered, counts.outstanding) == (3, 0, 0)
    # What the client has may have been in a request whose answer was lost; what it never got is sure.
    assert (counts.not_delivered, counts.unknown) == (["id-2"], ["id-0", "id-1"])
    assert producer.handed_back == {("orders", b"k"): ["id-2"]}
    assert ends == [DeliveryEnd.NOT_DELIVERED, DeliveryEnd.UNKNOWN, DeliveryEnd.UNKNOWN]
    producer.client.poll(0)  # what it says of itself, that nobody answers, counts too
    assert len(producer.client) == 0


def test_records_that_even_a_purge_does_not_end_are_named(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(highwater.resources.producer, "PURGE_SECONDS", 0.0)
    producer = ReliableProducer(build_producer_properties(nobody))
    for n in range(3):
        producer.send(Record("orders", b"k", b"v"), f"id-{n}")
    with pytest.raises(UndeliveredError, match="of 3 the client never reported; unknown: id-0, id-1, id-2"):
        producer.close(0.1)


def test_a_record_that_the_client_never_reports_ends_once_as_unknown(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed outstanding, a fourth end; and a report that comes after all must not count it again."""
    monkeypatch.setattr(highwater.resources.producer, "PURGE_SECONDS", 0.0)
    outcomes: list[Outcome] = []
    client.silent, client.room = True, 3
    producer = producing()
    producer.send(Record("t", b"a", b"v"), "a", on_outcome=outcomes.append)
    producer.send_all("t", [(b"b", b"v"), (b"c", b"v")], "bc")
    producer.send(Record("t", b"d", b"v"), "d")
    with pytest.raises(UndeliveredError, match="4 sent: 0 delivered, 0 outstanding, 1 NOT_SENT, 3 UNREPORTED, 3 of"):
        producer.close(0)
    for error in (None, fault("_PURGE_QUEUE"), None):
        client.report(error)
    with pytest.raises(UndeliveredError, match="not delivered: d; unknown: a, b, c; remedy"):
        producer.close(0)
    counts = producer.counts
    assert (counts.sent, counts.delivered, counts.unknown, counts.outstanding) == (4, 0, ["a", "b", "c"], 0)
    assert [outcome.end for outcome in outcomes] == [DeliveryEnd.UNKNOWN]


def test_a_place_that_the_broker_does_not_show_is_not_the_first_of_the_log(client: FakeClient) -> None:
    """A batch that it had already (DUPLICATE_SEQUENCE_NUMBER) is delivered, and has no offset."""
    from confluent_kafka import OFFSET_INVALID

    outcomes: list[Outcome] = []
    producer = producing()
    producer.send(Record("t", b"k", b"v"), on_outcome=outcomes.append)
    client.report(None, offset=OFFSET_INVALID)
    assert [(outcome.delivered, outcome.partition, outcome.offset) for outcome in outcomes] == [(True, 0, -1)]


def answering() -> dict[str, str]:
    """The properties of a producer with librdkafka's own stand-in for a broker, which takes what it is sent."""
    taking = {"test.mock.num.brokers": "1", "allow.auto.create.topics": "true"}
    return build_producer_properties("127.0.0.1:1") | taking


class Callback:
    """One that breaks at each record, and keeps what it was called with."""

    def __init__(self) -> None:
        self.reported: list[object] = []

    def __call__(self, shown: object) -> None:
        self.reported.append(shown)
        raise RuntimeError(f"the caller cannot take {shown}")


def test_a_callback_that_raises_at_close_leaves_no_other_record_without_its_end() -> None:
    """It once left `close` at once, with the rest in the queue. The answers are slow, so that there is a rest."""
    slow = {"test.mock.broker.rtt": "200"}
    producer, callback = ReliableProducer(answering() | slow, most_with_client=2), Callback()
    for n in range(5):
        producer.send(Record("orders", b"k", b"v"), str(n), callback)
    with pytest.raises(RuntimeError, match="the caller cannot take 0"):
        producer.close(20)
    assert callback.reported == ["0", "1", "2", "3", "4"]
    assert (producer.counts.delivered, producer.counts.outstanding, len(producer.client)) == (5, 0, 0)


def test_what_is_undelivered_is_reported_beside_the_error_of_a_callback(nobody: str) -> None:
    producer, callback = ReliableProducer(build_producer_properties(nobody), most_with_client=2), Callback()
    for n in range(3):
        producer.send(Record("orders", b"k", b"v"), f"id-{n}", on_outcome=callback)
    with pytest.raises(RuntimeError, match="the caller cannot take") as raised:
        producer.close(0.1)
    assert "not delivered: id-2; unknown: id-0, id-1" in "".join(raised.value.__notes__)
    producer.client.poll(0)  # what it says of itself, that nobody answers, counts too
    assert (len(callback.reported), producer.counts.outstanding, len(producer.client)) == (3, 0, 0)


def test_a_callback_that_raises_is_reported_by_the_next_look_and_once() -> None:
    producer, callback = ReliableProducer(answering()), Callback()
    producer.send(Record("orders", b"k", b"v"), "first", callback)
    with pytest.raises(RuntimeError, match="cannot take first"):
        producer.flush(20)
    producer.send(Record("orders", b"k", b"v"), "second")
    assert producer.close(20).delivered == 2


def test_an_error_of_the_caller_goes_on_when_a_callback_raises_too(nobody: str) -> None:
    def work() -> None:
        with ReliableProducer(build_producer_properties(nobody)) as producer:
            producer.send(Record("orders", b"k", b"v"), "first", on_outcome=Callback())
            raise LookupError("of the caller")

    with pytest.raises(LookupError, match="of the caller") as seen:
        work()
    notes = "".join(seen.value.__notes__)
    assert "unknown: first" in notes
    assert "a callback raised RuntimeError" in notes


def test_a_record_that_ran_out_of_time_is_unknown_and_stops_its_key(nobody: str) -> None:
    """It may have been written by an attempt whose answer was lost; sent again blindly it could come twice."""
    producer = ReliableProducer(build_producer_properties(nobody) | {"delivery.timeout.ms": "500"})
    producer.send(Record("orders", b"k", b"v"), "first")
    producer.flush(20)
    assert producer.counts.unknown == ["first"]
    assert producer.stopped == {("orders", b"k"): "first"}
    with pytest.raises(KeyStoppedError, match="record first of it failed"):
        producer.send(Record("orders", b"k", b"v"), "second")
    producer.send(Record("orders", b"other", b"v"), "third")
    assert producer.counts.sent == 2


# Every code of the table, by what helps and by what is sure of the record.
ERRORS: dict[tuple[ErrorKind, DeliveryEnd], str] = {
    (
        ErrorKind.LOCAL,
        DeliveryEnd.NOT_DELIVERED,
    ): "MSG_SIZE_TOO_LARGE _INVALID_ARG _KEY_SERIALIZATION _VALUE_SERIALIZATION _QUEUE_FULL _STATE",
    # In a report: all that is queued for a topic ends so, also what had been sent and had no answer.
    (ErrorKind.LOCAL, DeliveryEnd.UNKNOWN): "_UNKNOWN_PARTITION _UNKNOWN_TOPIC",
    (
        ErrorKind.PERMANENT,
        DeliveryEnd.NOT_DELIVERED,
    ): "INVALID_MSG INVALID_MSG_SIZE INVALID_REQUIRED_ACKS RECORD_LIST_TOO_LARGE "
    "INVALID_RECORD TOPIC_EXCEPTION UNSUPPORTED_COMPRESSION_TYPE UNSUPPORTED_FOR_MESSAGE_FORMAT",
    # What may come after an attempt that was written, and whose answer was lost.
    (ErrorKind.PERMANENT, DeliveryEnd.UNKNOWN): "TOPIC_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED "
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED SASL_AUTHENTICATION_FAILED _AUTHENTICATION INVALID_TIMESTAMP "
    "POLICY_VIOLATION UNKNOWN_TOPIC_OR_PART",
    (ErrorKind.TEMPORARY, DeliveryEnd.UNKNOWN): "LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION BROKER_NOT_AVAILABLE "
    "REPLICA_NOT_AVAILABLE NOT_ENOUGH_REPLICAS NETWORK_EXCEPTION KAFKA_STORAGE_ERROR FENCED_LEADER_EPOCH "
    "UNKNOWN_LEADER_EPOCH COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
    "CONCURRENT_TRANSACTIONS THROTTLING_QUOTA_EXCEEDED _TRANSPORT _ALL_BROKERS_DOWN _RETRY _RESOLVE _WAIT_COORD "
    "_TIMED_OUT_QUEUE",
    (
        ErrorKind.FATAL,
        DeliveryEnd.UNKNOWN,
    ): "_FATAL _FENCED _GAPLESS_GUARANTEE _INCONSISTENT INVALID_PRODUCER_EPOCH PRODUCER_FENCED "
    "OUT_OF_ORDER_SEQUENCE_NUMBER UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING UNSUPPORTED_VERSION "
    "INVALID_TXN_STATE",
    # librdkafka gives _BAD_MSG for an answer that it cannot read.
    (
        ErrorKind.UNCERTAIN,
        DeliveryEnd.UNKNOWN,
    ): "_MSG_TIMED_OUT _PURGE_INFLIGHT _PURGE_QUEUE _TIMED_OUT REQUEST_TIMED_OUT _DESTROY "
    "_INTR _BAD_MSG NOT_ENOUGH_REPLICAS_AFTER_APPEND DUPLICATE_SEQUENCE_NUMBER UNKNOWN",
}


@pytest.mark.parametrize(
    ("error", "kind", "end"),
    [(name, kind, end) for (kind, end), names in ERRORS.items() for name in names.split()]
    + [("A_CODE_OF_THE_FUTURE", ErrorKind.UNCERTAIN, DeliveryEnd.UNKNOWN)],
)
def test_what_an_error_says_of_a_record(error: str, kind: ErrorKind, end: DeliveryEnd) -> None:
    assert find_error_kind(error) is kind
    assert classify_end(error) is end


def test_every_name_in_the_table_is_looked_at() -> None:
    looked_at = {name for names in ERRORS.values() for name in names.split()}
    assert looked_at == set().union(*delivery.KINDS.values())
    assert (classify_end(None), classify_end(delivery.NOT_SENT)) == (DeliveryEnd.DELIVERED, DeliveryEnd.NOT_DELIVERED)


@pytest.mark.parametrize("code", ["_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "TOPIC_AUTHORIZATION_FAILED"])
def test_what_the_client_does_not_take_is_sure_and_what_it_reports_is_not(client: FakeClient, code: str) -> None:
    """A broker that wrongly lacks a topic ends records so that were written, and whose answer was lost."""
    ends: list[DeliveryEnd] = []
    producer = producing(OnFailure.GO_ON)
    for name in ("reported", "refused"):
        record = Record("t", b"k", name.encode())
        producer.send(record, name, on_outcome=lambda outcome: ends.append(outcome.end))
    client.ends, client.refusal = [fault(code)], fault(code)
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
    client.refusal = fault(code)
    with pytest.raises(RecordRefusedError, match=f"the words of {code}; found: {code}; remedy: {remedy}"):
        producing().send(Record("t", b"k", b"v"))


def test_a_client_that_is_done_for_good_refuses_with_counts_and_the_rest_still_ends(client: FakeClient) -> None:
    """A sender hears of it at once; what waits in the queue was not sent; what was under way nobody knows."""
    ends: dict[str, DeliveryEnd] = {}
    producer = producing()

    def send(name: str) -> None:
        record = Record("t", name.encode(), b"v")
        producer.send(record, name, on_outcome=lambda outcome: ends.update({name: outcome.end}))

    client.room = 2
    for name in ("under way", "fatal", "queued", "queued too"):
        send(name)
    client.refusal = fault("_FATAL", fatal=True)
    client.report(None)
    client.report(fault("_FATAL", fatal=True))
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
    client.refusal = fault("_FENCED", fatal=True)
    with pytest.raises(UndeliveredError, match="nothing more to t: the words of _FENCED; found: 0 sent"):
        producing().send_all("t", pairs(2))


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


def test_every_name_in_the_table_is_one_that_the_client_can_give() -> None:
    """A misspelled name would be classed as uncertain, in silence."""
    from confluent_kafka import KafkaError

    numbers = {value for name, value in vars(KafkaError).items() if isinstance(value, int)}
    given = {KafkaError(number).name() for number in numbers} | {KafkaError(number).name() for number in range(130)}
    assert set().union(*delivery.KINDS.values()) <= given
    names = [name for names in delivery.KINDS.values() for name in names]
    assert len(names) == len(set(names)), "a name has two kinds"


def test_a_full_queue_waits_for_room_instead_of_failing(nobody: str) -> None:
    """Room comes when the oldest records run out of time: the only end they can have here."""
    found = build_producer_properties(nobody) | {"delivery.timeout.ms": "1000", "queue.buffering.max.messages": "2"}
    outcomes: list[Outcome] = []
    producer = ReliableProducer(found)
    for n in range(5):
        producer.send(Record("orders", None, str(n).encode()), on_outcome=outcomes.append)
    with pytest.raises(UndeliveredError, match="5 sent: 0 delivered, 0 outstanding, 5 _MSG_TIMED_OUT"):
        producer.close(20)
    assert [o.error for o in outcomes] == ["_MSG_TIMED_OUT"] * 5


@pytest.mark.parametrize("many", [False, True])
def test_a_record_that_met_a_full_client_is_not_sent_once_its_key_is_stopped(client: FakeClient, *, many: bool) -> None:
    """The look that made room for it stopped its key, and it went out all the same, in front of the one that failed."""
    client.ends = [fault("_MSG_TIMED_OUT")]
    producer = producing()
    if many:
        producer.send_all("t", [(b"k", b"1"), (b"k", b"2")], "12")
    else:
        producer.send(Record("t", b"k", b"1"), "1")
        producer.send(Record("t", b"k", b"2"), "2")
    producer.poll()
    assert client.sent == [b"1"]
    assert producer.handed_back == {("t", b"k"): ["2"]}
    assert (producer.counts.unknown, producer.counts.not_delivered) == (["1"], ["2"])


def test_a_callback_that_sends_does_not_overtake_a_record_that_met_a_full_client(client: FakeClient) -> None:
    client.ends = [None]
    producer = producing()
    producer.send(Record("t", b"k", b"1"), "1", lambda _: producer.send(Record("t", b"k", b"3"), "3"))
    producer.send(Record("t", b"k", b"2"), "2")
    producer.poll()
    client.ends = [None, None]
    producer.close(20)
    assert client.sent == [b"1", b"2", b"3"]


@pytest.mark.timeout(60)
def test_a_full_client_that_reports_nothing_keeps_close_no_longer_than_it_was_given(client: FakeClient) -> None:
    """It waited for room until the delivery timed out, which is a day."""
    producer = producing()
    producer._most_with_client = 1
    for n in range(3):
        producer.send(Record("t", b"k", b"v"), str(n))
    producer._most_with_client = 10
    with pytest.raises(UndeliveredError, match="not delivered: 1, 2; unknown: 0"):
        producer.close(0.1)


def test_numbers_of_many_records_are_theirs_where_the_client_is_full(client: FakeClient) -> None:
    producer = producing()
    producer.send_all("t", pairs(4))
    assert client.sent == [b"v"]
    with pytest.raises(UndeliveredError, match="not delivered: 1, 2, 3; unknown: 0"):
        producer.close(0)


def test_a_record_that_is_too_large_is_refused_at_once_and_not_counted(nobody: str) -> None:
    producer = ReliableProducer(build_producer_properties(nobody, {"message.max.bytes": "2000"}))
    with pytest.raises(RecordRefusedError, match="MSG_SIZE_TOO_LARGE"):
        producer.send(Record("orders", None, b"x" * 5000))
    assert producer.counts.sent == 0


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(("policy", "stops"), [(OnFailure.STOP_KEY, True), (OnFailure.GO_ON, False)])
def test_a_refused_record_stops_its_key_whenever_it_is_refused(
    nobody: str, policy: OnFailure, *, stops: bool, queued: bool
) -> None:
    """Refused at once it stopped nothing, so that later versions of a key went out and the first one after them."""
    properties = build_producer_properties(nobody, {"message.max.bytes": "2000"})
    producer = ReliableProducer(properties, on_failure=policy, most_with_client=1)
    if queued:
        producer.send(Record("orders", b"before", b"v"))
    with contextlib.suppress(RecordRefusedError):
        producer.send(Record("orders", b"k", b"x" * 5000), "large")
    if queued:
        producer._most_with_client = 3
        producer.poll()
    shown = pytest.raises(KeyStoppedError, match="record large of it") if stops else contextlib.nullcontext()
    with shown:
        producer.send(Record("orders", b"k", b"v"), "later")
    producer.send(Record("orders", b"other", b"v"), "other")
    producer.send(Record("orders", None, b"v"), "without a key")
    assert producer.stopped == ({("orders", b"k"): "large"} if stops else {})
    # Refused at once it is not counted: its sender has the error. Refused late it is.
    assert (producer.counts.sent, producer.counts.not_delivered) == (
        2 + (not stops) + 2 * queued,
        ["large"] if queued else [],
    )


def test_an_error_of_the_caller_is_not_hidden_by_what_is_left(nobody: str) -> None:
    def work() -> None:
        with ReliableProducer(build_producer_properties(nobody)) as producer:
            producer.send(Record("orders", None, b"x"))
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller") as seen:
        work()
    assert "1 of orders" in "".join(seen.value.__notes__)


# From here on against a real broker.


@pytest.fixture(scope="module")
def auto_creating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that creates the topics that it is asked for, as brokers do by default."""
    from dev.broker import EmbeddedBroker

    with EmbeddedBroker(tmp_path_factory.mktemp("auto"), auto_create_topics=True) as started:
        yield started


def held(bootstrap: str, topic: str) -> list[tuple[bytes | None, bytes | None]]:
    """Every committed record, partition by partition in the order of offsets."""
    found = read_topic(bootstrap, topic)
    return [found[place] for place in sorted(found)]


@pytest.mark.slow
def test_every_record_is_delivered_once_and_counted_through_a_queue_of_ten(bootstrap: str, topic: TopicFactory) -> None:
    name = topic(partitions=1)
    outcomes: list[Outcome] = []
    properties = build_producer_properties(bootstrap, {"queue.buffering.max.messages": "10"})
    with ReliableProducer(properties) as producer:
        for n in range(500):
            producer.send(Record(name, b"k", b"%d" % n, headers=[("n", None)]), on_outcome=outcomes.append)
    assert held(bootstrap, name) == [(b"k", b"%d" % n) for n in range(500)]
    assert [o.offset for o in outcomes] == list(range(500))
    assert all(o.delivered and o.topic == name and o.timestamp > 0 for o in outcomes)
    counts = producer.counts
    assert (counts.sent, counts.delivered, counts.outstanding, counts.failed) == (500, 500, 0, {})


@pytest.mark.slow
def test_several_clients_keep_the_order_of_each_key(bootstrap: str, topic: TopicFactory) -> None:
    name = topic(partitions=2)
    with ReliableProducer(build_producer_properties(bootstrap), clients=4) as producer:
        for n in range(20_000):
            producer.send(Record(name, b"%d" % (n % 7) if n % 7 else None, b"%d" % n, partition=0))
        producer.send(Record(name, b"1", b"last", headers=[("n", b"1")], timestamp=1_000_000))
        shown: list[str] = []
        more = [(b"more-%d" % (n % 300), b"%d" % n) for n in range(10_000)]
        producer.send_all(name, more, map(str, range(10_000)), shown.append)
    assert producer.counts.delivered == 30_001
    assert sorted(shown, key=int) == [str(n) for n in range(10_000)]
    others = {key for key, _ in more}
    found = [(key, value) for key, value in held(bootstrap, name) if value != b"last" and key not in others]
    for stored in range(7):
        values = [int(value or b"") for key, value in found if key == (b"%d" % stored if stored else None)]
        assert values == [*range(stored, 20_000, 7)]


def test_several_clients_have_no_transaction_and_are_no_single_client(nobody: str) -> None:
    with pytest.raises(ConfigurationError, match="a transaction belongs to one client"):
        ReliableProducer(build_producer_properties(nobody, {"transactional.id": "t"}), clients=2)
    producer = ReliableProducer(build_producer_properties(nobody), clients=2)
    with pytest.raises(ConfigurationError, match="clients=1"):
        _ = producer.client
    producer.send(Record("t", b"1", b"v"), "one")
    producer.send(Record("t", b"2", b"v"), "two")
    with pytest.raises(UndeliveredError, match="one, two"):
        producer.close(0)
    assert sorted(producer.counts.unknown) == ["one", "two"]


def test_a_client_ends_with_its_producer(nobody: str) -> None:
    """One that waits for the collector would go on connecting, and keep what it was given."""
    producer = ReliableProducer(build_producer_properties(nobody))
    producer.send(Record("t", b"1", b"v"))
    producer._give_up()
    gone = ref(producer)
    gc.disable()
    try:
        del producer
        assert gone() is None
    finally:
        gc.enable()


def pairs(number: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"%d" % n, b"v") for n in range(number)]


def test_many_records_are_named_and_counted_like_one(nobody: str) -> None:
    """Three of seven are with the client; one waits, so that those after it have to."""
    producer = ReliableProducer(build_producer_properties(nobody), most_with_client=3)
    producer.send_all("t", pairs(3), "abc")
    producer.send(Record("t", b"1", b"v"), "d")
    producer.send_all("t", pairs(1), "e")
    producer.send_all("t", pairs(2))
    assert producer.counts.sent == producer.counts.outstanding == 7
    with pytest.raises(UndeliveredError):
        producer.close(0)
    assert producer.counts.not_delivered == ["d", "e", "5", "6"]
    assert sorted(producer.counts.unknown) == ["a", "b", "c"]


SEVERAL = {
    "keys that differ": [b"a", b"b", b"c", b"d"],
    "a key twice": [b"a", b"a", b"c", b"d"],
    "none": [None, None, None, None],
    "an empty one": [b"", b"b", b"c", None],
}


@pytest.mark.parametrize("keys", SEVERAL.values(), ids=[*SEVERAL])
def test_the_one_of_many_that_failed_is_named(client: FakeClient, keys: list[bytes | None]) -> None:
    client.room, client.ends = 4, [None, None, fault("_MSG_TIMED_OUT"), None]
    producer = producing()
    producer.send_all("t", [(key, b"v") for key in keys])
    for _ in range(4):
        producer.poll()
    assert str(producer.counts) == "4 sent: 3 delivered, 0 outstanding, 1 _MSG_TIMED_OUT, 1 of them unknown"
    assert producer.counts.unknown == ["2"]
    assert producer.stopped == ({("t", keys[2]): "2"} if keys[2] else {})


@pytest.mark.parametrize("keys", SEVERAL.values(), ids=[*SEVERAL])
@pytest.mark.parametrize("ids", [None, "abcd"], ids=["numbers", "ids"])
def test_of_many_each_that_was_delivered_is_reported_by_its_id(
    client: FakeClient, keys: list[bytes | None], ids: str | None
) -> None:
    client.room, client.ends = 4, [None, fault("_MSG_TIMED_OUT"), None, None]
    shown: list[str] = []
    producer = producing()
    producer.send_all("t", [(key, b"v") for key in keys], ids, shown.append)
    while client.ends:
        producer.poll()
        assert len(shown) == producer.counts.delivered == 3 - client.ends.count(None), "as each report comes"
    assert shown == (["0", "2", "3"] if ids is None else ["a", "c", "d"])
    assert producer.counts.unknown == (["1"] if ids is None else ["b"])


def test_of_many_those_that_wait_for_room_are_reported_too(client: FakeClient) -> None:
    """The client is full before we are, so one meets it full and waits in our queue, with those after it."""
    client.room, client.ends = 2, [None] * 5
    shown: list[str] = []
    producer = producing()
    producer.send_all("t", pairs(5), "abcde", shown.append)
    assert producer.close(1).delivered == 5
    assert shown == [*"abcde"]


def test_of_many_that_have_callbacks_the_client_leaves_unknown_only_those_it_never_reported_of(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that heard that a record was delivered may have acknowledged it."""
    monkeypatch.setattr(highwater.resources.producer, "PURGE_SECONDS", 0.0)
    client.silent, client.room = True, 4
    client.ends = [None, fault("INVALID_MSG")]
    shown: list[str] = []
    producer = producing()
    producer.send_all("t", pairs(4), "abcd", shown.append)
    producer.poll()
    producer.poll()
    with pytest.raises(UndeliveredError, match="4 sent: 1 delivered, 0 outstanding, 1 INVALID_MSG, 2 UNREPORTED"):
        producer.close(0)
    assert (producer.counts.not_delivered, producer.counts.unknown, shown) == (["b"], ["c", "d"], ["a"])
    client.report(None)
    assert (producer.counts.delivered, shown) == (1, ["a"]), "it has its end"


def test_of_many_a_callback_that_raises_keeps_no_other_from_being_reported(client: FakeClient) -> None:
    client.room, client.ends = 3, [None] * 3
    shown: list[str] = []

    def notify(name: str) -> None:
        shown.append(name)
        if name != "c":
            raise LookupError(name)

    producer = producing()
    with pytest.raises(LookupError, match="a"):  # the first report comes at once
        producer.send_all("t", pairs(3), "abc", notify)
    with pytest.raises(LookupError, match="b"):
        producer.close(1)
    assert (shown, producer.counts.delivered) == ([*"abc"], 3)


def test_of_many_that_the_client_never_reports_those_that_it_reported_are_as_unknown(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the delivered ones of a batch only: to call one delivered that is not would lose it."""
    monkeypatch.setattr(highwater.resources.producer, "PURGE_SECONDS", 0.0)
    client.silent, client.room = True, 4
    client.ends = [None, fault("INVALID_MSG")]
    producer = producing()
    producer.send_all("t", pairs(4), "abcd")
    producer.poll()
    producer.poll()
    assert (producer.counts.delivered, producer.counts.outstanding) == (1, 2)
    with pytest.raises(UndeliveredError, match="4 sent: 0 delivered, 0 outstanding, 1 INVALID_MSG, 3 UNREPORTED"):
        producer.close(0)
    assert (producer.counts.not_delivered, producer.counts.unknown) == (["b"], ["a", "c", "d"])
    client.report(None)
    client.report(fault("_PURGE_QUEUE"))
    assert producer.counts.delivered == 0


@pytest.mark.parametrize("keys", [[b"a", b"b", b"c"], [None, None, None]], ids=["together", "each"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_before_any_was_sent_leaves_none_unknown(
    client: FakeClient, keys: list[bytes | None], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    impersonate, calls = highwater.resources.delivery_tickets.Ticket.cover_records, itertools.count(1)

    def interrupted(*given: Any) -> object:
        if next(calls) == at:
            raise KeyboardInterrupt
        return impersonate(*given)

    client.room = 3
    producer = producing()
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(highwater.resources.delivery_tickets.Ticket, "cover_records", interrupted)
        producer.send_all("t", [(key, b"v") for key in keys])
    assert producer._with_client == len(client.sent) == producer.counts.sent
    client.ends = [None] * 3
    while client.under_way:
        producer.poll()
    assert producer.close(0).delivered == len(client.sent)


def test_what_an_interrupt_takes_away_between_two_batches_was_delivered_all_the_same(client: FakeClient) -> None:
    client.room, client.ends = 2, [None, None]
    producer = producing()
    producer.send_all("t", pairs(2))
    producer.poll()
    producer.poll()
    producer._free.pop()
    assert producer.close(0).delivered == 2


def test_a_stuck_record_of_each_batch_keeps_only_so_many_keys(client: FakeClient) -> None:
    """Each kept those of all that were sent with it, whatever had become of them."""
    client.room = 1_000
    producer = producing()
    producer._most_with_client = 100
    for n in range(50):
        producer.send_all("t", [(b"stuck", b"v"), (b"%d" % n, b"v")])
        client.under_way.pop()[2](None, None)
    shared = [ticket for ticket in producer._tickets.every if ticket.left and ticket.places]
    assert len(shared) == 2 * highwater.resources.producer.SPREAD
    assert (producer.counts.delivered, producer.counts.outstanding) == (50, 50)


def test_many_records_before_one_whose_key_is_of_a_wrong_type_are_sent(client: FakeClient) -> None:
    client.room = 4
    wrong: Any = bytearray(b"k")
    producer = producing()
    producer.send_all("t", [(b"a", b"1"), (wrong, b"2"), (b"c", b"3")])
    assert client.sent == [b"1", b"2", b"3"]


def test_many_records_before_an_error_of_their_source_are_sent(client: FakeClient) -> None:
    def failing() -> Iterator[tuple[bytes | None, bytes | None]]:
        yield from pairs(3)
        raise OSError("the source is gone")

    client.room = 4
    producer = producing()
    with pytest.raises(OSError, match="the source is gone"):
        producer.send_all("t", failing())
    assert (len(client.sent), producer.counts.sent) == (3, 3)


@pytest.mark.parametrize("ids", ["ab", "abcd"], ids=["fewer", "more"])
def test_ids_that_are_not_as_many_as_the_records_are_reported(nobody: str, ids: str) -> None:
    producer = ReliableProducer(build_producer_properties(nobody))
    with pytest.raises(ValueError, match="zip"):
        producer.send_all("t", pairs(3), ids)
    assert producer.counts.sent == min(len(ids), 3)


def test_a_refused_record_among_many_is_not_counted_and_stops_its_key(nobody: str) -> None:
    producer = ReliableProducer(build_producer_properties(nobody, {"message.max.bytes": "1000"}))
    with pytest.raises(RecordRefusedError):
        producer.send_all("t", [(b"1", b"v"), (b"2", b"v" * 2000), (b"3", b"v")], "abc")
    assert producer.counts.sent == 1
    with pytest.raises(KeyStoppedError, match="c was not sent"):
        producer.send_all("t", [(b"1", b"v"), (b"2", b"v")], "bc")
    assert producer.counts.sent == 2


@pytest.mark.parametrize("clients", [1, 2])
def test_a_value_of_a_wrong_type_is_an_error_and_not_counted(nobody: str, clients: int) -> None:
    producer = ReliableProducer(build_producer_properties(nobody), clients=clients)
    wrong: Any = 7
    with pytest.raises(TypeError):
        producer.send(Record("t", b"1", wrong))
    with pytest.raises(TypeError):
        producer.send_all("t", [(b"1", wrong)])
    assert str(producer.counts) == "0 sent: 0 delivered, 0 outstanding"
    producer.close(0)


def test_a_value_of_a_wrong_type_that_had_to_wait_is_reported_later_and_was_not_delivered() -> None:
    wrong: Any = 7
    producer = ReliableProducer(answering(), most_with_client=1)
    producer.send(Record("t", b"1", b"v"))
    producer.send(Record("t", b"2", wrong), "wrong")
    with pytest.raises(TypeError):
        producer.close()
    assert producer.counts.not_delivered == ["wrong"]
    assert producer.counts.outstanding == 0


def test_what_takes_in_reports_is_used_again() -> None:
    """The interpreter's collector would walk through all that is loaded for every 700 made."""
    with ReliableProducer(answering()) as producer:
        for _ in range(50):
            producer.send_all("t", pairs(100))
            producer.flush()
        assert len(producer._tickets.every) == 1
    assert producer.counts.delivered == 5_000


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 4])
def test_many_records_are_delivered_once_in_the_order_of_each_key(
    bootstrap: str, topic: TopicFactory, clients: int
) -> None:
    name = topic(partitions=1)
    with ReliableProducer(build_producer_properties(bootstrap), most_with_client=500, clients=clients) as producer:
        producer.send_all(name, ((b"%d" % (n % 7) if n % 7 else None, b"%d" % n) for n in range(20_000)))
    assert producer.counts.delivered == 20_000
    found = held(bootstrap, name)
    for stored in range(7):
        values = [int(value or b"") for key, value in found if key == (b"%d" % stored if stored else None)]
        assert values == [*range(stored, 20_000, 7)]


@pytest.mark.slow
def test_a_record_keeps_the_partition_and_the_time_that_are_asked_for(bootstrap: str, topic: TopicFactory) -> None:
    name = topic(partitions=3)
    outcomes: list[Outcome] = []
    with ReliableProducer(build_producer_properties(bootstrap)) as producer:
        producer.send(Record(name, None, b"v", partition=2, timestamp=1_000_000), on_outcome=outcomes.append)
    assert outcomes == [Outcome(name, 2, 0, 1_000_000)]


@pytest.mark.slow
def test_an_absent_topic_is_not_created_and_its_records_are_reported(auto_creating: EmbeddedBroker) -> None:
    """librdkafka's producers create topics by default, where the broker lets them."""
    from confluent_kafka.admin import AdminClient

    properties = build_producer_properties(auto_creating.bootstrap) | {"topic.metadata.propagation.max.ms": "1000"}
    producer = ReliableProducer(properties)
    producer.send(Record("nowhere", None, b"v"))
    with pytest.raises(UndeliveredError, match=r"1 sent: 0 delivered, 0 outstanding, 1 _?UNKNOWN_TOPIC"):
        producer.close(30)
    admin = AdminClient({"bootstrap.servers": auto_creating.bootstrap})
    assert "nowhere" not in admin.list_topics(timeout=60).topics


REFUSED = 200
"""The record that the broker finds too large; it goes through the client, which allows more."""


def send_with_one_too_large(
    bootstrap: str, name: str, policy: OnFailure, most_with_client: int = MAX_WITH_CLIENT, clients: int = 1
) -> tuple[ReliableProducer, list[str], list[str]]:
    """400 records of 4 keys; returns the producer, the ids that were ticked, and those that were not taken."""
    ticked: list[str] = []
    refused: list[str] = []
    properties = build_producer_properties(bootstrap, {"message.max.bytes": "4000000", "linger.ms": "0"})
    producer = ReliableProducer(properties, on_failure=policy, most_with_client=most_with_client, clients=clients)
    for n in range(400):
        value = b"x" * 2_000_000 if n == REFUSED else b"%d" % n
        try:
            producer.send(Record(name, b"k%d" % (n % 4), value, partition=0), str(n), ticked.append)
        except KeyStoppedError:
            refused.append(str(n))
    producer.flush(60)
    return producer, ticked, refused


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 3])
def test_a_record_that_fails_for_good_stops_its_key_and_no_other(
    bootstrap: str, topic: TopicFactory, clients: int
) -> None:
    name = topic(partitions=1)
    producer, ticked, refused = send_with_one_too_large(bootstrap, name, OnFailure.STOP_KEY, 20, clients)
    assert producer.counts.not_delivered[0] == str(REFUSED)
    assert producer.counts.unknown == []
    assert producer.handed_back
    assert set(producer.stopped) == {(name, b"k0")}
    values = [value.decode() for _, value in held(bootstrap, name) if value]
    assert sorted(ticked) == sorted(values), "each record of the topic is ticked once"
    for key in (1, 2, 3):
        assert [int(v) for v in values if int(v) % 4 == key] == [*range(key, 400, 4)], "other keys: all, in order"
    ours = [int(v) for v in values if int(v) % 4 == 0]
    assert ours == sorted(ours)
    assert ours[: REFUSED // 4] == [*range(0, REFUSED, 4)]
    back = [int(i) for i in producer.handed_back.get((name, b"k0"), [])]
    assert back == sorted(back), "in their order"
    later = {*range(REFUSED + 4, 400, 4)}
    assert later == {*back} | {int(i) for i in refused} | ({*ours} & later), "none is forgotten"
    assert len(ticked) + len(producer.counts.not_delivered) + len(refused) == 400


@pytest.mark.slow
def test_the_policy_to_go_on_sends_the_rest_and_reports_the_one(bootstrap: str, topic: TopicFactory) -> None:
    name = topic(partitions=1)
    producer, ticked, refused = send_with_one_too_large(bootstrap, name, OnFailure.GO_ON)
    assert refused == []
    assert producer.counts.not_delivered == [str(REFUSED)]
    assert [value.decode() for _, value in held(bootstrap, name) if value] == [
        str(n) for n in range(400) if n != REFUSED
    ]
    assert sorted(ticked, key=int) == [str(n) for n in range(400) if n != REFUSED]


@pytest.mark.slow
@pytest.mark.crash
def test_a_broker_that_is_killed_and_comes_back_costs_no_record_and_doubles_none(tmp_path: Path) -> None:
    """The queue holds the 1,200 records that may wait until the thread that sends them starts the broker again."""
    from dev.broker import EmbeddedBroker

    with EmbeddedBroker(tmp_path) as broker:
        create_topic(broker.bootstrap, "t", 1, {})
        with ReliableProducer(
            build_producer_properties(broker.bootstrap, {"queue.buffering.max.messages": "2000"})
        ) as producer:
            for n in range(3000):
                if n == 500:
                    broker.kill()
                if n == 1200:
                    broker.start()
                producer.send(Record("t", None, b"%d" % n, partition=0))
        assert producer.counts.delivered == 3000
        assert [value for _, value in held(broker.bootstrap, "t")] == [b"%d" % n for n in range(3000)]


def test_each_record_is_reported_to_its_own_callback(client: FakeClient) -> None:
    """The callbacks of the record before are used again where they are the same ones."""
    client.room, client.ends = 4, [None] * 4
    first: list[str] = []
    second: list[str] = []
    to_first, to_second = first.append, second.append
    producer = producing()
    for name, callback in (("a", to_first), ("b", to_second), ("c", None), ("d", to_second)):
        producer.send(Record("t", name.encode(), b"v"), name, callback)
    while client.under_way:
        producer.poll()
    assert (first, second, producer.counts.delivered) == (["a"], ["b", "d"], 4)


def test_one_by_one_and_together_the_records_of_a_key_go_to_the_same_client(nobody: str) -> None:
    """Else they would change places."""
    clients = SeveralClients(build_producer_properties(nobody), 3)
    keys = [None, *(b"%d" % n for n in range(30))]
    assert clients.select_produces(keys) == [clients.produces[find_client_index(key, 3)] for key in keys]
    assert len({*map(id, clients.select_produces(keys))}) == 3
