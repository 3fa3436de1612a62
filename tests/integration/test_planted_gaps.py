"""Gaps that are explained by Kafka or not, planted into sound tables."""

from __future__ import annotations

import pytest

from highwater.gaps import Gaps
from highwater.orchestration.checking import gap_checks
from highwater.plans import Loss
from highwater.slices import OffsetRange
from tests.helpers.planting import GAPS, drop
from tests.helpers.world import FIRST, NOON, RETRIED, World

# Seconds of processor each.
pytestmark = pytest.mark.slow


def seen(world: World) -> Gaps:
    world.check_slices()
    return world.ledger.gaps.read_for_slices([FIRST.key])[FIRST.key]


def test_on_a_topic_that_is_compacted_a_marker_is_not_distinguished_from_what_was_compacted(world: World) -> None:
    world.topics.cleanup_policy = "compact,delete"
    assert (seen(world).aborted, seen(world).markers, seen(world).markers_or_compacted) == (1, 0, 1)
    assert world.red() == {}


def test_a_topic_that_was_compacted_once_may_have_been_compacted_before_a_read(world: World) -> None:
    world.topics.cleanup_policy = "compact"
    world.check_slices([RETRIED.key])
    world.topics.cleanup_policy = "delete"
    assert seen(world).markers_or_compacted == 1


def test_settings_that_may_not_be_read_leave_it_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_checks, "fetch_topic_settings", lambda *_: None)
    assert (seen(world).markers, seen(world).markers_or_compacted) == (0, 1)


def test_records_missing_from_raw_fail_the_check_on_every_look(world: World) -> None:
    drop("raw", (0, 1))(world, FIRST)
    for _ in range(2):
        found = world.check_slices()[GAPS][FIRST.key]
        assert not found.passed
        assert not found.warning
        assert [*found.samples] == [{"partition": 0, "start": 1, "end": 2}]
    assert FIRST.key not in world.ledger.gaps.read_for_slices([FIRST.key]), (
        "nothing is explained as long as a record is lacking"
    )


def test_a_row_that_went_after_kafka_forgot_it_is_red(looked: World) -> None:
    looked.topics.log_start = 8
    drop("raw", (0, 1))(looked, FIRST)
    found = looked.check_slices()[GAPS]
    assert [found[key].passed for key in looked.keys] == [False, True, True]
    assert "others than the 2 of" in found[FIRST.key].text


def test_a_row_that_went_after_its_record_was_compacted_is_red(looked: World) -> None:
    """Also in a slice that had no gap at all."""
    looked.topics.cleanup_policy = "compact"
    looked.topics.committed["orders"].remove((0, 6))
    drop("raw", (0, 0))(looked, looked.second)
    assert looked.red([looked.second.key])[GAPS] == [looked.second.key]


def test_gaps_that_nobody_saw_in_time_are_a_warning(world: World) -> None:
    world.topics.log_start = 8
    found = world.check_slices()[GAPS][FIRST.key]
    assert (found.passed, found.warning, found.numbers["unseen"]) == (False, True, 2)
    world.topics.log_start, world.topics.topic_id = 0, "B" * 22
    assert world.ledger.gaps.read_for_slices([FIRST.key])[FIRST.key].unseen == 2, "what was seen first stays"


def test_losses_accepted_before_the_read_are_no_gap(world: World) -> None:
    drop("raw", (0, 0), (0, 1))(world, FIRST)
    world.alter_slice_commit("raw", FIRST, counts={"lost": 2})
    world.ledger.record_loss([Loss("orders", "orders", 0, 0, OffsetRange(0, 2), "expired", "ann", NOON)])
    world.topics.log_start = 2
    found = world.check_slices([FIRST.key])[GAPS][FIRST.key]
    # The aborted record of partition 1 lies before the log start as well: nobody can say what it was.
    assert (found.numbers["lost"], found.numbers["markers"], found.numbers["unseen"]) == (2, 1, 1)
