"""Keys, versions, types and names inferred from samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from highwater.classifying import classify
from highwater.declaration import Deletes, Field
from highwater.declaration_parts import RESERVED_COLUMNS
from highwater.errors import ConfigurationError
from highwater.formats import Avro, BigEndian, Json, KeyFormat, Protobuf, Text
from highwater.inference import format_value, infer
from highwater.schemas import Schema
from highwater.sources import Key, Meta
from highwater.stream_source import to_source
from tests.helpers.inferred import BEGIN_MS, build_records, field, framed, github_events, list_kinds, telemetry


def test_a_field_that_equals_every_record_key_is_the_key() -> None:
    found = infer("github", build_records(github_events(keyed=True)))
    assert (found.stream.key, found.stream.record_key) == (("repo_id",), "warn")


ODD: dict[str, tuple[bytes | None, Any]] = {
    "without a key": (None, {**telemetry()[50][1], "device": "s-9"}),
    "a heartbeat": (None, {"type": "heartbeat", "ts": BEGIN_MS}),
    "a key of another form": (b"check", {"type": "check", "ts": BEGIN_MS}),
}


def test_an_odd_record_leaves_no_weaker_key_either() -> None:
    """An ID that is distinct in each record is a key only where the record key shows none."""
    pairs = [(key, {**value, "event_id": f"e{at}"}) for at, (key, value) in enumerate(telemetry())]
    found = infer("sensors", build_records([*pairs, (None, {**pairs[50][1], "event_id": "odd", "device": "s-9"})]))
    assert (found.stream.key, found.stream.version) == (("device",), "seq")


def test_optional_columns_that_few_records_lack_hide_no_odd_record() -> None:
    pairs = [
        (key, {**value, **{f"note{n}": None if at % 100 == n else "x" for n in range(4)}})
        for at, (key, value) in enumerate(telemetry())
    ]
    found = infer("sensors", build_records([*pairs, (None, {**pairs[50][1], "device": "s-9"})]))
    assert (found.stream.key, found.stream.version) == (("device",), "seq")


def test_a_version_that_some_records_lack_is_none() -> None:
    pairs = telemetry()
    for at in (20, 60, 150):
        pairs[at][1]["seq"] = None
    found = infer("sensors", build_records(pairs))
    assert (found.stream.key, found.stream.version) == (("device",), None)
    assert list_kinds(found, build_records(pairs)) == ["event"] * 200


@pytest.mark.parametrize("name", ODD)
def test_one_odd_record_takes_neither_key_nor_version_from_the_others(name: str) -> None:
    pairs = telemetry()
    found = infer("sensors", build_records([*pairs[:50], ODD[name], *pairs[50:]]))
    assert (found.stream.key, found.stream.version) == (("device",), "seq")
    assert list_kinds(found, build_records(pairs)) == ["event"] * 200


def test_many_odd_records_are_no_odd_ones() -> None:
    found = infer("sensors", build_records([*telemetry(), *[ODD["a heartbeat"]] * 10]))
    assert found.stream.key == ()


def test_records_without_a_key_are_the_reason_for_no_key() -> None:
    """The reason was that no field equals the record key, which one did."""
    pairs = [(b"u%d" % (n % 5) if n % 2 else None, {"user": f"u{n % 5}", "n": n % 3}) for n in range(40)]
    found = infer("clicks", build_records(pairs))
    assert found.stream.key == ()
    assert found.reasons["key"].startswith("none: 20 of 40 records have no record key; else user equals the record key")


def test_a_number_that_falls_is_no_version() -> None:
    pairs = telemetry()
    pairs[150][1]["seq"] = 0
    found = infer("sensors", build_records(pairs))
    assert found.stream.version is None
    assert "seq would contradict the order of the offsets" in found.reasons["version"]


def test_a_compacted_topic_is_ordered_by_its_offsets_and_its_tombstones_delete() -> None:
    pairs = [(f"k{n % 10}".encode(), None if n % 13 == 12 else {"name": f"n{n}"}) for n in range(100)]
    records = build_records(pairs)
    found = infer("profiles", records)
    assert (found.stream.key, found.stream.version) == (("record_key",), "record_offset")
    assert field(found, "record_key") == Field("record_key", "string", source=Key())
    assert field(found, "record_offset") == Field("record_offset", "long", source=Meta("offset"))
    assert found.stream.deletes == Deletes(tombstones=True)
    assert list_kinds(found, records) == ["delete" if value is None else "event" for _, value in pairs]


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
    records = build_records(pairs)
    found = infer("profiles", records, schemas=KEY_SCHEMAS.get)
    assert found.stream.key_format == key_format
    assert field(found, wanted.name) == wanted
    assert (found.stream.key, found.stream.version) == ((wanted.name,), "record_offset")
    assert (found.stream.record_key, found.stream.deletes) == ("ignore", Deletes(tombstones=True))
    assert found.reasons["key_format"]
    deletes = ["delete" if value is None else "event" for _, value in pairs]
    assert list_kinds(found, records, KEY_SCHEMAS.get) == deletes
    held: dict[str, Any] = {}
    exec(to_source(found.stream, comments=found.comments), held)
    assert held["STREAM"] == found.stream


@pytest.mark.parametrize(
    ("key_of", "key_format", "key"),
    [
        (key_70, Avro(), "name"),
        (lambda n: framed(71, bytes([2 * n])), Avro(), "id"),
        (lambda n: framed(72, b'{"id": %d}' % n), Json(registry=True), "id"),
        (lambda n: framed(73, b"\0\x08" + bytes([n])), Protobuf(), "id"),
        (lambda n: {"id": n}, Json(), "id"),
        (lambda n: f'"k{n}"'.encode(), Json(), "name"),
        (lambda n: n.to_bytes(8), BigEndian(), "id"),
        (lambda n: n.to_bytes(4), BigEndian(4), "id"),
    ],
    ids=["avro texts", "avro records", "framed json", "protobuf", "json objects", "json texts", "longs", "integers"],
)
def test_keys_that_are_no_text_are_compared_with_the_fields_that_they_equal(
    key_of: Callable[[int], Any], key_format: KeyFormat, key: str
) -> None:
    """They were declared as "ignore", from when only texts could be compared; the key is taken from the value."""
    pairs = [(key_of(n), {"name": f"k{n}", "id": n, "n": n}) for n in range(1, 10)]
    records = build_records(pairs)
    found = infer("profiles", records, schemas=KEY_SCHEMAS.get)
    assert (found.stream.key, found.stream.key_format, found.stream.record_key) == ((key,), key_format, "warn")
    assert field(found, key).source is None
    assert found.reasons["record_key"].startswith("checked")
    assert found.reasons["key_format"]
    strict, other = replace(found.stream, record_key="strict"), build_records([(pairs[1][0], pairs[0][1])])
    assert {classify(strict, one, KEY_SCHEMAS.get).kind for one in records} == {"event"}
    assert classify(strict, other[0], KEY_SCHEMAS.get).kind == "reject"
    held: dict[str, Any] = {}
    exec(to_source(found.stream, comments=found.comments), held)
    assert held["STREAM"] == found.stream


@pytest.mark.parametrize(
    "key_of",
    [lambda n: {"id": f"k{n}"}, lambda n: {"other": n}, lambda n: (100 + n).to_bytes(8)],
    ids=["of another type", "without the member", "other numbers"],
)
def test_keys_that_differ_from_the_fields_are_not_compared(key_of: Callable[[int], Any]) -> None:
    """The field goes with the key, or is distinct in each record, and the keys would be counted as other ones."""
    pairs = [(key_of(n % 9), {"id": n % 9, "text": f"n{n}"}) for n in range(18)]
    found = infer("profiles", build_records(pairs))
    assert found.stream.record_key == "ignore"
    assert found.stream.key_format == Text() or field(found, found.stream.key[0]).source is not None
    assert found.reasons["record_key"].startswith("not checked")


def test_random_bytes_are_no_integers() -> None:
    chance = random.Random(3)
    records = build_records((chance.randbytes(8), {"name": f"n{n}", "id": n}) for n in range(50))
    found = infer("profiles", records)
    assert (found.stream.key, found.stream.key_format) == (("id",), Text())


def test_keys_in_several_partitions_are_not_ordered_by_offsets() -> None:
    pairs = [(f"k{n % 10}".encode(), None if n % 13 == 12 else {"name": f"n{n}"}) for n in range(100)]
    records = [*build_records(pairs), *build_records(pairs, partition=1)]
    found = infer("profiles", records)
    assert (found.stream.key, found.stream.version) == (("record_key",), None)
    assert "several partitions" in found.reasons["version"]


def test_names_are_legal_distinct_and_not_reserved() -> None:
    value = {"Key": 1, "key": 2, "user id": "a", "a.b": 1, "slice": 2, "a": {"b": 3, "B": 4}, 'quo"ted': 1, "": 2}
    value["\ud83d"] = 1
    records = build_records((None, value) for _ in range(5))
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
    assert found.left_out == ('quo"ted', "", "\ud83d")
    assert list_kinds(found, records) == ["event"] * 5
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
        ("amount", [f"{10**20}.50"], Field("amount", "decimal(23,2)", text=True)),
        ("t", ["9999-12-31T23:59:59-01:00"], Field("t", "string")),
        ("t", ["0001-01-01T00:00:00+01:00"], Field("t", "string")),
    ],
)
def test_a_field_has_the_type_of_its_values(name: str, values: list[Any], expected: Field) -> None:
    records = build_records((None, {name: value, "more": 1}) for value in values)
    found = infer("types", records)
    declared = replace(field(found, name))
    assert declared == expected
    assert list_kinds(found, records) == ["event"] * len(values)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("t", ["2026-01-01T00:00:00.1234567Z"], "more than six digits"),
        ("t", ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00"], "several forms"),
        ("at", [1_767_225_600, 1_767_225_600_000], "several units (1 in s, 1 in ms)"),
        ("at", ["1767225600000", "1767225600001"], "numbers of ms in text"),
    ],
)
def test_times_that_no_timestamp_reads_say_why(name: str, values: list[Any], reason: str) -> None:
    """They were texts and numbers without a word."""
    found = infer("types", build_records((None, {name: value, "more": 1}) for value in values))
    assert reason in found.field_reasons[name]
    assert infer("types", build_records([(None, {"at": 5, "t": "x"})])).field_reasons == {}


@pytest.mark.parametrize(
    ("declared", "value", "shown"),
    [
        (Field("x", "json"), {"a": Decimal(1), "b": [Decimal("1.5"), None]}, '{"a": 1, "b": [1.5, null]}'),
        (Field("x", "json"), True, "true"),
        (Field("x", "boolean"), True, "True"),
        (Field("x", "array", of=Field("e", "timestamp")), [1_000_000], '["1970-01-01T00:00:01Z"]'),
        (Field("x", "map", of=Field("e", "binary")), {"a": b"\x01"}, '{"a": "0x01"}'),
        (Field("x", "struct", of=(Field("t", "timestamp_ntz"),)), {"t": 0}, '{"t": "1970-01-01T00:00:00"}'),
        (Field("x", "decimal(9,2)"), Decimal("-9.00"), "-9.00"),
    ],
)
def test_an_example_shows_the_value_as_it_is(declared: Field, value: Any, shown: str) -> None:
    """Numbers inside of JSON were shown as texts, and times inside of arrays as microseconds."""
    assert format_value(declared, value) == shown


@pytest.mark.parametrize("topic", ["retry", "kafka", "2026", "Orders.V1-x", "___"])
def test_every_topic_has_a_name_that_a_stream_may_have(topic: str) -> None:
    """The topic `retry` was refused, and the remedy was a file that did not exist."""
    assert infer(topic, build_records([(None, {"id": 1})])).stream.topic == topic


def test_a_sample_of_tombstones_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="--records"):
        infer("t", build_records([(b"a", None)]))
