"""The commit of a slice keeps everything that the plan said, through its written form."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from highwater.divergence import Fingerprint
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice

SLICE = Slice(
    "orders", "orders", "Abc", 2, 42, {0: OffsetRange(5, 9), 1: OffsetRange(7, 7)}, datetime(2026, 1, 2, tzinfo=UTC)
)


def test_a_slice_commit_survives_its_written_form() -> None:
    slice_commit = SliceCommit(SLICE, attempt=3, rows=4, counts={"bytes": 17})
    assert SliceCommit.from_json(slice_commit.to_json()) == slice_commit


def test_records_of_the_plan_survive_in_the_slice_commit() -> None:
    """Of the fingerprints those of the slice's own records: one from before is in the slice commit that holds it."""
    marks = {0: Fingerprint(8, "a" * 64), 1: Fingerprint(6, "b" * 64)}
    slice_ = replace(SLICE, epochs={0: 3, 1: 5}, fingerprints=marks)
    found = SliceCommit.from_json(SliceCommit(slice_, attempt=3, rows=None, past=True).to_json())
    assert (found.past, found.slice_.epochs, found.slice_.fingerprints) == (True, slice_.epochs, {0: marks[0]})
    again = SliceCommit.from_json(replace(found, attempt=4).to_json())
    assert (again.slice_.epochs, again.slice_.fingerprints) == (found.slice_.epochs, found.slice_.fingerprints)


def test_other_tables_and_older_versions_report_nothing_of_it() -> None:
    text = SliceCommit(replace(SLICE, epochs={0: 3}), attempt=3, rows=4).to_json()
    assert "epochs" not in text
    assert SliceCommit.from_json(text).slice_.epochs == {}


def test_reading_run_of_a_slice_survives_in_the_slice_commit() -> None:
    """A slice commit of a version that lacked it is read."""
    slice_commit = SliceCommit(SLICE, attempt=3, rows=None, past=True, run="a-run")
    assert SliceCommit.from_json(slice_commit.to_json()) == slice_commit
    assert "run" not in replace(slice_commit, run="").to_plain()
    assert SliceCommit.from_json(replace(slice_commit, run="").to_json()).run == ""


def test_a_slice_commit_of_a_newer_format_is_not_guessed_at() -> None:
    text = SliceCommit(SLICE, attempt=3, rows=4).to_json().replace('"format":1', '"format":2')
    with pytest.raises(ValueError, match="format 2"):
        SliceCommit.from_json(text)
