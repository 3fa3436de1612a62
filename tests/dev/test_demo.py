"""The demonstration: whole, interrupted, and what it decides by itself."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from rich.console import Console

from dev import dagster_questions, demo_report, demo_shipments
from dev.compare import Comparison
from dev.dagster_questions import (
    DagsterRefusedError,
    backfill_state,
    launch_backfill,
    launch_run,
    observed,
    read_slice_states,
    runs,
)
from dev.demo import SOUND, STREAMS, Demo, DemoFailedError, fresh_home, main, without_configuration
from dev.demo_burst import RECORDS, Burst, BurstFigures
from dev.demo_definitions import declared
from dev.demo_report import Figures
from dev.demo_shipments import WITH_ADDED, compare_shipments
from dev.processes import free_port, wait_until
from dev.reconcile import report
from dev.shipments import ADDED, BATCH, STREAM, first_batch, second_batch
from highwater.breaker import Circuit
from highwater.errors import ConfigurationError
from highwater.resources.jars import DownloadError
from highwater.resources.ledger import Ledger
from highwater.resources.ledger.breakers import Judgement
from highwater.slices import OffsetRange, Slice
from highwater.stream_files import load_streams

REPOSITORY = Path(__file__).resolve().parents[2]


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


def reported(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200)
    report(comparison, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_report_says_what_differs_and_how_often() -> None:
    comparison = Comparison("orders")
    comparison.faults["tombstone"]["tombstone"] += 3
    assert "no difference" in reported(comparison)
    for offset in range(7):
        comparison.differences.add("raw: lacks a record of the topic", f"0:{offset}", "[a]", None)
    text = reported(comparison)
    assert "no difference" not in text
    assert "raw: lacks a record of the topic" in text
    assert "7" in text
    assert "0:4: expected '[a]'" in text
    assert "0:5" not in text


class FakeDagsterAnswers:
    """Answers as Dagster's webserver gave them."""

    def __init__(self, **data: Any) -> None:
        self.data = data

    def __call__(self, query: str, variables: Any) -> dict[str, Any]:
        return self.data


def test_slices_are_read_from_dagsters_storage() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("orders_slices", ["orders@0000000", "orders@0000001"])
        for table in ("raw", "events"):
            event = dg.AssetMaterialization(dg.AssetKey(["orders", table]), partition="orders@0000000")
            instance.report_runless_asset_event(event)
        states = read_slice_states(instance, [("orders", "raw"), ("orders", "current"), ("payments", "raw")])
    assert states["orders", "raw"].materialised == {"orders@0000000"}
    assert states["orders", "raw"].missing == {"orders@0000001"}
    assert states["orders", "current"].missing == states["orders", "raw"].planned
    assert not states["payments", "raw"].planned


@pytest.mark.parametrize("question", ["_RUNS", "_OBSERVED", "_LAUNCH", "_BACKFILL"])
def test_questions_are_in_dagsters_words(question: str) -> None:
    from dagster_graphql.schema import create_schema
    from graphql import parse, validate

    assert validate(create_schema().graphql_schema, parse(getattr(dagster_questions, question))) == []


def test_observations_of_an_asset_are_read() -> None:
    shown = [("breaker", "open"), ("lag", None), ("breaker", "closed")]
    entries = [{"metadataEntries": [{"label": label, "text": text}]} for label, text in shown]
    answers = FakeDagsterAnswers(assetOrError={"__typename": "Asset", "assetObservations": entries})
    assert observed(answers, ("kafka", "payments"), "breaker") == ["open", "closed"]
    with pytest.raises(DagsterRefusedError, match="knows no asset kafka/payments"):
        observed(
            FakeDagsterAnswers(assetOrError={"__typename": "AssetNotFoundError"}), ("kafka", "payments"), "breaker"
        )


