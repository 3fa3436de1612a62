"""Schema evolution: columns that come while slices are materialised, wider types, and members that no field is of."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from highwater.assets import schema_evolution
from highwater.declaration import Answers, Field, Stream, UnknownFields
from highwater.errors import ConfigurationError
from highwater.formats import Avro, Json
from highwater.schemas import Schema
from highwater.sources import Rest
from tests.helpers.support import LONG_TIERS, Message

if TYPE_CHECKING:
    from highwater.slices import Slice
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow

ANSWERS = Answers("By key.", "Once.", "Parked.")
BASE: list[dict[str, Any]] = [{"name": "id", "type": "string"}, {"name": "v", "type": "long"}]
PART = {"type": "record", "name": "Part", "fields": [{"name": "a", "type": "int"}]}
WIDE_PART = {
    "type": "record",
    "name": "Part",
    "fields": [{"name": "a", "type": "long"}, {"name": "b", "type": "string", "default": ""}],
}
FIELDS_OF = {
    1: BASE,
    2: [*BASE, {"name": "n", "type": "int"}, {"name": "key", "type": "string"}, {"name": "part", "type": PART}],
    3: [*BASE, {"name": "n", "type": "long"}, {"name": "part", "type": ["null", WIDE_PART]}],
    4: [*BASE, {"name": "n", "type": "string"}],
}


def text_of(number: int) -> str:
    return json.dumps({"type": "record", "name": "R", "fields": FIELDS_OF[number]})


def find_schema(one: int | str) -> Schema | None:
    return Schema(int(one), "AVRO", text_of(int(one))) if int(one) in FIELDS_OF else None


def framed(number: int, **values: Any) -> Message:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(text_of(number))), values)
    return Message(values["id"].encode(), b"\x00" + number.to_bytes(4, "big") + out.getvalue())


def avro_stream(topic: str, **changes: Any) -> Stream:
    options: dict[str, Any] = {"unknown_fields": UnknownFields("add"), "value": Avro(), **changes}
    fields = (Field("id", "string"), Field("v", "long"))
    return Stream("evolving", topic, fields, ("id",), "v", answers=ANSWERS, tiers=LONG_TIERS, **options)


def json_stream(topic: str, *fields: Field, **changes: Any) -> Stream:
    every = (Field("id", "string"), Field("v", "long"), *fields)
    return Stream("evolving", topic, every, ("id",), "v", answers=ANSWERS, tiers=LONG_TIERS, **changes)


def document(**values: Any) -> Message:
    return Message(values["id"].encode(), json.dumps(values).encode())


def next_slice(bench: Bench, number: int, first: int, *messages: Message) -> Slice:
    bench.send(*messages)
    slice_ = bench.plan(number, p0=(first, first + len(messages)))
    bench.materialise(slice_)
    return slice_


def events(bench: Bench, *names: str) -> list[tuple[Any, ...]]:
    rows = sorted(bench.rows("events"), key=lambda row: row["origin_offset"])
    return [tuple(row[name] for name in names) for row in rows]


def rejects(bench: Bench) -> list[tuple[Any, ...]]:
    return sorted((row["origin_offset"], row["reason"], row["detail"]) for row in bench.rows("rejects"))


def types(bench: Bench, table: str) -> dict[str, Any]:
    fields = bench.lake.open_existing_table(bench.stream.name, table).schema().fields
    return {field.name: json.loads(field.type.to_json()) for field in fields}


def test_schemas_add_columns_and_widen_them(bench: Bench) -> None:
    """A member of a newer schema is a column, in `current` too; int widens to long; a text for a number is a reject."""
    bench.stream, bench.schemas = avro_stream(bench.stream.topic), find_schema
    first = next_slice(bench, 0, 0, framed(1, id="a", v=1))
    assert "n" not in types(bench, "events")
    next_slice(bench, 1, 1, framed(2, id="a", v=2, n=7, key="k", part={"a": 1}), framed(1, id="b", v=1))
    assert types(bench, "events")["n"] == types(bench, "current")["n"] == "integer"
    assert events(bench, "key", "n", "key_2") == [("a", None, None), ("a", 7, "k"), ("b", None, None)]
    next_slice(bench, 2, 3, framed(3, id="a", v=3, n=2**40, part={"a": 2**33, "b": "x"}), framed(4, id="c", v=1, n="5"))
    assert types(bench, "events")["n"] == types(bench, "current")["n"] == "long"
    assert events(bench, "n", "part") == [
        (None, None),
        (7, {"a": 1, "b": None}),
        (None, None),
        (2**40, {"a": 2**33, "b": "x"}),
    ]
    assert rejects(bench) == [(4, "schema", "field n is long, found JSON STRING")]
    assert {key: (row["n"], row["part"]) for key, row in bench.current().items()} == {
        "a": (2**40, {"a": 2**33, "b": "x"}),
        "b": (None, None),
    }
    bench.materialise(first)
    assert events(bench, "n")[0] == (None,)
    assert not bench.failing()
    protocol = bench.lake.open_existing_table("evolving", "events").protocol()
    assert protocol.min_reader_version == 1, "a wider type must not keep other readers out"


def test_a_json_schema_adds_columns(bench: Bench) -> None:
    """Of the types that the schema says; a name in capitals that differs in case alone gets a number."""
    properties = {"id": {"type": "string"}, "v": {"type": "integer"}, "ID": {"type": "string"}, "n": {"type": "number"}}
    schema = Schema(7, "JSON", json.dumps({"type": "object", "properties": properties, "required": ["id", "v"]}))
    bench.stream = avro_stream(bench.stream.topic, value=Json(registry=True))
    bench.schemas = lambda one: schema if one == 7 else None
    framing = b"\x00\x00\x00\x00\x07"
    values = [{"id": "a", "v": 1, "n": 0.5, "other": 1}, {"id": "b", "v": 1, "ID": "x"}]
    next_slice(bench, 0, 0, *[Message(b"k", framing + json.dumps(one).encode()) for one in values])
    assert events(bench, "id", "n", "ID_2") == [("a", 0.5, None), ("b", None, "x")]
    assert "other" not in types(bench, "events")
    assert bench.current()["b"]["ID_2"] == "x"


def test_a_schema_of_another_format_adds_no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are rejects, and its members became columns of events for good."""
    strange = Schema(5, "PROTOBUF", 'syntax = "proto3"; message Other { string other = 1; }')
    unknown = Schema(6, "XML", "<schema/>")
    mine = Schema(1, "AVRO", text_of(1))
    monkeypatch.setattr(schema_evolution, "fetch_referenced_schemas", lambda _, __: [mine, strange, unknown])
    log: list[str] = []
    work: Any = SimpleNamespace(stream=avro_stream("t"), log=log.append)
    [found] = schema_evolution._read_schema_trees(work, raw=work)
    assert [one.name for one in found.members] == ["id", "v"]
    assert log == [
        "schema 5 adds no columns: its type is PROTOBUF, and not AVRO",
        "schema 6 adds no columns: its type is XML, and not AVRO",
    ]


