"""Sequences in batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import TypeVar

T = TypeVar("T")


def split_by_count(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items in their order, in batches of a fixed size; nothing for an empty sequence.

    Args:
        items: the items to cut.
        most: items in a batch, 1 or more; the last one may have fewer.
    """
    for at in range(0, len(items), most):
        yield items[at : at + most]


def split_by_size(items: Iterable[T], size: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """Batches that fit a transaction; an item that is too large by itself is a batch of its own.

    Args:
        items: the items to cut; one batch is held at a time.
        size: measures an item in bytes.
        most: items in a batch.
        most_bytes: total bytes of a batch.
    """
    batch: list[T] = []
    total = 0
    for item in items:
        weight = size(item)
        if batch and (len(batch) == most or total + weight > most_bytes):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += weight
    if batch:
        yield batch


def compute_batch_ranges(sizes: Iterable[int], most: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """The half-open ranges of the batches that `split_by_size` would make, from the sizes alone.

    Args:
        sizes: the items' sizes in bytes.
        most: items in a batch.
        most_bytes: total bytes of a batch.
    """
    sums = [0, *accumulate(sizes)]
    start, last = 0, len(sums) - 1
    while start < last:
        fitting = bisect_right(sums, sums[start] + most_bytes) - 1
        end = min(max(fitting, start + 1), start + most, last)
        yield start, end
        start = end


class PrefetchingIterator(Iterator[T]):
    """Items one after the other; the next one may be made before it is asked for.

    Args:
        items: where they come from; one at the most is held.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._held: list[T] = []

    def __next__(self) -> T:
        """The next item, as it was made or made now."""
        return self._held.pop() if self._held else next(self._items)

    def prepare(self) -> None:
        """Make the next item now, if there is one."""
        if not self._held:
            self._held.extend(islice(self._items, 1))
