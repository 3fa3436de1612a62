"""Every command line of `highwater` and `dagster` in a code block of a page has options and arguments that exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from dev.paths import REPOSITORY
from highwater.orchestration.cli.main import main
from tests.helpers.pages import CODE, PAGES, SHELL_BLOCK, find_spans, read_page

SEPARATORS = {"|", "||", ";", "&&", "&"}
REDIRECTIONS = {">", ">>", "<"}


def load_programs() -> dict[str, click.Command]:
    """The programs whose arguments are looked at, by name."""
    from dagster._cli import cli as dagster
    from dagster._daemon.cli import cli as dagster_daemon
    from dagster_webserver.cli import dagster_webserver

    return {
        "highwater": main,
        "dagster": dagster,
        "dagster-daemon": dagster_daemon,
        "dagster-webserver": dagster_webserver,
    }


PROGRAMS = load_programs()


def command_lines(text: str) -> Iterator[list[str]]:
    """Each call of one of the programs in the shell blocks of a page, as words."""
    for block in SHELL_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.search(rf"(?:^|[\s/])(?:{'|'.join(PROGRAMS)}) ", line):
                continue
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=";|&<>")
            lexer.whitespace_split = True
            for words in simple_commands(list(lexer)):
                if (program := words[0].split("/")[-1]) in PROGRAMS:
                    yield [program, *words[1:]]


def simple_commands(tokens: Sequence[str]) -> Iterator[list[str]]:
    """The commands of one line, without redirections and leading assignments."""
    words: list[str] = []
    skip_next = False
    for token in [*tokens, ";"]:
        if token in SEPARATORS:
            if words:
                yield words
            words, skip_next = [], False
        elif skip_next:
            skip_next = False
        elif token in REDIRECTIONS:
            skip_next = True
        elif words or not re.match(r"\w+=", token):
            words.append(token)


def fault_of(words: Sequence[str]) -> str | None:
    """The faults of a program's arguments; None if they can be parsed. Nothing is executed."""
    command = PROGRAMS[words[0]]
    rest = list(words[1:])
    while isinstance(command, click.Group):
        name = rest.pop(0) if rest else ""
        found = command.commands.get(name)
        if found is None:
            return f"no command {name!r}"
        command = found
    context = click.Context(command)
    try:
        values, left, _ = command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return error.format_message()
    missing = [p.name for p in command.params if p.required and not given(values.get(p.name or ""))]
    return f"extra arguments {left}" if left else f"missing {missing}" if missing else None


def given(value: object) -> bool:
    """Whether the parser found a value: click marks an absent one by None, an empty tuple or an enum member."""
    return isinstance(value, str) or (isinstance(value, tuple | list) and any(map(given, value)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_line_of_a_page_can_be_parsed(page: Path) -> None:
    faults = {" ".join(words): fault for words in command_lines(page.read_text()) if (fault := fault_of(words))}

    assert faults == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('highwater accept-loss "$STREAM" --topic orders.dlq.1 --yes --by "$USER"', None),
        ("A=1 .venv/bin/highwater metrics > new.prom; mv new.prom old.prom  # a comment", None),
        ("highwater ledger verify && highwater audit orders --slices 10", None),
        ('highwater erase orders --digest "$(printf %s "$KEY" | cut -d\' \' -f1)" --because "asked for"', None),
        ("highwater statis", "no command 'statis'"),
        ("highwater status --verbose", "No such option '--verbose'."),
        ("highwater slices", "missing ['stream']"),
        ("highwater explain orders@0000001 orders@0000002", "extra arguments ['orders@0000002']"),
        ("highwater accept-loss orders --topic", "Option '--topic' requires an argument."),
        ("dagster-webserver -p 3001 -w workspace.grpc.yaml --read-only", None),
        (".venv/bin/dagster-daemon start -w workspace.grpc.yaml", "no command 'start'"),
        (".venv/bin/dagster api grpc --host 127.0.0.1 --wsgi", "No such option '--wsgi'."),
    ],
)
def test_a_wrong_command_line_has_a_fault(line: str, fault: str | None) -> None:
    found = [fault_of(words) for words in command_lines(f"```sh\n{line}\n```\n")]

    assert found
    assert next(filter(None, found), None) == fault


def texts_of(file: Path) -> Iterator[str]:
    """The texts of a module, with `…` for each value that is filled in; the first part of one that has several."""
    tree = ast.parse(file.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def test_every_command_that_an_error_or_an_alert_names_exists() -> None:
    """With its options; `highwater row` names a row of ours."""
    named = re.compile(r"\bhighwater ([a-z]+(?:-[a-z]+)*)((?: (?:--[a-z-]+|[A-Z…]\S*))*)")
    files = [file for folder in CODE for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    found = {match.groups() for file in files for text in texts_of(file) for match in named.finditer(text)}
    found -= {("row", "")}
    options = {
        name: {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in main.commands.items()
    }

    assert len(found) > 40
    assert {name for name, _ in found} - options.keys() == set()
    assert [one for one in found if not set(re.findall(r"--[a-z-]+", one[1])) <= options[one[0]]] == []


def test_the_page_of_commands_has_every_command() -> None:
    named = {word for span in find_spans(read_page("docs/commands.md")) for word in re.findall(r"[a-z][a-z-]+", span)}

    assert set(main.commands) - named == set()


def test_every_variable_of_a_command_in_the_runbook_is_set_on_the_page_or_by_the_deployment() -> None:
    text = read_page("docs/runbook.md")
    blocks = "\n".join(SHELL_BLOCK.findall(text))
    set_here = set(re.findall(r"^(\w+)=", blocks, re.MULTILINE))
    used = set(re.findall(r"\$\{?(\w+)", blocks))

    assert {name for name in used - set_here if not name.startswith("HIGHWATER_")} == {"USER"}


def commands_below(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for one in command.commands.values():
            yield from commands_below(one)


@pytest.mark.parametrize("command", [*commands_below(main)], ids=lambda command: str(command.name))
def test_a_help_text_has_whole_sentences(command: click.Command) -> None:
    """A text lost its first line and had its last one twice, and nothing noticed."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    assert [one for one in paragraphs if not re.match(r"[A-Z`(]", one) or not re.search(r"[.:)]$", one)] == []
    lines = [line for one in paragraphs for line in one.splitlines()]
    assert len(lines) == len({*lines})
