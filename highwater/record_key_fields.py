"""The fields of a stream's key in a decoded record key, and the declarations that cannot be compared with one."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from highwater.formats import Avro, BigEndian, Csv, Json, KeyFormat, Lines, Protobuf, Raw, Text
from highwater.sources import Key, format_path, split_path

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.declaration_parts import Field

# Kafka Connect's JsonConverter writes a key below this name, beside its schema.
_PAYLOAD = "payload"


def build_record_key_field(declared: Field, key_format: KeyFormat, *, alone: bool) -> Field:
    """A field of the key with the record's key as its source.

    A field that is taken from the record's key stays so. Any other is the member with the name that its path ends
    with, or with its own; of a key that is no object it is the whole key.

    Args:
        declared: the field.
        key_format: the format of record keys.
        alone: whether it is the only field of the key.
    """
    given = declared.sources if declared.is_read else ()
    taken = tuple(one for one in given if isinstance(one, Key))
    found = taken or (*_list_members_for(declared, key_format, alone=alone), *([Key()] if alone else ()))
    return replace(declared, source=found, expression=None, mask=None)


def _list_members_for(declared: Field, key_format: KeyFormat, *, alone: bool) -> list[Key]:
    """The members of a record key that may hold a field, the likeliest first."""
    if isinstance(key_format, BigEndian | Raw | Text):
        return []
    given = [one for one in declared.sources if isinstance(one, tuple)] if declared.is_read else []
    names = dict.fromkeys([*(path[-1] for path in given), declared.name])
    paths: list[tuple[str, ...]] = [(name,) for name in names]
    if isinstance(key_format, Json):
        paths += [*((_PAYLOAD, name) for name in names), *([(_PAYLOAD,)] if alone else [])]
    return [Key(format_path(path)) for path in paths]


def find_key_comparison_problems(stream: Stream) -> list[str]:
    """The reasons why the record's key cannot be compared with the key, in sentences."""
    problem = _find_comparison_problem(stream) if stream.compares_decoded_keys else None
    compared = f"record_key={stream.record_key!r} compares the record's key with the fields {', '.join(stream.key)}"
    return [f"{compared}, and {problem} record_key='ignore'"] if problem else []


def _find_comparison_problem(stream: Stream) -> str | None:
    """The first fault, up to the words that name the last remedy."""
    declared = stream.key_format
    if isinstance(declared, Raw):
        return "key_format=Raw() does not decode it: declare the format of the keys, or"
    members = _list_members(declared)
    if members is None:
        return None
    if members:
        return _find_member_problem(stream, members)
    if len(stream.key) > 1:
        return f"a key of the format {type(declared).__name__} is one value: declare"
    return _find_type_problem(stream, declared)


def _find_member_problem(stream: Stream, members: frozenset[str]) -> str | None:
    """The first field of the key that keys with these members lack."""
    for declared in stream.record_key_fields:
        paths = [one.path for one in declared.sources if isinstance(one, Key) and one.path]
        if not any(split_path(path)[0] in members for path in paths):
            lacks = f"the keys have no member {declared.name!r}; they have {', '.join(sorted(members))}"
            return f"{lacks}: name the field after its member, or declare"
    return None


def _find_type_problem(stream: Stream, key_format: KeyFormat) -> str | None:
    """The fault of a field that no key of the format equals, as far as the declaration shows it."""
    declared, kind = stream.find_field(stream.key[0]), _parse_kind(key_format)
    takes_numbers = declared.is_number or declared.unit is not None
    if (isinstance(key_format, BigEndian) or kind in {"int", "long"}) and not takes_numbers:
        return f"the key is a whole number, and {declared.name!r} is a {declared.type}: declare it as a long, or"
    takes_texts = declared.text or isinstance(stream.value, Csv | Lines)
    if kind == "string" and takes_numbers and not takes_texts:
        return f"the key is a text, and {declared.name!r} is a number: declare text=True for it, or"
    return None


def _parse_kind(key_format: KeyFormat) -> str | None:
    """The type of a bare Avro key that is one value; None of other keys."""
    if not isinstance(key_format, Avro) or key_format.schema is None:
        return None
    schema = json.loads(key_format.schema)
    plain = isinstance(schema, dict) and "logicalType" not in schema
    kind = schema["type"] if plain else schema
    return kind if isinstance(kind, str) else None


def _list_members(key_format: KeyFormat) -> frozenset[str] | None:
    """The members of keys; none where a key is one value, None where the declaration does not show them."""
    if isinstance(key_format, BigEndian):
        return frozenset()
    if isinstance(key_format, Avro) and key_format.schema is not None:
        schema = json.loads(key_format.schema)
        is_record = isinstance(schema, dict) and schema.get("type") == "record"
        return frozenset(one["name"] for one in schema["fields"]) if is_record else _list_union_members(schema)
    is_wrapper = isinstance(key_format, Protobuf) and key_format.message.startswith("google.protobuf.")
    if isinstance(key_format, Protobuf) and key_format.descriptors is not None and not is_wrapper:
        return _list_message_fields(key_format.message, base64.b64decode(key_format.descriptors))
    return None


def _list_union_members(schema: object) -> frozenset[str] | None:
    """None of a union, which may hold records, or of a map; else there are none."""
    is_map = isinstance(schema, dict) and schema.get("type") == "map"
    return None if isinstance(schema, list) or is_map else frozenset()


def _list_message_fields(message: str, descriptors: bytes) -> frozenset[str]:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    return frozenset(one.name for one in pool.FindMessageTypeByName(message).fields)
