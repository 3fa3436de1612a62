"""The doctor's process for Spark: a bounded time, whatever Spark waits for, and nothing that goes on after it."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev import jars
from dev.object_store import ObjectStore
from dev.spark_local import environment, local_conf, write_conf_dir
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.orchestration.reporting import spark_trial
from highwater.orchestration.reporting.spark_trial import JOB, KAFKA, LAKE, SESSION, from_plain, to_plain, try_spark
from highwater.orchestration.reporting.trial_results import TrialResult
from highwater.resources.jars import OWN_JAR
from highwater.settings import Settings
from tests.helpers.fake_session import FakeSession
from tests.helpers.spark_trials import ALL_STEPS, STEPS, limit_step, read_states, try_real_spark

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect


@pytest.mark.parametrize(
    "one",
    [
        TrialResult("a", "text"),
        TrialResult("a", "text", warning=True, remedy="do"),
        TrialResult("a", error=ConfigurationError("problem", stored="s", found="f", remedy="do")),
        TrialResult("a", error=DependencyUnavailableError("problem", remedy="do")),
    ],
)
def test_a_result_comes_back_as_it_was(one: TrialResult) -> None:
    back = from_plain(to_plain(one))
    assert back.row == one.row
    assert type(back.error) is type(one.error)


def try_with(monkeypatch: pytest.MonkeyPatch, script: str, **given: str) -> list[TrialResult]:
    """Have a script in the place of the process that opens a session."""
    begin = "import json, os, sys, time\npipe = os.fdopen(int(sys.argv[1]), 'w')\n"
    begin += "def say(what, **more):\n    print(json.dumps({'what': what, **more}), file=pipe, flush=True)\n"
    monkeypatch.setattr(spark_trial, "reach", lambda *_: ("it answers", []))
    monkeypatch.setattr(
        spark_trial, "build_trial_command", lambda end, _: [sys.executable, "-c", f"{begin}{script}", str(end)]
    )
    monkeypatch.setattr(spark_trial, "END_SECONDS", 5.0)
    return list(try_spark(Settings.from_environment(given), os.environ, avro=False))


def test_reports_of_the_process_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = try_with(monkeypatch, f"for what in {STEPS[1:]}: say(what, text='fine')")
    assert [one.row for one in found] == [
        ["ok", "Spark", "it answers", ""],
        *(["ok", n, "fine", ""] for n in STEPS[1:]),
    ]


def test_a_cluster_without_workers_is_found_within_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A master answers and takes the application, and a run would wait for ever."""
    limit_step(monkeypatch, JOB, 0.5)
    script = (
        f"for what in {STEPS[1:-1]}: say(what, text='fine')\n"
        "print('WARN Initial job has not accepted any resources; check your cluster UI', file=sys.stderr, flush=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    started = time.monotonic()
    *_, last = try_with(monkeypatch, script)
    assert time.monotonic() - started < 60
    assert isinstance(last.error, DependencyUnavailableError)
    assert last.what == "Spark job"
    assert last.error.problem == "no executor of Spark ran a task within 0.5 s"
    assert str(last.error.found).startswith("Initial job has not accepted any resources")
    assert "start workers" in last.error.remedy
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_nothing_follows_a_session_that_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_step(monkeypatch, SESSION, 0.5)
    found = try_with(monkeypatch, "time.sleep(600)")
    assert [one.what for one in found] == STEPS[:2]
    assert "no Spark session was open within 0.5 s" in found[1].row[2]


def test_a_process_that_ends_is_an_error_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = try_with(monkeypatch, "say('Spark session', text='fine'); print('x OutOfMemoryError: heap'); os._exit(1)")
    assert [one.what for one in found] == STEPS[:3]
    assert found[2].row[2] == "the process that tried Spark ended at: Spark and the lake: OutOfMemoryError: heap"


def test_a_token_of_the_servers_address_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "say('Spark session', error={'problem': 'a planted b', 'stored': None, 'found': None, 'remedy': 'c'})"
    found = try_with(monkeypatch, script, SPARK_REMOTE="sc://spark/;token=planted;user_id=me")
    assert found[1].row[2] == "a (hidden) b"


def test_a_session_of_a_process_is_stopped_and_none_follows_one_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, stops, settings = FakeSession(), count(), Settings.from_environment({})
    monkeypatch.setattr(session, "stop", lambda: next(stops), raising=False)
    monkeypatch.setattr(spark_trial, "open_session", lambda _: session)
    assert [one.row[0] for one in spark_trial.run_steps([SESSION, LAKE, KAFKA], settings)] == ["ok"] * 3
    session.conf.pop("spark.sql.session.timeZone")
    assert [one.row[0] for one in spark_trial.run_steps([SESSION, LAKE, KAFKA], settings)] == ["failed"]
    assert next(stops) == 2


@pytest.mark.slow
@pytest.mark.long
def test_a_local_session_has_all_and_one_without_jars_names_them(tmp_path: Path) -> None:
    variables = environment(write_conf_dir(tmp_path, "local", local_conf(tmp_path, driver_memory_mb=512)))
    found = try_real_spark(tmp_path, variables, HIGHWATER_SPARK_MASTER="local[1]")
    assert read_states(found) == dict.fromkeys(ALL_STEPS, "ok"), [one.row for one in found.values()]
    bare = environment(write_conf_dir(tmp_path, "bare", {"spark.driver.memory": "512m", "spark.ui.enabled": "false"}))
    found = try_real_spark(tmp_path, bare, HIGHWATER_SPARK_MASTER="local[1]", HIGHWATER_LAKE="s3a://bucket/lake")
    assert read_states(found) == {
        **dict.fromkeys(ALL_STEPS, "ok"),
        **dict.fromkeys(("Spark and the lake", "Spark and Kafka", "Spark and Avro"), "failed"),
    }
    jars = {name: str(one.error.stored) for name, one in found.items() if one.error}
    assert "delta-spark_" in jars["Spark and the lake"]
    assert "spark-sql-kafka-0-10_" in jars["Spark and Kafka"]
    assert "spark-avro_" in jars["Spark and Avro"]


@pytest.mark.slow
@pytest.mark.long
def test_a_lake_on_s3_needs_the_class_of_the_log_store(tmp_path: Path) -> None:
    """It was missed at the first commit only."""
    with ObjectStore(tmp_path) as store:
        lake = f"{store.make_bucket('lake')}/lake"
        conf = {**local_conf(tmp_path, driver_memory_mb=512), "spark.ui.enabled": "false"}
        whole = conf["spark.driver.extraClassPath"]
        # Not the folder: `highwater jars` may have put the log store there.
        lacking = os.pathsep.join(str(jar) for jar in jars.folder("spark").glob("*.jar") if jar.name != OWN_JAR.name)
        for name, path, state in (("whole", whole, "ok"), ("lacking", lacking, "failed")):
            folder = write_conf_dir(tmp_path, name, {**conf, "spark.driver.extraClassPath": path})
            variables = {**environment(folder), **store.variables}
            found = try_real_spark(tmp_path, variables, HIGHWATER_SPARK_MASTER="local[1]", HIGHWATER_LAKE=lake)
            assert read_states(found) == {**dict.fromkeys(ALL_STEPS, "ok"), "Spark and the lake": state}, name
    assert "cannot load the log store" in found["Spark and the lake"].row[2]


@pytest.mark.slow
def test_a_connect_server_has_all(tmp_path: Path, spark_server: SparkConnect) -> None:
    found = try_real_spark(tmp_path, os.environ, SPARK_REMOTE=spark_server.remote)
    assert read_states(found) == dict.fromkeys(ALL_STEPS, "ok"), [one.row for one in found.values()]
