"""Schemas of a schema registry, and the framing by which a record names its schema."""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["AVRO", "PROTOBUF", "JSON"]
KINDS: tuple[Kind, ...] = get_args(Kind)

VALUE_HEADER = "__value_schema_id"
KEY_HEADER = "__key_schema_id"

# The first byte of the framing, and the bytes of the ID or GUID after it.
ID_MAGIC, ID_BYTES = 0, 4
GUID_MAGIC, GUID_BYTES = 1, 16
# A varint of 32 bits has 7 of them in each byte: 32 / 7, rounded up.
VARINT_BYTES = 5


class FramingError(ValueError):
    """A record's framing is broken.

    Args:
        problem: the fault.
        position: the byte that is wrong or missing, counted from 0.
        place: the bytes in which the position counts: the value, or a header.
    """

    def __init__(self, problem: str, position: int, place: str = "the value") -> None:
        super().__init__(f"{problem} at byte {position} of {place}")
        self.position = position


@dataclass(frozen=True)
class SchemaReference:
    """A schema that another schema needs.

    Args:
        name: the full name of the type for Avro, the path of the import for Protobuf.
        subject: the subject that has the schema.
        version: its version in that subject.
        text: the schema.
    """

    name: str
    subject: str
    version: int
    text: str


@dataclass(frozen=True)
class Schema:
    """A schema as the registry has it.

    Args:
        id: the ID in the registry; None for a schema that was read by its GUID.
        kind: the format as the registry names it: one of `KINDS`, or another that no record can be read by.
        text: JSON for Avro and JSON Schema, the content of a .proto file for Protobuf.
        references: all schemas that the text needs, directly or not, each after those that it needs itself. Empty for
            JSON Schema and for other formats, whose references are not read.
    """

    id: int | None
    kind: str
    text: str
    references: tuple[SchemaReference, ...] = ()


@dataclass(frozen=True)
class FramedValue:
    """A value without its framing, and the schema that the framing names.

    Args:
        schema_id: the schema's ID; None if the framing has a GUID.
        guid: the schema's GUID in its usual text form; None if the framing has an ID.
        payload: the value after the framing, or the whole value if the framing is a header.
        header_rest: the bytes after the ID or GUID in the header; None if the framing is in the value.
    """

    schema_id: int | None
    guid: str | None
    payload: bytes
    header_rest: bytes | None = None


def describe_other_kind(schema: Schema, wanted: Kind) -> str:
    """The fault of a record whose schema is of another format than the declared one."""
    return f"its type is {schema.kind}, and not {wanted}"


def parse_framing(
    value: bytes | None, headers: Sequence[tuple[str, bytes | None]], *, header: str = VALUE_HEADER
) -> FramedValue | None:
    """Read which schema a record names: by the header if it has one, else by the first bytes of the value.

    Args:
        value: the record's value, or its key with `KEY_HEADER`.
        headers: the record's headers; the last one of a name counts, as it does for Confluent's clients.
        header: the name of the header.

    Returns:
        The schema and the payload; None without a value.

    Raises:
        FramingError: the framing is missing or cut short.
    """
    if value is None:
        return None
    found = [content for name, content in headers if name == header]
    if not found:
        schema_id, _, rest = _split_framing(value, (ID_MAGIC,), "the value")
        return FramedValue(schema_id, None, rest)
    schema_id, guid, rest = _split_framing(found[-1] or b"", (ID_MAGIC, GUID_MAGIC), f"header {header}")
    return FramedValue(schema_id, guid, value, rest)


def _split_framing(data: bytes, allowed: tuple[int, ...], place: str) -> tuple[int | None, str | None, bytes]:
    """The ID or the GUID at the beginning of the data, and the bytes after it."""
    if not data or data[0] not in allowed:
        raise FramingError(f"no magic byte {' or '.join(map(str, allowed))}", 0, place)
    end = 1 + (ID_BYTES if data[0] == ID_MAGIC else GUID_BYTES)
    if len(data) < end:
        raise FramingError(f"the framing of {end} bytes is cut short", len(data), place)
    if data[0] == ID_MAGIC:
        return struct.unpack(">I", data[1:end])[0], None, data[end:]
    return None, str(uuid.UUID(bytes=data[1:end])), data[end:]


def parse_protobuf_message(framed: FramedValue) -> tuple[tuple[int, ...], bytes]:
    """The message indexes of a framed Protobuf value, and the message.

    The indexes follow the ID: in front of the message, or in the header.

    Raises:
        FramingError: the indexes are no such list, or are cut short.
    """
    if framed.header_rest is None:
        return parse_message_indexes(framed.payload)
    indexes, _ = parse_message_indexes(framed.header_rest)
    return indexes, framed.payload


