"""The workers of runs: the leases that show they are alive, and the end of runs whose worker is gone."""

# Dagster's default launcher cannot ask a worker whether it lives. Where worker and code server were killed together,
# the run would stay started for ever and keep its place in queue and pool. A worker without a lease may still live:
# it hung, or lost the ledger. Numbers of commits and fences of publications keep it from doing anything twice (ADR
# 22, ADR 11).

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING

import dagster as dg

from highwater.orchestration.sensing.run_history import RECORDS, is_of
from highwater.orchestration.worker_leases import LEASE_SECONDS, select_worker_leases

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger

# A living worker renews its lease within this time after the ledger, or the machine, came back: a beat is 15 s.
LOOK_AGAIN_SECONDS = 20.0
# Leases of dead workers stay for a day, for readers of the ledger.
LEASE_HISTORY_SECONDS = 86_400.0
# Runs that were launched and have not ended.
BEGUN = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED]


def select_runs_without_worker(started: Mapping[str, datetime], alive: Collection[str], now: datetime) -> list[str]:
    """The runs whose worker is gone: it gave no sign for a term, or never gave one since the run began a term ago.

    Args:
        started: runs that Dagster takes for started, with the time at which they began.
        alive: runs whose worker holds its lease.
        now: the time, in UTC.
    """
    latest = now - timedelta(seconds=LEASE_SECONDS)
    return [run for run, began in started.items() if run not in alive and began < latest]


@cache
def get_first_look_time() -> datetime:
    """The first look of this process, in UTC. It is a code server with sensors in it, and workers as children."""
    return datetime.now(UTC)


def end_runs_without_worker(
    instance: dg.DagsterInstance, ledger: Ledger, streams: Collection[Stream], now: datetime
) -> list[str]:
    """Report to Dagster which runs of the streams have failed with their worker, and free their places in pools.

    A run that is starting has no lease yet, and may take minutes for it on a busy machine. So it is missed only if it
    was launched before this code server: the one before would report a worker that died, and died with it.

    Dagster retries such a run as one whose worker died (`run_retries`); otherwise repair asks for its slices.
    It is looked at twice: while the ledger was unavailable, or the machine slept, the leases of the living ran out as
    well.

    Raises:
        DependencyUnavailableError: the ledger is unavailable; no run was ended.
    """
    here = get_first_look_time()
    records = instance.get_run_records(dg.RunsFilter(statuses=BEGUN), limit=RECORDS)
    seen = {one.dagster_run.run_id: one for one in records if any(is_of(stream, one) for stream in streams)}
    since = {run: _find_sign_due_since(instance, record, here) for run, record in seen.items()}
    started = {run: at for run, at in since.items() if at is not None}
    if not started:
        return []
    gone = select_runs_without_worker(
        started, select_worker_leases(ledger.read_leases()), now
    )  # read after the runs: a lease outlives its run
    if gone:
        # A tick has a minute, and the second look may not wait for the next one: see REPAIR_SECONDS.
        time.sleep(LOOK_AGAIN_SECONDS)
        gone = select_runs_without_worker(
            {run: started[run] for run in gone}, select_worker_leases(ledger.read_leases()), now
        )
    ended = [run for run in gone if _end_run(instance, seen[run].dagster_run)]
    ledger.forget_leases(LEASE_HISTORY_SECONDS)
    return ended


def _find_sign_due_since(instance: dg.DagsterInstance, record: dg.RunRecord, here: datetime) -> datetime | None:
    """Since when a run's worker owes a sign of life; None if it owes none."""
    run = record.dagster_run
    if run.status == dg.DagsterRunStatus.STARTED:
        return _get_start_time(record)
    # A launcher of containers can be asked: it reports dead workers by itself, and pulls images for minutes.
    launched = None if _can_be_asked(instance) else instance.get_run_stats(run.run_id).launch_time
    at = None if launched is None else datetime.fromtimestamp(launched, UTC)
    return at if at is not None and at < here else None


def _can_be_asked(instance: dg.DagsterInstance) -> bool:
    return instance.run_launcher.supports_check_run_worker_health


def _get_start_time(record: dg.RunRecord) -> datetime:
    if record.start_time is not None:
        return datetime.fromtimestamp(record.start_time, UTC)
    created = record.create_timestamp
    return created.replace(tzinfo=UTC) if created.tzinfo is None else created


def _end_run(instance: dg.DagsterInstance, seen: dg.DagsterRun) -> bool:
    run = instance.get_run_by_id(seen.run_id)
    if run is None or run.status != seen.status:
        return False  # it ended since its status was read, or its worker began
    instance.report_run_failed(
        run,
        f"The worker of this run is gone: it gave no sign of life for {LEASE_SECONDS:.0f} s, and its lease in the "
        "ledger ran out. What it committed stays; the rest of its slices is requested again.",
    )
    if instance.event_log_storage.supports_global_concurrency_limits:
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return True
