"""Erases a key from raw, events and rejects; the tables that depend on them follow."""

# 1. Commit raw without the records.
# 2. Remove their origins from the publication log; its attempts stay.
# 3. Commit events without them: the same decision, with a new attempt number. Nothing is classified again.
# 4. Commit rejects without the key.
# The slice is then incomplete in dlq, current and metrics, and their stages write them as usual. If the run dies in
# between, the next erasure of the key finishes it.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from highwater.assets import current, dlq, events, metrics, publication_log_writer, raw, rejects
from highwater.assets.commit import CommittedSlices, commit_rows, take_commit_turn
from highwater.assets.foreign import DLQ_SEEN
from highwater.assets.origins import SEEN, read_current_state
from highwater.envelope import ORIGIN, ORIGIN_SQL, Origin
from highwater.erasing import AGED, ErasedCounts, subtract_counts
from highwater.errors import ConfigurationError, UnbalancedError
from highwater.gaps import PartitionOffset, merge_places
from highwater.reject_reasons import BY_REASON, BY_RULE
from highwater.resources.commit_log import ensure_all_rows_seen, read_slice_commits
from highwater.resources.delta import ensure_all_read, query, query_all, slice_is_one_of
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.retention import AGED_FROM, count_expired_rows, count_records
from highwater.slice_commits import SliceCommit
from highwater.slices import SliceKey
from highwater.tables import COMMON

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import Column, DataFrame

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.slices import Slice

_TIMES = {"first_event_us", "last_event_us"}
_IS_KEY = "encode(sha256(key), 'hex') = '{digest}'"
# Counts of a slice's rows of raw.
_OF_RAW = ("raw", "tombstones")
# The tables that hold keys; the rows of the others follow from these.
KEYED = ("raw", "events", "rejects", "current")


@dataclass
class RowsOfKey:
    """The rows of a key.

    Args:
        places: for each slice the offsets of its records in raw.
        rows: for each slice how many rows of each table, with the tombstones, and the rejects by reason and rule.
        newest_ms: the greatest timestamp among the records, in milliseconds; 0 without one.
    """

    places: dict[str, list[PartitionOffset]] = field(default_factory=dict)
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    newest_ms: int = 0

    def count_rows(self, key: str, name: str, count: int) -> None:
        """Add rows of a slice."""
        mine = self.rows.setdefault(key, {})
        mine[name] = mine.get(name, 0) + count

    def build_erased(self, key: str) -> ErasedCounts:
        """The counts that are removed from a slice."""
        return ErasedCounts(key, merge_places(self.places.get(key, ())), self.rows.get(key, {}))


def find(lake: Lake, stream: Stream, digest: str) -> RowsOfKey:
    """The rows of a key in all tables, read without a JVM. The key column of all of raw is read for it.

    For slices whose rows of raw expired by age, events and rejects name the records.

    Raises:
        IncompleteReadError: fewer rows were read than the tables' logs count.
        DependencyUnavailableError: the lake could not be read.
    """
    found, mine = RowsOfKey(), _IS_KEY.format(digest=digest)
    there = _open_readable_tables(lake, stream, digest)
    if "raw" in there:
        tombstone = "false" if stream.tombstones_delete else "value IS NULL"
        where = f'slice, "partition", "offset", timestamp_ms, {tombstone} AS tombstone'
        for row in query(there["raw"], f"SELECT {where} FROM t WHERE {mine}"):
            found.places.setdefault(row["slice"], []).append((row["partition"], row["offset"]))
            found.newest_ms = max(found.newest_ms, row["timestamp_ms"])
            found.count_rows(row["slice"], "raw", 1)
            found.count_rows(row["slice"], "tombstones", int(row["tombstone"]))
    _count_events(found, there, mine)
    brought = f"SELECT updated_by_slice AS slice, count(*) AS n FROM t WHERE {mine} GROUP BY slice"
    for row in _query_if_exists(there, "current", brought):
        found.count_rows(row["slice"], "current", row["n"])
    _count_rejects(found, there, mine)
    for row in _list_aged_origins(there, mine):
        found.count_rows(row["slice"], "raw", 1)
        if row["origin_topic"] == SliceKey.parse(row["slice"]).topic:
            found.places.setdefault(row["slice"], []).append((row["origin_partition"], row["origin_offset"]))
    if {"rejects", "dlq"} <= there.keys():
        for row in query_all({"r": there["rejects"], "d": there["dlq"]}, _PUBLISHED.format(digest=digest)):
            found.count_rows(row["slice"], "dlq", row["n"])
    return found


