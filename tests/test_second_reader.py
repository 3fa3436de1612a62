"""The second reader: what becomes of records of six formats, by Python alone."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.classifying import Classification, classify
from highwater.declaration import Field
from highwater.formats import Avro, Csv, Json, Lines, Raw
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord, MisfitError
from highwater.sources import Key
from tests.helpers.format_streams import FORMATS, MICRO, build_stream_of, find_schema, records


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
    stream = build_stream_of(Csv(("x", "n", "ok")), Field("x", "string"), Field("n", "integer"), Field("ok", "boolean"))
    found = classify(stream, KafkaRecord(line), None)
    assert (found.values if found.kind == "event" else found.detail) == wanted


def test_lines_by_a_pattern() -> None:
    pattern = r"(?P<level>[A-Z]+) (?:\[(?P<thread>\w+)\] )?(?P<text>.*)"
    stream = build_stream_of(
        Lines(pattern), Field("level", "string"), Field("thread", "string", optional=True), Field("text", "string")
    )
    values = {"level": "WARN", "thread": None, "text": "disk is full"}
    assert classify(stream, KafkaRecord(b"WARN disk is full\r\n"), None).values == values
    assert classify(stream, KafkaRecord(b"WARN [main] x"), None).values["thread"] == "main"
    assert classify(stream, KafkaRecord(b"nothing"), None).detail == "the line does not match the declared pattern"


def test_bytes_that_are_not_parsed() -> None:
    stream = build_stream_of(Raw(), Field("body", "binary", source="value"), Field("text", "string", source="value"))
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
    return build_stream_of(Json(), Field("x", kind, **declared))


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
    stream = build_stream_of(Json(), Field("x", "double", nan="null"), Field("y", "long", optional=True))
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
    stream = build_stream_of(Json(), *fields, Field("m", "map", of=lists))
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
    stream = build_stream_of(Csv(names, delimiter, quote, null=None), *[Field(name, "string") for name in names])
    found = classify(stream, KafkaRecord(out.getvalue().encode()), None)
    assert (found.kind, [*found.values.values()]) == ("event", values)


@pytest.mark.parametrize("line", [b'"a', b'"a"b,1', b'"a""', b'"a" ,1'])
def test_a_quote_that_is_not_closed_is_a_reject(line: bytes) -> None:
    stream = build_stream_of(Csv(("a", "b")), Field("a", "string"))
    assert classify(stream, KafkaRecord(b"\xc3\xb6," + line), None).detail == (
        "no line of separated values: a quote that is not closed begins at byte 3"
    )


def test_a_long_value_is_no_reject() -> None:
    """The module csv refuses more than 131,072 characters."""
    found = classify(build_stream_of(Csv(("a", "b")), Field("a", "string")), KafkaRecord(b"x" * 200_000 + b",1"), None)
    assert found.values == {"a": "x" * 200_000}


def test_a_boolean_from_a_key_that_is_no_text() -> None:
    """It raised TypeError: a list has no hash."""
    stream = replace(build_stream_of(Csv(("a",)), Field("a", "string")), key_format=Json())
    stream = replace(stream, fields=(Field("x", "boolean", source=Key("k")),))
    assert classify(stream, KafkaRecord(b"1", b'{"k": []}'), None).reason == "malformed"
