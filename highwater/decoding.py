"""Record values and keys of every format as documents, by Python's own libraries, apart from the pipeline's code."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from highwater.avro_decoding import LOCAL_BEGIN, add_microseconds, decode_avro
from highwater.declaration import Field, Stream
from highwater.format_rules import to_python_pattern
from highwater.formats import Avro, BigEndian, Csv, Format, Json, KeyFormat, Lines, Protobuf, Raw, Text
from highwater.protobuf import compile_schema, decode_declared_files
from highwater.schemas import (
    KEY_HEADER,
    VALUE_HEADER,
    FramedValue,
    FramingError,
    Kind,
    Schema,
    build_self_contained_avro,
    describe_other_kind,
    parse_framing,
    parse_protobuf_message,
)
from highwater.second_reader import (
    HALF_OF_A_PAIR,
    MISSING,
    InfiniteNumber,
    KafkaRecord,
    MisfitError,
    UnparsedText,
    parse_number,
)
from highwater.sources import Rest

Schemas = Callable[[int | str], "Schema | None"]


class UnknownSchemaError(MisfitError):
    """The registry does not know a record's schema yet."""


def read_fields(stream: Stream) -> list[Field]:
    """The fields that come from records, as the format writes them: in lines of text numbers are texts."""
    return _as_written(stream, [_with_taken(stream, one) for one in stream.fields if one.is_read])


def read_record_key_fields(stream: Stream) -> list[Field]:
    """The fields of the key as a decoded record key has them."""
    return _as_written(stream, stream.record_key_fields)


def _as_written(stream: Stream, found: Iterable[Field]) -> list[Field]:
    """The fields, as texts where the stream's values are lines of text."""
    if not isinstance(stream.value, Csv | Lines):
        return [*found]
    return [replace(one, text=True) if one.is_number or one.unit or one.type == "boolean" else one for one in found]


def _with_taken(stream: Stream, field: Field) -> Field:
    """A field whose source is the rest of an object, with the names of the members that are no part of it."""
    if not isinstance(field.source, Rest):
        return field
    return replace(field, source=replace(field.source, taken=stream.select_taken_members(field.source.path)))


def decode_value(
    declared: Format, record: KafkaRecord, schemas: Schemas | None, *, infinite: bool = True
) -> dict[str, Any]:
    """The document of a record's value.

    Args:
        declared: the format.
        record: has a value.
        schemas: finds the registry's schemas by number or GUID; None if no registry is configured.
        infinite: whether fields take NaN and infinities; if none does, a document with them is not JSON.

    Returns:
        An object, whose parts are those of JSON, or times, dates and bytes. An object of JSON in which a name occurs
        twice is a `RepeatedNames`.

    Raises:
        MisfitError: the value is no such format.
        UnknownSchemaError: the registry does not know its schema.
        RecursionError: it is nested deeper than Python reads.
    """
    assert record.value is not None
    if isinstance(declared, Json):
        framed = _resolve_framing(record, schemas, by_guid=False)[0] if declared.registry else None
        return _parse_json(record.value if framed is None else framed.payload, infinite=infinite)
    if isinstance(declared, Avro):
        return dict(_decode_avro_record(declared, record, schemas, any_type=False))
    if isinstance(declared, Protobuf):
        found: dict[str, Any] = _decode_protobuf(declared, record, schemas)
        return found
    readers: Mapping[type[Any], Callable[[Any, bytes], Any]] = {
        Csv: _parse_csv,
        Lines: _parse_line,
        Raw: _wrap_raw_value,
    }
    return dict(readers[type(declared)](declared, record.value))


def decode_record_key(stream: Stream, record: KafkaRecord, schemas: Schemas | None) -> Any:
    """A record's key, decoded; `MISSING` without one, or where a record may have any key.

    Args:
        stream: declares the format.
        record: the record.
        schemas: finds the registry's schemas by number or GUID; None if no registry is configured.

    Returns:
        A text, a number, bytes, an object, or what else the format has.

    Raises:
        MisfitError: the key is no such format.
        UnknownSchemaError: the registry does not know its schema.
    """
    if record.key is None or not stream.needs_readable_key:
        return MISSING
    return decode_key(stream.key_format, record.key, record, schemas)


