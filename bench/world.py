"""The benchmarks' environment: a broker, one Spark driver, topics with known records, a lake a round."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets.streams.orders import STREAM as ORDERS
from highwater.assets.raw import LONGEST_FETCH_MS, RECORDS_PER_POLL
from highwater.assets.work import Work
from highwater.resources.divergence_detection import read_fingerprints
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.declaration import Stream

CUSTOMERS = 1000
PARTITIONS = 4
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
# Of an order's versions, as they are allowed: what no check asks twice about, like most of a sound topic.
STATES = ("placed", "paid", "refunded")


@dataclass
class World:
    """Services and a folder; lakes and ledgers are made in it by number, so that rounds never meet."""

    home: Path
    bootstrap: str
    spark: SparkSession
    made: int = field(default=0)

    def kafka(self) -> Kafka:
        return Kafka(self.bootstrap, {})

    def fresh(self, stream: Stream) -> Bed:
        """A lake and a ledger that nothing was written to."""
        self.made += 1
        home = self.home / f"round-{self.made}"
        bed = Bed(stream, Lake(str(home / "lake")), Ledger(f"sqlite:///{home / 'ledger.sqlite'}"), home)
        write_customers(bed.lake)
        return bed

    def work(self, bed: Bed, slices: list[Slice]) -> Work:
        return Work(bed.stream, slices, self.spark, bed.lake, bed.ledger, self.kafka(), lambda _: None)


@dataclass(frozen=True)
class Bed:
    """The place to which one round writes."""

    stream: Stream
    lake: Lake
    ledger: Ledger
    home: Path

    def remove(self) -> None:
        shutil.rmtree(self.home)


@contextmanager
def open_world() -> Iterator[World]:
    """Start broker and driver, and end them; all files are temporary.

    The driver is in this process: `foreachBatch`, the peer, runs its function where the driver is.
    """
    from dev.broker import EmbeddedBroker
    from dev.spark_local import environment, local_conf, write_conf_dir

    with ExitStack() as closing:
        home = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="highwater-bench-")))
        broker = closing.enter_context(EmbeddedBroker(home))
        conf = {**local_conf(home, driver_memory_mb=6144), "spark.master": "local[*]", "spark.ui.enabled": "false"}
        _adopt(environment(write_conf_dir(home, "bench", conf)))
        session = _open_session()
        closing.callback(session.stop)
        yield World(home, broker.bootstrap, session)


def _adopt(variables: dict[str, str]) -> None:
    import os

    os.environ.update(variables)


def _open_session() -> SparkSession:
    from pyspark.sql import SparkSession

    from highwater.resources.spark import prepare

    session = SparkSession.builder.appName("highwater-bench").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return prepare(session)


def write_customers(lake: Lake) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    table = pa.table({"customer_id": [f"c{n}" for n in range(CUSTOMERS)], "region": ["north"] * CUSTOMERS})
    write_deltalake(lake.build_reference_path("reference/customers"), table)


def build_order(number: int, orders: int, prefix: str = "o") -> tuple[str, str]:
    """Key and value of the n-th record: versions of each order rise along its partition."""
    order, version = f"{prefix}{number % orders}", number // orders + 1
    value = {
        "order_id": order,
        "version": version,
        "status": STATES[version - 1],
        "customer_id": f"c{number % (CUSTOMERS + 10)}",
        "amount": (number % 10_000) / 100,
        "event_time": (BEGIN + timedelta(seconds=number)).isoformat(),
    }
    return order, json.dumps(value)


def fill_topic(world: World, topic: str, records: int, *, skewed: bool = False) -> Stream:
    """Make a topic with a number of orders, evenly over its partitions or with 90 % in one; returns its stream."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": world.bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    add_orders(world, topic, records, skewed=skewed)
    # Ticks plan what there is: a few records are waited for otherwise.
    return replace(ORDERS, topic=topic, limits=replace(ORDERS.limits, min_offsets=1))


def add_orders(world: World, topic: str, records: int, *, prefix: str = "o", skewed: bool = False) -> None:
    """Send a given number of records of orders of their own to a topic."""
    from confluent_kafka import Producer

    config = {"bootstrap.servers": world.bootstrap, "enable.idempotence": True, "linger.ms": 20}
    producer = Producer({**config, "queue.buffering.max.messages": 1_000_000})
    for number in range(records):
        key, value = build_order(number, math.ceil(records / len(STATES)), prefix)
        producer.produce(topic, key=key, value=value, partition=_choose_partition(number, skewed=skewed))
        if number % 10_000 == 0:
            producer.poll(0)
    if producer.flush(300):
        raise RuntimeError(f"{topic} was not filled")


def _choose_partition(number: int, *, skewed: bool) -> int:
    if not skewed:
        return number % PARTITIONS
    return 0 if number % 10 else 1 + (number // 10) % (PARTITIONS - 1)


def build_last_slices(world: World, bed: Bed, slices: int, records: int, *, first: int = 0) -> list[Slice]:
    """Planned slices of a fixed size from an ordinal on, the last one ending where the topic does."""
    state = world.kafka().read_topic_state(bed.stream.topic)
    ends = {p: int(s.last_stable or 0) for p, s in state.partitions.items()}
    share = records // PARTITIONS
    cut = [{p: _build_slice(end, slices, n, share) for p, end in ends.items()} for n in range(slices)]
    some_slices = [
        Slice(
            stream=bed.stream.name,
            topic=bed.stream.topic,
            topic_id=state.topic_id,
            generation=0,
            ordinal=first + n,
            ranges=ranges,
            planned_at=datetime.now(UTC),
            fingerprints=read_fingerprints(
                world.kafka(), bed.stream.topic, {p: r for p, r in ranges.items() if len(r)}
            ),
        )
        for n, ranges in enumerate(cut)
    ]
    bed.ledger.add(some_slices)
    return some_slices


def build_whole_slice(world: World, bed: Bed) -> Slice:
    """One planned slice of everything that the topic holds."""
    [slice_] = build_last_slices(world, bed, 1, 0)
    ranges = {p: OffsetRange(0, r.end) for p, r in slice_.ranges.items()}
    return replace(slice_, ranges=ranges, fingerprints=read_fingerprints(world.kafka(), bed.stream.topic, ranges))


def _build_slice(end: int, slices: int, n: int, share: int) -> OffsetRange:
    start = end - slices * share + n * share
    return OffsetRange(start, start + share)


def build_source_options(world: World, topic: str, slices: list[Slice]) -> Any:
    """The options of Spark's Kafka source for what these slices hold."""
    first = {str(p): r.start for p, r in slices[0].ranges.items()}
    return {
        **world.kafka().build_spark_options(),
        "subscribe": topic,
        "startingOffsets": json.dumps({topic: first}),
        "kafka.isolation.level": "read_committed",
        # As raw has them: the peers shall not wait where we do not.
        "kafka.fetch.max.wait.ms": LONGEST_FETCH_MS,
        "kafka.max.poll.records": RECORDS_PER_POLL,
        "failOnDataLoss": "true",
        "includeHeaders": "true",
    }
