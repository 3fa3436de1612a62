"""How many origins ended where: counted in the tables without a JVM, so that the ends sum to what was produced.

What belongs here: counting. What does not: following one of them (`orchestration.locating`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from highwater.envelope import Origin
from highwater.errors import DependencyAwayError
from highwater.slices import SliceKey
from resources.lake import proofs_in, sized, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.proof import Proof
    from highwater.slices import Slice
    from resources.lake import Lake
    from resources.ledger import Ledger


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
    # Downstream first: what is committed meanwhile is then decided of nothing that is not counted.
    opened = {name: lake.table(stream.name, name) for name in ("dlq", "rejects", "events", "raw")}
    tables = {name: table for name, table in opened.items() if table is not None}
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
    opened = {name: lake.table(stream.name, name) for name in ("rejects", "events")}
    tables = {name: table for name, table in opened.items() if table is not None}
    counted = _Counted(tables, stream, [])
    there = sum(count for (topic, _), count in counted.left_over().items() if topic == stream.parked_topic)
    return there - counted.discarded({discard.origin for discard in ledger.discards(stream.name)})


def _main(proofs: Mapping[str, Proof], stream: Stream) -> dict[str, Proof]:
    return {key: proof for key, proof in proofs.items() if SliceKey.parse(key).topic == stream.topic}


_ORIGIN = ", ".join(f"origin_{name}" for name in Origin._fields)


def _same(one: str, other: str) -> str:
    return " AND ".join(f"{one}.origin_{name} = {other}.origin_{name}" for name in Origin._fields)


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
        self._main = f"{topic}@"
        self._parked = stream.parked_topic.replace("'", "''")

    def accepted(self) -> tuple[int, int]:
        """Rows of the main topic's origins in events, and how many origins they are."""
        if "events" not in self._tables:
            return 0, 0
        [found] = self._ask(
            "SELECT sum(n) AS rows, count(*) AS origins FROM "
            f"(SELECT count(*) AS n FROM events WHERE {self._mine} GROUP BY {_ORIGIN})"
        )
        return int(found["rows"] or 0), int(found["origins"])

    def left_over(self) -> dict[tuple[str, bool], int]:
        """Origins that were rejected and not accepted since: where the last rejection sent them, and whether it did."""
        if "rejects" not in self._tables:
            return {}
        sent = "false"
        joined = ""
        if "dlq" in self._tables:
            sent = "d.slice IS NOT NULL"
            joined = (
                f"LEFT JOIN (SELECT slice, {_ORIGIN} FROM dlq WHERE proof IS NULL) d "
                f"ON o.slice = d.slice AND {_same('o', 'd')}"
            )
        found = self._ask(
            f"{self._last()} SELECT o.next_topic, {sent} AS published, count(*) AS n FROM left_over o {joined} "
            f"GROUP BY o.next_topic, {sent}"
        )
        return {(str(row["next_topic"]), bool(row["published"])): int(row["n"]) for row in found}

    def discarded(self, given_up: Collection[Origin]) -> int:
        """Parked origins that a person gave up, and that were not accepted since."""
        if not given_up or "rejects" not in self._tables:
            return 0
        found = self._ask(f"{self._last()} SELECT {_ORIGIN} FROM left_over WHERE next_topic = '{self._parked}'")
        return sum(Origin(*[row[f"origin_{name}"] for name in Origin._fields]) in given_up for row in found)

    def _last(self) -> str:
        """The last rejection of each origin that was not accepted in a retry, as `left_over`.

        The main topic's slice came first; of tiers the one that was published last, or is not published yet. One that
        was accepted without a retry is in two places, and the ends sum to more than was produced.
        """
        sent = "SELECT slice, published_at, " if "dlq" in self._tables else "SELECT slice, NULL AS published_at, "
        origins = ", ".join(f"r.origin_{name}" for name in Origin._fields)
        order = (
            f"CASE WHEN starts_with(slice, '{self._main}') THEN 0 ELSE 1 END DESC, published_at DESC NULLS FIRST, "
            "coalesce(retries, 0) DESC"  # rows from before the column was there have null
        )
        return (
            f"WITH sent AS ({sent}{_ORIGIN} FROM {'dlq' if 'dlq' in self._tables else 'rejects'} "
            "WHERE proof IS NULL), "
            f"rejected AS (SELECT {origins}, r.slice, r.next_topic, r.retries, sent.published_at "
            f"FROM (SELECT * FROM rejects WHERE {self._mine}) r "
            f"LEFT JOIN sent ON r.slice = sent.slice AND {_same('r', 'sent')}), "
            f"last AS (SELECT {_ORIGIN}, first_value(next_topic ORDER BY {order}) AS next_topic, "
            f"first_value(slice ORDER BY {order}) AS slice FROM rejected GROUP BY {_ORIGIN}), "
            f"accepted AS (SELECT {_ORIGIN} FROM events WHERE {self._mine} AND retries > 0), "
            f"left_over AS (SELECT last.* FROM last LEFT ANTI JOIN accepted ON {_same('last', 'accepted')})"
        )

    def _ask(self, sql: str) -> list[dict[str, Any]]:
        return _ask(self._tables, sql)


def _ask(tables: Mapping[str, DeltaTable], sql: str) -> list[dict[str, Any]]:
    import pyarrow as pa
    from deltalake import QueryBuilder

    builder = QueryBuilder()
    for name, table in tables.items():
        builder = builder.register(name, table)
    try:
        found: list[dict[str, Any]] = pa.table(builder.execute(sql)).to_pylist()
    except Exception as error:
        raise DependencyAwayError(
            "the tables of the lake could not be counted",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="see that HIGHWATER_LAKE can be read, then try again",
        ) from error
    return found
