"""Usual records have the values and results that the expressions for all records give them."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from highwater.assets import decoding, fast_expressions, parsing
from highwater.assets.origins import PROBLEM
from highwater.declaration import Field
from highwater.formats import Avro
from highwater.sources import Header, Meta
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.assets.work import Work
    from highwater.declaration import Stream

NUMBERS = (
    "0", "-0", "12", "-7", "2147483647", "2147483648", "9007199254740993", "9223372036854775807", "9223372036854775808",
    "9" * 38, "9" * 39, "12.5", "12.50", "1.005", "100.0", "-0.0", "-0.00", "0.1", "1e2", "1E-2", "125e-1", "1e400",
    "1." + "0" * 40, "0." + "1" * 37, "0." + "1" * 45, "1767225600", "1767225600123", "-62135596800000", "3e38", "1e39",
)  # fmt: skip
TEXTS = (
    "", "text", "12", "-0", "007", "12.50", "1e3", " 12", "12\\n", "\\ue000number:1", "\\ud83d\\ude00", "\\ud83d",
    "ö", "true", "NaN", "2026-01-02", "2026-1-2", " 2026-01-02", "0000-01-01", "2026-02-30", "10:20:30", "10:20:30.500",
    "24:00:00", "2026-01-02T10:20:30Z", "2026-01-02t10:20:30.25z", "2026-01-02 10:20:30+02:00", "2026-01-02T10:20:30",
    "2026-01-02T10:20:30.1234567Z", "2026-01-02T10:20:30.1234560Z", "0001-01-01T00:00:00+01:00", "2026-01-02T10:20Z",
    "9999-12-31T23:59:59-01:00", "AAH/", "AAH", "A*", '{\\"a\\": 1}', "[1]", "end of the value",
)  # fmt: skip
OTHERS = (
    "null", "true", "false", "{}", "[]", '{"b": 1, "a": [1, null, "x.y"]}', '{"a": 2.50}', '{"a": 1e-7}', "[1e2, 1.5]",
    '{"a": 1, "a": 2}', '["12"]', '{"a": "1e5."}', '{"a": "\\ue000number:1e5."}', '["\\ue000", 1e5]',
    '["\\u2028/\\"\\\\"]',
    '{"a": 1e400}', '[-1e400]', '["Infinity"]', '{"a": 123456789012345678901234567890123456789}', '{"a": 0e0}',
)  # fmt: skip
WRITTEN = (*NUMBERS, *(f'"{text}"' for text in TEXTS), *OTHERS)
FIELDS = (
    Field("string", "string", optional=True),
    Field("long", "long", optional=True, nullable=True),
    Field("integer", "integer", optional=True),
    Field("text_long", "long", optional=True, text=True),
    Field("decimal", "decimal(12,2)", optional=True),
    Field("text_decimal", "decimal(12,2)", optional=True, text=True),
    Field("rounded", "decimal(4,1)", optional=True, rounded=True),
    Field("wide", "decimal(38,37)", optional=True),
    Field("whole", "decimal(38,0)", optional=True),
    Field("double", "double", optional=True),
    Field("float", "float", optional=True, nullable=True),
    Field("boolean", "boolean", optional=True),
    Field("timestamp", "timestamp", optional=True),
    Field("berlin", "timestamp", optional=True, zone="Europe/Berlin"),
    Field("local", "timestamp_ntz", optional=True),
    Field("seconds", "timestamp", optional=True, unit="s"),
    Field("millis", "timestamp", optional=True, unit="ms"),
    Field("nanos", "timestamp", optional=True, unit="ns"),
    Field("local_millis", "timestamp_ntz", optional=True, unit="ms"),
    Field("date", "date", optional=True),
    Field("days", "date", optional=True, unit="days"),
    Field("time", "time", optional=True),
    Field("binary", "binary", optional=True),
    Field("json", "json", optional=True),
    Field("default", "long", optional=True, default=5),
)
PATHS = (
    Field("deep", "string", source="a.b"),
    Field("either", "long", source=("a.c", "d")),
    Field("header", "string", source=Header("h"), optional=True),
    Field("offset", "long", source=Meta("offset")),
)
# Whole documents with a sound field and a fault, or what looks like one.
DOCUMENTS = (
    '{"a": {"b": "x", "c": 1}}', '{"a": {"b": "x"}, "d": 2}', ' {"a": {"b": "x", "c": 1}}',
    '{"a": {"b": "x", "c": 1}} x', '{"a": {"b": "x", "c": 1}}{}', '{"a": {"b": "x", "c": 1}},"end of the value"', '[]',
    '[{"a": {"b": "x", "c": 1}}]',
    '{"a": {"b": "x", "c": 1}, "z": 1e5}', '{"a": {"b": "x", "c": 1}, "z": 1, "z": 2}', '{"a": null, "d": 2}', "", "{",
    '{"a": {"b": "x", "c": 1}, "z": 01}', '{"a": {"b": "x", "c": 1}, "z": NaN}', '{"a": {"b": "x", "b": "y", "c": 1}}',
    '{"a": {"b": "\\ue000number:2", "c": 1e0}}', '{"a": {"b": "x", "c": 1}}],["', '\ufeff{"a": {"b": "x", "c": 1}}',
)  # fmt: skip


def stream_of(fields: tuple[Field, ...], **more: Any) -> Stream:
    return make_stream(
        "usual", fields=fields, key=(), version=None, event_time=None, record_key="ignore", lookup=None,
        transitions=None, first_version=None, **more,
    )  # fmt: skip


def classified(spark: SparkSession, stream: Stream, values: list[bytes]) -> tuple[list[Any], list[bool]]:
    """Detail and fields of each record, and whether it is a usual one."""
    from pyspark.sql import functions as F

    rows: list[Any] = [
        (at, b"k", value, [("h", b"1")], "t", 0, at, 1_767_225_600_000) for at, value in enumerate(values)
    ]
    raw = spark.createDataFrame(
        rows,
        "name BIGINT, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, "
        "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp_ms BIGINT",
    ).withColumn(PROBLEM, F.lit(None).cast("string"))
    work = cast("Work", SimpleNamespace(stream=stream, schemas=None, spark=spark))
    # A double as text, so that NaN is equal to itself; a time as a number, since Python has none beyond the year 9999.
    shown = {"double": "string", "float": "string", "timestamp": "string", "timestamp_ntz": "string", "date": "string"}
    columns = [
        F.col(f"field_{one.name}").cast(shown[one.type]) if one.type in shown else F.col(f"field_{one.name}")
        for one in stream.fields
    ]
    found = (
        parsing.parse_records(work, raw).select("name", "usual", "reason", "detail", *columns).orderBy("name").collect()
    )
    return [(row["reason"], row["detail"], *row[4:]) for row in found], [row["usual"] for row in found]


def ensure_same(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, stream: Stream, values: list[bytes]
) -> list[bool]:
    """Ensure that usual records have what the other expressions give them; returns which records are usual."""
    found, are_usual = classified(spark, stream, values)
    for module in (fast_expressions, decoding, parsing):
        monkeypatch.setattr(module, "has_usual_records", lambda _: False)
    wanted, none = classified(spark, stream, values)
    assert not any(none)
    unlike = [one for one in zip(values, found, wanted, strict=True) if one[1] != one[2]]
    assert unlike == []
    assert not any(row[1] for row, is_usual in zip(wanted, are_usual, strict=True) if is_usual)
    return are_usual


@pytest.mark.slow
def test_each_written_value_is_read_alike(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants are cast leniently: "12" is the number 12, 1.005 is the decimal 1.01, 2^63 is a double."""
    asked = [(one.name, written) for one in FIELDS for written in WRITTEN]
    # Only a record in which each other field is absent, and a default is there, is a usual one.
    values = [
        f'{{"{name}": {written}{"" if name == "default" else ", " + chr(34) + "default" + chr(34) + ": 1"}}}'.encode()
        for name, written in asked
    ]
    are_usual = dict(zip(asked, ensure_same(spark, monkeypatch, stream_of(FIELDS), values), strict=True))
    for name, written in (
        ("string", '"text"'), ("string", '"\\ue000number:1"'), ("long", "12"), ("long", "-0"), ("long", "null"),
        ("long", "9007199254740993"), ("text_long", '"12"'), ("decimal", "12.50"), ("decimal", "100.0"),
        ("decimal", "12"), ("text_decimal", '"12.50"'), ("rounded", "12.5"), ("wide", "0." + "1" * 37),
        ("whole", "9" * 38), ("double", "0.1"), ("double", "9007199254740993"), ("float", "0.1"), ("boolean", "true"),
        ("timestamp", '"2026-01-02T10:20:30Z"'), ("timestamp", '"2026-01-02t10:20:30.25z"'),
        ("berlin", '"2026-01-02T10:20:30"'), ("local", '"2026-01-02T10:20:30"'), ("seconds", "1767225600"),
        ("millis", "1767225600123"), ("date", '"2026-01-02"'), ("days", "12"), ("time", '"10:20:30.500"'),
        ("binary", '"AAH/"'), ("json", '{"b": 1, "a": [1, null, "x.y"]}'), ("json", '{"a": 2.50}'), ("json", "[]"),
    ):  # fmt: skip
        assert are_usual[name, written], (name, written)


