"""Retiring keys: what a slice costs Dagster ends when it is complete and old; and bringing keys back."""

# The ledger comes first. A marked key that is still live is removed at the next maintenance; the sensor `repair` adds a
# key that was brought back and is not live yet. Deleting a key fails the runs that name it, so named keys stay; runs
# that named a key during its deletion are looked for afterwards, and the key is added again.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import dagster as dg

from highwater.assets.publication_log import ensure_unchanged
from highwater.batching import split_by_count
from highwater.errors import ConfigurationError, DependencyUnavailableError
from highwater.maintenance import LiveKey, select_candidates, select_keys_to_retire
from highwater.orchestration.asset_keys import PUBLISHED, build_table_key, build_table_keys
from highwater.orchestration.checking import slice_status
from highwater.orchestration.sensing.run_history import RECORDS, read_past_runs, read_publishing_runs
from highwater.orchestration.sensing.run_requests import list_in_flight
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from dagster._core.execution.backfill import PartitionBackfill

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# The lake is asked for this many slices at once.
PAGE = 500
# Deleting one takes Dagster some milliseconds; the rest is left to the next maintenance.
MAX_KEYS = 20_000


@dataclass(frozen=True)
class RetirementOutcome:
    """The outcome for a stream's live keys, or the preview.

    Args:
        live: how many there were.
        retired: the retired keys, the oldest first.
        retained: how many were to be retired and stay, by reason.
    """

    live: int
    retired: Sequence[str] = ()
    retained: Mapping[str, int] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The outcome in sentences."""
        ends = f": {self.retired[0]} .. {self.retired[-1]}" if self.retired else ""
        lines = [f"keys: {len(self.retired):,} of {self.live:,} live ones are retired{ends}"]
        return [*lines, *[f"keys: {count:,} stay, {why}" for why, count in self.retained.items()]]


def retire(
    instance: dg.DagsterInstance, ledger: Ledger, lake: Lake, stream: Stream, now: datetime, *, dry_run: bool
) -> RetirementOutcome:
    """Retire the keys that the stream's `Maintenance` does not keep, or report which.

    Raises:
        DependencyUnavailableError: the ledger or the lake is unavailable, or what names keys is unknown; no key was
            retired.
    """
    live = list(instance.get_dynamic_partitions(stream.partitions_name))
    planned, recalled = ledger.read_plan_times(live), ledger.retired.read_recall_times(stream.name)
    half_done = ledger.retired.list_retired(live)
    keys = [LiveKey(key, at, recalled.get(key)) for key, at in planned.items() if key not in half_done]
    wanted = select_candidates(keys, stream.maintenance.live_slices, stream.maintenance.live_for, now)[:MAX_KEYS]
    named = list_keys_in_use(instance, stream, live, now)
    found, retained = select_keys_to_retire(wanted, list_complete_slices(lake, stream, wanted), named)
    gone = [*sorted(half_done - named), *found]
    if not dry_run and gone:
        ledger.retired.retire(stream.name, found, now)
        for key in gone:
            instance.delete_dynamic_partition(stream.partitions_name, key)
        late = sorted(list_keys_in_use(instance, stream, live, now) & set(gone))
        if late:
            bring_back(instance, ledger, stream, late, now)
            gone = [key for key in gone if key not in late]
            retained = {**retained, "named while they were retired": len(late)}
    return RetirementOutcome(len(live), gone, retained)


def list_complete_slices(lake: Lake, stream: Stream, keys: Sequence[str]) -> set[str]:
    """The slices that are complete in all tables and, of a stream that publishes its events, are sent.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    found: set[str] = set()
    for some in split_by_count(keys, PAGE):
        held = slice_status.read_attempts(lake, stream, some)
        found.update(
            set(ensure_unchanged(lake, stream, some, held.events))
            - {key for key in some if held.select_missing_tables(key)}
        )
    return found


