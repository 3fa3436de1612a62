"""The format and the envelope of sampled records."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from highwater.avro_decoding import find_schema_problem
from highwater.decoding import Schemas
from highwater.errors import ConfigurationError
from highwater.formats import Avro, Csv, Format, Json, Lines, Protobuf, Raw
from highwater.schemas import (
    KINDS,
    FramedValue,
    FramingError,
    Schema,
    build_self_contained_avro,
    parse_framing,
    parse_protobuf_message,
)
from highwater.second_reader import InfiniteNumber, KafkaRecord
from highwater.settings import SCHEMA_REGISTRY_URL

# A format is recognised if nine values in ten have it; the others will be rejects.
RECOGNISED_SHARE = 0.9
# Rarer characters in texts and numbers come first: they are the delimiter where both fit alike.
_DELIMITERS = "\t|;,"
# Numbers, dates and times of any country; a value that is left out fits too.
_PLAIN_CELL = re.compile(r"(?:[-+]?[0-9][-+0-9.,:/ TZ]*)?")
_HEADING = re.compile(r"\s*[^\W\d][^\n]{0,63}")
# An object, or an array of what is no word: logs begin with `[INFO]` too, and with `[2026-01-01 …`.
_DOCUMENT = re.compile(r'\ufeff?\s*(?:\{|\[\s*(?:[\[{"\]]|[-0-9.eE+]+\s*[,\]]))')
# Java's and Python's logs write milliseconds after a comma, which delimits nothing.
_LOG_TIME = re.compile(r"\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8},[0-9]{3}[\s\]]")
# Any text: the dot would leave out some line ends, which differ between Python and Java.
WHOLE_LINE = r"(?P<line>[\s\S]*)"


@dataclass(frozen=True)
class RecognisedFormat:
    """The format of the values of a sample.

    Args:
        format: the format.
        reason: why, for a person.
        documents: the values as JSON has them, where the format is JSON, CSV or text.
        schemas: the registered schemas that the values name, by ID; empty without a registry.
        message: for Protobuf which message of the schema the values are.
    """

    format: Format
    reason: str
    documents: tuple[Any, ...] = ()
    schemas: tuple[Schema, ...] = ()
    message: tuple[int, ...] = (0,)


def recognise(records: Sequence[KafkaRecord], schemas: Schemas | None) -> RecognisedFormat:
    """Find the format of the records that have a value.

    Raises:
        ConfigurationError: the values name schemas, and no registry is configured.
    """
    filled = [record for record in records if record.value is not None]
    framed = _recognise_framed(filled, schemas)
    if framed is not None:
        return framed
    documents = [found for record in filled if isinstance(found := parse_json_document(record.value), dict)]
    if _is_most(len(documents), len(filled)):
        return RecognisedFormat(
            Json(), f"{_format_share(len(documents), len(filled))} are JSON objects", tuple(documents)
        )
    texts = [text for record in filled if (text := decode_text(record.value)) is not None]
    if not _is_most(len(texts), len(filled)):
        return RecognisedFormat(
            Raw(), "the values are neither text nor framed by a known schema, so they are kept as bytes"
        )
    lines = [_strip_line_end(text) for text in texts]
    if reason := _explain_documents(lines):
        return replace(_recognise_lines(lines), reason=reason)
    firsts = {record.partition: _strip_line_end(decode_text(record.value) or "") for record in reversed(filled)}
    return _recognise_csv(lines, [*firsts.values()]) or _recognise_lines(lines)


def _explain_documents(lines: Sequence[str]) -> str:
    """Why texts that begin like JSON are not read as such; empty for other texts."""
    begun = [line for line in lines if _DOCUMENT.match(line)]
    if not _is_most(len(begun), len(lines)):
        return ""
    try:
        problem = "it is an array" if isinstance(json.loads(begun[0]), list) else "others are no object"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    share = _format_share(len(begun), len(lines))
    return f"{share} begin like JSON, where each has to be one object: of the first, {problem}; they are text"


def _strip_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _format_share(some: int, of: int) -> str:
    return f"all {of:,} values" if some == of else f"{some:,} of {of:,} values"


def _is_most(some: int, of: int) -> bool:
    return some > 0 and some >= RECOGNISED_SHARE * of


def parse_json_document(value: bytes | None) -> Any:
    """A JSON document with its numbers as int or float; None where there is none."""
    try:
        return None if value is None else json.loads(value.decode(), parse_constant=InfiniteNumber)
    except (ValueError, RecursionError):
        return None


def decode_text(value: bytes | None) -> str | None:
    """A value as text in UTF-8; None if it is none, or holds control characters that texts do not have."""
    try:
        text = None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
    return None if text is None or "\x00" in text else text


def _recognise_framed(records: Sequence[KafkaRecord], schemas: Schemas | None) -> RecognisedFormat | None:
    """The format of values whose schemas a registry knows; None where the values are not framed."""
    framed = [one for record in records if (one := _parse_framing(record)) is not None]
    if not _is_most(len(framed), len(records)):
        return None
    names = Counter(named for one in framed if (named := _find_schema_id(one)) is not None)
    if schemas is None:
        if not _is_framed(names, framed):
            return None
        raise ConfigurationError(
            "the values name schemas of a schema registry, and none is configured",
            found=f"schemas {', '.join(map(str, sorted(names, key=str)[:5]))}",
            remedy=f"set {SCHEMA_REGISTRY_URL} to the registry's address, then repeat the command",
        )
    found = {name: schema for name in names if (schema := schemas(name)) is not None and schema.kind in KINDS}
    problems = {name: problem for name, schema in found.items() if (problem := _find_schema_problem(schema))}
    if problems and sum(names[name] for name in problems) > (1 - RECOGNISED_SHARE) * len(records):
        first, problem = next(iter(problems.items()))
        reason = f"no format reads {found[first].kind} schema {first} of the registry, since {problem}"
        return RecognisedFormat(Raw(), f"{reason}: the values stay bytes, with their framing")
    found = {name: schema for name, schema in found.items() if name not in problems}
    known = [one for one in framed if _find_schema_id(one) in found]
    kinds = Counter(found[name].kind for one in known if (name := _find_schema_id(one)) is not None)
    if not _is_most(len(known), len(records)) or len(kinds) != 1:
        return None
    # Several names may be one schema: a number in one record, a GUID in another.
    distinct = {(one.text, one.references): one for one in sorted(found.values(), key=lambda one: one.id or 0)}
    read = tuple(distinct.values())
    kind = next(iter(kinds))
    shown = ", ".join(str(one.id if one.id is not None else "by GUID") for one in read)
    reason = f"{_format_share(len(known), len(records))} name schemas of the registry: {kind} {shown}"
    if kind == "JSON":
        documents = tuple(d for one in known if isinstance(d := parse_json_document(one.payload), dict))
        return RecognisedFormat(Json(registry=True), reason, documents, read)
    if kind == "AVRO":
        return RecognisedFormat(Avro(), reason, (), read)
    return RecognisedFormat(Protobuf(), reason, (), read, _find_common_message(known))


def _find_schema_problem(schema: Schema) -> str | None:
    """Why the values of a schema cannot be read; None where they can, or where the records show it."""
    if schema.kind != "AVRO":
        return None
    try:
        return find_schema_problem(build_self_contained_avro(schema))
    except (ValueError, KeyError, TypeError) as error:
        return str(error)


def _parse_framing(record: KafkaRecord) -> FramedValue | None:
    try:
        return parse_framing(record.value, record.headers)
    except FramingError:
        return None


def _find_schema_id(framed: FramedValue) -> int | str | None:
    return framed.guid if framed.schema_id is None else framed.schema_id


def _is_framed(names: Mapping[int | str, int], framed: Sequence[FramedValue]) -> bool:
    """Whether bytes that begin like a framing are one: few IDs for many values, or headers that say so."""
    if any(one.header_rest is not None for one in framed):
        return True
    return len(names) <= max(1, len(framed) // 10)


def _find_common_message(framed: Sequence[FramedValue]) -> tuple[int, ...]:
    """The message that most values are."""
    found: Counter[tuple[int, ...]] = Counter()
    for one in framed:
        try:
            found[parse_protobuf_message(one)[0]] += 1
        except FramingError:
            continue
    return found.most_common(1)[0][0] if found else (0,)


def _recognise_csv(lines: Sequence[str], firsts: Sequence[str]) -> RecognisedFormat | None:
    """The format of lines that all have the same number of values, two at least; with the first of each partition."""
    found = {one: rows for one in _DELIMITERS if (rows := _split_lines(lines, one))}
    if not found:
        return None
    delimiter = max(found, key=lambda one: (_compute_plain_share(found[one]), len(found[one][0])))
    rows = found[delimiter]
    size = len(rows[0])
    columns = tuple(f"c{number}" for number in range(1, size + 1))
    reason = f"{_format_share(len(rows), len(lines))} are lines of {size} values separated by {delimiter!r}"
    if (head := _find_head(rows, [_parse_row(one, delimiter) for one in firsts])) is not None:
        columns, rows = tuple(head), [row for row in rows if row != head]
        reason += "; a line names the columns, and will be a reject unless its values fit"
    documents = tuple({k: v or None for k, v in zip(columns, row, strict=True)} for row in rows)
    return RecognisedFormat(Csv(columns, delimiter=delimiter), reason, documents)


def _split_lines(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    """The rows of the usual length; none where lines differ in it, or the delimiter is part of a time."""
    rows = [_parse_row(line, delimiter) for line in lines]
    size, times = Counter(map(len, rows)).most_common(1)[0]
    is_time = delimiter == "," and _is_most(sum(map(bool, map(_LOG_TIME.match, lines))), len(lines))
    if size < 2 or is_time or not _is_most(times, len(lines)):
        return []
    rows = [row for row in rows if len(row) == size]
    # One comma or semicolon in each line is found in sentences too.
    is_sentence = size == 2 and delimiter in ",;" and not _compute_plain_share(rows)
    return [] if is_sentence else rows


def _compute_plain_share(rows: Sequence[Sequence[str]]) -> float:
    """The share of columns with numbers or times: half of a number is beside a text where the delimiter is wrong."""
    plain = [sum(map(bool, map(_PLAIN_CELL.fullmatch, cells))) for cells in zip(*rows, strict=True)]
    return sum(_is_most(one, len(rows)) for one in plain) / len(plain)


def _parse_row(line: str, delimiter: str) -> list[str]:
    try:
        found = list(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error:
        return []
    return found[0] if len(found) == 1 and "\n" not in line else []


def _find_head(rows: Sequence[list[str]], firsts: Sequence[list[str]]) -> list[str] | None:
    """The line that names the columns: the first of a partition, or one that is there again; None without one."""
    again = [
        some[0]
        for at, cells in enumerate(zip(*rows, strict=True))
        if len(words := {cell for cell in cells if not _PLAIN_CELL.fullmatch(cell)}) == 1
        and len(some := [row for row in rows if row[at] in words]) > 1
    ]
    candidates = [*(one for one in firsts if one in rows), *again]
    return next((one for one in candidates if _is_head(one, [row for row in rows if row != one])), None)


def _is_head(head: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Whether a line names columns: distinct words that do not occur again in their columns, and numbers do."""
    if not others or len({*head}) < len(head) or not all(map(_HEADING.fullmatch, head)):
        return False
    if any(name == row[at] for row in others for at, name in enumerate(head)):
        return False
    columns = [{*cells} - {""} for cells in zip(*others, strict=True)]
    if any(cells and all(map(_PLAIN_CELL.fullmatch, cells)) for cells in columns):
        return True
    return all(map(str.isidentifier, head)) and any(cell[:1].isdigit() for cells in columns for cell in cells)


