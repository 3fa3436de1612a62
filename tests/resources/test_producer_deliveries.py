"""The reliable producer on a real broker: one delivery of each record, in the order of its key."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import ref

import pytest

from highwater.errors import ConfigurationError, KeyStoppedError, UndeliveredError
from highwater.resources.producer import MAX_WITH_CLIENT, ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import OnFailure, Outcome, Record
from highwater.resources.several_clients import SeveralClients, find_client_index
from tests.conftest import TopicFactory, create_topic
from tests.helpers.fake_client import FakeClient
from tests.helpers.producing import open_producer, read_records

if TYPE_CHECKING:
    from dev.broker import EmbeddedBroker


@pytest.fixture(scope="module")
def auto_creating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that creates the topics that it is asked for, as brokers do by default."""
    from dev.broker import EmbeddedBroker

    with EmbeddedBroker(tmp_path_factory.mktemp("auto"), auto_create_topics=True) as started:
        yield started


@pytest.mark.slow
def test_every_record_is_delivered_once_and_counted_through_a_queue_of_ten(bootstrap: str, topic: TopicFactory) -> None:
    name = topic(partitions=1)
    outcomes: list[Outcome] = []
    properties = build_producer_properties(bootstrap, {"queue.buffering.max.messages": "10"})
    with ReliableProducer(properties) as producer:
        for n in range(500):
            producer.send(Record(name, b"k", b"%d" % n, headers=[("n", None)]), on_outcome=outcomes.append)
    assert read_records(bootstrap, name) == [(b"k", b"%d" % n) for n in range(500)]
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
    found = [(key, value) for key, value in read_records(bootstrap, name) if value != b"last" and key not in others]
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
    producer._abandon_outstanding()
    gone = ref(producer)
    gc.disable()
    try:
        del producer
        assert gone() is None
    finally:
        gc.enable()


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
    values = [value.decode() for _, value in read_records(bootstrap, name) if value]
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
    assert [value.decode() for _, value in read_records(bootstrap, name) if value] == [
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
        assert [value for _, value in read_records(broker.bootstrap, "t")] == [b"%d" % n for n in range(3000)]


def test_each_record_is_reported_to_its_own_callback(client: FakeClient) -> None:
    """The callbacks of the record before are used again where they are the same ones."""
    client.room, client.ends = 4, [None] * 4
    first: list[str] = []
    second: list[str] = []
    to_first, to_second = first.append, second.append
    producer = open_producer()
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
