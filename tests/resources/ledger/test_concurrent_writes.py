"""Rows that two processes add at the same time: PostgreSQL, unlike SQLite, refuses the second one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from highwater.alerting import Alert
from highwater.envelope import Origin
from highwater.erasing import ErasedCounts, Erasure, RecordedErasure
from highwater.plans import Discard, PublicationRecord
from highwater.resources.ledger import Ledger
from tests.helpers.racing import write_before
from tests.helpers.world import FIRST

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
DISCARDS = [Discard(Origin("orders", 0, 0, offset), "why", "ann", NOON) for offset in (1, 2)]
ERASURE = Erasure("orders", "a" * 64, "asked for", "ann", NOON)
ERASED = RecordedErasure(ERASURE, {FIRST.key: ErasedCounts(FIRST.key, {})})
ALERT = Alert("orders", "lag", "9", "5", "wait", NOON, reported=False)
# By table two writers that add the same row, and what the ledger holds after both.
WRITERS: dict[str, tuple[Callable[[Ledger], object], Callable[[Ledger], object], object]] = {
    "discards": (
        lambda ledger: ledger.discards.add("orders", DISCARDS),
        lambda ledger: [one.origin.offset for one in ledger.discards.list_for_stream("orders")],
        [1, 2],
    ),
    "erased_slices": (
        lambda ledger: ledger.erasures.add_missing([ERASED]),
        lambda ledger: [*ledger.erasures.read_for_slices([FIRST.key])],
        [FIRST.key],
    ),
    "retired_keys": (
        lambda ledger: ledger.retired.retire("orders", [FIRST.key], NOON),
        lambda ledger: ledger.retired.count("orders"),
        1,
    ),
    "publications": (
        lambda ledger: ledger.publications.record("orders", FIRST.key, PublicationRecord(1, 5, NOON)),
        lambda ledger: ledger.publications.read_for_slices([FIRST.key])[FIRST.key].sent,
        5,
    ),
    "alerts": (
        lambda ledger: ledger.alerts.record({("orders", "lag"): ALERT}),
        lambda ledger: [*ledger.alerts.read_open()],
        [("orders", "lag")],
    ),
    "watched": (
        lambda ledger: ledger.alerts.watch(["orders"], NOON),
        lambda ledger: ledger.alerts.read_watch_times(),
        {"orders": NOON},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("table", WRITERS)
def test_the_second_of_two_writers_looks_again(postgresql: Callable[[], str], table: str) -> None:
    """Its process met an error of the driver, which is no error of Highwater's, and without a remedy."""
    url = postgresql()
    ledger, other = Ledger(url), Ledger(url)
    ledger.add([replace(FIRST, fingerprints={}, epochs={})])
    if table == "erased_slices":
        ledger.erasures.add(ERASURE)
    write, read, expected = WRITERS[table]
    done = write_before(ledger, (f"INSERT INTO {table}",), lambda: write(other))
    write(ledger)
    assert done
    assert read(other) == expected
