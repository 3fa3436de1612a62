"""(j) The reliable producer against a bare one with the same acknowledgements.

What belongs here: this benchmark. What does not: what is lost or doubled, which tests show.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness import Result, Row, Verdict, alternate, timed
from resources.producer import Record, ReliableProducer, producer_properties

if TYPE_CHECKING:
    from bench.world import World

PARTITIONS = 4
KEYS = 10_000
ADDED_SECONDS = 0.05
PAYLOAD = os.urandom(64).hex().encode()

Send = Callable[[str, str, int], None]


def reliable_against_bare(world: World, rounds: int, records: int) -> Result:
    """(j) The same records by both, to their last delivery report; near the broker, and 50 ms away."""
    rows = [_row("near the broker", world.bootstrap, rounds, records)]
    with _far_away(world.home / "far") as address:
        rows.append(_row(f"{ADDED_SECONDS * 1000:.0f} ms away", address, rounds, records))
    return Result(
        name="j",
        title="The reliable producer, against a bare one",
        method=(
            f"{records:,} records of {len(PAYLOAD)} bytes over {KEYS:,} keys, acks=all for both, from the first send "
            "to the last delivery report. The bare one has librdkafka's defaults and counts its reports; it is not "
            "idempotent. The delay is added to the broker's answers by a proxy."
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
    from dev.proxy import DelayingProxy

    broker = EmbeddedBroker(home)
    with DelayingProxy(broker.node.port, ADDED_SECONDS) as proxy:
        broker.properties["advertised.listeners"] = f"PLAINTEXT://{proxy.address}"
        with broker:
            yield proxy.address


def _row(case: str, bootstrap: str, rounds: int, records: int) -> Row:
    numbers = itertools.count()

    def variant(send: Send) -> Callable[[int], float]:
        def run(_: int) -> float:
            topic = f"bench-j-{case.split(maxsplit=1)[0]}-{next(numbers)}"
            _create(bootstrap, topic)
            return timed(lambda: send(bootstrap, topic, records))

        return run

    return alternate(case, {"reliable": variant(_reliable), "bare": variant(_bare)}, rounds)


def _create(bootstrap: str, topic: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)


def _reliable(bootstrap: str, topic: str, records: int) -> None:
    with ReliableProducer(producer_properties(bootstrap)) as producer:
        for number in range(records):
            producer.send(Record(topic, b"%d" % (number % KEYS), PAYLOAD), str(number))


def _bare(bootstrap: str, topic: str, records: int) -> None:
    from confluent_kafka import Producer

    delivered = 0

    def report(error: object, message: object) -> None:
        nonlocal delivered
        del message
        delivered += error is None

    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for number in range(records):
        while True:
            try:
                producer.produce(topic, PAYLOAD, b"%d" % (number % KEYS), on_delivery=report)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush(120)
    if delivered != records:
        raise RuntimeError(f"{delivered} of {records} records were delivered")
