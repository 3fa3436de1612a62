"""The step of maintenance that deletes old rows of raw: none that is needed, and what has gone is reported as that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from deltalake import DeltaTable

from highwater.assets import raw_expiry
from highwater.assets.work import Work
from highwater.declaration import Retention, Stream
from highwater.envelope import Origin
from highwater.erasing import BY_AGE, ErasedCounts, Erasure
from highwater.errors import TemporaryError
from highwater.orchestration.checking.completeness import compare_with_topic
from highwater.orchestration.checking.offset_queries import RawRows, read_raw_rows
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.maintenance_job import _observe
from highwater.orchestration.operations import maintenance, raw_retention, rebuilding
from highwater.orchestration.operations.key_retirement import list_complete_slices
from highwater.orchestration.operations.maintenance import Report, TableReport
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.locating import locate
from highwater.reclaims import Reclaim
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.table_maintenance import TableSize
from highwater.retention import (
    AGED_FROM,
    count_expired_rows,
)
from highwater.slices import Slice
from tests.helpers.retained import (
    DAY,
    IN_DLQ,
    KAFKA,
    NOTHING,
    NOW,
    STORED,
    Step,
    discard_parked_record,
    held,
    locate_record,
)
from tests.helpers.world import FIRST, NOON, RETRIED, STREAM, World

# Seconds of processor each.
pytestmark = pytest.mark.slow


def test_a_dry_run_reports_what_would_go_and_what_stays(step: Step, world: World) -> None:
    second = world.second.key
    found = step.maintain(dry_run=True)
    assert (dict(found.rows), dict(found.retained)) == ({second: 2, RETRIED.key: 3}, {IN_DLQ: 1})
    assert found.lines == [
        f"raw, retained for 720 h: 2 slices lose 5 rows: {second} .. {RETRIED.key}",
        f"raw: 1 slices keep their rows, {IN_DLQ}",
    ]
    assert found.numbers == {"aged_slices": 2, "aged_rows": 5, "retained_slices": 1}
    assert world.ledger.erasures.list_for_stream("orders") == []
    assert held(world) == {*world.keys}


def test_nothing_goes_without_a_declaration_or_without_dagster(step: Step, world: World) -> None:
    assert maintenance.maintain(replace(step.work(), stream=STREAM), step.instance, NOW, dry_run=False).retained is None
    found = maintenance.maintain(step.work(), None, NOW, dry_run=False)
    assert "raw: DAGSTER_HOME is not set, so no slice loses its rows" in found.lines
    assert held(world) == {*world.keys}


def test_expired_rows_are_reported_and_downstream_tables_stay(step: Step, world: World) -> None:
    discard_parked_record(world)
    found = step.maintain()
    assert dict(found.rows) == {FIRST.key: 8, world.second.key: 2, RETRIED.key: 3}
    assert held(world) == set()
    assert world.red() == {}
    results = world.check_slices()
    gaps, placed = results["gaps_explained"][FIRST.key], results["offsets_accounted_for"][FIRST.key]
    assert (gaps.numbers["aged"], gaps.numbers["gaps"], gaps.numbers["aborted"]) == (8, 2, 1)
    assert "8 of records whose rows have expired are left out" in gaps.text
    assert (placed.numbers["raw"], placed.numbers["aged"], placed.numbers["gaps"]) == (8, 8, 2)
    compared = results["events_as_recorded"][FIRST.key]
    assert (compared.text, compared.numbers["events"]) == ("nothing is compared: 8 rows of raw have expired", 0)
    ends = count_ends(world.ledger, world.lake, STORED)
    assert (ends.error, ends.produced, ends.accepted, ends.tombstones, ends.discarded) == (None, 10, 8, 1, 1)

    reported = {offset: locate_record(world, offset) for offset in (0, 2, 3, 5)}
    assert {offset: one.end for offset, one in reported.items()} == {0: "accepted", 2: "discarded", 3: "aged", 5: "gap"}
    went = f"its row of raw expired, by maintenance at {NOW}: raw is retained for 720 h"
    assert reported[0].facts == [went]
    assert went in reported[3].lines[-1]
    [tier] = locate(world.ledger, NOTHING, world.lake, STORED, RETRIED.topic, 0, 0)
    assert tier.end == "aged"
    lines = explain(world.ledger, world.lake, STORED, FIRST.key, None).lines
    assert f"by age: 8 records, by maintenance at {NOW:%Y-%m-%d %H:%M} UTC: raw is retained for 720 h" in lines
    against = compare_with_topic(world.ledger, cast("Any", world.topics), world.lake, STORED, world.slices)
    assert [one.skipped for one in against] == [f"{n} rows of raw have expired" for n in (8, 2, 3)]
    assert dict(step.maintain().rows) == {}, "they go once"


def take_rows(world: World) -> None:
    world.rows["raw"] = [row for row in world.rows["raw"] if row["slice"] != world.second.key]


def say_so(world: World) -> None:
    """The commit's own word is no record."""
    take_rows(world)
    world.alter_slice_commit("raw", world.second, counts={"aged": 2})


