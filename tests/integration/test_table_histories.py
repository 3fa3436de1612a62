"""Tables across slices, decisions and declarations: winners, added columns and cleaned logs."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from highwater.assets import (
    commit,
    current,
    dlq,
    events,
    metrics,
    raw,
    rejects,
)
from highwater.assets.commit import Clock, CommittedSlices
from highwater.declaration import Field
from highwater.errors import (
    DependencyUnavailableError,
    SupersededAttemptError,
)
from highwater.resources.lake import Lake
from highwater.resources.spark_tables import build_known_rows, create_table
from highwater.routing import find_destination
from highwater.slice_commits import SliceCommit
from tests.helpers.staged import select_origins
from tests.helpers.support import (
    ORDERS,
    STAGES,
    Bench,
    customers,
    make_stream,
    order_message,
    read_rows,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.slices import Slice


pytestmark = pytest.mark.slow


def test_a_reference_table_that_is_unavailable_makes_no_reject(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    raw.materialise(bench.work(slice_))
    shutil.rmtree(bench.lake.build_reference_path("reference/customers"))
    with pytest.raises(DependencyUnavailableError, match="reference/customers"):
        events.materialise(bench.work(slice_))
    assert bench.rows("events") == []
    customers(bench.lake, ["c1"])
    events.materialise(bench.work(slice_))
    assert select_origins(bench.rows("events")) == {(0, 0)}


def test_a_slice_that_is_materialised_again_recomputes_its_keys(bench: Bench) -> None:
    """What a slice had brought must leave `current` with its events, and the next best version must come back."""
    customers(bench.lake, ["c1", "c2"])
    bench.send(
        order_message("o1", 1),
        order_message("o1", 3, customer_id="c2"),
        order_message("o1", 2),
        order_message("o2", 1, customer_id="c2"),
    )
    slices = [bench.plan(0, p0=(0, 1)), bench.plan(1, p0=(1, 2)), bench.plan(2, p0=(2, 3)), bench.plan(3, p0=(3, 4))]
    bench.materialise(*slices)
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 3, "o2": 1}
    customers(bench.lake, ["c1"])  # c2 is forgotten: the slices of version 3 and of o2 now hold no event
    bench.materialise(slices[1], slices[3])
    assert {key: row["version"] for key, row in bench.current().items()} == {"o1": 2}
    assert bench.failing() == {}


def test_current_holds_the_winners_of_the_events_after_every_step(bench: Bench) -> None:
    """Late slices, equal versions with other contents, and slices that lose events when they are materialised again."""
    every = ("c1", "c2", "c3")
    versions = [("o1", 2, "c2"), ("o2", 3, "c3"), ("o1", 1, "c1"), ("o2", 3, "c1"), ("o1", 3, "c3"), ("o3", 1, "c2")]
    versions += [("o2", 1, "c1"), ("o1", 3, "c1"), ("o3", 2, "c2"), ("o2", 2, "c2"), ("o1", 2, "c1"), ("o3", 1, "c2")]
    states = {1: "placed", 2: "paid", 3: "refunded"}
    bench.send(*[order_message(key, n, customer_id=of, status=states[n]) for key, n, of in versions])
    slices = [bench.plan(n, p0=(2 * n, 2 * n + 2)) for n in range(6)]
    merged: set[str] = set()
    steps = (
        ((4, 1), every),
        ((2,), every),
        ((2, 0), ("c1", "c2")),
        ((4, 5), ("c1", "c2")),
        ((3, 0), ("c1",)),
        ((1, 4), ("c1",)),
    )
    for ordinals, known in steps:
        customers(bench.lake, known)
        bench.materialise(*[slices[n] for n in ordinals])
        merged |= {slices[n].key for n in ordinals}
        best: dict[str, tuple[int, int]] = {}
        for row in bench.rows("events"):
            assert row["slice"] in merged
            mine = (row["version"], -row["origin_offset"])  # a later offset has no earlier time
            best[row["key"]] = max(mine, best.get(row["key"], mine))
        held = {key: (row["version"], -row["origin_offset"]) for key, row in bench.current().items()}
        assert held == best, (ordinals, known)
    assert held.keys() == {"o1", "o2", "o3"}
    assert bench.failing() == {}


def test_a_table_is_made_where_one_that_made_it_was_killed(spark: SparkSession, tmp_path: Path) -> None:
    """It left the folder of the log, in which Spark would make no table any more."""
    path = tmp_path / "raw"
    (path / "_delta_log").mkdir(parents=True)
    (path / "_delta_log" / ".00000000000000000000.json.tmp").write_text("half")
    create_table(spark, str(path), raw.COLUMNS, raw.STATISTICS_COLUMNS)
    assert spark.read.format("delta").load(str(path)).count() == 0
    assert [*read_rows(str(path))] == []


def test_as_many_tiers_as_anybody_declares_are_reported_by_reason(spark: SparkSession) -> None:
    stream = make_stream("orders", tiers=tuple(timedelta(seconds=n + 1) for n in range(60)))
    rows = [(reason, retries) for reason in stream.on_reject for retries in range(62)]
    asked = spark.createDataFrame(rows, "reason STRING, retries INT").select(
        "*", rejects._build_next_topic(stream).alias("to")
    )
    assert [row["to"] for row in asked.collect()] == [find_destination(stream, *row) for row in rows]


def test_an_older_decision_does_not_replace_what_follows_a_newer_one(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    older = {slice_.key: SliceCommit(slice_, 1, 0, {"rejects": 0})}
    with pytest.raises(SupersededAttemptError, match="reprocessed"):
        rejects._follow_decision(
            bench.work(slice_),
            CommittedSlices(older, 0),
            CommittedSlices({slice_.key: SliceCommit(slice_, 2, 0)}, 0),
            Clock(),
        )


def test_the_slice_commit_outlives_the_log_of_the_table(bench: Bench, tmp_path: Path) -> None:
    """Delta cleans its log up after 30 days; nothing may depend on what history() still shows."""
    bench.send(*[order_message(f"o{n}", 1) for n in range(5)])
    slices: list[Slice] = [bench.plan(n, p0=(n, n + 1)) for n in range(5)]
    path = Path(bench.lake.build_table_path(bench.stream.name, "raw"))
    raw.materialise(bench.work(slices[0]))
    # Each tenth commit would write one.
    bench.spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    for slice_ in slices[1:3]:
        raw.materialise(bench.work(slice_))
    aged = age(path / "_delta_log", timedelta(days=40))
    for slice_ in slices[3:]:
        raw.materialise(bench.work(slice_))
    left = {file.name for file in (path / "_delta_log").iterdir()}
    assert len(aged - left) >= 4, "Delta removed what was older than its retention"
    assert not any(slice_commit.key in text for slice_commit in slices[:2] for text in said_in(path / "_delta_log"))
    # Nobody has seen a table of this path: Spark, too, has nothing but what is left of the log.
    shutil.copytree(bench.lake.root, tmp_path / "aged")
    bench.lake = Lake(str(tmp_path / "aged"))
    assert set(bench.lake.load_slice_commits(bench.stream.name, "raw")) == {slice_.key for slice_ in slices}
    [again] = raw.materialise(bench.work(slices[0]))
    assert (again.attempt, again.note) == (2, None)
    path = Path(bench.lake.build_table_path(bench.stream.name, "raw"))
    for slice_, attempt in ((slices[0], 2), (slices[1], 1)):
        late, slice_commit = bench.spark.createDataFrame([], raw.COLUMNS), SliceCommit(slice_, 9, 0)
        looked = CommittedSlices({slice_.key: SliceCommit(slice_, attempt - 1, 0)}, 0)
        with pytest.raises(SupersededAttemptError, match=f"found: attempt {attempt}"):
            commit.commit_rows(
                bench.work(slice_), "raw", late, [slice_commit], looked, files=1, spread="offset", tasks=1
            )
    assert sorted((row["offset"], row["slice"]) for row in bench.rows("raw")) == [
        (n, slice_.key) for n, slice_ in enumerate(slices)
    ]


def age(folder: Path, by: timedelta) -> set[str]:
    """Let the files be older, by the time that a clean-up goes by; their names."""
    files = [*folder.iterdir()]
    for file in files:
        then = file.stat().st_mtime - by.total_seconds()
        os.utime(file, (then, then))
    return {file.name for file in files}


def said_in(log: Path) -> list[str]:
    return [file.read_text() for file in log.glob("*.json")]


def test_a_field_that_is_added_to_a_stream_becomes_a_column(bench: Bench) -> None:
    """Also where two runs meet it at once; the rows of before have null in it."""
    bench.send(order_message("o1", 1), order_message("o2", 1, note="seen"), order_message("o3", 1, note="too"))
    bench.materialise(bench.plan(0, p0=(0, 1)))
    fields = (*bench.stream.fields, Field("note", "string"))
    bench.stream = replace(bench.stream, fields=fields)
    later = [bench.plan(1, p0=(1, 2)), bench.plan(2, p0=(2, 3))]
    for slice_ in later:
        raw.materialise(bench.work(slice_))
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda slice_: events.materialise(bench.work(slice_)), later))
    for stage in (rejects, dlq, current):
        stage.materialise(bench.work(*later))
    assert {row["key"]: row["note"] for row in bench.rows("events")} == {"o1": None, "o2": "seen", "o3": "too"}
    assert {key: row["note"] for key, row in bench.current().items()} == {"o1": None, "o2": "seen", "o3": "too"}


@pytest.mark.long
def test_runs_that_began_before_a_field_was_added_write_on(bench: Bench) -> None:
    """One of them materialises a slice again: it must not take the new column from rows of other slices."""
    older = bench.stream
    note = replace(older, fields=(*older.fields, Field("note", "string")))
    both_fields = replace(note, fields=(*note.fields, Field("remark", "string")))
    bench.send(*[order_message(f"o{n}", 1, note=f"n{n}", remark=f"r{n}") for n in range(4)])
    slices = [bench.plan(n, p0=(n, n + 1)) for n in range(4)]
    bench.stream = note
    bench.materialise(*slices[:2])
    bench.stream = older
    bench.materialise(slices[0])
    assert {row["key"]: row["note"] for row in bench.rows("events")} == {"o0": None, "o1": "n1"}
    assert {key: row["note"] for key, row in bench.current().items()} == {"o0": None, "o1": "n1"}

    works = [replace(bench.work(slices[2]), stream=older), replace(bench.work(slices[3]), stream=both_fields)]
    for stage in STAGES:
        with ThreadPoolExecutor(2) as both:
            list(both.map(stage.materialise, works))
    expected = {"o0": (None, None), "o1": ("n1", None), "o2": (None, None), "o3": ("n3", "r3")}
    assert {row["key"]: (row["note"], row["remark"]) for row in bench.rows("events")} == expected
    assert {key: (row["note"], row["remark"]) for key, row in bench.current().items()} == expected
    assert bench.failing() == {}


def test_metrics_follow_every_decision_and_are_read_by_spark(bench: Bench) -> None:
    """A customer is forgotten: the slice reclaims what it said, and the other's copy counts from then on."""
    from decimal import Decimal

    bench.stream = replace(bench.stream, metrics=ORDERS.metrics)
    customers(bench.lake, ["c1", "c2"])
    first, copy = order_message("o1", 2, amount=10), order_message("o1", 2, amount=10, customer_id="c2")
    bench.send(copy, order_message("o2", 2, amount=3.25), first)
    slices = [bench.plan(0, p0=(0, 2)), bench.plan(1, p0=(2, 3))]
    bench.materialise(*slices)
    assert paid_minutes(bench) == [(2, Decimal("13.25"), 2, Decimal("6.625000"))]
    customers(bench.lake, ["c1"])
    bench.materialise(slices[0])
    assert paid_minutes(bench) == [(2, Decimal("13.25"), 2, Decimal("6.625000"))]
    assert select_origins(bench.rows("events")) == {(0, 1), (0, 2)}
    # Decided again, and killed before metrics: the decision stays until they follow.
    customers(bench.lake, ["c2"])
    events.materialise(bench.work(slices[1]))
    rejects.materialise(bench.work(slices[1]))
    dlq.materialise(bench.work(slices[1]))
    current.materialise(bench.work(slices[1]))
    [report] = events.materialise(bench.work(slices[1]))
    assert "metrics still to be written" in str(report.note)
    metrics.materialise(bench.work(slices[1]))
    assert paid_minutes(bench) == [(1, Decimal("3.25"), 1, Decimal("3.250000"))]


