"""Types of fields as a Protobuf schema says them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from highwater.declaration import Field
from highwater.protobuf import compile_schema
from highwater.schemas import Schema


def build_protobuf_tree(schema: Schema, message: Sequence[int] = (0,)) -> Field:
    """The field of a Protobuf message.

    Args:
        schema: the schema.
        message: the index of the message in its file, then of the message nested in it, and so on.

    Raises:
        ValueError: the schema does not compile, or has no such message.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool

    data, main = compile_schema(schema)
    files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.Add(file)
    main_file = next(file for file in files if file.name == main)
    among, names = main_file.message_type, [main_file.package] if main_file.package else []
    for place in message:
        if not 0 <= place < len(among):
            raise ValueError(f"the schema has no message {list(message)}")
        names.append(among[place].name)
        among = among[place].nested_type
    found = pool.FindMessageTypeByName(".".join(names))
    return _build_message_field("", found, ())


_INTEGERS = frozenset({"int32", "sint32", "sfixed32"})
_WHOLE = frozenset({"uint32", "fixed32", "int64", "sint64", "sfixed64"})
# 2**64 - 1 has 20 digits.
_UNSIGNED = frozenset({"uint64", "fixed64"})
_KNOWN = {"Timestamp": "timestamp", "Duration": "string", "Struct": "json", "ListValue": "json", "Value": "json"}
_WRAPPERS = "google.protobuf."


def _build_message_field(name: str, descriptor: Any, around: tuple[str, ...]) -> Field:
    full = descriptor.full_name
    if full.startswith(_WRAPPERS):
        short = full.removeprefix(_WRAPPERS)
        if short in _KNOWN:
            return Field(name, _KNOWN[short], nullable=_KNOWN[short] == "json")
        if short.endswith("Value"):
            return _build_single_field(name, descriptor.fields_by_name["value"], around)
    if full in around or not descriptor.fields:
        return Field(name, "json")
    inside = (*around, full)
    return Field(name, "struct", of=tuple(_build_protobuf_field(one, inside) for one in descriptor.fields))


def _build_protobuf_field(field: Any, around: tuple[str, ...]) -> Field:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return Field(
            field.name, "map", of=_build_single_field("value", field.message_type.fields_by_name["value"], around)
        )
    if field.is_repeated:
        return Field(field.name, "array", of=_build_single_field("element", field, around))
    return replace(_build_single_field(field.name, field, around), optional=bool(field.has_presence))


def _build_single_field(name: str, field: Any, around: tuple[str, ...]) -> Field:
    if field.message_type is not None:
        return _build_message_field(name, field.message_type, around)
    kind = _find_type_name(field)
    if kind in _INTEGERS:
        return Field(name, "integer")
    if kind in _WHOLE:
        return Field(name, "long")
    if kind in _UNSIGNED:
        return Field(name, "decimal(20,0)")
    types = {"float": "float", "double": "double", "bool": "boolean", "bytes": "binary"}
    return Field(name, types.get(kind, "string"), nan="null" if kind in {"float", "double"} else "reject")


def _find_type_name(field: Any) -> str:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto

    return str(FieldDescriptorProto.Type.Name(field.type)).removeprefix("TYPE_").lower()
