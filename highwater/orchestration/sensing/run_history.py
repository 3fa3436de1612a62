"""The history of runs and slices in Dagster's database."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import dagster as dg
from dagster._core.definitions.assets.job.asset_job import IMPLICIT_ASSET_JOB_NAME
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES, RunRecord

from highwater.batching import split_by_count
from highwater.declaration import Stream
from highwater.errors import DependencyUnavailableError
from highwater.orchestration.asset_keys import PUBLISHED, build_table_key, build_table_keys
from highwater.orchestration.run_tags import PUBLISH, PURPOSE, STREAM_TAG
from highwater.orchestration.sensing.run_requests import PastRun, resolve_run_keys
from highwater.resources.ledger.engine import KEYS_PER_STATEMENT

# Repair waits at most an hour, so the failures of the last day suffice.
MEMORY = timedelta(days=1)
# Runs that are asked for at once: some megabytes of memory.
RECORDS = 2_000
# More ended runs than these are not read of all streams to find those of one: 2,000 take 0.2 s, and the 150 of a stream
# 0.02 s.
ENDED_RECORDS = 300
# Dagster's daemon starts a retry within seconds; after so long it is taken for lost.
RETRY_GRACE = timedelta(minutes=5)
# Ticks ask of the same runs again and again, for an hour while a slice waits: a megabyte of memory.
RUNS_KNOWN = 10_000
_UNAVAILABLE: dict[str, bool] = {}


def read_past_runs(instance: dg.DagsterInstance, stream: Stream, order: Sequence[str], now: datetime) -> list[PastRun]:
    """The runs of the last day that took slices of the stream through its tables, and all that have not ended.

    Args:
        instance: Dagster's instance.
        stream: the stream.
        order: the stream's keys in Dagster's order.
        now: the time, in UTC.
    """
    raw = {build_table_key(stream, "raw")}
    return _read_runs(instance, stream, order, now, lambda record: _is_slice_run(stream, record), raw)


def read_publishing_runs(
    instance: dg.DagsterInstance, stream: Stream, order: Sequence[str], now: datetime
) -> list[PastRun]:
    """The runs of the last day that sent accepted events and did not succeed: others sent all that they named."""
    sent = partial(_is_publishing_run, stream)
    return _read_runs(instance, stream, order, now, lambda record: sent(record) and not record.dagster_run.is_success)


def _read_runs(
    instance: dg.DagsterInstance,
    stream: Stream,
    order: Sequence[str],
    now: datetime,
    wanted: Callable[[RunRecord], bool],
    raw: Collection[dg.AssetKey] = (),
) -> list[PastRun]:
    filters: list[dict[str, Any]] = [{"statuses": NOT_FINISHED_STATUSES}, {"updated_after": now - MEMORY}]
    found = (record for one in filters for record in _read_run_records(instance, stream, **one))
    records = {record.dagster_run.run_id: record for record in found if wanted(record)}
    position = {key: at for at, key in enumerate(order)}
    return [
        PastRun(
            resolve_run_keys(record.dagster_run.tags, order, position),
            _find_end_time(record, now),
            run_id,
            raw_alone=record.dagster_run.asset_selection == raw,
            by_hand=PURPOSE not in record.dagster_run.tags,
        )
        for run_id, record in records.items()
    ]


def _read_run_records(instance: dg.DagsterInstance, stream: Stream, **filters: Any) -> Iterator[RunRecord]:
    """Runs among which are all of the stream's, some of them twice.

    If the instance has too many runs to read each, only runs with the stream's tag are read, and runs that a person or
    a backfill requested by assets, which have no tag. An older run with neither, such as one of a user's own job over
    the stream's assets, is then not found.
    """
    most = RECORDS if "statuses" in filters else ENDED_RECORDS
    newest = instance.get_run_records(dg.RunsFilter(**filters), limit=most)
    yield from newest
    if len(newest) == most:
        yield from _iterate_pages(instance, dg.RunsFilter(**filters, tags={STREAM_TAG: stream.name}))
        yield from _iterate_pages(instance, dg.RunsFilter(**filters, job_name=IMPLICIT_ASSET_JOB_NAME))


def _iterate_pages(instance: dg.DagsterInstance, runs_filter: dg.RunsFilter) -> Iterator[RunRecord]:
    last = None
    while page := instance.get_run_records(runs_filter, limit=RECORDS, cursor=last):
        yield from page
        last = page[-1].dagster_run.run_id


def read_instance_id(instance: dg.DagsterInstance) -> str:
    """The ID that a Dagster instance gave its run storage; host and folder where the storage is no SQL database."""
    from dagster._core.storage.runs import SqlRunStorage

    storage = instance.run_storage
    return storage.get_run_storage_id() if isinstance(storage, SqlRunStorage) else describe_instance_place()


def describe_instance_place() -> str:
    """Host and folder of this process's Dagster instance."""
    return f"{socket.gethostname()}:{os.environ.get('DAGSTER_HOME', '')}"


