"""The doctor: every connection, permission and setting is tried once, and each failure names its remedy."""

# Nothing is created but one file or table in the lake, one lease in the ledger and one partition in Dagster's storage,
# which are removed again, and nothing is sent. Spark runs one job.

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from highwater import settings as names
from highwater.assets.dlq_marks import PREFIX, SEPARATOR
from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    HighwaterError,
    PermanentError,
    TopicAbsentError,
)
from highwater.formats import Avro, Json, Protobuf
from highwater.instances import ONE_INSTANCE
from highwater.message_size import format_config_command
from highwater.orchestration.checking.topic_audit import check_published_topics
from highwater.orchestration.dagster_home import ensure_home, translate_errors
from highwater.orchestration.reporting.consumer_lag import measure_unread_ages, read_raw_slices
from highwater.orchestration.reporting.publication_status import find_accepted_vanished_error
from highwater.orchestration.reporting.spark_trial import try_spark
from highwater.orchestration.reporting.trial_results import TrialResult, Try, run_trial
from highwater.resources.consumer_groups import build_denied_error, ensure_no_member
from highwater.resources.deleted_topics import find_vanished_error, read_state
from highwater.resources.delta import open_table
from highwater.resources.delta_rs_writes import try_storage
from highwater.resources.dlq_topics import check_accepted, ensure_no_drift
from highwater.resources.object_store import ensure_conditional_put, is_s3
from highwater.resources.topic_facts import (
    fetch_allowed_operations,
    fetch_topic_facts,
    fetch_topic_settings,
    has_broker_timestamps,
)
from highwater.resources.transactions import Transactions
from highwater.routing import compute_longest_retry_delay
from highwater.slices import OffsetRange
from highwater.topic_rules import RETENTION_PER_AGE, Finding, Level, check_topic, find_retention
from highwater.wording import format_duration

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.deployment import Deployment
    from highwater.settings import Settings
    from highwater.topic_rules import TopicFacts

CONNECT_SECONDS = 3.0
READ_SECONDS = 10.0
# How long the ledger would keep the doctor's lease if it died with it.
LEASE_SECONDS = 30.0
# The shortest delay of a tier is 1 s, the shortest usual one 10 s. An answer of the database takes less than this.
LONGEST_SKEW = timedelta(seconds=5)
# As much as a small file of a table; a smaller one may fit into what a full disk reserves.
TRIAL_BYTES = 2**20


def examine(
    deployment: Deployment, settings: Settings, environment: Mapping[str, str], without: Collection[str] = ()
) -> Iterator[TrialResult]:
    """Try everything, one after another; nothing that fails keeps the rest from being tried.

    Args:
        deployment: the connections.
        settings: where everything is.
        environment: for Dagster's and Java's variables.
        without: services that are not started yet and not tested; without `Kafka` no stream is tested.
    """
    parts: dict[str, Try] = {
        "declarations": lambda: _check_declarations(deployment),
        "settings": lambda: _check_process_settings(environment),
        "ledger": lambda: _check_ledger(deployment),
        "clock": lambda: _check_clock(deployment),
        "lake": lambda: _check_lake(settings.lake),
        "Dagster": lambda: _check_dagster(environment),
        "Kafka's configuration for Spark": lambda: _check_spark_options(deployment),
        "Kafka": lambda: f"{len(deployment.open_kafka().list_topic_names()):,} topics at {settings.kafka_bootstrap}",
    }
    if settings.alerts_url is not None:
        url = settings.alerts_url
        parts["receiver of alerts"] = lambda: _check_receiver(url)
    if settings.schema_registry_url is not None or any(map(_needs_registry, _list_declared_streams(deployment))):
        parts["schema registry"] = lambda: _check_registry(settings)
    for what, trial in parts.items():
        if what not in without:
            yield run_trial(what, trial)
    if "Spark" not in without:
        yield from try_spark(settings, environment, avro=any(map(_is_avro, _list_declared_streams(deployment))))
    if "Kafka" in without:
        yield TrialResult("streams", "not tried before their broker runs: highwater doctor tries it then")
        return
    try:
        streams = deployment.list_streams().values()
    except HighwaterError:
        return  # reported above
    for stream in streams:
        yield from _check_stream(deployment, stream)


