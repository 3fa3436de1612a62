"""The second reader: what becomes of records of six formats, by Python alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.classifying import Outcome, classify
from highwater.declaration import Field
from highwater.formats import Avro, Csv, Lines, Raw
from highwater.reading import MisfitError, Record
from highwater.schemas import Schema
from tests.format_streams import FORMATS, find_schema, records


def outcomes(name: str) -> list[Outcome]:
    return [classify(FORMATS[name], one, find_schema) for one in records(name)]


def told(name: str, *fields: str) -> list[tuple[Any, ...]]:
    return [(one.kind, one.key, *(one.values.get(field) for field in fields)) for one in outcomes(name)]


def test_debezium() -> None:
    assert told("01-debezium-postgres-plain", "amount", "note", "op", "lsn") == [
        ("event", "1001", Decimal("12.34"), None, "c", 24023128),
        ("event", "1001", Decimal("20.00"), "gift ☕", "u", 24023300),
        ("delete", "1001", None, None, "d", 24023400),
        ("tombstone", None, None, None, None, None),
    ]
    first = outcomes("01-debezium-postgres-plain")[0]
    assert (first.values["created"], first.event_time) == (1767225600123456, 1767225600200000)


def test_nested_events() -> None:
    assert told("05-github-events", "type", "actor_login", "repo_id", "org_login") == [
        ("event", "22249084964", "PushEvent", "octo", 1296269, None),
        ("event", "22249084965", "WatchEvent", "octo", 1296269, "corp"),
        ("event", "22249084966", "IssuesEvent", "octo", 1296269, None),
    ]
    assert outcomes("05-github-events")[0].version is None


def test_telemetry() -> None:
    assert told("06-iot-telemetry", "temp", "hum", "lat") == [
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
    assert told("10-avro-logical-types", "amount", "note", "kind", "currency", "tags", "seen_at") == [
        ("event", KEY, Decimal("1234.56"), None, "STANDARD", "EUR", {"a": "ö"}, 1767225600000001),
        ("event", KEY, None, "", "CREDIT", "EUR", {}, 1767225600000999),
        ("event", KEY, Decimal("-0.05"), "n", "STANDARD", "USD", {}, -1),
    ]


KEY = "7f1c3c1e-0000-4000-8000-000000000001"


def test_registered_json() -> None:
    assert told("12-json-schema-registry", "version", "amount", "coupon") == [
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
def test_what_an_avro_encoder_writes_comes_out(values: dict[str, Any]) -> None:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(WRITTEN), values)
    stream = replace(FORMATS["05-github-events"], fields=READ, key=(), event_time=None, value=Avro(json.dumps(WRITTEN)))
    found = classify(stream, Record(out.getvalue()), None)
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
    found = classify(stream, Record(line), None)
    assert (found.values if found.kind == "event" else found.detail) == wanted


def test_lines_by_a_pattern() -> None:
    pattern = r"(?P<level>[A-Z]+) (?:\[(?P<thread>\w+)\] )?(?P<text>.*)"
    stream = lined(
        Lines(pattern), Field("level", "string"), Field("thread", "string", optional=True), Field("text", "string")
    )
    values = {"level": "WARN", "thread": None, "text": "disk is full"}
    assert classify(stream, Record(b"WARN disk is full\r\n"), None).values == values
    assert classify(stream, Record(b"WARN [main] x"), None).values["thread"] == "main"
    assert classify(stream, Record(b"nothing"), None).detail == "the line does not match the declared pattern"


def test_bytes_that_are_not_parsed() -> None:
    stream = lined(Raw(), Field("body", "binary", source="value"), Field("text", "string", source="value"))
    assert classify(stream, Record(b"\xc3\xa9"), None).values == {"body": b"\xc3\xa9", "text": "é"}
    assert classify(stream, Record(b"\xff"), None).detail == "field text: it is not UTF-8 at byte 0"


def test_a_schema_with_a_reference() -> None:
    """Its types are defined where they are used first."""
    from highwater.decoding import document
    from highwater.schemas import Reference

    money = json.dumps({"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]})
    order = json.dumps({"type": "record", "name": "shop.Order", "fields": [{"name": "sum", "type": "shop.Money"}]})
    schema = Schema(1, "AVRO", order, (Reference("shop.Money", "money", 1, money),))
    assert document(Avro(), Record(b"\x00\x00\x00\x00\x01\x0e"), lambda _: schema) == {"sum": {"cents": 7}}
    with pytest.raises(MisfitError, match="bytes follow"):
        document(Avro(), Record(b"\x00\x00\x00\x00\x01\x0e\x00"), lambda _: schema)
