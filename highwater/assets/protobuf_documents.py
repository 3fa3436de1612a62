"""Protobuf messages as JSON documents, by Python alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

# A varint of 64 bits has ten bytes; no message is nested deeper than Protobuf's own limit.
_MAX_BITS = 63
_MAX_PLACES = 100
_SHORT_TEXT = 200
_Writer = Callable[[Any], str]
_dump = json.JSONEncoder(ensure_ascii=False).encode
_quoted = json.encoder.encode_basestring


class ProtobufReader:
    """Reads messages.

    Args:
        message: the full name of the message; empty for the one that the framing names.
        files: by schema the `FileDescriptorSet` in bytes, and the name of the file whose messages the framing counts.
        framed: whether the indexes of the message in its file precede it, or are in a header.
    """

    def __init__(self, message: str, files: Mapping[str, tuple[bytes, str]], *, framed: bool) -> None:
        from google.protobuf.message import DecodeError

        self._faults = (DecodeError, ValueError, KeyError, RecursionError)
        self._message, self._files, self._framed = message, files, framed
        self._pools: dict[str, Any] = {}
        self._kinds: dict[tuple[str, tuple[int, ...]], tuple[type[Any], _Writer]] = {}

    def read(
        self, schema: str | None, data: bytes | None, places: bytes | None = None
    ) -> tuple[str | None, str | None]:
        """The document of a message and its fault: one of them, or none without a schema or a value.

        Args:
            schema: the schema's ID.
            data: the value after its framing.
            places: the bytes after the ID in a header; None where the framing is in the value.
        """
        if schema is None or data is None:
            return None, None
        if schema not in self._files:
            return None, f"schema {schema} is no Protobuf that can be compiled"
        try:
            path, rest = self._split_framing(data, places)
            kind, write = self._find_message_class(schema, () if self._message else path)
            read = kind()
            read.ParseFromString(rest)
            return write(read), None
        except self._faults as error:
            return None, f"no Protobuf of schema {schema}: {str(error)[:_SHORT_TEXT] or type(error).__name__}"

    def _split_framing(self, data: bytes, places: bytes | None) -> tuple[tuple[int, ...], bytes]:
        if not self._framed:
            return (), data
        return _split_message_path(data) if places is None else (_split_message_path(places)[0], data)

    def _find_message_class(self, schema: str, places: tuple[int, ...]) -> tuple[type[Any], _Writer]:
        """The class of the message, and what writes it."""
        from google.protobuf.message_factory import GetMessageClass

        if (schema, places) not in self._kinds:
            descriptor = self._build_descriptor_pool(schema).FindMessageTypeByName(
                self._message or self._find_name(schema, places)
            )
            self._kinds[schema, places] = GetMessageClass(descriptor), _build_writer(descriptor, {})
        return self._kinds[schema, places]

    def _find_name(self, schema: str, places: tuple[int, ...]) -> str:
        """The full name of the message at these places."""
        from google.protobuf.descriptor_pb2 import FileDescriptorSet

        data, main = self._files[schema]
        [file] = [one for one in FileDescriptorSet.FromString(data).file if one.name == main]
        names, among = [file.package] if file.package else [], file.message_type
        for place in places:
            if not 0 <= place < len(among):
                raise ValueError(f"there is no message {[*places]}")
            names.append(among[place].name)
            among = among[place].nested_type
        return ".".join(names)

    def _build_descriptor_pool(self, schema: str) -> Any:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet
        from google.protobuf.descriptor_pool import DescriptorPool

        if schema not in self._pools:
            pool = DescriptorPool()
            for one in FileDescriptorSet.FromString(self._files[schema][0]).file:
                pool.Add(one)
            self._pools[schema] = pool
        return self._pools[schema]


def _split_message_path(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """The path to the message in its file, from outside in; and the message itself."""
    count, at = _decode_varint(data, 0)
    if not 0 <= count <= _MAX_PLACES:
        raise ValueError(f"the framing names {count} places of the message")
    places = [] if count else [0]
    for _ in range(count):
        place, at = _decode_varint(data, at)
        places.append(place)
    return tuple(places), data[at:]


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """A zig-zag number, and where it ends."""
    found = shift = 0
    while True:
        if at >= len(data) or shift > _MAX_BITS:
            raise ValueError(f"the places of the message end at byte {at}")
        byte = data[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return (found >> 1) ^ -(found & 1), at


def _build_writer(descriptor: Any, writers: dict[str, _Writer]) -> _Writer:
    """The writer of a message of one type as JSON: found once, since each field takes several questions.

    Args:
        descriptor: the type.
        writers: writers of the enclosing types, which may occur inside of it again.
    """
    known, name = _find_well_known_writer(descriptor), descriptor.full_name
    if known is not None:
        return lambda message: _dump(known(message))
    if name in writers:
        return writers[name]
    fields: list[tuple[str, bool, str, _Writer]] = []

    def write(message: Any) -> str:
        written = [
            begin + convert(getattr(message, field))
            for field, may_lack, begin, convert in fields
            if not may_lack or message.HasField(field)
        ]
        return "{" + ", ".join(written) + "}"

    writers[name] = write
    fields.extend(
        (
            field.name,
            field.has_presence and not field.is_repeated,
            f"{_quoted(field.name)}: ",
            _build_field_writer(field, writers),
        )
        for field in descriptor.fields
    )
    return write


def _build_field_writer(field: Any, writers: dict[str, _Writer]) -> _Writer:
    """The writer of a field's value."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = _build_value_writer(field.message_type.fields_by_name["value"], writers)
        return lambda value: (
            "{" + ", ".join(f"{_quoted(_format_map_key(key))}: {inner(value[key])}" for key in value) + "}"
        )
    each = _build_value_writer(field, writers)
    return (lambda value: "[" + ", ".join(map(each, value)) + "]") if field.is_repeated else each