def decode_key(declared: KeyFormat, key: bytes, record: KafkaRecord, schemas: Schemas | None) -> Any:
    """A record's key in a format.

    Raises:
        MisfitError: the key is no such format.
        UnknownSchemaError: the registry does not know its schema.
    """
    # The framing of a key is that of a value, but for the name of the header.
    headers = [(VALUE_HEADER, content) for name, content in record.headers if name == KEY_HEADER]
    moved = replace(record, value=key, headers=headers)
    try:
        return _decode_by_format(declared, key, moved, schemas)
    except UnknownSchemaError as error:
        raise UnknownSchemaError(f"{error} of the key") from error
    except MisfitError as error:
        text = str(error)
        worded = text.replace("the value", "the key", 1) if text.startswith("the value") else f"the key: {text}"
        raise MisfitError(worded) from error
    except RecursionError as error:
        raise MisfitError("the key is nested deeper than Python reads") from error


def _decode_by_format(declared: KeyFormat, key: bytes, moved: KafkaRecord, schemas: Schemas | None) -> Any:
    if isinstance(declared, Raw):
        return key
    if isinstance(declared, Text):
        try:
            return key.decode()
        except UnicodeDecodeError as error:
            raise MisfitError(f"the value is not UTF-8 at byte {error.start}") from error
    if isinstance(declared, BigEndian):
        if len(key) != declared.size:
            raise MisfitError(f"the value has {len(key)} bytes, and an integer {declared.size}")
        return int.from_bytes(key, signed=True)
    if isinstance(declared, Avro):
        return _decode_avro_record(declared, moved, schemas, any_type=True)
    if isinstance(declared, Protobuf):
        return _with_doubles(_decode_protobuf(declared, moved, schemas, any_type=True))
    framed = _resolve_framing(moved, schemas, by_guid=False)[0] if declared.registry else None
    return _parse_json_key(key if framed is None else framed.payload)


# Beyond these the pipeline reads a number of a key as a double.
_MAX_DIGITS = 38
_LONGEST_NUMBER = 1000  # of Jackson


def _parse_json_key(key: bytes) -> Any:
    """A document of any type, which is sound as a whole."""

    def build_strict_object(given: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(given)) < len(given):
            raise MisfitError("the value has a name twice")
        return dict(given)

    def reject_constant(name: str) -> Any:
        raise MisfitError(f"not JSON: {name}")

    found = _load_json(key, "not JSON", _parse_key_number, reject_constant, build_strict_object)
    if HALF_OF_A_PAIR.search(json.dumps(found, ensure_ascii=False, default=str)):
        raise MisfitError("the value has half of a surrogate pair")
    return found


def _load_json(
    value: bytes,
    fault: str,
    number: Callable[[str], Any],
    constant: Callable[[str], Any],
    pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]],
) -> Any:
    """A document with numbers, constants and objects as these functions build them; `fault` begins a parser's error."""
    try:
        return json.loads(
            value.decode(), parse_int=number, parse_float=number, parse_constant=constant, object_pairs_hook=pairs
        )
    except MisfitError:
        raise
    except UnicodeDecodeError as error:
        raise MisfitError(f"the value is not UTF-8 at byte {error.start}") from error
    except ValueError as error:
        raise MisfitError(f"{fault}: {error}") from error


def _parse_key_number(text: str) -> Decimal | float:
    if len(text) > _LONGEST_NUMBER:
        raise MisfitError(f"not JSON: a number of {len(text)} digits")
    number = None if "e" in text.lower() else Decimal(text)
    if number is None or len(number.as_tuple().digits) > _MAX_DIGITS or number.as_tuple().exponent < -_MAX_DIGITS:  # type: ignore[operator]
        return float(text)
    return number


def _with_doubles(found: Any) -> Any:
    """A message of a key, whose numbers with a point are doubles where they are written with an exponent."""
    if isinstance(found, dict):
        return {name: _with_doubles(one) for name, one in found.items()}
    if isinstance(found, list):
        return [_with_doubles(one) for one in found]
    if isinstance(found, InfiniteNumber):
        raise MisfitError(f"not JSON: {found.name}")
    return float(found) if isinstance(found, Decimal) and "e" in repr(float(found)) else found


