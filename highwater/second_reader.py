"""The second reader: the declared fields of a record by Python, which shares no code with the pipeline in Spark."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from typing import Any
from zoneinfo import ZoneInfo

from highwater.declaration import Field
from highwater.declaration_parts import UNITS
from highwater.sources import Header, Key, Meta, Reference, Rest, split_path

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 86_400_000_000
# A number of more places fits no type.
_MAX_PLACES = 40
MISSING: Any = object()
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# An exponent beyond this fits no type.
_MAX_EXPONENT = 400
_CLOCK = re.compile(r"((?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9])(?:\.([0-9]{1,6})0*)?")
# The part of ISO 8601 that RFC 3339 allows, with at most six digits after the second that are not zeros.
_ISO = re.compile(
    r"(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ](?P<clock>[0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,6})0*)?(?P<zone>[Zz]|(?P<sign>[+-])(?P<hours>[0-9]{2})(?::?(?P<minutes>[0-9]{2}))?)?"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_FARTHEST_ZONE = timedelta(hours=18)
_FIRST_MICROS = -62_135_596_800_000_000  # of the year 1
_LAST_MICROS = 253_402_300_799_999_999  # of the year 9999
# As RFC 4648, with or without padding; white space may be anywhere but after padding.
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?")
_SPACE = re.compile(r"[ \t-\r\x1c-\x1f]+")
_UNSCALED_BYTES = 16  # as many as 38 digits need
HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


class MisfitError(ValueError):
    """A record does not have a field as it is declared."""


class OtherTypeError(MisfitError):
    """A record has a value of another type than the field."""


class UnreadableError(ValueError):
    """Python's parsers cannot read what Spark may read: nothing is known of the field."""


