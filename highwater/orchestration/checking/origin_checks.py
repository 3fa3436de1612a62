"""Every record of raw in one place, origin by origin (I5)."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from highwater.assets.garbled_envelopes import DETAIL as NAMED_EARLY
from highwater.envelope import ORIGIN_SQL, Origin, build_headers, open_envelope
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.orchestration.checking.plan_checks import find_plan_difference
from highwater.orchestration.checking.slice_status import CONSERVED, check_record_counts
from highwater.reclaims import count_reclaims, is_stale
from highwater.resources.commit_log import read_slice_commits, with_row_counts
from highwater.resources.delta import has_column, query, query_all, read_count, slice_is_one_of, stream_rows
from highwater.resources.offset_predicates import build_in_any, build_in_none
from highwater.retention import count_expired_rows
from highwater.routing import find_tier

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice


def check_offsets_accounted(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    """For each slice whether every record of raw is in one place, by slice commits, by counts and origin by origin.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    tables = {name: table for name in CONSERVED if (table := lake.open_stream_table(stream.name, name)) is not None}
    slice_commits = {name: with_row_counts(table, read_slice_commits(table, keys)) for name, table in tables.items()}
    counted = check_record_counts(tables, slice_commits, keys)
    if len(tables) < len(CONSERVED):
        return counted
    slices = {slice_.key: slice_ for slice_ in ledger.get(keys)}
    discarded_origins = {discard.origin for discard in ledger.discards.list_for_stream(stream.name)}
    wrong = _read_misplaced_origins(
        tables,
        stream,
        slices,
        slice_commits,
        count_reclaims(ledger.reclaims.list_for_stream(stream.name)),
        discarded_origins,
    )
    found = {}
    for key, result in counted.items():
        decision = slice_commits["events"].get(key)
        problem = None if decision is None else find_plan_difference(slices[key], decision, "events")
        found[key] = _build_origins_result(result, problem, wrong[key])
    return found


def _build_origins_result(counted: CheckResult, problem: str | None, wrong: Sequence[Mapping[str, Any]]) -> CheckResult:
    numbers = {**counted.numbers, "misplaced": len(wrong)}
    kinds = Counter(str(one["problem"]) for one in wrong)
    totals = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items()))
    texts = [] if counted.passed else [counted.text]
    texts += [problem] if problem else []
    texts += [f"origins: {totals}"] if totals else []
    text = "; ".join(texts) if texts else f"{counted.text}, origin by origin"
    return CheckResult(not texts, text, numbers, wrong[:SAMPLES])


def _read_misplaced_origins(
    tables: Mapping[str, DeltaTable],
    stream: Stream,
    slices: Mapping[str, Slice],
    slice_commits: Mapping[str, Mapping[str, SliceCommit]],
    reclaim_numbers: Mapping[Origin, int],
    discarded_origins: Collection[Origin],
) -> dict[str, list[dict[str, Any]]]:
    """For each slice the origins that are not in exactly one place, or are there otherwise than in raw.

    For a slice whose rows of raw expired by age, only origins in two places or outside the plan are reported.
    """
    found: dict[str, list[dict[str, Any]]] = {key: [] for key in slices}
    decisions, gone = (
        slice_commits["events"],
        {key for key, slice_commit in slice_commits["raw"].items() if count_expired_rows(slice_commit)},
    )
    for row in _query_slices(tables, _TWICE, gone):
        found[row["slice"]].append(describe_sample("in two places", Origin.from_row(row)))
    for key in sorted(gone):
        found[key] += _read_unplanned_origins(tables, stream, slices[key])
    main = [key for key, slice_ in slices.items() if slice_.topic == stream.topic and key not in gone]
    for tombstone in ("false", "value IS NULL"):
        matching_keys = [key for key in main if _select_tombstone_condition(decisions.get(key)) == tombstone]
        for row in _query_slices(tables, _MISPLACED, matching_keys, tombstone=tombstone):
            found[row["slice"]].append(describe_sample(_describe_problem(row), Origin.from_row(row)))
    # Values are read of slices with rejects alone.
    rejected = [key for key in main if key in decisions and decisions[key].counts.get("rejects")]
    for name, question, keys in (("events", _ALTERED_EVENTS, main), ("rejects", _ALTERED_REJECTS, rejected)):
        # Records of the main topic were never rejected before, even if they were reclaimed from the DLQ since.
        tried = f"{read_count(tables[name], 'retries')} <> 0"
        other_key = _OTHER_KEY if stream.has_record_key else "false"
        for row in _query_slices(tables, question, keys, tried=tried, other_key=other_key):
            found[row["slice"]].append(describe_sample(f"in {name} otherwise than in raw", Origin.from_row(row)))
    # The owner of records of other systems depends on the ledger at decision time: the counts show it.
    tiers = [key for key, slice_ in slices.items() if slice_.topic in stream.tier_topics and key not in gone]
    for key in tiers:
        found[key] = _read_misplaced_in_tier(
            tables, stream, slices[key], decisions.get(key), reclaim_numbers, discarded_origins
        )
    return found


