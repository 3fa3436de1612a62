"""The pages say what the code does: settings, declarations, errors, commands, columns, links and examples.

What the pages say is read from their text; what holds is taken from the code, so neither can move without the other.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from datetime import date, timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dev.paths import REPOSITORY
from highwater import declaration, declaration_parts, errors, field_rules, settings
from highwater.errors import ConfigurationError
from highwater.stream_files import load_streams
from tests.helpers.pages import DOCS, PAGES, RUNBOOK, anchors, blocks, entries, rows, section, spans, text_of

CODE = ("highwater", "resources", "assets", "orchestration", "dev")

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


def example() -> declaration.Stream:
    """The stream that the page declares."""
    held: dict[str, Any] = {}
    exec(blocks("docs/streams.md", "python")[0], held)
    stream = held["STREAM"]
    assert isinstance(stream, declaration.Stream)
    return stream


# Settings


def setting_names() -> set[str]:
    return {
        value
        for name, value in vars(settings).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("DEFAULT_")
    }


def test_the_page_of_configuration_has_every_setting_and_no_other() -> None:
    listed = {spans(row[0])[0] for row in rows(section("docs/configuration.md", "Settings of Highwater"))}

    assert listed == setting_names()


def test_every_variable_that_a_page_names_is_read_somewhere() -> None:
    code = "".join(f.read_text() for folder in CODE for f in sorted((REPOSITORY / folder).rglob("*.py")))
    code += text_of("dagster.yaml")
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

    assert {name for name in read if f"`{name}`" not in text_of("docs/configuration.md")} == set()


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
    listed = {spans(row[0])[0]: row[1] for row in rows(section("docs/configuration.md", "Settings of Highwater"))}

    assert listed[name] == f"`{default}`"


def test_the_page_gives_the_places_below_home() -> None:
    found = settings.Settings.from_environment({settings.HOME: "/somewhere"})
    listed = {spans(row[0])[0]: row[1] for row in rows(section("docs/configuration.md", "Settings of Highwater"))}

    assert listed[settings.LAKE] == f"`{Path(found.lake).name}` below `HIGHWATER_HOME`"
    assert listed[settings.LEDGER_URL] == f"`{Path(found.ledger_url).name}` below `HIGHWATER_HOME`"


def test_the_page_has_every_property_of_kafka_with_its_fate() -> None:
    from highwater.resources import kafka_logins, kafka_options

    page = section("docs/configuration.md", "Kafka")
    handed, alone, guarded = page.split("\nProperties that ")[1:]
    known = {name: given or name for name, given in _handed(handed).items()}

    assert known == {name: name for name in kafka_options._SAME} | dict(kafka_options._RENAMED)
    assert set(spans(alone)) == kafka_options._OURS_ALONE
    taken = {name: spans(row[1]) for row in rows(guarded) for name in spans(row[0])}
    assert taken.keys() == kafka_options.GUARDED
    for name, values in taken.items():
        for value in values if values != [settings.KAFKA_BOOTSTRAP] else []:
            kafka_options.refuse_weakening({name: value})
    assert all(f"`{mechanism}`" in handed for mechanism in kafka_logins.PASSWORD_MODULES)


def test_the_page_of_security_has_every_property_of_a_login_and_no_other() -> None:
    from highwater.resources import kafka_logins, kafka_tls

    listed = {name for row in rows(section("docs/security.md", "Settings of each client")) for name in spans(row[0])}
    assert listed == kafka_logins.LOGINS | kafka_tls.KEYS | {*kafka_logins.MECHANISMS}


def test_the_page_of_security_names_every_variable_that_a_file_may_hold() -> None:
    listed = spans(section("docs/security.md", "Secrets from files"))
    assert {f"{name}_FILE" for name in settings.SECRETS} <= {*listed}


def _handed(text: str) -> dict[str, str]:
    found = {spans(row[0])[0]: (spans(row[1]) or [""])[0] for row in rows(text)}
    found.pop("sasl.username")  # with the password it becomes one property, which is looked at elsewhere
    return found


# Declarations


@pytest.mark.parametrize("kind", DECLARED, ids=lambda kind: kind.__name__)
def test_the_page_of_streams_has_every_field_of_a_declaration_and_no_other(kind: type) -> None:
    page = section("docs/streams.md", kind.__name__)
    table = next(part for part in page.split("\n\n") if part.lstrip().startswith("| field |"))
    listed = {spans(row[0])[0]: row[1] for row in rows(table)}

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


def checks_listed() -> dict[str, list[str]]:
    """The rows of the table of checks by the names of the checks."""
    table = "".join(section("docs/streams.md", "Checks").partition("| check |")[1:])
    return {spans(row[0])[0]: row for row in rows(table)}


def test_the_page_of_streams_has_every_check_with_its_severity() -> None:
    listed = {name: (spans(row[2])[0], row[3] == "yes") for name, row in checks_listed().items()}
    severities = [spans(row[0])[0] for row in rows(section("docs/streams.md", "Checks").partition("| check |")[0])]

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
    listed = {name for row in rows(section("docs/audit.md", "Missing versions")) for name in spans(row[0])}
    assert listed == kinds | {missing_versions.UNDECIDED, missing_versions.TO_COME, missing_versions.NOWHERE}


def test_the_page_of_streams_has_every_type_of_a_field() -> None:
    page = section("docs/streams.md", "Field")
    table = next(part for part in page.split("\n\n") if part.startswith("| type |"))
    listed = {name for row in rows(table) for name in spans(row[0])}

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
    page = section("docs/streams.md", "Field")
    sentence = re.search(r"These names are taken.*?declared: (.*?)\. A field", page, re.DOTALL)
    assert sentence is not None

    assert set(spans(sentence[1])) == declaration_parts.RESERVED_COLUMNS - {"version", "event_time"}


def test_the_page_declares_a_stream_in_at_most_forty_lines() -> None:
    assert len(blocks("docs/streams.md", "python")[0].splitlines()) <= 40
    assert example().name == "shipments"


def test_the_readme_has_one_screen_and_a_half() -> None:
    assert len(text_of("README.md").splitlines()) <= 80


def test_dagster_shows_of_a_stream_what_the_page_lists() -> None:
    from highwater.orchestration.build import build_defs

    page = text_of("docs/streams.md")
    table = page[page.index("| what | names |") : page.index("The tables and their columns")]
    listed = {row[0]: spans(row[1]) for row in rows(table)}
    stream = example()
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
    assert {(name, row[1].strip("`")) for name, row in checks_listed().items() if not row[4]} == checks


def test_the_page_lists_the_jobs_of_all_streams() -> None:
    from highwater.orchestration.build import build_defs

    stream = example()
    jobs = {name for name in build_defs(streams=[stream]).get_repository_def().job_names if not name.startswith("__")}
    listed = spans(section("docs/commands.md", "Jobs of operators"))
    assert {name for name in jobs if not name.startswith(stream.name)} <= set(listed)


# Errors


def entry(page: str, title: str) -> str:
    """The text of one entry of the runbook, up to the next heading of any level."""
    found = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^#|\Z)", text_of(page), re.MULTILINE | re.DOTALL)
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

    assert sorted(entries(title)) == sorted(kinds)


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
    assert [name for name in found if not any(fnmatch(title, name) for title in entries("Alerts"))] == []
    assert [title for title in entries("Alerts") if not any(fnmatch(title, name) for name in found)] == []


def test_every_entry_of_the_runbook_says_what_it_means_and_what_to_do() -> None:
    parts = ("Alerts", "Metrics of the deployment", "Permanent errors", "Temporary errors", "Formats and keys")
    found = {
        title: re.findall(r"^\*\*(\w+)\.\*\*", entry(RUNBOOK, title), re.MULTILINE)
        for p in parts
        for title in entries(p)
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
    assert anchor in anchors(text_of(page))


# Checks


def checks_by_name() -> dict[str, tuple[str, str]]:
    """For each check of the shipped streams and of the page's example its table, and what Dagster shows of it."""
    from highwater.orchestration.build import build_defs

    streams = [*load_streams().values(), example()]
    graph = build_defs(streams=streams).get_repository_def().asset_graph
    specs = [graph.get_check_spec(key) for key in graph.asset_check_keys]
    return {spec.name: (spec.asset_key.path[-1], f"{spec.description} {spec.metadata['page'].value}") for spec in specs}


