"""Erasing a key of a stream: what a person decides, as a command and as a job; a dry run by default."""

# The ledger comes first: from then on no reader takes the key's older records, whichever slice or tier they are in.
# Then what each slice loses is kept, there and in the lake (`highwater.assets.erasures_table`), and only then it is
# removed.

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.assets import client_reads, erasures_table, publication_log
from highwater.assets.erasing import (
    KEYED,
    RowsOfKey,
    ensure_key_erased,
    ensure_same_keys,
    erase,
    find,
    list_slices_of_key,
    list_versions,
)
from highwater.batching import split_by_count
from highwater.erasing import Erasure, ensure_digest, to_moment
from highwater.errors import ConfigurationError, SupersededAttemptError
from highwater.orchestration.checking import slice_status
from highwater.orchestration.dependencies import ensure_lake_exists
from highwater.orchestration.sensing.run_history import read_past_runs, read_publishing_runs
from highwater.orchestration.sensing.run_requests import list_in_flight
from highwater.tables import COMMON

if TYPE_CHECKING:
    import dagster as dg

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.erasing import ErasedCounts
    from highwater.resources.ledger.erasures import Erasures

RAW, CURRENT, EVENTS = "raw", "current", "events"
LEASE_SECONDS = 60
TRIES = 3


@dataclass(frozen=True)
class ErasureRequest:
    """A request to erase a key.

    Args:
        digest: SHA-256 of the key's bytes, in hexadecimal.
        dry_run: erase nothing; only report what would be erased.
        by: name of the person who decides.
        because: why.
    """

    digest: str
    dry_run: bool = True
    by: str = ""
    because: str = ""

    def check_complete(self) -> None:
        """Ensure that all is there that the record needs.

        Raises:
            ConfigurationError: something is missing.
        """
        ensure_digest(self.digest)
        if not self.dry_run and not (self.by and self.because):
            raise ConfigurationError(
                "an erasure needs a name and a reason",
                remedy="add --by NAME and --because REASON; the ledger keeps both",
            )


@dataclass(frozen=True)
class ErasureResult:
    """The result of an erasure, or the preview.

    Args:
        rows: for each slice how many rows of each table.
        done: slices that are without the key now.
        later: slices that could not be taken now, with the reason.
    """

    rows: Mapping[str, Mapping[str, int]]
    done: Sequence[str] = ()
    later: Mapping[str, str] = field(default_factory=dict)

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """The slices as names of columns and rows."""
        rows = [[key, *[str(counts.get(name, 0)) for name in COMMON]] for key, counts in sorted(self.rows.items())]
        return ["slice", *COMMON], rows


def erase_key(work: Work, instance: dg.DagsterInstance | None, request: ErasureRequest, now: datetime) -> ErasureResult:
    """Erase a key, or report what that would come to. The same again finishes what was left.

    Args:
        work: the connections; its slices do not matter. Its `log` gets the sentences.
        instance: Dagster's instance, to know which slices runs work on; None where it cannot be asked.
        request: the request.
        now: in UTC.

    Raises:
        ConfigurationError: the digest is none, or name or reason is missing.
        LeaseHeldError: another erasure goes on.
        SupersededAttemptError: runs were first again and again; the same again goes on.
        UnbalancedError: the tables of a slice do not hold what was decided, or the key is still there afterwards.
        IncompleteReadError: not all rows could be read, so nobody knows whether the key is among them.
        DependencyUnavailableError: something is unavailable; the same again goes on.
    """
    request.check_complete()
    stream, ledger = work.stream, work.ledger
    ensure_lake_exists(ledger, work.lake)
    ensure_same_keys(work.lake, stream, request.digest)
    look = _look(work, instance, request.digest, now)
    if instance is None:
        work.log("DAGSTER_HOME is not set: slices that runs work on are not known, so let no run go on meanwhile")
    if request.dry_run:
        _log_postponed_slices(work, look.later)
        work.log(f"{len(look.keys):,} slices hold the key. A dry run: nothing was erased")
        return ErasureResult(look.found.rows, later=look.later)
    with ledger.lease(build_lease_name(stream), LEASE_SECONDS) as lease:
        number, look = _record(work, instance, request, look, now)
        _log_postponed_slices(work, look.later)
        client_reads.remove_left_over(work.lake, stream.name, timedelta(0))
        wanted = _sort_by_version({*look.keys} - look.later.keys(), look.versions)
        done = _erase_slices(replace(work, before_commit=lease.check), request.digest, number, look.found, wanted)
    work.log(f"erased from {len(done):,} slices" + (f"; {len(look.later):,} are left" if look.later else ""))
    accepted = [stream.publishes.topic] if stream.publishes else []
    for line in LEFT_TO_DO:
        work.log(line.format(stream=stream.name, topics=", ".join([*stream.all_topics, *accepted])))
    return ErasureResult(look.found.rows, done, look.later)


