"""The pages of the project, by sections, tables, code and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dev.paths import REPOSITORY
from highwater import declaration

DOCS = REPOSITORY / "docs"
PAGES = sorted([REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *DOCS.rglob("*.md")])
RUNBOOK = "docs/runbook.md"
SHELL_BLOCK = re.compile(r"^ *```(?:sh|bash|console)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def read_page(name: str) -> str:
    return (REPOSITORY / name).read_text()


def find_section(page: str, title: str) -> str:
    """The text below a heading, up to the next heading of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", read_page(page), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no section {title!r}"
    return found[2]


def find_rows(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without heads and rulers; `\\|` is part of a cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {number - 1 for number, row in enumerate(cells) if set("".join(row)) <= {"-", ":"}}
    return [row for number, row in enumerate(cells) if number not in heads and number - 1 not in heads]


def find_spans(text: str) -> list[str]:
    """Code within the sentences of a text."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def find_blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read_page(page), re.MULTILINE | re.DOTALL)


def find_shell_blocks(page: str) -> list[str]:
    """The code blocks of commands, those within lists too."""
    return SHELL_BLOCK.findall(read_page(page))


def list_entries(title: str) -> list[str]:
    """The titles of the entries in a section of the runbook, in their order."""
    return re.findall(r"^### (.+)$", find_section(RUNBOOK, title), re.MULTILINE)


def list_anchors(text: str) -> set[str]:
    """The anchors that headings get: lower case, punctuation dropped, spaces as hyphens."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


CODE = ("highwater", "resources", "assets", "orchestration", "dev")


def load_example() -> declaration.Stream:
    """The stream that the page declares."""
    held: dict[str, Any] = {}
    exec(find_blocks("docs/streams.md", "python")[0], held)
    stream = held["STREAM"]
    assert isinstance(stream, declaration.Stream)
    return stream


def list_checks() -> dict[str, list[str]]:
    """The rows of the table of checks by the names of the checks."""
    table = "".join(find_section("docs/streams.md", "Checks").partition("| check |")[1:])
    return {find_spans(row[0])[0]: row for row in find_rows(table)}


def find_links(text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            yield link
