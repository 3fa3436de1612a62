"""The assets of a stream, made from its declaration."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import dagster as dg

from highwater.assets.work import do_nothing
from highwater.errors import ConfigurationError, UnknownSliceError
from highwater.log_fields import bind_log_fields, build_slice_fields
from highwater.orchestration import metadata
from highwater.orchestration.asset_keys import (
    BY_NAME,
    Table,
    build_partitions_definition,
    build_table_key,
    build_topic_key,
)
from highwater.orchestration.checking.blocking import ensure_not_blocked
from highwater.orchestration.dependencies import build_step_guards, ensure_lake_exists
from highwater.orchestration.failures import translate_errors
from highwater.orchestration.lineage import emit_lineage
from highwater.orchestration.resources import open_schema_finder
from highwater.orchestration.run_tags import STREAM_TAG
from highwater.orchestration.sensing.ordered_processing import ensure_in_turn
from highwater.orchestration.sensing.step_breaker import report_to_breaker
from highwater.resources.dependency_guards import guard_dependencies
from highwater.routing import is_stream_topic
from highwater.tables import select_tables

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport, Work
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

Stage = Callable[["Work"], "list[SliceReport]"]
# The stage that goes on beside another one: both rest on the events, and neither on the other. Begun in the step of
# `current`, `rejects` follows every check that blocks it.
BESIDE = {"current": "rejects"}


def build_table_assets(stream: "Stream") -> list[dg.AssetsDefinition]:
    """The tables of a stream."""
    return [_build_table_asset(stream, BY_NAME[name]) for name in select_tables(stream)]


def _build_table_asset(stream: "Stream", table: Table) -> dg.AssetsDefinition:
    key = build_table_key(stream, table.name)
    # `dg.asset` would repeat the description in the op, and so in the snapshot of each job.
    spec = dg.AssetSpec(
        key,
        deps=[build_topic_key(stream) if name == "kafka" else build_table_key(stream, name) for name in table.above],
        group_name=stream.name,
        kinds={table.engine, "deltalake", *table.kinds},
        owners=[stream.owner],
        tags={STREAM_TAG: stream.name},
        description=metadata.describe_asset(stream, table.what),
        metadata=metadata.build_stream_metadata(stream),
    )

    @dg.multi_asset(
        name="__".join(key.path),
        specs=[spec],
        partitions_def=build_partitions_definition(stream),
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=f"{stream.name}_{table.name}" if table.pool else None,
        required_resource_keys={"kafka", "ledger", "lake", *(["spark"] if table.spark else [])},
    )
    def materialise(context: dg.AssetExecutionContext) -> None:
        materialise_slices(context, stream, table)

    return materialise


def materialise_slices(context: dg.AssetExecutionContext, stream: "Stream", table: Table) -> None:
    """Take all slices of the run through one stage together, and report to Dagster of each.

    One result marks every slice of the run as materialised, so a stage commits all of them or raises.
    """
    # Each look at the keys asks Dagster's database.
    tries, keys = context.op_execution_context.retry_number, context.partition_keys
    named = bind_log_fields(stream=stream.name, table=table.name, **build_slice_fields(keys))
    with named, translate_errors(tries, context.resources.spark.interrupt if table.spark else do_nothing):
        ensure_not_blocked(context.instance, stream, table.name, keys)
        work = _open_work(context, stream, keys, spark=table.spark)
        guards = build_step_guards(table.name, work.ledger, work.kafka, work.lake, stream)
        with emit_lineage(work, table, context.run.job_name) as report_lineage:
            with report_to_breaker(work, table.name, tries), guard_dependencies(*guards):
                ensure_lake_exists(work.ledger, work.lake)
                ensure_in_turn(work, table.name)
                reports = _run_stage(context, table.name, work)
            _ensure_all_reported(work.keys, reports)
            report_lineage(reports)
        breaker, holds = work.ledger.breakers.read_circuit(stream.name), work.ledger.holds.read_open(stream.name)
        of_stream = {**metadata.build_breaker_metadata(breaker), **metadata.build_hold_metadata(stream, holds)}
        for report in reports:
            found = {**metadata.build_slice_metadata(report, len(reports)), **of_stream}
            context.add_asset_metadata(found, partition_key=report.slice_.key)


def _run_stage(context: dg.AssetExecutionContext, table: str, work: "Work") -> "list[SliceReport]":
    """Take the slices through a stage, and through the one that can go on beside it."""
    # A resource in its place may share nothing.
    concurrent = getattr(context.resources.spark, "concurrent", None) if BY_NAME[table].spark else None
    found = concurrent.take(table, work) if concurrent else None
    if found is not None:
        return list(found)
    if concurrent is None or table not in BESIDE or not _may_go_beside(context, BESIDE[table], work):
        return load_stage(table)(work)
    concurrent.start(BESIDE[table], load_stage(BESIDE[table]), work)
    found = load_stage(table)(replace(work, open_own_session=context.resources.spark.get_second_session))
    concurrent.wait()
    return found


def _may_go_beside(context: dg.AssetExecutionContext, table: str, work: "Work") -> bool:
    """Whether a table that follows the events alone may be committed before its step begins.

    The run must have classified the slices itself, so nothing is classified beside. The guards of the table's step are
    those of `events`, which passed in this run, except that the turn of an ordered stream is a table's own.
    """
    key, run = build_table_key(work.stream, table), context.run
    return (
        bool(work.classified)
        and not work.stream.ordered
        and (not run.asset_selection or key in run.asset_selection)
        and (not run.step_keys_to_execute or "__".join(key.path) in run.step_keys_to_execute)
    )


def load_stage(table: str) -> Stage:
    """The function that materialises a table. Its module is imported here, since it needs pyspark."""
    from highwater.assets import current, dlq, events, metrics, published, raw, rejects

    stages: dict[str, Stage] = {
        "raw": raw.materialise,
        "events": events.materialise,
        "rejects": rejects.materialise,
        "dlq": dlq.materialise,
        "current": current.materialise,
        "metrics": metrics.materialise,
        "published": published.materialise,
    }
    return stages[table]


def _open_work(context: dg.AssetExecutionContext, stream: "Stream", keys: Sequence[str], *, spark: bool) -> "Work":
    slices = read_planned_slices(context.resources.ledger.open(), stream, keys)
    context.log.info(
        "%s slices of %s, %s offsets: %s",
        len(slices),
        stream.name,
        f"{sum(s.offsets for s in slices):,}",
        _format_span(keys),
    )
    return build_work(context, stream, slices, spark=spark)


def build_work(
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
        # Stages without Spark never use this.
        spark=given.spark.get_session() if spark else None,  # type: ignore[arg-type]
        lake=given.lake.open(),
        ledger=given.ledger.open(),
        kafka=given.kafka.open(),
        log=context.log.info,
        run=context.run.run_id,
        # A resource in its place may share nothing.
        classified=getattr(given.spark, "classified", None) if spark else None,
        schemas=open_schema_finder(),
    )


def _format_span(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} .. {keys[-1]}"


def read_planned_slices(ledger: "Ledger", stream: "Stream", keys: Sequence[str]) -> "list[Slice]":
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
    for slice_ in slices:
        if slice_.stream != stream.name:
            raise UnknownSliceError(
                f"{slice_.key} is no slice of {stream.name}",
                stored=f"stream {slice_.stream}",
                found=f"stream {stream.name}",
                remedy=f"request it from {slice_.stream}; delete the key from {stream.partitions_name} in Dagster",
            )
        if not is_stream_topic(stream, slice_.topic):
            raise ConfigurationError(
                f"{slice_.key} is of a topic that stream {stream.name} does not read",
                stored=f"topic {slice_.topic}",
                found=f"declared are {', '.join([stream.topic, *stream.delays])}",
                remedy=f"if {slice_.topic} was its main topic, declare that again, and the other one as a stream of "
                "another name; if another system fills it, declare it under `foreign` again",
            )
    return slices


def _ensure_all_reported(keys: Sequence[str], reports: Sequence["SliceReport"]) -> None:
    reported = [report.slice_.key for report in reports]
    if sorted(reported) != sorted(keys):
        raise AssertionError(f"the stage reported {reported} and was asked for {list(keys)}")
