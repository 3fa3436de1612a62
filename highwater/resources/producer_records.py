"""Input and reports of a producer: records, their outcomes and counts, and the errors that name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from highwater.errors import RecordRefusedError, UndeliveredError
from highwater.resources.delivery import UNREPORTED, DeliveryEnd, classify_end, find_remedy

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

# An error names at most this many ids; `Counts` has them all.
NAMED = 20
# The client's own words for what a record leaves open.
ANY_PARTITION, NOW = -1, 0

Headers = Sequence[tuple[str, bytes | None]]


class Outcome(NamedTuple):
    """The outcome of one record.

    `error` is librdkafka's name of the fault, None when the record was delivered; only then are partition, offset and
    timestamp (milliseconds since 1970) those of the log. The offset is -1 where the broker had the record already and
    no longer says where. The topic is empty where the client never reported the record. `refused` if the client never
    took it: then it is nowhere, whatever the same error would leave open in a delivery report.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    error: str | None = None
    refused: bool = False

    @property
    def end(self) -> DeliveryEnd:
        """Delivered, not delivered, or unknown."""
        return DeliveryEnd.NOT_DELIVERED if self.refused else classify_end(self.error)

    @property
    def delivered(self) -> bool:
        """Whether every in-sync replica has the record."""
        return self.error is None


class Record(NamedTuple):
    """A record to send. A tuple, since one is made for every record: a frozen dataclass takes three times as long.

    Args:
        topic: the topic, which must exist.
        key: the key; records of one key stay in order.
        value: the value; None is a tombstone.
        headers: in their order.
        partition: a fixed partition; by the key if None.
        timestamp: publish time in milliseconds since 1970; now if None.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | None = None


class OnFailure(Enum):
    """The rule for later records of a key when one of them was not delivered, or perhaps not."""

    STOP_KEY = "stop the key"
    """Records that were not under way yet are handed back, and no more are taken; other keys go on."""
    GO_ON = "go on"
    """They are sent all the same, and the failure is reported."""


@dataclass
class Counts:
    """The numbers of records by their outcome so far; of those that were not delivered, the records.

    `sent` = `delivered` + `not delivered` + `unknown` + `outstanding`, at any time.
    """

    sent: int = 0
    delivered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    not_delivered: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def outstanding(self) -> int:
        """Records without a delivery report yet."""
        return self.sent - self.delivered - (self.failed.total() if self.failed else 0)

    def __str__(self) -> str:
        errors = "".join(f", {count:,} {name}" for name, count in sorted(self.failed.items()))
        ends = f", {len(self.unknown):,} of them unknown" if self.unknown else ""
        return f"{self.sent:,} sent: {self.delivered:,} delivered, {self.outstanding:,} outstanding{errors}{ends}"


def build_undelivered_error(counts: Counts, seconds: float, late: Counter[str]) -> UndeliveredError:
    """The error that names the records which were not delivered, or whose end is unknown.

    Args:
        counts: the numbers and ids.
        seconds: how long the producer waited for the rest.
        late: by topic the records that had no report by then.
    """
    left = ", ".join(f"{number:,} of {topic}" for topic, number in sorted(late.items()))
    waited = f"; without a report after {seconds:g} s: {left}" if left else ""
    unreported = counts.failed[UNREPORTED]
    silent = f"; of {unreported:,} the client never reported" if unreported else ""
    ids = _format_ids("not delivered", counts.not_delivered) + _format_ids("unknown", counts.unknown)
    return UndeliveredError(
        "not every record was delivered",
        found=f"{counts}{waited}{silent}{ids}",
        remedy=(
            "check that the brokers answer and the topics exist, then send again those that were not delivered; "
            "look for those that are unknown in the topic first, or they may come twice"
        ),
    )


def _format_ids(end: str, ids: Sequence[str]) -> str:
    if not ids:
        return ""
    more = f" and {len(ids) - NAMED:,} more" if len(ids) > NAMED else ""
    return f"; {end}: {', '.join(ids[:NAMED])}{more}"


def build_unplaced_outcome(topic: str, error: str, *, refused: bool = False) -> Outcome:
    """The outcome of a record that has no place in the log, or none that is known."""
    return Outcome(topic, -1, -1, -1, error, refused)


def build_outcome(topic: str, error: KafkaError | None, message: Message) -> Outcome:
    """The outcome that a delivery report gives."""
    if error is not None:
        return build_unplaced_outcome(topic, error.name())
    partition, offset = message.partition(), message.offset()
    return Outcome(
        topic, -1 if partition is None else partition, -1 if offset is None else offset, message.timestamp()[1]
    )


def translate_refusal(topic: str, error: KafkaError, counts: Counts) -> RecordRefusedError | UndeliveredError:
    """The error for a record that the client does not take: of this record, or of every one from now on."""
    if error.fatal() or error.name() == "_FATAL":
        return UndeliveredError(
            f"the producer can send nothing more to {topic}: {error.str()}",
            found=str(counts),
            remedy="start a new producer, and send again what was not delivered",
        )
    return RecordRefusedError(
        f"the client refuses a record for {topic}: {error.str()}",
        found=error.name(),
        remedy=find_remedy(error.name()),
    )


OrderKey = tuple[str, bytes]


def build_order_key(topic: str, key: bytes | None) -> OrderKey | None:
    """The topic and key within which records stay in order; None without a key, for then there is no order."""
    return None if key is None else (topic, key)
