"""Writes a faulty stream to Kafka, and keeps an account of every record: `python -m dev.generator --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self

from dev import paths
from dev.account import Account, account_file
from dev.customers import add_customers
from dev.faults import Source
from dev.intended import Intended
from dev.orders import ORDERS, customer_ids
from dev.payments import PAYMENTS
from dev.processes import signals_raise_interrupt
from dev.script import Script
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.resources.kafka import Kafka
from highwater.resources.outbox import Outbox
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Outcome, Record
from highwater.settings import HOME, Settings

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

SOURCES: Mapping[str, Source] = {source.name: source for source in (ORDERS, PAYMENTS)}
KAFKA_SECONDS = 15.0
# Records are entered in the account before they are sent, at most this many together.
CHUNK = 500
# A transaction stays open while this many records of others pass it, so that the last stable offset lags behind
# ...
HELD_RECORDS = 100
# ... but never as long as its timeout of a minute.
HELD_SECONDS = 5.0


@dataclass(frozen=True)
class Target:
    """The place to which a stream is written.

    Args:
        bootstrap: the brokers.
        home: folder of the accounts.
        lake: root of the lake, for the reference table.
        config: further properties of the client, secrets included.
        topic: the topic, where it is not named after the stream.
    """

    bootstrap: str
    home: Path
    lake: str
    config: Mapping[str, str] = field(default_factory=dict, repr=False)
    topic: str | None = None


@dataclass
class Summary:
    """The result of a run of the generator."""

    records: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.records / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()) if name != "none")
        return f"{self.records:,} records in {self.seconds:.1f} s; faults: {faults or 'none'}"


@dataclass(frozen=True)
class Order:
    """The request of a run.

    Args:
        seed: decides what is written.
        records: how many, up to a life more; without end if None.
        rate: records a second at the most; as fast as they go if None.
        rates: shares of keys with a fault, by its name.
        late_after: seconds until a late customer becomes known; never if None.
        burst: this many records that nobody can read come first, as fast as they go, and count for nothing
            else.
    """

    seed: int = 1
    records: int | None = None
    rate: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    late_after: float | None = None
    burst: int = 0


def generate(source: Source, target: Target, order: Order, stop: Event | None = None) -> Summary:
    """Write a stream until it has enough records or `stop` is set.

    Raises:
        ConfigurationError: properties that would weaken the producer, rates that make no sense, or a topic with too few
            partitions.
        DependencyUnavailableError: the brokers do not answer.
        UndeliveredError: records were not delivered; the account names them.
    """
    topic = target.topic or source.name
    build_producer_properties(target.bootstrap, target.config)  # refused before a client opens, and a topic is created
    create_topic(target, topic, source.partitions)
    account = Account(account_file(target.home, source.name))
    with ExitStack() as closing:
        closing.callback(account.close)
        run = account.begin_run(order.seed)
        script = Script(source, order.seed, run, order.records, order.rates)
        writer = closing.enter_context(_Writer(target, topic, account, run))
        if source is ORDERS:
            add_customers(target.lake, customer_ids())
        began = time.monotonic()
        for chunk in _chunks(script.poison(order.burst), CHUNK):
            writer.write(chunk)
        paced_from = time.monotonic()
        for chunk in _chunks(script.batches(), _chunk_size(order.rate)):
            writer.write(chunk)
            if source is ORDERS and order.late_after is not None:
                release_customers(account, target.lake, order.late_after)
            if _paced(paced_from, writer.summary.records - order.burst, order.rate, stop):
                break
        writer.close()
        writer.summary.seconds = time.monotonic() - began
        return writer.summary


def release_customers(account: Account, lake: str, older_than_seconds: float = 0) -> list[str]:
    """Let the late customers become known that were first used so long ago; returns them."""
    late = account.unknown_customers(older_than_seconds)
    if late:
        add_customers(lake, late)
        account.customers_known(late)
    return late


def _chunk_size(rate: float | None) -> int:
    """A quarter of a second's records, so that a slow stream flows evenly."""
    return CHUNK if rate is None else max(1, min(CHUNK, int(rate / 4)))


def _chunks(batches: Iterator[Sequence[Intended]], size: int) -> Iterator[list[Sequence[Intended]]]:
    while chunk := list(islice(batches, size)):
        yield chunk


def _paced(began: float, records: int, rate: float | None, stop: Event | None) -> bool:
    """Wait until a given number of records are due; returns whether to stop."""
    early = 0.0 if rate is None else records / rate - (time.monotonic() - began)
    if stop is None:
        time.sleep(max(0.0, early))
        return False
    return stop.wait(max(0.0, early))