def _check_declarations(deployment: Deployment) -> str:
    for error in deployment.declarations.faults.values():
        raise error
    return ", ".join(sorted(deployment.list_streams()))


def _check_process_settings(environment: Mapping[str, str]) -> str:
    """The variables that commands do not read, and the processes of Dagster and `serve-metrics` do.

    Raises:
        ConfigurationError: one has a value that cannot be used.
    """
    names.read_log_format(environment)
    names.find_docs_url(environment)
    names.parse_metrics_listen(environment.get(names.METRICS_LISTEN) or "")
    sensors = environment.get(names.SENSORS) or "running"
    if sensors.lower() != "running":
        raise ConfigurationError(
            f"{names.SENSORS} has a value that starts no sensor",
            found=sensors,
            remedy="set it to running, or leave it out and switch the sensors on in Dagster's UI",
        )
    return "the variables of the environment can be used"


def _list_declared_streams(deployment: Deployment) -> list[Stream]:
    """The declared streams; none where they cannot be read, which is reported by itself."""
    try:
        return list(deployment.list_streams().values())
    except HighwaterError:
        return []


def _needs_registry(stream: Stream) -> bool:
    formats = (stream.value, stream.key_format)
    return any(isinstance(one, Avro | Json | Protobuf) and one.registry for one in formats)


def _is_avro(stream: Stream) -> bool:
    return any(isinstance(one, Avro) for one in (stream.value, stream.key_format))


def _check_registry(settings: Settings) -> str:
    from highwater.resources.schema_registry import open_registry

    found = open_registry(settings)
    if found is None:
        raise ConfigurationError(
            "a stream has its schemas in a registry, and none is configured",
            remedy=f"set {names.SCHEMA_REGISTRY_URL}, as docs/configuration.md says",
        )
    return f"{len(found.list_subjects()):,} subjects"


def _check_spark_options(deployment: Deployment) -> str:
    """The number of properties that Spark's client gets; not their values, since some are secrets."""
    return f"{len(deployment.open_kafka().build_spark_options())} properties"


def _check_stream(deployment: Deployment, stream: Stream) -> Iterator[TrialResult]:
    def check_main_topic() -> str:
        state = read_state(deployment.open_ledger(), deployment.open_kafka(), stream, stream.topic)
        return f"{len(state.partitions)} partitions"

    found = run_trial(f"topic {stream.topic}", check_main_topic)
    yield found
    if found.error is None:
        yield run_trial(f"reading {stream.topic}", lambda: _check_reading(deployment, stream.topic))
        yield run_trial(f"permissions of {stream.name}", lambda: _check_permissions(deployment, stream))
        yield from _check_topic_rules(deployment, stream)
        yield _check_dlq(deployment, stream)
        if stream.publishes is not None:
            yield run_trial(
                f"topic of accepted events {stream.publishes.topic}", lambda: _check_accepted_topic(deployment, stream)
            )
            group = f"highwater.pub.{stream.publishes.topic}"
            yield run_trial(f"group {group}", lambda: _check_group(deployment, group))
        for one in stream.foreign_topics:
            yield _check_foreign_topic(deployment, stream, one)
        yield run_trial(f"transactions of {stream.name}", lambda: _check_transactions(deployment, stream))
        yield run_trial(f"group {stream.group}", lambda: _check_group(deployment, stream.group))
    yield run_trial(f"Dagster instances of {stream.name}", lambda: _check_instances(deployment, stream))
    if stream.lookup is not None:
        table = stream.lookup.table
        wanted = [stream.lookup.column, *[one.reference for one in stream.fields if one.reference is not None]]
        yield run_trial(
            f"reference table {table}",
            lambda: _check_reference_table(deployment.open_lake().build_reference_path(table), wanted),
        )


