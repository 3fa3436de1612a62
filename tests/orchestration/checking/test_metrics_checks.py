"""The check of metrics against the table of `highwater.assets.metrics`: no false alarm, and no error passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from deltalake import DeltaTable, write_deltalake

from highwater.orchestration.checking import metrics_checks
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.metrics_checks import FOLLOWS, check_metrics_follow_events
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import query
from highwater.slice_commits import SliceCommit
from tests.helpers.measured import Event, Measured

# In seconds.
HOUR, DAY = 3600, 24 * 3600


@pytest.fixture
def made(tmp_path: Path) -> Measured:
    return Measured(tmp_path)


def result(made: Measured, ordinal: int) -> CheckResult:
    key = made.slice_(ordinal).key
    return check_metrics_follow_events(made.ledger, made.lake, made.stream, [key])[FOLLOWS][key]


def change(made: Measured, what: Callable[[list[dict[str, Any]]], object]) -> None:
    """Write the table again with other rows."""
    import pyarrow as pa

    path = made.lake.build_table_path("orders", "metrics")
    table = DeltaTable(path)
    found = pa.table(table.to_pyarrow_table())
    rows = found.to_pylist()
    what(rows)
    write_deltalake(path, pa.Table.from_pylist(rows, found.schema), mode="overwrite", partition_by=["slice"])


def test_late_events_conflicts_and_second_deliveries_raise_no_alarm(made: Measured) -> None:
    made.decide(0, Event("a", 1, 300, amount="9.00", published=1), Event("a", 2, 3600), Event("b", 1, 0, amount="0.10"))
    made.decide(1, Event("a", 1, 0, offset=5), Event("b", 1, 0, amount="0.10", offset=6), Event("c", 1, 59))
    made.measure(0, 1)
    for ordinal in (0, 1):
        found = result(made, ordinal)
        assert found.passed, found.text
        assert found.numbers["not_settled"] == 0
    assert result(made, 0).numbers["minutes"] == 3


def test_a_version_that_counts_far_away_is_looked_for_where_minutes_differ(made: Measured) -> None:
    """Among the events of the hour alone it would count here."""
    made.decide(0, Event("a", 1, 3 * DAY))
    made.measure(0)
    made.decide(1, Event("a", 1, 0, amount="9.00", offset=5), Event("b", 1, 0, offset=6))
    made.measure(1)
    assert result(made, 1).passed, result(made, 1).text


def test_minutes_of_slices_that_metrics_do_not_follow_yet_are_left_out(made: Measured) -> None:
    made.decide(0, Event("a", 1, 0), Event("b", 1, HOUR / 2), Event("d", 1, DAY))
    made.measure(0)
    made.decide(1, Event("c", 1, 0, offset=5))
    found = result(made, 0)
    assert (found.passed, found.numbers["not_settled"]) == (True, 2), "the hour of the second minute holds the first"
    behind = result(made, 1)
    assert (behind.passed, behind.text) == (False, "the slice is not in metrics")
    made.measure(1)
    assert result(made, 1).passed
    made.decide(0, Event("a", 1, 2 * DAY))
    assert result(made, 1).passed, "what the first said of the minute before is nowhere any more"
    assert result(made, 0).text == "metrics follow attempt 1, events are of attempt 2"


def test_a_version_that_counts_elsewhere_once_its_slice_is_reprocessed_raises_no_alarm(made: Measured) -> None:
    made.decide(0, Event("a", 1, DAY))
    made.decide(1, Event("a", 1, 0, amount="9.00", offset=5), Event("b", 1, 0, offset=6))
    made.measure(0, 1)
    made.decide(0)
    found = result(made, 1)
    assert (found.passed, found.numbers["not_settled"]) == (True, 1), "it counts there as soon as metrics follow"


def test_a_minute_that_lost_its_events_is_reported(made: Measured) -> None:
    """The commit record names the minutes that the slice had events in."""
    made.decide(0, Event("a", 1, 0), Event("b", 1, 2 * HOUR))
    made.measure(0)
    DeltaTable(made.lake.build_table_path("orders", "events")).delete("key = 'b'")
    found = result(made, 0)
    assert (found.passed, found.numbers["unlike"], found.samples[0]["problem"]) == (False, 1, "a row, and no event")


def test_the_mean_is_rounded_away_from_0_half_way(made: Measured) -> None:
    # 0.33 / 32 = 0.0103125
    made.decide(0, *[Event(f"k{n}", 1, 0, amount="0.01" if n else "0.02", offset=n) for n in range(32)])
    made.measure(0)
    assert result(made, 0).passed, result(made, 0).text
    change(made, lambda rows: [row.update(hour_mean=None) for row in rows])
    assert result(made, 0).samples == [{"minute": "2026-03-01 12:00", "problem": "hour_mean is None, not 0.010313"}]


def test_a_slice_that_was_decided_a_moment_ago_does_not_set_all_events_in_motion(
    made: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events show which minutes wait; nothing is asked of slices that have none in these hours."""
    asked: list[object] = []

    def looking(table: DeltaTable, keys: Sequence[str] | None = None) -> dict[str, SliceCommit]:
        asked.append(keys)
        return read_slice_commits(table, keys)

    monkeypatch.setattr(metrics_checks, "read_slice_commits", looking)
    made.decide(0, Event("a", 1, 0), Event("b", 1, HOUR / 2))
    made.decide(2, Event("d", 1, 2 * DAY))
    made.measure(0, 2)
    made.decide(1, Event("c", 1, 0, offset=5))
    found = result(made, 0)
    assert (found.passed, found.numbers["not_settled"]) == (True, 2)
    keys = [made.slice_(ordinal).key for ordinal in (0, 1)]
    assert [sorted(cast("list[str]", one)) for one in asked] == [keys[:1], keys[:1], keys, keys]
    # What is wrong besides is looked for as before; that the commit names a minute more needs no look.
    DeltaTable(made.lake.build_table_path("orders", "events")).delete("key = 'b'")
    found = result(made, 0)
    assert (found.numbers["unlike"], found.numbers["not_settled"]) == (0, 2)
    assert found.text.startswith("the commit of metrics names 2 rows, and should of 1; ")
    made.decide(1, Event("c", 1, -DAY, offset=5))
    found = result(made, 0)
    assert (found.passed, found.numbers["unlike"], found.numbers["not_settled"]) == (False, 1, 0)
    assert None in asked