def list_versions(lake: Lake, stream: Stream, digest: str) -> dict[str, list[Any]]:
    """By slice the versions of the key's events, as values that compare as the version rule does.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    table, found = lake.open_stream_table(stream.name, events.TABLE), dict[str, list[Any]]()
    mine = f"SELECT slice, version FROM t WHERE {_IS_KEY.format(digest=digest)}"
    for row in query(table, mine) if table is not None else ():
        version = row["version"]
        found.setdefault(row["slice"], []).append(tuple(version.values()) if isinstance(version, dict) else version)
    return found


def list_slices_of_key(lake: Lake, stream: Stream, digest: str, keys: Sequence[str]) -> set[str]:
    """The slices among some that have rows of the key in raw.

    Raises:
        IncompleteReadError: fewer rows of the slices were read than their commits count.
        DependencyUnavailableError: the lake could not be read.
    """
    table = lake.open_stream_table(stream.name, raw.TABLE)
    if table is None or not keys:
        return set()
    ensure_all_rows_seen(table, keys)
    where = f"{_IS_KEY.format(digest=digest)} AND {slice_is_one_of(keys)}"
    return {str(row["slice"]) for row in query(table, f"SELECT DISTINCT slice FROM t WHERE {where}")}


def _count_events(found: RowsOfKey, there: Mapping[str, DeltaTable], mine: str) -> None:
    for row in _query_if_exists(there, "events", f"SELECT slice, count(*) AS n FROM t WHERE {mine} GROUP BY slice"):
        found.count_rows(row["slice"], "events", row["n"])


def _count_rejects(found: RowsOfKey, there: Mapping[str, DeltaTable], mine: str) -> None:
    by_rule = f"SELECT slice, reason, rule, count(*) AS n FROM t WHERE {mine} GROUP BY slice, reason, rule"
    for row in _query_if_exists(there, "rejects", by_rule):
        names = ["rejects", f"{BY_REASON}{row['reason']}"]
        for name in names if row["rule"] is None else [*names, f"{BY_RULE}{row['rule']}"]:
            found.count_rows(row["slice"], name, row["n"])


def ensure_same_keys(lake: Lake, stream: Stream, digest: str) -> None:
    """Ensure that the key is that of the same records in raw and in events, where a stream lets them differ.

    Raises:
        ConfigurationError: it is not, so that some of its records would be left.
        DependencyUnavailableError: the lake could not be read.
    """
    raw_rows, event_rows = lake.open_stream_table(stream.name, "raw"), lake.open_stream_table(stream.name, "events")
    if stream.has_record_key or raw_rows is None or event_rows is None:
        return
    [found] = query_all({"r": raw_rows, "e": event_rows}, _OTHERWISE.format(digest=digest))
    if found["n"]:
        raise ConfigurationError(
            f"records of {stream.name} would be left: events and their records have different keys",
            stored="the key is erased by the key of the records",
            found=f"{found['n']:,} events where only the event or only its record has the key",
            remedy="erase the rows in a copy of the stream that declares record_key='strict', if the record keys are "
            "text; else delete them by hand and record the loss; nothing was erased now",
        )


_OTHERWISE = """
SELECT count(*) AS n FROM e JOIN r ON origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE coalesce(encode(sha256(e.key), 'hex') = '{digest}', false)
   <> coalesce(encode(sha256(r.key), 'hex') = '{digest}', false)
