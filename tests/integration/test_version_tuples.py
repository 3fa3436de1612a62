"""Versions of several fields: the first one counts most, and numbers count as numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from highwater.declaration import Answers, Deletes, Field, Stream
from highwater.errors import DeclarationError
from tests.helpers.support import LONG_TIERS, Message

if TYPE_CHECKING:
    from tests.helpers.support import Bench

FIELDS = (
    Field("id", "string"),
    Field("file", "integer"),
    Field("pos", "long"),
    Field("at", "timestamp"),
    Field("op", "string", optional=True),
    Field("x", "string", optional=True),
)
STREAM = Stream(
    "changes",
    "changes",
    FIELDS,
    ("id",),
    ("file", "pos"),
    answers=Answers("By key.", "Once.", "Parked."),
    deletes=Deletes("op", ("d",)),
    tiers=LONG_TIERS,
)


def change(file: int, pos: int | None, *, key: str = "a", **more: Any) -> Message:
    value = {"id": key, "file": file, "pos": pos, "at": "2026-01-01T00:00:00Z", **more}
    return Message(key.encode(), json.dumps(value).encode())


@pytest.mark.slow
def test_the_highest_version_wins_whatever_the_order(bench: Bench) -> None:
    """As texts 9 is above 10, and 2|0 below 10|0: both would leave an old row in `current`."""
    from highwater.assets.current_rebuild import RebuildSnapshot, compare_with_events, rebuild

    bench.stream = replace(STREAM, topic=bench.stream.topic)
    bench.send(
        change(2, 10, x="newest of file 2"),
        change(2, 9, x="old"),
        change(10, 0, x="newest"),
        change(9, 9_223_372_036_854_775_807, x="largest of file 9"),
        change(1, 5, key="gone", op="d"),
        change(1, -1, key="b"),
        change(1, None, key="b"),
        change(1, 4, key="gone", x="late"),
    )
    for number, (first, end) in enumerate([(0, 3), (3, 8)]):
        bench.materialise(bench.plan(number, p0=(first, end)))
    versions = sorted((row["version"], row["file"], row["pos"]) for row in bench.rows("events") if row["key"] == "a")
    assert versions == [
        ("0000000000000000002|0000000000000000009", 2, 9),
        ("0000000000000000002|0000000000000000010", 2, 10),
        ("0000000000000000009|9223372036854775807", 9, 9_223_372_036_854_775_807),
        ("0000000000000000010|0000000000000000000", 10, 0),
    ]
    assert {key: row["x"] for key, row in bench.current().items()} == {"a": "newest"}
    assert sorted((row["reason"], row["detail"]) for row in bench.rows("rejects")) == [
        ("invalid", "pos is below 0, and a part of the version"),
        ("malformed", "field pos is null"),
    ]
    work = bench.work()
    assert compare_with_events(work, RebuildSnapshot.take(work)).none
    assert rebuild(work) == 1
    assert {name.partition(" ")[0] for name in bench.failing()} == {"versions_along_offsets"}, "and no other check"


@pytest.mark.slow
def test_times_are_parts_too(bench: Bench) -> None:
    bench.stream = replace(STREAM, topic=bench.stream.topic, version=("at", "pos"), deletes=None)
    bench.send(
        change(1, 1, at="2026-01-01T00:00:00.5Z", x="middle"),
        change(1, 0, at="2026-01-01T00:00:00.500001Z", x="newest"),
        change(1, 9, at="0999-01-01T00:00:00Z", x="oldest"),
    )
    bench.materialise(bench.plan(0, p0=(0, 3)))
    assert sorted(row["version"] for row in bench.rows("events")) == [
        "0999-01-01 00:00:00.000000|0000000000000000009",
        "2026-01-01 00:00:00.500000|0000000000000000001",
        "2026-01-01 00:00:00.500001|0000000000000000000",
    ]
    assert bench.current()["a"]["x"] == "newest"
    assert {name.partition(" ")[0] for name in bench.failing()} == {"versions_along_offsets"}, "and no other check"


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"version": ()}, "version names no field"),
        ({"version": ("pos", "pos")}, "the version has field 'pos' 2 times"),
        ({"version": ("pos", "id")}, "the version must be an integer, a long or a timestamp"),
        ({"version": ("pos", "nothing")}, "'nothing' is used and not declared"),
        ({"first_version": 1, "record_key": "strict"}, "first_version is for versions that count"),
    ],
)
def test_a_version_of_several_fields_is_checked(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(DeclarationError, match=reported):
        replace(STREAM, **changes)
