"""Spark: the settings of a session, the end of its work, and its errors in our words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.errors import (
    KAFKA,
    LAKE,
    ConfigurationError,
    DependencyUnavailableError,
    HighwaterError,
    NothingFetchedError,
    OffsetsExpiredError,
    SupersededAttemptError,
    TopicTruncatedError,
)
from highwater.resources.object_store import (
    CLASS_REMEDY,
    FILE_LOG_STORE,
    FILE_LOG_STORE_SETTING,
    LOG_STORE,
    LOG_STORE_SETTING,
    LOG_STORES,
    STORE_REMEDY,
    UNSAFE,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Settings needed at a session's start: Delta's extensions cannot be added to a running one.
STATIC_CONF: Mapping[str, str] = MappingProxyType(
    {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # Spark keeps the last 100 classes that it compiled for queries. A slice goes through its tables by some 140 of
        # them, in the same order each time: 107 were compiled again for every slice, a quarter of its time.
        "spark.sql.codegen.cache.maxEntries": "2000",
        # PySpark notes the line of each column for its errors: under a profiler a second of a slice's events. The lines
        # are ours and say nothing to the reader of an error.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        # Delta loads the class at the first commit to a table at such a place, and reads no session's setting of it.
        LOG_STORE_SETTING: LOG_STORE,
        FILE_LOG_STORE_SETTING: FILE_LOG_STORE,
    }
)

# Whether Spark plans the rest of a query again after each shuffle, which it does unless somebody set it up otherwise.
ADAPTIVE = "spark.sql.adaptive.enabled"

# As which type of Parquet Spark writes timestamps.
TIMESTAMPS = "spark.sql.parquet.outputTimestampType"

# Settings that can be set on a running session, so that a Connect server that others set up works as well.
SESSION_CONF: Mapping[str, str] = MappingProxyType(
    {
        # Event times and timestamps mean the same on every machine.
        "spark.sql.session.timeZone": "UTC",
        # Spark's default is INT96. Most other readers take that for nanoseconds, which overflow in silence outside of
        # 1677 to 2262.
        TIMESTAMPS: "TIMESTAMP_MICROS",
        # Times before 1900 as they are, not moved into the calendar of Spark 2, nor refused as by Spark 3.
        "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
        "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
        # Files are skipped by them, and rows are counted.
        "spark.databricks.delta.stats.collect": "true",
        # Characters of a text in the statistics of a file: a slice key has 260 at the most, with Kafka's longest name
        # of a topic. Delta's 32 would find a slice of a topic with a long name in every file.
        "spark.databricks.io.skipping.stringPrefixLength": "260",
        # Parquet leaves out the count of nulls where the least and the greatest value of a column have 4,096 bytes
        # together, and deltalake takes a missing count for zero: `IS NULL` then finds no row of the file. So both are
        # cut: 2 * 1,024 < 4,096.
        "parquet.statistics.truncate.length": "1024",
        # Our reads name the slices, so no partition is left to prune by a join. To find that out, Spark writes out each
        # joined column down to the table it comes from: ten of the fifteen seconds of planning a slice's events.
        "spark.sql.optimizer.dynamicPartitionPruning.enabled": "false",
        # Our cached frames are read a second time and released; compressing them took longer than computing them.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
        # The pages of Spark would show the secrets of Kafka's client in clear (I13). A password may hold any character
        # and a key has many lines, so everything after the first such name is hidden. Spark looks through the plan of
        # each query, character by character: the first look spares the four others.
        "spark.sql.redaction.string.regex": r"(?is)(?=[spk])(sasl\.jaas\.config|password|secret|keystore\.key).*",
    }
)

# The message of raw's fence around its reads.
DIVERGED = "HIGHWATER_DIVERGED"
_DIVERGED = re.compile(r"HIGHWATER_DIVERGED: [a-z0-9 ]*")
_CONFLICT = re.compile(r"Concurrent\w+Exception|DELTA_CONCURRENT_\w+|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED")
_EXPIRED = re.compile(r"OffsetOutOfRange|data may have been lost|KAFKA_DATA_LOSS|Cannot fetch offset")
_NOTHING_FETCHED = re.compile(r"Cannot fetch record for offset")
_SPARK_UNAVAILABLE = re.compile(
    r"StatusCode\.UNAVAILABLE|Connection refused|failed to connect|Socket closed|Connection reset"
    r"|INVALID_HANDLE\.|RETRIES_EXCEEDED|SESSION_NOT_FOUND|SESSION_CLOSED|OPERATION_NOT_FOUND|Stream removed"
    r"|incorrect server side session identifier"
)
# Options of a channel to a Connect server beyond PySpark's own. A server that hangs, or a network that swallows
# packets, sends no error, and PySpark waits for ever (SPARK-58094): so a connection without traffic for a minute during
# a call gets a ping, and is closed when that is not answered for 20 s. A server in Java refuses the fourth ping within
# five minutes in which it sent nothing (gRPC's proposal A8). Connect's sends something every two minutes, as it ends
# each stream of answers then (`spark.connect.execute.reattachable.senderMaxStreamDuration`).
CHANNEL: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Seen with gRPC 1.85: this one decides, for every ping, and is a minute otherwise.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # A server that is back is found so soon; otherwise the wait grows to two minutes, for all sessions of the process.
    ("grpc.max_reconnect_backoff_ms", 10_000),
)
# See `_give_up_in_time`.
RETRIES = 9
LONGEST_BACKOFF_MS = 10_000
_S3_UNAVAILABLE = re.compile(
    r"AWSClientIOException|AWSServiceIOException|AWSServiceThrottledException|AWSStatus500Exception|ApiCallTimeout"
    r"|NoAwsCredentialsException|ExpiredToken|UnknownStoreException|UnknownHostException: .*(?:s3a:|awssdk)"
    r"|The log entry \S+ could not be written|object store at \S+ could not be probed"
)
_NO_LOG_STORE = re.compile(rf"(ClassNotFoundException|NoClassDefFoundError): ({'|'.join(map(re.escape, LOG_STORES))})")
# Spark has time-outs of its own, as for a broadcast.
_KAFKA_UNAVAILABLE = re.compile(
    r"kafka\.common\.errors\.\w*TimeoutException|No resolvable bootstrap|BrokerNotAvailable|DisconnectException"
)
_KAFKA_FORBIDS = re.compile(r"Not authorized to access (topic|group)s?: .*")
_STORAGE = re.compile(
    r"Permission denied|AccessDenied|No space left|Disk quota exceeded|Mkdirs failed|Read-only file system"
    r"|Destination exists and is not a directory|Parent path is not a directory"
)
# Files of shuffles, spilled rows and cached blocks, and the classes that write them; S3A buffers uploads on disk.
_SCRATCH = (
    r"/blockmgr-|spark-local|temp_(?:shuffle|local)_|DiskBlock(?:Manager|ObjectWriter)|UnsafeSorterSpillWriter"
    r"|UnsafeExternalSorter|ExternalSorter|ExternalAppendOnlyMap|org\.apache\.spark\.(?:storage|shuffle)\."
    r"|org\.apache\.hadoop\.fs\.s3a\.S3ADataBlocks"
)
# The first of these after a fault shows what was written: a spill below a write to the lake has the lake's later.
_WRITTEN = re.compile(rf"(?P<scratch>{_SCRATCH})|org\.apache\.(?:hadoop|parquet)\.|io\.delta\.|spark\.sql\.delta\.")
_NO_SCRATCH_DIRECTORY = re.compile(r"Failed to create (?:local|a temp) dir\w*.*")


def connect(remote: str) -> SparkSession:
    """A session of its own on a Connect server, whose silence is an error; it connects when it is first used."""
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # As `SparkSession.builder.remote` does, which takes no options of the channel: what follows is Connect's.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    channel = DefaultChannelBuilder(remote, channelOptions=list(CHANNEL))
    session: Any = ConnectSession.builder.channelBuilder(channel).create()
    return session  # type: ignore[no-any-return]


def _allow_deep_plans() -> None:
    """Let protobuf copy plans of more than 100 levels, which an array of structs with arrays has.

    Its compiled implementation refuses them otherwise, and offers no other way. A Connect server takes 1,024 levels
    (`spark.connect.grpc.marshallerRecursionLimit`).
    """
    with suppress(ImportError, AttributeError):
        from google._upb import _message

        _message.SetAllowOversizeProtos(True)  # noqa: FBT003 - takes no name


def prepare(session: SparkSession) -> SparkSession:
    """Set what our queries rely on; returns the session, or closes it where that fails."""
    if is_connect(session):
        _allow_deep_plans()
        _give_up_in_time(session)
    try:
        for name, value in SESSION_CONF.items():
            session.conf.set(name, value)
    except BaseException:
        close(session)
        raise
    return session


def _give_up_in_time(session: SparkSession) -> None:
    """Let a server that is unavailable fail the slice within a minute.

    The client's own policy waits 15 times, up to a minute each: a quarter of an hour in which the run looks alive. Ours
    waits 0.05 s times 2.5ⁿ, 10 s at the most: 9 times, about 35 s in all; then Dagster's retry of the run takes over.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    client: Any = vars(session)["_client"]  # only a Connect session has it
    client.set_retry_policies(
        [DefaultPolicy(max_retries=RETRIES, backoff_multiplier=2.5, max_backoff=LONGEST_BACKOFF_MS)]
    )


