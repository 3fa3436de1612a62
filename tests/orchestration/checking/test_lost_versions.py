"""Missing versions: excused by what still waits, or an error that names the place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from assets.streams.orders import STREAM as ORDERS
from highwater.declaration import Severity
from highwater.envelope import Origin
from highwater.orchestration.checking import missing_versions, version_queries
from highwater.orchestration.checking.version_checks import (
    MISSING,
    check_version_gaps,
)
from highwater.orchestration.checking.version_queries import STREAM, Scope
from highwater.resources import commit_log
from highwater.slices import SliceKey
from tests.helpers.version_tables import (
    FIRST,
    SECOND,
    THIRD,
    TIER,
    Planted,
    event,
    red,
    reject,
    value,
)

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.slice_commits import SliceCommit


# Seconds of processor each.
pytestmark = pytest.mark.slow


ERROR, WARN = Severity.ERROR, Severity.WARN


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


PLACES = {
    "waits in a tier": (reject(14, "x", value(2), "orders.dlq.1"), "waits_in_a_tier"),
    "parked": (reject(14, "x", value(2), "orders.parked"), "is_parked"),
    "malformed and parked": (reject(14, "x", b"no JSON", "orders.parked"), "may_be_parked"),
    "malformed in a tier": (reject(14, "x", b"{}", "orders.dlq.2"), "may_wait_in_a_tier"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_missing_version_that_waits_is_a_warning_that_names_it(planted: Planted, name: str) -> None:
    row, number = PLACES[name]
    planted.events += [event(4, 1, "x"), event(15, 3, "x")]
    planted.rejects.append(row)
    results = planted.check_slices()
    assert red(ORDERS, results) == {MISSING: {SECOND: WARN, STREAM: WARN}}
    found = results[MISSING][STREAM]
    assert (found.numbers["missing"], found.numbers[number]) == (1, 1)
    where = str(found.samples[0]["where"])
    assert where.startswith("may be orders" if "may" in number else "orders")
    assert "orders partition 0 offset 14, on " + row["next_topic"] in where
    due = {"waits in a tier": "due at 2026-03-01 10:01:10 UTC", "malformed in a tier": "due at 2026-03-01 10:06:00 UTC"}
    assert due.get(name, "") in where
    assert ("redrive-parked orders" in found.text) == ("parked" in number)


@pytest.mark.parametrize(
    ("said", "number"), [(value(2), "is_reclaimed"), (b"no JSON", "may_be_reclaimed")], ids=["named", "unreadable"]
)
def test_reclaimed_records_wait_for_their_slice_and_on_no_topic(planted: Planted, said: bytes, number: str) -> None:
    """Its copy in the tier counts no more, so that no time at which it is due may be reported."""
    planted.events += [event(4, 1, "x"), event(15, 3, "x")]
    planted.rejects.append(reject(14, "x", said, "orders.dlq.1"))
    planted.reclaim_numbers = {Origin("orders", 0, 0, 14): 1}
    found = planted.check_slices()[MISSING][STREAM]
    assert (found.passed, found.warning) == (False, True)
    assert (found.numbers["missing"], found.numbers[number]) == (1, 1)
    where = str(found.samples[0]["where"])
    assert "offset 14, which its slice reprocesses when it is materialised again" in where
    assert "orders.dlq.1" not in where
    # Rejected again and published again, it waits as any other.
    planted.rejects[-1]["reclaims"] = 1
    assert number not in planted.check_slices()[MISSING][STREAM].numbers


def test_a_reject_is_due_by_its_own_publication_alone(planted: Planted) -> None:
    """What the slice's table of before says of the copy that was reclaimed is no publication of the new one."""
    planted.events += [event(4, 1, "x"), event(15, 3, "x")]
    old = reject(14, "x", value(2), "orders.dlq.1")
    restarted = {**old, "reclaims": 1}
    planted.rejects.append(restarted)
    planted.reclaim_numbers = {Origin("orders", 0, 0, 14): 1}
    assert "due at" in str(planted.check_slices()[MISSING][STREAM].samples[0]["where"])
    planted.published = [old]
    found = planted.check_slices()[MISSING][STREAM]
    assert found.numbers["waits_in_a_tier"] == 1
    assert "due at" not in str(found.samples[0]["where"]), "rejected again, and not published yet"


NO_EXCUSE = {
    "another version of the key waits": [reject(14, "x", value(4), "orders.dlq.1")],
    "another key waits": [reject(14, "y", b"no JSON", "orders.dlq.1")],
    "what waited was accepted": [reject(3, "x", b"no JSON", "orders.dlq.1")],
}


