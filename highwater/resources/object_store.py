"""A lake on S3: the settings of Spark for it, and the refusal of writers that could lose a commit."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

SCHEME = "s3a"
LOG_STORE = "highwater.delta.ConditionalS3LogStore"
LOG_STORE_SETTING = f"spark.delta.logStore.{SCHEME}.impl"
# Compiled by `python -m dev.log_store` from the source beside it; Spark's driver needs it on its class path.
LOG_STORE_JAR = Path(__file__).parent / "log_store" / "highwater-s3.jar"

# Beginning of the message of `LOG_STORE` for a store that ignores the condition of a PUT.
UNSAFE = "HIGHWATER_UNSAFE_STORE"
STORE_REMEDY = (
    "use a store with conditional PUT, such as Amazon S3, MinIO or Ceph from 2024 on; docs/deployment/s3.md names them"
)
CLASS_REMEDY = (
    f"put {LOG_STORE_JAR} on the class path of Spark's driver or Connect server, as docs/deployment/s3.md says"
)

_S3A = f"spark.hadoop.fs.{SCHEME}"
_OTHER_SCHEMES = ("s3", "s3n")

# Buckets whose store was seen to refuse a second PUT, for the life of the process.
_probed: set[str] = set()
_one_probe = threading.Lock()


def is_s3(path: str) -> bool:
    """Whether a path is in an object store that is addressed as S3.

    Raises:
        ConfigurationError: it is named by a scheme that Spark and deltalake do not both open.
    """
    scheme = path.partition("://")[0]
    if "://" in path and scheme in _OTHER_SCHEMES:
        raise ConfigurationError(
            f"Hadoop's client of S3 does not open the scheme {scheme}:",
            found=path,
            remedy=f"name the lake {SCHEME}://{path.partition('://')[2]}",
        )
    return path.startswith(f"{SCHEME}://")


def ensure_log_store(session: SparkSession, lake: str) -> None:
    """Refuse a session whose commits to a lake on S3 could overwrite those of another driver.

    Args:
        session: a session of this process or of a Connect server.
        lake: the lake's root.

    Raises:
        ConfigurationError: the session has another log store than ours; nothing was written.
    """
    if not is_s3(lake):
        return
    found = session.conf.get(LOG_STORE_SETTING, None)
    if found != LOG_STORE:
        raise ConfigurationError(
            f"this Spark session would write to {lake} without a conditional PUT: two drivers could lose a commit",
            stored=f"{LOG_STORE_SETTING}={LOG_STORE}",
            found=found or "Delta's default, io.delta.storage.S3SingleDriverLogStore",
            remedy=f"start Spark with this setting, and {CLASS_REMEDY}",
        )


def ensure_conditional_put(path: str) -> None:
    """Refuse to write to a store on S3 that ignores the condition of a PUT; each bucket is asked once in a process.

    Args:
        path: the table that is to be written; the probe is written beside it, and removed.

    Raises:
        ConfigurationError: the store let a second writer overwrite the first one's commit of a probe.
    """
    if not is_s3(path):
        return
    store = "/".join(path.split("/", 3)[:3])
    with _one_probe:
        if store not in _probed:
            _probe(path.rstrip("/").rpartition("/")[0], store)
            _probed.add(store)


def _probe(folder: str, store: str) -> None:
    """Let two writers, who both saw version 0 of a table, commit its version 1."""
    import pyarrow as pa
    from deltalake import DeltaTable, write_deltalake
    from deltalake.exceptions import CommitFailedError
    from deltalake.fs import DeltaStorageHandler

    name = f".highwater-probe-{uuid.uuid4().hex}"
    path, rows = f"{folder}/{name}", pa.table({"n": [1]})
    try:
        write_deltalake(path, rows)
        first, second = DeltaTable(path), DeltaTable(path)
        _append_once(first, rows)
        try:
            _append_once(second, rows)
        except CommitFailedError:
            return
    finally:
        DeltaStorageHandler(folder).delete_dir(name)
    raise ConfigurationError(
        f"the object store at {store} ignores the condition of a PUT: a second writer overwrote the first one's commit",
        stored="If-None-Match: * is answered by 412 where the object exists",
        found="the object was replaced",
        remedy=STORE_REMEDY,
    )


def _append_once(table: DeltaTable, rows: pa.Table) -> None:
    from deltalake import CommitProperties, write_deltalake

    once = CommitProperties(max_commit_retries=0)
    write_deltalake(table, rows, mode="append", commit_properties=once)


def s3a_conf(environment: Mapping[str, str]) -> dict[str, str]:
    """Spark's settings for the store that AWS's own variables name; deltalake reads these variables by itself.

    Args:
        environment: its `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, `AWS_REGION` or `AWS_DEFAULT_REGION` and
            `AWS_VIRTUAL_HOSTED_STYLE_REQUEST` are looked at. Keys stay where they are: Java's SDK finds them as
            deltalake does.
    """
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    by_host = environment.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in {"1", "true"}
    conf = {
        f"{_S3A}.aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
    }
    if region:
        conf[f"{_S3A}.endpoint.region"] = region
    if endpoint:
        conf[f"{_S3A}.endpoint"] = endpoint
        conf[f"{_S3A}.path.style.access"] = "false" if by_host else "true"
        conf[f"{_S3A}.connection.ssl.enabled"] = "false" if endpoint.startswith("http://") else "true"
    return conf