def test_every_check_has_a_page_and_no_page_is_of_none() -> None:
    checks = checks_by_name()
    pages = {file.stem for file in (DOCS / "checks").glob("*.md")}
    listed = {name: (spans(row[1])[0], next(links(row[0]))) for name, row in checks_listed().items()}

    assert pages == set(checks)
    assert listed == {name: (table, f"checks/{name}.md") for name, (table, _) in checks.items()}


def test_a_check_names_its_page_in_dagster() -> None:
    lacking = {name for name, (_, shown) in checks_by_name().items() if shown.count(f"docs/checks/{name}.md") != 2}

    assert lacking == set()


def test_a_page_of_a_check_says_what_it_proves_when_it_fails_and_what_to_do() -> None:
    for name, (table, _) in checks_by_name().items():
        page = f"docs/checks/{name}.md"
        assert text_of(page).startswith(f"# {name}\n\nA check on `{table}`. ")
        assert all(section(page, title).strip() for title in ("What it proves", "When it fails", "What to do"))


def test_a_red_check_names_its_page_and_a_green_one_does_not() -> None:
    from highwater.orchestration.checking.check_rules import CheckResult
    from highwater.orchestration.checking.checks import build_evaluation

    red, green = (
        build_evaluation(example(), "current", "versions_in_order", "t@0000000", CheckResult(passed, "so"))
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


# Metrics


def test_the_page_of_observability_has_every_metric_with_its_labels() -> None:
    from highwater.orchestration.reporting.prometheus_metrics import FAMILIES

    listed = {spans(row[0])[0]: tuple(spans(row[1])) for row in rows(section("docs/observability.md", "Metrics"))}

    assert listed == {name: labels for name, (labels, _) in FAMILIES.items()}


def test_the_page_of_commands_has_every_end_that_the_metric_counts() -> None:
    from highwater.orchestration.checking.origin_counts import OriginEnds
    from highwater.orchestration.reporting.prometheus_metrics import MetricSamples, _measure_origin_ends

    found = MetricSamples()
    _measure_origin_ends(found, dataclasses.replace(example(), tiers=(timedelta(minutes=1),)), OriginEnds())
    table = section("docs/commands.md", "Where is this record").partition("| end |")[2]

    listed = {end for row in rows(table) for end in spans(row[2])}
    assert listed == {labels[1] for labels, _ in found.samples["highwater_origins"]}


# Tables


def columns_of(sql: str) -> list[str]:
    """The names of columns that are declared in SQL; a comma inside of brackets separates no columns."""
    flat = re.sub(r"<[^>]*(?:<[^>]*>)?[^>]*>|\([^)]*\)", "", sql)
    return [part.split()[0].strip("`") for part in flat.split(",")]


def columns_listed(title: str) -> list[str]:
    """The columns that a section of the page of tables lists; `a … b` means all of the origin."""
    origin = ["origin_topic", "origin_generation", "origin_partition", "origin_offset"]
    origin += ["origin_timestamp", "origin_timestamp_ms"]
    found: list[str] = []
    for row in rows(section("docs/tables.md", title).split("\n###")[0]):
        if row[0] == "the declared fields":
            found.append("FIELDS")
        elif "…" in row[0]:
            found += origin
        elif row[0].startswith("`") and row[0].strip("`").islower() and title != "reasons":
            found += spans(row[0]) + (["FIELDS"] if "the declared fields" in row[0] else [])
    return found


def with_fields(columns: list[str], stream: declaration.Stream) -> list[str]:
    """The stream's own fields as one entry."""
    names = {f.name for f in stream.fields}
    stored = [name for name in columns if name not in names]
    first = next((at for at, name in enumerate(columns) if name in names), None)
    return stored if first is None else [*columns[:first], "FIELDS", *stored[first:]]


@pytest.mark.parametrize("title", ["raw", "events", "rejects", "dlq", "current"])
def test_the_page_of_tables_has_the_columns_in_their_order(title: str) -> None:
    from highwater.assets import current, dlq, events, raw, rejects

    stream = example()
    code = {
        "raw": raw.COLUMNS,
        "events": events.build_sql_columns(stream),
        "rejects": rejects.COLUMNS,
        "dlq": dlq.COLUMNS,
        "current": current.build_sql_columns(stream),
    }[title]
    listed = [name for name in columns_listed(title) if name not in {"malformed", "schema", "invalid", "unresolved"}]

    assert listed == with_fields(columns_of(code), stream)


def test_the_page_of_tables_has_the_columns_of_metrics() -> None:
    from assets.streams.orders import STREAM as ORDERS
    from highwater.assets import minute_rows

    listed = [name for row in rows(section("docs/tables.md", "metrics")) for name in spans(row[0])]
    statuses = minute_rows.select_statuses(ORDERS)
    by_status = ["<status>_events", "<status>_amount"]
    found = [name for name in minute_rows.build_schema(ORDERS).names if name.partition("_")[0] not in statuses]

    assert listed == [*found[:3], *by_status, *found[3:]]
    assert {name.replace("<status>", status) for name in by_status for status in statuses} == {
        *minute_rows.build_schema(ORDERS).names
    } - {*found}


def test_the_page_of_tables_has_the_columns_of_published() -> None:
    from highwater.assets import publication_log

    listed = [name for row in rows(section("docs/tables.md", "published")) for name in spans(row[0])]

    assert listed == publication_log.build_schema().names


def test_the_page_of_tables_has_the_columns_of_a_batch_under_way() -> None:
    from highwater.assets import publication_log

    [first, *others] = rows(section("docs/tables.md", "_sending"))

    assert spans(first[0]) == ["published"]
    assert [
        *publication_log.build_schema().names,
        *(name for row in others for name in spans(row[0])),
    ] == publication_log.build_sending_schema().names


def test_the_page_of_tables_has_every_field_of_a_batch() -> None:
    from highwater.assets.publication_log import BatchUnderWay

    [batch] = re.findall(r'`(\{"format": 1, "attempt".*?)`', section("docs/tables.md", "_sending"))

    assert re.findall(r'"(\w+)":', batch) == [*json.loads(BatchUnderWay(1, "t", "id").to_json())]


def test_the_page_of_tables_has_the_columns_of_erasures() -> None:
    from highwater.assets import erasures_table

    assert columns_listed("erasures") == erasures_table.build_schema().names


def test_the_page_of_tables_has_the_columns_of_discards() -> None:
    from highwater.assets import discards_table

    [first, *others] = rows(section("docs/tables.md", "discards"))

    assert [name for row in (first, *others) for name in spans(row[0])] == discards_table.build_schema().names


def test_the_contract_of_accepted_events_has_every_header_and_what_it_may_say() -> None:
    import pyarrow as pa

    from highwater.assets.publication_window import PublicationWindow, build_schema
    from highwater.assets.published import OutgoingRecords
    from highwater.publishing import EventState, Lateness, PublicationOutcome

    table = section("docs/published.md", "The record").split("| header | value |")[1]
    listed = {name: row[1] for row in rows("| header | value |" + table) for name in spans(row[0])}
    row = pa.table([["t@0"], ["t"], [0], [0], [0], [0], [b""], [None], [None]], schema=build_schema())
    window = PublicationWindow(row, [PublicationOutcome(EventState.RETRACTED, 1, Lateness.CORRECTED)], pa.array([0]))
    [sent] = OutgoingRecords(window, "accepted", 1)

    named = {f"highwater.origin{name}" if name.startswith(".") else name for name in listed}
    assert named == dict(sent.headers).keys()
    assert set(spans(listed["highwater.late"])) == {late.value for late in Lateness}


def sql_block(marker: str) -> str:
    return next(block for block in blocks("docs/tables.md", "sql") if marker in block)


def test_metrics_equal_the_query_over_events(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    from tests.helpers.measured import Event, Measured

    made = Measured(tmp_path)
    conflict, copy = Event("a", 1, 7200, amount="9.00", published=1), Event("a", 1, 0, offset=5)
    made.decide(0, conflict, Event("a", 2, 60, "refunded"), Event("b", 1, 0, amount="0.10"))
    made.decide(1, copy, Event("a", 1, 0, offset=6), Event("c", 1, 59))
    made.measure(0, 1)
    events = DeltaTable(made.lake.build_table_path("orders", "events"))
    result = QueryBuilder().register("t", events).execute(sql_block("paid_amount"))
    found = {row.pop("minute"): row for row in pa.table(result).to_pylist()}

    assert found == {
        minute: {name: row[name] for name in ("events", "paid_events", "paid_amount")}
        for minute, row in made.table().items()
    }
    assert len(found) == 2


def test_the_page_of_tables_has_every_field_of_a_commit_record() -> None:
    from datetime import UTC, datetime

    from highwater.slice_commits import SliceCommit
    from highwater.slices import OffsetRange, Slice

    slice_ = Slice("s", "t", "id", 0, 0, {0: OffsetRange(0, 1)}, datetime.now(UTC))
    table = section("docs/tables.md", "The commit record").split("| in | `counts` holds |")[0]
    listed = {name for row in rows(table) for name in spans(row[0])}

    assert listed == set(SliceCommit(slice_, attempt=1, rows=1, past=True, run="r", extra={"batch": 1}).to_plain())


def test_the_page_of_tables_has_every_reason() -> None:
    from highwater import reject_reasons

    found = {
        spans(row[0])[0]: row[1] == "yes"
        for row in rows(section("docs/tables.md", "rejects"))
        if row[1] in {"yes", "no"}
    }

    assert found == {reason: reason in reject_reasons.PERMANENT for reason in reject_reasons.REASONS}


def test_the_page_of_tables_has_the_columns_of_commits() -> None:
    from highwater.resources import commit_log_writer

    listed = [name for row in rows(section("docs/tables.md", "Commits")) for name in spans(row[0])]
    assert sorted(listed) == sorted(commit_log_writer.build_schema().names)


def test_the_queries_over_commits_take_the_newest_commit_of_a_slice(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    from dev.planted import plant
    from highwater.slice_commits import SliceCommit
    from highwater.slices import OffsetRange, Slice

    slices = [
        Slice("orders", "orders", "A" * 22, 0, n, {0: OffsetRange(n * 10, n * 10 + 10)}, datetime.now(UTC))
        for n in (41, 42)
    ]
    none = pa.table({"slice": pa.array([], pa.string())})
    for table, attempt, stored in (("raw", 1, slices), ("events", 2, slices), ("events", 3, slices[1:])):
        plant(str(tmp_path / table), none, [SliceCommit(slice_, attempt, 10 - attempt) for slice_ in stored])
    view, *queries = (part.split("\n", 1)[1] for part in sql_block("VIEW newest").strip().rstrip(";").split(";\n"))
    newest = view.partition(" AS\n")[2].replace("delta.`/path/to/lake/orders/_commits`", "t")
    log = QueryBuilder().register("t", DeltaTable(str(tmp_path / "_commits")))
    asked = [f"WITH newest AS ({newest}) {query}".replace("`", '"') for query in queries]
    ranges, runs, counts = (pa.table(log.execute(query)).to_pylist() for query in asked)

    first, second = ([{"partition": 0, "start": n, "end": n + 10}] for n in (410, 420))
    assert [(row["table"], row["slice"][-2:], row["ranges"]) for row in ranges] == [
        ("events", "41", first),
        ("events", "42", second),
        ("raw", "41", first),
        ("raw", "42", second),
    ]
    assert {(row["table"], row["attempt"]) for row in runs} == {("raw", 1), ("events", 3)}
    assert [(row["table"], row["slices"], row["rows"]) for row in counts] == [("events", 2, 15), ("raw", 2, 18)]


# Rules


def rules_listed(page: str, title: str) -> list[str]:
    return [spans(row[0])[0] for row in rows(section(page, title).split("\n###")[0])]


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
    listed = [(row[0], spans(row[2])) for row in rows(section("docs/concepts.md", "Guarantees"))]

    assert [name for name, _ in listed] == [f"I{number}" for number in range(1, 18)]
    assert [file for _, files in listed for file in files or ["none"] if not (REPOSITORY / file).is_file()] == []


def test_the_glossary_has_each_term_once_in_order() -> None:
    terms = [row[0].lower() for row in rows(text_of("docs/glossary.md"))]

    assert terms == sorted(set(terms))


# Commands, links, examples


def code_text(page: Path) -> str:
    """All that a page sets as code."""
    text = page.read_text()
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *spans(text)])


def test_every_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of("Makefile"), re.MULTILINE))
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
    broken = [link for link in links(page.read_text()) if not resolves(page, link)]

    assert broken == []


