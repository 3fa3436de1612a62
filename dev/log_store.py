"""The jar of Delta's log store for S3: `python -m dev.log_store` compiles it, which needs a JDK 17 or newer."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dev import jars
from dev.spark_local import spark_home
from highwater.resources.object_store import LOG_STORE_JAR

SOURCE = LOG_STORE_JAR.with_name("ConditionalS3LogStore.java")
MANIFEST = "META-INF/MANIFEST.MF"
# The oldest Java that Spark 4.0 runs on.
RELEASE = "17"
# One that ZIP can hold: the same classes then give the same bytes.
_DATE = (1980, 1, 1, 0, 0, 0)


def manifest(source: str) -> str:
    """The jar's manifest with the checksum of its source, by which an outdated jar is found without a JDK."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    # A line of a manifest has 72 bytes at the most.
    return f"Manifest-Version: 1.0\nHighwater-Source-1: {digest[:32]}\nHighwater-Source-2: {digest[32:]}\n\n"


def compile_classes(javac: str = "javac") -> dict[str, bytes]:
    """The classes, by their names in the jar.

    Raises:
        subprocess.CalledProcessError: the source does not compile.
        FileNotFoundError: there is no compiler.
    """
    class_path = f"{jars.class_path('spark')}:{spark_home() / 'jars'}/*"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([javac, "--release", RELEASE, "-g:none", "-cp", class_path, "-d", folder, SOURCE], check=True)
        return {str(file.relative_to(folder)): file.read_bytes() for file in Path(folder).rglob("*.class")}


def main() -> int:
    """The program."""
    jars.ensure("spark")
    files = {MANIFEST: manifest(SOURCE.read_text()).encode(), **compile_classes()}
    with zipfile.ZipFile(LOG_STORE_JAR, "w", zipfile.ZIP_DEFLATED) as jar:
        for name, content in files.items():
            jar.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_DEFLATED)
    print(f"{LOG_STORE_JAR}: {', '.join(files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
