"""Versions: each planted defect turns its check red, and no other; what is explained is reported and passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from assets.streams.payments import STREAM as PAYMENTS
from dev.compare_versions import NUMBERS, OF_THE_DATA, compare_versions, wrong_versions
from dev.planted import plant as plant_table
from dev.shapes import SHAPES
from highwater.declaration import Field, Severity, Transitions
from highwater.orchestration.checking import version_queries
from highwater.orchestration.checking.check_rules import SAMPLES
from highwater.orchestration.checking.checks import build_evaluation
from highwater.orchestration.checking.version_checks import (
    ALONG_OFFSETS,
    IN_ORDER,
    MISSING,
    ONE_CONTENT,
    TRANSITIONS,
    check_stream_versions,
    check_version_gaps,
    check_versions,
    select_check_names,
    select_missing_check_names,
)
from highwater.orchestration.checking.version_queries import STREAM
from highwater.resources.lake import Lake
from tests.helpers.version_tables import (
    BEGIN,
    FIRST,
    SECOND,
    THIRD,
    TIER,
    Generated,
    Planted,
    compute_winners,
    event,
    red,
)

# Seconds of processor each.
pytestmark = pytest.mark.slow


LATER: dict[str, Any] = {"event_time": BEGIN + timedelta(hours=1)}
ERROR, WARN = Severity.ERROR, Severity.WARN


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def test_sound_tables_pass_every_check(planted: Planted) -> None:
    found = planted.check_slices()
    assert red(ORDERS, found) == {}
    assert [*found] == [ALONG_OFFSETS, ONE_CONTENT, TRANSITIONS, MISSING, IN_ORDER]
    assert all(set(by) == {FIRST, SECOND, THIRD, TIER, STREAM} for by in found.values())
    assert found[ALONG_OFFSETS][STREAM].numbers["events"] == 10
    assert found[ONE_CONTENT][STREAM].numbers["second_deliveries"] == 1
    assert found[ALONG_OFFSETS][SECOND].numbers["second_deliveries"] == 1, "behind a version of an earlier slice"
    assert found[ALONG_OFFSETS][TIER].numbers["returns_from_the_DLQ"] == 1, "its second version overtook it"


def plant(*rows: dict[str, object]) -> Callable[[Planted], None]:
    return lambda planted: planted.events.extend(rows)


def take_from_current(planted: Planted, version: int) -> None:
    planted.current = [r for r in compute_winners(planted.events) if (r["key"], r["version"]) != ("o1", version)]


def add_to_current(planted: Planted) -> None:
    ahead = {**event(0, 9, "o1"), "updated_by_slice": FIRST}
    planted.current = [*compute_winners(planted.events), ahead]


def fold_wrongly(**changes: object) -> Callable[[Planted], None]:
    """Let `current` have dropped the earlier of two events of one version, which are of two slices."""

    def planted_in(planted: Planted) -> None:
        later = event(25, 1, "x", **changes)
        planted.events += [event(4, 1, "x"), later]
        others = [row for row in compute_winners(planted.events) if row["key"] != "x"]
        planted.current = [*others, {**later, "updated_by_slice": later["slice"]}]

    return planted_in


DEFECTS: dict[str, tuple[Callable[[Planted], None], dict[str, dict[str, Severity]]]] = {
    "the later of two contents in current": (
        fold_wrongly(customer_id="c2"),
        {ONE_CONTENT: {FIRST: WARN, THIRD: WARN, STREAM: WARN}, IN_ORDER: {FIRST: ERROR, STREAM: ERROR}},
    ),
    "the later of two contents of one moment in current": (
        fold_wrongly(customer_id="c2", origin_timestamp=BEGIN + timedelta(seconds=4)),
        {ONE_CONTENT: {FIRST: WARN, THIRD: WARN, STREAM: WARN}, IN_ORDER: {FIRST: ERROR, STREAM: ERROR}},
    ),
    "a second delivery in current": (fold_wrongly(), {}),
    "a version that falls within a slice": (
        plant(event(4, 2, "x"), event(5, 1, "x", **LATER)),
        {ALONG_OFFSETS: {FIRST: ERROR, STREAM: ERROR}},
    ),
    "a version that falls below one of an earlier slice": (
        plant(event(4, 2, "x"), event(25, 1, "x", **LATER)),
        {ALONG_OFFSETS: {THIRD: ERROR, STREAM: ERROR}},
    ),
    "two contents in one slice": (
        plant(event(4, 1, "x"), event(5, 1, "x", amount=Decimal(1))),
        {ONE_CONTENT: {FIRST: WARN, STREAM: WARN}},
    ),
    "two contents in two slices": (
        plant(event(4, 1, "x"), event(25, 1, "x", customer_id="c2")),
        {ONE_CONTENT: {FIRST: WARN, THIRD: WARN, STREAM: WARN}},
    ),
    "a first version in another state": (
        plant(event(4, 1, "x", status="paid")),
        {TRANSITIONS: {FIRST: WARN, STREAM: WARN}},
    ),
    "a state that may not follow the one in another slice": (
        plant(event(4, 1, "x"), event(15, 2, "x", status="refunded")),
        {TRANSITIONS: {SECOND: WARN, STREAM: WARN}},
    ),
    "a version that is nowhere": (
        plant(event(4, 1, "x"), event(15, 3, "x")),
        {MISSING: {SECOND: ERROR, STREAM: ERROR}},
    ),
    "a first version that is nowhere": (
        plant(event(4, 2, "x")),
        {MISSING: {FIRST: ERROR, STREAM: ERROR}},
    ),
    "a key that current lost": (
        lambda planted: take_from_current(planted, 3),
        {IN_ORDER: {FIRST: ERROR, SECOND: ERROR, THIRD: ERROR, STREAM: ERROR}},
    ),
    "a version in current that no event has": (add_to_current, {IN_ORDER: {STREAM: ERROR}}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_turns_its_check_red_and_no_other(planted: Planted, name: str) -> None:
    defect, expected = DEFECTS[name]
    defect(planted)
    assert planted.red() == expected


EXPLAINED = {
    "second_deliveries": [event(4, 1, "x"), event(15, 2, "x"), event(25, 1, "x")],
    "conflicts": [event(4, 1, "x"), event(15, 2, "x"), event(25, 1, "x", amount=Decimal(1), **LATER)],
    "reordered_by_their_producer": [event(14, 2, "x"), event(25, 1, "x")],
    "returns_from_the_DLQ": [event(14, 2, "x"), event(5, 1, "x", slice=TIER, retries=1)],
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_fall_that_is_explained_is_counted_and_passes(planted: Planted, name: str) -> None:
    before = planted.check_slices()[ALONG_OFFSETS][STREAM].numbers
    planted.events += EXPLAINED[name]
    found = planted.check_slices()[ALONG_OFFSETS]
    assert all(result.passed for result in found.values())
    numbers = found[STREAM].numbers
    assert (numbers["falls"] - before["falls"], numbers[name] - before.get(name, 0)) == (1, 1)


def test_a_fall_names_its_origin_and_the_one_that_it_fell_behind(planted: Planted) -> None:
    planted.events += [event(4, 1, "x"), event(5, 3, "x"), event(6, 2, "x"), event(25, 1, "x", **LATER)]
    planted.events += [event(5, 2, "x", **LATER)]
    first = planted.check_slices()[ALONG_OFFSETS][THIRD].samples[0]
    wanted = {"key": "x", "version": 1, "highest": 3, "generation": 0, "partition": 0, "offset": 25, "behind": 5}
    assert {name: first[name] for name in wanted} == wanted


def test_no_order_is_claimed_between_partitions(planted: Planted) -> None:
    planted.events += [event(4, 2, "x"), event(15, 1, "x", origin_partition=1, **LATER)]
    found = planted.check_slices()[ALONG_OFFSETS]
    assert found[STREAM].passed
    assert found[STREAM].numbers["keys_in_several_partitions"] == 1
    assert "1 keys moved to other partitions" in found[STREAM].text


def test_no_order_is_claimed_between_generations(planted: Planted) -> None:
    planted.events += [event(4, 2, "x"), event(5, 1, "x", origin_generation=1, **LATER)]
    assert planted.check_slices()[ALONG_OFFSETS][STREAM].passed


def test_a_conflict_names_its_origins(planted: Planted) -> None:
    planted.events += [event(4, 1, "x"), event(5, 1, "x"), event(25, 1, "x", customer_id="c2")]
    found = planted.check_slices()[ONE_CONTENT]
    for key in (FIRST, THIRD, STREAM):
        assert {"0:4", "0:5", "0:25"} == set(str(found[key].samples[0]["origins"]).split(", "))


SKU, GIFT = {"sku": "A", "price": Decimal("1.50")}, {"sku": "B", "price": None}
NESTED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "other lines": ({"lines": [SKU, GIFT]}, {"lines": [GIFT, SKU]}, 1),
    "no lines": ({"lines": []}, {"lines": None}, 1),
    "another place": ({"place": {"town": "Ulm"}}, {"place": {"town": None}}, 1),
    "another tag": ({"tags": [("a", "1")]}, {"tags": [("a", "2")]}, 1),
    "no text": ({"customer_id": ""}, {"customer_id": None}, 1),
    "the same": ({"lines": [SKU], "place": {"town": "Ulm"}}, {"lines": [SKU], "place": {"town": "Ulm"}}, 0),
    "tags in another order": ({"tags": [("a", "1"), ("b", None)]}, {"tags": [("b", None), ("a", "1")]}, 0),
}


@pytest.mark.parametrize("name", NESTED)
def test_arrays_maps_and_structs_are_content(tmp_path: Path, name: str) -> None:
    """Two records of one version that differ in an order's lines alone counted as one that was delivered twice."""
    import pyarrow as pa

    line = (Field("sku", "string"), Field("price", "decimal(12,2)", nullable=True))
    fields = (
        Field("lines", "array", of=Field("line", "struct", of=line), nullable=True),
        Field("place", "struct", of=(Field("town", "string", nullable=True),), nullable=True),
        Field("tags", "map", of=Field("tag", "string", nullable=True), nullable=True),
    )
    planted = Planted(tmp_path, replace(ORDERS, fields=(*ORDERS.fields, *fields), publishes=None))
    of_line = pa.struct([("sku", pa.string()), ("price", pa.decimal128(12, 2))])
    planted.extra = [
        pa.field("lines", pa.list_(of_line)),
        pa.field("place", pa.struct([("town", pa.string())])),
        pa.field("tags", pa.map_(pa.string(), pa.string())),
    ]
    first, second, conflicts = NESTED[name]
    before = planted.check_slices()[ONE_CONTENT][STREAM].numbers["second_deliveries"]
    planted.events += [event(4, 1, "x", **first), event(5, 1, "x", **second)]
    found = planted.check_slices()
    assert found[ONE_CONTENT][STREAM].passed == (not conflicts)
    assert found[ONE_CONTENT][STREAM].numbers["second_deliveries"] - before == 1 - conflicts
    assert found[ALONG_OFFSETS][STREAM].passed


