"""Declarations inferred from the formats of public topics: change events, envelopes, telemetry and text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from highwater.declaration import Deletes, Field
from highwater.formats import Csv, Json, Lines, Raw
from highwater.inference import infer
from highwater.sample_counts import parse_record_lines
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from highwater.sources import Header
from highwater.stream_source import to_source
from tests.helpers.inferred import (
    BEGIN,
    BEGIN_MS,
    REGISTRY,
    build_records,
    change,
    changes,
    field,
    github_events,
    list_kinds,
    list_sentences,
    list_types,
    load_stream,
    opaque,
    orders,
    telemetry,
    text,
)

FOLDER = Path(__file__).parent / "formats"
AVRO = FOLDER / "10-avro-logical-types.schemas.json"


def test_debezium_changes_have_the_rows_columns_and_deletes() -> None:
    pairs = changes()
    records = build_records(pairs)
    found = infer("shop.public.orders", records)
    assert list_types(found) == {
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
    assert (stream.event_time, stream.record_key, stream.key_format) == ("source_ts_ms", "warn", Json())
    assert stream.deletes == Deletes(field="op", values=("d",))
    assert field(found, "id").source == ("after.id", "before.id")
    assert (field(found, "created").unit, field(found, "day").unit) == ("us", "days")
    assert "Debezium" in found.reasons["envelope"]
    expected = ["tombstone" if value is None else "delete" if value["op"] == "d" else "event" for _, value in pairs]
    assert list_kinds(found, records) == expected


@pytest.mark.parametrize("enveloped", [False, True])
def test_changes_of_mongodb_have_the_document_as_text(enveloped: bool) -> None:
    """The document had no column: the table had keys and times alone."""
    pairs: list[tuple[Any, Any]] = []
    for at in range(60):
        key, op = {"id": f'{{"$oid": "{at % 7}"}}'}, "d" if at % 20 == 19 else "u" if at >= 7 else "c"
        value: dict[str, Any] = {
            "before": None,
            "after": None if op == "d" else f'{{"_id": {at % 7}, "n": {at}}}',
            "op": op,
        }
        value |= {"source": {"ts_ms": BEGIN_MS + at, "ord": 1}, "ts_ms": BEGIN_MS + at}
        value["updateDescription"] = {"removedFields": None, "updatedFields": '{"n": 1}'} if op == "u" else None
        pairs.append((key, {"schema": None, "payload": value} if enveloped else value))
    records = build_records(pairs)
    found = infer("shop.orders", records)
    source = "payload.after" if enveloped else None
    assert field(found, "after") == Field("after", "string", source=source, optional=True, nullable=True)
    assert list_types(found)["updateDescription_updatedFields"] == "string"
    assert (found.stream.key, found.stream.version) == (("id",), "source_ts_ms")
    assert list_kinds(found, records) == ["delete" if one % 20 == 19 else "event" for one in range(60)]


def test_births_before_1980_are_days() -> None:
    """One birthday of the year 1960 made the column a number."""
    pairs = [({"id": at}, change(at, "c", at)) for at in range(20)]
    for at, (_, value) in enumerate(pairs):
        value["after"] |= {"dob": 365 * at - 25_000, "due": 30}
    found = infer("t", build_records(pairs))
    assert field(found, "dob") == Field("dob", "date", source="after.dob", unit="days")
    assert list_types(found)["due"] == "long"


def test_truncates_and_messages_of_a_log_are_no_evidence() -> None:
    """They have no row and no record key, so that one in thirty took the key away, and with it all deletes."""
    pairs = changes()
    others = [{"source": {"lsn": 1, "ts_ms": BEGIN_MS}, "op": op, "ts_ms": BEGIN_MS} for op in "tmtmtmtmtm"]
    found = infer("t", build_records([*pairs, *((None, one) for one in others)]))
    assert (found.stream.key, found.stream.version) == (("id",), "lsn")
    assert found.stream.deletes == Deletes(field="op", values=("d",))


def test_all_schemas_of_kafka_connect_are_read() -> None:
    """The schema of one record was that of all: those of an older one lacked a field, or had a wider number."""
    older = [{"field": "id", "type": "int32"}, {"field": "n", "type": "int64"}]
    newer = [{"field": "id", "type": "int64"}, {"field": "n", "type": "int32"}, {"field": "c", "type": "string"}]
    values = [{"id": at, "n": 2**40} for at in range(20)] + [{"id": 2**40, "n": at, "c": "x"} for at in range(20)]
    schemas = [{"type": "struct", "fields": one} for one in (older, newer) for _ in range(20)]
    pairs = [(None, {"schema": schema, "payload": one}) for schema, one in zip(schemas, values, strict=True)]
    for some in (pairs, pairs[::-1]):
        records = build_records(some)
        found = infer("t", records)
        assert list_types(found) == {"id": "long", "n": "long", "c": "string"}
        assert list_kinds(found, records) == ["event"] * 40


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
    records = build_records(mysql(files=("binlog.000009", "binlog.000010")))
    found = infer("dbserver1.inventory.products", records)
    assert (found.stream.key, found.stream.version) == (("id",), ("log", "pos", "row"))
    assert field(found, "log").expression == "try_cast(substring_index(`file`, '.', -1) AS INT)"
    assert (field(found, "file").mask, field(found, "pos").type) == ("drop", "long")
    assert found.stream.deletes == Deletes(field="op", values=("d",))
    assert "binary log" in found.reasons["version"]
    assert "(log, pos, row)" in found.stream.answers.does_order_matter
    source = to_source(found.stream, summary="A test.", comments=found.comments, field_comments=found.field_reasons)
    assert load_stream(source, tmp_path) == found.stream
    assert list_kinds(found, records) == ["event"] * 60


@pytest.mark.parametrize("files", [("binlog.000010", "binlog.000009"), ("binlog.000001", "other")])
def test_a_log_that_began_anew_orders_nothing(files: Sequence[str]) -> None:
    found = infer("dbserver1.inventory.products", build_records(mysql(files=files)))
    assert found.stream.version is None
    assert "source_ts_ms would contradict" in found.reasons["version"]


def test_a_truncate_amid_changes_takes_nothing_from_them() -> None:
    pairs = changes()
    truncate = {"before": None, "after": None, "source": change(1, "c", 300)["source"], "op": "t", "ts_ms": BEGIN_MS}
    whole, found = (infer("shop.public.orders", build_records(some)) for some in (pairs, [*pairs, (None, truncate)]))
    assert (found.stream.key, found.stream.version, found.stream.deletes) == (("id",), "lsn", whole.stream.deletes)
    assert found.reasons["key"].endswith("; 1 of the sample is of another form")
    assert list_kinds(found, build_records([(None, truncate)])) == ["reject"]


def test_a_change_without_a_log_position_is_ordered_by_the_databases_time() -> None:
    pairs = [({"id": n}, change(n, "c", n, lsn=None)) for n in range(20)]
    found = infer("t", build_records(pairs))
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
    records = build_records(pairs)
    found = infer("t", records)
    assert field(found, "amount") == Field(
        "amount", "decimal(38,2)", source="payload.after.amount", nullable=True, unscaled=True
    )
    assert field(found, "id").source == ("payload.after.id", "payload.before.id")
    assert (list_types(found)["created"], list_types(found)["day"], list_types(found)["updated_at"]) == (
        "timestamp_ntz",
        "date",
        "timestamp",
    )
    assert (found.stream.key, found.stream.version) == (("id",), "lsn")
    assert "reject" not in list_kinds(found, records)


def test_github_events_are_flat_beside_their_polymorphic_payload() -> None:
    records = build_records(github_events())
    found = infer("github", records)
    assert list_types(found) == {
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
    assert list_kinds(found, records) == ["event"] * 200


def test_telemetry_has_times_in_milliseconds_and_nan_as_null() -> None:
    records = build_records(telemetry())
    found = infer("sensors", records)
    assert list_types(found) == {
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
    assert list_kinds(found, records) == ["event"] * 200


def test_order_lines_are_an_array_of_structs() -> None:
    records = build_records(orders())
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
    assert list_kinds(found, records) == ["event"] * 200


def test_lines_of_separated_values_have_columns_by_the_first_line() -> None:
    lines = [b"id,name,price,at", *(f"{n},n{n},{n}.5,2026-01-01T00:00:{n % 60:02d}Z".encode() for n in range(99))]
    records = build_records((None, line) for line in lines)
    found = infer("csv", records)
    assert found.stream.value == Csv(("id", "name", "price", "at"))
    assert list_types(found) == {"id": "long", "name": "string", "price": "double", "at": "timestamp"}
    assert (found.stream.key, found.stream.event_time) == (("id",), "at")
    assert list_kinds(found, records) == ["reject", *["event"] * 99]


def test_a_line_that_names_the_columns_is_found_anywhere_and_more_than_once() -> None:
    """A producer writes it in front of each file: all columns were texts named c1, c2 and so on."""
    lines = [f"{n},n{n},{n / 2}".encode() for n in range(60)]
    lines[20] = lines[40] = b"id,full name,price"
    found = infer("csv", build_records((None, line) for line in lines))
    assert found.stream.value == Csv(("id", "full name", "price"))
    assert list_types(found) == {"id": "long", "full_name": "string", "price": "double"}


def test_a_value_of_a_line_that_is_always_empty_is_text() -> None:
    """It was JSON, so that a later value had quotation marks around it."""
    found = infer("csv", build_records((None, f"{n},,x".encode()) for n in range(20)))
    assert field(found, "c2") == Field("c2", "string", nullable=True)


def test_only_the_first_line_of_a_partition_or_one_that_is_there_again_names_columns() -> None:
    rows = [(n % 2, f"{n},n{n},{n / 2}".encode()) for n in range(60)]
    odd = b"unknown,bob,none"
    at_first, later = [(0, rows[0][1]), (1, odd), *rows[1:]], [*rows[:30], (1, odd), *rows[30:]]
    for lines, columns in ((at_first, ("unknown", "bob", "none")), (later, ("c1", "c2", "c3"))):
        found = infer("csv", [KafkaRecord(one, None, (), "t", part, at) for at, (part, one) in enumerate(lines)])
        assert found.stream.value == Csv(columns)


@pytest.mark.parametrize(
    ("line", "delimiter", "values"),
    [
        ("{n};Smith, J.;{n},50;01.02.2026", ";", 4),
        ("{n},5;{n},75", ";", 2),
        ("{n},text/html; charset=utf-8,x{n}", ",", 3),
        ("{n}\ta;b\tc;d", "\t", 3),
        ("x{n},a|b,c|d,e", ",", 4),
    ],
)
def test_the_delimiter_is_the_one_that_leaves_numbers_whole(line: str, delimiter: str, values: int) -> None:
    """The comma of a number came first: 12,50 was two values, and all semicolons were text."""
    found = infer("csv", build_records((None, line.format(n=n).encode()) for n in range(40)))
    assert isinstance(found.stream.value, Csv)
    assert (found.stream.value.delimiter, len(found.stream.value.columns)) == (delimiter, values)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('[{{"id": {n}}}, {{"id": 1}}]', "it is an array"),
        ('\ufeff{{"id": {n}, "a": 1}}', "Unexpected UTF-8 BOM"),
        ("{{'id': {n}, 'a': None}}", "property name enclosed in double quotes"),
        ("2026-01-01 00:00:{n:02d},123 [INFO] a.b - started", "lines of text"),
        ("<34>1 host{n} app - stopped; see above", "lines of text"),
        ("[2026-01-01 00:00:{n:02d}] started", "lines of text"),
        ("[INFO] started {n}", "lines of text"),
        ("[{n}, 2]", "it is an array"),
    ],
)
def test_commas_of_documents_sentences_and_log_times_delimit_nothing(value: str, reason: str) -> None:
    """Parts of an array, or the milliseconds of a time, became columns."""
    records = build_records((None, value.format(n=n).encode()) for n in range(40))
    found = infer("t", records)
    assert reason in found.reasons["format"]
    assert list_types(found) == {"line": "string"}
    assert list_kinds(found, records) == ["event"] * 40


def test_text_is_a_line_and_other_bytes_are_preserved() -> None:
    words = build_records(list_sentences())
    found = infer("log", words)
    assert isinstance(found.stream.value, Lines)
    assert (list_types(found), list_kinds(found, words)) == ({"line": "string", "record_key": "string"}, ["event"] * 20)
    bytes_ = build_records(opaque())
    found = infer("log", bytes_)
    assert (found.stream.value, list_types(found)) == (Raw(), {"value": "binary"})
    assert list_kinds(found, bytes_) == ["event"] * 20
    several = build_records((None, b"Traceback\n  line") for _ in range(20))
    found = infer("log", several)
    assert (found.stream.value, list_types(found)) == (Raw(), {"value": "string"})


def test_cloud_events_have_their_data_and_their_time() -> None:
    def event(number: int) -> dict[str, Any]:
        at = text(BEGIN + timedelta(seconds=number))
        data = {"total": number, "id": "inner"}
        return {"specversion": "1.0", "id": f"e{number}", "source": "/shop", "type": "order", "time": at, "data": data}

    records = build_records((None, event(n)) for n in range(50))
    found = infer("events", records)
    assert list_types(found) == {
        "specversion": "string",
        "id": "string",
        "source": "string",
        "type": "string",
        "time": "timestamp",
        "total": "long",
        "data_id": "string",
    }
    assert (found.stream.key, found.stream.event_time) == (("id",), "time")
    assert list_kinds(found, records) == ["event"] * 50


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
    assert list_kinds(found, records) == ["event"] * 50


def with_headers(value: bytes, *, times: int = 40) -> list[KafkaRecord]:
    """Records with a header in each, one in some, and one that is no text."""
    own = (("ce_id", b"e"), ("ce_type", b"t"), ("ce_source", b"s"), ("ce_specversion", b"1.0"))
    rare = [(("trace-id", b"t"),) if at % 2 else () for at in range(times)]
    return [
        KafkaRecord(value, None, (*own, ("ce_tenant", b"a%d" % at), ("raw", b"\xff"), *more), "t", 0, at)
        for at, more in enumerate(rare)
    ]


def test_headers_are_columns_where_they_are_the_event_and_are_named_elsewhere() -> None:
    """Extensions of CloudEvents, and all headers of records without a value, had no column and no mention."""
    found = infer("events", with_headers(b'{"total": 1}'))
    assert field(found, "ce_tenant") == Field("ce_tenant", "string", source=Header("ce_tenant"))
    assert "ce_specversion" not in list_types(found)
    assert found.headers == ("raw", "trace-id")
    records = [replace(one, headers=one.headers[4:]) for one in with_headers(b"")]
    found = infer("events", records)
    assert found.stream.fields == (
        Field("value", "binary"),
        Field("ce_tenant", "string", source=Header("ce_tenant")),
        Field("trace-id", "string", optional=True, source=Header("trace-id")),
    )
    assert (found.reasons["format"], found.headers) == ("the values are empty", ("raw",))
    assert list_kinds(found, records) == ["event"] * 40


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
    assert list_kinds(found, records, known.get) == expected[3]
