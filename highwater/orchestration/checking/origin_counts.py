"""Counts of origins by their end, without a JVM; the ends sum to the produced records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from highwater.assets.reclaims import NUMBER
from highwater.envelope import ORIGIN_SQL, Origin
from highwater.erasing import to_microseconds
from highwater.orchestration.checking.last_rejections import build_left_over_clause
from highwater.reclaims import count_reclaims, is_stale
from highwater.resources.commit_log import read_slice_commits, with_row_counts
from highwater.resources.delta import count_logged_rows, query_all, slice_is_one_of
from highwater.resources.offset_predicates import build_in_none
from highwater.retention import count_records
from highwater.routing import compute_longest_retry_delay
from highwater.slices import SliceKey, merge_ranges

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.plans import Generation, Loss
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# Origins that one query counts, some 100 bytes each; more are counted in several ranges of offsets.
ROWS_AT_ONCE = 5_000_000
# Records published just before an acceptance are cut into a slice at most this long after they were due.
PLANNED_WITHIN = timedelta(minutes=2)


@dataclass(frozen=True)
class OriginEnds:
    """The ends of the origins of a stream's main topic.

    Args:
        produced: records of the main topic that are in raw, or were in raw until they expired by age.
        accepted: origins in events.
        twice: rows in events beyond one for each origin; anything but 0 is an error.
        tombstones: records without a value.
        waiting: by tier the origins that were published to it and not accepted since.
        stranded: by tier those that were published to it before it lost records, or while the stream declared it,
            which it no longer does; tiers without any are left out.
        parked: origins that wait for a person.
        discarded: origins that a person discarded; none of them is accepted later.
        reclaimed: origins that were reclaimed from the DLQ, and are not reprocessed yet.
        unpublished: rejected, and not published yet: the end `rejected` elsewhere.
        undecided: in raw, and not classified yet.
    """

    produced: int = 0
    accepted: int = 0
    twice: int = 0
    tombstones: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)
    stranded: Mapping[str, int] = field(default_factory=dict)
    parked: int = 0
    discarded: int = 0
    reclaimed: int = 0
    unpublished: int = 0
    undecided: int = 0

    @property
    def sum(self) -> int:
        """All ends together; what was produced, if nothing is lost or doubled."""
        ended = self.accepted + self.tombstones + self.parked + self.discarded + self.reclaimed
        ended += sum(self.waiting.values()) + sum(self.stranded.values())
        return ended + self.unpublished + self.undecided

    @property
    def error(self) -> str | None:
        """The contradiction in the numbers; None if they agree."""
        if self.twice:
            return f"{self.twice:,} rows of events are of an origin that is there already"
        if self.sum != self.produced:
            return f"the ends sum to {self.sum:,}, produced were {self.produced:,}"
        return None

    @property
    def rows(self) -> list[list[str]]:
        """Name and count of each end."""
        named = {
            "accepted": self.accepted,
            "tombstones": self.tombstones,
            **{f"waiting on {tier}": count for tier, count in self.waiting.items()},
            **{f"not read from {tier}, to be reclaimed": count for tier, count in self.stranded.items()},
            "parked": self.parked,
            "discarded": self.discarded,
            "reclaimed, not reprocessed yet": self.reclaimed,
            "rejected, not published yet": self.unpublished,
            "not decided yet": self.undecided,
            "sum": self.sum,
            "produced": self.produced,
        }
        return [[name, f"{count:,}"] for name, count in named.items()]


def count_ends(ledger: Ledger, lake: Lake, stream: Stream) -> OriginEnds:
    """Count the ends of all origins that raw holds, or held until they expired.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    tables = _open_tables(lake, stream, "dlq", "rejects", "events", "raw")
    if "raw" not in tables:
        return OriginEnds()
    decided = {name: read_slice_commits(tables[name]) if name in tables else {} for name in ("events", "rejects")}
    settled = {
        key
        for key, p in decided["events"].items()
        if key in decided["rejects"] and decided["rejects"][key].attempt == p.attempt
    }
    read = with_row_counts(tables["raw"], _filter_main_topic(read_slice_commits(tables["raw"]), stream))
    open_slices = [slice_commit.slice_ for key, slice_commit in decided["events"].items() if key not in settled]
    counted = _TableCounts(tables, stream, open_slices, ledger.list_losses(stream.name, stream.topic))
    rows, accepted = counted.count_accepted()
    discarded_origins = {discard.origin for discard in ledger.discards.list_for_stream(stream.name)}
    reclaim_numbers = count_reclaims(ledger.reclaims.list_for_stream(stream.name))
    reclaimed = counted.count_reclaimed(reclaim_numbers, discarded_origins)
    discarded = counted.count_discarded(discarded_origins)
    rejected = Counter(counted.count_left_over())
    rejected.subtract(reclaimed)
    rejected.subtract(discarded)
    lost = read_loss_times(ledger, stream, settled, datetime.now(UTC))
    stranded = counted.count_stranded(lost, reclaim_numbers, discarded_origins)
    return OriginEnds(
        produced=sum(map(count_records, read.values())),
        accepted=accepted,
        twice=rows - accepted,
        tombstones=sum(
            slice_commit.counts.get("tombstones", 0)
            for key, slice_commit in _filter_main_topic(decided["events"], stream).items()
            if key in settled
        ),
        waiting={tier: rejected[tier, True] - stranded.get(tier, 0) for tier in stream.tier_topics},
        stranded={**stranded, **_select_undeclared(stream, rejected)},
        parked=rejected[stream.parked_topic, True],
        discarded=discarded.total(),
        reclaimed=reclaimed.total(),
        unpublished=sum(count for (_, published), count in rejected.items() if not published),
        undecided=sum(count_records(slice_commit) for key, slice_commit in read.items() if key not in settled),
    )


