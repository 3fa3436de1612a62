"""The part of a decoded value that a declared field is read from: its paths, its text and its type."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from highwater.assets.documents import EXACT
from highwater.field_rules import CONTAINERS
from highwater.formats import Csv, Lines
from highwater.sources import Header, Key, Meta, Reference, Rest, split_path

if TYPE_CHECKING:
    from pyspark.sql import Column

    from highwater.declaration import Field, Stream

_INFINITE = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True)
class FieldPart:
    """The value of a field in a record.

    Args:
        json: a variant; null where it has nothing.
        kind: the type of the variant.
        number: the plain and exact digits of a number.
        declared: the field.
        textual: whether the format has texts alone, so that numbers and booleans are written as such.
        mark: the mark of numbers in the document that has the value; null where none is marked.
        written: the value as text where that is known to be its type.
    """

    json: Column
    kind: Column
    number: Column
    declared: Field
    textual: bool
    mark: Column
    written: Column | None = None

    @cached_property
    def text(self) -> Column:
        """The value as text."""
        from pyspark.sql import functions as F

        return F.try_variant_get(self.json, "$", "string") if self.written is None else self.written

    @cached_property
    def is_inexact(self) -> Column:
        """Whether the value is a number that the variant parser would have rounded."""
        from pyspark.sql import functions as F

        if self.written is not None:
            return F.lit(False)
        return self.mark.isNotNull() & (self.kind == "STRING") & F.startswith(self.text, self.mark)

    @cached_property
    def behind_mark(self) -> Column:
        """The text of a number that the variant parser would have rounded."""
        from pyspark.sql import functions as F

        return self.text.substr(F.lit(len(EXACT) + 1), F.length(self.text))

    @cached_property
    def is_infinite(self) -> Column:
        """Whether the value is NaN or an infinity in a document."""
        return self.is_inexact & self.behind_mark.isin(list(_INFINITE))

    def get_as(self, kind: str) -> Column:
        """The value as a type of SQL; null where it is another."""
        from pyspark.sql import functions as F

        return F.try_variant_get(self.json, "$", kind)


def select_outermost_names(stream: Stream) -> list[str]:
    """The names in the value's outermost object that fields are taken from."""
    return list(dict.fromkeys(path[0] for path in _select_all_paths(stream)))


def select_whole_fields(stream: Stream) -> list[str]:
    """The fields of `select_outermost_names` whose objects and arrays are read too."""
    any_ = [f for f in stream.fields if f.type == "json" or f.type in CONTAINERS]
    deep = [path[0] for path in _select_all_paths(stream) if len(path) > 1]
    return list(dict.fromkeys([*deep, *(path[0] for f in any_ for path in _select_paths(f))]))


def can_hold_infinity(stream: Stream) -> bool:
    """Whether a field takes NaN or an infinity."""
    return any(map(_can_hold_infinity, stream.fields))


def _can_hold_infinity(declared: Field) -> bool:
    return declared.nan != "reject" or any(map(_can_hold_infinity, declared.members))


def _select_all_paths(stream: Stream) -> list[tuple[str, ...]]:
    return [path for declared in stream.fields if not declared.expression for path in _select_paths(declared)]


def _select_paths(declared: Field) -> list[tuple[str, ...]]:
    return [one for one in declared.sources if isinstance(one, tuple)]


def build_part(stream: Stream, declared: Field) -> FieldPart:
    """The part of a declared field of a stream, by its columns."""
    from pyspark.sql import functions as F

    name, textual = declared.name, isinstance(stream.value, Csv | Lines)
    columns = F.col(f"json_{name}"), F.col(f"kind_{name}"), F.col(f"number_{name}")
    return FieldPart(*columns, declared, textual, _build_mark(stream, declared))


def _build_mark(stream: Stream, declared: Field) -> Column:
    """The mark of numbers where a field's value is part of the document: a header or a key may begin as it does."""
    from pyspark.sql import functions as F

    is_part = [isinstance(one, tuple | Rest) for one in declared.sources]
    if all(is_part):
        return F.col("mark")
    found = [
        F.when(from_source(stream, one).isNotNull(), F.lit(part))
        for one, part in zip(declared.sources, is_part, strict=True)
    ]
    return F.when(F.coalesce(*found), F.col("mark")) if any(is_part) else F.lit(None).cast("string")