class RepeatedNames(dict[str, Any]):
    """An object of JSON in which names occur more than once; it has the last value of each.

    Args:
        pairs: the names and values, as they are written.
    """

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = frozenset(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else RepeatedNames(pairs)


def _parse_json(value: bytes, *, infinite: bool) -> dict[str, Any]:
    def convert_constant(name: str) -> InfiniteNumber:
        if not infinite:
            raise MisfitError(f"the value is no JSON: {name}, which no field takes")
        return InfiniteNumber(name)

    found = _load_json(value, "the value is no JSON", parse_number, convert_constant, _build_object)
    if not isinstance(found, dict):
        raise MisfitError("the value is no JSON object")
    return found


def _resolve_framing(
    record: KafkaRecord, schemas: Schemas | None, *, by_guid: bool = True
) -> tuple[FramedValue, Schema | None]:
    """The payload and its schema; a document in JSON is read without one where that is known by a GUID alone."""
    try:
        framed = parse_framing(record.value, record.headers)
    except FramingError as error:
        raise MisfitError(f"the value has no schema ID: {error}") from error
    assert framed is not None
    if framed.schema_id is None and not by_guid:
        return framed, None
    schema_id = framed.guid if framed.schema_id is None else framed.schema_id
    found = None if schemas is None or schema_id is None else schemas(schema_id)
    if found is None:
        raise UnknownSchemaError(f"the registry does not know schema {schema_id}")
    return framed, found


def _resolve_schema(record: KafkaRecord, schemas: Schemas | None, kind: Kind) -> tuple[FramedValue, Schema]:
    """The payload and its schema, which is of the declared format."""
    framed, schema = _resolve_framing(record, schemas)
    assert schema is not None
    if schema.kind != kind:
        name = framed.guid if framed.schema_id is None else framed.schema_id
        raise MisfitError(f"schema {name} cannot be read: {describe_other_kind(schema, kind)}")
    return framed, schema


def _inline_references(schema: Schema) -> str:
    try:
        return build_self_contained_avro(schema)
    except Exception as error:  # whatever the registry gives for a schema
        raise MisfitError(f"schema {schema.id} cannot be read: {error}") from error


def _decode_avro_record(declared: Avro, record: KafkaRecord, schemas: Schemas | None, *, any_type: bool) -> Any:
    """The decoded value, by the declared schema or by the one that the framing names."""
    if declared.schema is not None:
        return decode_avro(declared.schema, record.value or b"", "the declared schema", any_type=any_type)
    framed, schema = _resolve_schema(record, schemas, "AVRO")
    return decode_avro(
        _inline_references(schema), framed.payload, f"schema {schema.id or framed.guid}", any_type=any_type
    )


def _decode_protobuf(
    declared: Protobuf, record: KafkaRecord, schemas: Schemas | None, *, any_type: bool = False
) -> Any:
    from google.protobuf.message import DecodeError

    try:
        if declared.descriptors is not None:
            kind, payload = (
                _build_message_class(*_parse_declared_files(declared), declared.message, ()),
                record.value or b"",
            )
        else:
            framed, schema = _resolve_schema(record, schemas, "PROTOBUF")
            places, payload = parse_protobuf_message(framed)
            kind = _build_message_class(*compile_schema(schema), declared.message, places)
        read = kind()
        read.ParseFromString(payload)
        found = _convert_message(read)
    except MisfitError:
        raise
    except (DecodeError, FramingError, ValueError, KeyError, TypeError) as error:
        raise MisfitError(f"no Protobuf: {error}") from error
    if not any_type and not isinstance(found, dict):
        raise MisfitError(f"a message {kind.DESCRIPTOR.full_name} has no fields")
    return found


@lru_cache(maxsize=256)
def _parse_declared_files(declared: Protobuf) -> tuple[bytes, str]:
    return decode_declared_files(declared)


@lru_cache(maxsize=256)
def _build_message_class(files: bytes, main: str, name: str, places: tuple[int, ...]) -> Any:
    """The class of a message, by its name or by its place in the main file and in the messages around it."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    known, pool = FileDescriptorSet.FromString(files).file, DescriptorPool()
    for one in known:
        pool.Add(one)
    if not name:
        [file] = [one for one in known if one.name == main]
        inside, names = file.message_type, [file.package] if file.package else []
        for place in places:
            if place >= len(inside):
                raise MisfitError(f"the schema has no message {places}")
            names.append(inside[place].name)
            inside = inside[place].nested_type
        name = ".".join(names)
    return GetMessageClass(pool.FindMessageTypeByName(name))


_WRAPPERS = frozenset(
    f"{kind}Value" for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)


def _convert_message(message: Any) -> Any:
    """The contents of a message, in the types that JSON has: bytes are base64, and times are ISO 8601."""
    package, _, name = message.DESCRIPTOR.full_name.rpartition(".")
    known = name if package == "google.protobuf" else ""
    if known == "Timestamp":
        return _format_timestamp(message.seconds, message.nanos)
    if known == "Duration":
        return message.ToJsonString()
    if known == "Value":
        kind = message.WhichOneof("kind") or "null_value"
        return None if kind == "null_value" else _convert_field(message, kind)
    if known in _WRAPPERS | {"Struct", "ListValue"}:
        return _convert_field(message, message.DESCRIPTOR.fields[0].name)
    there = [f for f in message.DESCRIPTOR.fields if not f.has_presence or f.is_repeated or message.HasField(f.name)]
    return {field.name: _convert_field(message, field.name) for field in there}


def _convert_field(message: Any, name: str) -> Any:
    """The contents of one field of a message."""
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {_format_key(key): _convert_value(inner, value[key]) for key in value}
    if field.is_repeated:
        return [_convert_value(field, one) for one in value]
    return _convert_value(field, value)


def _convert_value(field: Any, value: Any) -> Any:
    """A value that is no list and no map."""
    if field.message_type is not None:
        return _convert_message(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number
        return known[value].name if value in known else str(value)
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return parse_number(repr(value))
    return InfiniteNumber(_NAMES[str(value)])


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _format_key(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _format_timestamp(seconds: int, nanos: int) -> str:
    """ISO 8601 to the microsecond, or a text that is no time."""
    found = add_microseconds(LOCAL_BEGIN, seconds * 1_000_000 + nanos // 1000)
    return f"{found.isoformat()}Z" if isinstance(found, datetime) else f"{seconds} s and {nanos} ns since 1970"


def _decode_line(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise MisfitError(f"the value is not UTF-8 at byte {error.start}") from error
    line = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if "\n" in line or "\r" in line:
        raise MisfitError("the value has more than one line")
    return line


def _parse_csv(declared: Csv, value: bytes) -> dict[str, str | None]:
    values = _split_values(_decode_line(value), declared)
    if len(values) != len(declared.columns):
        raise MisfitError(f"{len(values)} values in place of {len(declared.columns)}")
    return {name: None if one == declared.null else one for name, one in zip(declared.columns, values, strict=True)}


def _split_values(line: str, declared: Csv) -> list[str]:
    """The values of a line, of any length: the module csv has a limit, which is one for the whole process."""
    quote, end = re.escape(declared.quote), re.escape(declared.delimiter)
    quoted = re.compile(rf"{quote}((?:[^{quote}]|{quote}{quote})*+){quote}(?={end}|\Z)")
    found, at = list[str](), 0
    while True:
        if line.startswith(declared.quote, at):
            match = quoted.match(line, at)
            if match is None:
                place = len(line[:at].encode())
                raise MisfitError(f"no line of separated values: a quote that is not closed begins at byte {place}")
            value, at = match[1].replace(declared.quote * 2, declared.quote), match.end()
        else:
            begin, at = at, line.find(declared.delimiter, at)
            at = len(line) if at < 0 else at
            value = line[begin:at]
        found.append(value)
        if at == len(line):
            return found
        at += 1


def _parse_line(declared: Lines, value: bytes) -> dict[str, str]:
    found = re.fullmatch(to_python_pattern(declared.pattern), _decode_line(value), re.ASCII)
    if found is None:
        raise MisfitError("the line does not match the declared pattern")
    return {name: one for name, one in found.groupdict().items() if one}


def _wrap_raw_value(declared: Raw, value: bytes) -> dict[str, bytes]:
    del declared
    return {"value": UnparsedText(value)}
