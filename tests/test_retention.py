"""The rule that decides which slices lose their rows of raw."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.declaration import Retention
from highwater.erasing import BY_AGE, Erasure, compute_erasure_times
from highwater.errors import DeclarationError
from highwater.retention import (
    RetentionFacts,
    select_free_slices,
    select_old_slices,
    select_planned_before,
)
from tests.helpers.retained import AGE, DAY, IN_DLQ
from tests.helpers.world import NOON, STREAM

KEYS = st.sets(st.sampled_from("abcdef"))


@given(KEYS, KEYS, KEYS, KEYS)
def test_only_slices_that_nothing_keeps_lose_rows(
    named: set[str], whole: set[str], in_dlq: set[str], reclaimed: set[str]
) -> None:
    found, retained = select_free_slices("abcdef", RetentionFacts(named, whole, in_dlq, reclaimed))
    assert {*found} == whole - named - in_dlq - reclaimed
    assert found == sorted(found)
    assert len(found) + sum(retained.values()) == 6


def test_each_slice_reports_why_it_keeps_its_rows() -> None:
    needed = RetentionFacts(
        in_unfinished_runs={"a"}, complete={"a", "c", "d", "e"}, in_dlq={"c", "d"}, reclaimed_slices={"d"}
    )
    assert select_free_slices("abcde", needed) == (
        ["e"],
        {
            "named by unfinished runs or backfills": 1,
            "incomplete in some table": 1,
            IN_DLQ: 1,
            "reclaimed from the DLQ and not reprocessed yet": 1,
        },
    )


def test_a_slice_is_as_old_as_its_newest_record_and_its_plan() -> None:
    second = timedelta(seconds=1)
    planned = {"b": NOON - 9 * DAY, "a": NOON - 9 * DAY, "c": NOON - 10 * DAY, "d": NOON - 7 * DAY}
    assert select_planned_before(planned, 7 * DAY, NOON) == ["c", "a", "b"]
    published = {
        "a": NOON - 7 * DAY,
        "b": NOON - 7 * DAY - second,
        "c": NOON + DAY,
        "d": NOON - 999 * DAY,
    }
    newest = {key: int(at.timestamp()) * 1_000 for key, at in published.items()}
    assert select_old_slices(["d", "c", "b", "a", "no rows"], newest, 7 * DAY, NOON) == ["d", "b"]


@pytest.mark.parametrize(
    ("retention", "reported"),
    [
        (Retention(raw=timedelta(hours=23)), "raw must be retained for a day at least"),
        (Retention(raw=AGE, events=AGE), "events are never deleted"),
        (Retention(rejects=AGE), "rejects are never deleted"),
    ],
)
def test_unsupported_retention_is_refused(retention: Retention, reported: str) -> None:
    with pytest.raises(DeclarationError, match=reported):
        replace(STREAM, retention=retention)


def test_expired_rows_are_no_erased_key() -> None:
    assert compute_erasure_times([Erasure("orders", BY_AGE, "", "", NOON), Erasure("orders", "a", "", "", NOON)]) == {
        "a": NOON
    }