@pytest.mark.parametrize(
    ("damage", "red"),
    [(take_rows, {"gaps_explained", "offsets_accounted_for"}), (say_so, {"gaps_explained"})],
)
def test_rows_that_went_without_a_record_are_an_error(
    step: Step, world: World, damage: Callable[[World], None], red: set[str]
) -> None:
    damage(world)
    assert {*world.red()} == red
    if damage is say_so:
        assert "and the ledger knows of 0 of them" in world.check_slices()["gaps_explained"][world.second.key].text
    else:
        assert count_ends(world.ledger, world.lake, STORED).error is not None
    del step


def test_a_record_explains_nothing_of_rows_that_came_back(step: Step, world: World) -> None:
    """They were read from Kafka again; that they are gone again is another matter."""
    before = [*world.rows["raw"]]
    step.maintain()
    world.rows["raw"] = before
    world.alter_slice_commit("raw", world.second, counts={})
    world.alter_slice_commit("raw", RETRIED, counts={})
    assert world.red() == {}
    reported = explain(world.ledger, world.lake, STORED, world.second.key, None).aged
    assert reported[-1] == "raw was read again since, and holds its records"
    take_rows(world)
    assert {*world.red([world.second.key])} == {"gaps_explained", "offsets_accounted_for"}
    assert locate_record(world, 6).end == "gap"


@pytest.mark.parametrize("what", ["an event is gone", "in two places", "not planned"])
def test_downstream_faults_are_found_without_raw(step: Step, world: World, what: str) -> None:
    step.maintain()
    event = world.at("events", world.second, (0, 0))
    if what == "an event is gone":
        world.rows["events"].remove(event)
    elif what == "in two places":
        reject = {**world.rows["rejects"][0], "slice": world.second.key}
        world.rows["rejects"].append({**reject, **{n: event[n] for n in event if n.startswith("origin_")}})
    else:
        event["origin_offset"] = 99
    assert world.second.key in world.red()["offsets_accounted_for"]
    text = world.check_slices()["offsets_accounted_for"][world.second.key].text
    reported = {
        "an event is gone": "and 1 are there",
        "in two places": "1 in two places",
        "not planned": "and not planned",
    }
    assert reported[what] in text


# The steps of retention, each in the ledger (add, begin, done), the table that follows it (keep), or raw (commit).
POINTS = ["add", "begin", "keep", "commit", "done"]


@pytest.mark.parametrize("point", POINTS[1:])
def test_wherever_it_dies_the_next_one_finishes_it(step: Step, world: World, point: str) -> None:
    step.dies = point
    with pytest.raises(TemporaryError, match=f"killed at {point}"):
        step.maintain()
    assert held(world) == ({FIRST.key} if point in {"commit", "done"} else {*world.keys})
    assert world.red() == {}
    fresh = Ledger(f"sqlite:///{Path(world.lake.root).parent / 'rebuilt.sqlite'}")
    rebuilt = rebuilding.rebuild_from_lake(fresh, world.lake, KAFKA, STORED, [], lambda _: None, dry_run=False)
    assert ("2 slices have expired rows of raw" in rebuilt.lines) == (point != "begin")
    world.ledger = fresh  # as it were lost, too
    for _ in range(9):
        fresh.allocate_attempts(world.keys)
    assert step.maintain().back == []
    assert held(world) == {FIRST.key}
    assert world.red() == {}
    recorded = [it for one in fresh.erasures.list_recorded("orders") for it in one.slices.values()]
    assert {one.slice_key for one in recorded if one.done_at} == {world.second.key, RETRIED.key}


