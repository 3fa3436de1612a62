"""The declared fields of a record by Python's own parsers, which share no code with the pipeline.

What belongs here: one record's fields in the types of their columns. What does not: the pipeline's expressions
(`assets.fields`), or comparing events with records (`orchestration.checking.contents`).
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation, localcontext
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from highwater.declaration import UNITS
from highwater.sources import Header, Key, Meta, steps

if TYPE_CHECKING:
    from highwater.declaration import Field

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 86_400_000_000
# A number of more places fits no type.
_MOST_PLACES = 40
_MISSING: Any = object()
_LARGEST_FLOAT = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


class MisfitError(ValueError):
    """A record does not have a field as it is declared."""


class UnreadableError(ValueError):
    """Python's parsers cannot read what Spark may read: nothing is known of the field."""


@dataclass(frozen=True)
class Record:
    """A record as Kafka gave it, with its origin."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    topic: str = ""
    partition: int = 0
    offset: int = 0
    timestamp_ms: int = 0


@dataclass(frozen=True)
class Infinite:
    """NaN or an infinity, which is no JSON."""

    name: str


def document_of(value: bytes) -> Any:
    """The JSON document of a value; numbers are `Decimal`, or None where Python holds none so large.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested deeper than Python reads.
    """
    return json.loads(value, parse_int=_number, parse_float=_number, parse_constant=Infinite)


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def value_of(field: Field, record: Record, document: Any) -> Any:
    """A field in its column's type.

    Args:
        field: its declaration.
        record: the record.
        document: the JSON document of its value.

    Returns:
        Text, a whole number, a `Decimal`, a float, a bool, a `date`, bytes, microseconds since 1970 of a timestamp, or
        None where the column is null.

    Raises:
        MisfitError: the record does not have it as it is declared.
        UnreadableError: Python cannot tell.
    """
    found = _found(field, record, document)
    if found is _MISSING:
        if not field.optional:
            raise MisfitError("it is missing")
        return field.default
    if found is None:
        if not field.nullable:
            raise MisfitError("it is null")
        return None
    if isinstance(found, Infinite):
        if field.nan == "reject":
            raise MisfitError(f"it is {found.name}")
        return None if field.nan == "null" else float(found.name.replace("Infinity", "inf"))
    return _READERS[field.type.split("(")[0]](field, found)


def _found(field: Field, record: Record, document: Any) -> Any:
    """What the first source has that has something."""
    for source in field.sources:
        found = _from(source, record, document)
        if found is not _MISSING:
            return found
    return _MISSING


def _from(source: Key | Header | Meta | tuple[str, ...], record: Record, document: Any) -> Any:
    if isinstance(source, tuple):
        return _at(document, source)
    if isinstance(source, Meta):
        found = {
            "timestamp": Decimal(record.timestamp_ms),
            "partition": Decimal(record.partition),
            "offset": Decimal(record.offset),
            "topic": record.topic,
        }
        return found[source.name]
    if isinstance(source, Header):
        values = [value for name, value in record.headers if name == source.name]
        return _text(values[-1]) if values else _MISSING
    text = _text(record.key)
    if not source.path or text is _MISSING:
        return text
    try:
        return _at(document_of(text.encode()), steps(source.path))
    except (ValueError, RecursionError):
        return _MISSING


def _at(document: Any, path: Sequence[str]) -> Any:
    for step in path:
        if not isinstance(document, Mapping) or step not in document:
            return _MISSING
        document = document[step]
    return document


def _text(value: bytes | None) -> Any:
    try:
        return _MISSING if value is None else value.decode()
    except UnicodeDecodeError:
        return _MISSING


def _string(field: Field, found: Any) -> str:
    del field
    if not isinstance(found, str):
        raise MisfitError("it is no text")
    return found


def _boolean(field: Field, found: Any) -> bool:
    del field
    if not isinstance(found, bool):
        raise MisfitError("it is neither true nor false")
    return found


def _decimal(field: Field, found: Any) -> Decimal:
    """A number exactly, as it is written."""
    if isinstance(found, str) and field.text:
        found = _number(found)
        if found is None:
            raise MisfitError("the text is no number")
    if not isinstance(found, Decimal) or not found.is_finite():
        raise MisfitError("it is no number")
    return found


def _whole(field: Field, found: Any) -> int:
    number = _decimal(field, found)
    with localcontext(prec=100):
        if abs(number.adjusted()) > _MOST_PLACES or number != number.to_integral_value():
            raise MisfitError("it is no whole number of the type")
        return int(number)


def _float(field: Field, found: Any) -> float:
    read = float(_decimal(field, found))
    if math.isinf(read) or (field.type == "float" and abs(read) > _LARGEST_FLOAT):
        raise MisfitError(f"it does not fit {field.type}")
    return float(struct.unpack("<f", struct.pack("<f", read))[0]) if field.type == "float" else read


def _moment(field: Field, found: Any) -> int:
    if field.unit is not None:
        return _counted(field, found)
    if not isinstance(found, str):
        raise MisfitError("it is no text")
    try:
        moment = datetime.fromisoformat(found.upper())
    except ValueError as error:
        raise UnreadableError(str(error)) from error  # Spark reads more forms and years than Python
    if moment.tzinfo is None:
        if field.zone is None:
            raise MisfitError("it has no zone")
        moment = moment.replace(tzinfo=ZoneInfo(field.zone))
    try:
        return (moment - _BEGIN) // timedelta(microseconds=1)
    except OverflowError as error:
        raise UnreadableError(str(error)) from error


def _counted(field: Field, found: Any) -> int:
    """Microseconds since 1970 of a number; what nanoseconds have beyond them is cut off."""
    assert field.unit is not None
    number = _decimal(field, found)
    if number.adjusted() > _MOST_PLACES:
        raise MisfitError(f"it is no plausible number of {field.unit}")
    with localcontext(prec=100):
        factor = UNITS[field.unit]
        exact = number * factor.numerator / factor.denominator
        micros = math.floor(exact)
    first, last = (((day - _BEGIN.date()).days) * _DAY for day in field.plausible)
    if (field.unit != "ns" and exact != micros) or not first <= micros < last + _DAY:
        raise MisfitError(f"it is no plausible number of {field.unit}")
    return micros


def _day(field: Field, found: Any) -> date:
    try:
        if field.unit is not None:
            return _BEGIN.date() + timedelta(days=_whole(field, found))
        return date.fromisoformat(_string(field, found))
    except (ValueError, OverflowError) as error:
        raise MisfitError(str(error)) from error


def _bytes(field: Field, found: Any) -> bytes:
    try:
        return base64.b64decode(_string(field, found))
    except ValueError as error:
        raise MisfitError(str(error)) from error


def _json(field: Field, found: Any) -> Any:
    """The value itself: how it is written as text is the writer's."""
    del field
    return found


_READERS = {
    "string": _string,
    "boolean": _boolean,
    "integer": _whole,
    "long": _whole,
    "decimal": _decimal,
    "float": _float,
    "double": _float,
    "timestamp": _moment,
    "date": _day,
    "binary": _bytes,
    "json": _json,
}


def same(field: Field, read: Any, stored: Any) -> bool:
    """Whether a column of an event holds what was read of its record.

    Args:
        field: its declaration.
        read: as `value_of` returned it.
        stored: as the table has it; of a timestamp in microseconds since 1970.
    """
    if read is None or stored is None:
        return read is None and stored is None
    if field.type == "json":
        return bool(document_of(stored.encode()) == read)
    if isinstance(read, float) and math.isnan(read):
        return isinstance(stored, float) and math.isnan(stored)
    # To Python `true` equals 1.
    return bool(read == stored) and isinstance(read, bool) == isinstance(stored, bool)
