"""Events as the records that publish them: key, JSON value and fingerprint, read in windows, the first one ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from highwater.assets import event_json
from highwater.assets.duplicate_events import CopySearch, build_select_list
from highwater.assets.origins import MILLISECONDS, build_origin_predicate
from highwater.assets.publication_window import build_schema
from highwater.envelope import ORIGIN, ORIGIN_SQL
from highwater.resources.delta import query_arrow, slice_is_one_of

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# Events that are read at once: those of a slice of usual size.
WINDOW = 200_000
# The number of events written as JSON at a time, without the interpreter's lock; fingerprints need the lock.
PART = 25_000


@dataclass
class EventRecords:
    """The records of some slices' events, in the order of their publication.

    Args:
        stream: its declaration.
        events: the table, at the version that is published.
        slices: the slices, in the order of publication.
        decisions: their commits in events.
    """

    stream: Stream
    events: DeltaTable
    slices: Sequence[Slice]
    decisions: Mapping[str, SliceCommit]
    _ahead: tuple[Future[pa.Table | None], Iterator[pa.Table]] | None = field(default=None, repr=False)
    _asked: Future[bool] | None = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        """Events of the slices."""
        return sum(self.decisions[slice_.key].rows or 0 for slice_ in self.slices)

    @property
    def twice(self) -> CopySearch:
        """The search for copies of the events."""
        return CopySearch(self.stream, self.events, self.slices, self.decisions)

    def has_copies(self) -> bool:
        """Whether a version of theirs came more than once, in any slice."""
        return self.twice.has_copies() if self._asked is None else self._asked.result()

    def read_ahead(self, by: Executor) -> None:
        """Begin to read the first window and to look for copies, before the windows are asked for."""
        windows = self._iterate_windows()
        self._ahead = by.submit(next, windows, None), windows
        self._asked = by.submit(self.twice.has_copies)

    def read_windows(self) -> Iterator[pa.Table]:
        """Tables of the columns of a window, at most this many events each; read again at each call."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            yield from self._iterate_windows()
            return
        first, others = ahead
        if (rows := first.result()) is not None:
            yield rows
        yield from others

    def _iterate_windows(self) -> Iterator[pa.Table]:
        import pyarrow as pa
        import pyarrow.compute as pc

        place = {slice_.key: at for at, slice_ in enumerate(self.slices)}
        for where in self._build_window_conditions():
            rows = self._read(where)
            if len(place) > 1:  # within a slice they come in their order
                rows = rows.take(pc.sort_indices(pc.index_in(rows["slice"], pa.array([*place], pa.string()))))
            yield self._build_window(rows)

    def _build_window_conditions(self) -> Iterator[str]:
        """Conditions that pick the events window by window, in their order."""
        if self.rows <= WINDOW:
            yield slice_is_one_of([slice_.key for slice_ in self.slices])
            return
        for slice_ in self.slices:
            slice_condition = slice_is_one_of([slice_.key])
            sql = f"SELECT {ORIGIN_SQL} FROM t WHERE {slice_condition} ORDER BY {ORIGIN_SQL}"
            origins = query_arrow({"t": self.events}, sql)
            for start in range(0, len(origins), WINDOW):
                yield f"{slice_condition} AND ({build_origin_predicate(origins.slice(start, WINDOW))})"

    def _read(self, where: str) -> pa.Table:
        columns = f"slice, {ORIGIN_SQL}, {MILLISECONDS}, {build_select_list(self.stream, self.events)}"
        sql = f"SELECT {columns} FROM t WHERE {where} ORDER BY {ORIGIN_SQL}"
        return query_arrow({"t": self.events}, sql)

    def _build_window(self, rows: pa.Table) -> pa.Table:
        """The columns of the window. While one part's fingerprints are taken, the next one is written as JSON."""
        import pyarrow as pa

        parts = [rows.slice(at, PART) for at in range(0, len(rows), PART)] or [rows]
        values, prints = [], []
        with ThreadPoolExecutor(1, "JSON") as beside:
            for written in [beside.submit(event_json.encode_values, self.stream, part) for part in parts]:
                values.append(written.result())
                prints.append(pa.array(event_json.compute_fingerprints(values[-1]), pa.string()))
        made = {
            "key": event_json.encode_keys(rows),
            "value": pa.chunked_array(values),
            "fingerprint": pa.chunked_array(prints),
        }
        plain = rows.select(["slice", *ORIGIN, MILLISECONDS])
        return pa.table({**dict(zip(plain.column_names, plain.columns, strict=True)), **made}, schema=build_schema())