"""


def _open_readable_tables(lake: Lake, stream: Stream, digest: str) -> dict[str, DeltaTable]:
    """The tables that exist, after a read of every row of those with keys."""
    tables = {name: lake.open_stream_table(stream.name, name) for name in COMMON}
    there = {name: table for name, table in tables.items() if table is not None}
    for name in KEYED:
        if name in there:
            _list_slices_of_key(there[name], name, digest)
    return there


def _list_slices_of_key(table: DeltaTable, name: str, digest: str) -> set[str]:
    """The slices that rows of a key name, after a read of every row and no filter.

    Raises:
        IncompleteReadError: fewer rows were read than the table's log counts.
    """
    is_mine = f"coalesce({_IS_KEY.format(digest=digest)}, false)"
    by = "updated_by_slice" if name == current.TABLE else "slice"
    # An aggregate over the keys: a mere count would be answered from the table's log.
    rows = query(table, f"SELECT {by} AS found, {is_mine} AS mine, count(*) AS n FROM t GROUP BY 1, 2")
    ensure_all_read(table, sum(int(row["n"]) for row in rows))
    return {str(row["found"]) for row in rows if row["mine"]}


def ensure_key_erased(lake: Lake, stream: Stream, digest: str, keys: Sequence[str], names: Sequence[str]) -> None:
    """Validate, by a read of all rows without a JVM, that slices have no row of a key any more: Spark removed them.

    Args:
        lake: the tables.
        stream: their stream.
        digest: the key.
        keys: the slices.
        names: the tables.

    Raises:
        UnbalancedError: the key is still there.
        IncompleteReadError: fewer rows were read than the tables' logs count.
        DependencyUnavailableError: the lake could not be read.
    """
    for name in names:
        table = lake.open_stream_table(stream.name, name)
        if table is None:
            continue
        held = _list_slices_of_key(table, name, digest)
        if left := sorted(held.intersection(keys)):
            raise UnbalancedError(
                f"the erased key is still in {name} of {stream.name}",
                stored="no row of the key",
                found=f"rows of it in {len(left):,} slices, the first is {left[0]}",
                remedy="run the same command again; if this stays, keep the output and do not call the key erased",
            )


_SAME = " AND ".join(f"r.{name} = d.{name}" for name in ("slice", *ORIGIN))
_PUBLISHED = f"""
SELECT d.slice AS slice, count(*) AS n FROM r JOIN d ON {_SAME}
WHERE encode(sha256(r.key), 'hex') = '{{digest}}' GROUP BY d.slice
"""


def _list_aged_origins(there: Mapping[str, DeltaTable], mine: str) -> list[dict[str, Any]]:
    """The origins of the key's rows in events and rejects of slices whose rows of raw have expired."""
    if "raw" not in there:
        return []
    gone = [key for key, slice_commit in read_slice_commits(there["raw"]).items() if count_expired_rows(slice_commit)]
    where = f"{mine} AND {slice_is_one_of(gone)}"
    names = [name for name in ("events", "rejects") if name in there and gone]
    return [row for name in names for row in query(there[name], f"SELECT slice, {ORIGIN_SQL} FROM t WHERE {where}")]


def _query_if_exists(there: Mapping[str, DeltaTable], name: str, sql: str) -> list[dict[str, Any]]:
    return query(there[name], sql) if name in there else []


def erase(work: Work, digest: str, taken: Mapping[str, ErasedCounts]) -> None:
    """Remove the key's rows of the work's slices from all tables; what an earlier try removed stays removed.

    Args:
        work: slices that no run works on, each whole, or not decided yet, or left half done by an erasure.
        digest: the key.
        taken: for each slice what the ledger says is taken from it.

    Raises:
        SupersededAttemptError: another writer was first; it may be tried again.
        UnbalancedError: the tables do not hold what was decided.
        DependencyUnavailableError: Spark, Kafka, the ledger or the lake is unavailable; it may be tried again.
    """
    with delta_errors(f"{work.stream.name} without an erased key"):
        _from_raw(work, digest, taken)
        decided, taken = _from_events(work, digest, taken)
        _from_rejects(work, digest, decided, taken)
    if not decided:
        return
    mine = replace(work, slices=[slice_ for slice_ in work.slices if slice_.key in decided])
    rejects.materialise(mine)
    dlq.materialise(mine)
    if work.stream.versioned:
        current.materialise(mine)
    if work.stream.metrics:
        metrics.materialise(mine)


def _from_raw(work: Work, digest: str, taken: Mapping[str, ErasedCounts]) -> None:
    committed = CommittedSlices.read(work, raw.TABLE)
    table = work.lake.open_existing_table(work.stream.name, raw.TABLE, committed.version)
    where = f"{_IS_KEY.format(digest=digest)} AND {slice_is_one_of(work.keys)}"
    counted = query(table, f"SELECT slice, count(*) AS n FROM t WHERE {where} GROUP BY slice")
    gone = {str(row["slice"]): int(str(row["n"])) for row in counted}
    gone |= _count_aged_rows(work, committed, taken)
    if not gone:
        return
    attempts = work.ledger.allocate_attempts([*gone])
    slice_commits = [
        _build_raw_slice_commit(committed.slice_commits[key], attempts[key], count) for key, count in gone.items()
    ]
    _commit(
        work,
        raw.TABLE,
        committed,
        _read_remaining_rows(work, raw.TABLE, committed, digest, [*gone]),
        slice_commits,
        "offset",
    )


