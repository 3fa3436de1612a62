"""Versions along offsets: each planted disorder is told, with its explanation, and no other."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.streams.orders import STREAM as ORDERS
from assets.streams.payments import STREAM as PAYMENTS
from orchestration.checks import evaluation
from orchestration.verdicts import Verdict
from orchestration.version_checks import ALONG_OFFSETS, ONE_CONTENT, SAMPLES, TRANSITIONS, names, version_checks
from resources.lake import Lake

BEGIN = datetime(2026, 3, 1, 10, tzinfo=UTC)
SLICE, OTHER = "orders@0000001", "orders@0000002"


def event(offset: int, version: int, key: str = "o1", **changes: Any) -> dict[str, Any]:
    """An event whose time goes with its version; `changes` overrides columns."""
    sound = {
        "slice": SLICE,
        "origin_topic": "orders",
        "origin_generation": 0,
        "origin_partition": 0,
        "origin_offset": offset,
        "retries": 0,
        "key": key,
        "version": version,
        "event_time": BEGIN + timedelta(minutes=version),
        "order_id": key,
        "status": "placed" if version == 1 else "paid" if version == 2 else "refunded",
        "customer_id": "c1",
        "amount": Decimal("12.50"),
        "proof": None,
    }
    return sound | changes


def verdicts(tmp_path: Path, *rows: dict[str, Any]) -> dict[str, dict[str, Verdict]]:
    import pyarrow as pa
    from deltalake import write_deltalake

    lake = Lake(str(tmp_path))
    schema = pa.schema(
        [
            *[(name, pa.string()) for name in ("slice", "origin_topic")],
            *[(name, pa.int32()) for name in ("origin_generation", "origin_partition")],
            ("origin_offset", pa.int64()),
            ("retries", pa.int32()),
            ("key", pa.string()),
            ("version", pa.int32()),
            ("event_time", pa.timestamp("us", "UTC")),
            *[(name, pa.string()) for name in ("order_id", "status", "customer_id")],
            ("amount", pa.decimal128(12, 2)),
            ("proof", pa.string()),
        ]
    )
    write_deltalake(lake.path("orders", "events"), pa.Table.from_pylist(list(rows), schema), partition_by=["slice"])
    return version_checks(lake, ORDERS, [SLICE, OTHER])


def test_versions_that_rise_pass_every_check(tmp_path: Path) -> None:
    proof = {**event(0, 1), "proof": "{}", "key": None, "version": None}
    found = verdicts(tmp_path, *[event(n, n) for n in (1, 2, 3)], event(9, 1, "o2", slice=OTHER), proof)
    assert [*found] == [ALONG_OFFSETS, ONE_CONTENT, TRANSITIONS]
    assert all(verdict.passed for by_slice in found.values() for verdict in by_slice.values())
    assert found[ALONG_OFFSETS][SLICE].numbers["events"] == 3


EXPLAINED = {
    "second_deliveries": [event(1, 1), event(2, 2), event(3, 1)],
    "conflicts": [event(1, 1), event(2, 2), event(3, 1, amount=Decimal(1), event_time=BEGIN + timedelta(hours=1))],
    "reordered_by_their_producer": [event(1, 2), event(2, 1)],
    "returns_from_the_DLQ": [event(1, 2, retries=1), event(2, 1, retries=1)],
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_fall_that_is_explained_is_counted_and_passes(tmp_path: Path, name: str) -> None:
    found = verdicts(tmp_path, *EXPLAINED[name])[ALONG_OFFSETS][SLICE]
    assert found.passed
    assert (found.numbers["falls"], found.numbers[name]) == (1, 1)


def test_a_fall_that_nothing_explains_fails_its_slice_and_no_other(tmp_path: Path) -> None:
    """The lower version happened later: its producer counts backwards."""
    late = event(2, 1, event_time=BEGIN + timedelta(hours=1))
    found = verdicts(tmp_path, event(1, 2), late, event(9, 1, "o2", slice=OTHER))[ALONG_OFFSETS]
    assert not found[SLICE].passed
    assert not found[SLICE].warning
    [sample] = found[SLICE].samples
    assert (sample["key"], sample["version"], sample["highest"], sample["offset"]) == ("o1", 1, 2, 2)
    assert found[OTHER].passed


def test_no_order_is_claimed_between_partitions_or_slices(tmp_path: Path) -> None:
    found = verdicts(tmp_path, event(1, 2), event(1, 1, origin_partition=1), event(2, 1, slice=OTHER))[ALONG_OFFSETS]
    assert found[SLICE].passed
    assert (found[SLICE].numbers["falls"], found[SLICE].numbers["keys_in_several_partitions"]) == (0, 1)
    assert found[OTHER].numbers["falls"] == 0


def test_two_contents_of_a_version_are_a_warning_with_their_origins(tmp_path: Path) -> None:
    found = verdicts(tmp_path, event(1, 1), event(2, 1), event(3, 1, customer_id="c2"))[ONE_CONTENT][SLICE]
    assert (found.passed, found.warning, found.numbers["conflicts"]) == (False, True, 1)
    assert {"0:1", "0:2", "0:3"} == set(str(found.samples[0]["origins"]).split(", "))


def test_a_second_delivery_is_no_conflict(tmp_path: Path) -> None:
    assert verdicts(tmp_path, event(1, 1), event(2, 1))[ONE_CONTENT][SLICE].passed


WRONG = {
    "a first version in another state": [event(1, 1, status="paid")],
    "a state that may not follow": [event(1, 1), event(2, 2, status="refunded")],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_transition_that_is_not_allowed_is_a_warning(tmp_path: Path, name: str) -> None:
    found = verdicts(tmp_path, *WRONG[name])[TRANSITIONS][SLICE]
    assert (found.passed, found.warning, found.numbers["not_allowed"]) == (False, True, 1)


def test_a_version_that_is_missing_is_no_transition(tmp_path: Path) -> None:
    assert verdicts(tmp_path, event(1, 1), event(2, 3))[TRANSITIONS][SLICE].passed


def test_samples_are_few_and_counts_exact(tmp_path: Path) -> None:
    rows = [event(n, 1, f"o{n}", status="paid") for n in range(50)]
    found = verdicts(tmp_path, *rows)[TRANSITIONS][SLICE]
    assert (found.numbers["not_allowed"], len(found.samples)) == (50, SAMPLES)


def test_dagster_gets_the_samples_as_a_table(tmp_path: Path) -> None:
    found = verdicts(tmp_path, event(1, 1, status="paid"))[TRANSITIONS][SLICE]
    made = evaluation(ORDERS, "events", TRANSITIONS, SLICE, found)
    assert made.severity.value == "WARN"
    assert made.partition == SLICE
    samples = made.metadata["samples"]
    assert isinstance(samples, dg.TableMetadataValue)
    assert samples.records[0].data["state"] == "paid"


def test_transitions_are_checked_where_they_are_declared_and_versions_count() -> None:
    assert TRANSITIONS in names(ORDERS)
    assert TRANSITIONS not in names(PAYMENTS)
    assert TRANSITIONS not in names(replace(ORDERS, transitions=None))
