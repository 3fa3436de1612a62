"""The dashboard and the alert rules name metrics and labels that are exposed, and entries of the runbook that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from dev.paths import REPOSITORY
from highwater.orchestration.reporting.prometheus_metrics import FAMILIES
from tests.helpers.pages import RUNBOOK, list_anchors, list_entries, read_page

DASHBOARD = json.loads((REPOSITORY / "deploy/grafana/highwater.json").read_text())
RULES = yaml.safe_load((REPOSITORY / "deploy/prometheus/highwater.rules.yaml").read_text())
GROUPS: dict[str, list[dict[str, Any]]] = {group["name"]: group["rules"] for group in RULES["groups"]}
ALL_RULES = [rule for rules in GROUPS.values() for rule in rules]
# A metric with the labels that its selector names.
SELECTOR = re.compile(r"\b(highwater_[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) ?\(([^)]*)\)")


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the dashboard and of the rules, with the text that names labels of its result."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"], ""
    for rule in ALL_RULES:
        yield rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


@pytest.mark.parametrize(("query", "legend"), sorted(set(queries())))
def test_a_query_names_metrics_and_labels_that_are_exposed(query: str, legend: str) -> None:
    used = SELECTOR.findall(query)
    assert used
    known: set[str] = set()
    for name, selector in used:
        labels = FAMILIES[name][0]
        assert set(re.findall(r"(\w+) ?(?:=~|!~|!=|=)", selector)) <= set(labels), name
        known |= set(labels)
    grouped = {label.strip() for labels in GROUPED.findall(query) for label in labels.split(",")} - {""}
    assert grouped <= known
    assert set(re.findall(r"\{\{ ?(\w+) ?\}\}", legend)) <= (grouped or known)
    for opening, closing in ("()", "{}", "[]"):
        assert query.count(opening) == query.count(closing)


def test_every_metric_is_in_the_dashboard() -> None:
    assert {name for name, _ in SELECTOR.findall(json.dumps(DASHBOARD["panels"]))} == FAMILIES.keys()


def test_panels_have_their_own_ids_and_places() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_rules_have_their_own_names_a_severity_and_an_entry_of_the_runbook() -> None:
    known = list_anchors(read_page(RUNBOOK))
    for rule in ALL_RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Highwater[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in {"page", "warn"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "HIGHWATER_DOCS_URL/runbook.md"
        assert anchor in known, rule["alert"]
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))
    names = [rule["alert"] for rule in ALL_RULES]
    assert len(set(names)) == len(names)


def test_every_alert_of_the_runbook_has_one_rule_with_its_entry() -> None:
    """An alert's name ends with a blank and a name where the title ends with three dots."""
    found: dict[str, str] = {}
    for rule in GROUPS["highwater-alerts"]:
        match = re.search(r'\{alert(=~?)"([^"]+)"\}', rule["expr"])
        assert match is not None
        found[match[2]] = rule["annotations"]["runbook_url"].partition("#")[2]
        assert (match[1] == "=~") == match[2].endswith(".+")
    titles = list_entries("Alerts")
    assert found.keys() == {title.replace("…", ".+") for title in titles}
    for title in titles:
        assert found[title.replace("…", ".+")] in list_anchors(f"### {title}\n")
