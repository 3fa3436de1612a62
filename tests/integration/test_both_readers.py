"""The pipeline and the second reader say the same of each record, in every format, sound or not."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from highwater.classifying import classify
from highwater.declaration import Deletes, Field, Stream, UnknownFields
from highwater.formats import Avro, Csv, Json, KeyFormat, Lines, Protobuf, Raw
from highwater.second_reader import KafkaRecord
from highwater.sources import Key, Meta, Rest
from tests.helpers import protobuf_orders
from tests.helpers.agreement import find_difference, is_canonical, mutate
from tests.helpers.format_pages import SAMPLED, read_samples
from tests.helpers.format_streams import FORMATS, records
from tests.helpers.pipeline_rows import KEY_SCHEMAS, bare, by_pipeline, framed, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

UNIONS = {
    "type": "record",
    "name": "Unions",
    "namespace": "n.s",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "w", "type": ["int", "long"]},
        {
            "name": "u",
            "type": [
                "null",
                "int",
                "string",
                {"type": "record", "name": "In", "fields": [{"name": "a", "type": ["string", "boolean"]}]},
            ],
        },
        {"name": "arr", "type": {"type": "array", "items": ["In", "string", "null"]}},
        {"name": "m", "type": {"type": "map", "values": ["double", "boolean"]}},
        {"name": "again", "type": ["null", "n.s.In"]},
    ],
}


def avro_unions() -> tuple[Stream, list[bytes]]:
    import io

    import fastavro

    def written(**values: Any) -> bytes:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(UNIONS), values)
        return out.getvalue()

    fields = [Field(name, "json", nullable=True) for name in ("u", "arr", "m", "again")]
    stream = bare(Avro(json.dumps(UNIONS)), Field("id", "string"), Field("w", "long"), *fields)
    return stream, [
        written(id="1", w=5, u=None, arr=["x", None, {"a": True}], m={"k": 1.5, "z": True}, again={"a": "q"}),
        written(id="2", w=2**40, u="text", arr=[], m={}, again=None),
        written(id="3", w=1, u={"a": "s"}, arr=[{"a": "t"}], m={}, again=None),
    ]


def avro_wide_decimals() -> tuple[Stream, list[bytes]]:
    """Decimals of more digits than a column has, as Kafka Connect writes them, also in a union and of a fixed."""
    import io

    import fastavro

    kind = {"type": "bytes", "logicalType": "decimal", "precision": 64}
    of_fixed = {"type": "fixed", "name": "F", "size": 24, "logicalType": "decimal", "precision": 50, "scale": 3}
    types = {"a": {**kind, "scale": 2}, "b": ["null", {**kind, "scale": 10}], "c": {**kind, "scale": 45}, "d": of_fixed}
    schema = {"type": "record", "name": "W", "fields": [{"name": name, "type": one} for name, one in types.items()]}
    plain = json.loads(json.dumps(schema).replace("logicalType", "ignored"))

    def written(a: int, b: int | None, c: int, d: int) -> bytes:
        out = io.BytesIO()
        values = [None if one is None else one.to_bytes(24, "big", signed=True) for one in (a, b, c, d)]
        fastavro.schemaless_writer(out, fastavro.parse_schema(plain), dict(zip("abcd", values, strict=True)))
        return out.getvalue()

    stream = bare(
        Avro(json.dumps(schema)),
        Field("a", "decimal(12,2)"),
        Field("b", "decimal(38,10)", nullable=True),
        Field("c", "binary"),
        Field("d", "decimal(38,3)"),
    )
    return stream, [written(12_345, -1, 5, 10**37), written(-5, None, 0, -1), written(10**38, 0, 0, 0)]


def csv_lines() -> tuple[Stream, list[bytes]]:
    stream = bare(
        Csv(("x", "n", "ok", "at")),
        Field("x", "string", nullable=True),
        Field("n", "decimal(8,2)"),
        Field("ok", "boolean"),
        Field("at", "timestamp", unit="ms"),
    )
    return stream, [
        b"a,1,true,1767225600000\n",
        b'"a,""b",2.50,false,1767225600001',
        b',"3",true,1767225600000\r\n',
        b"a,1,true",
        b"a,1,true,1767225600000,more",
        b"a,x,true,1767225600000",
        b"",
        b"a,1,true,1767225600000\nb,1,true,1767225600000",
        b" a , 1,true,1767225600000",
        b"\xff,1,true,1767225600000",
    ]


def log_lines() -> tuple[Stream, list[bytes]]:
    pattern = r"(?P<level>[A-Z]+) (?:\[(?P<thread>[a-z]+)\] )?(?P<count>[0-9]+) (?P<text>.*)"
    stream = bare(
        Lines(pattern),
        Field("level", "string"),
        Field("thread", "string", optional=True),
        Field("count", "long"),
        Field("text", "string", optional=True, default="none"),
    )
    return stream, [
        b"WARN [main] 12 disk is full",
        b"INFO 7 ",
        b"INFO 7 x\n",
        b"info 7 x",
        b"INFO 99999999999999999999 x",
    ]


def opaque() -> tuple[Stream, list[bytes]]:
    stream = bare(Raw(), Field("body", "binary", source="value"), Field("text", "string", source="value"))
    return stream, [b"\xc3\xa9", b"", b"\xff", b"plain"]


def of_format(name: str) -> tuple[Stream, list[bytes]]:
    return FORMATS[name], [one.value for one in records(name) if one.value]


def of_page(page: str, place: int) -> tuple[Stream, list[bytes]]:
    samples = read_samples(page, place)
    return samples.stream, [one.value for one in samples.records if one.value]


def collected() -> tuple[Stream, list[bytes]]:
    """Members that no field is taken from, in one column."""
    fields = (Field("id", "string"), Field("rest", "json", optional=True, source=Rest()))
    return bare(Json(), *fields), [
        b'{"id": "1"}',
        b'{"id": "1", "x": [1.50, null], "y z": {"a": 1E+2, "b": "\\ud83d\\ude00"}}',
        b'{"x": 100000000000000000000000000000000000000000.5, "id": "1", "end": "end of the value"}',
    ]


def containers() -> tuple[Stream, list[bytes]]:
    """Arrays, maps and structs inside of each other."""
    line = (Field("sku", "string"), Field("price", "decimal(8,2)", nullable=True))
    fields = (
        Field("tags", "map", of=Field("counts", "array", of=Field("count", "integer", nullable=True))),
        Field("rows", "array", of=Field("row", "array", of=Field("line", "struct", of=line))),
        Field("place", "struct", of=(Field("at", "timestamp"), Field("day", "date", optional=True)), nullable=True),
    )
    return bare(Json(), *fields), [
        b'{"tags": {"a": [1, null], "": []}, "rows": [[{"sku": "x", "price": 1.50}], []], "place": null}',
        b'{"tags": {}, "rows": [], "place": {"at": "2026-01-01T00:00:00Z", "day": "2026-01-01"}}',
        b'{"tags": {"a": [], "b": [7]}, "rows": [[{"sku": "", "price": 0}]], "place": {"at": "2026-01-01T00:00:00Z"}}',
    ]


def refused() -> tuple[Stream, list[bytes]]:
    """Members that no field is taken from make a reject."""
    stream = bare(Json(), Field("id", "string", source="after.id"), Field("n", "long", source="after.n", nullable=True))
    return replace(stream, unknown_fields=UnknownFields("reject", "after")), [
        b'{"after": {"id": "1", "n": null}, "op": "c"}',
        b'{"after": {"id": "1", "n": 5, "other": 1}}',
        b'{"after": {"n": 5, "id": "\\ud83d\\ude00"}}',
    ]


CASES: dict[str, Callable[[], tuple[Stream, list[bytes]]]] = {
    **{name: partial(of_format, name) for name in FORMATS},
    "avro unions": avro_unions,
    "avro wide decimals": avro_wide_decimals,
    "containers": containers,
    "collected": collected,
    "refused": refused,
    "csv": csv_lines,
    "lines": log_lines,
    "raw": opaque,
    "protobuf": lambda: (protobuf_orders.STREAM, list(protobuf_orders.MESSAGES)),
    **{f"{page} page, {place}": partial(of_page, page, place) for page, place in SAMPLED},
}


def in_avro(number: int, *values: Any) -> list[bytes]:
    import io

    import fastavro

    schema, found = fastavro.parse_schema(json.loads(KEY_SCHEMAS[number].text)), []
    for value in values:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, schema, value)
        found.append(out.getvalue())
    return found


MEMBERS = (
    Field("k_id", "long", source=Key("id")),
    Field("k_at", "timestamp", source=Key("at")),
    Field("k_parts", "array", source=Key("parts"), of=Field("part", "string", nullable=True)),
)
KEY_RECORDS = in_avro(62, {"id": 7, "at": 5, "parts": ["a", None]}, {"id": -(2**40), "at": 0, "parts": []})
IN_JSON = (
    b'{"id":1001,"n":2.50}',
    b'{"id":-3,"n":1}',
    b'{"id":12,"n":0.1, "x": [{"y": "\xc3\xbc"}, null, true]}',
    b'{"id":1,"n":1e2}',
    b'{"id":1,"n":NaN}',
)
IN_PROTOBUF = (
    b"\x0a\x02ab\x10\x07\x19\x00\x00\x00\x00\x00\x00\xf8?",
    b"\x0a\x02\xc3\xbc",
    b"\x19\xff\xff\xff\xff\xff\xff\xefC",
)
IN_MESSAGES = (
    Field("k_id", "string", source=Key("id")),
    Field("k_n", "long", source=Key("n")),
    Field("k_d", "double", source=Key("d")),
    Field("k_exact", "decimal(38,2)", source=Key("d"), rounded=True),
)
IN_OBJECTS = (Field("k_id", "long", source=Key("id")), Field("k_n", "decimal(8,2)", source=Key("n")))
# By name the format, the fields, and keys of the format.
KEYS: dict[str, tuple[KeyFormat, tuple[Field, ...], list[bytes]]] = {
    "json": (Json(), IN_OBJECTS, [*IN_JSON]),
    "json texts": (Json(), (Field("k", "string", source=Key()),), [b'"a"', rb'"\u00fc\ud83d\ude00"', b"7", b"null"]),
    "framed avro records": (Avro(), MEMBERS, [framed(62, one) for one in KEY_RECORDS]),
    "framed avro enums": (
        Avro(),
        (Field("k", "string", source=Key(), nullable=True),),
        [framed(65, one) for one in in_avro(65, "B", None)],
    ),
    "framed protobuf": (Protobuf(), IN_MESSAGES, [framed(64, b"\0" + one) for one in IN_PROTOBUF]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_both_readers_agree_on_keys(spark: SparkSession, name: str) -> None:
    """Of keys of a format, and of 200 with a byte changed, left out or added; also of tombstones."""
    key_format, fields, keys = KEYS[name]
    first = next(one.name for one in fields if one.type != "array")
    roles: dict[str, Any] = {} if fields[0].nullable else {"key": (first,), "version": "at"}
    if roles:
        roles["deletes"] = Deletes(tombstones=True)
    rest = (Field("at", "long", source=Meta("offset")), Field("id", "string", optional=True))
    stream = bare(Json(), *fields, *rest, key_format=key_format, **roles)
    seed = random.randrange(10**6)
    changed = [*keys, *mutated(keys, random.Random(seed), 200), b""]
    values = [None if at % 5 == 0 and roles else b"{}" for at, _ in enumerate(changed)]
    found = {row["name"]: row.asDict() for row in by_pipeline(spark, stream, values, changed)}
    assert {found[at]["reason"] for at, _ in enumerate(keys[:2])} == {None}
    wrong: dict[bytes, Any] = {}
    for offset, (value, key) in enumerate(zip(values, changed, strict=True)):
        record = KafkaRecord(value, key, (), "t", 0, offset, 1_767_225_600_000)
        if unlike := find_difference(stream, classify(stream, record, schema_of), found[offset]):
            wrong[key] = unlike
    few = dict(list(wrong.items())[:5])
    assert not wrong, f"seed {seed}, {len(wrong)} keys: {few}"


@pytest.mark.slow
def test_a_key_whose_schema_is_in_a_header_or_unknown(spark: SparkSession) -> None:
    """The header of a key has another name than that of a value."""
    stream = bare(Json(), Field("k", "string", source=Key()), key_format=Avro())
    [payload] = in_avro(60, "o-17")
    headers = [("__value_schema_id", framed(99, b"")), ("__key_schema_id", framed(60, b""))]
    keys, all_headers = [payload, framed(98, payload), None], [headers, [], []]
    found = by_pipeline(spark, stream, [b"{}"] * 3, keys, all_headers)
    reported = {row["name"]: (row["reason"], row["detail"], row["v_k"]) for row in found}
    assert reported == {
        0: (None, None, "o-17"),
        1: ("unresolved", "the registry does not know schema 98 of the key", None),
        2: ("malformed", "field k (the record's key) is missing", None),
    }
    for at, (key, of_record) in enumerate(zip(keys, all_headers, strict=True)):
        theirs = classify(stream, KafkaRecord(b"{}", key, of_record, "t", 0, at, 0), schema_of)
        assert (theirs.reason, theirs.values.get("k")) == (reported[at][0], reported[at][2])


ORDERS = [one[protobuf_orders.FRAMING_BYTES :] for one in protobuf_orders.MESSAGES]
BY_NUMBER, BY_GUID = b"\0" + (5).to_bytes(4), b"\1" + bytes(16)
# In a header, the second message of the file: a list of one index, which is 1.
SECOND = b"\x02\x02"
# By name the stream, and values with the contents of their headers; the last header counts.
IN_HEADERS: dict[str, tuple[Stream, list[Any]]] = {
    "avro": (
        bare(Avro(), Field("id", "long")),
        [
            *((one, [framed(62, b"")]) for one in KEY_RECORDS),
            *((KEY_RECORDS[0], [content]) for content in (None, b"", b"\0\0", framed(98, b""), framed(62, b"more"))),
            (framed(62, KEY_RECORDS[0]), [None]),
            (KEY_RECORDS[0], [framed(98, b""), framed(62, b"")]),
        ],
    ),
    "json": (
        bare(Json(registry=True), Field("id", "long")),
        [(b'{"id": 1}', [content]) for content in (framed(42, b""), BY_GUID, None, b"", BY_GUID[:-1])],
    ),
    "protobuf": (
        protobuf_orders.STREAM,
        [
            *((one, [BY_NUMBER + SECOND]) for one in ORDERS),
            *((one, [content]) for one in ORDERS for content in (BY_NUMBER, None, b"", BY_NUMBER + b"\x02")),
            # Without indexes in the header: the bytes of the message would be taken for them.
            (bytes.fromhex("0a04616263641007"), [BY_NUMBER]),
            (b"", [BY_NUMBER]),
            (b"", [BY_NUMBER + SECOND]),
            (ORDERS[0], [BY_NUMBER + SECOND + b"more"]),
            (protobuf_orders.MESSAGES[0], [None]),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_HEADERS)
def test_both_readers_agree_on_schemas_in_headers(spark: SparkSession, name: str) -> None:
    stream, values = IN_HEADERS[name]
    headers = [[("__value_schema_id", content) for content in contents] for _, contents in values]
    found = {
        row["name"]: row.asDict() for row in by_pipeline(spark, stream, [value for value, _ in values], (), headers)
    }
    theirs = [
        classify(stream, KafkaRecord(value, b"k", its, "t", 0, at, 1_767_225_600_000), schema_of)
        for at, ((value, _), its) in enumerate(zip(values, headers, strict=True))
    ]
    assert theirs[0].kind == "event"
    assert {one.kind for one in theirs} == {"event", "reject"}
    unlike = {at: find_difference(stream, one, found[at]) for at, one in enumerate(theirs)}
    assert {at: one for at, one in unlike.items() if one} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("declared", "kind"), [(Avro(), "AVRO"), (Protobuf(), "PROTOBUF")])
def test_a_schema_of_another_type_rejects_its_records_and_keys_alone(
    spark: SparkSession, declared: Any, kind: str
) -> None:
    """A type that Highwater does not know failed the slice again and again."""
    sound = {"AVRO": framed(60, b"\x02k"), "PROTOBUF": framed(64, b"\x00\x0a\x01k")}[kind]
    value = {"AVRO": framed(62, KEY_RECORDS[0]), "PROTOBUF": sound}[kind]
    stream = bare(declared, Field("n", "long", source=Meta("offset")), Field("k", "json", source=Key()))
    stream = replace(stream, key_format=declared)
    values, keys = [value, framed(66, b"<a/>"), None, value, framed(63, b"{}")], [sound] * 3
    keys += [framed(66, b"<a/>"), sound]
    found = {row["name"]: (row["reason"], row["detail"]) for row in by_pipeline(spark, stream, values, keys)}
    refused = f"cannot be read: its type is %s, and not {kind}"
    assert found == {
        0: (None, None),
        1: ("malformed", f"schema 66 {refused % 'XML'}"),
        2: (None, None),
        3: ("malformed", f"the key: schema 66 {refused % 'XML'}"),
        4: ("malformed", f"schema 63 {refused % 'JSON'}"),
    }
    for at, (one, key) in enumerate(zip(values, keys, strict=True)):
        theirs = classify(stream, KafkaRecord(one, key, (), "t", 0, at, 0), schema_of)
        assert (theirs.reason, theirs.detail) == found[at]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_both_readers_agree(spark: SparkSession, name: str) -> None:
    """Of the records of a format, and of 300 with a byte changed, left out or added."""
    stream, values = CASES[name]()
    seed = random.randrange(10**6)
    changed = [*values, *mutated(values, random.Random(seed), 300)]
    found = {row["name"]: row.asDict() for row in by_pipeline(spark, stream, changed)}
    wrong: dict[bytes, Any] = {}
    for at, value in enumerate(changed):
        theirs = classify(stream, KafkaRecord(value, b"k", (), "t", 0, at, 1_767_225_600_000), schema_of)
        ours = found[at]
        if theirs.kind != "reject" and not is_canonical(stream, KafkaRecord(value), schema_of):
            continue
        if unlike := find_difference(stream, theirs, ours):
            wrong[value] = unlike
    few = dict(list(wrong.items())[:5])
    assert not wrong, f"seed {seed}, {len(wrong)} records: {few}"


def mutated(values: list[bytes], chance: random.Random, count: int) -> list[bytes]:
    return [mutate(chance.choice([one for one in values if one]), chance) for _ in range(count)]
