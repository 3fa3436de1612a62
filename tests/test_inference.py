"""Declarations inferred from samples: the formats of public topics, and larger samples that are generated here."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.classifying import Classification, classify
from highwater.declaration import Answers, Deletes, Field, Limits, OnReject, Start, Stream
from highwater.declaration_parts import ON_REJECT, RESERVED_COLUMNS
from highwater.decoding import Schemas
from highwater.errors import ConfigurationError
from highwater.formats import Avro, BigEndian, Csv, Format, Json, KeyFormat, Lines, Protobuf, Raw, Text
from highwater.inference import Inferred, infer, infer_from_schema
from highwater.sample_counts import count_outcomes, count_sample, parse_record_lines
from highwater.sampling import compute_shares, needs_repeats, select_repeats
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from highwater.sources import Header, Key, Meta
from highwater.stream_files import load_streams
from highwater.stream_source import to_source

FOLDER = Path(__file__).parent / "formats"
AVRO = FOLDER / "10-avro-logical-types.schemas.json"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
BEGIN_MS = 1_767_225_600_000


def records_of(
    pairs: Iterable[tuple[Any, Any]], headers: Sequence[tuple[str, bytes]] = (), **more: Any
) -> list[KafkaRecord]:
    """Records from keys and values; what is no bytes is written as JSON."""

    def written(one: Any) -> Any:
        return one if one is None or isinstance(one, bytes) else json.dumps(one).encode()

    return [
        KafkaRecord(
            written(value), written(key), tuple(headers), "t", more.get("partition", 0), offset, BEGIN_MS + offset
        )
        for offset, (key, value) in enumerate(pairs)
    ]


def types(found: Inferred) -> dict[str, str]:
    return {one.name: one.type for one in found.stream.fields}


def kinds(found: Inferred, records: Sequence[KafkaRecord], schemas: Schemas | None = None) -> list[str]:
    return [classify(found.stream, one, schemas).kind for one in records]


def text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def field(found: Inferred, name: str) -> Field:
    return found.stream.find_field(name)


# --- Debezium


def change(number: int, op: str, at: int, **more: Any) -> dict[str, Any]:
    row = {
        "id": number,
        "customer": f"c{number}",
        "amount": base64.b64encode((1234 + at).to_bytes(2, "big")).decode(),
        "note": None if at % 3 else "gift ☕",
        "created": (BEGIN_MS + at) * 1000 + 456,
        "day": 20454 + at % 9,
        "updated_at": text(BEGIN + timedelta(seconds=at)),
    }
    source = {"version": "3.2.0", "connector": "postgresql", "ts_ms": BEGIN_MS + at, "lsn": 24_000_000 + at}
    before = None if op == "c" else row if op == "u" else {**dict.fromkeys(row), "id": number}
    after = None if op == "d" else row
    return {"before": before, "after": after, "source": {**source, **more}, "op": op, "ts_ms": BEGIN_MS + at + 90}


def changes() -> list[tuple[Any, Any]]:
    chance, live = random.Random(7), set[int]()
    found: list[tuple[Any, Any]] = []
    while len(found) < 200:
        number, at = chance.randrange(30), len(found)
        if number in live and chance.random() < 0.3:
            live.discard(number)
            found += [({"id": number}, change(number, "d", at)), ({"id": number}, None)]
        else:
            found.append(({"id": number}, change(number, "u" if number in live else "c", at)))
            live.add(number)
    return found


def test_debezium_changes_have_the_rows_columns_and_deletes() -> None:
    pairs = changes()
    records = records_of(pairs)
    found = infer("shop.public.orders", records)
    assert types(found) == {
        "id": "long",
        "customer": "string",
        "amount": "string",
        "note": "string",
        "created": "timestamp_ntz",
        "day": "date",
        "updated_at": "timestamp",
        "op": "string",
        "lsn": "long",
        "source_ts_ms": "timestamp",
    }
    stream = found.stream
    assert (stream.name, stream.value, stream.key, stream.version) == ("shop_public_orders", Json(), ("id",), "lsn")
    assert (stream.event_time, stream.record_key) == ("source_ts_ms", "ignore")
    assert stream.deletes == Deletes(field="op", values=("d",))
    assert field(found, "id").source == ("after.id", "before.id")
    assert (field(found, "created").unit, field(found, "day").unit) == ("us", "days")
    assert "Debezium" in found.reasons["envelope"]
    expected = ["tombstone" if value is None else "delete" if value["op"] == "d" else "event" for _, value in pairs]
    assert kinds(found, records) == expected


def mysql(*, files: Sequence[str]) -> list[tuple[Any, Any]]:
    """Changes with the position in a binary log, all within one second."""
    source = {"connector": "mysql", "ts_ms": BEGIN_MS, "row": 0, "server_id": 1}
    found = []
    for at in range(60):
        value = change(at % 7, "u" if at >= 7 else "c", at)
        value["source"] = {**source, "file": files[at * len(files) // 60], "pos": 4 + at}
        found.append(({"id": at % 7}, value))
    return found


def test_changes_of_mysql_are_ordered_by_file_and_position(tmp_path: Path) -> None:
    """Its time is often that of a second: of two changes within it the first would stay."""
    records = records_of(mysql(files=("binlog.000009", "binlog.000010")))
    found = infer("dbserver1.inventory.products", records)
    assert (found.stream.key, found.stream.version) == (("id",), ("log", "pos", "row"))
    assert field(found, "log").expression == "try_cast(substring_index(`file`, '.', -1) AS INT)"
    assert (field(found, "file").stored, field(found, "pos").type) == (False, "long")
    assert found.stream.deletes == Deletes(field="op", values=("d",))
    assert "binary log" in found.reasons["version"]
    assert "(log, pos, row)" in found.stream.answers.does_order_matter
    source = to_source(found.stream, summary="A test.", comments=found.comments, field_comments=found.field_reasons)
    assert loaded(source, tmp_path) == found.stream
    assert kinds(found, records) == ["event"] * 60


@pytest.mark.parametrize("files", [("binlog.000010", "binlog.000009"), ("binlog.000001", "other")])
def test_a_log_that_began_anew_orders_nothing(files: Sequence[str]) -> None:
    found = infer("dbserver1.inventory.products", records_of(mysql(files=files)))
    assert found.stream.version is None
    assert "source_ts_ms would contradict" in found.reasons["version"]


def test_a_truncate_amid_changes_takes_nothing_from_them() -> None:
    pairs = changes()
    truncate = {"before": None, "after": None, "source": change(1, "c", 300)["source"], "op": "t", "ts_ms": BEGIN_MS}
    whole, found = (infer("shop.public.orders", records_of(some)) for some in (pairs, [*pairs, (None, truncate)]))
    assert (found.stream.key, found.stream.version, found.stream.deletes) == (("id",), "lsn", whole.stream.deletes)
    assert found.reasons["key"].endswith("; 1 of the sample is of another form")
    assert kinds(found, records_of([(None, truncate)])) == ["reject"]


def test_a_change_without_a_log_position_is_ordered_by_the_databases_time() -> None:
    pairs = [({"id": n}, change(n, "c", n, lsn=None)) for n in range(20)]
    found = infer("t", records_of(pairs))
    assert (found.stream.version, found.stream.event_time) == ("source_ts_ms", "source_ts_ms")


def connect(kind: str, name: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "optional": True, **({"name": name} if name else {}), **more}


def test_the_schema_of_kafka_connect_gives_decimals_and_times() -> None:
    types_ = {
        "id": connect("int64"),
        "customer": connect("string"),
        "amount": connect("bytes", "org.apache.kafka.connect.data.Decimal", parameters={"scale": "2"}),
        "note": connect("string"),
        "created": connect("int64", "io.debezium.time.MicroTimestamp"),
        "day": connect("int32", "io.debezium.time.Date"),
        "updated_at": connect("string", "io.debezium.time.ZonedTimestamp"),
    }
    row = {"type": "struct", "optional": True, "fields": [{**kind, "field": name} for name, kind in types_.items()]}
    source = {"type": "struct", "fields": [{"type": "int64", "field": "ts_ms"}, {**connect("int64"), "field": "lsn"}]}
    whole = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {**source, "field": "source"},
        {"type": "string", "field": "op"},
    ]
    schema = {"type": "struct", "fields": whole}
    pairs = [
        ({"schema": {}, "payload": key}, None if value is None else {"schema": schema, "payload": value})
        for key, value in changes()
    ]
    records = records_of(pairs)
    found = infer("t", records)
    assert field(found, "amount") == Field(
        "amount", "decimal(38,2)", source="payload.after.amount", nullable=True, unscaled=True
    )
    assert field(found, "id").source == ("payload.after.id", "payload.before.id")
    assert (types(found)["created"], types(found)["day"], types(found)["updated_at"]) == (
        "timestamp_ntz",
        "date",
        "timestamp",
    )
    assert (found.stream.key, found.stream.version) == (("id",), "lsn")
    assert "reject" not in kinds(found, records)


# --- GitHub's events: nested, and polymorphic


def github_events(*, keyed: bool = False) -> list[tuple[Any, Any]]:
    payloads: list[Callable[[int], dict[str, Any]]] = [
        lambda n: {"push_id": n, "size": 1, "commits": [{"sha": "a", "message": "fix"}]},
        lambda _: {"action": "started"},
        lambda n: {"action": "opened", "issue": {"number": n, "title": "t"}},
        lambda n: {"ref": "main", "ref_type": "branch", "description": None, "master": str(n)},
        lambda n: {"forkee": {"id": n}, "size": "large"},
    ]
    found: list[tuple[Any, Any]] = []
    for number in range(200):
        event: dict[str, Any] = {
            "id": str(22_249_084_964 + number),
            "type": f"Kind{number % 5}",
            "actor": {"id": number % 7, "login": f"user{number % 7}"},
            "repo": {"id": 1_000_000 + number % 11, "name": "octo/hello"},
            "payload": payloads[number % 5](number),
            "public": number % 2 == 0,
            "created_at": text(BEGIN + timedelta(seconds=number)),
        }
        if number % 4 == 0:
            event["org"] = {"id": 9919, "login": "corp"}
        found.append((str(1_000_000 + number % 11).encode() if keyed or number % 3 else None, event))
    return found


def test_github_events_are_flat_beside_their_polymorphic_payload() -> None:
    records = records_of(github_events())
    found = infer("github", records)
    assert types(found) == {
        "id": "string",
        "type": "string",
        "actor_id": "long",
        "actor_login": "string",
        "repo_id": "long",
        "repo_name": "string",
        "payload": "json",
        "public": "boolean",
        "created_at": "timestamp",
        "org_id": "long",
        "org_login": "string",
    }
    assert (found.stream.key, found.stream.version, found.stream.event_time) == (("id",), None, "created_at")
    assert (found.stream.deletes, found.stream.record_key) == (None, "ignore")
    assert field(found, "org_login") == Field("org_login", "string", source="org.login", optional=True)
    assert kinds(found, records) == ["event"] * 200


def test_a_field_that_equals_every_record_key_is_the_key() -> None:
    found = infer("github", records_of(github_events(keyed=True)))
    assert (found.stream.key, found.stream.record_key) == (("repo_id",), "warn")


# --- telemetry


def telemetry() -> list[tuple[Any, Any]]:
    found = []
    for number in range(200):
        device = number % 8
        value: dict[str, Any] = {
            "device": f"s-{device}",
            "seq": 4700 + number,
            "ts": BEGIN_MS + 1000 * number,
            "temp": float("nan") if number % 10 == 0 else 21 if number % 10 == 1 else 21.5 + number,
            "hum": None if number % 6 == 0 else 45.5,
            "rssi": -70,
            "pos": None if number % 9 == 0 else {"lat": 52.5, "lon": 13 if number % 2 else 13.4},
        }
        if number % 5 == 0:
            value["fw"] = "1.2.0"
        found.append((bytes([0xA4, 0xCF, 0x12, 0xFF, 0, device]), value))
    return found


def test_telemetry_has_times_in_milliseconds_and_nan_as_null() -> None:
    records = records_of(telemetry())
    found = infer("sensors", records)
    assert types(found) == {
        "device": "string",
        "seq": "long",
        "ts": "timestamp",
        "temp": "double",
        "hum": "double",
        "rssi": "long",
        "pos_lat": "double",
        "pos_lon": "double",
        "fw": "string",
    }
    assert field(found, "temp").nan == "null"
    assert field(found, "ts").unit == "ms"
    assert (found.stream.key, found.stream.version, found.stream.event_time) == (("device",), "seq", "ts")
    assert kinds(found, records) == ["event"] * 200


ODD: dict[str, tuple[bytes | None, Any]] = {
    "without a key": (None, {**telemetry()[50][1], "device": "s-9"}),
    "a heartbeat": (None, {"type": "heartbeat", "ts": BEGIN_MS}),
    "a key of another form": (b"check", {"type": "check", "ts": BEGIN_MS}),
}


def test_an_odd_record_leaves_no_weaker_key_either() -> None:
    """An ID that is distinct in each record is a key only where the record key shows none."""
    pairs = [(key, {**value, "event_id": f"e{at}"}) for at, (key, value) in enumerate(telemetry())]
    found = infer("sensors", records_of([*pairs, (None, {**pairs[50][1], "event_id": "odd", "device": "s-9"})]))
    assert (found.stream.key, found.stream.version) == (("device",), "seq")


def test_optional_columns_that_few_records_lack_hide_no_odd_record() -> None:
    pairs = [
        (key, {**value, **{f"note{n}": None if at % 100 == n else "x" for n in range(4)}})
        for at, (key, value) in enumerate(telemetry())
    ]
    found = infer("sensors", records_of([*pairs, (None, {**pairs[50][1], "device": "s-9"})]))
    assert (found.stream.key, found.stream.version) == (("device",), "seq")


def test_a_version_that_some_records_lack_is_none() -> None:
    pairs = telemetry()
    for at in (20, 60, 150):
        pairs[at][1]["seq"] = None
    found = infer("sensors", records_of(pairs))
    assert (found.stream.key, found.stream.version) == (("device",), None)
    assert kinds(found, records_of(pairs)) == ["event"] * 200


@pytest.mark.parametrize("name", ODD)
def test_one_odd_record_takes_neither_key_nor_version_from_the_others(name: str) -> None:
    pairs = telemetry()
    found = infer("sensors", records_of([*pairs[:50], ODD[name], *pairs[50:]]))
    assert (found.stream.key, found.stream.version) == (("device",), "seq")
    assert kinds(found, records_of(pairs)) == ["event"] * 200


def test_many_odd_records_are_no_odd_ones() -> None:
    found = infer("sensors", records_of([*telemetry(), *[ODD["a heartbeat"]] * 10]))
    assert found.stream.key == ()


def test_a_number_that_falls_is_no_version() -> None:
    pairs = telemetry()
    pairs[150][1]["seq"] = 0
    found = infer("sensors", records_of(pairs))
    assert found.stream.version is None
    assert "seq would contradict the order of the offsets" in found.reasons["version"]


# --- orders with lines


def orders() -> list[tuple[Any, Any]]:
    found = []
    for number in range(200):
        order, version = f"o-{number % 40}", number // 40 + 1
        value: dict[str, Any] = {
            "order_id": order,
            "version": version,
            "status": "placed",
            "total": f"{number}.90",
            "updated_at": text(BEGIN + timedelta(seconds=number)),
            "lines": [
                {"sku": "A", "qty": 2, "price": "19.95"},
                {"sku": "B", "qty": 1, "price": 4.89, **({"gift": True} if number % 3 else {})},
            ][: number % 3],
        }
        if number % 4 == 0:
            value["coupon"] = None if number % 8 else "SPRING"
        found.append((order.encode(), value))
    return found


def test_order_lines_are_an_array_of_structs() -> None:
    records = records_of(orders())
    found = infer("orders.v1", records)
    line = (
        Field("sku", "string"),
        Field("qty", "long"),
        Field("price", "double", text=True),
        Field("gift", "boolean", optional=True),
    )
    assert field(found, "lines") == Field("lines", "array", of=Field("element", "struct", of=line))
    assert field(found, "total") == Field("total", "decimal(18,2)", text=True)
    assert field(found, "coupon") == Field("coupon", "string", optional=True, nullable=True)
    assert (found.stream.key, found.stream.version, found.stream.event_time) == (("order_id",), "version", "updated_at")
    assert found.stream.record_key == "warn"
    assert kinds(found, records) == ["event"] * 200


# --- schema registry

INVOICE = {
    "type": "record",
    "name": "Invoice",
    "namespace": "billing",
    "fields": [
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {
            "name": "amount",
            "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}],
            "default": None,
        },
        {"name": "issued_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "due", "type": {"type": "int", "logicalType": "date"}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["STANDARD", "CREDIT"]}},
        {"name": "checksum", "type": {"type": "fixed", "name": "Crc", "size": 4}},
    ],
}
INVOICE_2 = {**INVOICE, "fields": [*INVOICE["fields"], {"name": "currency", "type": "string", "default": "EUR"}]}
ORDER_JSON = {
    "type": "object",
    "required": ["order_id", "version", "amount", "placed_at"],
    "properties": {
        "order_id": {"type": "string"},
        "version": {"type": "integer"},
        "amount": {"type": "number"},
        "placed_at": {"type": "string", "format": "date-time"},
        "coupon": {"type": ["string", "null"]},
    },
}
GUID = "89791762-2336-4186-9674-299b90a802e2"
REGISTRY: dict[int | str, Schema] = {
    7: Schema(7, "AVRO", json.dumps(INVOICE)),
    8: Schema(8, "AVRO", json.dumps(INVOICE_2)),
    9: Schema(9, "AVRO", '"string"'),
    42: Schema(42, "JSON", json.dumps(ORDER_JSON)),
    GUID: Schema(None, "JSON", json.dumps(ORDER_JSON)),
}


def framed(schema_id: int, payload: bytes) -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big") + payload


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
    records = records_of(invoices())
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
    assert found.stream.record_key == "ignore"
    assert kinds(found, records, REGISTRY.get) == ["event"] * 200


def test_a_schema_that_is_unknown_yet_is_retried(tmp_path: Path) -> None:
    """Streams of a registry were declared without tiers, so that a person had to send such a record again."""
    found = infer("invoices", records_of(invoices()), schemas=REGISTRY.get)
    assert len(found.stream.tiers) > 0
    assert "retried" in found.stream.answers.what_on_failure
    assert infer("orders", records_of(orders())).stream.tiers == ()
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
    assert kinds(found, records, REGISTRY.get) == ["event"] * 200


def test_framed_values_without_a_registry_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="HIGHWATER_SCHEMA_REGISTRY_URL"):
        infer("invoices", records_of(invoices()))


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
    records = records_of((f"o{n:02d}".encode(), value) for n, value in enumerate(values))
    found = infer("orders", records, schemas=schemas)  # type: ignore[arg-type]
    assert (found.stream.value, types(found)) == (Protobuf(), {"id": "string", "qty": "long"})
    assert found.stream.key == ("id",)
    assert kinds(found, records, schemas) == ["event"] * 40  # type: ignore[arg-type]


def test_a_schema_alone_gives_columns_and_no_key() -> None:
    found = infer_from_schema("invoices", REGISTRY[8])
    assert (found.stream.value, found.stream.key, found.stream.version) == (Avro(), (), None)
    assert "no record" in found.reasons["format"]


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
    assert types(found) == {
        "id": "long",
        "at": "timestamp_ntz",
        "op": "string",
        "lsn": "long",
        "source_ts_ms": "timestamp",
    }
    assert field(found, "at") == Field("at", "timestamp_ntz", source="after.at", unit="us")


# --- other formats and envelopes


def test_lines_of_separated_values_have_columns_by_the_first_line() -> None:
    lines = [b"id,name,price,at", *(f"{n},n{n},{n}.5,2026-01-01T00:00:{n % 60:02d}Z".encode() for n in range(99))]
    records = records_of((None, line) for line in lines)
    found = infer("csv", records)
    assert found.stream.value == Csv(("id", "name", "price", "at"))
    assert types(found) == {"id": "long", "name": "string", "price": "double", "at": "timestamp"}
    assert (found.stream.key, found.stream.event_time) == (("id",), "at")
    assert kinds(found, records) == ["reject", *["event"] * 99]


def test_text_is_a_line_and_other_bytes_are_preserved() -> None:
    words = records_of(sentences())
    found = infer("log", words)
    assert isinstance(found.stream.value, Lines)
    assert (types(found), kinds(found, words)) == ({"line": "string", "record_key": "string"}, ["event"] * 20)
    bytes_ = records_of(opaque())
    found = infer("log", bytes_)
    assert (found.stream.value, types(found)) == (Raw(), {"value": "binary"})
    assert kinds(found, bytes_) == ["event"] * 20
    several = records_of((None, b"Traceback\n  line") for _ in range(20))
    found = infer("log", several)
    assert (found.stream.value, types(found)) == (Raw(), {"value": "string"})


def test_cloud_events_have_their_data_and_their_time() -> None:
    def event(number: int) -> dict[str, Any]:
        at = text(BEGIN + timedelta(seconds=number))
        data = {"total": number, "id": "inner"}
        return {"specversion": "1.0", "id": f"e{number}", "source": "/shop", "type": "order", "time": at, "data": data}

    records = records_of((None, event(n)) for n in range(50))
    found = infer("events", records)
    assert types(found) == {
        "specversion": "string",
        "id": "string",
        "source": "string",
        "type": "string",
        "time": "timestamp",
        "total": "long",
        "data_id": "string",
    }
    assert (found.stream.key, found.stream.event_time) == (("id",), "time")
    assert kinds(found, records) == ["event"] * 50


def test_cloud_events_in_headers_have_columns_too() -> None:
    records = [
        KafkaRecord(
            json.dumps({"total": n}).encode(),
            None,
            (
                ("ce_id", f"e{n}".encode()),
                ("ce_source", b"/shop"),
                ("ce_type", b"order"),
                ("ce_time", b"2026-01-01T00:00:00Z"),
            ),
            "t",
            0,
            n,
        )
        for n in range(50)
    ]
    found = infer("events", records)
    assert field(found, "ce_id") == Field("ce_id", "string", source=Header("ce_id"))
    assert (found.stream.key, found.stream.event_time) == (("ce_id",), "ce_time")
    assert kinds(found, records) == ["event"] * 50


def test_a_compacted_topic_is_ordered_by_its_offsets_and_its_tombstones_delete() -> None:
    pairs = [(f"k{n % 10}".encode(), None if n % 13 == 12 else {"name": f"n{n}"}) for n in range(100)]
    records = records_of(pairs)
    found = infer("profiles", records)
    assert (found.stream.key, found.stream.version) == (("record_key",), "record_offset")
    assert field(found, "record_key") == Field("record_key", "string", source=Key())
    assert field(found, "record_offset") == Field("record_offset", "long", source=Meta("offset"))
    assert found.stream.deletes == Deletes(tombstones=True)
    assert kinds(found, records) == ["delete" if value is None else "event" for _, value in pairs]


KEY_SCHEMAS: dict[int | str, Schema] = {
    70: Schema(70, "AVRO", '"string"'),
    71: Schema(71, "AVRO", '{"type": "record", "name": "K", "fields": [{"name": "id", "type": "long"}]}'),
    72: Schema(72, "JSON", "{}"),
    73: Schema(73, "PROTOBUF", 'syntax = "proto3"; message K { int64 id = 1; }'),
}


def key_70(number: int) -> bytes:
    return framed(70, b"\x04" + f"k{number}".encode())


@pytest.mark.parametrize(
    ("key_of", "key_format", "wanted"),
    [
        (lambda n: (1000 + n).to_bytes(8), BigEndian(), Field("record_key", "long", source=Key())),
        (lambda n: (-1 - n).to_bytes(8, signed=True), BigEndian(), Field("record_key", "long", source=Key())),
        (lambda n: n.to_bytes(4), BigEndian(4), Field("record_key", "long", source=Key())),
        (lambda n: f'"k{n}"'.encode(), Json(), Field("record_key", "string", source=Key())),
        (lambda n: {"id": n}, Json(), Field("id", "long", source=Key("id"))),
        (lambda n: {"schema": {}, "payload": f"k{n}"}, Json(), Field("record_key", "string", source=Key("payload"))),
        (key_70, Avro(), Field("record_key", "string", source=Key())),
        (lambda n: framed(71, bytes([2 * n])), Avro(), Field("id", "long", source=Key("id"))),
        (lambda n: framed(72, b'{"id": %d}' % n), Json(registry=True), Field("id", "long", source=Key("id"))),
        (lambda n: framed(73, b"\0\x08" + bytes([n + 1])), Protobuf(), Field("id", "long", source=Key("id"))),
    ],
    ids=["longs", "negative longs", "integers", "json texts", "json objects", "connect", "avro texts", "avro records",
         "framed json", "protobuf"],
)  # fmt: skip
def test_tombstones_delete_whatever_the_format_of_keys(
    key_of: Callable[[int], Any], key_format: KeyFormat, wanted: Field
) -> None:
    pairs = [(key_of(n % 10), None if n % 13 == 12 else {"name": f"n{n}"}) for n in range(100)]
    records = records_of(pairs)
    found = infer("profiles", records, schemas=KEY_SCHEMAS.get)
    assert found.stream.key_format == key_format
    assert field(found, wanted.name) == wanted
    assert (found.stream.key, found.stream.version) == ((wanted.name,), "record_offset")
    assert (found.stream.record_key, found.stream.deletes) == ("ignore", Deletes(tombstones=True))
    assert found.reasons["key_format"]
    deletes = ["delete" if value is None else "event" for _, value in pairs]
    assert kinds(found, records, KEY_SCHEMAS.get) == deletes
    held: dict[str, Any] = {}
    exec(to_source(found.stream, comments=found.comments), held)
    assert held["STREAM"] == found.stream


def test_a_key_in_avro_that_a_field_equals_is_taken_from_the_value() -> None:
    """The value is what people read; a declaration without key_format is simpler."""
    records = records_of((key_70(n), {"name": f"k{n}", "n": n}) for n in range(10))
    found = infer("profiles", records, schemas=KEY_SCHEMAS.get)
    assert (found.stream.key, found.stream.key_format, found.stream.record_key) == (("name",), Text(), "ignore")
    assert "key_format" not in found.reasons


def test_random_bytes_are_no_integers() -> None:
    chance = random.Random(3)
    records = records_of((chance.randbytes(8), {"name": f"n{n}", "id": n}) for n in range(50))
    found = infer("profiles", records)
    assert (found.stream.key, found.stream.key_format) == (("id",), Text())


def test_keys_in_several_partitions_are_not_ordered_by_offsets() -> None:
    pairs = [(f"k{n % 10}".encode(), None if n % 13 == 12 else {"name": f"n{n}"}) for n in range(100)]
    records = [*records_of(pairs), *records_of(pairs, partition=1)]
    found = infer("profiles", records)
    assert (found.stream.key, found.stream.version) == (("record_key",), None)
    assert "several partitions" in found.reasons["version"]


def test_names_are_legal_distinct_and_not_reserved() -> None:
    value = {"Key": 1, "key": 2, "user id": "a", "a.b": 1, "slice": 2, "a": {"b": 3, "B": 4}, 'quo"ted': 1, "": 2}
    records = records_of((None, value) for _ in range(5))
    found = infer("odd", records)
    assert [(one.name, one.source) for one in found.stream.fields] == [
        ("Key_value", "Key"),
        ("key_value_2", "key"),
        ("user_id", '["user id"]'),
        ("a_b", '["a.b"]'),
        ("slice_value", "slice"),
        ("a_b_2", "a.b"),
        ("a_B_3", "a.B"),
    ]
    assert found.left_out == ('quo"ted', "")
    assert kinds(found, records) == ["event"] * 5
    assert not RESERVED_COLUMNS & {one.name.lower() for one in found.stream.fields}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("n", [1, 2], Field("n", "long")),
        ("n", [1, 2.5], Field("n", "double")),
        ("n", [1, "2"], Field("n", "long", text=True)),
        ("n", [2**70], Field("n", "decimal(38,0)")),
        ("n", [True, False], Field("n", "boolean")),
        ("n", [True, 1], Field("n", "json")),
        ("n", [None, None], Field("n", "json", nullable=True)),
        ("n", [None, "a"], Field("n", "string", nullable=True)),
        ("n", [[1], [2, 3]], Field("n", "array", of=Field("element", "long"))),
        ("n", [[1], ["a"]], Field("n", "json")),
        ("n", [[1], {"a": 1}], Field("n", "json")),
        ("n", [[], []], Field("n", "json")),
        ("d", ["2026-01-01", "2026-12-31"], Field("d", "date")),
        ("d", ["2026-01-01", "2026-13-31"], Field("d", "string")),
        ("t", ["2026-01-01T00:00:00Z"], Field("t", "timestamp")),
        ("t", ["2026-01-01T00:00:00"], Field("t", "timestamp_ntz")),
        ("t", ["2026-01-01T00:00:00.123456789Z"], Field("t", "string")),
        ("createdAt", [1_767_225_600], Field("createdAt", "timestamp", unit="s")),
        ("createdAt", [1_767_225_600_000_000_000], Field("createdAt", "timestamp", unit="ns")),
        ("count", [1_767_225_600], Field("count", "long")),
        ("created_at", [12], Field("created_at", "long")),
        ("ttl_time", [1_767_225_600], Field("ttl_time", "long")),
    ],
)
def test_a_field_has_the_type_of_its_values(name: str, values: list[Any], expected: Field) -> None:
    records = records_of((None, {name: value, "more": 1}) for value in values)
    found = infer("types", records)
    declared = replace(field(found, name))
    assert declared == expected
    assert kinds(found, records) == ["event"] * len(values)


def test_a_sample_of_tombstones_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="--records"):
        infer("t", records_of([(b"a", None)]))


# --- the file


def loaded(source: str, folder: Path) -> Stream:
    (folder / "one.py").write_text(source)
    [found] = load_streams(folder).values()
    return found


def lines() -> list[tuple[Any, Any]]:
    return [(None, f"{n},n{n},{n}.5".encode()) for n in range(20)]


def sentences() -> list[tuple[Any, Any]]:
    return [(b"host", f"INFO started in {n} ms".encode()) for n in range(20)]


def opaque() -> list[tuple[Any, Any]]:
    return [(None, bytes([255, n])) for n in range(20)]


@pytest.mark.parametrize("sample", [changes, github_events, telemetry, orders, lines, sentences, opaque])
def test_the_file_declares_the_same_stream_in_the_format_of_ruff(
    sample: Callable[[], list[tuple[Any, Any]]], tmp_path: Path
) -> None:
    found = infer("shop", records_of(sample()))
    source = to_source(found.stream, comments=found.comments, field_comments=found.field_reasons)
    assert loaded(source, tmp_path) == found.stream
    assert "declaration_parts" not in source
    assert_formatted([source], tmp_path)


def test_numbers_in_text_are_text_and_the_reason_names_the_declaration_that_reads_numbers() -> None:
    records = records_of([(f"p-{n}", {"parcel": f"p-{n}", "weight": f"{n}.250"}) for n in range(40)])
    found = infer("parcels", records)
    assert types(found)["weight"] == "string"
    assert "text=True" in found.field_reasons["weight"]


def assert_formatted(sources: Sequence[str], folder: Path, *, rules: bool = True) -> None:
    """Ruff would change none of the files, and finds no fault in them."""
    (folder / "__init__.py").touch()  # else each would be a fault, as a file of no package
    files = [folder / f"file{number}.py" for number, _ in enumerate(sources)]
    for file, source in zip(files, sources, strict=True):
        file.write_text(source)
    configuration = ["--config", str(Path(__file__).parent.parent / "pyproject.toml")]
    commands = [["format", "--diff"]]
    # Any text may be a comment that looks like code, or has letters that look like others.
    commands += [["check", "--no-cache"]] if rules else []
    for command in commands:
        names = [*map(str, files)]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *configuration, *names],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: name not in RESERVED_COLUMNS | {"version", "event_time"}
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=90)
SCALARS = st.sampled_from(["string", "long", "integer", "double", "boolean", "date", "binary", "json", "decimal(12,2)"])
STEPS = st.from_regex(r'[^"\\\x00-\x1f\x7f]{1,20}', fullmatch=True)
SOURCES = st.one_of(
    st.none(),
    STEPS.map(lambda step: f'["{step}"]'),
    STEPS.map(Header),
    st.just(Key()),
    st.just(Key("payload.id")),
    st.just(Meta("offset")),
    st.just(("after.id", "before.id")),
)
FIELDS = st.builds(
    lambda name, kind, source, optional, nullable: Field(
        name, kind, source=source, optional=optional, nullable=nullable
    ),
    NAMES,
    SCALARS,
    SOURCES,
    st.booleans(),
    st.booleans(),
)
STRUCTS = st.builds(
    lambda name, members: Field(name, "array", of=Field("element", "struct", of=tuple(members))),
    NAMES,
    st.lists(FIELDS.map(lambda one: replace(one, source=None)), min_size=1, max_size=4, unique_by=lambda one: one.name),
)
FORMATS: st.SearchStrategy[Format] = st.sampled_from([Json(), Json(registry=True), Avro(), Protobuf()])


@st.composite
def declarations(draw: st.DrawFn) -> Stream:
    fields = draw(st.lists(st.one_of(FIELDS, STRUCTS), max_size=8, unique_by=lambda one: one.name))
    keyed = draw(st.booleans())
    more: dict[str, Any] = {}
    if keyed:
        fields = [Field("the_key", "string", source=Key()), Field("version", "long", source=Meta("offset")), *fields]
        fields = list({one.name: one for one in reversed(fields)}.values())[::-1]
        more = {"key": ("the_key",), "version": "version", "deletes": Deletes(tombstones=True)}
    if draw(st.booleans()):
        at = st.datetimes(datetime(2000, 1, 1), datetime(2030, 1, 1))  # noqa: DTZ001 - the zone is written beside it
        more["start"] = draw(st.one_of(st.just(Start.LATEST), at.map(lambda one: f"{one.isoformat()}Z")))
    if draw(st.booleans()):
        more["limits"] = Limits(max_wait=draw(st.timedeltas(timedelta(0), timedelta(days=3))))
        more["tiers"] = (timedelta(seconds=draw(st.integers(1, 9))), timedelta(minutes=5))
        more["on_reject"] = {**ON_REJECT, "malformed": OnReject.RETRY}
    deep = any(one.source == Key("payload.id") for one in fields)
    formats: list[KeyFormat] = [Json(), Avro(), Protobuf()] if deep else [Text(), BigEndian(4)]
    key_format = draw(st.sampled_from(formats))
    checks = ["warn", "ignore", "strict"] if key_format == Text() else ["ignore"]
    return Stream(
        name=draw(NAMES),
        topic="t.1",
        key_format=key_format,
        fields=tuple(fields),
        value=draw(FORMATS),
        description=draw(TEXTS),
        record_key=draw(st.sampled_from(checks)),
        answers=Answers(draw(TEXTS), draw(TEXTS), draw(TEXTS)),
        **more,
    )


@settings(max_examples=60)
@given(declarations(), TEXTS)
def test_any_declaration_is_the_same_when_its_file_is_loaded(stream: Stream, comment: str) -> None:
    source = to_source(
        stream,
        summary=comment,
        comments={"key": comment, "fields": comment, "deletes": comment},
        field_comments={one.name: comment for one in stream.fields[::2]},
    )
    held: dict[str, Any] = {}
    exec(compile(source, "stream.py", "exec"), held)
    assert held["STREAM"] == stream


def test_any_declaration_is_in_the_format_of_ruff(tmp_path: Path) -> None:
    sources: list[str] = []

    @settings(max_examples=60, database=None, derandomize=True)
    @given(declarations(), TEXTS)
    def collect(stream: Stream, comment: str) -> None:
        sources.append(
            to_source(
                stream,
                comments={"key": comment},
                field_comments={stream.fields[0].name: comment} if stream.fields else {},
            )
        )

    collect()
    assert_formatted(sources, tmp_path, rules=False)


# --- the six formats of public topics

PUBLIC: dict[str, tuple[tuple[str, ...], str | None, str | None, list[str]]] = {
    "01-debezium-postgres-plain": (("id",), "lsn", "source_ts_ms", ["event", "event", "delete", "tombstone"]),
    "05-github-events": (("id",), None, "created_at", ["event"] * 3),
    # The device sends seconds after it sent milliseconds, and one device has two record keys.
    "06-iot-telemetry": ((), None, "ts", ["event", "event", "reject"]),
    "09-order-lines": (("order_id",), "version", "updated_at", ["event"] * 3),
    "10-avro-logical-types": (("id",), None, "issued_at", ["event"] * 3),
    "12-json-schema-registry": (("order_id",), "version", "placed_at", ["event"] * 3),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_format_is_recognised_from_three_records(name: str) -> None:
    records = parse_record_lines((FOLDER / f"{name}.jsonl").read_text().splitlines(), name)
    known = dict(REGISTRY)
    known.update({int(n): Schema(int(n), "AVRO", json.dumps(one)) for n, one in json.loads(AVRO.read_text()).items()})
    found = infer(name, records, schemas=known.get)
    stream = found.stream
    expected = PUBLIC[name]
    assert (stream.key, stream.version, stream.event_time) == expected[:3]
    assert kinds(found, records, known.get) == expected[3]


# --- samples


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ({0: 100, 1: 100}, 10, {0: 5, 1: 5}),
        ({0: 2, 1: 100}, 10, {0: 2, 1: 8}),
        ({0: 0, 1: 3}, 10, {0: 0, 1: 3}),
        ({0: 9, 1: 9, 2: 9}, 2, {0: 1, 1: 1, 2: 0}),
        ({}, 5, {}),
    ],
)
def test_partitions_give_equal_shares_of_a_sample(sizes: dict[int, int], count: int, expected: dict[int, int]) -> None:
    assert compute_shares(sizes, count) == expected


def keyed(*keys: bytes | None, value: bytes = b"{}", first: int = 0) -> list[KafkaRecord]:
    return [KafkaRecord(value, key, (), "t", 0, first + number) for number, key in enumerate(keys)]


def test_repeats_have_the_keys_of_the_sample() -> None:
    """Sensors that send in turn gave a sample with each key once: an append-only stream without a key."""
    sample = keyed(b"a", b"b", b"c", b"d", b"e")
    assert needs_repeats(sample)
    found = select_repeats(sample, keyed(b"a", b"b", b"x", b"y", b"z", b"b", b"x", b"a", b"c"))
    assert [(record.offset, record.key) for record in found] == [(5, b"b"), (7, b"a")]


def test_a_busy_key_alone_is_no_evidence_of_repeats() -> None:
    sample = keyed(*(bytes([one]) for one in range(40)))
    found = select_repeats(sample, keyed(*[b"\0"] * 50, b"\x01", first=40))
    assert [record.key for record in found] == [b"\0"] * 3 + [b"\x01"]


def test_large_records_are_not_read_for_repeats() -> None:
    sample = keyed(*(bytes([one]) for one in range(40)))
    large = keyed(*(bytes([one]) for one in range(40)), value=bytes(20 * 2**20), first=40)
    assert len(select_repeats(sample, large)) == 3


@pytest.mark.parametrize("keys", [(b"a", None), (b"a", b"a"), ()])
def test_repeats_are_not_read_where_they_show_nothing(keys: tuple[bytes | None, ...]) -> None:
    assert not needs_repeats(keyed(*keys))


def test_a_sample_is_counted_with_an_example_of_each_reject() -> None:
    found = infer("orders.v1", records_of(orders()))
    faults = records_of([(b"o-1", b"{"), (b"o-1", b"["), (b"o-1", None), *orders()[:2]])
    counts = count_sample(found.stream, faults, None)
    assert (counts.events, counts.deletes, counts.tombstones, counts.rejected) == (2, 0, 1, 2)
    assert {group.reason for group in counts.rejects} == {"malformed"}
    assert min(group.offset for group in counts.rejects) == 0


def test_rejects_of_a_sample_are_counted_by_rule() -> None:
    """Details that differ in numbers alone are alike, so `amount1` and `amount2` were one row."""
    details = [("amount1", "rule amount1: not amount1 > 0"), ("amount2", "rule amount2: not amount2 > 0")]
    outcomes = [
        Classification("reject", "invalid", detail, rule=rule) for rule, detail in [*details, *details, details[0]]
    ]
    counts = count_outcomes(keyed(*[b"a"] * 5), outcomes)
    assert [(group.reason, group.rule, group.count) for group in counts.rejects] == [
        ("invalid", "amount1", 3),
        ("invalid", "amount2", 2),
    ]
    assert [row[0] for row in counts.rows[3:]] == ["reject: invalid, amount1", "reject: invalid, amount2"]


def test_records_are_read_from_lines() -> None:
    line = '{"key_hex": "61", "value_hex": null, "headers": [["h", "62"]], "timestamp_ms": 5}'
    [record] = parse_record_lines([line, ""], "t")
    assert (record.key, record.value, list(record.headers), record.timestamp_ms) == (b"a", None, [("h", b"b")], 5)
    with pytest.raises(ConfigurationError, match="line 1"):
        parse_record_lines(["{}"], "t")
