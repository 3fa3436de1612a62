"""Repeated requests are reported too: slices that are never exhausted, and that run after run leaves undone."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from highwater.alerting import Alert
from highwater.orchestration.reporting import alert_conditions, alerts
from highwater.orchestration.sensing import repairing
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.exhausted_slices import StalledSlice
from tests.helpers.commits import commit_empty
from tests.helpers.holding import FOUND, STREAM
from tests.helpers.repairing import NAMED, ONE, OPEN, TWO, Repairing, open_breaker
from tests.helpers.support import report_failed_run
from tests.helpers.written_tables import NOW

ALL = ("events", "rejects", "current")


class RepairAndAlerts:
    """Repair's ticks and those of the alerts; each opens the ledger as another daemon does."""

    def __init__(self, folder: Path, ours: Repairing, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url, self.ours, self.heard = f"sqlite:///{folder / 'ledger.sqlite'}", ours, list[Alert]()
        monkeypatch.setattr(
            alerts,
            "CONDITIONS",
            (
                alert_conditions._measure_stalled_slices,
                alert_conditions._measure_exhausted_slices,
                alert_conditions._measure_holds,
            ),
        )

    def tick(self) -> str:
        unused: Any = None
        _, found = self.ours.tick()
        alerts.tick(Ledger(self.url), unused, unused, [self.ours.stream], self.heard.append)
        return found.message

    def kinds(self) -> list[str]:
        return [f"{alert.to_plain()['kind']} {alert.what}" for alert in self.heard]


@pytest.fixture
def in_order(tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch) -> RepairAndAlerts:
    """A stream that decides in order, its first slices in raw."""
    ours = Repairing(tmp_path, instance, [ONE, TWO], STREAM)
    commit_empty(ours.lake, [ONE, TWO], "raw")
    return RepairAndAlerts(tmp_path, ours, monkeypatch)


def test_the_first_time_stays(ledger: Ledger) -> None:
    stored = ledger.stalled_slices
    stored.add("orders", {"a": 6}, NOW)
    stored.add("orders", {"a": 9, "b": 7}, NOW.replace(hour=1))
    assert stored.read_open("orders") == [StalledSlice("a", NOW, 6), StalledSlice("b", NOW.replace(hour=1), 7)]
    assert stored.read_open("payments") == []
    stored.end(["a", "c"])
    assert [one.slice_key for one in stored.read_open("orders")] == ["b"]


def test_the_first_of_an_order_that_fails_on_and_on_is_one_alert_and_one_recovery(
    in_order: RepairAndAlerts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never exhausted, since all others wait for it: it was requested every hour, and nobody knew."""
    ours = in_order.ours
    for _ in range(repairing.RULES.most_runs - 1):
        ours.fail(ONE.key)
    in_order.tick()
    assert in_order.kinds() == [], "five runs"
    ours.fail(ONE.key)
    reported = in_order.tick()
    assert f"1 left undone by {repairing.RULES.most_runs} runs or more: {ONE.key}" in reported
    [alert] = in_order.heard
    assert (alert.what, alert.value.startswith(f"1 slices; {ONE.key} was left undone by 6 runs")) == (
        "stalled",
        True,
    )
    assert f"highwater explain {ONE.key}" in alert.remedy
    ours.fail(ONE.key)
    in_order.tick()
    with monkeypatch.context() as patched:
        patched.setattr(repairing, "read_past_runs", lambda *_: [])  # the daemon was unavailable for a day
        in_order.tick()
    assert in_order.kinds() == ["alert stalled"]
    commit_empty(ours.lake, [ONE], *ALL)
    assert "left undone" not in in_order.tick()
    in_order.tick()
    assert in_order.kinds() == ["alert stalled", "recovery stalled"]
    assert alert_conditions._measure_stalled_slices in alert_conditions.CONDITIONS


def test_held_slices_are_reported_as_held_while_a_run_decides_them(in_order: RepairAndAlerts) -> None:
    """The hold ends when the events are committed, and the run goes on for a while."""
    ours = in_order.ours
    ours.ledger.holds.note("orders", ONE.key, FOUND, NOW)
    ours.fail_often(ONE.key)
    in_order.tick()
    run = dg.DagsterRun("orders_slice", tags={"dagster/partition": ONE.key, "highwater/stream": "orders"})
    ours.instance.add_run(run)
    commit_empty(ours.lake, [ONE], "events")
    in_order.tick()
    assert ours.ledger.holds.read_open("orders") == []
    commit_empty(ours.lake, [ONE], "rejects", "current")
    in_order.tick()
    assert in_order.kinds() == ["alert held", "recovery held"]


def test_a_slice_that_failed_on_and_on_and_is_held_since_is_reported_as_held(in_order: RepairAndAlerts) -> None:
    ours = in_order.ours
    ours.fail_often(ONE.key)
    in_order.tick()
    ours.ledger.holds.note("orders", ONE.key, FOUND, NOW)
    in_order.tick()
    assert sorted(in_order.kinds()) == ["alert held", "alert stalled", "recovery stalled"]


def test_slices_waiting_for_the_breaker_are_not_reported_as_stalled(in_order: RepairAndAlerts) -> None:
    open_breaker(in_order.ours.ledger, replace(OPEN, until=NOW.replace(year=2100)))
    in_order.ours.fail_often(ONE.key)
    in_order.tick()
    assert in_order.kinds() == []


def test_slices_that_wait_for_spark_are_one_alert_until_it_is_back(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were requested every hour, and nothing was reported before retention came near what Kafka keeps."""
    ours = Repairing(tmp_path, instance, [ONE, TWO])
    telling = RepairAndAlerts(tmp_path, ours, monkeypatch)
    for slice_ in (ONE, TWO):
        ours.fail_often(slice_.key)
    time.sleep(0.01)
    for slice_ in (ONE, TWO):
        report_failed_run(
            ours.instance,
            {**NAMED, "dagster/partition": slice_.key},
            "DependencyUnavailableError: Spark is unavailable",
        )
    telling.tick()
    telling.tick()
    assert telling.kinds() == ["alert stalled"]
    assert telling.heard[0].value.startswith("2 slices; ")
    commit_empty(ours.lake, [ONE], "raw", *ALL)
    telling.tick()
    assert telling.kinds() == ["alert stalled"], "one waits still"
    time.sleep(0.01)
    report_failed_run(ours.instance, {**NAMED, "dagster/partition": TWO.key}, "UnbalancedError: rows are missing")
    telling.tick()
    telling.tick()
    assert sorted(telling.kinds()) == ["alert retries exhausted", "alert stalled", "recovery stalled"]
