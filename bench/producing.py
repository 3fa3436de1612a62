"""(j) The reliable producer against a bare one with the same acknowledgements."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.harness import Result, Row, Target, alternate
from dev.processes import LOOPBACK, free_port
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Record

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from bench.world import World

PARTITIONS = 4
KEYS = 10_000
ADDED_SECONDS = 0.05
SMALL, USUAL = 128, 1024
LISTENERS = ("PLAINTEXT", "CONTROLLER", "FAR")

Send = Callable[[str, str, int, bytes], "Took"]


class Settings(NamedTuple):
    """The producer's settings for brokers that are far away, by the advice of docs/producers.md."""

    clients: int
    linger: float
    most_with_client: int


FAR = {SMALL: Settings(2, 2 * ADDED_SECONDS, 140_000), USUAL: Settings(8, 6 * ADDED_SECONDS, 70_000)}
# Sent records, as a multiple of the requested ones: the last round trips are no throughput, and would be a good part of
# it.
TIMES = {SMALL: 3, USUAL: 2}
RELIABLE, RELIABLE_FAR = "reliable", "reliable, far"
BARE, BARE_BY_ID = "bare", "bare, callbacks"
# What acknowledges upstream, of both: a callback for each record, which has its id.
BY_ID, ONE_BY_ONE = "reliable, callbacks", "reliable, one by one"

# The first records, of keys enough for every client and partition to have one.
WARMING = 100
FIRST = "the first records"

IN_FLIGHT: dict[str, object] = {"max.in.flight.requests.per.connection": 5}
IDEMPOTENT: dict[str, object] = {"enable.idempotence": True}


def compare_reliable_with_bare(world: World, rounds: int, records: int) -> Result:
    """(j) The same records by both, to their last delivery report: one replica and three, near and 50 ms away."""
    rows = []
    for brokers in (1, 3):
        with _near_and_far(world.home / f"brokers-{brokers}", brokers) as addresses:
            for where, address in addresses.items():
                for size in (SMALL, USUAL):
                    rows += _rows(Case(size, brokers, where), address, rounds, records * TIMES[size])
    return Result(
        name="j",
        title="The reliable producer, against a bare one",
        method=(
            f"{records * TIMES[USUAL]:,} records, or {records * TIMES[SMALL]:,} small ones, over {KEYS:,} keys, "
            f"acks=all, two of three replicas in sync: seconds from the first {WARMING} delivery reports to the last. "
            f"'{BARE}' has librdkafka's defaults, '{RELIABLE}' is `send_all`, '{ONE_BY_ONE}' `send`; callbacks get "
            f"each record's id. Far away, all reliable ones but '{RELIABLE}' follow "
            f"[producers.md](producers.md#the-properties); proxies delay the brokers' answers. Shares are of the "
            f"speed of '{BARE}', with callbacks of '{BARE_BY_ID}'."
        ),
        rows=rows,
        targets=[
            Target(f"share: {name}", row.ratio(name, peer), 0.8, case=row.case)
            for row in rows
            for name, peer in _list_compared_pairs(row)
        ],
    )


def _list_compared_pairs(row: Row) -> list[tuple[str, str]]:
    """Pairs of a producer and the bare one it is compared with; none for the time of the first record."""
    if FIRST in row.case:
        return []
    together = RELIABLE_FAR if row.case.endswith("away") else RELIABLE
    return [(together, BARE), (BY_ID, BARE_BY_ID), (ONE_BY_ONE, BARE_BY_ID)]


class Took(NamedTuple):
    """Seconds until the first records were delivered, and from then until all others were."""

    first: float
    others: float


class Case(NamedTuple):
    """Bytes a value, replicas, and how far the brokers are."""

    size: int
    replicas: int
    where: str

    def __str__(self) -> str:
        replicas = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        return f"{self.size:,} bytes, {replicas}, {self.where}"


@contextmanager
def _near_and_far(home: Path, brokers: int) -> Iterator[dict[str, str]]:
    """A cluster's address near by, and the one by which clients reach it the long way alone.

    Each broker has a listener more, which gives clients the address of its proxy; among themselves brokers are near.
    """
    from dev.broker import EmbeddedCluster

    cluster = EmbeddedCluster(home, brokers)
    ports = {free_port(): broker for broker in cluster.brokers}
    for broker in cluster.brokers:  # what is deleted before it reaches the disk never waits for it
        broker.properties["log.segment.delete.delay.ms"] = "500"
    # In a process of its own: its threads would take the interpreter's lock away from the producer that is measured.
    ours, theirs = multiprocessing.Pipe()
    proxies = multiprocessing.get_context("spawn").Process(target=_measure_delay, args=([*ports], theirs), daemon=True)
    proxies.start()
    try:
        far = ours.recv()
        for (port, broker), address in zip(ports.items(), far, strict=True):
            broker.properties["listeners"] += f",FAR://{LOOPBACK}:{port}"
            broker.properties["advertised.listeners"] += f",FAR://{address}"
            broker.properties["listener.security.protocol.map"] = ",".join(f"{one}:PLAINTEXT" for one in LISTENERS)
        with cluster:
            yield {"near": cluster.bootstrap, f"{ADDED_SECONDS * 1000:.0f} ms away": ",".join(far)}
    finally:
        proxies.terminate()
        proxies.join()


