"""The step of maintenance that deletes rows of raw, on tables that are written without a JVM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from deltalake import DeltaTable

from highwater.assets import raw_expiry
from highwater.assets.commit import CommittedSlices
from highwater.assets.work import Work
from highwater.declaration import Retention
from highwater.envelope import Origin
from highwater.errors import TemporaryError
from highwater.orchestration.checking import gap_checks
from highwater.orchestration.operations import maintenance
from highwater.orchestration.operations.raw_retention import RetentionOutcome
from highwater.orchestration.reporting.locating import locate
from highwater.plans import Discard
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.erasures import Erasures
from highwater.retention import (
    AGED_FROM,
)
from highwater.slice_commits import SliceCommit
from tests.helpers.world import NOON, STREAM, World, write_world

NOTHING = cast("Any", None)
KAFKA = cast("Any", SimpleNamespace(list_group_names=list))
AGE = timedelta(days=30)
STORED = replace(STREAM, retention=Retention(raw=AGE))
NOW = datetime.now(UTC)
DAY = timedelta(days=1)
IN_DLQ = "with records that wait in a tier or are parked"


class Step:
    """Maintenance of a world, whose commits are written as Spark would write them.

    Args:
        world: its tables.
        dies: where it dies, one of `POINTS`: the step that was done last.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.dies, self.stream = world, "", STORED
        self.meanwhile: Callable[[], object] = lambda: None
        self.instance = dg.DagsterInstance.ephemeral()
        monkeypatch.setattr(gap_checks, "fetch_topic_settings", lambda *_: None)
        monkeypatch.setattr(maintenance, "_maintain_table", lambda task: task)
        monkeypatch.setattr(raw_expiry, "_commit", self.commit)
        monkeypatch.setattr(raw_expiry, "_read_expired_rows", self.held)
        for after, (name, before) in {"begin": ("begin", "add"), "done": ("mark_done", "")}.items():
            monkeypatch.setattr(Erasures, name, self.dying(getattr(Erasures, name), before, after))

    def held(self, work: Work, slice_commits: Mapping[str, SliceCommit]) -> list[dict[str, Any]]:
        """The rows of the versions that the commit records name."""
        import pyarrow as pa
        from deltalake import QueryBuilder

        rows = []
        for key, slice_commit in slice_commits.items():
            table = DeltaTable(work.lake.build_table_path("orders", "raw"), version=slice_commit.counts[AGED_FROM])
            sql = f"SELECT * FROM t WHERE slice = '{key}'"
            rows += pa.table(QueryBuilder().register("t", table).execute(sql)).to_pylist()
        return rows

    def commit(
        self,
        work: Work,
        committed: CommittedSlices,
        rows: Sequence[Any],
        slice_commits: Sequence[SliceCommit],
        *,
        records: Sequence[int],
    ) -> None:
        del work, records
        self.pass_point("keep")
        mine = {slice_commit.key: slice_commit for slice_commit in slice_commits}
        assert {
            key: slice_commit.attempt > committed.find_attempt(key) for key, slice_commit in mine.items()
        } == dict.fromkeys(mine, True)
        self.world.slice_commits["raw"].update(mine)
        self.world.rows["raw"] = [row for row in self.world.rows["raw"] if row["slice"] not in mine] + [*rows]
        self.world.write()
        self.meanwhile()
        self.pass_point("commit")

    def dying(self, do: Callable[..., None], before: str, after: str) -> Callable[..., None]:
        """A method of the ledger's record, and the points on both sides of it."""

        def done(*reported: Any) -> None:
            self.pass_point(before)
            do(*reported)
            self.pass_point(after)

        return done

    def pass_point(self, point: str) -> None:
        if point and self.dies == point:
            self.dies = ""
            raise TemporaryError(f"killed at {point}", remedy="none")

    def work(self, ledger: Ledger | None = None) -> Work:
        spark = cast("Any", SimpleNamespace(createDataFrame=lambda *_: []))
        return Work(self.stream, [], spark, self.world.lake, ledger or self.world.ledger, KAFKA, print)

    def maintain(self, *, dry_run: bool = False) -> RetentionOutcome:
        found = maintenance.maintain(self.work(), self.instance, NOW, dry_run=dry_run).retained
        assert found is not None
        return found

    def run(self, key: str) -> None:
        tags = {"dagster/partition": key, "highwater/stream": "orders"}
        self.instance.add_run(dg.DagsterRun(job_name="orders_slice", tags=tags, status=dg.DagsterRunStatus.STARTED))


def make_looked(folder: Path) -> World:
    """Sound tables, whose gaps were looked at while all rows are there."""
    with pytest.MonkeyPatch.context() as patch:
        made = write_world(folder, patch)
        for _ in range(2):  # those that the tables have
            made.ledger.allocate_attempts(made.keys)
        assert made.red() == {}
    return made


@contextmanager
def open_step(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    made = Step(world, monkeypatch)
    yield made
    made.instance.dispose()


def discard_parked_record(world: World) -> None:
    """The one record of the world that is parked is discarded by a person."""
    world.ledger.discards.add("orders", [Discard(Origin("orders", 0, 0, 2), "no use", "ann", NOON)])


def held(world: World) -> set[str]:
    return {row["slice"] for row in world.rows["raw"]}


def locate_record(world: World, offset: int) -> Any:
    [found] = locate(world.ledger, NOTHING, world.lake, STORED, "orders", 0, offset)
    return found
