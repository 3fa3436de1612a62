"""The runbook and the pages of checks have every error, alert and check."""

from __future__ import annotations

import ast
import inspect
import re
from fnmatch import fnmatch

import dagster as dg
import pytest

from dev.paths import REPOSITORY
from highwater import errors
from highwater.errors import ConfigurationError
from highwater.stream_files import load_streams
from tests.helpers.pages import (
    CODE,
    DOCS,
    RUNBOOK,
    find_links,
    find_section,
    find_spans,
    list_anchors,
    list_checks,
    list_entries,
    load_example,
    read_page,
)


def entry(page: str, title: str) -> str:
    """The text of one entry of the runbook, up to the next heading of any level."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^#|\Z)", read_page(page), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no entry {title!r}"
    return found[1]


@pytest.mark.parametrize(
    ("family", "title"),
    [(errors.PermanentError, "Permanent errors"), (errors.TemporaryError, "Temporary errors")],
)
def test_the_runbook_has_every_error_in_its_family(family: type[errors.HighwaterError], title: str) -> None:
    kinds = [
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, family) and kind is not family and kind.__module__ == errors.__name__
    ]

    assert sorted(list_entries(title)) == sorted(kinds)


def alerts_measured() -> list[str]:
    """What the alerts are called, as patterns: the second argument wherever a `Measure` is made."""
    files = sorted(file for folder in CODE for file in (REPOSITORY / folder).rglob("*.py"))
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return [
        pattern_of(call.args[1]) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Condition"
    ]


def pattern_of(text: ast.expr) -> str:
    """A text as the code writes it, with `*` for what is filled in."""
    if isinstance(text, ast.Subscript):
        return pattern_of(text.value)
    if isinstance(text, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in text.values)
    assert isinstance(text, ast.Constant), "an alert whose name cannot be read here"
    return str(text.value)


def test_the_runbook_has_every_alert() -> None:
    from highwater.orchestration.reporting.alert_conditions import CONDITIONS

    found = alerts_measured()
    assert len(found) >= len(CONDITIONS)
    assert [name for name in found if not any(fnmatch(title, name) for title in list_entries("Alerts"))] == []
    assert [title for title in list_entries("Alerts") if not any(fnmatch(title, name) for name in found)] == []


def test_every_entry_of_the_runbook_says_what_it_means_and_what_to_do() -> None:
    parts = ("Alerts", "Metrics of the deployment", "Permanent errors", "Temporary errors", "Formats and keys")
    found = {
        title: re.findall(r"^\*\*(\w+)\.\*\*", entry(RUNBOOK, title), re.MULTILINE)
        for p in parts
        for title in list_entries(p)
    }

    # An entry has no place to look at where `highwater status` or the error's text has everything.
    allowed = (["Means", "Look", "Do"], ["Means", "Do"])
    assert {title: words for title, words in found.items() if words not in allowed} == {}


@pytest.mark.parametrize(
    "kind",
    [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind is not errors.HighwaterError],
    ids=lambda kind: kind.__name__,
)
def test_a_failure_in_dagster_names_its_entry(kind: type[errors.HighwaterError]) -> None:
    from highwater.orchestration.failures import to_failure

    shown = to_failure(kind("wrong", remedy="fix it")).metadata["runbook"].value

    page, _, anchor = str(shown).partition("#")
    assert anchor in list_anchors(read_page(page))


def checks_by_name() -> dict[str, tuple[str, str]]:
    """For each check of the shipped streams and of the page's example its table, and what Dagster shows of it."""
    from highwater.orchestration.build import build_defs

    streams = [*load_streams().values(), load_example()]
    graph = build_defs(streams=streams).get_repository_def().asset_graph
    specs = [graph.get_check_spec(key) for key in graph.asset_check_keys]
    return {spec.name: (spec.asset_key.path[-1], f"{spec.description} {spec.metadata['page'].value}") for spec in specs}


def test_every_check_has_a_page_and_no_page_is_of_none() -> None:
    checks = checks_by_name()
    pages = {file.stem for file in (DOCS / "checks").glob("*.md")}
    listed = {name: (find_spans(row[1])[0], next(find_links(row[0]))) for name, row in list_checks().items()}

    assert pages == set(checks)
    assert listed == {name: (table, f"checks/{name}.md") for name, (table, _) in checks.items()}


def test_a_check_names_its_page_in_dagster() -> None:
    lacking = {name for name, (_, shown) in checks_by_name().items() if shown.count(f"docs/checks/{name}.md") != 2}

    assert lacking == set()


def test_a_page_of_a_check_says_what_it_proves_when_it_fails_and_what_to_do() -> None:
    for name, (table, _) in checks_by_name().items():
        page = f"docs/checks/{name}.md"
        assert read_page(page).startswith(f"# {name}\n\nA check on `{table}`. ")
        assert all(find_section(page, title).strip() for title in ("What it proves", "When it fails", "What to do"))


def test_a_red_check_names_its_page_and_a_green_one_does_not() -> None:
    from highwater.orchestration.checking.check_rules import CheckResult
    from highwater.orchestration.checking.checks import build_evaluation

    red, green = (
        build_evaluation(load_example(), "current", "versions_in_order", "t@0000000", CheckResult(passed, "so"))
        for passed in (False, True)
    )

    assert red.metadata["page"] == dg.MetadataValue.path("docs/checks/versions_in_order.md")
    assert "page" not in green.metadata


def test_the_pages_of_checks_are_links_where_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from highwater.orchestration.checking.checks import build_link

    monkeypatch.setenv("HIGHWATER_DOCS_URL", "https://localhost/docs/")
    assert build_link("slices_tile") == dg.MetadataValue.url("https://localhost/docs/checks/slices_tile.md")
    monkeypatch.setenv("HIGHWATER_DOCS_URL", "docs")
    with pytest.raises(ConfigurationError, match="no address of a page; found: docs; remedy: begin it with https"):
        build_link("slices_tile")
