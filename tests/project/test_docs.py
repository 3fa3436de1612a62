"""The pages say what the code does: settings, declarations, errors, commands, columns, links and examples.

What the pages say is read from their text; what holds is taken from the code, so neither can move without the other."""

from __future__ import annotations

import dataclasses
import math
import re
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from dev.paths import REPOSITORY
from highwater import declaration, declaration_parts, field_rules, settings
from tests.helpers.pages import (
    CODE,
    PAGES,
    find_blocks,
    find_rows,
    find_section,
    find_spans,
    list_checks,
    load_example,
    read_page,
)

DECLARED = (
    declaration.Stream,
    declaration.Field,
    declaration.Deletes,
    declaration.UnknownFields,
    declaration.Lookup,
    declaration.Transitions,
    declaration.Limits,
    declaration.Alerts,
    declaration.Foreign,
    declaration.Metrics,
    declaration.Breaker,
    declaration.Accepted,
    declaration.Maintenance,
    declaration.Retention,
    declaration.Answers,
)


# Settings


def setting_names() -> set[str]:
    return {
        value
        for name, value in vars(settings).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("DEFAULT_")
    }


def test_the_page_of_configuration_has_every_setting_and_no_other() -> None:
    listed = {
        find_spans(row[0])[0] for row in find_rows(find_section("docs/configuration.md", "Settings of Highwater"))
    }

    assert listed == setting_names()


def test_every_variable_that_a_page_names_is_read_somewhere() -> None:
    code = "".join(f.read_text() for folder in CODE for f in sorted((REPOSITORY / folder).rglob("*.py")))
    code += read_page("dagster.yaml")
    files = {f"{name}_FILE" for name in settings.SECRETS}
    named = {
        word for page in PAGES for word in re.findall(r"\b(?:HIGHWATER|DAGSTER|SPARK)_[A-Z_]+[A-Z]\b", page.read_text())
    }

    assert {name for name in named - files if name not in code} == set()


def test_every_variable_of_ours_is_in_the_page_of_configuration() -> None:
    code = "".join(f.read_text() for folder in CODE for f in sorted((REPOSITORY / folder).rglob("*.py")))
    # Names that are assigned as constants; the markers of errors are no variables.
    read = set(re.findall(r'^[A-Z_]+ = "(HIGHWATER_[A-Z_]+)"$', code, re.MULTILINE)) - {
        "HIGHWATER_DIVERGED",
        "HIGHWATER_UNSAFE_STORE",
        "HIGHWATER_UNCONVERTED_TIMESTAMP",
    }

    assert {name for name in read if f"`{name}`" not in read_page("docs/configuration.md")} == set()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        (settings.KAFKA_BOOTSTRAP, settings.DEFAULT_BOOTSTRAP),
        (settings.SPARK_MASTER, settings.DEFAULT_MASTER),
        (settings.KAFKA_CONFIG, "{}"),
        (settings.LOG_FORMAT, settings.DEFAULT_LOG_FORMAT),
        (settings.METRICS_LISTEN, settings.DEFAULT_METRICS_LISTEN),
    ],
)
def test_the_page_gives_a_setting_its_default(name: str, default: str) -> None:
    listed = {
        find_spans(row[0])[0]: row[1]
        for row in find_rows(find_section("docs/configuration.md", "Settings of Highwater"))
    }

    assert listed[name] == f"`{default}`"


def test_the_page_gives_the_places_below_home() -> None:
    found = settings.Settings.from_environment({settings.HOME: "/somewhere"})
    listed = {
        find_spans(row[0])[0]: row[1]
        for row in find_rows(find_section("docs/configuration.md", "Settings of Highwater"))
    }

    assert listed[settings.LAKE] == f"`{Path(found.lake).name}` below `HIGHWATER_HOME`"
    assert listed[settings.LEDGER_URL] == f"`{Path(found.ledger_url).name}` below `HIGHWATER_HOME`"


def test_the_page_has_every_property_of_kafka_with_its_fate() -> None:
    from highwater.resources import kafka_logins, kafka_options

    page = find_section("docs/configuration.md", "Kafka")
    handed, alone, guarded = page.split("\nProperties that ")[1:]
    known = {name: given or name for name, given in _handed(handed).items()}

    assert known == {name: name for name in kafka_options._SAME} | dict(kafka_options._RENAMED)
    assert set(find_spans(alone)) == kafka_options._OURS_ALONE
    taken = {name: find_spans(row[1]) for row in find_rows(guarded) for name in find_spans(row[0])}
    assert taken.keys() == kafka_options.GUARDED
    for name, values in taken.items():
        for value in values if values != [settings.KAFKA_BOOTSTRAP] else []:
            kafka_options.refuse_weakening({name: value})
    assert all(f"`{mechanism}`" in handed for mechanism in kafka_logins.PASSWORD_MODULES)


