from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from assets.streams.payments import STREAM as PAYMENTS
from dev import up
from dev.dagster_services import DagsterServices, prepare_home
from dev.paths import REPOSITORY
from dev.processes import Child, ChildFailedError, accepts, free_port, wait_until
from dev.stack import Stack
from highwater import settings
from highwater.errors import ConfigurationError

CONFIGURED = {settings.KAFKA_BOOTSTRAP: "broker.example:9092", settings.SPARK_REMOTE: "sc://spark.example:15002"}


def test_configured_services_replace_embedded_ones(tmp_path: Path) -> None:
    stack = Stack(tmp_path, base=CONFIGURED)
    assert stack.broker is None
    assert stack.spark is None
    assert stack.bootstrap == "broker.example:9092"
    assert stack.env[settings.SPARK_REMOTE] == "sc://spark.example:15002"


def test_unconfigured_services_are_embedded_on_loopback(tmp_path: Path) -> None:
    stack = Stack(tmp_path, base={})
    assert stack.broker is not None
    assert stack.spark is not None
    assert re.fullmatch(r"127\.0\.0\.1:\d+", stack.bootstrap)
    assert re.fullmatch(r"sc://127\.0\.0\.1:\d+", stack.env[settings.SPARK_REMOTE])
    assert stack.env["DAGSTER_HOME"] == str(tmp_path / "dagster")
    assert stack.dagster is not None
    assert stack.dagster.code is not None, "webserver and daemon share one code server"


def test_runs_with_a_local_master_find_the_jars_in_any_home(tmp_path: Path) -> None:
    """Dagster's processes had the variables of before: in a home without jars every run failed."""
    stack = Stack(tmp_path, base={settings.SPARK_MASTER: "local[2]"})
    stack._prepare_local_spark()
    children = [child.environment.get("SPARK_CONF_DIR") for child in stack._children()]
    assert children == [str(tmp_path / "spark" / "local")] * 3


def test_a_master_takes_the_place_of_the_connect_server(tmp_path: Path) -> None:
    stack = Stack(tmp_path, base={settings.SPARK_MASTER: "spark://master.example:7077"})
    assert stack.spark is None
    assert settings.SPARK_REMOTE not in stack.env


def test_a_schema_registry_is_embedded_when_asked_and_none_is_configured(tmp_path: Path) -> None:
    assert Stack(tmp_path, base={}).registry is None
    stack = Stack(tmp_path, base={}, registry=True)
    assert stack.registry is not None
    assert stack.env[settings.SCHEMA_REGISTRY_URL] == stack.registry.url
    assert f"Registry  {stack.registry.url}" in up.welcome(stack)
    assert "schema registry" in up.not_started(stack)
    stack = Stack(tmp_path, base={settings.SCHEMA_REGISTRY_URL: "http://registry.example:8081"}, registry=True)
    assert stack.registry is None
    assert stack.env[settings.SCHEMA_REGISTRY_URL] == "http://registry.example:8081"


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ([], {}, True),
        ([], CONFIGURED, False),
        (["--generate"], CONFIGURED, True),
        (["--no-generate"], {}, False),
    ],
)
def test_a_generator_writes_to_somebodys_broker_only_when_asked(
    arguments: list[str], environment: dict[str, str], expected: bool
) -> None:
    assert up.generates(up.parser().parse_args(arguments), environment) is expected


def test_a_burst_of_payments_is_written_when_asked(tmp_path: Path) -> None:
    class Seen:
        bootstrap, home = "127.0.0.1:1", tmp_path

        def __init__(self) -> None:
            self.commands: dict[str, list[str]] = {}

        def run(self, name: str, command: list[str]) -> None:
            self.commands[name] = command

    for arguments, payments in (["--burst"], up.BURST["payments"]), ([], 0):
        start = up.writers(up.parser().parse_args(arguments), {})
        assert start is not None
        seen = Seen()
        start(seen)  # type: ignore[arg-type]
        asked = {name: command[command.index("--burst") + 1] for name, command in seen.commands.items()}
        assert asked == {"generator-orders": "0", "generator-payments": str(payments)}
    least = PAYMENTS.limits.min_offsets or 0
    assert up.BURST["payments"] >= max(least, PAYMENTS.breaker.min_records), "a slice at once, and one that is judged"
    for configured in ({}, CONFIGURED):
        with pytest.raises(ConfigurationError, match="no generator runs"):
            up.writers(up.parser().parse_args(["--burst", "--no-generate"]), configured)
    assert up.writers(up.parser().parse_args([]), CONFIGURED) is None