@dataclass(frozen=True)
class KafkaRecord:
    """A record as Kafka gave it, with its origin."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] = ()
    topic: str = ""
    partition: int = 0
    offset: int = 0
    timestamp_ms: int = 0


@dataclass(frozen=True)
class InfiniteNumber:
    """NaN or an infinity, which is no JSON."""

    name: str


@dataclass(frozen=True)
class OutOfRangeValue:
    """A decoded value beyond every type: a number with a huge exponent, or a time with a huge year."""

    text: str


class UnparsedText(bytes):
    """A value that is not parsed: a `string` is its text, and absent where it is not UTF-8."""

    __slots__ = ()


def parse_document(value: bytes) -> Any:
    """The JSON document of a value in UTF-8; numbers are `Decimal`, or `OutOfRangeValue` every type.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested deeper than Python reads.
    """
    return json.loads(value.decode(), parse_int=parse_number, parse_float=parse_number, parse_constant=InfiniteNumber)


def parse_number(text: str) -> Decimal | OutOfRangeValue:
    """A number of JSON exactly as it is written."""
    if "e" not in text and "E" not in text:
        return Decimal(text)
    exponent = text.lower().partition("e")[2].lstrip("+-").lstrip("0")
    return OutOfRangeValue(text) if len(exponent) > 3 or int(exponent or 0) > _MAX_EXPONENT else Decimal(text)


def convert_field(field: Field, record: KafkaRecord, document: Any, key: Any) -> Any:
    """A field in its column's type.

    Args:
        field: its declaration.
        record: the record.
        document: the JSON document of its value.
        key: its decoded key; `MISSING` without one.

    Returns:
        Text, a whole number, a `Decimal`, a float, a bool, a `date`, bytes, microseconds since 1970 of a timestamp, or
        None where the column is null.

    Raises:
        MisfitError: the record does not have it as it is declared.
        UnreadableError: Python cannot read the type.
    """
    return _read(field, _found(field, record, document, key))


def _read(field: Field, found: Any) -> Any:
    """A field of what its source has."""
    if found is MISSING:
        if not field.optional:
            raise MisfitError("it is missing")
        return field.default
    if found is None:
        if not field.nullable:
            raise MisfitError("it is null")
        return None
    if isinstance(found, float) and not math.isfinite(found):
        found = InfiniteNumber("NaN" if math.isnan(found) else "Infinity" if found > 0 else "-Infinity")
    if isinstance(found, InfiniteNumber) and field.type != "json":
        if field.nan == "reject":
            raise MisfitError(f"it is {found.name}")
        return None if field.nan == "null" else float(found.name.replace("Infinity", "inf"))
    return _READERS[field.type.split("(")[0]](field, found)


def _found(field: Field, record: KafkaRecord, document: Any, key: Any) -> Any:
    """The value of the first source that has one."""
    for source in field.sources:
        found = _find_source_value(source, record, document, key)
        if isinstance(found, UnparsedText) and field.type == "string":
            found = _decode_text(found)
        if found is not MISSING:
            return found
    return MISSING


def _find_source_value(
    source: Key | Header | Meta | Reference | Rest | tuple[str, ...], record: KafkaRecord, document: Any, key: Any
) -> Any:
    if isinstance(source, tuple):
        return _find_at_path(document, source)
    if isinstance(source, Rest):
        return select_unknown_members(source.path, source.taken, document) or MISSING
    if isinstance(source, Reference):
        raise UnreadableError(f"{source.column} is a column of the lookup's table, and no part of a record")
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
        return _decode_text(values[-1]) if values else MISSING
    return _find_at_path(key, split_path(source.path)) if source.path else key


def select_unknown_members(path: Sequence[str], taken: Collection[str], document: Any) -> dict[str, Any]:
    """The members that no field is taken from, of the object at a path; empty where there is none."""
    found = _find_at_path(document, path)
    return {name: one for name, one in found.items() if name not in taken} if isinstance(found, Mapping) else {}


def _find_at_path(document: Any, path: Sequence[str]) -> Any:
    for step in path:
        if not isinstance(document, Mapping) or step not in document:
            return MISSING
        document = document[step]
    return document


def _decode_text(value: bytes | None) -> Any:
    try:
        return MISSING if value is None else value.decode()
    except UnicodeDecodeError:
        return MISSING


def _to_string(field: Field, found: Any) -> str:
    del field
    if not isinstance(found, str):
        raise OtherTypeError("it is no text")
    if HALF_OF_A_PAIR.search(found):
        raise MisfitError("it has half of a surrogate pair")
    return found


def _to_boolean(field: Field, found: Any) -> bool:
    if field.text and isinstance(found, str) and found in {"true", "false"}:
        return bool(found == "true")
    if not isinstance(found, bool):
        raise OtherTypeError("it is neither true nor false")
    return found


def _to_exact_number(field: Field, found: Any) -> Decimal:
    """A number exactly, as it is written."""
    if field.unscaled:
        return _decode_unscaled(field, found)
    if isinstance(found, int) and not isinstance(found, bool):
        found = Decimal(found)
    if isinstance(found, str) and field.text:
        if not _JSON_NUMBER.fullmatch(found):
            raise MisfitError("the text is no number")
        found = parse_number(found)
    if isinstance(found, OutOfRangeValue):
        raise MisfitError(f"it does not fit {field.type}")
    if isinstance(found, str) and _JSON_NUMBER.fullmatch(found):
        declares = ", which text=True declares" if field.is_number else ""
        raise OtherTypeError(f"it is a number in text{declares}")
    if not isinstance(found, Decimal):
        raise OtherTypeError("it is no number")
    return found


def _decode_unscaled(field: Field, found: Any) -> Decimal:
    """A decimal by its unscaled value."""
    digits = _to_bytes(field, _to_string(field, found))
    if not 1 <= len(digits) <= _UNSCALED_BYTES:
        raise MisfitError(f"it has {len(digits)} bytes; an unscaled value has 1 to {_UNSCALED_BYTES}")
    return Decimal(int.from_bytes(digits, signed=True)).scaleb(-_find_scale(field), Context(prec=100))


def _to_decimal(field: Field, found: Any) -> Decimal:
    """A decimal; rounded half up where that is declared."""
    number = _to_exact_number(field, found)
    if not number:
        return Decimal(0).scaleb(-_find_scale(field))
    if number.adjusted() > _MAX_PLACES:
        raise MisfitError(f"it does not fit {field.type}")
    fitted = number.quantize(Decimal(1).scaleb(-_find_scale(field)), ROUND_HALF_UP, Context(prec=100))
    if fitted != number and not field.rounded:
        raise MisfitError(f"it has more than {_find_scale(field)} digits after the point")
    return fitted


def _find_scale(field: Field) -> int:
    return int(field.type.rstrip(")").partition(",")[2])


def _to_whole_number(field: Field, found: Any) -> int:
    number = _to_exact_number(field, found)
    with localcontext(prec=100):
        if (number and abs(number.adjusted()) > _MAX_PLACES) or number != number.to_integral_value():
            raise MisfitError("it is no whole number of the type")
        return int(number)


def _to_float(field: Field, found: Any) -> float:
    exact = found if isinstance(found, float) else _to_exact_number(field, found)
    try:
        read = round_to_single(exact) if field.type == "float" else float(exact)
    except OverflowError:
        read = math.inf
    if math.isinf(read):
        raise MisfitError(f"it does not fit {field.type}")
    return read


def round_to_single(exact: float | Decimal) -> float:
    """The nearest number in 32 bits.

    Raises:
        OverflowError: it is infinite.
    """
    read = float(exact)
    if isinstance(exact, Decimal) and math.isfinite(read) and Decimal(read) != exact:
        # By way of 64 bits it is rounded twice. A double with an odd last bit is never half way between two singles.
        [bits] = struct.unpack("<q", struct.pack("<d", read))
        if not bits & 1:
            read = math.nextafter(read, math.inf if exact > Decimal(read) else -math.inf)
    return float(struct.unpack("<f", struct.pack("<f", read))[0])


def _to_timestamp(field: Field, found: Any) -> int:
    if isinstance(found, datetime) and found.tzinfo is not None:
        return (found - EPOCH) // timedelta(microseconds=1)
    if field.unit is not None:
        return _to_epoch_micros(field, found)
    written, local = _parse_iso_time(found)
    if written["zone"] is None:
        if field.zone is None:
            raise MisfitError("it has no zone")
        micros = _count_micros(local.replace(tzinfo=ZoneInfo(field.zone)))
    else:
        micros = _count_micros(local.replace(tzinfo=UTC)) - _parse_zone_offset(written) // timedelta(microseconds=1)
    if not _FIRST_MICROS <= micros <= _LAST_MICROS:
        raise UnreadableError("it is outside of the years 1 to 9999")
    return micros


def _to_local_timestamp(field: Field, found: Any) -> int:
    """Microseconds since 1970 of a time without a zone."""
    if isinstance(found, datetime) and found.tzinfo is None:
        return _count_micros(found.replace(tzinfo=UTC))
    if field.unit is not None:
        return _to_epoch_micros(field, found)
    written, local = _parse_iso_time(found)
    if written["zone"] is not None:
        raise MisfitError("it has a zone")
    return _count_micros(local.replace(tzinfo=UTC))


def _parse_iso_time(found: Any) -> tuple[re.Match[str], datetime]:
    """A time in ISO 8601 by its parts, and without its zone."""
    if not isinstance(found, str):
        raise OtherTypeError("it is no text")
    written = _ISO.fullmatch(found)
    if written is None:
        raise UnreadableError("it is no time such as 2026-03-01T10:00:00.25Z, with six digits of a second at most")
    fraction = (written["fraction"] or "").ljust(6, "0")
    try:
        return written, datetime.fromisoformat(f"{written['day']}T{written['clock']}.{fraction}")
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def _parse_zone_offset(written: re.Match[str]) -> timedelta:
    """The offset of a zone from UTC."""
    if written["sign"] is None:
        return timedelta()
    minutes = int(written["minutes"] or 0)
    offset = timedelta(hours=int(written["hours"]), minutes=minutes)
    if minutes > 59 or offset > _FARTHEST_ZONE:
        raise UnreadableError(f"there is no zone {written['zone']}")
    return offset if written["sign"] == "+" else -offset


def _count_micros(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


def _read_time(field: Field, found: Any) -> str:
    """A time of day in ISO 8601, with its microseconds where it has some."""
    if field.unit is not None:
        micros, is_whole = _convert_units(field, found)
        if not is_whole or not 0 <= micros < _DAY:
            raise MisfitError(f"it is no time of day in {field.unit} since midnight")
        return (EPOCH + timedelta(microseconds=micros)).time().isoformat()
    digits = _CLOCK.fullmatch(_to_string(field, found))
    if digits is None:
        raise MisfitError("it is no time of day")
    fraction = (digits[2] or "").ljust(6, "0")
    return digits[1] if fraction == "000000" else f"{digits[1]}.{fraction}"


def _to_epoch_micros(field: Field, found: Any) -> int:
    """Microseconds since 1970 of a number; what nanoseconds have beyond them is cut off."""
    micros, is_whole = _convert_units(field, found)
    first, last = (((day - EPOCH.date()).days) * _DAY for day in field.plausible)
    if (field.unit != "ns" and not is_whole) or not first <= micros < last + _DAY:
        raise MisfitError(f"it is no plausible number of {field.unit}")
    return micros


def _convert_units(field: Field, found: Any) -> tuple[int, bool]:
    """The microseconds of a number of units, rounded down, and whether they are exact."""
    assert field.unit is not None
    number = _to_exact_number(field, found)
    if number and (number.adjusted() > _MAX_PLACES or number.adjusted() < -_MAX_PLACES):
        raise MisfitError(f"it is no plausible number of {field.unit}")
    whole, parts = number.as_integer_ratio()
    whole, parts = whole * UNITS[field.unit].numerator, parts * UNITS[field.unit].denominator
    return whole // parts, whole % parts == 0


def _to_date(field: Field, found: Any) -> date:
    if isinstance(found, date) and not isinstance(found, datetime):
        return found
    try:
        if field.unit is not None:
            return EPOCH.date() + timedelta(days=_to_whole_number(field, found))
        if not _DATE.fullmatch(_to_string(field, found)):
            raise MisfitError("it is no date such as 2026-03-01")
        return date.fromisoformat(found)
    except (ValueError, OverflowError) as error:
        raise MisfitError(str(error)) from error


def _to_bytes(field: Field, found: Any) -> bytes:
    if isinstance(found, bytes):
        return bytes(found)
    text = _to_string(field, found)
    digits = _SPACE.sub("", text)
    if not _BASE64.fullmatch(digits) or re.search(rf"={_SPACE.pattern}", text):
        raise MisfitError("it is no base64")
    return base64.b64decode(digits + "=" * (-len(digits) % 4))


def _to_json_value(field: Field, found: Any) -> Any:
    """The value itself: how it is written as text is the writer's."""
    del field
    return found


