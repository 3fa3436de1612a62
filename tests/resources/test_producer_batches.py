"""Many records sent in one call: each is reported like one that was sent alone."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import highwater.resources.producer
from highwater.errors import KeyStoppedError, RecordRefusedError, UndeliveredError
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Record
from tests.conftest import TopicFactory
from tests.helpers.fake_client import FakeClient, build_fault
from tests.helpers.producing import build_answering_properties, build_pairs, open_producer, read_records


def test_many_records_are_named_and_counted_like_one(nobody: str) -> None:
    """Three of seven are with the client; one waits, so that those after it have to."""
    producer = ReliableProducer(build_producer_properties(nobody), most_with_client=3)
    producer.send_all("t", build_pairs(3), "abc")
    producer.send(Record("t", b"1", b"v"), "d")
    producer.send_all("t", build_pairs(1), "e")
    producer.send_all("t", build_pairs(2))
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
    client.room, client.ends = 4, [None, None, build_fault("_MSG_TIMED_OUT"), None]
    producer = open_producer()
    producer.send_all("t", [(key, b"v") for key in keys])
    for _ in range(4):
        producer.poll()
    assert str(producer.counts) == "4 sent: 3 delivered, 0 outstanding, 1 _MSG_TIMED_OUT, 1 of them unknown"
    assert producer.counts.unknown == ["2"]
    assert producer.stopped == ({("t", keys[2]): "2"} if keys[2] else {})


@pytest.mark.parametrize("keys", SEVERAL.values(), ids=[*SEVERAL])
@pytest.mark.parametrize("ids", [None, "abcd"], ids=["numbers", "ids"])
def test_each_delivered_record_of_a_batch_is_reported_by_its_id(
    client: FakeClient, keys: list[bytes | None], ids: str | None
) -> None:
    client.room, client.ends = 4, [None, build_fault("_MSG_TIMED_OUT"), None, None]
    shown: list[str] = []
    producer = open_producer()
    producer.send_all("t", [(key, b"v") for key in keys], ids, shown.append)
    while client.ends:
        producer.poll()
        assert len(shown) == producer.counts.delivered == 3 - client.ends.count(None), "as each report comes"
    assert shown == (["0", "2", "3"] if ids is None else ["a", "c", "d"])
    assert producer.counts.unknown == (["1"] if ids is None else ["b"])


def test_batch_records_waiting_for_a_full_client_are_reported(client: FakeClient) -> None:
    """The client is full before we are, so one meets it full and waits in our queue, with those after it."""
    client.room, client.ends = 2, [None] * 5
    shown: list[str] = []
    producer = open_producer()
    producer.send_all("t", build_pairs(5), "abcde", shown.append)
    assert producer.close(1).delivered == 5
    assert shown == [*"abcde"]


def test_only_unreported_records_of_a_batch_with_callbacks_are_unknown(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that heard that a record was delivered may have acknowledged it."""
    monkeypatch.setattr(highwater.resources.producer, "PURGE_SECONDS", 0.0)
    client.silent, client.room = True, 4
    client.ends = [None, build_fault("INVALID_MSG")]
    shown: list[str] = []
    producer = open_producer()
    producer.send_all("t", build_pairs(4), "abcd", shown.append)
    producer.poll()
    producer.poll()
    with pytest.raises(UndeliveredError, match="4 sent: 1 delivered, 0 outstanding, 1 INVALID_MSG, 2 UNREPORTED"):
        producer.close(0)
    assert (producer.counts.not_delivered, producer.counts.unknown, shown) == (["b"], ["c", "d"], ["a"])
    client.report(None)
    assert (producer.counts.delivered, shown) == (1, ["a"]), "it has its end"


def test_failing_callback_of_a_batch_does_not_stop_other_reports(client: FakeClient) -> None:
    client.room, client.ends = 3, [None] * 3
    shown: list[str] = []

    def notify(name: str) -> None:
        shown.append(name)
        if name != "c":
            raise LookupError(name)

    producer = open_producer()
    with pytest.raises(LookupError, match="a"):  # the first report comes at once
        producer.send_all("t", build_pairs(3), "abc", notify)
    with pytest.raises(LookupError, match="b"):
        producer.close(1)
    assert (shown, producer.counts.delivered) == ([*"abc"], 3)


