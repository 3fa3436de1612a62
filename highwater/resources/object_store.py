"""Where Spark puts the log of a lake's tables, and the refusal of writers that could lose a commit."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.errors import LAKE, ConfigurationError, DependencyUnavailableError
from highwater.resources.delta import find_local_path
from highwater.resources.jars import OWN_JAR

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from pyspark.sql import SparkSession

SCHEME = "s3a"
LOG_STORE = "highwater.delta.ConditionalS3LogStore"
LOG_STORE_SETTING = f"spark.delta.logStore.{SCHEME}.impl"
FILE_LOG_STORE = "highwater.delta.LinkedFileLogStore"
FILE_LOG_STORE_SETTING = "spark.delta.logStore.file.impl"
LOG_STORES = (LOG_STORE, FILE_LOG_STORE)

# Beginning of the message of `LOG_STORE` for a store that ignores the condition of a PUT.
UNSAFE = "HIGHWATER_UNSAFE_STORE"
STORE_REMEDY = "use a store with conditional PUT, such as Amazon S3; docs/deployment/s3.md says how to try another"
CLASS_REMEDY = (
    f"put {OWN_JAR} on the class path of Spark's driver or Connect server, as docs/configuration.md says, and for S3 "
    "docs/deployment/s3.md"
)

_S3A = f"spark.hadoop.fs.{SCHEME}"
_OTHER_SCHEMES = ("s3", "s3n")

# Variables of deltalake, with the value that changes nothing.
_WEAKENING = {"AWS_CONDITIONAL_PUT": "etag", "AWS_S3_ALLOW_UNSAFE_RENAME": "false", "AWS_S3_LOCKING_PROVIDER": ""}
_PRECONDITION_FAILED = 412
_NOT_IMPLEMENTED = 501
_REGION = "us-east-1"

# The beginning of the names of objects by which a store is probed, here and in the log store's Java.
_PROBE = ".highwater-probe-"
# A probe takes seconds, so an older object is one that a killed process left behind.
_LONGEST_PROBE = timedelta(hours=1)

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


def drop_empty_variables(environment: MutableMapping[str, str]) -> None:
    """Let an empty variable of AWS count as not set, as an empty setting does.

    deltalake panics on an empty address, and Java's SDK refuses an empty region. Compose files and charts pass empty
    ones on.
    """
    for name in [name for name, value in environment.items() if name.startswith("AWS_") and not value]:
        del environment[name]


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


def has_exclusive_log_store(session: SparkSession, lake: str) -> bool:
    """Whether commits of a session fail where another process, such as delta-rs in ours, wrote the same entry.

    Args:
        session: a session of this process or of a Connect server; one for S3 was looked at by `ensure_log_store`.
        lake: the lake's root.
    """
    if find_local_path(lake) is None:
        return is_s3(lake)
    return session.conf.get(FILE_LOG_STORE_SETTING, None) == FILE_LOG_STORE


def ensure_conditional_put(path: str) -> None:
    """Refuse to write to a store on S3 that ignores the condition of a PUT; each bucket is asked once in a process.

    Args:
        path: the table that is to be written; the probe is written beside it, and removed.

    Raises:
        ConfigurationError: the store let a second PUT replace the first one's object, or deltalake is configured to
            write without the condition.
        DependencyUnavailableError: the store could not be asked.
    """
    if not is_s3(path):
        return
    refuse_weakening(os.environ)
    bucket, _, key = path.removeprefix(f"{SCHEME}://").partition("/")
    with _one_probe:
        if bucket not in _probed:
            _probe(bucket, _build_probe_prefix(key.rpartition("/")[0]) + uuid.uuid4().hex)
            _probed.add(bucket)


def _build_probe_prefix(folder: str) -> str:
    return f"{folder.strip('/')}/{_PROBE}".lstrip("/")


def remove_left_probes(folders: Iterable[str], now: datetime) -> None:
    """Remove the objects that killed probes left in folders of an object store; those of others are younger.

    An empty object harms nobody: where the store refuses, the next maintenance tries it again.
    """
    in_store = [folder for folder in folders if is_s3(folder)]
    if not in_store:
        return
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return  # writers refuse the lake
    with suppress(BotoCoreError, ClientError):
        client = _build_s3_client(os.environ)
        for folder in in_store:
            bucket, _, key = folder.removeprefix(f"{SCHEME}://").partition("/")
            found = client.list_objects_v2(Bucket=bucket, Prefix=_build_probe_prefix(key))
            for one in found.get("Contents", ()):
                if now - one["LastModified"] > _LONGEST_PROBE:
                    client.delete_object(Bucket=bucket, Key=one["Key"])


def refuse_weakening(environment: Mapping[str, str]) -> None:
    """Refuse variables by which deltalake would commit to S3 otherwise than by a conditional PUT.

    Raises:
        ConfigurationError: one is set.
    """
    for name, harmless in _WEAKENING.items():
        if environment.get(name, harmless).lower() != harmless:
            raise ConfigurationError(
                f"{name} lets deltalake commit to S3 without a conditional PUT",
                found=environment[name],
                remedy=f"unset {name}: every writer of the lake must use the condition",
            )


def _probe(bucket: str, key: str) -> None:
    """PUT one object twice under the condition that it is absent."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, EndpointConnectionError
    except ImportError:
        raise ConfigurationError(
            "the package boto3 is needed to see whether an object store is safe to write to",
            remedy="pip install boto3; the extra [s3] of the wheel has it",
        ) from None
    where = f"{SCHEME}://{bucket}/{key}"
    try:
        client = _build_s3_client(os.environ)
        try:
            refused = _is_second_put_refused(client, bucket, key)
        except (EndpointConnectionError, ConnectTimeoutError):
            raise  # nothing is there
        except (BotoCoreError, ClientError):
            with suppress(BotoCoreError, ClientError):  # the first error says more
                client.delete_object(Bucket=bucket, Key=key)
            raise
        client.delete_object(Bucket=bucket, Key=key)
    except (BotoCoreError, ClientError) as error:
        if isinstance(error, ClientError) and _find_http_status(error) == _NOT_IMPLEMENTED:
            raise ConfigurationError(
                f"the object store of {SCHEME}://{bucket} knows no condition of a PUT",
                found=str(error),
                remedy=STORE_REMEDY,
            ) from error
        raise _build_refused_error(where, error) from error
    if refused:
        return
    raise ConfigurationError(
        f"the object store of {SCHEME}://{bucket} ignores the condition of a PUT: two writers could lose a commit",
        stored="a second PUT with If-None-Match: * is answered by 412",
        found=f"the second PUT of {where} replaced the first",
        remedy=STORE_REMEDY,
    )