@pytest.mark.slow
def test_each_document_is_read_alike(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [document.encode() for document in DOCUMENTS] + [b'{"a": {"b": "\xff", "c": 1}}']
    are_usual = ensure_same(spark, monkeypatch, stream_of(PATHS), values)
    assert are_usual[:3] == [True, True, True]


AVRO = {
    "string": "string", "bytes": "bytes", "int": "int", "long": "long", "float": "float", "double": "double",
    "boolean": "boolean", "decimal": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 3},
    "small": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 1},
    "date": {"type": "int", "logicalType": "date"}, "millis": {"type": "long", "logicalType": "timestamp-millis"},
    "micros": {"type": "long", "logicalType": "timestamp-micros"},
    "local": {"type": "long", "logicalType": "local-timestamp-micros"}, "null_string": ["null", "string"],
    "null_long": ["null", "long"], "enum": {"type": "enum", "name": "E", "symbols": ["A", "B"]},
    "inside": ["null", {"type": "record", "name": "In", "fields": [{"name": "s", "type": ["null", "string"]}]}],
}  # fmt: skip
AVRO_VALUES: dict[str, tuple[Any, ...]] = {
    "string": ("", "12", "text", "2026-01-02T10:20:30Z", "2026-01-02", "AAH/", "\ue000number:1"),
    "bytes": (b"", b"\0\xff"),
    "int": (0, -1, 2**31 - 1),
    "long": (0, 2**53 + 1, -(2**63), 1_767_225_600_123, 20_454),
    "float": (0.5, 3e38, float("nan"), float("inf")),
    "double": (0.1, -0.0, 1e300, float("nan"), float("-inf")),
    "boolean": (True, False),
    "decimal": (Decimal("1.005"), Decimal("-1.500"), Decimal("9999999.999")),
    "small": (Decimal("1.5"), Decimal("-99999.9"), Decimal("0.0")),
    "date": (0, -719_162, -719_163, 2_932_896, 2_932_897),
    "millis": (0, 1_767_225_600_123, -62_135_596_800_001, 253_402_300_800_000),
    "micros": (0, 1_767_225_600_123_456, -62_135_596_800_000_001, 253_402_300_800_000_000),
    "local": (0, 1_767_225_600_123_456, -62_135_596_800_000_001, 253_402_300_800_000_000),
    "null_string": (None, "x"),
    "null_long": (None, 5),
    "enum": ("A",),
    "inside": (None, {"s": None}, {"s": "x"}),
}
# Of each field the member that it is read from.
TYPED = (
    ("string", "string"), ("string", "timestamp"), ("string", "date"), ("string", "binary"), ("string", "long"),
    ("enum", "string"), ("bytes", "binary"), ("bytes", "string"), ("int", "integer"), ("int", "long"),
    ("int", "decimal(4,2)"),
    ("long", "long"), ("long", "integer"), ("long", "decimal(18,0)"), ("long", "double"), ("long", "float"),
    ("long", "string"), ("float", "float"), ("float", "double"), ("double", "double"), ("double", "float"),
    ("double", "long"), ("boolean", "boolean"), ("decimal", "decimal(12,3)"), ("decimal", "decimal(12,2)"),
    ("small", "decimal(12,2)"), ("small", "decimal(4,2)"), ("small", "double"), ("date", "date"),
    ("millis", "timestamp"),
    ("micros", "timestamp"), ("local", "timestamp_ntz"), ("local", "timestamp"), ("micros", "long"),
    ("null_string", "string"), ("null_long", "long"),
)  # fmt: skip


