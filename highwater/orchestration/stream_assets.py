"""The assets of a stream, made from its declaration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dagster as dg

from highwater.errors import ConfigurationError, UnknownSliceError
from highwater.log_fields import fields, of_slices
from highwater.orchestration import metadata
from highwater.orchestration.dependencies import guards_of, see_lake_there
from highwater.orchestration.failures import told_to_dagster
from highwater.orchestration.lineage import lineage_of
from highwater.orchestration.partitions import slices_of
from highwater.orchestration.resources import schemas
from highwater.orchestration.sensing.breaking import watched
from highwater.resources.guards import guarded
from highwater.routing import reads
from highwater.tables import stages_of, tables_of

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport, Work
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

Stage = Callable[["Work"], "list[SliceReport]"]

# The tag by which runs and assets of one stream are found.
STREAM_TAG = "highwater/stream"
# Runs that dagster.yaml bounds for each stream, by its name: those of slices of tiers, and those of slices of the main
# topic, so that however long a backlog is, a place is left for what is retried or published.
TIER_TAG = "highwater/tier"
MAIN_TAG = "highwater/main"


@dataclass(frozen=True)
class Table:
    """One asset of a stream.

    Args:
        name: the table's name, and the last part of the asset's key.
        what: one sentence for the asset's page.
        above: the tables that it is made from; `kafka` is the topic.
        pool: whether runs take turns here.
        engine: what computes it.
        spark: whether a session is opened for it.
        kinds: what else it is made of, beside Delta.
    """

    name: str
    what: str
    above: tuple[str, ...]
    pool: bool = False
    engine: str = "spark"
    spark: bool = True
    kinds: frozenset[str] = frozenset()

    def stage(self) -> Stage:
        """The function that materialises it, imported when a run needs it."""
        from importlib import import_module

        stage: Stage = import_module(f"highwater.assets.{self.name}").materialise
        return stage


# What every stream has.
TABLES = (
    Table("raw", "Every record of a slice as Kafka gave it: nothing parsed, nothing dropped.", ("kafka",)),
    Table("events", "The records that were parsed, validated and resolved.", ("raw",)),
    Table("rejects", "The records that were not, each with its reason and its origin.", ("raw", "events")),
    Table("dlq", "Which of the rejects were published, and where to: to a tier for a retry, or parked.", ("rejects",)),
    # Two merges into one table conflict, so they take turns.
    Table("current", "One row a key: the event with the highest version.", ("events",), pool=True),
)

# Commits follow each other anyway; in turn they compute nothing in vain.
METRICS = Table(
    "metrics",
    "One row a minute of event time: events and amounts by status, and the mean amount over a moving hour.",
    ("events", "current"),
    pool=True,
    engine="python",
)

# No part of the job that takes slices through the tables: it follows the prefix of slices that are done.
PUBLISHED = Table(
    "published",
    "Which events were sent to the topic of accepted events, each once and in the order of its origin.",
    ("events", "dlq"),
    pool=True,
    engine="python",
    spark=False,
    kinds=frozenset({"kafka"}),
)


BY_NAME = {table.name: table for table in (*TABLES, METRICS, PUBLISHED)}


def slice_job_name(stream: "Stream") -> str:
    """The job that takes slices of a stream through its tables."""
    return f"{stream.name}_slice"


def publish_job_name(stream: "Stream") -> str:
    """The job that sends a stream's accepted events."""
    return f"{stream.name}_publish"


def topic_key(stream: "Stream") -> dg.AssetKey:
    """The key of the external asset that stands for the topic."""
    return dg.AssetKey(["kafka", stream.topic])


def table_key(stream: "Stream", table: str) -> dg.AssetKey:
    """The key of a table's asset."""
    return dg.AssetKey([stream.name, table])


def table_keys(stream: "Stream") -> list[dg.AssetKey]:
    """The keys of the tables that a run takes its slices through, upstream first."""
    return [table_key(stream, name) for name in stages_of(stream)]


def topic_spec(stream: "Stream") -> dg.AssetSpec:
    """The topic, as the asset that Highwater reads and does not make."""
    return dg.AssetSpec(
        topic_key(stream),
        group_name=stream.name,
        kinds={"kafka"},
        owners=[stream.owner],
        tags={STREAM_TAG: stream.name},
        description=metadata.description(stream, f"The Kafka topic `{stream.topic}`."),
        metadata=metadata.of_stream(stream),
    )


def table_assets(stream: "Stream") -> list[dg.AssetsDefinition]:
    """The tables of a stream."""
    return [_table_asset(stream, BY_NAME[name]) for name in tables_of(stream)]


