"""(o): classifying records of each format, beside what Spark itself decodes of the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.harness import Result, Row, Target, alternate, measure_seconds
from bench.world import World
from highwater.assets.origins import PROBLEM
from highwater.assets.parsing import build_event_time, build_key, parse_records, select_column_fields
from highwater.declaration import Answers, Field, Stream
from highwater.formats import Avro, Json, Protobuf

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ANSWERS = Answers("By key.", "Once.", "Parked.")
_FLAT = (
    Field("id", "string"),
    Field("version", "long"),
    Field("status", "string"),
    Field("amount", "decimal(12,2)"),
    Field("at", "timestamp"),
)
_AS_TEXT = tuple(replace(one, text=one.name == "amount") for one in _FLAT)
_NESTED = (
    Field("id", "string"),
    Field("version", "long"),
    Field("login", "string", source="actor.login"),
    Field("repo", "long", source="repo.id"),
    Field("at", "timestamp"),
    Field("payload", "json"),
)
_AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "version", "type": "long"},
            {"name": "status", "type": "string"},
            {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        ],
    }
)
_STATUS = "element_at(array('placed', 'paid', 'refunded'), CAST(id % 3 AS INT) + 1)"
_AMOUNT = "CAST(id % 10000 / 100 AS DECIMAL(12,2))"
_TEXT_TIME = """date_format(timestamp_seconds(1767225600 + id), "yyyy-MM-dd'T'HH:mm:ss'Z'")"""
_COLUMNS = (
    f"concat('o', id) AS id, id AS version, {_STATUS} AS status, {_AMOUNT} AS amount, "
    "timestamp_seconds(1767225600 + id) AS at"
)
_OF_FLAT = (
    f"named_struct('id', concat('o', id), 'version', id, 'status', {_STATUS}, 'amount', {_AMOUNT}, 'at', {_TEXT_TIME})"
)
_OBJECT = f"""named_struct('id', concat('o', id), 'version', id,
    'actor', named_struct('id', id % 1000, 'login', concat('user', id % 1000), 'url', concat('https://e.org/', id)),
    'repo', named_struct('id', id % 77, 'name', 'r'), 'at', {_TEXT_TIME},
    'payload', named_struct('size', id % 9,
        'commits', array(named_struct('sha', sha2(CAST(id AS STRING), 256), 'distinct', true))))"""
MESSAGES = 1_000


def compare_classification(world: World, rounds: int, records: int) -> Result:
    """(o) Classifying flat and nested JSON, Avro and Protobuf, against Spark's own functions into a no-op sink."""
    bed = world.fresh(_build_stream("bench", _FLAT))
    made = {
        "flat JSON": _build_json(world, records, _OF_FLAT),
        "nested JSON": _build_json(world, records, _OBJECT),
        "Avro": _build_avro(world, records),
        "Protobuf": _build_protobuf(world, records),
    }
    streams = {
        "flat JSON": _build_stream("flat", _FLAT),
        "nested JSON": _build_stream("nested", _NESTED),
        "Avro": _build_stream("avro", _FLAT, value=Avro(_AVRO)),
        "Protobuf": _build_stream("protobuf", _AS_TEXT, value=Protobuf("bench.Order", _build_descriptors())),
    }
    peers: Mapping[str, Callable[[DataFrame], DataFrame]] = {
        "flat JSON": lambda rows: _from_json(
            rows, "id STRING, version BIGINT, status STRING, amount STRING, at STRING"
        ),
        "nested JSON": lambda rows: _from_json(
            rows,
            "id STRING, version BIGINT, actor STRUCT<login: STRING>, repo STRUCT<id: BIGINT>, at STRING, "
            "payload STRUCT<size: BIGINT, commits: ARRAY<STRUCT<sha: STRING, distinct: BOOLEAN>>>",
        ),
        "Avro": _from_avro,
    }
    rows = []
    for name, raw in made.items():
        work = world.work(replace(bed, stream=streams[name]), [])
        mine = _select_columns(streams[name], parse_records(work, raw))
        peer = (
            peers[name](raw)
            if name in peers
            else _select_columns(streams["flat JSON"], parse_records(world.work(bed, []), made["flat JSON"]))
        )
        variants = {"Highwater": _sink(mine), _build_peer(name): _sink(peer)}
        rows.append(alternate(name, variants, rounds))
        print(f"  {name}: {rows[-1].ratio('Highwater', _build_peer(name)):.2f}", flush=True)
    for raw in made.values():
        raw.unpersist()
    bed.remove()
    return Result(
        name="o",
        title="Classifying by format",
        method=(
            f"{records:,} records in Spark's memory are decoded and classified, not written. `from_json` and "
            "`from_avro` check nothing; the peer of Protobuf is flat JSON, classified."
        ),
        rows=rows,
        targets=[
            *(
                Target(f"{name} against Spark's own function", _compute_ratio(rows, name), 0.7)
                for name in ("nested JSON", "Avro")
            ),
            Target("Protobuf against flat JSON", _compute_ratio(rows, "Protobuf"), 0.3),
        ],
    )


