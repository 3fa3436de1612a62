"""Archives of loaded classes, with which the JVMs of broker and Spark start in some 0.6 of the processor time.

On request a JVM writes the classes it has loaded as it ends (JEP 350). One that starts with such a file neither
reads nor verifies these classes again. It holds the file against its own version and class path, and goes on without
it where they differ; so an archive can be missing or out of date, and nothing but time is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dev import paths
from dev.java import find_java
from highwater.resources.jars import LOCK, OWN_JAR, lock_setup, temporary_folder

if TYPE_CHECKING:
    from dev.java import Java

Name = Literal["broker", "spark"]

# To write 200 MB at its end took a JVM 11 s on 2 quiet cores.
END_SECONDS = 180.0
# Each class that cannot be kept is a warning of its own, some thousands of them.
_QUIET = ("-Xlog:disable", "-Xlog:all=error:stderr")


def options(name: Name, java: Java, tools: Path = paths.TOOLS) -> list[str]:
    """The options of a JVM that starts with its archive; none where there is none."""
    archive = _folder(tools, java) / f"{name}.jsa"
    return [f"-XX:SharedArchiveFile={archive}", "-Xshare:auto"] if archive.is_file() else []


def _folder(tools: Path, java: Java) -> Path:
    """The folder of the archives for a Java: others for other jars."""
    own = sha256(OWN_JAR.read_bytes()).hexdigest()
    known = "\n".join([str(java.home), str(java.version), version("pyspark"), _lock(), own])
    return tools / "classes" / sha256(known.encode()).hexdigest()[:16]


def _lock() -> str:
    return LOCK.read_text()


def ensure(tools: Path = paths.TOOLS) -> None:
    """Have the archives in place. It is tried once: after that this is a look at a folder, whatever came of it.

    Raises:
        ChildFailedError: a JVM did not run.
        OSError: the folder cannot be written.
    """
    java = find_java(os.environ)
    folder = _folder(tools, java)
    with lock_setup("classes", tools):
        if folder.is_dir():
            return
        folder.parent.mkdir(exist_ok=True)
        with temporary_folder(tools) as work:
            made = work / "made"
            made.mkdir()
            try:
                if _writes_archives(java):
                    print("Preparing the classes of broker and Spark: once, about a minute ...", flush=True)
                    _run_both(work, made)
            except Exception:
                folder.mkdir()
                raise
            made.rename(folder)


def _writes_archives(java: Java) -> bool:
    """Whether this Java has the archive of its own classes, on which ours rest."""
    result = subprocess.run([java.executable, "-Xshare:on", "-version"], capture_output=True, timeout=60, check=False)
    return result.returncode == 0


def _run_both(home: Path, made: Path) -> None:
    """Let broker and Spark do a little of everything once, and write what they have loaded."""
    from dev.broker import EmbeddedBroker
    from dev.spark_connect import SparkConnect
    from dev.spark_local import SMALL_QUERIES

    def writing(name: Name) -> list[str]:
        return [f"-XX:ArchiveClassesAtExit={made / name}.jsa", *_QUIET]

    broker = EmbeddedBroker(home, java_options=writing("broker"))
    spark = SparkConnect(home, extra=SMALL_QUERIES, java_options=writing("spark"))
    try:
        broker.launch()
        spark.launch()
        broker.wait_ready()
        spark.wait_ready()
        _use(broker.bootstrap, spark.remote, home / "lake")
    finally:
        spark.stop(END_SECONDS)
        broker.stop(END_SECONDS)


def _use(bootstrap: str, remote: str, lake: Path) -> None:
    """Take records from a topic into a table, change it, and read it."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic("t", 2, 1)])["t"].result(30)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "t", "log_level": 0})
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(100):
        producer.produce("t", b'{"a": %d, "b": "2026-01-01T00:00:00Z"}' % number, b"%d" % (number % 7))
    producer.commit_transaction(30)
    spark = SparkSession.builder.remote(remote).getOrCreate()
    try:
        ends = '{"t": {"0": -1, "1": -1}}'
        kafka_options = {
            "kafka.bootstrap.servers": bootstrap,
            "subscribe": "t",
            "endingOffsets": ends,
            "includeHeaders": "true",
        }
        came = spark.read.format("kafka").options(**kafka_options).load()
        value = F.from_json(F.col("value").cast("string"), "a INT, b TIMESTAMP, c DECIMAL(12,2)")
        rows = came.select(F.col("key").cast("string"), "offset", value.alias("v")).select("key", "offset", "v.*")
        path = str(lake / "t")
        rows.withColumn("slice", F.lit("t@0")).write.format("delta").partitionBy("slice").save(path)
        table = spark.read.format("delta").load(path)
        best = table.groupBy("key").agg(F.max_by(F.struct("a", "b"), "offset").alias("last"), F.count("*").alias("n"))
        best.write.format("delta").save(str(lake / "best"))
        again = rows.withColumn("slice", F.lit("t@1")).join(
            table.select("key", "offset"), ["key", "offset"], "left_anti"
        )
        replaced = again.write.format("delta").mode("overwrite").option("replaceWhere", "slice = 't@1'")
        replaced.option("userMetadata", "{}").save(path)
        spark.sql(f"DELETE FROM delta.`{path}` WHERE a = 3")
        spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect()
        table.orderBy("offset").toPandas()
    finally:
        spark.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; what goes wrong is reported and costs nothing but time."""
    del arguments
    try:
        ensure()
    except Exception as error:  # noqa: BLE001 - whatever it is, all else works without
        print(f"broker and Spark will start more slowly, without archives of their classes: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
