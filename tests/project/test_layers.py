"""The layers of the package, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from dev.paths import REPOSITORY

PACKAGE = REPOSITORY / "highwater"
PAGE = REPOSITORY / "docs" / "architecture.md"
DEFINITIONS = {
    "build",
    "code_server",
    "components",
    "jobs",
    "maintenance_job",
    "operator_jobs",
    "preloaded",
    "sensors",
    "stream_assets",
}
FOLDERS = ["checking", "sensing", "operations", "reporting"]


@cache
def modules() -> dict[str, Path]:
    """All modules of the package by their names."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules of the package that a module imports when it runs; imports for type checkers are left out."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        todo += ast.iter_child_nodes(node)


@cache
def imports() -> dict[str, frozenset[str]]:
    found = {}
    for name, file in modules().items():
        wanted = {one for one in imported(ast.parse(file.read_text())) if one in modules() and one != name}
        found[name] = frozenset(wanted)
    return found


def layer(module: str) -> int:
    """The number of a module's layer in the table of docs/architecture.md."""
    parts = module.split(".")[1:]
    if not parts or parts[0] not in {"resources", "assets", "orchestration"}:
        return 1
    if parts[0] != "orchestration":
        return {"resources": 2, "assets": 3}[parts[0]]
    below = parts[1] if len(parts) > 1 else ""
    if below in DEFINITIONS:
        return 9
    if below == "cli":
        return 10
    return 5 + FOLDERS.index(below) if below in FOLDERS else 4


def test_imports_follow_the_layers() -> None:
    """Imports inside of functions count too."""
    wrong = [f"{a} imports {b}" for a, some in imports().items() for b in some if layer(b) > layer(a)]
    assert wrong == []


def test_no_import_is_circular() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


def test_no_module_is_imported_by_its_name_as_text() -> None:
    # The code server gets the name of the module with the definitions by its command line.
    others = {name: file for name, file in modules().items() if name != "highwater.orchestration.code_server"}
    assert [name for name, file in others.items() if "import_module(" in file.read_text()] == []


@pytest.mark.parametrize("arrow", sorted(set(re.findall(r"^ +(\S+) --> (\S+)$", PAGE.read_text(), re.MULTILINE))))
def test_each_arrow_of_the_page_is_an_import(arrow: tuple[str, str]) -> None:
    source, target = map(full_name, arrow)
    assert target in imports()[source], f"{source} does not import {target}"


def full_name(short: str) -> str:
    """The module that the page names without its package."""
    [found] = [
        name
        for name in modules()
        if name in {f"highwater.{short}", f"highwater.orchestration.{short}"} and name != "highwater.resources"
    ]
    return found


def test_modules_of_the_page_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", PAGE.read_text())
    roots = [REPOSITORY, PACKAGE, PACKAGE / "orchestration"]
    assert named
    assert [one for one in named if not any((root / one).is_file() for root in roots)] == []
