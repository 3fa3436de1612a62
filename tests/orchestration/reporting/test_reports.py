"""What a stage reports of slices for which nothing was left to commit."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from dev.planted import plant
from highwater.assets.commit import CommittedSlices, commit_with_retries
from highwater.assets.work import Work
from highwater.resources.lake import Lake
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.support import make_stream


def test_a_committed_slice_is_reported_with_the_version_in_which_it_does(tmp_path: Path) -> None:
    """A run that took over the commit of another one, or kept its rows, once reported no version."""
    slices = [Slice("orders", "orders", "A", 0, n, {0: OffsetRange(n, n + 1)}, datetime.now(UTC)) for n in range(2)]
    lake = Lake(str(tmp_path / "lake"))
    for slice_ in slices:
        rows = pa.table({"slice": pa.array([], pa.string())})
        plant(lake.build_table_path("orders", "raw"), rows, [SliceCommit(slice_, 1, 0, {"lost": 1})])
    said: list[str] = []
    nobody: Any = None
    work = Work(make_stream("orders"), slices, nobody, lake, nobody, nobody, said.append)
    stored = {slice_.key: "rows unchanged" for slice_ in slices}
    found = commit_with_retries(work, "raw", CommittedSlices.read(work, "raw"), stored, nobody)
    assert [(one.delta_version, one.note, one.counts) for one in found] == [(1, "rows unchanged", {"lost": 1})] * 2
    assert not any("committed" in line for line in said)
