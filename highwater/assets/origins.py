"""Origins: where each record of raw was first published, also when it came back through a DLQ topic."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from highwater import envelope
from highwater.assets import discards_table, foreign, garbled_envelopes, reclaims
from highwater.assets.dlq_copies import COPIED_AT, with_copies
from highwater.balancing import combine_pairwise
from highwater.declaration_parts import TOPIC_NAME
from highwater.envelope import ORIGIN
from highwater.resources.delta import slice_is_one_of
from highwater.resources.offset_predicates import build_between, build_in_any
from highwater.resources.spark_tables import read_table_version
from highwater.routing import find_tier

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, WindowSpec

    from highwater.assets.commit import CommittedSlices
    from highwater.assets.work import Work
    from highwater.slices import Slice

# When an origin was published, in milliseconds since 1970: Kafka takes any number, and times have only some years.
MILLISECONDS = "origin_timestamp_ms"
# The same as a time, null outside of the years 1 to 9999, and as a number.
TIMESTAMP = ("origin_timestamp", MILLISECONDS)
# The table of what was published.
DLQ = "dlq"
# The problem of a record whose envelope cannot be read; it is rejected under the place where it lies.
PROBLEM = "envelope_problem"
SEEN = garbled_envelopes.EVENTS_SEEN
# For each slice what its decision rests on, as its slice commit has it.
Seen = Mapping[str, Mapping[str, int]]


def select_tier_slices(work: Work, slices: Sequence[Slice]) -> list[Slice]:
    """The slices that hold retries."""
    return [slice_ for slice_ in slices if slice_.topic != work.stream.topic]


def read_current_state(work: Work, slice_: Slice, events_version: int) -> dict[str, int]:
    """The inputs of a slice's decision beside the slice itself; for one of the main topic the reclaimed records."""
    reclaims_seen = reclaims.read_current_state(work)
    if slice_.topic == work.stream.topic:
        return reclaims_seen
    return {
        SEEN: events_version,
        **reclaims_seen,
        **discards_table.read_current_state(work),
        **foreign.read_current_state(work),
    }


def build_origin_predicate(places: pa.Table) -> str:
    """A predicate in SQL that holds for these origins, and in each partition for what lies between them.

    Args:
        places: the columns of `ORIGIN`, in their order; not empty.
    """
    *where, offset = ORIGIN
    [first], [last] = places.slice(0, 1).to_pylist(), places.slice(len(places) - 1).to_pylist()
    found = places.group_by(where).aggregate([(offset, "min"), (offset, "max")]).to_pylist()
    spans = ((*(one[name] for name in where), one[f"{offset}_min"], one[f"{offset}_max"] + 1) for one in found)
    # The first says the same more loosely, so that files and groups of rows are left unread.
    return f"{build_between(first, last)} AND {build_in_any(spans)}"


def with_origins(
    work: Work, raw: DataFrame, slices: Sequence[Slice], seen: Seen, published: Collection[str]
) -> DataFrame:
    """Raw rows with their origin, `retries` (how often they were classified before), `first_failed_at` and `reclaims`.

    `reclaims` is the number that a copy carries (`highwater.reclaims`); 0 on the main topic.

    Headers give an origin on tiers only: on the main topic anybody may write what they like into them.

    Args:
        work: the connections.
        raw: the rows.
        slices: the slices that they are of.
        seen: inputs of the decisions of slices of tiers.
        published: the slices with published records.
    """
    from pyspark.sql import DataFrame as Frame
    from pyspark.sql import functions as F

    theirs = [slice_ for slice_ in slices if slice_.topic in work.stream.foreign_topics]
    if not theirs:
        return _with_own_origins(work, raw, slices, seen, published)
    frames = [
        _with_foreign_origins(work, raw.where(F.col("slice") == slice_.key), slice_, seen, published)
        for slice_ in theirs
    ]
    if len(theirs) < len(slices):
        rest = [slice_ for slice_ in slices if slice_ not in theirs]
        slice_rows = raw.where(slice_is_one_of([slice_.key for slice_ in rest]))
        frames.append(_with_own_origins(work, slice_rows, rest, seen, published))
    return combine_pairwise(Frame.unionByName, frames)


def _build_place() -> dict[str, Column]:
    """A record's own place as its origin."""
    from pyspark.sql import functions as F

    return {
        "origin_topic": F.col("topic"),
        "origin_generation": F.col("generation"),
        "origin_partition": F.col("partition"),
        "origin_offset": F.col("offset"),
        "origin_timestamp": F.col("timestamp"),
        MILLISECONDS: F.col("timestamp_ms"),
        "retries": F.lit(0),
        "first_failed_at": F.lit(None).cast("timestamp"),
        reclaims.NUMBER: F.lit(0),
    }


