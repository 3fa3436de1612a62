"""A window: records for the topic of accepted events that are held at once, column by column."""

# A window has many rows of few kinds, so equal properties are computed once for each kind: an object for each row would
# cost as much as sending it.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from highwater.envelope import ORIGIN, ORIGIN_TYPES

if TYPE_CHECKING:
    import pyarrow as pa

    from highwater.publishing import PublicationOutcome

# Rows that are made into objects at a time.
FEW = 1_000
# Columns in which the records of a run agree.
RUN = ("slice", *ORIGIN[:-1])


def build_schema() -> pa.Schema:
    """The columns: the slice that sends, the origin, its time in microseconds since 1970 in UTC, and the record.

    Value and fingerprint are null in what retracts an event.
    """
    import pyarrow as pa

    return pa.schema(
        [
            ("slice", pa.string()),
            *ORIGIN_TYPES,
            ("origin_timestamp_ms", pa.int64()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("fingerprint", pa.string()),
        ]
    )


@dataclass(frozen=True)
class PublicationWindow:
    """Rows in the order of publication.

    Args:
        rows: the columns of `build_schema`.
        outcomes: the kinds of outcomes of a row; None where the earlier outcome stays.
        which: for each row the place of its outcome.
    """

    rows: pa.Table
    outcomes: Sequence[PublicationOutcome | None]
    which: pa.Array

    def __len__(self) -> int:
        """Rows in it."""
        return len(self.rows)

    def filter_by_outcome(self, wanted: Callable[[PublicationOutcome | None], bool]) -> PublicationWindow:
        """The rows whose outcome is wanted."""
        import pyarrow as pa

        hits = [wanted(one) for one in self.outcomes]
        if all(hits):
            return self
        selected = pa.array(hits, pa.bool_()).take(self.which)
        return PublicationWindow(self.rows.filter(selected), self.outcomes, self.which.filter(selected))

    def build_column(self, say: Callable[[Any], Any], kind: pa.DataType) -> pa.Array:
        """A column computed from each row's outcome; null without one."""
        import pyarrow as pa

        said = [None if one is None else say(one) for one in self.outcomes]
        return pa.array(said, kind).take(self.which)

    def select_range(self, start: int, end: int) -> PublicationWindow:
        """The rows of a range, half-open."""
        return PublicationWindow(
            self.rows.slice(start, end - start), self.outcomes, self.which.slice(start, end - start)
        )

    def count_by_slice(self) -> dict[str, int]:
        """The rows of each slice."""
        counts: dict[str, int] = {one["values"]: one["counts"] for one in self.rows["slice"].value_counts().to_pylist()}
        return counts

    def measure_sizes(self) -> list[int]:
        """Bytes of key and value of each row."""
        import pyarrow.compute as pc

        lengths = (pc.fill_null(pc.binary_length(self.rows[name]), 0) for name in ("key", "value"))
        sizes: list[int] = pc.add(*lengths).to_pylist()
        return sizes

    def iterate_rows(self) -> Iterator[tuple[bytes, bytes | None, bytes, bytes, int]]:
        """Key, value, the origin's offset and milliseconds as text, and the place of the outcome, for each row.

        Few are made at a time: those of a whole part would leave the processor's cache before they are used.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        numbers = (self.rows["origin_offset"], self.rows["origin_timestamp_ms"])
        texts = (pc.cast(pc.cast(one, pa.string()), pa.binary()) for one in numbers)
        columns = (self.rows["key"], self.rows["value"], *texts, self.which)
        for start in range(0, len(self), FEW):
            yield from zip(*(one.slice(start, FEW).to_pylist() for one in columns), strict=True)

    def split_runs(self) -> Iterator[PublicationWindow]:
        """Parts whose rows have slice, topic, generation and partition in common: few, since rows are in order."""
        import pyarrow.compute as pc

        last = len(self) - 1
        if last < 0:
            return
        columns = [self.rows[name] for name in RUN]
        changes = reduce(pc.or_, [pc.not_equal(one.slice(1), one.slice(0, last)) for one in columns])
        starts = [0, *(at + 1 for at in pc.indices_nonzero(changes).to_pylist())]
        for start, end in zip(starts, [*starts[1:], last + 1], strict=True):
            yield self.select_range(start, end)
