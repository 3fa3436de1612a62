"""The records of a batch of slices: its events in order, each compared with the earlier publication of its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from highwater.assets import reclaims, rejects
from highwater.assets.origins import MILLISECONDS
from highwater.assets.publication_log import build_schema, select_complete
from highwater.assets.publication_window import PublicationWindow
from highwater.assets.publication_window import build_schema as window_schema
from highwater.envelope import ORIGIN, ORIGIN_SQL, Origin
from highwater.errors import UnbalancedError
from highwater.publishing import (
    EventState,
    Lateness,
    PublicationOutcome,
    RecordedOutcome,
    can_retract,
    decide_publication,
    ensure_none_retracted,
    select_second_deliveries,
)
from highwater.resources.delta import query_all, slice_is_one_of

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.assets.event_records import EventRecords
    from highwater.assets.publication_log_writer import PublicationLog
    from highwater.assets.work import Work
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# Memory that a batch's events may take to be held until they are sent.
HELD_BYTES = 256 * 1024 * 1024


@dataclass
class PublicationBatch:
    """Slices that are published together, read from one version of events.

    Args:
        work: the connections.
        book: earlier publications of events.
        records: the slices' records.
    """

    work: Work
    book: PublicationLog
    records: EventRecords
    _held: list[PublicationWindow] = field(default_factory=list)

    @property
    def slices(self) -> Sequence[Slice]:
        """The slices, in the order of publication."""
        return self.records.slices

    @property
    def events(self) -> DeltaTable:
        """The table, at the version that is published."""
        return self.records.events

    def read_windows(self) -> Iterator[PublicationWindow]:
        """All events in the order of publication, window by window, then what retracts events.

        They are read once where they take little memory, else again at each call.

        Raises:
            RetractionError: what was sent of a slice is no event any more, and nobody allows that.
        """
        if self._held:
            yield from self._held
            return
        found: list[PublicationWindow] = []
        seen: set[Origin] = set()
        missing = set(self._left_out)
        count, size = 0, 0
        for rows in self.records.read_windows():
            window = self._decide_outcomes(rows)
            count, size = count + len(window), size + window.rows.nbytes
            if self._known:
                seen.update(one for one in _build_origins(window.rows) if one in self._known)
            if missing:
                missing.difference_update(
                    zip(window.rows["slice"].to_pylist(), _build_origins(window.rows), strict=True)
                )
            if size <= HELD_BYTES:
                found.append(window)
            else:
                found.clear()
            yield window
        self._ensure_all(count)
        last = self._build_removal_window(seen, missing)
        if size <= HELD_BYTES:
            self._held = [*found, last]
        yield last

    def _ensure_all(self, count: int) -> None:
        if count != self.records.rows:
            raise UnbalancedError(
                f"{', '.join(slice_.key for slice_ in self.slices)}: the table of events holds another number of rows "
                "than its commits recorded",
                stored=self.records.rows,
                found=count,
                remedy="materialise the slices again from events on; nothing of them was sent now",
            )

    def build_publication_rows(self) -> pa.Table:
        """The rows of the table `published`: a sent record has its number, an omitted one none."""
        import pyarrow as pa

        parts, number = [], 0
        for window in self.read_windows():
            parts.append(self._build_rows(window.filter_by_outcome(lambda one: one is not None), number))
            number += len(parts[-1]) - parts[-1]["number"].null_count
        return pa.concat_tables(parts)

    def select_outgoing(self) -> Iterator[PublicationWindow]:
        """The records that are sent, in their order."""
        for window in self.read_windows():
            yield window.filter_by_outcome(lambda one: one is not None and one.goes_out)

    def _build_rows(self, window: PublicationWindow, number: int) -> pa.Table:
        """The rows of records, numbered from `number` on."""
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = window.rows
        sent = window.build_column(lambda one: one.goes_out, pa.bool_())
        numbers = pc.add(pc.cumulative_sum(pc.cast(sent, pa.int64())), number - 1)
        keys = [slice_.key for slice_ in self.slices]
        attempts = pa.array([self.records.decisions[key].attempt for key in keys], pa.int32())
        columns: dict[str, Any] = {
            "slice": rows["slice"],
            **{name: rows[name] for name in ORIGIN},
            "attempt": attempts.take(pc.index_in(rows["slice"], pa.array(keys)).combine_chunks()),
            "state": window.build_column(lambda one: one.state.value, pa.string()),
            "revision": window.build_column(lambda one: one.revision, pa.int32()),
            "late": window.build_column(lambda one: one.late and one.late.value, pa.string()),
            "fingerprint": rows["fingerprint"],
            "published_at": window.build_column(lambda one: one.at, build_schema().field("published_at").type),
            "number": pc.if_else(sent, numbers, None),
        }
        return pa.table(columns, schema=build_schema().append(pa.field("number", pa.int64())))

    def _decide_outcomes(self, rows: pa.Table) -> PublicationWindow:
        import pyarrow as pa
        import pyarrow.compute as pc

        known, again, passed = self._known, self._again, self._passed
        plain = {key: PublicationOutcome(EventState.SENT, 0, late) for key, late in self._late.items()}
        if not known and not again and not passed:
            which = pc.index_in(rows["slice"], pa.array([*plain], pa.string()))
            return PublicationWindow(rows, [*plain.values()], which.combine_chunks())
        decided = [
            decide_publication(
                key,
                print_,
                known.get(origin),
                again=(key, origin) in again,
                late=self._late[key] or self._find_lateness(key, origin),
            )
            if known or passed or (key, origin) in again
            else plain[key]
            for key, origin, print_ in zip(
                rows["slice"].to_pylist(), _build_origins(rows), rows["fingerprint"].to_pylist(), strict=True
            )
        ]
        places = {one: at for at, one in enumerate(dict.fromkeys(decided))}
        return PublicationWindow(rows, [*places], pa.array([places[one] for one in decided], pa.int32()))

    @cached_property
    def _committed(self) -> dict[str, SliceCommit]:
        """The commits of published slices, in full or in part."""
        return self.book.load_slice_commits([slice_.key for slice_ in self.slices])

    @cached_property
    def _late(self) -> dict[str, Lateness | None]:
        """The reason why an unknown event of each slice would be late."""
        published = select_complete(self._committed)
        return {
            slice_.key: Lateness.RETRIED
            if slice_.topic != self.work.stream.topic
            else (Lateness.CORRECTED if slice_.key in published else None)
            for slice_ in self.slices
        }

    @cached_property
    def _ends(self) -> dict[tuple[str, int, int], int]:
        """The last offsets that were sent of slices whose first publication broke off."""
        found: dict[tuple[str, int, int], int] = {}
        for origin, one in self._known.items():
            if one.state is EventState.SENT:
                place = (one.slice_key, origin.generation, origin.partition)
                found[place] = max(found.get(place, -1), origin.offset)
        return found

    def _find_lateness(self, key: str, origin: Origin) -> Lateness | None:
        """Accepted since the first publication broke off, or the lake was lost, at an offset that had been passed."""
        end = self._ends.get((key, origin.generation, origin.partition), -1)
        passed = self._passed.get((origin.topic, origin.generation, origin.partition), -1)
        return Lateness.CORRECTED if origin.offset < max(end, passed) else None

    @cached_property
    def _known(self) -> dict[Origin, RecordedOutcome]:
        """Earlier outcomes of the origins in slices that were published, and in any slice of those that moved."""
        found = self.book.load_outcomes(slice_is_one_of(self._committed)) if self._committed else {}
        if where := self._build_moved_conditions():
            theirs = f"SELECT DISTINCT {ORIGIN_SQL} FROM e WHERE ({' OR '.join(where)})"
            for origin, one in self.book.load_outcomes_among(self.events, theirs).items():
                # Readers have the highest revision, whichever slice sent it.
                if origin not in found or one.revision > found[origin].revision:
                    found[origin] = one
        if self.book.before is not None and self._restarted:
            theirs = f"SELECT {ORIGIN_SQL} FROM e WHERE {slice_is_one_of(self._restarted)}"
            found = self.book.before.merge_earlier_copies(found, self.events, theirs)
        return found

    @cached_property
    def _restarted(self) -> list[str]:
        """The slices of whose origins some may have been sent before a lost lake was restarted."""
        before = self.book.before
        return [] if before is None else [slice_.key for slice_ in self.slices if before.may_contain(slice_)]

    @cached_property
    def _passed(self) -> Mapping[tuple[str, int, int], int]:
        """By partition the last offset that had been sent by then, if any of these slices lies before its end."""
        return self.book.before.passed if self.book.before is not None and self._restarted else {}

    def _build_moved_conditions(self) -> list[str]:
        """Conditions that pick the events that another slice may have sent: those of tiers, and those reclaimed."""
        tiers = [slice_.key for slice_ in self.slices if slice_.topic != self.work.stream.topic]
        found = [slice_is_one_of(tiers)] if tiers else []
        seen = [slice_.key for slice_ in self.slices if self.records.decisions[slice_.key].counts.get(reclaims.SEEN)]
        main = [key for key in seen if key not in tiers]
        if not main:
            return found
        reclaimed = f"({slice_is_one_of(main)} AND {reclaims.NUMBER} > 0)"
        some = query_all({"e": self.events}, f"SELECT 1 FROM e WHERE {reclaimed} LIMIT 1")
        return [*found, reclaimed] if some else found

    @cached_property
    def _again(self) -> set[tuple[str, Origin]]:
        """Events whose content was accepted before, under another origin."""
        publishes = self.work.stream.publishes
        assert publishes is not None, "only streams that publish have batches"
        if not self.records.has_copies():
            return set()
        return select_second_deliveries(self.records.twice.list_copies(self.book, self._known), publishes.horizon)

    @cached_property
    def _left_out(self) -> set[tuple[str, Origin]]:
        """Second deliveries that were left out of the slices before."""
        return self.book.load_second_deliveries(
            [key for key, one in self._committed.items() if one.counts.get("second_deliveries")]
        )

    def _build_removal_window(self, seen: set[Origin], missing: set[tuple[str, Origin]]) -> PublicationWindow:
        """Origins that were sent or left out of the slices, and are no events of them any more."""
        import pyarrow as pa

        rows: list[dict[str, Any]] = [
            {"slice": key, **dict(zip(ORIGIN, origin, strict=True))} for key, origin in sorted(missing)
        ]
        outcomes = [PublicationOutcome(EventState.GONE, 0, None) for _ in rows]
        for slice_ in self.slices:
            gone = {
                origin: one
                for origin, one in self._known.items()
                if one.slice_key == slice_.key and one.state is EventState.SENT and origin not in seen
            }
            gone |= self._load_rejected_origins(slice_.key)
            if not gone:
                continue
            allowed = can_retract(self._leaves.get(slice_.key), [one.at for one in gone.values()])
            ensure_none_retracted(slice_.key, gone, allowed=allowed)
            rows += self._load_retraction_rows(slice_, gone)
            outcomes += [
                PublicationOutcome(EventState.RETRACTED, gone[one].revision + 1, Lateness.CORRECTED)
                for one in sorted(gone)
            ]
        which = pa.array(range(len(rows)), pa.int32())
        return PublicationWindow(pa.Table.from_pylist(rows, window_schema()), outcomes, which)

    def _load_rejected_origins(self, key: str) -> dict[Origin, RecordedOutcome]:
        """Records sent before a lost lake was restarted, and was rejected since."""
        if key not in self._restarted or self._rejects is None:
            return {}
        sql = f"SELECT {ORIGIN_SQL} FROM e WHERE {rejects.PUBLISHED_AT} IS NULL"
        known = self.book.load_outcomes_among(self._rejects, f"{sql} AND {slice_is_one_of([key])}")
        return {origin: one for origin, one in known.items() if not one.slice_key and one.state is EventState.SENT}

    @cached_property
    def _leaves(self) -> dict[str, datetime]:
        """Slices whose retraction a person permits, with the time."""
        found = self.work.ledger.breakers.read_accepted_slices([slice_.key for slice_ in self.slices])
        return {key: one.accepted_at for key, one in found.items()}

    @cached_property
    def _rejects(self) -> DeltaTable | None:
        return self.work.lake.open_stream_table(self.work.stream.name, rejects.TABLE)

    def _load_retraction_rows(self, slice_: Slice, gone: Mapping[Origin, RecordedOutcome]) -> list[dict[str, Any]]:
        """The records that retract events, with the keys that these have as rejects."""
        assert self._rejects is not None, "retracted records are among the rejects"
        sql = f"SELECT {ORIGIN_SQL}, {MILLISECONDS}, key FROM t WHERE {slice_is_one_of([slice_.key])}"
        rows = {Origin.from_row(row): row for row in query_all({"t": self._rejects}, sql)}
        # An event that is no reject either was lost elsewhere: readers never hear of that.
        ensure_none_retracted(slice_.key, gone.keys() - rows.keys(), allowed=False)
        return [{**rows[one], "slice": slice_.key, "key": rows[one]["key"] or b""} for one in sorted(gone)]


def _build_origins(rows: pa.Table) -> Iterator[Origin]:
    return map(Origin._make, zip(*(rows[name].to_pylist() for name in ORIGIN), strict=True))