def test_minutes_that_lie_far_apart_are_asked_for_in_parts(made: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were asked for from the first to the last, with all events in between."""
    monkeypatch.setattr(metrics_checks, "MAX_RANGES", 2)
    minutes: set[int] = set()

    def looking(table: DeltaTable, sql: str) -> list[dict[str, Any]]:
        found = query(table, sql)
        minutes.update(row["minute"] for row in found if "minute" in row)
        return found

    monkeypatch.setattr(metrics_checks, "query", looking)
    # The same version is reported on two days, in different parts; the earlier origin counts.
    days = [Event(f"k{day}", 1, 2 * day * DAY, offset=day) for day in range(5)]
    made.decide(0, *days, Event("k4", 1, 60, amount="9.00", offset=9))
    made.decide(1, *[Event(f"m{day}", 1, (2 * day + 1) * DAY, offset=20 + day) for day in range(5)])
    made.measure(0, 1)
    found = result(made, 0)
    assert (found.passed, found.numbers["minutes"]) == (True, 6), found.text
    assert [within.count(">=") for within in metrics_checks._build_time_conditions(minutes)] == [2, 2, 1]
    noon = 29_539_440  # 2026-03-01 12:00
    assert minutes == {noon + 2 * day * 24 * 60 for day in range(5)} | {noon + 1}
    change(made, lambda rows: [row.update(events=7) for row in rows])
    found = result(made, 0)
    assert (found.passed, found.numbers["unlike"]) == (False, 5)