@pytest.mark.parametrize("point", POINTS[:3])
def test_unfinished_expiry_is_not_recorded_as_done(step: Step, world: World, point: str) -> None:
    """It was said to be done of slices that held all of their rows."""
    step.dies = point
    with pytest.raises(TemporaryError, match="killed"):
        step.maintain()
    step.stream = replace(STORED, retention=Retention(raw=9999 * DAY))  # declared so meanwhile: nothing is old enough
    assert dict(step.maintain().rows) == {}
    assert held(world) == {*world.keys}
    both = [world.second.key, RETRIED.key]
    [recorded] = world.ledger.erasures.list_recorded("orders")
    assert {key: one.done_at for key, one in recorded.slices.items()} == dict.fromkeys(both if point != "add" else [])
    step.stream = STORED
    assert [*step.maintain().rows] == both
    found = [it for one in world.ledger.erasures.list_recorded("orders") for it in one.slices.values()]
    assert (len(found), [one for one in found if one.done_at is None]) == (2 if point == "add" else 4, [])


def begin_a_run(step: Step) -> None:
    step.meanwhile = lambda: None
    step.instance.add_dynamic_partitions("orders_slices", step.world.keys)
    step.run(step.world.second.key)


def reprocess(step: Step) -> None:
    step.meanwhile = lambda: None
    step.world.alter_slice_commit("events", step.world.second, attempt=9)
    step.world.write()


@pytest.mark.parametrize("meanwhile", [begin_a_run, reprocess])
def test_rows_that_a_run_needs_meanwhile_are_put_back(
    step: Step, world: World, meanwhile: Callable[[Step], None]
) -> None:
    before = world.of("raw", slice=world.second.key)
    step.meanwhile = lambda: meanwhile(step)
    found = step.maintain()
    assert (found.back, [*found.rows]) == ([world.second.key], [RETRIED.key])
    again = sorted(world.of("raw", slice=world.second.key), key=lambda row: row["offset"])
    assert [(row["offset"], row["key"], row["value"]) for row in again] == [
        (row["offset"], row["key"], row["value"]) for row in before
    ]
    slice_commit = world.lake.load_slice_commits("orders", "raw", [world.second.key])[world.second.key]
    assert (slice_commit.rows, count_expired_rows(slice_commit), AGED_FROM in slice_commit.counts) == (2, 0, False)
    [open_] = world.ledger.erasures.read_for_slices([world.second.key])[world.second.key]
    assert open_.done_at is None


def test_slices_that_runs_work_on_or_that_are_not_whole_keep_their_rows(step: Step, world: World) -> None:
    step.instance.add_dynamic_partitions("orders_slices", world.keys)
    step.run(world.second.key)
    world.alter_slice_commit("rejects", RETRIED, attempt=1)
    world.write()
    found = step.maintain()
    assert dict(found.retained) == {
        IN_DLQ: 1,
        "named by unfinished runs or backfills": 1,
        "incomplete in some table": 1,
    }
    assert held(world) == {*world.keys}


def test_a_record_that_a_retry_rejected_again_keeps_rows_of_both_slices(world: World) -> None:
    """Parked by reference, it is in raw of the slice of the tier; reclaimed, it is decided from the first one."""
    for name in ("rejects", "dlq"):
        [row] = world.of(name, origin_offset=2)
        world.rows[name].append({**row, "slice": RETRIED.key, "retries": 1})
    world.write()
    assert raw_retention.read_dlq_slices(world.ledger, world.lake, STORED) == {FIRST.key, RETRIED.key}
    discard_parked_record(world)
    assert raw_retention.read_dlq_slices(world.ledger, world.lake, STORED) == set()


def test_slices_whose_records_were_reclaimed_keep_their_rows(step: Step, world: World) -> None:
    reclaim = Reclaim(Origin("orders", 0, 0, 6), world.second.key, 1, "a fixed rule", "ann", NOON)
    world.ledger.reclaims.add("orders", [reclaim])
    found = step.maintain()
    assert dict(found.retained) == {IN_DLQ: 1, "reclaimed from the DLQ and not reprocessed yet": 1}
    assert [*found.rows] == [RETRIED.key]


