"""Avro values as documents, by fastavro with the pipeline's types in the place of its own."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any

from highwater.schemas import MAX_DECIMAL_DIGITS, with_storable_decimals
from highwater.second_reader import MisfitError, OutOfRangeValue


def decode_avro(text: str, payload: bytes, named: str, *, any_type: bool) -> Any:
    """The value of an Avro record, read by fastavro.

    Args:
        text: the writer's schema, as JSON.
        payload: the record without framing.
        named: the name of the schema, for errors.
        any_type: whether the schema may be of another type than a record.

    Raises:
        MisfitError: the schema or the bytes cannot be read.
    """
    import fastavro

    stream = io.BytesIO(payload)
    try:
        schema = _parse_avro_schema(text, any_type=any_type)
    except Exception as error:
        raise MisfitError(f"{named} cannot be read: {error}") from error
    try:
        found: Any = fastavro.schemaless_reader(stream, schema, None)
    except Exception as error:
        raise MisfitError(f"no Avro at byte {stream.tell()}: {type(error).__name__}: {error}") from error
    if stream.tell() < len(payload):
        raise MisfitError(f"bytes follow the Avro record at byte {stream.tell()}")
    return found[_MEMBER] if any_type else found


def find_schema_problem(text: str) -> str | None:
    """Why no values of an Avro schema are read; None where they are."""
    try:
        _parse_avro_schema(text, any_type=False)
    except Exception as error:  # noqa: BLE001 - as fastavro raises for a schema that is none
        return str(error)
    return None


# The field of a record that has a value of any type.
_MEMBER = "key"


@lru_cache(maxsize=256)
def _parse_avro_schema(text: str, *, any_type: bool) -> Any:
    """A schema for fastavro, which has our logical types in the place of its own.

    Raises:
        ValueError: it is no record and has to be one, or a record is inside of itself, which Spark does not read.
    """
    import fastavro
    from fastavro.read import LOGICAL_READERS

    given = json.loads(text)
    if any_type:
        # fastavro parses other types again with each value. A record of one field has the bytes of the field.
        given = {"type": "record", "name": "highwater_key", "fields": [{"name": _MEMBER, "type": given}]}
    elif not isinstance(given, dict) or given.get("type") != "record":
        raise ValueError("it is no record")
    LOGICAL_READERS.update({f"{kind}-{_OURS}{logical}": reader for (kind, logical), reader in _LOGICAL_TYPES.items()})
    parsed = fastavro.parse_schema(_with_our_types(with_storable_decimals(given)))
    _ensure_finite(parsed, ())
    refused: dict[str, Any] = _without_negative_numbers(parsed)
    return refused


class _Branches(list[Any]):
    """The branches of a union; none has a negative number.

    fastavro's compiled reader adds the length to a negative number before it asks for the branch, as a list does. With
    this length the sum is after the last branch.
    """

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, int) and number < 0:
            raise IndexError(f"a union has no branch {number}")
        return super().__getitem__(number)


def _without_negative_numbers(parsed: Any) -> Any:
    """A parsed schema from which fastavro takes no symbol and no branch of a union by a negative number."""
    if isinstance(parsed, list):
        return _Branches(map(_without_negative_numbers, parsed))
    if not isinstance(parsed, dict):
        return parsed
    found = {key: _without_negative_numbers(one) if key in _NESTED else one for key, one in parsed.items()}
    if "fields" in found:
        found["fields"] = [{**one, "type": _without_negative_numbers(one["type"])} for one in parsed["fields"]]
    if _NAMED in found:
        found[_NAMED] = {name: _without_negative_numbers(one) for name, one in parsed[_NAMED].items()}
    if "symbols" in found:
        found["symbols"] = dict(enumerate(parsed["symbols"]))
    return found


# The keys of a schema that have schemas.
_NESTED = frozenset({"type", "items", "values"})
# Where fastavro has the types that the rest of a schema names.
_NAMED = "__named_schemas"
# Begins the names of logical types that fastavro reads by our functions. Its own round decimals, write UUIDs again, and
# fail for times that Python does not know, also in fields that nobody reads.
_OURS = "highwater-"


def _with_our_types(schema: Any) -> Any:
    """A schema without the logical types that the pipeline takes for numbers, texts or bytes, such as times of day."""
    if isinstance(schema, list):
        return [_with_our_types(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_our_types(one) if key in _NESTED else one for key, one in schema.items()}
    if "fields" in found:
        found["fields"] = [{**one, "type": _with_our_types(one["type"])} for one in schema["fields"]]
    logical = found.pop("logicalType", None)
    if (found["type"] if isinstance(found.get("type"), str) else None, logical) not in _LOGICAL_TYPES:
        return found
    if logical == "decimal" and not _is_decimal(found):
        return found  # Avro ignores what it cannot be
    return {**found, "logicalType": f"{_OURS}{logical}"}


def _is_decimal(schema: Mapping[str, Any]) -> bool:
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 <= scale <= precision or precision < 1:
        return False
    return schema["type"] == "bytes" or precision < len(str(2 ** (8 * schema["size"] - 1)))


def _ensure_finite(schema: Any, around: tuple[str, ...]) -> None:
    """Ensure that no type is inside of itself; fastavro has written out all names."""
    if isinstance(schema, str) and schema in around:
        raise ValueError(f"the type {schema} is inside of itself")
    if isinstance(schema, list):
        for one in schema:
            _ensure_finite(one, around)
    elif isinstance(schema, dict):
        around = (*around, schema["name"]) if "name" in schema else around
        inside = [schema[key] for key in ("type", "items", "values") if key in schema]
        for one in (*inside, *(field["type"] for field in schema.get("fields", ()))):
            _ensure_finite(one, around)


def _decode_decimal(data: bytes, schema: Mapping[str, Any], _: object = None) -> Decimal:
    unscaled = int.from_bytes(data, signed=True)
    if not data or abs(unscaled) >= 10 ** schema["precision"]:
        raise ValueError(f"a decimal with more digits than {schema['precision']}, or without bytes")
    return Decimal(unscaled).scaleb(-int(schema.get("scale", 0)), Context(prec=MAX_DECIMAL_DIGITS))


def add_microseconds(begin: datetime, micros: int) -> datetime | OutOfRangeValue:
    """A time plus microseconds; `OutOfRangeValue` outside of the years 1 to 9999."""
    try:
        return begin + timedelta(microseconds=micros)
    except OverflowError:
        return OutOfRangeValue(f"{micros} microseconds since 1970")


def _decode_date(days: int, _: object = None, __: object = None) -> date | OutOfRangeValue:
    found = add_microseconds(LOCAL_BEGIN, days * 86_400_000_000)
    return found.date() if isinstance(found, datetime) else found


_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
LOCAL_BEGIN = _BEGIN.replace(tzinfo=None)
_LOGICAL_TYPES: Mapping[tuple[str | None, str | None], Callable[..., Any]] = {
    ("long", "timestamp-millis"): lambda number, *_: add_microseconds(_BEGIN, number * 1000),
    ("long", "timestamp-micros"): lambda number, *_: add_microseconds(_BEGIN, number),
    ("long", "local-timestamp-millis"): lambda number, *_: add_microseconds(LOCAL_BEGIN, number * 1000),
    ("long", "local-timestamp-micros"): lambda number, *_: add_microseconds(LOCAL_BEGIN, number),
    ("int", "date"): _decode_date,
    ("bytes", "decimal"): _decode_decimal,
    ("fixed", "decimal"): _decode_decimal,
}
