"""Jars by their coordinates: resolved by Ivy, compared with a lock, put in place as a whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from highwater.errors import PermanentError, TemporaryError
from highwater.resources.java import find_java

LOCK = Path(__file__).with_name("jars.lock")
# Our own classes: log stores for Delta, and the Connect server. Compiled by `python -m dev.java_classes` from the
# sources beside it.
OWN_JAR = Path(__file__).parent / "java_classes" / "highwater.jar"
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
        classifier: distinguishes several files of one version; empty for the main one.
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


def read_lock(text: str) -> dict[str, dict[Module, str]]:
    """Read the lock: for each set its modules and their SHA-256 in hex."""
    found: dict[str, dict[Module, str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, module, digest = line.split()
            found.setdefault(name, {})[Module.parse(module)] = digest
    return found


def write_lock(locked: Mapping[str, Mapping[Module, str]]) -> str:
    """The inverse of `read_lock`, in a fixed order."""
    rows = ((name, module, digest) for name in sorted(locked) for module, digest in sorted(locked[name].items()))
    return HEADER + "".join(f"{name} {module} {digest}\n" for name, module, digest in rows)


def build_jars_path(name: str, tools: Path) -> Path:
    """The folder of the jars of a set once they are fetched."""
    return tools / "jars" / name


def build_class_path(name: str, tools: Path) -> str:
    """The set as a class path for `java -cp`."""
    return f"{build_jars_path(name, tools)}{os.sep}*"


def copy_own_jar(folder: Path) -> None:
    """Put the jar of our own classes into a folder of jars, in the place of one of another release."""
    half = folder / f".{OWN_JAR.name}"
    shutil.copyfile(OWN_JAR, half)
    half.replace(folder / OWN_JAR.name)


def ensure_jars(name: str, tools: Path, lock: Path = LOCK) -> Path:
    """Have the jars of a set in place; when they are, this is a look at their names and sizes.

    Args:
        name: a set of the lock; Highwater's sessions need `spark`.
        tools: the jars lie below, in `jars/<name>`.
        lock: the modules with their checksums.

    Returns:
        The folder of the jars.

    Raises:
        ConfigurationError: no suited Java runs Ivy.
        DownloadError: something could not be fetched; the next call goes on from there.
        JarError: a jar is not the recorded one.
    """
    locked = read_lock(lock.read_text())[name]
    place = build_jars_path(name, tools)
    if not is_complete(place, locked):
        with lock_setup(name, tools):
            if not is_complete(place, locked):
                _fetch(name, locked, tools)
    return place


def is_complete(place: Path, locked: Mapping[Module, str]) -> bool:
    """Whether the jars are those of the lock, and as long as they were when they were compared with it.

    A jar that was removed or truncated since would fail in the JVM, by a missing class.
    """
    recorded = {"complete": _build_digest(locked), "sizes": _format_file_sizes(place, locked)}
    return all(
        (place / name).is_file() and (place / name).read_text() == checksum for name, checksum in recorded.items()
    )


def _fetch(name: str, locked: Mapping[Module, str], tools: Path) -> None:
    place = build_jars_path(name, tools)
    print(f"Fetching {len(locked)} jars of the set {name!r} into {place} ...", flush=True)
    with temporary_folder(tools) as work:
        cache = build_cache_path(name, tools)
        verify(locked, resolve(locked, work, cache, transitive=False), cache)
        for module in locked:
            if module.is_archive:
                _unpack(work / "new" / module.file, work / "new" / module.stem)
        (work / "new" / "sizes").write_text(_format_file_sizes(work / "new", locked))
        (work / "new" / "complete").write_text(_build_digest(locked))
        _put_in_place(work, place)


def _unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    archive.unlink()


@contextmanager
def lock_setup(name: str, tools: Path) -> Iterator[None]:
    """A lock for set-ups of one checkout: the second waits, and then finds everything there."""
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


def _format_file_sizes(place: Path, locked: Mapping[Module, str]) -> str:
    return "".join(
        f"{file.relative_to(place)} {file.stat().st_size if file.is_file() else 'missing'}\n"
        for module in sorted(locked)
        for file in _list_files(place, module)
    )


def _list_files(place: Path, module: Module) -> list[Path]:
    """The files of a module in the set's folder; a file that an archive lacks is not listed, so the sizes differ."""
    if module.is_archive:
        return sorted(file for file in (place / module.stem).rglob("*") if file.is_file())
    return [place / module.file]


def _build_digest(locked: Mapping[Module, str]) -> str:
    return hashlib.sha256(write_lock({"spark": locked}).encode()).hexdigest()


