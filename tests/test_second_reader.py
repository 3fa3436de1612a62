"""The second reader: what becomes of records of six formats, by Python alone."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.classifying import Classification, classify
from highwater.column_comparison import matches_stored
from highwater.declaration import Field
from highwater.decoding import decode_value
from highwater.errors import DeclarationError
from highwater.field_rules import find_field_problems
from highwater.format_rules import to_java_pattern, to_python_pattern
from highwater.formats import Avro, Csv, Json, Lines, Protobuf, Raw
from highwater.protobuf import compile_schema
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord, MisfitError
from highwater.sources import Key, Meta
from tests.helpers.format_streams import FORMATS, find_schema, records


def outcomes(name: str) -> list[Classification]:
    return [classify(FORMATS[name], one, find_schema) for one in records(name)]


def reported(name: str, *fields: str) -> list[tuple[Any, ...]]:
    return [(one.kind, one.key, *(one.values.get(field) for field in fields)) for one in outcomes(name)]


def test_debezium() -> None:
    assert reported("01-debezium-postgres-plain", "amount", "note", "op", "lsn") == [
        ("event", "1001", Decimal("12.34"), None, "c", 24023128),
        ("event", "1001", Decimal("20.00"), "gift ☕", "u", 24023300),
        ("delete", "1001", None, None, "d", 24023400),
        ("tombstone", None, None, None, None, None),
    ]
    first = outcomes("01-debezium-postgres-plain")[0]
    assert (first.values["created"], first.event_time) == (1767225600123456, 1767225600200000)


def test_a_truncate_is_found_by_debeziums_envelope_alone() -> None:
    """With schema and payload; not where `op` is a field of something else, or means anything in an accepted record."""
    plain = FORMATS["01-debezium-postgres-plain"]
    fields = (
        Field("id", "long", source=("payload.after.id", "payload.before.id")),
        Field("op", "string", source="payload.op"),
        Field("lsn", "long", source="payload.lsn"),
    )
    nested = replace(plain, fields=fields, event_time=None)
    found = classify(nested, KafkaRecord(b'{"payload":{"op":"t","lsn":7}}'), None)
    assert (found.reason, found.rule) == ("invalid", "op.truncate")
    assert "current still has its keys" in str(found.detail)

    other = replace(nested, fields=(Field("id", "long"), Field("op", "string"), Field("lsn", "long")))
    found = classify(other, KafkaRecord(b'{"op":"t","lsn":7}'), None)
    assert (found.reason, found.rule, found.detail) == ("malformed", None, "field id: it is missing")

    fields = (*fields[1:], Field("x", "long", source="payload.after.x", optional=True))
    events = replace(nested, fields=fields, key=(), version=None, deletes=None)
    assert classify(events, KafkaRecord(b'{"payload":{"op":"t","lsn":7}}'), None).kind == "event"


def test_nested_events() -> None:
    assert reported("05-github-events", "type", "actor_login", "repo_id", "org_login") == [
        ("event", "22249084964", "PushEvent", "octo", 1296269, None),
        ("event", "22249084965", "WatchEvent", "octo", 1296269, "corp"),
        ("event", "22249084966", "IssuesEvent", "octo", 1296269, None),
    ]
    assert outcomes("05-github-events")[0].version is None


def test_telemetry() -> None:
    assert reported("06-iot-telemetry", "temp", "hum", "lat") == [
        ("event", "s-17", 21.500000000000004, 1e-05, 52.520008),
        ("event", "s-17", None, None, -0.0),
        ("reject", None, 21.0, 45.5, None),
    ]
    assert outcomes("06-iot-telemetry")[2].detail == "field ts: it is no plausible number of ms"


def test_order_lines() -> None:
    found = outcomes("09-order-lines")
    assert [[tuple(line.values()) for line in one.values["lines"]] for one in found] == [
        [("A", 2, Decimal("19.95"), None), ("B", 1, Decimal("10.00"), None)],
        [("A", 2, Decimal("4.90"), True)],
        [],
    ]


def test_avro() -> None:
    assert reported("10-avro-logical-types", "amount", "note", "kind", "currency", "tags", "seen_at") == [
        ("event", KEY, Decimal("1234.56"), None, "STANDARD", "EUR", {"a": "ö"}, 1767225600000001),
        ("event", KEY, None, "", "CREDIT", "EUR", {}, 1767225600000999),
        ("event", KEY, Decimal("-0.05"), "n", "STANDARD", "USD", {}, -1),
    ]


IN_TEXT = "it is a number in text, which text=True declares"
KEY = "7f1c3c1e-0000-4000-8000-000000000001"


def test_registered_json() -> None:
    assert reported("12-json-schema-registry", "version", "amount", "coupon") == [
        ("event", "o-17", 1, Decimal("12.5"), None),
        ("event", "o-17", 2, Decimal("12.5"), None),
        ("event", "o-17", 3, Decimal("0.0000001"), None),
    ]


def test_an_unknown_schema_is_temporary() -> None:
    record = replace(records("10-avro-logical-types")[0], value=b"\x00\x00\x00\x00\x63rest")
    found = classify(FORMATS["10-avro-logical-types"], record, find_schema)
    assert (found.kind, found.reason, found.detail) == ("reject", "unresolved", "the registry does not know schema 99")


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_byte_never_breaks_the_reader(name: str, data: st.DataObject) -> None:
    """A reject or values; no other error."""
    record = data.draw(st.sampled_from([one for one in records(name) if one.value]))
    assert record.value is not None
    at = data.draw(st.integers(0, len(record.value) - 1))
    changed = record.value[:at] + bytes([data.draw(st.integers(0, 255))]) + record.value[at + 1 :]
    assert classify(FORMATS[name], replace(record, value=changed), find_schema).kind in {"event", "delete", "reject"}


WRITTEN = {
    "type": "record",
    "name": "Everything",
    "fields": [
        {"name": "s", "type": "string"},
        {"name": "l", "type": "long"},
        {"name": "d", "type": ["null", "double"]},
        {"name": "b", "type": "bytes"},
        {"name": "a", "type": {"type": "array", "items": "int"}},
        {"name": "m", "type": {"type": "map", "values": "boolean"}},
    ],
}
READ = (
    Field("s", "string"),
    Field("l", "long"),
    Field("d", "double", nullable=True),
    Field("b", "binary"),
    Field("a", "array", of=Field("e", "integer")),
    Field("m", "map", of=Field("v", "boolean")),
)


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "s": st.text(),
            "l": st.integers(-(2**63), 2**63 - 1),
            "d": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "b": st.binary(),
            "a": st.lists(st.integers(-(2**31), 2**31 - 1)),
            "m": st.dictionaries(st.text(), st.booleans()),
        }
    )
)
def test_values_of_an_avro_encoder_are_decoded(values: dict[str, Any]) -> None:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(WRITTEN), values)
    stream = replace(FORMATS["05-github-events"], fields=READ, key=(), event_time=None, value=Avro(json.dumps(WRITTEN)))
    found = classify(stream, KafkaRecord(out.getvalue()), None)
    assert (found.kind, found.values) == ("event", values)


def lined(value: Any, *fields: Field) -> Any:
    return replace(FORMATS["05-github-events"], fields=fields, key=(), event_time=None, value=value)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (b"a,1,true\n", {"x": "a", "n": 1, "ok": True}),
        (b'"a,""b",2,false', {"x": 'a,"b', "n": 2, "ok": False}),
        (b"a,,true", "field n: it is null"),
        (b"a,1", "2 values in place of 3"),
        (b"a,1,true\nb,2,true", "the value has more than one line"),
        (b"\xff,1,true", "the value is not UTF-8 at byte 0"),
        (b"a,1.5,true", "field n: it is no whole number of the type"),
        (b"a,1,yes", "field ok: it is neither true nor false"),
    ],
)
def test_lines_of_separated_values(line: bytes, wanted: Any) -> None:
    stream = lined(Csv(("x", "n", "ok")), Field("x", "string"), Field("n", "integer"), Field("ok", "boolean"))
    found = classify(stream, KafkaRecord(line), None)
    assert (found.values if found.kind == "event" else found.detail) == wanted


def test_lines_by_a_pattern() -> None:
    pattern = r"(?P<level>[A-Z]+) (?:\[(?P<thread>\w+)\] )?(?P<text>.*)"
    stream = lined(
        Lines(pattern), Field("level", "string"), Field("thread", "string", optional=True), Field("text", "string")
    )
    values = {"level": "WARN", "thread": None, "text": "disk is full"}
    assert classify(stream, KafkaRecord(b"WARN disk is full\r\n"), None).values == values
    assert classify(stream, KafkaRecord(b"WARN [main] x"), None).values["thread"] == "main"
    assert classify(stream, KafkaRecord(b"nothing"), None).detail == "the line does not match the declared pattern"


def test_bytes_that_are_not_parsed() -> None:
    stream = lined(Raw(), Field("body", "binary", source="value"), Field("text", "string", source="value"))
    assert classify(stream, KafkaRecord(b"\xc3\xa9"), None).values == {"body": b"\xc3\xa9", "text": "é"}
    assert classify(stream, KafkaRecord(b"\xff"), None).detail == "field text: it is missing"


def test_a_schema_with_a_reference() -> None:
    """Its types are defined where they are used first."""
    from highwater.decoding import decode_value
    from highwater.schemas import SchemaReference

    money = json.dumps({"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]})
    order = json.dumps({"type": "record", "name": "shop.Order", "fields": [{"name": "sum", "type": "shop.Money"}]})
    schema = Schema(1, "AVRO", order, (SchemaReference("shop.Money", "money", 1, money),))
    assert decode_value(Avro(), KafkaRecord(b"\x00\x00\x00\x00\x01\x0e"), lambda _: schema) == {"sum": {"cents": 7}}
    with pytest.raises(MisfitError, match="bytes follow"):
        decode_value(Avro(), KafkaRecord(b"\x00\x00\x00\x00\x01\x0e\x00"), lambda _: schema)


def json_field(kind: str, **declared: Any) -> Any:
    return lined(Json(), Field("x", kind, **declared))


MICRO = 1_767_225_600_000_000
BERLIN = "Europe/Berlin"


class Refused(str):
    """A part of the detail of a reject."""

    __slots__ = ()


# A field, what is written in JSON, and the value or the reject.
WRITTEN_JSON: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "an exponent beyond every type is no null": (
        "long",
        {"nullable": True},
        "1e99999999999999999999",
        Refused("fit long"),
    ),
    "a small exponent beyond every type": ("double", {}, "1e-500", Refused("does not fit double")),
    "a text with an underscore": ("integer", {"text": True}, '"1_000"', Refused("the text is no number")),
    "a text with spaces": ("integer", {"text": True}, '" 5 "', Refused("the text is no number")),
    "a text with other digits": ("integer", {"text": True}, '"\u0663"', Refused("the text is no number")),
    "a long in an array of integers": (
        "array",
        {"of": Field("e", "integer")},
        "[1, 2147483648]",
        Refused("x[1]: it does not"),
    ),
    "too many digits in a struct": (
        "array",
        {"of": Field("e", "struct", of=(Field("p", "decimal(4,2)"),))},
        '[{"p": 1.234}]',
        Refused("x[0].p: it has more"),
    ),
    "null in an array": ("array", {"of": Field("e", "integer")}, "[1, null]", Refused("x[1]: it is null")),
    "null in an array of nullable ones": ("array", {"of": Field("e", "integer", nullable=True)}, "[null]", [None]),
    "a missing member": (
        "map",
        {"of": Field("e", "struct", of=(Field("p", "long"),))},
        '{"k": {}}',
        Refused('x["k"].p: it is'),
    ),
    "a time without punctuation": ("timestamp", {}, '"20260101T000000Z"', Refused("it is no time")),
    "a time by its week": ("timestamp", {}, '"2026-W01-1T00:00:00Z"', Refused("it is no time")),
    "a time with a seventh digit": ("timestamp", {}, '"2026-01-01T00:00:00.1234567Z"', Refused("it is no time")),
    "a time with zeros behind": ("timestamp", {}, '"2026-01-01T00:00:00.1234560000Z"', MICRO + 123456),
    "a zone without a colon": ("timestamp", {}, '"2026-01-01 00:00:00+0100"', MICRO - 3_600_000_000),
    "a zone of hours alone": ("timestamp", {}, '"2026-01-01 00:00:00.5-05"', MICRO + 18_000_500_000),
    "a zone that is too far": ("timestamp", {}, '"2026-01-01T00:00:00+18:01"', Refused("there is no zone +18:01")),
    "a year beyond 9999": ("timestamp", {}, '"9999-12-31T23:59:59-01:00"', Refused("outside of the years 1 to 9999")),
    "an hour that the clock skips": ("timestamp", {"zone": BERLIN}, '"2026-03-29T02:30:00"', 1_774_747_800_000_000),
    "an hour that is there twice": ("timestamp", {"zone": BERLIN}, '"2026-10-25T02:30:00"', 1_792_888_200_000_000),
    "a local time with a zone": ("timestamp_ntz", {}, '"2026-01-01T00:00:00Z"', Refused("it has a zone")),
    "a local time": ("timestamp_ntz", {}, '"2026-01-01T00:00:00.25"', MICRO + 250_000),
    "a date without punctuation": ("date", {}, '"20260228"', Refused("it is no date")),
    "a time of day with other digits": ("time", {}, '"\u0661\u0662:00:00"', Refused("no time of day")),
    "a time of day": ("time", {}, '"12:00:00.10"', "12:00:00.100000"),
    "half a millisecond of a day": ("time", {"unit": "ms"}, "1.5", "00:00:00.001500"),
    "half a microsecond of a day": ("time", {"unit": "us"}, "1.5", Refused("no time of day in us")),
    "a day too long": ("time", {"unit": "ms"}, "86400000", Refused("no time of day in ms")),
    "base64 with another character": ("binary", {}, '"AAAA*"', Refused("it is no base64")),
    "base64 without padding": ("binary", {}, '"AAA"', b"\0\0"),
    "base64 with white space": ("binary", {}, '"AA A\\n="', b"\0\0"),
    "base64 with white space in its padding": ("binary", {}, '"AA= ="', Refused("it is no base64")),
    "an unscaled value without bytes": ("decimal(12,2)", {"unscaled": True}, '""', Refused("it has 0 bytes")),
    "an unscaled value of 17 bytes": (
        "decimal(38,0)",
        {"unscaled": True},
        '"' + "A" * 22 + 'E="',
        Refused("it has 17 bytes"),
    ),
    "an unscaled value as a number": ("decimal(12,2)", {"unscaled": True}, "12.5", Refused("it is no text")),
    "a negative unscaled value": ("decimal(12,2)", {"unscaled": True}, '"+w=="', Decimal("-0.05")),
    "a half is rounded up": ("decimal(4,2)", {"rounded": True}, "1.005", Decimal("1.01")),
    "a negative half is rounded away from zero": ("decimal(4,2)", {"rounded": True}, "-1.005", Decimal("-1.01")),
    "rounded beyond the type": ("decimal(4,2)", {"rounded": True}, "99.995", Refused("it does not fit decimal(4,2)")),
    "the largest number in 32 bits as it is shown": ("float", {}, "3.4028235e38", 3.4028234663852886e38),
    "half way to infinity in 32 bits": ("float", {}, "3.4028235677973366164e38", Refused("it does not fit float")),
    "a number that is not rounded twice": ("float", {}, "16777217.00000000000001", 16777218.0),
    "half of a surrogate pair": ("string", {}, '"\\ud83d"', Refused("half of a surrogate pair")),
    "half of a surrogate pair inside": (
        "json",
        {},
        '{"a": ["\\ud83d"]}',
        Refused("field x has half of a surrogate pair"),
    ),
    "a declared name twice": ("string", {}, '"a", "x": "b"', Refused("field x occurs twice")),
    "a name twice inside": ("json", {}, '{"a": 1, "a": 1}', Refused("field x has the name 'a' twice")),
    "an ignored exponent of 5,000 digits": ("string", {}, '"a", "y": 1e' + "9" * 5000, "a"),
    "an ignored name twice": ("string", {}, '"a", "y": {"b": 1, "b": 2}', "a"),
    "an ignored half of a surrogate pair": ("string", {}, '"a", "y": ["\\ud83d"]', "a"),
    "NaN that no field takes": ("string", {}, '"a", "y": [NaN]', Refused("NaN, which no field takes")),
    "NaN in a text": ("string", {}, '"a", "y": "NaN"', "a"),
}


@pytest.mark.parametrize("name", WRITTEN_JSON)
def test_json_is_read_as_strictly_as_by_the_pipeline(name: str) -> None:
    """Python's parsers took some of these for other values, or for none; each differed from the pipeline."""
    kind, declared, written, wanted = WRITTEN_JSON[name]
    found = classify(json_field(kind, **declared), KafkaRecord(f'{{"x": {written}}}'.encode()), None)
    if isinstance(wanted, Refused):
        assert found.reason == "malformed"
        assert wanted in str(found.detail)
    else:
        assert (found.kind, found.values) == ("event", {"x": wanted})


