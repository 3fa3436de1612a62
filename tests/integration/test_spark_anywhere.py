"""The same slice on a Connect server, in the process itself, and on a cluster: configuration alone decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dev.paths import REPOSITORY
from dev.spark_local import SMALL_QUERIES, environment, local_conf, write_conf_dir
from dev.spark_standalone import SparkStandalone
from highwater import settings
from highwater.orchestration.reporting.spark_trial import JOB
from highwater.resources.lake import Lake
from tests.helpers.spark_trials import ALL_STEPS, limit_step, read_states, try_real_spark
from tests.helpers.support import PAGE_SECONDS, Message, customers, order_message, read_rows, read_topic, send

if TYPE_CHECKING:
    from dev.spark_connect import SparkConnect
    from highwater.orchestration.reporting.trial_results import TrialResult
    from tests.conftest import TopicFactory

pytestmark = pytest.mark.slow

MESSAGES = [
    *(order_message(f"o{n % 5}", n // 5 + 1, partition=n % 3) for n in range(30)),
    order_message("o1", 9, partition=1, customer_id="nobody"),
    Message(b"o2", b"{", 2),
    Message(b"o3", None, 0),
]


@pytest.fixture
def sent(topic: TopicFactory, bootstrap: str) -> str:
    """A topic that holds the messages."""
    name = topic(partitions=3)
    send(bootstrap, name, MESSAGES)
    return name


def take_slice(home: Path, bootstrap: str, topic: str, spark: dict[str, str]) -> None:
    """Take the topic's one slice through the job in a process of its own."""
    # A Connect session of this process leaves a variable that would make the child a client too.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
    variables = {**inherited, **spark, settings.HOME: str(home), settings.KAFKA_BOOTSTRAP: bootstrap}
    customers(Lake(str(home / "lake")))
    command = [sys.executable, "-m", "tests.helpers.slice_child", topic]
    done = subprocess.run(
        command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]


def require_tables(home: Path, bootstrap: str, topic: str) -> None:
    """Compare the tables with an independent reading of the topic."""
    base = home / "lake" / "orders"
    raw = {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in read_rows(str(base / "raw"))}
    assert raw == read_topic(bootstrap, topic)
    assert len(read_rows(str(base / "events"))) == 30
    assert sorted(r["reason"] for r in read_rows(str(base / "rejects"))) == ["malformed", "unresolved"]


@pytest.mark.long
def test_a_connect_server_takes_the_slice(
    tmp_path: Path, bootstrap: str, sent: str, spark_server: SparkConnect
) -> None:
    take_slice(tmp_path, bootstrap, sent, {settings.SPARK_REMOTE: spark_server.remote})
    require_tables(tmp_path, bootstrap, sent)


@pytest.mark.long
def test_a_session_in_the_process_itself_takes_the_slice(tmp_path: Path, bootstrap: str, sent: str) -> None:
    conf_dir = write_conf_dir(tmp_path, "local", {**local_conf(tmp_path, driver_memory_mb=1024), **SMALL_QUERIES})
    take_slice(tmp_path, bootstrap, sent, {**environment(conf_dir), settings.SPARK_MASTER: "local[2]"})
    require_tables(tmp_path, bootstrap, sent)


def test_a_standalone_master_with_two_workers_takes_the_slice(
    tmp_path: Path, bootstrap: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor finds what the master lacks: workers at first, in the end the master itself."""
    with SparkStandalone(tmp_path, workers=0) as cluster:
        variables = cluster.driver_environment()

        def examine() -> dict[str, TrialResult]:
            return try_real_spark(tmp_path, variables, HIGHWATER_SPARK_MASTER=cluster.master)

        with monkeypatch.context() as patch:
            limit_step(patch, JOB, 5.0)
            found = examine()
        assert read_states(found) == {**dict.fromkeys(ALL_STEPS, "ok"), "Spark job": "failed"}, show(found)
        assert "no executor of Spark ran a task" in found["Spark job"].row[2]
        cluster.add_worker()
        cluster.add_worker()
        found = examine()
        assert read_states(found) == dict.fromkeys(ALL_STEPS, "ok"), show(found)
        take_slice(tmp_path, bootstrap, sent, {**variables, settings.SPARK_MASTER: cluster.master})
        application = fetch_newest_application(cluster)
    assert application["state"] == "FINISHED"
    # A worker keeps a folder for each executor that it ran.
    ran = [list((tmp_path / "spark" / f"worker-{n}" / application["id"]).glob("*")) for n in (1, 2)]
    assert all(ran), "each worker process ran an executor"
    require_tables(tmp_path, bootstrap, sent)
    assert read_states(examine()) == {"Spark": "failed"}, "nothing of it runs"


def show(found: dict[str, TrialResult]) -> list[list[str]]:
    return [one.row for one in found.values()]


def fetch_newest_application(cluster: SparkStandalone) -> dict[str, Any]:
    """The application that completed last, as the master shows it."""
    with urllib.request.urlopen(f"{cluster.page}/json/", timeout=PAGE_SECONDS) as answer:
        completed: list[dict[str, Any]] = json.load(answer)["completedapps"]
    return max(completed, key=lambda one: one["starttime"])
