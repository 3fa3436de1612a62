"""A producer that loses nothing in silence: every record ends as delivered, not delivered, or unknown."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, repeat
from types import TracebackType
from typing import TYPE_CHECKING, Self
from weakref import WeakMethod

from highwater.errors import ConfigurationError, KeyStoppedError, RecordRefusedError, UndeliveredError
from highwater.resources.clients import open_client
from highwater.resources.delivery import NOT_SENT, UNREPORTED, DeliveryEnd
from highwater.resources.delivery_tickets import (
    KEY_TYPES,
    NO_CALLBACKS,
    Callbacks,
    OnDelivered,
    OnOutcome,
    OutstandingRecord,
    Pair,
    RaisedErrors,
    Ticket,
    TicketPool,
)
from highwater.resources.producer_records import (
    ANY_PARTITION,
    NOW,
    Counts,
    OnFailure,
    OrderKey,
    Outcome,
    Record,
    build_order_key,
    build_outcome,
    build_undelivered_error,
    build_unplaced_outcome,
    translate_refusal,
)
from highwater.resources.several_clients import SeveralClients, find_client_index

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

POLL_SECONDS = 0.1
CLOSE_SECONDS = 60.0
# Records that the client has: as many as a fast producer writes within a tenth of a second.
MAX_WITH_CLIENT = 50_000
# Records that wait here for the client. More would be no faster: they only cost memory.
MAX_QUEUED = 10_000
# `send` takes in reports that often. At each record, taking in would cost more than sending.
TAKE_IN_SECONDS = 0.005
# `send_all` takes this many records at a time; they share one callback where their keys differ.
BATCH = 100
# Records of a batch are delivered at different times, so more batches are open than could be under way. At this
# multiple something is stuck, and each record gets a ticket of its own.
SPREAD = 3
PURGE_SECONDS = 10.0


class ReliableProducer:
    """Sends records, waits instead of failing when its queue is full, and accounts for every one of them.

    Records wait in a queue of ours, and the client holds a limited number of them: its records may be on a broker
    already, also when it says that they are still in its queue, so only ours can be withdrawn for sure.

    Use it as a context manager, or call `close`, which is where a loss is reported. It belongs to one thread.

    Args:
        properties: made by `build_producer_properties`.
        on_failure: treatment of the later records of a key after one failed for good.
        most_with_client: how many records the client holds at a time, 1 or more. When a key is stopped, or the brokers
            are unavailable, these count as under way; fewer narrow that, and may be slower.
        clients: how many share the work, each with some of the keys and with batches of its own under way. More than
            one is faster where brokers are far away, and only there.

    Raises:
        ConfigurationError: the client refuses its configuration.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        *,
        on_failure: OnFailure = OnFailure.STOP_KEY,
        most_with_client: int = MAX_WITH_CLIENT,
        clients: int = 1,
    ) -> None:
        from confluent_kafka import KafkaException, Producer

        self._client_error = KafkaException
        if clients > 1:
            self._client: Producer | SeveralClients = SeveralClients(properties, clients)
        else:
            self._client = open_client(Producer, properties, name="reliable producer")
        self._on_failure = on_failure
        self.transactional = "transactional.id" in properties
        """Whether its records count only once a transaction is committed; delivery reports come before."""
        # One for each client; `SeveralClients` says to which a record's key belongs.
        self._produces = self._client.produces if isinstance(self._client, SeveralClients) else [self._client.produce]
        self._produces_of = self._client.select_produces if isinstance(self._client, SeveralClients) else None
        self.counts = Counts()
        self._next_number = 0
        # A record that the client has holds one of the tickets, or shares it; the others are free.
        self._raised = RaisedErrors()
        self._tickets = TicketPool(self.counts, self._raised, WeakMethod(self._on_delivery_report))
        self._free = self._tickets.free
        # Records that wait here hold none.
        self._queue: deque[tuple[Record, OutstandingRecord]] = deque()
        self._most_with_client = max(1, most_with_client)
        # After closing: for each topic, the records that had no report until then.
        self._late: Counter[str] | None = None
        self._taken_in = 0.0
        # The callbacks of the last record: callers repeat them, and a tuple per record costs garbage collection.
        self._callbacks = NO_CALLBACKS
        self.stopped: dict[OrderKey, str] = {}
        """Topic and key of each stopped key, with the id of the record that failed."""
        self.handed_back: dict[OrderKey, list[str]] = {}
        """By topic and key the ids of records that the client never had, in order: the key is stopped, or it ended."""

    @property
    def client(self) -> Producer:
        """The client itself, for transactions and metadata; records sent through it are not counted.

        Raises:
            ConfigurationError: there are several.
        """
        if isinstance(self._client, SeveralClients):
            raise ConfigurationError("this producer has several clients", remedy="construct it with clients=1")
        return self._client

    def send(
        self,
        record: Record,
        record_id: str | None = None,
        on_delivered: OnDelivered | None = None,
        *,
        on_outcome: OnOutcome | None = None,
    ) -> None:
        """Hand a record over; waits while the queue is full.

        Args:
            record: the record to send.
            record_id: the caller's name of it, for its report; a number if None.
            on_delivered: called with the id once every in-sync replica has the record, from `send`, `poll`, `flush` or
                `close`. Acknowledge upstream only then.
            on_outcome: called once with the record's outcome.

        The first error that callbacks raise comes out of `send`, `poll`, `flush` or `close` once the reports at hand
        are taken in.

        Raises:
            RecordRefusedError: the client would never send it, for example because it is too large. It is not counted
                as sent; under `OnFailure.STOP_KEY` its key is stopped, or later records would overtake it.
            KeyStoppedError: an earlier record of its key failed; this one was not sent.
            UndeliveredError: the producer cannot send any more at all.
        """
        if time.monotonic() - self._taken_in >= TAKE_IN_SECONDS:
            self.poll()
        callbacks: Callbacks | None = None
        if on_delivered is not None or on_outcome is not None:
            callbacks = self._callbacks
            if callbacks[0] is not on_delivered or callbacks[1] is not on_outcome:
                callbacks = self._callbacks = (on_delivered, on_outcome)
        number = self._next_number
        self._next_number = number + 1
        if self.stopped:
            self._ensure_not_stopped(record, OutstandingRecord(number, record_id, callbacks))
        counts = self.counts
        # The first comparison is enough for most records, and does without the failed ones.
        full = counts.sent - counts.delivered >= self._most_with_client and self._with_client >= self._most_with_client
        if self._queue or full:
            self._wait_for_room()
            counts.sent += 1
            self._queue.append((record, OutstandingRecord(number, record_id, callbacks)))
            return
        counts.sent += 1
        try:
            self._hand_over(record, number, record_id, callbacks)
        except Exception as error:  # noqa: BLE001 - errors that are not for the queue are raised there
            self._handle_produce_error(record, OutstandingRecord(number, record_id, callbacks), error)

    def send_all(
        self,
        topic: str,
        records: Iterable[tuple[bytes | None, bytes | None]],
        record_ids: Iterable[str] | None = None,
        on_delivered: OnDelivered | None = None,
    ) -> None:
        """Hand many records over, as `send` does, for less time each.

        Args:
            topic: the topic of all of them.
            records: key and value of each. Best at hand: they are taken some at a time, and go when those are there.
                An error leaves those after it unsent; of an iterator up to a hundred were taken all the same.
            record_ids: the caller's name of each, as many as there are records; numbers if None.
            on_delivered: called as by `send`, for each record.

        Raises:
            ValueError: there are more records than ids, or fewer; those before are sent.
            RecordRefusedError: as `send`. The records before are sent, those after are not.
            KeyStoppedError: as `send`, and the same of the others.
            UndeliveredError: the producer cannot send any more at all.
        """
        ids: Iterable[str | None] = repeat(None) if record_ids is None else record_ids
        pairs = zip(records, ids, strict=record_ids is not None)
        callbacks = None if on_delivered is None else (on_delivered, None)
        while self._send_batch(topic, pairs, callbacks):
            if time.monotonic() - self._taken_in >= TAKE_IN_SECONDS:
                self.poll()

    def _send_batch(self, topic: str, pairs: Iterator[Pair], callbacks: Callbacks | None) -> bool:
        """Returns whether there was a record."""
        batch: list[Pair] = []
        failed: Exception | None = None
        try:
            batch.extend(islice(pairs, BATCH))
        except Exception as error:  # noqa: BLE001 - raised below: those before it are in the batch, and go first
            failed = error
        at = 0
        while at < len(batch):
            at += self._send_while_room(topic, batch[at:] if at else batch, callbacks)
        if failed is not None:
            raise failed
        return bool(batch)

    def _send_while_room(self, topic: str, batch: list[Pair], callbacks: Callbacks | None) -> int:
        """Send the first of them, as many as there is room for; returns how many that were."""
        if self.stopped or self._queue:  # a closer look is for `send`
            return self._send_first(topic, batch, callbacks)
        room = self._most_with_client - self._with_client
        if room <= 0:
            self.poll(POLL_SECONDS)
            return 0
        some = batch[:room] if room < len(batch) else batch
        keys = [key for (key, _), _ in some]
        if not {*map(type, keys)} <= KEY_TYPES:
            return self._send_first(topic, batch, callbacks)
        produces = self._produces * len(some) if self._produces_of is None else self._produces_of(keys)
        tickets: list[Ticket] = []
        taken, refused = 0, None
        try:
            # Here is what every record needs, and no more.
            ids = [record_id for _, record_id in some]
            self._tickets.take_for(tickets, self._next_number, keys, ids, callbacks, most=self._most_tickets)
            every = zip(some, tickets, produces, strict=True)
            for taken, (((key, value), _), ticket, produce) in enumerate(every, 1):  # noqa: B007
                produce(topic, value, key, ANY_PARTITION, ticket)
        except Exception as error:  # noqa: BLE001 - errors that are not for the queue are raised below
            refused, taken = error, taken - 1
        finally:
            self.counts.sent += taken
            self._next_number += taken
            self._free.extend({ticket for ticket in tickets[taken:] if ticket.take_back()})
        if refused is None:
            return taken
        (key, value), record_id = some[taken]
        sent = OutstandingRecord(self._next_number, record_id, callbacks)
        self._next_number += 1
        self.counts.sent += 1
        self._handle_produce_error(Record(topic, key, value), sent, refused)
        return taken + 1

    def _send_first(self, topic: str, batch: list[Pair], callbacks: Callbacks | None) -> int:
        (key, value), record_id = batch[0]
        self.send(Record(topic, key, value), record_id, (callbacks or NO_CALLBACKS)[0])
        return 1

    def _handle_produce_error(self, record: Record, sent: OutstandingRecord, error: Exception) -> None:
        """The outcome of a record that the client did not take from its sender.

        A record that meets a full client waits in our queue. If we waited for reports first, it would be sent even
        though a report stops its key, and after records that a callback sends meanwhile.
        """
        if isinstance(error, BufferError):
            self._queue.append((record, sent))
            return
        self.counts.sent -= 1
        if not isinstance(error, self._client_error):  # a value of a wrong type, say
            raise error
        refusal = translate_refusal(record.topic, error.args[0], self.counts)
        if isinstance(refusal, RecordRefusedError):
            self.stop(record.topic, record.key, sent.name)
        raise refusal from error

    @property
    def _most_tickets(self) -> int:
        return SPREAD * self._most_with_client // BATCH + SPREAD

    @property
    def _with_client(self) -> int:
        return self.counts.outstanding - len(self._queue)

    def _wait_for_room(self) -> None:
        while len(self._queue) >= MAX_QUEUED:
            self.poll(POLL_SECONDS)

    def _ensure_not_stopped(self, record: Record, sent: OutstandingRecord) -> None:
        key = build_order_key(record.topic, record.key)
        if key is not None and key in self.stopped:
            raise KeyStoppedError(
                f"records of key {key[1]!r} of {key[0]} are stopped: {sent.name} was not sent",
                found=f"record {self.stopped[key]} of it failed",
                remedy="resolve that record and those in `handed_back`, then send them in order with a new producer",
            )

    def _produce_queued(self) -> None:
        """Give the client what waits, as long as it has room; records of stopped keys are handed back instead."""
        while self._queue and self._with_client < self._most_with_client:
            record, sent = self._queue.popleft()
            topic, key = record.topic, build_order_key(record.topic, record.key)
            if key is not None and key in self.stopped:
                self._hand_back(record, sent)
                continue
            try:
                self._hand_over(record, *sent)
            except BufferError:
                # Room comes with delivery reports; those of the oldest come by the delivery timeout at last.
                self._queue.appendleft((record, sent))
                return
            except self._client_error as error:
                refusal = translate_refusal(topic, error.args[0], self.counts)
                # Where no producer takes anything any more, those under way end by themselves.
                fault = str(refusal.found) if isinstance(refusal, RecordRefusedError) else NOT_SENT
                self._handle_outcome(sent, record.key, build_unplaced_outcome(topic, fault, refused=True))
            except Exception as error:  # noqa: BLE001 - a value of a wrong type, say: the next look reports it
                self._handle_outcome(sent, record.key, build_unplaced_outcome(topic, NOT_SENT))
                self._raised.keep(error)

    def _hand_back(self, record: Record, sent: OutstandingRecord) -> None:
        """End a record that the client never had; those of a key are kept in order, to be sent by another producer."""
        key = build_order_key(record.topic, record.key)
        if key is not None:
            self.handed_back.setdefault(key, []).append(sent.name)
        self._report_outcome(sent, build_unplaced_outcome(record.topic, NOT_SENT))

    def _hand_over(self, record: Record, number: int, record_id: str | None, callbacks: Callbacks | None) -> None:
        topic, key, value, headers, partition, timestamp = record
        to = ANY_PARTITION if partition is None else partition
        free, produces = self._free, self._produces
        # Inlined: each Python call here is paid for every record.
        produce = produces[0] if len(produces) == 1 else produces[find_client_index(key, len(produces))]
        ticket = free.pop() if free else self._tickets.take()
        ticket.first, ticket.one, ticket.callbacks, ticket.left = number, record_id, callbacks, 1
        ticket.ids, ticket.places = (), None
        try:
            # Most records have neither; naming them here would cost each record time.
            if headers or timestamp is not None:
                at = NOW if timestamp is None else timestamp
                produce(topic, value, key, to, ticket, headers=[*headers], timestamp=at)
            else:
                produce(topic, value, key, to, ticket)
        except Exception:
            free.append(ticket)
            raise

    def _on_delivery_report(self, ticket: Ticket, error: KafkaError | None, message: Message) -> None:
        """Take in the client's delivery report of a record that failed, or whose outcome is asked for."""
        if ticket.callbacks is NO_CALLBACKS:  # it has its end
            self._release_ticket(ticket)
            return
        topic, key = message.topic() or "", message.key()
        outcome = build_outcome(topic, error, message)
        # Only now: a client that broke down for good may report with its own error pending, which ends this above.
        sent = ticket.take_reported(key)
        self._release_ticket(ticket)
        if self._late is not None and error is not None:
            self._late[topic] += 1
        self._handle_outcome(sent, key, outcome)

    def _release_ticket(self, ticket: Ticket) -> None:
        ticket.left -= 1
        if not ticket.left:
            self._free.append(ticket)

    def _handle_outcome(self, sent: OutstandingRecord, key: bytes | None, outcome: Outcome) -> None:
        if outcome.end is not DeliveryEnd.DELIVERED:
            self.stop(outcome.topic, key, sent.name)
        self._report_outcome(sent, outcome)

    def stop(self, topic: str, key: bytes | None, record_id: str) -> None:
        """Send no more of a key, as after a record of it that failed; under `OnFailure.GO_ON` it goes on."""
        if self._on_failure is OnFailure.STOP_KEY and key is not None:
            self.stopped.setdefault((topic, key), record_id)

    def _report_outcome(self, sent: OutstandingRecord, outcome: Outcome) -> None:
        on_delivered, on_outcome = sent.callbacks or NO_CALLBACKS
        if outcome.error is None:
            self.counts.delivered += 1
            if on_delivered is not None:
                self._raised.call(on_delivered, sent.name)
        else:
            self.counts.failed[outcome.error] += 1
            ids = self.counts.not_delivered if outcome.end is DeliveryEnd.NOT_DELIVERED else self.counts.unknown
            ids.append(sent.name)
        if on_outcome is not None:
            self._raised.call(on_outcome, outcome)

    def poll(self, seconds: float = 0) -> None:
        """Take in delivery reports that have come, waiting so long at the most for the first one."""
        self._take_in(seconds)
        self._raised.raise_first()

    def _take_in(self, seconds: float) -> None:
        self._client.poll(seconds)
        self._taken_in = time.monotonic()
        self._produce_queued()

    def flush(self, seconds: float = CLOSE_SECONDS) -> int:
        """Wait so long at the most until every record has its report; returns how many have none."""
        self._drain(seconds)
        self._raised.raise_first()
        return self.counts.outstanding

    def _drain(self, seconds: float, *, past_errors: bool = False) -> None:
        deadline = time.monotonic() + seconds
        while self.counts.outstanding and (left := deadline - time.monotonic()) > 0:
            if self._raised and not past_errors:
                return
            if self._queue:  # not `flush`, which would let the client run empty before it gets more
                self._take_in(min(POLL_SECONDS, left))
            else:
                self._client.flush(min(1.0, left))

    def close(self, seconds: float = CLOSE_SECONDS) -> Counts:
        """Wait so long at the most for the rest; returns the counts when every record was delivered.

        Nothing is left in a queue afterwards: a record that the client never got is not delivered, other outstanding
        records are unknown, also those that the client never reports. A callback that raises keeps no other record
        waiting: it is raised at the end, with what was not delivered as a note.

        Raises:
            UndeliveredError: records were not delivered, or their end is unknown; the text names them.
        """
        try:
            self._drain(seconds, past_errors=True)
        except BaseException as error:  # Ctrl-C
            self._end_after_error(error)
            raise
        undelivered = self._end(seconds)
        raised = self._raised.take()
        if raised is not None:
            if undelivered is not None:
                raised.add_note(str(undelivered))
            raise raised
        if undelivered is not None:
            raise undelivered
        return self.counts

    def _end(self, seconds: float) -> UndeliveredError | None:
        """Abandon records that are outstanding after this many seconds; returns the error that names them."""
        late = self._abandon_outstanding()
        complete = not (self.counts.failed or self.counts.outstanding)
        return None if complete else build_undelivered_error(self.counts, seconds, late)

    def _end_after_error(self, error: BaseException) -> None:
        """End the remaining records at once, and report them beside an error that goes on."""
        self._drain(POLL_SECONDS, past_errors=True)
        undelivered = self._end(POLL_SECONDS)
        raised = self._raised.take()
        if undelivered is not None:
            error.add_note(str(undelivered))
        if raised is not None:
            error.add_note(f"a callback raised {raised!r}")

    def _abandon_outstanding(self) -> Counter[str]:
        """End outstanding records; returns how many of each topic there were."""
        late = self._late = Counter(record.topic for record, _ in self._queue)
        while self._queue:
            self._hand_back(*self._queue.popleft())
        if self._with_client:
            self._client.purge(in_queue=True, in_flight=True, blocking=True)
            deadline = time.monotonic() + PURGE_SECONDS
            while self._with_client and time.monotonic() < deadline:
                self._client.poll(POLL_SECONDS)
        self._tickets.drop_free()
        for ticket in self._tickets.select_unreported_tickets():
            self._end_unreported(ticket)
        return late

    def _end_unreported(self, ticket: Ticket) -> None:
        """End records without a report as unknown, and with them those that share an ambiguous ticket."""
        unreported = ticket.select_unreported()
        self.counts.delivered -= len(unreported) - ticket.left
        ticket.callbacks = NO_CALLBACKS
        for sent in unreported:
            self._report_outcome(sent, build_unplaced_outcome("", UNREPORTED))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the caller's own error goes on
            self._end_after_error(error)
