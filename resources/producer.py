"""A producer that loses nothing in silence: every record ends as delivered, not delivered, or named as outstanding.

What belongs here: the properties of such a producer, and the counting of its delivery reports. What does not: what is
sent, or what is done about a record that was not delivered.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from highwater.errors import ConfigurationError, PermanentError, TemporaryError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

# An outage of brokers is mended within a day, or a person decides; until then records wait in memory and in order.
DELIVERY_TIMEOUT_MS = 24 * 60 * 60 * 1000
# Below two minutes (Kafka's own default, KIP-91) a rolling restart of the brokers may already lose records.
LEAST_DELIVERY_TIMEOUT_MS = 120_000
# The broker's transaction.max.timeout.ms is 15 minutes by default; it refuses more.
TRANSACTION_TIMEOUT_MS = 60_000
MOST_IN_FLIGHT = 5
POLL_SECONDS = 0.1
CLOSE_SECONDS = 60.0

Headers = Sequence[tuple[str, bytes | None]]

_ALIASES = {
    "request.required.acks": "acks",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.timeout.ms": "delivery.timeout.ms",
    "message.send.max.retries": "retries",
    "compression.codec": "compression.type",
}


class UndeliveredError(TemporaryError):
    """Records whose delivery was refused, timed out, or was not known yet when the producer was closed."""


class RecordRefusedError(PermanentError):
    """A record that the client refuses to send, for example because it is too large; it was not sent."""


def producer_properties(
    bootstrap: str, config: Mapping[str, str] | None = None, *, transactional_id: str | None = None
) -> dict[str, str]:
    """The properties of a reliable producer, in librdkafka's names.

    Args:
        bootstrap: brokers as `host:port`, comma separated.
        config: further properties, secrets included; a value here wins over a default that may be changed.
        transactional_id: makes the producer transactional. Its records may then wait no longer than the transaction
            lasts, since librdkafka refuses a delivery timeout above `transaction.timeout.ms`.

    Raises:
        ConfigurationError: a property would weaken the producer; property, value and reason are in the text.
    """
    given = {_ALIASES.get(name, name): str(value) for name, value in (config or {}).items()}
    if transactional_id is not None:
        given["transactional.id"] = transactional_id
    for name, value in given.items():
        _see_not_weakened(name, value, transactional="transactional.id" in given)
    found = {**_defaults(given), **given, "bootstrap.servers": bootstrap}
    if "transactional.id" in found:
        found["delivery.timeout.ms"] = str(min(int(found["delivery.timeout.ms"]), int(found["transaction.timeout.ms"])))
    return found


def _defaults(given: Mapping[str, str]) -> dict[str, str]:
    found = {
        "acks": "all",
        "enable.idempotence": "true",
        "max.in.flight.requests.per.connection": str(MOST_IN_FLIGHT),
        "delivery.timeout.ms": str(DELIVERY_TIMEOUT_MS),
        # librdkafka's own default is another one than that of Kafka's Java clients: keys would part ways.
        "partitioner": "murmur2_random",
        "allow.auto.create.topics": "false",
        "linger.ms": "5",
    }
    if "transactional.id" in given:
        found["transaction.timeout.ms"] = str(TRANSACTION_TIMEOUT_MS)
    return found


def _see_not_weakened(name: str, value: str, *, transactional: bool) -> None:
    reason = _weakness(name, value, transactional=transactional)
    if reason is not None:
        raise ConfigurationError(
            f"the producer's property {name} must not be {value}: {reason}",
            remedy=f"take {name} out of the configuration",
        )


def _weakness(name: str, value: str, *, transactional: bool) -> str | None:
    """Why a property would weaken the producer; None if it does not."""
    low = value.strip().lower()
    if name == "acks" and low not in {"all", "-1"}:
        return "a record would count as delivered before every in-sync replica has it"
    if name == "enable.idempotence" and low != "true":
        return "a retry could write a record twice, or out of order"
    if name == "max.in.flight.requests.per.connection" and not _in(low, 1, MOST_IN_FLIGHT):
        return f"brokers keep the order of at most {MOST_IN_FLIGHT} requests in flight (KIP-185)"
    if name == "retries" and not _in(low, 2**31 - 1, 2**31 - 1):
        return "attempts are bounded by delivery.timeout.ms alone (KIP-91), or a short outage uses them up"
    if name == "delivery.timeout.ms" and not transactional and not _in(low, LEAST_DELIVERY_TIMEOUT_MS, 2**31 - 1):
        return f"below {LEAST_DELIVERY_TIMEOUT_MS} ms a restart of brokers may lose records (0 would never end)"
    if name == "delivery.report.only.error" and low != "false":
        return "what is delivered could not be counted"
    return None


def _in(text: str, least: int, most: int) -> bool:
    return text.lstrip("-").isdigit() and least <= int(text) <= most


class Outcome(NamedTuple):
    """What became of one record.

    `error` is librdkafka's name of the fault, None when the record was delivered; only then are partition, offset and
    timestamp (milliseconds since 1970) those of the log.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    error: str | None = None

    @property
    def delivered(self) -> bool:
        """Whether every in-sync replica has the record."""
        return self.error is None


