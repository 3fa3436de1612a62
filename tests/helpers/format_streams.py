"""Declarations of topics as other systems fill them, and their records, for the pipeline and for the second reader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from highwater.declaration import Answers, Deletes, Field, Stream
from highwater.formats import Avro, Format, Json
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord

FOLDER = Path(__file__).parents[1] / "formats"
ANSWERS = Answers("By key.", "The same version counts once.", "Rejects wait for a person.")


# The detail of a number that is written as a text.
IN_TEXT = "it is a number in text, which text=True declares"
# Microseconds of 2026-01-01.
MICRO = 1_767_225_600_000_000


def _stream(name: str, fields: tuple[Field, ...], **more: Any) -> Stream:
    return Stream(name, name, fields, answers=ANSWERS, record_key="ignore", **more)


def _row(name: str, kind: str, **more: Any) -> Field:
    """A column of a Debezium record, which a delete has in `before`."""
    return Field(name, kind, source=(f"after.{name}", f"before.{name}"), **more)


LINE = (
    Field("sku", "string"),
    Field("qty", "integer"),
    Field("price", "decimal(12,2)", text=True, rounded=True),
    Field("gift", "boolean", optional=True),
)
# In deletes Debezium fills `before` with the key alone, and columns that may not be null with zeros.
FORMATS: Mapping[str, Stream] = {
    "01-debezium-postgres-plain": _stream(
        "debezium",
        (
            _row("id", "long"),
            Field("customer", "string", source="after.customer"),
            Field("amount", "decimal(12,2)", source="after.amount", unscaled=True),
            Field("note", "string", source="after.note", nullable=True),
            Field("created", "timestamp_ntz", source="after.created", unit="us"),
            Field("day", "date", source="after.day", unit="days"),
            Field("updated_at", "timestamp", source="after.updated_at"),
            Field("op", "string", one_of=("c", "u", "d", "r")),
            Field("lsn", "long", source="source.lsn"),
            Field("at", "timestamp", source="source.ts_ms", unit="ms"),
        ),
        key=("id",),
        version="lsn",
        event_time="at",
        deletes=Deletes("op", ("d",)),
    ),
    "05-github-events": _stream(
        "github",
        (
            Field("id", "string"),
            Field("type", "string"),
            Field("actor_login", "string", source="actor.login"),
            Field("repo_id", "long", source="repo.id"),
            Field("repo_name", "string", source="repo.name"),
            Field("created_at", "timestamp"),
            Field("payload", "json"),
            Field("org_login", "string", source="org.login", optional=True),
        ),
        key=("id",),
        event_time="created_at",
    ),
    "06-iot-telemetry": _stream(
        "telemetry",
        (
            Field("device", "string"),
            Field("seq", "long"),
            Field("ts", "timestamp", unit="ms"),
            Field("temp", "double", nan="null"),
            Field("hum", "double", nullable=True),
            Field("rssi", "integer"),
            Field("lat", "double", source="pos.lat", optional=True),
            Field("lon", "double", source="pos.lon", optional=True),
        ),
        key=("device",),
        version="seq",
        event_time="ts",
    ),
    "09-order-lines": _stream(
        "order_lines",
        (
            Field("order_id", "string"),
            Field("version", "integer"),
            Field("status", "string"),
            Field("total", "decimal(12,2)", text=True),
            Field("updated_at", "timestamp"),
            Field("coupon", "string", optional=True, nullable=True),
            Field("lines", "array", of=Field("line", "struct", of=LINE)),
        ),
        key=("order_id",),
        version="version",
        event_time="updated_at",
    ),
    "10-avro-logical-types": _stream(
        "invoices",
        (
            Field("id", "string"),
            Field("amount", "decimal(12,2)", nullable=True),
            Field("issued_at", "timestamp"),
            Field("seen_at", "timestamp"),
            Field("due", "date"),
            Field("tags", "map", of=Field("tag", "string")),
            Field("note", "string", nullable=True),
            Field("kind", "string"),
            Field("checksum", "binary"),
            Field("currency", "string", optional=True, default="EUR"),
        ),
        key=("id",),
        version="issued_at",
        event_time="issued_at",
        value=Avro(),
    ),
    "12-json-schema-registry": _stream(
        "registered",
        (
            Field("order_id", "string"),
            Field("version", "integer"),
            Field("amount", "decimal(18,8)"),
            Field("placed_at", "timestamp"),
            Field("coupon", "string", optional=True, nullable=True),
        ),
        key=("order_id",),
        version="version",
        event_time="placed_at",
        value=Json(registry=True),
    ),
}
_AVRO = json.loads((FOLDER / "10-avro-logical-types.schemas.json").read_text())
SCHEMAS: Mapping[int, Schema] = {
    **{int(number): Schema(int(number), "AVRO", json.dumps(one)) for number, one in _AVRO.items()},
    42: Schema(42, "JSON", '{"type": "object"}'),
}


def find_schema(one: int | str) -> Schema | None:
    """A schema by its number; GUIDs are known to nobody."""
    return SCHEMAS.get(one) if isinstance(one, int) else None


def records(name: str) -> list[KafkaRecord]:
    """The records of a format, in their order."""
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines()
    return [_record(at, json.loads(line)) for at, line in enumerate(lines)]


def _record(offset: int, line: Mapping[str, Any]) -> KafkaRecord:
    value, key = line["value_hex"], line["key_hex"]
    return KafkaRecord(
        value=None if value is None else bytes.fromhex(value),
        key=None if key is None else bytes.fromhex(key),
        headers=[(header, bytes.fromhex(content)) for header, content in line["headers"]],
        offset=offset,
        timestamp_ms=line["timestamp_ms"],
    )


def build_stream_of(value: Format, *fields: Field) -> Stream:
    """A stream without a key whose values have a format."""
    return replace(FORMATS["05-github-events"], fields=fields, key=(), event_time=None, value=value)
