"""Duplicate events: events of a batch whose version came more than once, looked for in the table of events."""

# The same content has the same event time, so that the statistics of files leave out those of other times.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from highwater.assets import event_json
from highwater.assets.origins import MILLISECONDS
from highwater.envelope import ORIGIN, ORIGIN_SQL, Origin
from highwater.publishing import PossibleCopy, RecordedOutcome
from highwater.resources.delta import query_arrow, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.assets.publication_log_writer import PublicationLog
    from highwater.declaration import Stream
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

_SAME = " AND ".join(f"x.{name} = y.{name}" for name in ("key", "version", "event_time"))


@dataclass(frozen=True)
class CopySearch:
    """The search for the copies of a batch's events.

    Args:
        stream: its declaration.
        events: the table, at the version that is published.
        slices: the slices of the batch, in the order of publication.
        decisions: their commits in events.
    """

    stream: Stream
    events: DeltaTable
    slices: Sequence[Slice]
    decisions: Mapping[str, SliceCommit]

    def has_copies(self) -> bool:
        """Whether there are any copies; nearly always there are none. It needs neither fields nor rows."""
        return bool(len(query_arrow({"e": self.events}, f"WITH {self._twice} SELECT 1 FROM twice LIMIT 1")))

    def list_copies(self, book: PublicationLog, known: Mapping[Origin, RecordedOutcome]) -> list[PossibleCopy]:
        """Events of versions that came more than once, in the batch or in slices that were published.

        Args:
            book: earlier publications of events.
            known: earlier publications of the batch's origins.
        """
        rows = query_arrow({"e": self.events}, self._question)
        prints = event_json.compute_fingerprints(event_json.encode_values(self.stream, rows))
        origins = [*map(Origin._make, zip(*(rows[name].to_pylist() for name in ORIGIN), strict=True))]
        slices, ms = rows["slice"].to_pylist(), rows[MILLISECONDS].to_pylist()
        place = {slice_.key: at for at, slice_ in enumerate(self.slices)}
        published = {**known, **self._read_published_elsewhere(book, sorted(set(slices) - place.keys()))}
        ordered = sorted(zip(slices, origins, prints, ms, strict=True), key=lambda one: (place.get(one[0], -1), one[1]))
        found = []
        for at, (key, origin, print_, when) in enumerate(ordered):
            before = published.get(origin)
            if before is not None and before.fingerprint is not None:
                found.append(PossibleCopy(key, origin, before.fingerprint, when))
            if key in place and (before is None or before.fingerprint != print_):
                found.append(PossibleCopy(key, origin, print_, when, at))
        return found

    def _read_published_elsewhere(self, book: PublicationLog, keys: Sequence[str]) -> dict[Origin, RecordedOutcome]:
        """The outcome of the copies in other slices; one that was not published yet is not among them."""
        return (
            book.load_outcomes_among(self.events, f"SELECT {ORIGIN_SQL} FROM ({self._question})", keys) if keys else {}
        )

    @property
    def _twice(self) -> str:
        own_slices = slice_is_one_of([slice_.key for slice_ in self.slices])
        return f"""
            own_slices AS (SELECT key, version, event_time FROM e WHERE {own_slices}),
            near AS (SELECT * FROM e x LEFT SEMI JOIN own_slices y ON {_SAME} WHERE {self._times}),
            twice AS (SELECT key, version, event_time FROM near GROUP BY key, version, event_time
                      HAVING count(*) > 1)"""

    @property
    def _question(self) -> str:
        fields = build_select_list(self.stream, self.events)
        return f"""
            WITH {self._twice}
            SELECT slice, {ORIGIN_SQL}, {MILLISECONDS}, {fields} FROM near x LEFT SEMI JOIN twice y ON {_SAME}"""

    @property
    def _times(self) -> str:
        spans = []
        for slice_ in self.slices:
            counts = self.decisions[slice_.key].counts
            if "first_event_us" in counts and "last_event_us" in counts:
                first, last = (_format_timestamp(counts[name]) for name in ("first_event_us", "last_event_us"))
                spans.append(f"event_time BETWEEN {first} AND {last}")
            elif self.decisions[slice_.key].rows:
                return "true"
        return f"({' OR '.join(spans)})" if spans else "false"


def build_select_list(stream: Stream, events: DeltaTable) -> str:
    """The key and the declared fields in SQL; one that was just declared becomes a column with the next slice."""
    there = {one.name for one in events.schema().fields}
    names = dict.fromkeys(["key", *(one.name for one in stream.stored_fields)])
    return ", ".join(f'"{name}"' if name in there else f'CAST(NULL AS VARCHAR) AS "{name}"' for name in names)


def _format_timestamp(us: int) -> str:
    return f"arrow_cast({us}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