def select_stream_names(record: RunRecord) -> set[str]:
    """The names of the streams that a run may be of: by its tag, and by the assets that it was asked for."""
    run = record.dagster_run
    tagged = run.tags.get(STREAM_TAG)
    return {key.path[0] for key in run.asset_selection or ()} | ({tagged} if tagged else set())


def is_of(stream: Stream, record: RunRecord) -> bool:
    """Whether a run is one of the stream's: by its tag, or by the assets that it was asked for."""
    return _is_slice_run(stream, record) or _is_publishing_run(stream, record)


def _is_publishing_run(stream: Stream, record: RunRecord) -> bool:
    run = record.dagster_run
    is_tagged = run.tags.get(STREAM_TAG) == stream.name and run.tags.get(PURPOSE) == PUBLISH
    return is_tagged or build_table_key(stream, PUBLISHED.name) in (run.asset_selection or ())


def _is_slice_run(stream: Stream, record: RunRecord) -> bool:
    run = record.dagster_run
    if run.tags.get(PURPOSE) == PUBLISH:
        return False
    return run.tags.get(STREAM_TAG) == stream.name or bool(
        set(build_table_keys(stream)) & set(run.asset_selection or ())
    )


def _find_end_time(record: RunRecord, now: datetime) -> datetime | None:
    run = record.dagster_run
    if not run.is_finished:
        return None
    ended = _find_time_of_end(record)
    return None if run.is_complete_and_waiting_to_retry and now - ended < RETRY_GRACE else ended


def _find_time_of_end(record: RunRecord) -> datetime:
    """A run that was cancelled in the queue has no end; its last change is when it ended."""
    if record.end_time is not None:
        return datetime.fromtimestamp(record.end_time, UTC)
    changed = record.update_timestamp
    return changed.replace(tzinfo=UTC) if changed.tzinfo is None else changed


def list_dependency_failures(instance: dg.DagsterInstance, keys: Collection[str], runs: Iterable[PastRun]) -> set[str]:
    """The slices whose last run failed by an unavailable dependency whose breaker stayed closed.

    Spark has none, and that of Kafka is kept closed by questions that a broker answers while another one is missing.
    They are asked for on and on, at the longest wait: what they wait for is no fault of theirs.

    Args:
        instance: Dagster's instance.
        keys: the slices.
        runs: runs that named them.
    """
    last: dict[str, PastRun] = {}
    for run in sorted((run for run in runs if run.ended_at is not None), key=lambda run: str(run.ended_at)):
        last.update(dict.fromkeys(run.keys & set(keys), run))
    unavailable = {
        run_id: has_failed_by_dependency(instance, run_id) for run_id in {run.run_id for run in last.values()} if run_id
    }
    return {key for key, run in last.items() if unavailable.get(run.run_id)}


def has_failed_by_dependency(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a step of a run failed because a dependency, Spark for example, was unavailable.

    Args:
        instance: Dagster's instance.
        run_id: a run that ended. Its log is read once: the answer stays.
    """
    known = _UNAVAILABLE.get(run_id)
    if known is None:
        if len(_UNAVAILABLE) >= RUNS_KNOWN:
            _UNAVAILABLE.clear()
        known = _UNAVAILABLE[run_id] = _has_dependency_error(instance, run_id)
    return known


def _has_dependency_error(instance: dg.DagsterInstance, run_id: str) -> bool:
    failures = instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    texts = [entry.dagster_event.step_failure_data for entry in failures if entry.dagster_event is not None]
    return any(
        data.error is not None and DependencyUnavailableError.__name__ in data.error.to_string() for data in texts
    )


def read_materialised_slices(
    instance: dg.DagsterInstance, stream: Stream, keys: Collection[str]
) -> dict[str, frozenset[str]]:
    """For each table which of these slices Dagster holds as materialised.

    Dagster is asked for the slices alone: `get_materialized_partitions` reads every slice that the stream ever had.
    """
    return {key.path[-1]: select_materialised_slices(instance, key, keys) for key in build_table_keys(stream)}


def select_materialised_slices(
    instance: dg.DagsterInstance, asset: dg.AssetKey, keys: Collection[str]
) -> frozenset[str]:
    """The slices of these that Dagster holds as materialised in a table."""
    parts = split_by_count([*dict.fromkeys(keys)], KEYS_PER_STATEMENT)
    event = dg.DagsterEventType.ASSET_MATERIALIZATION
    return frozenset(
        key for part in parts for key in instance.get_latest_storage_id_by_partition(asset, event, {*part})
    )
