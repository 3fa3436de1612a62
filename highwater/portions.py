"""A long sequence taken in portions.

What belongs here: the cut. What does not: how long a portion may be, which whoever works on one knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def cut(items: Iterable[T], size: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """Portions that fit a transaction; what is larger by itself is a portion of its own.

    Args:
        items: what is cut; one portion is held at a time.
        size: of an item, in bytes.
        most: items in a portion.
        most_bytes: of the items of a portion together.
    """
    portion: list[T] = []
    total = 0
    for item in items:
        weight = size(item)
        if portion and (len(portion) == most or total + weight > most_bytes):
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += weight
    if portion:
        yield portion


def cuts(sizes: Iterable[int], most: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """The same of items that are not at hand: the half-open ranges of the portions.

    Args:
        sizes: of the items, in bytes.
        most: items in a portion.
        most_bytes: of the items of a portion together.
    """
    for portion in cut(enumerate(sizes), lambda one: one[1], most, most_bytes):
        yield portion[0][0], portion[-1][0] + 1