def test_another_encoding_is_no_json() -> None:
    for encoding in ("utf-16", "utf-32", "utf-8-sig"):
        assert classify(json_field("string"), KafkaRecord('{"x": "a"}'.encode(encoding)), None).reason == "malformed"


def test_nan_beside_a_field_that_takes_it() -> None:
    stream = lined(Json(), Field("x", "double", nan="null"), Field("y", "long", optional=True))
    assert classify(stream, KafkaRecord(b'{"x": NaN, "z": -Infinity}'), None).values == {"x": None, "y": None}
    assert classify(stream, KafkaRecord(b'{"x": 1, "y": NaN}'), None).detail == "field y: it is NaN"


@pytest.mark.parametrize(
    ("kind", "written", "key"),
    [
        ("decimal(12,2)", "12.5", "12.50"),
        ("decimal(18,8)", "1e-8", "0.00000001"),
        ("boolean", "true", "true"),
        ("long", "-7", "-7"),
        ("date", '"2026-01-01"', "2026-01-01"),
        ("timestamp", '"2026-01-01T01:00:00.120+01:00"', "2026-01-01 00:00:00.12"),
        ("timestamp_ntz", '"0987-01-01T00:00:00"', "0987-01-01 00:00:00"),
    ],
)
def test_a_key_is_the_text_that_spark_writes(kind: str, written: str, key: str) -> None:
    """A decimal lacked its zeros, and a time was a number of microseconds."""
    stream = replace(json_field(kind), key=("x",), record_key="strict")
    assert classify(stream, KafkaRecord(f'{{"x": {written}}}'.encode(), key.encode()), None).key == key
    assert classify(stream, KafkaRecord(f'{{"x": {written}}}'.encode(), b"other"), None).reason == "malformed"


