"""What maintenance decides, and which keys it takes from Dagster: a few thousand of them, without a JVM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.definitions.partitions.subset import DefaultPartitionsSubset
from dagster._core.execution.asset_backfill import AssetBackfillData
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager
from hypothesis import given
from hypothesis import strategies as st

from dev.planted import plant
from highwater.declaration import Accepted, Maintenance
from highwater.errors import ConfigurationError, DeclarationError, DependencyUnavailableError, UnknownSliceError
from highwater.maintenance import (
    FEWEST_FILES,
    MAX_BYTES,
    TARGET_BYTES,
    File,
    FileGroup,
    Horizon,
    LiveKey,
    TablePartition,
    group_files_to_merge,
    select_candidates,
    select_partitions_to_compact,
)
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.cli.main import main
from highwater.orchestration.operations import key_retirement, maintenance, old_runs
from highwater.orchestration.operations.old_runs import delete_runs
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.sensing import repairing, stream_ticks
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.commits import commit_current
from tests.helpers.support import FakeSilentKafka, make_stream

# Seconds of processor each.
pytestmark = pytest.mark.slow

NOW = datetime.now(UTC)
STREAM = make_stream("orders")
DAY = timedelta(days=1)


def hours(count: float) -> timedelta:
    return timedelta(hours=count)


# Decisions


def test_a_horizon_outlasts_a_run_with_its_retries() -> None:
    """6 h, three times, and 20 minutes: 18 h 20 min."""
    Horizon().ensure_enough(hours(18) + timedelta(minutes=20))
    with pytest.raises(ConfigurationError) as caught:
        Horizon().ensure_enough(hours(18))
    assert caught.value.stored == "18 h"
    assert caught.value.found == ("6 h of the longest run x (1 + 2 retries) + 0.3333 h of waiting for leases = 18.33 h")


def test_an_unfinished_retry_keeps_the_version_that_it_reads() -> None:
    rule = Horizon(hours(1), retries=0, leases=hours(1))
    read = {"young": NOW - hours(21), "old": NOW - hours(23), "unknown": None}
    assert set(rule.select_outlived_slices(hours(24), read, NOW)) == {"old", "unknown"}


def test_small_files_are_joined_where_there_are_many() -> None:
    small, large = 1_000, 64 * 1024 * 1024
    parts = [
        TablePartition("one", (small,)),
        TablePartition("eight", (small,) * 8),
        TablePartition("nine", (small,) * 9),
        TablePartition("many", (small,) * 10),
        TablePartition("large", (large,) * 9),
    ]
    assert select_partitions_to_compact(parts) == ["many", "nine"]


@pytest.mark.parametrize(("files", "joined"), [(7, False), (8, True), (300, True)])
def test_files_that_fill_one_of_the_target_are_joined(files: int, *, joined: bool) -> None:
    """`current` of hundreds of such files was never joined."""
    part = TablePartition("", (17 * 1024**2,) * files + (64 * 1024**2,) * 9)
    assert select_partitions_to_compact([part]) == ([""] if joined else [])


def test_bytes_rewritten_by_one_maintenance_are_bounded() -> None:
    part = TablePartition("huge", (1_000,) * 9 + (60 * 1024**2,) * 220)
    assert select_partitions_to_compact([part, replace(part, key="huge too")]) == ["huge"]


def test_large_files_do_not_keep_small_ones_from_being_joined() -> None:
    """They are not rewritten: a table of many of them has small files too."""
    large = (100 * 1024**2,) * 1_000
    parts = [TablePartition("one", (1_000,) * 10 + large), TablePartition("two", (1_000,) * 9 + large)]
    assert select_partitions_to_compact(parts) == ["one", "two"]


def test_a_table_of_many_small_files_is_joined_whatever_its_size() -> None:
    part = TablePartition("", (10 * 1024**2,) * 3_000)
    assert select_partitions_to_compact([part]) == [""]


def files(*sizes: int, start: int = 0) -> list[File]:
    keys = [f"orders@{n:07d}" for n in range(start, start + len(sizes))]
    return [File(f"{key}.parquet", size, key, key) for key, size in zip(keys, sizes, strict=True)]


def test_small_files_of_neighbours_are_merged_up_to_the_target() -> None:
    tenth = TARGET_BYTES // 10
    groups = group_files_to_merge(reversed(files(*[tenth] * 25)))
    assert [len(group.files) for group in groups] == [11, 11], "what is left waits for more"
    assert [file.first for file in groups[0].files] == [f"orders@{n:07d}" for n in range(11)]
    assert group_files_to_merge(files(*[tenth] * 8)) == []
    assert [len(group.files) for group in group_files_to_merge(files(*[1] * 9))] == [9]


def test_a_slice_of_several_files_is_in_one_group() -> None:
    """Groups ended within a slice, which could not be moved then: no night joined anything."""
    size = 20 * 1024**2
    there = [replace(file, path=f"{n} {file.path}") for file in files(*[size] * 11) for n in range(8)]
    groups = group_files_to_merge(there)
    assert [len(group.files) for group in groups] == [8] * 11
    assert [(len({file.first for file in group.files}), group.target_files) for group in groups] == [(1, 1)] * 11
    wide = [replace(file, path=f"{n} {file.path}") for file in files(size) for n in range(200)]
    assert [len(group.files) for group in group_files_to_merge(wide)] == [52, 52, 52, 44], (
        "what writers wait for is bounded"
    )


def test_files_that_are_large_enough_are_left_alone() -> None:
    assert group_files_to_merge(files(*[TARGET_BYTES // 2] * 50)) == []


@given(st.lists(st.integers(1, TARGET_BYTES), max_size=80))
def test_merged_files_are_few_for_their_bytes(sizes: list[int]) -> None:
    """After maintenance the number of files follows the bytes, whatever slices wrote."""
    groups = group_files_to_merge(files(*sizes))
    merged = {file.path for group in groups for file in group.files}
    assert len(merged) == sum(len(group.files) for group in groups), "each file once"
    after = len(sizes) - len(merged) + sum(-(-group.bytes // TARGET_BYTES) for group in groups)
    assert after <= 2 * sum(sizes) / TARGET_BYTES + FEWEST_FILES


@pytest.mark.parametrize(
    ("size", "days", "maintenances"), [(1_000, 8, 1), (5_000, 8, 1), (20_000, 8, 1), (500_000, 1, 5)]
)
def test_after_maintenance_files_follow_bytes_whatever_the_slices(
    size: int, days: int, maintenances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200,000 slices in a table that is maintained until nothing is left: at most twice as many files as full ones."""
    share, table = 200_000 // days, ModelledTable()
    monkeypatch.setattr(maintenance, "list_files", lambda _: [*table.files.values()])
    monkeypatch.setattr(maintenance, "compact", table.merge)
    for day in range(days):
        table.add(files(*[size] * share, start=day * share))
        rewritten = [*islice(iter(table.maintain, 0), maintenances + 1)]
        assert len(rewritten) == maintenances
        assert max(rewritten) <= MAX_BYTES
        assert len(table.files) <= 2 * (day + 1) * share * size / TARGET_BYTES + FEWEST_FILES


