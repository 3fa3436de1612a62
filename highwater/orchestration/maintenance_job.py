"""The job `maintenance` and its schedule: `highwater maintain` for all streams, every night."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from highwater.errors import PermanentError
from highwater.log_fields import bind_log_fields
from highwater.orchestration.asset_keys import build_table_key
from highwater.orchestration.failures import (
    NOT_TRIED_AGAIN,
    TRIES_AGAIN,
    format_redacted_error,
    translate_errors,
    wait_seconds,
)
from highwater.orchestration.jobs import build_one_op_job
from highwater.orchestration.run_tags import STREAM_TAG
from highwater.orchestration.stream_assets import build_work
from highwater.stream_files import find_declared_stream

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.operations.maintenance import Report

NAME = "maintenance"


class MaintenanceConfig(dg.Config):
    """Configuration of `maintenance`."""

    streams: list[str] = Field(default=[], description="Names of the streams; all if empty.")
    dry_run: bool = Field(default=False, description="Only show what would be done.")


def build_maintenance_job(streams: "Mapping[str, Stream]") -> dg.JobDefinition:
    """The job `maintenance`: one step maintains stream after stream, and an error of one delays no other.

    Args:
        streams: the declared streams, by name.
    """
    about = "`highwater maintain` for the streams of the configuration, all by default: compacts files, removes old "
    about += "files and rows, retires slice keys. The report is an observation of each table."

    def maintain(context: dg.OpExecutionContext, config: Any) -> None:
        with translate_errors(context.retry_number, context.resources.spark.interrupt):
            chosen = [find_declared_stream(streams, name) for name in config.streams] or list(streams.values())
            if len(chosen) == 1:
                context.instance.add_run_tags(context.run_id, {STREAM_TAG: chosen[0].name})
            _maintain_all(context, chosen, dry_run=config.dry_run)
            _drop_missing(context, dry_run=config.dry_run)

    return build_one_op_job(NAME, about, MaintenanceConfig, maintain, spark=True)


def build_nightly_schedule(job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """The schedule `maintenance`, which is stopped until a person starts it."""
    return dg.ScheduleDefinition(
        name=NAME, job=job, cron_schedule="0 3 * * *", description="Maintains all streams every day at 3 UTC."
    )


def _maintain_all(context: dg.OpExecutionContext, streams: Sequence["Stream"], *, dry_run: bool) -> None:
    """Maintain the streams; those that fail for a temporary reason are tried again after the others.

    Raises:
        PermanentError: streams failed; it names each with its error.
    """
    faults: dict[str, str] = {}
    pending = streams
    for tries in range(1 + TRIES_AGAIN):
        if tries:
            time.sleep(wait_seconds(tries - 1))
        failed: list[Stream] = []
        for stream in pending:
            faults.pop(stream.name, None)
            try:
                with bind_log_fields(stream=stream.name):
                    _maintain(context, stream, dry_run=dry_run)
            except Exception as error:  # noqa: BLE001 - whatever fails one stream delays no other
                faults[stream.name] = format_redacted_error(error)
                context.log.error("%s: %s", stream.name, faults[stream.name])  # noqa: TRY400 - secrets are removed
                with suppress(Exception):  # the error of the stream matters more
                    context.resources.spark.interrupt()
                if not isinstance(error, NOT_TRIED_AGAIN):
                    failed.append(stream)
        if not (pending := failed):
            break
    if faults:
        raise PermanentError(
            f"maintenance failed for {len(faults)} of {len(streams)} streams",
            found="; ".join(f"{name}: {text}" for name, text in faults.items()),
            remedy="follow the remedy of each error in the run's log; the other streams are maintained",
        )


def _drop_missing(context: dg.OpExecutionContext, *, dry_run: bool) -> None:
    """Drop the names of tables that are gone from the catalog."""
    from highwater.resources.catalog import drop_missing

    lake = context.resources.lake.open()
    if not dry_run and lake.catalog is not None:
        gone = drop_missing(context.resources.spark.get_session(), lake.catalog, lake.root)
        context.log.info("%s: names of missing tables that were dropped: %s", lake.catalog, ", ".join(gone) or "none")


def _maintain(context: dg.OpExecutionContext, stream: "Stream", *, dry_run: bool) -> None:
    from highwater.orchestration.operations.maintenance import maintain

    report = maintain(build_work(context, stream), context.instance, datetime.now(UTC), dry_run=dry_run)
    for line in report.lines:
        context.log.info(line)
    _observe(context, stream, report)


def _observe(context: dg.OpExecutionContext, stream: "Stream", report: "Report") -> None:
    """Record each table's numbers as an observation of its asset, where they plot from night to night."""
    whole: dict[str, int] = {} if report.retained is None else dict(report.retained.numbers)
    if report.keys is not None:
        whole |= {"live_keys": report.keys.live, "retired_keys": len(report.keys.retired)}
    for one in report.tables:
        numbers = {name: value for name, value in one.row.items() if name != "table"}
        numbers |= whole if one.table == "raw" else {}
        notes = {"notes": "\n".join(one.notes)} if one.notes else {}
        metadata = {f"{NAME}/{name}": value for name, value in {**numbers, **notes}.items()}
        context.log_event(dg.AssetObservation(build_table_key(stream, one.table), metadata=metadata))