def _count_aged_rows(work: Work, committed: CommittedSlices, taken: Mapping[str, ErasedCounts]) -> dict[str, int]:
    """For slices whose raw rows expired by age: how many were the key's, unless the slice commit says it."""
    old = {
        key: slice_commit
        for key, slice_commit in committed.slice_commits.items()
        if count_expired_rows(slice_commit) and taken[key].rows.get("raw")
    }
    decided = work.lake.load_slice_commits(work.stream.name, events.TABLE, [*old])
    return {key: taken[key].rows["raw"] for key, one in decided.items() if one.counts["raw"] == count_records(old[key])}


def _build_raw_slice_commit(committed: SliceCommit, attempt: int, gone: int) -> SliceCommit:
    """The slice commit without some records; rows that expired are not put back with the key's among them."""
    counts = {name: count for name, count in committed.counts.items() if name != AGED_FROM}
    counts["erased"] = counts.get("erased", 0) + gone
    if count_expired_rows(committed):
        counts[AGED] -= gone
    return replace(committed, attempt=attempt, rows=None, counts=counts)


def _from_events(
    work: Work, digest: str, taken: Mapping[str, ErasedCounts]
) -> tuple[dict[str, SliceCommit], Mapping[str, ErasedCounts]]:
    """Commit the decisions without the records.

    Returns the decisions of all of the slices that have one, as they are, and what is taken from these.
    A decision that names as many records as raw holds now is without them already.
    """
    held = CommittedSlices.read(work, raw.TABLE)
    committed = CommittedSlices.read(work, events.TABLE)
    open_ = [
        key
        for key, slice_commit in committed.slice_commits.items()
        if slice_commit.counts["raw"] != count_records(held.slice_commits[key])
    ]
    if not open_:
        return dict(committed.slice_commits), taken
    taken = {**taken, **_count_decided_rows(work, digest, committed, [taken[key] for key in open_])}
    attempts = work.ledger.allocate_attempts(open_)
    table = work.lake.open_existing_table(work.stream.name, events.TABLE, committed.version)
    spans = _read_event_spans(table, digest, open_)
    slices = {slice_.key: slice_ for slice_ in work.slices}
    slice_commits = []
    for key in open_:
        counts = _subtract_counts(key, committed.slice_commits[key].counts, taken[key].rows)
        new_counts = {**counts, **spans.get(key, {}), **_read_current_versions(work, slices[key], committed.version)}
        slice_commits.append(
            SliceCommit(committed.slice_commits[key].slice_, attempts[key], counts["events"], new_counts)
        )
    gone = list_origins(table, digest, open_)
    publication_log_writer.delete_origins(work, gone)
    rows = _with_attempts(_read_remaining_rows(work, events.TABLE, committed, digest, open_), attempts)
    _commit(work, events.TABLE, committed, rows, slice_commits, "origin_offset")
    publication_log_writer.delete_origins(work, gone)  # a run may have sent them meanwhile
    return {**committed.slice_commits, **{slice_commit.key: slice_commit for slice_commit in slice_commits}}, taken


def _count_decided_rows(
    work: Work, digest: str, committed: CommittedSlices, taken: Sequence[ErasedCounts]
) -> dict[str, ErasedCounts]:
    """What is taken, with the events and rejects of the decisions as they are: a run may have decided since the look.

    Slices whose rejects follow another decision are left out.
    """
    lake, stream, rejected = work.lake, work.stream.name, CommittedSlices.read(work, rejects.TABLE)
    counted = {one.slice_key: one for one in taken if _is_followed(one.slice_key, committed, rejected)}
    versions = {events.TABLE: committed.version, rejects.TABLE: rejected.version} if counted else {}
    there = {name: lake.open_existing_table(stream, name, version) for name, version in versions.items()}
    found, mine = RowsOfKey(), f"{_IS_KEY.format(digest=digest)} AND {slice_is_one_of(counted)}"
    _count_events(found, there, mine)
    _count_rejects(found, there, mine)
    of_raw = {key: {name: one.rows.get(name, 0) for name in _OF_RAW} for key, one in counted.items()}
    return {key: replace(one, rows={**of_raw[key], **found.rows.get(key, {})}) for key, one in counted.items()}


def _is_followed(key: str, committed: CommittedSlices, rejected: CommittedSlices) -> bool:
    return committed.find_attempt(key) == rejected.find_attempt(key)


def list_origins(table: DeltaTable, digest: str, keys: Sequence[str]) -> dict[str, set[Origin]]:
    """The origins of the key's events, by slice."""
    found: dict[str, set[Origin]] = {}
    where = f"{_IS_KEY.format(digest=digest)} AND {slice_is_one_of(keys)}"
    for row in query(table, f"SELECT slice, {', '.join(ORIGIN)} FROM t WHERE {where}"):
        found.setdefault(row["slice"], set()).add(Origin.from_row(row))
    return found


