"""Commands, links and examples of the pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dev.paths import REPOSITORY
from tests.helpers.pages import (
    DOCS,
    PAGES,
    find_blocks,
    find_links,
    find_rows,
    find_section,
    find_spans,
    list_anchors,
    read_page,
)


def code_text(page: Path) -> str:
    """All that a page sets as code."""
    text = page.read_text()
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *find_spans(text)])


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", read_page("Makefile"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z][a-z0-9-]*)", code_text(page))}

    assert named - targets == set()


def test_every_program_that_a_page_starts_is_installed() -> None:
    programs = {name for page in PAGES for name in re.findall(r"\.venv/bin/([a-z-]+)", page.read_text())}

    assert {name for name in programs if not (REPOSITORY / ".venv/bin" / name).exists()} == set()


def test_every_highwater_command_that_a_page_names_exists() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:^|[\s/])highwater ([a-z][a-z-]+)", code_text(page), re.MULTILINE)
    }

    assert named - set(_commands()) == set()


def _commands() -> list[str]:
    from importlib.util import find_spec

    if find_spec("highwater.orchestration.cli.main") is None:
        return []
    from highwater.orchestration.cli.main import main

    return sorted(main.commands)


def test_every_module_that_a_page_runs_exists() -> None:
    from importlib.util import find_spec

    named = {name for page in PAGES for name in re.findall(r"\bpython -m ([\w.]+)", code_text(page))}

    assert {name for name in named if find_spec(name) is None} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_relative_link_resolves(page: Path) -> None:
    broken = [link for link in find_links(page.read_text()) if not resolves(page, link)]

    assert broken == []


def resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not anchor or anchor in list_anchors(target.read_text())


def test_every_decision_is_in_the_index() -> None:
    files = {file.name for file in (DOCS / "adr").glob("0*.md")}

    assert set(find_links(read_page("docs/adr/README.md"))) == files


def test_a_decision_has_context_options_and_a_decision_or_names_its_successor() -> None:
    for page in sorted(f"docs/adr/{file.name}" for file in (DOCS / "adr").glob("0*.md")):
        headings = re.findall(r"^## (.+)$", read_page(page), re.MULTILINE)
        decision = find_section(page, "Decision").strip()
        if decision.startswith("Superseded by [") and next(find_links(decision)):
            assert headings == ["Decision"], page
        else:
            assert headings == ["Context", "Options", "Decision"], page
            assert decision.startswith("Accepted"), page


def test_every_json_example_is_json() -> None:
    for page in PAGES:
        for block in find_blocks(str(page.relative_to(REPOSITORY)), "json"):
            json.loads(block)


def test_every_python_example_compiles() -> None:
    for page in PAGES:
        for block in find_blocks(str(page.relative_to(REPOSITORY)), "python"):
            compile(block, str(page), "exec")


def test_every_folder_of_the_tree_is_there() -> None:
    listed = {
        name for row in find_rows(find_section("docs/architecture.md", "The tree")) for name in find_spans(row[0])
    }

    assert {name for name in listed if not (REPOSITORY / name).is_dir()} == set()
