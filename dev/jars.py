"""Jars of broker, Spark, Kafka's tools and a schema registry: resolved once by Ivy, held against a lock, put in place.

`python -m dev.jars` fetches what is missing; `python -m dev.jars registry` fetches what is otherwise fetched on demand;
`python -m dev.jars --lock` writes the lock.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import quoteattr

from dev import paths
from dev.java import find_java
from highwater.errors import PermanentError, TemporaryError

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

LOCK = Path(__file__).with_name("jars.lock")
HEADER = "# set group:artifact:version sha256 - written by `make jars-lock`\n"

# An Ivy settings file for those who resolve from a mirror; without it Ivy's own default is taken.
IVY_SETTINGS = "HIGHWATER_IVY_SETTINGS"

AGAIN = "connect the network, then run the same command again: finished downloads are not repeated"


JAR, ARCHIVE = "jar", "tar.gz"
# A slow network needs minutes for the largest file, and Ivy prints nothing until a file is complete.
PROGRESS_SECONDS = 5.0


class JarError(PermanentError):
    """A jar is not the one that the lock records."""


class DownloadError(TemporaryError):
    """Ivy could not get every jar; what it has got stays in its cache."""


@dataclass(frozen=True, order=True)
class Module:
    """One jar, or one archive of jars, by its coordinates.

    Args:
        group: the publisher.
        artifact: the name.
        version: the version.
        classifier: tells apart several files of one version; empty for the main one.
        type: `jar` or `tar.gz`.
    """

    group: str
    artifact: str
    version: str
    classifier: str = ""
    type: str = JAR

    def __str__(self) -> str:
        classifier = f":{self.classifier}" if self.classifier else ""
        type_ = f"@{self.type}" if self.type != JAR else ""
        return f"{self.group}:{self.artifact}:{self.version}{classifier}{type_}"

    @classmethod
    def parse(cls, text: str) -> Module:
        """Read `group:artifact:version[:classifier][@type]`, as Gradle writes it."""
        names, _, type_ = text.partition("@")
        group, artifact, version, *classifier = names.split(":")
        return cls(group, artifact, version, "".join(classifier), type_ or JAR)

    @property
    def file(self) -> str:
        """Name of its file in the set's folder."""
        return f"{self.stem}.{self.type}"

    @property
    def stem(self) -> str:
        """Name of the folder that an archive is unpacked into."""
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.artifact}-{self.version}{classifier}"

    @property
    def is_archive(self) -> bool:
        """Whether it is unpacked."""
        return self.type == ARCHIVE


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


def read_lock(text: str) -> dict[SetName, dict[Module, str]]:
    """Read the lock: for each set its modules and their SHA-256 in hex."""
    found: dict[SetName, dict[Module, str]] = {name: {} for name in WANTED}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, module, digest = line.split()
            found[name][Module.parse(module)] = digest  # type: ignore[index] # an unknown set is a KeyError
    return found


def write_lock(locked: Mapping[SetName, Mapping[Module, str]]) -> str:
    """The inverse of `read_lock`, in a fixed order."""
    rows = ((name, module, digest) for name in sorted(locked) for module, digest in sorted(locked[name].items()))
    return HEADER + "".join(f"{name} {module} {digest}\n" for name, module, digest in rows)


def folder(name: SetName, tools: Path = paths.TOOLS) -> Path:
    """Where the jars of a set lie once they are fetched."""
    return tools / "jars" / name


def class_path(name: SetName, tools: Path = paths.TOOLS) -> str:
    """The set as a class path for `java -cp`."""
    return f"{folder(name, tools)}{os.sep}*"


def ensure(name: SetName, tools: Path = paths.TOOLS, lock: Path = LOCK) -> Path:
    """Have the jars of a set in place; when they are, this is a look at their names and sizes.

    Returns:
        The folder of the jars.

    Raises:
        DownloadError: something could not be fetched; the next call goes on from there.
        JarError: a jar is not the recorded one.
    """
    locked = read_lock(lock.read_text())[name]
    place = folder(name, tools)
    if not _is_complete(place, locked):
        with one_at_a_time(name, tools):
            if not _is_complete(place, locked):
                _fetch(name, locked, tools)
    return place


def _is_complete(place: Path, locked: Mapping[Module, str]) -> bool:
    """Whether the jars are those of the lock, and as long as they were when they were held against it.

    One that was removed or cut short since would fail in the JVM, by a class that it does not find.
    """
    recorded = {"complete": _digest_of(locked), "sizes": _sizes(place, locked)}
    return all((place / name).is_file() and (place / name).read_text() == told for name, told in recorded.items())