def test_the_transition_of_a_version_with_two_contents_is_that_of_the_one_that_counts(planted: Planted) -> None:
    """The earliest origin wins, which is not the first offset where a publish time lies before."""
    late = {"origin_timestamp": BEGIN - timedelta(hours=1)}
    planted.events += [event(4, 1, "x", status="canceled"), event(5, 1, "x", **late)]
    assert planted.check_slices()[TRANSITIONS][STREAM].passed


def test_ranges_of_keys_find_the_same(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded by looking at some keys at a time; nothing may be counted twice or lost for it."""
    for number, rows in enumerate([*EXPLAINED.values(), [event(4, 2), event(25, 1, **LATER)], [event(5, 3)]]):
        planted.events += [{**row, "key": f"x{number}"} for row in rows]
    at_once = planted.check_slices()
    assert set(red(ORDERS, at_once)) == {ALONG_OFFSETS, ONE_CONTENT, MISSING}
    monkeypatch.setattr(version_queries, "EVENTS_AT_ONCE", 4)
    in_ranges = planted.check_slices()
    for check, by_slice in at_once.items():
        for key, result in by_slice.items():
            assert (in_ranges[check][key].numbers, in_ranges[check][key].text) == (result.numbers, result.text)


@pytest.mark.parametrize("at_once", [version_queries.EVENTS_AT_ONCE, 20])
def test_samples_are_few_and_counts_exact(planted: Planted, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Each range of keys brought as many: of a large stream with many wrong keys hundreds were shown."""
    monkeypatch.setattr(version_queries, "EVENTS_AT_ONCE", at_once)
    planted.events += [event(4, 1, f"x{n}", status="paid") for n in range(50)]
    planted.events += [event(5, 3, f"y{n}") for n in range(50)]
    planted.current = [row for row in compute_winners(planted.events) if not row["key"].startswith(("x", "y"))]
    found = planted.check_slices()
    for key in (FIRST, STREAM):
        assert (found[TRANSITIONS][key].numbers["not_allowed"], len(found[TRANSITIONS][key].samples)) == (50, SAMPLES)
        assert (found[MISSING][key].numbers["nowhere"], len(found[MISSING][key].samples)) == (100, SAMPLES)
        assert [row["key"] for row in found[TRANSITIONS][key].samples] == sorted(f"x{n}" for n in range(50))[:SAMPLES]
    assert (found[IN_ORDER][STREAM].numbers["absent"], len(found[IN_ORDER][STREAM].samples)) == (100, SAMPLES)


def test_without_tables_a_slice_fails_and_a_stream_does_not(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path))
    for by_slice in (check_versions(lake, ORDERS, [FIRST]) | check_version_gaps(lake, ORDERS, [FIRST])).values():
        assert not by_slice[FIRST].passed
    assert all(result.passed for result in check_stream_versions(lake, ORDERS).values())


