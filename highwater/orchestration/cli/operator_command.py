"""The class of commands of operators: with `--yes` the action is checked and recorded before the command begins."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from highwater.erasing import compute_digest
from highwater.errors import UnknownSliceError
from highwater.operator_actions import OperatorAction, build_recorded_arguments
from highwater.orchestration.cli.terminal import because_option, by_option, read_login_name
from highwater.orchestration.deployment import Deployment
from highwater.slices import SliceKey

# Parameters of commands that have another name in the configuration of the job.
_NAMES = {"slice_key": "slice", "on": "topics", "resend": "accepted_again"}
_NOT_ASKED = frozenset({"stream", "dry_run", "by", "because", "as_json", "key"})


class OperatorCommand(click.Command):
    """A command of an operator's decision; it adds `--yes`, `--by` and `--because` to its function's options.

    The function gets `by` and `because` where it declares these options itself.
    """

    def __init__(self, name: str | None, *, params: list[click.Parameter] | None = None, **settings: Any) -> None:
        declared = list(params or ())
        names = {one.name for one in declared}
        self._added = [option for option in _build_options() if option.name not in names]
        super().__init__(name, params=[*declared, *self._added], **settings)

    @property
    def action(self) -> str:
        """The name of the operator job that does the same."""
        return str(self.name).replace("-", "_")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; with `--yes` after the check and the record of the action."""
        from highwater.orchestration.operations.recorded_action import recorded_action

        given = dict(ctx.params)
        for option in self._added:
            del ctx.params[str(option.name)]
        if given["dry_run"]:
            return super().invoke(ctx)
        deployment = ctx.find_object(Deployment)
        assert deployment is not None  # the group made it
        with recorded_action(
            deployment.open_ledger(), deployment.settings.operators, self._build_action(deployment, given)
        ):
            return super().invoke(ctx)

    def _build_action(self, deployment: Deployment, given: Mapping[str, Any]) -> OperatorAction:
        values = {_NAMES.get(name, name): value for name, value in given.items() if name not in _NOT_ASKED}
        if given.get("key"):
            values["digest"] = compute_digest(given["key"].encode())
        return OperatorAction(
            self.action,
            _find_stream(deployment, given),
            build_recorded_arguments(values),
            by=given["by"],
            because=given["because"],
            through=f"login {read_login_name()}",
            at=datetime.now(UTC),
        )


def _find_stream(deployment: Deployment, given: Mapping[str, Any]) -> str:
    """The stream that a command is about: its argument, or the stream that reads the topic of its slice."""
    if "stream" in given:
        return str(given["stream"])
    text = str(given["slice_key"] if "slice_key" in given else given["slices"][0])
    try:
        topic = SliceKey.parse(text).topic
    except UnknownSliceError:
        return text
    return next((stream.name for stream in deployment.list_streams().values() if topic in stream.all_topics), "")


def _build_options() -> list[click.Parameter]:
    """The options `--by` and `--because` as a command has them."""

    @click.command()
    @by_option
    @because_option
    def command() -> None:
        """Carry the options."""

    return command.params
