"""Record values of every format as documents, by Python's own libraries, which share no code with the pipeline.

What belongs here: from bytes to a document. What does not: the fields of a document (`highwater.reading`), or the
pipeline's expressions (`assets.decoding`).
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from highwater.format_rules import python_pattern
from highwater.formats import Avro, Csv, Format, Json, Lines, Protobuf, Raw
from highwater.protobuf import compiled, declared_files
from highwater.reading import MisfitError, Record, UnreadableError, document_of
from highwater.schemas import FramingError, framing_of, protobuf_message, self_contained_avro

if TYPE_CHECKING:
    from highwater.declaration import Field, Stream
    from highwater.schemas import Framed, Schema

Schemas = Callable[[int | str], "Schema | None"]


_LONGEST_VALUE = 2**31 - 1


class UnknownSchemaError(MisfitError):
    """The registry does not know a record's schema yet."""


def read_fields(stream: Stream) -> list[Field]:
    """The fields that come from records, as the format writes them: in lines of text numbers are texts."""
    found = [one for one in stream.fields if one.expression is None]
    if not isinstance(stream.value, Csv | Lines):
        return found
    return [replace(one, text=True) if one.is_number or one.unit or one.type == "boolean" else one for one in found]


def document(declared: Format, record: Record, schemas: Schemas | None) -> Any:
    """The document of a record's value.

    Args:
        declared: the format.
        record: has a value.
        schemas: those of the registry, by number or GUID; None where none is configured.

    Raises:
        MisfitError: the value is no such format.
        UnknownSchemaError: the registry does not know its schema.
        RecursionError: it is nested deeper than Python reads.
    """
    assert record.value is not None
    if isinstance(declared, Json):
        return _json(_framed(record, schemas, by_guid=False)[0].payload if declared.registry else record.value)
    if isinstance(declared, Avro):
        if declared.schema is not None:
            return _avro(declared.schema, record.value)
        framed, schema = _framed(record, schemas)
        assert schema is not None
        if schema.kind != "AVRO":
            raise MisfitError(f"schema {schema.id} is no Avro")
        return _avro(self_contained_avro(schema), framed.payload)
    if isinstance(declared, Protobuf):
        return _protobuf(declared, record, schemas)
    readers: Mapping[type[Any], Callable[[Any, bytes], Any]] = {Csv: _csv, Lines: _line, Raw: _raw}
    return readers[type(declared)](declared, record.value)


