"""How far slices are, by their commits in the lake without a JVM; and the rule of the check `versions_in_order`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from highwater.orchestration.checking.check_rules import (
    SAMPLES,
    CheckResult,
    CountedRows,
    SliceAttempts,
    build_conservation_result,
    check_order,
)
from highwater.orchestration.checking.tie_break_check import CLASS, IS_LATER, RULE, ComparedEvents, read_later_origins
from highwater.orchestration.checking.version_queries import Scope, VersionFindings, split_by_keys
from highwater.resources.commit_log import build_slices_query, read_slice_commits
from highwater.resources.delta import has_column, query, query_all, slice_is_one_of
from highwater.slice_commits import SliceCommit
from highwater.tables import select_stages

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake

# The tables that hold the records of a slice.
CONSERVED = ("raw", "events", "rejects")


def check_record_counts(
    tables: Mapping[str, DeltaTable], slice_commits: Mapping[str, Mapping[str, SliceCommit]], keys: Sequence[str]
) -> dict[str, CheckResult]:
    """For each slice whether its records are accounted for, by its commits and the rows that are there.

    Args:
        tables: the existing tables of `CONSERVED`, as they were opened.
        slice_commits: by table the slice commits in it, with their rows.
        keys: the slices.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    rows = {name: _count_rows(table, keys) for name, table in tables.items()}
    return {
        key: build_conservation_result(
            {name: slice_commits.get(name, {}).get(key) for name in CONSERVED},
            {name: rows.get(name, {}).get(key, CountedRows()) for name in CONSERVED},
        )
        for key in keys
    }


def _count_rows(table: DeltaTable, keys: Sequence[str]) -> dict[str, CountedRows]:
    """The rows of slices with the attempts that they name; those of raw name none."""
    attempt = "attempt" if has_column(table, "attempt") else "CAST(NULL AS INT)"
    sql = f"SELECT slice, count(*) AS rows, min({attempt}) AS least, max({attempt}) AS most FROM t"
    where = f"{slice_is_one_of(keys)}"
    return {
        row["slice"]: CountedRows(row["rows"], frozenset({row["least"], row["most"]} - {None}))
        for row in query(table, f"{sql} WHERE {where} GROUP BY slice")
    }


