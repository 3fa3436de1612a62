"""Declarations inferred from the schemas of a registry."""

from __future__ import annotations

import io
import json
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest

from highwater.declaration import Field
from highwater.errors import ConfigurationError
from highwater.formats import Avro, Json, Protobuf, Raw, Text
from highwater.inference import infer, infer_from_schema
from highwater.inference_schemas import build_avro_tree, connect_tree
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from highwater.stream_files import load_streams
from highwater.stream_source import to_source
from tests.helpers.inferred import (
    BEGIN,
    GUID,
    REGISTRY,
    build_records,
    field,
    framed,
    list_kinds,
    list_types,
    orders,
    text,
)


def avro(schema_id: int, value: Any) -> bytes:
    written = io.BytesIO()
    fastavro.schemaless_writer(written, fastavro.parse_schema(json.loads(REGISTRY[schema_id].text)), value)
    return framed(schema_id, written.getvalue())


def invoices() -> list[tuple[bytes, bytes]]:
    found = []
    for number in range(200):
        name = f"7f1c3c1e-0000-4000-8000-{number:012d}"
        value = {
            "id": name,
            "amount": None if number % 5 == 0 else Decimal(number).scaleb(-2),
            "issued_at": BEGIN + timedelta(seconds=number),
            "due": date(2026, 2, 1),
            "tags": {"a": "ö"} if number % 2 else {},
            "kind": "STANDARD",
            "checksum": b"\x00\xc0\xff\xee",
            "currency": "USD",
        }
        found.append((avro(9, name), avro(7 + number % 2, value)))
    return found


def test_avro_types_come_from_the_schemas_of_the_registry() -> None:
    records = build_records(invoices())
    found = infer("invoices", records, schemas=REGISTRY.get)
    assert found.stream.value == Avro()
    assert found.stream.fields == (
        Field("id", "string"),
        Field("amount", "decimal(12,2)", optional=True, nullable=True),
        Field("issued_at", "timestamp"),
        Field("due", "date"),
        Field("tags", "map", of=Field("value", "string")),
        Field("kind", "string"),
        Field("checksum", "binary"),
        Field("currency", "string", optional=True, default="EUR"),
    )
    assert (found.stream.key, found.stream.version, found.stream.event_time) == (("id",), None, "issued_at")
    assert (found.stream.record_key, found.stream.key_format) == ("warn", Avro())
    assert list_kinds(found, records, REGISTRY.get) == ["event"] * 200


def test_a_schema_that_is_unknown_yet_is_retried(tmp_path: Path) -> None:
    """Streams of a registry were declared without tiers, so that a person had to send such a record again."""
    found = infer("invoices", build_records(invoices()), schemas=REGISTRY.get)
    assert len(found.stream.tiers) > 0
    assert "retried" in found.stream.answers.what_on_failure
    assert infer("orders", build_records(orders())).stream.tiers == ()
    (tmp_path / "invoices.py").write_text(to_source(found.stream, summary="Invoices.", comments={}, field_comments={}))
    assert load_streams(tmp_path)["invoices"] == found.stream


def test_json_of_a_registry_is_framed_or_named_by_a_header() -> None:
    records = []
    for number in range(200):
        order: dict[str, Any] = {
            "order_id": f"o-{number % 20}",
            "version": number // 20,
            "amount": 12.5 if number % 2 else 1e-7,
        }
        order["placed_at"] = text(BEGIN + timedelta(seconds=number))
        if number % 3 == 0:
            order["coupon"] = None
        payload, key = json.dumps(order).encode(), order["order_id"].encode()
        guid = b"\x01" + bytes.fromhex(GUID.replace("-", ""))
        by_header = KafkaRecord(payload, key, (("__value_schema_id", guid),), "t", 0, number)
        records.append(KafkaRecord(framed(42, payload), key, (), "t", 0, number) if number % 2 else by_header)
    found = infer("orders", records, schemas=REGISTRY.get)
    assert found.stream.value == Json(registry=True)
    assert found.stream.fields == (
        Field("order_id", "string"),
        Field("version", "long"),
        Field("amount", "double"),
        Field("placed_at", "timestamp"),
        Field("coupon", "string", optional=True, nullable=True),
    )
    assert (found.stream.key, found.stream.version, found.stream.event_time) == (("order_id",), "version", "placed_at")
    assert list_kinds(found, records, REGISTRY.get) == ["event"] * 200


