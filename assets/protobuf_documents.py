"""Protobuf messages as JSON documents, by Python alone.

What belongs here: what a document has of a message. What does not: Spark (`assets.protobuf`). The module is sent to
executors as it is, so it imports nothing of ours.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

# A varint of 64 bits has ten bytes; no message is nested deeper than Protobuf's own limit.
_MOST_BITS = 63
_MOST_PLACES = 100
_SHORT_TEXT = 200


class Reader:
    """Reads messages.

    Args:
        message: the full name of the message; empty for the one that the framing names.
        files: by schema the `FileDescriptorSet` in bytes, and the name of the file whose messages the framing counts.
        framed: whether the places of the message in its file stand before it.
    """

    def __init__(self, message: str, files: Mapping[str, tuple[bytes, str]], *, framed: bool) -> None:
        self._message, self._files, self._framed = message, files, framed
        self._pools: dict[str, Any] = {}

    def read(self, schema: str | None, data: bytes | None) -> tuple[str | None, str | None]:
        """The document of a message and what is wrong with it: one of them, or none without a schema or a value."""
        from google.protobuf.message import DecodeError
        from google.protobuf.message_factory import GetMessageClass

        if schema is None or data is None:
            return None, None
        if schema not in self._files:
            return None, f"schema {schema} is no Protobuf that can be compiled"
        try:
            kind, rest = self._kind(schema, data)
            read = GetMessageClass(kind)()
            read.ParseFromString(rest)
            return json.dumps(_document(read), ensure_ascii=False), None
        except (DecodeError, ValueError, KeyError, RecursionError) as error:
            return None, f"no Protobuf of schema {schema}: {str(error)[:_SHORT_TEXT] or type(error).__name__}"

    def _kind(self, schema: str, data: bytes) -> tuple[Any, bytes]:
        """The descriptor of the message, and its bytes."""
        places, rest = _places(data) if self._framed else ([], data)
        if self._message:
            return self._pool(schema).FindMessageTypeByName(self._message), rest
        return self._pool(schema).FindMessageTypeByName(self._name(schema, places)), rest

    def _name(self, schema: str, places: list[int]) -> str:
        """The full name of the message at these places."""
        from google.protobuf.descriptor_pb2 import FileDescriptorSet

        data, main = self._files[schema]
        [file] = [one for one in FileDescriptorSet.FromString(data).file if one.name == main]
        names, among = [file.package] if file.package else [], file.message_type
        for place in places:
            if not 0 <= place < len(among):
                raise ValueError(f"there is no message {places}")
            names.append(among[place].name)
            among = among[place].nested_type
        return ".".join(names)

    def _pool(self, schema: str) -> Any:
        from google.protobuf.descriptor_pb2 import FileDescriptorSet
        from google.protobuf.descriptor_pool import DescriptorPool

        if schema not in self._pools:
            pool = DescriptorPool()
            for one in FileDescriptorSet.FromString(self._files[schema][0]).file:
                pool.Add(one)
            self._pools[schema] = pool
        return self._pools[schema]


def _places(data: bytes) -> tuple[list[int], bytes]:
    """Where in its file the message is, from outside in; and the message itself."""
    count, at = _varint(data, 0)
    if not 0 <= count <= _MOST_PLACES:
        raise ValueError(f"the framing names {count} places of the message")
    places = [] if count else [0]
    for _ in range(count):
        place, at = _varint(data, at)
        places.append(place)
    return places, data[at:]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A zig-zag number, and where it ends."""
    found = shift = 0
    while True:
        if at >= len(data) or shift > _MOST_BITS:
            raise ValueError(f"the places of the message end at byte {at}")
        byte = data[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return (found >> 1) ^ -(found & 1), at


def _document(message: Any) -> Any:
    known = _known(message.DESCRIPTOR.full_name)
    if known is not None:
        return known(message)
    return {
        field.name: _of_field(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if field.is_repeated or not field.has_presence or message.HasField(field.name)
    }


def _of_field(field: Any, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {_map_key(key): _plain(inner, value[key]) for key in value}
    return [_plain(field, each) for each in value] if field.is_repeated else _plain(field, value)


def _map_key(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _plain(field: Any, value: Any) -> Any:
    if field.type == field.TYPE_BYTES:
        return base64.b64encode(value).decode()
    if field.type == field.TYPE_ENUM:
        named = field.enum_type.values_by_number.get(value)
        return str(value) if named is None else named.name
    return _document(value) if field.type in {field.TYPE_MESSAGE, field.TYPE_GROUP} else value


def _known(name: str) -> Callable[[Any], Any] | None:
    """How a message of Protobuf's own package is written, if it is one."""
    package, _, kind = name.rpartition(".")
    if package != "google.protobuf":
        return None
    own: dict[str, Callable[[Any], Any]] = {
        "Timestamp": _timestamp,
        "Duration": lambda one: one.ToJsonString(),
        "Struct": _object,
        "ListValue": lambda one: [_untyped(each) for each in one.values],
        "Value": _untyped,
    }
    wrapper = (
        (lambda one: _plain(one.DESCRIPTOR.fields_by_name["value"], one.value)) if kind.endswith("Value") else None
    )
    return own.get(kind, wrapper)


def _timestamp(one: Any) -> str:
    """ISO 8601 in UTC; what a time has beyond the microsecond is cut off."""
    try:
        moment = datetime(1970, 1, 1) + timedelta(seconds=one.seconds, microseconds=one.nanos // 1000)  # noqa: DTZ001 - in UTC
    except OverflowError:
        return f"{one.seconds} s and {one.nanos} ns since 1970"
    return f"{moment.isoformat()}Z"


def _object(one: Any) -> dict[str, Any]:
    return {key: _untyped(value) for key, value in one.fields.items()}


def _untyped(one: Any) -> Any:
    which = one.WhichOneof("kind")
    if which in {None, "null_value"}:
        return None
    value = getattr(one, which)
    if which == "struct_value":
        return _object(value)
    return [_untyped(each) for each in value.values] if which == "list_value" else value
