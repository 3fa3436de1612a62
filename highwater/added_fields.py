"""Fields that schemas of a registry add to a stream, and how the types of such fields widen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from highwater.declaration import Field, Stream
from highwater.declaration_parts import RESERVED_COLUMNS, fold_case
from highwater.inference_names import build_legal_members, choose_free_name, without_unwritable
from highwater.sources import format_path

# The key in a column's metadata under which Delta's schema keeps the field.
METADATA = "highwater.field"
_OPTIONS = ("text", "unit", "zone", "nan", "rounded", "unscaled")
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_DEFAULTS = Field("", "")


def with_added(stream: Stream, columns: Mapping[str, str]) -> Stream:
    """The stream with the fields that were added to its table of events.

    Args:
        stream: as it is declared; a declared field wins over an added one of the same name.
        columns: the text of the metadata `METADATA` by column, of the columns that have it.
    """
    if stream.unknown_fields.policy != "add":
        return stream
    declared = {f.name.lower() for f in stream.fields}
    added = [from_text(text) for name, text in columns.items() if name.lower() not in declared]
    return replace(stream, fields=(*stream.fields, *added)) if added else stream


def evolve_stream(stream: Stream, declared: Stream, tree: Field) -> Stream:
    """The stream with a field for each member that schemas name, and added fields as wide as the schemas say.

    Declared fields stay as they are declared. Added ones are optional, nullable, and have no default.

    Args:
        stream: with the fields that were added before.
        declared: without them.
        tree: the field of type `struct` that holds the values of all schemas.
    """
    path = stream.unknown_fields.path
    members = {one.name: one for one in _select_members(tree, path)}
    fields = [f if f in declared.fields else _widen_field(f, members, path) for f in stream.fields]
    taken = stream.select_taken_members(path)
    names = {fold_case(name) for name in (*RESERVED_COLUMNS, *(f.name for f in stream.fields))}
    for name, member in members.items():
        if name in taken or (whole := _to_added_field(member)) is None:
            continue
        column = choose_free_name(name, names, reserved=False)
        source = None if (*path, name) == (column,) else format_path((*path, name))
        fields.append(replace(whole, name=column, source=source))
    return replace(stream, fields=tuple(fields)) if fields != list(stream.fields) else stream


def select_added_fields(declared: Stream, stream: Stream) -> list[Field]:
    """The fields of a stream that were added to those that are declared."""
    return [f for f in stream.fields if f not in declared.fields]


def _select_members(tree: Field, path: tuple[str, ...]) -> tuple[Field, ...]:
    for step in path:
        found = [one for one in tree.members if one.name == step and tree.type == "struct"]
        if not found:
            return ()
        [tree] = found
    return tree.members if tree.type == "struct" else ()


def _widen_field(field: Field, members: Mapping[str, Field], path: tuple[str, ...]) -> Field:
    [source] = field.sources
    if not isinstance(source, tuple) or source[:-1] != path or source[-1] not in members:
        return field
    return widen_field(field, members[source[-1]])


def _to_optional_field(field: Field) -> Field:
    """A field that may be absent or null, with all that is inside of it."""
    inner = tuple(_to_optional_field(one) for one in field.members)
    # Elements of arrays and values of maps are there or null.
    inside = inner if field.type == "struct" else tuple(replace(one, optional=False) for one in inner)
    of = inside if isinstance(field.of, tuple) else inside[0]
    return replace(field, optional=True, nullable=True, default=None, of=of)


def _to_added_field(member: Field) -> Field | None:
    """A member of a schema as a field with legal names; None where no source can name it."""
    found = without_unwritable(member)
    return None if found is None else _to_optional_field(replace(found, of=build_legal_members(found)))


def widen_field(field: Field, newer: Field) -> Field:
    """The field with a type that also holds the values of a newer schema, where one type widens to the other.

    `integer` widens to `long`, `float` to `double`, a decimal to one with more digits before and after the point, and
    a struct gets the members that it lacks. Any other type stays as it is: values that do not fit it are rejects.
    """
    if field.type == newer.type == "struct":
        newer_members = {_find_source_name(one): one for one in newer.members}
        names = {fold_case(one.name) for one in field.members}
        mine = [widen_field(one, newer_members.get(_find_source_name(one), one)) for one in field.members]
        there = {_find_source_name(one) for one in field.members}
        for name, one in newer_members.items():
            if name not in there and (whole := _to_added_field(one)) is not None:
                column = choose_free_name(one.name, names, reserved=False)
                source = None if column == name else format_path((name,))
                mine.append(replace(whole, name=column, source=source))
        return replace(field, of=tuple(mine))
    if field.type == newer.type and field.type in {"array", "map"}:
        return replace(field, of=widen_field(field.members[0], newer.members[0]))
    return replace(field, type=newer.type) if can_widen(field.type, newer.type) else field


def _find_source_name(member: Field) -> str:
    [source] = member.sources
    return source[-1] if isinstance(source, tuple) else member.name


def can_widen(narrow: str, wide: str) -> bool:
    """Whether every value of one type of a field is the same value of another, wider one."""
    narrow_digits, other = _DECIMAL.fullmatch(narrow), _DECIMAL.fullmatch(wide)
    if narrow_digits and other:
        before, after = (int(one[1]) - int(one[2]) for one in (narrow_digits, other))
        return before <= after and int(narrow_digits[2]) <= int(other[2]) and narrow != wide
    return (narrow, wide) in {("integer", "long"), ("float", "double")}


def to_text(field: Field) -> str:
    """An added field as JSON, for the metadata of its column."""
    return json.dumps(_to_plain(field), ensure_ascii=False, sort_keys=True)


def from_text(text: str) -> Field:
    """The field that `to_text` wrote.

    Raises:
        ValueError: it is none.
    """
    return _from_plain(json.loads(text))


def _to_plain(field: Field) -> dict[str, Any]:
    options = {name: getattr(field, name) for name in (*_OPTIONS, "optional", "nullable")}
    found = {name: value for name, value in options.items() if value != getattr(_DEFAULTS, name)}
    if field.source is not None:
        found["source"] = field.source
    if field.members:
        inner = [_to_plain(one) for one in field.members]
        found["of"] = inner if isinstance(field.of, tuple) else inner[0]
    return {"name": field.name, "type": field.type, **found}


def _from_plain(plain: Mapping[str, Any]) -> Field:
    of = plain.get("of", ())
    inner = tuple(_from_plain(one) for one in of) if isinstance(of, list) else _from_plain(of) if of else ()
    return Field(**{**plain, "of": inner})
