"""(j) The reliable producer against a bare one with the same acknowledgements.

What belongs here: this benchmark. What does not: what is lost or doubled, which tests show.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.harness import Result, Row, Verdict, alternate, timed
from dev.processes import LOOPBACK, free_port
from resources.producer import Record, ReliableProducer
from resources.producer_properties import producer_properties

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from bench.world import World

PARTITIONS = 4
KEYS = 10_000
ADDED_SECONDS = 0.05
SMALL, USUAL = 128, 1024
LISTENERS = ("PLAINTEXT", "CONTROLLER", "FAR")

Send = Callable[[str, str, int, bytes], None]

IN_FLIGHT: dict[str, object] = {"max.in.flight.requests.per.connection": 5}
IDEMPOTENT: dict[str, object] = {"enable.idempotence": True}


def reliable_against_bare(world: World, rounds: int, records: int) -> Result:
    """(j) The same records by both, to their last delivery report: one replica and three, near and 50 ms away."""
    rows = []
    for brokers in (1, 3):
        with _near_and_far(world.home / f"brokers-{brokers}", brokers) as addresses:
            rows += [
                _row(Case(size, brokers, where), address, rounds, records)
                for where, address in addresses.items()
                for size in (SMALL, USUAL)
            ]
    return Result(
        name="j",
        title="The reliable producer, against a bare one",
        method=(
            f"{records:,} records over {KEYS:,} keys, acks=all for all, from the first send "
            "to the last delivery report. The bare one has librdkafka's defaults and counts its reports: it is not "
            "idempotent, and has any number of requests in flight. The two beside it show what each of these costs "
            "alone. Three replicas are on brokers of their own, two of which must be in sync. The delay is added to "
            "the brokers' answers to the client by proxies."
        ),
        rows=rows,
        verdicts=[
            Verdict(f"of the bare producer's speed: {row.case}", row.ratio("reliable", "bare"), 0.8) for row in rows
        ],
    )


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

    Each broker has a listener more, which tells clients the address of its proxy; among themselves brokers are near.
    """
    from dev.broker import EmbeddedCluster

    cluster = EmbeddedCluster(home, brokers)
    ports = {free_port(): broker for broker in cluster.brokers}
    # In a process of its own: its threads would take the interpreter's lock away from the producer that is measured.
    ours, theirs = multiprocessing.Pipe()
    proxies = multiprocessing.get_context("spawn").Process(target=_delay, args=([*ports], theirs), daemon=True)
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


def _delay(ports: Sequence[int], tell: Connection) -> None:
    from dev.proxy import DelayingProxy

    with ExitStack() as proxies:
        tell.send([proxies.enter_context(DelayingProxy(port, ADDED_SECONDS)).address for port in ports])
        tell.recv()


def _row(case: Case, bootstrap: str, rounds: int, records: int) -> Row:
    payload = os.urandom(case.size // 2).hex().encode()
    numbers = itertools.count()

    def variant(send: Send) -> Callable[[int], float]:
        def run(_: int) -> float:
            topic = f"bench-j-{case.size}-{next(numbers)}-{case.where.split()[0]}"
            _create(bootstrap, topic, case.replicas)
            return timed(lambda: send(bootstrap, topic, records, payload))

        return run

    bare: dict[str, dict[str, object]] = {"bare": {}, "bare, 5 in flight": IN_FLIGHT, "bare, idempotent": IDEMPOTENT}
    variants = {name: variant(partial(_bare, more=more)) for name, more in bare.items()}
    return alternate(str(case), {"reliable": variant(_reliable), **variants}, rounds)


def _create(bootstrap: str, topic: str, replicas: int) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    config = {"min.insync.replicas": str(max(1, replicas - 1))}
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, replicas, config=config)])[topic].result(30)


def _reliable(bootstrap: str, topic: str, records: int, payload: bytes) -> None:
    with ReliableProducer(producer_properties(bootstrap)) as producer:
        for number in range(records):
            producer.send(Record(topic, b"%d" % (number % KEYS), payload), str(number))


def _bare(bootstrap: str, topic: str, records: int, payload: bytes, more: dict[str, object]) -> None:
    from confluent_kafka import Producer

    delivered = 0

    def report(error: object, message: object) -> None:
        nonlocal delivered
        del message
        delivered += error is None

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", **more})
    for number in range(records):
        while True:
            try:
                producer.produce(topic, payload, b"%d" % (number % KEYS), on_delivery=report)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush(120)
    if delivered != records:
        raise RuntimeError(f"{delivered} of {records} records were delivered")