def test_dagster_gets_the_samples_as_a_table(planted: Planted) -> None:
    planted.events += [event(4, 1, "x", status="paid")]
    found = planted.check_slices()[TRANSITIONS][FIRST]
    made = build_evaluation(ORDERS, "events", TRANSITIONS, FIRST, found)
    assert made.partition == FIRST
    samples = made.metadata["samples"]
    assert isinstance(samples, dg.TableMetadataValue)
    assert samples.records[0].data["state"] == "paid"


def test_versions_may_be_times(tmp_path: Path) -> None:
    """A time was compared with the number of the first version once, and the check could not be asked at all."""
    import pyarrow as pa

    planted = Planted(tmp_path)
    planted.write()
    table = planted.lake.open_stream_table("orders", "events")
    assert table is not None
    rows = table.to_pyarrow_table()
    times = pa.array([BEGIN + timedelta(hours=n) for n in rows["version"].to_pylist()])
    rows = rows.set_column(rows.schema.get_field_index("version"), "version", times.cast(pa.timestamp("us", "UTC")))
    fields = {"account_id": "order_id", "payment_id": "order_id", "currency": "status", "booked_at": "event_time"}
    for ours, theirs in fields.items():
        rows = rows.append_column(ours, rows[theirs])
    slice_commits = planted.lake.load_slice_commits("orders", "events").values()
    plant_table(planted.lake.build_table_path("payments", "events"), rows, slice_commits)
    with_states = replace(PAYMENTS, transitions=Transitions("currency", "placed", {"placed": ("paid",)}))
    found = check_versions(planted.lake, PAYMENTS, [FIRST, SECOND])
    assert check_versions(planted.lake, with_states, [FIRST, SECOND]).keys() == found.keys()
    assert {name: [by_slice[key].passed for key in (FIRST, SECOND)] for name, by_slice in found.items()} == {
        ALONG_OFFSETS: [True, True],
        ONE_CONTENT: [True, True],
    }
    assert "1" in found[ALONG_OFFSETS][SECOND].text, "the second delivery follows a higher version and is reported"


