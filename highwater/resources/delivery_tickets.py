"""Tickets: the callbacks by which the client reports what became of records, few objects for many records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self
from weakref import WeakMethod

from highwater.resources.producer_records import Counts, Outcome

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

OnDelivered = Callable[[str], None]
OnOutcome = Callable[[Outcome], None]
KEY_TYPES = frozenset({bytes, type(None)})
# Key and value of a record, and its id.
Pair = tuple[tuple[bytes | None, bytes | None], str | None]


Callbacks = tuple[OnDelivered | None, OnOutcome | None]
# A ticket has it once its record was ended without a report; None, where there simply are no callbacks.
NO_CALLBACKS: Callbacks = (None, None)


class OutstandingRecord(NamedTuple):
    """The state of a record until its end is known."""

    number: int
    record_id: str | None
    callbacks: Callbacks | None

    @property
    def name(self) -> str:
        return str(self.number) if self.record_id is None else self.record_id


class Ticket:
    """The callback for the delivery reports of one or several records.

    It covers a batch of `send_all` if possible: with one for each record, a report waits for memory that the
    processor last saw some ten thousand records ago, which was a sixth of a producer's time. The key of a report names
    its record, so the keys differ; it is read only if the record failed or there is a callback.

    Tickets are used again. One made for each record would be one more object for the interpreter's collector, which
    then walks through all that a process has loaded: in a worker of Dagster that took a third of a producer's time.
    """

    __slots__ = ("callbacks", "first", "ids", "left", "one", "places")

    first: int
    one: str | None
    """The id of a record that is alone; it costs no sequence of ids."""
    ids: Sequence[str | None]
    places: dict[bytes | None, int] | None
    """By key the places of records without a report; None for a record that is alone."""
    callbacks: Callbacks | None
    left: int
    """Reports to come."""

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        raise NotImplementedError

    def cover_records(
        self,
        first: int,
        ids: Sequence[str | None],
        places: dict[bytes | None, int],
        callbacks: Callbacks | None,
    ) -> Self:
        """Cover records from the number `first` on; `places` are theirs by key."""
        self.first, self.one, self.ids, self.places, self.callbacks = first, None, ids, places, callbacks
        self.left = len(ids)
        return self

    def cover_one_record(self, number: int, record_id: str | None, callbacks: Callbacks | None) -> Self:
        """Cover a single record."""
        self.first, self.one, self.ids, self.places, self.callbacks = number, record_id, (), None, callbacks
        self.left = 1
        return self

    def take_back(self) -> bool:
        """Drop the last record, which the client did not take; returns whether the ticket is free then."""
        if self.left:
            self.left -= 1
            self.ids = self.ids[:-1]
            if self.places is not None:
                self.places.popitem()
        return not self.left

    def take_reported(self, key: bytes | None) -> OutstandingRecord:
        """The record with this key, whose report has come."""
        if self.places is None:
            return OutstandingRecord(self.first, self.one, self.callbacks)
        return self._build_sent(self.places.pop(key))

    def select_unreported(self) -> list[OutstandingRecord]:
        """Records whose end it does not know, where it lacks reports: of delivered ones it may only have the number."""
        return (
            [self.take_reported(None)]
            if self.places is None
            else [self._build_sent(place) for place in self.places.values()]
        )

    def _build_sent(self, place: int) -> OutstandingRecord:
        return OutstandingRecord(self.first + place, self.ids[place], self.callbacks)


class RaisedErrors:
    """The first error that callbacks raised since the last look.

    The client goes on with other reports while an error is pending, and keeps the last error alone; so ours waits until
    the client is done.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __bool__(self) -> bool:
        return self._first is not None

    def keep(self, error: Exception) -> None:
        """Store an error, unless there is an earlier one."""
        self._first = self._first or error

    def take(self) -> Exception | None:
        """The error, which is raised then."""
        first, self._first = self._first, None
        return first

    def call(self, callback: Callable[..., None], report: str | Outcome) -> None:
        """Call a callback of somebody; what it raises is kept."""
        try:
            callback(report)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised again
            self.keep(error)

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if (first := self.take()) is not None:
            raise first