def _json(value: bytes) -> Any:
    if value.startswith(codecs.BOM_UTF8):
        raise MisfitError("not JSON: a byte order mark at byte 0")
    try:
        value.decode()  # Python would read UTF-16 and UTF-32 as well
        found = document_of(value)
    except ValueError as error:
        raise MisfitError(f"the value is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise MisfitError("the value is no JSON object")
    return found


def _framed(record: Record, schemas: Schemas | None, *, by_guid: bool = True) -> tuple[Framed, Schema | None]:
    """The payload and its schema; a document in JSON is read without one where that is known by a GUID alone."""
    try:
        framed = framing_of(record.value, record.headers)
    except FramingError as error:
        raise MisfitError(f"the value has no schema ID: {error}") from error
    assert framed is not None
    if framed.schema_id is None and not by_guid:
        return framed, None
    asked = framed.guid if framed.schema_id is None else framed.schema_id
    found = None if schemas is None or asked is None else schemas(asked)
    if found is None:
        raise UnknownSchemaError(f"the registry does not know schema {asked}")
    return framed, found


def _avro(text: str, payload: bytes) -> Any:
    import fastavro

    stream = io.BytesIO(payload)
    try:
        schema = fastavro.parse_schema(_as_spark_reads(json.loads(text)))
        found = fastavro.schemaless_reader(stream, schema, None)
    except Exception as error:
        raise MisfitError(f"no Avro at byte {stream.tell()}: {type(error).__name__}: {error}") from error
    if stream.tell() < len(payload):
        raise MisfitError(f"bytes follow the Avro record at byte {stream.tell()}")
    return found


# To the pipeline a UUID is text, and a time of day is a number.
_PLAIN = frozenset({"uuid", "time-millis", "time-micros"})


def _as_spark_reads(schema: Any) -> Any:
    """The schema without the logical types that Spark does not know."""
    if isinstance(schema, list):
        return [_as_spark_reads(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    known = {key: one for key, one in schema.items() if key != "logicalType" or one not in _PLAIN}
    return {key: _as_spark_reads(one) for key, one in known.items()}


def _protobuf(declared: Protobuf, record: Record, schemas: Schemas | None) -> Any:
    """The message by `json_format`, with whole numbers of 64 bits as numbers again."""
    from google.protobuf import json_format
    from google.protobuf.message import DecodeError
    from google.protobuf.message_factory import GetMessageClass

    try:
        if declared.descriptors is not None:
            kind, payload = _message(*declared_files(declared), declared.message, ()), record.value or b""
        else:
            framed, schema = _framed(record, schemas)
            assert schema is not None
            places, payload = protobuf_message(framed)
            kind = _message(*compiled(schema), declared.message, places)
        read = GetMessageClass(kind)()
        read.ParseFromString(payload)
        text = json_format.MessageToJson(
            read, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, ensure_ascii=False
        )
    except TypeError as error:  # an `Any` whose type is in no descriptor
        raise UnreadableError(str(error)) from error
    except (DecodeError, FramingError, json_format.Error, ValueError, KeyError) as error:
        if isinstance(error, MisfitError):
            raise
        raise MisfitError(f"no Protobuf: {error}") from error
    return _with_numbers(document_of(text.encode()), kind)


def _message(files: bytes, main: str, name: str, places: tuple[int, ...]) -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for one in FileDescriptorSet.FromString(files).file:
        pool.Add(one)
    if name:
        return pool.FindMessageTypeByName(name)
    found: Any = pool.FindFileByName(main)
    inside = next(one for one in FileDescriptorSet.FromString(files).file if one.name == main).message_type
    for place in places:
        if place >= len(inside):
            raise MisfitError(f"the schema has no message {places}")
        known = getattr(found, "message_types_by_name", None) or found.nested_types_by_name
        found = known[inside[place].name]
        inside = inside[place].nested_type
    return found


def _with_numbers(value: Any, kind: Any) -> Any:
    """A message's document whose numbers of 64 bits are numbers, and whose infinite ones are floats."""
    if kind.full_name == "google.protobuf.Timestamp":
        return re.sub(r"(\.[0-9]{6})[0-9]+", r"\1", value)  # what is beyond the microsecond is cut off
    if kind.full_name in {"google.protobuf.Int64Value", "google.protobuf.UInt64Value"}:
        return Decimal(value)
    if kind.full_name.startswith("google.protobuf.") or not isinstance(value, dict):
        return value
    return {field.name: _number_in(field, value[field.name]) for field in kind.fields if field.name in value}


def _number_in(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _number_in(inner, one) for key, one in value.items()}
    if isinstance(value, list):
        return [_number_in(field, one) for one in value]
    if field.message_type is not None:
        return _with_numbers(value, field.message_type)
    if isinstance(value, str) and field.cpp_type in {field.CPPTYPE_INT64, field.CPPTYPE_UINT64}:
        return int(value)
    if isinstance(value, str) and field.cpp_type in {field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT}:
        return float(value.replace("Infinity", "inf"))
    if field.cpp_type == field.CPPTYPE_FLOAT:  # written as short as it can be
        return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    return str(value) if field.enum_type is not None else value


def _text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise MisfitError(f"the value is not UTF-8 at byte {error.start}") from error
    line = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if "\n" in line or "\r" in line:
        raise MisfitError("the value has more than one line")
    return line


def _csv(declared: Csv, value: bytes) -> dict[str, str | None]:
    line = _text(value)
    csv.field_size_limit(_LONGEST_VALUE)
    dialect: dict[str, Any] = {"delimiter": declared.delimiter, "quotechar": declared.quote}
    try:
        rows = list(csv.reader([line], doublequote=True, strict=True, **dialect))
    except csv.Error as error:
        raise MisfitError(f"no line of separated values: {error}") from error
    values = rows[0] if rows else []
    values = values or [""]
    if len(values) != len(declared.columns):
        raise MisfitError(f"{len(values)} values in place of {len(declared.columns)}")
    return {name: None if one == declared.null else one for name, one in zip(declared.columns, values, strict=True)}


def _line(declared: Lines, value: bytes) -> dict[str, str]:
    found = re.fullmatch(python_pattern(declared.pattern), _text(value), re.ASCII)
    if found is None:
        raise MisfitError("the line does not match the declared pattern")
    return {name: one for name, one in found.groupdict().items() if one}


def _raw(declared: Raw, value: bytes) -> dict[str, bytes]:
    del declared
    return {"value": value}
