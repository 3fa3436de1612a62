"""What a session lacks is named with its jar and its remedy, by the texts that Spark was seen to give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pyspark
import pytest

from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.resources import spark_checks
from highwater.resources.object_store import FILE_LOG_STORE, LOG_STORE, LOG_STORE_SETTING
from highwater.resources.spark import SESSION_CONF, STATIC_CONF
from highwater.settings import Settings
from tests.helpers.fake_session import FakeSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELTA = "SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure the"
KAFKA = "Failed to find data source: kafka. Please deploy the application as per the deployment section"
STORAGE = "ExecutionError: java.lang.NoClassDefFoundError: io/delta/storage/LogStore\nPlease ensure that"
S3A = "RuntimeException: java.lang.ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found"
SDK = "java.lang.NoClassDefFoundError: software/amazon/awssdk/core/exception/SdkException"


def fake(**given: Any) -> SparkSession:
    return cast("SparkSession", FakeSession(**given))


LOCAL = Settings.from_environment({})
SERVER = Settings.from_environment({"SPARK_REMOTE": "sc://spark:15002/;token=planted"})
CLUSTER = Settings.from_environment({"HIGHWATER_SPARK_MASTER": "spark://spark:7077"})
S3 = Settings.from_environment({"HIGHWATER_LAKE": "s3a://bucket/lake"})


def test_a_session_with_all_that_the_tables_need_is_fine() -> None:
    text, remedy = spark_checks.check_session(fake(), LOCAL)
    assert text.startswith(f"Spark {pyspark.__version__} takes our settings")
    assert remedy == ""
    assert LOG_STORE in spark_checks.check_session(fake(), S3)[0]
    # Others may have extensions of their own.
    more = {spark_checks.EXTENSIONS: f"org.other.Extension, {STATIC_CONF[spark_checks.EXTENSIONS]}"}
    spark_checks.check_session(fake(conf=more), LOCAL)


@pytest.mark.parametrize("name", [spark_checks.EXTENSIONS, spark_checks.CATALOG, "spark.sql.session.timeZone"])
def test_a_setting_that_is_missing_is_named_with_its_remedy(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        spark_checks.check_session(fake(conf={name: None}), SERVER)
    assert name in caught.value.problem
    assert caught.value.stored == {**STATIC_CONF, **SESSION_CONF}[name]
    assert "configuration" in caught.value.remedy
    assert "planted" not in str(caught.value)


def test_the_setting_that_a_connect_server_does_not_give_back_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor refused every Connect server."""
    unread = fake(conf={spark_checks.REDACTION: None})
    with pytest.raises(ConfigurationError, match="redaction"):
        spark_checks.check_session(unread, LOCAL)
    monkeypatch.setattr(spark_checks, "is_connect", lambda _: True)
    spark_checks.check_session(unread, SERVER)


def test_a_session_that_could_lose_commits_to_s3_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="without a conditional PUT"):
        spark_checks.check_session(fake(conf={LOG_STORE_SETTING: None}), S3)


def test_versions_of_spark_and_pyspark_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, *_ = pyspark.__version__.split(".")
    other_minor, other_major = f"{major}.{int(minor) + 1}.0", f"{int(major) + 1}.{minor}.0"
    assert spark_checks.compare_versions(fake(version=f"{major}.{minor}.99")) == ""
    for version in (other_minor, other_major):
        with pytest.raises(ConfigurationError, match=f"found: Spark {version}; .*SPARK_HOME"):
            spark_checks.compare_versions(fake(version=version))
    monkeypatch.setattr(spark_checks, "is_connect", lambda _: True)
    text, remedy = spark_checks.check_session(fake(version=other_minor), SERVER)
    assert f"PySpark is {pyspark.__version__}" in text
    assert remedy.startswith(f"run a Connect server of Spark {major}.{minor}")
    with pytest.raises(ConfigurationError, match="Connect server"):
        spark_checks.compare_versions(fake(version=other_major))


@pytest.mark.parametrize(
    ("fault", "jar"),
    [
        (DELTA, "delta-spark_4.0_2.13-"),
        (STORAGE, "delta-storage-"),
        (S3A, "hadoop-aws-"),
        (SDK, "AWS SDK 2"),
        ('UnsupportedFileSystemException: No FileSystem for scheme "gs"', "gs://"),
    ],
)
def test_a_jar_that_spark_and_the_lake_need_is_named(fault: str, jar: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        spark_checks.check_lake(fake(faults={"delta": fault}), CLUSTER)
    assert jar in str(caught.value.stored)
    for part in ("highwater jars --to", "spark.driver.extraClassPath", "SPARK_CONF_DIR"):
        assert part in caught.value.remedy


@pytest.mark.parametrize(("store", "settings"), [(LOG_STORE, S3), (FILE_LOG_STORE, LOCAL)])
def test_the_class_of_a_log_store_has_a_remedy_of_its_own(store: str, settings: Settings) -> None:
    """Also where the trace below it has words that would name another jar."""
    fault = f"java.lang.ClassNotFoundException: {store}\n\tat org.apache.spark.sql.delta.DeltaLog"
    with pytest.raises(ConfigurationError, match=r"cannot load the log store .*highwater\.jar"):
        spark_checks.check_lake(fake(faults={"delta": fault}), settings)


def test_a_table_that_is_not_there_is_what_the_lake_should_answer() -> None:
    assert "on the class path" in spark_checks.check_lake(fake(), LOCAL)
    with pytest.raises(DependencyUnavailableError, match="The specified bucket does not exist"):
        spark_checks.check_lake(
            fake(faults={"delta": "NoSuchBucketException: The specified bucket does not exist"}), S3
        )


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [(LOCAL, "run highwater jars;"), (SERVER, "copy jars/spark to the Connect server"), (CLUSTER, "SPARK_CONF_DIR")],
)
def test_the_connector_of_kafka_is_named_with_the_remedy_for_this_spark(settings: Settings, remedy: str) -> None:
    assert "on the class path" in spark_checks.check_kafka(fake(), settings)
    with pytest.raises(ConfigurationError) as caught:
        spark_checks.check_kafka(fake(faults={"kafka": KAFKA}), settings)
    assert "spark-sql-kafka-0-10_2.13-" in str(caught.value.stored)
    assert remedy in caught.value.remedy


def test_the_module_for_avro_is_named() -> None:
    assert "on the class path" in spark_checks.check_avro(fake(faults={"avro": "[PATH_NOT_FOUND] Path"}), LOCAL)
    with pytest.raises(ConfigurationError, match=r"spark-avro_2\.13-"):
        spark_checks.check_avro(fake(faults={"avro": "Failed to find data source: avro. Avro is built-in but"}), LOCAL)


def test_a_class_that_only_the_trace_of_a_connect_server_names_is_found() -> None:
    class ServerError(OSError):
        def getStackTrace(self) -> str:  # noqa: N802 - as PySpark names it
            return f"java.lang.RuntimeException\n\tat x\nCaused by: {STORAGE}"

    error = spark_checks.explain_error("Spark cannot look", ServerError("an error of the server"), SERVER)
    assert "delta-storage-" in str(error.stored)


def test_an_unknown_error_is_shown_by_its_cause() -> None:
    text = "An error occurred while calling None.x.\n: java.lang.IllegalStateException: stopped\n\tat org.apache"
    error = spark_checks.explain_error("no Spark session opens", OSError(text), CLUSTER)
    assert isinstance(error, HighwaterError)
    assert error.found == "java.lang.IllegalStateException: stopped"
