"""(j) The reliable producer against a bare one with the same acknowledgements.

What belongs here: this benchmark. What does not: what is lost or doubled, which tests show.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness import Result, Row, Verdict, alternate, timed
from resources.producer import Record, ReliableProducer
from resources.producer_properties import producer_properties

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from bench.world import World

PARTITIONS = 4
KEYS = 10_000
ADDED_SECONDS = 0.05
SMALL, USUAL = 128, 1024

Send = Callable[[str, str, int, bytes], None]

IN_FLIGHT: dict[str, object] = {"max.in.flight.requests.per.connection": 5}
IDEMPOTENT: dict[str, object] = {"enable.idempotence": True}


def reliable_against_bare(world: World, rounds: int, records: int) -> Result:
    """(j) The same records by both, to their last delivery report; near the broker, and 50 ms away."""
    rows = [_row("near the broker", world.bootstrap, rounds, records, size) for size in (SMALL, USUAL)]
    with _far_away(world.home / "far") as address:
        away = f"{ADDED_SECONDS * 1000:.0f} ms away"
        rows += [_row(away, address, rounds, records, size) for size in (SMALL, USUAL)]
    return Result(
        name="j",
        title="The reliable producer, against a bare one",
        method=(
            f"{records:,} records over {KEYS:,} keys, acks=all for all, from the first send "
            "to the last delivery report. The bare one has librdkafka's defaults and counts its reports: it is not "
            "idempotent, and has any number of requests in flight. The two beside it show what each of these costs "
            "alone. The delay is added to the broker's answers by a proxy."
        ),
        rows=rows,
        verdicts=[
            Verdict(f"of the bare producer's speed {row.case}", row.ratio("reliable", "bare"), 0.8) for row in rows
        ],
    )


@contextmanager
def _far_away(home: Path) -> Iterator[str]:
    """A broker that clients reach by the long way alone: it tells them the proxy's address as its own."""
    from dev.broker import EmbeddedBroker

    broker = EmbeddedBroker(home)
    # In a process of its own: its threads would take the interpreter's lock away from the producer that is measured.
    ours, theirs = multiprocessing.Pipe()
    proxy = multiprocessing.get_context("spawn").Process(target=_delay, args=(broker.node.port, theirs), daemon=True)
    proxy.start()
    try:
        address = ours.recv()
        broker.properties["advertised.listeners"] = f"PLAINTEXT://{address}"
        with broker:
            yield address
    finally:
        proxy.terminate()
        proxy.join()


def _delay(port: int, tell: Connection) -> None:
    from dev.proxy import DelayingProxy

    with DelayingProxy(port, ADDED_SECONDS) as proxy:
        tell.send(proxy.address)
        tell.recv()


def _row(where: str, bootstrap: str, rounds: int, records: int, size: int) -> Row:
    case = f"{size:,} bytes, {where}"
    payload = os.urandom(size // 2).hex().encode()
    numbers = itertools.count()

    def variant(send: Send) -> Callable[[int], float]:
        def run(_: int) -> float:
            topic = f"bench-j-{size}-{next(numbers)}"
            _create(bootstrap, topic)
            return timed(lambda: send(bootstrap, topic, records, payload))

        return run

    bare: dict[str, dict[str, object]] = {"bare": {}, "bare, 5 in flight": IN_FLIGHT, "bare, idempotent": IDEMPOTENT}
    variants = {name: variant(partial(_bare, more=more)) for name, more in bare.items()}
    return alternate(case, {"reliable": variant(_reliable), **variants}, rounds)


def _create(bootstrap: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)


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
