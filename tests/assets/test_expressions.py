"""Fields and rules that are expressions of Spark SQL."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Deletes, Field
from highwater.errors import ConfigurationError, DeclarationError
from tests.helpers.support import Message, make_stream

if TYPE_CHECKING:
    from tests.helpers.support import Bench

FIELDS = (
    Field("id", "string"),
    Field("file", "string", mask="drop"),
    Field("pos", "long", mask="drop"),
    Field("version", "long", expression="try_cast(substring_index(file, '.', -1) AS BIGINT) * 1000000 + pos"),
    Field("email", "string", mask="drop", nullable=True),
    Field("email_hash", "string", expression="sha2(email, 256)", nullable=True),
    Field("amount", "decimal(12,2)"),
    Field("sort", "string", optional=True),
    Field("tax", "decimal(12,2)", expression="amount * 0.2"),
    Field("gone", "boolean", expression="coalesce(sort = 'gone', false)"),
)
MORE: dict[str, Any] = {
    "fields": FIELDS,
    "key": ("id",),
    "version": "version",
    "event_time": None,
    "record_key": "ignore",
    "first_version": None,
    "transitions": None,
    "lookup": None,
    "deletes": Deletes("gone", (True,)),
    "rules": {"amount_positive": "amount > 0", "sort_is_short": "length(sort) < 10"},
}


def record(text: str) -> Message:
    return Message(None, text.encode())


@pytest.mark.slow
def test_columns_rules_versions_and_deletes_by_expression(bench: Bench) -> None:
    """A version of file and position, a hash in place of an address, a sum, a delete by condition, and two rules."""
    bench.stream = make_stream(bench.stream.topic, **MORE)
    bench.send(
        record('{"id": "a", "file": "bin.000001", "pos": 900, "email": "x@y", "amount": 10.5}'),
        record('{"id": "a", "file": "bin.000002", "pos": 4, "email": null, "amount": 2}'),
        record('{"id": "b", "file": "bin.000002", "pos": 5, "email": null, "amount": 2, "sort": "gone"}'),
        record('{"id": "b", "file": "bin.000001", "pos": 5, "email": null, "amount": 3, "sort": "s"}'),
        record('{"id": "c", "file": "bin.000001", "pos": 6, "email": null, "amount": 0}'),
        record('{"id": "d", "file": "bin.000001", "pos": 7, "email": null, "amount": 1, "sort": "0123456789"}'),
        record('{"id": "e", "file": "bin", "pos": 7, "email": null, "amount": 1}'),
    )
    bench.materialise(bench.plan(0, p0=(0, 7)))
    events = sorted(bench.rows("events"), key=lambda row: (row["key"], row["version"]))
    assert [(row["key"], row["version"], row["tax"]) for row in events] == [
        ("a", 1_000_900, Decimal("2.10")),
        ("a", 2_000_004, Decimal("0.40")),
        ("b", 1_000_005, Decimal("0.60")),
        ("b", 2_000_005, Decimal("0.40")),
    ]
    assert {"email", "file", "pos"}.isdisjoint(events[0])
    assert events[0]["email_hash"] == sha256(b"x@y").hexdigest()
    assert events[1]["email_hash"] is None
    assert {key: row["version"] for key, row in bench.current().items()} == {"a": 2_000_004}
    assert sorted((row["reason"], row["detail"]) for row in bench.rows("rejects")) == [
        ("invalid", "rule amount_positive is not met: amount > 0"),
        ("invalid", "rule sort_is_short is not met: length(sort) < 10"),
        ("malformed", f"field version is null: {FIELDS[3].expression}"),
    ]
    # The older version of b came after the newer one.
    assert [name.split()[0] for name in bench.failing()] == ["versions_along_offsets"]


@pytest.mark.slow
def test_a_record_on_which_an_expression_fails_is_a_reject_and_the_others_go_on(bench: Bench) -> None:
    """A division by zero, a text that is no number, and a failing rule; Spark would fail the whole query."""
    share, number = "100 / amount", "CAST(sort AS INT)"
    fields = (*FIELDS[:8], Field("share", "double", expression=share), Field("n", "long", expression=number))
    rules = {"known": "CAST(email AS INT) > 0"}
    changes = {"fields": (*fields, FIELDS[9]), "rules": rules, "record_key": "ignore"}
    bench.stream = make_stream(bench.stream.topic, **{**MORE, **changes})
    common = '"file": "bin.000001", "pos": 1, "email"'
    bench.send(
        record(f'{{"id": "a", {common}: null, "amount": 4, "sort": "7"}}'),
        record(f'{{"id": "b", {common}: null, "amount": 0, "sort": "7"}}'),
        record(f'{{"id": "c", {common}: null, "amount": 4, "sort": "seven"}}'),
        record(f'{{"id": "d", {common}: "nobody", "amount": 4, "sort": "7"}}'),
        record(f'{{"id": "e", {common}: "12", "amount": 5, "sort": "8"}}'),
    )
    slice_ = bench.plan(0, p0=(0, 5))
    bench.materialise(slice_)
    assert sorted((row["key"], row["share"], row["n"]) for row in bench.rows("events")) == [("a", 25, 7), ("e", 20, 8)]
    rejects = sorted((row["origin_offset"], row["reason"], row["rule"], row["detail"]) for row in bench.rows("rejects"))
    failed = "its expression fails on this record"
    assert rejects == [
        (1, "malformed", None, f"field share: {failed}: {share}"),
        (2, "malformed", None, f"field n: {failed}: {number}"),
        (3, "invalid", "known", f"rule known fails on this record: {rules['known']}"),
    ]
    again = bench.rejects_from_raw(slice_)
    assert sorted((row["origin_offset"], row["reason"], row["rule"], row["detail"]) for row in again) == rejects


@pytest.mark.slow
def test_an_expression_that_spark_refuses_is_named(bench: Bench) -> None:
    """The error has the field, the text and Spark's reason."""
    bench.stream = make_stream(bench.stream.topic, **{**MORE, "rules": {"known": "abs(nothing_of_that_name) = 1"}})
    bench.send(record("{}"))
    with pytest.raises(ConfigurationError) as caught:
        bench.materialise(bench.plan(0, p0=(0, 1)))
    assert "rule 'known'" in str(caught.value)
    assert "nothing_of_that_name" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"rules": {"now": "event_time < now()"}}, "rule 'now': 'now' cannot be used"),
        ({"rules": {"other": "amount > (SELECT 1)"}}, "'SELECT' cannot be used"),
        ({"rules": {"other": "amount > (FROM t)"}}, "'(FROM' cannot be used"),
        ({"rules": {"other": "amount > (TABLE t)"}}, "'(TABLE' cannot be used"),
        ({"rules": {"empty": " "}}, "the expression is empty"),
        ({"rules": {"half": "amount > "}}, "rule 'half': it ends with '>'"),
        ({"rules": {"half": "amount > 0 AND"}}, "rule 'half': it ends with 'AND'"),
        ({"rules": {"half": "amount > 0)"}}, "rule 'half': its parentheses do not match"),
        ({"rules": {"half": "status = 'x"}}, "rule 'half': a quotation mark is not closed"),
        ({"rules": {"other": "amount > 0 and nope = 'x'"}}, "rule 'other': there is no field 'nope'"),
        ({"rules": {"a rule": "true"}}, "rule 'a rule': a name is letters"),
        (
            {"fields": (*ORDERS.fields, Field("x", "long", expression="1", optional=True))},
            "an expression has no source",
        ),
    ],
)
def test_forbidden_expressions_are_refused(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        replace(ORDERS, **changes)
    assert reported in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "amount IS DISTINCT FROM version",
        "extract(year FROM event_time) > 2000",
        "trim(BOTH ' ' FROM status) <> ''",
        "Amount > 0 OR version = 1e3",
        "status = 'it''s ('",
        "event_time > date '2020-01-01'",
        "status RLIKE '^a'",
        "exists(array(version), x -> x > 0)",
        "case when amount > 0 then true else false end",
        'status <> "it\'s ("',
        r"replace(status, r'\', '/') = 'a'",
        "amount > 1.",
        "amount > 0 /* don't */",
        "status <> 'a' -- that's all",
    ],
)
def test_sound_and_unknown_expressions_are_left_to_spark(text: str) -> None:
    assert replace(ORDERS, rules={"other": text}).rules


def test_words_in_quotes_are_no_functions() -> None:
    assert replace(ORDERS, rules={"status": "status <> 'select now()'"}).rules