def _select_undeclared(stream: Stream, rejected: Mapping[tuple[str, bool], int]) -> dict[str, int]:
    """Counts of origins by the tier that they were published to, of tiers that the stream no longer declares."""
    return {
        topic: count
        for (topic, published), count in rejected.items()
        if published and count and topic not in stream.dlq_topics
    }


def count_parked(ledger: Ledger, lake: Lake, stream: Stream, *, published: bool = False) -> int:
    """Origins that were rejected for good, and neither accepted, discarded nor reclaimed since.

    Args:
        ledger, lake: the connections.
        stream: the declaration.
        published: only those that are known to be on the parked topic.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    tables = _open_tables(lake, stream, "dlq", "rejects", "events")
    counted = _TableCounts(tables, stream, [], ledger.list_losses(stream.name, stream.topic))
    discarded_origins = {discard.origin for discard in ledger.discards.list_for_stream(stream.name)}
    found = Counter(counted.count_left_over())
    found.subtract(
        counted.count_reclaimed(count_reclaims(ledger.reclaims.list_for_stream(stream.name)), discarded_origins)
    )
    found.subtract(counted.count_discarded(discarded_origins))
    if published:
        return found[stream.parked_topic, True]
    return sum(count for (topic, _), count in found.items() if topic == stream.parked_topic)


def _open_tables(lake: Lake, stream: Stream, *names: str) -> dict[str, DeltaTable]:
    """The tables that are there; downstream first, so that nothing is counted that was decided meanwhile."""
    found = {name: lake.open_stream_table(stream.name, name) for name in names}
    return {name: table for name, table in found.items() if table is not None}


def _filter_main_topic(slice_commits: Mapping[str, SliceCommit], stream: Stream) -> dict[str, SliceCommit]:
    return {
        key: slice_commit for key, slice_commit in slice_commits.items() if SliceKey.parse(key).topic == stream.topic
    }


class _TableCounts:
    """Counts over the tables as they were opened.

    Args:
        tables: by name; any of them may be missing.
        stream: the stream.
        open_slices: slices that are being decided. They are left out, and of those of the main topic all of their
            origins, whatever became of them in a tier: they count as undecided.
        losses: holes of the main topic; origins in them were not read there, though a tier may have them after
            a rebuild.
    """

    def __init__(
        self, tables: Mapping[str, DeltaTable], stream: Stream, open_slices: Sequence[Slice], losses: Sequence[Loss]
    ) -> None:
        self._tables = tables
        topic = stream.topic.replace("'", "''")
        conditions = [f"origin_topic = '{topic}'"]
        if open_slices:
            conditions.append(f"NOT {slice_is_one_of([slice_.key for slice_ in open_slices])}")
        main_slices = [slice_ for slice_ in open_slices if slice_.topic == stream.topic]
        undecided = [
            (generation, partition, offsets.start, offsets.end)
            for generation in {slice_.generation for slice_ in main_slices}
            for partition, ranges in merge_ranges(one for one in main_slices if one.generation == generation).items()
            for offsets in ranges
        ]
        lost = [(loss.generation, loss.partition, loss.offsets.start, loss.offsets.end) for loss in losses]
        conditions.append(build_in_none([*undecided, *lost]))
        self._mine = " AND ".join(conditions)

    def count_accepted(self) -> tuple[int, int]:
        """Rows of the main topic's origins in events, and how many origins they are."""
        if "events" not in self._tables:
            return 0, 0
        rows = origins = 0
        parts = max(1, math.ceil(count_logged_rows(self._tables["events"]) / ROWS_AT_ONCE))
        for part in range(parts):
            # There is only one topic, so it is not compared.
            [found] = self._ask(
                "SELECT coalesce(sum(n), 0) AS rows, count(*) AS origins FROM (SELECT count(*) AS n FROM events WHERE "
                f"{self._mine} AND origin_offset % {parts} = {part} "
                "GROUP BY origin_generation, origin_partition, origin_offset)"
            )
            rows, origins = rows + int(found["rows"]), origins + int(found["origins"])
        return rows, origins

    def count_left_over(self) -> dict[tuple[str, bool], int]:
        """Origins that were rejected and not accepted since: where the last rejection sent them, and whether it did."""
        if "rejects" not in self._tables:
            return {}
        found = self._ask(
            f"{self._left_over} SELECT next_topic, published, count(*) AS n FROM left_over "
            "GROUP BY next_topic, published"
        )
        return {(str(row["next_topic"]), bool(row["published"])): int(row["n"]) for row in found}

    def count_discarded(self, discarded_origins: Collection[Origin]) -> Counter[tuple[str, bool]]:
        """The rows of `left_over` that a person discarded, counted alike: one may have been sent back before that."""
        if not discarded_origins or "rejects" not in self._tables:
            return Counter()
        rows = self._ask(f"{self._left_over} SELECT {ORIGIN_SQL}, next_topic, published FROM left_over")
        return Counter(
            (str(row["next_topic"]), bool(row["published"]))
            for row in rows
            if Origin.from_row(row) in discarded_origins
        )

    def count_reclaimed(
        self, reclaim_numbers: Mapping[Origin, int], discarded_origins: Collection[Origin]
    ) -> Counter[tuple[str, bool]]:
        """The rows of `left_over` that were reclaimed since they were rejected, counted alike."""
        if not reclaim_numbers or "rejects" not in self._tables:
            return Counter()
        rows = self._ask(f"{self._left_over} SELECT {ORIGIN_SQL}, next_topic, published, {NUMBER} FROM left_over")
        return Counter(
            (str(row["next_topic"]), bool(row["published"]))
            for row in rows
            if is_stale(reclaim_numbers, origin := Origin.from_row(row), row[NUMBER])
            and origin not in discarded_origins
        )

    def count_stranded(
        self, lost: Mapping[str, datetime], reclaim_numbers: Mapping[Origin, int], discarded_origins: Collection[Origin]
    ) -> dict[str, int]:
        """By tier the origins of `left_over` that it lost: published there before the moment, and not reclaimed."""
        if not lost or "rejects" not in self._tables:
            return {}
        found: Counter[str] = Counter()
        for topic, moment in lost.items():
            rows = self._ask(
                f"{self._left_over} SELECT {ORIGIN_SQL}, {NUMBER} FROM left_over WHERE published AND next_topic = "
                f"'{topic}' AND arrow_cast(published_at, 'Int64') < {to_microseconds(moment)}"
            )
            origins = ((Origin.from_row(row), row[NUMBER]) for row in rows)
            found[topic] = sum(
                one not in discarded_origins and not is_stale(reclaim_numbers, one, number) for one, number in origins
            )
        return {topic: count for topic, count in found.items() if count}

    @property
    def _left_over(self) -> str:
        return build_left_over_clause(self._tables, self._mine)

    def _ask(self, sql: str) -> list[dict[str, Any]]:
        return query_all(self._tables, sql)


