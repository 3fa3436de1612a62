"""Columns of Avro and Protobuf: the types of their schemas, and how their libraries take values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from highwater.declaration import Field
from tests.helpers import encoded_columns as e
from tests.helpers import value_domains as v
from tests.helpers.encoded_columns import Column, write_members
from tests.helpers.value_domains import Domain

_BY_NAME = {one.field.name: one for one in (*e.PLAIN, *e.ODD)}


def _write_same(value: Any) -> Any:
    return value


def give(name: str, kind: Any, as_name: str = "", **declared: Any) -> Column:
    """A column whose values the library takes as they are."""
    return replace(write(name, kind, as_name, **declared), write=_write_same)


def write(name: str, kind: Any, as_name: str = "", **declared: Any) -> Column:
    """A column whose values are written as in JSON."""
    column = _BY_NAME[name]
    return replace(column, kind=kind, field=replace(column.field, name=as_name or name, **declared))


def write_each(names: Iterable[str], kind: Any) -> list[Column]:
    return [write(name, kind) for name in names]


def choose(*values: Any) -> Domain:
    return Domain(values, lambda chance: chance.choice(values))


def _logical(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "logicalType": name}


def _decimal(precision: int, scale: int, **more: Any) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale, **more}


def _record(name: str, **members: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": one, "type": kind} for one, kind in members.items()]}


def _array(kind: Any) -> dict[str, Any]:
    return {"type": "array", "items": kind}


_ISO = ("date", "time", "moment", "berlin", "local")
_COUNTED = ("whole_seconds", "millis", "micros", "local_millis", "local_micros")
_UUIDS = choose("00000000-0000-0000-0000-000000000000", "123e4567-e89b-42d3-a456-426614174000")
AVRO_PLAIN = [
    give("string", "string"),
    give("flag", "boolean"),
    give("integer", "int"),
    *(give(name, name) for name in ("long", "float", "double")),
    Column(Field("enum", "string"), choose("A", "B2"), kind={"type": "enum", "name": "Kind", "symbols": ["A", "B2"]}),
    Column(Field("uuid", "string"), _UUIDS, kind=_logical("string", "uuid")),
    give("integer", "int", "widened", type="long"),
    replace(give("integer", "int", "as_double", type="double"), stored=float),
    replace(give("long", "long", "as_decimal", type="decimal(19,0)"), stored=Decimal),
    give("money", _decimal(12, 2)),
    give("fine", _decimal(38, 10, type="fixed", name="Fine", size=16)),
    give("unit", _decimal(38, 38)),
    give("date", _logical("int", "date"), "typed_date"),
    write("days", "int"),
    *write_each(_ISO, "string"),
    *write_each(_COUNTED, "long"),
    give("nanos", _logical("long", "timestamp-nanos")),
    give("millis", _logical("long", "timestamp-millis"), "typed_millis", unit=None),
    give("micros", _logical("long", "timestamp-micros"), "typed_micros", unit=None),
    give("local_millis", _logical("long", "local-timestamp-millis"), "local_typed_millis", unit=None),
    give("local_micros", _logical("long", "local-timestamp-micros"), "local_typed_micros", unit=None),
    give("binary", "bytes", "bytes"),
    Column(Field("fixed", "binary"), choose(b"\0\0", b"\xff\x80"), kind={"type": "fixed", "name": "Two", "size": 2}),
    write("binary", "string"),
]
_LINE = _record("Line", sku="string", qty=["null", "int"], price=_decimal(12, 2))
_PLACE = _record("Place", town=["null", "string"], moment=_logical("long", "timestamp-micros"))
_UNION: list[Any] = [
    "boolean",
    "long",
    "double",
    "string",
    _array(["null", "string", "double"]),
    {"type": "map", "values": "float"},
]
_OF_UNION = choose(True, 7, -(2**63), 0.1, 1e22, "\0\U0001f600", [], [None, "", 0.1], {}, {"": 0.5, "\U0001f600": -2.0})
_ANY_SINGLE = choose(*v.SINGLE.edges, float("nan"), float("inf"), float("-inf"))
AVRO_ODD = [
    give("lines", _array(_LINE)),
    give("sizes", _array(["null", "double"])),
    give("counts", {"type": "map", "values": _array(["null", "long"])}),
    give("place", _PLACE),
    give("clock_millis", _logical("int", "time-millis")),
    give("clock_micros", _logical("long", "time-micros")),
    give("any_double", "double"),
    replace(give("any_double", "float", "any_float", type="float"), domain=_ANY_SINGLE),
    Column(Field("json", "json"), _OF_UNION, kind=_UNION),
    Column(Field("inside", "string", source="outer.inner.inside"), v.TEXT),
]


def build_avro_schema(name: str, columns: Iterable[Column]) -> dict[str, Any]:
    """A record of columns; one that may be null is a union."""
    kinds = {one.field.name: ["null", one.kind] if one.field.nullable else one.kind for one in columns if one.kind}
    return _record(name, **kinds, outer=_record("Outer", inner=_record("Inner", inside="string")))


def _write_moment(moment: datetime) -> dict[str, int]:
    seconds, micros = divmod(v.micros_of(moment), 10**6)
    return {"seconds": seconds, "nanos": micros * 1000}


_DURATIONS = {
    "0s": timedelta(),
    "3.500s": timedelta(seconds=3.5),
    "-0.000001s": timedelta(microseconds=-1),
    "86400s": timedelta(days=1),
}
_QUARTERS = Domain((0.0, 0.25, -0.75, 2.0**52), lambda chance: chance.randrange(-(2**40), 2**40) / 4)
_TYPES_OF = {
    "integer": ("int32", "sint32", "sfixed32"),
    "long": ("int64", "sint64", "sfixed64"),
}
PROTOBUF_PLAIN = [
    give("string", "string"),
    give("flag", "bool"),
    *(give(name, kind, f"{name}_{kind}") for name, kinds in _TYPES_OF.items() for kind in kinds),
    *(Column(Field(kind, "long"), v.UNSIGNED_INTEGER, kind=kind) for kind in ("uint32", "fixed32")),
    *(
        Column(Field(kind, "decimal(20,0)"), v.UNSIGNED_LONG, stored=Decimal, kind=kind)
        for kind in ("uint64", "fixed64")
    ),
    give("float", "float"),
    give("double", "double"),
    replace(give("integer", "int32", "as_double", type="double"), stored=float),
    Column(Field("exact", "decimal(18,2)"), _QUARTERS, kind="double", stored=lambda number: Decimal(f"{number:.2f}")),
    write("digits", "string"),
    give("binary", "bytes", "bytes"),
    write("binary", "string"),
    Column(Field("enum", "string"), choose("A", "B2"), kind="Kind"),
    Column(Field("duration", "string"), choose(*_DURATIONS), _DURATIONS.__getitem__, kind="google.protobuf.Duration"),
    replace(write("micros", "google.protobuf.Timestamp", "typed", unit=None), write=_write_moment),
    *write_each(_ISO, "string"),
    *write_each(_COUNTED, "int64"),
    write("nanos", "int64"),
    write("days", "int32"),
    Column(Field("more", "json"), choose({}, {"": None, "a": [1.0, "\0", {"b": True}]}), kind="google.protobuf.Struct"),
]
PROTOBUF_ODD = [
    Column(
        Field("lines", "array", of=Field("line", "struct", of=e.OPTIONAL_LINE)),
        v.build_lists(e.LINES),
        write_members(price=str),
        kind="repeated Line",
    ),
    Column(Field("longs", "array", of=Field("one", "long")), v.build_lists(v.LONG), kind="repeated sint64"),
    Column(Field("tags", "map", of=Field("tag", "string")), v.build_maps(v.TEXT, v.NAMES), kind="map<string, string>"),
    Column(
        Field("numbered", "map", of=Field("one", "double")),
        v.build_maps(v.DOUBLE, choose("0", "-1", "2147483647")),
        lambda value: {int(key): one for key, one in value.items()},
        kind="map<sint32, double>",
    ),
    replace(write("place", "Place", of=e.OPTIONAL_PLACE), write=write_members(moment=_write_moment)),
    write("clock_millis", "int32"),
    write("clock_micros", "int64"),
    give("any_double", "double"),
    Column(Field("inside", "string", source="outer.inner.inside"), v.TEXT),
    Column(Field("maybe", "string", optional=True), v.or_null(v.TEXT), kind="optional string"),
    Column(
        Field("wrapped", "long", optional=True),
        v.or_null(v.LONG),
        lambda number: {"value": number},
        kind="google.protobuf.Int64Value",
    ),
]
_MESSAGES = """
  message Line { string sku = 1; optional int32 qty = 2; string price = 3; }
  message Place { optional string town = 1; google.protobuf.Timestamp moment = 2; }
  message Inner { string inside = 1; }
  message Outer { Inner inner = 1; }
  enum Kind { A = 0; B2 = 1; }
"""


def build_protobuf_schema(columns: Iterable[Column]) -> str:
    """A file whose second message has a message `Row` of columns."""
    kinds = {one.field.name: one.kind for one in columns if one.kind} | {"outer": "Outer"}
    fields = "".join(f"    {kind} {name} = {at};\n" for at, (name, kind) in enumerate(kinds.items(), 1))
    names = ("duration", "struct", "timestamp", "wrappers")
    imports = "".join(f'import "google/protobuf/{name}.proto";\n' for name in names)
    other = "message Other { string string = 1; }"
    row = f"message All {{{_MESSAGES}  message Row {{\n{fields}  }}\n}}\n"
    return f'syntax = "proto3";\npackage shop;\n{imports}{other}\n{row}'
