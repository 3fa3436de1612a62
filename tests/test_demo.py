"""The demonstration: whole, interrupted, and what it decides by itself."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dev.compare import Comparison
from dev.dagster_questions import DagsterRefusedError, backfill_state, launch_backfill, runs, slice_states
from dev.demo import DemoFailedError, fresh_home, main, without_configuration
from dev.processes import wait_until
from dev.reconcile import report
from highwater.errors import ConfigurationError

REPOSITORY = Path(__file__).parent.parent


def test_nothing_that_is_configured_is_written_to() -> None:
    environment = {
        "HIGHWATER_KAFKA_BOOTSTRAP": "production:9092",
        "HIGHWATER_LAKE": "s3://production",
        "SPARK_REMOTE": "sc://production",
        "HIGHWATER_SPARK_MASTER": "spark://production",
        "DAGSTER_HOME": "/production",
        "PATH": "/bin",
    }
    assert without_configuration(environment) == {"PATH": "/bin"}


def test_the_home_is_emptied(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    home.mkdir()
    (home / "left").write_text("over")
    assert list(fresh_home(home).iterdir()) == []


def test_the_home_of_a_running_stack_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "stack.busy").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match="another demonstration runs"):
            fresh_home(tmp_path)
        assert (tmp_path / "stack.busy").exists()
    fresh_home(tmp_path)
    assert not (tmp_path / "stack.busy").exists()


def told(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200)
    report(comparison, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_report_says_what_differs_and_how_often() -> None:
    comparison = Comparison("orders")
    comparison.faults["tombstone"]["tombstone"] += 3
    assert "no difference" in told(comparison)
    for offset in range(7):
        comparison.differences.add("raw: lacks a record of the topic", f"0:{offset}", "[a]", None)
    text = told(comparison)
    assert "no difference" not in text
    assert "raw: lacks a record of the topic" in text
    assert "7" in text
    assert "0:4: expected '[a]'" in text
    assert "0:5" not in text


class Answers:
    """Answers as Dagster's webserver gave them."""

    def __init__(self, **data: Any) -> None:
        self.data = data

    def __call__(self, query: str, variables: Any) -> dict[str, Any]:
        return self.data


def test_states_of_slices_are_read() -> None:
    statuses = {
        "materializedPartitions": ["orders@0000000"],
        "materializingPartitions": [],
        "failedPartitions": ["orders@0000001"],
        "unmaterializedPartitions": [],
    }
    ask = Answers(a0={"__typename": "AssetNode", "assetPartitionStatuses": statuses})
    found = slice_states(ask, [("orders", "raw")])["orders", "raw"]
    assert found.planned == {"orders@0000000", "orders@0000001"}
    assert found.failed == {"orders@0000001"}
    with pytest.raises(DagsterRefusedError, match="knows no asset orders/nothing"):
        slice_states(Answers(a0={"__typename": "AssetNotFoundError"}), [("orders", "nothing")])


def test_errors_of_dagster_are_not_taken_for_nothing() -> None:
    with pytest.raises(DagsterRefusedError, match="kaput"):
        runs(Answers(runsOrError={"__typename": "PythonError", "message": "kaput"}))
    with pytest.raises(DagsterRefusedError, match="kaput"):
        launch_backfill(Answers(launchPartitionBackfill={"__typename": "PythonError", "message": "kaput"}), [], [], "")
    with pytest.raises(DagsterRefusedError):
        backfill_state(Answers(partitionBackfillOrError={"__typename": "BackfillNotFoundError"}), "b")


@pytest.mark.parametrize(
    ("status", "of_runs", "done", "failed"),
    [
        ("REQUESTED", [], False, False),
        ("REQUESTED", ["STARTED"], False, False),
        ("REQUESTED", ["SUCCESS", "QUEUED"], False, False),
        ("REQUESTED", ["SUCCESS", "SUCCESS"], True, False),
        ("REQUESTED", ["SUCCESS", "FAILURE"], False, True),
        ("REQUESTED", ["FAILURE again", "SUCCESS"], True, False),
        ("REQUESTED", ["FAILURE again"], False, False),
        ("FAILED", [], False, True),
    ],
)
def test_a_backfill_is_done_when_its_runs_are(status: str, of_runs: list[str], done: bool, failed: bool) -> None:
    retried = [{"key": "dagster/will_retry", "value": "true"}]
    listed = [
        {"runId": str(n), "status": run.split()[0], "tags": retried if " " in run else []}
        for n, run in enumerate(of_runs)
    ]
    ask = Answers(
        partitionBackfillOrError={"__typename": "PartitionBackfill", "status": status, "runs": listed, "error": None}
    )
    found = backfill_state(ask, "b")
    assert (found.done, found.failed) == (done, failed)


@pytest.mark.slow
def test_from_nothing_to_tables_that_equal_the_account(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["--home", str(tmp_path / "demo"), "--scale", "0.1", "--deadline", "500"])
    told_ = capfd.readouterr()
    assert status == 0, told_.out + told_.err
    assert told_.out.count("no difference") == 2
    assert "backfill" in told_.out


def test_a_difference_is_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Comparison("orders")
    wrong.differences.add("raw: lacks a record of the topic", "0:0")

    def run(_: object) -> list[Comparison]:
        return [wrong]

    monkeypatch.setattr("dev.demo.Demo.run", run)
    assert main(["--home", str(tmp_path / "demo")]) == 1


def test_a_failure_is_an_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise DemoFailedError("1 runs failed", found="run 7", remedy="read the log")

    monkeypatch.setattr("dev.demo.Demo.run", fail)
    assert main(["--home", str(tmp_path / "demo")]) == 1
    assert "1 runs failed; found: run 7" in capsys.readouterr().err


def descendants_of(marker: str) -> list[int]:
    """Processes whose command or environment names the folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if marker.encode() in text and state != "Z":
                found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    home = tmp_path / "demo"
    demo = subprocess.Popen(
        [sys.executable, "-m", "dev.demo", "--home", str(home), "--scale", "0.1"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until((home / "generator" / "orders.sqlite").exists, 120, "the generator's start")
        assert len(descendants_of(str(home))) > 2
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130, output.decode()
    assert b"interrupted" in output
    deadline = time.monotonic() + 10
    while descendants_of(str(home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert descendants_of(str(home)) == []