def test_a_key_with_half_of_a_pair_is_a_reject() -> None:
    """It raised UnicodeEncodeError."""
    stream = replace(json_field("string"), key=("x",), record_key="strict")
    assert classify(stream, KafkaRecord(b'{"x": "\\ud83d"}', b"?"), None).reason == "malformed"


# --- Avro


def avro(kind: Any, value: Any, declared: Field, *, physical: Any = None) -> Any:
    """The value of a field `x` that is written in Avro, or the detail of the reject."""

    def schema(one: Any) -> dict[str, Any]:
        fields = [{"name": "x", "type": one}, {"name": "end", "type": "string"}]
        return {"type": "record", "name": "R", "fields": fields}

    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema(physical or kind)), {"x": value, "end": "ö"})
    stream = lined(Avro(json.dumps(schema(kind))), declared, Field("end", "string"))
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
        found = classify(lined(Json(), Field("x", kind)), KafkaRecord(f'{{"x": {digits}}}'.encode()), None)
        scale = int(kind.partition(",")[2][:-1])
        fits = len(digits.lstrip("-").partition(".")[0].lstrip("0")) <= 38 - scale
        fits &= len(digits.partition(".")[2]) <= scale
        assert (found.values == {"x": Decimal(digits)}) is fits, kind
        assert (found.kind == "event") is fits, kind


