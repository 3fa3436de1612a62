"""A decision that was not followed is finished; one that nothing can follow, since rows do not add up, is recreated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from highwater.assets import events
from highwater.assets.commit import CommittedSlices
from highwater.assets.work import Work
from highwater.plans import PublicationRecord
from highwater.slices import Slice
from tests.helpers.world import FIRST, NOON, STREAM, World

NOTHING = cast("Any", None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """The second slice, of two events and no rejects, was killed before `current`."""
    found = World(tmp_path)
    del found.slice_commits["current"][found.second.key]
    return found


def taken_over(world: World, slice_: Slice) -> str | None:
    """Why the decision on a slice stays; None where it is recreated."""
    world.write()
    work = Work(STREAM, [slice_], NOTHING, world.lake, world.ledger, NOTHING, print)
    read, committed, published = (CommittedSlices.read(work, table) for table in ("raw", "events", "dlq"))
    return events._list_unfinished_slices(work, read, committed, published).get(slice_.key)


def test_a_split_that_adds_up_is_finished(world: World) -> None:
    assert "attempt 2 is taken over: current still" in str(taken_over(world, world.second))


def lose_an_event(world: World, slice_: Slice) -> None:
    world.rows["events"].remove(world.at("events", slice_, (0, 0)))


def add_a_reject(world: World, slice_: Slice) -> None:
    world.rows["rejects"].append({**world.of("rejects")[0], "slice": slice_.key})


def read_fewer_before_rejects(world: World, slice_: Slice) -> None:
    del world.slice_commits["rejects"][slice_.key]
    world.rows["raw"].remove(world.at("raw", slice_, (0, 0)))


@pytest.mark.parametrize("damage", [lose_an_event, add_a_reject, read_fewer_before_rejects])
def test_a_split_that_no_rejects_can_follow_is_reprocessed(
    world: World, damage: Callable[[World, Slice], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(world, world.second)
    assert taken_over(world, world.second) is None
    assert "reprocessed: " in capsys.readouterr().out


@pytest.mark.parametrize("attempt", [1, 2])
def test_partly_published_slices_are_not_reprocessed(world: World, attempt: int) -> None:
    """Other records might be rejected, beside those that were sent; what an earlier decision sent is known."""
    world.ledger.publications.record("orders", world.second.key, PublicationRecord(attempt, 0, NOON))
    lose_an_event(world, world.second)
    assert (taken_over(world, world.second) is None) == (attempt == 1)


def test_rows_of_raw_that_were_lost_after_the_rejects_change_no_decision(world: World) -> None:
    world.rows["raw"].remove(world.at("raw", world.second, (0, 0)))
    assert taken_over(world, world.second) is not None


def test_rows_of_raw_that_went_by_their_age_are_no_damage(world: World) -> None:
    del world.slice_commits["rejects"][world.second.key]
    world.rows["raw"] = [row for row in world.rows["raw"] if row["slice"] != world.second.key]
    world.alter_slice_commit("raw", world.second, counts={"aged": 2})
    assert taken_over(world, world.second) is not None


def test_a_whole_slice_is_no_business_of_this(world: World) -> None:
    assert taken_over(world, FIRST) is None