def _read_unplanned_origins(tables: Mapping[str, DeltaTable], stream: Stream, slice_: Slice) -> list[dict[str, Any]]:
    """Origins in events and rejects of a slice of the main topic that its plan does not have."""
    if slice_.topic != stream.topic:
        return []
    spans = ((slice_.generation, p, r.start, r.end) for p, r in slice_.ranges.items())
    where = f"{slice_is_one_of([slice_.key])} AND {build_in_none(spans)}"
    sql = f"SELECT {ORIGIN_SQL} FROM t WHERE {where}"
    rows = [row for name in ("events", "rejects") for row in query(tables[name], sql)]
    return [describe_sample("in events or rejects, and not planned", Origin.from_row(row)) for row in rows]


def build_tombstone_condition(stream: Stream, value: str = "value") -> str:
    """The condition, in SQL, of a record of raw that is neither an event nor a reject."""
    return "false" if stream.tombstones_delete else f"{value} IS NULL"


def _select_tombstone_condition(decision: SliceCommit | None) -> str:
    """That condition for a slice, by its decision: the declaration may have changed since."""
    return "value IS NULL" if decision is not None and decision.counts.get("tombstones") else "false"


def _query_slices(
    tables: Mapping[str, DeltaTable], question: str, keys: Collection[str], **named: str
) -> list[dict[str, Any]]:
    if not keys:
        return []
    conditions = {"slices": slice_is_one_of(keys)} | {f"{x}_slices": slice_is_one_of(keys, f"{x}.slice") for x in "xr"}
    return query_all(tables, question.format(**conditions, **named))


# One pass, which finds records only in raw, records not in raw, and records that exist twice.
_MISPLACED = f"""
SELECT slice, {ORIGIN_SQL}, sum(r) AS in_raw, sum(n) AS tombstones, sum(e) AS in_events, sum(j) AS in_rejects
FROM (SELECT slice, topic AS origin_topic, generation AS origin_generation, "partition" AS origin_partition,
             "offset" AS origin_offset, 1 AS r, CASE WHEN {{tombstone}} THEN 1 ELSE 0 END AS n, 0 AS e, 0 AS j
      FROM raw WHERE {{slices}}
      UNION ALL SELECT slice, {ORIGIN_SQL}, 0, 0, 1, 0 FROM events WHERE {{slices}}
      UNION ALL SELECT slice, {ORIGIN_SQL}, 0, 0, 0, 1 FROM rejects WHERE {{slices}})
GROUP BY slice, {ORIGIN_SQL} HAVING sum(r) <> 1 OR sum(n) + sum(e) + sum(j) <> 1
ORDER BY slice, origin_partition, origin_offset
"""
# The part that can be checked without raw.
_TWICE = f"""
SELECT slice, {ORIGIN_SQL}
FROM (SELECT slice, {ORIGIN_SQL} FROM events WHERE {{slices}}
      UNION ALL SELECT slice, {ORIGIN_SQL} FROM rejects WHERE {{slices}})
GROUP BY slice, {ORIGIN_SQL} HAVING count(*) > 1
ORDER BY slice, origin_partition, origin_offset
"""
_SAME_RECORD = """x.slice = r.slice AND origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE {x_slices} AND {r_slices}"""
# A key that is declared strict is the record's own.
_OTHER_KEY = "(arrow_cast(x.key, 'Binary') IS DISTINCT FROM arrow_cast(r.key, 'Binary'))"
_ALTERED_EVENTS = f"""
SELECT x.slice, {ORIGIN_SQL} FROM events x JOIN raw r ON {_SAME_RECORD}
  AND ({{other_key}}
       OR (origin_timestamp_ms IS DISTINCT FROM r.timestamp_ms) OR {{tried}})
ORDER BY x.slice, origin_partition, origin_offset
"""
_ALTERED_REJECTS = f"""
SELECT x.slice, {ORIGIN_SQL} FROM rejects x JOIN raw r ON {_SAME_RECORD}
  AND ((x.key IS DISTINCT FROM r.key) OR (x.value IS DISTINCT FROM r.value)
       OR (x.headers IS DISTINCT FROM r.headers) OR (origin_timestamp_ms IS DISTINCT FROM r.timestamp_ms) OR {{tried}})
ORDER BY x.slice, origin_partition, origin_offset
"""


