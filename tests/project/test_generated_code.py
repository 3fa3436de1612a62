"""The stages on a Spark with the settings that users get: queries run as generated code, and adapted.

All other tests have `SMALL_QUERIES`, which nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dev.spark_local import SHORT_LIVED
from tests.integration import test_stages
from tests.orchestration.sensing import test_run_history

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dev.spark_connect import SparkConnect
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkConnect]:
    """A Connect server as `make up` starts it, without Java's second compiler, which changes no result."""
    from dev.spark_connect import SparkConnect

    java = {"spark.driver.extraJavaOptions": SHORT_LIVED["spark.driver.extraJavaOptions"]}
    with SparkConnect(tmp_path_factory.mktemp("generated"), extra=java) as started:
        yield started


@pytest.fixture(scope="module")
def spark(spark_server: SparkConnect) -> Iterator[SparkSession]:
    """A session on it; every fixture of the tests below has this one."""
    from pyspark.sql import SparkSession

    from highwater.resources.spark import close, prepare

    session = prepare(SparkSession.builder.remote(spark_server.remote).create())
    yield session
    close(session)


taken = test_stages.taken


def test_fences_split_and_current_hold_on_generated_code(
    spark: SparkSession, taken: test_stages.Taken, bench: Bench, tmp_path: Path
) -> None:
    """One test of several, so that one worker alone starts this server."""
    ensure_generated(spark, tmp_path / "numbers")
    for holds in (
        test_stages.test_raw_holds_every_record_of_the_topic_byte_by_byte,
        test_stages.test_the_split_is_conserved_and_reported_by_reason,
        test_stages.test_whatever_is_not_exactly_the_declared_record_is_malformed,
        test_stages.test_current_follows_events_and_repeats_nothing,
        test_stages.test_a_late_starter_cannot_overwrite_a_younger_commit,
    ):
        holds(taken)
    test_run_history.test_another_record_under_the_mark_is_not_read(bench)


def ensure_generated(spark: SparkSession, path: Path) -> None:
    spark.range(9).write.parquet(str(path))
    plan = spark.sql(f"EXPLAIN CODEGEN SELECT id + 1 FROM parquet.`{path}` WHERE id > 3").collect()[0][0]
    assert "Found 1 WholeStageCodegen subtrees" in plan
    assert spark.conf.get("spark.sql.codegen.factoryMode") == "FALLBACK"
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    assert int(spark.conf.get("spark.sql.codegen.cache.maxEntries") or 100) > 2 * 140, "room for a slice's own queries"
