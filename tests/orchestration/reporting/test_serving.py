"""Endpoints: one measuring serves all scrapes, and health names what fails."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteInstigatorOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, TickData, TickStatus
from dagster._daemon.types import DaemonHeartbeat

from dev.processes import LOOPBACK, free_port
from highwater.errors import ConfigurationError
from highwater.orchestration import resources
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.metrics import measure_streams
from highwater.orchestration.reporting.health import LIMIT, SENSORS, Health, HealthCondition, examine
from highwater.orchestration.reporting.prometheus_metrics import MetricSamples
from highwater.orchestration.reporting.serving import CachedValue, build_application, open_server
from highwater.resources.kafka import Kafka
from highwater.resources.ledger import Ledger
from highwater.settings import parse_metrics_listen
from tests.helpers.prometheus_text import read

DEADLINE = 60.0


def fetched(url: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@contextmanager
def served(metrics: CachedValue[MetricSamples], health: CachedValue[Health]) -> Iterator[str]:
    with open_server(LOOPBACK, 0, build_application(metrics, health)) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{serving.server_port}"
        finally:
            serving.shutdown()
            thread.join()


def healthy() -> Health:
    return Health([HealthCondition("ledger", ok=True, reason="it answers")])


class Counted:
    """Measures one number: how often it measured."""

    def __init__(self) -> None:
        self.times = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self) -> MetricSamples:
        self.times += 1
        assert self.go_on.wait(DEADLINE)
        found = MetricSamples()
        found.add("highwater_held_slices", self.times, "orders")
        return found


def number(text: str) -> float:
    return read(text)["highwater_held_slices"]["orders",]


OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def scraped(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=OPEN_METRICS), timeout=DEADLINE) as answer:
        return str(answer.read().decode())


def test_scrapes_at_once_share_one_measuring() -> None:
    counted = Counted()
    counted.go_on.clear()
    found: list[str] = []
    with served(CachedValue(counted, 60.0, DEADLINE), CachedValue(healthy, 60.0)) as url:
        threads = [threading.Thread(target=lambda: found.append(scraped(f"{url}/metrics"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        counted.go_on.set()
        for thread in threads:
            thread.join()
        found.append(scraped(f"{url}/metrics"))
    assert [number(text) for text in found] == [1.0] * 9
    assert counted.times == 1


def test_a_value_that_is_too_old_is_measured_again() -> None:
    counted = Counted()
    shared = CachedValue(counted, 0.01)
    deadline = time.monotonic() + DEADLINE
    while counted.times < 3:
        assert time.monotonic() < deadline
        assert shared.get() is not None


def test_a_measuring_that_hangs_serves_the_numbers_of_before() -> None:
    """A scrape that waits longer than its scraper loses all numbers, also those that are known."""
    counted = Counted()
    shared = CachedValue(counted, seconds=0.0, patience=0.01)
    first = None
    deadline = time.monotonic() + DEADLINE
    while first is None:
        assert time.monotonic() < deadline
        first = shared.get()
    counted.go_on.clear()
    later = shared.get()
    assert later is not None
    assert later.samples["highwater_held_slices"]
    counted.go_on.set()


def test_a_measuring_that_fails_leaves_the_numbers_of_before() -> None:
    counted = Counted()
    shared = CachedValue(counted, seconds=0.0)
    first = shared.get()
    shared._compute = lambda: 1 / 0  # type: ignore[assignment, return-value]
    assert shared.get() is first


def test_before_the_first_measuring_ends_there_is_nothing_to_scrape() -> None:
    counted = Counted()
    counted.go_on.clear()
    with served(CachedValue(counted, 60.0, patience=0.01), CachedValue(lambda: 1 / 0, 60.0)) as url:  # type: ignore[arg-type, return-value]
        assert fetched(f"{url}/metrics")[0] == 503
        status, kind, body = fetched(f"{url}/health")
        assert (status, kind, json.loads(body)["status"]) == (503, "application/json", "unknown")
        assert fetched(f"{url}/")[0] == 404
        counted.go_on.set()


# Health


def nobody() -> Any:
    return nullcontext(None)


@pytest.fixture(scope="module")
def shared_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def instance(shared_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """An instance without heartbeats and ticks."""
    shared_instance.wipe_daemon_heartbeats()
    shared_instance.wipe_all_schedules()
    return shared_instance


def tick(instance: dg.DagsterInstance, sensor: str, at: datetime, *, running: bool = True) -> None:
    """A sensor whose last tick began at a time."""
    origin = RemoteInstigatorOrigin(RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "all"), sensor)
    status = InstigatorStatus.RUNNING if running else InstigatorStatus.STOPPED
    instance.add_instigator_state(InstigatorState(origin, InstigatorType.SENSOR, status))
    data = TickData(origin.get_id(), sensor, InstigatorType.SENSOR, TickStatus.SKIPPED, at.timestamp())
    instance.create_tick(data._replace(selector_id=origin.get_selector().get_id()))


def beat(instance: dg.DagsterInstance, at: datetime) -> None:
    """All daemons reported at a time."""
    for daemon in instance.get_required_daemon_types():
        instance.add_daemon_heartbeat(DaemonHeartbeat(at.timestamp(), daemon, "id"))


def failing(ledger: Ledger, instance: dg.DagsterInstance, now: datetime) -> dict[str, str]:
    found = examine(lambda: ledger, lambda: nullcontext(instance), now)
    return {one.name: one.reason for one in found.findings if not one.ok}


def test_a_deployment_that_works_is_healthy(ledger: Ledger, instance: dg.DagsterInstance) -> None:
    now = datetime.now(UTC)
    beat(instance, now - LIMIT + timedelta(seconds=2))
    tick(instance, "planner", now - LIMIT + timedelta(seconds=2))
    assert failing(ledger, instance, now) == {}


def test_late_ticks_fail(ledger: Ledger, instance: dg.DagsterInstance) -> None:
    now = datetime.now(UTC)
    beat(instance, now - LIMIT - timedelta(seconds=2))
    tick(instance, "planner", now - LIMIT - timedelta(seconds=2))
    found = failing(ledger, instance, now)
    assert found.keys() == {"daemon", "planner"}
    assert "SENSOR 0:03:02 ago" in found["daemon"]
    assert "its last tick was 0:03:02 ago" in found["planner"]


def test_missing_ticks_fail(ledger: Ledger, instance: dg.DagsterInstance) -> None:
    now = datetime.now(UTC)
    found = failing(ledger, instance, now)
    assert "SENSOR never" in found["daemon"]
    assert "no tick of a running sensor planner" in found["planner"]
    tick(instance, "planner", now, running=False)
    assert "no tick of a running sensor planner" in failing(ledger, instance, now)["planner"]


def test_a_ledger_that_cannot_be_used_fails() -> None:
    """Its password is in no reason."""
    url = f"postgresql+psycopg2://highwater:hunter2@{LOOPBACK}:{free_port()}/none"
    found = examine(lambda: Ledger(url), nobody, datetime.now(UTC))
    assert not found.ok
    assert [one.ok for one in found.findings] == [False, None, None]
    assert "hunter2" not in json.dumps(found.to_plain())


def test_the_sensors_are_those_of_the_definitions() -> None:
    found = build_defs(streams=[]).get_repository_def().sensor_defs
    assert {one.name for one in found} == set(SENSORS)


# The command


@pytest.mark.slow
def test_the_command_serves_both_until_it_is_ended(tmp_path: Path) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "HIGHWATER_HOME": str(tmp_path),
        "HIGHWATER_KAFKA_BOOTSTRAP": f"{LOOPBACK}:{free_port()}",
        "HIGHWATER_METRICS_LISTEN": f"{LOOPBACK}:{port}",
    }
    environment.pop("DAGSTER_HOME", None)
    command = [sys.executable, "-m", "highwater.orchestration.cli.main", "serve-metrics"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == f"http://{LOOPBACK}:{port}/metrics"
            status, _, body = fetched(f"http://{LOOPBACK}:{port}/health")
            assert (status, json.loads(body)["checks"]["ledger"]["ok"]) == (200, True)
            deadline = time.monotonic() + DEADLINE
            while (answer := fetched(f"http://{LOOPBACK}:{port}/metrics"))[0] == 503:
                assert time.monotonic() < deadline
            assert answer[0] == 200
            assert 'highwater_up{dependency="kafka"} 0.0' in answer[2]
            assert 'highwater_up{dependency="ledger"} 1.0' in answer[2]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE) == 0


def test_a_secret_that_is_replaced_in_its_file_is_used_by_the_next_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process asked with the old password until it was started again, and brokers lock users for that."""
    asked: list[tuple[str, str]] = []

    def measure(ledger: Ledger, kafka: Kafka, *_: object) -> MetricSamples:
        asked.append((repr(ledger), kafka.build_spark_options()["kafka.sasl.jaas.config"]))
        return MetricSamples()

    monkeypatch.setattr("highwater.orchestration.reporting.prometheus_metrics.measure", measure)
    config, url = tmp_path / "config", tmp_path / "url"
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG_FILE", str(config))
    monkeypatch.setenv("HIGHWATER_LEDGER_URL_FILE", str(url))
    older: weakref.ref[Ledger] | None = None
    for secret in ("first", "second"):
        login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "me"}
        config.write_text(json.dumps({**login, "sasl.password": secret}))
        url.write_text(f"sqlite:///{tmp_path}/{secret}")
        measure_streams([])
        if older is not None:
            gc.collect()
            assert older() is None, "its pool of connections is closed"
        older = weakref.ref(resources.LedgerResource().open())
    for secret, (place, jaas) in zip(("first", "second"), asked, strict=True):
        assert secret in place
        assert secret in jaas


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ("127.0.0.1", 9464)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::]:9464", ("::", 9464))],
)
def test_an_address_is_host_and_port(text: str, found: tuple[str, int]) -> None:
    assert parse_metrics_listen(text) == found


@pytest.mark.parametrize("text", ["9464", ":9464", "host:", "host:http", "host:70000"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no address to listen on"):
        parse_metrics_listen(text)


def test_a_port_that_is_taken_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with open_server(LOOPBACK, 0, lambda *_: []) as taken:
        arguments = ["serve-metrics", "--listen", f"{LOOPBACK}:{taken.server_port}"]
        done = CliRunner().invoke(main, arguments, env={"HIGHWATER_HOME": str(tmp_path)})
    assert done.exit_code == 2
    assert "choose another port" in done.stderr