def test_the_doctor_comes_first_and_tries_what_is_there(tmp_path: Path) -> None:
    """Not the broker and the Spark that are still to be started: that they do not answer is no news."""
    rows = up.examined(Stack(tmp_path, base={"HIGHWATER_HOME": str(tmp_path)}))
    assert [(row[0], row[1]) for row in rows] == [
        ("ok", "declarations"),
        ("ok", "settings"),
        ("ok", "ledger"),
        ("ok", "clock"),
        ("ok", "lake"),
        ("ok", "Kafka's configuration for Spark"),
        ("ok", "streams"),
    ]
    assert up.not_started(Stack(tmp_path, base=CONFIGURED)) == {"Dagster"}


def test_a_second_stack_in_one_home_is_refused(tmp_path: Path) -> None:
    second = Stack(tmp_path, base=CONFIGURED, dagster=False)
    with (
        Stack(tmp_path, base=CONFIGURED, dagster=False),
        pytest.raises(ConfigurationError, match="another stack runs in"),
        second,
    ):
        pass
    with Stack(tmp_path, base=CONFIGURED, dagster=False):
        assert (tmp_path / "env").read_text().startswith("export HIGHWATER_HOME=")


def test_a_part_that_ends_by_itself_is_reported_with_its_log(tmp_path: Path) -> None:
    with Stack(tmp_path, base={**os.environ, **CONFIGURED}, dagster=False) as stack:
        child = stack.run("fragile", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
        child.wait(30)
        with pytest.raises(ChildFailedError, match="fragile ended with exit status 3") as caught:
            stack.supervise()
    assert "the reason" in str(caught.value.found)


def test_started_services_end_when_the_start_fails(tmp_path: Path) -> None:
    def fail(stack: Stack) -> None:
        started.append(stack.run("other", [sys.executable, "-c", "import time; time.sleep(600)"]))
        raise RuntimeError("the broker's topics could not be made")

    started: list[Child] = []
    with pytest.raises(RuntimeError, match="topics"), Stack(tmp_path, base=CONFIGURED, dagster=False, on_broker=fail):
        pass
    assert not started[0].alive


def test_settings_of_a_persons_own_instance_are_preserved(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    prepare_home(tmp_path, ours=False)
    assert (tmp_path / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"
    prepare_home(tmp_path, ours=True)
    assert (tmp_path / "dagster.yaml").read_text() == (REPOSITORY / "dagster.yaml").read_text()


@pytest.mark.slow
def test_definitions_that_do_not_load_are_reported_in_dagsters_words(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_there\n")
    workspace = tmp_path / "workspace.yaml"
    workspace.write_text(f"load_from: [{{python_file: {{relative_path: {tmp_path / 'broken.py'}}}}}]\n")
    variables = {**os.environ, "DAGSTER_HOME": str(tmp_path / "dagster")}
    prepare_home(tmp_path / "dagster", ours=True)
    services = DagsterServices(tmp_path, variables, workspace=workspace)
    try:
        services.touch.start()
        services.wait_touched()
        services.webserver.start()
        with pytest.raises(ChildFailedError, match="a_module_that_is_not_there"):
            services.wait_ready()
    finally:
        services.stop()


TICKING = """
import json, os
from pathlib import Path
import dagster as dg

here = Path(os.environ["TEST_FOLDER"])

@dg.op
def tell():
    found = {"cwd": os.getcwd(), "home": os.environ["DAGSTER_HOME"], "group": os.getpgid(0)}
    (here / "run.json").write_text(json.dumps(found))

@dg.job
def telling():
    tell()

@dg.sensor(job=telling, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def ticking():
    with (here / "ticks").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    yield dg.RunRequest(run_key="one")

defs = dg.Definitions(jobs=[telling], sensors=[ticking])
"""


@pytest.mark.slow
def test_one_code_server_serves_all_and_whatever_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon of `make up` had a code server of its own, which it replaced every minute and which died with it."""
    monkeypatch.setattr("dev.dagster_services.SHORTEST_LIFE_SECONDS", 0.0)
    (tmp_path / "ticking.py").write_text(TICKING)
    home = tmp_path / "dagster"
    variables = {"DAGSTER_HOME": str(home), "TEST_FOLDER": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    prepare_home(home, ours=True)
    services = DagsterServices(tmp_path, {**os.environ, **variables}, ui_port=free_port(), module="ticking")
    ticks = tmp_path / "ticks"

    def ticking_servers(since: int) -> set[str]:
        """The processes that sensors were evaluated in after a number of ticks."""
        return set(ticks.read_text().split()[since:]) if ticks.exists() else set()

    def restarted(name: str) -> str:
        [line] = services.restart_ended()
        assert line.startswith(f"{name} ended with exit status ")
        seen = len(ticks.read_text().split())
        wait_until(lambda: len(ticking_servers(seen)) > 0, 120, f"a tick after the end of {name}")
        [server] = ticking_servers(seen)
        return server

    try:
        services.touch.start()
        services.launch_code()
        services.launch()
        services.wait_ready()
        wait_until((tmp_path / "run.json").exists, 120, "the run")
        [first] = ticking_servers(0)
        assert services.code is not None
        run = json.loads((tmp_path / "run.json").read_text())
        assert run == {"cwd": str(REPOSITORY), "home": str(home), "group": services.code.pid}
        assert services.restart_ended() == []

        kill_group(services.daemon)
        assert restarted("dagster-daemon") == first, "the code server outlives the daemon"
        kill_group(services.code)
        assert restarted("dagster-code") != first
    finally:
        services.stop()
    assert services.restart_ended() == [], "what was stopped stays so"


def kill_group(child: Child) -> None:
    """SIGKILL from outside, as the kernel does when memory is short."""
    assert child.pid is not None
    os.killpg(child.pid, signal.SIGKILL)
    wait_until(lambda: not child.alive, 30, f"the end of {child.name}")


def test_a_process_that_ends_soon_after_its_start_is_an_error(tmp_path: Path) -> None:
    """It would be started again for ever, and nobody would read why it ends."""
    services = DagsterServices(tmp_path, dict(os.environ), module="a_module", daemon=[sys.executable, "-c", "oops"])
    services._launch(services.daemon)
    wait_until(lambda: not services.daemon.alive, 30, "its end")
    with pytest.raises(
        ChildFailedError, match="dagster-daemon ended with exit status 1, within 30 s of its start"
    ) as e:
        services.restart_ended()
    assert "NameError" in str(e.value.found)


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_make_up_leaves_nothing_behind_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, settings.HOME: str(tmp_path / "home")}
    said = (tmp_path / "said").open("w+")
    program = subprocess.Popen(
        [sys.executable, "-m", "dev.up", "--no-generate"], env=environment, stdout=said, stderr=said, cwd=REPOSITORY
    )
    try:
        wait_until(
            lambda: "Ctrl-C ends everything" in Path(said.name).read_text() or program.poll() is not None, 300, "up"
        )
        text = Path(said.name).read_text()
        ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", text)]
        assert len(ports) == 4, text
        assert all(accepts(port) for port in ports)
        program.send_signal(number)
        assert program.wait(60) == (-9 if number == signal.SIGKILL else 0)
    finally:
        program.kill()
    wait_until(lambda: not any(accepts(port) for port in ports), 30, "the end of every server")
    wait_until(lambda: not processes_naming(tmp_path), 30, "the end of every process")


def processes_naming(folder: Path) -> list[str]:
    """Command lines of processes, zombies left out, whose environment or arguments name a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments, variables = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in arguments + variables and int(process.name) != os.getpid():
            found.append(arguments.replace(b"\0", b" ").decode(errors="replace"))
    return found
