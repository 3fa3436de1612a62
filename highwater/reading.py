"""The declared fields of a record by Python's own parsers, which share no code with the pipeline.

What belongs here: one record's fields in the types of their columns. What does not: the pipeline's expressions
(`assets.fields`), or comparing events with records (`orchestration.checking.contents`).
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation, localcontext
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
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6}0*)?([Zz]|[+-][0-9]{2}:?[0-9]{2})?"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_CLOCK = re.compile(r"((?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d)(?:\.(\d{1,6})0*)?")
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
    return _read(field, _found(field, record, document))


def _read(field: Field, found: Any) -> Any:
    """A field of what its source has."""
    if found is _MISSING:
        if not field.optional:
            raise MisfitError("it is missing")
        return field.default
    if found is None:
        if not field.nullable:
            raise MisfitError("it is null")
        return None
    if isinstance(found, float) and not math.isfinite(found):
        found = Infinite("NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity")
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
    if isinstance(found, bytes):
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise MisfitError(f"it is not UTF-8 at byte {error.start}") from error
    if not isinstance(found, str):
        raise MisfitError("it is no text")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise MisfitError(f"it has half of a surrogate pair at character {error.start}") from error
    return found


def _boolean(field: Field, found: Any) -> bool:
    if field.text and found in {"true", "false"}:
        return bool(found == "true")
    if not isinstance(found, bool):
        raise MisfitError("it is neither true nor false")
    return found


def _decimal(field: Field, found: Any) -> Decimal:
    """A number exactly, as it is written."""
    if field.unscaled:
        try:
            unscaled = int.from_bytes(base64.b64decode(_string(field, found), validate=True), signed=True)
        except ValueError as error:
            raise MisfitError(str(error)) from error
        return Decimal(unscaled).scaleb(-_scale(field), Context(prec=100))
    if isinstance(found, int) and not isinstance(found, bool):
        found = Decimal(found)
    if isinstance(found, str) and field.text:
        found = _number(found) if _JSON_NUMBER.fullmatch(found) else None
        if found is None:
            raise MisfitError("the text is no number")
    if not isinstance(found, Decimal) or not found.is_finite():
        raise MisfitError("it is no number")
    return found


def _amount(field: Field, found: Any) -> Decimal:
    """A decimal; rounded half up where that is declared."""
    number = _decimal(field, found)
    if not field.rounded or number.adjusted() > _MOST_PLACES:
        return number
    return number.quantize(Decimal(1).scaleb(-_scale(field)), ROUND_HALF_UP, Context(prec=100))


def _scale(field: Field) -> int:
    return int(field.type.rstrip(")").partition(",")[2])


def _whole(field: Field, found: Any) -> int:
    number = _decimal(field, found)
    with localcontext(prec=100):
        if abs(number.adjusted()) > _MOST_PLACES or number != number.to_integral_value():
            raise MisfitError("it is no whole number of the type")
        return int(number)


def _float(field: Field, found: Any) -> float:
    read = found if isinstance(found, float) else float(_decimal(field, found))
    if math.isinf(read) or (field.type == "float" and abs(read) > _LARGEST_FLOAT):
        raise MisfitError(f"it does not fit {field.type}")
    return float(struct.unpack("<f", struct.pack("<f", read))[0]) if field.type == "float" else read


def _moment(field: Field, found: Any) -> int:
    if isinstance(found, datetime) and found.tzinfo is not None:
        return (found - _BEGIN) // timedelta(microseconds=1)
    if field.unit is not None:
        return _counted(field, found)
    if not isinstance(found, str):
        raise MisfitError("it is no text")
    if not _TIMESTAMP.fullmatch(found):
        raise UnreadableError("it is no timestamp in ISO 8601 with six digits of a second at the most")
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


def _local(field: Field, found: Any) -> int:
    """Microseconds since 1970 of a time without a zone."""
    if isinstance(found, datetime) and found.tzinfo is None:
        return (found.replace(tzinfo=UTC) - _BEGIN) // timedelta(microseconds=1)
    if field.unit is not None:
        return _counted(field, found)
    if not isinstance(found, str):
        raise MisfitError("it is no text")
    if not _TIMESTAMP.fullmatch(found):
        raise UnreadableError("it is no timestamp in ISO 8601 with six digits of a second at the most")
    try:
        moment = datetime.fromisoformat(found.upper())
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    if moment.tzinfo is not None:
        raise MisfitError("it has a zone")
    return (moment.replace(tzinfo=UTC) - _BEGIN) // timedelta(microseconds=1)


def _time(field: Field, found: Any) -> str:
    """A time of day in ISO 8601, with its microseconds where it has some."""
    if field.unit is not None:
        micros = _whole(field, found) * (1000 if field.unit == "ms" else 1)
        if not 0 <= micros < _DAY:
            raise MisfitError("it is no time of day")
        return (_BEGIN + timedelta(microseconds=micros)).time().isoformat()
    text = _string(field, found)
    digits = _CLOCK.fullmatch(text)
    if digits is None:
        raise MisfitError("it is no time of day")
    fraction = (digits[2] or "").ljust(6, "0")
    return digits[1] if fraction == "000000" else f"{digits[1]}.{fraction}"


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
    if isinstance(found, date) and not isinstance(found, datetime):
        return found
    try:
        if field.unit is not None:
            return _BEGIN.date() + timedelta(days=_whole(field, found))
        text = _string(field, found)
        if not _DATE.fullmatch(text):
            raise MisfitError("it is no date in ISO 8601")
        return date.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise MisfitError(str(error)) from error


def _bytes(field: Field, found: Any) -> bytes:
    if isinstance(found, bytes):
        return found
    try:
        return base64.b64decode(_string(field, found))
    except ValueError as error:
        raise MisfitError(str(error)) from error


def _json(field: Field, found: Any) -> Any:
    """The value itself: how it is written as text is the writer's."""
    del field
    return found


