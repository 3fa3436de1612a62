"""The Java, jars, settings and environment of a Spark JVM on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dev import jars, paths
from dev.java import find_java
from dev.processes import LOOPBACK
from highwater.resources.jars import OWN_JAR
from highwater.resources.spark import SESSION_CONF, STATIC_CONF

# Variables that would turn a server of ours into a client of somebody's, or change what it loads.
_STRANGE = ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_CONF_DIR", "SPARK_MASTER", "PYSPARK_SUBMIT_ARGS")

_LOGGING = """rootLogger.level=warn
rootLogger.appenderRef.err.ref=err
appender.err.type=Console
appender.err.name=err
appender.err.target=SYSTEM_ERR
appender.err.layout.type=PatternLayout
appender.err.layout.pattern=%d{ISO8601} %p %c{1}: %m%n%ex
logger.deploy.name=org.apache.spark.deploy
logger.deploy.level=info
# One warning for each read of a batch: our reads name their offsets, so there is nothing to warn of.
logger.kafka.name=org.apache.spark.sql.kafka010
logger.kafka.level=error
"""


def spark_home() -> Path:
    """The folder of Spark's own scripts and jars: it comes with pyspark."""
    import pyspark

    return Path(pyspark.__file__).parent


# A driver that lives for minutes spends half of its processor time on compiling what it will not run often enough: on
# 2 cores the first slice took 40 s of processor time with the second compiler, 21 s without it. Without it, too, Java
# gives the compiled code 48 MiB, which are full after some slices: sweeping them took 2 s of the 14 s of a slice.
SHORT_LIVED = {
    # Avro's parser allocates what a length says before it looks for the bytes: a few wrong ones would take all memory.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m "
    "-Dorg.apache.avro.limits.bytes.maxLength=67108864 -Dorg.apache.avro.limits.string.maxLength=67108864 "
    "-Dorg.apache.avro.limits.collectionItems.maxLength=1000000",
    # What a plan learns while it runs does not pay where the plan takes longer than the run: a fifth of a small slice.
    "spark.sql.adaptive.enabled": "false",
    # Spark's page shows plans in their short form: to write the long one of each query took a tenth of a small slice.
    "spark.sql.ui.explainMode": "simple",
}

# For drivers whose queries have a few thousand rows at the most.
SMALL_QUERIES = {
    **SHORT_LIVED,
    # Generated code takes longer to compile than a few thousand rows take without it: 10 s instead of 15 s of
    # processor time for a small slice through all tables. The benchmarks and `make up` have it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # A task of such a query is hardly more than its start, so they have as few as may be.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.shuffle.partitions": "2",
}


def local_conf(home: Path, *, driver_memory_mb: int = 2048) -> dict[str, str]:
    """Settings of a driver on this machine, whether it serves Connect or one process.

    Args:
        home: its scratch files and warehouse lie below.
        driver_memory_mb: the heap in MiB.
    """
    every = f"{jars.folder('spark')}{os.sep}*{os.pathsep}{OWN_JAR}"
    return {
        **STATIC_CONF,
        **SESSION_CONF,
        # A class path, not spark.jars: those are copied at every start.
        "spark.driver.extraClassPath": every,
        "spark.executor.extraClassPath": every,
        "spark.driver.memory": f"{driver_memory_mb}m",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.local.dir": str(home / "spark" / "scratch"),
        "spark.sql.warehouse.dir": str(home / "spark" / "warehouse"),
        # The defaults of 50 and 200 cost seconds a commit on a machine of few cores.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.shuffle.partitions": "4",
        # On local files Hadoop starts a program to set the mode of each file that it writes: Delta's checksum files are
        # left out.
        "spark.databricks.delta.writeChecksumFile.enabled": "false",
        # What would be listed for those files is looked up by a job of its own at a table's first commit.
        "spark.databricks.delta.allFilesInCrc.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


def write_conf_dir(home: Path, name: str, conf: Mapping[str, str]) -> Path:
    """Write a folder for `SPARK_CONF_DIR`, so that a process that starts a local session has these settings."""
    folder = home / "spark" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log4j2.properties").write_text(_LOGGING)
    (folder / "spark-defaults.conf").write_text("".join(f"{key} {escaped(conf[key])}\n" for key in sorted(conf)))
    return folder


def escaped(value: str) -> str:
    r"""A value as Java's properties files want it: `\` doubled."""
    return value.replace("\\", "\\\\")


def environment(conf_dir: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a process that starts a JVM of Spark.

    Args:
        conf_dir: from `write_conf_dir`.
        base: what to start from; our own environment if left out.
    """
    inherited = {k: v for k, v in (os.environ if base is None else base).items() if k not in _STRANGE}
    return {
        **inherited,
        **find_java(os.environ, paths.TOOLS).build_environment(),
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONF_DIR": str(conf_dir),
        # Functions in Python run in the environment that has their packages.
        "PYSPARK_PYTHON": sys.executable,
        # Without it the pages of Spark listen on every address.
        "SPARK_LOCAL_IP": LOOPBACK,
        "SPARK_LOCAL_HOSTNAME": LOOPBACK,
    }
