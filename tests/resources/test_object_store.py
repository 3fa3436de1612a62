"""A lake on S3 without Spark: the settings that follow from AWS's, the probe, the refusals, and the jar."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from click.testing import CliRunner

from assets.streams.orders import STREAM as ORDERS
from dev import java_classes
from dev.object_store import ObjectStore
from dev.processes import LOOPBACK, free_port
from highwater.errors import LAKE, ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.orchestration import resources
from highwater.orchestration.cli.main import main
from highwater.orchestration.operations.maintenance import _list_probe_folders
from highwater.orchestration.reporting import doctor
from highwater.resources import object_store
from highwater.resources.delta import open_table
from highwater.resources.delta_rs_writes import append_missing
from highwater.resources.jars import OWN_JAR
from highwater.resources.lake import Lake
from highwater.resources.local_spark import SERVER
from highwater.resources.object_store import (
    FILE_LOG_STORE,
    FILE_LOG_STORE_SETTING,
    LOG_STORE,
    LOG_STORE_SETTING,
    build_s3a_conf,
    ensure_conditional_put,
    ensure_log_store,
    has_exclusive_log_store,
    is_s3,
    refuse_weakening,
    remove_left_probes,
)
from highwater.resources.spark import STATIC_CONF, translate_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The version of the compiler that made the jar; others may give other bytes.
JAVAC = "17"


def keys(store: ObjectStore, bucket: str) -> list[str]:
    return store.keys(bucket.removeprefix("s3a://"))


# Settings


def test_spark_s_settings_follow_from_those_of_aws() -> None:
    amazon = build_s3a_conf({"AWS_DEFAULT_REGION": "eu-west-1", "AWS_SECRET_ACCESS_KEY": "planted"})
    assert {name.rpartition("s3a.")[2] for name in amazon} == {"aws.credentials.provider", "endpoint.region"}
    assert "planted" not in str(amazon)
    own = build_s3a_conf({"AWS_ENDPOINT_URL": "http://store:9000", "AWS_REGION": "here", "AWS_DEFAULT_REGION": "there"})
    found = {name.rpartition("s3a.")[2]: value for name, value in own.items()}
    del found["aws.credentials.provider"]
    assert found == {
        "endpoint.region": "here",
        "endpoint": "http://store:9000",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
    }
    by_host = {"AWS_ENDPOINT_URL": "https://store", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}
    assert build_s3a_conf(by_host)["spark.hadoop.fs.s3a.path.style.access"] == "false"
    assert build_s3a_conf(by_host)["spark.hadoop.fs.s3a.connection.ssl.enabled"] == "true"


def test_an_empty_variable_of_aws_counts_as_not_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """deltalake panicked on an empty AWS_ENDPOINT_URL, which the compose file passed on."""
    for begin in (resources.read_settings, lambda: CliRunner().invoke(main, ["init", str(tmp_path / "shop")])):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "")
        monkeypatch.setenv("AWS_REGION", "")
        monkeypatch.setenv("AWS_PROFILE", "mine")
        begin()
        assert {"AWS_ENDPOINT_URL", "AWS_REGION", "AWS_PROFILE"} & set(os.environ) == {"AWS_PROFILE"}


def test_a_scheme_that_hadoop_does_not_open_is_refused() -> None:
    assert is_s3("s3a://lake/x")
    assert not any(map(is_s3, ("/s3/lake", "file:///s3a", "gs://lake", "abfss://lake@account/x", "s3")))
    with pytest.raises(ConfigurationError) as refused:
        is_s3("s3://my-bucket/lake")
    assert "s3a://my-bucket/lake" in refused.value.remedy


def session(**conf: str) -> SparkSession:
    return cast("SparkSession", SimpleNamespace(conf=conf))


def test_a_session_without_the_log_store_is_refused() -> None:
    assert STATIC_CONF[LOG_STORE_SETTING] == LOG_STORE, "a session in the run's own process has it"
    ensure_log_store(session(**{LOG_STORE_SETTING: LOG_STORE}), "s3a://lake")
    ensure_log_store(session(), "/lake")
    ensure_log_store(session(), "gs://lake")
    with pytest.raises(ConfigurationError, match="S3SingleDriverLogStore") as refused:
        ensure_log_store(session(), "s3a://lake")
    assert f"{LOG_STORE_SETTING}={LOG_STORE}" == refused.value.stored
    assert str(OWN_JAR) in refused.value.remedy
    with pytest.raises(ConfigurationError, match="another"):
        ensure_log_store(session(**{LOG_STORE_SETTING: "another"}), "s3a://lake")


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_CONDITIONAL_PUT", "disabled"), ("AWS_S3_ALLOW_UNSAFE_RENAME", "true"), ("AWS_S3_LOCKING_PROVIDER", "x")],
)
def test_variables_that_weaken_deltalake_are_refused(name: str, value: str) -> None:
    refuse_weakening({"AWS_CONDITIONAL_PUT": "etag", "AWS_S3_ALLOW_UNSAFE_RENAME": "False"})
    with pytest.raises(ConfigurationError, match=name):
        refuse_weakening({name: value})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"java.lang.ClassNotFoundException: {LOG_STORE}\n at x", "cannot load the log store"),
        ("java.io.IOException: HIGHWATER_UNSAFE_STORE: the object store at s3a://lake ignores", "was not written"),
    ],
)
def test_a_refusal_of_the_driver_is_one_of_ours(text: str, problem: str) -> None:
    error = translate_error("s3a://lake/orders/raw", text)
    assert isinstance(error, ConfigurationError)
    assert problem in error.problem


@pytest.mark.parametrize(
    "text",
    [
        "org.apache.hadoop.fs.s3a.AWSClientIOException: Unable to execute HTTP request: Connection refused",
        "java.io.IOException: The log entry s3a://lake/_delta_log/1.json could not be written: Connection refused",
    ],
)
def test_a_store_that_is_unavailable_is_not_taken_for_spark(text: str) -> None:
    error = translate_error("s3a://lake/orders/raw", text)
    assert isinstance(error, DependencyUnavailableError)
    assert error.of == LAKE


# The probe


@pytest.mark.slow
def test_a_store_is_probed_once_and_left_clean(store: ObjectStore, bucket: str) -> None:
    import pyarrow as pa

    for _ in range(2):
        append_missing(f"{bucket}/lake/orders/small", lambda _: pa.table({"n": [1]}))
    probes = store.writes(f"/{bucket.removeprefix('s3a://')}/lake/orders/.highwater-probe-")
    assert [*probes.values()] == [1]
    assert not [key for key in keys(store, bucket) if "probe" in key]


@pytest.mark.slow
def test_nothing_is_written_to_a_store_that_ignores_conditions(store: ObjectStore, bucket: str) -> None:
    import pyarrow as pa

    with store.ignoring_conditions():
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="ignores the condition of a PUT") as refused:
                append_missing(f"{bucket}/lake/orders/small", lambda _: pa.table({"n": [1]}))
        with pytest.raises(ConfigurationError, match="ignores the condition"):
            doctor._check_lake(f"{bucket}/lake")
    assert refused.value.remedy == object_store.STORE_REMEDY
    assert keys(store, bucket) == []
    assert open_table(f"{bucket}/lake/orders/small") is None
    assert doctor._check_lake(f"{bucket}/lake").endswith("read and removed; a second PUT of an object is refused")


def test_a_store_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{LOOPBACK}:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(DependencyUnavailableError, match="did not answer a probe") as unavailable:
        ensure_conditional_put(f"s3a://away-{uuid.uuid4().hex}/orders/raw")
    assert unavailable.value.of == LAKE
    assert "planted" not in str(unavailable.value)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("NoSuchBucket", "create the bucket, or correct HIGHWATER_LAKE"),
        ("AccessDenied", "give this user the permissions"),
        ("InvalidAccessKeyId", "give this process the keys"),
        (None, "give this process the keys"),
    ],
)
def test_a_store_that_refuses_a_probe_has_the_remedy_of_its_cause(
    code: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that nobody had created did not answer, and was to be made reachable."""
    from botocore.exceptions import ClientError, NoCredentialsError

    def refuse(*_: object) -> Any:
        if code is None:
            raise NoCredentialsError
        raise ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "PutObject")

    monkeypatch.setattr(object_store, "_build_s3_client", refuse)
    with pytest.raises(DependencyUnavailableError, match=f"refused a probe at s3a://.*remedy: {remedy}"):
        ensure_conditional_put(f"s3a://refusing-{uuid.uuid4().hex}/orders/raw")