def list_keys_in_use(
    instance: dg.DagsterInstance, stream: Stream, order: Sequence[str], now: datetime
) -> frozenset[str]:
    """The keys that an unfinished run or backfill names.

    Args:
        instance: Dagster's instance.
        stream: the stream.
        order: the stream's keys in Dagster's order.
        now: in UTC.

    Raises:
        DependencyUnavailableError: Dagster has something unfinished that does not name its keys.
    """
    from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES

    unfinished = instance.get_runs_count(dg.RunsFilter(statuses=NOT_FINISHED_STATUSES))
    if unfinished > RECORDS:
        raise _build_unknown_keys_error(
            stream, f"{unfinished:,} runs are not finished, and {RECORDS:,} can be looked at"
        )
    runs = list_in_flight(
        [*read_past_runs(instance, stream, order, now), *read_publishing_runs(instance, stream, order, now)]
    )
    return runs.union(*(_select_backfill_keys(stream, backfill) for backfill in _fetch_unfinished_backfills(instance)))


def _fetch_unfinished_backfills(instance: dg.DagsterInstance) -> list[PartitionBackfill]:
    from dagster._core.execution.backfill import (
        BULK_ACTION_TERMINAL_STATUSES,
        BulkActionsFilter,
        BulkActionStatus,
    )

    statuses = [status for status in BulkActionStatus if status not in BULK_ACTION_TERMINAL_STATUSES]
    return list(instance.get_backfills(filters=BulkActionsFilter(statuses=statuses)))


def _select_backfill_keys(stream: Stream, backfill: PartitionBackfill) -> frozenset[str]:
    if backfill.serialized_asset_backfill_data is not None:  # the form of old versions, which names no keys
        raise _build_unknown_keys_error(
            stream, f"the backfill {backfill.backfill_id} does not name which keys it names"
        )
    if backfill.asset_backfill_data is None:
        return frozenset(backfill.partition_names or ())
    subsets = backfill.asset_backfill_data.target_subset.partitions_subsets_by_asset_key
    assets = (*build_table_keys(stream), build_table_key(stream, PUBLISHED.name))
    ours = [subsets[key] for key in assets if key in subsets]
    return frozenset(key for subset in ours for key in subset.get_partition_keys())


def _build_unknown_keys_error(stream: Stream, why: str) -> DependencyUnavailableError:
    return DependencyUnavailableError(
        f"no key of {stream.name} was retired: unfinished runs or backfills may name some",
        found=why,
        remedy="nothing to do: it is tried again when they have ended",
    )


def bring_back(
    instance: dg.DagsterInstance | None, ledger: Ledger, stream: Stream, keys: Sequence[str], now: datetime
) -> None:
    """Mark retired keys as live, then add them to Dagster in the order given; without an instance repair adds them."""
    ledger.retired.recall(keys, now)
    if instance is not None and keys:
        instance.add_dynamic_partitions(stream.partitions_name, list(keys))


def recall(
    instance: dg.DagsterInstance | None,
    ledger: Ledger,
    stream: Stream,
    first: str,
    last: str,
    now: datetime,
    log: Callable[[str], object],
    *,
    dry_run: bool,
) -> list[str]:
    """Bring back the retired keys from `first` to `last`, slices of one topic; returns them, the oldest first.

    Args:
        instance: Dagster's instance with the keys; None if there is none.
        ledger: has the slices and the recalls.
        stream: the stream of the keys.
        first: the oldest slice key to bring back.
        last: the newest one.
        now: the time of the recall, in UTC.
        log: takes sentences about the result.
        dry_run: only return the keys.

    Raises:
        UnknownSliceError: one of the two was never planned.
        ConfigurationError: they are of two topics, of another stream, or in the wrong order.
    """
    begin, end = SliceKey.parse(first), SliceKey.parse(last)
    [slice_, _] = ledger.get([first, last])
    if begin.topic != end.topic or begin.ordinal > end.ordinal or slice_.stream != stream.name:
        raise ConfigurationError(
            f"{first} to {last} are no slices of one topic of {stream.name}, the older one first",
            remedy=f"highwater slices {stream.name} --topic {begin.topic} lists them",
        )
    later = ledger.list_slices(stream.name, begin.topic, after=first, limit=end.ordinal - begin.ordinal)
    meant = [first, *[one.key for one in later if one.ordinal <= end.ordinal]]
    retired = ledger.retired.list_retired(meant)
    keys = [key for key in meant if key in retired]
    log(f"{len(keys):,} of {len(meant):,} slices have a retired key")
    if dry_run:
        log("a dry run: nothing was brought back")
    elif keys:
        bring_back(instance, ledger, stream, keys, now)
        log(
            "brought back"
            if instance
            else "brought back: the sensor repair adds them to Dagster within its next rest, 12 minutes at the longest"
        )
    return keys
