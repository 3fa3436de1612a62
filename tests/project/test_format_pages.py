"""The pages of docs/formats: their examples are declarations that are accepted, and every format and type is there."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from highwater import field_rules
from highwater.classifying import classify
from highwater.declaration import Stream
from highwater.formats import Format, KeyFormat
from highwater.second_reader import KafkaRecord
from tests.helpers.format_pages import PAGE_SCHEMAS, SAMPLED, load_declared_streams, parse_value, read_samples
from tests.helpers.pages import find_rows, find_section, find_spans

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/formats").glob("*.md"))
EXAMPLES = [page for page in PAGES if not page.endswith("README.md")]


def types() -> set[str]:
    """The names of all types, by the pattern that declarations are compared with."""
    return {"decimal(p,s)" if "decimal" in one else one for one in field_rules.TYPE.pattern.split("|")}


@pytest.mark.parametrize("page", [*EXAMPLES, "docs/streams.md"])
def test_the_examples_of_a_page_are_accepted(page: str) -> None:
    streams = load_declared_streams(page)

    assert streams
    assert all(isinstance(stream, Stream) for stream in streams)


def test_no_two_pages_declare_the_same_stream_or_topic() -> None:
    streams = [stream for page in EXAMPLES for stream in load_declared_streams(page)]

    assert len({stream.name for stream in streams}) == len(streams)
    assert len({stream.topic for stream in streams}) == len(streams)


def test_every_format_has_an_example() -> None:
    shown = {type(stream.value) for page in EXAMPLES for stream in load_declared_streams(page)}

    assert shown == {*get_args(Format)}


def test_the_page_of_keys_has_every_format_of_keys() -> None:
    page = "docs/formats/keys.md"
    introduction = (ROOT / page).read_text().partition("\n## ")[0]
    listed = {name.partition("(")[0] for row in find_rows(introduction) for name in find_spans(row[1])}
    shown = {type(stream.key_format).__name__ for stream in load_declared_streams(page)}
    formats = {kind.__name__ for kind in get_args(KeyFormat)}

    assert listed == formats
    assert shown == formats - {"Raw"}


def test_the_page_of_formats_lists_every_page() -> None:
    text = (ROOT / "docs/formats/README.md").read_text()

    assert [page for page in EXAMPLES if f"]({Path(page).name}" not in text] == []


def test_the_page_of_formats_has_every_type() -> None:
    parts = find_section("docs/formats/README.md", "Types").split("\n\n")
    table = next(part for part in parts if part.startswith("| type |"))

    assert {name for row in find_rows(table) for name in find_spans(row[0])} == types()


def test_the_page_of_streams_has_every_type_in_its_two_tables() -> None:
    parts = find_section("docs/streams.md", "Field").split("\n\n")
    tables = [part for part in parts if part.startswith(("| type |", "| further type |"))]
    listed = [name for table in tables for row in find_rows(table) for name in find_spans(row[0])]

    assert sorted(listed) == sorted(types())


def test_the_page_of_streams_has_every_format() -> None:
    listed = {find_spans(row[0])[0].partition("(")[0] for row in find_rows(find_section("docs/streams.md", "Value"))}

    assert listed == {kind.__name__ for kind in get_args(Format)}


@pytest.mark.parametrize(("page", "place"), SAMPLED)
def test_the_second_reader_classifies_the_samples_as_the_page_reports(page: str, place: int) -> None:
    """Which records are events with which keys, and which are rejects for which reason."""
    sample = read_samples(page, place)
    found = [classify(sample.stream, one, PAGE_SCHEMAS.get) for one in sample.records]

    assert {at: one.reason for at, one in enumerate(found) if one.kind == "reject"} == sample.rejects
    stored = [one for one in found if one.kind in {"event", "delete"}]
    assert len(stored) == sample.events
    if sample.stream.key:
        assert [one.key for one in stored] == sample.keys


def test_the_bytes_of_a_declared_schema_are_the_row_that_the_page_shows() -> None:
    stream = load_declared_streams("docs/formats/avro.md")[1]
    line = next(span for span in find_spans((ROOT / "docs/formats/avro.md").read_text()) if span.startswith("06 6d"))

    found = classify(
        stream, KafkaRecord(parse_value(line), b"k", (), stream.topic, 0, 0, 1767225600000), PAGE_SCHEMAS.get
    )

    assert (found.kind, found.key, found.version) == ("event", "m-7", 1)