def test_the_page_of_security_has_every_property_of_a_login_and_no_other() -> None:
    from highwater.resources import kafka_logins, kafka_tls

    listed = {
        name
        for row in find_rows(find_section("docs/security.md", "Settings of each client"))
        for name in find_spans(row[0])
    }
    assert listed == kafka_logins.LOGINS | kafka_tls.KEYS | {*kafka_logins.MECHANISMS}


def test_the_page_of_security_names_every_variable_that_a_file_may_hold() -> None:
    listed = find_spans(find_section("docs/security.md", "Secrets from files"))
    assert {f"{name}_FILE" for name in settings.SECRETS} <= {*listed}


def _handed(text: str) -> dict[str, str]:
    found = {find_spans(row[0])[0]: (find_spans(row[1]) or [""])[0] for row in find_rows(text)}
    found.pop("sasl.username")  # with the password it becomes one property, which is looked at elsewhere
    return found


# Declarations


@pytest.mark.parametrize("kind", DECLARED, ids=lambda kind: kind.__name__)
def test_the_page_of_streams_has_every_field_of_a_declaration_and_no_other(kind: type) -> None:
    page = find_section("docs/streams.md", kind.__name__)
    table = next(part for part in page.split("\n\n") if part.lstrip().startswith("| field |"))
    listed = {find_spans(row[0])[0]: row[1] for row in find_rows(table)}

    assert listed == {f.name: default_text(f) for f in dataclasses.fields(kind)}


def default_text(field: dataclasses.Field[Any]) -> str:
    """How the page writes a default."""
    if constant := {"on_reject": "ON_REJECT", "checks": "CHECK_SEVERITIES"}.get(field.name):
        return f"`{constant}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{type(field.default_factory()).__name__}()`"
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, timedelta):
        minutes = value / timedelta(minutes=1)
        return f"`{minutes:g} minute{'' if minutes == 1 else 's'}`"
    if isinstance(value, declaration.Start):
        return f"`Start.{value.name}`"
    if isinstance(value, tuple) and value and all(isinstance(one, date) for one in value):
        return " to ".join(f"`{one}`" for one in value)
    if isinstance(value, str):
        escaped = value.replace("|", "\\|")
        return f'`"{escaped}"`'
    # To Python a bool is an int.
    return f"`{value:_}`" if type(value) is int else f"`{value}`"


def test_the_page_of_streams_has_every_check_with_its_severity() -> None:
    listed = {name: (find_spans(row[2])[0], row[3] == "yes") for name, row in list_checks().items()}
    severities = [
        find_spans(row[0])[0] for row in find_rows(find_section("docs/streams.md", "Checks").partition("| check |")[0])
    ]

    assert listed == {
        n: (s.name, n in declaration_parts.CAN_BLOCK) for n, s in declaration_parts.CHECK_SEVERITIES.items()
    }
    assert severities == [f"Severity.{one.name}" for one in declaration.Severity]


def test_the_page_of_the_audit_has_every_place_of_a_missing_version() -> None:
    from highwater.orchestration.checking import missing_versions

    kinds = {
        missing_versions.OpenReject(version, "topic", tier, None, "", reclaimed).kind
        for version in (1, None)
        for tier in (True, False)
        for reclaimed in (True, False)
    }
    listed = {
        name for row in find_rows(find_section("docs/audit.md", "Missing versions")) for name in find_spans(row[0])
    }
    assert listed == kinds | {missing_versions.UNDECIDED, missing_versions.TO_COME, missing_versions.NOWHERE}


def test_the_page_of_streams_has_every_type_of_a_field() -> None:
    page = find_section("docs/streams.md", "Field")
    table = next(part for part in page.split("\n\n") if part.startswith("| type |"))
    listed = {name for row in find_rows(table) for name in find_spans(row[0])}

    assert {name.replace("(p,s)", "(12,2)") for name in listed} == {
        "float",
        "double",
        "date",
        "binary",
        "json",
        "string",
        "integer",
        "long",
        "boolean",
        "timestamp",
        "decimal(12,2)",
    }
    assert all(field_rules.TYPE.fullmatch(name.replace("(p,s)", "(12,2)")) for name in listed)


def test_the_page_of_streams_has_every_name_that_is_taken() -> None:
    page = find_section("docs/streams.md", "Field")
    sentence = re.search(r"These names are taken.*?declared: (.*?)\. A field", page, re.DOTALL)
    assert sentence is not None

    assert set(find_spans(sentence[1])) == declaration_parts.RESERVED_COLUMNS - {"version", "event_time"}


def test_the_page_declares_a_stream_in_at_most_forty_lines() -> None:
    assert len(find_blocks("docs/streams.md", "python")[0].splitlines()) <= 40
    assert load_example().name == "shipments"


def test_the_readme_has_one_screen_and_a_half() -> None:
    assert len(read_page("README.md").splitlines()) <= 80


