"""Jars of broker, Spark, Kafka's tools and a schema registry: resolved once by Ivy, compared with a lock, put in place.

`python -m dev.jars` fetches what is missing; `python -m dev.jars registry` fetches what is otherwise fetched on demand;
`python -m dev.jars --lock` writes the lock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from dev import paths
from highwater.resources import jars
from highwater.resources.jars import (
    ARCHIVE,
    LOCK,
    DownloadError,
    JarError,
    Module,
    build_cache_path,
    compute_sha256,
    resolve,
    temporary_folder,
    write_lock,
)

SetName = Literal["broker", "registry", "spark", "tools"]

BROKER_KAFKA = "4.3.1"
# The connector and its token provider must agree, and 4.0.0 is the newest of the latter; it runs on pyspark 4.0.5.
SPARK_KAFKA = "4.0.0"
DELTA = "4.4.0"
# The release of Hadoop that Spark 4.0.5 ships.
HADOOP = "3.4.1"
# Hadoop asks for the bundle of the whole SDK, 558 MB. These are the modules that S3 needs, 9 MB, in the release that
# Hadoop 3.4.2 was built with; of 2.24, with which 3.4.1 was, not all modules resolve. From 2.30 on the SDK adds
# checksums that other stores than S3 refuse.
AWS = "2.29.52"
_AWS_MODULES = (
    "annotations",
    "apache-client",
    "arns",
    "auth",
    "aws-core",
    "aws-query-protocol",
    "aws-xml-protocol",
    "checksums",
    "checksums-spi",
    "crt-core",
    "endpoints-spi",
    "http-auth",
    "http-auth-aws",
    "http-auth-aws-eventstream",
    "http-auth-spi",
    "http-client-spi",
    "identity-spi",
    "json-utils",
    "metrics-spi",
    "netty-nio-client",
    "profiles",
    "protocol-core",
    "regions",
    "retries",
    "retries-spi",
    "s3",
    "s3-transfer-manager",
    "sdk-core",
    "sts",
    "third-party-jackson-core",
    "utils",
)
REGISTRY = "2.6.13.Final"

# What the lock is made from. The closure of Delta and of the connector would bring hundreds of jars that Spark ships
# or that only tests want, six minutes of resolving; so Spark's set is listed, and only the broker's is a closure.
WANTED: Mapping[SetName, Sequence[str]] = {
    "broker": (
        f"org.apache.kafka:kafka_2.13:{BROKER_KAFKA}",
        # Not in the closure: without a binding of slf4j 1.7 the broker logs nothing.
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
    ),
    "spark": (
        f"org.apache.spark:spark-sql-kafka-0-10_2.13:{SPARK_KAFKA}",
        # The newest that resolves; it runs on pyspark 4.0.5, which ships what it depends on (avro 1.12, xz 1.10).
        "org.apache.spark:spark-avro_2.13:4.0.2",
        f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{SPARK_KAFKA}",
        "org.apache.kafka:kafka-clients:3.9.0",
        "org.apache.commons:commons-pool2:2.12.0",
        f"io.delta:delta-spark_4.0_2.13:{DELTA}",
        f"io.delta:delta-storage:{DELTA}",
        f"io.delta:delta-kernel-api:{DELTA}",
        f"io.delta:delta-kernel-defaults:{DELTA}",
        f"io.delta:delta-kernel-unitycatalog:{DELTA}",
        "io.unitycatalog:unitycatalog-client:0.6.0",
        "io.unitycatalog:unitycatalog-hadoop:0.6.0",
        f"org.apache.hadoop:hadoop-aws:{HADOOP}",
        *(f"software.amazon.awssdk:{module}:{AWS}" for module in _AWS_MODULES),
        "org.reactivestreams:reactive-streams:1.0.4",
        "software.amazon.eventstream:eventstream:1.0.1",
    ),
    # `kafka-consumer-groups` and the like, for tests: they run with the broker's jars beside this one, and its closure
    # would bring Connect and a web server.
    "tools": (f"org.apache.kafka:kafka-tools:{BROKER_KAFKA}",),
    # Apicurio with all its dependencies.
    "registry": (f"io.apicurio:apicurio-registry-app:{REGISTRY}:all@{ARCHIVE}",),
}
CLOSURES: frozenset[SetName] = frozenset({"broker"})
# 142 MB: the first demonstration or test with schemas fetches it, since the set-up is complete without it.
ON_DEMAND: frozenset[SetName] = frozenset({"registry"})


def folder(name: SetName, tools: Path = paths.TOOLS) -> Path:
    """The folder of the jars of a set once they are fetched."""
    return jars.build_jars_path(name, tools)


def class_path(name: SetName, tools: Path = paths.TOOLS) -> str:
    """The set as a class path for `java -cp`."""
    return jars.build_class_path(name, tools)


def ensure(name: SetName, tools: Path = paths.TOOLS, lock: Path = LOCK) -> Path:
    """Have the jars of a set in place, as `highwater.resources.jars.ensure_jars` does."""
    return jars.ensure_jars(name, tools, lock)


def record(tools: Path = paths.TOOLS, lock: Path = LOCK) -> None:
    """Write the lock from `WANTED`."""
    lock.write_text(write_lock({name: _recorded(name, tools) for name in WANTED}))


def _recorded(name: SetName, tools: Path) -> dict[Module, str]:
    modules = [Module.parse(text) for text in WANTED[name]]
    with temporary_folder(tools) as work:
        fetched = resolve(modules, work, build_cache_path(name, tools), transitive=name in CLOSURES)
        return {module: compute_sha256(jar) for module, jar in fetched.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; exit status 1 and the reason when jars are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.jars", description="Fetch the jars of broker, Spark and tools."
    )
    parser.add_argument(
        "sets", nargs="*", metavar="SET", help=f"of {', '.join(WANTED)}; default: all but {', '.join(ON_DEMAND)}"
    )
    parser.add_argument("--lock", action="store_true", help="write the lock instead")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.sets} - {*WANTED}):
        parser.error(f"no such set: {', '.join(unknown)}")
    if options.lock:
        record()
        return 0
    try:
        # Side by side: nearly all of the time is waiting for many small files.
        with ThreadPoolExecutor() as pool:
            list(pool.map(ensure, options.sets or [name for name in WANTED if name not in ON_DEMAND]))
    except (JarError, DownloadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
