"""The tables' needs of a Spark session: versions, settings, Delta, the lake's file system, Kafka, an executor."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.resources.jars import LOCK, read_lock
from highwater.resources.object_store import LOG_STORE, LOG_STORES, ensure_log_store, is_s3
from highwater.resources.spark import SESSION_CONF, STATIC_CONF, TIMESTAMPS, is_connect, translate_error
from highwater.resources.spark_places import parse_address

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.settings import Settings

EXTENSIONS, CATALOG = "spark.sql.extensions", "spark.sql.catalog.spark_catalog"
# A Connect server of Spark 4.0.5 was seen to give no value of it, whatever is set.
REDACTION = "spark.sql.redaction.string.regex"
# Spark names a data source that it lacks in two ways: Kafka and Avro in the second.
_NO_SOURCE = re.compile(r"Failed to find (?:the )?data source: (\w+)")
_NO_CLASS = re.compile(r"(?:ClassNotFoundException|NoClassDefFoundError):? (?:Class )?([\w/$]+(?:[./][\w$]+)+)")
_NO_SCHEME = re.compile(r'No FileSystem for scheme "?([\w-]+)')
_NO_TABLE = re.compile(
    r"DELTA_(?:PATH_DOES_NOT_EXIST|TABLE_NOT_FOUND|MISSING_DELTA_TABLE|SCHEMA_NOT_SET)|PATH_NOT_FOUND"
)
_CAUSE = re.compile(r"^: (.+)$", re.MULTILINE)

# By the beginning of a class, or by a data source, the artifact of the lock that has it; the longest beginning counts.
ARTIFACTS = {
    "delta": "delta-spark_",
    "io.delta.": "delta-spark_",
    "io.delta.storage.": "delta-storage",
    "org.apache.spark.sql.delta.": "delta-spark_",
    "kafka": "spark-sql-kafka-0-10_",
    "org.apache.spark.sql.kafka010.": "spark-sql-kafka-0-10_",
    "org.apache.spark.kafka010.": "spark-token-provider-kafka-0-10_",
    "org.apache.kafka.": "kafka-clients",
    "org.apache.commons.pool2.": "commons-pool2",
    "org.apache.hadoop.fs.s3a.": "hadoop-aws",
    "avro": "spark-avro_",
}
SDK = "software.amazon.awssdk"


def check_session(session: SparkSession, settings: Settings) -> tuple[str, str]:
    """Compare versions and settings of a session with what the tables need.

    Returns:
        The found versions, and a warning's remedy, which is empty if the versions fit.

    Raises:
        ConfigurationError: versions do not fit, Delta's extension or catalog is not set, a setting of ours is not
            taken, or commits to a lake on S3 could be lost.
    """
    remedy = compare_versions(session)
    _ensure_delta_is_set(session, settings)
    found = {name: session.conf.get(name, None) for name in SESSION_CONF}
    for name, value in found.items():
        if name == REDACTION and value is None and is_connect(session):
            continue
        if value != SESSION_CONF[name]:
            raise ConfigurationError(
                f"the Spark session does not take the setting {name}",
                stored=SESSION_CONF[name],
                found=value,
                remedy="let sessions of this Spark set it, or set it in Spark's own configuration",
            )
    ensure_log_store(session, settings.lake)
    commits = f", and commits to S3 by {LOG_STORE}" if is_s3(settings.lake) else ""
    text = f"Spark {session.version} takes our settings; timestamps are written as {found[TIMESTAMPS]}{commits}"
    return f"{text}; PySpark is {_read_pyspark_version()}" if remedy else text, remedy


def compare_versions(session: SparkSession) -> str:
    """Compare Spark's version with PySpark's.

    Returns:
        The remedy for another minor version of a Connect server; empty if none is needed.

    Raises:
        ConfigurationError: a server has another major version, or a driver of this process another minor one.
    """
    ours, theirs = _read_pyspark_version().split(".")[:2], session.version.split(".")[:2]
    if ours == theirs:
        return ""
    if is_connect(session):
        remedy = f"run a Connect server of Spark {'.'.join(ours)}, or install pyspark of the server's version"
        if ours[0] == theirs[0]:
            return remedy
    else:
        remedy = f"let SPARK_HOME lead to Spark {'.'.join(ours)}, or unset it: PySpark brings its own Spark"
    raise ConfigurationError(
        "Spark and PySpark have different versions",
        stored=f"PySpark {_read_pyspark_version()}",
        found=f"Spark {session.version}",
        remedy=remedy,
    )


def _read_pyspark_version() -> str:
    import pyspark

    return pyspark.__version__


def _ensure_delta_is_set(session: SparkSession, settings: Settings) -> None:
    """Ensure that Delta's extension and catalog are in the session's settings; a session cannot add them."""
    for name in (EXTENSIONS, CATALOG):
        found = session.conf.get(name, None) or ""
        if STATIC_CONF[name] not in [part.strip() for part in found.split(",")]:
            where = (
                f"the Connect server at {parse_address(settings.spark_remote)}" if settings.spark_remote else "Spark"
            )
            raise ConfigurationError(
                f"{where} runs without {name} of Delta",
                stored=STATIC_CONF[name],
                found=found or "not set",
                remedy=f"set {name} {STATIC_CONF[name]} in spark-defaults.conf and restart it, "
                "as docs/configuration.md says",
            )


def check_lake(session: SparkSession, settings: Settings) -> str:
    """Let Spark look in the lake for a Delta table that is not there: Delta, file system and log store are loaded."""
    path = f"{settings.lake}/.highwater-doctor-{uuid.uuid4().hex}"
    try:
        _ = session.read.format("delta").load(path).schema
    except Exception as error:
        if not _NO_TABLE.search(str(error)):
            raise explain_error("Spark cannot look for a table in the lake", error, settings) from error
    return f"Delta and the file system of {settings.lake} are on the class path of the driver"


def check_kafka(session: SparkSession, settings: Settings) -> str:
    """Let Spark load the Kafka connector; it connects to no broker."""
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "none"}
    try:
        _ = session.read.format("kafka").options(**options).load().schema
    except Exception as error:
        raise explain_error("Spark cannot load the Kafka connector", error, settings) from error
    return "the connector is on the class path of the driver"


def check_avro(session: SparkSession, settings: Settings) -> str:
    """Let Spark load the module that decodes Avro."""
    try:
        _ = session.read.format("avro").load(f"/.highwater-doctor-{uuid.uuid4().hex}").schema
    except Exception as error:
        if not _NO_TABLE.search(str(error)):
            raise explain_error("Spark cannot load the module for Avro", error, settings) from error
    return "the module is on the class path of the driver"


def check_job(session: SparkSession, settings: Settings) -> str:
    """Run a job of one task, which needs an executor."""
    try:
        session.range(1).count()
    except Exception as error:
        raise explain_error("a job of one task failed on Spark", error, settings) from error
    return "an executor ran a task"


def explain_error(problem: str, error: Exception, settings: Settings) -> HighwaterError:
    """An error of Spark with the jar that is missing, or what else is known of it."""
    if isinstance(error, HighwaterError):
        return error
    text = f"{type(error).__name__}: {error}"
    # A Connect client has the causes apart from the text.
    server_trace = getattr(error, "getStackTrace", lambda: None)
    text = f"{text}\n{server_trace() or ''}".rstrip()
    # A stack trace may hold words that mean something else, but a class of our log stores has a remedy of its own.
    if not any(store in text for store in LOG_STORES) and (lacking := find_missing_jar(text)):
        return ConfigurationError(
            problem,
            stored=f"a class path with {lacking[0]}",
            found=f"{lacking[1]} was not found",
            remedy=describe_jar_remedy(settings),
        )
    if known := translate_error("the doctor's trial", text):
        return known
    cause = _CAUSE.search(text)
    return DependencyUnavailableError(
        problem,
        found=(cause[1] if cause else text.splitlines()[0])[:300],
        remedy="read the log of Spark's driver or server; docs/configuration.md has the settings of Spark",
    )


def find_missing_jar(text: str) -> tuple[str, str] | None:
    """The jar that a text of Spark misses, and the class or data source that the text names; None if it names none."""
    if found := _NO_SOURCE.search(text):
        return _find_jar(found[1]), f"the data source {found[1]}"
    if found := _NO_CLASS.search(text):
        name = found[1].replace("/", ".")
        return _find_jar(name), f"the class {name}"
    if found := _NO_SCHEME.search(text):
        return f"Hadoop's file system for {found[1]}://", f"the scheme {found[1]}"
    return None


def _find_jar(name: str) -> str:
    if name.startswith(SDK):
        return "the AWS SDK 2 for Java (software.amazon.awssdk)"
    begins = max((one for one in ARTIFACTS if name.startswith(one)), key=len, default=None)
    if begins is None:
        return f"the jar that has {name}"
    locked = read_lock(LOCK.read_text(encoding="utf-8"))["spark"]
    return next(module.file for module in locked if module.artifact.startswith(ARTIFACTS[begins]))


def describe_jar_remedy(settings: Settings) -> str:
    """The remedy for a missing jar on the class path of the configured Spark."""
    if settings.spark_remote is not None:
        return (
            "run highwater jars --to FOLDER, copy jars/spark to the Connect server, name the jars in "
            "spark.driver.extraClassPath and spark.executor.extraClassPath of its spark-defaults.conf, and restart it"
        )
    if settings.spark_master.startswith("local"):
        return "run highwater jars; with a SPARK_CONF_DIR of your own, name the jars in spark.driver.extraClassPath"
    return (
        "run highwater jars --to FOLDER, copy jars/spark to the same path on every machine, and name the jars in "
        "spark.driver.extraClassPath and spark.executor.extraClassPath of spark-defaults.conf in SPARK_CONF_DIR"
    )
