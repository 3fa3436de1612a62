"""What all tests share: the real services, started when a test first asks for them, and names of one's own.

Services live for the whole session, topics and lakes for one test: so tests neither wait for JVMs nor see each other.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings as hypothesis

from dev import processes
from highwater import settings

if TYPE_CHECKING:
    import dagster as dg
    from pyspark.sql import SparkSession

    from dev.object_store import ObjectStore
    from dev.postgresql import Server
    from dev.spark_connect import SparkConnect
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from tests.helpers.support import Bench

TopicFactory = Callable[..., str]

# A bound on a wait only distinguishes a hang from a slow machine: machines were seen to hang for minutes.
processes.PATIENCE = 5.0

# How long an example takes says something of the machine alone.
hypothesis.register_profile("untimed", deadline=None)
hypothesis.load_profile("untimed")


# A shell that starts the tests after it has them ignore Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# These run whole stacks. Two at once take each other's processor time until both end at their time-outs, so one worker
# has them all, and begins with them.
STACKS = ("test_demo.py", "test_soak.py", "test_tutorial.py", "test_crashes_daemon.py", "test_spark_anywhere.py")
# Each of these has a test of minutes. One that began last would keep the run going while the other workers are idle.
LONGEST = (
    "test_crashes.py",
    "test_s3.py",
    "test_accepted_topic.py",
    "test_generated_code.py",
    "test_foreign.py",
    "test_rebuilding_all.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whatever starts a JVM is slow, so that `make test-fast` starts none."""
    if {"bootstrap", "spark_server"} & {*getattr(item, "fixturenames", ())}:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker begin with some of the longest modules: at first every worker has an equal, contiguous part."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules = [[one for one in items if one.path.name == name] for name in LONGEST]
    others = [one for one in items if one.path.name not in {*STACKS, *LONGEST}]
    begins = [[one for name in STACKS for one in items if one.path.name == name]] + [[] for _ in range(workers - 1)]
    for at, module in enumerate(modules):
        begins[1 + at % (workers - 1) if workers > 1 else 0] += module
    ordered: list[pytest.Item] = []
    for worker, mine in enumerate(begins):
        left = len(items) * (worker + 1) // workers - len(ordered) - len(mine)
        ordered += mine + others[: max(0, left)]
        del others[: max(0, left)]
    items[:] = ordered + others


@pytest.fixture(autouse=True, scope="session")
def _no_configuration_of_the_machine() -> Iterator[None]:
    """What a person's shell names (`source .highwater/env`) must not be written to by tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith("HIGHWATER_") or name in {settings.SPARK_REMOTE, "DAGSTER_HOME"}:
                patch.delenv(name)
        patch.setenv("DAGSTER_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(autouse=True)
def _patience_with_brokers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long an answer is waited for.

    The session's broker answers late on a machine that hangs for seconds, and a run would wait. A test that is not slow
    starts none, so nothing answers, and the wait only takes time.
    """
    if {"bench", "module_bench"} & {*request.fixturenames}:
        seconds = 60.0
    elif request.node.get_closest_marker("slow"):
        return
    else:
        seconds = 0.3
        monkeypatch.setattr("highwater.resources.broker_requests.FIRST_SECONDS", 0.2)
    for module in ("kafka", "consumer_groups", "topic_facts", "dlq_topics"):
        monkeypatch.setattr(f"highwater.resources.{module}.REQUEST_SECONDS", seconds)


@pytest.fixture(autouse=True)
def _second_look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks at a topic follow each other at once: seconds in between would add minutes to the tests of losses."""
    monkeypatch.setattr("highwater.resources.kafka.LOOKS_APART", 0.05)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger's, of the test's own."""
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture
def ledger(url: str) -> Ledger:
    from highwater.resources.ledger import Ledger

    return Ledger(url)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake of the test's own, where nothing is yet."""
    from highwater.resources.lake import Lake

    return Lake(str(tmp_path / "lake"))


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance of the test's own."""
    import dagster as dg

    with dg.DagsterInstance.ephemeral(tempdir=str(tmp_path)) as made:
        yield made


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Server]:
    """A PostgreSQL server of this worker."""
    from dev import postgresql

    try:
        postgresql.postgresql_programs()
    except postgresql.NotThereError as error:
        pytest.skip(str(error))
    with postgresql.postgresql("max_connections=300") as server:
        yield server


@pytest.fixture(scope="session")
def no_pgbouncer() -> str | None:
    """Why there is no PgBouncer; None where there is one."""
    from dev import postgresql

    try:
        postgresql.pgbouncer_program()
    except postgresql.NotThereError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def pgbouncer_server(postgresql_server: Server, no_pgbouncer: str | None) -> Iterator[Server]:
    """PgBouncer in transaction mode, in front of the server."""
    from dev import postgresql

    if no_pgbouncer:
        pytest.skip(no_pgbouncer)
    with postgresql.pgbouncer(postgresql_server) as server:
        yield server


@pytest.fixture
def postgresql(postgresql_server: Server) -> Iterator[Callable[[], str]]:
    """Makes databases and gives their URLs; they go with the test."""
    with postgresql_server.databases() as create:
        yield lambda: postgresql_server.url(create())


