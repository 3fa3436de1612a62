"""Slices whose records were reclaimed from the DLQ, and that nobody has materialised since."""

# Nothing decides such a slice by itself: repair takes it for whole. A decision keeps how many reclaims it saw
# (`highwater.assets.reclaims`), so the slices that wait are those of a reclaim that their decision did not see.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from highwater.assets.events import TABLE as EVENTS
from highwater.assets.reclaims import SEEN
from highwater.batching import split_by_count
from highwater.resources.commit_log import read_slice_commits
from highwater.tables import select_stages

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

# The lake is asked for this many slices at once.
PAGE = 500
# A command names this many slices; it is shown again for the rest when they are done.
NAMED = 20


@dataclass(frozen=True)
class ReclaimedRecords:
    """A slice that waits to be reprocessed.

    Args:
        slice_key: the slice.
        records: how many of its records were reclaimed and not decided since.
        since: when the first of them was, in UTC.
        by: name of the person who reclaimed the first of them.
        retired: whether the slice has no key in Dagster.
    """

    slice_key: str
    records: int
    since: datetime
    by: str
    retired: bool

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**vars(self), "since": self.since.isoformat()}


def list_pending_slices(ledger: Ledger, lake: Lake, stream: Stream) -> list[ReclaimedRecords]:
    """The slices of a stream that are to be reprocessed, the first that were reclaimed first.

    It costs one question to the ledger, and where anything was ever reclaimed a look at the commits of those slices.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    acts = ledger.reclaims.read_acts_by_slice(stream.name)
    seen = _load_reclaim_numbers(lake, stream, sorted(acts)) if acts else {}
    unseen = {key: [act for act in mine if act.number > seen.get(key, 0)] for key, mine in acts.items()}
    unseen = {key: mine for key, mine in unseen.items() if mine}
    retired = ledger.retired.list_retired(sorted(unseen))
    # No origin is reclaimed a second time before it was reprocessed: the acts' counts are those of different records.
    found = [
        ReclaimedRecords(key, sum(act.records for act in mine), mine[0].at, mine[0].by, key in retired)
        for key, mine in unseen.items()
    ]
    return sorted(found, key=lambda one: (one.since, one.slice_key))


def _load_reclaim_numbers(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, int]:
    """The number of reclaims that each slice's decision in events saw."""
    table = lake.open_stream_table(stream.name, EVENTS)
    if table is None:
        return {}
    slice_commits = [
        slice_commit for some in split_by_count(keys, PAGE) for slice_commit in read_slice_commits(table, some).values()
    ]
    return {slice_commit.key: slice_commit.counts.get(SEEN, 0) for slice_commit in slice_commits}


def describe_pending_slices(found: Sequence[ReclaimedRecords]) -> str:
    """Slices that wait, one or more, in a sentence."""
    records = sum(one.records for one in found)
    return (
        f"{records:,} records of {len(found):,} slices were reclaimed from the DLQ and not reprocessed, the first "
        f"by {found[0].by} at {found[0].since:%Y-%m-%d %H:%M} UTC"
    )


def build_reprocess_command(stream: Stream, found: Sequence[ReclaimedRecords]) -> str:
    """The command that decides slices again, for a shell; first the one that brings their keys back, if it needs to.

    If the command is not for all slices, the number of remaining ones precedes it in brackets.
    """
    first = found[:NAMED]
    back = [
        f".venv/bin/highwater recall-keys {stream.name} {one.slice_key} {one.slice_key} --yes"
        for one in first
        if one.retired
    ]
    tables = select_stages(stream)[1:]
    asked = " or ".join(f"key:{stream.name}/{table}" for table in tables)
    materialise = f'.venv/bin/dagster asset materialize -m orchestration.definitions --select "{asked}" --partition'
    keys = [one.slice_key for one in first]
    command = f"{materialise} {keys[0]}" if len(keys) == 1 else _build_shell_loop(keys, materialise)
    rest = f"({len(found) - NAMED:,} more are named when these are done) " if len(found) > NAMED else ""
    return rest + " && ".join([*back, command])


def _build_shell_loop(keys: Sequence[str], command: str) -> str:
    return f'for slice in {" ".join(keys)}; do {command} "$slice"; done'
