"""The stream `shipments` of `make demo`: Avro values whose second schema in the registry adds a field."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from highwater.declaration import Answers, Field, Limits, Stream, UnknownFields
from highwater.formats import Avro

PARTITIONS = 2
# Few: they show schemas, not throughput.
BATCH = 200
# The field of the second schema alone, which no field of the stream is taken from.
ADDED = "parcels"

STREAM = Stream(
    name="shipments",
    topic="shipments",
    description="Shipments of orders; each revision replaces the one before it.",
    fields=(
        Field("shipment_id", "string"),
        Field("revision", "long"),
        Field("carrier", "string"),
        Field("weight", "decimal(8,3)"),
        Field("shipped_at", "timestamp"),
    ),
    key=("shipment_id",),
    version="revision",
    event_time="shipped_at",
    record_key="strict",
    value=Avro(),
    unknown_fields=UnknownFields("add"),
    # Each batch is one slice: every run costs processor time that goes into starting it.
    limits=Limits(min_offsets=BATCH),
    answers=Answers(
        does_order_matter="Only within a shipment: the highest revision is the one that counts.",
        what_about_duplicates="The same revision twice counts once.",
        what_on_failure="A person reads the rejects: no topic of retries is declared.",
    ),
)

_FIELDS: list[dict[str, Any]] = [
    {"name": "shipment_id", "type": "string"},
    {"name": "revision", "type": "int"},
    {"name": "carrier", "type": {"type": "enum", "name": "Carrier", "symbols": ["RAIL", "ROAD", "SHIP"]}},
    {"name": "weight", "type": {"type": "bytes", "logicalType": "decimal", "precision": 8, "scale": 3}},
    {"name": "shipped_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
]
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def _schema(*fields: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "Shipment", "namespace": "demo", "fields": fields})


FIRST_SCHEMA = _schema(*_FIELDS)
SECOND_SCHEMA = _schema(*_FIELDS, {"name": ADDED, "type": "int", "default": 1})


def first_batch() -> list[dict[str, Any]]:
    """The records of the first schema: every shipment as it was planned."""
    return [_shipment(number, revision=1) for number in range(BATCH)]


def second_batch() -> list[dict[str, Any]]:
    """The records of the second schema: every other shipment in its next revision, and as many new ones."""
    revised = [_shipment(number, revision=2) for number in range(0, BATCH, 2)]
    new = [_shipment(BATCH + number, revision=1) for number in range(BATCH // 2)]
    return [{**record, ADDED: number % 4 + 1} for number, record in enumerate([*revised, *new])]


def _shipment(number: int, *, revision: int) -> dict[str, Any]:
    return {
        "shipment_id": f"s-{number:05d}",
        "revision": revision,
        "carrier": ("RAIL", "ROAD", "SHIP")[number % 3],
        "weight": Decimal(1_000 * revision + number).scaleb(-3),
        "shipped_at": _BEGIN + timedelta(minutes=number, milliseconds=revision),
    }