def test_rows_that_were_reread_since_they_were_recorded_stay(step: Step, world: World) -> None:
    work, both = replace(step.work(), slices=[world.second, RETRIED]), [world.second.key, RETRIED.key]
    number = world.ledger.erasures.add(Erasure("orders", BY_AGE, "", "", NOW))
    world.ledger.erasures.begin(number, [ErasedCounts(key, {}, {}) for key in both])
    assert raw_expiry.expire_rows(work, dict(zip(both, (1, 3), strict=True))) == [RETRIED.key]
    assert held(world) == {FIRST.key, world.second.key}
    assert raw_retention._return_needed_rows(work, step.instance, both, NOW) == []
    [recorded] = world.ledger.erasures.list_recorded("orders")
    assert [key for key, one in recorded.slices.items() if one.done_at] == [RETRIED.key]


def test_the_job_shows_what_went_on_the_page_of_raw(step: Step) -> None:
    seen: list[Any] = []
    tables = [TableReport(name, TableSize(1, 1, 1, 1), TableSize(1, 1, 1, 1), 0, 0, 0) for name in ("raw", "events")]
    report = Report(tables, done=True, retained=step.maintain(dry_run=True))
    _observe(cast("Any", SimpleNamespace(log_event=seen.append)), STORED, report)
    reported = [{name: value.value for name, value in one.metadata.items() if "slices" in name} for one in seen]
    assert reported == [{"maintenance/aged_slices": 2, "maintenance/retained_slices": 1}, {}]


def test_one_maintenance_takes_a_bounded_number_of_slices_the_oldest_first(
    step: Step, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_retention, "MAX_SLICES", 1)
    first, second = step.maintain(), step.maintain()
    assert ([*first.rows], [*second.rows]) == ([world.second.key], [RETRIED.key])
    assert [len(one.notes) for one in (first, second)] == [1, 0]


def test_no_slice_is_looked_at_beyond_those_that_one_maintenance_takes(
    step: Step, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def looking(lake: Lake, stream: Stream, keys: Sequence[str]) -> set[str]:
        looked.extend(keys)
        return list_complete_slices(lake, stream, keys)

    monkeypatch.setattr(raw_retention, "list_complete_slices", looking)
    monkeypatch.setattr(raw_retention, "MAX_SLICES", 1)
    monkeypatch.setattr(raw_retention, "PAGE", 1)
    discard_parked_record(world)
    found = step.maintain(dry_run=True)
    assert ([*found.rows], len(found.notes)) == ([FIRST.key], 1)
    assert looked == [FIRST.key, world.second.key], "the second one shows that there are more"


def test_few_rounds_take_all(step: Step, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads the whole record of what went; only the question for offsets is asked of few slices at a time."""
    rounds, asked = list[int](), list[int]()

    def taking(work: Work, recorded: Mapping[str, int]) -> list[str]:
        rounds.append(len(work.slices))
        return raw_expiry.expire_rows(work, recorded)

    def asking(raw: DeltaTable, slices: Sequence[Slice]) -> dict[str, RawRows]:
        asked.append(len(slices))
        return read_raw_rows(raw, slices)

    monkeypatch.setattr(raw_retention, "expire_rows", taking)
    monkeypatch.setattr(raw_retention, "read_raw_rows", asking)
    step.stream = replace(STORED, limits=replace(STORED.limits, slices_per_run=1))
    discard_parked_record(world)
    assert dict(step.maintain().rows) == {FIRST.key: 8, world.second.key: 2, RETRIED.key: 3}
    assert (held(world), rounds, asked) == (set(), [3], [1, 1, 1])
    assert world.red() == {}


def test_records_that_were_rejected_during_the_look_keep_the_rows(
    step: Step, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run began and ended in between, so that nothing names the slice."""

    def reprocessed(lake: Lake, stream: Stream, keys: Sequence[str]) -> set[str]:
        for name in ("rejects", "dlq"):
            [row] = world.of(name, origin_offset=2)
            world.rows[name].append({**row, "slice": world.second.key, "origin_offset": 6})
        world.write()
        return list_complete_slices(lake, stream, keys)

    monkeypatch.setattr(raw_retention, "list_complete_slices", reprocessed)
    assert [*step.maintain().rows] == [RETRIED.key]
    assert held(world) == {FIRST.key, world.second.key}


def test_an_erasure_that_goes_on_is_waited_for(step: Step, world: World) -> None:
    with world.ledger.lease("erase orders", 60):
        found = step.maintain()
    assert "gave way to another writer" in found.notes[0]
    assert held(world) == {*world.keys}
