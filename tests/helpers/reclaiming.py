"""Records that a test reclaims in the tables of a world."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from highwater.envelope import Origin
from highwater.orchestration.checking.origin_counts import OriginEnds, count_ends
from highwater.orchestration.operations.reclaiming import ReclaimRequest, RecordsOnDlq, reclaim_records
from highwater.orchestration.reporting.locating import locate
from highwater.resources.ledger import Ledger
from tests.helpers.support import order
from tests.helpers.world import FIRST, NOON, PARKED, RETRIED, STREAM, World

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake


X, Y = Origin("orders", 0, 0, 2), Origin("orders", 0, 0, 4)


class Reclaiming:
    """Reclaims of records in the tables of a world."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.log: list[str] = []

    @property
    def where(self) -> tuple[Ledger, Lake, Stream]:
        return self.world.ledger, self.world.lake, STREAM

    def reclaim(self, **asked: Any) -> RecordsOnDlq:
        self.world.write()
        return reclaim_records(*self.where, ReclaimRequest(**asked), self.log.append)

    def ends(self) -> OriginEnds:
        self.world.write()
        found = count_ends(*self.where)
        assert found.error is None, found.rows
        return found

    def end(self, of: int) -> str:
        topics = cast("Kafka", self.world.topics)
        [found] = locate(self.world.ledger, topics, self.world.lake, STREAM, "orders", 0, of)
        return found.end

    def reject_in_tier(self) -> None:
        """Reject the record in the slice of the tier, later than in the first one."""
        world = self.world
        world.read(RETRIED, 0, 1, "o5", headers=[])
        reported = {"retries": 1, "next_topic": STREAM.tier_topics[1], "published_at": NOON + timedelta(seconds=5)}
        for table in ("rejects", "dlq"):
            world.rows[table].append({**world.at(table, FIRST, (0, 2)), "slice": RETRIED.key, **reported})

    def reprocess(self, *, accepted: bool) -> None:
        """Materialise the first slice again: its earlier rows of offset 2 are replaced."""
        world = self.world
        for table in ("rejects", "dlq"):
            world.rows[table].remove(world.at(table, FIRST, (0, 2)))
        if accepted:
            world.at("raw", FIRST, (0, 2))["value"] = json.dumps(order("o5", 1)).encode()
            world._event(FIRST, X, "o5", 1)
            world.at("events", FIRST, (0, 2))["reclaims"] = 1
        else:
            world.rows["raw"].remove(world.at("raw", FIRST, (0, 2)))
            world.read_reject(FIRST, 0, 2, "invalid", PARKED)
            world.at("rejects", FIRST, (0, 2))["reclaims"] = world.at("dlq", FIRST, (0, 2))["reclaims"] = 1
        for table in ("events", "rejects", "dlq", "current"):
            del world.slice_commits[table][FIRST.key]
        world._prove(FIRST)
