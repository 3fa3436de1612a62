"""Copies of events: in the window that is sent, and in other slices. The tables are written without Spark."""

from __future__ import annotations

import pytest

from assets import event_records
from assets.event_records import EventRecords
from tests.accepted import Event, Tables


def records(tables: Tables, number: int) -> EventRecords:
    """The events of the slice with this number."""
    [piece] = [one for one in tables.pieces.values() if one.ordinal == number]
    decisions = tables.lake.committed("orders", "events", [*tables.pieces])
    return EventRecords(tables.stream, tables.lake.table_at("orders", "events"), [piece], decisions)


def any_twice(found: EventRecords, *, judged: bool = False) -> bool:
    return found.any_twice(next(found.windows()), judged=judged)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Slice 0 has a copy in itself, 1 and 2 share an event, 3 has an event time of its own and 4 a version of its own.

    5 has two contents of one version.
    """
    tables = Tables(tmp_path_factory.mktemp("copies"))
    later = {"event_time": "2026-04-01T00:00:00+00:00"}
    changed = {"amount": 7}
    for number, some in enumerate(
        [
            [Event(0, 0, "a"), Event(0, 1, "a"), Event(0, 2, "b")],
            [Event(0, 3, "c"), Event(0, 4, "d")],
            [Event(0, 5, "c"), Event(0, 6, "e")],
            [Event(0, 7, "c", changes=later), Event(0, 8, "f", changes=later)],
            [Event(0, 9, "c", version=2), Event(0, 10, "g")],
            [Event(0, 11, "h"), Event(0, 12, "h", changes=changed)],
        ]
    ):
        piece = tables.plan(number, p0=(some[0].offset, some[-1].offset + 1))
        tables.decide(piece, some)
    return tables


@pytest.mark.parametrize(
    ("number", "twice", "elsewhere"),
    [(0, True, False), (1, True, True), (2, True, True), (3, False, False), (4, False, False), (5, False, False)],
)
def test_copies_are_found_within_the_window_and_in_other_slices(
    tables: Tables, number: int, *, twice: bool, elsewhere: bool
) -> None:
    found = records(tables, number)
    assert found.twice.any_elsewhere() == elsewhere
    assert any_twice(found) == twice


def test_of_events_that_were_judged_before_other_contents_of_a_version_count_too(tables: Tables) -> None:
    """What was sent of one of them may be what the other one says now."""
    assert any_twice(records(tables, 5), judged=True)


def test_copies_in_different_windows_of_a_slice_are_found(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_records, "WINDOW", 1)
    assert any_twice(records(tables, 0))
