"""The connections as Dagster resources."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import PrivateAttr

from highwater.assets.classified import SharedFrames
from highwater.assets.concurrent_stages import ConcurrentStages
from highwater.errors import HighwaterError
from highwater.orchestration.deployment import read_process_settings
from highwater.orchestration.redaction import list_remembered_secrets, remember_secrets
from highwater.orchestration.worker_leases import LEASE_SECONDS, build_lease_name
from highwater.resources.kafka_tls import read_file_versions
from highwater.settings import Settings

# How long a stage beside another one may take to end after its session was interrupted.
INTERRUPTED_SECONDS = 10.0

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.producer import ReliableProducer
    from highwater.resources.producer_records import OnFailure
    from highwater.schemas import Schema


def read_settings() -> Settings:
    """The settings of this process, read now; their secrets stay known, for errors of clients that are still open."""
    found = read_process_settings()
    remember_secrets(found)
    return found


def list_known_secrets() -> frozenset[str]:
    """The secrets of this process's settings, and those they had before: a client of older ones may be open."""
    with suppress(HighwaterError):  # settings that cannot be read have opened nothing
        read_settings()
    return list_remembered_secrets()


def open_schema_finder() -> "Callable[[int | str], Schema | None] | None":
    """The finder of schemas in the registry of `HIGHWATER_SCHEMA_REGISTRY_URL`, by number or GUID; None without one."""
    from highwater.resources.schema_registry import build_schema_finder

    found = read_settings()
    return build_schema_finder(found.schema_registry_url, found.schema_registry_config)


class KafkaResource(dg.ConfigurableResource["Kafka"]):
    """The brokers of `HIGHWATER_KAFKA_BOOTSTRAP`, with the properties of `HIGHWATER_KAFKA_CONFIG`."""

    def open(self) -> "Kafka":
        """A client; it connects when it is first used."""
        found = read_settings()
        config = found.kafka_config
        return _open_kafka(found.kafka_bootstrap, frozenset(config.items()), read_file_versions(config))


class ProducerResource(dg.ConfigurableResource["ReliableProducer"]):
    """A reliable producer for the brokers of `HIGHWATER_KAFKA_BOOTSTRAP`, for assets of your own that send records."""

    def open(
        self, clients: int = 1, most_with_client: int | None = None, on_failure: "OnFailure | None" = None
    ) -> "ReliableProducer":
        """A producer of the caller's own; use it as a context manager, whose end reports undelivered records.

        Args:
            clients: how many share its work; more than one is faster to brokers that are far away.
            most_with_client: how many records may be under way at a time; the producer's default if None.
            on_failure: treatment of the later records of a key after one failed for good; None stops the key.

        Raises:
            ConfigurationError: a property of `HIGHWATER_KAFKA_CONFIG` would weaken it, or another client of ours.
        """
        from highwater.resources.kafka_options import refuse_weakening
        from highwater.resources.producer import MAX_WITH_CLIENT, ReliableProducer
        from highwater.resources.producer_properties import build_producer_properties
        from highwater.resources.producer_records import OnFailure

        found = read_settings()
        refuse_weakening(found.kafka_config)
        return ReliableProducer(
            build_producer_properties(found.kafka_bootstrap, found.kafka_config),
            on_failure=on_failure or OnFailure.STOP_KEY,
            most_with_client=most_with_client or MAX_WITH_CLIENT,
            clients=clients,
        )


class LedgerResource(dg.ConfigurableResource["Ledger"]):
    """The ledger of `HIGHWATER_LEDGER_URL`."""

    # In the process of a run it also holds the lease of the run's worker. Every step of ours needs the ledger, and the
    # steps of a run share its resources: the lease lasts while the process has steps to do or waits for a pool.
    _alive: object = PrivateAttr(default=None)

    def open(self) -> "Ledger":
        """The ledger, created where it is missing."""
        return _open_ledger(read_settings().ledger_url)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Begin to show that the run's worker lives; in ticks there is no run.

        A ledger that cannot be opened is reported by the steps, which need it.
        """
        if context.run is not None:
            with suppress(HighwaterError):
                self._alive = self.open().build_heartbeat(build_lease_name(context.run), LEASE_SECONDS)
                self._alive.start()

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End it; the lease covers the moment until Dagster has recorded the run's end."""
        del context
        alive, self._alive = self._alive, None
        if alive is not None:
            alive.stop()  # type: ignore[attr-defined]  # pydantic needs a type that exists at run time


# One, not more: the client of an older password would go on connecting, and brokers lock users for that.
@lru_cache(maxsize=1)
def _open_kafka(bootstrap: str, config: frozenset[tuple[str, str]], files: object) -> "Kafka":
    """One client a process: a code server ticks for months, and each client has threads of its own.

    A login that changed, or a file of a key that was replaced, makes another: librdkafka reads files once.
    """
    from highwater.resources.kafka import Kafka

    del files
    return Kafka(bootstrap, dict(config))


# One for the same reason. A ledger that is in use outlives its place here.
@lru_cache(maxsize=1)
def _open_ledger(url: str) -> "Ledger":
    """One pool of connections a process; those of an older password are closed when nobody uses them."""
    from highwater.resources.ledger import Ledger

    return Ledger(url)


