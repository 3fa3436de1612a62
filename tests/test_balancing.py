"""Many parts made one by a tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.balancing import combine_pairwise


@given(st.lists(st.text(max_size=2), min_size=1, max_size=70))
def test_the_order_stays(parts: list[str]) -> None:
    assert combine_pairwise(str.__add__, parts) == "".join(parts)


@pytest.mark.parametrize(("parts", "depth"), [(1, 0), (2, 1), (5, 3), (1000, 10)])
def test_it_nests_by_the_logarithm(parts: int, depth: int) -> None:
    assert combine_pairwise(lambda left, right: max(left, right) + 1, [0] * parts) == depth


def test_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to combine"):
        combine_pairwise(str.__add__, [])