def test_json_schemas_have_maps_recursion_and_integers_of_any_size() -> None:
    """A recursive schema gave twelve columns of one name, a map was text, and larger integers were all rejected."""
    node: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
    node["properties"]["next"] = {"$ref": "#/definitions/Node"}
    parts: dict[str, Any] = {"id": {"type": "string"}, "at": {"$ref": "#/definitions/Node"}, "more": {"$ref": "#"}}
    parts |= {"big": {"type": "integer"}, "scores": {"type": "object", "additionalProperties": {"type": "number"}}}
    schema = {"type": "object", "properties": parts, "required": [*parts], "definitions": {"Node": node}}
    schemas = {3: Schema(3, "JSON", json.dumps(schema))}.get
    place = {"city": "Turin", "next": None}
    values = [
        {"id": f"o{n}", "at": place, "more": None, "big": 2**63 + n, "scores": {f"k{n}": n / 2}} for n in range(40)
    ]
    records = build_records((one["id"].encode(), framed(3, json.dumps(one).encode())) for one in values)
    found = infer("orders", records, schemas=schemas)  # type: ignore[arg-type]
    assert list_types(found) == {
        "id": "string",
        "at_city": "string",
        "at_next": "json",
        "more": "json",
        "big": "decimal(38,0)",
        "scores": "map",
    }
    assert list_kinds(found, records, schemas) == ["event"] * 40  # type: ignore[arg-type]


def test_framed_values_without_a_registry_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="HIGHWATER_SCHEMA_REGISTRY_URL"):
        infer("invoices", build_records(invoices()))


def test_protobuf_types_come_from_the_schema() -> None:
    text_ = """
        syntax = "proto3";
        import "google/protobuf/timestamp.proto";
        message Order {
          string id = 1; int32 qty = 2; uint64 big = 3; double price = 4; bytes raw = 5;
          google.protobuf.Timestamp at = 6; repeated Line lines = 7; map<string, int64> counts = 8;
          optional string note = 9; Place place = 10; Kind kind = 11;
        }
        message Line { string sku = 1; int64 qty = 2; }
        message Place { string city = 1; }
        enum Kind { UNKNOWN = 0; }
    """
    found = infer_from_schema("orders", Schema(1, "PROTOBUF", text_))
    assert found.stream.value == Protobuf()
    assert found.stream.fields == (
        Field("id", "string"),
        Field("qty", "integer"),
        Field("big", "decimal(20,0)"),
        Field("price", "double", nan="null"),
        Field("raw", "binary"),
        Field("at", "timestamp", optional=True),
        Field("lines", "array", of=Field("element", "struct", of=(Field("sku", "string"), Field("qty", "long")))),
        Field("counts", "map", of=Field("value", "long")),
        Field("note", "string", optional=True),
        Field("place_city", "string", source="place.city", optional=True),
        Field("kind", "string"),
    )


def test_protobuf_values_name_their_message() -> None:
    schema = 'syntax = "proto3"; message Other { string a = 1; } message Order { string id = 1; int64 qty = 2; }'
    # The second message of the file: one index, which is 1, each as a zig-zag varint.
    values = [framed(5, b"\x02\x02" + b"\x0a\x03" + f"o{n:02d}".encode() + b"\x10" + bytes([n + 1])) for n in range(40)]
    schemas = {5: Schema(5, "PROTOBUF", schema)}.get
    records = build_records((f"o{n:02d}".encode(), value) for n, value in enumerate(values))
    found = infer("orders", records, schemas=schemas)  # type: ignore[arg-type]
    assert (found.stream.value, list_types(found)) == (Protobuf(), {"id": "string", "qty": "long"})
    assert found.stream.key == ("id",)
    assert list_kinds(found, records, schemas) == ["event"] * 40  # type: ignore[arg-type]


def test_a_schema_alone_gives_columns_and_no_key() -> None:
    found = infer_from_schema("invoices", REGISTRY[8])
    assert (found.stream.value, found.stream.key, found.stream.version) == (Avro(), (), None)
    assert "no record" in found.reasons["format"]


def test_a_schema_of_an_unknown_type_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"schema 3 .* a type that no format reads.*type XML"):
        infer_from_schema("t", Schema(3, "XML", "<x/>"))


def test_values_and_keys_of_an_unknown_type_of_schema_are_bytes() -> None:
    schemas = {3: Schema(3, "XML", "<x/>")}.get
    records = build_records((framed(3, b"<k>%d</k>" % n), framed(3, b"<x>%d</x>" % n)) for n in range(40))
    found = infer("t", records, schemas=schemas)  # type: ignore[arg-type]
    assert (found.stream.value, found.stream.key_format) == (Raw(), Text())


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "record", "name": "N", "fields": [{"name": "n", "type": ["null", "N"]}]}, "N is inside of itself"),
        ("string", "it is no record"),
        ([{"type": "record", "name": "N", "fields": []}, "null"], "it is no record"),
    ],
)
def test_values_of_an_avro_schema_that_nothing_reads_are_bytes(schema: Any, problem: str) -> None:
    """The declaration of a recursive schema rejected every record, and another one ended the command."""
    schemas = {3: Schema(3, "AVRO", json.dumps(schema))}.get
    records = build_records((b"k%d" % n, framed(3, b"\x00")) for n in range(40))
    found = infer("t", records, schemas=schemas)  # type: ignore[arg-type]
    assert found.stream.value == Raw()
    assert "AVRO schema 3" in found.reasons["format"]
    assert problem in found.reasons["format"]
    assert list_kinds(found, records, schemas) == ["event"] * 40  # type: ignore[arg-type]


