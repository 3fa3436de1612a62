"""The envelope of a record on a DLQ topic: headers that say where it came from and why it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

PREFIX = "highwater."
ORIGIN_TOPIC = "highwater.origin.topic"
ORIGIN_GENERATION = "highwater.origin.generation"
ORIGIN_PARTITION = "highwater.origin.partition"
ORIGIN_OFFSET = "highwater.origin.offset"
ORIGIN_TIMESTAMP = "highwater.origin.timestamp"
ATTEMPT = "highwater.attempt"
REASON = "highwater.reason"
# Of a record that a declared rule or check refused alone.
RULE = "highwater.rule"
DETAIL = "highwater.detail"
SLICE = "highwater.slice"
FIRST_FAILED_AT = "highwater.first_failed_at"
# On the topic of accepted events alone.
LATE = "highwater.late"
REVISION = "highwater.revision"
RETRACTED = "highwater.retracted"
RECLAIMS = "highwater.reclaims"
# Headers of a reference: a record on the parked topic that lacks at least its value.
LEFT_OUT = "highwater.left_out"
RAW_TOPIC = "highwater.raw.topic"
RAW_GENERATION = "highwater.raw.generation"
RAW_PARTITION = "highwater.raw.partition"
RAW_OFFSET = "highwater.raw.offset"
BYTES = "highwater.bytes"
# Parts that `highwater.left_out` may name.
VALUE, OWN_HEADERS, KEY = "value", "headers", "key"

# Room that a DLQ topic must have beyond the main topic's largest record.
MAX_BYTES = 16 * 1024
# A detail is for people; it and a rule's name are cut at this length, so that the envelope never outgrows its room.
MAX_DETAIL = 1000

# Limit of counters: one less than the columns hold, so that the next number fits as well.
MAX_COUNT = 2**31 - 2

# The years 1 to 9999: what readers of the tables can hold as a time. Beyond them there is the number alone.
MIN_MILLISECONDS, MAX_MILLISECONDS = -62_135_596_800_000, 253_402_300_799_999

KafkaHeader = tuple[str, bytes | None]


class Origin(NamedTuple):
    """The place at which a record was first published: its identity for ever."""

    topic: str
    generation: int
    partition: int
    offset: int

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """The origin that a row of a table names."""
        return cls(*[row[name] for name in ORIGIN])


class Place(NamedTuple):
    """The place at which a record was read: it picks one row of the table `raw`."""

    topic: str
    generation: int
    partition: int
    offset: int


# The columns of an origin, in every table.
ORIGIN = tuple(f"origin_{name}" for name in Origin._fields)
# The same as a list in SQL.
ORIGIN_SQL = ", ".join(ORIGIN)
# The same with their types, by Arrow's names.
ORIGIN_TYPES = tuple(zip(ORIGIN, ("string", "int32", "int32", "int64"), strict=True))


@dataclass(frozen=True)
class ValueReference:
    """The headers of a reference beside the envelope.

    Args:
        left_out: the parts of the record that are not in it: the value, and perhaps its own headers and its key.
        place: where all of it is in raw.
        size: size of the whole record with its envelope, in bytes.
    """

    left_out: tuple[str, ...]
    place: Place
    size: int

    def to_headers(self) -> list[KafkaHeader]:
        """The headers, all as text in UTF-8."""
        plain: dict[str, object] = {
            LEFT_OUT: ",".join(self.left_out),
            RAW_TOPIC: self.place.topic,
            RAW_GENERATION: self.place.generation,
            RAW_PARTITION: self.place.partition,
            RAW_OFFSET: self.place.offset,
            BYTES: self.size,
        }
        return [(name, str(value).encode()) for name, value in plain.items()]

    @classmethod
    def from_headers(cls, text: Mapping[str, str]) -> Self | None:
        """The headers as text by name; None unless they are whole."""
        parts = tuple(text.get(LEFT_OUT, "").split(","))
        try:
            generation, partition, offset, size = (
                int(text.get(name, "")) for name in (RAW_GENERATION, RAW_PARTITION, RAW_OFFSET, BYTES)
            )
        except ValueError:
            return None
        if VALUE not in parts or not set(parts) <= {VALUE, OWN_HEADERS, KEY} or not text.get(RAW_TOPIC):
            return None
        if min(generation, partition, offset, size) < 0 or max(generation, partition) > _INT or offset > _LONG:
            return None
        return cls(parts, Place(text[RAW_TOPIC], generation, partition, offset), size)


@dataclass(frozen=True)
class Envelope:
    """The envelope in headers.

    Args:
        topic, generation, partition, offset: the origin, which is the record's identity for ever.
        timestamp: when it was first published, in milliseconds since 1970 in UTC.
        attempt: how often it was classified and rejected: 1 after the main topic.
        reason: why it was rejected the last time.
        detail: the same in words.
        slice_key: the slice that rejected it the last time.
        first_failed_at: when it was rejected the first time, in UTC.
        rule: the name of the rule or check that refused it; None where another reason did.
        reclaims: how often the origin had been reclaimed from the DLQ when this was published (`highwater.reclaims`).
        reference: where raw holds the record, if this record leaves it out; None for a whole record.
    """

    topic: str
    generation: int
    partition: int
    offset: int
    timestamp: int
    attempt: int
    reason: str
    detail: str
    slice_key: str
    first_failed_at: datetime
    rule: str | None = None
    reclaims: int = 0
    reference: ValueReference | None = None

    @property
    def origin(self) -> Origin:
        """The record's identity."""
        return Origin(self.topic, self.generation, self.partition, self.offset)

    def to_headers(self) -> list[KafkaHeader]:
        """The headers, all as text in UTF-8."""
        plain: dict[str, object] = {
            ORIGIN_TOPIC: self.topic,
            ORIGIN_GENERATION: self.generation,
            ORIGIN_PARTITION: self.partition,
            ORIGIN_OFFSET: self.offset,
            ORIGIN_TIMESTAMP: self.timestamp,
            ATTEMPT: self.attempt,
            REASON: self.reason,
            **({} if self.rule is None else {RULE: self.rule[:MAX_DETAIL]}),
            DETAIL: self.detail[:MAX_DETAIL],
            SLICE: self.slice_key,
            FIRST_FAILED_AT: self.first_failed_at.isoformat(),
            RECLAIMS: self.reclaims,
        }
        headers: list[KafkaHeader] = [(name, str(value).encode()) for name, value in plain.items()]
        return headers if self.reference is None else [*headers, *self.reference.to_headers()]