class LakeResource(dg.ConfigurableResource["Lake"]):
    """The lake below `HIGHWATER_LAKE`."""

    def open(self) -> "Lake":
        """The lake; nothing is read yet."""
        from highwater.resources.lake import Lake

        found = read_settings()
        return Lake(found.lake, found.catalog)


class SparkResource(dg.ConfigurableResource["SparkSession"]):
    """Spark: the Connect server of `SPARK_REMOTE`, else a session in the process of the run."""

    # The first step that needs it opens the session, and all steps of a run share it. So a Spark that is unavailable
    # fails the step, with its retries, and not the whole run before it began.
    _session: object = PrivateAttr(default=None)
    # For a stage beside another one.
    _second: object = PrivateAttr(default=None)
    _classified: SharedFrames = PrivateAttr(default_factory=SharedFrames)
    _concurrent: ConcurrentStages = PrivateAttr(default_factory=ConcurrentStages)

    @property
    def classified(self) -> SharedFrames:
        """The classified rows that Spark holds for the session, shared by the steps of the run."""
        return self._classified

    @property
    def concurrent(self) -> ConcurrentStages:
        """The stage that works beside the one of a step."""
        return self._concurrent

    def get_session(self) -> "SparkSession":
        """The run's session."""
        if self._session is None:
            self._session = open_session(read_settings())
        return self._session  # type: ignore[return-value]  # pydantic needs a type that exists at run time

    def get_second_session(self) -> "SparkSession":
        """A session beside the run's, on the same driver: what one of them sets does not reach the other."""
        if self._second is None:
            self._second = open_session_beside(self.get_session(), read_settings())
        return self._second  # type: ignore[return-value]

    def interrupt(self) -> None:
        """Stop what the run's sessions do, on the server too, and let go of them; the step's next try opens others.

        A session does not outlive its server: after a restart its client refuses every answer ("Please create a new
        Spark Session to reconnect"), so that all tries of the step would fail on a server that is well.
        """
        from highwater.resources.spark import interrupt, try_once

        sessions = self._take_sessions()
        with ExitStack() as closing:
            for session in sessions:
                closing.callback(close_session, session)
            closing.callback(self._classified.release)
            closing.callback(self._concurrent.wait, INTERRUPTED_SECONDS)
            for session in sessions:
                # Where the server is unavailable the error under way has waited for it already.
                try_once(session)
                closing.callback(interrupt, session)

    def _take_sessions(self) -> "list[SparkSession]":
        found = [session for session in (self._session, self._second) if session is not None]
        self._session = self._second = None
        return found  # type: ignore[return-value]

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Let go of the server's sessions; a local one ends with its process."""
        del context
        from highwater.resources.spark import try_once

        sessions = self._take_sessions()
        for session in sessions:
            try_once(session)
        self._classified.release()
        for session in sessions:
            close_session(session)


def open_session(found: Settings) -> "SparkSession":
    """Open a session with the deployment's settings.

    Raises:
        ConfigurationError: the session could lose commits to a lake on S3.
        DependencyUnavailableError: Spark does not answer.
    """
    from highwater.resources.object_store import ensure_log_store
    from highwater.resources.spark import connect, delta_errors, prepare
    from highwater.resources.spark_places import parse_address

    # A Connect server's parameters may hold a token (I13).
    with delta_errors(parse_address(found.spark_remote) if found.spark_remote else found.spark_master):
        # A session of its own: the version of a last commit, and an interrupt, are a session's.
        session = prepare(connect(found.spark_remote) if found.spark_remote else _start_local_session(found))
        try:
            ensure_log_store(session, found.lake)
        except BaseException:
            close_session(session)
            raise
    return session


def open_session_beside(session: "SparkSession", found: Settings) -> "SparkSession":
    """Open another session on the driver of a session.

    Raises:
        DependencyUnavailableError: Spark does not answer.
    """
    from highwater.resources.spark import is_connect, prepare

    return open_session(found) if is_connect(session) else prepare(session.newSession())


def _start_local_session(found: Settings) -> "SparkSession":
    from dagster_pyspark import PySparkResource

    from highwater.resources.local_spark import build_jars_conf, set_java
    from highwater.resources.object_store import build_s3a_conf, is_s3
    from highwater.resources.spark import STATIC_CONF

    jars = build_jars_conf(found, os.environ)
    set_java(os.environ, found.home)
    conf = {"spark.master": found.spark_master, "spark.app.name": "highwater", **STATIC_CONF, **jars}
    if is_s3(found.lake):
        conf |= build_s3a_conf(os.environ)
    spark = PySparkResource(spark_config=conf)
    spark.setup_for_execution(dg.build_init_resource_context())
    session: SparkSession = spark.spark_session
    return session


def close_session(session: "SparkSession") -> None:
    """End a session that `open_session` opened."""
    from highwater.resources.spark import close

    close(session)


@contextmanager
def use_session(found: Settings) -> Iterator["SparkSession"]:
    """A session for work outside of a run."""
    session = open_session(found)
    try:
        yield session
    finally:
        close_session(session)


def default_resources() -> dict[str, object]:
    """The resources under the names that the assets and sensors ask for."""
    return {
        "kafka": KafkaResource(),
        "producer": ProducerResource(),
        "ledger": LedgerResource(),
        "lake": LakeResource(),
        "spark": SparkResource(),
    }
