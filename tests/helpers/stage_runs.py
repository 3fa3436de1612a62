"""Runs of a stream's assets without stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import dagster as dg

from highwater.assets.work import SliceReport
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.build import build_defs
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from tests.helpers.version_tables import FIRST, SECOND, Planted

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.declaration import Stream


@dataclass(frozen=True)
class FakeWork:
    """The inputs of a stage that uses its keys and its log alone."""

    keys: list[str]
    log: Callable[[str], None] = print


class StageRuns:
    """Runs of the assets of `orders` on planted tables; remembers which tables were taken.

    The stages are left out, by putting `stage` in the place of `stream_assets.load_stage`.
    """

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.planted = Planted(folder / "lake")
        self.planted.write()
        self.instance = instance
        self.spark = SimpleNamespace(get_session=lambda: None, interrupt=lambda: None)
        self.taken: list[str] = []
        self.failed: list[str | None] = []
        self.ledger = Ledger(f"sqlite:///{folder / 'ledger.sqlite'}")
        self.ledger.add([p.slice_ for p in self._slice_commits()])
        instance.add_dynamic_partitions("orders_slices", [FIRST, SECOND])

    def _slice_commits(self) -> list[SliceCommit]:
        return [
            p for key, p in self.planted.lake.load_slice_commits("orders", "events").items() if key in {FIRST, SECOND}
        ]

    def stage(self, name: str) -> Callable[[Work], list[SliceReport]]:
        def take(work: Work) -> list[SliceReport]:
            self.taken.append(name)
            return [SliceReport(slice_, 1, 0, 0) for slice_ in work.slices]

        return take

    def run(self, stream: Stream, key: str, *tables: str) -> bool:
        """Whether a run of one slice succeeds; of the whole job, or of these tables and their checks."""
        self.taken.clear()
        opened = {
            "kafka": SimpleNamespace(open=lambda: SimpleNamespace(list_topic_names=list)),
            "ledger": SimpleNamespace(open=lambda: self.ledger),
            "lake": SimpleNamespace(open=lambda: self.planted.lake),
            "spark": self.spark,
        }
        chosen = [build_table_key(stream, table) for table in tables] or None
        job = build_defs(streams=[stream], resources=opened).resolve_job_def("orders_slice")
        done = job.execute_in_process(
            instance=self.instance, partition_key=key, raise_on_error=False, asset_selection=chosen
        )
        self.failed = [e.step_key for e in done.all_events if e.event_type is dg.DagsterEventType.STEP_FAILURE]
        return done.success
