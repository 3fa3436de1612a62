"""Batches of the asset `published`: each is settled once, whatever dies or decides meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from highwater.assets import accepted_copies, publication_log, publication_log_writer, published, retraction_guard
from highwater.envelope import Origin
from highwater.errors import SupersededAttemptError
from highwater.resources.delta import query
from highwater.slices import Slice
from tests.helpers.accepted import Broken, Event, Tables
from tests.helpers.publishing_scene import PublishingScene, open_scene


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishingScene]:
    with open_scene(tmp_path, monkeypatch) as made:
        yield made


def publish_and_die(monkeypatch: pytest.MonkeyPatch, tables: Tables, *slices: Slice) -> None:
    """Die when the commit of `published` is done, while `_sending` still has the batch that it settled."""
    commit = publication_log_writer._commit

    def killed(*given: Any, **named: Any) -> None:
        commit(*given, **named)
        raise Broken("settled")

    with monkeypatch.context() as patched:
        patched.setattr(publication_log_writer, "_commit", killed)
        with pytest.raises(Broken, match="settled"):
            tables.publish(*slices)


def test_a_batch_that_is_settled_is_not_settled_a_second_time(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "SLICES_PER_BATCH", 1)
    tables, lake, stream = scene.tables, scene.tables.lake, scene.tables.stream
    slices = [scene.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(2)]
    for n, slice_ in enumerate(slices):
        scene.decide(slice_, 2 * n, 2 * n + 1)
    publish_and_die(monkeypatch, tables, *slices)
    written_down = publication_log.BatchUnderWay.from_json(
        query(lake.open_existing_table("orders", publication_log.SENDING), BATCHES)[0]["batch"]
    )
    assert written_down.slices.keys() == {slices[0].key}
    assert publication_log.load_current_batch(lake, stream) == publication_log.BatchUnderWay(
        1, "orders.accepted", "T" * 22, settled={slices[0].key: 1}
    )
    assert publication_log.list_sending_slices(lake, stream) == set()
    settled, version = lake.load_commits_and_version("orders", publication_log.TABLE, [slices[0].key])
    tables.publish(*slices)
    assert not [line for line in tables.lines if "was interrupted" in line]
    assert lake.load_commits_and_version("orders", publication_log.TABLE, [slices[0].key]) == (settled, version + 1)
    assert [record.place[1] for record in scene.log.records] == [0, 1, 2, 3]


BATCHES = "SELECT batch FROM t WHERE batch IS NOT NULL"


def test_a_slice_to_be_looked_at_again_stays_so_where_the_run_dies_behind_the_commit(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled a second time, its second delivery stood as before, and the topic lacked a content of the events."""
    tables = scene.tables
    slices = [scene.plan(n, p0=(n, n + 1)) for n in range(3)]
    same = [Event(0, n, "o1", minute=n) for n in range(2)]
    for slice_, event in zip(slices, [*same, Event(0, 2, "o2")], strict=True):
        tables.decide(slice_, [event])
    tables.publish(*slices[:2])
    tables.decide(slices[0], [replace(same[0], changes={"status": "paid"})])
    tables.decide(slices[1], same[1:])
    publish_and_die(monkeypatch, tables, *slices[:2])
    keys = [slice_.key for slice_ in slices]

    def again() -> bool:
        return (
            tables.lake.load_slice_commits("orders", publication_log.TABLE, keys)[keys[1]].attempt
            == publication_log.LOOK_AGAIN
        )

    assert again()
    tables.publish(slices[2])
    assert again()
    tables.publish(*slices)
    assert [record.place[1] for record in scene.log.records] == [0, 0, 2, 1]
    attempts = tables.lake.load_slice_commits("orders", "events", keys)
    assert [
        *publication_log.ensure_unchanged(tables.lake, tables.stream, keys, {k: p.attempt for k, p in attempts.items()})
    ] == keys


def test_a_batch_without_records_leaves_the_one_before_it_settled(scene: PublishingScene) -> None:
    """It is not written down, and its number comes again."""
    tables, log = scene.tables, scene.log
    slice_ = scene.plan(0, p0=(0, 2))
    scene.decide(slice_, 0, 1)
    tables.publish(slice_)
    scene.decide(slice_, 0, 1)
    tables.publish(slice_)
    assert (len(log.records), publication_log.list_sending_slices(tables.lake, tables.stream)) == (2, set())
    assert tables.lake.load_slice_commits("orders", publication_log.TABLE, [slice_.key])[slice_.key].attempt == 2
    scene.decide(slice_, 0, 1, status="paid")
    log.breaks = f"committed {log.commits + 1}"
    with pytest.raises(Broken):
        tables.publish(slice_)
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == {slice_.key}
    tables.publish(slice_)
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()
    assert [record.headers.get("highwater.revision") for record in log.records] == [None, None, "1", "1"]


def test_a_batch_that_sent_nothing_is_over_where_a_decision_was_first(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may take its records for sent: decisions that reject them were refused until the next publication."""
    tables = scene.tables
    slice_ = scene.plan(0, p0=(0, 2))
    scene.decide(slice_, 0, 1)
    ensure_done = published._ensure_done

    def decided_meanwhile(*given: Any) -> None:
        ensure_done(*given)
        scene.decide(slice_, 0, status="paid")

    with monkeypatch.context() as patched:
        patched.setattr(published, "_ensure_done", decided_meanwhile)
        with pytest.raises(SupersededAttemptError):
            tables.publish(slice_)
    assert publication_log.load_current_batch(tables.lake, tables.stream) == publication_log.BatchUnderWay(
        1, "orders.accepted", "T" * 22
    )
    assert publication_log.list_sending_slices(tables.lake, tables.stream) == set()
    assert retraction_guard._list_sent_slices(tables.work(slice_), [slice_.key]) == []
    tables.publish(slice_)
    assert [record.place[1] for record in scene.log.records] == [0]


def test_a_batch_that_begins_while_an_erasure_looks_stops_it(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = scene.tables
    slice_ = scene.plan(0, p0=(0, 2))
    scene.decide(slice_, 0, 1)
    tables.publish(slice_)
    scene.decide(slice_, 0, 1, status="paid")

    def begun(*_: object) -> None:
        scene.log.breaks = f"committed {scene.log.commits + 1}"
        with pytest.raises(Broken):
            tables.publish(slice_)

    version = tables.lake.open_existing_table("orders", publication_log.TABLE).version()
    monkeypatch.setattr(accepted_copies, "delete_copies", begun)
    with pytest.raises(SupersededAttemptError, match=f"{slice_.key}: a publication of them is under way"):
        publication_log_writer.delete_origins(tables.work(), {slice_.key: {Origin("orders", 0, 0, 1)}})
    assert tables.lake.open_existing_table("orders", publication_log.TABLE).version() == version


def test_batch_settled_during_a_decision_is_detected(scene: PublishingScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the table before the batch missed both, and what was sent could be rejected."""
    tables = scene.tables
    slice_ = scene.plan(0, p0=(0, 2))
    scene.decide(slice_, 0, 1)
    scene.log.breaks = "committed 1"
    with pytest.raises(Broken):
        tables.publish(slice_)

    def settled_first(*given: Any) -> set[str]:
        tables.publish(slice_)
        return publication_log.list_sending_slices(*given)

    monkeypatch.setattr(retraction_guard, "list_sending_slices", settled_first)
    assert retraction_guard._list_sent_slices(tables.work(slice_), [slice_.key]) == [slice_.key]
