"""After its last attempt a slice raises an alert, and is not requested until a person releases it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from highwater.alerting import Condition
from highwater.errors import ConfigurationError
from highwater.orchestration.cli.main import main
from highwater.orchestration.operations.retrying_slices import RetryRequest, release_for_retries
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.status_report import StreamStatus
from highwater.orchestration.sensing import repairing
from highwater.orchestration.sensing.run_requests import PastRun, RepairRules, decide_repair
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.exhausted_slices import ExhaustedSlice
from tests.helpers.breaking import open_repairing
from tests.helpers.commits import commit_empty
from tests.helpers.racing import write_before
from tests.helpers.repairing import NAMED, ONE, STREAM, TWO, Repairing
from tests.helpers.support import report_failed_run

NOW = datetime(2026, 3, 1, tzinfo=UTC)
RULES = RepairRules()


def test_exhausted_slices_are_not_requested_however_old_their_runs() -> None:
    """It was requested again after a day, and so on for ever."""
    missing = {"a": NOW - timedelta(days=9), "b": NOW - timedelta(days=9)}
    found = decide_repair(missing, [], NOW, RULES, exhausted=["a"])
    assert (found.exhausted_slices, [*found.due]) == (("a",), ["b"])


def test_a_patient_slice_waits_its_longest_time_however_often_it_failed() -> None:
    runs = [PastRun(frozenset({"a"}), NOW - timedelta(minutes=30 + n)) for n in range(20)]
    missing = {"a": NOW - timedelta(days=9)}
    found = decide_repair(missing, runs, NOW, RULES, patient=["a"])
    assert found.waiting == {"a": NOW + timedelta(minutes=30)}
    assert decide_repair(missing, runs, NOW + timedelta(hours=1), RULES, patient=["a"]).due == {"a": 21}


@pytest.mark.slow
def test_a_release_is_not_lost_by_a_tick_at_the_same_time(postgresql: Callable[[], str]) -> None:
    """The tick had seen no row, and deleted that of the release before it wrote its own."""
    url = postgresql()
    ledger, other = Ledger(url), Ledger(url).exhausted_slices
    ledger.exhausted_slices.add("orders", {"b": 6}, NOW)
    writes = "DELETE FROM exhausted_slices", "INSERT INTO exhausted_slices"
    done = write_before(ledger, writes, lambda: other.release_any("orders", "a", by="ann", because="fixed", now=NOW))
    ledger.exhausted_slices.add("orders", {"a": 6, "b": 6}, NOW + timedelta(hours=1))
    assert done
    assert other.read_release_times(["a", "b"]) == {"a": NOW}


def test_the_first_time_stays_and_a_release_ends_it(tmp_path: Path) -> None:
    stored = Ledger(f"sqlite:///{tmp_path / 'l.sqlite'}").exhausted_slices
    stored.add("orders", {"a": 6, "b": 7}, NOW)
    stored.add("orders", {"a": 9}, NOW + timedelta(hours=1))
    assert stored.read_open("orders") == [ExhaustedSlice("a", NOW, 6), ExhaustedSlice("b", NOW, 7)]
    assert stored.read_open("payments") == []
    assert stored.release("a", by="ann", because="fixed", now=NOW + timedelta(hours=2))
    assert not stored.release("a", by="bob", because="too", now=NOW + timedelta(hours=3))
    assert [one.slice_key for one in stored.read_open("orders")] == ["b"]
    stored.end(["a", "b"])
    assert stored.read_for_slices(["a", "b"]) == {"a": ExhaustedSlice("a", NOW, 6, NOW + timedelta(hours=2))}, (
        "the record of a person stays"
    )
    stored.add("orders", {"a": 6}, NOW + timedelta(hours=4))
    assert stored.read_open("orders") == [ExhaustedSlice("a", NOW + timedelta(hours=4), 6)]


@pytest.fixture
def repairing_(tmp_path: Path) -> Iterator[Repairing]:
    with open_repairing(tmp_path, slices=[ONE, TWO], in_raw=2) as made:
        made.fail_often(ONE.key)
        yield made


def measured(ours: Repairing) -> Any:
    unused: Any = None
    return alert_conditions._measure_exhausted_slices(alert_inputs.StreamInputs(ours.ledger, unused, unused, STREAM))


def test_a_slice_that_fails_again_and_again_is_an_alert_and_stays_exhausted(
    repairing_: Repairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = repairing_
    text = "no slice is exhausted"
    none = Condition("orders", "retries exhausted", text, text, over=False, remedy="no action needed")
    assert measured(ours) == none
    requests, tick = ours.tick()
    assert requests == [([TWO.key], False, "repair")]
    assert f"1 exhausted after {repairing.RULES.most_runs} runs, look at them: {ONE.key}" in tick.message
    alert = measured(ours)
    assert alert.over
    assert alert.remedy == (
        f"highwater explain {ONE.key} shows its runs: fix what they fail by, then materialise it, or "
        f"highwater retry-slice {ONE.key}"
    )
    assert alert.value.startswith(f"1 slices; {ONE.key} is exhausted since ")
    monkeypatch.setattr(
        repairing, "read_past_runs", lambda *_: []
    )  # a day later Dagster is asked for none of these runs
    assert ours.tick()[0] == [([TWO.key], False, "repair")]
    reported = explain(ours.ledger, ours.lake, STREAM, ONE.key, None)
    assert any("is exhausted since" in line for line in reported.lines)
    assert reported.to_plain()["exhausted_slice"]["runs"] == repairing.RULES.most_runs
    status = StreamStatus(
        "orders", "orders", 2, 0, "A", exhausted_slices=ours.ledger.exhausted_slices.read_open("orders")
    )
    assert any(f"highwater retry-slice {ONE.key}" in line for line in status.lines)
    assert [one["slice"] for one in status.to_plain()["exhausted_slices"]] == [ONE.key]


def test_a_person_lets_it_be_tried_again(repairing_: Repairing, tmp_path: Path) -> None:
    ours = repairing_
    ours.tick()

    def run(*arguments: str) -> Any:
        url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        return CliRunner().invoke(main, ["retry-slice", ONE.key, *arguments], env={"HIGHWATER_LEDGER_URL": url})

    assert "a dry run: nothing was recorded" in run().output
    assert run("--yes", "--by", "").exit_code == 2, "needs the name of the person"
    assert ([ONE.key], False, "repair") not in ours.tick()[0]
    time.sleep(0.01)  # the runs ended before it was released
    done = run("--yes", "--by", "ann")
    assert (done.exit_code, "the sensor repair requests it" in done.output) == (0, True), done.output
    assert not measured(ours).over
    asked = [key for keys, _, _ in ours.tick()[0] for key in keys]
    assert asked == [ONE.key, TWO.key]
    with pytest.raises(ConfigurationError, match="is not exhausted"):
        release_for_retries(ours.ledger, {"orders": STREAM}, RetryRequest(ONE.key), NOW, print)
    with pytest.raises(ConfigurationError, match="is no slice of payments"):
        release_for_retries(ours.ledger, {"payments": STREAM}, RetryRequest(ONE.key), NOW, print)
    ours.fail_often(ONE.key)
    ours.tick()
    assert measured(ours).over, "what fails again is exhausted again"


@pytest.mark.parametrize("during", ["read_past_runs", "_update_exhausted_slices", "_decide"])
def test_a_release_during_a_tick_is_not_undone(
    repairing_: Repairing, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick that had begun before gave the slice up again, and what the person decided was forgotten."""
    ours = repairing_
    ours.tick()
    time.sleep(0.01)
    step = getattr(repairing, during)

    def released(*asked: Any) -> Any:
        found = step(*asked)
        assert ours.ledger.exhausted_slices.release(ONE.key, by="ann", because="fixed", now=datetime.now(UTC))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(repairing, during, released)
        ours.tick()
    assert not measured(ours).over
    asked = [key for keys, _, _ in ours.tick()[0] for key in keys]
    assert asked == [ONE.key, TWO.key]