def test_a_logical_type_that_cannot_be_is_ignored() -> None:
    """So Avro's specification says; a declared schema is refused for it, one of the registry is read."""
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 4}
    text = json.dumps({"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]})
    value = KafkaRecord(b"\0\0\0\0\x01\x02\x05")
    found = classify(lined(Avro(), Field("x", "binary")), value, lambda _: Schema(1, "AVRO", text))
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
        lined(Avro(), Field("x", "string")), KafkaRecord(b"\0\0\0\0\x01\0"), lambda _: Schema(1, "AVRO", text)
    )
    assert found.reason == "malformed"
    assert reported in str(found.detail)


# --- Protobuf

PROTO = """
syntax = "proto3";
package p;
import "google/protobuf/any.proto";
import "google/protobuf/field_mask.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Around { message Inside { int32 n = 1; } }
message M {
  string s = 1;
  int64 n = 2;
  float f = 3;
  double d = 4;
  bytes b = 5;
  uint64 u = 6;
  bool ok = 7;
  optional int32 o = 8;
  google.protobuf.Timestamp t = 9;
  google.protobuf.Int64Value w = 10;
  repeated google.protobuf.Int64Value ws = 11;
  google.protobuf.Any any = 12;
  google.protobuf.FieldMask mask = 13;
  google.protobuf.Value v = 14;
  map<bool, M> deep = 15;
  repeated int64 many = 16;
  enum E { ZERO = 0; ONE = 1; }
  E e = 17;
}
"""
SCHEMA = Schema(1, "PROTOBUF", PROTO)


def message(name: str = "M") -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    for one in FileDescriptorSet.FromString(compile_schema(SCHEMA)[0]).file:
        pool.Add(one)
    return GetMessageClass(pool.FindMessageTypeByName(f"p.{name}"))()


def of_message(made: Any, *fields: Field, places: bytes = b"\x02\x02") -> Any:
    stream = lined(Protobuf(), *fields)
    value = b"\0\0\0\0\x01" + places + made.SerializeToString()
    found = classify(stream, KafkaRecord(value), lambda _: SCHEMA)
    return found.values if found.kind == "event" else found.detail


def test_unset_members_of_a_message_have_defaults() -> None:
    fields = (
        Field("s", "string"), Field("n", "long"), Field("d", "double"), Field("b", "binary"), Field("ok", "boolean"),
        Field("e", "string"), Field("many", "array", of=Field("one", "long")), Field("o", "integer", optional=True),
        Field("w", "long", optional=True),
    )  # fmt: skip
    assert list(of_message(message(), *fields).values()) == ["", 0, 0.0, b"", False, "ZERO", [], None, None]


def test_well_known_protobuf_types_are_decoded() -> None:
    """A wrapper of 64 bits was a text, `Any` raised TypeError, and a time of a far year refused the message."""
    made = message()
    made.t.seconds, made.t.nanos = 1_767_225_600, 123_456_789
    made.w.value = 2**60
    made.ws.add().value = -5
    made.any.type_url, made.any.value = "nowhere/p.Q", b"1"
    made.mask.paths.append("a_b")
    made.deep[True].n = 7
    inner = Field("m", "struct", of=(Field("n", "long"),))
    found = of_message(
        made, Field("t", "timestamp"), Field("w", "long"), Field("ws", "array", of=Field("one", "long")),
        Field("type", "string", source="any.type_url"), Field("deep", "map", of=inner),
        Field("paths", "array", source="mask.paths", of=Field("one", "string")),
    )  # fmt: skip
    assert found == {
        "t": MICRO + 123456, "w": 2**60, "ws": [-5], "type": "nowhere/p.Q", "deep": {"true": {"n": 7}}, "paths": ["a_b"]
    }  # fmt: skip
    made.t.seconds = 2**50
    assert of_message(made, Field("w", "long")) == {"w": 2**60}
    assert "it is no time" in of_message(made, Field("t", "timestamp"))


def test_numbers_of_32_bits_and_infinite_ones() -> None:
    """A float was read by its few digits, unlike by the pipeline."""
    made = message()
    made.f, made.d, made.e = 0.1, 0.5, 9
    found = of_message(made, Field("f", "double"), Field("d", "decimal(4,2)"), Field("e", "string"))
    assert found == {"f": 0.10000000149011612, "d": Decimal("0.5"), "e": "9"}
    made.d = float("nan")
    assert of_message(made, Field("s", "string")) == {"s": ""}
    assert of_message(made, Field("d", "double")) == "field d: it is NaN"
    assert of_message(made, Field("d", "double", nan="null")) == {"d": None}
    made.d = float("-inf")
    assert of_message(made, Field("d", "double", nan="keep")) == {"d": float("-inf")}


def test_a_message_by_its_place() -> None:
    inside = message("Around.Inside")
    inside.n = 3
    assert of_message(inside, Field("n", "integer"), places=b"\x04\x00\x00") == {"n": 3}
    assert "no message" in of_message(inside, Field("n", "integer"), places=b"\x02\x0c")
    assert "message indexes" in of_message(message(), Field("n", "integer"), places=b"\x03")


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "s": st.text(),
            "n": st.integers(-(2**63), 2**63 - 1),
            "u": st.integers(0, 2**64 - 1),
            "d": st.floats(),
            "f": st.floats(width=32),
            "b": st.binary(),
            "ok": st.booleans(),
            "many": st.lists(st.integers(-(2**63), 2**63 - 1)),
        }
    )
)
def test_values_of_a_protobuf_encoder_are_decoded(values: dict[str, Any]) -> None:
    kinds = {"s": "string", "n": "long", "d": "double", "f": "float", "b": "binary", "ok": "boolean"}
    fields = [Field(name, kind, nan="keep" if name in "df" else "reject") for name, kind in kinds.items()]
    fields += [Field("u", "decimal(20,0)"), Field("many", "array", of=Field("one", "long"))]
    made = message()
    made.MergeFrom(type(made)(**values))
    found = of_message(made, *fields)
    assert {name: repr(float(one)) if name in "df" else one for name, one in found.items()} == {
        name: repr(float(one)) if name in "df" else one for name, one in values.items()
    } | ({"d": "0.0"} if repr(values["d"]) == "0.0" else {})