def links(text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in link:
            yield link


def resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target.read_text())


def test_every_decision_is_in_the_index() -> None:
    files = {file.name for file in (DOCS / "adr").glob("0*.md")}

    assert set(links(text_of("docs/adr/README.md"))) == files


def test_a_decision_has_context_options_and_a_decision_or_names_its_successor() -> None:
    for page in sorted(f"docs/adr/{file.name}" for file in (DOCS / "adr").glob("0*.md")):
        headings = re.findall(r"^## (.+)$", text_of(page), re.MULTILINE)
        decision = section(page, "Decision").strip()
        if decision.startswith("Superseded by [") and next(links(decision)):
            assert headings == ["Decision"], page
        else:
            assert headings == ["Context", "Options", "Decision"], page
            assert decision.startswith("Accepted"), page


def test_every_json_example_is_json() -> None:
    for page in PAGES:
        for block in blocks(str(page.relative_to(REPOSITORY)), "json"):
            json.loads(block)


def test_every_python_example_compiles() -> None:
    for page in PAGES:
        for block in blocks(str(page.relative_to(REPOSITORY)), "python"):
            compile(block, str(page), "exec")


def test_every_folder_of_the_tree_is_there() -> None:
    listed = {name for row in rows(section("docs/architecture.md", "The tree")) for name in spans(row[0])}

    assert {name for name in listed if not (REPOSITORY / name).is_dir()} == set()


def test_the_tasks_of_a_read_are_those_that_the_page_reports() -> None:
    from assets.streams.orders import STREAM
    from highwater.assets.raw import _compute_records_per_task

    page, limits = section("docs/operations.md", "The size of a slice"), STREAM.limits
    reported = {
        "a slice of 40,000 offsets or less": [1, 40_000],
        f"a slice of {limits.max_offsets:,} offsets": [limits.max_offsets],
        "two such slices, up to ten": [2 * limits.max_offsets, 10 * limits.max_offsets],
        "twenty such slices": [limits.slices_per_run * limits.max_offsets],
    }
    for what, offsets in reported.items():
        [tasks] = {math.ceil(number / _compute_records_per_task(number)) for number in offsets}
        assert f"| {what} | {tasks} |" in page