def _check_instances(deployment: Deployment, stream: Stream) -> str:
    """Ensure that one Dagster instance at the most works on a stream.

    Raises:
        ConfigurationError: two do.
    """
    instances, now = deployment.open_ledger().instances, datetime.now(UTC)
    if found := instances.list_concurrent(stream.name, now):
        raise ConfigurationError(
            f"{len(found)} Dagster instances work on {stream.name} at the same time",
            found="; ".join(one.text for one in found),
            remedy=ONE_INSTANCE,
        )
    last = max(instances.list_for_stream(stream.name), key=lambda one: one.last_seen, default=None)
    return "no sensor ticked yet" if last is None else last.text


def _check_dlq(deployment: Deployment, stream: Stream) -> TrialResult:
    what = f"DLQ topics of {stream.name}"
    try:
        text, warning = ensure_no_drift(
            deployment.open_kafka(), stream, partial(find_vanished_error, deployment.open_ledger(), stream)
        )
    except HighwaterError as error:
        return TrialResult(what, error=error)
    return TrialResult(what, text, warning=warning)


def _check_accepted_topic(deployment: Deployment, stream: Stream) -> str:
    find_error = partial(find_accepted_vanished_error, deployment.open_ledger(), deployment.open_lake(), stream)
    return check_accepted(deployment.open_kafka(), stream, find_error)


def _check_foreign_topic(deployment: Deployment, stream: Stream, topic: str) -> TrialResult:
    """A topic that another system fills, and may not have made yet."""
    what, kafka = f"DLQ topic {topic} of another system", deployment.open_kafka()
    try:
        partitions = len(kafka.read_topic_state(topic).partitions)
        clock = "the broker" if has_broker_timestamps(kafka, topic) else "producers"
        settings = fetch_topic_settings(kafka, topic)
    except TopicAbsentError:
        return TrialResult(
            what, "it is not there: the other system has not made it yet, or the name is wrong", warning=True
        )
    except HighwaterError as error:
        return TrialResult(what, error=error)
    found = f"{partitions} partitions, timestamps set by {clock}"
    waits, retained_for = compute_longest_retry_delay(stream.delays[topic]), find_retention(settings)
    if retained_for is None or retained_for >= RETENTION_PER_AGE * waits:
        return TrialResult(what, found)
    needed = f"retention.ms={int(RETENTION_PER_AGE * waits / timedelta(milliseconds=1))}"
    return TrialResult(
        what,
        f"{found}; it keeps a record for {format_duration(retained_for)}, "
        f"which waits there for up to {format_duration(waits)}",
        warning=True,
        remedy=format_config_command(kafka.bootstrap, topic, needed),
    )


def _check_topic_rules(deployment: Deployment, stream: Stream) -> Iterator[TrialResult]:
    try:
        found = {stream.topic: check_topic(_fetch_main_facts(deployment, stream))}
        published, errors = check_published_topics(deployment.open_kafka(), stream)
    except HighwaterError as error:
        yield TrialResult(f"topic {stream.topic}: rules", error=error)
        return
    for topic, findings in {**found, **published}.items():
        yield from (_convert_finding(topic, one) for one in findings if one.level is not Level.OK)
    yield from (TrialResult(f"topics that {stream.name} publishes to: rules", error=error) for error in errors)


def _fetch_main_facts(deployment: Deployment, stream: Stream) -> TopicFacts:
    """The facts of the main topic; of a planned one with the age of the oldest unread record, for its retention."""
    ledger, kafka = deployment.open_ledger(), deployment.open_kafka()
    if ledger.topics.read_planned_topic(stream.name, stream.topic) is None:
        return fetch_topic_facts(kafka, stream.topic)  # nobody is late before the first plan
    read = read_raw_slices(ledger, deployment.open_lake(), stream)
    ages = measure_unread_ages(ledger, kafka, stream, stream.topic, read)
    return fetch_topic_facts(kafka, stream.topic, ages.oldest, age_known=ages.sure)


def _convert_finding(topic: str, one: Finding) -> TrialResult:
    what = f"topic {topic}: {one.rule}"
    if one.level is Level.ERROR:
        return TrialResult(what, error=PermanentError(one.value, remedy=one.remedy))
    return TrialResult(what, one.value, warning=True, remedy=one.remedy)


