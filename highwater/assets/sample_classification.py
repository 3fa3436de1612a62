"""Classifies the sample of `highwater try` by Spark, as a run would; commits nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from highwater.assets.expressions import GUARDED
from highwater.assets.origins import PROBLEM
from highwater.assets.parsing import build_key, is_tombstone, parse_records
from highwater.classifying import Classification
from highwater.errors import ConfigurationError
from highwater.resources.session_settings import session_settings
from highwater.resources.spark import delta_errors

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.second_reader import KafkaRecord

_COLUMNS = (
    "place INT, key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, origin_topic STRING, "
    "origin_partition INT, origin_offset BIGINT, origin_timestamp_ms BIGINT"
)


def classify_records(work: Work, records: Sequence[KafkaRecord]) -> list[Classification]:
    """The classification of records, with expressions, rules and lookups, but without the values of fields.

    Args:
        work: the connections; no slices.
        records: records of the stream's topic.

    Returns:
        The outcome of each record, in their order.

    Raises:
        ConfigurationError: an expression cannot be computed, or the lookup's table does not fit.
        DependencyUnavailableError: Spark, the registry or the lake is unavailable.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    rows: list[Any] = [
        (at, one.key, one.value, [*one.headers], one.topic, one.partition, one.offset, one.timestamp_ms)
        for at, one in enumerate(records)
    ]
    if not rows:
        return []
    raw = work.spark.createDataFrame(cast("Any", rows), _COLUMNS).withColumn(PROBLEM, F.lit(None).cast("string"))
    tombstone = is_tombstone(work.stream).alias("tombstone")
    found = parse_records(work, raw, guarded=True).select(
        "place", "reason", "rule", "detail", "deleted", build_key(work.stream).alias("whole_key"), tombstone
    )
    try:
        with delta_errors(f"the sample of {work.stream.topic}"), session_settings(work.spark, GUARDED):
            collected = found.collect()
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark could not classify the sample of {work.stream.topic}",
            found=str(error).splitlines()[0][:300],
            remedy="correct the expressions and rules",
        ) from error
    return [_build_classification(row) for row in sorted(collected, key=lambda row: row["place"])]


def _build_classification(row: Any) -> Classification:
    if row["tombstone"]:
        return Classification("tombstone")
    if row["reason"] is not None:
        return Classification("reject", row["reason"], row["detail"], rule=row["rule"])
    return Classification("delete" if row["deleted"] else "event", key=row["whole_key"])