def _build_ticket_class(
    free: list[Ticket],
    counts: Counts,
    raised: RaisedErrors,
    reported: WeakMethod[Callable[[Ticket, KafkaError | None, Message], None]],
) -> type[Ticket]:
    """Makes the tickets of a producer.

    Args:
        free: where a ticket goes when all its records were delivered.
        counts: where that is counted.
        raised: where what a callback raises goes.
        reported: takes the surplus of reports. Weak, or no client would end before the collector comes.
    """

    class Reporting(Ticket):
        __slots__ = ()

        def __call__(self, error: KafkaError | None, message: Message) -> None:
            callbacks = self.callbacks
            if error is None and callbacks is None:
                counts.delivered += 1
                self.left -= 1
                if not self.left:
                    free.append(self)
                return
            on_delivered, on_outcome = callbacks or NO_CALLBACKS
            if error is not None or on_outcome is not None or on_delivered is None:
                if (more := reported()) is not None:
                    more(self, error, message)
                return
            # Without a `OutstandingRecord`, which would take as long as all the rest.
            if self.places is None:
                number, name = self.first, self.one
            else:
                place = self.places.pop(message.key())
                number, name = self.first + place, self.ids[place]
            counts.delivered += 1
            self.left -= 1
            if not self.left:
                free.append(self)
            try:
                on_delivered(str(number) if name is None else name)
            except Exception as error_of_callback:  # noqa: BLE001 - whatever it is, it is raised again
                raised.keep(error_of_callback)

    return Reporting


OnReport = Callable[[Ticket, "KafkaError | None", "Message"], None]


class TicketPool:
    """The tickets of a producer.

    Args:
        counts: where delivered records are counted.
        raised: where what a callback raises goes.
        reported: takes the surplus of reports. Weak, or no client would end before the collector comes.
    """

    def __init__(self, counts: Counts, raised: RaisedErrors, reported: WeakMethod[OnReport]) -> None:
        # A record that the client has holds one of the tickets, or shares it; the others are free.
        self.every: list[Ticket] = []
        self.free: list[Ticket] = []
        self._new = _build_ticket_class(self.free, counts, raised, reported)

    def take(self) -> Ticket:
        """A free one, for as many records as it is reported."""
        if self.free:
            return self.free.pop()
        ticket = self._new().cover_records(0, (), {}, None)
        self.every.append(ticket)
        return ticket

    @property
    def busy(self) -> int:
        """Tickets with reports to come."""
        return len(self.every) - len(self.free)

    def take_for(
        self,
        tickets: list[Ticket],
        first: int,
        keys: Sequence[bytes | None],
        ids: Sequence[str | None],
        callbacks: Callbacks | None,
        *,
        most: int,
    ) -> None:
        """Add a ticket for each record: one ticket for all where their keys distinguish them.

        After an interruption, the owner of the list can give back its tickets.

        Args:
            tickets: gets them.
            first: the number of the first record.
            keys: the records' keys.
            ids: the records' IDs.
            callbacks: the callbacks of all records.
            most: from this many tickets with reports to come on, each record gets one of its own.
        """
        places = dict(zip(keys, range(len(keys)), strict=True))
        # Reports do not distinguish an empty key from none. And one stuck record keeps the keys of all that share its
        # ticket.
        if len(places) == len(keys) and all(keys) and self.busy < most:
            tickets += [self.take()] * len(keys)
            tickets[0].cover_records(first, ids, places, callbacks)
            return
        for number, one in enumerate(ids, first):
            tickets.append(self.take())
            tickets[-1].cover_one_record(number, one, callbacks)

    def drop_free(self) -> None:
        """Drop the free tickets, which would stay until the collector comes: a class like theirs keeps itself alive."""
        free = {id(ticket) for ticket in self.free}
        self.every = [ticket for ticket in self.every if id(ticket) not in free]
        self.free.clear()

    def select_unreported_tickets(self) -> list[Ticket]:
        """Tickets of records that the client never reported, in the order of sending, once the free ones are gone.

        Records that a callback sends meanwhile take other tickets.
        """
        silent = (ticket for ticket in self.every if ticket.left and ticket.callbacks is not NO_CALLBACKS)
        return sorted(silent, key=lambda ticket: ticket.first)
