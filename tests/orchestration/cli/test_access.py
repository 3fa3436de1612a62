"""Access: named operators alone decide, in commands and in jobs, and the ledger has who decided, when and why."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from highwater.errors import ConfigurationError
from highwater.operator_actions import OperatorAction
from highwater.orchestration import operator_jobs
from highwater.orchestration.cli.main import main
from highwater.orchestration.cli.operator_command import OperatorCommand
from highwater.orchestration.operator_jobs import OPERATIONS, OperatorConfig
from highwater.resources.ledger import Ledger
from highwater.settings import parse_operators
from tests.helpers.operator_calls import SAME, Calls

ACTIONS = sorted(act.__name__ for act, config in OPERATIONS.items() if issubclass(config, OperatorConfig))
LOGIN = pwd.getpwuid(os.getuid()).pw_name
# Times are written otherwise by a command than in a run's configuration.
TIMES = {"since", "until"}


@pytest.fixture
def ledger(calls: Calls, tmp_path: Path) -> Ledger:
    del calls
    return Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")


def by_command(action: str, *arguments: str) -> str:
    """Run the command of an action with `--yes`, and return its output."""
    return CliRunner().invoke(main, [action.replace("_", "-"), *SAME[action][2], "--yes", *arguments]).output


def by_job(
    defs: dg.Definitions,
    action: str,
    tags: Mapping[str, str] | None = None,
    **config: Any,
) -> tuple[str, str]:
    """Run the job of an action with `record`, and return the error and the run's id."""
    given = {"stream": "orders", **SAME[action][1], "dry_run": False, **config}
    with dg.DagsterInstance.ephemeral() as instance:
        done = defs.resolve_job_def(action).execute_in_process(
            instance=instance, run_config=given, raise_on_error=False, tags=dict(tags or {})
        )
        [failure] = [event.step_failure_data for event in done.all_events if event.is_step_failure]
    assert failure.user_failure_data is not None
    return str(failure.user_failure_data.description), done.run_id


def test_every_command_that_decides_has_a_job_and_passes_the_check() -> None:
    """A command with `--yes` that is no operator command would write under no name."""
    changing = {name for name, command in main.commands.items() if any(p.name == "dry_run" for p in command.params)}
    checked = {name for name, command in main.commands.items() if isinstance(command, OperatorCommand)}
    assert {name.replace("-", "_") for name in checked} == set(ACTIONS)
    # Maintenance and planning do what the declaration says, as the schedule and the sensor do.
    assert changing - checked == {"maintain", "plan"}