def test_decimals_of_64_digits_are_of_38() -> None:
    """Kafka Connect writes 64 where it knows only the scale: such a column was bytes."""
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 2}
    record = {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]}
    assert build_avro_tree(Schema(1, "AVRO", json.dumps(record))).members == (Field("x", "decimal(38,2)"),)
    parameters = {"scale": "2", "connect.decimal.precision": "64"}
    logical = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal", "parameters": parameters}
    assert connect_tree(logical, "x") == Field("x", "decimal(38,2)", unscaled=True)


def test_decimals_of_kafka_connect_are_base64_or_numbers_as_the_documents_have_them() -> None:
    """With `decimal.format=NUMERIC` each record was rejected: numbers were no base64."""
    parameters = {"scale": "2", "connect.decimal.precision": "10"}
    name = "org.apache.kafka.connect.data.Decimal"
    kind = {"type": "bytes", "name": name, "parameters": parameters}
    kinds = {"x": kind, "a": {"type": "array", "items": kind}}
    connect = {"type": "struct", "fields": [{**one, "field": at} for at, one in kinds.items()]}
    number = {"type": "number", "title": name, "connect.type": "bytes", "connect.parameters": parameters}
    schema = {"type": "object", "properties": {"x": number, "a": {"type": "array", "items": number}}}
    schemas = {3: Schema(3, "JSON", json.dumps(schema))}.get
    for one, unscaled in ((1.25, False), ("AQ==", True)):
        value = {"x": one, "a": [one]}
        for wrapped in (
            json.dumps({"schema": connect, "payload": value}).encode(),
            framed(3, json.dumps(value).encode()),
        ):
            records = build_records((None, wrapped) for _ in range(20))
            found = infer("t", records, schemas=schemas)  # type: ignore[arg-type]
            assert field(found, "x").unscaled is unscaled
            assert field(found, "a").members[0].unscaled is unscaled
            assert list_kinds(found, records, schemas) == ["event"] * 20  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "payload", "expected"),
    [
        ({"type": "string"}, "x", Field("payload", "string")),
        ({"type": "int32", "optional": True}, None, Field("payload", "integer", nullable=True)),
        (
            {"type": "array", "items": {"type": "string"}},
            ["x"],
            Field("payload", "array", of=Field("element", "string")),
        ),
    ],
)
def test_a_payload_of_kafka_connect_that_is_no_row_is_one_column(schema: Any, payload: Any, expected: Field) -> None:
    """It had no column, or one named `element` that no record had."""
    records = build_records((None, {"schema": schema, "payload": payload}) for _ in range(20))
    found = infer("t", records)
    assert found.stream.fields == (expected,)
    assert list_kinds(found, records) == ["event"] * 20


def test_times_of_a_schema_are_of_any_year() -> None:
    """The end of validity in the year 9999, and days before 1980, were implausible in a unit that the schema says."""
    kinds = {
        "org.apache.kafka.connect.data.Timestamp": 253_402_214_400_000,
        "io.debezium.time.MicroTimestamp": -(10**15),
    }
    members = [{"type": "int64", "field": f"t{at}", "name": name} for at, name in enumerate(kinds)]
    value = {f"t{at}": number for at, number in enumerate(kinds.values())}
    schema = {"type": "struct", "fields": members}
    records = build_records((None, {"schema": schema, "payload": value}) for _ in range(20))
    assert list_kinds(infer("t", records), records) == ["event"] * 20


def test_debezium_in_avro_is_recognised_by_the_schema() -> None:
    row = {
        "type": "record",
        "name": "Value",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "at", "type": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}},
        ],
    }
    source = [{"name": "ts_ms", "type": "long"}, {"name": "lsn", "type": ["null", "long"], "default": None}]
    envelope = {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "source", "type": {"type": "record", "name": "Source", "fields": source}},
            {"name": "op", "type": "string"},
        ],
    }
    found = infer_from_schema("t", Schema(1, "AVRO", json.dumps(envelope)))
    assert list_types(found) == {
        "id": "long",
        "at": "timestamp_ntz",
        "op": "string",
        "lsn": "long",
        "source_ts_ms": "timestamp",
    }
    any_year = date(1, 1, 1), date(9999, 12, 31)
    assert field(found, "at") == Field("at", "timestamp_ntz", source="after.at", unit="us", plausible=any_year)
