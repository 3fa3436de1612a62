"""Log lines as JSON: every line of a run and of a tick, with the fields by which a collector finds them."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dev.paths import REPOSITORY
from dev.processes import LOOPBACK, free_port
from highwater.assets.commit import Clock
from highwater.errors import ConfigurationError
from highwater.log_fields import bind_log_fields, build_slice_fields
from highwater.orchestration import log_lines
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.checks import build_evaluation
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from highwater.resources.ledger import Ledger
from highwater.settings import LOG_FORMAT
from highwater.slices import OffsetRange, Slice
from tests.helpers.pages import find_rows, find_section, find_spans
from tests.helpers.support import make_stream

STREAM = make_stream("orders")
KEYS = ["orders@0000007", "orders@0000008"]


@pytest.fixture
def json_lines() -> Iterator[None]:
    """What a process of Dagster's has done when it has loaded the definitions."""
    before = logging.getLoggerClass()
    log_lines.install({LOG_FORMAT: "json"})
    yield
    logging.setLoggerClass(before)


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", f"{LOOPBACK}:{free_port()}")
    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as made:
        yield made


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was written to the console; every line of it is JSON, and has no field that the page does not name."""
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    named = {name for row in find_rows(find_section("docs/operations.md", "Logs")) for name in find_spans(row[0])}
    assert {name for line in found for name in line} <= named
    return found


class FailingSpark(dg.ConfigurableResource[Any]):
    """Fails the step when it asks for a session."""

    def get_session(self) -> None:
        raise ConfigurationError("there is no Spark", remedy="none")

    def interrupt(self) -> None:
        """Nothing to stop."""


@pytest.mark.usefixtures("json_lines")
def test_every_line_of_a_run_is_json_and_names_stream_slices_and_run(
    instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slices = [Slice("orders", "orders", "A" * 22, 0, n, {0: OffsetRange(n, n + 1)}, datetime.now(UTC)) for n in (7, 8)]
    assert Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}").add(slices)
    instance.add_dynamic_partitions(STREAM.partitions_name, KEYS)
    tags = {RANGE_START: KEYS[0], RANGE_END: KEYS[1], "highwater/stream": "orders"}
    job = build_defs(streams=[STREAM], resources={"spark": FailingSpark()}).resolve_job_def("orders_slice")
    run = job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
    found = lines(capsys)
    assert len(found) > 5
    assert {line["run"] for line in found} == {run.run_id}
    assert {(line["stream"], line["slices"]) for line in found} == {("orders", f"{KEYS[0]} .. {KEYS[1]}")}
    assert all(datetime.fromisoformat(line["timestamp"]).tzinfo == UTC for line in found)
    [ours] = [line for line in found if line["message"].startswith("2 slices of orders, 2 offsets")]
    assert (ours["table"], ours["level"], ours["job"]) == ("raw", "info", "orders_slice")
    [failed] = [line for line in found if line.get("dagster_event") == "STEP_FAILURE"]
    assert (failed["level"], failed["step"]) == ("error", "orders__raw")
    assert "there is no Spark" in failed["error"]
    assert not failed["message"].startswith("orders_slice"), "the text has Dagster's prefix, whose parts are fields"


@pytest.mark.usefixtures("json_lines")
def test_a_slice_that_is_done_is_reported_with_its_numbers_and_the_seconds_of_its_phases(
    instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `materialise_slices` does it, without Spark: fields, a phase, and the metadata of each slice."""
    partitions = dg.StaticPartitionsDefinition(KEYS)
    clock = Clock()

    @dg.asset(key=["orders", "raw"], partitions_def=partitions)
    def raw(context: dg.AssetExecutionContext) -> None:
        with (
            bind_log_fields(stream="orders", table="raw", **build_slice_fields(context.partition_keys)),
            clock.phase("commit"),
        ):
            context.log.info("raw: committing %s slices", 2)
        for key in context.partition_keys:
            numbers: dict[str, Any] = {"dagster/partition_row_count": 12, "seconds/read": 1.25, "note": "as it was"}
            context.add_asset_metadata(numbers, partition_key=key)

    job = dg.Definitions(assets=[raw], jobs=[dg.define_asset_job("j", [raw])]).resolve_job_def("j")
    assert job.execute_in_process(instance=instance, tags={RANGE_START: KEYS[0], RANGE_END: KEYS[1]}).success
    found = lines(capsys)
    [progress] = [line for line in found if line["message"] == "raw: committing 2 slices"]
    assert (progress["phase"], progress["stream"], progress["table"]) == ("commit", "orders", "raw")
    done = [line for line in found if line.get("dagster_event") == "ASSET_MATERIALIZATION"]
    assert sorted((line["asset"], line["slice"]) for line in done) == [("orders/raw", key) for key in KEYS]
    assert [line["seconds"] for line in done] == [{"read": 1.25}] * 2
    assert done[0]["numbers"] == {"dagster/partition_row_count": 12}
    assert all("phase" not in line for line in found if line is not progress)


