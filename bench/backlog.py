"""(a), (b), (c), (g), (i): a backlog, beside Structured Streaming, a bare read, a skewed topic, and in small slices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench.harness import Result, Row, Target, Variant, alternate, measure_seconds
from bench.world import Bed, World, build_last_slices, build_source_options, build_whole_slice, fill_topic
from highwater.assets import current, events, parsing, raw, rejects, slice_classification
from highwater.assets.classified import SharedFrames
from highwater.assets.concurrent_stages import ConcurrentStages
from highwater.assets.origins import with_origins
from highwater.assets.work import do_nothing
from highwater.resources.spark import prepare
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.slices import Slice

BATCHES = (1, 4, 20)
# A stream that writes four tables a batch takes minutes for twenty: the whole path is measured at both ends only.
ENDS = (1, 20)
# The peer that raw is compared with, and what it sets otherwise than Spark does: Kafka's own default.
BY_DEFAULT = "Spark's read into nothing"
SPARKS_POLLS = {"kafka.max.poll.records": "500"}
KAFKA = "topic", "partition", "offset", "timestamp", "timestampType AS timestamp_type", "key", "value", "headers"


def compare_raw_with_streaming(world: World, rounds: int, records: int) -> Result:
    """(a) A backlog to `raw`, in one range run, against micro-batches of the slices' size into Delta."""
    stream = fill_topic(world, "bench-a", max(BATCHES) * records)

    def ours(bed: Bed, some_slices: list[Slice]) -> None:
        raw.materialise(world.work(bed, some_slices))

    def prepare(bed: Bed, some_slices: list[Slice]) -> None:
        _create_raw(world, bed, some_slices)

    rows = [_compare(world, stream, n, records, rounds, ours, _stream_raw, prepare) for n in BATCHES]
    return Result(
        name="a",
        title="A backlog to raw, against Structured Streaming",
        method=(
            f"{records:,} records a slice, into existing empty tables. Highwater takes the slices in one run; the "
            "stream takes a micro-batch a slice (`availableNow`, `maxOffsetsPerTrigger`)."
        ),
        rows=rows,
        targets=[
            Target("times as fast at 1 batch", rows[0].ratio("Highwater", "Structured Streaming"), 1.1),
            Target("times as fast at 20 batches", rows[-1].ratio("Highwater", "Structured Streaming"), 4.0),
        ],
    )


Action = Callable[[Bed, "list[Slice]"], object]


def _prepare_round(
    world: World, stream: Any, slices: int, records: int, action: Action, prepare: Action | None = None
) -> Variant:
    """The work that takes slices into a lake of its own; preparing it is not timed."""

    def run(_: int) -> float:
        bed = world.fresh(stream)
        some_slices = build_last_slices(world, bed, slices, records)
        if prepare is not None:
            prepare(bed, some_slices)
        took = measure_seconds(lambda: action(bed, some_slices))
        bed.remove()
        return took

    return run


def _compare(
    world: World, stream: Any, n: int, records: int, rounds: int, ours: Action, peer: Any, prepare: Action | None = None
) -> Row:
    variants = {
        "Highwater": _prepare_round(world, stream, n, records, ours, prepare),
        "Structured Streaming": _prepare_round(
            world, stream, n, records, lambda bed, some_slices: peer(world, bed, some_slices, records), prepare
        ),
    }
    return alternate(f"{n} batches", variants, rounds)


def _create_raw(world: World, bed: Bed, some_slices: list[Slice]) -> None:
    """Empty tables for both sides: a table is created once, and backlogs come again and again.

    To either the driver has committed once, so it knows them: ours holds a slice without records.
    """
    nothing = {p: OffsetRange(0, 0) for p in some_slices[0].ranges}
    first = replace(some_slices[0], ordinal=len(some_slices), ranges=nothing, fingerprints={})
    bed.ledger.add([first])
    raw.materialise(world.work(bed, [first]))
    empty = (
        world.spark.read.format("kafka")
        .options(**build_source_options(world, bed.stream.topic, some_slices))
        .load()
        .limit(0)
    )
    empty.selectExpr(*KAFKA).write.format("delta").save(bed.lake.build_table_path("peer", "raw"))


def _stream_raw(world: World, bed: Bed, some_slices: list[Slice], records: int) -> None:
    query = (
        world.spark.readStream.format("kafka")
        .options(**build_source_options(world, bed.stream.topic, some_slices), maxOffsetsPerTrigger=str(records))
        .load()
        .selectExpr(*KAFKA)
        .writeStream.format("delta")
        .option("checkpointLocation", str(bed.home / "checkpoint"))
        .trigger(availableNow=True)
        .start(bed.lake.build_table_path("peer", "raw"))
    )
    query.awaitTermination()