class _Writer:
    """Sends records and enters their ends; one plain producer, and one for transactions when the first is due."""

    def __init__(self, target: Target, topic: str, account: Account, run: int) -> None:
        self._topic = topic
        self._account = account
        self._run = run
        self._target = target
        self._plain = ReliableProducer(build_producer_properties(target.bootstrap, target.config))
        self._outbox = Outbox(outbox_file(target.home, topic), Kafka(target.bootstrap, target.config))
        self._transactional: ReliableProducer | None = None
        self._open: _Open | None = None
        self.summary = Summary()

    def __enter__(self) -> Self:
        # What a generator that was killed had put into the outbox is settled first.
        self._outbox.recover(self._report)
        self._outbox.send(self._plain, self._report)
        return self

    def __exit__(self, *error: object) -> None:
        # After an error or Ctrl-C the account still learns what became of the records that are under way.
        try:
            self._end_transaction()
        finally:
            self._plain.flush(KAFKA_SECONDS)
            self._outbox.close()

    def close(self) -> None:
        """Wait for the rest.

        Raises:
            UndeliveredError: records were not delivered.
        """
        self._end_transaction()
        self._plain.close()

    def write(self, chunk: Sequence[Sequence[Intended]]) -> None:
        """Enter the records and send them."""
        for transaction, batches in groupby(chunk, key=_in_transaction):
            if transaction:
                for batch in batches:
                    self._transaction(batch)
            else:
                self._plainly([made for batch in batches for made in batch])
        for batch in chunk:
            self.summary.records += len(batch)
            self.summary.faults.update(made.fault for made in batch)

    def _plainly(self, records: Sequence[Intended]) -> None:
        """Enter records, put them into the outbox and send what waits there."""
        entered = [(str(self._enter(made)), self._record(made)) for made in records]
        self._account.save()
        self._outbox.put(entered)
        self._outbox.send(self._plain, self._report)
        self._held_long_enough(len(records))

    def _report(self, record_id: str, outcome: Outcome) -> None:
        self._account.report(int(record_id), *outcome[1:5])

    def _record(self, made: Intended) -> Record:
        backdated = int(time.time() * 1000) - made.backdated_ms if made.backdated_ms else None
        return Record(self._topic, made.key, made.value, made.headers, made.partition, backdated)

    def _enter(self, made: Intended, transaction: int | None = None) -> int:
        return self._account.enter(self._topic, self._run, made, transaction)

    def _send(self, producer: ReliableProducer, made: Intended, identity: int) -> None:
        producer.send(
            self._record(made), str(identity), on_outcome=lambda outcome: self._report(str(identity), outcome)
        )

    def _transaction(self, batch: Sequence[Intended]) -> None:
        """Write a batch in a transaction, and leave it open for a while."""
        self._end_transaction()
        producer = self._transactional = self._transactional or self._new_transactional()
        fate = batch[0].transaction or "committed"
        transaction = self._account.begin_transaction(fate)
        entered = [(made, self._enter(made, transaction)) for made in batch]
        self._account.save()
        producer.client.begin_transaction()
        for made, identity in entered:
            self._send(producer, made, identity)
        self._open = _Open(transaction, fate)
        if producer.flush(KAFKA_SECONDS):
            raise self._away(f"records of a transaction were not acknowledged within {KAFKA_SECONDS:.0f} s")

    def _new_transactional(self) -> ReliableProducer:
        name = f"generator-{self._topic}"
        found = build_producer_properties(self._target.bootstrap, self._target.config, transactional_id=name)
        producer = ReliableProducer(found)
        producer.client.init_transactions(KAFKA_SECONDS)
        return producer

    def _held_long_enough(self, passed: int) -> None:
        if self._open is not None:
            self._open.passed += passed
            if self._open.passed >= HELD_RECORDS or time.monotonic() - self._open.began > HELD_SECONDS:
                self._end_transaction()

    def _end_transaction(self) -> None:
        from confluent_kafka import KafkaException

        open_, self._open = self._open, None
        if open_ is None or self._transactional is None:
            return
        client = self._transactional.client
        end = client.commit_transaction if open_.fate == "committed" else client.abort_transaction
        try:
            end(KAFKA_SECONDS)
        except KafkaException as error:
            # What became of it is not known: the account leaves it open.
            raise self._away(f"a transaction could not be {open_.fate}: {error.args[0].str()}") from error
        self._account.end_transaction(open_.identity, open_.fate)

    def _away(self, found: str) -> DependencyUnavailableError:
        return DependencyUnavailableError(
            f"the broker at {self._target.bootstrap} did not answer in time",
            found=found,
            remedy="check that it runs, then start the generator again",
        )