def test_the_demonstration_declares_shorter_waits_and_other_slices_and_nothing_else() -> None:
    """A deployment gets the declarations of `assets/streams`; its cool-down lasts longer than the demonstration."""
    shipped = load_streams()
    for stream in declared(7):
        theirs = shipped[stream.name]
        assert stream.breaker.cool_down < timedelta(minutes=1) < theirs.breaker.cool_down
        if stream.name == "orders":
            assert stream.limits == replace(theirs.limits, max_offsets=7, min_offsets=7)
            assert next(iter(stream.delays.values())) < next(iter(theirs.delays.values()))
        else:
            assert stream.limits == replace(theirs.limits, min_offsets=RECORDS)
        assert stream.tiers[1:] == theirs.tiers[1:]
        assert replace(stream, breaker=theirs.breaker, limits=theirs.limits, tiers=theirs.tiers) == theirs
        assert replace(stream.breaker, cool_down=theirs.breaker.cool_down) == theirs.breaker
    assert [stream.name for stream in declared(7)] == [*shipped]
    assert declared(7, registry=True) == [*declared(7), STREAM]
    assert shipped["payments"].breaker.min_records <= RECORDS == SOUND


def write_shipments(lake: Path, *, events: list[dict[str, Any]], current: list[dict[str, Any]]) -> None:
    """The tables as a run writes them, without a JVM."""
    import pyarrow as pa
    from deltalake import write_deltalake

    tables = {"raw": [{"slice": f"shipments@000000{n}"} for n in (0, 1)], "events": events, "current": current}
    for name, rows in tables.items():
        columns = dict.fromkeys(column for row in rows for column in row)
        write_deltalake(str(lake / "shipments" / name), pa.table({c: [row.get(c) for row in rows] for c in columns}))


def newest_shipments() -> list[dict[str, Any]]:
    rows = [*first_batch(), *second_batch()]
    return [*{row["shipment_id"]: row for row in rows}.values()]


def test_shipments_with_the_written_values_do_not_differ(tmp_path: Path) -> None:
    written = [*first_batch(), *second_batch()]
    write_shipments(tmp_path, events=written, current=newest_shipments())
    found = compare_shipments(written, str(tmp_path))
    assert not found.differences, found.differences
    assert found.numbers["slices"] == 2
    assert found.numbers["records written"] == found.numbers["events"] == 2 * BATCH
    assert found.numbers[WITH_ADDED] == BATCH
    assert found.numbers["rows of current"] == 3 * BATCH // 2


def test_every_kind_of_difference_of_shipments_is_found(tmp_path: Path) -> None:
    written = [*first_batch(), *second_batch()]
    events = [*written[1:], written[1]]
    old = {**newest_shipments()[0], "carrier": "AIR"}
    write_shipments(tmp_path, events=events, current=[old, *newest_shipments()[1:]])
    assert compare_shipments(written, str(tmp_path)).differences.counts == {
        "events: another number of rows than was written": 2,
        "current: other values than were written": 1,
    }


def test_a_column_that_was_not_added_is_a_difference(tmp_path: Path) -> None:
    def without(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != ADDED} for row in rows]

    written = [*first_batch(), *second_batch()]
    write_shipments(tmp_path, events=without(written), current=without(newest_shipments()))
    assert compare_shipments(written, str(tmp_path)).differences.counts == {
        "events: other values than were written": BATCH,
        "current: other values than were written": BATCH,
    }


def test_without_a_network_the_rest_is_shown_and_the_reason_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise DownloadError("Ivy could not fetch every jar", found="UnknownHostException: repo", remedy="connect")

    monkeypatch.setattr("dev.demo.jars.ensure", fail)
    console = Console(file=io.StringIO(), width=200)
    demo = Demo(tmp_path, console)
    assert not demo._fetch_registry()
    assert demo.streams == STREAMS
    assert isinstance(console.file, io.StringIO)
    shown = one_line(console.file.getvalue())
    assert "the schema registry could not be fetched: Ivy could not fetch every jar" in shown
    assert "UnknownHostException: repo" in shown
    assert "goes on without the stream shipments. To see it, connect the network and run `make demo` again." in shown
    demo_report.report(console, demo.figures, [Comparison("orders"), Comparison("payments")], tmp_path)
    assert "not shown: the schema registry could not be fetched" in one_line(console.file.getvalue())