def _format_map_key(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _build_value_writer(field: Any, writers: dict[str, _Writer]) -> _Writer:
    """The writer of one value of a field."""
    if field.type in {field.TYPE_MESSAGE, field.TYPE_GROUP}:
        return _build_writer(field.message_type, writers)
    if field.type == field.TYPE_STRING:
        return _quoted
    if field.cpp_type in {field.CPPTYPE_BOOL, field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT}:
        return _dump
    plain = _build_text_converter(field)
    return str if plain is None else lambda value: _quoted(plain(value))


def _build_text_converter(field: Any) -> Callable[[Any], str] | None:
    """The text of a value that is no part of JSON."""
    if field.type == field.TYPE_BYTES:
        return lambda value: base64.b64encode(value).decode()
    if field.type == field.TYPE_ENUM:
        names = {number: one.name for number, one in field.enum_type.values_by_number.items()}
        return lambda value: names.get(value) or str(value)
    return None


def _find_well_known_writer(descriptor: Any) -> Callable[[Any], Any] | None:
    """The writer of a message of Protobuf's own package, if it is one."""
    package, _, kind = descriptor.full_name.rpartition(".")
    if package != "google.protobuf":
        return None
    own: dict[str, Callable[[Any], Any]] = {
        "Timestamp": _format_timestamp,
        "Duration": lambda one: one.ToJsonString(),
        "Struct": _convert_struct,
        "ListValue": lambda one: [_convert_value(each) for each in one.values],
        "Value": _convert_value,
    }
    if kind in own or not kind.endswith("Value"):
        return own.get(kind)
    if "value" not in descriptor.fields_by_name:
        return lambda one: one.DESCRIPTOR.fields_by_name["value"]
    wrapped = _build_text_converter(descriptor.fields_by_name["value"])
    return (lambda one: one.value) if wrapped is None else lambda one: wrapped(one.value)


def _format_timestamp(one: Any) -> str:
    """ISO 8601 in UTC; what a time has beyond the microsecond is cut off."""
    try:
        moment = datetime(1970, 1, 1) + timedelta(seconds=one.seconds, microseconds=one.nanos // 1000)  # noqa: DTZ001 - in UTC
    except OverflowError:
        return f"{one.seconds} s and {one.nanos} ns since 1970"
    return f"{moment.isoformat()}Z"


def _convert_struct(one: Any) -> dict[str, Any]:
    return {key: _convert_value(value) for key, value in one.fields.items()}


def _convert_value(one: Any) -> Any:
    which = one.WhichOneof("kind")
    if which in {None, "null_value"}:
        return None
    value = getattr(one, which)
    if which == "struct_value":
        return _convert_struct(value)
    return [_convert_value(each) for each in value.values] if which == "list_value" else value