def _to_array(field: Field, found: Any) -> list[Any]:
    if not isinstance(found, list | tuple):
        raise OtherTypeError("it is no array")
    [element] = field.members
    return [_convert_nested(element, one, f"[{at}]") for at, one in enumerate(found)]


def _read_map(field: Field, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise OtherTypeError("it is no object")
    [inner] = field.members
    return {key: _convert_nested(inner, one, f'["{key}"]') for key, one in found.items()}


def _to_struct(field: Field, found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise OtherTypeError("it is no object")
    return {one.name: _convert_nested(one, _find_first_value(one, found), f".{one.name}") for one in field.members}


def _find_first_value(field: Field, around: Any) -> Any:
    """The value of the first path that has one."""
    found = (_find_at_path(around, source) for source in field.sources if isinstance(source, tuple))
    return next((one for one in found if one is not MISSING), MISSING)


def _convert_nested(field: Field, found: Any, place: str) -> Any:
    """A field inside another one; its problem is reported with its place."""
    try:
        return _read(field, found)
    except (MisfitError, UnreadableError) as error:
        raise type(error)(format_located_problem(place, error)) from error


def format_located_problem(place: str, error: ValueError) -> str:
    """The problem after its place: `lines[1].price: it is missing`."""
    return f"{place}{'' if str(error).startswith(('.', '[')) else ': '}{error}"


_READERS = {
    "string": _to_string,
    "boolean": _to_boolean,
    "integer": _to_whole_number,
    "long": _to_whole_number,
    "decimal": _to_decimal,
    "float": _to_float,
    "double": _to_float,
    "timestamp": _to_timestamp,
    "date": _to_date,
    "binary": _to_bytes,
    "json": _to_json_value,
    "timestamp_ntz": _to_local_timestamp,
    "time": _read_time,
    "array": _to_array,
    "map": _read_map,
    "struct": _to_struct,
}