def test_shipments_need_a_registry_that_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HIGHWATER_SCHEMA_REGISTRY_URL", raising=False)
    assert demo_shipments.main([]) == 1
    assert "no schema registry is configured" in capsys.readouterr().err
    monkeypatch.setenv("HIGHWATER_SCHEMA_REGISTRY_URL", f"http://127.0.0.1:{free_port()}")
    assert demo_shipments.main([]) == 1
    assert "gave no usable answer" in capsys.readouterr().err


class Following:
    """The burst of a demonstration on a ledger, with answers of Dagster, and what was asked of it."""

    def __init__(self, ledger: Ledger, parked: int) -> None:
        self.ledger, self.parked = ledger, parked
        self.asked: list[str] = []
        self.sound = 0
        self.burst = Burst(ledger, "nowhere:1", self.ask, self._write_sound)

    def _write_sound(self) -> None:
        self.sound += 1

    def ask(self, query: str, variables: Any) -> dict[str, Any]:
        self.asked.append(query.split()[1].partition("(")[0])
        tags = variables.get("filter", {}).get("tags", [])
        probe = [{"key": "dagster/asset_partition_range_start", "value": "payments@0000001"}, *tags]
        texts = ["closed since 10:01", "open since 10:00: x"]
        observations = [{"metadataEntries": [{"label": "breaker", "text": text}]} for text in texts]
        return {
            "runsOrError": {"__typename": "Runs", "results": [{"runId": "r", "status": "SUCCESS", "tags": probe}]},
            "launchRun": {"__typename": "LaunchRunSuccess", "run": {"runId": "r"}},
            "assetOrError": {"__typename": "Asset", "assetObservations": observations},
        }

    def plan(self, ordinal: int) -> None:
        ranges = {0: OffsetRange(ordinal * 1_200, (ordinal + 1) * 1_200)}
        self.ledger.add([Slice("payments", "payments", "A" * 22, 0, ordinal, ranges, NOW)])

    def store(self, circuit: Circuit, *judged: Judgement) -> None:
        self.ledger.breakers.update("payments", [], lambda *_: (circuit, judged))


NOW = datetime(2026, 3, 1, 10, tzinfo=UTC)
REFUSED = "payments@0000000"


def followed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, parked: int = 0) -> Following:
    """A burst whose slice the breaker has refused."""
    stored = {"payments.parked": dict.fromkeys(range(parked))} if parked else {}
    monkeypatch.setattr("dev.demo_burst.read_topics", lambda *_: stored)
    found = Following(ledger, parked)
    found.plan(0)
    found.burst.look()
    assert (found.burst.figures.slice_key, found.sound) == ("", 0), "nothing was refused yet"
    judged = Judgement(REFUSED, "payments", "run 7", NOW, records=1_200, rejects=1_200, refused=True)
    found.store(Circuit(since=NOW, why="1,200 of 1,200", until=NOW + timedelta(seconds=20)), judged)
    return found


