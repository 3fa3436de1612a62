"""Decoded values, compared with the rows of a table."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from highwater.column_comparison import matches_stored
from highwater.declaration import Field
from tests.helpers.format_streams import MICRO


@pytest.mark.parametrize(
    ("read", "stored"),
    [
        (datetime(2026, 1, 1, 0, 0, 0, 120000, UTC), '"2026-01-01 00:00:00.12+00:00"'),
        (datetime(2026, 1, 1), '"2026-01-01 00:00:00"'),  # noqa: DTZ001 - a local time
        (date(2026, 1, 1), '"2026-01-01"'),
        (b"\0\xff", '"AP8="'),
        (0.10000000149011612, "0.1"),
        (1e300, "1.0E300"),
        (float("inf"), "Infinity"),
        ({"a": [1, None, True, {"b": Decimal("1.50")}]}, '{"a":[1,null,true,{"b":1.5}]}'),
    ],
)
def test_json_of_decoded_values_is_compared(read: Any, stored: str) -> None:
    """Times and dates of Avro never equalled their texts: the check called sound events unlike."""
    declared = Field("x", "json")
    assert matches_stored(declared, read, stored)
    assert not matches_stored(declared, read, stored.replace("1", "2").replace("P", "Q").replace("Inf", "-Inf"))


def test_nested_values_are_compared_with_rows_of_a_table() -> None:
    at = Field("at", "timestamp_ntz")
    declared = Field("x", "map", of=Field("v", "array", of=Field("e", "struct", of=(at, Field("n", "long")))))
    read = {"k": [{"at": MICRO, "n": 1}, None]}
    moment = datetime(2026, 1, 1)  # noqa: DTZ001 - a local time
    assert matches_stored(declared, read, [("k", [{"at": moment, "n": 1}, None])])
    assert not matches_stored(declared, read, {"k": [{"at": moment, "n": 2}, None]})
    assert not matches_stored(declared, read, {"k": [{"at": moment, "n": True}, None]})
    assert not matches_stored(declared, read, {"k": [{"n": 1}, None]})
    assert not matches_stored(declared, read, [("l", [{"at": moment, "n": 1}, None])])