def _log_postponed_slices(work: Work, later: Mapping[str, str]) -> None:
    for key, why in later.items():
        work.log(f"{key} is left for later: {why}; erase the key again then")


@dataclass(frozen=True)
class _Look:
    """The slices of a key at one moment.

    Args:
        raw_version: the version of raw before the look; -1 without a table.
        found: the rows of the key.
        keys: slices with rows of the key, or with an unfinished erasure of it.
        later: slices whose turn is later, with the reason.
        versions: by slice the versions of the key's events.
    """

    raw_version: int
    found: RowsOfKey
    keys: Sequence[str]
    later: Mapping[str, str]
    versions: Mapping[str, Sequence[Any]]


def _look(work: Work, instance: dg.DagsterInstance | None, digest: str, now: datetime) -> _Look:
    stream, raw = work.stream, work.lake.open_stream_table(work.stream.name, RAW)
    found = find(work.lake, stream, digest)
    begun = _load_unfinished_erasures(work.ledger.erasures, stream, digest)
    keys = sorted({*found.rows, *begun})
    later = _list_postponed_slices(work, instance, keys, begun, now)
    versions = list_versions(work.lake, stream, digest) if stream.versioned else {}
    later |= _list_newer_slices(work, found, versions, later)
    return _Look(-1 if raw is None else raw.version(), found, keys, later, versions)


def _record(
    work: Work, instance: dg.DagsterInstance | None, request: ErasureRequest, look: _Look, now: datetime
) -> tuple[int, _Look]:
    """Record the erasure; returns its number, and the slices of the key with those that were read since the look.

    Reads that begin after the record leave the key out. An earlier one may have committed since, or goes on.
    """
    number = _add_erasure(work, request, look, now)
    busy = _list_busy_slices(instance, work.stream, now) if instance else frozenset[str]()
    held = work.lake.load_commits(work.stream.name, RAW)
    fresh = [key for key in held.records if held.find_version(key) > look.raw_version]
    if list_slices_of_key(work.lake, work.stream, request.digest, fresh):
        at, look = _find_moment(look, now), _look(work, instance, request.digest, now)
        if _find_moment(look, now) > at:
            number = _add_erasure(work, request, look, now)
    began = dict.fromkeys(sorted(busy - held.records.keys() - look.later.keys()), "a run reads it")
    return number, replace(look, later={**look.later, **began})


def _find_moment(look: _Look, now: datetime) -> datetime:
    """A producer's clock may run ahead: existing records are older than the erasure, whatever their time says."""
    return max(now, to_moment(look.found.newest_ms))


def _add_erasure(work: Work, request: ErasureRequest, look: _Look, now: datetime) -> int:
    at = _find_moment(look, now)
    number = work.ledger.erasures.add(Erasure(work.stream.name, request.digest, request.because, request.by, at))
    erasures_table.sync_with_ledger(work.ledger, work.lake, work.stream.name)
    return number


def build_lease_name(stream: Stream) -> str:
    """The lock of those who remove rows for good: one at a time."""
    return f"erase {stream.name}"


LEFT_TO_DO = (
    "files of older versions still hold the rows, until `highwater maintain {stream} --yes` runs after its horizon",
    "Kafka still holds the records until retention takes them: {topics}",
)


