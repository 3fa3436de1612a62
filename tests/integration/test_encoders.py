"""What a Python encoder of each format writes comes out as the same values, by both readers."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import pytest

from highwater.classifying import classify
from highwater.column_comparison import matches_stored
from highwater.declaration import Field, Stream
from highwater.formats import Avro, Json
from highwater.second_reader import KafkaRecord
from tests.helpers import protobuf_orders
from tests.helpers.pipeline_rows import bare, by_pipeline, framed, reported, schema_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = 150
FAR = (datetime(9999, 1, 1, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
CHARACTERS = "aZ0 \t\n\"'\\,{}[]:/äß€中\u2028\U0001f600\x01\x7f"

Values = dict[str, Any]

LINE = (
    Field("sku", "string"),
    Field("qty", "integer", nullable=True),
    Field("price", "decimal(12,2)"),
    Field("sizes", "array", of=Field("size", "double")),
)
FIELDS = (
    Field("s", "string"),
    Field("n", "long"),
    Field("d", "double"),
    Field("ok", "boolean"),
    Field("m", "decimal(12,2)"),
    Field("at", "timestamp"),
    Field("note", "string", nullable=True),
    Field("lines", "array", of=Field("line", "struct", of=LINE)),
    Field("tags", "map", of=Field("counts", "array", of=Field("count", "integer", nullable=True))),
    Field("longs", "array", of=Field("long", "long")),
    Field("floats", "array", of=Field("float", "float")),
    Field("flags", "array", of=Field("flag", "boolean")),
    Field("place", "struct", of=(Field("town", "string", nullable=True), Field("north", "double")), nullable=True),
)
_DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}
_LINE = [
    {"name": "sku", "type": "string"},
    {"name": "qty", "type": ["null", "int"]},
    {"name": "price", "type": _DECIMAL},
    {"name": "sizes", "type": {"type": "array", "items": "double"}},
]
_PLACE = [{"name": "town", "type": ["null", "string"]}, {"name": "north", "type": "double"}]
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Whole",
    "fields": [
        {"name": "s", "type": "string"},
        {"name": "n", "type": "long"},
        {"name": "d", "type": "double"},
        {"name": "ok", "type": "boolean"},
        {"name": "m", "type": _DECIMAL},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "note", "type": ["null", "string"]},
        {"name": "lines", "type": {"type": "array", "items": {"type": "record", "name": "Line", "fields": _LINE}}},
        {"name": "tags", "type": {"type": "map", "values": {"type": "array", "items": ["null", "int"]}}},
        {"name": "longs", "type": {"type": "array", "items": "long"}},
        {"name": "floats", "type": {"type": "array", "items": "float"}},
        {"name": "flags", "type": {"type": "array", "items": "boolean"}},
        {"name": "place", "type": ["null", {"type": "record", "name": "Place", "fields": _PLACE}]},
    ],
}


def text(chance: random.Random) -> str:
    return "".join(chance.choice(CHARACTERS) for _ in range(chance.randrange(9)))


def number(chance: random.Random) -> float:
    return chance.choice([0.0, 1e-300, 1.7e308, 0.1, float(chance.randrange(99)), chance.uniform(-1e6, 1e6)])


def single(value: float) -> float:
    """The nearest number of single precision."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def maybe(chance: random.Random, value: Any) -> Any:
    return None if chance.random() < 0.3 else value


def drawn(chance: random.Random) -> Values:
    """The values of one record."""
    bits = chance.choice([3, 31, 53, 63])

    def line() -> Values:
        cents = Decimal(chance.randint(-(10**6), 10**6)) / 100
        sizes = [number(chance) for _ in range(chance.randrange(3))]
        return {"sku": text(chance), "qty": maybe(chance, chance.randrange(99)), "price": cents, "sizes": sizes}

    def counts() -> list[int | None]:
        return [maybe(chance, chance.randrange(9)) for _ in range(chance.randrange(3))]

    place = {"town": maybe(chance, text(chance)), "north": number(chance)}
    return {
        "s": text(chance),
        "n": chance.randrange(-(2**bits), 2**bits),
        "d": number(chance),
        "ok": chance.random() < 0.5,
        "m": Decimal(chance.randint(-(10**11), 10**11)) / 100,
        "at": chance.randint(-(10**15), FAR),
        "note": maybe(chance, text(chance)),
        "lines": [line() for _ in range(chance.randrange(3))],
        "tags": {text(chance): counts() for _ in range(chance.randrange(3))},
        "longs": [chance.randrange(-(2**bits), 2**bits) for _ in range(chance.randrange(3))],
        "floats": [single(chance.uniform(-1e6, 1e6)) for _ in range(chance.randrange(3))],
        "flags": [chance.random() < 0.5 for _ in range(chance.randrange(3))],
        "place": maybe(chance, place),
    }