def _with_own_origins(
    work: Work, raw: DataFrame, slices: Sequence[Slice], seen: Seen, published: Collection[str]
) -> DataFrame:
    """Rows of the main topic and of the tiers."""
    from pyspark.sql import functions as F

    own, ours, tiers = _build_place(), {foreign.LEFT: F.lit(False)}, select_tier_slices(work, slices)
    if not tiers:
        # Spark plans each call for longer than it evaluates a constant, so all that holds for any record is one call.
        return raw.withColumns({**ours, **own, PROBLEM: F.lit(None).cast("string")})
    on_tier = F.col("topic") != work.stream.topic
    marked = _with_problem(work, raw.withColumns(ours), on_tier, None, tiers, seen, published)
    sound = on_tier & F.col(PROBLEM).isNull()
    enveloped = _from_headers()
    return marked.withColumns(
        {
            name: F.when(sound, enveloped[name]).otherwise(_build_fallback_origin(work, name, column))
            for name, column in own.items()
        }
    )


def _with_foreign_origins(
    work: Work, raw: DataFrame, slice_: Slice, seen: Seen, published: Collection[str]
) -> DataFrame:
    """Rows of a slice of a foreign topic. If a record carries our envelope, only the envelope counts."""
    from pyspark.sql import functions as F

    marked = raw.withColumns(foreign.build_named_origin()).withColumn("enveloped", _has(envelope.ORIGIN_TOPIC))
    marked = _with_problem(work, marked, F.col("enveloped"), foreign.find_problem(), [slice_], seen, published)
    read = foreign.with_reader(work, marked, seen[slice_.key])
    namespace, sound = F.lit(work.stream.namespace), F.col(PROBLEM).isNull()
    place, from_us = _build_place(), _from_headers()
    place |= {"origin_topic": F.concat(namespace, "topic"), "retries": F.lit(1)}
    from_them = {
        **place,
        "origin_topic": F.when(F.col("reader").isNull(), F.concat(namespace, "named_topic")).otherwise(
            F.col("named_topic")
        ),
        "origin_generation": F.coalesce("reader", F.lit(0)),
        "origin_partition": F.col("named_partition"),
        "origin_offset": F.col("named_offset"),
        **_build_timestamp(F.coalesce("named_ms", "timestamp_ms")),
        # Such a copy carries no number: it is one of the publication that makes it a retry.
        reclaims.NUMBER: F.coalesce(foreign.PUBLISHED, F.lit(0)),
    }
    origins = {
        name: F.when(~sound, place[name]).when(F.col("enveloped"), from_us[name]).otherwise(from_them[name])
        for name in place
    }
    left = sound & ~F.col("enveloped") & F.col(foreign.LEFT)
    return read.withColumns({**origins, foreign.LEFT: left}).select(*raw.columns, *origins, PROBLEM, foreign.LEFT)


def _build_fallback_origin(work: Work, name: str, column: Column) -> Column:
    """The origin of a record without a sound envelope: its own place, and the tier's number as its retries."""
    from pyspark.sql import functions as F

    if name == "retries":
        for topic in work.stream.tier_topics:
            column = F.when(F.col("topic") == topic, find_tier(work.stream, topic)).otherwise(column)
    return column


def _decode_header(name: str) -> Column:
    """The text of the last header of this name; null without one, or when it is not UTF-8."""
    from pyspark.sql import functions as F

    values = F.transform(F.filter("headers", lambda h: h["key"] == name), lambda h: h["value"])
    value = F.try_element_at(values, F.lit(-1))
    return F.when(F.is_valid_utf8(value.cast("string")), value.cast("string"))


def _from_headers() -> dict[str, Column]:
    from pyspark.sql import functions as F

    failed_at = _decode_header(envelope.FIRST_FAILED_AT).try_cast("timestamp")
    return {
        "origin_topic": _decode_header(envelope.ORIGIN_TOPIC),
        "origin_generation": _decode_header(envelope.ORIGIN_GENERATION).try_cast("int"),
        "origin_partition": _decode_header(envelope.ORIGIN_PARTITION).try_cast("int"),
        "origin_offset": _decode_header(envelope.ORIGIN_OFFSET).try_cast("bigint"),
        **_build_timestamp(_decode_header(envelope.ORIGIN_TIMESTAMP).try_cast("bigint")),
        "retries": _decode_header(envelope.ATTEMPT).try_cast("int"),
        "first_failed_at": F.when(F.year(failed_at).between(1970, 9999), failed_at),
        reclaims.NUMBER: F.when(_has(envelope.RECLAIMS), _decode_header(envelope.RECLAIMS).try_cast("int")).otherwise(
            0
        ),
    }


def _has(name: str) -> Column:
    """Whether there is a header of this name."""
    from pyspark.sql import functions as F

    return F.coalesce(F.exists("headers", lambda h: h["key"] == name), F.lit(False))


