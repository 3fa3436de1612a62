"""Folding `current`: which slices are in a fold, and when the next one is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.folding import BASE, RECENT, Fold, Run, fold_due, merged_runs, runs_of

slices = st.dictionaries(st.tuples(st.sampled_from(["orders", "orders.dlq.1"]), st.integers(0, 300)), st.integers(1, 3))


@given(slices)
def test_runs_name_exactly_the_folded_slices(attempts: dict[tuple[str, int], int]) -> None:
    assert Fold(BASE, 1, runs_of(attempts)).attempts() == attempts


@given(slices)
def test_a_fold_survives_its_written_form(attempts: dict[tuple[str, int], int]) -> None:
    fold = Fold(RECENT, 7, runs_of(attempts))
    assert Fold.from_json(fold.to_json()) == fold


@given(slices, slices)
def test_the_later_attempt_of_a_slice_stands(
    older: dict[tuple[str, int], int], newer: dict[tuple[str, int], int]
) -> None:
    keys = {f"{topic}@{ordinal:07d}": attempt for (topic, ordinal), attempt in newer.items()}
    merged = Fold(BASE, 2, merged_runs([Fold(BASE, 1, runs_of(older))], keys))
    assert merged.attempts() == {**older, **newer}


def test_a_thousand_slices_of_one_attempt_are_one_run() -> None:
    assert runs_of({("orders", n): 1 for n in range(1000)}) == {"orders": (Run(0, 999, 1),)}


def test_a_slice_that_is_not_folded_has_attempt_0() -> None:
    fold = Fold(BASE, 1, {"orders": (Run(2, 4, 5),)})
    assert [fold.attempt_of(f"orders@000000{n}") for n in (1, 2, 4, 5)] == [0, 5, 5, 0]


@pytest.mark.parametrize(
    ("slices", "slice_rows", "recent", "base", "due"),
    [
        (49, 10**9, 0, 0, None),
        (50, 1, 0, 0, BASE),
        (50, 10, 10, 100, RECENT),
        (50, 15, 10, 100, BASE),
    ],
)
def test_the_base_is_rewritten_only_for_a_quarter_of_its_rows(
    slices: int, slice_rows: int, recent: int, base: int, due: str | None
) -> None:
    assert fold_due(slices, slice_rows, recent, base) == due
