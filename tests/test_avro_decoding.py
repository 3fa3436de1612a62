"""Values of Avro, decoded by Python alone as Spark decodes them."""

from __future__ import annotations

import io
import json
from datetime import date
from decimal import Decimal
from typing import Any

import fastavro
import pytest

from highwater.classifying import classify
from highwater.declaration import Field
from highwater.decoding import decode_value
from highwater.formats import Avro, Json
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord, MisfitError
from tests.helpers.format_streams import IN_TEXT, MICRO, build_stream_of


def avro(kind: Any, value: Any, declared: Field, *, physical: Any = None) -> Any:
    """The value of a field `x` that is written in Avro, or the detail of the reject."""

    def schema(one: Any) -> dict[str, Any]:
        fields = [{"name": "x", "type": one}, {"name": "end", "type": "string"}]
        return {"type": "record", "name": "R", "fields": fields}

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema(physical or kind)), {"x": value, "end": "ö"})
    stream = build_stream_of(Avro(json.dumps(schema(kind))), declared, Field("end", "string"))
    found = classify(stream, KafkaRecord(out.getvalue()), None)
    return found.values["x"] if found.kind == "event" else found.detail


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


FAR = 2**62  # microseconds: the year 148,107


@pytest.mark.parametrize(
    ("kind", "physical", "value", "declared", "wanted"),
    [
        (logical("int", "time-millis"), "int", 43_200_123, Field("x", "time", unit="ms"), "12:00:00.123000"),
        (logical("long", "time-micros"), "long", 43_200_000_001, Field("x", "time", unit="us"), "12:00:00.000001"),
        (logical("int", "time-millis"), "int", 5, Field("x", "integer"), 5),
        (logical("int", "time-millis"), "int", 5, Field("x", "time"), "field x: it is no text"),
        (logical("string", "uuid"), "string", "7F1C-A", Field("x", "string"), "7F1C-A"),
        (logical("long", "timestamp-nanos"), "long", MICRO * 1000 + 1, Field("x", "timestamp", unit="ns"), MICRO),
        (logical("long", "timestamp-micros"), "long", -1, Field("x", "timestamp"), -1),
        (logical("long", "timestamp-micros"), "long", FAR, Field("x", "timestamp"), "field x: it is no text"),
        (logical("long", "timestamp-micros"), "long", FAR, Field("x", "long", source="y", optional=True), None),
        (logical("long", "timestamp-millis"), "long", 1, Field("x", "timestamp_ntz"), "field x: it is no text"),
        (logical("long", "local-timestamp-millis"), "long", 1, Field("x", "timestamp_ntz"), 1000),
        (logical("long", "local-timestamp-millis"), "long", 1, Field("x", "timestamp"), "field x: it is no text"),
        (logical("int", "date"), "int", -1, Field("x", "date"), date(1969, 12, 31)),
        (logical("bytes", "decimal", precision=4), "bytes", b"\xfb", Field("x", "decimal(9,2)"), Decimal(-5)),
        ("float", None, 0.1, Field("x", "double"), 0.10000000149011612),
        ("double", None, 0.1, Field("x", "float"), 0.10000000149011612),
        ("double", None, 1e39, Field("x", "float"), "field x: it does not fit float"),
        ("double", None, 0.5, Field("x", "decimal(4,2)"), "field x: it is no number"),
        ("double", None, 5.0, Field("x", "timestamp", unit="s"), "field x: it is no number"),
        ("string", None, "0.5", Field("x", "decimal(4,2)"), f"field x: {IN_TEXT}"),
        ("string", None, "half", Field("x", "decimal(4,2)"), "field x: it is no number"),
        ("int", None, 5, Field("x", "decimal(4,2)"), Decimal(5)),
        ("int", None, 5, Field("x", "double"), 5.0),
        ("bytes", None, b"abc", Field("x", "string"), "field x: it is no text"),
        ("string", None, "AAA=", Field("x", "binary"), b"\0\0"),
    ],
)  # fmt: skip
def test_avro_types_are_those_of_the_pipeline(
    kind: Any, physical: Any, value: Any, declared: Field, wanted: Any
) -> None:
    """A UUID was written again, times of day fitted no field, and a far time of an ignored field refused the record."""
    assert avro(kind, value, declared, physical=physical) == wanted