def _table_asset(stream: "Stream", table: Table) -> dg.AssetsDefinition:
    key = table_key(stream, table.name)
    # `dg.asset` would repeat the description in the op, and so in the snapshot of each job.
    spec = dg.AssetSpec(
        key,
        deps=[topic_key(stream) if name == "kafka" else table_key(stream, name) for name in table.above],
        group_name=stream.name,
        kinds={table.engine, "deltalake", *table.kinds},
        owners=[stream.owner],
        tags={STREAM_TAG: stream.name},
        description=metadata.description(stream, table.what),
        metadata=metadata.of_stream(stream),
    )

    @dg.multi_asset(
        name="__".join(key.path),
        specs=[spec],
        partitions_def=slices_of(stream),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=f"{stream.name}_{table.name}" if table.pool else None,
        required_resource_keys={"kafka", "ledger", "lake", *(["spark"] if table.spark else [])},
    )
    def materialise(context: dg.AssetExecutionContext) -> None:
        materialise_slices(context, stream, table)

    return materialise


def materialise_slices(context: dg.AssetExecutionContext, stream: "Stream", table: Table) -> None:
    """Take all slices of the run through one stage together, and tell Dagster of each.

    One result marks every slice of the run as materialised, so a stage commits all of them or raises.
    """
    from highwater.orchestration.checking.blocking import see_not_blocked
    from highwater.orchestration.sensing.turns import see_in_turn

    tries = context.op_execution_context.retry_number
    named = fields(stream=stream.name, table=table.name, **of_slices(context.partition_keys))
    with named, told_to_dagster(tries, context.resources.spark.interrupt if table.spark else nothing):
        see_not_blocked(context.instance, stream, table.name, context.partition_keys)
        work = _work(context, stream, context.partition_keys, spark=table.spark)
        guards = guards_of(table.name, work.ledger, work.kafka, work.lake, stream)
        with lineage_of(work, table, context.run.job_name) as report_lineage:
            with watched(work, table.name, tries), guarded(*guards):
                see_lake_there(work.ledger, work.lake)
                see_in_turn(work, table.name)
                reports = table.stage()(work)
            _see_all_reported(work.keys, reports)
            report_lineage(reports)
        breaker, holds = work.ledger.breakers.circuit(stream.name), work.ledger.holds.open(stream.name)
        of_stream = {**metadata.of_breaker(breaker), **metadata.of_holds(stream, holds)}
        for report in reports:
            found = {**metadata.of_slice(report, len(reports)), **of_stream}
            context.add_asset_metadata(found, partition_key=report.piece.key)


def nothing() -> None:
    """Stop nothing: no work goes on elsewhere."""


def _work(context: dg.AssetExecutionContext, stream: "Stream", keys: Sequence[str], *, spark: bool) -> "Work":
    slices = planned(context.resources.ledger.open(), stream, keys)
    context.log.info(
        "%s slices of %s, %s offsets: %s", len(slices), stream.name, f"{sum(s.offsets for s in slices):,}", _span(keys)
    )
    return work_of(context, stream, slices, spark=spark)


def work_of(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    stream: "Stream",
    slices: "Sequence[Slice]" = (),
    *,
    spark: bool = True,
) -> "Work":
    """A run's connections; of a job that is about a whole stream without slices."""
    from highwater.assets.work import Work

    given = context.resources
    return Work(
        stream=stream,
        slices=slices,
        # Who has none asks it for nothing.
        spark=given.spark.session() if spark else None,  # type: ignore[arg-type]
        lake=given.lake.open(),
        ledger=given.ledger.open(),
        kafka=given.kafka.open(),
        log=context.log.info,
        run=context.run.run_id,
        # A resource in its place may share nothing.
        classified=getattr(given.spark, "classified", None) if spark else None,
        schemas=schemas(),
    )


def _span(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} .. {keys[-1]}"


def planned(ledger: "Ledger", stream: "Stream", keys: Sequence[str]) -> "list[Slice]":
    """The planned slices of these keys, in their order.

    Raises:
        UnknownSliceError: there are no keys, one of them was never planned, or it belongs to another stream.
        ConfigurationError: one is of a topic that the stream does not read, as it is declared now.
    """
    if not keys:
        raise UnknownSliceError(
            f"the run names no slice of {stream.name}",
            remedy="choose slices whose range does not run backwards: Dagster orders keys as they were added",
        )
    slices = list(ledger.get(list(keys)))
    for piece in slices:
        if piece.stream != stream.name:
            raise UnknownSliceError(
                f"{piece.key} is no slice of {stream.name}",
                stored=f"stream {piece.stream}",
                found=f"stream {stream.name}",
                remedy=f"request it from {piece.stream}; delete the key from {stream.partitions_name} in Dagster",
            )
        if not reads(stream, piece.topic):
            raise ConfigurationError(
                f"{piece.key} is of a topic that stream {stream.name} does not read",
                stored=f"topic {piece.topic}",
                found=f"declared are {', '.join([stream.topic, *stream.delays])}",
                remedy=f"if {piece.topic} was its main topic, declare that again, and the other one as a stream of "
                "another name; if another system fills it, declare it under `foreign` again",
            )
    return slices


def _see_all_reported(keys: Sequence[str], reports: Sequence["SliceReport"]) -> None:
    reported = [report.piece.key for report in reports]
    if sorted(reported) != sorted(keys):
        raise AssertionError(f"the stage reported {reported} and was asked for {list(keys)}")
