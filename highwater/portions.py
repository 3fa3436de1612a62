"""A long sequence taken in portions.

What belongs here: the cut. What does not: how long a portion may be, which whoever works on one knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def portions(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items in their order, so many at a time; nothing of an empty sequence.

    Args:
        items: what is cut.
        most: items in a portion, 1 or more; the last one may have fewer.
    """
    for at in range(0, len(items), most):
        yield items[at : at + most]