class ModelledTable:
    """The files of a table of slices, as maintenance finds them and merges them by Spark."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.rewritten = 0
        self.merges = 0

    def add(self, files: list[File]) -> None:
        self.files.update({file.path: file for file in files})

    def merge(self, _work: object, _table: str, group: FileGroup) -> bool:
        for file in group.files:
            del self.files[file.path]
        self.merges, self.rewritten = self.merges + 1, self.rewritten + group.bytes
        first, last = min(file.first for file in group.files), max(file.last for file in group.files)
        size = group.bytes // group.target_files
        self.add([File(f"{self.merges} {n}", size, first, last) for n in range(group.target_files)])
        return True

    def maintain(self) -> int:
        """The bytes that one maintenance rewrites."""
        self.rewritten, nothing = 0, cast("Any", SimpleNamespace(update_incremental=lambda: None))
        maintenance._merge(maintenance._Task(nothing, "raw", nothing, 168, {}, dry_run=False))
        return self.rewritten


def test_the_oldest_plans_lose_their_keys_first() -> None:
    keys = [LiveKey(f"k{n}", NOW - n * DAY) for n in range(5)]
    assert select_candidates(keys, newest=3, longest=None, now=NOW) == ["k4", "k3"]
    assert select_candidates(keys, newest=9, longest=timedelta(days=2.5), now=NOW) == ["k4", "k3"]
    recalled = [*keys[:4], replace(keys[4], recalled_at=NOW - 6 * DAY)]
    assert select_candidates(recalled, newest=3, longest=None, now=NOW) == ["k3"], "and k4 takes no other's place"
    assert select_candidates(recalled, newest=3, longest=None, now=NOW + 2 * DAY) == ["k4", "k3"]


@pytest.mark.parametrize(
    "maintenance",
    [
        Maintenance(live_slices=0),
        Maintenance(live_for=timedelta(0)),
        Maintenance(horizon=timedelta(0)),
        Maintenance(horizon=8 * DAY),
    ],
)
def test_a_maintenance_that_retains_nothing_is_refused(maintenance: Maintenance) -> None:
    with pytest.raises(DeclarationError, match="maintenance"):
        make_stream("orders", maintenance=maintenance)


# Keys


class Deployment:
    """Slices without rows that all tables hold, with a live key each; the stream keeps two thirds of the keys."""

    def __init__(self, root: Path, instance: dg.DagsterInstance, slices: int) -> None:
        self.instance = instance
        self.newest = slices * 2 // 3
        self.stream = make_stream("orders", maintenance=Maintenance(live_slices=self.newest))
        self.ledger = Ledger(f"sqlite:///{root / 'ledger.sqlite'}")
        self.lake = Lake(str(root / "lake"))
        begin = NOW - timedelta(minutes=slices)
        self.slices = [
            Slice("orders", "orders", "A" * 22, 0, n, {0: OffsetRange(n, n + 1)}, begin + timedelta(minutes=n))
            for n in range(slices)
        ]
        self.keys = [slice_.key for slice_ in self.slices]
        self.ledger.add(self.slices)
        self.half = self.keys[7]
        for table in ("raw", "events", "rejects", "current"):
            self._fill(table, [one for one in self.slices if (table, one.key) != ("rejects", self.half)])
        instance.add_dynamic_partitions("orders_slices", self.keys)

    def _fill(self, table: str, slices: list[Slice], attempt: int = 1) -> None:
        import pyarrow as pa

        if table == "current":
            commit_current(self.lake, "orders", {s.key: attempt for s in slices})
            return
        rows = pa.table({name: pa.array([], pa.string()) for name in ("slice", "reason", "rule", "next_topic")})
        slice_commits = [SliceCommit(s, attempt, 0) for s in slices]
        plant(self.lake.build_table_path("orders", table), rows, slice_commits, replace=True)

    @property
    def resources(self) -> Any:
        return SimpleNamespace(
            ledger=SimpleNamespace(open=lambda: self.ledger),
            lake=SimpleNamespace(open=lambda: self.lake),
            kafka=SimpleNamespace(open=FakeSilentKafka),
        )

    def live(self) -> list[str]:
        return list(self.instance.get_dynamic_partitions("orders_slices"))

    def run_of(self, first: str, last: str, purpose: str = "plan") -> str:
        range_ = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
        tags = {**range_, "highwater/stream": "orders", "highwater/purpose": purpose}
        run = dg.DagsterRun(job_name="orders_slice", tags=tags, status=dg.DagsterRunStatus.NOT_STARTED)
        self.instance.add_run(run)
        return run.run_id

    def ended(self, *ends: str, stream: str = "orders") -> str:
        """A run that succeeded, and has logged."""
        named = dict(
            zip(("dagster/asset_partition_range_start", "dagster/asset_partition_range_end"), ends, strict=False)
        )
        tags = {**named, "highwater/stream": stream}
        run = dg.DagsterRun(job_name=f"{stream}_slice", tags=tags, status=dg.DagsterRunStatus.SUCCESS)
        self.instance.add_run(run)
        self.instance.report_engine_event("done", run)
        log = self._log_of(run.run_id)
        log.parent.mkdir(parents=True)
        log.write_text("printed")
        return run.run_id

    def _log_of(self, run_id: str) -> Path:
        manager = cast("Any", self.instance.compute_log_manager)
        return Path(manager.get_captured_local_path([run_id, "compute_logs", "raw"], "out"))

    def logged(self, run_id: str) -> bool:
        """Whether anything is left of what a run logged."""
        return bool(self.instance.all_logs(run_id)) or self._log_of(run_id).exists()

    def runs(self) -> set[str]:
        return {run.run_id for run in self.instance.get_runs()}

    def backfill_of(self, *keys: str, table: str = "events") -> None:
        named = {build_table_key(STREAM, table): DefaultPartitionsSubset(set(keys))}
        subset = cast("Any", AssetGraphSubset)(partitions_subsets_by_asset_key=named)
        data = AssetBackfillData.empty(subset, NOW.timestamp(), self.instance)
        backfill = PartitionBackfill(
            backfill_id="someone",
            status=BulkActionStatus.REQUESTED,
            from_failure=False,
            tags={},
            backfill_timestamp=NOW.timestamp(),
            asset_selection=[build_table_key(STREAM, table)],
            asset_backfill_data=data,
        )
        self.instance.add_backfill(backfill)

    def retire(self, now: datetime = NOW, *, dry_run: bool = False) -> key_retirement.RetirementOutcome:
        return key_retirement.retire(self.instance, self.ledger, self.lake, self.stream, now, dry_run=dry_run)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        yield Deployment(tmp_path, instance, slices=60)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Deployment]:
    """As many slices as a stream has live ones by default, and a thousand more."""
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as instance:
        yield Deployment(tmp_path, instance, slices=3_000)


def test_runs_that_name_no_live_key_go_with_their_logs_when_they_are_old(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = LocalComputeLogManager(str(tmp_path / "logs"))  # an instance without a home keeps none
    monkeypatch.setattr(deployment.instance, "_compute_log_manager", logs)
    ours, keys = deployment, deployment.keys
    old = len(keys) - ours.newest
    stays = [ours.ended(keys[0], keys[old]), ours.ended(keys[-1], keys[-1])]
    goes = [ours.ended(keys[0], keys[old - 1]), ours.ended(), ours.ended("x'); --", "x'); --")]
    other, goes_on = ours.ended(keys[0], keys[0], stream="payments"), ours.run_of(keys[50], keys[50])
    assert set(ours.retire().retired) > set(keys[: old - 1]) - {ours.half}
    # What is not whole keeps its key, so that run stays until it is.
    ours.instance.delete_dynamic_partition("orders_slices", ours.half)
    later = NOW + timedelta(days=31)
    young = delete_runs(ours.instance, ours.stream, NOW + timedelta(days=29), dry_run=False)
    assert young is not None
    assert (young.deleted, young.retained) == (0, 0)
    monkeypatch.setattr(old_runs, "MAX_RUNS", 2)
    some = delete_runs(ours.instance, ours.stream, later, dry_run=True)
    assert some is not None
    assert (some.deleted, some.more, "later ones are checked next time" in some.line) == (2, True, True)
    monkeypatch.setattr(old_runs, "MAX_RUNS", 3)
    dry = delete_runs(ours.instance, ours.stream, later, dry_run=True)
    assert dry is not None
    assert (dry.deleted, dry.retained, dry.more) == (3, 2, False)
    assert ours.runs() == {*stays, *goes, other, goes_on}
    assert delete_runs(ours.instance, ours.stream, later, dry_run=False) == dry
    assert ours.runs() == {*stays, other, goes_on}
    assert [run_id for run_id in goes if ours.logged(run_id)] == []
    assert [run_id for run_id in stays if not ours.logged(run_id)] == []
    remaining = replace(ours.stream, maintenance=replace(ours.stream.maintenance, runs_for=None))
    assert delete_runs(ours.instance, remaining, later, dry_run=False) is None


def test_old_keys_are_retired_and_nobody_adds_them_again(large: Deployment) -> None:
    """Never one that a run or a backfill names, or of a slice that is not whole; plan, ledger and lake stay."""
    ours, old = large, 1_000
    assert ours.newest == Maintenance().live_slices
    running = ours.run_of(ours.keys[10], ours.keys[12])
    ours.backfill_of(ours.keys[20], ours.keys[2_500])
    stay = {ours.half, *ours.keys[10:13], ours.keys[20]}
    dry = ours.retire(dry_run=True)
    assert ours.live() == ours.keys
    assert len(dry.retired) == old - len(stay)
    assert dry.retained == {"named by unfinished runs or backfills": 4, "not complete": 1}

    assert set(ours.retire().retired) == set(ours.keys[:old]) - stay
    assert ours.live() == [key for key in ours.keys if key in stay or key in ours.keys[old:]]
    assert ours.ledger.list_slices("orders") == ours.slices
    assert ours.ledger.retired.count("orders") == old - len(stay)

    assert stream_ticks.list_keys_to_add(ours.instance, ours.ledger, STREAM, "orders", planned=0) == []
    cursor: str | None = None
    for _ in range(len(ours.keys) // stream_ticks.PAGE):
        tick = repairing.repair(ours.instance, ours.resources, STREAM, cursor)
        assert list(tick.keys) == []
        assert {event.partition for event in tick.events} & set(dry.retired) == set()
        cursor = tick.cursor

    ours.instance.delete_run(running)
    assert set(ours.retire().retired) == {*ours.keys[10:13]}, "nobody names them now"


@pytest.fixture
def publishing(deployment: Deployment) -> Deployment:
    deployment.stream = replace(deployment.stream, publishes=Accepted("orders.accepted"))
    return deployment


def test_a_key_stays_until_the_events_of_its_slice_are_sent(publishing: Deployment) -> None:
    """Else nobody could ask for the slice, and those after it would wait for ever."""
    ours = publishing
    assert not ours.retire().retired, "nothing was ever sent"
    ours._fill("published", ours.slices, attempt=2)
    assert ours.retire().retained == {"not complete": 20}, "not as they are decided"
    ours._fill("published", ours.slices[:5])
    assert ours.retire().retired == ours.keys[:5]
    assert ours.live() == ours.keys[5:]


def test_keys_that_a_run_or_a_backfill_publishes_stay(publishing: Deployment) -> None:
    ours = publishing
    ours._fill("published", ours.slices)
    ours.run_of(ours.keys[1], ours.keys[2], purpose="publish")
    ours.backfill_of(ours.keys[4], table="published")
    found = ours.retire()
    assert found.retained == {"named by unfinished runs or backfills": 3, "not complete": 1}
    assert set(ours.keys[:8]) & set(ours.live()) == {ours.keys[n] for n in (1, 2, 4, 7)}


def test_a_planner_whose_newest_slices_are_all_retired_adds_none(deployment: Deployment) -> None:
    ours = deployment
    idle = make_stream("orders", maintenance=Maintenance(live_for=timedelta(minutes=1)))
    key_retirement.retire(ours.instance, ours.ledger, ours.lake, idle, NOW + DAY, dry_run=False)
    assert ours.live() == [ours.half]
    assert stream_ticks.list_keys_to_add(ours.instance, ours.ledger, STREAM, "orders", planned=0) == []


def test_keys_that_were_brought_back_stay_for_a_backfill(deployment: Deployment) -> None:
    ours = deployment
    ours.retire()
    reported: list[str] = []
    meant = (ours.keys[5], ours.keys[9])

    def recall(first: str, last: str, *, dry_run: bool = False) -> list[str]:
        return key_retirement.recall(
            ours.instance, ours.ledger, STREAM, first, last, NOW, reported.append, dry_run=dry_run
        )

    assert recall(*meant, dry_run=True) == [*ours.keys[5:7], *ours.keys[8:10]]
    assert reported[0] == "4 of 5 slices have a retired key"
    assert ours.keys[5] not in ours.live()
    explained = explain(ours.ledger, ours.lake, STREAM, ours.keys[5], lambda: nullcontext(ours.instance)).lines
    command = f"highwater recall-keys orders {ours.keys[5]} {ours.keys[5]} --yes"
    assert explained[-2:] == [f"its key is retired: {command} brings it back", "complete"]
    recall(*meant)
    assert ours.live()[-4:] == [*ours.keys[5:7], *ours.keys[8:10]], "neighbours, so that a range takes them together"
    assert not ours.retire(NOW + 6 * DAY).retired
    assert set(ours.retire(NOW + 8 * DAY).retired) == {*ours.keys[5:7], *ours.keys[8:10]}
    with pytest.raises(ConfigurationError, match="older one first"):
        recall(*reversed(meant))
    with pytest.raises(UnknownSliceError):
        recall(meant[0], "orders@0099999")


def test_a_retired_slice_that_the_lake_lost_gets_its_key_again(deployment: Deployment) -> None:
    ours = deployment
    ours.retire()
    lost = ours.keys[3]
    ours._fill("events", [one for one in ours.slices if one.key != lost])
    tick = repairing.repair(ours.instance, ours.resources, STREAM, None)
    assert list(tick.keys) == [lost]
    assert lost in {request.keys[0] for request in tick.requests}
    assert ours.ledger.retired.list_retired([lost]) == set()


def test_a_retirement_that_died_half_way_is_finished(deployment: Deployment) -> None:
    ours = deployment
    ours.ledger.retired.retire("orders", ours.keys[:2], NOW)
    ours.run_of(ours.keys[1], ours.keys[1])
    found = ours.retire().retired
    assert ours.keys[0] in found
    assert ours.keys[1] in ours.live()


def test_a_key_that_a_run_names_meanwhile_comes_back(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the deletion somebody launched a run."""
    ours, look = deployment, key_retirement.list_keys_in_use

    def late(*arguments: Any) -> frozenset[str]:
        found = look(*arguments)
        ours.run_of(ours.keys[0], ours.keys[0])
        return found

    monkeypatch.setattr(key_retirement, "list_keys_in_use", late)
    found = ours.retire()
    assert found.retained["named while they were retired"] == 1
    assert ours.keys[0] in ours.live()
    assert ours.keys[0] not in found.retired
    assert ours.ledger.retired.list_retired(ours.keys[:2]) == {ours.keys[1]}


def test_no_key_is_retired_while_it_is_not_known_who_names_it(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = deployment
    monkeypatch.setattr(key_retirement, "RECORDS", 0)
    ours.run_of(ours.keys[0], ours.keys[0])
    with pytest.raises(DependencyUnavailableError, match="may name some"):
        ours.retire()
    assert ours.live() == ours.keys


def test_the_command_brings_keys_back(deployment: Deployment, tmp_path: Path) -> None:
    ours = deployment
    ours.retire()
    environment = {"HIGHWATER_HOME": str(tmp_path), "DAGSTER_HOME": ""}
    command = ["recall-keys", "orders", ours.keys[0], ours.keys[1], "--yes", "--json"]
    ran = CliRunner().invoke(main, command, env=environment)
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["keys"] == ours.keys[:2]
    tick = repairing.repair(ours.instance, ours.resources, STREAM, None)
    assert list(tick.keys) == ours.keys[:2], "without DAGSTER_HOME repair adds them"