def _describe_problem(row: Mapping[str, Any]) -> str:
    places = row["tombstones"] + row["in_events"] + row["in_rejects"]
    if not row["in_raw"]:
        return "in events or rejects, and not in raw"
    if row["in_raw"] > 1:
        return "twice in raw"
    return "in no place" if not places else "in two places"


def describe_sample(problem: str, origin: Origin) -> dict[str, Any]:
    """An example for the check's page."""
    return {"problem": problem, **origin._asdict()}


def _read_misplaced_in_tier(
    tables: Mapping[str, DeltaTable],
    stream: Stream,
    slice_: Slice,
    decision: SliceCommit | None,
    reclaim_numbers: Mapping[Origin, int],
    discarded_origins: Collection[Origin],
) -> list[dict[str, Any]]:
    """The misplaced origins of a tier's slice, whose origins are in the envelopes of its records.

    Several records may have one origin: one counts, the others are superseded. All are superseded where another slice
    accepted the origin, a person discarded it, or they were published before it was reclaimed from the DLQ.
    """
    slice_condition = f"{slice_is_one_of([slice_.key])}"
    rows = stream_rows(
        tables["raw"],
        f"SELECT {RECORD} FROM t WHERE NOT ({_select_tombstone_condition(decision)}) AND {slice_condition}",
    )
    early = _read_early_records(tables["rejects"], slice_, slice_condition)
    copies = Counter(_copy_of(stream, slice_, row, early) for row in rows)
    read, counting, contents = Counter[Origin](), set(), defaultdict[Origin, set[str]](set)
    tries = defaultdict[Origin, set[int | None]](lambda: {None})  # a row without the number is no error
    for one, times in copies.items():
        read[one.origin] += times
        counting |= set() if is_stale(reclaim_numbers, one.origin, one.reclaims) else {one.origin}
        contents[one.origin] |= {one.as_event, one.as_reject}
        tries[one.origin].add(one.retries)
    placed, altered = Counter[Origin](), list[tuple[Origin, str]]()
    for name, columns in _select_record_columns(stream).items():
        tried = "retries" if has_column(tables[name], "retries") else "NULL AS retries"
        for row in stream_rows(tables[name], f"SELECT {ORIGIN_SQL}, {tried}, {columns} FROM t WHERE {slice_condition}"):
            origin = Origin.from_row(row)
            placed[origin] += 1
            same = _build_digest(row) in contents[origin] and row["retries"] in tries[origin]
            altered += [(origin, name)] if origin in read and not same else []
    found = [describe_sample("in two places", origin) for origin, times in sorted(placed.items()) if times > 1]
    found += [describe_sample(f"in {name} otherwise than in raw", origin) for origin, name in sorted(altered)]
    found += [
        describe_sample("in events or rejects, and not in raw", origin)
        for origin in sorted(placed.keys() - read.keys())
    ]
    left = counting.difference(placed, discarded_origins)
    found += [
        describe_sample("in no place", origin)
        for origin in sorted(left - _read_origins_elsewhere(tables, stream, slice_, left))
    ]
    superseded = sum(read.values()) - len(read.keys() & placed.keys())
    decided = decision.counts.get("superseded", 0) if decision else superseded
    if superseded != decided and not found:
        found = [
            describe_sample(f"among {superseded:,} superseded, and {decided:,} were decided", o)
            for o in sorted(read)[:1]
        ]
    return found


