"""The classified records of a run, kept in Spark: the stage `events` makes them, and `rejects` reads them again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class _CachedRows:
    """Records that Spark keeps.

    Args:
        rows: the records.
        published: the attempts whose rejects were published by then, by slice key: what they sent is left to the DLQ.
        size: their bytes in Kafka.
        attempts: the attempts that were committed of them, by slice key.
    """

    rows: DataFrame
    published: Mapping[str, int]
    size: int
    attempts: dict[str, int] = field(default_factory=dict)


@dataclass
class SharedFrames:
    """The rows that the stages of one run share, so that a record is classified once.

    A stage that finds nothing here classifies the records again, from the same versions of the tables: after a crash,
    or where another run decided.
    """

    _cached: list[_CachedRows] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there are rows."""
        return bool(self._cached)

    @property
    def size(self) -> int:
        """The bytes that all of the records have in Kafka."""
        return sum(one.size for one in self._cached)

    def keep(self, rows: DataFrame, published: Mapping[str, int], size: int) -> None:
        """Keep records which Spark holds (`persist`) until `release`.

        Args:
            rows: the records of some slices.
            published: for each of these slices the attempt whose rejects were published; 0 for none.
            size: their bytes in Kafka.
        """
        self._cached.append(_CachedRows(rows, published, size))

    def record_attempts(self, attempts: Mapping[str, int]) -> None:
        """Note the attempts that were committed of what was kept last."""
        for last in self._cached[-1:]:
            last.attempts.update({key: attempt for key, attempt in attempts.items() if key in last.published})

    def select_frames(
        self, attempts: Mapping[str, int], published: Mapping[str, int]
    ) -> list[tuple[DataFrame, list[str]]]:
        """The records of decisions.

        Args:
            attempts: the attempts of the decisions, by slice key.
            published: the attempts whose rejects are published now.

        Returns:
            Frames, each with the slices whose records are to be taken from it; none if one of the slices is not here as
            it was decided.
        """
        found: list[tuple[DataFrame, list[str]]] = []
        left = dict(attempts)
        for one in self._cached:
            mine = [
                key
                for key, attempt in left.items()
                if one.attempts.get(key) == attempt and one.published[key] == published.get(key, 0)
            ]
            if mine:
                found.append((one.rows, mine))
            left = {key: attempt for key, attempt in left.items() if key not in mine}
        return [] if left else found

    def release(self) -> None:
        """Let Spark drop the cached rows; a session that died has dropped them already."""
        cached, self._cached = self._cached, []
        for one in cached:
            with suppress(Exception):
                one.rows.unpersist()
