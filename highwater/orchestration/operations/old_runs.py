"""Deleting old runs: their events and logs are the last that a retired slice costs Dagster."""

# A run that names a slice whose key is live stays: Dagster's page of the slice shows its events. What people did,
# and what became of every slice, is in ledger and lake.

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import dagster as dg
from dagster._core.storage.dagster_run import FINISHED_STATUSES

from highwater.errors import UnknownSliceError
from highwater.orchestration.run_tags import PARTITION, RANGE_END, RANGE_START
from highwater.orchestration.sensing.run_history import is_of
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime

    from highwater.declaration import Stream

# Deleting one takes Dagster some milliseconds; the rest is left to the next maintenance.
MAX_RUNS = 2_000
PAGE = 500


@dataclass(frozen=True)
class OldRuns:
    """The outcome for a stream's old runs, or the preview.

    Args:
        older_than: runs that ended longer ago.
        deleted: how many of them name no live key.
        retained: how many of them name one.
        more: whether later ones were left to the next maintenance.
    """

    older_than: timedelta
    deleted: int
    retained: int
    more: bool = False

    @property
    def line(self) -> str:
        """The outcome in a sentence."""
        text = f"runs: {self.deleted:,} that ended over {self.older_than.days} days ago are deleted with their logs"
        text += "; later ones are checked next time" if self.more else ""
        return f"{text}; {self.retained:,} stay, slices with a live key were made by them" if self.retained else text


def delete_runs(instance: dg.DagsterInstance, stream: Stream, now: datetime, *, dry_run: bool) -> OldRuns | None:
    """Delete the stream's runs that its `Maintenance` does not keep, or report how many; None if it keeps them all.

    The keys that are live now decide, so it comes after they were retired.
    """
    age = stream.maintenance.runs_for
    if age is None:
        return None
    live = _group_ordinals(instance.get_dynamic_partitions(stream.partitions_name))
    gone: list[str] = []
    retained, more = 0, False
    for run in _fetch_finished_runs(instance, stream, now - age):
        if more := len(gone) == MAX_RUNS:
            break
        if _has_live_key(run.tags, live):
            retained += 1
        else:
            gone.append(run.run_id)
    for run_id in () if dry_run else gone:
        instance.compute_log_manager.delete_logs(prefix=[run_id])
        instance.delete_run(run_id)
    return OldRuns(age, len(gone), retained, more)


def _fetch_finished_runs(instance: dg.DagsterInstance, stream: Stream, before: datetime) -> Iterator[dg.DagsterRun]:
    """The stream's runs that changed no more since a time, the oldest first."""
    ended, last = dg.RunsFilter(statuses=list(FINISHED_STATUSES), updated_before=before), None
    while page := instance.get_run_records(ended, limit=PAGE, cursor=last, ascending=True):
        yield from (record.dagster_run for record in page if is_of(stream, record))
        last = page[-1].dagster_run.run_id


def _group_ordinals(keys: Iterable[str]) -> dict[str, list[int]]:
    """The live slices of each topic, in order."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for key in map(SliceKey.parse, keys):
        found[key.topic].append(key.ordinal)
    return {topic: sorted(ordinals) for topic, ordinals in found.items()}


def _has_live_key(tags: Mapping[str, str], live: Mapping[str, list[int]]) -> bool:
    """Whether a live key is among those that a run's tags name; of a range across topics, whether there is any."""
    names = [tags[name] for name in (PARTITION, RANGE_START, RANGE_END) if name in tags]
    try:
        keys = [SliceKey.parse(name) for name in names]
    except UnknownSliceError:  # somebody's own partition
        return False
    if len({key.topic for key in keys}) > 1:
        return bool(live)
    if not keys:
        return False
    ordinals = live.get(keys[0].topic, [])
    return bisect_left(ordinals, keys[0].ordinal) < bisect_right(ordinals, keys[-1].ordinal)
