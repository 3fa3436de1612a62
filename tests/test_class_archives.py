"""Archives of classes: used where they are, and nothing depends on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev import class_archives
from dev.class_archives import options
from dev.java import Java, find_java

if TYPE_CHECKING:
    from dev.broker import EmbeddedBroker
    from dev.spark_connect import SparkConnect

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
def test_a_running_broker_and_spark_have_their_archives_in_memory(
    broker: EmbeddedBroker, spark_server: SparkConnect
) -> None:
    """A JVM says nothing where it goes on without: one whose class path differs by a folder does."""
    java = find_java(os.environ)
    running: dict[class_archives.Name, int | None] = {"broker": broker.pid, "spark": spark_server.pid}
    for name, pid in running.items():
        if not options(name, java):
            pytest.skip("this Java has no archive of its own classes")
        assert f"{name}.jsa" in "".join(maps(group) for group in members(pid))


def members(group: int | None) -> list[int]:
    """The processes of a group."""
    found = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
    return [pid for pid in found if group_of(pid) == group]


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""
