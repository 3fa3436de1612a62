"""Records and a mark of them in one Kafka transaction: each is published once, wherever a run dies.

What belongs here: transactions with a mark. What does not: what is published (`assets.dlq`).

The mark is an offset that is committed for a consumer group in the transaction of the records that it counts. Opening a
producer of the same name fences every earlier one, and waits until the outcome of its transaction is settled; only then
is the mark read. A look before that was seen to come too early: a transaction that had just been committed was not
visible yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from highwater.errors import ConfigurationError, SupersededAttemptError, TemporaryError
from resources.kafka import READER
from resources.producer import POLL_SECONDS, Record
from resources.producer_properties import producer_properties

if TYPE_CHECKING:
    from confluent_kafka import KafkaException

    from resources.kafka import Kafka

T = TypeVar("T")

# Longer than the 60 s of a transaction: another producer's one may have to time out first.
INIT_SECONDS = 90.0
CALL_SECONDS = 30.0
# librdkafka's own default.
LARGEST_BATCH = 1_000_000
PAUSE_SECONDS = 0.2
_FENCED = frozenset({"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_TXN_STATE"})
# A coordinator that was just made, or moved; an offset whose transaction is being settled.
_MOVING = frozenset(
    {"COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "UNSTABLE_OFFSET_COMMIT"}
    | {"_WAIT_COORD"}
)
_DENIED = frozenset({"TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"})


@dataclass(frozen=True)
class Mark:
    """How far a publication came: so many records of the decision with this attempt, of what `identity` names."""

    attempt: int
    sent: int
    identity: str = ""


def publishing_properties(kafka: Kafka, name: str, most_bytes: int = LARGEST_BATCH) -> dict[str, Any]:
    """The properties of the producer of such transactions.

    Raises:
        ConfigurationError: a property would weaken it.
    """
    config = kafka.client_config()
    bootstrap = config.pop("bootstrap.servers")
    # Of the topics' own limits none is below this; what is too large for its topic is refused by the broker.
    sized = {
        "message.max.bytes": "104857600",
        **{key: str(value) for key, value in config.items()},
        "batch.size": str(min(LARGEST_BATCH, most_bytes)),
    }
    return dict(producer_properties(bootstrap, sized, transactional_id=name))


class Transactions:
    """A producer whose transactions carry a mark. Use it as a context; it belongs to one thread.

    Args:
        kafka: the cluster.
        name: names the transactions, and the group of the mark; who opens the same name fences who had it.
        topic: the mark stands at partition 0 of this topic, which must exist.
        most_bytes: the least `max.message.bytes` of the topics that are sent to: brokers hold whole batches against it.

    Raises:
        DependencyAwayError: no broker answered in time.
        ConfigurationError: the broker forbids it.
    """

    def __init__(self, kafka: Kafka, name: str, topic: str, *, most_bytes: int = LARGEST_BATCH) -> None:
        from confluent_kafka import Consumer, Producer

        self._kafka = kafka
        self._name = name
        self._topic = topic
        self._producer = Producer(publishing_properties(kafka, name, most_bytes))
        # Only names the group: it is never assigned anything.
        self._group = Consumer(kafka.client_config(**{**READER, "group.id": name}))

    def __enter__(self) -> Self:
        try:
            self._trying(lambda: self._producer.init_transactions(CALL_SECONDS), INIT_SECONDS)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._group.close()
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    def mark(self) -> Mark | None:
        """The mark of the last transaction that was committed; None if there is none, or it expired."""
        from confluent_kafka import TopicPartition

        def ask() -> Any:
            # Not the admin client's question for it: confluent-kafka 2.16 was seen to crash the process in it while the
            # group's coordinator loads. A reader of committed records is told of no offset that is still in doubt.
            [found] = self._group.committed([TopicPartition(self._topic, 0)], CALL_SECONDS)
            return found

        found = self._trying(ask, CALL_SECONDS)
        if found.error is not None:
            raise self._kafka.away(found.error.str())
        if found.offset < 0:
            return None
        told = json.loads(found.metadata)
        return Mark(int(told["attempt"]), found.offset, str(told["identity"]))

    def commit(self, records: Sequence[Record], mark: Mark) -> None:
        """Publish records and the mark that counts them, all or nothing.

        Raises:
            SupersededAttemptError: another run opened the same name: it goes on, this one ends.
            DependencyAwayError: the transaction failed; nothing of it is visible, or the next opening finds it whole.
        """
        from confluent_kafka import KafkaException, TopicPartition

        told = {"attempt": mark.attempt, "identity": mark.identity}
        offsets = [TopicPartition(self._topic, 0, mark.sent, metadata=json.dumps(told))]
        try:
            self._producer.begin_transaction()
            for record in records:
                self._produce(record)
            group = self._group.consumer_group_metadata()
            self._trying(
                lambda: self._producer.send_offsets_to_transaction(offsets, group, CALL_SECONDS), 2 * CALL_SECONDS
            )
            self._trying(lambda: self._producer.commit_transaction(CALL_SECONDS), 2 * CALL_SECONDS)
        except KafkaException as error:
            raise self._ended(error) from error

    def _produce(self, record: Record) -> None:
        fixed: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        while True:
            try:
                return self._producer.produce(
                    record.topic, value=record.value, key=record.key, headers=list(record.headers), **fixed
                )
            except BufferError:
                self._producer.poll(POLL_SECONDS)

    def _trying(self, call: Callable[[], T], seconds: float) -> T:
        """Call until it works: these calls can be repeated after an error that says so."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + seconds
        while True:
            try:
                return call()
            except KafkaException as error:
                fault = error.args[0]
                passing = fault.retriable() or fault.name() in _MOVING
                if not passing or time.monotonic() > deadline:
                    raise self._ended(error) from error
                time.sleep(PAUSE_SECONDS)

    def _ended(self, error: KafkaException) -> TemporaryError | ConfigurationError:
        fault = error.args[0]
        if fault.name() in _FENCED or (fault.fatal() and "fenced" in fault.str().lower()):
            return SupersededAttemptError(
                f"{self._name}: another run publishes the same",
                found=fault.name(),
                remedy="nothing: that run goes on, and this one finds what it did",
            )
        if fault.name() in _DENIED:
            return ConfigurationError(
                f"the broker forbids transactions named {self._name}",
                found=fault.name(),
                remedy="allow this user to write to transactional ids and groups that begin with highwater.pub.",
            )
        if fault.txn_requires_abort():
            self._abort()
        return self._kafka.away(f"{self._name}: {fault.name()}: {fault.str()}")

    def _abort(self) -> None:
        """Give the transaction up at once; otherwise it would hold readers at its start until it times out."""
        from confluent_kafka import KafkaException

        try:
            self._producer.abort_transaction(CALL_SECONDS)
        except KafkaException:
            return  # the next one who opens the name settles it
