"""Every record is accounted for although processes were killed all the time."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dev.compare import Comparison
from dev.kills import Victim, schedule
from dev.soak import Ordeal, Soak, SoakResult, main, report
from highwater.errors import TemporaryError


def test_a_seed_decides_what_is_killed_and_when() -> None:
    kills = [*schedule(7, 40, 2.0, 5.0)]
    assert kills == [*schedule(7, 40, 2.0, 5.0)]
    assert kills != [*schedule(8, 40, 2.0, 5.0)]
    assert len(kills) == 40
    assert {kill.victim for kill in kills[:4]} == {*Victim}
    assert all(2.0 <= kill.after <= 5.0 for kill in kills)
    workers = sum(kill.victim is Victim.WORKER for kill in schedule(7, 1000, 0, 1))
    assert 500 < workers < 700


def test_records_are_written_for_as_long_as_processes_are_killed() -> None:
    assert Ordeal(records=1000, kills=10, least=2, most=8).rate == 20
    assert Ordeal(records=1000, kills=0).rate == 1000


def test_spark_is_to_start_quickly_where_it_is_killed_often() -> None:
    assert Ordeal(records=50_000, kills=0).short_lived
    assert Ordeal(records=1_000_000, kills=100).short_lived
    assert not Ordeal(records=1_000_000, kills=0).short_lived


def test_faults_are_reported_and_set_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), width=200)
    comparison = Comparison("orders")
    comparison.differences.add("raw: lacks a record of the topic", "0:0")
    result = SoakResult([comparison], {"broker": 2}, wrong=["orders: differences"])
    report(console, Ordeal(seed=9), result)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("seed 9", "2 x broker", "wrong: orders: differences", "raw: lacks a record"):
        assert part in text
    monkeypatch.setattr("dev.soak.Soak.run", lambda _: result)
    assert main(["--home", str(tmp_path / "soak"), "--records", "5"]) == 1
    monkeypatch.setattr("dev.soak.Soak.run", lambda _: SoakResult())
    assert main(["--home", str(tmp_path / "soak")]) == 0

    def fail(_: object) -> None:
        raise TemporaryError("too slow", found="a slice", remedy="wait")

    monkeypatch.setattr("dev.soak.Soak.run", fail)
    assert main(["--home", str(tmp_path / "soak")]) == 1
    assert "too slow" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_every_record_is_accounted_for_after_kills(tmp_path: Path) -> None:
    """Of workers, daemon, broker and Spark, while every fault is written; compared with an account of its own.

    `make test` kills clients, server, workers and daemon one by one: `test_crashes`, `test_crashes_daemon`, `test_s3`.
    """
    records, kills = 50_000, 10
    ordeal = Ordeal(records, kills, least=4, most=10, settle=1800)
    result = Soak(tmp_path / "soak", Console(width=200), ordeal).run()
    assert result.wrong == []
    assert sum(result.killed.values()) == kills
    assert len(result.killed) == len(Victim)
    assert sum(comparison.numbers["records in the topic"] for comparison in result.comparisons) >= 0.98 * records