@pytest.mark.parametrize("action", ACTIONS)
def test_a_name_that_is_not_listed_is_refused_before_anything_is_written(
    defs: dg.Definitions,
    calls: Calls,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    monkeypatch.setenv("HIGHWATER_OPERATORS", "bob, carol")
    refused = f"'ann' may not decide {action}"
    assert refused in by_command(action, "--by", "ann")
    assert refused in by_job(defs, action, by="ann")[0]
    assert calls.seen == []
    assert ledger.operator_actions.list_newest() == []


@pytest.mark.parametrize("action", ACTIONS)
def test_a_listed_name_is_allowed_and_recorded(
    defs: dg.Definitions,
    calls: Calls,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    monkeypatch.setenv("HIGHWATER_OPERATORS", "bob,carol")
    before = datetime.now(UTC)
    assert "called" in by_command(action, "--by", "bob", "--because", "a test")
    found, run_id = by_job(defs, action, by="bob", because="a test")
    assert "called" in found
    assert len(calls.seen) == 2
    command, job = ledger.operator_actions.list_newest("orders")
    for one in (command, job):
        assert (one.action, one.stream, one.by, one.because) == (action, "orders", "bob", "a test")
        assert before <= one.at < before + timedelta(minutes=10)
        # The work is replaced by an error, whose name is the outcome.
        assert one.outcome == "ConfigurationError"
    assert (command.through, job.through) == (f"login {LOGIN}", f"run {run_id}")
    asked = [{name: value for name, value in one.asked.items() if name not in TIMES} for one in (command, job)]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_dry_run_asks_for_no_name_and_records_nothing(
    calls: Calls,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    monkeypatch.setenv("HIGHWATER_OPERATORS", "bob")
    assert "called" in CliRunner().invoke(main, [action.replace("_", "-"), *SAME[action][2]]).output
    assert len(calls.seen) == 1
    assert ledger.operator_actions.list_newest() == []


@pytest.mark.parametrize("action", ACTIONS)
def test_without_the_setting_everybody_decides_under_a_name(calls: Calls, ledger: Ledger, action: str) -> None:
    assert "called" in by_command(action, "--by", "anybody")
    assert "needs the name of the person" in by_command(action, "--by", "")
    assert len(calls.seen) == 1
    assert [one.by for one in ledger.operator_actions.list_newest()] == ["anybody"]


@pytest.mark.usefixtures("calls")
def test_the_tag_of_a_run_names_the_person(
    defs: dg.Definitions,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HIGHWATER_OPERATORS", "bob")
    assert "needs the name of the person" in by_job(defs, "pause", by="")[0]
    assert "'eve' may not decide pause" in by_job(defs, "pause", {"user": "eve"}, by="")[0]
    assert ledger.operator_actions.list_newest() == []
    assert "called" in by_job(defs, "pause", {"user": "bob"}, by="")[0]
    assert [one.by for one in ledger.operator_actions.list_newest()] == ["bob"]


@pytest.mark.usefixtures("calls")
def test_a_command_takes_the_login_name(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIGHWATER_OPERATORS", "bob")
    refused = CliRunner().invoke(main, ["rebuild-ledger", "orders", "--yes"])
    assert (refused.exit_code, f"'{LOGIN}' may not decide" in refused.output) == (2, True)
    monkeypatch.setenv("HIGHWATER_OPERATORS", f"bob,{LOGIN}")
    assert "called" in CliRunner().invoke(main, ["rebuild-ledger", "orders", "--yes"]).output
    assert [one.by for one in ledger.operator_actions.list_newest()] == [LOGIN]


@pytest.mark.usefixtures("calls")
def test_a_run_that_names_two_persons_is_refused(defs: dg.Definitions, ledger: Ledger) -> None:
    found, _ = by_job(defs, "pause", {"user": "eve"}, by="bob")
    assert "the run names two persons" in found
    assert ledger.operator_actions.list_newest() == []


@pytest.mark.usefixtures("calls")
def test_no_key_of_a_record_is_in_the_record(ledger: Ledger) -> None:
    CliRunner().invoke(main, ["erase", "orders", "--key", "secret-key", "--yes", "--by", "a", "--because", "b"])
    CliRunner().invoke(main, ["redrive-parked", "orders", "--key", "secret-key", "--yes", "--by", "a"])
    erased, redriven = ledger.operator_actions.list_newest()
    # printf %s secret-key | sha256sum
    digest = "85dbe15d75ef9308c7ae0f33c7a324cc6f4bf519a2ed2f3027bd33c140a4f9aa"
    assert (dict(erased.asked), dict(redriven.asked)) == ({"digest": digest}, {"keys": 1})


def test_the_outcome_of_an_action_that_ends_well_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pause` writes to the ledger alone, so that it is carried out here."""
    monkeypatch.setenv("HIGHWATER_HOME", str(tmp_path))
    done = CliRunner().invoke(main, ["pause", "orders", "--yes", "--by", "ann"])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(main, ["pause", "orders", "--yes", "--by", "bob"])
    assert again.exit_code == 2, "it is paused already"
    shown = CliRunner().invoke(main, ["operator-actions", "orders", "--json"])
    found = [(one["action"], one["by"], one["outcome"]) for one in json.loads(shown.output)]
    assert found == [("pause", "ann", "done"), ("pause", "bob", "ConfigurationError")]
    assert "ann" in CliRunner().invoke(main, ["operator-actions"]).output


def test_the_newest_decisions_are_listed_oldest_first(ledger: Ledger) -> None:
    at = datetime(2026, 3, 1, tzinfo=UTC)
    for number in range(3):
        ledger.operator_actions.begin(OperatorAction("pause", f"s{number % 2}", {}, f"p{number}", "", "login a", at))
    assert [one.by for one in ledger.operator_actions.list_newest(most=2)] == ["p1", "p2"]
    assert [one.by for one in ledger.operator_actions.list_newest("s0")] == ["p0", "p2"]


@pytest.mark.parametrize(
    ("text", "names"), [("", None), (" ", None), ("ann", {"ann"}), (" ann , bob,", {"ann", "bob"})]
)
def test_operators_are_listed_by_commas(text: str, names: set[str] | None) -> None:
    assert parse_operators(text) == names


def test_a_list_without_a_name_is_refused() -> None:
    """It would let nobody decide, or everybody."""
    with pytest.raises(ConfigurationError, match="HIGHWATER_OPERATORS has no name"):
        parse_operators(" , ")


def test_every_operator_command_shows_both_options() -> None:
    for name, command in main.commands.items():
        if isinstance(command, OperatorCommand):
            options = {text for one in command.params for text in (*one.opts, *one.secondary_opts)}
            assert {"--dry-run", "--yes", "--by", "--because"} <= options, name
    assert operator_jobs.USER_TAG == "user"
