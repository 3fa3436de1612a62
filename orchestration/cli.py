"""The command `highwater`: what a person or a script asks of planning.

What belongs here: arguments, output, exit status. What does not: any decision.

Exit status: 0 done; 2 an error that a person has to mend, or wrong arguments; 75 a dependency is away (EX_TEMPFAIL of
sysexits.h), so that a script may try again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from highwater.errors import ConfigurationError, HighwaterError, TemporaryError
from highwater.settings import Settings

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.slices import Slice
    from resources.kafka import Kafka
    from resources.lake import Lake
    from resources.ledger import Ledger

PERMANENT = 2
TEMPORARY = 75


def exit_status(error: HighwaterError) -> int:
    """The exit status that an error ends the command with."""
    return TEMPORARY if isinstance(error, TemporaryError) else PERMANENT


def told(error: HighwaterError) -> str:
    """An error as a person reads it, one value a line."""
    lines = [f"error: {error.problem}"]
    lines += [f"  stored: {error.stored}"] if error.stored is not None else []
    lines += [f"  found:  {error.found}"] if error.found is not None else []
    return "\n".join([*lines, f"  remedy: {error.remedy}"])


class _Group(click.Group):
    """Ends every command's error in plain words and the right status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HighwaterError as error:
            click.echo(told(error), err=True)
            ctx.exit(exit_status(error))


class Deployment:
    """The connections of this process's settings, opened when they are asked for.

    Args:
        settings: where everything is.
        declarations: the folder of the declared streams; the shipped one if None.
    """

    def __init__(self, settings: Settings, declarations: Path | None = None) -> None:
        self._settings = settings
        self._declarations = declarations

    def streams(self) -> dict[str, Stream]:
        """The declared streams by name."""
        from assets.streams import load_streams

        return load_streams() if self._declarations is None else load_streams(self._declarations)

    def stream(self, name: str) -> Stream:
        """One declared stream.

        Raises:
            ConfigurationError: none is declared under that name.
        """
        streams = self.streams()
        if name not in streams:
            raise ConfigurationError(
                f"no stream is named {name!r}",
                found=f"declared are {', '.join(sorted(streams)) or 'none'}",
                remedy="name one of them, or declare it in assets/streams/",
            )
        return streams[name]

    def ledger(self) -> Ledger:
        from resources.ledger import Ledger

        return Ledger(self._settings.ledger_url)

    def kafka(self) -> Kafka:
        from resources.kafka import Kafka

        return Kafka(self._settings.kafka_bootstrap, self._settings.kafka_config)

    def lake(self) -> Lake:
        from resources.lake import Lake

        return Lake(self._settings.lake)


_deployment = click.make_pass_decorator(Deployment)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--declarations",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the declared streams, instead of the shipped one.",
)
@click.version_option(package_name="highwater")
@click.pass_context
def main(context: click.Context, declarations: Path | None) -> None:
    """Kafka topics into Delta tables, slice by slice.

    Settings are read from the environment: HIGHWATER_HOME, HIGHWATER_LAKE, HIGHWATER_LEDGER_URL,
    HIGHWATER_KAFKA_BOOTSTRAP, HIGHWATER_KAFKA_CONFIG. Exit status: 0 done, 2 something has to be mended, 75 a service
    is away and trying again may help.
    """
    context.obj = Deployment(Settings.from_environment(os.environ), declarations)


@main.command()
@click.argument("stream")
@click.option("--commit", is_flag=True, help="Record the plan in the ledger; without it nothing is recorded.")
@_as_json
@_deployment
def plan(deployment: Deployment, stream: str, commit: bool, as_json: bool) -> None:  # noqa: FBT001 - click's flags
    """Cut what is new in STREAM's topic into slices; a dry run unless --commit is given."""
    from orchestration.planning import Planner

    declared = deployment.stream(stream)
    tick = Planner(deployment.ledger(), deployment.kafka()).tick(declared, datetime.now(UTC), dry=not commit)
    if as_json:
        _print_json(
            {
                "stream": stream,
                "recorded": commit,
                "slices": [_slice_plain(piece) for piece in tick.slices],
                "lag": tick.lag,
                "skipped": {str(p): why for p, why in tick.skipped.items()},
                "errors": {str(p): _error_plain(error) for p, error in tick.errors.items()},
            }
        )
    else:
        lines = tick.lines if commit else [*tick.lines, "a dry run: nothing was recorded; add --commit"]
        _print_lines(lines)
    for error in tick.errors.values():
        raise error


@main.command()
@click.argument("stream")
@click.option("--topic", help="Only slices of this topic.")
@click.option("--after", help="Only slices planned after the one with this key.")
@click.option("--last", "newest", type=click.IntRange(min=1), default=20, show_default=True, help="The newest so many.")
@_as_json
@_deployment
def slices(
    deployment: Deployment,
    stream: str,
    topic: str | None,
    after: str | None,
    newest: int,
    as_json: bool,  # noqa: FBT001 - click's flag
) -> None:
    """List planned slices of STREAM, oldest first."""
    declared = deployment.stream(stream)
    found = deployment.ledger().slices(declared.name, topic, after=after, newest=newest)
    if as_json:
        _print_json([_slice_plain(piece) for piece in found])
        return
    rows = [
        [piece.key, piece.generation, f"{piece.planned_at:%Y-%m-%d %H:%M:%S}", f"{piece.offsets:,}", _ranges(piece)]
        for piece in found
    ]
    _print_table(["slice", "generation", "planned at (UTC)", "offsets", "ranges"], rows)


