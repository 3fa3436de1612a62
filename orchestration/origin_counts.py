"""How many origins ended where: counted in the tables without a JVM, so that the ends sum to what was produced.

What belongs here: counting. What does not: following one of them (`orchestration.locating`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from highwater.envelope import ORIGIN, Origin
from highwater.slices import SliceKey
from resources.lake import proofs_in, query_all, rows_in, sized, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.proof import Proof
    from highwater.slices import Slice
    from resources.lake import Lake
    from resources.ledger import Ledger


# Origins that one query counts, some 100 bytes each; more are counted in several portions of offsets.
ROWS_AT_ONCE = 5_000_000


@dataclass(frozen=True)
class Ends:
    """How the origins of a stream's main topic ended.

    Args:
        produced: records of the main topic that stand in raw.
        accepted: origins in events.
        twice: rows in events beyond one for each origin; anything but 0 is an error.
        tombstones: records without a value.
        waiting: by tier the origins that were published to it and not accepted since.
        parked: origins that wait for a person.
        discarded: origins that a person gave up.
        unpublished: rejected, and not published yet.
        undecided: in raw, and not decided yet.
    """

    produced: int = 0
    accepted: int = 0
    twice: int = 0
    tombstones: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)
    parked: int = 0
    discarded: int = 0
    unpublished: int = 0
    undecided: int = 0

    @property
    def sum(self) -> int:
        """All ends together; what was produced, if nothing is lost or doubled."""
        ended = self.accepted + self.tombstones + self.parked + self.discarded
        return ended + sum(self.waiting.values()) + self.unpublished + self.undecided

    @property
    def error(self) -> str | None:
        """What is wrong with the numbers; None if they agree."""
        if self.twice:
            return f"{self.twice:,} rows of events are of an origin that stands there already"
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
            "parked": self.parked,
            "discarded": self.discarded,
            "rejected, not published yet": self.unpublished,
            "not decided yet": self.undecided,
            "sum": self.sum,
            "produced": self.produced,
        }
        return [[name, f"{count:,}"] for name, count in named.items()]


def count_ends(ledger: Ledger, lake: Lake, stream: Stream) -> Ends:
    """Count the ends of all origins that raw holds.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    tables = _opened(lake, stream, "dlq", "rejects", "events", "raw")
    if "raw" not in tables:
        return Ends()
    decided = {name: proofs_in(tables[name]) if name in tables else {} for name in ("events", "rejects")}
    settled = {
        key
        for key, p in decided["events"].items()
        if key in decided["rejects"] and decided["rejects"][key].attempt == p.attempt
    }
    read = sized(tables["raw"], _main(proofs_in(tables["raw"]), stream))
    open_slices = [proof.piece for key, proof in decided["events"].items() if key not in settled]
    counted = _Counted(tables, stream, open_slices)
    rows, accepted = counted.accepted()
    left_over = counted.left_over()
    discarded = counted.discarded({discard.origin for discard in ledger.discards(stream.name)})
    return Ends(
        produced=sum(proof.rows or 0 for proof in read.values()),
        accepted=accepted,
        twice=rows - accepted,
        tombstones=sum(
            proof.counts.get("tombstones", 0)
            for key, proof in _main(decided["events"], stream).items()
            if key in settled
        ),
        waiting={tier: left_over.get((tier, True), 0) for tier in stream.tier_topics},
        parked=left_over.get((stream.parked_topic, True), 0) - discarded,
        discarded=discarded,
        unpublished=sum(count for (_, published), count in left_over.items() if not published),
        undecided=sum(proof.rows or 0 for key, proof in read.items() if key not in settled),
    )


