"""Columns of events that come from a reference table: their values, what they need, and what a changed row changes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.assets import events, raw
from highwater.classifying import classify
from highwater.declaration import Accepted, Deletes, Field, Stream
from highwater.errors import ConfigurationError, DeclarationError
from highwater.second_reader import KafkaRecord
from highwater.sources import Reference
from highwater.stream_source import to_source
from tests.helpers.support import order_message

if TYPE_CHECKING:
    from tests.helpers.support import Bench

REGION = Field("region", "string", source=Reference("region"))
SCORE = Field("score", "long", source=Reference("points"), nullable=True)


def enriched(stream: Stream, *fields: Field, **changes: Any) -> Stream:
    return replace(stream, fields=(*stream.fields, *fields), **changes)


def reference(bench: Bench, rows: list[tuple[str | None, str | None, int | None]]) -> None:
    """Write the reference table; points have 32 bits in it."""
    import pyarrow as pa
    from deltalake import write_deltalake

    columns = [[row[at] for row in rows] for at in range(3)]
    types = {"customer_id": pa.string(), "region": pa.string(), "points": pa.int32()}
    arrays = [pa.array(values, type=kind) for values, kind in zip(columns, types.values(), strict=True)]
    table = pa.table(dict(zip(types, arrays, strict=True)))
    path = bench.lake.build_reference_path("reference/customers")
    write_deltalake(path, table, mode="overwrite", schema_mode="overwrite")


@pytest.mark.slow
def test_columns_of_the_row_that_is_found(bench: Bench) -> None:
    """A record is one event, however many rows its value has; rows that differ, or lack a value, are waited for."""
    bench.stream = enriched(bench.stream, REGION, SCORE)
    rows = [("c1", "north", 7), ("c2", "south", None), ("c3", None, 1), ("c4", "east", 1), ("c4", "west", 1)]
    reference(bench, [*rows, ("c1", "north", 7), (None, "north", 1)])
    bench.send(*[order_message(f"o{n}", 1, customer_id=f"c{n}") for n in range(1, 6)])
    bench.materialise(bench.plan(0, p0=(0, 5)))
    found = sorted((row["key"], row["region"], row["score"]) for row in bench.rows("events"))
    assert found == [("o1", "north", 7), ("o2", "south", None)]
    assert {key: (row["region"], row["score"]) for key, row in bench.current().items()} == {
        "o1": ("north", 7),
        "o2": ("south", None),
    }
    table = "reference/customers"
    assert sorted(
        (row["origin_offset"], row["reason"], row["permanent"], row["detail"]) for row in bench.rows("rejects")
    ) == [
        (2, "unresolved", False, f"field region is null in {table}, column region, for this customer_id"),
        (3, "unresolved", False, f"{table} has several rows of this customer_id, which differ"),
        (4, "unresolved", False, f"customer_id is not in {table}"),
    ]
    assert not bench.failing()


@pytest.mark.slow
def test_a_changed_row_is_no_conflict(bench: Bench) -> None:
    """A second delivery has the columns of another row and the content of its record, which alone is compared."""
    bench.stream = enriched(bench.stream, REGION)
    reference(bench, [("c1", "north", 7)])
    bench.send(order_message("o1", 1), order_message("o1", 1), order_message("o1", 1, amount=5))
    first, second, third = (bench.plan(at, p0=(at, at + 1)) for at in range(3))
    bench.materialise(first)
    reference(bench, [("c1", "south", 7)])
    bench.materialise(second)
    assert sorted(row["region"] for row in bench.rows("events")) == ["north", "south"]
    assert not bench.failing()
    assert bench.current()["o1"]["region"] == "north"
    bench.materialise(third)
    assert "one_content_a_version" in " ".join(bench.failing())


@pytest.mark.slow
def test_deletes_need_no_row_with_values(bench: Bench) -> None:
    declared = {"first_version": None, "transitions": None, "deletes": Deletes("status", ("canceled",))}
    bench.stream = enriched(bench.stream, REGION, **declared)
    reference(bench, [("c1", None, 7), ("c2", "east", 1), ("c2", "west", 1)])
    bench.send(*[order_message(f"o{n}", 2, status="canceled", customer_id=f"c{n}") for n in (1, 2)])
    bench.materialise(bench.plan(0, p0=(0, 2)))
    assert [row["deleted"] for row in bench.rows("events")] == [True, True]
    assert bench.rows("rejects") == []
    assert not bench.failing()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("declared", "detail", "stored", "found"),
    [
        (
            Field("area", "string", source=Reference("area")),
            "the reference table reference/customers has no column area, which orders reads",
            r"version \d+ has customer_id, region, points",
            None,
        ),
        (
            Field("region", "long", source=Reference("region")),
            "the column region of the reference table reference/customers does not fit field region",
            "orders declares long",
            r"version \d+ of the table has string",
        ),
    ],
    ids=["no column", "another type"],
)
def test_a_table_that_does_not_fit_fails_the_slice(
    bench: Bench, declared: Field, detail: str, stored: str, found: str | None
) -> None:
    """Its records are not to blame: none of them is a reject."""
    bench.stream = enriched(bench.stream, declared)
    reference(bench, [("c1", "north", 7)])
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    raw.materialise(bench.work(slice_))
    with pytest.raises(ConfigurationError, match=detail) as caught:
        events.materialise(bench.work(slice_))
    assert re.fullmatch(stored, str(caught.value.stored))
    assert found is None or re.fullmatch(found, str(caught.value.found))
    assert bench.rows("events") == []


@pytest.mark.parametrize(
    ("fields", "changes", "detail"),
    [
        ([REGION], {"lookup": None}, "'region' is a column of the lookup's table, and no lookup is declared"),
        ([REGION], {"key": ("region",)}, "'region' is a column of the lookup's table, so it cannot be the key"),
        ([REGION], {"rules": {"north": "upper(Region) = 'N'"}}, "rule 'north': it names 'region', a column of the"),
        ([REGION, Field("x", "string", expression="region")], {}, "field 'x': it names 'region', a column of the"),
        ([replace(REGION, source=(Reference("region"), "region"))], {}, "its only source"),
        ([replace(REGION, expression="1")], {}, "its only source"),
        ([replace(REGION, type="json")], {}, "cannot be a json"),
        ([replace(REGION, one_of=("north",), mask="drop")], {}, "as it is: leave out one_of, mask"),
        (
            [replace(ORDERS.fields[3], name="who", nullable=True), REGION],
            {"lookup": replace(ORDERS.lookup, field="who")},  # type: ignore[type-var]
            "field 'who', by which it is looked up, may be null: declare optional=True",
        ),
    ],
)
def test_fields_of_a_lookup_go_with_the_rest(fields: list[Field], changes: dict[str, Any], detail: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(detail)):
        enriched(ORDERS, *fields, **{"publishes": None, **changes})


def test_a_rule_may_have_the_name_of_such_a_field_as_a_text() -> None:
    stream = enriched(ORDERS, REGION, rules={"one": "customer_id <> 'region'"}, publishes=Accepted("a"))
    assert [f.name for f in stream.fields if not f.is_read] == ["region"]


def test_the_second_reader_leaves_such_fields_out() -> None:
    """`highwater try` has neither Spark nor the reference table."""
    message = order_message("o1", 1)
    stream = enriched(ORDERS, REGION)
    outcome = classify(stream, KafkaRecord(message.value, message.key), None)
    assert (outcome.kind, outcome.key, "region" in outcome.values) == ("event", "o1", False)
    held: dict[str, Any] = {}
    exec(to_source(stream), held)
    assert held["STREAM"] == stream
