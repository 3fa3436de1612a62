"""The rules of fields inside other fields."""

from __future__ import annotations

import pytest

from highwater.declaration import Field
from highwater.field_rules import find_field_problems
from highwater.sources import Key, Meta


@pytest.mark.parametrize(
    ("declared", "reported"),
    [
        (Field("x", "struct", of=(Field("a`b", "string"),)), "member 'a`b': a name is letters"),
        (Field("x", "struct", of=(Field("a", "string", source="a..b"),)), "field 'a': source: 'a..b' is no path"),
        (Field("x", "struct", of=(Field("a", "string", source=Key()),)), "'a' inside of it can only come from a path"),
        (Field("x", "struct", of=(Field("a", "long"), Field("A", "long"))), "'a' is a member twice"),
        (Field("x", "timestamp_ntz", source=Meta("timestamp")), "is a number in ms: declare unit='ms'"),
        (Field("x", "array", of=()), "of must be one field, the elements of the array"),
        (Field("x", "map", of=Field("v", "long", optional=True)), "they cannot be optional"),
        (Field("x", "struct"), "of gives no member of the struct"),
        (Field("x", "string", of=Field("v", "long")), "of is for arrays, maps and structs, and this is a string"),
        (Field("x", "time", optional=True, default="00:00:00"), "a time has no default"),
        (Field("x", "decimal(4,2)", unscaled=True, text=True), "leave out text"),
        (Field("x", "long", rounded=True), "rounded and unscaled are for decimals"),
    ],
)
def test_a_field_that_cannot_be_is_refused_with_a_sentence(declared: Field, reported: str) -> None:
    """A wrong path of a member raised ValueError, and a name with a backtick failed in Spark."""
    assert any(reported in problem for problem in find_field_problems(declared))


def nested(depth: int) -> Field:
    return Field("x", "long") if depth == 1 else Field("x", "array", of=nested(depth - 1))


def test_fields_are_nested_16_times_at_most() -> None:
    assert find_field_problems(nested(16)) == []
    assert "16 times at the most" in find_field_problems(nested(17))[0]