def test_dagster_shows_of_a_stream_what_the_page_lists() -> None:
    from highwater.orchestration.build import build_defs

    page = read_page("docs/streams.md")
    table = page[page.index("| what | names |") : page.index("The tables and their columns")]
    listed = {row[0]: find_spans(row[1]) for row in find_rows(table)}
    stream = load_example()
    repository = build_defs(streams=[stream]).get_repository_def()

    assets = {
        key.to_user_string().replace(stream.topic, "<topic>") for key in repository.asset_graph.get_all_asset_keys()
    }
    assert set(listed["assets"]) == assets
    assert listed["partitions"] == [stream.partitions_name]
    assert set(listed["jobs"]) == {name for name in repository.job_names if name.startswith(stream.name)}
    assert set(listed["sensors"]) == {s.name for s in repository.sensor_defs}
    assert set(listed["schedules"]) == {s.name for s in repository.schedule_defs}
    checks = {(key.name, key.asset_key.path[-1]) for key in repository.asset_graph.asset_check_keys}
    assert {(name, row[1].strip("`")) for name, row in list_checks().items() if not row[4]} == checks


def test_the_page_lists_the_jobs_of_all_streams() -> None:
    from highwater.orchestration.build import build_defs

    stream = load_example()
    jobs = {name for name in build_defs(streams=[stream]).get_repository_def().job_names if not name.startswith("__")}
    listed = find_spans(find_section("docs/commands.md", "Jobs of operators"))
    assert {name for name in jobs if not name.startswith(stream.name)} <= set(listed)


# Metrics


def test_the_page_of_observability_has_every_metric_with_its_labels() -> None:
    from highwater.orchestration.reporting.prometheus_metrics import FAMILIES

    listed = {
        find_spans(row[0])[0]: tuple(find_spans(row[1]))
        for row in find_rows(find_section("docs/observability.md", "Metrics"))
    }

    assert listed == {name: labels for name, (labels, _) in FAMILIES.items()}


def test_the_page_of_commands_has_every_end_that_the_metric_counts() -> None:
    from highwater.orchestration.checking.origin_counts import OriginEnds
    from highwater.orchestration.reporting.prometheus_metrics import MetricSamples, _measure_origin_ends

    found = MetricSamples()
    _measure_origin_ends(found, dataclasses.replace(load_example(), tiers=(timedelta(minutes=1),)), OriginEnds())
    table = find_section("docs/commands.md", "Where is this record").partition("| end |")[2]

    listed = {end for row in find_rows(table) for end in find_spans(row[2])}
    assert listed == {labels[1] for labels, _ in found.samples["highwater_origins"]}


# Rules


def rules_listed(page: str, title: str) -> list[str]:
    return [find_spans(row[0])[0] for row in find_rows(find_section(page, title).split("\n###")[0])]


def test_the_page_of_the_audit_has_every_rule_for_topics() -> None:
    from highwater.topic_rules import check_topic
    from tests.helpers.topic_facts import SAFE

    assert rules_listed("docs/audit.md", "Rules for topics") == [one.rule for one in check_topic(SAFE)]


def test_the_page_of_producers_has_every_rule_and_what_is_untold() -> None:
    from highwater.producer_rules import Client, ProducerFacts, check_producer

    for client in Client:
        found = check_producer(ProducerFacts("theirs", client, None, {}))
        assert rules_listed("docs/producers.md", "The rules") == [one.rule for one in found]


def test_the_page_of_the_audit_has_every_reason_of_a_key_in_several_partitions() -> None:
    from highwater.partitioners import KeyPlaceReason

    assert rules_listed("docs/audit.md", "Keys in several partitions") == [one.value for one in KeyPlaceReason]


# Guarantees and terms


def test_the_page_of_concepts_names_a_test_file_for_each_guarantee() -> None:
    listed = [(row[0], find_spans(row[2])) for row in find_rows(find_section("docs/concepts.md", "Guarantees"))]

    assert [name for name, _ in listed] == [f"I{number}" for number in range(1, 18)]
    assert [file for _, files in listed for file in files or ["none"] if not (REPOSITORY / file).is_file()] == []


def test_the_glossary_has_each_term_once_in_order() -> None:
    terms = [row[0].lower() for row in find_rows(read_page("docs/glossary.md"))]

    assert terms == sorted(set(terms))


def test_the_tasks_of_a_read_are_those_that_the_page_reports() -> None:
    from assets.streams.orders import STREAM
    from highwater.assets.raw import _compute_records_per_task

    page, limits = find_section("docs/operations.md", "The size of a slice"), STREAM.limits
    reported = {
        "a slice of 40,000 offsets or less": [1, 40_000],
        f"a slice of {limits.max_offsets:,} offsets": [limits.max_offsets],
        "two such slices, up to ten": [2 * limits.max_offsets, 10 * limits.max_offsets],
        "twenty such slices": [limits.slices_per_run * limits.max_offsets],
    }
    for what, offsets in reported.items():
        [tasks] = {math.ceil(number / _compute_records_per_task(number)) for number in offsets}
        assert f"| {what} | {tasks} |" in page