@pytest.mark.usefixtures("json_lines")
def test_a_red_check_is_reported_with_its_slice(
    instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CheckResult(passed=False, text="of 3 keys 1 are absent", numbers={"absent": 1})

    @dg.asset(
        key=["orders", "current"],
        check_specs=[dg.AssetCheckSpec("versions_in_order", asset=["orders", "current"])],
    )
    def current() -> Iterator[Any]:
        yield dg.MaterializeResult()
        yield build_evaluation(STREAM, "current", "versions_in_order", KEYS[0], result)

    dg.materialize([current], instance=instance, raise_on_error=False)
    [reported] = [line for line in lines(capsys) if line.get("dagster_event") == "ASSET_CHECK_EVALUATION"]
    assert (reported["check"], reported["passed"], reported["slice"]) == ("versions_in_order", False, KEYS[0])
    assert (reported["found"], reported["numbers"]["absent"]) == ("of 3 keys 1 are absent", 1)


@pytest.mark.usefixtures("json_lines")
def test_a_tick_names_its_sensor(instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str]) -> None:
    defs = build_defs(streams=[STREAM])
    for name in ("planner", "alerts"):
        context = dg.build_sensor_context(
            instance=instance, resources=defs.resources, sensor_name=name, repository_name="highwater"
        )
        with context as opened:
            defs.get_repository_def().get_sensor_def(name).evaluate_tick(opened)
    found = lines(capsys)
    [planner] = [line for line in found if line["tick"] == "planner"]
    assert planner["level"] == "warning"
    assert "did not answer" in planner["message"]
    assert {line["tick"] for line in found} == {"planner", "alerts"}


@pytest.mark.slow
def test_a_process_that_loads_the_definitions_writes_json(tmp_path: Path) -> None:
    """From its first line on: the definitions are loaded before a run has a logger. The slice was never planned."""
    environment = {**os.environ, "DAGSTER_HOME": str(tmp_path), "HIGHWATER_HOME": str(tmp_path), LOG_FORMAT: "json"}
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        instance.add_dynamic_partitions("orders_slices", KEYS[:1])
    command = [str(Path(sys.executable).parent / "dagster"), "asset", "materialize", "-m", "orchestration.definitions"]
    command += ["--select", "key:orders/raw", "--partition", KEYS[0]]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [line for line in done.stderr.splitlines() if " - dagster - " in line] == []
    assert {line["slice"] for line in found} == {KEYS[0]}
    kinds = [line["dagster_event"] for line in found if "dagster_event" in line]
    assert kinds[0] == "PIPELINE_START"  # as Dagster still calls it
    assert "UnknownSliceError" in next(line["error"] for line in found if line.get("dagster_event") == "STEP_FAILURE")


def test_an_exception_and_a_value_that_is_no_json_stay_one_line() -> None:
    error = ValueError("two\nlines")
    reported = (ValueError, error, None)
    record = logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "%s failed", (Path("a"),), reported)
    with bind_log_fields(slice=Path("b")):
        text = log_lines.build_formatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["slice"], line["level"]) == ("a failed", "b", "error")
    assert "two\nlines" in line["exception"]


def test_a_process_that_was_not_asked_writes_as_before(
    instance: dg.DagsterInstance, capsys: pytest.CaptureFixture[str]
) -> None:
    before = logging.getLoggerClass()
    for asked in ({}, {LOG_FORMAT: ""}, {LOG_FORMAT: "text"}):
        log_lines.install(asked)
    assert logging.getLoggerClass() is before

    @dg.asset
    def anything() -> None:
        return

    dg.materialize([anything], instance=instance)
    assert " - dagster - DEBUG - " in capsys.readouterr().err


def test_another_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="found: yaml; remedy: set it to text or json"):
        log_lines.install({LOG_FORMAT: "yaml"})


def test_loading_the_definitions_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever process of Dagster's loads them writes runs or ticks."""
    from orchestration.definitions import defs

    monkeypatch.setenv(LOG_FORMAT, "yaml")
    with pytest.raises(ConfigurationError, match=LOG_FORMAT):
        defs()