def test_a_slice_that_is_materialised_again_fills_the_columns(bench: Bench) -> None:
    """Of columns that were declared, or added by a schema, after its first commit."""
    topic = bench.stream.topic
    bench.stream, bench.schemas = avro_stream(topic, unknown_fields=UnknownFields("ignore")), find_schema
    slice_ = next_slice(bench, 0, 0, framed(2, id="a", v=1, n=7, key="k", part={"a": 1}))
    assert "n" not in types(bench, "events")
    bench.stream = avro_stream(topic)
    bench.materialise(slice_)
    assert events(bench, "n", "key_2", "part") == [(7, "k", {"a": 1})]
    assert bench.current()["a"]["n"] == 7
    assert not bench.failing()


def test_declared_types_widen(bench: Bench) -> None:
    """The rows of before keep their values, in the wider types."""
    topic = bench.stream.topic
    narrow = (
        Field("i", "integer"),
        Field("f", "float"),
        Field("d", "decimal(5,2)"),
        Field("s", "struct", of=(Field("a", "integer"),)),
        Field("l", "array", of=Field("", "integer")),
    )
    bench.stream = json_stream(topic, *narrow)
    next_slice(bench, 0, 0, document(id="a", v=1, i=1, f=0.5, d=1.25, s={"a": 1}, l=[1, 2]))
    wide = (
        Field("i", "long"),
        Field("f", "double"),
        Field("d", "decimal(12,3)"),
        Field("s", "struct", of=(Field("a", "long"), Field("b", "string", optional=True))),
        Field("l", "array", of=Field("", "long")),
    )
    bench.stream = json_stream(topic, *wide)
    big = document(id="b", v=1, i=2**40, f=0.1, d=123456789.125, s={"a": 2**40, "b": "x"}, l=[2**40])
    next_slice(bench, 1, 1, big)
    assert [types(bench, table)[name] for table in ("events", "current") for name in "ifd"] == [
        "long",
        "double",
        "decimal(12,3)",
    ] * 2
    assert [(str(d), *rest) for d, *rest in events(bench, "d", "i", "f", "s", "l")] == [
        ("1.250", 1, 0.5, {"a": 1, "b": None}, [1, 2]),
        ("123456789.125", 2**40, 0.1, {"a": 2**40, "b": "x"}, [2**40]),
    ]
    assert bench.current()["a"]["l"] == [1, 2]
    assert not bench.failing()