def test_a_stream_has_the_checks_that_its_versions_allow() -> None:
    assert select_check_names(ORDERS) == [ALONG_OFFSETS, ONE_CONTENT, TRANSITIONS]
    assert select_missing_check_names(ORDERS) == [MISSING]
    assert select_check_names(PAYMENTS) == [ALONG_OFFSETS, ONE_CONTENT]
    assert select_missing_check_names(PAYMENTS) == []
    assert TRANSITIONS not in select_check_names(replace(ORDERS, transitions=None))
    assert select_missing_check_names(replace(ORDERS, first_version=None)) == []


def test_generated_faults_are_reported_by_their_kind_and_raise_no_other_alarm(tmp_path: Path) -> None:
    """Every fault, slice by slice as they are decided; what late customers held back comes at the end."""
    world = Generated(tmp_path)
    alarmed: dict[str, set[str]] = {}
    for upto in range(1, len(world.main) + 1):
        report(alarmed, world.red_keys(world.main[:upto], world.main[upto - 1]))
    report(alarmed, world.red_keys([*world.main, TIER], TIER))
    whole = world.red_keys([*world.main, TIER], None)
    report(alarmed, whole)
    allowed = {
        ONE_CONTENT: world.keys_with("conflict"),
        TRANSITIONS: world.keys_with("forbidden_transition"),
        MISSING: world.keys_with("missing_version"),
    }
    assert {name: keys - allowed[name] for name, keys in alarmed.items()} == {name: set() for name in allowed}
    assert whole == allowed, "over the stream all are reported"
    assert allowed.keys() == OF_THE_DATA, "in a soak no other check may be red"