# By the store's code, or the client's own error: the remedy. A store without an answer has no code.
_MISSING_KEYS = (
    "give this process the keys of the store as docs/deployment/s3.md says: they are absent, wrong or expired"
)
_REFUSALS = {
    "NoSuchBucket": "create the bucket, or correct HIGHWATER_LAKE",
    "AccessDenied": "give this user the permissions that docs/deployment/s3.md lists",
    "InvalidAccessKeyId": _MISSING_KEYS,
    "SignatureDoesNotMatch": _MISSING_KEYS,
    "ExpiredToken": _MISSING_KEYS,
    "NoCredentialsError": _MISSING_KEYS,
    "PartialCredentialsError": _MISSING_KEYS,
}


def _build_refused_error(where: str, error: Exception) -> DependencyUnavailableError:
    """The error for a probe that failed, with the remedy of what the store or its client said."""
    response: Mapping[str, Any] = getattr(error, "response", {})
    code = response.get("Error", {}).get("Code", type(error).__name__)
    refused = code in _REFUSALS
    return DependencyUnavailableError(
        f"the object store {'refused' if refused else 'did not answer'} a probe at {where}",
        found=str(error),
        remedy=_REFUSALS.get(
            code, "check that HIGHWATER_LAKE is reachable, and that this user may write and delete below it"
        ),
        of=LAKE,
    )


def _is_second_put_refused(client: Any, bucket: str, key: str) -> bool:
    """PUT twice; a client sends the first PUT again where its answer was lost, so that may be refused too."""
    from botocore.exceptions import ClientError

    try:
        for _ in range(2):
            client.put_object(Bucket=bucket, Key=key, Body=b"", IfNoneMatch="*")
    except ClientError as error:
        if _find_http_status(error) != _PRECONDITION_FAILED:
            raise
        return True
    return False


def _find_http_status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _build_s3_client(environment: Mapping[str, str]) -> Any:
    """A client that finds the store, and the keys to it, as deltalake does."""
    import boto3
    from botocore.config import Config

    style = "virtual" if _is_by_host(environment) else "path"
    # Other stores than Amazon's refuse the checksums that the client would add by itself.
    config = Config(s3={"addressing_style": style}, request_checksum_calculation="when_required")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or _REGION
    return boto3.client("s3", config=config, region_name=region)


def _is_by_host(environment: Mapping[str, str]) -> bool:
    """Whether a bucket is part of the host's name in addresses, as deltalake reads its variable."""
    return environment.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in {"1", "true"}


def build_s3a_conf(environment: Mapping[str, str]) -> dict[str, str]:
    """Spark's settings for the store that AWS's own variables name; deltalake reads these variables by itself.

    Args:
        environment: its `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, `AWS_REGION` or `AWS_DEFAULT_REGION` and
            `AWS_VIRTUAL_HOSTED_STYLE_REQUEST` are looked at. Keys stay where they are: Java's SDK finds them as
            deltalake does.
    """
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    conf = {
        f"{_S3A}.aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
    }
    if region:
        conf[f"{_S3A}.endpoint.region"] = region
    if endpoint:
        conf[f"{_S3A}.endpoint"] = endpoint
        conf[f"{_S3A}.path.style.access"] = "false" if _is_by_host(environment) else "true"
        conf[f"{_S3A}.connection.ssl.enabled"] = "false" if endpoint.startswith("http://") else "true"
    return conf