def count_parked(ledger: Ledger, lake: Lake, stream: Stream) -> int:
    """Origins that were rejected for good, and neither accepted nor given up since.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    tables = _opened(lake, stream, "dlq", "rejects", "events")
    counted = _Counted(tables, stream, [])
    there = sum(count for (topic, _), count in counted.left_over().items() if topic == stream.parked_topic)
    return there - counted.discarded({discard.origin for discard in ledger.discards(stream.name)})


def _opened(lake: Lake, stream: Stream, *names: str) -> dict[str, DeltaTable]:
    """Those of the tables that are there; downstream first, so that nothing is counted that was decided meanwhile."""
    found = {name: lake.table(stream.name, name) for name in names}
    return {name: table for name, table in found.items() if table is not None}


def _main(proofs: Mapping[str, Proof], stream: Stream) -> dict[str, Proof]:
    return {key: proof for key, proof in proofs.items() if SliceKey.parse(key).topic == stream.topic}


_ORIGIN = ", ".join(ORIGIN)


def _same(one: str, other: str) -> str:
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in ORIGIN)


class _Counted:
    """Counts over the tables as they were opened.

    Args:
        tables: by name; any of them may be missing.
        stream: the stream.
        open_slices: slices that are being decided. They are left out, and of those of the main topic all of their
            origins, whatever became of them in a tier: they count as undecided.
    """

    def __init__(self, tables: Mapping[str, DeltaTable], stream: Stream, open_slices: Sequence[Slice]) -> None:
        self._tables = tables
        topic = stream.topic.replace("'", "''")
        conditions = ["proof IS NULL", f"origin_topic = '{topic}'"]
        if open_slices:
            conditions.append(f"NOT {slice_is_one_of([piece.key for piece in open_slices])}")
        conditions += [
            f"NOT (origin_generation = {piece.generation} AND origin_partition = {partition} "
            f"AND origin_offset >= {offsets.start} AND origin_offset < {offsets.end})"
            for piece in open_slices
            if piece.topic == stream.topic
            for partition, offsets in piece.ranges.items()
            if len(offsets)
        ]
        self._mine = " AND ".join(conditions)
        self._parked = stream.parked_topic.replace("'", "''")

    def accepted(self) -> tuple[int, int]:
        """Rows of the main topic's origins in events, and how many origins they are."""
        if "events" not in self._tables:
            return 0, 0
        rows = origins = 0
        parts = max(1, math.ceil(rows_in(self._tables["events"]) / ROWS_AT_ONCE))
        for part in range(parts):
            # Of the topic there is one, so it is not compared.
            [found] = self._ask(
                "SELECT coalesce(sum(n), 0) AS rows, count(*) AS origins FROM (SELECT count(*) AS n FROM events WHERE "
                f"{self._mine} AND origin_offset % {parts} = {part} "
                "GROUP BY origin_generation, origin_partition, origin_offset)"
            )
            rows, origins = rows + int(found["rows"]), origins + int(found["origins"])
        return rows, origins

    def left_over(self) -> dict[tuple[str, bool], int]:
        """Origins that were rejected and not accepted since: where the last rejection sent them, and whether it did."""
        if "rejects" not in self._tables:
            return {}
        found = self._ask(
            f"{self._left_over} SELECT next_topic, published, count(*) AS n FROM left_over "
            "GROUP BY next_topic, published"
        )
        return {(str(row["next_topic"]), bool(row["published"])): int(row["n"]) for row in found}

    def discarded(self, given_up: Collection[Origin]) -> int:
        """Parked origins that a person gave up, and that were not accepted since."""
        if not given_up or "rejects" not in self._tables:
            return 0
        found = self._ask(f"{self._left_over} SELECT {_ORIGIN} FROM left_over WHERE next_topic = '{self._parked}'")
        return sum(Origin.of_row(row) in given_up for row in found)

    @property
    def _left_over(self) -> str:
        """The last rejection of each origin that was not accepted in a retry, as `left_over`.

        The last is the one that was published last, or is not published yet. An origin that was accepted without a
        retry is in two places, and the ends sum to more than was produced.
        """
        # Without the table of what was published nothing was.
        sent = "dlq WHERE proof IS NULL" if "dlq" in self._tables else "rejects WHERE false"
        at = "published_at" if "dlq" in self._tables else "CAST(NULL AS TIMESTAMP) AS published_at"
        # Rows from before the column `retries` was there have null.
        order = "ORDER BY published, published_at DESC NULLS LAST, coalesce(retries, 0) DESC"
        accepted = f"SELECT {_ORIGIN} FROM events WHERE {self._mine} AND retries > 0"
        nobody = f"SELECT {_ORIGIN} FROM rejects WHERE false"
        return (
            f"WITH sent AS (SELECT slice, {_ORIGIN}, {at} FROM {sent}), "
            "rejected AS (SELECT r.*, sent.published_at, sent.slice IS NOT NULL AS published "
            f"FROM (SELECT slice, {_ORIGIN}, next_topic, retries FROM rejects WHERE {self._mine}) r "
            f"LEFT JOIN sent ON r.slice = sent.slice AND {_same('r', 'sent')}), "
            f"last AS (SELECT {_ORIGIN}, first_value(next_topic {order}) AS next_topic, "
            f"first_value(published {order}) AS published FROM rejected GROUP BY {_ORIGIN}), "
            f"accepted AS ({accepted if 'events' in self._tables else nobody}), "
            f"left_over AS (SELECT last.* FROM last LEFT ANTI JOIN accepted ON {_same('last', 'accepted')})"
        )

    def _ask(self, sql: str) -> list[dict[str, Any]]:
        return query_all(self._tables, sql)