@pytest.mark.slow
def test_maintenance_removes_what_killed_probes_left(
    store: ObjectStore, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that was killed between PUT and DELETE left an empty object behind for ever."""
    lake = Lake(f"{bucket}/lake")
    paths = [f"{lake.root}/raw", f"{lake.root}/orders/raw", f"{lake.root}/orders/raw/_delta_log/1.json"]
    with monkeypatch.context() as killed:
        killed.setattr(object_store, "_is_second_put_refused", kill_after_first_put)
        for path in paths:
            object_store._probed.clear()
            with pytest.raises(KeyboardInterrupt):
                ensure_conditional_put(path)
    name, _, root = lake.root.removeprefix("s3a://").partition("/")
    object_store._build_s3_client(os.environ).put_object(Bucket=name, Key=f"{root}/orders/raw/a.parquet", Body=b"")
    left = keys(store, bucket)
    assert len(left) == 4

    def maintain(age: timedelta) -> list[str]:
        remove_left_probes(_list_probe_folders(lake, ORDERS), datetime.now(UTC) + age)
        return keys(store, bucket)

    assert maintain(timedelta()) == left, "another driver probes"
    assert maintain(timedelta(hours=2)) == [f"{root}/orders/raw/a.parquet"]


def kill_after_first_put(client: Any, bucket: str, key: str) -> bool:
    client.put_object(Bucket=bucket, Key=key, Body=b"", IfNoneMatch="*")
    raise KeyboardInterrupt


def test_probes_that_cannot_be_removed_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: object) -> Any:
        from botocore.exceptions import NoCredentialsError

        raise NoCredentialsError

    monkeypatch.setattr(object_store, "_build_s3_client", build)
    remove_left_probes(["s3a://lake/orders", "/lake/orders"], datetime.now(UTC))


class FakeStore:
    """A store that answers the PUTs of a probe by statuses, one after another."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.objects: set[str] = set()

    def put_object(self, **asked: str) -> None:
        from botocore.exceptions import ClientError

        self.objects.add(asked["Key"])
        if (status := self.statuses.pop(0)) != 200:
            code = {"Error": {"Code": "planted"}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise ClientError(cast("Any", code), "PutObject")

    def delete_object(self, **asked: str) -> None:
        self.objects.discard(asked["Key"])


@pytest.mark.parametrize(
    ("statuses", "refused"),
    [
        # The answer of the first PUT was lost, and the client sent it again.
        ([412], None),
        ([200, 412], None),
        ([200, 200], ConfigurationError),
        # Runs tried it again and again: a store that does not know the condition counted as one that is unavailable.
        ([501], ConfigurationError),
        ([200, 501], ConfigurationError),
        ([403], DependencyUnavailableError),
        ([200, 503], DependencyUnavailableError),
    ],
)
def test_a_probe_leaves_nothing_whatever_the_store_answers(
    statuses: list[int], refused: type[HighwaterError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeStore(*statuses)
    monkeypatch.setattr(object_store, "_build_s3_client", lambda _: fake)
    with nullcontext() if refused is None else pytest.raises(refused):
        ensure_conditional_put(f"s3a://fake-{uuid.uuid4().hex}/orders/raw")
    assert fake.objects == set()


def test_a_lake_on_s3_without_boto3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", cast("Any", None))
    with pytest.raises(ConfigurationError, match="boto3"):
        ensure_conditional_put(f"s3a://none-{uuid.uuid4().hex}/orders/raw")


@pytest.mark.parametrize(
    ("lake", "store", "exclusive"),
    [
        ("/mnt/lake", FILE_LOG_STORE, True),
        ("file:///mnt/lake", FILE_LOG_STORE, True),
        ("/mnt/lake", None, False),
        ("/mnt/lake", "io.delta.storage.LocalLogStore", False),
        ("s3a://lake", None, True),
        ("abfss://lake@x", FILE_LOG_STORE, False),
        ("gs://lake", FILE_LOG_STORE, False),
    ],
)
def test_only_known_log_stores_keep_the_commits_of_two_processes(lake: str, store: str | None, exclusive: bool) -> None:
    given = session(**({} if store is None else {FILE_LOG_STORE_SETTING: store}))
    assert has_exclusive_log_store(given, lake) == exclusive


# The jar


def test_the_jar_is_of_the_sources_beside_it() -> None:
    with zipfile.ZipFile(OWN_JAR) as jar:
        names = jar.namelist()
        said = jar.read(java_classes.MANIFEST).decode()
    assert said == java_classes.build_manifest(), "run python -m dev.java_classes"
    assert {f"{name.replace('.', '/')}.class" for name in (LOG_STORE, FILE_LOG_STORE, SERVER)} <= {*names}


@pytest.mark.slow
def test_the_sources_compile_to_the_jar() -> None:
    javac = shutil.which("javac")
    if javac is None:
        pytest.skip("there is no javac; the checksum of the sources is compared all the same")
    classes = java_classes.compile_classes(javac)
    said = subprocess.run([javac, "-version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"javac (\d+)", said)
    with zipfile.ZipFile(OWN_JAR) as jar:
        packed = {name: jar.read(name) for name in jar.namelist() if name.endswith(".class")}
    assert classes.keys() == packed.keys()
    if version is not None and version[1] == JAVAC:
        assert classes == packed


def test_the_jar_is_part_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((OWN_JAR.parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["highwater"]
    folder = OWN_JAR.parents[2]
    assert OWN_JAR in {file for pattern in patterns for file in folder.glob(pattern)}