def _measure_delay(ports: Sequence[int], connection: Connection) -> None:
    from dev.proxy import DelayingProxy

    with ExitStack() as proxies:
        connection.send([proxies.enter_context(DelayingProxy(port, ADDED_SECONDS)).address for port in ports])
        connection.recv()


def _rows(case: Case, bootstrap: str, rounds: int, records: int) -> list[Row]:
    payload = os.urandom(case.size // 2).hex().encode()
    numbers = itertools.count()
    first: dict[str, list[float]] = {}

    def variant(name: str, send: Send) -> Callable[[int], float]:
        first[name] = []

        def run(turn: int) -> float:
            topic = f"bench-j-{case.size}-{next(numbers)}-{case.where.split()[0]}"
            with _topic(bootstrap, topic, case.replicas):
                took = send(bootstrap, topic, records, payload)
            if turn >= 0:
                first[name].append(took.first)
            return took.others

        return run

    far = None if case.where == "near" else FAR[case.size]
    senders: dict[str, Send] = {
        RELIABLE: partial(_send_reliably, _send_all, None),
        **({} if far is None else {RELIABLE_FAR: partial(_send_reliably, _send_all, far)}),
        BY_ID: partial(_send_reliably, _send_all_by_id, far),
        ONE_BY_ONE: partial(_send_reliably, _send_one_by_one, far),
        BARE: partial(_send_barely, {}),
        BARE_BY_ID: partial(_send_barely, {}, by_id=True),
        "bare, 5 in flight": partial(_send_barely, IN_FLIGHT),
        "bare, idempotent": partial(_send_barely, IDEMPOTENT),
    }
    row = alternate(str(case), {name: variant(name, send) for name, send in senders.items()}, rounds)
    return [row, Row(f"{FIRST}, {case.where}", first)] if case.size == USUAL and case.replicas == 1 else [row]


@contextmanager
def _topic(bootstrap: str, name: str, replicas: int) -> Iterator[None]:
    """A topic, which is gone again afterwards: all of them together would fill a disk."""
    from confluent_kafka.admin import AdminClient, NewTopic

    config = {"min.insync.replicas": str(max(1, replicas - 1))}
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, PARTITIONS, replicas, config=config)])[name].result(30)
    try:
        yield
    finally:
        admin.delete_topics([name])[name].result(30)


def _send_reliably(
    send: Callable[[ReliableProducer, str, int, bytes, Acknowledged], None],
    far: Settings | None,
    bootstrap: str,
    topic: str,
    records: int,
    payload: bytes,
) -> Took:
    acknowledged = Acknowledged()
    begin = time.perf_counter()
    with _open(bootstrap, far) as producer:
        for number in range(WARMING):
            producer.send(Record(topic, b"%d" % number, payload), str(number))
        producer.flush()
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        send(producer, topic, records, payload, acknowledged)
    took = Took(first, time.perf_counter() - begin)
    if send is not _send_all:
        acknowledged.check(records)
    return took


class Acknowledged:
    """As little as a callback can do with an id."""

    def __init__(self) -> None:
        self.number = 0
        self.last = ""

    def __call__(self, record_id: str) -> None:
        self.number += 1
        self.last = record_id

    def check(self, records: int) -> None:
        if self.number != records:
            raise RuntimeError(f"{self.number} of {records} records were acknowledged")


def _send_all(producer: ReliableProducer, topic: str, records: int, payload: bytes, acknowledged: Acknowledged) -> None:
    del acknowledged
    producer.send_all(topic, ((b"%d" % (number % KEYS), payload) for number in range(records)))


def _send_all_by_id(
    producer: ReliableProducer, topic: str, records: int, payload: bytes, acknowledged: Acknowledged
) -> None:
    pairs = ((b"%d" % (number % KEYS), payload) for number in range(records))
    producer.send_all(topic, pairs, map(str, range(records)), acknowledged)


def _send_one_by_one(
    producer: ReliableProducer, topic: str, records: int, payload: bytes, acknowledged: Acknowledged
) -> None:
    for number in range(records):
        producer.send(Record(topic, b"%d" % (number % KEYS), payload), str(number), acknowledged)


def _open(bootstrap: str, far: Settings | None) -> ReliableProducer:
    if far is None:
        return ReliableProducer(build_producer_properties(bootstrap))
    properties = build_producer_properties(bootstrap, {"linger.ms": f"{far.linger * 1000:.0f}"})
    return ReliableProducer(properties, clients=far.clients, most_with_client=far.most_with_client)


def _send_barely(
    more: dict[str, object], bootstrap: str, topic: str, records: int, payload: bytes, *, by_id: bool = False
) -> Took:
    from confluent_kafka import Producer

    delivered = 0
    acknowledged = Acknowledged()

    def report(error: object, message: object) -> None:
        nonlocal delivered
        del message
        delivered += error is None

    def report_id(record_id: str, error: object, message: object) -> None:
        del message
        if error is None:
            acknowledged(record_id)

    begin = time.perf_counter()
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **more})
    for number in range(WARMING):
        producer.produce(topic, payload, b"%d" % number, on_delivery=report)
    producer.flush(120)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    for number in range(records):
        callback = partial(report_id, str(number)) if by_id else report
        while True:
            try:
                producer.produce(topic, payload, b"%d" % (number % KEYS), on_delivery=callback)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush(120)
    took = Took(first, time.perf_counter() - begin)
    acknowledged.number += delivered
    acknowledged.check(records + WARMING)
    return took
