"""The version rule over generated histories: in whatever order, how often, and in what parts rows are merged."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater.assets.current import select_winners

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
Row = Mapping[str, Any]

ROWS = st.fixed_dictionaries(
    {
        "version": st.integers(1, 3),
        "second": st.integers(0, 2),
        "origin_partition": st.integers(0, 1),
        "origin_offset": st.integers(0, 2),
        "origin_generation": st.integers(0, 1),
        "part": st.integers(0, 2),
    }
)
# An origin occurs once: two rows that are equal in it are one.
HISTORIES = st.lists(
    ROWS,
    min_size=1,
    max_size=8,
    unique_by=lambda row: (row["second"], row["origin_partition"], row["origin_offset"], row["origin_generation"]),
)


def expected(history: Sequence[Row]) -> Row:
    """The highest version; of equal ones what was published first, then the least partition, offset and generation."""
    highest = max(row["version"] for row in history)
    place = ("second", "origin_partition", "origin_offset", "origin_generation")
    return min((row for row in history if row["version"] == highest), key=lambda row: [row[name] for name in place])


def table(spark: SparkSession, rows: Sequence[tuple[str, int, Row]]) -> DataFrame:
    made = [
        (
            way,
            number,
            row["version"],
            row["second"] * 1000,
            row["origin_partition"],
            row["origin_offset"],
            row["origin_generation"],
            row["part"],
            row["second"],
        )
        for way, number, row in rows
    ]
    columns = (
        "way STRING, history INT, version INT, origin_timestamp_ms BIGINT, origin_partition INT, origin_offset BIGINT, "
        "origin_generation INT, part INT, second INT"
    )
    return spark.createDataFrame(made, columns)


@pytest.mark.slow
# The first example is the simplest one, so two are the least.
@settings(max_examples=2, deadline=None, suppress_health_check=[*HealthCheck])
@given(histories=st.lists(HISTORIES, min_size=80, max_size=80), seed=st.integers())
def test_compaction_is_commutative_associative_and_idempotent(
    spark: SparkSession, histories: list[list[Row]], seed: int
) -> None:
    """One job over all histories: hypothesis makes them, and Spark would cost seconds for each by itself."""
    plain = [(number, row) for number, history in enumerate(histories) for row in history]
    shuffled = random.Random(seed).sample(plain, len(plain))
    ways = {"plain": plain, "shuffled": shuffled, "doubled": [*shuffled, *plain], "in parts": plain}
    rows = table(spark, [(way, number, row) for way, found in ways.items() for number, row in found])
    whole = rows.where("way <> 'in parts'")
    # Parts are merged first, then their winners, and one part again.
    parts = select_winners(rows.where("way = 'in parts'"), "way", "history", "part")
    merged = select_winners(parts.unionByName(rows.where("way = 'in parts' AND part = 0")), "way", "history")
    found = select_winners(whole, "way", "history").unionByName(merged).collect()

    names = ("version", "second", "origin_partition", "origin_offset", "origin_generation")
    model = {number: tuple(expected(history)[name] for name in names) for number, history in enumerate(histories)}
    for way in ways:
        assert {row["history"]: tuple(row[name] for name in names) for row in found if row["way"] == way} == model, way