def _check_lake(root: str) -> str:
    if "://" in root and not root.startswith("file://"):
        # The refusals of a store first: each has a remedy of its own, where a table only could not be written.
        refuses = "; a second PUT of an object is refused" if is_s3(root) else ""
        ensure_conditional_put(f"{root}/raw")
        try_storage(root)
        return f"{root}: a table was written, read and removed{refuses}"
    folder = Path(root.removeprefix("file://"))
    at = folder if folder.exists() else next(parent for parent in folder.parents if parent.exists())
    try:
        # Without a name in the folder nothing is left when this process is killed. A file without bytes would fit on a
        # full disk.
        with tempfile.TemporaryFile(dir=at) as file:
            file.write(bytes(TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "free space there" if full else "make it writable for this user"
        raise DependencyUnavailableError(
            f"nothing can be written to {at}",
            found=error.strerror,
            remedy=f"{remedy}, or set HIGHWATER_LAKE to another place",
        ) from error
    return f"{root} can be written to, {shutil.disk_usage(at).free / 2**30:,.1f} GiB are free"


def _check_reference_table(path: str, wanted: Sequence[str]) -> str:
    table = open_table(path)
    if table is None:
        raise DependencyUnavailableError(
            f"there is no table at {path}", remedy="write it; until then slices that need it fail, and are tried again"
        )
    columns = [field.name for field in table.schema().fields]
    if lacking := [name for name in wanted if name not in columns]:
        raise ConfigurationError(
            f"the table at {path} has no column {', '.join(lacking)}",
            found=", ".join(columns),
            remedy="fix the table, or the lookup in the stream's declaration",
        )
    return f"version {table.version()}, with the column {', '.join(wanted)}"


def _check_transactions(deployment: Deployment, stream: Stream) -> str:
    """Open a producer by a name that the ACLs of the DLQ must allow, and ask for its mark; nothing is sent.

    The name is nobody's: to open that of a slice, or of the topic of accepted events, would fence who sends by it.
    """
    kafka = deployment.open_kafka()
    with Transactions(kafka, f"{PREFIX}doctor{SEPARATOR}{stream.name}", stream.topic) as transactions:
        transactions.mark()
    return "transactional ids and groups that begin with highwater.pub. may be used"


def _check_group(deployment: Deployment, name: str) -> str:
    """A group that is kept without members: whether somebody is in it, and whether it may be written to."""
    found = ensure_no_member(deployment.open_kafka(), name)
    if found.may_commit is False:
        raise build_denied_error(name, "Describe, and not Read")
    return "may be kept" if found.may_commit else "is not there yet: the first commit creates it"


def _check_ledger(deployment: Deployment) -> str:
    """Read it, and write to it: a lease, which is released at once."""
    ledger = deployment.open_ledger()
    planned = sum(ledger.count_slices().values())
    with ledger.lease(f"doctor {uuid.uuid4().hex}", seconds=LEASE_SECONDS):
        return f"{planned:,} slices are planned; it can be written to"


def _check_clock(deployment: Deployment) -> str:
    """Compare this machine's clock with that of the ledger's database.

    Raises:
        ConfigurationError: they differ, so that retries, breakers and alerts come too early or too late.
    """
    skew = deployment.open_ledger().measure_clock_skew()
    if abs(skew) > LONGEST_SKEW:
        raise ConfigurationError(
            "the clocks of this machine and of the ledger's database differ",
            found=f"the database is {format_duration(abs(skew))} {'ahead' if skew > timedelta(0) else 'behind'}",
            remedy="synchronise the clocks of all machines and brokers, as by NTP",
        )
    return "it agrees with that of the ledger's database"


def _check_reading(deployment: Deployment, topic: str) -> str:
    """Read a record of the topic, if there is one: the last that readers may see."""
    kafka = deployment.open_kafka()
    for partition, seen in kafka.read_topic_state(topic).partitions.items():
        first, end = seen.log_start, seen.last_stable
        if first is not None and end is not None and first < end:
            last = {partition: OffsetRange(end - 1, end)}
            many = sum(1 for _ in kafka.read(topic, last, seconds=READ_SECONDS))
            return f"a record of partition {partition} was read" if many else "may be read; a marker is at its end"
    return "may be looked at; there is no record to read"


def _check_permissions(deployment: Deployment, stream: Stream) -> str:
    """The brokers' permissions on the stream's topics; those that are not there yet are reported.

    Raises:
        ConfigurationError: something that is needed is not allowed.
    """
    needed = {stream.topic: {"READ", "DESCRIBE"}}
    needed |= {topic: {"READ", "WRITE", "DESCRIBE"} for topic in stream.dlq_topics}
    needed |= {topic: {"READ", "DESCRIBE"} for topic in stream.foreign_topics}
    needed |= {stream.publishes.topic: {"READ", "WRITE", "DESCRIBE"}} if stream.publishes else {}
    kafka = deployment.open_kafka()
    found = fetch_allowed_operations(kafka, [*needed])
    lacking = {topic: sorted(needed[topic] - allowed) for topic, allowed in found.items()}
    if any(lacking.values()):
        lacks = [f"{', '.join(names)} on {topic}" for topic, names in lacking.items() if names]
        raise ConfigurationError(
            f"the broker does not let this user do all that the stream {stream.name} needs",
            found=f"not allowed: {'; '.join(lacks)}",
            remedy=_build_acl_commands(kafka.bootstrap, lacking),
        )
    rest = sorted(needed.keys() - found.keys())
    unreported = f"; not there yet, or not to be seen: {', '.join(rest)}" if rest else ""
    return f"reading and writing are allowed on {', '.join(found) or 'no topic'}{unreported}"


def _build_acl_commands(bootstrap: str, lacking: Mapping[str, Sequence[str]]) -> str:
    """The commands that allow what this user lacks on each topic; the client does not know the principal."""
    tool = f"kafka-acls --bootstrap-server {bootstrap} --add --allow-principal User:NAME"
    options = {topic: [f"--operation {name.title()}" for name in names] for topic, names in lacking.items() if names}
    commands = "; ".join(f"{tool} {' '.join(given)} --topic {topic}" for topic, given in options.items())
    return f"{commands}, with this user's name"


def _check_receiver(url: str) -> str:
    """Ensure that somebody listens; nothing is posted. The URL may hold a token and is never repeated (I13)."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigurationError(
            f"{names.ALERTS_URL} is no HTTP address",
            remedy="set it to a URL that begins with http:// or https://; "
            "the value is not shown, since it may hold a token",
        )
    try:
        with socket.create_connection((parts.hostname, port), CONNECT_SECONDS):
            return f"somebody listens at port {port}; nothing was posted"
    except (OSError, ValueError) as error:
        raise DependencyUnavailableError(
            "nobody listens where alerts are posted",
            found=type(error).__name__,
            remedy=f"start the receiver, or fix {names.ALERTS_URL}",
        ) from None


def _check_dagster(environment: Mapping[str, str]) -> str:
    home = environment.get("DAGSTER_HOME")
    if not home:
        raise ConfigurationError(
            "DAGSTER_HOME is not set",
            remedy="set it to the whole path of a folder with a copy of the project's dagster.yaml",
        )
    ensure_home(home)
    file = Path(home).expanduser() / "dagster.yaml"
    if not os.access(file, os.R_OK):
        raise ConfigurationError(
            f"there is no {file}", remedy="copy dagster.yaml there: it has the pools and the run monitoring"
        )
    _write_to_storage(home)
    return f"{file} is there, and the storage can be written to"


def _write_to_storage(home: str) -> None:
    """Add a partition to a definition that nothing uses, and remove it; storage that is not there yet is created."""
    import dagster as dg

    # Always the same key: one that a killed doctor left is removed by the next.
    key, problem = "trial", f"Dagster's storage, as {home} configures it, cannot be written to"
    with translate_errors(problem), dg.DagsterInstance.from_config(str(Path(home).expanduser())) as instance:
        instance.add_dynamic_partitions("highwater_doctor", [key])
        instance.delete_dynamic_partition("highwater_doctor", key)