def _list_postponed_slices(
    work: Work, instance: dg.DagsterInstance | None, keys: Sequence[str], begun: Collection[str], now: datetime
) -> dict[str, str]:
    """Slices whose turn is later: a run works on them, or their decision is not followed yet by all that it needs.

    A run that reads a slice for the first time may have begun before the erasure was known.
    """
    stream = work.stream
    busy = _list_busy_slices(instance, stream, now) if instance else frozenset()
    candidates = sorted({*keys, *busy})
    if not candidates:
        return {}
    held, sending = (
        slice_status.read_attempts(work.lake, stream, candidates),
        publication_log.list_sending_slices(work.lake, stream),
    )
    found = {key: "a run reads it" for key in candidates if key not in held.raw}
    for key in keys:
        if key in busy:
            found[key] = "a run works on it"
        elif key in sending:
            found[key] = f"its publication broke off, materialise {stream.name}/{publication_log.TABLE} of it first"
        elif key in held.events and held.select_missing_tables(key) and key not in begun:
            found[key] = f"it is decided, and not in {', '.join(held.select_missing_tables(key))} yet"
    return found


def _list_newer_slices(
    work: Work, found: RowsOfKey, versions: Mapping[str, Sequence[Any]], later: Collection[str]
) -> dict[str, str]:
    """Slices with newer events of the key than postponed slices: without them `current` would show the older ones (I6).

    A postponed slice that is not decided yet may hold any version.
    """
    waiting = found.rows.keys() & later
    if not waiting or not versions:
        return {}
    undecided = waiting - work.lake.load_slice_commits(work.stream.name, EVENTS, sorted(waiting)).keys()
    others = versions.keys() - later
    newer = set(others) if undecided else set[str]()
    while postponed := versions.keys() & (waiting | newer):
        lowest = min(min(versions[key]) for key in postponed)
        if not (more := {key for key in others - newer if max(versions[key]) >= lowest}):
            break
        newer |= more
    why = f"a slice that is left for later may have older events of the key, which {CURRENT} would show again"
    return dict.fromkeys(sorted(newer), why)


def _sort_by_version(keys: set[str], versions: Mapping[str, Sequence[Any]]) -> list[str]:
    """The newest events go last, so that `current` shows no older ones if this process dies in between."""
    newest = {key: max(versions[key]) for key in keys if key in versions}
    return [*sorted(keys - newest.keys()), *sorted(newest, key=lambda key: (newest[key], key))]


def _list_busy_slices(instance: dg.DagsterInstance, stream: Stream, now: datetime) -> frozenset[str]:
    """Slices that runs read, decide or send."""
    order = list(instance.get_dynamic_partitions(stream.partitions_name))
    return list_in_flight(
        [*read_past_runs(instance, stream, order, now), *read_publishing_runs(instance, stream, order, now)]
    )


def _erase_slices(work: Work, digest: str, number: int, found: RowsOfKey, wanted: Sequence[str]) -> list[str]:
    erasures, done = work.ledger.erasures, list[str]()
    open_ = _load_unfinished_erasures(erasures, work.stream, digest)
    for some in split_by_count(wanted, work.stream.limits.slices_per_run):
        taken = {key: open_.get(key) or found.build_erased(key) for key in some}
        erasures.begin(number, [one for key, one in taken.items() if key not in open_])
        erasures_table.sync_with_ledger(work.ledger, work.lake, work.stream.name)
        _try(replace(work, slices=work.ledger.get(some)), digest, taken)
        ensure_key_erased(work.lake, work.stream, digest, some, [name for name in KEYED if name != CURRENT])
        erasures.mark_done(some, digest, datetime.now(UTC))
        erasures_table.sync_with_ledger(work.ledger, work.lake, work.stream.name)
        done += some
        work.log(f"erased from {len(done):,} of {len(wanted):,} slices")
    # Its rows lie in partitions of many slices, so it is read once.
    ensure_key_erased(work.lake, work.stream, digest, done, [CURRENT])
    return done


def _load_unfinished_erasures(erasures: Erasures, stream: Stream, digest: str) -> dict[str, ErasedCounts]:
    """Erasures of the key that took rows from slices and did not finish."""
    newest = {key: all_[-1] for key, all_ in erasures.read_for_key(stream.name, digest).items()}
    return {key: one for key, one in newest.items() if one.done_at is None}


def _try(work: Work, digest: str, taken: Mapping[str, ErasedCounts]) -> None:
    for tries in range(1, TRIES + 1):
        try:
            erase(work, digest, taken)
        except SupersededAttemptError:
            if tries == TRIES:
                raise
            time.sleep(tries)
        else:
            return
