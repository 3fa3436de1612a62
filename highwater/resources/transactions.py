"""Records and a mark of them in one Kafka transaction: each is published once, at whatever point a run dies."""

# The mark is an offset that is committed for a consumer group in the transaction of the records that it counts. Opening
# a producer of the same name fences every earlier one, and waits until the outcome of its transaction is settled; only
# then is the mark read. A look before that was seen to come too early: a transaction that had just been committed was
# not visible yet.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from highwater.errors import ConfigurationError, RecordTooLargeError, SupersededAttemptError, TemporaryError
from highwater.message_size import build_too_large_error, measure_message
from highwater.resources.clients import open_client
from highwater.resources.producer import POLL_SECONDS
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import ANY_PARTITION, NOW, Record
from highwater.settings import KAFKA_CONFIG

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, KafkaException, Producer

    from highwater.resources.kafka import Kafka

T = TypeVar("T")

# Longer than the 60 s of a transaction: another producer's one may have to time out first.
INIT_SECONDS = 90.0
CALL_SECONDS = 30.0
CONNECT_SECONDS = 2.0
# While a group's coordinator is unavailable, librdkafka waits for a change of any broker's connection and heeds no time
# limit (its issues 5456 and 5511): minutes, until a broker ends an idle one. Two such changes come within
# `transaction.timeout.ms`, 60 s.
IDLE_MS = 20_000
# librdkafka's own default.
LARGEST_BATCH = 1_000_000
# A broker ends the connection of a larger request (socket.request.max.bytes, 100 MiB by default), and says nothing.
LARGEST_RECORD = 100 * 1024 * 1024 - 64 * 1024
# A topic may compress batches again, which lets those grow that cannot be compressed: by 1 part in 1,000 at the most.
SPARE = 16
PAUSE_SECONDS = 0.2
REPORT_SECONDS = 5.0
_FENCED = frozenset({"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH", "INVALID_TXN_STATE"})
# A coordinator that was just made, or moved; an offset whose transaction is being settled.
_MOVING = frozenset(
    {"COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "UNSTABLE_OFFSET_COMMIT"}
    | {"_WAIT_COORD"}
)
# The first is the client's word too; the second means a batch larger than a segment of the topic's log.
_TOO_LARGE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
_NAME_DENIED = frozenset({"TRANSACTIONAL_ID_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"})


def _do_nothing() -> None:
    """The idle callback that does nothing."""


@dataclass(frozen=True)
class PublicationMark:
    """The progress of a publication: how many records of this attempt are committed, for the slice in `identity`."""

    attempt: int
    sent: int
    identity: str = ""


def build_publishing_properties(kafka: Kafka, name: str, most_bytes: int = LARGEST_BATCH) -> dict[str, Any]:
    """The properties of the producer of such transactions.

    Raises:
        ConfigurationError: a property would weaken it.
    """
    config = kafka.build_client_config()
    bootstrap = config.pop("bootstrap.servers")
    # The broker refuses records that are too large for their topic.
    sized = {
        "message.max.bytes": str(LARGEST_RECORD),
        "connections.max.idle.ms": str(IDLE_MS),
        **{key: str(value) for key, value in config.items()},
        "batch.size": str(min(LARGEST_BATCH, most_bytes - most_bytes // SPARE)),
    }
    return dict(build_producer_properties(bootstrap, sized, transactional_id=name))


class Transactions:
    """A producer whose transactions carry a mark. Use it as a context; it belongs to one thread.

    Args:
        kafka: the cluster.
        name: names the transactions; who opens the same name fences who had it.
        topic: the mark is stored at partition 0 of this topic, which must exist.
        most_bytes: the least `max.message.bytes` of the topics that are sent to: brokers hold whole batches against it.
        group: the consumer group of the mark; it has the name of the transactions if left out.

    Raises:
        DependencyUnavailableError: no broker answered in time.
        ConfigurationError: the broker forbids it, or the client refuses its configuration.
    """

    def __init__(
        self, kafka: Kafka, name: str, topic: str, *, most_bytes: int = LARGEST_BATCH, group: str | None = None
    ) -> None:
        self._kafka = kafka
        self._name = name
        self._topic = topic
        self.properties: Mapping[str, Any] = build_publishing_properties(kafka, name, most_bytes)
        self._refused: set[tuple[str | None, bytes, bytes]] = set()
        self._producer = self._open_producer(reports_delivery=False)
        self._last: PublicationMark | None = None
        self._meanwhile: Callable[[], object] = _do_nothing
        # Only names the group: it is never assigned anything.
        self._group = kafka.open_reader(**{"group.id": group or name})

    def _open_producer(self, *, reports_delivery: bool) -> Producer:
        """A producer; with delivery reports it also reports refused records.

        A transaction with a failed record cannot be committed, even without delivery reports (librdkafka counts the
        records, `txn_dr_fails`). With reports the client takes the interpreter's lock
        for each record, also for those that are delivered.
        """
        from confluent_kafka import Producer

        # Bound to the set, not to this object: with a report that nobody took in, the client would live for ever.
        reports = {"delivery.report.only.error": True, "on_delivery": partial(_note, self._refused)}
        self._reports_delivery = reports_delivery
        return open_client(Producer, {**self.properties, **(reports if reports_delivery else {})}, name=self._name)

    def __enter__(self) -> Self:
        try:
            self._init()
        except BaseException:
            self._close()
            raise
        return self

    def _init(self) -> None:
        self._connect()
        self._call_with_retries(lambda: self._producer.init_transactions(CALL_SECONDS), INIT_SECONDS)

    def _connect(self) -> None:
        """Let the client find a broker first: with none, it would ask for the coordinator again after half a second.

        The first answer comes by a connection that the client closes as it learns the brokers' names (librdkafka 2.16),
        the second one by one that stays.
        """
        from confluent_kafka import KafkaException

        with suppress(KafkaException):  # the call that needs it reports a fault
            for _ in range(2):
                self._producer.list_topics(self._topic, CONNECT_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._group.close()
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)

    def mark(self) -> PublicationMark | None:
        """The mark of the last transaction that was committed; None if there is none, or it expired."""
        from confluent_kafka import TopicPartition

        def ask() -> Any:
            # Not the admin client's question for it: confluent-kafka 2.16 was seen to crash the process in it while the
            # group's coordinator loads. A reader of committed records gets no offset that is still in doubt.
            [found] = self._group.committed([TopicPartition(self._topic, 0)], CALL_SECONDS)
            return found

        found = self._call_with_retries(ask, CALL_SECONDS)
        if found.error is not None:
            raise self._translate_fault(found.error)
        stored = json.loads(found.metadata) if found.offset >= 0 else None
        self._last = stored and PublicationMark(int(stored["attempt"]), found.offset, str(stored["identity"]))
        return self._last

    def commit(
        self, records: Iterable[Record], mark: PublicationMark, meanwhile: Callable[[], object] = _do_nothing
    ) -> None:
        """Publish records and the mark that counts them, all or nothing.

        Args:
            records: in the order of their publication; they may be asked for again.
            mark: counts these too.
            meanwhile: called once, when the client has the records and sends them by itself, before they are committed.
                Its errors are raised, and nothing of the transaction is visible.

        Raises:
            SupersededAttemptError: another run opened the same name, or the transaction outlived
                `transaction.timeout.ms` and the broker ended it: that run goes on, or the next one does; this one ends.
            RecordTooLargeError: the broker or the client does not take some of the records, which the error names;
                nothing of the transaction is visible, and another one may follow.
            ConfigurationError: the broker forbids it; nothing of it is visible.
            DependencyUnavailableError: the transaction failed; nothing of it is visible, or the next opening finds it
                whole.
        """
        self._meanwhile = meanwhile
        self._publish(records, mark)
        self._last = mark

    def _publish(self, records: Iterable[Record], mark: PublicationMark) -> None:
        self._refused.clear()
        try:
            self._commit(records, mark)
        except SupersededAttemptError:
            raise
        except TemporaryError as error:
            if not self._may_be_too_large(records, error):
                raise
            refused = self._find_too_large_error(records)
            if refused is None and self._reports_delivery:
                raise
            self._renew()
            if refused is not None:
                raise refused from error
            self._publish(records, mark)  # again, by a producer with delivery reports

    def _may_be_too_large(self, records: Iterable[Record], error: TemporaryError) -> bool:
        """Whether the transaction itself failed: a refused record may cause no other error than that."""
        from confluent_kafka import KafkaException

        if not isinstance(error.__cause__, KafkaException):
            return False
        fault = error.__cause__.args[0]
        failed = fault.txn_requires_abort() or fault.name() in _TOO_LARGE
        return failed and any(self._is_alone(one) for one in records)

    def _is_alone(self, record: Record) -> bool:
        """With others in its batch is no record that is larger than a batch may be."""
        alone = min(int(self.properties["batch.size"]), self.most_bytes)
        return measure_message(record.key, record.value, record.headers) > alone

    def _renew(self) -> None:
        """Go on with another producer, unless another run went on meanwhile.

        A producer with a refused record was seen to skip sequence numbers in its next transactions (librdkafka 2.16).
        The new one reports refused records: a silent one would fail another transaction at the next refusal.
        """
        self._producer.purge(in_queue=True, in_flight=True, blocking=False)
        self._producer, last = self._open_producer(reports_delivery=True), self._last
        self._init()
        if self.mark() != last:
            raise SupersededAttemptError(
                f"{self._name}: another run published the same meanwhile",
                stored=last,
                found=self._last,
                remedy="nothing to do: the next run finds what that one did",
            )

    def _commit(self, records: Iterable[Record], mark: PublicationMark) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        metadata = {"attempt": mark.attempt, "identity": mark.identity}
        offsets = [TopicPartition(self._topic, 0, mark.sent, metadata=json.dumps(metadata))]
        try:
            self._producer.begin_transaction()
            self._produce(records)
            self._use_the_time()
            group = self._group.consumer_group_metadata()
            self._call_with_retries(
                lambda: self._producer.send_offsets_to_transaction(offsets, group, CALL_SECONDS), 2 * CALL_SECONDS
            )
            self._call_with_retries(lambda: self._producer.commit_transaction(CALL_SECONDS), 2 * CALL_SECONDS)
        except KafkaException as error:
            raise self._translate_error(error) from error

    def _use_the_time(self) -> None:
        """Call what was given for it, once: a transaction that is restarted finds it done."""
        meanwhile, self._meanwhile = self._meanwhile, _do_nothing
        try:
            meanwhile()
        except BaseException:
            self._abort()
            raise

    def _produce(self, records: Iterable[Record]) -> None:
        from confluent_kafka import KafkaException

        produce = self._producer.produce
        for topic, key, value, headers, partition, _ in records:
            pairs = headers if isinstance(headers, list) else list(headers)
            to = ANY_PARTITION if partition is None else partition
            while True:
                try:
                    # By place, since names cost each call time. The two in the middle are for reports.
                    produce(topic, value, key, to, None, None, NOW, pairs)
                    break
                except BufferError:
                    _call_client(lambda: self._producer.poll(POLL_SECONDS))
                except KafkaException as error:
                    if error.args[0].name() in _TOO_LARGE:
                        self._refused.add(_build_record_identity(topic, key, value))
                        self._abort()
                    raise

    def _find_too_large_error(self, records: Iterable[Record]) -> RecordTooLargeError | None:
        """The error of records that were refused for their size; None where none is known.

        A batch of several that is refused shows that a limit was lowered since it was read, which the next run finds.
        """
        from confluent_kafka import KafkaException

        try:
            _call_client(lambda: self._producer.flush(REPORT_SECONDS))
        except KafkaException:
            return None  # the client broke down for good: its size is not what keeps a record back
        refused = [one for one in records if _build_record_identity(one.topic, one.key, one.value) in self._refused]
        found = [one for one in refused if self._is_alone(one)]
        if not found:
            return None
        sizes = [(one.topic, measure_message(one.key, one.value, one.headers)) for one in found]
        error = build_too_large_error(sizes, self.most_bytes, self._kafka.bootstrap)
        error.refused = found
        return error

    @property
    def most_bytes(self) -> int:
        """The largest record that the client takes."""
        return int(self.properties["message.max.bytes"])

    @property
    def compresses(self) -> bool:
        """Whether the client compresses batches."""
        return str(self.properties.get("compression.type", "none")) != "none"

    def _call_with_retries(self, call: Callable[[], T], seconds: float) -> T:
        """Call until it works: these calls can be repeated after an error that says so."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + seconds
        while True:
            try:
                return _call_client(call)
            except KafkaException as error:
                fault = error.args[0]
                passing = fault.retriable() or fault.name() in _MOVING
                if not passing or time.monotonic() > deadline:
                    raise self._translate_error(error) from error
                time.sleep(PAUSE_SECONDS)

    def _translate_error(self, error: KafkaException) -> TemporaryError | ConfigurationError:
        fault = self._find_cause(error.args[0])
        if fault.name() in _FENCED or (fault.fatal() and "fenced" in fault.str().lower()):
            return SupersededAttemptError(
                f"{self._name}: another run publishes the same, or the broker aborted this transaction",
                found=fault.name(),
                remedy="nothing to do: the next run continues after the committed records. If it happens again and "
                f"again without another run, see what held this one up for {self.properties['transaction.timeout.ms']} "
                "ms (transaction.timeout.ms)",
            )
        if fault.txn_requires_abort():
            self._abort()
        return self._translate_fault(fault)

    def _translate_fault(self, fault: KafkaError) -> TemporaryError | ConfigurationError:
        if fault.name() in _NAME_DENIED:
            return ConfigurationError(
                f"the broker forbids transactions named {self._name}",
                found=fault.name(),
                remedy="allow this user to write to transactional ids and groups that begin with highwater.pub.",
            )
        if fault.name() == "CLUSTER_AUTHORIZATION_FAILED":
            return ConfigurationError(
                f"the broker forbids the idempotent producer of {self._name}",
                found=fault.name(),
                remedy="allow this user IdempotentWrite on the cluster",
            )
        if fault.name() == "TOPIC_AUTHORIZATION_FAILED":
            return ConfigurationError(
                f"the broker forbids this user a topic of the transaction {self._name}",
                found=fault.name(),
                remedy=f"allow Describe, Read and Write on {self._topic} and the other topics that docs/dlq.md lists; "
                "highwater doctor names what is missing",
            )
        if fault.name() == "INVALID_TRANSACTION_TIMEOUT":
            return ConfigurationError(
                f"the broker does not allow transactions of {self.properties['transaction.timeout.ms']} ms",
                found=fault.str(),
                remedy=f"lower transaction.timeout.ms in {KAFKA_CONFIG}, "
                "or raise transaction.max.timeout.ms on the brokers",
            )
        return self._kafka.build_unavailable_error(f"{self._name}: {fault.name()}: {fault.str()}")

    def _find_cause(self, fault: KafkaError) -> KafkaError:
        """The error by which the client or its transaction failed: a later call may learn only that it did."""
        cause: KafkaError | None = None
        if fault.name() == "_FATAL":
            cause = self._abort()
        elif fault.name() == "_STATE":
            cause = self._find_abort_cause()
        return fault if cause is None else cause

    def _find_abort_cause(self) -> KafkaError | None:
        """The error of a transaction that failed while another call was under way; None if none did.

        The client answers with it when another transaction is begun, which a failed one forbids.
        """
        from confluent_kafka import KafkaException

        try:
            _call_client(self._producer.begin_transaction)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            return None if cause.name() == "_STATE" else cause
        self._abort()
        return None

    def _abort(self) -> KafkaError | None:
        """Give the transaction up at once; otherwise it would hold readers at its start until it times out.

        Returns why the client does not; then the next one who opens the name settles it.
        """
        from confluent_kafka import KafkaException

        try:
            _call_client(lambda: self._producer.abort_transaction(CALL_SECONDS))
        except KafkaException as error:
            refusal: KafkaError = error.args[0]
            return refusal
        return None


def _note(refused: set[tuple[str | None, bytes, bytes]], error: KafkaError | None, message: Any) -> None:
    """Take in a delivery report: which record was refused for its size."""
    if error is not None and error.name() in _TOO_LARGE:
        refused.add(_build_record_identity(message.topic(), message.key(), message.value()))


def _call_client(call: Callable[[], T]) -> T:
    """Call the client, which reports deliveries meanwhile.

    A client that fails for good reports deliveries with its own error pending. Python then blames the report, by a
    SystemError whose cause is the client's error: the cause is raised.
    """
    from confluent_kafka import KafkaException

    try:
        return call()
    except SystemError as error:
        if isinstance(error.__cause__, KafkaException):
            raise error.__cause__ from None
        raise


def _build_record_identity(
    topic: str | None, key: bytes | None, value: bytes | None
) -> tuple[str | None, bytes, bytes]:
    """The identity of a record: reports do not distinguish an empty key or value from none."""
    return topic, key or b"", value or b""