def _build_peer(name: str) -> str:
    return {"Avro": "from_avro", "Protobuf": "flat JSON"}.get(name, "from_json")


def _compute_ratio(rows: list[Row], name: str) -> float:
    [row] = [one for one in rows if one.case == name]
    return row.ratio("Highwater", _build_peer(name))


def _build_stream(name: str, fields: tuple[Field, ...], **more: Any) -> Stream:
    made = {"key": ("id",), "version": "version", "event_time": "at", "record_key": "ignore", "value": Json(), **more}
    return Stream(name, name, fields, answers=_ANSWERS, **made)


def _select_columns(stream: Stream, rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    fields = [F.col(f"field_{f.name}").alias(f.name) for f in select_column_fields(stream)]
    return rows.select(
        build_key(stream).alias("key"), build_event_time(stream).alias("event_time"), *fields, "reason", "detail"
    )


def _sink(rows: DataFrame) -> Callable[[int], float]:
    return lambda _: measure_seconds(lambda: rows.write.format("noop").mode("overwrite").save())


def _build_raw(world: World, rows: DataFrame) -> DataFrame:
    """Rows with `id` and `value` as rows of raw with origins, held in memory."""
    del world
    from pyspark.sql import functions as F

    raw = rows.selectExpr(
        "CAST(concat('o', id) AS BINARY) AS key", "value",
        "CAST(array() AS ARRAY<STRUCT<key: STRING, value: BINARY>>) AS headers", "'bench' AS origin_topic",
        "0 AS origin_partition", "id AS origin_offset", "timestamp'2026-01-01' AS origin_timestamp",
        "1767225600000 AS origin_timestamp_ms",
    ).withColumn(PROBLEM, F.lit(None).cast("string")).persist()  # fmt: skip
    raw.count()
    return raw


def _build_json(world: World, records: int, value: str) -> DataFrame:
    return _build_raw(world, world.spark.range(records).selectExpr("id", f"CAST(to_json({value}) AS BINARY) AS value"))


def _build_avro(world: World, records: int) -> DataFrame:
    from pyspark.sql.avro.functions import to_avro

    rows = world.spark.range(records).selectExpr("id", f"struct({_COLUMNS}) AS whole")
    return _build_raw(world, rows.withColumn("value", to_avro("whole", _AVRO)))


def _from_json(rows: DataFrame, schema: str) -> DataFrame:
    from pyspark.sql import functions as F

    return rows.select(F.from_json(F.col("value").cast("string"), schema).alias("read")).select("read.*")


def _from_avro(rows: DataFrame) -> DataFrame:
    from pyspark.sql.avro.functions import from_avro

    read: Column = from_avro("value", _AVRO)
    return rows.select(read.alias("read")).select("read.*")


def _build_descriptors() -> str:
    import base64

    from google.protobuf import descriptor_pb2 as pb

    file = pb.FileDescriptorProto(name="order.proto", package="bench", syntax="proto3")
    message = file.message_type.add(name="Order")
    kinds = {"id": 9, "version": 3, "status": 9, "amount": 9, "at": 9}
    for number, (name, kind) in enumerate(kinds.items(), 1):
        message.field.add(name=name, number=number, type=kind, label=1)
    return base64.b64encode(pb.FileDescriptorSet(file=[file]).SerializeToString()).decode()


def _build_protobuf(world: World, records: int) -> DataFrame:
    """A thousand messages, again and again."""
    import base64

    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    pool.Add(descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(_build_descriptors())).file[0])
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Order"))
    values = [
        (
            n,
            kind(
                id=f"o{n}", version=n, status="paid", amount=f"{n / 100:.2f}", at="2026-01-01T00:00:00Z"
            ).SerializeToString(),
        )
        for n in range(MESSAGES)
    ]
    few = world.spark.createDataFrame(values, "n BIGINT, value BINARY")
    return _build_raw(world, world.spark.range(records).selectExpr("id", f"id % {MESSAGES} AS n").join(few, "n"))
