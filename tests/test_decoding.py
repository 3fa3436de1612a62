"""JSON of values and keys without Spark: each fault has a sentence of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from highwater.decoding import _parse_json, _parse_json_key
from highwater.second_reader import MisfitError

VALUE = partial(_parse_json, infinite=False)


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (_parse_json_key, b"{", "not JSON: Expecting"),
        (_parse_json_key, b"NaN", "not JSON: NaN"),
        (_parse_json_key, b"\xff", "the value is not UTF-8 at byte 0"),
        (_parse_json_key, b'{"a": 1, "a": 2}', "the value has a name twice"),
        (_parse_json_key, rb'"\ud800"', "the value has half of a surrogate pair"),
        (VALUE, b"{", "the value is no JSON: Expecting"),
        (VALUE, b'{"a": NaN}', "the value is no JSON: NaN, which no field takes"),
        (VALUE, b"\xff", "the value is not UTF-8 at byte 0"),
        (VALUE, b"[]", "the value is no JSON object"),
    ],
)
def test_a_fault_of_json_is_named(parse: Callable[[bytes], Any], text: bytes, problem: str) -> None:
    with pytest.raises(MisfitError) as raised:
        parse(text)
    assert str(raised.value).startswith(problem)