def _build_timestamp(ms: Column) -> dict[str, Column]:
    """The columns of `TIMESTAMP` of a number."""
    from pyspark.sql import functions as F

    is_time = ms.between(envelope.MIN_MILLISECONDS, envelope.MAX_MILLISECONDS)
    return {"origin_timestamp": F.when(is_time, F.timestamp_millis(ms)), MILLISECONDS: ms}


def build_publication_time(work: Work) -> Column:
    """`highwater.foreign.find_publication_time` as an expression over rows of raw."""
    from pyspark.sql import functions as F

    enveloped = F.when(_find_envelope_problem(work).isNull(), _from_headers()[MILLISECONDS])
    named = foreign.build_named_origin()
    is_named = (
        named["named_topic"].isNotNull() & named["named_partition"].isNotNull() & named["named_offset"].isNotNull()
    )
    is_foreign = F.col("topic").isin(*work.stream.foreign_topics) & ~_has(envelope.ORIGIN_TOPIC)
    original = F.when(is_foreign, F.when(is_named, named["named_ms"])).otherwise(enveloped)
    return F.least("timestamp_ms", F.when(F.col("topic") != work.stream.topic, original))


def _with_problem(
    work: Work,
    rows: DataFrame,
    enveloped: Column,
    otherwise: Column | None,
    tiers: Sequence[Slice],
    seen: Seen,
    published: Collection[str],
) -> DataFrame:
    """Rows with `PROBLEM`: that of the envelope where there is one, else what else there is to be said."""
    from pyspark.sql import functions as F

    named = {name: column for name, column in _from_headers().items() if name in ORIGIN}
    marked = garbled_envelopes.with_early(work, rows, named, tiers, seen, [p.key for p in tiers if p.key in published])
    early = F.when(F.col(garbled_envelopes.EARLY), F.lit(garbled_envelopes.DETAIL))
    problem = F.when(enveloped, F.coalesce(_find_envelope_problem(work), early))
    return marked.withColumn(PROBLEM, problem if otherwise is None else problem.when(~enveloped, otherwise)).drop(
        garbled_envelopes.EARLY
    )


def _find_envelope_problem(work: Work) -> Column:
    """The reason why the envelope cannot be believed; null if it can."""
    from pyspark.sql import functions as F

    found = _from_headers()
    namespaced = f"^{re.escape(work.stream.namespace)}{TOPIC_NAME}\\z"
    most = envelope.MAX_COUNT
    numbers = {
        envelope.ORIGIN_GENERATION: found["origin_generation"].between(0, most),
        envelope.ORIGIN_PARTITION: found["origin_partition"] >= 0,
        envelope.ORIGIN_OFFSET: found["origin_offset"] >= 0,
        envelope.RECLAIMS: found[reclaims.NUMBER].between(0, most),
    }
    topic = found["origin_topic"]
    problems = [
        F.when(topic.isNull(), F.lit(f"header {envelope.ORIGIN_TOPIC} is missing")),
        F.when(
            ~topic.isin(*work.stream.all_topics) & ~topic.rlike(namespaced),
            F.lit(f"header {envelope.ORIGIN_TOPIC} names a topic of another stream"),
        ),
        *[
            F.when(~F.coalesce(sound, F.lit(False)), F.lit(f"header {name} is missing or no number from 0 on"))
            for name, sound in numbers.items()
        ],
        F.when(found[MILLISECONDS].isNull(), F.lit(f"header {envelope.ORIGIN_TIMESTAMP} is missing or no time in ms")),
        F.when(
            ~F.coalesce(found["retries"].between(1, most), F.lit(False)),
            F.lit(f"header {envelope.ATTEMPT} is missing or no number from 1 on"),
        ),
    ]
    return F.coalesce(*problems)