def test_types_without_a_common_one_are_refused(bench: Bench) -> None:
    """The slice fails with both types and the remedy; nothing is rejected for a fault of the declaration."""
    topic = bench.stream.topic
    bench.stream = json_stream(topic, Field("i", "integer"))
    next_slice(bench, 0, 0, document(id="a", v=1, i=1))
    bench.stream = json_stream(topic, Field("i", "string"))
    with pytest.raises(ConfigurationError, match="column 'i' of evolving/events cannot hold the declared type"):
        next_slice(bench, 1, 1, document(id="b", v=1, i="x"))
    assert rejects(bench) == []
    bench.stream = json_stream(topic, Field("i", "integer", optional=True), Field("text", "string", source="i"))
    bench.stream = json_stream(topic, Field("text", "string", source="i"))
    bench.materialise(bench.plan(1, p0=(1, 2)))
    assert events(bench, "i", "text") == [(1, None), (None, "x")]


ODD = '{"id": "a", "v": 1, "x \\"y\\"": "\\ud83d\\ude00", "deep": {"n": 1e400, "m": [1.25]}, "e": 1E+2}'


def test_unknown_members_are_collected(bench: Bench) -> None:
    """Into one column of JSON, exactly: also of a document that Spark's parser refuses, or that names ours."""
    rest = Field("rest", "json", optional=True, source=Rest())
    bench.stream = json_stream(bench.stream.topic, rest)
    messages = [
        document(id="a", v=1),
        document(id="a", v=2, x=None, y={"z": [1, 2.5]}),
        Message(b"a", ODD.replace('"v": 1', '"v": 3').encode()),
        document(id="a", v=4, end="end of the value"),
        Message(b"a", b'{"id": "a", "v": 5, "half": "\\ud83d"}'),
        Message(b"a", b'{"id": "a", "v": 6, "twice": 1, "twice": 2}'),
    ]
    next_slice(bench, 0, 0, *messages)
    found = [(v, None if text is None else json.loads(text, parse_float=str)) for v, text in events(bench, "v", "rest")]
    assert found == [
        (1, None),
        (2, {"x": None, "y": {"z": [1, "2.5"]}}),
        (3, {'x "y"': "😀", "deep": {"n": "1e400", "m": ["1.25"]}, "e": "1E+2"}),
        (4, {"end": "end of the value"}),
    ]
    assert [(offset, reason) for offset, reason, _ in rejects(bench)] == [(4, "malformed"), (5, "malformed")]
    assert not bench.failing()


def test_unknown_members_are_rejected(bench: Bench) -> None:
    """With the reason `schema`, and their names; those inside of another object do not count."""
    unknown = UnknownFields("reject", within="after")
    fields = (Field("id", "string", source="after.id"), Field("v", "long", source="after.v"))
    bench.stream = replace(
        json_stream(bench.stream.topic), fields=fields, unknown_fields=unknown, record_key="ignore", value=Json()
    )
    next_slice(
        bench,
        0,
        0,
        Message(b"a", b'{"op": "c", "after": {"id": "a", "v": 1}}'),
        Message(b"a", b'{"op": "c", "after": {"id": "a", "v": 2, "y": 1, "x": null}}'),
        Message(b"a", b'{"after": {"id": "a", "v": 3, "a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}}'),
        Message(b"a", b'{"after": {"id": 5, "v": 3, "a": 1}}'),
    )
    assert events(bench, "v") == [(1,)]
    assert rejects(bench) == [
        (1, "schema", "no field is declared for after.x, after.y"),
        (2, "schema", "no field is declared for after.a, after.b, after.c, after.d, after.e and 1 more"),
        (3, "malformed", "field id (after.id) is string, found JSON BIGINT"),
    ]
    assert not bench.failing()
