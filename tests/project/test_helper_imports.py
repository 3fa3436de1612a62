"""Helpers that tests share are in modules of their own: no test module is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.paths import REPOSITORY

TESTS = REPOSITORY / "tests"
# It runs tests of other modules again, with the settings of Spark that users have.
RUNS_OTHERS = "tests/project/test_generated_code.py"


def imported(tree: ast.AST) -> Iterator[str]:
    """The full names of all modules that a module may import, at its top or in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_tests(text: str) -> list[str]:
    """The test modules that a text imports; a test function or a fixture is imported through its module."""
    names = {name for name in imported(ast.parse(text)) if name.split(".")[0] == "tests"}
    return sorted(name for name in names if any(part.startswith("test_") for part in name.split(".")))


@pytest.mark.parametrize(
    "text",
    [
        "from tests.test_slices import a_slice",
        "from tests import test_slices",
        "import tests.integration.test_stages",
        "def load():\n    from tests.integration.test_stages import a_slice as one",
    ],
)
def test_an_import_of_a_test_module_is_found(text: str) -> None:
    assert imported_tests(text)
    assert not imported_tests(text.replace("test_", "of_"))


def test_no_test_module_is_imported() -> None:
    """A change of one test file broke tests of others, and fixtures were imported past the linter."""
    files = [Path(file) for file in TESTS.rglob("*.py")]
    found = {str(file.relative_to(REPOSITORY)): imported_tests(file.read_text()) for file in files}
    assert len(found) > 200
    assert {file for file, names in found.items() if names} == {RUNS_OTHERS}, found