# --- JSON and lines


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "s": st.text(st.characters(exclude_categories=["Cs"])),
            "n": st.integers(-(2**63), 2**63 - 1),
            "d": st.floats(allow_nan=False, allow_infinity=False),
            "ok": st.booleans(),
            "m": st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.none() | st.integers(0, 9))
            ),
        }
    ),
    st.booleans(),
)
def test_values_of_a_json_encoder_are_decoded(values: dict[str, Any], ascii_alone: bool) -> None:
    lists = Field("v", "array", of=Field("e", "integer", nullable=True))
    fields = (Field("s", "string"), Field("n", "long"), Field("d", "double"), Field("ok", "boolean"))
    stream = lined(Json(), *fields, Field("m", "map", of=lists))
    found = classify(stream, KafkaRecord(json.dumps(values, ensure_ascii=ascii_alone).encode()), None)
    assert (found.kind, found.values) == ("event", values)


LINE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(LINE, min_size=2, max_size=4),
    st.sampled_from([",", ";", "\t", "|", "^"]),
    st.sampled_from(['"', "'", "]"]),
)
def test_values_of_a_csv_encoder_are_decoded(values: list[str], delimiter: str, quote: str) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quotechar=quote, lineterminator="\r\n").writerow(values)
    names = tuple(f"c{at}" for at, _ in enumerate(values))
    stream = lined(Csv(names, delimiter, quote, null=None), *[Field(name, "string") for name in names])
    found = classify(stream, KafkaRecord(out.getvalue().encode()), None)
    assert (found.kind, [*found.values.values()]) == ("event", values)