def parse_message_indexes(payload: bytes) -> tuple[tuple[int, ...], bytes]:
    """Read which message of a Protobuf schema a payload is.

    The list is a count and that many zig-zag varints: the index of the message in its file, then of the message nested
    in it, and so on. A count of 0 means the first message of the file.

    Returns:
        The indexes, and the bytes after them.

    Raises:
        FramingError: the list is cut short, or a number in it is negative or too long.
    """
    count, at = _read_varint(payload, 0)
    if count > len(payload) - at:  # each index takes a byte or more
        raise FramingError(f"{count} message indexes are cut short", len(payload), "the message indexes")
    indexes = []
    for _ in range(count):
        index, at = _read_varint(payload, at)
        indexes.append(index)
    return tuple(indexes) or (0,), payload[at:]


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """A zig-zag varint that is not negative, and the position after it."""
    number = 0
    for shift, byte in enumerate(data[start : start + VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * shift)
        if not byte & 0x80:
            if number & 1:  # zig-zag: odd numbers are negative
                raise FramingError("a negative number", start, "the message indexes")
            return number >> 1, start + shift + 1
    if len(data) - start >= VARINT_BYTES:
        raise FramingError(f"a number of more than {VARINT_BYTES} bytes", start, "the message indexes")
    raise FramingError("a number is cut short", len(data), "the message indexes")


def build_self_contained_avro(schema: Schema) -> str:
    """An Avro schema as one JSON document: each type of a reference is defined where it is used first.

    Raises:
        ValueError: a text is not JSON.
    """
    if not schema.references:
        return schema.text
    inlining = _Inlining()
    for reference in schema.references:
        inlining.collect(json.loads(reference.text), "")
    return json.dumps(inlining.inline_types(json.loads(schema.text), ""))


# Kafka Connect writes 64 digits where it knows only the scale; a column has 38.
MAX_DECIMAL_DIGITS = 38


def with_storable_decimals(schema: Any) -> Any:
    """An Avro schema whose decimals have at most 38 digits; those with more after the point are bytes."""
    if isinstance(schema, list):
        return [with_storable_decimals(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: with_storable_decimals(one) if key in _HAVE_TYPES else one for key, one in schema.items()}
    precision, scale = found.get("precision"), found.get("scale", 0)
    if found.get("logicalType") != "decimal" or not isinstance(precision, int) or precision <= MAX_DECIMAL_DIGITS:
        return found
    if isinstance(scale, int) and scale <= MAX_DECIMAL_DIGITS:
        return {**found, "precision": MAX_DECIMAL_DIGITS}
    return {key: one for key, one in found.items() if key != "logicalType"}


# The keys of a schema, or of a field, below which there are further types.
_HAVE_TYPES = frozenset({"type", "items", "values", "fields"})
_NAMED_TYPES = frozenset({"record", "error", "enum", "fixed"})
_PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})


class _Inlining:
    """The named types of references, and which of them the document defines already."""

    def __init__(self) -> None:
        self._types: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._defined: set[str] = set()

    def collect(self, node: Any, namespace: str) -> None:
        """Remember each named type below a node, with the namespace around it."""
        if isinstance(node, list):
            for branch in node:
                self.collect(branch, namespace)
        elif isinstance(node, dict):
            if node.get("type") in _NAMED_TYPES:
                name = _build_full_name(node, namespace)
                self._types.setdefault(name, (node, namespace))
                namespace = name.rpartition(".")[0]
            for part in _select_nested_types(node):
                self.collect(part, namespace)

    def inline_types(self, node: Any, namespace: str) -> Any:
        """A node with the definition of each type that is used for the first time."""
        if isinstance(node, list):
            return [self.inline_types(branch, namespace) for branch in node]
        if isinstance(node, str):
            return self._resolve_name(node, namespace)
        if node["type"] in _NAMED_TYPES:
            return self._build_definition(node, namespace)
        if node["type"] in {"array", "map"}:
            inner = "items" if node["type"] == "array" else "values"
            return {**node, inner: self.inline_types(node[inner], namespace)}
        if isinstance(node["type"], str) and node["type"] not in _PRIMITIVES:
            return self._resolve_name(node["type"], namespace)  # {"type": "shop.Money"}, which not every parser takes
        return {**node, "type": self.inline_types(node["type"], namespace)}

    def _resolve_name(self, name: str, namespace: str) -> Any:
        for full in (_qualify_name(name, namespace), name):
            if full in self._defined:
                return name
            if full in self._types:
                return self._build_definition(*self._types[full])
        return name  # a primitive type, or a type that the document itself defines

    def _build_definition(self, node: Mapping[str, Any], namespace: str) -> Any:
        name = _build_full_name(node, namespace)
        if name in self._defined:
            return name
        self._defined.add(name)
        space, _, short = name.rpartition(".")
        definition = {**node, "name": short, "namespace": space}
        if "fields" in node:
            definition["fields"] = [
                {**field, "type": self.inline_types(field["type"], space)} for field in node["fields"]
            ]
        return definition


def _select_nested_types(node: Mapping[str, Any]) -> list[Any]:
    """The parts of a node that may hold further types."""
    nested = [node[name] for name in ("items", "values") if name in node]
    inner = [node["type"]] if isinstance(node.get("type"), dict | list) else []
    return [*nested, *inner, *(field["type"] for field in node.get("fields", ()))]


def _build_full_name(node: Mapping[str, Any], namespace: str) -> str:
    return _qualify_name(node["name"], node.get("namespace", namespace))


def _qualify_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"
