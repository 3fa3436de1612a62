"""A ledger that was lost is rebuilt from the lake: no offset is planned twice, and none that was is forgotten."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.declaration import Start
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.operations.rebuilding import rebuild_plans
from highwater.slices import OffsetRange, Slice
from tests.helpers.scene import Scene
from tests.helpers.support import make_stream
from tests.helpers.written_tables import Written, slice_of

if TYPE_CHECKING:
    from tests.conftest import TopicFactory

STREAM = make_stream("orders")
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def offsets(slices: list[Slice]) -> Counter[tuple[int, int]]:
    return Counter((p, o) for s in slices for p, r in s.ranges.items() for o in range(r.start, r.end))


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=12), st.integers(0, 3)
)
def test_whatever_slices_were_not_read_every_offset_is_planned_once(
    cuts: list[tuple[int, int, bool]], beyond: int
) -> None:
    """Slices of two partitions tile from offset 0; some of them never came into the lake."""
    ends, planned, read = [0, 0], [], []
    for ordinal, (first, second, was_read) in enumerate(cuts):
        ranges = {0: (ends[0], ends[0] + first), 1: (ends[1], ends[1] + second)}
        planned.append(slice_of(ordinal, ranges))
        ends = [ends[0] + first, ends[1] + second]
        read += [planned[-1]] if was_read else []
    if not read:
        return
    found = rebuild_plans(STREAM, read, {"orders": read[-1].ordinal + beyond}, NOW)
    until = planned[: read[-1].ordinal + 1]
    assert offsets([*found.slices]) == offsets(until)
    assert len({slice_.key for slice_ in found.slices}) == len(found.slices)
    assert {slice_.key: slice_ for slice_ in found.slices if slice_.key not in found.unread} == {p.key: p for p in read}
    [generation] = found.generations
    assert generation.first_ordinal == read[-1].ordinal + beyond + 1
    assert not found.losses


def test_a_hole_between_neighbours_is_a_loss() -> None:
    found = rebuild_plans(STREAM, [slice_of(0, {0: (5, 9)}), slice_of(1, {0: (12, 20), 1: (0, 3)})], {}, NOW)
    assert [(loss.partition, loss.offsets) for loss in found.losses] == [(0, OffsetRange(9, 12))]
    assert found.generations[0].starts == {0: 5, 1: 0}, "planning began behind the log's start"


def test_generations_restart() -> None:
    slices = [slice_of(0, {0: (0, 9)}), slice_of(1, {0: (4, 7)}, 1), slice_of(2, {0: (7, 8)}, 1)]
    found = rebuild_plans(STREAM, [*reversed(slices)], {}, NOW)
    assert [(g.number, g.starts, g.first_ordinal) for g in found.generations] == [(0, {0: 0}, 0), (1, {0: 4}, 3)]
    assert ([*found.losses], [*found.unread]) == ([], [])


def test_a_partition_that_joined_in_a_slice_that_was_not_read_is_read_from_its_beginning() -> None:
    found = rebuild_plans(STREAM, [slice_of(0, {0: (0, 9)}), slice_of(2, {0: (9, 12), 1: (100, 200)})], {}, NOW)
    assert found.unread == ["orders@0000001"]
    assert found.slices[1].ranges == {0: OffsetRange(9, 9), 1: OffsetRange(0, 100)}


def test_a_generation_whose_first_slices_were_not_read() -> None:
    """Of a topic that was recreated all is read; after a truncation nobody knows where planning went on."""
    recreated = replace(slice_of(2, {0: (50, 60)}, 1), topic_id="B" * 22)
    found = rebuild_plans(STREAM, [slice_of(0, {0: (0, 9)}), recreated], {}, NOW)
    assert ([*found.unread], found.slices[1].ranges) == (["orders@0000001"], {0: OffsetRange(0, 50)})
    found = rebuild_plans(STREAM, [slice_of(0, {0: (0, 9)}), slice_of(2, {0: (50, 60)}, 1)], {}, NOW)
    assert ([*found.unread], [*found.losses]) == ([], [])
    assert "what was planned before it, if anything, is not known" in found.lines[-1]


def test_a_stream_that_began_at_the_latest_is_not_read_from_its_beginning() -> None:
    latest = replace(STREAM, start=Start.LATEST)
    assert rebuild_plans(latest, [slice_of(1, {0: (50, 60)})], {}, NOW).unread == []
    assert rebuild_plans(STREAM, [slice_of(1, {0: (50, 60)})], {}, NOW).unread == ["orders@0000000"]


@pytest.mark.slow
def test_planning_goes_on_behind_a_ledger_that_was_rebuilt(
    bootstrap: str, topic: TopicFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(bootstrap, topic(partitions=2), tmp_path)
    for partition in (0, 1, 0):
        scene.write(8, partition)
        scene.tick()
    before = scene.slices()
    assert len(before) == 3
    refused = scene.run("rebuild-ledger", "orders", "--yes")
    assert refused.exit_code == EXIT_PERMANENT
    assert "3 slices" in refused.output
    lake = Written(tmp_path)
    for slice_ in (before[0], before[2]):  # the second was planned and never read
        lake.prove(slice_, {"raw": 8, "events": 8, "rejects": 0, "current": 8}, attempt=4)
    lake.write()
    for file in tmp_path.glob("ledger.sqlite*"):
        file.unlink()
    dry = scene.run("rebuild-ledger", "orders")
    assert "3 slices of" in dry.output
    assert f"1 of them are not in the lake: {before[1].key}" in dry.output
    assert scene.slices() == []

    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", bootstrap)
    job = build_defs(streams=[scene.stream]).resolve_job_def("rebuild_ledger")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(scene.stream.partitions_name, [f"{scene.topic}@0000041"])
        config = {"stream": scene.stream.name, "dry_run": False, "by": "ann"}
        assert job.execute_in_process(instance=instance, run_config=config).success
    assert [(s.key, s.ranges) for s in scene.slices()] == [(s.key, s.ranges) for s in before]
    assert scene.ledger.allocate_attempts([before[0].key]) == {before[0].key: 5}
    scene.write(6, 1)
    [fresh] = scene.tick().slices
    assert fresh.key == f"{scene.topic}@0000042"
    scene.ensure_each_once({(0, 0, o) for o in range(16)}, {(0, 1, o) for o in range(14)})
