"""Archives of classes: used where they are, and nothing depends on them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dev import class_archives, jars
from dev.class_archives import options
from dev.java import Java, find_java

SOME = Java(Path("there"), 17, "a test")


def test_a_jvm_starts_with_its_archive_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options("broker", SOME, tmp_path) == []
    archive = class_archives._archives(tmp_path, SOME)["broker"]
    archive.parent.mkdir(parents=True)
    archive.touch()
    assert options("broker", SOME, tmp_path)[0] == f"-XX:SharedArchiveFile={archive}"
    assert options("spark", SOME, tmp_path) == []
    assert options("broker", Java(Path("elsewhere"), 17, "a test"), tmp_path) == []
    monkeypatch.setattr(class_archives, "_lock", lambda: "other jars")
    assert options("broker", SOME, tmp_path) == []


def test_what_cannot_be_made_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(home: Path, made: object) -> None:
        raise OSError(f"no room in {home}")

    monkeypatch.setattr(class_archives, "find_java", lambda _: SOME)
    monkeypatch.setattr(class_archives, "_writes_archives", lambda _: True)
    monkeypatch.setattr(class_archives, "_run_both", broken)
    monkeypatch.setattr(class_archives.ensure, "__defaults__", (tmp_path,))
    assert class_archives.main() == 0
    assert "will start more slowly" in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.jsa"), *tmp_path.glob("classes-*")]


def test_they_are_made_once_and_by_a_java_that_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def write(_: Path, archives: dict[class_archives.Name, Path]) -> None:
        for archive in archives.values():
            archive.touch()
            made.append(archive)

    monkeypatch.setattr(class_archives, "find_java", lambda _: SOME)
    monkeypatch.setattr(class_archives, "_run_both", write)
    monkeypatch.setattr(class_archives, "_writes_archives", lambda _: False)
    class_archives.ensure(tmp_path)
    assert not made
    monkeypatch.setattr(class_archives, "_writes_archives", lambda _: True)
    class_archives.ensure(tmp_path)
    class_archives.ensure(tmp_path)
    assert len(made) == len({file.name for file in made}) == 2
    assert all(options(name, SOME, tmp_path) for name in ("broker", "spark"))


@pytest.mark.slow
def test_the_broker_finds_its_classes_in_the_archive() -> None:
    java = find_java(os.environ)
    ours = options("broker", java)
    if not ours:
        pytest.skip("this Java has no archive of its own classes")
    program = ["-cp", jars.class_path("broker"), "kafka.tools.StorageTool", "random-uuid"]
    # `-Xshare:on` ends a JVM whose archive does not fit.
    fitting = ["-Xlog:class+load", *(one for one in ours if not one.startswith("-Xlog")), "-Xshare:on"]
    done = subprocess.run(
        [java.executable, *fitting, *program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("shared objects file (top)") > 1_000
