"""Spark's errors in our words, by the texts that Spark, Hadoop and the kernel were seen to give."""

from __future__ import annotations

import pytest

from highwater.errors import (
    KAFKA,
    LAKE,
    ConfigurationError,
    DependencyUnavailableError,
    OffsetsExpiredError,
    SupersededAttemptError,
)
from highwater.resources.spark import _allow_deep_plans, delta_errors, translate_error

TABLE = "/lake/orders/raw"
FOLDER = f"file:{TABLE}/slice=orders@0000007"
FILE = f"{FOLDER}/part-00000-0c5d.c000.snappy.parquet"
TASK = (
    "SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to "
    f"file:{TABLE}. SQLSTATE: 58030\n\tat org.apache.spark.sql.execution.datasources.FileFormatWriter\nCaused by: "
)
NOT_WRITTEN = {
    "no right": f"java.io.FileNotFoundException: {FILE} (Permission denied)",
    "no right to the log": f"java.nio.file.AccessDeniedException: {TABLE}/_delta_log/00000000000000000001.json",
    "an object store without the right": "com.amazonaws.services.s3.model.AmazonS3Exception: Access Denied; "
    "Error Code: AccessDenied; Status Code: 403",
    "full": "java.io.IOException: No space left on device",
    "mounted to be read": f"java.io.FileNotFoundException: {FILE} (Read-only file system)",
    "a folder that cannot be made": f"java.io.IOException: Mkdirs failed to create {FOLDER} (exists=false, cwd=file:/)",
    "a file in its place": "org.apache.hadoop.fs.FileAlreadyExistsException: "
    f"Destination exists and is not a directory: {FOLDER[5:]}",
    "a file above it": "org.apache.hadoop.fs.ParentNotDirectoryException: "
    f"Parent path is not a directory: file:{TABLE}",
}


@pytest.mark.parametrize("cause", NOT_WRITTEN.values(), ids=NOT_WRITTEN.keys())
def test_write_errors_belong_to_the_lake_and_are_retried(cause: str) -> None:
    with pytest.raises(DependencyUnavailableError) as caught, delta_errors(TABLE):
        raise OSError(TASK + cause + "\n\tat java.base/java.io.FileOutputStream.open0(Native Method)")
    error = caught.value
    assert error.of == LAKE
    assert TABLE in error.problem
    assert str(error.found).endswith(cause), "the line that says it, whole"
    assert "HIGHWATER_LAKE" in error.remedy


SPILLED = (
    "\n\tat java.base/sun.nio.ch.FileDispatcherImpl.write0(Native Method)"
    "\n\tat org.apache.spark.storage.TimeTrackingOutputStream.write(TimeTrackingOutputStream.java:59)"
    "\n\tat org.apache.spark.storage.DiskBlockObjectWriter.write(DiskBlockObjectWriter.scala:334)"
    "\n\tat org.apache.spark.util.collection.unsafe.sort.UnsafeSorterSpillWriter.write(SpillWriter.java:136)"
    "\n\tat org.apache.spark.util.collection.unsafe.sort.UnsafeExternalSorter.spill(UnsafeExternalSorter.java:261)"
)
LAKE_WRITE = (
    "\n\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)"
    "\n\tat org.apache.hadoop.fs.RawLocalFileSystem$LocalFSFileOutputStream.write(RawLocalFileSystem.java:426)"
    "\n\tat org.apache.parquet.hadoop.ParquetFileWriter.end(ParquetFileWriter.java:1699)"
    "\n\tat org.apache.spark.sql.execution.datasources.FileFormatDataWriter.write(FileFormatDataWriter.scala:87)"
)
IN_MAP_STAGE = "\n\tat org.apache.spark.shuffle.ShuffleWriteProcessor.write(ShuffleWriteProcessor.scala:56)"
BLOCK = "/data/blockmgr-6f3c/0c/temp_shuffle_9a1e"
NO_SCRATCH = {
    "a spill": "java.io.IOException: No space left on device" + SPILLED,
    "a spill below a write to the lake": "java.io.IOException: No space left on device" + SPILLED + LAKE_WRITE,
    "a quota": "java.io.IOException: Disk quota exceeded" + SPILLED,
    "a file of a shuffle": f"java.io.FileNotFoundException: {BLOCK} (No space left on device)",
    "no right": f"java.io.FileNotFoundException: {BLOCK} (Permission denied)" + LAKE_WRITE,
    "a buffer for S3": "java.io.IOException: No space left on device"
    "\n\tat org.apache.hadoop.fs.s3a.S3ADataBlocks$DiskBlock.write(S3ADataBlocks.java:867)",
    "no directory": "java.io.IOException: Failed to create local dir in /data/spark (Permission denied)",
}


