"""Conditions over places, compared with plain Python on a table, and on one of thousands of partitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from highwater.envelope import ORIGIN, ORIGIN_TYPES
from highwater.resources.delta import query
from highwater.resources.offset_predicates import build_between, build_in_any, build_in_none

# A process of DataFusion's did not outlive three thousand alternatives.
MANY = 4000
PLACES = [(topic, g, p, o) for topic in ("a", "b-c") for g in range(2) for p in range(3) for o in range(3)]


def table_of(path: Path, places: list[tuple[Any, ...]]) -> DeltaTable:
    import pyarrow as pa

    rows = [dict(zip(ORIGIN, place, strict=True)) for place in places]
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in ORIGIN_TYPES])
    write_deltalake(str(path), pa.Table.from_pylist(rows, schema))
    return DeltaTable(str(path))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> DeltaTable:
    return table_of(tmp_path_factory.mktemp("few"), PLACES)


def found(table: DeltaTable, condition: str) -> list[tuple[Any, ...]]:
    rows = query(table, f"SELECT * FROM t WHERE {condition}")
    return sorted(tuple(row[name] for name in ORIGIN) for row in rows)


@given(st.sampled_from(PLACES), st.sampled_from(PLACES))
def test_between_two_places_is_what_their_order_says(few: DeltaTable, one: Any, other: Any) -> None:
    first, last = sorted([one, other])
    named = [dict(zip(ORIGIN, place, strict=True)) for place in (first, last)]
    assert found(few, build_between(*named)) == [place for place in PLACES if first <= place <= last]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=5))
def test_in_no_range_is_what_python_says(few: DeltaTable, spans: list[tuple[int, int, int, int]]) -> None:
    def held(place: tuple[Any, ...]) -> bool:
        return any(place[1:3] == span[:2] and span[2] <= place[3] < span[3] for span in spans)

    assert found(few, build_in_none(spans)) == [place for place in PLACES if not held(place)]


@given(st.lists(st.tuples(st.sampled_from(["a", "b-c"]), *[st.integers(0, 3)] * 4), max_size=5))
def test_in_a_range_is_what_python_says(few: DeltaTable, spans: list[tuple[str, int, int, int, int]]) -> None:
    def held(place: tuple[Any, ...]) -> bool:
        return any(place[:3] == span[:3] and span[3] <= place[3] < span[4] for span in spans)

    assert found(few, build_in_any(spans)) == [place for place in PLACES if held(place)]


def test_thousands_of_partitions_are_looked_up(tmp_path: Path) -> None:
    table = table_of(tmp_path / "many", [("a", 0, p, 7) for p in range(MANY)])
    assert found(table, build_in_none((0, p, 0, 9) for p in range(1, MANY))) == [("a", 0, 0, 7)]
    assert len(found(table, build_in_any(("a", 0, p, 0, 9) for p in range(1, MANY)))) == MANY - 1


def test_predicate_of_several_places_matches_nothing_between_their_partitions(few: DeltaTable) -> None:
    import pyarrow as pa

    from highwater.assets.origins import build_origin_predicate

    wanted = [("a", 0, 1, 0), ("a", 0, 1, 2), ("a", 1, 0, 1), ("b-c", 0, 0, 0)]
    places = pa.Table.from_pylist([dict(zip(ORIGIN, place, strict=True)) for place in wanted])
    assert found(few, build_origin_predicate(places)) == sorted([*wanted, ("a", 0, 1, 1)])
