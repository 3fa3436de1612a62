"""The terminal: options that commands share, exit statuses, and how values, tables and errors are printed."""

# Exit status: 0 done; 2 an error that needs a person, or wrong arguments; 75 a dependency is unavailable (EX_TEMPFAIL
# of sysexits.h), so that a script may try again.

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from highwater.errors import HighwaterError, TemporaryError
from highwater.orchestration.deployment import Deployment

Table = tuple[Sequence[str], Sequence[Sequence[object]]]

DRY_RUN_NOTE = "a dry run: nothing was recorded"
EXIT_PERMANENT = 2
EXIT_TEMPORARY = 75


def read_login_name() -> str:
    """The login name of this process's user; its number where the system has no name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def exit_status(error: HighwaterError) -> int:
    """The exit status that an error ends the command with."""
    return EXIT_TEMPORARY if isinstance(error, TemporaryError) else EXIT_PERMANENT


def format_error(error: HighwaterError) -> str:
    """An error as a person reads it, one value a line."""
    lines = [f"error: {error.problem}"]
    lines += [f"  stored: {error.stored}"] if error.stored is not None else []
    lines += [f"  found:  {error.found}"] if error.found is not None else []
    return "\n".join([*lines, f"  remedy: {error.remedy}"])


deployment_of = click.make_pass_decorator(Deployment)
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
because_option = click.option("--because", default="", help="Why; goes into the record.")
dry_run_option = click.option(
    "--dry-run/--yes", "dry_run", default=True, help="Only show what would happen, which is the default; or do it."
)
by_option = click.option(
    "--by", default=read_login_name, show_default="your login name", help="Who decides it; goes into the record."
)


def add_options(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command these arguments and options, in the order in which its help shows them."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def to_plain_error(error: HighwaterError) -> dict[str, Any]:
    values = {"problem": error.problem, "stored": error.stored, "found": error.found, "remedy": error.remedy}
    return {"error": type(error).__name__, **{name: value for name, value in values.items() if value is not None}}


def print_json(plain: object) -> None:
    click.echo(json.dumps(plain, indent=2))


def print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)


def print_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest value; numbers to the right."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in [list(names), *cells]:
        click.echo("  ".join(_pad_cell(text, width) for text, width in zip(line, widths, strict=True)).rstrip())


def print_result(plain: Mapping[str, object], lines: Sequence[str], *, as_json: bool, table: Table = ((), ())) -> None:
    """A result as JSON, with its lines; or the table, if it has rows, and the lines."""
    if as_json:
        print_json({**plain, "lines": [*lines]})
        return
    if table[1]:
        print_table(*table)
    print_lines(lines)


def print_decision(plain: Mapping[str, object], lines: Sequence[str], *, dry_run: bool, as_json: bool) -> None:
    """A decision as JSON, with its lines; or the lines, with a note if it was a dry run."""
    note = [DRY_RUN_NOTE] if dry_run and not as_json else []
    print_result({**plain, "done": not dry_run}, [*lines, *note], as_json=as_json)
    print_needed_options("--yes --by NAME", dry_run=dry_run, as_json=as_json)


def print_needed_options(options: str, *, dry_run: bool, as_json: bool) -> None:
    """Print after a dry run the options with which the same command acts."""
    if dry_run and not as_json:
        click.echo(f"to do it, add {options}")


def _pad_cell(text: str, width: int) -> str:
    return text.rjust(width) if text.replace(",", "").isdigit() else text.ljust(width)