def _fetch(name: SetName, locked: Mapping[Module, str], tools: Path) -> None:
    place = folder(name, tools)
    print(f"Fetching {len(locked)} jars of the set {name!r} into {place} ...", flush=True)
    with temporary_folder(tools) as work:
        cache = _ivy_cache(name, tools)
        verify(locked, resolve(locked, work, cache, transitive=False), cache)
        for module in locked:
            if module.is_archive:
                _unpack(work / "new" / module.file, work / "new" / module.stem)
        (work / "new" / "sizes").write_text(_sizes(work / "new", locked))
        (work / "new" / "complete").write_text(_digest_of(locked))
        _put_in_place(work, place)


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    archive.unlink()


@contextmanager
def one_at_a_time(name: str, tools: Path) -> Iterator[None]:
    """Of two set-ups of one checkout at once the second waits, and then finds everything there."""
    tools.mkdir(parents=True, exist_ok=True)
    with (tools / f"{name}.busy").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        yield


@contextmanager
def temporary_folder(tools: Path) -> Iterator[Path]:
    """A folder on the file system of the tools, from which files are moved into place in one step."""
    tools.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="new-", dir=tools))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _put_in_place(work: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rename(work / "old")
    (work / "new").rename(place)


def _sizes(place: Path, locked: Mapping[Module, str]) -> str:
    return "".join(
        f"{file.relative_to(place)} {file.stat().st_size if file.is_file() else 'missing'}\n"
        for module in sorted(locked)
        for file in _files(place, module)
    )


def _files(place: Path, module: Module) -> list[Path]:
    """The files of a module in the set's folder; a file that an archive lacks is not listed, so the sizes differ."""
    if module.is_archive:
        return sorted(file for file in (place / module.stem).rglob("*") if file.is_file())
    return [place / module.file]


def _digest_of(locked: Mapping[Module, str]) -> str:
    return hashlib.sha256(write_lock({"spark": locked}).encode()).hexdigest()


def verify(locked: Mapping[Module, str], fetched: Mapping[Module, Path], cache: Path) -> None:
    """Hold every jar against the lock.

    Args:
        locked: the modules and their SHA-256.
        fetched: the modules and their files.
        cache: Ivy's; a jar that differs is dropped from it, so that the next call fetches it anew.

    Raises:
        DownloadError: a jar is missing.
        JarError: a jar differs.
    """
    for module, expected in sorted(locked.items()):
        if module not in fetched:
            raise DownloadError(f"{module} was not fetched", remedy=AGAIN)
        found = sha256(fetched[module])
        if found != expected:
            shutil.rmtree(cache / module.group / module.artifact, ignore_errors=True)
            raise JarError(
                f"{module} is not the recorded jar",
                stored=expected,
                found=found,
                remedy="run the same command again; if it fails again, the mirror has another file: do not use it",
            )


def sha256(file: Path) -> str:
    """The checksum of a file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def resolve(modules: Iterable[Module], work: Path, cache: Path, *, transitive: bool) -> dict[Module, Path]:
    """Let Ivy retrieve modules into the folder `new` below `work`; it shows each download.

    Args:
        modules: what to get.
        work: an empty folder.
        cache: Ivy's; what is there is not downloaded again.
        transitive: whether what the modules depend on is wanted too.

    Returns:
        What came, with what it depends on if `transitive`, and the files.

    Raises:
        DownloadError: Ivy failed; the message has its own words.
    """
    (work / "ivy.xml").write_text(ivy_xml(modules, transitive=transitive))
    with _show_download(cache):
        _run_ivy(_ivy_command(work / "ivy.xml", work / "retrieved", cache))
    (work / "new").mkdir()
    return dict(_named(work / "retrieved", work / "new"))


def _named(retrieved: Path, into: Path) -> Iterator[tuple[Module, Path]]:
    # Ivy tells the coordinates by the pattern of `_ivy_command`; files are put down under the names that people know.
    for file in [file for file in retrieved.rglob("*") if file.is_file()]:
        group, artifact, version = file.relative_to(retrieved).parent.parts
        classifier, _, type_ = file.name.removeprefix("file").removeprefix("-").partition(".")
        module = Module(group, artifact, version, classifier, type_)
        yield module, file.rename(into / module.file)


def ivy_xml(modules: Iterable[Module], *, transitive: bool) -> str:
    """An Ivy file that asks for modules, with or without what they depend on."""
    mapping, flag = ("default->default", "true") if transitive else ("default->master", "false")
    wanted = "\n".join(
        f"<dependency org={quoteattr(m.group)} name={quoteattr(m.artifact)} rev={quoteattr(m.version)}"
        f' conf="{mapping}" transitive="{flag}">{_artifact_xml(m)}</dependency>'
        for m in sorted(modules)
    )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="highwater" module="jars"/>\n'
        '<configurations><conf name="default"/></configurations>\n'
        f"<dependencies>\n{wanted}\n</dependencies></ivy-module>\n"
    )


def _artifact_xml(module: Module) -> str:
    if (module.classifier, module.type) == ("", JAR):
        return ""
    type_, classifier = quoteattr(module.type), quoteattr(module.classifier)
    return f"<artifact name={quoteattr(module.artifact)} type={type_} ext={type_} m:classifier={classifier}/>"


def _ivy_cache(name: SetName, tools: Path) -> Path:
    # One each: two Ivys in one cache at once get in each other's way.
    return tools / "ivy" / name


def _ivy_command(ivy_file: Path, retrieved: Path, cache: Path) -> list[str]:
    import pyspark

    (ivy,) = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
    command = [str(find_java(os.environ).executable), "-jar", str(ivy), "-cache", str(cache)]
    if own := os.environ.get(IVY_SETTINGS):
        command += ["-settings", own]
    # Some jars are of the packaging "bundle": without it five are missing.
    command += ["-ivy", str(ivy_file), "-types", JAR, "bundle", ARCHIVE]
    return [*command, "-retrieve", f"{retrieved}/[organisation]/[artifact]/[revision]/file(-[classifier]).[ext]"]


def _run_ivy(command: list[str]) -> None:
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy:
        assert ivy.stdout is not None
        for line in ivy.stdout:
            lines.append(line.rstrip())
            if shown := progress(line):
                print(shown, flush=True)
    if ivy.returncode:
        raise DownloadError(
            "Ivy could not fetch every jar",
            found="\n".join(troubles(lines)),
            remedy=AGAIN,
        )


@contextmanager
def _show_download(cache: Path) -> Iterator[None]:
    """Print every few seconds how much of a file is downloaded."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            if downloaded := partial_bytes(cache):
                print(f"  {downloaded / 1e6:,.0f} MB ...", flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def partial_bytes(cache: Path) -> int:
    """The size of the files that Ivy is downloading into its cache."""
    size = 0
    for file in cache.rglob("*.part"):
        # Ivy renames each file when it is complete.
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def progress(line: str) -> str | None:
    """What of a line of Ivy is shown: the end of each jar's download, without the address."""
    done = re.search(r"\[SUCCESSFUL \] (\S+)#(\S+?);(\S+?)!", line)
    return f"  {done[1]}:{done[2]}:{done[3]}" if done else None


def troubles(lines: Sequence[str]) -> list[str]:
    """What of Ivy's output tells why it failed: warnings and errors, the last 20."""
    telling = [line.strip() for line in lines if re.search(r"UNRESOLVED|FAILED|Exception|ERROR|WARN|not found", line)]
    return (telling or list(lines))[-20:]


def record(tools: Path = paths.TOOLS, lock: Path = LOCK) -> None:
    """Write the lock from `WANTED`."""
    lock.write_text(write_lock({name: _recorded(name, tools) for name in WANTED}))


def _recorded(name: SetName, tools: Path) -> dict[Module, str]:
    modules = [Module.parse(text) for text in WANTED[name]]
    with temporary_folder(tools) as work:
        fetched = resolve(modules, work, _ivy_cache(name, tools), transitive=name in CLOSURES)
        return {module: sha256(jar) for module, jar in fetched.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; exit status 1 and the reason when jars are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.jars", description="Fetch the jars of broker, Spark and tools."
    )
    parser.add_argument(
        "sets", nargs="*", metavar="SET", help=f"of {', '.join(WANTED)}; default: all but {', '.join(ON_DEMAND)}"
    )
    parser.add_argument("--lock", action="store_true", help="write dev/jars.lock instead")
    asked = parser.parse_args(arguments)
    if unknown := sorted({*asked.sets} - {*WANTED}):
        parser.error(f"no such set: {', '.join(unknown)}")
    if asked.lock:
        record()
        return 0
    try:
        # Side by side: nearly all of the time is waiting for many small files.
        with ThreadPoolExecutor() as pool:
            list(pool.map(ensure, asked.sets or [name for name in WANTED if name not in ON_DEMAND]))
    except (JarError, DownloadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