def with_fate(
    work: Work, rows: DataFrame, slices: Sequence[Slice], seen: Seen, published: CommittedSlices
) -> DataFrame:
    """Rows with what was published of them (columns `held_...`, null where nothing was), `elsewhere` and `superseded`.

    None is superseded as yet: `with_superseded` needs the reasons for that.

    A record that was published is left to the DLQ, whatever would become of it now (I5), unless it was reclaimed from
    there since. A tier's record is superseded where its origin was accepted `elsewhere`, or was discarded, or reclaimed
    since it was published. A record of another system is superseded while its main slice decides on the origin. Records
    published before the lake was lost and rebuilt count as published too, with `copied_at`.

    Computed for the events and again for the rejects of the same decision, from the same versions.

    Args:
        work: the connections.
        rows: raw rows with their origins.
        slices: the slices that the rows are of.
        seen: for each slice what its decision rests on: what was reclaimed by then and, of tiers, the version of
            events in which others' acceptance counts.
        published: the published rejects of them, in one version of the table.
    """
    from pyspark.sql import functions as F

    tiers = select_tier_slices(work, slices)
    nothing = {
        **{f"held_{name}": F.lit(None).cast(kind) for name, kind in HELD.items()},
        COPIED_AT: F.lit(None).cast("timestamp"),
        **dict.fromkeys((reclaims.STALE, discards_table.DISCARDED, "elsewhere", "superseded"), F.lit(False)),
    }
    stale = reclaims.with_stale(work, rows.withColumns(nothing), slices, seen)
    marked = _with_held(work, discards_table.with_discarded(work, stale, tiers, seen), published)
    held = with_copies(work, marked, slices, [*HELD])
    if not tiers:
        return held
    joined = held.join(_read_accepted_elsewhere(work, tiers, seen), ["slice", *ORIGIN], "left")
    gone = F.col("accepted").isNotNull() | F.col(foreign.LEFT) | F.col(reclaims.STALE) | F.col(discards_table.DISCARDED)
    elsewhere = gone & F.col("held_reason").isNull()
    return joined.withColumn("elsewhere", elsewhere).drop("accepted")


def with_superseded(work: Work, rows: DataFrame, slices: Sequence[Slice]) -> DataFrame:
    """Classified rows: of an origin that comes several times in a tier's slice all but one become `superseded`.

    The first that can be accepted, or the first of all if none can: a correction that lies after what it corrects must
    not be lost for it. A copy whose end is `elsewhere` never counts before one whose end is here.

    Args:
        work: the connections.
        rows: classified rows, with `elsewhere` and `superseded`.
        slices: the slices that the rows are of.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    if not select_tier_slices(work, slices):
        return rows
    refused = F.col("reason").isNotNull()
    same = Window.partitionBy("slice", *ORIGIN, F.col("value").isNull()).orderBy(
        "elsewhere", refused, "partition", "offset"
    )
    return rows.withColumn("superseded", F.col("elsewhere") | _is_repeated(work, same))


def filter_first_per_origin(work: Work, rows: DataFrame, slices: Sequence[Slice]) -> DataFrame:
    """Without an accepted row, the first of each origin: the rows that `with_superseded` leaves."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    if not select_tier_slices(work, slices):
        return rows
    again = _is_repeated(work, Window.partitionBy("slice", *ORIGIN).orderBy("partition", "offset"))
    return rows.withColumn("again", again).where(~F.col("again")).drop("again")


def _is_repeated(work: Work, same: WindowSpec) -> Column:
    from pyspark.sql import functions as F

    return (F.row_number().over(same) > 1) & (F.col("topic") != work.stream.topic)


HELD = {
    "reason": "string",
    "rule": "string",
    "detail": "string",
    "next_topic": "string",
    "first_failed_at": "timestamp",
}


def _with_held(work: Work, rows: DataFrame, published: CommittedSlices) -> DataFrame:
    from pyspark.sql import functions as F

    if not published.slice_commits:
        return rows
    there = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, DLQ), published.version)
    published_rejects = reclaims.with_reclaim_number(there.where(slice_is_one_of(published.slice_commits)))
    published_rows = published_rejects.select(
        "slice", *ORIGIN, *[F.col(name).alias(f"held_{name}") for name in (*HELD, reclaims.NUMBER)]
    )
    joined = rows.drop(*[f"held_{name}" for name in HELD]).join(published_rows, ["slice", *ORIGIN], "left")
    # A ledger that was lost has forgotten what was reclaimed; what was published since is left to the DLQ even so.
    number, main = F.coalesce("held_reclaims", F.lit(-1)), F.col("topic") == work.stream.topic
    holds = (number == F.col(reclaims.NUMBER)) | (main & (number > F.col(reclaims.NUMBER)))
    held_columns = {f"held_{name}": F.when(holds, F.col(f"held_{name}")) for name in HELD}
    held_columns[reclaims.NUMBER] = F.when(holds, number).otherwise(F.col(reclaims.NUMBER))
    return joined.withColumns(held_columns).drop("held_reclaims")


def _read_accepted_elsewhere(work: Work, tiers: Sequence[Slice], seen: Seen) -> DataFrame:
    """For each slice of a tier the origins that were in events of other slices when it was decided."""
    from pyspark.sql import DataFrame as Frame
    from pyspark.sql import functions as F

    path = work.lake.build_table_path(work.stream.name, "events")
    yes = F.lit(True).alias("accepted")
    found = [
        read_table_version(work.spark, path, seen[slice_.key][SEEN])
        .where(F.col("slice") != slice_.key)
        .select(F.lit(slice_.key).alias("slice"), *ORIGIN, yes)
        .distinct()
        for slice_ in tiers
    ]
    return combine_pairwise(Frame.unionByName, found)
