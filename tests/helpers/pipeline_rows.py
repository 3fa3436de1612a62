"""Rows that the pipeline makes of values, with the schemas of their keys."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

from highwater.assets.origins import PROBLEM
from highwater.assets.parsing import build_key, has_other_key, parse_records
from highwater.assets.work import Work
from highwater.declaration import Field, Stream
from highwater.schemas import Schema
from tests.helpers import protobuf_orders
from tests.helpers.format_pages import PAGE_SCHEMAS
from tests.helpers.format_streams import FORMATS
from tests.helpers.format_streams import find_schema as find_format_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession


def bare(value: Any, *fields: Field, **more: Any) -> Stream:
    more = {"key": (), **more}
    return replace(FORMATS["05-github-events"], name="bare", fields=fields, event_time=None, value=value, **more)


def schema_of(one: int | str) -> Schema | None:
    known = protobuf_orders.find_schema(one) or find_format_schema(one)
    return known or KEY_SCHEMAS.get(cast("int", one)) or PAGE_SCHEMAS.get(one)


KEY_RECORD = {
    "type": "record",
    "name": "Key",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "parts", "type": {"type": "array", "items": ["null", "string"]}},
    ],
}
KEY_SCHEMAS: dict[int, Schema] = {
    60: Schema(60, "AVRO", '"string"'),
    61: Schema(61, "AVRO", '"long"'),
    62: Schema(62, "AVRO", json.dumps(KEY_RECORD)),
    63: Schema(63, "JSON", "{}"),
    64: Schema(64, "PROTOBUF", 'syntax = "proto3"; message K { string id = 1; int64 n = 2; double d = 3; }'),
    65: Schema(65, "AVRO", '["null", {"type": "enum", "name": "E", "symbols": ["A", "B"]}]'),
    66: Schema(66, "XML", "<schema/>"),
}


def framed(number: int, payload: bytes) -> bytes:
    return b"\0" + number.to_bytes(4) + payload


def reported(value: Any) -> Any:
    """Rows as dictionaries, bytes as such."""
    if hasattr(value, "asDict"):
        return {key: reported(one) for key, one in value.asDict().items()}
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, list):
        return [reported(one) for one in value]
    return {key: reported(one) for key, one in value.items()} if isinstance(value, dict) else value


def by_pipeline(
    spark: SparkSession,
    stream: Stream,
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] = (),
    headers: Sequence[Any] = (),
    find_schema: Callable[[int | str], Schema | None] = schema_of,
) -> list[Any]:
    from pyspark.sql import functions as F

    records: Any = zip_longest(values, keys or [b"k"] * len(values), headers, fillvalue=[])
    rows: list[Any] = [
        (at, key, value, its, "t", 0, at, 1_767_225_600_000) for at, (value, key, its) in enumerate(records)
    ]
    raw = spark.createDataFrame(
        cast("Any", rows),
        "name BIGINT, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, "
        "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp_ms BIGINT",
    ).withColumn(PROBLEM, F.lit(None).cast("string"))
    nothing = cast("Any", None)
    work = Work(stream, (), spark, nothing, nothing, nothing, nothing, schemas=find_schema)
    columns = []
    for declared in stream.fields:
        value = F.col(f"field_{declared.name}")
        if declared.type in {"timestamp", "timestamp_ntz"}:
            value = F.unix_micros(value.cast("timestamp"))
        columns.append(value.alias(f"v_{declared.name}"))
    other_key = has_other_key(stream).alias("other_key")
    return (
        parse_records(work, raw)
        .select("name", "reason", "rule", "detail", build_key(stream).alias("event_key"), other_key, *columns)
        .collect()
    )
