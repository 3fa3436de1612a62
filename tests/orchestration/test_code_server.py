"""`highwater serve-code`: Dagster's code server, whose workers are forked."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from click.testing import CliRunner

from dev.dagster_services import DagsterServices, prepare_home
from dev.paths import REPOSITORY
from dev.processes import free_port, wait_until
from highwater.orchestration import code_server
from highwater.orchestration.cli.main import main
from tests.helpers.deployment import TERMINATE

DEFINITIONS = """
import json, os, sys, time
from pathlib import Path
import dagster as dg
from highwater.orchestration.code_server import RUN_MODULES

here = Path(os.environ["TEST_FOLDER"])

@dg.op
def note(context):
    file = here / context.run.tags["name"]
    found = {"pid": os.getpid(), "group": os.getpgid(0), "folder": os.getcwd(), "loaded": LOADED}
    file.with_suffix(".new").write_text(json.dumps(found))
    file.with_suffix(".new").rename(file.with_suffix(".json"))
    time.sleep(float(context.run.tags["seconds"]))

@dg.job(executor_def=dg.in_process_executor)
def noting():
    note()

@dg.sensor(job=noting, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def asking():
    for name, seconds in {"short": 0, "killed": 600, "terminated": 600}.items():
        yield dg.RunRequest(run_key=name, tags={"name": name, "seconds": str(seconds)})

LOADED = {*RUN_MODULES} <= {*sys.modules}

@dg.definitions
def defs():
    with (here / "built").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return dg.Definitions(jobs=[noting], sensors=[asking])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of definitions that notes each time they are built."""
    (tmp_path / "forked_definitions.py").write_text(DEFINITIONS)
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "forked_definitions"
    sys.modules.pop("forked_definitions", None)


def test_the_process_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: began.append(words))
    monkeypatch.setenv("HIGHWATER_LOG_FORMAT", "json")
    CliRunner().invoke(main, ["serve-code", "--module-name", "a.b"], catch_exceptions=False)
    [words] = began
    assert words[0] == sys.executable
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--host": "127.0.0.1",
        "--port": "4266",
        "--max-workers": "32",
        "--module-name": "a.b",
        "--location-name": "highwater",
        "--log-format": "json",
    }


def test_definitions_are_built_once(tmp_path: Path, module: str) -> None:
    code_server.build_definitions(module)
    code_server.build_definitions(module)
    assert (tmp_path / "built").read_text().split() == [str(os.getpid())]
    assert isinstance(sys.modules[module].defs, dg.Definitions)


def test_definitions_that_cannot_be_built_are_for_the_worker_to_report(capfd: pytest.CaptureFixture[str]) -> None:
    code_server.preload("a_module_that_is_not_there")
    assert "No module named 'a_module_that_is_not_there'" in capfd.readouterr().err


def test_dagsters_server_asks_for_a_context_that_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._grpc import server

    assert vars(server)["multiprocessing"] is multiprocessing, "`fork_workers` replaces it"
    monkeypatch.delattr(server, "multiprocessing")
    code_server.fork_workers("a_module")
    assert not hasattr(server, "multiprocessing"), "each worker is a new Python then"


FORKED_FROM = """
import os, threading
os.environ["PRELOADED_MODULE"] = "orchestration.definitions"
before = set(os.listdir("/proc/self/fd"))
import highwater.orchestration.preloaded
files = [f"/proc/self/fd/{n}" for n in set(os.listdir("/proc/self/fd")) - before]
opened = [os.readlink(file) for file in files if os.path.exists(file)]
print(threading.active_count(), [name for name in opened if name.startswith(("socket:", "anon_inode:"))])
"""


def test_workers_inherit_no_thread_and_no_connection() -> None:
    """A thread ends with the fork, whatever it holds; a connection would have two users."""
    done = subprocess.run([sys.executable, "-c", FORKED_FROM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == "1 []", done.stderr


@pytest.mark.slow
def test_a_worker_is_forked_with_all_loaded_and_can_be_killed_and_terminated(tmp_path: Path, module: str) -> None:
    home = tmp_path / "dagster"
    prepare_home(home, ours=True)
    variables = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(tmp_path)}
    services = DagsterServices(tmp_path, variables, ui_port=free_port(), module=module)

    def read_note(name: str) -> SimpleNamespace:
        file = tmp_path / f"{name}.json"
        wait_until(file.exists, 120, f"the run {name}")
        return SimpleNamespace(**json.loads(file.read_text()))

    def wait_ended(instance: dg.DagsterInstance, name: str, status: dg.DagsterRunStatus) -> None:
        filters = dg.RunsFilter(tags={"name": name}, statuses=[status])
        wait_until(lambda: bool(instance.get_runs(filters)), 120, f"the end of {name}")

    try:
        services.touch.start()
        services.launch_code()
        services.launch()
        services.wait_ready()
        assert services.code is not None
        with dg.DagsterInstance.from_config(str(home)) as instance:
            short = read_note("short")
            wait_ended(instance, "short", dg.DagsterRunStatus.SUCCESS)
            built = set(map(int, (tmp_path / "built").read_text().split()))
            assert len(built) == 2, "the server, and the process that workers are forked from"
            assert short.pid not in built
            assert short.loaded
            assert (short.folder, short.group) == (str(REPOSITORY), services.code.pid), "it ends with the server"

            os.kill(read_note("killed").pid, signal.SIGKILL)
            wait_ended(instance, "killed", dg.DagsterRunStatus.FAILURE)
            [run] = instance.get_runs(dg.RunsFilter(tags={"name": "terminated"}))
            read_note("terminated")
            services.ask(TERMINATE, {"run": run.run_id})
            wait_ended(instance, "terminated", dg.DagsterRunStatus.CANCELED)
    finally:
        services.stop()
