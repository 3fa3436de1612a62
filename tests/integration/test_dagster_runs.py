"""Runs that the daemon launches: the sensor's, a backfill's, a command's, and one that is ended early."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest

from highwater.commit_records import from_user_metadata
from highwater.declaration import Limits
from highwater.orchestration.asset_keys import TABLES, build_table_key, build_topic_key
from highwater.orchestration.run_tags import RANGE_END, RANGE_START
from tests.helpers.deployment import LAUNCH_BACKFILL, TERMINATE, Deployment, Running, wait_for
from tests.helpers.lineage_receiver import Receiver, is_valid, receiving
from tests.helpers.support import fetch_rest, list_tagged_jobs, order_message, read_rows, read_topic

# Nothing is rejected here, so nothing is published.
COMMITTED = [table for table in TABLES if table.name != "dlq"]

if TYPE_CHECKING:
    from dev.dagster_services import DagsterServices
    from dev.spark_connect import SparkConnect

pytestmark = pytest.mark.slow

# Runs take some 15 s each on a quiet machine of 2 cores, and ten times that on one with 24 processes waiting.
SECONDS = 480.0


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """The lineage server of the module's deployment."""
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def deployed(
    tmp_path_factory: pytest.TempPathFactory, bootstrap: str, spark_server: SparkConnect, receiver: Receiver
) -> Iterator[tuple[Deployment, DagsterServices]]:
    """One deployment for the module, whose sensors have taken its backlog; each test may be the first one on it."""
    from tests.conftest import create_topic

    name = f"orders.runs.{tmp_path_factory.getbasetemp().name}"
    create_topic(bootstrap, name, 2, {})
    limits = Limits(max_offsets=10, slices_per_run=3)
    root = tmp_path_factory.mktemp("deployed")
    # Other workers have the server too: by the user its jobs are distinguished from theirs.
    remote = f"{spark_server.remote}/;user_id={name}"
    deployment = Deployment.make(root, name, bootstrap, remote, limits, sensors=True, lineage_url=receiver.url)
    deployment.send([order_message(f"o{n % 7}", n // 7 + 1, partition=n % 2) for n in range(50)])
    with Running(deployment) as services:
        with deployment.instance() as instance:
            wait_for(lambda: len(deployment.materialised(instance)) == 5, SECONDS, "five slices in every table")
            runs = instance.get_runs(dg.RunsFilter(job_name="orders_slice"))
            wait_for(lambda: all(instance.get_run_by_id(r.run_id).is_finished for r in runs), SECONDS, "the runs' end")
        yield deployment, services


def test_the_sensor_takes_a_backlog_through_all_tables(
    deployed: tuple[Deployment, DagsterServices], spark_server: SparkConnect
) -> None:
    deployment, _ = deployed
    with deployment.instance() as instance:
        runs = instance.get_runs(dg.RunsFilter(job_name="orders_slice"))
        ranges = sorted((run.tags[RANGE_START][-7:], run.tags[RANGE_END][-7:]) for run in runs)
        assert ranges == [("0000000", "0000002"), ("0000003", "0000004")]
        assert {instance.get_run_by_id(r.run_id).status for r in runs} == {dg.DagsterRunStatus.SUCCESS}
        passed = dict.fromkeys(deployment.keys(), True)
        for checked, check in (
            ("raw", "slices_tile"),
            ("raw", "offsets_as_planned"),
            ("raw", "gaps_explained"),
            ("events", "offsets_accounted_for"),
            ("dlq", "rejects_published"),
            ("current", "versions_in_order"),
            ("current", "current_follows_events"),
        ):
            assert _checks(instance, deployment, checked, check) == passed, check
        observed = instance.fetch_observations(build_topic_key(deployment.stream), limit=1).records
        assert observed[0].asset_observation.metadata["lag"].value == 0
    for table in COMMITTED:
        assert len(deployment.commits(table.name)) == 2, "one commit a range"
    assert sum(_records_read(spark_server, deployment.stream.topic).values()) == 50, "each record is read once"
    _tables_hold_the_topic(deployment)


def _checks(instance: dg.DagsterInstance, deployment: Deployment, table: str, check: str) -> dict[str, bool]:
    key = dg.AssetCheckKey(build_table_key(deployment.stream, table), check)
    found = instance.event_log_storage.get_asset_check_partition_info([key])
    return {str(info.partition_key): info.latest_execution_status.value == "SUCCEEDED" for info in found}


def _tables_hold_the_topic(deployment: Deployment) -> None:
    records = read_topic(deployment.bootstrap, deployment.stream.topic)
    lake, name = deployment.lake, deployment.stream.name
    raw = read_rows(lake.build_table_path(name, "raw"))
    assert {(r["partition"], r["offset"]): (r["key"], r["value"]) for r in raw} == records
    assert len(raw) == len(records)
    events = read_rows(lake.build_table_path(name, "events"))
    assert sorted((r["origin_partition"], r["origin_offset"]) for r in events) == sorted(records)


def test_each_slice_of_a_range_has_metadata_of_its_own(deployed: tuple[Deployment, DagsterServices]) -> None:
    deployment, _ = deployed
    with deployment.instance() as instance:
        records = instance.fetch_materializations(build_table_key(deployment.stream, "events"), limit=20).records
    planned = {slice_.key: slice_ for slice_ in deployment.ledger.list_slices("orders")}
    together = Counter(record.run_id for record in records)
    for record in records:
        metadata = record.asset_materialization.metadata
        slice_ = planned[record.partition_key]
        table = [row.data for row in metadata["offsets"].records]
        assert table == [
            {"partition": p, "start": r.start, "end": r.end, "offsets": len(r)}
            for p, r in sorted(slice_.ranges.items())
        ]
        assert metadata["dagster/partition_row_count"].value == 10
        assert metadata["lag_at_planning"].value == slice_.lag
        assert {"delta_version", "rejects/malformed", "event_span_seconds"} <= set(metadata)
        # A run that a busy machine had repeated found its slices committed, and says so.
        assert "seconds/commit" in metadata or "note" in metadata
        assert metadata["slices_in_run"].value == together[record.run_id]
    with deployment.instance() as instance:
        for stage in COMMITTED:
            for record in instance.fetch_materializations(
                build_table_key(deployment.stream, stage.name), limit=5
            ).records:
                metadata = record.asset_materialization.metadata
                # A row of current belongs to no slice alone: it shows the events that it took into account.
                source = "events" if stage.name == "current" else stage.name
                slices = [row["slice"] for row in read_rows(deployment.lake.build_table_path("orders", source))]
                rows = slices.count(record.partition_key)
                assert metadata["dagster/partition_row_count"].value == rows
                cost = {name: float(str(one.value)) for name, one in metadata.items() if name.startswith("write/")}
                # Nothing is written of events that are all older than the rows of their keys.
                changed = [cost.get(f"write/rows_{done}") for done in ("inserted", "updated")]
                wrote = any(changed) if stage.name == "current" else rows > 0
                assert "note" in metadata or (cost["write/bytes"] > 0) is wrote
                assert metadata["lag_at_planning"].value == planned[record.partition_key].lag


def test_lineage_has_each_step_with_its_offsets_rows_and_version(
    deployed: tuple[Deployment, DagsterServices], receiver: Receiver
) -> None:
    """The workers of runs send in the background, and deliver the last events when they end."""
    deployment, _ = deployed
    with deployment.instance() as instance:
        runs = {run.run_id for run in instance.get_runs(dg.RunsFilter(job_name="orders_slice"))}
        records = instance.fetch_materializations(build_table_key(deployment.stream, "events"), limit=100).records
    steps = {(run, f"orders/{table.name}") for run in runs for table in TABLES}

    def complete() -> dict[tuple[str, str], dict[str, Any]]:
        found = [one for one in [*receiver.events] if one["eventType"] == "COMPLETE"]
        return {(one["run"]["facets"]["parent"]["run"]["runId"], one["job"]["name"]): one for one in found}

    wait_for(lambda: steps <= complete().keys(), SECONDS, "the events of every step")
    sent = {step: event for step, event in complete().items() if step in steps}
    assert all(map(is_valid, sent.values()))
    planned = {slice_.key: slice_ for slice_ in deployment.ledger.list_slices("orders")}
    for run in runs:
        mine = [record for record in records if record.run_id == run]
        counts = [one.asset_materialization.metadata["dagster/partition_row_count"] for one in mine]
        versions = {str(one.asset_materialization.metadata["delta_version"].value) for one in mine}
        [table] = sent[run, "orders/events"]["outputs"]
        assert (table["namespace"], table["name"]) == ("file", deployment.lake.build_table_path("orders", "events"))
        assert table["outputFacets"]["outputStatistics"]["rowCount"] == sum(int(str(one.value)) for one in counts)
        assert table["facets"]["version"]["datasetVersion"] in versions
        [topic] = sent[run, "orders/raw"]["inputs"]
        assert (topic["namespace"], topic["name"]) == (f"kafka://{deployment.bootstrap}", deployment.stream.topic)
        read = topic["inputFacets"]["highwater_offsets"]["slices"]
        assert {one["slice"]: {r["partition"]: (r["start"], r["end"]) for r in one["ranges"]} for one in read} == {
            record.partition_key: {p: (r.start, r.end) for p, r in planned[str(record.partition_key)].ranges.items()}
            for record in mine
        }


def test_a_backfill_from_the_page_is_one_run_and_one_commit_a_table_for_each_contiguous_range(
    deployed: tuple[Deployment, DagsterServices], spark_server: SparkConnect
) -> None:
    deployment, services = deployed
    before = {table.name: len(deployment.commits(table.name)) for table in COMMITTED}
    newest = max(_records_read(spark_server, deployment.stream.topic), default=-1)
    keys = deployment.keys()
    ranges = [keys[:2], keys[3:5]]
    backfill = _backfill(deployment, services, [key for some in ranges for key in some])
    with deployment.instance() as instance:
        runs = _finished_runs(instance, {"dagster/backfill": backfill}, many=2)
        assert {run.status for run in runs} == {dg.DagsterRunStatus.SUCCESS}
        assert sorted([run.tags[RANGE_START], run.tags[RANGE_END]] for run in runs) == ranges
        for run in runs:
            _report_progress(instance, run)
    for table in COMMITTED:
        commits = deployment.commits(table.name)
        assert len(commits) - before[table.name] == 2, table.name
        said = [from_user_metadata(one["userMetadata"], 0, None) for one in commits[:2]]
        written = [[record.slice_key for record in records] for records in said]
        assert sorted(map(sorted, written)) == ranges
    read = _records_read(spark_server, deployment.stream.topic, newest)
    assert sum(read.values()) == 10 * 4, "each record is read from Kafka once, although it is counted and then written"
    _tables_hold_the_topic(deployment)


def _report_progress(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Of each table what it began with, and what was committed: slices, records, rate."""
    lines: dict[str, list[str]] = {}
    for entry in instance.all_logs(run.run_id):
        lines.setdefault(str(entry.step_key), []).append(entry.user_message)
    span = f"{run.tags[RANGE_START]} .. {run.tags[RANGE_END]}"
    for table in COMMITTED:
        reported = lines[f"orders__{table.name}"]
        rows = {"raw": "20", "events": "20", "rejects": "0"}.get(table.name, r"\d+")
        began = reported.index(f"2 slices of orders, 20 offsets: {span}")
        assert [
            one for one in reported[began:] if re.fullmatch(rf"committed 2 slices, {rows} rows, [\d,]+ rows/s", one)
        ]


def _finished_runs(instance: dg.DagsterInstance, tags: dict[str, str], many: int) -> list[dg.DagsterRun]:
    def done() -> bool:
        runs = instance.get_runs(dg.RunsFilter(tags=tags))
        return len(runs) >= many and all(run.is_finished for run in runs)

    wait_for(done, SECONDS, f"the runs of {tags}")
    return list(instance.get_runs(dg.RunsFilter(tags=tags)))


def test_the_command_line_takes_a_range_in_one_run(deployed: tuple[Deployment, DagsterServices]) -> None:
    deployment, _ = deployed
    before = {table.name: len(deployment.commits(table.name)) for table in COMMITTED}
    keys = deployment.keys()[:2]
    done = subprocess.run(
        deployment.cli("asset", "materialize", "--select", "group:orders", "--partition-range", "...".join(keys)),
        env=deployment.environment,
        cwd=deployment.root,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    after = {table.name: len(deployment.commits(table.name)) for table in COMMITTED}
    assert {table: after[table] - before[table] for table in after} == dict.fromkeys(after, 1), "one commit a table"
    _tables_hold_the_topic(deployment)


def test_a_run_that_is_terminated_stops_its_work_on_the_server(
    deployed: tuple[Deployment, DagsterServices], spark_server: SparkConnect
) -> None:
    """The Connect server would otherwise go on for a client that is gone, and commit behind the next run's back."""
    deployment, services = deployed
    commits = len(deployment.commits("raw"))
    deployment.slow.touch()
    try:
        run = _launch(deployment, services, deployment.keys()[:1])
        wait_for(lambda: _running_jobs(spark_server, deployment) > 0, SECONDS, "Spark's work on the slow slice")
        services.ask(TERMINATE, {"run": run})
        with deployment.instance() as instance:
            wait_for(lambda: instance.get_run_by_id(run).is_finished, 60, "the end of the run")
            assert instance.get_run_by_id(run).status is dg.DagsterRunStatus.CANCELED
        wait_for(lambda: _running_jobs(spark_server, deployment) == 0, 20, "the end of Spark's work")
    finally:
        deployment.slow.unlink()
    assert len(deployment.commits("raw")) == commits
    _ensure_taken(deployment, services, deployment.keys()[:1])
    assert len(deployment.commits("raw")) == commits + 1
    _tables_hold_the_topic(deployment)


def _ensure_taken(deployment: Deployment, services: DagsterServices, keys: list[str], *tables: str) -> None:
    """A new run of the slices succeeds."""
    with deployment.instance() as instance:
        run = _launch(deployment, services, keys, *tables)
        wait_for(lambda: instance.get_run_by_id(run).is_finished, SECONDS, "the slice's next run")
        assert instance.get_run_by_id(run).status is dg.DagsterRunStatus.SUCCESS


def _launch(deployment: Deployment, services: DagsterServices, keys: list[str], *tables: str) -> str:
    """The run of a backfill that needs one."""
    tags = {"dagster/backfill": _backfill(deployment, services, keys, *tables)}
    with deployment.instance() as instance:
        wait_for(lambda: bool(instance.get_runs(dg.RunsFilter(tags=tags))), SECONDS, "the backfill's run")
        return instance.get_runs(dg.RunsFilter(tags=tags))[0].run_id


def _backfill(deployment: Deployment, services: DagsterServices, keys: list[str], *tables: str) -> str:
    chosen = tables or [table.name for table in TABLES]
    params = {
        "assetSelection": [{"path": [deployment.stream.name, table]} for table in chosen],
        "partitionNames": keys,
    }
    answers: list[dict[str, str]] = []

    def launched() -> bool:
        # Beside other tests the code server was once too busy to answer the page in time.
        answers.append(services.ask(LAUNCH_BACKFILL, {"params": params})["launchPartitionBackfill"])
        return answers[-1]["__typename"] == "LaunchBackfillSuccess"

    wait_for(launched, 60, f"a backfill of {keys}; the page answered {answers}")
    return answers[-1]["backfillId"]


def _records_read(server: SparkConnect, topic: str, after: int = -1) -> dict[int, int]:
    """The records that Spark's queries after one read from a topic, by the query's number and the server's figures.

    The server forgets its oldest queries, other workers' among them, so their place in the list says nothing.
    """
    [application] = fetch_rest(server, "applications")
    queries = fetch_rest(
        server, f"applications/{application['id']}/sql?details=true&planDescription=true&length=100000"
    )
    return {
        query["id"]: sum(
            int(metric["value"].replace(",", ""))
            for node in query["nodes"]
            if "Kafka" in node["nodeName"]
            for metric in node["metrics"]
            if metric["name"] == "number of output rows"
        )
        for query in queries
        if query["id"] > after and topic in query["planDescription"]
    }


def _running_jobs(server: SparkConnect, deployment: Deployment) -> int:
    """The deployment's jobs that run on the server now, by Spark's own REST interface."""
    return len(list_tagged_jobs(server, f"User_{deployment.stream.topic}_", status="running"))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_command_stops_its_work_too(
    deployed: tuple[Deployment, DagsterServices], spark_server: SparkConnect, number: signal.Signals
) -> None:
    """Ctrl-C in a terminal, and the end of a container; the slice is taken by the next run."""
    deployment, services = deployed
    commits = len(deployment.commits("raw"))
    deployment.slow.touch()
    log = Path(deployment.root / "interrupted.log")
    try:
        with log.open("w") as out:
            child = subprocess.Popen(
                deployment.cli("asset", "materialize", "--select", "group:orders", "--partition", deployment.keys()[0]),
                env=deployment.environment,
                cwd=deployment.root,
                stdout=out,
                stderr=out,
            )
            wait_for(lambda: _running_jobs(spark_server, deployment) > 0, SECONDS, "Spark's work on the slow slice")
            child.send_signal(number)
            assert child.wait(60) != 0
        wait_for(lambda: _running_jobs(spark_server, deployment) == 0, 20, "the end of Spark's work")
    finally:
        deployment.slow.unlink()
    assert len(deployment.commits("raw")) == commits
    _ensure_taken(deployment, services, deployment.keys()[:1], "raw")
    assert len(deployment.commits("raw")) == commits + 1
    _tables_hold_the_topic(deployment)