def verify(locked: Mapping[Module, str], fetched: Mapping[Module, Path], cache: Path) -> None:
    """Verify every jar against the lock.

    Args:
        locked: the modules and their SHA-256.
        fetched: the modules and their files.
        cache: Ivy's; a jar that differs is dropped from it, so that the next call fetches it again.

    Raises:
        DownloadError: a jar is missing.
        JarError: a jar differs.
    """
    for module, expected in sorted(locked.items()):
        if module not in fetched:
            raise DownloadError(f"{module} was not fetched", remedy=AGAIN)
        found = compute_sha256(fetched[module])
        if found != expected:
            shutil.rmtree(cache / module.group / module.artifact, ignore_errors=True)
            raise JarError(
                f"{module} is not the recorded jar",
                stored=expected,
                found=found,
                remedy="run the same command again; if it fails again, the mirror has another file: do not use it",
            )


def compute_sha256(file: Path) -> str:
    """The checksum of a file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def resolve(modules: Iterable[Module], work: Path, cache: Path, *, transitive: bool) -> dict[Module, Path]:
    """Let Ivy retrieve modules into the folder `new` below `work`; it shows each download.

    Args:
        modules: the modules to fetch.
        work: an empty folder.
        cache: Ivy's cache; jars in it are not downloaded again.
        transitive: whether what the modules depend on is wanted too.

    Returns:
        The resolved modules, with their dependencies if `transitive`, and the files.

    Raises:
        DownloadError: Ivy failed; the message has its own words.
    """
    (work / "ivy.xml").write_text(build_ivy_xml(modules, transitive=transitive))
    with _show_download(cache):
        _run_ivy(_build_ivy_command(work / "ivy.xml", work / "retrieved", cache))
    (work / "new").mkdir()
    return dict(_rename_retrieved(work / "retrieved", work / "new"))


def _rename_retrieved(retrieved: Path, into: Path) -> Iterator[tuple[Module, Path]]:
    # The pattern of `_build_ivy_command` encodes the coordinates; files get the names that people know.
    for file in [file for file in retrieved.rglob("*") if file.is_file()]:
        group, artifact, version = file.relative_to(retrieved).parent.parts
        classifier, _, type_ = file.name.removeprefix("file").removeprefix("-").partition(".")
        module = Module(group, artifact, version, classifier, type_)
        yield module, file.rename(into / module.file)


def build_ivy_xml(modules: Iterable[Module], *, transitive: bool) -> str:
    """An Ivy file that asks for modules, with or without what they depend on."""
    mapping, flag = ("default->default", "true") if transitive else ("default->master", "false")
    wanted = "\n".join(
        f"<dependency org={quoteattr(m.group)} name={quoteattr(m.artifact)} rev={quoteattr(m.version)}"
        f' conf="{mapping}" transitive="{flag}">{_build_artifact_xml(m)}</dependency>'
        for m in sorted(modules)
    )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="highwater" module="jars"/>\n'
        '<configurations><conf name="default"/></configurations>\n'
        f"<dependencies>\n{wanted}\n</dependencies></ivy-module>\n"
    )


def _build_artifact_xml(module: Module) -> str:
    if (module.classifier, module.type) == ("", JAR):
        return ""
    type_, classifier = quoteattr(module.type), quoteattr(module.classifier)
    return f"<artifact name={quoteattr(module.artifact)} type={type_} ext={type_} m:classifier={classifier}/>"


def build_cache_path(name: str, tools: Path) -> Path:
    """The cache of Ivy for one set of jars."""
    # One each: two Ivys in one cache at once get in each other's way.
    return tools / "ivy" / name


def _build_ivy_command(ivy_file: Path, retrieved: Path, cache: Path) -> list[str]:
    import pyspark

    (ivy,) = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
    command = [str(find_java(os.environ, cache.parent).executable), "-jar", str(ivy), "-cache", str(cache)]
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
            if shown := format_progress(line):
                print(shown, flush=True)
    if ivy.returncode:
        raise DownloadError(
            "Ivy could not fetch every jar",
            found="\n".join(select_error_lines(lines)),
            remedy=AGAIN,
        )


@contextmanager
def _show_download(cache: Path) -> Iterator[None]:
    """Print every few seconds how much of a file is downloaded."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(PROGRESS_SECONDS):
            if downloaded := measure_partial_bytes(cache):
                print(f"  {downloaded / 1e6:,.0f} MB ...", flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure_partial_bytes(cache: Path) -> int:
    """The size of the files that Ivy is downloading into its cache."""
    size = 0
    for file in cache.rglob("*.part"):
        # Ivy renames each file when it is complete.
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def format_progress(line: str) -> str | None:
    """The part of a line of Ivy that is shown: the end of each jar's download, without the address."""
    done = re.search(r"\[SUCCESSFUL \] (\S+)#(\S+?);(\S+?)!", line)
    return f"  {done[1]}:{done[2]}:{done[3]}" if done else None


def select_error_lines(lines: Sequence[str]) -> list[str]:
    """The lines of Ivy's output that show why it failed: warnings and errors, the last 20."""
    relevant = [line.strip() for line in lines if re.search(r"UNRESOLVED|FAILED|Exception|ERROR|WARN|not found", line)]
    return (relevant or list(lines))[-20:]
