"""A deployment of one stream for tests: its folders, its definitions, its daemon and webserver.

Everything is real; only the stream's topic and limits are the test's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from dev.dagster_services import DagsterServices, prepare_home
from dev.paths import REPOSITORY
from dev.processes import free_port, wait_until
from highwater.orchestration.asset_keys import build_table_keys
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from tests.helpers.support import ORDERS, Message, customers, make_stream, send

if TYPE_CHECKING:
    from highwater.declaration import Limits, Stream

# The file that Dagster loads. While the file SLOW exists, each record that raw reads takes half a second on the server.
DEFINITIONS = """
import os
from pathlib import Path

from highwater.assets import raw
from highwater.declaration import Limits
from highwater.orchestration.build import build_defs
from tests.helpers.support import make_stream

_one_read = raw._read_ranges

def _slowly(*args):
    rows = _one_read(*args)
    if not Path(os.environ["TEST_SLOW"]).exists():
        return rows
    return rows.where("reflect('java.lang.Thread', 'sleep', 500L) IS NULL")

raw._read_ranges = _slowly
stream = make_stream(
    os.environ["TEST_TOPIC"],
    limits=Limits(max_offsets=int(os.environ["TEST_RECORDS"]), slices_per_run=int(os.environ["TEST_SLICES_PER_RUN"])),
)
defs = build_defs(streams=[stream], environment=os.environ)
"""

LAUNCH_BACKFILL = """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
TERMINATE = """mutation ($run: String!) { terminateRun(runId: $run) { __typename } }"""


@dataclass
class Deployment:
    """One stream with folders of its own on services that are shared."""

    root: Path
    stream: Stream
    bootstrap: str
    remote: str
    sensors: bool = False
    lineage_url: str = ""

    @classmethod
    def make(cls, root: Path, topic: str, bootstrap: str, remote: str, limits: Limits, **changes: Any) -> Deployment:
        made = cls(root, make_stream(topic, limits=limits), bootstrap, remote, **changes)
        (root / "definitions_of_test.py").write_text(DEFINITIONS)
        prepare_home(made.dagster_home, ours=True)
        customers(made.lake)
        return made

    @property
    def dagster_home(self) -> Path:
        return self.root / "dagster"

    @property
    def slow(self) -> Path:
        """While this file exists, reading takes its time."""
        return self.root / "slow"

    @property
    def settings(self) -> dict[str, str]:
        """What configures Highwater."""
        return {
            "HIGHWATER_HOME": str(self.root),
            "HIGHWATER_LAKE": str(self.root / "lake"),
            "HIGHWATER_LEDGER_URL": f"sqlite:///{self.root / 'ledger.sqlite'}",
            "HIGHWATER_KAFKA_BOOTSTRAP": self.bootstrap,
            "SPARK_REMOTE": self.remote,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The variables of every process of the deployment."""
        return {
            **os.environ,
            **self.settings,
            "HIGHWATER_SENSORS": "running" if self.sensors else "",
            "DAGSTER_HOME": str(self.dagster_home),
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.root}",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
            "TEST_TOPIC": self.stream.topic,
            "TEST_RECORDS": str(self.stream.limits.max_offsets),
            "TEST_SLICES_PER_RUN": str(self.stream.limits.slices_per_run),
            "TEST_SLOW": str(self.slow),
            "OPENLINEAGE_URL": self.lineage_url,
        }

    @property
    def lake(self) -> Lake:
        return Lake(str(self.root / "lake"))

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.settings["HIGHWATER_LEDGER_URL"])

    @property
    def kafka(self) -> Kafka:
        return Kafka(self.bootstrap, {})

    def instance(self) -> dg.DagsterInstance:
        """Dagster's instance, opened beside the daemon's."""
        return dg.DagsterInstance.from_config(str(self.dagster_home))

    def services(self) -> DagsterServices:
        # Not the usual port: another worker of the tests may take it at the same moment.
        return DagsterServices(self.root, self.environment, ui_port=free_port(), module="definitions_of_test")

    def cli(self, *arguments: str) -> list[str | Path]:
        """A command of Dagster's on the deployment's definitions."""
        return [Path(sys.executable).parent / "dagster", *arguments, "-f", str(self.root / "definitions_of_test.py")]

    def send(self, messages: Sequence[Message]) -> None:
        send(self.bootstrap, self.stream.topic, messages)

    def keys(self) -> list[str]:
        """All planned slices."""
        return [slice_.key for slice_ in self.ledger.list_slices(self.stream.name)]

    def materialised(self, instance: dg.DagsterInstance) -> set[str]:
        """Slices that Dagster holds as materialised in every table."""
        return set.intersection(
            *(set(instance.get_materialized_partitions(key)) for key in build_table_keys(self.stream))
        )

    def commits(self, table: str) -> list[Mapping[str, Any]]:
        """The commits of a table that wrote slices, newest first."""
        from deltalake import DeltaTable

        history = DeltaTable(self.lake.build_table_path(self.stream.name, table)).history()
        return [commit for commit in history if "highwater" in (commit.get("userMetadata") or "")]


class Running:
    """A deployment's code server, webserver and daemon, as a context."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.services = deployment.services()

    def __enter__(self) -> DagsterServices:
        try:
            self.services.touch.start()
            self.services.launch_code()
            self.services.launch()
            self.services.wait_ready()
        except BaseException:
            self.services.stop()
            raise
        return self.services

    def __exit__(self, *_: object) -> None:
        self.services.stop()


def wait_for(found: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll to a deadline."""
    wait_until(found, seconds, what)


__all__ = ["LAUNCH_BACKFILL", "ORDERS", "TERMINATE", "Deployment", "Running", "wait_for"]