def try_once(session: SparkSession) -> None:
    """Send outstanding requests of a Connect server only once, so that the process ends without waiting for retries."""
    if is_connect(session):
        vars(session)["_client"].set_retry_policies([])


def close(session: SparkSession) -> None:
    """End a Connect session on its server; a session of this process stays for the next one who asks.

    PySpark closes a session again when it is collected, with the threads that all sessions of the process share.
    The collector runs in any thread: in one of those it ended the next query in an error, or waited for ever for the
    `stop` that waited for it. So a session that is closed has nothing left to close.
    """
    if not is_connect(session):
        return
    try_once(session)
    session.stop()
    vars(session)["_client"].close = lambda: None


def interrupt(session: SparkSession) -> None:
    """Stop what the session is doing, on the server too; the session itself stays usable."""
    if is_connect(session):
        session.interruptAll()
    else:
        session.sparkContext.cancelAllJobs()


def is_connect(session: SparkSession) -> bool:
    """Whether the session is a client of a Spark Connect server."""
    return type(session).__module__.startswith("pyspark.sql.connect")


@contextmanager
def delta_errors(what: str) -> Iterator[None]:
    """Say Spark's errors in our words; an error that is not known passes unchanged.

    Args:
        what: the table or topic that was worked on, for the message.
    """
    try:
        yield
    except HighwaterError:
        raise
    except Exception as error:
        known = translate_error(what, f"{type(error).__name__}: {error}")
        if known is None:
            raise
        raise known from error


