"""Few records go through Spark with settings of their own; many, or few beside large tables, with the usual ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from highwater.assets import small_slices
from highwater.assets.small_slices import MAX_OFFSETS, SETTINGS, list_classification_tables, small_slice_settings
from highwater.assets.work import Work
from highwater.declaration import Lookup
from highwater.resources.lake import Lake
from tests.helpers.fake_session import FakeSession
from tests.helpers.support import make_stream
from tests.helpers.written_tables import a_slice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

USUAL = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.shuffle.partitions": "200",
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}


def work(offsets: int, lake: Path, topic: str = "orders") -> Work:
    nothing = cast("Any", None)
    spark = cast("SparkSession", FakeSession(USUAL))
    return Work(make_stream("orders"), [a_slice(0, offsets, topic)], spark, Lake(str(lake)), nothing, nothing, print)


def in_force(work: Work, *tables: str) -> dict[str, str]:
    with small_slice_settings(work, tables):
        found = settings(work)
    assert settings(work) == USUAL, "restored"
    return found


def settings(work: Work) -> dict[str, str]:
    return {name: str(work.spark.conf.get(name)) for name in USUAL}


def test_few_records_have_settings_of_their_own(tmp_path: Path) -> None:
    assert in_force(work(MAX_OFFSETS, tmp_path)) == SETTINGS
    assert in_force(work(MAX_OFFSETS + 1, tmp_path)) == USUAL
    several = work(MAX_OFFSETS, tmp_path)
    assert in_force(replace(several, slices=[*several.slices, a_slice(1, 1)])) == USUAL


def test_beside_a_large_table_they_have_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_slices, "MAX_ROWS", 3)
    few, many = str(tmp_path / "few"), str(tmp_path / "many")
    write_deltalake(few, pa.table({"n": [1, 2, 3]}))
    write_deltalake(many, pa.table({"n": [1, 2, 3, 4]}))
    assert in_force(work(5, tmp_path), few, str(tmp_path / "absent")) == SETTINGS
    assert in_force(work(5, tmp_path), few, many) == USUAL


def test_a_table_whose_log_does_not_count_its_rows_needs_it(tmp_path: Path) -> None:
    path = str(tmp_path / "uncounted")
    write_deltalake(path, pa.table({"n": [1]}), configuration={"delta.dataSkippingNumIndexedCols": "0"})
    log = tmp_path / "uncounted" / "_delta_log" / f"{0:020d}.json"
    assert '"stats"' in log.read_text()
    log.write_text("\n".join(_without_stats(line) for line in log.read_text().splitlines()))
    assert in_force(work(5, tmp_path), path) == USUAL


def _without_stats(line: str) -> str:
    entry = json.loads(line)
    entry.get("add", {}).pop("stats", None)
    return json.dumps(entry)


def test_an_unreadable_table_is_left_to_the_stage(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    write_deltalake(str(broken), pa.table({"n": [1]}))
    (broken / "_delta_log" / f"{0:020d}.json").write_text("no JSON")
    assert in_force(work(5, tmp_path), str(broken)) == USUAL


def test_classification_reads_the_reference_table_and_for_retries_the_events(tmp_path: Path) -> None:
    main = work(5, tmp_path)
    lookup = main.stream.lookup
    assert isinstance(lookup, Lookup)
    assert list_classification_tables(main) == [f"{tmp_path}/{lookup.table}"]
    assert list_classification_tables(work(5, tmp_path, "orders.dlq.1")) == [
        f"{tmp_path}/{lookup.table}",
        f"{tmp_path}/orders/events",
    ]
    assert list_classification_tables(replace(main, stream=replace(main.stream, lookup=None))) == []
