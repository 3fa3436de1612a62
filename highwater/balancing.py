"""Many parts made one, by a tree and not by a chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def combine_pairwise(combine: Callable[[T, T], T], parts: Sequence[T]) -> T:
    """All parts in their order, combined two by two: a thousand of them nest ten deep.

    For conditions and unions of Spark whose number grows with the data. A Spark Connect client sends them as nested
    messages. Protobuf reads at most a hundred levels, and a chain of fifty parts already exceeds that.

    Args:
        combine: makes one of two neighbours; it must be associative.
        parts: one or more.

    Raises:
        ValueError: there is no part.
    """
    if not parts:
        raise ValueError("nothing to combine")
    level = list(parts)
    while len(level) > 1:
        pairs = [combine(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
