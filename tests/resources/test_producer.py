"""The reliable producer on a simulated client: each record's end is reported."""

from __future__ import annotations

import contextlib

import pytest

import highwater.resources.producer
from highwater.errors import KeyStoppedError, RecordRefusedError, UndeliveredError
from highwater.resources.delivery import DeliveryEnd
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import OnFailure, Outcome, Record
from tests.helpers.fake_client import FakeClient, build_fault
from tests.helpers.producing import build_answering_properties, build_pairs, open_producer


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
    producer = open_producer()
    producer.send(Record("t", b"a", b"v"), "a", on_outcome=outcomes.append)
    producer.send_all("t", [(b"b", b"v"), (b"c", b"v")], "bc")
    producer.send(Record("t", b"d", b"v"), "d")
    with pytest.raises(UndeliveredError, match="4 sent: 0 delivered, 0 outstanding, 1 NOT_SENT, 3 UNREPORTED, 3 of"):
        producer.close(0)
    for error in (None, build_fault("_PURGE_QUEUE"), None):
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
    producer = open_producer()
    producer.send(Record("t", b"k", b"v"), on_outcome=outcomes.append)
    client.report(None, offset=OFFSET_INVALID)
    assert [(outcome.delivered, outcome.partition, outcome.offset) for outcome in outcomes] == [(True, 0, -1)]


class FailingCallback:
    """One that breaks at each record, and keeps what it was called with."""

    def __init__(self) -> None:
        self.reported: list[object] = []

    def __call__(self, shown: object) -> None:
        self.reported.append(shown)
        raise RuntimeError(f"the caller cannot take {shown}")


def test_a_callback_that_raises_at_close_leaves_no_other_record_without_its_end() -> None:
    """It once left `close` at once, with the rest in the queue. The answers are slow, so that there is a rest."""
    slow = {"test.mock.broker.rtt": "200"}
    producer, callback = ReliableProducer(build_answering_properties() | slow, most_with_client=2), FailingCallback()
    for n in range(5):
        producer.send(Record("orders", b"k", b"v"), str(n), callback)
    with pytest.raises(RuntimeError, match="the caller cannot take 0"):
        producer.close(20)
    assert callback.reported == ["0", "1", "2", "3", "4"]
    assert (producer.counts.delivered, producer.counts.outstanding, len(producer.client)) == (5, 0, 0)


def test_undelivered_records_are_reported_beside_the_error_of_a_callback(nobody: str) -> None:
    producer, callback = ReliableProducer(build_producer_properties(nobody), most_with_client=2), FailingCallback()
    for n in range(3):
        producer.send(Record("orders", b"k", b"v"), f"id-{n}", on_outcome=callback)
    with pytest.raises(RuntimeError, match="the caller cannot take") as raised:
        producer.close(0.1)
    assert "not delivered: id-2; unknown: id-0, id-1" in "".join(raised.value.__notes__)
    producer.client.poll(0)  # what it says of itself, that nobody answers, counts too
    assert (len(callback.reported), producer.counts.outstanding, len(producer.client)) == (3, 0, 0)


def test_a_callback_that_raises_is_reported_by_the_next_look_and_once() -> None:
    producer, callback = ReliableProducer(build_answering_properties()), FailingCallback()
    producer.send(Record("orders", b"k", b"v"), "first", callback)
    with pytest.raises(RuntimeError, match="cannot take first"):
        producer.flush(20)
    producer.send(Record("orders", b"k", b"v"), "second")
    assert producer.close(20).delivered == 2


def test_an_error_of_the_caller_goes_on_when_a_callback_raises_too(nobody: str) -> None:
    def work() -> None:
        with ReliableProducer(build_producer_properties(nobody)) as producer:
            producer.send(Record("orders", b"k", b"v"), "first", on_outcome=FailingCallback())
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
    client.ends = [build_fault("_MSG_TIMED_OUT")]
    producer = open_producer()
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
    producer = open_producer()
    producer.send(Record("t", b"k", b"1"), "1", lambda _: producer.send(Record("t", b"k", b"3"), "3"))
    producer.send(Record("t", b"k", b"2"), "2")
    producer.poll()
    client.ends = [None, None]
    producer.close(20)
    assert client.sent == [b"1", b"2", b"3"]


@pytest.mark.timeout(60)
def test_a_full_client_that_reports_nothing_keeps_close_no_longer_than_it_was_given(client: FakeClient) -> None:
    """It waited for room until the delivery timed out, which is a day."""
    producer = open_producer()
    producer._most_with_client = 1
    for n in range(3):
        producer.send(Record("t", b"k", b"v"), str(n))
    producer._most_with_client = 10
    with pytest.raises(UndeliveredError, match="not delivered: 1, 2; unknown: 0"):
        producer.close(0.1)


def test_numbers_of_many_records_are_theirs_where_the_client_is_full(client: FakeClient) -> None:
    producer = open_producer()
    producer.send_all("t", build_pairs(4))
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