@pytest.fixture
def pgbouncer(postgresql_server: Server, pgbouncer_server: Server) -> Iterator[Callable[[], str]]:
    """Makes databases and gives their URLs at PgBouncer; they go with the test."""
    with postgresql_server.databases() as create:
        yield lambda: pgbouncer_server.url(create())


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A database whose folder is missing yet."""
    return f"sqlite:///{tmp_path / 'folder' / 'ledger.sqlite'}"


@pytest.fixture(params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def either_url(request: pytest.FixtureRequest) -> str:
    """A database of the test's own: SQLite, and PostgreSQL by way of PgBouncer where there is one."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    direct = request.getfixturevalue("no_pgbouncer") is not None
    return str(request.getfixturevalue("postgresql" if direct else "pgbouncer")())


SERVERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("postgresql", "pgbouncer")]


@pytest.fixture(params=["sqlite", *SERVERS])
def each_url(request: pytest.FixtureRequest) -> str:
    """A database of the test's own, once of each kind; PostgreSQL also by way of PgBouncer in transaction mode."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_url"))
    return str(request.getfixturevalue(request.param)())


@pytest.fixture(scope="session")
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data and logs of the services that all workers share."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "services"


@pytest.fixture(scope="session")
def bootstrap(session_home: Path) -> str:
    """The address of a real broker, shared by all workers; tests that kill one start their own."""
    from tests.helpers.services import join_broker

    return join_broker(session_home).bootstrap


@pytest.fixture(scope="session")
def spark_server(session_home: Path) -> SparkConnect:
    """A warm Spark Connect server, shared by all workers; tests that kill one start their own."""
    from tests.helpers.services import join_spark

    return join_spark(session_home)


@pytest.fixture(scope="session")
def spark(spark_server: SparkConnect) -> Iterator[SparkSession]:
    """A Connect session, shared by tests that neither interrupt it nor change its settings."""
    from pyspark.sql import SparkSession

    from highwater.resources.spark import close, prepare

    session = prepare(SparkSession.builder.remote(spark_server.remote).create())
    yield session
    close(session)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server of a module's own, which this process and its children find by AWS's variables."""
    from dev.object_store import ObjectStore

    with ObjectStore(tmp_path_factory.mktemp("s3")) as opened, pytest.MonkeyPatch.context() as patch:
        for name, value in opened.variables.items():
            patch.setenv(name, value)
        yield opened


@pytest.fixture
def bucket(store: ObjectStore) -> str:
    """A bucket of the test's own, as a URI."""
    return store.make_bucket(f"lake-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def topic(bootstrap: str, request: pytest.FixtureRequest) -> TopicFactory:
    """Makes topics with names of the test's own: `topic("orders", partitions=3, **{"cleanup.policy": "compact"})`."""
    test = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:60].strip("-")

    def make(name: str = "orders", *, partitions: int = 1, **config: str) -> str:
        full = f"{name}.{test}.{uuid.uuid4().hex[:8]}"
        create_topic(bootstrap, full, partitions, config)
        return full

    return make


def create_topic(bootstrap: str, name: str, partitions: int, config: dict[str, str], replicas: int = 1) -> None:
    """Create a topic and wait until every broker knows a leader of each partition."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, replicas, config=config)])[name].result(120)
    _await_leaders(bootstrap, name, partitions)


def grow(bootstrap: str, name: str, partitions: int) -> None:
    """Add partitions to a topic until it has this many, and wait until every broker knows a leader of each."""
    from confluent_kafka.admin import AdminClient, NewPartitions

    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_partitions([NewPartitions(name, partitions)])[name].result(30)
    _await_leaders(bootstrap, name, partitions)


def _await_leaders(bootstrap: str, name: str, partitions: int) -> None:
    """Ask each broker by itself: one learns of a topic after another, and any of them may answer the next client."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    from dev.processes import wait_until

    def is_led(broker: str) -> bool:
        admin = AdminClient({"bootstrap.servers": broker})
        try:
            found = admin.list_topics(name, timeout=60).topics[name].partitions
        except KafkaException:
            return True  # a broker that is stopped learns of it when it starts
        return len(found) == partitions and all(p.leader >= 0 for p in found.values())

    for broker in bootstrap.split(","):
        wait_until(lambda broker=broker: is_led(broker), 30, f"a leader for each partition of {name} on {broker}")  # type: ignore[misc]


@pytest.fixture
def bench(topic: TopicFactory, spark: SparkSession, bootstrap: str, tmp_path: Path) -> Bench:
    """A stream on a topic of three partitions of its own, with a lake and a ledger of its own."""
    from tests.helpers.support import make_bench

    return make_bench(topic(partitions=3), bootstrap, spark, tmp_path)


@pytest.fixture(scope="module")
def module_bench(bootstrap: str, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench for the fixtures of a module: its tests read what these made, or change a copy of it."""
    from tests.helpers.support import make_bench

    topic = f"orders.module.{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, topic, 3, {})
    return make_bench(topic, bootstrap, spark, tmp_path_factory.mktemp("module"))
