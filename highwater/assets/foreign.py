"""Foreign origins in Spark: which record of the main topic a record is of that another system rejected."""

# An origin that slices of the main topic read, or will read, is theirs until they publish it (I5): before that the
# record is left to them. One that none of them ever reads has a namespace of its own.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from highwater import envelope, foreign
from highwater.assets import reclaims
from highwater.declaration_parts import TOPIC_NAME
from highwater.envelope import MAX_MILLISECONDS, ORIGIN
from highwater.plans import Planned
from highwater.resources.spark_tables import read_table_version

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.plans import Generation, Loss
    from highwater.resources.ledger import Ledger

# Inputs of a decision, in the slice commit of a foreign topic's slice: its rejects are computed from the same inputs.
DLQ_SEEN = "dlq_seen"
GENERATIONS_SEEN = "generations_seen"
LOSSES_SEEN = "losses_seen"
# A record whose origin is still its main slice's.
LEFT = "left_to_main"
# How often its origin was reclaimed when it was published; null where it was not.
PUBLISHED = "published_reclaims"


def read_current_state(work: Work) -> dict[str, int]:
    """The inputs of the decision of a foreign topic's slice, beside the events of others."""
    published = work.lake.open_stream_table(work.stream.name, "dlq")
    where = (work.stream.name, work.stream.topic)
    return {
        DLQ_SEEN: -1 if published is None else published.version(),
        GENERATIONS_SEEN: len(work.ledger.topics.list_generations(*where)),
        LOSSES_SEEN: len(work.ledger.list_losses(*where)),
    }


def read_main_log(ledger: Ledger, stream: Stream, seen: Mapping[str, int] | None = None) -> foreign.MainLog:
    """The main topic's log, with the generations and losses that were seen; all of today if that is None."""
    generations = ledger.topics.list_generations(stream.name, stream.topic)
    losses = ledger.list_losses(stream.name, stream.topic)
    if seen is not None:
        generations, losses = generations[: seen[GENERATIONS_SEEN]], losses[: seen[LOSSES_SEEN]]
    return foreign.MainLog(generations, losses, _read_closed_ends(ledger, stream, generations[:-1], losses))


def _read_closed_ends(
    ledger: Ledger, stream: Stream, closed: Sequence[Generation], losses: Sequence[Loss]
) -> dict[int, Mapping[int, int]]:
    """The ends of the plans of generations that are not planned any more."""
    last = {slice_.generation: slice_ for slice_ in ledger.list_slices(stream.name, stream.topic)} if closed else {}
    return {one.number: Planned.from_generation(one, last.get(one.number), losses).ends for one in closed}


def build_named_origin() -> dict[str, Column]:
    """The origin that foreign headers name: topic, partition, offset and its time in ms; null where they do not."""
    from pyspark.sql import functions as F

    system = _extract_system_header()
    own_time = F.when(F.col("timestamp_type") == foreign.BY_PRODUCER, F.col("timestamp_ms"))
    topic, partition, offset, time = [F.lit(None) for _ in range(4)]
    for prefix in (*foreign.AS_TEXT, *foreign.AS_BYTES):
        theirs, as_text = system == prefix + foreign.TOPIC, prefix in foreign.AS_TEXT
        topic = F.when(theirs, _extract_topic_name(prefix + foreign.TOPIC)).otherwise(topic)
        partition = F.when(theirs, _read_number_header(prefix + foreign.PARTITION, 4, as_text=as_text)).otherwise(
            partition
        )
        offset = F.when(theirs, _read_number_header(prefix + foreign.OFFSET, 8, as_text=as_text)).otherwise(offset)
        time = F.when(theirs, own_time if as_text else _from_bytes(prefix + foreign.TIMESTAMP, 8)).otherwise(time)
    return {
        "named_topic": topic,
        "named_partition": partition.try_cast("int"),
        "named_offset": offset,
        "named_ms": _convert_time(time),
    }


def _extract_system_header() -> Column:
    """The header by which the system that wrote first names the topic; null where none of them wrote."""
    from pyspark.sql import functions as F

    theirs = F.filter("headers", lambda h: h["key"].isin(*foreign.TOPICS))
    return F.try_element_at(F.transform(theirs, lambda h: h["key"]), F.lit(1))


def _extract_first_header(name: str) -> Column:
    """The value of the first header of this name, as bytes."""
    from pyspark.sql import functions as F

    values = F.transform(F.filter("headers", lambda h: h["key"] == name), lambda h: h["value"])
    return F.try_element_at(values, F.lit(1))


def _extract_topic_name(name: str) -> Column:
    from pyspark.sql import functions as F

    text = _extract_first_header(name).cast("string")
    return F.when(text.rlike(f"^{TOPIC_NAME}\\z"), text)


def _read_number_header(name: str, length: int, *, as_text: bool) -> Column:
    return _from_text(name) if as_text else _from_bytes(name, length)


def _from_text(name: str) -> Column:
    from pyspark.sql import functions as F

    text = _extract_first_header(name).cast("string")
    return F.when(text.rlike(f"^{foreign.NUMBER}\\z"), text.try_cast("bigint"))