def _select_unknown_members(stream: Stream, path: tuple[str, ...]) -> Column:
    """The members that no field is taken from, by name, of the object at a path; null where there is none."""
    from pyspark.sql import functions as F

    members = F.try_variant_get("json", build_variant_path(path), "map<string,variant>")
    taken = sorted(stream.select_taken_members(path))
    return F.map_filter(members, lambda name, _: ~name.isin(taken)) if taken else members


def _build_rest(stream: Stream, path: tuple[str, ...]) -> Column:
    """The members of the object at a path that no field is taken from, as a variant; null where there are none."""
    from pyspark.sql import functions as F

    unknown = _select_unknown_members(stream, path)
    return F.when(F.size(unknown) > 0, F.to_variant_object(unknown))


# Members that a problem names at most.
_MAX_NAMED = 5


def describe_unknown_members(stream: Stream) -> Column:
    """The members of a record without a field, for a person; null where every member has one, or none is looked for."""
    from pyspark.sql import functions as F

    if stream.unknown_fields.policy != "reject":
        return F.lit(None).cast("string")
    path = stream.unknown_fields.path
    names = F.array_sort(F.map_keys(_select_unknown_members(stream, path)))
    prefix = "".join(f"{step}." for step in path)
    listed = F.concat_ws(", ", F.transform(F.slice(names, 1, _MAX_NAMED), lambda one: F.concat(F.lit(prefix), one)))
    more = F.size(names) - _MAX_NAMED
    rest = F.when(more > 0, F.concat(F.lit(" and "), more.cast("string"), F.lit(" more"))).otherwise("")
    return F.when(F.size(names) > 0, F.concat(F.lit("no field is declared for "), listed, rest))


def from_source(stream: Stream, source: Key | Header | Meta | Rest | Reference | tuple[str, ...]) -> Column:
    """The value of a source, as a variant; null where it has none."""
    from pyspark.sql import functions as F

    if isinstance(source, Rest):
        return _build_rest(stream, source.path)
    if isinstance(source, tuple):
        return F.try_variant_get("json", build_variant_path(source), "variant")
    if isinstance(source, Meta):
        # The origin's columns, since a copy on a tier has another place.
        column = F.col("origin_timestamp_ms" if source.name == "timestamp" else f"origin_{source.name}")
        return column.cast("string" if source.name == "topic" else "bigint").cast("variant")
    if isinstance(source, Header):
        values = F.transform(F.filter("headers", lambda h: h["key"] == source.name), lambda h: h["value"])
        return to_text(F.try_element_at(values, F.lit(-1))).cast("variant")
    assert isinstance(source, Key), "fields of the lookup's table are no part of a record"
    key = F.col("key_json")
    return F.try_variant_get(key, build_variant_path(split_path(source.path)), "variant") if source.path else key


def to_text(value: Column) -> Column:
    """A variant as text; null where its text is no valid UTF-8."""
    from pyspark.sql import functions as F

    return F.when(F.is_valid_utf8(value.cast("string")), value.cast("string"))


def build_variant_path(names: tuple[str, ...], root: str = "$") -> str:
    """The path in Spark's syntax to the values below these names."""
    return root + "".join(f'["{step}"]' for step in names)


def needs_digits(declared: Field) -> bool:
    """Whether a field is read from the digits of a number: a number, or a time that counts units."""
    return declared.is_number or declared.unit is not None


# Types of a decoded value that a JSON document does not have.
_TYPED = {
    "timestamp": "TIMESTAMP",
    "timestamp_ntz": "TIMESTAMP_NTZ",
    "date": "DATE",
    "binary": "BINARY",
    "array": "ARRAY",
    "map": "OBJECT",
    "struct": "OBJECT",
}


def matches_type(part: FieldPart) -> Column:
    """Whether the type of the value is one that the field may have."""
    from pyspark.sql import functions as F

    kind, declared = part.kind, part.declared
    if declared.type == "json":
        return F.lit(True)
    if declared.type in CONTAINERS:
        return kind.startswith(_TYPED[declared.type])
    text = (kind == "STRING") & ~part.is_inexact
    if declared.type == "boolean":
        return (kind == "BOOLEAN") | text if part.textual else kind == "BOOLEAN"
    typed = kind == _TYPED[declared.type] if declared.type in _TYPED else F.lit(False)
    if not needs_digits(declared) or declared.unscaled:
        return typed | text
    number = (kind == "BIGINT") | kind.startswith("DECIMAL") | kind.isin(["DOUBLE", "FLOAT"]) | typed
    texts = declared.text or part.textual
    return number | (kind == "STRING" if texts else part.is_inexact & ~part.is_infinite)