@pytest.mark.parametrize("line", [b'"a', b'"a"b,1', b'"a""', b'"a" ,1'])
def test_a_quote_that_is_not_closed_is_a_reject(line: bytes) -> None:
    stream = lined(Csv(("a", "b")), Field("a", "string"))
    assert classify(stream, KafkaRecord(b"\xc3\xb6," + line), None).detail == (
        "no line of separated values: a quote that is not closed begins at byte 3"
    )


def test_a_long_value_is_no_reject() -> None:
    """The module csv refuses more than 131,072 characters."""
    found = classify(lined(Csv(("a", "b")), Field("a", "string")), KafkaRecord(b"x" * 200_000 + b",1"), None)
    assert found.values == {"a": "x" * 200_000}


def test_a_boolean_from_a_key_that_is_no_text() -> None:
    """It raised TypeError: a list has no hash."""
    stream = replace(lined(Csv(("a",)), Field("a", "string")), key_format=Json())
    stream = replace(stream, fields=(Field("x", "boolean", source=Key("k")),))
    assert classify(stream, KafkaRecord(b"1", b'{"k": []}'), None).reason == "malformed"


def test_classes_of_a_pattern_have_ascii_alone() -> None:
    """As Java's: a digit of another script matched in Python alone."""
    stream = lined(Lines(r"(?P<n>\d+)"), Field("n", "string"))
    assert classify(stream, KafkaRecord("\u0663".encode()), None).reason == "malformed"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<a>.)(?P=a)", r"(?P<a>.)\Z", r"(?P<a>.)\z",
        r"(?P<a>x{,3})", r"(?P<a>x{)", r"(?P<a>[a[b]])", r"(?P<a>[a&&b])",
        r"(?x)(?P<a> . )", r"(?P<a>\h)", r"(?P<a>\v)", r"(?P<a>\0)",
        r"(?P<a>.)(?#c)", r"(?P<a>[\b])", r"(?P<a>\p{L})", r"(?P<a>\Qx\E)", r"(?P<a>.)\k<a>", r"(?P<a>.)(?(1)b|c)",
        r"(?P<a>.)\U0001f600", r"(?P<a>.)\123", r"(?a)(?P<a>.)", r"(?d)(?P<a>.)",
    ],
)  # fmt: skip
def test_expressions_that_python_and_java_do_not_share_are_refused(pattern: str) -> None:
    with pytest.raises(DeclarationError, match="which Python and Java do not both read"):
        lined(Lines(pattern), Field("a", "string"))


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"\++(?P<a>\d++)", "++7"), (r"(?>x|y)*+(?P<a>7)\)*", "xy7))"), (r"(?:x){2}(?P<a>.{1}+)", "xx7"),
        (r"(?P<a>7)&&x", "7&&x"), (r"(?P<a>7)\\Z", r"7\Z"), (r"\A(?P<a>[+*]+?|7)", "7"),
        (r"(?i)(?<a>7)(?:x|y)(?=Z)z", "7Xz"), (r"(?P<a>[]7\]\[^&]{1,2}?)", "7"), (r"\(?<(?P<a>.)>\)?", "(<7>)"),
        (r"[(?P<](?<a>7)", "<7"), (r"(?P<a>\x37|\u0038)(\.\1)?", "7.7"),
    ],
)  # fmt: skip
def test_expressions_that_both_readers_share_are_accepted(pattern: str, line: str) -> None:
    """`++` after a backslash was refused, and a parenthesis after one was taken for a group."""
    stream = lined(Lines(pattern), Field("a", "string"))
    assert classify(stream, KafkaRecord(line.encode()), None).values == {"a": "7"}