def compare_raw_with_bare_reads(world: World, rounds: int, records: int) -> Result:
    """(b) One slice to `raw`, against Spark's read into nothing and against a bare consumer."""
    stream = fill_topic(world, "bench-b", records)

    def variant(action: Action) -> Variant:
        return _prepare_round(
            world, stream, 1, records, action, lambda bed, some_slices: _create_raw(world, bed, some_slices)
        )

    row = alternate(
        f"{records:,} records",
        {
            "Highwater raw": variant(lambda bed, some_slices: raw.materialise(world.work(bed, some_slices))),
            BY_DEFAULT: variant(lambda bed, some_slices: _read_into_nothing(world, bed, some_slices, **SPARKS_POLLS)),
            "the same, with raw's options": variant(
                lambda bed, some_slices: _read_into_nothing(world, bed, some_slices)
            ),
            "Spark's read appended to Delta": variant(
                lambda bed, some_slices: _read_into_delta(world, bed, some_slices)
            ),
            "bare librdkafka": variant(lambda bed, some_slices: _consume(world, bed, some_slices)),
        },
        rounds,
    )
    return Result(
        name="b",
        title="Raw, against reads that write nothing",
        method=("One slice, as in (a). The first read has Spark's default polling. librdkafka counts in one process."),
        rows=[row],
        targets=[
            Target("of the speed of Spark's read", row.ratio("Highwater raw", BY_DEFAULT), 0.7),
            Target("of the speed of a plain append", row.ratio("Highwater raw", "Spark's read appended to Delta"), 0.9),
        ],
    )


def _read_into_nothing(world: World, bed: Bed, some_slices: list[Slice], **options: str) -> None:
    _read_barely(world, bed, some_slices, **options).write.format("noop").mode("overwrite").save()


def _read_into_delta(world: World, bed: Bed, some_slices: list[Slice]) -> None:
    _read_barely(world, bed, some_slices).write.format("delta").mode("append").save(
        bed.lake.build_table_path("peer", "raw")
    )


def _read_barely(world: World, bed: Bed, some_slices: list[Slice], **others: str) -> DataFrame:
    import json

    topic = bed.stream.topic
    ends = json.dumps({topic: {str(p): r.end for p, r in some_slices[-1].ranges.items()}})
    options = {**build_source_options(world, topic, some_slices), "endingOffsets": ends, **others}
    return world.spark.read.format("kafka").options(**options).load().selectExpr(*KAFKA)


def _consume(world: World, bed: Bed, some_slices: list[Slice]) -> None:
    found = sum(1 for _ in world.kafka().read(bed.stream.topic, some_slices[0].ranges))
    if found != some_slices[0].offsets:
        raise RuntimeError(f"read {found} of {some_slices[0].offsets} records")


def compare_whole_path(world: World, rounds: int, records: int) -> Result:
    """(c) Raw, events, rejects and current, against a `foreachBatch` stream that writes the same tables."""
    stream = fill_topic(world, "bench-c", max(BATCHES) * records)

    def ours(bed: Bed, some_slices: list[Slice]) -> None:
        _take(world, bed, some_slices)

    rows = [_compare(world, stream, n, records, rounds, ours, _stream_everything) for n in ENDS]
    return Result(
        name="c",
        title="The whole path, against foreachBatch",
        method=(
            f"{records:,} records a slice, through raw, events, rejects and current. The stream has the same "
            "expressions, `txnAppId` and `txnVersion`, merges into one row a key, and generates code, as is Spark's "
            "default."
        ),
        rows=rows,
        targets=[
            Target("times as fast at 1 batch", rows[0].ratio("Highwater", "Structured Streaming"), 1.0),
            Target("times as fast at 20 batches", rows[-1].ratio("Highwater", "Structured Streaming"), 5.5),
        ],
    )


def _stream_everything(
    world: World, bed: Bed, some_slices: list[Slice], records: int, began: Callable[[], object] = do_nothing
) -> None:
    def each(batch: DataFrame, number: int) -> None:
        began()
        _write_batch(world, bed, batch, number)

    (
        world.spark.readStream.format("kafka")
        .options(**build_source_options(world, bed.stream.topic, some_slices), maxOffsetsPerTrigger=str(records))
        .load()
        .selectExpr(*KAFKA)
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(bed.home / "checkpoint"))
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


def _write_batch(world: World, bed: Bed, batch: DataFrame, number: int) -> None:
    from pyspark.sql import functions as F

    batch.persist()
    _append(bed, batch, "raw", number)
    named = batch.withColumns(
        {"slice": F.lit(str(number)), "generation": F.lit(0), "timestamp_ms": F.unix_millis("timestamp")}
    )
    work = world.work(bed, [])
    parsed = parsing.parse_records(work, with_origins(work, named.where("value IS NOT NULL"), [], {}, ())).persist()
    accepted = parsed.where("reason IS NULL").select(
        *slice_classification.build_origin_columns({str(number): number}),
        *slice_classification.build_event_columns(bed.stream),
    )
    _append(bed, accepted, "events", number)
    rejected = parsed.where("reason IS NOT NULL")
    _append(bed, rejected.select("topic", "partition", "offset", "reason", "detail", "key", "value"), "rejects", number)
    _merge(bed, current.select_winners(accepted, "key"), first=number == 0)
    parsed.unpersist()
    batch.unpersist()