# An accepted loss of a tier says which offsets are gone, not whose origins they were. But when every slice of the tier
# is decided that may hold earlier publications, an origin that was published there before, and still waits, is one of
# the lost ones. Reporting it too early does no harm: a reclaimed record is accepted once.
def read_loss_times(ledger: Ledger, stream: Stream, decided: Collection[str], now: datetime) -> dict[str, datetime]:
    """For each tier that lost records, and reads no more of what was published before, when that was accepted.

    Args:
        ledger: holds plans and losses.
        stream: the stream.
        decided: the slices that are decided.
        now: the time, in UTC.
    """
    found = {}
    losses = ledger.list_losses(stream.name)
    for topic, delay in zip(stream.tier_topics, stream.tiers, strict=True):
        topic_losses = [loss for loss in losses if loss.topic == topic]
        accepted = _find_last_acceptance(ledger.topics.list_generations(stream.name, topic), topic_losses, delay)
        if accepted is None or accepted[1] > now:
            continue
        moment, until = accepted
        slices = ledger.list_slices(stream.name, topic)
        if all(slice_.key in decided for slice_ in slices if slice_.planned_at <= until):
            found[topic] = moment
    return found


def _find_last_acceptance(
    generations: Sequence[Generation], losses: Sequence[Loss], delay: timedelta
) -> tuple[datetime, datetime] | None:
    """The last acceptance of a loss of a tier, and the end of planning for what was published before it.

    None if no loss was ever accepted. Records from before a topic was recreated are never planned.
    """
    recreated_at = [later.opened_at for one, later in pairwise(generations) if one.topic_id != later.topic_id]
    others = [later.opened_at for one, later in pairwise(generations) if one.topic_id == later.topic_id]
    # The losses of a topic are recorded at the moment of its new generation.
    others += [loss.recorded_at for loss in losses if loss.recorded_at not in recreated_at]
    waits = compute_longest_retry_delay(delay) + PLANNED_WITHIN
    moments = [(at, at) for at in recreated_at] + [(at, at + waits) for at in others]
    return max(moments, default=None)
