"""Where Dagster's instance cannot be opened or asked, commands say so in our words and end with a status of ours."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from dev.processes import LOOPBACK, free_port
from highwater.errors import ConfigurationError, DependencyUnavailableError, HighwaterError
from highwater.orchestration.cli.terminal import EXIT_PERMANENT, EXIT_TEMPORARY
from highwater.orchestration.dagster_home import ask_instance, dagster_instance
from highwater.orchestration.reporting import doctor
from highwater.slices import OffsetRange, Slice
from tests.helpers.scene import Scene

SLICE = Slice("orders", "orders", "AAAAAAAAAAAAAAAAAAAAAA", 0, 0, {0: OffsetRange(0, 9)}, datetime.now(UTC))
SECRET = "planted"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    found = Scene(f"{LOOPBACK}:{free_port()}", "orders", tmp_path)
    found.ledger.add([SLICE])
    return found


@pytest.fixture(params=["relative", "no folder", "broken file", "no database"])
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A DAGSTER_HOME that cannot be used; gives the status that commands end with."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / SECRET).write_text("no folder")
    base = str(tmp_path / SECRET / "storage")
    texts = {"broken file": "storage: [", "no database": json.dumps({"storage": {"sqlite": {"base_dir": base}}})}
    (folder / "dagster.yaml").write_text(texts.get(request.param, ""))
    named = {"relative": "home", "no folder": str(tmp_path / "none")}.get(request.param, str(folder))
    monkeypatch.setenv("DAGSTER_HOME", named)
    return EXIT_TEMPORARY if request.param == "no database" else EXIT_PERMANENT


def test_explain_reports_the_rest_and_ends_with_a_status_of_ours(scene: Scene, home: int) -> None:
    """It ended with status 1 and a traceback."""
    reported = scene.run("explain", SLICE.key)
    assert reported.exit_code == home, reported.output
    assert reported.stdout.splitlines()[0].startswith(SLICE.key)
    assert "incomplete: raw, events, rejects, dlq, current still to be written" in reported.stdout
    assert reported.stdout.count("runs and checks: Dagster could not be asked: ") == 1
    assert "error: " in reported.stderr
    assert "remedy: " in reported.stderr
    assert SECRET not in reported.output.replace("\n", "")
    plain = scene.run("explain", SLICE.key, "--json")
    assert plain.exit_code == home
    page = json.loads(plain.stdout)
    assert (page["slice"], page["runs"], page["checks"]) == (SLICE.key, None, None)
    assert "remedy: " in page["dagster_error"]


def test_the_audit_reports_the_rest_and_ends_with_a_status_of_ours(scene: Scene, home: int) -> None:
    """It ended with status 1 and a traceback. Kafka, which is unavailable here too, is reported beside it."""
    reported = scene.run("audit", "orders")
    assert reported.exit_code == home, reported.output
    assert reported.stdout.count("error: Dagster could not be asked: ") == 1
    assert reported.stdout.count("error: Kafka at ") == 1
    assert "DAGSTER_HOME is not set" not in reported.output
    assert "checks of slices: Dagster could not be asked for their last results, and none was made" in reported.stdout
    page = json.loads(scene.run("audit", "orders", "--json").stdout)[0]
    assert (page["slices"], page["failing_checks"]) == (1, None)


@pytest.mark.parametrize(
    "command",
    [
        ("recall-keys", "orders", SLICE.key, SLICE.key),
        ("rebuild-ledger", "orders"),
        ("erase", "orders", "--key", "k"),
    ],
)
def test_a_command_that_needs_dagster_ends_with_a_status_of_ours(
    scene: Scene, home: int, command: tuple[str, ...]
) -> None:
    reported = scene.run(*command)
    assert reported.exit_code == home, reported.output
    assert "error: D" in reported.stderr


def test_explain_says_that_dagster_was_not_asked(scene: Scene) -> None:
    """Without a word a slice looked as if no run had ever worked on it."""
    reported = scene.run("explain", SLICE.key)
    assert reported.exit_code == 0, reported.output
    assert "runs and checks: Dagster was not asked, DAGSTER_HOME is not set" in reported.stdout.splitlines()


def test_the_doctor_refuses_a_home_that_dagster_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dagster.yaml").write_text("")
    with pytest.raises(ConfigurationError, match="not an absolute path"):
        doctor._check_dagster({"DAGSTER_HOME": "."})


def test_storage_that_does_not_answer_a_command_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else goes wrong beside an instance keeps its own error."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with pytest.raises(DependencyUnavailableError, match="does not answer") as caught, dagster_instance():
        raise OperationalError(SECRET, {}, Exception(SECRET))
    assert SECRET not in str(caught.value)
    with pytest.raises(ZeroDivisionError), dagster_instance():
        raise ZeroDivisionError
    with pytest.raises(ConfigurationError, match="mine"), dagster_instance():
        raise ConfigurationError("mine", remedy="-")


def test_an_answer_is_given_or_why_there_is_none() -> None:
    some: Any = SimpleNamespace(number=3)

    def broken() -> AbstractContextManager[None]:
        raise OSError(SECRET)

    assert ask_instance(lambda: nullcontext(some), str) == (str(some), None)
    assert ask_instance(lambda: nullcontext(None), lambda _: 3) == (None, None)
    given, error = ask_instance(broken, lambda _: 3)
    assert given is None
    assert isinstance(error, HighwaterError)
    assert SECRET not in str(error)
