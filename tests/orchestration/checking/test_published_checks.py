"""The check of published events: events that were not sent, and rows that are none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from highwater.assets import publication_log, published
from highwater.declaration import Field
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.published_checks import check_events_published
from highwater.resources.commit_log import TABLE as COMMITS
from tests.helpers.accepted import Broken
from tests.helpers.publishing_scene import PublishingScene, open_scene


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishingScene]:
    with open_scene(tmp_path, monkeypatch) as made:
        yield made


def test_the_check_reports_events_that_were_not_sent_and_rows_that_are_none(scene: PublishingScene) -> None:
    from deltalake import DeltaTable

    first, second = scene.plan(0, p0=(0, 2)), scene.plan(1, p0=(2, 4))
    scene.decide(first, 0, 1)
    scene.decide(second, 2, 3)
    ledger, lake, stream = scene.tables.ledger, scene.tables.lake, scene.tables.stream
    scene.tables.publish(first)
    found = check_events_published(ledger, lake, stream, [first.key, second.key])["events_published"]
    assert found[first.key].numbers == {"events": 2, "sent": 2, "second_deliveries": 0, "retracted": 0, "unlike": 0}
    assert (found[second.key].passed, found[second.key].text) == (
        True,
        "the slice is not published yet: its turn comes",
    )
    DeltaTable(lake.build_table_path("orders", "published")).update(
        {"fingerprint": "'x'"}, predicate="origin_offset = 1"
    )
    result = check_events_published(ledger, lake, stream, [first.key])["events_published"][first.key]
    assert (result.passed, result.text) == (False, "1 sent with another value")
    assert [row["offset"] for row in result.samples] == [1]
    DeltaTable(lake.build_table_path("orders", "published")).update(
        {"origin_offset": "17"}, predicate="origin_offset = 1"
    )
    result = check_events_published(ledger, lake, stream, [first.key])["events_published"][first.key]
    assert not result.passed
    assert result.text == "1 an event, and neither sent nor a second delivery; 1 sent, and no event"
    DeltaTable(lake.build_table_path("orders", "published")).delete(predicate="origin_offset = 0")
    result = check_events_published(ledger, lake, stream, [first.key])["events_published"][first.key]
    assert "the commit names 2 sent" in result.text


def test_a_row_of_published_that_is_there_twice_is_reported(scene: PublishingScene) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake

    slice_ = scene.plan(0, p0=(0, 2))
    scene.decide(slice_, 0, 1)
    scene.tables.publish(slice_)
    table = DeltaTable(scene.tables.lake.build_table_path("orders", "published"))
    rows = pa.table(table.to_pyarrow_table(filters=[("origin_offset", "=", 1)]))
    write_deltalake(table, rows, mode="append")
    ledger, lake, stream = scene.tables.ledger, scene.tables.lake, scene.tables.stream
    result = check_events_published(ledger, lake, stream, [slice_.key])["events_published"][slice_.key]
    assert result.text.startswith("1 there twice; the commit names 2 sent")


def test_waiting_slices_are_distinguished_from_lost_ones(
    scene: PublishingScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice whose commit was removed from the table passed as one that waits, rows and all."""
    from deltalake import DeltaTable

    tables, log = scene.tables, scene.log
    first, second = scene.plan(0, minute=0, p0=(0, 2)), scene.plan(1, minute=10, p0=(2, 4))
    retried = scene.plan(0, tables.stream.tier_topics[0], minute=5, p0=(0, 1))
    for slice_, offsets in ((first, (0, 1)), (second, (2, 3)), (retried, (7,))):
        scene.decide(slice_, *offsets)
    every = [first.key, second.key, retried.key]

    def red() -> dict[str, str]:
        found = check_events_published(tables.ledger, tables.lake, tables.stream, every)["events_published"]
        return {key: one.text for key, one in found.items() if not one.passed}

    monkeypatch.setattr(published, "RECORDS_PER_TRANSACTION", 1)
    for broken in ("before 4", "before 5"):
        log.breaks = broken
        with pytest.raises(Broken):
            tables.publish(first, second)
        assert red() == {}, "what was interrupted is sent with the next run"
    assert (
        tables.lake.load_slice_commits("orders", "published", [second.key])[second.key].attempt
        == publication_log.INCOMPLETE
    )
    tables.publish(first, second)
    assert red() == {}, "a slice of a tier may come at any time"
    tables.publish(retried)
    scene.decide(first, 0, 1)
    assert red() == {}, "reprocessed"
    tables.publish(first)
    assert red() == {}, "its rows stay those of the decision before"
    scene.decide(second, 2, 3)
    tables.publish(second)
    assert red() == {}

    log_of_commits = DeltaTable(tables.lake.build_table_path("orders", COMMITS))
    log_of_commits.delete(f"\"table\" = 'published' AND slice IN ('{first.key}', '{retried.key}')")
    gone = "rows, and the commit that they came with is gone: restore the table"
    assert red() == {first.key: f"the slice has 2 {gone}", retried.key: f"the slice has 1 {gone}"}
    DeltaTable(tables.lake.build_table_path("orders", "published")).delete(f"slice IN ('{first.key}', '{retried.key}')")
    assert red() == {first.key: f"the slice is not published, and {second.key} after it is: restore the table"}


def test_values_of_another_declaration_are_not_compared(scene: PublishingScene) -> None:
    """A field that came to the stream since, or left it, makes another value of every event."""
    slice_ = scene.plan(0, p0=(0, 2))
    scene.decide(slice_, 0, 1)
    scene.tables.publish(slice_)
    ledger, lake, stream = scene.tables.ledger, scene.tables.lake, scene.tables.stream
    more = replace(stream, fields=(*stream.fields, Field("currency", "string")))
    fewer = replace(stream, fields=stream.fields[::-1])
    for declared in (more, fewer):
        assert check_events_published(ledger, lake, declared, [slice_.key])["events_published"][slice_.key].passed


def test_values_with_a_field_that_came_between_decision_and_publication_are_compared(scene: PublishingScene) -> None:
    """They were sent with null in it; events with a null were left out, so that nobody saw them altered."""
    from deltalake import DeltaTable

    slice_, tables = scene.plan(0, p0=(0, 2)), scene.tables
    scene.decide(slice_, 0, 1)
    tables.stream = replace(tables.stream, fields=(*tables.stream.fields, Field("currency", "string")))
    tables.publish(slice_)

    def result() -> CheckResult:
        found = check_events_published(tables.ledger, tables.lake, tables.stream, [slice_.key])
        return found["events_published"][slice_.key]

    assert result().passed
    DeltaTable(tables.lake.build_table_path("orders", "events")).update(
        {"customer_id": "NULL"}, predicate="origin_offset = 1"
    )
    assert (result().passed, result().text) == (False, "1 sent with another value")