@pytest.mark.parametrize("quantifier", ["*", "+", "*?", "{2,}", "{2,3}", "{0,9}?"])
def test_a_group_is_repeated_in_a_loop_alone(quantifier: str) -> None:
    reported = re.escape(f"by {quantifier!r}: write {quantifier.rstrip('?') + '+'!r}")
    with pytest.raises(DeclarationError, match=reported):
        lined(Lines(rf"(?P<a>.)(?:x|y){quantifier}"), Field("a", "string"))


def test_groups_are_named_in_either_syntax() -> None:
    for written in (r"(?P<a>.)\(?<b>[(?<c>](?<d>.)", r"(?<a>.)\(?<b>[(?<c>](?P<d>.)"):
        assert to_java_pattern(written) == r"(?<a>.)\(?<b>[(?<c>](?<d>.)"
        assert to_python_pattern(written) == r"(?P<a>.)\(?<b>[(?<c>](?P<d>.)"


# --- Rules of nested fields


@pytest.mark.parametrize(
    ("declared", "reported"),
    [
        (Field("x", "struct", of=(Field("a`b", "string"),)), "member 'a`b': a name is letters"),
        (Field("x", "struct", of=(Field("a", "string", source="a..b"),)), "field 'a': source: 'a..b' is no path"),
        (Field("x", "struct", of=(Field("a", "string", source=Key()),)), "'a' inside of it can only come from a path"),
        (Field("x", "struct", of=(Field("a", "long"), Field("A", "long"))), "'a' is a member twice"),
        (Field("x", "timestamp_ntz", source=Meta("timestamp")), "is a number in ms: declare unit='ms'"),
        (Field("x", "array", of=()), "of must be one field, the elements of the array"),
        (Field("x", "map", of=Field("v", "long", optional=True)), "they cannot be optional"),
        (Field("x", "struct"), "of gives no member of the struct"),
        (Field("x", "string", of=Field("v", "long")), "of is for arrays, maps and structs, and this is a string"),
        (Field("x", "time", optional=True, default="00:00:00"), "a time has no default"),
        (Field("x", "decimal(4,2)", unscaled=True, text=True), "leave out text"),
        (Field("x", "long", rounded=True), "rounded and unscaled are for decimals"),
    ],
)
def test_a_field_that_cannot_be_is_refused_with_a_sentence(declared: Field, reported: str) -> None:
    """A wrong path of a member raised ValueError, and a name with a backtick failed in Spark."""
    assert any(reported in problem for problem in find_field_problems(declared))