def test_a_slice_that_somebody_materialised_is_abandoned_no_more(repairing_: Repairing) -> None:
    ours = repairing_
    ours.tick()
    assert measured(ours).over
    commit_empty(ours.lake, [ONE], "events", "rejects", "current")
    ours.tick()
    assert not measured(ours).over


@pytest.mark.parametrize(
    ("text", "exhausted"),
    [("DependencyUnavailableError: Spark is unavailable", False), ("UnbalancedError: rows are missing", True)],
    ids=["Spark is unavailable", "the slice's own fault"],
)
def test_slices_that_fail_while_spark_is_unavailable_are_not_exhausted(
    repairing_: Repairing, text: str, exhausted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = repairing_
    time.sleep(0.01)
    report_failed_run(ours.instance, {**NAMED, "dagster/partition": ONE.key}, text)
    _, tick = ours.tick()
    assert measured(ours).over == exhausted
    assert ("waiting for the next attempt" in tick.message) != exhausted


def test_log_of_a_run_is_read_once_while_its_slice_waits(
    repairing_: Repairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Spark was unavailable each tick read a log for every slice."""
    ours = repairing_
    time.sleep(0.01)
    report_failed_run(
        ours.instance, {**NAMED, "dagster/partition": ONE.key}, "DependencyUnavailableError: Spark is unavailable"
    )
    read: list[str] = []
    all_logs = dg.DagsterInstance.all_logs

    def counted(instance: dg.DagsterInstance, run_id: str, **asked: Any) -> Any:
        read.append(run_id)
        return all_logs(instance, run_id, **asked)

    monkeypatch.setattr(dg.DagsterInstance, "all_logs", counted)
    for _ in range(3):
        assert f"1 waiting for the next attempt: {ONE.key}" in ours.tick()[1].message
    assert len(read) == 1
    report_failed_run(ours.instance, {**NAMED, "dagster/partition": ONE.key}, "UnbalancedError: rows are missing")
    ours.tick()
    assert measured(ours).over, "another run is another answer"
    assert len(read) == 2