def check_version_order(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    """For each slice whether `current` is at or above every version that the slice brought, and by the rule.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    events, current = lake.open_stream_table(stream.name, "events"), lake.open_stream_table(stream.name, "current")
    if events is None or current is None:
        return dict.fromkeys(keys, CheckResult(passed=False, text="there is no table of events, or none of current"))
    sql = _ORDER.format(slices=slice_is_one_of(keys), deletes=_build_deletes_query(events))
    found = {row["slice"]: row for row in query_all({"e": events, "c": current}, sql)}
    counts = {key: found.get(key, {"keys": 0, "absent": 0, "behind": 0, "late": 0}) for key in keys}
    wrong = [key for key, row in counts.items() if row["absent"] or row["behind"]]
    samples = _read_samples(events, current, wrong, _build_deletes_query(events)) if wrong else {}
    late = [key for key, row in counts.items() if row["late"]]
    later = read_later_origins({"e": events, "c": current}, stream, ComparedEvents.from_slices(late)) if late else {}
    return {
        key: check_order(
            row["keys"],
            row["absent"],
            row["behind"],
            [*samples.get(key, ()), *_build_examples(later.get(key, VersionFindings()))],
            stream.name,
            later=later.get(key, VersionFindings()).counts[CLASS],
        )
        for key, row in counts.items()
    }


def _build_examples(later: VersionFindings) -> list[dict[str, object]]:
    return [{name: cell for name, cell in row.items() if name != "class"} for row in later.samples]


_RULE = ", ".join(RULE)
# An event is followed where `current` has a higher version of its key, or its own of the same origin or an earlier one.
# Joined row by row, since ranking the rows of a slice's keys takes three times as long; and only those of the highest
# version that a slice has of a key, since a key may come with hundreds.
_ORDER = f"""
WITH highest AS (SELECT slice AS of_slice, key AS of_key, max(version) AS of_version FROM e
                 WHERE {{slices}} GROUP BY slice, key),
     brought AS (SELECT slice, key, version, {_RULE}
                 FROM (SELECT slice, key, version, {_RULE} FROM e WHERE {{slices}}) r
                 LEFT SEMI JOIN highest ON slice = of_slice AND key = of_key AND version = of_version),
     in_table AS (SELECT key, version, {_RULE} FROM c {{deletes}}),
     beside AS (SELECT b.slice, b.key, max(b.version) AS version, max(s.version) AS in_table,
                  bool_or(s.version > b.version OR (s.version = b.version AND {IS_LATER} IS NOT TRUE)) AS followed
                FROM brought b LEFT JOIN in_table s ON b.key = s.key
                GROUP BY b.slice, b.key, b.origin_partition, b.origin_offset, b.origin_generation),
     held AS (SELECT slice, key, max(version) AS version, max(in_table) AS in_table,
                bool_and(coalesce(followed, false)) AS followed
              FROM beside GROUP BY slice, key)
SELECT slice, count(*) AS keys,
       sum(CASE WHEN in_table IS NULL THEN 1 ELSE 0 END) AS absent,
       sum(CASE WHEN in_table < version THEN 1 ELSE 0 END) AS behind,
       sum(CASE WHEN in_table = version AND NOT followed THEN 1 ELSE 0 END) AS late
FROM held GROUP BY slice
"""
# A delete is a version too: it is in events alone.
_DELETES = "UNION ALL SELECT key, version, {rule} FROM e WHERE deleted"
_COMMITTED_VERSIONS = f"""
     wanted AS (SELECT DISTINCT key FROM brought),
     in_table AS (SELECT c.key, max(c.version) AS version FROM (SELECT key, version, {_RULE} FROM c {{deletes}}) c
                  JOIN wanted ON c.key = wanted.key GROUP BY c.key)
"""
# For each key the winning event of its slice.
_EXAMPLES = f"""
WITH brought AS (SELECT * FROM (SELECT slice, key, version, origin_topic, origin_generation, origin_partition,
                                  origin_offset, row_number() OVER (PARTITION BY slice, key
                                    ORDER BY version DESC, origin_timestamp_ms, origin_partition, origin_offset,
                                             origin_generation) AS place
                                FROM e WHERE {{slices}}) WHERE place = 1), {_COMMITTED_VERSIONS},
     wrong AS (SELECT b.*, s.version AS in_current, row_number() OVER (PARTITION BY b.slice ORDER BY b.key) AS rank
               FROM brought b LEFT JOIN in_table s ON b.key = s.key WHERE s.version IS NULL OR s.version < b.version)
SELECT slice, key, version AS in_events, in_current, origin_topic, origin_generation, origin_partition, origin_offset
FROM wrong WHERE rank <= {SAMPLES} ORDER BY slice, key
"""


def _build_deletes_query(events: DeltaTable) -> str:
    """The deletes of events beside the rows of `current`, in SQL; nothing where events have none."""
    return _DELETES.format(rule=_RULE) if has_column(events, "deleted") else ""


def _read_samples(
    events: DeltaTable, current: DeltaTable, keys: Sequence[str], deletes: str
) -> dict[str, list[dict[str, object]]]:
    """For each slice some of the keys that are absent or behind, with both versions and the origin of the higher."""
    found: dict[str, list[dict[str, object]]] = {key: [] for key in keys}
    for row in query_all({"e": events, "c": current}, _EXAMPLES.format(slices=slice_is_one_of(keys), deletes=deletes)):
        found[row.pop("slice")].append(row)
    return found


@dataclass(frozen=True)
class ComparedKeys:
    """The keys of `current` beside those of events: how many, and those that differ."""

    keys: int
    found: VersionFindings


# Slices whose part of `current` does not follow their events yet are left out, and so are all of their keys.
_HIGHEST = """
WITH settled AS (SELECT slice FROM ({slices}) WHERE NOT {unsettled}),
     brought AS (SELECT key, max(version) AS version, bool_or({unsettled}) AS moving FROM e
                 WHERE {key_range} GROUP BY key),
     in_table AS (SELECT key, max(version) AS version, max(live) AS live, max(dead) AS dead
                  FROM (SELECT key, version, version AS live, NULL AS dead, updated_by_slice AS slice
                        FROM c {deletes}) c
                  LEFT SEMI JOIN settled ON c.slice = settled.slice
                  WHERE {key_range} GROUP BY key),
     beside AS (SELECT coalesce(b.key, s.key) AS key, b.version AS in_events, coalesce(s.live, s.version) AS in_current,
                  CASE WHEN s.live < s.dead THEN 'revived'
                       WHEN s.version IS NULL THEN 'absent' WHEN b.version IS NULL OR s.version > b.version THEN 'ahead'
                       WHEN s.version < b.version THEN 'behind' ELSE '' END AS class
                FROM brought b FULL OUTER JOIN in_table s ON b.key = s.key WHERE NOT coalesce(b.moving, false))
SELECT * FROM (SELECT *, count(*) OVER (PARTITION BY class) AS found,
                      row_number() OVER (PARTITION BY class ORDER BY key) AS rank FROM beside)
WHERE rank <= CASE WHEN class = '' THEN 1 ELSE {samples} END
"""


def compare_highest_versions(lake: Lake, stream: Stream, attempts: SliceAttempts, *, conflicts: bool) -> ComparedKeys:
    """Compare the version of each key in `current` with the highest one in events, over the whole stream.

    Args:
        lake: the tables.
        stream: the stream.
        attempts: the attempts in its tables, read before: later commits are left out.
        conflicts: whether a version has several contents; only then `current` may hold the wrong one of them.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    events, current = lake.open_stream_table(stream.name, "events"), lake.open_stream_table(stream.name, "current")
    if events is None or current is None:
        return ComparedKeys(0, VersionFindings())
    decided = {key: slice_commit.attempt for key, slice_commit in read_slice_commits(events).items()}
    followed = attempts.current or {}
    moving = [key for key, attempt in decided.items() if followed.get(key) != attempt]
    # After a RESTORE of events `current` holds slices that events lack.
    moving += followed.keys() - decided.keys()
    of_commits, slices = build_slices_query(events)
    tables = {"e": events, "c": current, **of_commits}
    keys, found = 0, VersionFindings()
    deletes = (
        "UNION ALL SELECT key, version, NULL, version AS dead, slice FROM e WHERE deleted"
        if has_column(events, "deleted")
        else ""
    )
    unsettled = slice_is_one_of(moving) if moving else "false"
    for scope in split_by_keys(events, Scope(None)):
        sql = _HIGHEST.format(
            unsettled=unsettled, key_range=scope.key_range, samples=SAMPLES, slices=slices, deletes=deletes
        )
        for row in query_all(tables, sql):
            count, rank = row.pop("found"), row.pop("rank")
            keys += count if rank == 1 else 0
            if row["class"]:
                found.counts[row["class"]] += count if rank == 1 else 0
                found.keep(row)
        if conflicts:
            for later in read_later_origins(
                tables, stream, ComparedEvents.from_key_range(scope.key_range, unsettled, slices)
            ).values():
                found.counts.update(later.counts)
                for sample in later.samples:
                    found.keep(sample)
    return ComparedKeys(keys, found)


SliceCommits = Mapping[str, Mapping[str, SliceCommit]]


def read_stream_commits(lake: Lake, stream: Stream, keys: Sequence[str] | None = None) -> SliceCommits:
    """For each table with commits of slices the slices that are in it, of these slices or of all.

    Raises:
        DependencyUnavailableError: the lake could not be read; a table that was never created is empty.
    """
    return {
        name: lake.load_slice_commits(stream.name, name, keys) for name in select_stages(stream) if name != "current"
    }


def read_attempts(lake: Lake, stream: Stream, keys: Sequence[str] | None = None) -> SliceAttempts:
    """The attempts in the stream's tables, of these slices or of all.

    Raises:
        DependencyUnavailableError: the lake could not be read; a table that was never created is empty.
    """
    return read_commit_attempts(lake, stream, read_stream_commits(lake, stream, keys), keys)


def read_commit_attempts(
    lake: Lake, stream: Stream, slice_commits: SliceCommits, keys: Sequence[str] | None = None
) -> SliceAttempts:
    """The attempts by slice commits that were read before, of these slices or of all; `current` is read now."""
    current = lake.load_commits(stream.name, "current", keys).attempts if stream.versioned else None
    return replace(_build_attempts(slice_commits), current=current)


def list_processed_slices(lake: Lake, stream: Stream, keys: Sequence[str]) -> set[str]:
    """The slices that are done but for `current` and `metrics`: read, decided, and their rejects published.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    found = _build_attempts(read_stream_commits(lake, stream, keys))
    return {key for key in keys if set(found.select_missing_tables(key)) <= {"metrics"}}


def _build_attempts(slice_commits: SliceCommits) -> SliceAttempts:
    nothing_to_publish = {
        key: slice_commit for key, slice_commit in slice_commits["rejects"].items() if not slice_commit.rows
    }
    tables = {**slice_commits, "dlq": {**nothing_to_publish, **slice_commits["dlq"]}}
    numbers = {
        name: {key: slice_commit.attempt for key, slice_commit in found.items()} for name, found in tables.items()
    }
    return SliceAttempts(**numbers, current=None)
