"""The page of tables names the columns, fields and reasons that the code has, and its queries hold."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from highwater import declaration
from tests.helpers.pages import find_blocks, find_rows, find_section, find_spans, load_example


def columns_of(sql: str) -> list[str]:
    """The names of columns that are declared in SQL; a comma inside of brackets separates no columns."""
    flat = re.sub(r"<[^>]*(?:<[^>]*>)?[^>]*>|\([^)]*\)", "", sql)
    return [part.split()[0].strip("`") for part in flat.split(",")]


def columns_listed(title: str) -> list[str]:
    """The columns that a section of the page of tables lists; `a … b` means all of the origin."""
    origin = ["origin_topic", "origin_generation", "origin_partition", "origin_offset"]
    origin += ["origin_timestamp", "origin_timestamp_ms"]
    found: list[str] = []
    for row in find_rows(find_section("docs/tables.md", title).split("\n###")[0]):
        if row[0] == "the declared fields":
            found.append("FIELDS")
        elif "…" in row[0]:
            found += origin
        elif row[0].startswith("`") and row[0].strip("`").islower() and title != "reasons":
            found += find_spans(row[0]) + (["FIELDS"] if "the declared fields" in row[0] else [])
    return found


def with_fields(columns: list[str], stream: declaration.Stream) -> list[str]:
    """The stream's own fields as one entry."""
    names = {f.name for f in stream.fields}
    stored = [name for name in columns if name not in names]
    first = next((at for at, name in enumerate(columns) if name in names), None)
    return stored if first is None else [*columns[:first], "FIELDS", *stored[first:]]


def test_the_page_of_tables_has_every_property_of_ours() -> None:
    """A run refuses a table whose `highwater.key` somebody changed, and no page named it."""
    from highwater import added_fields
    from highwater.assets import commit, events

    used = re.findall(r'"(highwater\.\w+)":', inspect.getsource(commit.ensure_table))
    rows = find_rows(find_section("docs/tables.md", "Changes from outside"))
    listed = [name for row in rows for name in find_spans(row[0]) if name.startswith("highwater.")]

    assert len(used) == 2
    assert sorted(listed) == sorted([*used, events.KEY_PROPERTY, added_fields.METADATA])


@pytest.mark.parametrize("title", ["raw", "events", "rejects", "dlq", "current"])
def test_the_page_of_tables_has_the_columns_in_their_order(title: str) -> None:
    from highwater.assets import current, dlq, events, raw, rejects

    stream = load_example()
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

    listed = [name for row in find_rows(find_section("docs/tables.md", "metrics")) for name in find_spans(row[0])]
    statuses = minute_rows.select_statuses(ORDERS)
    by_status = ["<status>_events", "<status>_amount"]
    found = [name for name in minute_rows.build_schema(ORDERS).names if name.partition("_")[0] not in statuses]

    assert listed == [*found[:3], *by_status, *found[3:]]
    assert {name.replace("<status>", status) for name in by_status for status in statuses} == {
        *minute_rows.build_schema(ORDERS).names
    } - {*found}


def test_the_page_of_tables_has_the_columns_of_published() -> None:
    from highwater.assets import publication_log

    listed = [name for row in find_rows(find_section("docs/tables.md", "published")) for name in find_spans(row[0])]

    assert listed == publication_log.build_schema().names


def test_the_page_of_tables_has_the_columns_of_a_batch_under_way() -> None:
    from highwater.assets import publication_log

    [first, *others] = find_rows(find_section("docs/tables.md", "_sending"))

    assert find_spans(first[0]) == ["published"]
    assert [
        *publication_log.build_schema().names,
        *(name for row in others for name in find_spans(row[0])),
    ] == publication_log.build_sending_schema().names


def test_the_page_of_tables_has_every_field_of_a_batch() -> None:
    from highwater.assets.publication_log import BatchUnderWay

    [batch] = re.findall(r'`(\{"format": 1, "attempt".*?)`', find_section("docs/tables.md", "_sending"))

    assert re.findall(r'"(\w+)":', batch) == [*json.loads(BatchUnderWay(1, "t", "id").to_json())]


def test_the_page_of_tables_has_the_columns_of_erasures() -> None:
    from highwater.assets import erasures_table

    assert columns_listed("erasures") == erasures_table.build_schema().names


def test_the_page_of_tables_has_the_columns_of_discards() -> None:
    from highwater.assets import discards_table

    [first, *others] = find_rows(find_section("docs/tables.md", "discards"))

    assert [name for row in (first, *others) for name in find_spans(row[0])] == discards_table.build_schema().names


def test_the_contract_of_accepted_events_has_every_header_and_what_it_may_say() -> None:
    import pyarrow as pa

    from highwater.assets.publication_window import PublicationWindow, build_schema
    from highwater.assets.published import OutgoingRecords
    from highwater.publishing import EventState, Lateness, PublicationOutcome

    table = find_section("docs/published.md", "The record").split("| header | value |")[1]
    listed = {name: row[1] for row in find_rows("| header | value |" + table) for name in find_spans(row[0])}
    row = pa.table([["t@0"], ["t"], [0], [0], [0], [0], [b""], [None], [None]], schema=build_schema())
    window = PublicationWindow(row, [PublicationOutcome(EventState.RETRACTED, 1, Lateness.CORRECTED)], pa.array([0]))
    [sent] = OutgoingRecords(window, "accepted", 1)

    named = {f"highwater.origin{name}" if name.startswith(".") else name for name in listed}
    assert named == dict(sent.headers).keys()
    assert set(find_spans(listed["highwater.late"])) == {late.value for late in Lateness}


def sql_block(marker: str) -> str:
    return next(block for block in find_blocks("docs/tables.md", "sql") if marker in block)


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
    table = find_section("docs/tables.md", "The commit record").split("| in | `counts` holds |")[0]
    listed = {name for row in find_rows(table) for name in find_spans(row[0])}

    assert listed == set(SliceCommit(slice_, attempt=1, rows=1, past=True, run="r", extra={"batch": 1}).to_plain())


def test_the_page_of_tables_has_every_reason() -> None:
    from highwater import reject_reasons

    found = {
        find_spans(row[0])[0]: row[1] == "yes"
        for row in find_rows(find_section("docs/tables.md", "rejects"))
        if row[1] in {"yes", "no"}
    }

    assert found == {reason: reason in reject_reasons.PERMANENT for reason in reject_reasons.REASONS}


def test_the_page_of_tables_has_the_columns_of_commits() -> None:
    from highwater.resources import commit_log_writer

    listed = [name for row in find_rows(find_section("docs/tables.md", "Commits")) for name in find_spans(row[0])]
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
