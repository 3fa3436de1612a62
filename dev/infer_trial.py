"""The trial of `highwater infer`: unknown topics to tables by a new user's commands, against the clock."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev import paths
from dev.broker import EmbeddedBroker
from dev.infer_trial_topics import TOPICS, Account, Topic
from dev.processes import LOOPBACK, Child, exit_status, free_port
from dev.registry import EmbeddedRegistry
from highwater import settings
from highwater.errors import HighwaterError

if TYPE_CHECKING:
    import dagster as dg

RECORDS = 100_000
PARTITIONS = 3
# Five minutes from the first command to the tables.
ALLOWED_SECONDS = 300.0
# Seen on 2 busy cores: 90 s. A trial that is too slow is to end with its figures all the same.
LONGEST_SECONDS = 480.0
# Opening Dagster's storage and the table takes a fifth of a second of processor.
LOOK_SECONDS = 2.0
TABLES = ("raw", "events", "rejects", "current")
SHOWN_ROWS = 3


@dataclass
class Outcome:
    """The result of a trial.

    Args:
        name: the trial.
        seconds: of each stage, in their order.
        differences: what the tables hold otherwise than the generator's account, a sentence each.
    """

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def total(self) -> float:
        """From the first command to the tables."""
        return sum(self.seconds.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - began

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        state = "as written" if not self.differences else f"{len(self.differences)} differences"
        return f"{self.name}: {self.total:.0f} s ({stages}); {state}"


class Trial:
    """One topic, taken to tables in a project of its own.

    Args:
        topic: what is in the topic.
        folder: where the project and the logs go.
        bootstrap: the broker.
        registry_url: the schema registry, if there is one.
    """

    def __init__(self, topic: Topic, folder: Path, bootstrap: str, registry_url: str | None) -> None:
        self._topic = topic
        self._folder = folder
        self._bootstrap = bootstrap
        self._registry_url = registry_url
        self.project = folder / f"trial-{topic.stream.replace('_', '-')}"
        self.home = self.project / ".highwater"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HIGHWATER_", "DAGSTER_", "SPARK_"))}
        self.environment = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            settings.KAFKA_BOOTSTRAP: bootstrap,
            **({settings.SCHEMA_REGISTRY_URL: registry_url} if registry_url else {}),
        }

    def fill(self, records: int) -> Account:
        """Create the topic and send its records."""
        from confluent_kafka import Producer
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self._bootstrap})
        # The records' timestamps are older than the broker's retention.
        config = {"retention.ms": "-1", **self._topic.config}
        made = NewTopic(self._topic.name, PARTITIONS, 1, config=config)
        admin.create_topics([made])[self._topic.name].result(30)
        queue = {"queue.buffering.max.messages": 1_000_000, "linger.ms": 20, "enable.idempotence": True}
        producer = Producer({"bootstrap.servers": self._bootstrap, **queue})
        account = Account()
        for sent in self._topic.write(records, account, self._register):
            producer.produce(
                self._topic.name, sent.value, sent.key, timestamp=sent.timestamp_ms, headers=list(sent.headers)
            )
            producer.poll(0)
        if left := producer.flush(120):
            raise HighwaterError(f"{left} records were not delivered within 120 s", remedy="read the broker's log")
        return account

    def _register(self, subject: str, schema: str, kind: str) -> int:
        from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

        client = SchemaRegistryClient({"url": self._registry_url})
        # The field `currency` of the newer schema has a default, so any rule of compatibility lets it pass.
        return int(client.register_schema(subject, Schema(schema, kind)))

    def run(self, account: Account, records: int) -> Outcome:
        """Do what a new user does, and compare the tables with the account."""
        outcome = Outcome(self._topic.stream)
        stream = self._topic.stream
        with outcome.stage("init"):
            self._call(self._folder, "highwater", "init", self.project.name)
        self._adopt_jars()
        with outcome.stage("infer"):
            print(self._call(self.project, "highwater", "infer", self._topic.name))
        (self.project / "streams" / "example.py").unlink()
        with outcome.stage("try"):
            print(self._call(self.project, "highwater", "try", stream))
        dagster_home = self.home / "dagster"
        dagster_home.mkdir(parents=True)
        (dagster_home / "dagster.yaml").write_bytes((self.project / "dagster.yaml").read_bytes())
        self.environment |= {"DAGSTER_HOME": str(dagster_home), "HIGHWATER_SENSORS": "running"}
        with outcome.stage("doctor"):
            print(self._call(self.project, "highwater", "doctor", fails=True))
        port = str(free_port())
        command = ["dagster", "dev", "-w", "workspace.yaml", "-h", LOOPBACK, "-p", port]
        dagster = Child("dagster", command, logs=self.home / "logs", environment=self.environment, cwd=self.project)
        try:
            with outcome.stage("dagster"):
                dagster.start()
                dagster.wait_healthy(lambda: bool(self._runs()), LONGEST_SECONDS)
            with outcome.stage("tables"):
                self._wait_for_tables(dagster, records)
            print("  steps: " + ", ".join(self._steps()))
            outcome.differences = [*self._failed_runs(), *self._differences(account, records)]
            print(self._call(self.project, "highwater", "audit", stream, fails=True))
        finally:
            dagster.stop()
        return outcome

    def _adopt_jars(self) -> None:
        """A machine that is set up has the jars: `highwater jars` would fetch them once."""
        (self.home / "jars").mkdir(parents=True)
        (self.home / "jars" / "spark").symlink_to(paths.TOOLS / "jars" / "spark")

    def _call(self, folder: Path, *command: str, fails: bool = False) -> str:
        """The command and its output; with `fails` whatever its exit status is."""
        done = subprocess.run(
            command, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode and not fails:
            raise HighwaterError(
                f"{' '.join(command)} ended with exit status {done.returncode}",
                found=done.stdout + done.stderr,
                remedy="read its message",
            )
        return f"$ {' '.join(command)}\n{done.stdout}{done.stderr}"

    @contextmanager
    def _instance(self) -> Iterator[dg.DagsterInstance]:
        import dagster as dg

        with dg.DagsterInstance.from_config(self.environment["DAGSTER_HOME"]) as instance:
            yield instance

    def _runs(self) -> list[Any]:
        with self._instance() as instance:
            return list(instance.get_runs())

    def _wait_for_tables(self, dagster: Child, records: int) -> None:
        """Wait until raw has all records and no run is under way."""

        def is_done() -> bool:
            time.sleep(LOOK_SECONDS)
            return _count(self._table("raw")) >= records and all(run.is_finished for run in self._runs())

        dagster.wait_healthy(is_done, LONGEST_SECONDS)

    def _table(self, name: str) -> Path:
        return self.home / "lake" / self._topic.stream / name

    def _steps(self) -> list[str]:
        with self._instance() as instance:
            found = [
                (step.start_time, step.step_key, step.end_time - step.start_time)
                for run in instance.get_runs()
                for step in instance.get_run_step_stats(run.run_id)
                if step.start_time and step.end_time
            ]
        return [f"{key} {seconds:.1f} s" for _, key, seconds in sorted(found)]

    def _failed_runs(self) -> list[str]:
        return [
            f"run {run.run_id} of {run.job_name} ended {run.status.value}" for run in self._runs() if run.is_failure
        ]

    def _differences(self, account: Account, records: int) -> list[str]:
        """Values that DuckDB reads otherwise than the account says."""
        tables = [name for name in TABLES if self._table(name).is_dir()]
        connection = _connected()
        for name in tables:
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM delta_scan('{self._table(name)}')")
        wanted = {
            f"SELECT count(*) FROM raw WHERE topic = '{self._topic.name}'": records,
            "SELECT count(*) FROM events": account.events,
            "SELECT count(DISTINCT (origin_partition, origin_offset)) FROM rejects": account.rejects,
        }
        if account.deletes:
            wanted["SELECT count(*) FROM events WHERE deleted"] = account.deletes
        if account.current is not None:
            wanted["SELECT count(*) FROM current"] = account.current
        elif "current" in tables:
            return ["there is a table current, and the records have no version"]
        found = [
            f"{query}: {was:,}, and not {number:,}"
            for query, number in wanted.items()
            if (was := connection.execute(query).fetchall()[0][0]) != number
        ]
        return [*found, *(one for query, rows in account.rows.items() for one in _unlike(connection, query, rows))]


def _connected() -> Any:
    import duckdb
    import duckdb_extension_delta

    connection = duckdb.connect()
    [folder] = duckdb_extension_delta.__path__
    connection.execute(f"LOAD '{folder}/extensions/v{duckdb.__version__}/delta.duckdb_extension'")
    return connection


def _count(table: Path) -> int:
    if not (table / "_delta_log").is_dir():
        return 0
    return int(_connected().execute(f"SELECT count(*) FROM delta_scan('{table}')").fetchall()[0][0])


def _unlike(connection: Any, query: str, rows: Sequence[tuple[Any, ...]]) -> list[str]:
    import duckdb

    try:
        found = connection.execute(query).fetchall()
    except duckdb.Error as error:
        return [f"{query}: {error}"]
    wanted, read = Counter(rows), Counter(found)
    missing, more = wanted - read, read - wanted
    if not missing and not more:
        return []
    first = f"wanted {sorted(missing, key=str)[:SHOWN_ROWS]}, found {sorted(more, key=str)[:SHOWN_ROWS]}"
    return [f"{query}: {missing.total():,} rows are missing, {more.total():,} are not wanted: {first}"]


def run_trials(names: Sequence[str], records: int, home: Path) -> list[Outcome]:
    """Fill the topics of some trials, and take one after the other to tables."""
    outcomes = []
    with ExitStack() as closing:
        broker = closing.enter_context(EmbeddedBroker(home))
        registry = None
        if any(TOPICS[name].registry for name in names):
            registry = closing.enter_context(EmbeddedRegistry(home))
        for name in names:
            topic = TOPICS[name]
            url = registry.url if registry is not None and topic.registry else None
            trial = Trial(topic, home, broker.bootstrap, url)
            began = time.monotonic()
            account = trial.fill(records)
            print(f"== {name}: {records:,} records in {time.monotonic() - began:.0f} s", flush=True)
            outcomes.append(trial.run(account, records))
            print(f"{outcomes[-1]}\n" + "".join(f"  {one}\n" for one in outcomes[-1].differences), flush=True)
    return outcomes


def report(outcomes: Sequence[Outcome]) -> Mapping[str, Any]:
    """The figures as plain values."""
    return {
        one.name: {"total": round(one.total, 1), "stages": {k: round(v, 1) for k, v in one.seconds.items()}}
        for one in outcomes
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; exit status 1 when a trial takes too long or its tables differ from what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.infer_trial", description="Take unknown topics to tables as a new user does, by the clock."
    )
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(TOPICS)}; default: all")
    parser.add_argument("--records", type=int, default=RECORDS, help="records in each topic")
    parser.add_argument("--home", type=Path, help="an empty folder for all files, which stay; default: a temporary one")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.trials} - {*TOPICS}):
        parser.error(f"no such trial: {', '.join(unknown)}")
    with ExitStack() as closing:
        home = options.home or Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="highwater-infer-")))
        home.mkdir(parents=True, exist_ok=True)
        outcomes = run_trials(options.trials or [*TOPICS], options.records, home.absolute())
    print(json.dumps(report(outcomes), indent=2))
    for one in outcomes:
        print(one)
    return int(any(one.differences or one.total > ALLOWED_SECONDS for one in outcomes))


if __name__ == "__main__":
    sys.exit(exit_status(main))