def _acceptance_options(command: Callable[..., None]) -> Callable[..., None]:
    """What both commands of acceptance take."""
    for option in (
        _as_json,
        click.option("--topic", help="The tier that is meant, instead of the main topic."),
        click.option("--by", help="Who accepts it; goes into the record. Needed with --yes."),
        click.option("--dry-run", "dry", is_flag=True, help="Only show what would be recorded; the default."),
        click.option("--yes", "sure", is_flag=True, help="Record it. Without it only what would be recorded is shown."),
        click.option(
            "--partition", "partitions", type=click.IntRange(min=0), multiple=True, help="Only this one; repeatable."
        ),
        click.argument("stream"),
    ):
        command = option(command)
    return command


@main.command("accept-loss")
@_acceptance_options
@_deployment
def accept_loss(deployment: Deployment, /, **asked: Any) -> None:
    """Accept that offsets of STREAM's topic are gone, so that planning goes on behind them.

    Records the hole, and opens a new generation of a topic that was recreated or cut off.
    """
    _accept(deployment, divergence=False, **asked)


@main.command("accept-divergence")
@_acceptance_options
@_deployment
def accept_divergence(deployment: Deployment, /, **asked: Any) -> None:
    """Accept that other records stand under planned offsets of STREAM's topic than before.

    An unclean leader election does that. Planning goes on where the log parts from what was planned, as a new
    generation; rows of the old history that are in the lake stay, and are told apart by their generation.
    """
    _accept(deployment, divergence=True, **asked)


def _accept(
    deployment: Deployment,
    *,
    divergence: bool,
    stream: str,
    topic: str | None,
    partitions: tuple[int, ...],
    sure: bool,
    dry: bool,
    by: str | None,
    as_json: bool,
) -> None:
    if sure and dry:
        raise click.UsageError("--yes and --dry-run contradict each other")
    if sure and not by:
        raise click.UsageError("--yes needs --by NAME: it is accepted by a person")
    from highwater.routing import named
    from orchestration import acceptance

    declared = named(deployment.stream(stream), topic)
    found = acceptance.accept_loss(
        deployment.ledger(),
        deployment.kafka(),
        declared,
        acceptance.never_read(deployment.lake(), declared),
        by=by or "nobody yet",
        now=datetime.now(UTC),
        partitions=set(partitions) or None,
        dry=not sure,
        divergence=divergence,
    )
    if as_json:
        _print_json({"stream": stream, "recorded": sure and not found.nothing, "lines": found.lines})
        return
    if found.nothing:
        _print_lines([f"nothing of {stream} is lost: there is nothing to accept"])
        return
    _print_lines([*found.lines, "recorded" if sure else "a dry run: nothing was recorded; add --yes --by NAME"])


@main.command()
@click.argument("streams", nargs=-1)
@_as_json
@_deployment
def status(deployment: Deployment, streams: Sequence[str], as_json: bool) -> None:  # noqa: FBT001 - click's flag
    """Show how far the topics are planned, for the named STREAMS or all."""
    from orchestration.plan_status import StreamStatus, stream_status

    declared = [deployment.stream(name) for name in streams] or list(deployment.streams().values())
    ledger, kafka = deployment.ledger(), deployment.kafka()
    counts = ledger.counts()
    found: list[StreamStatus] = [stream_status(ledger, kafka, stream, counts) for stream in declared]
    if as_json:
        _print_json([one.to_plain() for one in found])
    else:
        for one in found:
            _print_lines(one.lines)
            if one.partitions:
                _print_table(*one.table)
    errors = [error for one in found for error in one.errors]
    if errors:
        # What a person has to mend comes before what mends itself.
        raise min(errors, key=exit_status)


def _slice_plain(piece: Slice) -> dict[str, Any]:
    from highwater.slices import ranges_to_plain

    return {
        "slice": piece.key,
        "topic_id": piece.topic_id,
        "generation": piece.generation,
        "planned_at": piece.planned_at.isoformat(),
        "offsets": piece.offsets,
        "ranges": ranges_to_plain(piece.ranges),
    }


def _error_plain(error: HighwaterError) -> dict[str, Any]:
    values = {"problem": error.problem, "stored": error.stored, "found": error.found, "remedy": error.remedy}
    return {"error": type(error).__name__, **{name: value for name, value in values.items() if value is not None}}


def _ranges(piece: Slice, most: int = 4) -> str:
    filled = [f"{p}: [{r.start}, {r.end})" for p, r in sorted(piece.ranges.items()) if len(r)]
    more = [f"and {len(filled) - most} more"] if len(filled) > most else []
    return " ".join([*filled[:most], *more])


def _print_json(plain: object) -> None:
    click.echo(json.dumps(plain, indent=2))


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


def _print_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest value; numbers to the right."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in [list(names), *cells]:
        click.echo("  ".join(_padded(text, width) for text, width in zip(line, widths, strict=True)).rstrip())


def _padded(text: str, width: int) -> str:
    return text.rjust(width) if text.replace(",", "").isdigit() else text.ljust(width)


if __name__ == "__main__":
    main()