def paid_minutes(bench: Bench) -> list[tuple[object, ...]]:
    rows = bench.spark.read.format("delta").load(bench.lake.build_table_path(bench.stream.name, "metrics"))
    return [tuple(row) for row in rows.select("paid_events", "paid_amount", "hour_events", "hour_mean").collect()]


def test_a_field_may_have_every_name_that_a_declaration_takes(bench: Bench) -> None:
    name = "@odd-Größe_1"
    bench.stream = replace(bench.stream, fields=(*bench.stream.fields, Field(name, "string", one_of=("x",))))
    bench.send(
        order_message("o1", 1, 0, **{name: "x"}), order_message("o2", 1, 0, **{name: "y"}), order_message("o3", 1)
    )
    bench.materialise(bench.plan(0, p0=(0, 3)))
    assert {key: row[name] for key, row in bench.current().items()} == {"o1": "x"}
    assert [row["detail"] for row in bench.rows("rejects")] == [f"unknown {name}", f"field {name} is missing"]
    assert not bench.failing()


def test_rows_that_are_known_come_as_they_were_given(spark: SparkSession) -> None:
    """Into a table goes what was planned, whatever is in it; a value that fits nowhere is an error, and no null."""
    columns = "slice STRING, start BIGINT"
    rows = [('it\'s \\ "a" :rows\n\u00e9\U0001f600', 2**63 - 1), ("", -1)]
    assert [tuple(row) for row in build_known_rows(spark, columns, rows).collect()] == rows
    assert build_known_rows(spark, columns, []).collect() == []
    with pytest.raises(Exception, match=r"(?i)malformed"):
        build_known_rows(spark, columns, [("beyond", 2**63)]).collect()