def test_a_decimal_with_more_digits_than_its_schema_is_not_rounded() -> None:
    """12345.67 in a decimal of four digits was read as 12350."""
    kind = logical("bytes", "decimal", precision=4, scale=2)
    found = avro(kind, (1_234_567).to_bytes(3, "big"), Field("x", "decimal(12,2)"), physical="bytes")
    assert "a decimal with more digits than 4" in found
    assert "without bytes" in avro(kind, b"", Field("x", "decimal(12,2)"), physical="bytes")


@pytest.mark.parametrize("digits", ["9" * 28 + "." + "9" * 10, "-0." + "0" * 37 + "1", "1" * 29])
def test_a_decimal_has_as_many_digits_as_its_type(digits: str) -> None:
    """One of more than 28 digits ended in `decimal.InvalidOperation`."""
    for kind in ("decimal(38,10)", "decimal(38,38)", "decimal(38,0)"):
        found = classify(build_stream_of(Json(), Field("x", kind)), KafkaRecord(f'{{"x": {digits}}}'.encode()), None)
        scale = int(kind.partition(",")[2][:-1])
        fits = len(digits.lstrip("-").partition(".")[0].lstrip("0")) <= 38 - scale
        fits &= len(digits.partition(".")[2]) <= scale
        assert (found.values == {"x": Decimal(digits)}) is fits, kind
        assert (found.kind == "event") is fits, kind


@pytest.mark.parametrize(
    ("scale", "declared", "value", "wanted"),
    [
        (2, Field("x", "decimal(38,2)"), 12_345, Decimal("123.45")),
        (2, Field("x", "decimal(12,2)"), -5, Decimal("-0.05")),
        (2, Field("x", "decimal(38,2)"), 10**38, "a decimal with more digits than 38"),
        (40, Field("x", "binary"), 1, b"\x01"),
    ],
)
def test_a_decimal_of_64_digits_is_one_of_38(scale: int, declared: Field, value: int, wanted: Any) -> None:
    """Kafka Connect writes 64 where it knows only the scale: each record of such a schema was rejected."""
    kind = logical("bytes", "decimal", precision=64, scale=scale)
    written = value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True)
    found = avro(kind, written, declared, physical="bytes")
    assert found == wanted if not isinstance(wanted, str) else wanted in found


def test_a_logical_type_that_cannot_be_is_ignored() -> None:
    """So Avro's specification says; a declared schema is refused for it, one of the registry is read."""
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 4}
    text = json.dumps({"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]})
    value = KafkaRecord(b"\0\0\0\0\x01\x02\x05")
    found = classify(build_stream_of(Avro(), Field("x", "binary")), value, lambda _: Schema(1, "AVRO", text))
    assert found.values == {"x": b"\x05"}


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("{nope", "cannot be read"),
        ('"string"', "it is no record"),
        ('{"type": "object"}', "it is no record"),
        ('["null", {"type": "record", "name": "N", "fields": []}]', "it is no record"),
        ('{"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}', "N is inside of itself"),
        ('{"type": "record", "name": "N", "fields": [{"name": "n", "type": "M"}]}', "cannot be read"),
    ],
)
def test_a_schema_of_the_registry_that_cannot_be_read_is_a_reject(text: str, reported: str) -> None:
    """It raised JSONDecodeError or fastavro's own errors."""
    found = classify(
        build_stream_of(Avro(), Field("x", "string")), KafkaRecord(b"\0\0\0\0\x01\0"), lambda _: Schema(1, "AVRO", text)
    )
    assert found.reason == "malformed"
    assert reported in str(found.detail)


def test_an_enum_of_avro_has_no_negative_symbols() -> None:
    """fastavro counted -1 from the end: the second reader called a record sound that Spark rejects."""
    kind = {"type": "enum", "name": "K", "symbols": ["A", "B"]}
    fields = [{"name": "a", "type": kind}, {"name": "b", "type": ["null", "K"]}]
    declared = Avro(json.dumps({"type": "record", "name": "R", "fields": fields}))
    assert decode_value(declared, KafkaRecord(b"\x02\x02\x00"), None) == {"a": "B", "b": "A"}
    for value in (b"\x01\x00", b"\x00\x02\x01", b"\x04\x00"):
        with pytest.raises(MisfitError, match="no Avro at byte"):
            decode_value(declared, KafkaRecord(value), None)
