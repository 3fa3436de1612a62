"""The jar of our own classes for Spark: `python -m dev.java_classes` compiles it, which needs a JDK 17 or newer."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dev import jars
from dev.spark_local import spark_home
from highwater.resources.jars import OWN_JAR

SOURCES = sorted(OWN_JAR.parent.glob("*.java"))
MANIFEST = "META-INF/MANIFEST.MF"
# The oldest Java that Spark 4.0 runs on.
RELEASE = "17"
# One that ZIP can hold: the same classes then give the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)


def build_manifest() -> str:
    """The jar's manifest with the checksum of its sources, by which an outdated jar is found without a JDK."""
    digest = hashlib.sha256("".join(source.read_text() for source in SOURCES).encode()).hexdigest()
    # A line of a manifest has 72 bytes at the most.
    return f"Manifest-Version: 1.0\nHighwater-Source-1: {digest[:32]}\nHighwater-Source-2: {digest[32:]}\n\n"


def compile_classes(javac: str = "javac") -> dict[str, bytes]:
    """The classes, by their names in the jar.

    Raises:
        subprocess.CalledProcessError: a source does not compile.
        FileNotFoundError: there is no compiler.
    """
    class_path = f"{jars.class_path('spark')}:{spark_home() / 'jars'}/*"
    with tempfile.TemporaryDirectory() as folder:
        options = ["--release", RELEASE, "-g:none", "-cp", class_path, "-d", folder]
        subprocess.run([javac, *options, *SOURCES], check=True)
        return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(Path(folder).rglob("*.class"))}


def main() -> int:
    """The program."""
    jars.ensure("spark")
    files = {MANIFEST: build_manifest().encode(), **compile_classes()}
    with zipfile.ZipFile(OWN_JAR, "w", zipfile.ZIP_DEFLATED) as jar:
        for name, content in files.items():
            jar.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    print(f"{OWN_JAR}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