def test_a_burst_is_accepted_and_followed_until_the_breaker_closes(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = followed(ledger, monkeypatch)
    assert not found.burst.refused("run 8"), "whatever else fails is a failure"
    assert found.burst.refused("run 7")
    assert (found.sound, [*ledger.breakers.read_accepted_slices([REFUSED])]) == (1, [REFUSED])
    found.burst.look()
    assert "Run" not in found.asked, "the probe's slice is planned first, or the breaker would close without one"
    found.plan(1)
    found.burst.look()
    found.burst.look()
    assert found.asked.count("Run") == 1
    assert not found.burst.over
    found.store(Circuit(since=NOW + timedelta(seconds=33)))
    found.burst.look()
    figures = found.burst.figures
    assert (found.burst.over, figures.seconds, figures.probes) == (True, 33.0, ("payments@0000001",))
    assert figures.status_line == "open since 10:00: x"
    figures.ends = Counter({"reject (malformed)": 1_200})
    assert figures.wrong == []
    text = messages(figures)
    for part in (
        "10:00:00 UTC: 1,200 of 1,200; 1,200 records of payments that nobody can read",
        "the breaker opened at payments@0000000 after 1,200 rejects of 1,200 records, 0 of them on payments.parked",
        "payments@0000001 was the probe; the breaker closed after 33 s",
        "the burst ended as 1,200 reject (malformed), on payments.parked",
    ):
        assert part in text


def test_unexpected_results_of_the_burst_are_reported(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    flooded = followed(ledger, monkeypatch, parked=3)
    flooded.burst.look()
    assert flooded.burst.figures.wrong == ["3 records stood on payments.parked while the breaker of payments was open"]
    lost = BurstFigures(records=5, ends=Counter({"reject (malformed)": 4}))
    assert lost.wrong == ["the burst of 5 records ended as {'reject (malformed)': 4}"]
    assert BurstFigures(closed=NOW).wrong == ["no observation of kafka/payments shows the open breaker"]
    assert Figures(burst=lost).wrong == lost.wrong
    assert "wrong: the burst of 5 records ended as" in messages(lost)


def messages(figures: BurstFigures) -> str:
    """The report, as one line of text."""
    console = Console(file=io.StringIO(), width=100)
    comparisons = [Comparison(stream, numbers=Counter(slices=2)) for stream in ("orders", "payments")]
    demo_report.report(console, Figures(burst=figures), comparisons, Path("home"))
    assert isinstance(console.file, io.StringIO)
    return one_line(console.file.getvalue())


def one_line(text: str) -> str:
    """What a table breaks into lines."""
    return " ".join(text.replace("│", " ").split())


def test_errors_of_dagster_are_not_taken_for_nothing() -> None:
    with pytest.raises(DagsterRefusedError, match="kaput"):
        runs(FakeDagsterAnswers(runsOrError={"__typename": "PythonError", "message": "kaput"}))
    with pytest.raises(DagsterRefusedError, match="kaput"):
        launch_backfill(
            FakeDagsterAnswers(launchPartitionBackfill={"__typename": "PythonError", "message": "kaput"}), [], [], ""
        )
    with pytest.raises(DagsterRefusedError, match="kaput"):
        launch_run(
            FakeDagsterAnswers(launchRun={"__typename": "PythonError", "message": "kaput"}), "payments_slice", {}
        )
    with pytest.raises(DagsterRefusedError):
        backfill_state(FakeDagsterAnswers(partitionBackfillOrError={"__typename": "BackfillNotFoundError"}), "b")


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
    ask = FakeDagsterAnswers(
        partitionBackfillOrError={"__typename": "PartitionBackfill", "status": status, "runs": listed, "error": None}
    )
    found = backfill_state(ask, "b")
    assert (found.done, found.failed) == (done, failed)


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_from_nothing_to_tables_that_equal_the_account(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = main(["--home", str(tmp_path / "demo"), "--scale", "0.1", "--deadline", "2400"])
    output_ = capfd.readouterr()
    assert status == 0, output_.out + output_.err
    assert output_.out.count("no difference") == 3
    assert "backfill" in output_.out
    text = one_line(output_.out)
    assert f"the second schema of shipments added the column {ADDED} while slices were materialised" in text
    assert f"{2 * BATCH} events" in text
    assert f"{BATCH} {WITH_ADDED}" in text
    opened = "the breaker opened at payments@0000000 after 1,200 rejects of 1,200 records, 0 of them on payments.parked"
    assert opened in text
    assert "kafka/payments shows that the breaker is open" in text
    assert "payments@0000001 was the probe; the breaker closed after" in text
    assert "the burst ended as 1,200 reject (malformed), on payments.parked" in text


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
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
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
        generator = home / "generator" / "orders.sqlite"
        wait_until(lambda: demo.poll() is not None or generator.exists(), 120, "the generator's start")
        assert demo.poll() is None, demo.communicate()[0].decode()
        assert len(descendants_of(str(home))) > 2
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=300)
    finally:
        demo.kill()
    # A shell reports both as 130. Python ends itself by the signal when it arrived in code compiled from a string.
    assert demo.returncode in (130, -signal.SIGINT), output.decode()
    assert b"interrupted" in output
    wait_until(lambda: descendants_of(str(home)) == [], 30, "the end of all that it started")
