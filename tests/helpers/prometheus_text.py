"""The text of the metrics, parsed as a scraper parses it."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from highwater.orchestration.reporting.prometheus_metrics import FAMILIES

Found = dict[str, dict[tuple[str, ...], float]]


def read(text: str) -> Found:
    """The text as a scraper reads it: by family and the values of its labels in the order that is documented."""
    found: Found = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        labels = FAMILIES[family.name][0]
        found[family.name] = {tuple(s.labels[name] for name in labels): s.value for s in family.samples}
    return found
