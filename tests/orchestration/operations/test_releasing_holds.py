"""Held slices as an operator sees and releases them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from highwater.errors import (
    ConfigurationError,
    UnknownSliceError,
)
from highwater.holds import Release
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.main import main
from highwater.orchestration.metadata import build_hold_metadata
from highwater.orchestration.operations.releasing_holds import ReleaseRequest, release_slice
from highwater.orchestration.reporting import alert_conditions, alert_inputs
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.reporting.prometheus_metrics import MetricSamples, _measure_holds
from highwater.orchestration.sensing.ordered_processing import (
    format_hold_lines,
)
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.helpers.holding import FOUND, NOON, STREAM
from tests.helpers.racing import write_before
from tests.helpers.repairing import ONE, TWO, open_breaker
from tests.helpers.support import make_stream


def test_a_hold_is_reported_everywhere(ledger: Ledger, tmp_path: Path) -> None:
    from dev.processes import LOOPBACK, free_port

    nothing: Any = None
    measured = alert_conditions._measure_holds(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    assert measured is not None
    assert not measured.over
    assert alert_conditions._measure_holds in alert_conditions.CONDITIONS
    assert build_hold_metadata(STREAM, [])["held"].value == "nothing is held"
    assert build_hold_metadata(make_stream("orders"), []) == {}
    ledger.add([TWO])
    hold = ledger.holds.note("orders", TWO.key, FOUND, NOON)
    text = (
        "orders@0000002 is held since 2026-03-01 12:00:00 UTC by 3 records, the first is orders partition 2 offset 41, "
        "unresolved: customer_id is not in reference/customers; attempt 1 at 12:00:00"
    )
    measured = alert_conditions._measure_holds(alert_inputs.StreamInputs(ledger, nothing, nothing, STREAM))
    assert measured is not None
    assert (measured.over, measured.value) == (True, text)
    assert "highwater release-hold orders@0000002 sends" in measured.remedy
    status = read_stream_status(ledger, Kafka(f"{LOOPBACK}:{free_port()}"), STREAM, {})
    assert f"  {text}; fix it, or highwater release-hold orders@0000002" in status.lines
    [plain] = status.to_plain()["holds"]
    assert plain["first_origin"] == {"topic": "orders", "generation": 0, "partition": 2, "offset": 41}
    assert (plain["slice"], plain["records"], plain["attempts"], plain["release"]) == (TWO.key, 3, 1, None)
    explained = explain(ledger, Lake(str(tmp_path / "lake")), STREAM, TWO.key, None)
    assert text in explained.lines
    assert explained.to_plain()["hold"] == plain
    found = MetricSamples()
    _measure_holds(found, ledger, STREAM)
    assert found.samples["highwater_held_slices"] == [(("orders",), 1)]
    assert found.samples["highwater_held_records"] == [(("orders",), 3)]
    assert build_hold_metadata(STREAM, [hold])["held"].value == text
    assert any(text in line for line in format_hold_lines([hold]))


def test_a_person_releases_a_slice_under_a_name(ledger: Ledger, url: str) -> None:
    from highwater.stream_files import load_streams

    ledger.add([ONE, TWO])
    assert "orders" in load_streams()
    ledger.holds.note("orders", TWO.key, FOUND, NOON)

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["release-hold", *arguments], env={"HIGHWATER_LEDGER_URL": url})

    dry = run(TWO.key)
    assert dry.exit_code == 0, dry.output
    assert "orders@0000002 is held since" in dry.output
    assert "would go to orders.dlq.1" in dry.output
    assert [hold.release for hold in ledger.holds.read_open("orders")] == [None]
    assert "needs the name of the person" in run(TWO.key, "--yes", "--by", "").output
    assert run("orders@0000099", "--yes", "--by", "ann").exit_code == 2
    assert "orders@0000001 is not held" in run(ONE.key, "--yes", "--by", "ann").output
    done = run(TWO.key, "--park", "--yes", "--by", "ann", "--because", "unknown customer", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["done"] is True
    released = ledger.holds.read_for_slices([TWO.key])[TWO.key].release
    assert released is not None
    assert (released.park, released.by, released.because) == (True, "ann", "unknown customer")
    assert "was released before" in run(TWO.key, "--yes", "--by", "bob").output


def test_the_job_does_what_the_command_does(ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.add([ONE])
    ledger.holds.note("orders", ONE.key, FOUND, NOON)
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)
    job = build_defs(streams=[STREAM]).get_job_def("release_hold")
    asked = {"stream": "orders", "slice": ONE.key, "dry_run": False, "by": "ann", "because": "test data", "park": True}
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=asked).success
    released = ledger.holds.read_for_slices([ONE.key])[ONE.key].release
    assert released is not None
    assert (released.by, released.park) == ("ann", True)


def test_a_release_names_the_breaker_that_the_slice_waits_for(ledger: Ledger) -> None:
    ledger.add([ONE, TWO])
    said: list[str] = []
    for slice_ in (ONE, TWO):
        ledger.holds.note("orders", slice_.key, FOUND, NOON)
        asked = ReleaseRequest(slice_.key, dry_run=False, by="ann")
        release_slice(ledger, {"orders": STREAM}, asked, NOON, lambda line: said.append(str(line)))
        assert ("waits for the breaker of orders" in said[-1]) == (slice_ == TWO)
        open_breaker(ledger)


def test_invalid_releases_are_reported(ledger: Ledger) -> None:
    ledger.add([ONE])
    for asked, stream, error in (
        (ReleaseRequest(ONE.key, dry_run=False), "orders", ConfigurationError),
        (ReleaseRequest(ONE.key), "payments", ConfigurationError),
        (ReleaseRequest("orders@0000009"), "orders", UnknownSliceError),
    ):
        with pytest.raises(error):
            release_slice(ledger, {stream: STREAM}, asked, NOON, lambda _: None)


@pytest.mark.slow
def test_a_release_is_not_lost_by_an_attempt_at_the_same_time(postgresql: Callable[[], str]) -> None:
    """The attempt had read the hold before and wrote it back; PostgreSQL, unlike SQLite, lets others write then."""
    url = postgresql()
    ledger, other = Ledger(url), Ledger(url)
    ledger.holds.note("orders", TWO.key, FOUND, NOON)
    release = Release(False, "ann", "fixed", NOON + timedelta(minutes=1))
    releases = write_before(
        ledger, ("DELETE FROM holds", "UPDATE holds"), lambda: other.holds.release(TWO.key, release)
    )
    later = replace(FOUND, records=FOUND.records + 1)
    found = ledger.holds.note("orders", TWO.key, later, NOON + timedelta(minutes=2))
    assert releases == [True]
    assert ledger.holds.read_for_slices([TWO.key])[TWO.key] == found
    assert (found.release, found.attempts, found.found, found.since) == (release, 2, later, NOON)
