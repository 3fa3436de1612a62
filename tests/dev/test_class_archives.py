"""Archives of classes: used where they are, and nothing depends on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dev import class_archives
from dev.class_archives import options
from dev.java import Java, find_java
from highwater.resources.local_spark import SERVER

SOME = Java(Path("there"), 17, "a test")


def test_a_jvm_starts_with_its_archive_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options("broker", SOME, tmp_path) == []
    archive = class_archives._folder(tmp_path, SOME) / "broker.jsa"
    archive.parent.mkdir(parents=True)
    archive.touch()
    assert options("broker", SOME, tmp_path)[0] == f"-XX:SharedArchiveFile={archive}"
    assert options("spark", SOME, tmp_path) == []
    assert options("broker", Java(Path("elsewhere"), 17, "a test"), tmp_path) == []
    monkeypatch.setattr(class_archives, "_lock", lambda: "other jars")
    assert options("broker", SOME, tmp_path) == []


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where archives were to be made, instead of being made."""
    where: list[Path] = []

    def write(_: Path, made: Path) -> None:
        where.append(made)
        for name in ("broker", "spark"):
            (made / f"{name}.jsa").touch()

    monkeypatch.setattr(class_archives, "find_java", lambda _: SOME)
    monkeypatch.setattr(class_archives, "_writes_archives", lambda _: True)
    monkeypatch.setattr(class_archives, "_run_both", write)
    monkeypatch.setattr(class_archives.ensure, "__defaults__", (tmp_path,))
    return where


def test_failed_archives_only_slow_the_start_and_warn_once(
    tried: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Path, made: Path) -> None:
        tried.append(made)
        (made / "broker.jsa").touch()
        raise OSError(f"no room in {made}")

    monkeypatch.setattr(class_archives, "_run_both", broken)
    assert class_archives.main() == class_archives.main() == 0
    assert capsys.readouterr().err.count("will start more slowly") == len(tried) == 1
    assert not [*tmp_path.rglob("*.jsa"), *tmp_path.rglob("made")]


def test_interrupted_archives_are_built_again(
    tried: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Path, made: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(class_archives, "_run_both", interrupted)
        with pytest.raises(KeyboardInterrupt):
            class_archives.ensure()
    class_archives.ensure()
    assert len(tried) == 1
    assert options("spark", SOME, tmp_path)


def test_they_are_made_once_and_by_a_java_that_can(
    tried: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(class_archives, "_writes_archives", lambda _: False)
        class_archives.ensure()
        patched.setattr(class_archives, "_lock", lambda: "other jars")
        patched.setattr(class_archives, "_writes_archives", lambda _: True)
        class_archives.ensure()
        class_archives.ensure()
        assert all(options(name, SOME, tmp_path) for name in ("broker", "spark"))
    assert len(tried) == 1
    assert not options("spark", SOME, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("bootstrap", "spark_server")
def test_a_running_broker_and_spark_have_their_archives_in_memory(session_home: Path) -> None:
    """A JVM says nothing where it goes on without: one whose class path differs by a folder does."""
    java = find_java(os.environ)
    running: dict[class_archives.Name, str] = {"broker": "kafka.Kafka", "spark": SERVER}
    for name, main in running.items():
        if not options(name, java):
            pytest.skip("this Java has no archive of its own classes")
        assert f"{name}.jsa" in "".join(maps(pid) for pid in running_in(session_home, main))


def running_in(home: Path, main: str) -> list[int]:
    """The processes of this class on this folder, by their command lines."""
    pids = [one.name for one in Path("/proc").iterdir() if one.name.isdigit()]
    reported = {int(pid): command_of(pid) for pid in pids}
    return [pid for pid, command in reported.items() if main in command and str(home) in command]


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""