def test_batch_with_unreported_records_is_unknown_as_a_whole(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the delivered ones of a batch only: to call one delivered that is not would lose it."""
    monkeypatch.setattr(highwater.resources.producer, "PURGE_SECONDS", 0.0)
    client.silent, client.room = True, 4
    client.ends = [None, build_fault("INVALID_MSG")]
    producer = open_producer()
    producer.send_all("t", build_pairs(4), "abcd")
    producer.poll()
    producer.poll()
    assert (producer.counts.delivered, producer.counts.outstanding) == (1, 2)
    with pytest.raises(UndeliveredError, match="4 sent: 0 delivered, 0 outstanding, 1 INVALID_MSG, 3 UNREPORTED"):
        producer.close(0)
    assert (producer.counts.not_delivered, producer.counts.unknown) == (["b"], ["a", "c", "d"])
    client.report(None)
    client.report(build_fault("_PURGE_QUEUE"))
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
    producer = open_producer()
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(highwater.resources.delivery_tickets.Ticket, "cover_records", interrupted)
        producer.send_all("t", [(key, b"v") for key in keys])
    assert producer._with_client == len(client.sent) == producer.counts.sent
    client.ends = [None] * 3
    while client.under_way:
        producer.poll()
    assert producer.close(0).delivered == len(client.sent)


def test_records_interrupted_between_two_batches_are_delivered(client: FakeClient) -> None:
    client.room, client.ends = 2, [None, None]
    producer = open_producer()
    producer.send_all("t", build_pairs(2))
    producer.poll()
    producer.poll()
    producer._free.pop()
    assert producer.close(0).delivered == 2


def test_a_stuck_record_of_each_batch_keeps_only_so_many_keys(client: FakeClient) -> None:
    """Each kept those of all that were sent with it, whatever had become of them."""
    client.room = 1_000
    producer = open_producer()
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
    producer = open_producer()
    producer.send_all("t", [(b"a", b"1"), (wrong, b"2"), (b"c", b"3")])
    assert client.sent == [b"1", b"2", b"3"]


def test_many_records_before_an_error_of_their_source_are_sent(client: FakeClient) -> None:
    def failing() -> Iterator[tuple[bytes | None, bytes | None]]:
        yield from build_pairs(3)
        raise OSError("the source is gone")

    client.room = 4
    producer = open_producer()
    with pytest.raises(OSError, match="the source is gone"):
        producer.send_all("t", failing())
    assert (len(client.sent), producer.counts.sent) == (3, 3)


@pytest.mark.parametrize("ids", ["ab", "abcd"], ids=["fewer", "more"])
def test_ids_that_are_not_as_many_as_the_records_are_reported(nobody: str, ids: str) -> None:
    producer = ReliableProducer(build_producer_properties(nobody))
    with pytest.raises(ValueError, match="zip"):
        producer.send_all("t", build_pairs(3), ids)
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
    producer = ReliableProducer(build_answering_properties(), most_with_client=1)
    producer.send(Record("t", b"1", b"v"))
    producer.send(Record("t", b"2", wrong), "wrong")
    with pytest.raises(TypeError):
        producer.close()
    assert producer.counts.not_delivered == ["wrong"]
    assert producer.counts.outstanding == 0


def test_tickets_that_receive_reports_are_reused() -> None:
    """The interpreter's collector would walk through all that is loaded for every 700 made."""
    with ReliableProducer(build_answering_properties()) as producer:
        for _ in range(50):
            producer.send_all("t", build_pairs(100))
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
    found = read_records(bootstrap, name)
    for stored in range(7):
        values = [int(value or b"") for key, value in found if key == (b"%d" % stored if stored else None)]
        assert values == [*range(stored, 20_000, 7)]
