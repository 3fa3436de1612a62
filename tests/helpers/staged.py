"""Messages that a stage rejects or accepts, by the reason."""

from __future__ import annotations

import json

from tests.helpers.support import (
    order,
)


def select_origins(rows: list[dict[str, object]]) -> set[tuple[object, object]]:
    return {(row["origin_partition"], row["origin_offset"]) for row in rows}


def sound(order_id: str) -> bytes:
    return json.dumps(order(order_id, 1)).encode()


def without(name: str) -> bytes:
    return json.dumps({k: v for k, v in order("o1", 1).items() if k != name}).encode()


BAD_VALUES = {
    "field missing": without("amount"),
    "not JSON": b"nope",
    "two documents": sound("o1") + sound("o1"),
    "trailing word": sound("o1") + b" x",
    "trailing bracket": sound("o1") + b"]",
    "an array's end and another document": sound("o1") + b"]" + sound("o1"),
    "another element": sound("o1") + b"," + sound("o1"),
    "a comma": sound("o1") + b",",
    "an array": b"[1]",
    "null": b"null",
    "a field twice": b'{"order_id": "o1", "order_id": "o1"}',
    "not UTF-8": b'{"order_id": "\xff"}',
    "empty": b"",
}