# A record in raw, and the row of events or rejects that came of it; times as numbers.
RECORD = """"partition", "offset", timestamp_ms AS ms, key, value, headers"""
_TIME = "origin_timestamp_ms AS ms"
_PLACED = {"events": f"{_TIME}, arrow_cast(key, 'Binary') AS key", "rejects": f"{_TIME}, key, value, headers"}


def _select_record_columns(stream: Stream) -> dict[str, str]:
    """The columns of a record in events and rejects; the key of an event is the record's only where that is strict."""
    return _PLACED if stream.has_record_key else {**_PLACED, "events": _TIME}


class _Copy(NamedTuple):
    """A record on a tier.

    Args:
        origin: the record's identity.
        reclaims: how often it had been reclaimed from the DLQ when this copy was published.
        retries: how often it was rejected by then.
        as_event, as_reject: digests of what events and rejects hold of it unchanged.
    """

    origin: Origin
    reclaims: int
    retries: int
    as_event: str
    as_reject: str


def _read_early_records(rejects: DeltaTable, slice_: Slice, slice_condition: str) -> set[tuple[int, int]]:
    """Partition and offset of records whose envelope named an origin before that was decided: by now it may be."""
    columns = f"origin_partition, origin_offset FROM t WHERE {slice_condition} AND origin_topic = '{slice_.topic}'"
    rows = query(rejects, f"SELECT {columns} AND detail = '{NAMED_EARLY}'")
    return {(row["origin_partition"], row["origin_offset"]) for row in rows}


def _copy_of(stream: Stream, slice_: Slice, row: Mapping[str, Any], early: Collection[tuple[int, int]]) -> _Copy:
    mapped = {**row, "headers": None} if (row["partition"], row["offset"]) in early else row
    origin, reclaims, retries, ms = parse_record_envelope(stream, slice_, mapped)
    whole = {**row, "ms": ms}
    as_event = {"ms": ms, "key": row["key"]} if stream.has_record_key else {"ms": ms}
    return _Copy(origin, reclaims, retries, _build_digest(as_event), _build_digest(whole))


def parse_record_envelope(stream: Stream, slice_: Slice, row: Mapping[str, Any]) -> tuple[Origin, int, int, int]:
    """The origin of a row of raw, of a tier's slice: its own place if it has no envelope.

    Returns:
        The record's identity, how often it had been reclaimed from the DLQ when this copy was published, how often it
        was rejected by then, and its timestamp in milliseconds since 1970.
    """
    envelope = open_envelope(build_headers(row), stream.is_origin)
    if envelope is None:
        origin = Origin(slice_.topic, slice_.generation, row["partition"], row["offset"])
        return origin, 0, find_tier(stream, slice_.topic), row["ms"]
    return envelope.origin, envelope.reclaims, envelope.attempt, envelope.timestamp


def _build_digest(row: Mapping[str, Any]) -> str:
    values = [row[name] for name in ("ms", "key", "value", "headers") if name in row]
    return hashlib.sha256(repr(values).encode()).hexdigest()


def _read_origins_elsewhere(
    tables: Mapping[str, DeltaTable], stream: Stream, slice_: Slice, origins: Collection[Origin]
) -> set[Origin]:
    """The origins that another slice accepted, or accepted once and has reprocessed since.

    That one holds it as a reject then: another slice of a tier, or one of the main topic that rejected it later than
    this slice was planned.
    """
    if not origins:
        return set()
    least, most = (pick(origin.offset for origin in origins) for pick in (min, max))
    spans = ((*origin, origin.offset + 1) for origin in origins)
    between = f"origin_offset BETWEEN {least} AND {most} AND {build_in_any(spans)}"
    where = f"slice <> '{slice_.key}' AND {between}"
    later = f"arrow_cast(first_failed_at, 'Int64') > {int(slice_.planned_at.timestamp() * 1_000_000)}"
    rejected = f"{where} AND (NOT starts_with(slice, '{stream.topic}@') OR {later})"
    rows = [
        *query_all(tables, f"SELECT DISTINCT {ORIGIN_SQL} FROM events WHERE {where}"),
        *query_all(tables, f"SELECT DISTINCT {ORIGIN_SQL} FROM rejects WHERE {rejected}"),
    ]
    return {Origin.from_row(row) for row in rows}