def _append(bed: Bed, rows: DataFrame, table: str, number: int) -> None:
    options = {"txnAppId": "peer", "txnVersion": str(number)}
    rows.write.format("delta").mode("append").options(**options).save(bed.lake.build_table_path("peer", table))


def _merge(bed: Bed, rows: DataFrame, *, first: bool) -> None:
    path = bed.lake.build_table_path("peer", "current")
    if first:
        rows.limit(0).write.format("delta").save(path)
    rows.createOrReplaceTempView("newer")
    rows.sparkSession.sql(  # a batch has a session of its own
        f"MERGE INTO delta.`{path}` t USING newer s ON t.key = s.key "
        "WHEN MATCHED AND s.version > t.version THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )


SIZES = (1_000, 10_000, 100_000, 400_000)
# Of the smallest size, against the peer: one of each to begin with, and then these; one of them writes a checkpoint.
MICRO_BATCHES = 10


def measure_slice_sizes(world: World, rounds: int, records: int) -> Result:
    """(i) One slice through all tables, at several sizes, and small slices against micro-batches."""
    del records
    stream, smallest = fill_topic(world, "bench-i", max(SIZES)), min(SIZES)

    def variant(size: int) -> Variant:
        return _prepare_round(world, stream, 1, size, lambda bed, some_slices: _take(world, bed, some_slices))

    row = alternate("one slice", {f"{size:,} records": variant(size) for size in SIZES}, rounds)
    variants = {
        "Highwater": lambda _: _measure_slice_seconds(world, stream, smallest),
        "foreachBatch": lambda _: _measure_micro_batch_seconds(world, stream, smallest),
    }
    again = alternate(f"{smallest:,} records, existing tables", variants, rounds)
    return Result(
        name="i",
        title="The size of a slice",
        method=(
            "One slice through raw, events, rejects and current, into new tables. Then slices of "
            f"{smallest:,} in runs of their own, against micro-batches of (c) after the first."
        ),
        rows=[row, again],
        targets=[
            Target(
                "micro-batches that take as long as a slice",
                1 / again.ratio("Highwater", "foreachBatch"),
                0.9,
                at_least=False,
            )
        ],
    )


def _measure_slice_seconds(world: World, stream: Any, records: int) -> float:
    """Mean seconds of several slices where the tables are there."""
    bed = world.fresh(stream)
    first, *others = build_last_slices(world, bed, 1 + MICRO_BATCHES, records)
    _take(world, bed, [first])
    begin = time.perf_counter()
    for slice_ in others:
        _take(world, bed, [slice_])
    took = time.perf_counter() - begin
    bed.remove()
    return took / MICRO_BATCHES


def _measure_micro_batch_seconds(world: World, stream: Any, records: int) -> float:
    """Mean seconds from the beginning of the peer's micro-batch to that of the next one."""
    bed = world.fresh(stream)
    begins: list[float] = []
    some_slices = build_last_slices(world, bed, 2 + MICRO_BATCHES, records)
    _stream_everything(world, bed, some_slices, records, began=lambda: begins.append(time.perf_counter()))
    bed.remove()
    return (begins[-1] - begins[1]) / MICRO_BATCHES


def _take(world: World, bed: Bed, some_slices: list[Slice]) -> None:
    """The steps of a run, which opens a session for a MERGE of Spark beside another stage."""
    work = replace(world.work(bed, some_slices), classified=SharedFrames())
    raw.materialise(work)
    events.materialise(work)
    concurrent = ConcurrentStages()
    concurrent.start("rejects", rejects.materialise, work)
    current.materialise(replace(work, open_own_session=lambda: prepare(world.spark.newSession())))
    assert concurrent.take("rejects", work) is not None


def compare_skewed_topic(world: World, rounds: int, records: int) -> Result:
    """(g) One slice of a topic that holds 90 % in one partition, against an even one."""
    even, skewed = fill_topic(world, "bench-g-even", records), fill_topic(world, "bench-g-skewed", records, skewed=True)

    def variant(stream: Any) -> Variant:
        def run(_: int) -> float:
            bed = world.fresh(stream)
            slice_ = build_whole_slice(world, bed)
            took = measure_seconds(lambda: raw.materialise(world.work(bed, [slice_])))
            bed.remove()
            return took

        return run

    row = alternate(f"{records:,} records", {"even": variant(even), "90 % in one": variant(skewed)}, rounds)
    return Result(
        name="g",
        title="A skewed partition, against an even topic",
        method=("One slice to raw. Reads are cut by records, not by partition: 8 tasks up to two million records."),
        rows=[row],
        targets=[
            Target(
                "seconds of the skewed one in those of the even one",
                1 / row.ratio("90 % in one", "even"),
                1.3,
                at_least=False,
            )
        ],
    )
