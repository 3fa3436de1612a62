"""Records as public producers write them, and what is inferred from them."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from highwater.classifying import classify
from highwater.declaration import Field, Stream
from highwater.decoding import Schemas
from highwater.inference import Inferred
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord
from highwater.stream_files import load_streams

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
BEGIN_MS = 1_767_225_600_000


def build_records(
    pairs: Iterable[tuple[Any, Any]], headers: Sequence[tuple[str, bytes]] = (), **more: Any
) -> list[KafkaRecord]:
    """Records from keys and values; what is no bytes is written as JSON."""

    def written(one: Any) -> Any:
        return one if one is None or isinstance(one, bytes) else json.dumps(one).encode()

    return [
        KafkaRecord(
            written(value), written(key), tuple(headers), "t", more.get("partition", 0), offset, BEGIN_MS + offset
        )
        for offset, (key, value) in enumerate(pairs)
    ]


def list_types(found: Inferred) -> dict[str, str]:
    return {one.name: one.type for one in found.stream.fields}


def list_kinds(found: Inferred, records: Sequence[KafkaRecord], schemas: Schemas | None = None) -> list[str]:
    return [classify(found.stream, one, schemas).kind for one in records]


def text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def field(found: Inferred, name: str) -> Field:
    return found.stream.find_field(name)


def change(number: int, op: str, at: int, **more: Any) -> dict[str, Any]:
    row = {
        "id": number,
        "customer": f"c{number}",
        "amount": base64.b64encode((1234 + at).to_bytes(2, "big")).decode(),
        "note": None if at % 3 else "gift ☕",
        "created": (BEGIN_MS + at) * 1000 + 456,
        "day": 20454 + at % 9,
        "updated_at": text(BEGIN + timedelta(seconds=at)),
    }
    source = {"version": "3.2.0", "connector": "postgresql", "ts_ms": BEGIN_MS + at, "lsn": 24_000_000 + at}
    before = None if op == "c" else row if op == "u" else {**dict.fromkeys(row), "id": number}
    after = None if op == "d" else row
    return {"before": before, "after": after, "source": {**source, **more}, "op": op, "ts_ms": BEGIN_MS + at + 90}


def changes() -> list[tuple[Any, Any]]:
    chance, live = random.Random(7), set[int]()
    found: list[tuple[Any, Any]] = []
    while len(found) < 200:
        number, at = chance.randrange(30), len(found)
        if number in live and chance.random() < 0.3:
            live.discard(number)
            found += [({"id": number}, change(number, "d", at)), ({"id": number}, None)]
        else:
            found.append(({"id": number}, change(number, "u" if number in live else "c", at)))
            live.add(number)
    return found


def github_events(*, keyed: bool = False) -> list[tuple[Any, Any]]:
    payloads: list[Callable[[int], dict[str, Any]]] = [
        lambda n: {"push_id": n, "size": 1, "commits": [{"sha": "a", "message": "fix"}]},
        lambda _: {"action": "started"},
        lambda n: {"action": "opened", "issue": {"number": n, "title": "t"}},
        lambda n: {"ref": "main", "ref_type": "branch", "description": None, "master": str(n)},
        lambda n: {"forkee": {"id": n}, "size": "large"},
    ]
    found: list[tuple[Any, Any]] = []
    for number in range(200):
        event: dict[str, Any] = {
            "id": str(22_249_084_964 + number),
            "type": f"Kind{number % 5}",
            "actor": {"id": number % 7, "login": f"user{number % 7}"},
            "repo": {"id": 1_000_000 + number % 11, "name": "octo/hello"},
            "payload": payloads[number % 5](number),
            "public": number % 2 == 0,
            "created_at": text(BEGIN + timedelta(seconds=number)),
        }
        if number % 4 == 0:
            event["org"] = {"id": 9919, "login": "corp"}
        found.append((str(1_000_000 + number % 11).encode() if keyed or number % 3 else None, event))
    return found


def telemetry() -> list[tuple[Any, Any]]:
    found = []
    for number in range(200):
        device = number % 8
        value: dict[str, Any] = {
            "device": f"s-{device}",
            "seq": 4700 + number,
            "ts": BEGIN_MS + 1000 * number,
            "temp": float("nan") if number % 10 == 0 else 21 if number % 10 == 1 else 21.5 + number,
            "hum": None if number % 6 == 0 else 45.5,
            "rssi": -70,
            "pos": None if number % 9 == 0 else {"lat": 52.5, "lon": 13 if number % 2 else 13.4},
        }
        if number % 5 == 0:
            value["fw"] = "1.2.0"
        found.append((bytes([0xA4, 0xCF, 0x12, 0xFF, 0, device]), value))
    return found


def orders() -> list[tuple[Any, Any]]:
    found = []
    for number in range(200):
        order, version = f"o-{number % 40}", number // 40 + 1
        value: dict[str, Any] = {
            "order_id": order,
            "version": version,
            "status": "placed",
            "total": f"{number}.90",
            "updated_at": text(BEGIN + timedelta(seconds=number)),
            "lines": [
                {"sku": "A", "qty": 2, "price": "19.95"},
                {"sku": "B", "qty": 1, "price": 4.89, **({"gift": True} if number % 3 else {})},
            ][: number % 3],
        }
        if number % 4 == 0:
            value["coupon"] = None if number % 8 else "SPRING"
        found.append((order.encode(), value))
    return found


INVOICE = {
    "type": "record",
    "name": "Invoice",
    "namespace": "billing",
    "fields": [
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {
            "name": "amount",
            "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}],
            "default": None,
        },
        {"name": "issued_at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "due", "type": {"type": "int", "logicalType": "date"}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["STANDARD", "CREDIT"]}},
        {"name": "checksum", "type": {"type": "fixed", "name": "Crc", "size": 4}},
    ],
}


INVOICE_2 = {**INVOICE, "fields": [*INVOICE["fields"], {"name": "currency", "type": "string", "default": "EUR"}]}
ORDER_JSON = {
    "type": "object",
    "required": ["order_id", "version", "amount", "placed_at"],
    "properties": {
        "order_id": {"type": "string"},
        "version": {"type": "integer"},
        "amount": {"type": "number"},
        "placed_at": {"type": "string", "format": "date-time"},
        "coupon": {"type": ["string", "null"]},
    },
}


GUID = "89791762-2336-4186-9674-299b90a802e2"
REGISTRY: dict[int | str, Schema] = {
    7: Schema(7, "AVRO", json.dumps(INVOICE)),
    8: Schema(8, "AVRO", json.dumps(INVOICE_2)),
    9: Schema(9, "AVRO", '"string"'),
    42: Schema(42, "JSON", json.dumps(ORDER_JSON)),
    GUID: Schema(None, "JSON", json.dumps(ORDER_JSON)),
}


def framed(schema_id: int, payload: bytes) -> bytes:
    return b"\x00" + schema_id.to_bytes(4, "big") + payload


def load_stream(source: str, folder: Path) -> Stream:
    (folder / "one.py").write_text(source)
    [found] = load_streams(folder).values()
    return found


def list_sentences() -> list[tuple[Any, Any]]:
    return [(b"host", f"INFO started in {n} ms".encode()) for n in range(20)]


def opaque() -> list[tuple[Any, Any]]:
    return [(None, bytes([255, n])) for n in range(20)]
