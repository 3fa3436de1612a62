"""The audit of sound tables with one planted defect."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from typing import Any, NoReturn, cast

import pytest

from highwater.gaps import PartitionOffset
from highwater.orchestration.checking import checks
from highwater.orchestration.reporting import audit as audit_page
from highwater.orchestration.reporting import audit_report
from highwater.orchestration.reporting.consumer_lag import RecordAges
from highwater.orchestration.reporting.status_report import StreamStatus
from highwater.resources.kafka import Kafka
from tests.helpers.planting import (
    ACCOUNTED,
    ALONG,
    EVENT,
    FOLLOWS,
    LONE,
    LOSER,
    MALFORMED,
    METRICS,
    RECORDED,
    SENT,
    WINNER,
    alter,
    double,
    drop,
)
from tests.helpers.world import FIRST, ID, World, slice_
from tests.helpers.world import FULL_STREAM as STREAM

# Seconds of processor each.
pytestmark = pytest.mark.slow


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., audit_report.Audit]:
    """The audit of a world's tables as they are now, without a topic."""
    status = StreamStatus(stream="orders", topic="orders", slices=3, generation=0, topic_id=ID)
    monkeypatch.setattr(audit_page, "read_stream_status", lambda *_: status)
    monkeypatch.setattr(audit_page, "_measure_ages", lambda *_: RecordAges({}, sure=False))
    monkeypatch.setattr(audit_page, "_check_main_topic", lambda *_: ([], None, []))
    monkeypatch.setattr(audit_page, "compare_with_topic", lambda *_: [])
    monkeypatch.setattr(audit_page, "compare_sent_records", lambda *_: [])
    monkeypatch.setattr(audit_page, "check_producers", lambda *_: ({}, []))

    def made(world: World, **asked: Any) -> audit_report.Audit:
        world.write()
        return audit_page.audit(world.ledger, cast("Kafka", world.topics), world.lake, STREAM, **asked)

    return made


def test_a_key_that_moved_is_a_warning_of_the_audit_and_turns_nothing_red(
    make_world: Callable[..., World], audit: Callable[..., audit_report.Audit]
) -> None:
    """It is in two partitions though none was added: between them no order is claimed."""
    world = make_world(copies=2)
    of = world.copies[1]

    def reported() -> tuple[list[str], list[str]]:
        found = audit(world, records_of=len(world.slices), versions=True, keys=True)
        return found.errors, [line for line in found.head if line.startswith("warning: ")]

    assert reported() == ([], [])
    world.rewrite(of, EVENT, LONE, 2)
    moved = "keys: 1 are in several partitions though none was added for them"
    assert reported() == ([], [f"warning: {moved}"])
    assert world.check_slices([of.key])[ALONG][of.key].numbers["keys_in_several_partitions"] == 1


def test_the_audit_reports_seams_and_checks_the_newest_slices_again(
    world: World, audit: Callable[..., audit_report.Audit]
) -> None:
    def errors(newest: int) -> list[str]:
        return audit(world, records_of=newest).errors

    assert errors(3) == []
    double("current", WINNER)(world, FIRST)
    assert errors(0) == []
    [reported] = errors(3)
    assert reported.startswith(f"{FIRST.key}: {FOLLOWS}: ")
    world.rows["current"].pop()
    alter("events", LOSER, amount=Decimal(99))(world, FIRST)
    reported = "1 of 5 events have other fields than their records in raw"
    # The minute of the loser is that of a second delivery in the second slice too.
    red = [one.partition(": ")[2] for one in errors(3)]
    assert [one for one in red if not one.startswith((METRICS, SENT))] == [f"{RECORDED}: {reported}"]
    world.ledger.add([slice_(2, p0=(9, 9), p1=(4, 4))])
    assert "orders@0000002: partition 0 [8, 9) is in no slice, and not recorded as lost" in errors(0)


STRANGE: dict[str, PartitionOffset] = {
    "raw": EVENT,
    "events": LOSER,
    "rejects": MALFORMED,
    "dlq": MALFORMED,
    "published": LOSER,
    "current": WINNER,
}


def test_rows_of_a_slice_that_nobody_planned_are_an_error_of_the_audit(
    world: World, audit: Callable[..., audit_report.Audit]
) -> None:
    assert audit(world).orphan_slices == []
    sound = deepcopy(world.rows)
    for table, place in STRANGE.items():
        world.rows = deepcopy(sound)
        column = "updated_by_slice" if table == "current" else "slice"
        world.rows[table].append({**world.at(table, FIRST, place), column: "orders@0000099"})
        found = audit(world)
        [reported] = found.orphan_slices
        assert reported.startswith(
            f"{table} holds rows of 1 slices that the ledger does not know: orders@0000099; remedy: "
        )
        assert reported in found.errors


def test_a_row_that_breaks_a_check_hides_nothing_else_from_the_audit(
    world: World, audit: Callable[..., audit_report.Audit], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object) -> NoReturn:
        raise TypeError("no offset")

    monkeypatch.setattr(checks, "CHECKS", [replace(checks.CHECKS[0], decide=break_down), *checks.CHECKS[1:]])
    drop("events", LOSER)(world, FIRST)
    errors = audit(world, records_of=len(world.slices)).errors
    assert any("slices_tile" in text and "TypeError: no offset" in text for text in errors)
    assert any(f"{FIRST.key}: {ACCOUNTED}" in text for text in errors)
