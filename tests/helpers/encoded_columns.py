"""Columns of each type, and how producers of each format write them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from highwater.declaration import Field
from highwater.sources import Source
from tests.helpers import value_domains as v
from tests.helpers.value_domains import Domain

ANY_DAY = (date.min, date.max)


def store(value: Any) -> Any:
    """A value as its column has it; a time with or without a zone in microseconds since 1970."""
    if isinstance(value, dict):
        return {name: store(one) for name, one in value.items()}
    if isinstance(value, list):
        return [store(one) for one in value]
    if isinstance(value, datetime):
        return v.micros_of(value)
    return value.isoformat() if isinstance(value, time) else value


@dataclass(frozen=True)
class Column:
    """A column, the values that records have for it, and how a producer writes them.

    Args:
        field: its declaration.
        domain: the values.
        write: the value as the format's library takes it.
        stored: the value that the column has then.
        kind: the type in a schema of Avro or Protobuf.
    """

    field: Field
    domain: Domain
    write: Callable[[Any], Any] = lambda value: value
    stored: Callable[[Any], Any] = store
    kind: Any = None


def move(column: Column, *sources: Source) -> Column:
    """A column with other sources."""
    return replace(column, field=replace(column.field, source=sources))


def allow_nulls(columns: list[Column], **options: Any) -> list[Column]:
    """Columns; every other one may be null."""
    return [
        replace(one, field=replace(one.field, **options), domain=v.or_null(one.domain)) if at % 2 else one
        for at, one in enumerate(columns)
    ]


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encode_unscaled(number: Decimal) -> str:
    """The unscaled value as Kafka Connect writes it: base64 of the fewest bytes of two's complement."""
    sign, digits, _ = number.as_tuple()
    unscaled = int("".join(map(str, digits))) * (-1 if sign else 1)
    return encode_base64(unscaled.to_bytes((unscaled + (unscaled < 0)).bit_length() // 8 + 1, signed=True))


def count(unit: int) -> Callable[[Any], Any]:
    """A time, or a time of day, counted in units of a number of microseconds."""

    def write(value: datetime | time) -> int:
        moment = value if isinstance(value, datetime) else datetime.combine(v.EPOCH, value)
        return v.micros_of(moment) // unit

    return write


def count_days(day: date) -> int:
    return (day - v.EPOCH.date()).days


def count_seconds(moment: datetime) -> Decimal:
    """Seconds with as many digits after the point as there are microseconds."""
    return Decimal(v.micros_of(moment)).scaleb(-6)


def write_zoned(moment: datetime) -> str:
    """ISO 8601 in one of several zones and notations."""
    style = moment.microsecond // 10 % 5
    if 2 <= moment.year <= 9998 and style in {1, 2}:
        moment = moment.astimezone(timezone(timedelta(hours=-7, minutes=-30) if style == 1 else timedelta(hours=14)))
    text = moment.isoformat(sep=" " if style == 3 else "T")
    return text.replace("+00:00", "Z") if style % 2 == 0 else text


def localize(local: datetime) -> int:
    """A clock's time in Berlin in microseconds since 1970."""
    return v.micros_of(local.replace(tzinfo=ZoneInfo("Europe/Berlin")).astimezone(UTC))


def write_iso(value: Any) -> str:
    text: str = value.isoformat()
    return text


def write_plain(number: Decimal) -> str:
    """Digits without an exponent."""
    return f"{number:f}"


def _time(name: str, domain: Domain, unit: str, divisor: int, kind: str = "timestamp") -> Column:
    return Column(Field(name, kind, unit=unit, plausible=ANY_DAY), domain, count(divisor))  # type: ignore[arg-type]


_DATES = [
    Column(Field("date", "date"), v.DAY, write_iso),
    Column(Field("days", "date", unit="days"), v.DAY, count_days),
    Column(Field("time", "time"), v.CLOCK, write_iso),
    Column(Field("moment", "timestamp"), v.MOMENT, write_zoned),
    Column(Field("berlin", "timestamp", zone="Europe/Berlin"), v.BERLIN, write_iso, localize),
    Column(Field("seconds", "timestamp", unit="s", plausible=ANY_DAY), v.MOMENT, count_seconds),
    _time("whole_seconds", v.MOMENT_S, "s", 10**6),
    _time("millis", v.MOMENT_MS, "ms", 1000),
    _time("micros", v.MOMENT, "us", 1),
    Column(Field("nanos", "timestamp", unit="ns", plausible=ANY_DAY), v.NANOS, stored=lambda nanos: nanos // 1000),
    Column(Field("local", "timestamp_ntz"), v.LOCAL, write_iso),
    _time("local_millis", v.LOCAL_MS, "ms", 1000, "timestamp_ntz"),
    _time("local_micros", v.LOCAL, "us", 1, "timestamp_ntz"),
]
_CLOCKS = [
    Column(Field("clock_millis", "time", unit="ms"), v.CLOCK_MS, count(1000)),
    Column(Field("clock_micros", "time", unit="us"), v.CLOCK, count(1)),
]
_NUMBERS = [
    Column(Field("flag", "boolean"), v.FLAG),
    Column(Field("integer", "integer"), v.INTEGER),
    Column(Field("long", "long"), v.LONG),
    Column(Field("float", "float"), v.SINGLE),
    Column(Field("double", "double"), v.DOUBLE),
    Column(Field("money", "decimal(12,2)"), v.MONEY),
    Column(Field("fine", "decimal(38,10)"), v.FINE),
    Column(Field("unit", "decimal(38,38)"), v.UNIT),
]
_STRING = Column(Field("string", "string"), v.TEXT)
_BINARY = Column(Field("binary", "binary"), v.BINARY, encode_base64)
# Numbers come out as they are written: a double would change some of them.
_DOCUMENTS = v.build_documents(7, Decimal("0.10"), Decimal("1E+400"), Decimal("12345678901234567890123456789.5"))
PLAIN = [
    _STRING,
    *_NUMBERS,
    Column(Field("number", "long", text=True), v.LONG, str),
    Column(Field("digits", "decimal(38,0)", text=True), v.WHOLE, write_plain),
    *_DATES,
    _BINARY,
    Column(Field("json", "json"), _DOCUMENTS),
]
_LINE = (
    Field("sku", "string"),
    Field("qty", "integer", nullable=True),
    Field("price", "decimal(12,2)"),
)
LINES = v.build_structs(sku=v.TEXT, qty=v.or_null(v.INTEGER), price=v.MONEY)
PLACE = v.build_structs(town=v.or_null(v.TEXT), moment=v.MOMENT)
_PLACE = (Field("town", "string", nullable=True), Field("moment", "timestamp"))
COUNTS = v.build_maps(v.build_lists(v.or_null(v.LONG)), v.NAMES)
# Where a member is absent instead of null, and decimals are texts.
OPTIONAL_LINE, OPTIONAL_PLACE = (
    tuple(replace(one, text=one.name == "price", optional=one.nullable, nullable=False) for one in members)
    for members in (_LINE, _PLACE)
)
_COUNTS = Field("counts", "array", of=Field("count", "long", nullable=True))


def write_members(**writers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What writes the members of structs, alone or in lists."""

    def write(value: Any) -> Any:
        if isinstance(value, list):
            return [write(one) for one in value]
        return {name: writers.get(name, lambda same: same)(one) for name, one in value.items()}

    return write


# What only a stream that is read without cheap expressions has.
ODD = [
    Column(Field("lines", "array", of=Field("line", "struct", of=_LINE)), v.build_lists(LINES)),
    Column(Field("sizes", "array", of=Field("size", "double", nullable=True)), v.build_lists(v.or_null(v.DOUBLE))),
    Column(Field("counts", "map", of=_COUNTS), COUNTS),
    Column(Field("place", "struct", of=_PLACE), PLACE, write_members(moment=write_zoned)),
    *_CLOCKS,
    Column(Field("unscaled", "decimal(12,2)", unscaled=True), v.MONEY, encode_unscaled),
    Column(Field("unscaled_whole", "decimal(38,0)", unscaled=True), v.WHOLE, encode_unscaled),
    Column(Field("any_double", "double", nan="keep"), v.ANY_DOUBLE),
]
# As Kafka Connect and Debezium write a row without a schema of Avro.
CONNECT = [
    _STRING,
    *_NUMBERS[:5],
    *[one for one in ODD if one.field.name in {"clock_millis", "clock_micros", "unscaled", "unscaled_whole"}],
    *[one for one in _DATES if one.field.name in {"days", "millis", "local_micros", "moment"}],
    _BINARY,
    Column(Field("tags", "map", of=Field("tag", "string", nullable=True)), v.build_maps(v.or_null(v.TEXT), v.NAMES)),
]


def write_text(column: Column) -> Column:
    """A column of a format that has texts alone."""

    def write(value: Any) -> str:
        found = column.write(value)
        if isinstance(found, bool):
            return str(found).lower()
        return write_plain(found) if isinstance(found, Decimal) else str(found)

    return replace(column, write=write)


# Of lines; the text of json is a JSON string there.
TEXTS = [
    write_text(one)
    for one in (
        Column(Field("string", "string"), v.LINE_TEXT),
        *_NUMBERS,
        *_DATES,
        *_CLOCKS,
        # An empty text is null, or absent.
        replace(_BINARY, domain=replace(v.BINARY, edges=v.BINARY.edges[1:], draw=lambda chance: chance.randbytes(3))),
        Column(Field("json", "json"), v.LINE_TEXT),
    )
]
# Of headers and keys of text: numbers are declared as text, and times cannot be numbers.
AS_TEXT = [
    replace(one, field=replace(one.field, text=one.field.is_number))
    for one in TEXTS
    if one.field.unit is None and one.field.name not in {"flag", "json"}
]