def test_the_checks_find_what_a_second_count_finds(tmp_path: Path) -> None:
    """The one that a soak holds them against."""
    world = Generated(tmp_path)
    decided = [*world.main, TIER]
    planted = world.write(decided)
    written = {(row["key"], row["version"]) for row in planted.events}
    fields = [*SHAPES["orders"].types]
    expected = wrong_versions(planted.events, fields, ORDERS.transitions, ORDERS.first_version, written)
    assert {check: wrong.count for check, wrong in expected.items()} == {
        check: check_stream_versions(planted.lake, ORDERS)[check].numbers[name] for check, name in NUMBERS.items()
    }
    by_check = check_versions(planted.lake, ORDERS, decided) | check_version_gaps(planted.lake, ORDERS, decided)
    red = {
        check: {key for key, result in by_slice.items() if not result.passed and not result.warning}
        for check, by_slice in by_check.items()
    }
    counts = {check: wrong.count for check, wrong in expected.items()}
    assert compare_versions(expected, counts, red) == []
    sound = next(key for key in decided if key not in red[ONE_CONTENT])
    shown = min(expected[TRANSITIONS].slices)
    planted_wrong = red | {ONE_CONTENT: {*red[ONE_CONTENT], sound}, TRANSITIONS: red[TRANSITIONS] - {shown}}
    assert compare_versions(expected, counts | {MISSING: 0}, planted_wrong) == [
        f"{MISSING} counts 0 where {counts[MISSING]} are wrong",
        f"{ONE_CONTENT} fails in 1 slices where nothing is wrong: {sound}",
        f"{TRANSITIONS} passes in 1 slices that show it: {shown}",
    ]


def report(alarmed: dict[str, set[str]], found: dict[str, set[str]]) -> None:
    for name, keys in found.items():
        alarmed.setdefault(name, set()).update(keys)
