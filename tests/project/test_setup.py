"""The set-up as a newcomer meets it: make's targets, the locks, the errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from dev.paths import REPOSITORY

LOCKS = ("requirements.lock", "requirements-build.lock")
COMMANDS = {
    "soak",
    "soak-producer",
    "infer-trial",
    "cluster",
    "help",
    "setup",
    "demo",
    "up",
    "test",
    "test-fast",
    "test-long",
    "test-s3",
    "bench",
    "lint",
    "format",
    "lock",
    "jars-lock",
    "clean",
}


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The make that runs these tests hands its options on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A checkout in which nothing was set up."""
    for name in ("Makefile", "pyproject.toml", "requirements-build.in", *LOCKS):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def test_make_test_runs_no_test_a_second_time(bare: Path) -> None:
    """It ran up to three failed tests again, so that a test that fails now and then was never looked at."""
    (bare / ".venv").mkdir()
    commands = make(bare, "--dry-run", "test").stdout.splitlines()
    [runs] = [line for line in commands if "pytest" in line]
    assert re.search(r"\.venv/bin/python -m pytest .*-m \"not long\"$", runs)
    assert not re.search(r"\|\||;|--lf|--last-failed|rerun|flaky|again", runs)
    options = tomllib.loads((bare / "pyproject.toml").read_text())
    assert not re.search(r"rerun|flaky|--lf|-p ", options["tool"]["pytest"]["ini_options"]["addopts"])
    assert not {*pins("requirements.lock")} & {"pytest-rerunfailures", "flaky", "pytest-retry"}


def pins(lock: str) -> dict[str, str]:
    """Name → version, as locked for this Python."""
    text = (REPOSITORY / lock).read_text()
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)(?: ;[^\\\n]*)? \\$", text, re.MULTILINE))


def test_make_alone_explains_every_command_and_sets_nothing_up(bare: Path) -> None:
    done = make(bare)
    assert done.returncode == 0
    assert set(re.findall(r"^  make (\S+) +\S", done.stdout, re.MULTILINE)) == COMMANDS
    assert not (bare / ".venv").exists()


@pytest.mark.parametrize("python", ["no-such-python", "/bin/false"])
def test_without_a_suited_python_the_remedy_is_named(bare: Path, python: str) -> None:
    done = make(bare, "setup", f"PYTHON={python}")
    assert done.returncode != 0
    assert f"'{python}' is no Python 3.11" in done.stderr
    assert "apt-get install python3.11-venv" in done.stderr
    assert not (bare / ".venv").exists()


@pytest.mark.parametrize("command", sorted(COMMANDS - {"help", "clean"}))
def test_every_command_has_the_set_up_done_first(bare: Path, command: str) -> None:
    done = make(bare, "--dry-run", command)
    assert done.returncode == 0, done.stderr
    assert "-m venv .venv" in done.stdout
    assert "--require-hashes" in done.stdout


def test_an_environment_that_was_interrupted_is_restarted(bare: Path) -> None:
    """A `venv` ended by Ctrl-C left a Python without pip, which every later `make` took for ready."""
    (bare / ".venv" / "bin").mkdir(parents=True)
    (bare / ".venv" / "bin" / "python").touch()
    assert "-m venv .venv" in make(bare, "--dry-run", "setup").stdout


def test_lint_changes_no_file(bare: Path) -> None:
    recipe = make(bare, "--dry-run", "lint").stdout
    assert "ruff format --check" in recipe
    assert "--fix" not in recipe


@pytest.mark.parametrize("lock", LOCKS)
def test_everything_locked_has_hashes_and_nothing_an_address(lock: str) -> None:
    text = (REPOSITORY / lock).read_text()
    requirements = re.split(r"\n(?=[A-Za-z0-9])", text)
    assert requirements
    assert all("--hash=sha256:" in requirement for requirement in requirements)
    assert "://" not in text
    assert "index-url" not in text


def test_the_lock_holds_what_the_project_pins() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    locked = pins("requirements.lock")
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name, _, exact = requirement.partition("==")
        name = re.split(r"[\[<>=]", name)[0].lower().replace("_", "-")
        assert name in locked, f"run `make lock`: {name} is not in the lock"
        if exact:
            assert re.fullmatch(re.escape(exact).replace(r"\*", ".*"), locked[name])
    assert locked["sqlalchemy"].startswith("2.0."), "dagster-postgres 0.29.27 fails with 2.1"


def test_pyproject_does_not_take_dagster_off_its_workspace() -> None:
    """With a table of Dagster's in it, `dagster dev` ignores workspace.yaml and loads something else."""
    tools = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    assert not {"dagster", "dg"} & set(tools)


def test_ci_runs_what_a_developer_runs() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert script.stat().st_mode & 0o111
    assert "make --no-print-directory test" in script.read_text()