def translate_error(what: str, text: str) -> HighwaterError | None:
    """The error of ours that a text of Spark's means; None if it is not known."""
    if found := _DIVERGED.search(text):
        return TopicTruncatedError(
            f"{what}: another record is where the plan saw the last one",
            found=found.group(),
            remedy="highwater status names the partition and the command that goes on as a new generation",
        )
    if found := _CONFLICT.search(text):
        return SupersededAttemptError(
            f"another writer of {what} was first", found=found.group(), remedy="nothing to do: the write is tried again"
        )
    if found := _EXPIRED.search(text):
        return OffsetsExpiredError(
            f"Kafka no longer holds all offsets of {what}",
            found=_find_line(text, found),
            remedy="highwater status names the partition and the command that records the loss",
        )
    if found := _NOTHING_FETCHED.search(text):
        return NothingFetchedError(
            f"Kafka gave Spark nothing at {what}",
            found=_find_line(text, found),
            remedy="check that the broker answers; for tiered storage raise fetch.wait.max.ms in "
            "HIGHWATER_KAFKA_CONFIG",
            of=KAFKA,
        )
    if found := _KAFKA_FORBIDS.search(text):
        return ConfigurationError(
            f"Kafka refused Spark's user at {what}",
            found=_find_line(text, found),
            remedy="allow the user of HIGHWATER_KAFKA_CONFIG to describe and to read the "
            + ("topic" if found[1] == "topic" else "groups that begin with spark-kafka-"),
        )
    return (
        _translate_unsafe_write(what, text)
        or _translate_scratch_error(what, text)
        or _translate_unavailable_error(what, text)
    )


def _translate_unsafe_write(what: str, text: str) -> HighwaterError | None:
    """The refusals of a commit that could overwrite another one."""
    if found := re.search(UNSAFE, text):
        return ConfigurationError(f"{what} was not written", found=_find_line(text, found), remedy=STORE_REMEDY)
    if found_class := _NO_LOG_STORE.search(text):
        return ConfigurationError(
            f"Spark cannot load the log store that commits to {what}", found=found_class.group(), remedy=CLASS_REMEDY
        )
    return None


def _translate_scratch_error(what: str, text: str) -> HighwaterError | None:
    """A fault of the directory for Spark's own files, which says nothing of the lake's storage."""
    found = _NO_SCRATCH_DIRECTORY.search(text) or _STORAGE.search(text)
    if found is None or (found.re is _STORAGE and not _is_of_scratch(text, found)):
        return None
    return DependencyUnavailableError(
        f"Spark's scratch directory failed at {what}",
        found=_find_line(text, found),
        remedy="free space in the directories of spark.local.dir on Spark's machines, or set SPARK_LOCAL_DIRS (for "
        "uploads to S3 fs.s3a.buffer.dir) to larger ones that Spark may write, then request the slice again",
    )


def _is_of_scratch(text: str, found: re.Match[str]) -> bool:
    """Whether a fault is of a file of Spark's own, by its line and by the first known class of the stack below it."""
    written = _WRITTEN.search(text, text.rfind("\n", 0, found.start()) + 1)
    return written is not None and written["scratch"] is not None


def _translate_unavailable_error(what: str, text: str) -> HighwaterError | None:
    for pattern, name, of, remedy in (
        (
            _S3_UNAVAILABLE,
            "the lake's storage",
            LAKE,
            "check that HIGHWATER_LAKE may be written, then request the slice again",
        ),
        (
            _SPARK_UNAVAILABLE,
            "Spark",
            None,
            "check that the Spark server runs (SPARK_REMOTE), then request the slice again",
        ),
        (
            _STORAGE,
            "the lake's storage",
            LAKE,
            "check that HIGHWATER_LAKE may be written, then request the slice again",
        ),
        (_KAFKA_UNAVAILABLE, "Kafka", KAFKA, "check that the broker answers, then request the slice again"),
    ):
        if found := pattern.search(text):
            return DependencyUnavailableError(
                f"{name} failed at {what}", found=_find_line(text, found), remedy=remedy, of=of
            )
    return None


def _find_line(text: str, found: re.Match[str]) -> str:
    start = text.rfind("\n", 0, found.start()) + 1
    end = text.find("\n", found.end())
    return text[start : end if end >= 0 else len(text)][:300]
