"""Sound tables, and defects planted into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from highwater.gaps import PartitionOffset
from highwater.orchestration.checking import gap_checks
from highwater.orchestration.checking.offset_queries import read_raw_offsets
from highwater.resources.kafka import Kafka
from highwater.slices import Slice
from highwater.topic_rules import Setting
from tests.helpers.world import FULL_STREAM as STREAM
from tests.helpers.world import World

TILE, PLANNED, GAPS = "slices_tile", "offsets_as_planned", "gaps_explained"
ACCOUNTED, PUBLISHED = "offsets_accounted_for", "rejects_published"
RECORDED = "events_as_recorded"
METRICS = "metrics_follow_events"
FOLLOWS, VERSIONS = "current_follows_events", "versions_in_order"
MISSING, SENT = "no_version_missing", "events_published"
ALONG, ONE_CONTENT, TRANSITIONS = "versions_along_offsets", "one_content_a_version", "transitions_allowed"


def build_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Makes sound tables that nobody has looked at."""

    def made(copies: int = 1) -> World:
        return show_settings(World(tmp_path, copies, STREAM), monkeypatch)

    return made


def show_settings(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Let the checks find the settings of the world's topics."""

    def settings(*_: object) -> dict[str, Setting]:
        return {"cleanup.policy": Setting(world.topics.cleanup_policy, "DYNAMIC_TOPIC_CONFIG")}

    monkeypatch.setattr(gap_checks, "fetch_topic_settings", settings)
    return world


def look(world: World) -> World:
    world.write()
    held = read_raw_offsets(world.ledger, world.lake, STREAM, world.keys)
    found = gap_checks.check_gaps_explained(world.ledger, cast("Kafka", world.topics), STREAM, held)
    assert all(result.passed for result in found.values())
    world.topics.reads.clear()
    return world


Plant = Callable[[World, Slice], object]


def drop(table: str, *places: PartitionOffset) -> Plant:
    def plant(world: World, of: Slice) -> None:
        for place in places:
            world.rows[table].remove(world.at(table, of, place))

    return plant


def double(table: str, place: PartitionOffset, **changes: object) -> Plant:
    return lambda world, of: world.rows[table].append({**world.at(table, of, place), **changes})


def alter(table: str, place: PartitionOffset, **changes: object) -> Plant:
    return lambda world, of: world.at(table, of, place).update(changes)


EVENT, MALFORMED, TOMBSTONE, WINNER, LOSER, LONE = (0, 0), (0, 2), (0, 3), (1, 3), (1, 0), (1, 2)
