"""The examples of the format pages: declarations, sample records, and what the page says becomes of each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from highwater.declaration import Stream
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from tests.helpers.pages import find_blocks, find_rows, find_spans, read_page

# Pages and how many of their streams have sample records: as lines, and as tables with keys and headers.
_AS_LINES = {
    "json": 2,
    "csv": 1,
    "lines": 1,
    "avro": 1,
    "protobuf": 1,
    "debezium": 1,
    "kafka-connect": 1,
    "cloudevents": 1,
}
_AS_TABLES = [("raw", 0), ("cloudevents", 1)]
SAMPLED = [*((page, at) for page, count in _AS_LINES.items() for at in range(count)), *_AS_TABLES]
MOMENT_MS = 1767225600000


@dataclass(frozen=True)
class Samples:
    """Sample records of a page.

    Args:
        stream: the declaration that they are classified by.
        records: the records.
        events: how many of them become events or deletes.
        keys: the first column of these rows.
        rejects: the reasons of the others by offset.
    """

    stream: Stream
    records: list[KafkaRecord]
    events: int
    keys: list[str]
    rejects: dict[int, str]


def load_declared_streams(page: str) -> list[Stream]:
    """The streams that the examples of a page declare, in their order; a later block may use an earlier one."""
    names: dict[str, Any] = {}
    found: list[Stream] = []
    for block in find_blocks(page, "python"):
        exec(block, names)
        one = names.pop("STREAM", None)
        found += [*names.pop("STREAMS", []), *([] if one is None else [one])]
        names |= {} if one is None else {"STREAM": one}
    return list({stream.name: stream for stream in found}.values())


def read_samples(page: str, place: int) -> Samples:
    """The samples of the stream at a place of a page."""
    stream, text = load_declared_streams(f"docs/formats/{page}.md")[place], read_page(f"docs/formats/{page}.md")
    if (page, place) in _AS_TABLES:
        part = "".join(text.partition("| offset | key | headers | value |")[1:])
        samples, *tables = [part for part in part.split("\n\n") if part.startswith("| ")]
        records = [_parse_row(stream, row) for row in find_rows(samples)]
    else:
        after = text.split("\n```text\n0  ")[1 + place]
        tables = [part for part in after.split("\n\n") if part.startswith("| ")]
        values = [line.partition("  ")[2] for line in ("0  " + after.partition("\n```")[0]).splitlines()]
        records = [
            KafkaRecord(parse_value(value), b"k", (), stream.topic, 0, at, MOMENT_MS) for at, value in enumerate(values)
        ]
    events = next(find_rows(part) for part in tables if part.startswith(("| key ", "| event_time ")))
    rejects = next(find_rows(part) for part in tables if part.startswith("| offset | reason"))
    keys = [row[0].strip("`").replace("\\|", "|") for row in events]
    return Samples(stream, records, len(events), keys, {int(row[0]): find_spans(row[1])[0] for row in rejects})


def _parse_row(stream: Stream, row: list[str]) -> KafkaRecord:
    headers = [(name, value.encode()) for name, _, value in (span.partition(": ") for span in find_spans(row[2]))]
    key, value = (parse_value(find_spans(cell)[0]) for cell in (row[1], row[3]))
    return KafkaRecord(value, key, headers, stream.topic, 0, int(row[0]), MOMENT_MS)


def parse_value(text: str) -> bytes | None:
    """The value of a sample record; bytes are written in hexadecimal, with a space between two."""
    if text.startswith("(null"):
        return None
    if text == "(no bytes)":
        return b""
    return bytes.fromhex(text) if re.fullmatch(r"[0-9a-f]{2}( [0-9a-f]{2})+", text) else text.encode()


def _build_schemas() -> dict[int | str, Schema]:
    """Schemas 7 and 8 of the page of Avro."""
    first = json.loads(find_blocks("docs/formats/avro.md", "json")[0])
    second = {**first, "fields": [*first["fields"], {"name": "currency", "type": "string", "default": "EUR"}]}
    return {7: Schema(7, "AVRO", json.dumps(first)), 8: Schema(8, "AVRO", json.dumps(second))}


PAGE_SCHEMAS = _build_schemas()
