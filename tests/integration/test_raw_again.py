"""A step of raw that is tried again in its run: what was committed stays, although the answer was lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from dev.planted import plant
from highwater.assets import raw
from highwater.assets.work import Work
from highwater.plans import Generation
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice
from tests.helpers.fake_session import FakeSession
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.resources.kafka import Kafka

NOW = datetime(2026, 3, 1, tzinfo=UTC)
STREAM = make_stream("orders")
MINE, OTHER, OLD = (Slice("orders", "orders", "A", 0, n, {0: OffsetRange(9 * n, 9 * n + 9)}, NOW) for n in range(3))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Of a run that has committed one of three slices; another run, and a version that named no run, the others."""
    import pyarrow as pa

    ledger, lake = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Lake(str(tmp_path / "lake"))
    ledger.topics.open_generation(Generation("orders", "orders", "A", 0, {0: 0}, NOW))
    runs = [(MINE, "this"), (OTHER, "another"), (OLD, "")]
    ledger.add([slice_ for slice_, _ in runs])
    ledger.allocate_attempts([slice_.key for slice_, _ in runs])
    records = [(slice_.key, slice_.ranges[0].start + n) for slice_, _ in runs for n in range(9)]
    rows = pa.table({"slice": [key for key, _ in records], "offset": [offset for _, offset in records]})
    plant(lake.build_table_path("orders", "raw"), rows, [SliceCommit(slice_, 1, 9, run=run) for slice_, run in runs])
    monkeypatch.setattr(raw, "ensure_table", lambda *_: None)
    spark, kafka = cast("SparkSession", FakeSession()), cast("Kafka", SimpleNamespace(build_spark_options=dict))
    return Work(STREAM, [MINE], spark, lake, ledger, kafka, lambda _: None, run="this")


def test_slices_committed_by_this_run_are_not_read_or_committed_again(work: Work) -> None:
    """Its second try read all again, and put a version with the same records after the first."""
    [report] = raw.materialise(work)
    assert (report.attempt, report.delta_version) == (1, 0)
    assert report.note == "this run had committed it before; it is not read again"
    assert work.lake.open_stream_table("orders", "raw").version() == 0
    assert work.ledger.allocate_attempts([MINE.key]) == {MINE.key: 2}, "no attempt was begun"


@pytest.mark.parametrize(("run", "stored"), [("this", [MINE]), ("third", []), ("", [])])
def test_slices_committed_by_another_run_are_read_again(
    run: str, stored: list[Slice], work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: dict[str, list[str]] = {}

    def look(_: object, left: Mapping[str, Slice], __: object) -> dict[str, str]:
        reported["looked at"] = [*left]
        return {}

    def commit(_: object, __: object, ___: object, stored: Mapping[str, str], ____: object) -> list[object]:
        reported["kept"] = [*stored]
        return []

    monkeypatch.setattr(raw, "list_unreadable_slices", look)
    monkeypatch.setattr(raw, "commit_with_retries", commit)
    raw.materialise(replace(work, slices=[MINE, OTHER, OLD], run=run))
    rest = [slice_.key for slice_ in (MINE, OTHER, OLD) if slice_ not in stored]
    assert reported == {"looked at": rest, "kept": [slice_.key for slice_ in stored]}
