"""(l) Sending rejects and accepted events, against a bare transactional producer of the same records."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import Result, Row, Target, alternate, measure_seconds
from highwater.assets import dlq, published
from highwater.declaration import Accepted
from highwater.resources.dlq_topics import ensure_accepted, ensure_dlq_topics
from highwater.resources.transactions import Transactions
from tests.helpers.accepted import Event, Tables

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from bench.world import World
    from highwater.resources.producer_records import Record
    from highwater.resources.transactions import PublicationMark

PARTITIONS = 4
KEYS = 10_000
WANTED = 0.6
BARE, CONNECTED = "bare", "bare, connected first"


def compare_publication_with_bare(world: World, rounds: int, records: int) -> Result:
    """(l) The rejects of a slice to a tier, and the events of a slice to the topic of accepted events."""
    rows = [
        _compare_events(world, rounds, records, slices=1),
        _compare_events(world, rounds, 4 * records, slices=2),
        _compare_rejects(world, rounds, records // 2),
    ]
    return Result(
        name="l",
        title="Publication, against a bare transactional producer",
        method=(
            "Highwater reads the tables and sends the records with their mark; for events it also looks for second "
            "deliveries and commits twice. The bare producer has the records in memory. It mostly waits half a second "
            "for its coordinator, one that connects first seldom. Shares are of the named producer's speed."
        ),
        rows=rows,
        targets=[
            Target(f"share: {name}", row.ratio("Highwater", name), WANTED, case=row.case)
            for row in rows
            for name in (BARE, CONNECTED)
        ],
    )


def _build_tables(world: World, name: str) -> Tables:
    from tests.conftest import create_topic

    topic = f"bench-p-{name}"
    create_topic(world.bootstrap, topic, PARTITIONS, {})
    return Tables(world.home / topic, topic, bootstrap=world.bootstrap)


def _build_events(first: int, records: int) -> list[Event]:
    return [
        Event(n % PARTITIONS, n // PARTITIONS, f"o{n % KEYS}", n // KEYS + 1, n / 1000)
        for n in range(first, first + records)
    ]


def _compare_events(world: World, rounds: int, records: int, slices: int) -> Row:
    tables = _build_tables(world, f"events-{slices}")
    size = records // slices
    some_slices = []
    for number in range(slices):
        some = _build_events(number * size, size)
        share = (some[0].offset, some[-1].offset + 1)
        some_slices.append(tables.plan(number, p0=share, p1=share, p2=share, p3=share))
        tables.decide(some_slices[-1], some)
    sent: list[list[Record]] = []
    numbers = itertools.count()

    def ours(turn: int) -> float:
        shutil.rmtree(Path(tables.lake.build_table_path("orders", published.TABLE)), ignore_errors=True)
        tables.stream = replace(tables.stream, publishes=Accepted(f"{tables.stream.topic}.{next(numbers)}"))
        ensure_accepted(tables.kafka, tables.stream)
        with _collected(sent) if turn < 0 else nullcontext():
            return measure_seconds(lambda: tables.publish(*some_slices))

    several = f", {slices} slices" if slices > 1 else ""
    return alternate(f"{records:,} accepted events{several}", {"Highwater": ours, **_send_barely(world, sent)}, rounds)


def _compare_rejects(world: World, rounds: int, records: int) -> Row:
    tables = _build_tables(world, "rejects")
    topics = ensure_dlq_topics(tables.kafka, tables.stream)
    sent: list[list[Record]] = []
    numbers = itertools.count()

    def ours(turn: int) -> float:
        slice_ = tables.plan(next(numbers))
        tables.decide(slice_, [], rejected=_build_events(0, records), known=False)
        decided, _ = tables.lake.load_commits_and_version("orders", "rejects", [slice_.key])
        work = tables.work(slice_)
        with _collected(sent) if turn < 0 else nullcontext():
            return measure_seconds(lambda: dlq._publish(work, slice_, decided[slice_.key], topics))  # noqa: SLF001 - the commit of its table is Spark's

    return alternate(f"{records:,} rejects", {"Highwater": ours, **_send_barely(world, sent)}, rounds)


@contextmanager
def _collected(sent: list[list[Record]]) -> Iterator[None]:
    """Remember the records of each transaction: of the round that does not count."""
    commit = Transactions.commit

    def keeping(self: Transactions, records: Iterable[Record], mark: PublicationMark, *given: Any) -> None:
        sent.append([*records])
        commit(self, records, mark, *given)

    setattr(Transactions, "commit", keeping)  # noqa: B010 - a method, which an assignment may not replace
    try:
        yield
    finally:
        setattr(Transactions, "commit", commit)  # noqa: B010


def _send_barely(world: World, sent: Sequence[Sequence[Record]]) -> dict[str, Callable[[int], float]]:
    numbers = itertools.count()

    def send(*, connected: bool) -> None:
        from confluent_kafka import Producer

        name = f"bench-p-{id(sent)}-{next(numbers)}"
        producer = Producer({"bootstrap.servers": world.bootstrap, "transactional.id": name, "linger.ms": 5})
        if connected:
            producer.list_topics(sent[0][0].topic, 30)
        producer.init_transactions(30)
        for records in sent:
            producer.begin_transaction()
            for record in records:
                _produce(producer, record)
            producer.commit_transaction(30)

    return {
        BARE: lambda _: measure_seconds(partial(send, connected=False)),
        CONNECTED: lambda _: measure_seconds(partial(send, connected=True)),
    }


def _produce(producer: Producer, record: Record) -> None:
    while True:
        try:
            return producer.produce(
                record.topic, record.value, record.key, partition=record.partition or 0, headers=list(record.headers)
            )
        except BufferError:
            producer.poll(0.1)
