"""The comparison of what the pipeline and the second reader make of a record, and records with a changed byte."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import fastavro
from fastavro.validation import validate

from highwater.classifying import Classification
from highwater.column_comparison import matches_stored
from highwater.declaration import Stream
from highwater.formats import Avro
from highwater.schemas import FramingError, Schema, parse_framing
from highwater.second_reader import KafkaRecord
from tests.helpers.pipeline_rows import reported


def find_difference(stream: Stream, theirs: Classification, ours: Mapping[str, Any]) -> Any:
    """What the second reader and the pipeline say otherwise of one record; nothing if they agree."""
    if (ours["reason"] is None) != (theirs.kind != "reject") or (ours["reason"] == "unresolved") != (
        theirs.reason == "unresolved"
    ):
        return ours["reason"], ours["detail"], theirs
    if ours["reason"] is not None:
        both_invalid = ours["reason"] == theirs.reason == "invalid"
        return (ours["rule"], theirs.rule) if both_invalid and ours["rule"] != theirs.rule else None
    unlike = {
        declared.name: (theirs.values[declared.name], ours[f"v_{declared.name}"])
        for declared in stream.fields
        if not matches_stored(declared, theirs.values[declared.name], reported(ours[f"v_{declared.name}"]))
    }
    return unlike | ({"key": (theirs.key, ours["event_key"])} if theirs.key != ours["event_key"] else {})


def is_canonical(stream: Stream, record: KafkaRecord, find_schema: Callable[[int | str], Schema | None]) -> bool:
    """Whether an encoder writes value and key so: to some readers a boolean of Avro is any byte but 0, to others 1."""
    named = {"__key_schema_id": "__value_schema_id"}
    headers = [(named.get(name, ""), content) for name, content in record.headers]
    return _is_canonical_avro(stream.value, record, find_schema) and _is_canonical_avro(
        stream.key_format, replace(record, value=record.key, headers=headers), find_schema
    )


def _is_canonical_avro(declared: Any, record: KafkaRecord, find_schema: Callable[[int | str], Schema | None]) -> bool:
    if not isinstance(declared, Avro) or record.value is None:
        return True
    text, payload = declared.schema, record.value
    if text is None:
        try:
            framed = parse_framing(record.value, record.headers)
        except FramingError:
            return True
        schema = None if framed is None or framed.schema_id is None else find_schema(framed.schema_id)
        if framed is None or schema is None:
            return True
        text, payload = schema.text, framed.payload
    parsed, out = fastavro.parse_schema(_without_logical_types(json.loads(text))), io.BytesIO()
    try:
        found: Any = fastavro.schemaless_reader(io.BytesIO(payload), parsed, None)
        fastavro.schemaless_writer(out, parsed, found)
    except Exception:  # noqa: BLE001 - whatever fastavro raises for bytes that are none
        return True
    # Java drops the bits beyond the 32 of an `int`, which no encoder writes.
    return out.getvalue() == payload and validate(found, parsed, raise_errors=False)


def _without_logical_types(schema: Any) -> Any:
    """A schema whose values fastavro reads and writes as they are."""
    if isinstance(schema, list):
        return [_without_logical_types(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without_logical_types(one) for name, one in schema.items() if name != "logicalType"}


def mutate(value: bytes, chance: random.Random) -> bytes:
    """The bytes with one changed, left out or added."""
    if not value:
        return bytes([chance.randrange(256)])
    at, byte = chance.randrange(len(value)), bytes([chance.randrange(256)])
    return chance.choice([value[:at] + byte + value[at + 1 :], value[:at] + value[at + 1 :], value + byte])
