"""The pipeline and the second reader say the same of each record, in every format, sound or not."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from assets.origins import PROBLEM
from assets.parsing import judged, key_of
from highwater.classifying import classify
from highwater.declaration import Field, Stream, UnknownFields
from highwater.formats import Avro, Csv, Json, Lines, Raw
from highwater.reading import Record, same
from highwater.sources import Rest
from tests import protobuf_orders
from tests.format_streams import FORMATS, find_schema, records

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from assets.work import Work
    from highwater.schemas import Schema

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


def bare(value: Any, *fields: Field) -> Stream:
    return replace(FORMATS["05-github-events"], name="bare", fields=fields, key=(), event_time=None, value=value)


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


def collected() -> tuple[Stream, list[bytes]]:
    """Members that no field is taken from, in one column."""
    fields = (Field("id", "string"), Field("rest", "json", optional=True, source=Rest()))
    return bare(Json(), *fields), [
        b'{"id": "1"}',
        b'{"id": "1", "x": [1.50, null], "y z": {"a": 1E+2, "b": "\\ud83d\\ude00"}}',
        b'{"x": 100000000000000000000000000000000000000000.5, "id": "1", "end": "end of the value"}',
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
    "collected": collected,
    "refused": refused,
    "csv": csv_lines,
    "lines": log_lines,
    "raw": opaque,
    "protobuf": lambda: (protobuf_orders.STREAM, list(protobuf_orders.MESSAGES)),
}


def schema_of(one: int | str) -> Schema | None:
    return protobuf_orders.find_schema(one) or find_schema(one)


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
        theirs = classify(stream, Record(value, b"k", (), "t", 0, at, 1_767_225_600_000), schema_of)
        ours = found[at]
        if theirs.kind != "reject" and not is_canonical(stream, value):
            continue
        if (ours["reason"] is None) != (theirs.kind != "reject"):
            wrong[value] = (ours["reason"], ours["detail"], theirs)
        elif ours["reason"] is None:
            fields = {f.name: f for f in stream.fields}
            unlike = {
                one: (theirs.values[one], ours[f"v_{one}"])
                for one, declared in fields.items()
                if not same(declared, theirs.values[one], told(ours[f"v_{one}"]))
            }
            unlike |= {"key": (theirs.key, ours["event_key"])} if theirs.key != ours["event_key"] else {}
            if unlike:
                wrong[value] = unlike
    few = dict(list(wrong.items())[:5])
    assert not wrong, f"seed {seed}, {len(wrong)} records: {few}"


def is_canonical(stream: Stream, value: bytes) -> bool:
    """Whether an encoder writes a value so: to some readers a boolean of Avro is any byte but 0, to others only 1."""
    import io

    import fastavro

    from highwater.decoding import document

    if not isinstance(stream.value, Avro) or stream.value.schema is None:
        return True
    out, schema = io.BytesIO(), fastavro.parse_schema(json.loads(stream.value.schema))
    fastavro.schemaless_writer(out, schema, document(stream.value, Record(value), None))
    return out.getvalue() == value


def told(value: Any) -> Any:
    """Rows as dictionaries, bytes as such."""
    if hasattr(value, "asDict"):
        return {key: told(one) for key, one in value.asDict().items()}
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, list):
        return [told(one) for one in value]
    return {key: told(one) for key, one in value.items()} if isinstance(value, dict) else value


def mutated(values: list[bytes], chance: random.Random, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        value = chance.choice([one for one in values if one])
        at, byte = chance.randrange(len(value)), bytes([chance.randrange(256)])
        found.append(chance.choice([value[:at] + byte + value[at + 1 :], value[:at] + value[at + 1 :], value + byte]))
    return found


def by_pipeline(spark: SparkSession, stream: Stream, values: list[bytes]) -> list[Any]:
    from pyspark.sql import functions as F

    rows: list[Any] = [(at, b"k", value, [], "t", 0, at, 1_767_225_600_000) for at, value in enumerate(values)]
    raw = spark.createDataFrame(
        cast("Any", rows),
        "name BIGINT, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, "
        "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp_ms BIGINT",
    ).withColumn(PROBLEM, F.lit(None).cast("string"))
    work = cast("Work", SimpleNamespace(stream=stream, schemas=schema_of, spark=spark))
    columns = []
    for declared in stream.fields:
        value = F.col(f"field_{declared.name}")
        if declared.type in {"timestamp", "timestamp_ntz"}:
            value = F.unix_micros(value.cast("timestamp"))
        columns.append(value.alias(f"v_{declared.name}"))
    return judged(work, raw).select("name", "reason", "detail", key_of(stream).alias("event_key"), *columns).collect()