@pytest.mark.parametrize("name", NO_EXCUSE)
def test_unrelated_records_do_not_explain_a_missing_version(planted: Planted, name: str) -> None:
    planted.events += [event(4, 1, "x"), event(15, 3, "x")]
    planted.rejects += NO_EXCUSE[name]
    assert planted.red() == {MISSING: {SECOND: ERROR, STREAM: ERROR}}


def test_one_record_is_committed_for_one_missing_version(planted: Planted) -> None:
    planted.events += [event(4, 1, "x"), event(15, 6, "x")]
    planted.rejects += [reject(5, "x", value(3), "orders.dlq.1"), reject(6, "x", b"?", "orders.parked")]
    found = planted.check_slices()[MISSING][STREAM]
    counts = {"missing": 4, "waits_in_a_tier": 1, "may_be_parked": 1, "nowhere": 2}
    assert {name: found.numbers[name] for name in counts} == counts
    assert found.samples[0]["class"] == "nowhere", "what a person has to look at comes first"


def test_a_version_that_an_undecided_slice_may_hold_is_a_warning(planted: Planted) -> None:
    planted.events += [event(4, 1, "x"), event(24, 3, "x"), event(15, 2, "x")]
    planted.undecided = {SECOND}
    results = planted.check_slices()
    assert red(ORDERS, results)[MISSING] == {THIRD: WARN, STREAM: WARN}
    numbers = results[MISSING][STREAM].numbers
    assert numbers["missing"] == numbers["not_decided_yet"] > 0
    planted.undecided = set()
    assert planted.red() == {}


def test_a_hole_that_lies_before_both_neighbours_excuses_nothing(planted: Planted) -> None:
    planted.events = [event(14, 1, "x"), event(15, 3, "x"), event(29, 1, "y")]
    planted.undecided = {FIRST}
    assert planted.red()[MISSING] == {SECOND: ERROR, STREAM: ERROR}


def test_behind_the_newest_slice_a_version_may_still_come(planted: Planted) -> None:
    planted.events += [event(24, 2, "x")]
    results = planted.check_slices()
    assert red(ORDERS, results) == {MISSING: {THIRD: WARN, STREAM: WARN}}
    assert results[MISSING][THIRD].numbers["may_still_come"] == 1


def test_a_version_that_comes_late_closes_the_gap_of_an_earlier_slice(planted: Planted) -> None:
    planted.events += [event(4, 2, "x"), event(25, 1, "x")]
    assert planted.red() == {}


def test_far_away_slices_are_looked_at_before_a_version_is_nowhere(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only neighbours are looked at; the second version is in none of them."""
    monkeypatch.setattr(version_queries, "SLICES_AROUND", 0)
    planted.events += [event(4, 2, "x"), event(14, 1, "x"), event(15, 4, "x"), event(24, 3, "x")]
    planted.write()
    assert not Scope.from_slice_keys(ORDERS, [SECOND]).whole
    assert check_version_gaps(planted.lake, ORDERS, [SECOND])[MISSING][SECOND].passed
    planted.events = [row for row in planted.events if (row["key"], row["version"]) != ("x", 3)]
    planted.write()
    assert check_version_gaps(planted.lake, ORDERS, [SECOND])[MISSING][SECOND].numbers["nowhere"] == 1


def test_a_slice_is_compared_with_those_around_it_and_a_tier_against_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_queries, "SLICES_AROUND", 1)
    key = str(SliceKey("orders", 7))
    assert Scope.from_slice_keys(ORDERS, [key]).among.endswith("BETWEEN 'orders@0000006' AND 'orders@0000008')")
    assert Scope.from_slice_keys(ORDERS, [key, TIER]).among == "true"
    assert Scope.from_slice_keys(ORDERS, None) == Scope(None)


@pytest.mark.parametrize(("below", "slice_commits_of"), [({}, [False]), ({"origin_partition": 1}, [False, True])])
def test_records_of_slices_that_cannot_matter_are_not_read(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, below: dict[str, int], slice_commits_of: list[bool]
) -> None:
    """They are as many as there are slices. Of a key that moved, though, the missing version may lie before all."""
    monkeypatch.setattr(version_queries, "SLICES_AROUND", 0)
    asked: list[str] = []

    def slice_commits_from(table: DeltaTable, topic: str, since: str) -> dict[str, SliceCommit]:
        asked.append(since)
        return commit_log.read_slice_commits_since(table, topic, since)

    monkeypatch.setattr(missing_versions, "read_slice_commits_since", slice_commits_from)
    planted.events += [event(24, 1, "x", **below), event(25, 3, "x")]
    planted.write()
    found = check_version_gaps(planted.lake, ORDERS, [THIRD])[MISSING][THIRD]
    assert found.numbers["may_still_come"] == found.numbers["missing"] == 1
    everything = [since == "" for since in asked]
    assert everything == [whole for whole in slice_commits_of for _ in ("events", "rejects")]