@pytest.mark.parametrize("cause", NO_SCRATCH.values(), ids=NO_SCRATCH.keys())
def test_a_full_scratch_directory_is_not_the_lake(cause: str) -> None:
    """It counted against the lake's breaker, and the remedy named HIGHWATER_LAKE."""
    error = translate_error(TABLE, TASK + cause)
    assert isinstance(error, DependencyUnavailableError)
    assert error.of is None
    assert error.problem.startswith("Spark's scratch directory failed")
    assert "SPARK_LOCAL_DIRS" in error.remedy
    assert "spark.local.dir" in error.remedy
    assert str(error.found).endswith(cause.partition("\n")[0])


@pytest.mark.parametrize("trace", [LAKE_WRITE, LAKE_WRITE + IN_MAP_STAGE])
def test_a_full_lake_is_not_the_scratch_directory(trace: str) -> None:
    error = translate_error(TABLE, TASK + "java.io.IOException: No space left on device" + trace)
    assert getattr(error, "of", None) == LAKE


def test_another_writer_and_kafka_are_not_taken_for_the_storage() -> None:
    conflict = translate_error(TABLE, TASK + "ConcurrentAppendException: [DELTA_CONCURRENT_APPEND] Files were added")
    assert isinstance(conflict, SupersededAttemptError)
    expired = translate_error(
        TABLE, TASK + "java.lang.IllegalStateException: Cannot fetch offset 5, data may have been lost"
    )
    assert isinstance(expired, OffsetsExpiredError)
    denied = translate_error(
        TABLE,
        TASK + "org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access topics: [orders]",
    )
    assert isinstance(denied, ConfigurationError), "a broker that answered is not unavailable"
    assert str(denied.found).endswith("[orders]")
    late = translate_error(TABLE, TASK + "org.apache.kafka.common.errors.TimeoutException: no answer in 60000ms")
    assert isinstance(late, DependencyUnavailableError)
    assert late.of == KAFKA
    store = "java.net.UnknownHostException: getFileStatus on s3a://lake/orders: no address"
    assert getattr(translate_error(TABLE, TASK + store), "of", None) == LAKE
    assert translate_error(TABLE, TASK + "java.net.UnknownHostException: kafka-1") is None
    own = "java.util.concurrent.TimeoutException: Futures timed out after [300 seconds]"
    assert translate_error(TABLE, TASK + own) is None, "a broadcast of Spark's"
    assert translate_error(TABLE, TASK + "java.lang.ArithmeticException: / by zero") is None


def test_a_plan_of_many_levels_is_copied() -> None:
    """A stream with an array of structs that have arrays failed over Connect, by a SystemError of protobuf."""
    from pyspark.sql.connect import proto

    _allow_deep_plans()
    plan = proto.Expression()
    plan.literal.integer = 1
    for _ in range(400):
        outer = proto.Expression()
        outer.unresolved_function.function_name = "abs"
        outer.unresolved_function.arguments.append(plan)
        plan = outer
    copy = proto.Expression()
    copy.CopyFrom(plan)
    assert copy == plan
