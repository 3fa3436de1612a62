"""Slices whose rows of raw are gone: erasure, reclaims, decisions and later reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.assets import events, slice_classification
from highwater.assets.commit import CommittedSlices
from highwater.assets.raw import _KafkaRows
from highwater.assets.work import Work
from highwater.erasing import compute_digest
from highwater.errors import SupersededAttemptError, TemporaryError, UnbalancedError
from highwater.orchestration.operations import erasing
from highwater.orchestration.operations.erasing import ErasureRequest
from highwater.orchestration.operations.parked import ParkedSelection
from highwater.orchestration.operations.reclaiming import read_records_on_dlq
from highwater.retention import (
    AGED_FROM,
    count_records,
)
from highwater.slice_commits import SliceCommit
from tests.helpers.erasure_commits import FakeErasureCommits
from tests.helpers.retained import (
    NOTHING,
    NOW,
    STORED,
    Step,
    discard_parked_record,
    held,
    locate_record,
)
from tests.helpers.world import FIRST, RETRIED, World

# Seconds of processor each.
pytestmark = pytest.mark.slow


def test_a_key_is_erased_of_slices_whose_rows_of_raw_are_gone(
    step: Step, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event goes; of its second deliveries nothing is known any more, and nothing is claimed."""
    for name in ("events", "rejects"):
        counts = world.slice_commits[name][FIRST.key].counts
        world.alter_slice_commit(name, FIRST, counts={**counts, "rejects_malformed": 1, "rejects_unresolved": 1})
    discard_parked_record(world)
    step.maintain()
    assert held(world) == set()
    rows = dict(world.slice_commits["raw"])
    retained = FakeErasureCommits(world, monkeypatch)
    world.slice_commits["raw"].update(rows)
    world.write()
    retained.dies_after = "raw"
    work, asked = step.work(), ErasureRequest(compute_digest(b"o5"), dry_run=False, by="ann", because="asked for")
    with pytest.raises(TemporaryError, match="killed"):
        erasing.erase_key(work, None, asked, NOW)
    retained.dies_after = ""
    erasing.erase_key(work, None, asked, NOW)
    assert [name for name in retained.names if name != "forgotten"] == ["raw", "events", "rejects"]
    assert world.of("events", key="o5") == world.of("rejects", key=b"o5") == []
    lost = {key: one for key, one in world.slice_commits["raw"].items() if "erased" in one.counts}
    reported = {key: (count_records(one), one.counts["erased"], AGED_FROM in one.counts) for key, one in lost.items()}
    assert reported == {FIRST.key: (6, 2, False), RETRIED.key: (2, 1, False)}
    red = world.red()
    assert {name: red.get(name) for name in ("gaps_explained", "offsets_accounted_for")} == {
        "gaps_explained": None, "offsets_accounted_for": None
    }  # fmt: skip
    assert (locate_record(world, 4).end, locate_record(world, 0).end) == ("erased", "accepted")


def test_records_of_slices_without_rows_are_not_reclaimed(step: Step, world: World) -> None:
    """A retry that is reprocessed may reject what it had accepted; there is nothing to decide of on the main topic."""
    found = read_records_on_dlq(world.ledger, world.lake, STORED, ParkedSelection())
    assert (found.slices, found.aged) == ([FIRST.key], 0)
    world.alter_slice_commit("raw", FIRST, counts={"aged": 8})
    world.write()
    found = read_records_on_dlq(world.ledger, world.lake, STORED, ParkedSelection())
    assert (found.slices, found.aged) == ([], 1)
    assert "1 are of slices whose rows of raw have expired" in found.lines[-1]
    del step


def committed(slice_commit: SliceCommit) -> CommittedSlices:
    return CommittedSlices({slice_commit.key: slice_commit}, 7)


def test_a_decision_remains_without_raw_and_none_is_made_of_nothing() -> None:
    gone, whole = committed(SliceCommit(FIRST, 2, 0, {"aged": 8})), committed(SliceCommit(FIRST, 1, 8))
    assert events._select_undecidable_slices(whole, [FIRST.key], CommittedSlices({}, -1)) == {}
    decided = committed(SliceCommit(FIRST, 2, 5))
    assert "raw's retention deleted 8 rows" in events._select_undecidable_slices(gone, [FIRST.key], decided)[FIRST.key]
    with pytest.raises(UnbalancedError, match="no longer has all rows"):
        events._select_undecidable_slices(gone, [FIRST.key], CommittedSlices({}, -1))


def test_a_split_of_rows_that_went_meanwhile_is_not_committed(world: World) -> None:
    work = Work(STORED, [FIRST], NOTHING, world.lake, world.ledger, NOTHING, print)
    read = CommittedSlices.read(work, "raw")
    slice_classification._ensure_as_read(work, read, {FIRST.key: 8})
    slice_classification._ensure_as_read(work, read, {FIRST.key: 7})  # damaged by something else, which the checks find
    world.alter_slice_commit("raw", FIRST, attempt=2, counts={"aged": 8})
    world.rows["raw"] = [row for row in world.rows["raw"] if row["slice"] != FIRST.key]
    world.write()
    with pytest.raises(SupersededAttemptError, match="committed again"):
        slice_classification._ensure_as_read(work, read, {FIRST.key: 0})


def test_a_part_of_what_went_does_not_come_back() -> None:
    """Compaction took records since: events of fewer would be fewer events."""
    again = _KafkaRows(NOTHING, {}, {FIRST.key: 7})
    assert "would give 7 records, the commit recorded 8" in str(
        again.find_refusal(FIRST, SliceCommit(FIRST, 2, 0, {"aged": 8}))
    )
    assert replace(again, again={FIRST.key: 8}).find_refusal(FIRST, SliceCommit(FIRST, 2, 0, {"aged": 8})) is None