def _recognise_lines(lines: Sequence[str]) -> RecognisedFormat:
    if not any(lines):
        return RecognisedFormat(Raw(), "the values are empty")
    if any("\n" in line or "\r" in line for line in lines):
        return RecognisedFormat(Raw(), "the values are texts of several lines, so each is kept whole", tuple(lines))
    documents = tuple({"line": line} if line else {} for line in lines)
    return RecognisedFormat(Lines(WHOLE_LINE), "the values are lines of text without a known form", documents)


@dataclass(frozen=True)
class ValueEnvelope:
    """The delimiters around the data of a value.

    Args:
        kind: `debezium`, `connect`, `cloudevents`, `cloudevents headers`, or empty for none.
        prefix: where the envelope is in the value: `payload` beside a schema of Kafka Connect.
        reason: why, for a person.
        schemas: the distinct schemas that Kafka Connect's JsonConverter wrote beside the payloads.
    """

    kind: str
    reason: str
    prefix: tuple[str, ...] = ()
    schemas: tuple[Any, ...] = ()


_NONE = ValueEnvelope("", "none: the fields are at the top of the value")
_CLOUD = frozenset({"specversion", "id", "source", "type"})


def recognise_envelope(documents: Sequence[Any], records: Sequence[KafkaRecord]) -> ValueEnvelope:
    """Find the envelope of JSON documents."""
    objects = [one for one in documents if isinstance(one, Mapping)]
    connect = [one for one in objects if {*one} == {"schema", "payload"}]
    if _is_most(len(connect), len(objects)):
        schemas = tuple({json.dumps(one["schema"]): one["schema"] for one in connect if one["schema"]}.values())
        payloads = [one["payload"] for one in connect if isinstance(one["payload"], Mapping)]
        if _is_most(sum(map(is_change, payloads)), len(payloads)):
            return ValueEnvelope("debezium", "Debezium, with the schema of Kafka Connect", ("payload",), schemas)
        return ValueEnvelope("connect", "schema and payload of Kafka Connect's JsonConverter", ("payload",), schemas)
    if _is_most(sum(map(is_change, objects)), len(objects)):
        return ValueEnvelope("debezium", "Debezium: before, after, source and op")
    if _is_most(sum({*one} >= _CLOUD for one in objects), len(objects)):
        return ValueEnvelope("cloudevents", "CloudEvents, structured: the event is in data")
    return recognise_header_envelope(records)


def recognise_header_envelope(records: Sequence[KafkaRecord]) -> ValueEnvelope:
    """The envelope that the headers form, with any value format."""
    filled = [record for record in records if record.value is not None]
    named = [record for record in filled if {"ce_id", "ce_type"} <= {name for name, _ in record.headers}]
    if _is_most(len(named), len(filled)):
        return ValueEnvelope("cloudevents headers", "CloudEvents, binary: attributes in the headers ce_*")
    return _NONE


def is_change(document: Mapping[str, Any]) -> bool:
    """Whether an object is a change event of Debezium."""
    names = {*document}
    return {"op", "source"} <= names and bool({"before", "after"} & names) and isinstance(document["source"], Mapping)
