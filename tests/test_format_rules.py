"""Regular expressions of lines, as Python and Java both read them."""

from __future__ import annotations

import re

import pytest

from highwater.classifying import classify
from highwater.declaration import Field
from highwater.errors import DeclarationError
from highwater.format_rules import to_java_pattern, to_python_pattern
from highwater.formats import Lines
from highwater.second_reader import KafkaRecord
from tests.helpers.format_streams import build_stream_of


def test_classes_of_a_pattern_have_ascii_alone() -> None:
    """As Java's: a digit of another script matched in Python alone."""
    stream = build_stream_of(Lines(r"(?P<n>\d+)"), Field("n", "string"))
    assert classify(stream, KafkaRecord("\u0663".encode()), None).reason == "malformed"


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<a>.)(?P=a)", r"(?P<a>.)\Z", r"(?P<a>.)\z",
        r"(?P<a>x{,3})", r"(?P<a>x{)", r"(?P<a>[a[b]])", r"(?P<a>[a&&b])",
        r"(?x)(?P<a> . )", r"(?P<a>\h)", r"(?P<a>\v)", r"(?P<a>\0)",
        r"(?P<a>.)(?#c)", r"(?P<a>[\b])", r"(?P<a>\p{L})", r"(?P<a>\Qx\E)", r"(?P<a>.)\k<a>", r"(?P<a>.)(?(1)b|c)",
        r"(?P<a>.)\U0001f600", r"(?P<a>.)\123", r"(?a)(?P<a>.)", r"(?d)(?P<a>.)",
    ],
)  # fmt: skip
def test_expressions_that_python_and_java_do_not_share_are_refused(pattern: str) -> None:
    with pytest.raises(DeclarationError, match="which Python and Java do not both read"):
        build_stream_of(Lines(pattern), Field("a", "string"))


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (r"\++(?P<a>\d++)", "++7"), (r"(?>x|y)*+(?P<a>7)\)*", "xy7))"), (r"(?:x){2}(?P<a>.{1}+)", "xx7"),
        (r"(?P<a>7)&&x", "7&&x"), (r"(?P<a>7)\\Z", r"7\Z"), (r"\A(?P<a>[+*]+?|7)", "7"),
        (r"(?i)(?<a>7)(?:x|y)(?=Z)z", "7Xz"), (r"(?P<a>[]7\]\[^&]{1,2}?)", "7"), (r"\(?<(?P<a>.)>\)?", "(<7>)"),
        (r"[(?P<](?<a>7)", "<7"), (r"(?P<a>\x37|\u0038)(\.\1)?", "7.7"),
    ],
)  # fmt: skip
def test_expressions_that_both_readers_share_are_accepted(pattern: str, line: str) -> None:
    """`++` after a backslash was refused, and a parenthesis after one was taken for a group."""
    stream = build_stream_of(Lines(pattern), Field("a", "string"))
    assert classify(stream, KafkaRecord(line.encode()), None).values == {"a": "7"}


@pytest.mark.parametrize("quantifier", ["*", "+", "*?", "{2,}", "{2,3}", "{0,9}?"])
def test_a_group_is_repeated_in_a_loop_alone(quantifier: str) -> None:
    reported = re.escape(f"by {quantifier!r}: write {quantifier.rstrip('?') + '+'!r}")
    with pytest.raises(DeclarationError, match=reported):
        build_stream_of(Lines(rf"(?P<a>.)(?:x|y){quantifier}"), Field("a", "string"))


def test_groups_are_named_in_either_syntax() -> None:
    for written in (r"(?P<a>.)\(?<b>[(?<c>](?<d>.)", r"(?<a>.)\(?<b>[(?<c>](?P<d>.)"):
        assert to_java_pattern(written) == r"(?<a>.)\(?<b>[(?<c>](?<d>.)"
        assert to_python_pattern(written) == r"(?P<a>.)\(?<b>[(?<c>](?P<d>.)"