def avro(schema: dict[str, Any], value: Any) -> bytes:
    """A record whose logical types are written as plain numbers, since Python has no such times."""
    import fastavro

    out = io.BytesIO()
    plain = json.loads(json.dumps(schema))
    for one in plain["fields"]:
        if isinstance(one["type"], dict) and one["type"].get("logicalType") != "decimal":
            one["type"].pop("logicalType", None)
    fastavro.schemaless_writer(out, fastavro.parse_schema(plain), value)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("member", AVRO)
def test_each_type_of_avro_is_read_alike(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    """A path to a member of a record in Avro gives what the variant of the record gives, or the record is unusual."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": AVRO[member]}]}
    kinds = [kind for one, kind in TYPED if one == member]
    values = [avro(schema, {"x": value}) for value in AVRO_VALUES[member]]
    # Bytes after the value, too few of them, and a text that is not UTF-8.
    values += [b"", values[0][:-1], values[0] + b"\0", values[0] + decoding._AVRO_MARK, decoding._AVRO_MARK]
    values += [values[0] + decoding._AVRO_MARK + b"\0", b"\x02\xff", b"\x02\x02\xff", b"\x02\x02\x02\xff"]
    if member == "inside":
        fields = [(Field("x", "string", source="x.s"),), (Field("x", "string", source="x.s", nullable=True),)]
    else:
        fields = [(Field("x", kind, nullable=member.startswith("null")),) for kind in kinds]
    for some in fields:
        with monkeypatch.context() as patched:
            ensure_same(spark, patched, stream_of(some, value=Avro(json.dumps(schema))), values)


@pytest.mark.slow
def test_a_record_of_the_declared_types_in_avro_is_a_usual_one(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [("string", "string"), ("long", "long"), ("small", "decimal(12,2)"), ("micros", "timestamp")]
    fields = tuple(Field(one, kind) for one, kind in names)
    schema = {"type": "record", "name": "R", "fields": [{"name": one, "type": AVRO[one]} for one, _ in names]}
    values = [avro(schema, {"string": "x", "long": 1, "small": Decimal("1.5"), "micros": n}) for n in (0, -(10**17))]
    stream = stream_of(fields, value=Avro(json.dumps(schema)))
    assert ensure_same(spark, monkeypatch, stream, values) == [True, False]


@pytest.mark.slow
def test_the_options_of_from_avro_have_no_state(spark: SparkSession) -> None:
    """Sessions that look for cached rows evaluate them at once; `map(…)` then held a key twice, and a query failed."""
    from pyspark.sql import functions as F

    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": AVRO["double"]}]}
    rows = spark.range(1).select(F.lit(b"").alias("v")).select(decoding._from_avro(F.col("v"), json.dumps(schema)))
    plan = rows._explain_string(extended=True)  # type: ignore[operator]
    assert "from_avro(" in plan
    assert "PERMISSIVE" in plan
    assert "map(mode" not in plan