def in_json(values: Values, chance: random.Random) -> bytes:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=values["at"])
    found = json.dumps(
        {**values, "at": moment.isoformat()}, ensure_ascii=chance.random() < 0.5, default=lambda one: f"<{one}>"
    )
    # The encoder knows no decimals: they are numbers as they are written.
    for one in (values["m"], *(line["price"] for line in values["lines"])):
        found = found.replace(f'"<{one}>"', str(one))
    return found.encode()


_PARSED = fastavro.parse_schema(SCHEMA)


def in_avro(values: Values, _: random.Random) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, _PARSED, values)
    return out.getvalue()


def drawn_order(chance: random.Random) -> Values:
    lines = [{"sku": text(chance), "qty": chance.randint(-9, 9)} for _ in range(chance.randrange(3))]
    return {
        "id": f"{chance.randrange(99)}{text(chance)}",
        "version": chance.randrange(-(2**63), 2**63),
        "price": number(chance),
        "note": maybe(chance, text(chance)),
        "lines": lines,
        "counts": {text(chance): chance.randrange(-(2**63), 2**63) for _ in range(chance.randrange(3))},
        "raw": chance.randbytes(chance.randrange(4)),
        "big": chance.randrange(2**64),
        "paid": chance.random() < 0.5,
    }


def in_protobuf(values: Values, _: random.Random) -> bytes:
    return protobuf_orders.message(**{name: value for name, value in values.items() if value is not None})


# By name the stream, what draws values, and what writes them.
ENCODERS: Mapping[str, tuple[Stream, Callable[[random.Random], Values], Callable[[Values, random.Random], bytes]]] = {
    "json": (bare(Json(), *FIELDS), drawn, in_json),
    "framed json": (bare(Json(registry=True), *FIELDS), drawn, lambda *given: framed(42, in_json(*given))),
    "avro": (bare(Avro(json.dumps(SCHEMA)), *FIELDS), drawn, in_avro),
    "framed protobuf": (protobuf_orders.STREAM, drawn_order, in_protobuf),
}


def written(name: str, seed: int) -> tuple[Stream, list[Values], list[bytes]]:
    stream, draw, encode = ENCODERS[name]
    chance = random.Random(seed)
    values = [draw(chance) for _ in range(RECORDS)]
    return stream, values, [encode(one, chance) for one in values]


def unlike(stream: Stream, wanted: Sequence[Values], found: Sequence[Mapping[str, Any]]) -> list[Any]:
    declared = {one.name: one for one in stream.fields}
    return [
        (name, value, row[name])
        for values, row in zip(wanted, found, strict=True)
        for name, value in values.items()
        if not matches_stored(declared[name], value, row[name])
    ]


@pytest.mark.parametrize("name", ENCODERS)
def test_the_second_reader_reads_what_was_written(name: str) -> None:
    seed = random.randrange(10**6)
    stream, values, encoded = written(name, seed)
    found = [classify(stream, KafkaRecord(one), schema_of) for one in encoded]
    assert {one.detail for one in found} == {None}, f"seed {seed}"
    assert unlike(stream, values, [one.values for one in found]) == [], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_the_pipeline_reads_what_was_written(spark: SparkSession, name: str) -> None:
    seed = random.randrange(10**6)
    stream, values, encoded = written(name, seed)
    rows = sorted(by_pipeline(spark, stream, encoded), key=lambda row: row["name"])
    assert {row["detail"] for row in rows} == {None}, f"seed {seed}"
    found = [{one: reported(row[f"v_{one}"]) for one in values[0]} for row in rows]
    assert unlike(stream, values, found) == [], f"seed {seed}"


_ARRAY = {"type": "array", "items": "double"}
ARRAYS = {
    "type": "record",
    "name": "Arrays",
    "fields": [
        {"name": "either", "type": ["null", "string", _ARRAY]},
        {"name": "named", "type": {"type": "map", "values": _ARRAY}},
        {"name": "rows", "type": {"type": "array", "items": _ARRAY}},
    ],
}


@pytest.mark.slow
def test_doubles_in_arrays_of_avro_keep_their_digits_wherever_the_array_is(spark: SparkSession) -> None:
    """Avro 1.12.0 alone rounds them to `float`: 0.1 becomes 0.10000000149011612, and 1.7e308 infinite."""
    doubles = Field("doubles", "array", of=Field("double", "double"))
    fields = (Field("either", "json"), Field("named", "map", of=doubles), Field("rows", "array", of=doubles))
    stream, numbers, parsed = (
        bare(Avro(json.dumps(ARRAYS)), *fields),
        [0.1, 1.7e308, -1e-300],
        fastavro.parse_schema(ARRAYS),
    )
    encoded = []
    for either in (numbers, "text"):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, {"either": either, "named": {"a": numbers}, "rows": [numbers, []]})
        encoded.append(out.getvalue())
    found = sorted(by_pipeline(spark, stream, encoded), key=lambda row: row["name"])
    assert [row["detail"] for row in found] == [None, None]
    assert [json.loads(row["v_either"]) for row in found] == [numbers, "text"]
    assert [(row["v_named"], row["v_rows"]) for row in found] == [({"a": numbers}, [numbers, []])] * 2