def _array(field: Field, found: Any) -> list[Any]:
    if not isinstance(found, list | tuple):
        raise MisfitError("it is no array")
    [element] = field.members
    return [_inside(element, one, f"[{at}]") for at, one in enumerate(found)]


def _map(field: Field, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise MisfitError("it is no object")
    [inner] = field.members
    return {key: _inside(inner, one, f'["{key}"]') for key, one in found.items()}


def _struct(field: Field, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise MisfitError("it is no object")
    return {one.name: _inside(one, _first(one, found), f".{one.name}") for one in field.members}


def _first(field: Field, around: Any) -> Any:
    """What the first path has that has something."""
    found = (_at(around, source) for source in field.sources if isinstance(source, tuple))
    return next((one for one in found if one is not _MISSING), _MISSING)


def _inside(field: Field, found: Any, place: str) -> Any:
    """A field inside of another one; its place is told with what is wrong."""
    try:
        return _read(field, found)
    except MisfitError as error:
        raise MisfitError(f"{place}{'' if str(error).startswith(('.', '[')) else ': '}{error}") from error


_READERS = {
    "string": _string,
    "boolean": _boolean,
    "integer": _whole,
    "long": _whole,
    "decimal": _amount,
    "float": _float,
    "double": _float,
    "timestamp": _moment,
    "date": _day,
    "binary": _bytes,
    "json": _json,
    "timestamp_ntz": _local,
    "time": _time,
    "array": _array,
    "map": _map,
    "struct": _struct,
}


def _as_document(read: Any) -> Any:
    """A decoded value as the JSON document that says the same."""
    if isinstance(read, Mapping):
        return {key: _as_document(one) for key, one in read.items()}
    if isinstance(read, list | tuple):
        return [_as_document(one) for one in read]
    if isinstance(read, date):
        raise UnreadableError("a date or a time in JSON is written as Spark writes it")
    if isinstance(read, bytes):
        return base64.b64encode(read).decode()
    if isinstance(read, int | float) and not isinstance(read, bool):
        return Infinite(str(read)) if isinstance(read, float) and not math.isfinite(read) else Decimal(repr(read))
    return read


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
        return bool(document_of(stored.encode()) == _as_document(read))
    if field.type == "array":
        [element] = field.members
        return len(read) == len(stored) and all(same(element, *pair) for pair in zip(read, stored, strict=True))
    if field.type == "map":
        [inner], there = field.members, dict(stored)
        return read.keys() == there.keys() and all(same(inner, read[key], there[key]) for key in read)
    if field.type == "struct":
        return all(same(one, read[one.name], stored[one.name]) for one in field.members)
    if field.type in {"timestamp", "timestamp_ntz"} and isinstance(stored, datetime):
        aware = stored if stored.tzinfo else stored.replace(tzinfo=UTC)
        stored = (aware - _BEGIN) // timedelta(microseconds=1)
    if isinstance(read, float) and math.isnan(read):
        return isinstance(stored, float) and math.isnan(stored)
    # To Python `true` equals 1.
    return bool(read == stored) and isinstance(read, bool) == isinstance(stored, bool)
