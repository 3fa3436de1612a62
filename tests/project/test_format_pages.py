"""The pages of docs/formats: their examples are declarations that are accepted, and every format and type is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from highwater import field_rules
from highwater.classifying import classify
from highwater.declaration import Stream
from highwater.formats import Format, KeyFormat
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from tests.helpers.pages import blocks, rows, section, spans

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/formats").glob("*.md"))
EXAMPLES = [page for page in PAGES if not page.endswith("README.md")]


def declared(page: str) -> list[Stream]:
    """The streams that the examples of a page declare, in their order; a later block may use an earlier one."""
    names: dict[str, Any] = {}
    found: list[Stream] = []
    for block in blocks(page, "python"):
        exec(block, names)
        one = names.pop("STREAM", None)
        found += [*names.pop("STREAMS", []), *([] if one is None else [one])]
        names |= {} if one is None else {"STREAM": one}
    return list({stream.name: stream for stream in found}.values())


def types() -> set[str]:
    """The names of all types, by the pattern that declarations are compared with."""
    return {"decimal(p,s)" if "decimal" in one else one for one in field_rules.TYPE.pattern.split("|")}


@pytest.mark.parametrize("page", [*EXAMPLES, "docs/streams.md"])
def test_the_examples_of_a_page_are_accepted(page: str) -> None:
    streams = declared(page)

    assert streams
    assert all(isinstance(stream, Stream) for stream in streams)


def test_no_two_pages_declare_the_same_stream_or_topic() -> None:
    streams = [stream for page in EXAMPLES for stream in declared(page)]

    assert len({stream.name for stream in streams}) == len(streams)
    assert len({stream.topic for stream in streams}) == len(streams)


def test_every_format_has_an_example() -> None:
    shown = {type(stream.value) for page in EXAMPLES for stream in declared(page)}

    assert shown == {*get_args(Format)}


def test_the_page_of_keys_has_every_format_of_keys() -> None:
    page = "docs/formats/keys.md"
    introduction = (ROOT / page).read_text().partition("\n## ")[0]
    listed = {name.partition("(")[0] for row in rows(introduction) for name in spans(row[1])}
    shown = {type(stream.key_format).__name__ for stream in declared(page)}
    formats = {kind.__name__ for kind in get_args(KeyFormat)}

    assert listed == formats
    assert shown == formats - {"Raw"}


def test_the_page_of_formats_lists_every_page() -> None:
    text = (ROOT / "docs/formats/README.md").read_text()

    assert [page for page in EXAMPLES if f"]({Path(page).name}" not in text] == []


def test_the_page_of_formats_has_every_type() -> None:
    parts = section("docs/formats/README.md", "Types").split("\n\n")
    table = next(part for part in parts if part.startswith("| type |"))

    assert {name for row in rows(table) for name in spans(row[0])} == types()


def test_the_page_of_streams_has_every_type_in_its_two_tables() -> None:
    parts = section("docs/streams.md", "Field").split("\n\n")
    tables = [part for part in parts if part.startswith(("| type |", "| further type |"))]
    listed = [name for table in tables for row in rows(table) for name in spans(row[0])]

    assert sorted(listed) == sorted(types())


def test_the_page_of_streams_has_every_format() -> None:
    listed = {spans(row[0])[0].partition("(")[0] for row in rows(section("docs/streams.md", "Value"))}

    assert listed == {kind.__name__ for kind in get_args(Format)}


# Pages and how many of their streams have sample records that can be read from the text as they are.
SAMPLED = {
    "json": 2,
    "csv": 1,
    "lines": 1,
    "avro": 1,
    "protobuf": 1,
    "debezium": 1,
    "kafka-connect": 1,
    "cloudevents": 1,
}
# Spark rejects digits after the microsecond, Python cuts them off.
SPARK_ALONE = {("cloudevents", 0, 2)}


@pytest.mark.parametrize(("page", "place"), [(page, at) for page, count in SAMPLED.items() for at in range(count)])
def test_the_second_reader_classifies_the_samples_as_the_page_reports(page: str, place: int) -> None:
    """Which records are events with which keys, and which are rejects for which reason."""
    stream = declared(f"docs/formats/{page}.md")[place]
    after = (ROOT / f"docs/formats/{page}.md").read_text().split("\n```text\n0  ")[1 + place]
    tables = [part for part in after.split("\n\n") if part.startswith("| ")]
    events = next(rows(part) for part in tables if part.startswith(("| key ", "| event_time ")))
    rejects = {
        int(row[0]): spans(row[1])[0] for row in next(rows(p) for p in tables if p.startswith("| offset | reason"))
    }
    for of_page, of_place, offset in SPARK_ALONE:
        if (of_page, of_place) == (page, place):
            del rejects[offset]
    records = [*map(_value, ("0  " + after.partition("\n```")[0]).splitlines())]
    found = {
        at: classify(stream, KafkaRecord(value, b"k", (), stream.topic, 0, at, 1767225600000), _schemas().get)
        for at, value in enumerate(records)
        if (page, place, at) not in SPARK_ALONE
    }

    assert {at: one.reason for at, one in found.items() if one.kind == "reject"} == rejects
    stored = [one for one in found.values() if one.kind in {"event", "delete"}]
    assert len(stored) == len(events)
    if stream.key:
        assert [one.key for one in stored] == [row[0].strip("`").replace("\\|", "|") for row in events]


@pytest.mark.parametrize(("page", "place"), [("raw", 0), ("cloudevents", 1)])
def test_the_second_reader_classifies_the_samples_in_tables_as_the_page_reports(page: str, place: int) -> None:
    """The samples with keys and headers: which are events with which keys, and which are rejects for which reason."""
    stream = declared(f"docs/formats/{page}.md")[place]
    text = (ROOT / f"docs/formats/{page}.md").read_text().partition("| offset | key | headers | value |")
    samples, *tables = [part for part in "".join(text[1:]).split("\n\n") if part.startswith("| ")]
    events = next(rows(part) for part in tables if part.startswith("| key "))
    rejects = {
        int(row[0]): spans(row[1])[0] for row in next(rows(p) for p in tables if p.startswith("| offset | reason"))
    }
    found = {}
    for row in rows(samples):
        headers = [(name, value.encode()) for name, _, value in (span.partition(": ") for span in spans(row[2]))]
        key, value = (_value(f"0  {spans(cell)[0]}") for cell in (row[1], row[3]))
        record = KafkaRecord(value, key, headers, stream.topic, 0, int(row[0]), 1767225600000)
        found[record.offset] = classify(stream, record, _schemas().get)

    assert {at: one.reason for at, one in found.items() if one.kind == "reject"} == rejects
    assert [one.key for one in found.values() if one.kind == "event"] == [row[0] for row in events]


def test_the_bytes_of_a_declared_schema_are_the_row_that_the_page_shows() -> None:
    stream = declared("docs/formats/avro.md")[1]
    line = next(span for span in spans((ROOT / "docs/formats/avro.md").read_text()) if span.startswith("06 6d"))

    found = classify(
        stream, KafkaRecord(_value(f"0  {line}"), b"k", (), stream.topic, 0, 0, 1767225600000), _schemas().get
    )

    assert (found.kind, found.key, found.version) == ("event", "m-7", 1)


def _value(line: str) -> bytes | None:
    """The value of a sample record; bytes are written in hexadecimal, with a space between two."""
    text = line.partition("  ")[2]
    if text.startswith("(null"):
        return None
    if text == "(no bytes)":
        return b""
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{2}( [0-9a-f]{2})+", text) else text.encode()


def _schemas() -> dict[int | str, Schema]:
    """Schemas 7 and 8 of the page of Avro."""
    first = json.loads(blocks("docs/formats/avro.md", "json")[0])
    second = {**first, "fields": [*first["fields"], {"name": "currency", "type": "string", "default": "EUR"}]}
    return {7: Schema(7, "AVRO", json.dumps(first)), 8: Schema(8, "AVRO", json.dumps(second))}