@dataclass
class Counts:
    """How many records ended how, so far."""

    sent: int = 0
    delivered: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def outstanding(self) -> int:
        """Records without a delivery report yet."""
        return self.sent - self.delivered - self.failed.total()

    def __str__(self) -> str:
        errors = "".join(f", {count:,} {name}" for name, count in sorted(self.failed.items()))
        return f"{self.sent:,} sent: {self.delivered:,} delivered, {self.outstanding:,} outstanding{errors}"


class ReliableProducer:
    """Sends records, waits instead of failing when its queue is full, and counts every delivery report.

    Use it as a context manager, or call `close`, which is where a loss is told. It belongs to one thread.

    Args:
        properties: made by `producer_properties`.
    """

    def __init__(self, properties: Mapping[str, str]) -> None:
        from confluent_kafka import Producer

        self._client: Producer = Producer(dict(properties))
        self._left: Counter[str] = Counter()
        self.counts = Counts()

    @property
    def client(self) -> Producer:
        """The client itself, for transactions and metadata; records sent through it are not counted."""
        return self._client

    def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        partition: int | None = None,
        timestamp: int | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        """Hand a record over; waits while the queue is full.

        Args:
            topic: the topic, which must exist.
            key: the key; records of one key stay in order.
            value: the value; None is a tombstone.
            headers: in their order.
            partition: a fixed partition; by the key if None.
            timestamp: publish time in milliseconds since 1970; now if None.
            on_outcome: called once with what became of the record, from `send`, `poll`, `flush` or `close`.

        Raises:
            RecordRefusedError: the client would never send it, for example because it is too large.
            UndeliveredError: the producer cannot send any more at all.
        """
        fixed: dict[str, Any] = {"partition": partition, "timestamp": timestamp}
        fixed = {name: value for name, value in fixed.items() if value is not None}

        def report(error: KafkaError | None, message: Message) -> None:
            self._count(topic, _outcome(topic, error, message), on_outcome)

        self._when_room(
            topic,
            lambda: self._client.produce(
                topic, value=value, key=key, headers=list(headers), on_delivery=report, **fixed
            ),
        )
        self.counts.sent += 1
        self._left[topic] += 1
        self._client.poll(0)

    def _when_room(self, topic: str, produce: Callable[[], None]) -> None:
        from confluent_kafka import KafkaException

        while True:
            try:
                return produce()
            except BufferError:
                # Room comes with delivery reports; those of the oldest records come by the delivery timeout at last.
                self._client.poll(POLL_SECONDS)
            except KafkaException as error:
                raise _refusal(topic, error.args[0], self.counts) from error

    def _count(self, topic: str, outcome: Outcome, on_outcome: Callable[[Outcome], None] | None) -> None:
        self._left[topic] -= 1
        if outcome.error is None:
            self.counts.delivered += 1
        else:
            self.counts.failed[outcome.error] += 1
        if on_outcome is not None:
            on_outcome(outcome)

    def poll(self, seconds: float = 0) -> None:
        """Take in delivery reports that have come, waiting so long at the most for the first one."""
        self._client.poll(seconds)

    def flush(self, seconds: float = CLOSE_SECONDS) -> int:
        """Wait so long at the most until every record has its report; returns how many have none."""
        deadline = time.monotonic() + seconds
        while self.counts.outstanding and time.monotonic() < deadline:
            self._client.flush(min(1.0, max(0.0, deadline - time.monotonic())))
        return self.counts.outstanding

    def close(self, seconds: float = CLOSE_SECONDS) -> Counts:
        """Wait so long at the most for the rest; returns the counts when every record was delivered.

        Raises:
            UndeliveredError: records were not delivered, or have no report yet; the text names them by topic and fault.
        """
        self.flush(seconds)
        if self.counts.outstanding or self.counts.failed:
            raise self._undelivered(seconds)
        return self.counts

    def _undelivered(self, seconds: float) -> UndeliveredError:
        left = ", ".join(f"{count:,} of {topic}" for topic, count in sorted(self._left.items()) if count)
        waited = f"; without a report after {seconds:g} s: {left}" if left else ""
        return UndeliveredError(
            "not every record was delivered",
            found=f"{self.counts}{waited}",
            remedy="see that the brokers answer and the topics exist, then send these records again",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The caller's own error goes on; what it left undelivered is told beside it.
        self.flush(POLL_SECONDS)
        if self.counts.outstanding or self.counts.failed:
            error.add_note(str(self._undelivered(POLL_SECONDS)))


def _outcome(topic: str, error: KafkaError | None, message: Message) -> Outcome:
    if error is not None:
        return Outcome(topic, -1, -1, -1, error.name())
    return Outcome(topic, message.partition() or 0, message.offset() or 0, message.timestamp()[1])


def _refusal(topic: str, error: KafkaError, counts: Counts) -> RecordRefusedError | UndeliveredError:
    if error.fatal():
        return UndeliveredError(
            f"the producer can send nothing more to {topic}: {error.str()}",
            found=str(counts),
            remedy="start a new producer, and send again what was not delivered",
        )
    return RecordRefusedError(
        f"the client refuses a record for {topic}: {error.str()}",
        found=error.name(),
        remedy="send it smaller, or raise message.max.bytes here and max.message.bytes of the topic",
    )