def _read_current_versions(work: Work, slice_: Slice, events_version: int) -> dict[str, int]:
    """Versions in place of those that the decision saw: maintenance may have removed these long ago.

    Only a recomputation of rejects reads them. The ledger state that the decision used stays: the decision rests on it.
    """
    now = read_current_state(work, slice_, events_version)
    return {name: now[name] for name in (SEEN, DLQ_SEEN) if name in now}


def _from_rejects(
    work: Work, digest: str, decided: Mapping[str, SliceCommit], taken: Mapping[str, ErasedCounts]
) -> None:
    """Commit the rejects as they are, without the key, under the attempt of the decision that lost it.

    They are not computed again: what others accepted or published since would count, and give another number of them.
    """
    committed = CommittedSlices.read(work, rejects.TABLE)
    open_ = [
        slice_commit
        for key, slice_commit in decided.items()
        if committed.find_attempt(key) != slice_commit.attempt
        and _matches_without_key(slice_commit, committed.slice_commits.get(key), taken[key])
    ]
    if not open_:
        return
    attempts = {slice_commit.key: slice_commit.attempt for slice_commit in open_}
    rows = _with_attempts(_read_remaining_rows(work, rejects.TABLE, committed, digest, [*attempts]), attempts)
    slice_commits = [replace(slice_commit, rows=slice_commit.counts["rejects"]) for slice_commit in open_]
    _commit(work, rejects.TABLE, committed, rows, slice_commits, "origin_offset")


def _matches_without_key(decided: SliceCommit, rejected: SliceCommit | None, taken: ErasedCounts) -> bool:
    """Whether a decision is the one that rejects follow, without the key, and no other that was made since."""
    if rejected is None:
        return False
    try:
        return _without_times(_subtract_counts(decided.key, rejected.counts, taken.rows)) == _without_times(
            decided.counts
        )
    except UnbalancedError:
        return False


def _without_times(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in counts.items() if name not in {*_TIMES, SEEN, DLQ_SEEN}}


def _with_attempts(rows: DataFrame, attempts: Mapping[str, int]) -> DataFrame:
    from pyspark.sql import functions as F

    named = F.create_map(*[F.lit(part) for pair in attempts.items() for part in pair])[F.col("slice")]
    return rows.withColumn("attempt", named)


def _subtract_counts(key: str, counts: Mapping[str, int], rows: Mapping[str, int]) -> dict[str, int]:
    reasons, rules = (
        {name.removeprefix(prefix): n for name, n in rows.items() if name.startswith(prefix)}
        for prefix in (BY_REASON, BY_RULE)
    )
    without_times = {name: value for name, value in counts.items() if name not in _TIMES}
    return subtract_counts(
        key, without_times, rows.get("raw", 0), rows.get("tombstones", 0), rows.get("events", 0), reasons, rules
    )


def _read_event_spans(table: DeltaTable, digest: str, keys: Sequence[str]) -> dict[str, dict[str, int]]:
    """The first and last event time of what stays of each slice; a slice without events has none."""
    us = "arrow_cast(event_time, 'Int64')"
    rest = f"encode(sha256(key), 'hex') <> '{digest}' AND {slice_is_one_of(keys)}"
    sql = f"SELECT slice, min({us}) AS first, max({us}) AS last FROM t WHERE {rest} GROUP BY slice"
    return {row["slice"]: {"first_event_us": row["first"], "last_event_us": row["last"]} for row in query(table, sql)}


def _read_remaining_rows(
    work: Work, name: str, committed: CommittedSlices, digest: str, keys: Sequence[str]
) -> DataFrame:
    rows = read_table_version(work.spark, work.lake.build_table_path(work.stream.name, name), committed.version)
    return rows.where(slice_is_one_of(keys)).where(~_is_key(digest))


def _is_key(digest: str) -> Column:
    from pyspark.sql import functions as F

    return F.coalesce(F.sha2(F.col("key").cast("binary"), 256) == digest, F.lit(False))


def _commit(
    work: Work,
    name: str,
    committed: CommittedSlices,
    rows: DataFrame,
    slice_commits: Sequence[SliceCommit],
    spread: str,
) -> None:
    records = [committed.slice_commits[slice_commit.key].rows or 0 for slice_commit in slice_commits]
    with take_commit_turn(work, name):
        work.before_commit()
        commit_rows(work, name, rows, slice_commits, committed, files=raw.compute_file_count(records), spread=spread)