def _from_bytes(name: str, length: int) -> Column:
    """A big-endian number of this many bytes; null for one below 0."""
    from pyspark.sql import functions as F

    value = _extract_first_header(name)
    # A longer value is cut to fit, since converting a number that does not fit would fail the query.
    digits = F.substring(F.hex(value), 1, 2 * length)
    positive = digits.rlike("^[0-7]")
    return F.when((F.length(value) == length) & positive, F.conv(digits, 16, 10).try_cast("bigint"))


def _convert_time(milliseconds: Column) -> Column:
    from pyspark.sql import functions as F

    return F.when(milliseconds.between(0, MAX_MILLISECONDS), milliseconds)


def find_problem() -> Column:
    """The reason why foreign headers name no origin; null if they do."""
    from pyspark.sql import functions as F

    none = F.lit(f"no header {', '.join(foreign.TOPICS)} or {envelope.ORIGIN_TOPIC} says whence it came")
    garbled = F.lit(" and its like name no topic, partition and offset")
    text = F.coalesce(F.concat(F.lit("header "), _extract_system_header(), garbled), none)
    names = ("named_topic", "named_partition", "named_offset")
    return F.when(reduce(or_, [F.col(name).isNull() for name in names]), text)


def with_reader(work: Work, rows: DataFrame, seen: Mapping[str, int]) -> DataFrame:
    """Add `reader`: the generation of the main topic that reads the origin, or null.

    The rows have the columns of `build_named_origin`. Also adds `LEFT`, whether that generation's slices have not
    published the origin yet, so that it is theirs, and `PUBLISHED`.

    Args:
        work: the connections.
        rows: rows of one slice of a foreign topic.
        seen: inputs of its decision.
    """
    from pyspark.sql import functions as F

    log = read_main_log(work.ledger, work.stream, seen)
    spans = [tuple(span) for span in log.compute_unread_spans()]
    elsewhere = work.spark.createDataFrame(
        spans,
        "in_generation INT, in_partition INT, from_offset BIGINT, to_offset BIGINT, other_reader INT",
    )
    marked = rows.withColumn(
        "named_generation", F.when(F.col("named_topic") == work.stream.topic, _find_open_offset(log))
    )
    inside = (
        (F.col("named_generation") == F.col("in_generation"))
        & (F.col("named_partition") == F.col("in_partition"))
        & (F.col("named_offset") >= F.col("from_offset"))
        & (F.col("to_offset").isNull() | (F.col("named_offset") < F.col("to_offset")))
    )
    moved = F.when(F.col("in_generation").isNotNull(), F.col("other_reader")).otherwise(F.col("named_generation"))
    found = marked.join(F.broadcast(elsewhere), inside, "left").withColumn("reader", moved).drop(*elsewhere.columns)
    return _with_left(work, found, seen[DLQ_SEEN])


def _find_open_offset(log: foreign.MainLog) -> Column:
    """`MainLog.find_open_offset` as an expression."""
    from pyspark.sql import functions as F

    time = F.col("named_ms")
    moment = F.coalesce(time, "timestamp_ms")
    first = log.generations[0].number if log.generations else None
    # The youngest first; one chain, not one condition in the other: there may be many.
    found = F.when(F.lit(False), None)
    for one in reversed(log.generations[1:]):
        opened = moment >= foreign.to_milliseconds(one.opened_at)
        found = found.when(opened, F.when(time.isNotNull(), F.lit(one.number)))
    return found.otherwise(F.lit(first)).cast("int")


def _with_left(work: Work, rows: DataFrame, version: int) -> DataFrame:
    """A record is its main slice's while that has not published its origin: then it is a retry like any other.

    The time that its headers name must be that of the record that was published: after a topic was recreated, and
    before somebody accepts that, other records come by the same offsets.
    """
    from pyspark.sql import functions as F

    ours = F.col("reader").isNotNull()
    if version < 0:
        return rows.withColumns({LEFT: ours, PUBLISHED: F.lit(None).cast("int")})
    published = (
        reclaims.with_reclaim_number(
            read_table_version(work.spark, work.lake.build_table_path(work.stream.name, "dlq"), version)
        )
        .where(F.col("origin_topic") == work.stream.topic)
        .groupBy(*[F.col(name).alias(f"published_{name}") for name in ORIGIN[1:]])
        .agg(
            F.collect_set("origin_timestamp_ms").alias("published_ms"),
            F.max(reclaims.NUMBER).alias(PUBLISHED),
        )
    )
    same = (
        (F.col("reader") == F.col("published_origin_generation"))
        & (F.col("named_partition") == F.col("published_origin_partition"))
        & (F.col("named_offset") == F.col("published_origin_offset"))
    )
    agrees = F.col("named_ms").isNull() | F.array_contains("published_ms", F.col("named_ms"))
    joined = rows.join(published, same, "left")
    return joined.withColumn(LEFT, ours & ~F.coalesce(agrees & F.col("published_ms").isNotNull(), F.lit(False))).drop(
        *[name for name in published.columns if name != PUBLISHED]
    )