def nested(depth: int) -> Field:
    return Field("x", "long") if depth == 1 else Field("x", "array", of=nested(depth - 1))


def test_fields_are_nested_16_times_at_most() -> None:
    assert find_field_problems(nested(16)) == []
    assert "16 times at the most" in find_field_problems(nested(17))[0]


# --- What a table holds


@pytest.mark.parametrize(
    ("read", "stored"),
    [
        (datetime(2026, 1, 1, 0, 0, 0, 120000, UTC), '"2026-01-01 00:00:00.12+00:00"'),
        (datetime(2026, 1, 1), '"2026-01-01 00:00:00"'),  # noqa: DTZ001 - a local time
        (date(2026, 1, 1), '"2026-01-01"'),
        (b"\0\xff", '"AP8="'),
        (0.10000000149011612, "0.1"),
        (1e300, "1.0E300"),
        (float("inf"), "Infinity"),
        ({"a": [1, None, True, {"b": Decimal("1.50")}]}, '{"a":[1,null,true,{"b":1.5}]}'),
    ],
)
def test_json_of_decoded_values_is_compared(read: Any, stored: str) -> None:
    """Times and dates of Avro never equalled their texts: the check called sound events unlike."""
    declared = Field("x", "json")
    assert matches_stored(declared, read, stored)
    assert not matches_stored(declared, read, stored.replace("1", "2").replace("P", "Q").replace("Inf", "-Inf"))


def test_an_enum_of_avro_has_no_negative_symbols() -> None:
    """fastavro counted -1 from the end: the second reader called a record sound that Spark rejects."""
    kind = {"type": "enum", "name": "K", "symbols": ["A", "B"]}
    fields = [{"name": "a", "type": kind}, {"name": "b", "type": ["null", "K"]}]
    declared = Avro(json.dumps({"type": "record", "name": "R", "fields": fields}))
    assert decode_value(declared, KafkaRecord(b"\x02\x02\x00"), None) == {"a": "B", "b": "A"}
    for value in (b"\x01\x00", b"\x00\x02\x01", b"\x04\x00"):
        with pytest.raises(MisfitError, match="no Avro at byte"):
            decode_value(declared, KafkaRecord(value), None)


def test_nested_values_are_compared_with_rows_of_a_table() -> None:
    at = Field("at", "timestamp_ntz")
    declared = Field("x", "map", of=Field("v", "array", of=Field("e", "struct", of=(at, Field("n", "long")))))
    read = {"k": [{"at": MICRO, "n": 1}, None]}
    moment = datetime(2026, 1, 1)  # noqa: DTZ001 - a local time
    assert matches_stored(declared, read, [("k", [{"at": moment, "n": 1}, None])])
    assert not matches_stored(declared, read, {"k": [{"at": moment, "n": 2}, None]})
    assert not matches_stored(declared, read, {"k": [{"at": moment, "n": True}, None]})
    assert not matches_stored(declared, read, {"k": [{"n": 1}, None]})
    assert not matches_stored(declared, read, [("l", [{"at": moment, "n": 1}, None])])