def _in_transaction(batch: Sequence[Intended]) -> bool:
    return batch[0].transaction is not None


def outbox_file(home: Path, topic: str) -> Path:
    """The file in which the records of a topic wait until they are acknowledged."""
    return home / "generator" / f"{topic}.outbox.sqlite"


@dataclass
class _Open:
    identity: int
    fate: str
    passed: int = 0
    began: float = field(default_factory=time.monotonic)


def create_topic(target: Target, topic: str, partitions: int) -> None:
    """Create a topic; one that is there must have as many partitions at the least.

    Raises:
        DependencyUnavailableError: the brokers do not answer.
        ConfigurationError: it has fewer, or a property would weaken a guarantee.
    """
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    admin = Kafka(target.bootstrap, target.config).get_admin()
    try:
        admin.create_topics([NewTopic(topic, partitions)], operation_timeout=KAFKA_SECONDS)[topic].result(KAFKA_SECONDS)
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise DependencyUnavailableError(
                f"topic {topic} could not be created", found=error.args[0].str(), remedy="check that the broker answers"
            ) from error
    found = _partitions(admin, topic)
    if found < partitions:
        raise ConfigurationError(
            f"topic {topic} has too few partitions",
            stored=partitions,
            found=found,
            remedy="delete it, or name another one with --topic",
        )


def _partitions(admin: AdminClient, topic: str) -> int:
    """The number of partitions of a topic, once each has a leader: for a moment a new topic shows none at all.

    Raises:
        DependencyUnavailableError: there is a partition without a leader.
    """
    deadline = time.monotonic() + KAFKA_SECONDS
    while time.monotonic() < deadline:
        found = admin.list_topics(topic, timeout=KAFKA_SECONDS).topics[topic].partitions
        if found and all(partition.leader >= 0 for partition in found.values()):
            return len(found)
        time.sleep(0.1)
    raise DependencyUnavailableError(f"topic {topic} has no leader yet", remedy="check that every broker runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _parser().parse_args(arguments)
    environment = {**os.environ, HOME: str(options.home)}
    settings = Settings.from_environment(environment)
    target = Target(
        options.bootstrap or settings.kafka_bootstrap,
        settings.home,
        settings.lake,
        settings.kafka_config,
        options.topic,
    )
    try:
        order = Order(
            seed=options.seed,
            records=None if options.until_interrupted else options.records,
            rate=options.rate,
            rates={
                **(dict.fromkeys(SOURCES[options.stream].faults, 0.0) if options.no_faults else {}),
                **dict(options.fault),
            },
            late_after=options.late_customers_after,
            burst=options.burst,
        )
        with signals_raise_interrupt():
            print(generate(SOURCES[options.stream], target, order))
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if options.until_interrupted else 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dev.generator", description=__doc__)
    add: Callable[..., object] = parser.add_argument
    add("--stream", choices=sorted(SOURCES), default=ORDERS.name)
    add("--bootstrap", metavar="HOST:PORT", help="default: HIGHWATER_KAFKA_BOOTSTRAP")
    add("--topic", help="default: the stream's name")
    add("--home", type=Path, default=paths.home(os.environ), help="account and lake lie below it; default: %(default)s")
    add("--records", type=int, default=10_000, help="default: %(default)s")
    add("--until-interrupted", action="store_true", help="go on until Ctrl-C instead")
    add("--rate", type=float, help="records a second; default: as fast as they go")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--no-faults", action="store_true", help="only those that --fault names")
    add(
        "--fault",
        type=_rate,
        action="append",
        default=[],
        metavar="NAME=SHARE",
        help="share of keys with a fault, 0 to 1; may be repeated. "
        + " ".join(f"{name}: {', '.join(sorted(source.faults))}." for name, source in SOURCES.items()),
    )
    add(
        "--late-customers-after", type=float, metavar="SECONDS", help="when late customers become known; default: never"
    )
    add(
        "--burst",
        type=int,
        default=0,
        metavar="RECORDS",
        help="number of unreadable records to write first; default: none",
    )
    return parser


def _rate(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    return name, float(share)


if __name__ == "__main__":
    sys.exit(main())