def add_envelope(envelope: Envelope, headers: Iterable[KafkaHeader]) -> list[KafkaHeader]:
    """The record's own headers untouched and in their order, then the envelope in place of any earlier one.

    So headers never grow with the attempts.
    """
    return [*remove_envelope(headers), *envelope.to_headers()]


def remove_envelope(headers: Iterable[KafkaHeader]) -> Sequence[KafkaHeader]:
    """The record's own headers."""
    return [header for header in headers if not header[0].startswith(PREFIX)]


def build_headers(row: Mapping[str, Any]) -> list[KafkaHeader]:
    """The headers of a row of raw or of rejects, in their order."""
    return [(header["key"], header["value"]) for header in row["headers"] or ()]


def open_envelope(headers: Iterable[KafkaHeader], believed: Callable[[str], bool] | None = None) -> Envelope | None:
    """The envelope of a record on a DLQ topic; None where one is missing or cannot be believed.

    If a header occurs several times, the last one counts. `highwater.assets.origins` reads the same in Spark.

    Args:
        headers: all of the record's.
        believed: whether a topic may be that of an origin: one of another stream may not; all may if None.
    """
    try:
        text = {name: (value or b"").decode() for name, value in headers if name.startswith(PREFIX)}
    except UnicodeDecodeError:
        return None
    topic, numbers = text.get(ORIGIN_TOPIC), _parse_numbers(text)
    if not topic or numbers is None or (believed is not None and not believed(topic)):
        return None
    reference = ValueReference.from_headers(text)
    if reference is None and LEFT_OUT in text:
        return None
    generation, partition, offset, timestamp, attempt, reclaims = numbers
    return Envelope(
        topic=topic,
        generation=generation,
        partition=partition,
        offset=offset,
        timestamp=timestamp,
        attempt=attempt,
        reason=text.get(REASON, ""),
        detail=text.get(DETAIL, ""),
        slice_key=text.get(SLICE, ""),
        first_failed_at=_parse_moment(text.get(FIRST_FAILED_AT, "")),
        rule=text.get(RULE),
        reclaims=reclaims,
        reference=reference,
    )


_INT, _LONG = 2**31 - 1, 2**63 - 1
_RANGES = {
    ORIGIN_GENERATION: (0, MAX_COUNT),
    ORIGIN_PARTITION: (0, _INT),
    ORIGIN_OFFSET: (0, _LONG),
    ORIGIN_TIMESTAMP: (-_LONG - 1, _LONG),
    ATTEMPT: (1, MAX_COUNT),
    RECLAIMS: (0, MAX_COUNT),
}
# Values for records without the header, which were published before it existed.
_WITHOUT = {RECLAIMS: "0"}


def _parse_numbers(text: Mapping[str, str]) -> tuple[int, int, int, int, int, int] | None:
    """Generation, partition, offset, timestamp, attempt and reclaims; None unless all are in their ranges."""
    found = []
    for name, (least, most) in _RANGES.items():
        try:
            number = int(text.get(name, _WITHOUT.get(name, "")))
        except ValueError:
            return None
        if not least <= number <= most:
            return None
        found.append(number)
    generation, partition, offset, timestamp, attempt, reclaims = found
    return generation, partition, offset, timestamp, attempt, reclaims


def _parse_moment(text: str) -> datetime:
    """The moment; the beginning of 1970 where it cannot be read: nothing is decided by it."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
