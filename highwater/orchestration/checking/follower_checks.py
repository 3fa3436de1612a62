"""Checks of tables that follow a decision: published rejects and current events (I5, I6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.assets.parsing import select_column_fields
from highwater.assets.reclaims import NUMBER
from highwater.assets.schema_evolution import build_evolved_stream
from highwater.envelope import ORIGIN, ORIGIN_SQL, Origin
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.orchestration.checking.origin_checks import describe_sample
from highwater.orchestration.checking.plan_checks import find_commit_difference, find_plan_difference
from highwater.orchestration.checking.tie_break_check import IS_LATER
from highwater.reject_reasons import BY_REASON, BY_RULE, PERMANENT, format_count_name
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import has_column, query_all, read_count, select_common_columns, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.commit_records import CommitRecord
    from highwater.declaration import Stream
    from highwater.plans import PublicationRecord
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice


def check_rejects_published(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    """For each slice whether its rejects are the rows of dlq, and as many as were published.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    rejects, dlq = lake.open_stream_table(stream.name, "rejects"), lake.open_stream_table(stream.name, "dlq")
    if rejects is None:
        return dict.fromkeys(keys, CheckResult(passed=False, text="the slice is not in rejects"))
    slices = {slice_.key: slice_ for slice_ in ledger.get(keys)}
    decided, slice_commits = read_slice_commits(rejects, keys), {} if dlq is None else read_slice_commits(dlq, keys)
    sent = ledger.publications.read_for_slices(keys)
    wrong: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    if dlq is not None:
        numbers = {"rejected": read_count(rejects, NUMBER), "sent": read_count(dlq, NUMBER)}
        for row in query_all({"rejects": rejects, "dlq": dlq}, _UNLIKE.format(slices=slice_is_one_of(keys), **numbers)):
            wrong[row["slice"]].append(describe_sample(_describe_difference(row), Origin.from_row(row)))
    return {
        key: _build_rejects_result(slices[key], decided.get(key), slice_commits.get(key), sent.get(key), wrong[key])
        for key in keys
    }


_AS_PUBLISHED = (
    f"{ORIGIN_SQL}, origin_timestamp_ms, attempt, retries, reason, rule, detail, next_topic, first_failed_at"
)
# dlq does not keep it: it follows from the reason.
_PERMANENT = "reason IN (" + ", ".join(f"'{reason}'" for reason in sorted(PERMANENT)) + ")"
# A changed row appears on both sides.
_UNLIKE = f"""
SELECT slice, {ORIGIN_SQL}, sum(j) AS in_rejects, sum(d) AS in_dlq
FROM (SELECT slice, {_AS_PUBLISHED}, {{rejected}} AS {NUMBER}, coalesce(permanent, {_PERMANENT}) AS permanent,
             1 AS j, 0 AS d
      FROM rejects WHERE {{slices}}
      UNION ALL
      SELECT slice, {_AS_PUBLISHED}, {{sent}}, {_PERMANENT}, 0, 1 FROM dlq WHERE {{slices}})
GROUP BY slice, {_AS_PUBLISHED}, {NUMBER}, permanent HAVING sum(j) <> 1 OR sum(d) <> 1
ORDER BY slice, origin_partition, origin_offset
"""


def _describe_difference(row: Mapping[str, Any]) -> str:
    if row["in_rejects"] and row["in_dlq"]:
        return "there twice"
    return "rejected, and not published as such" if row["in_rejects"] else "published, and not rejected as such"


def _build_rejects_result(
    slice_: Slice,
    decided: SliceCommit | None,
    slice_commit: SliceCommit | None,
    sent: PublicationRecord | None,
    wrong: Sequence[Mapping[str, Any]],
) -> CheckResult:
    numbers = {
        "rejects": (decided.rows or 0) if decided else 0,
        **(_select_reject_counts(decided.counts) if decided else {}),
        "in_dlq": (slice_commit.rows or 0) if slice_commit else 0,
        "sent": sent.sent if sent else 0,
        "unlike": len(wrong),
    }
    problem = _find_publication_problem(slice_, decided, slice_commit, sent)
    kinds = Counter(str(one["problem"]) for one in wrong)
    texts = [problem] if problem else []
    texts += [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]
    if texts:
        return CheckResult(passed=False, text="; ".join(texts), numbers=numbers, samples=wrong[:SAMPLES])
    text = f"{numbers['rejects']:,} rejects, each published once" if numbers["rejects"] else "nothing was rejected"
    return CheckResult(passed=True, text=text, numbers=numbers)


def _select_reject_counts(counts: Mapping[str, int]) -> dict[str, int]:
    """The rejects of a decision by reason and by rule, as metadata names them."""
    return {format_count_name(n): count for n, count in counts.items() if count and n.startswith((BY_REASON, BY_RULE))}


def _find_publication_problem(
    slice_: Slice, decided: SliceCommit | None, slice_commit: SliceCommit | None, sent: PublicationRecord | None
) -> str | None:
    if decided is None:
        return "the slice is not in rejects"
    if problem := find_plan_difference(slice_, decided, "rejects"):
        return problem
    if not decided.rows:
        return None
    if slice_commit is None or sent is None:
        return f"{decided.rows:,} rejects, and " + (
            "the slice is not in dlq" if slice_commit is None else "none was sent"
        )
    if not decided.attempt == slice_commit.attempt == sent.attempt:
        return (
            f"rejects are of attempt {decided.attempt}, dlq of {slice_commit.attempt}, what was sent of {sent.attempt}"
        )
    # Rejects that were published for an earlier decision are in dlq, and were not sent again.
    expected = slice_commit.counts.get("sent", sent.sent)
    if sent.sent != expected or sent.sent > (slice_commit.rows or 0):
        return (
            f"the ledger names {sent.sent:,} that were sent, the commit of dlq of {expected:,} of {slice_commit.rows:,}"
        )
    return find_commit_difference(slice_, slice_commit, "dlq", decided.rows)


def check_current_follows_events(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    """For each slice whether `current` follows its events, row by row.

    Each row that names the slice must be one of its events, with the same columns. Each key of its events must have one
    row, of no lower version.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    events, current = lake.open_stream_table(stream.name, "events"), lake.open_stream_table(stream.name, "current")
    if events is None or current is None:
        return dict.fromkeys(keys, CheckResult(passed=False, text="there is no table of events, or none of current"))
    decided = read_slice_commits(events, keys)
    held = lake.load_commits(stream.name, "current", keys).records
    tables = {"e": events, "c": current}
    sql = _UNLIKE_EVENTS.format(
        columns=_build_event_columns(stream, tables),
        slices=slice_is_one_of(keys),
        updated=slice_is_one_of(keys, "updated_by_slice"),
        deleted="coalesce(deleted, false)" if has_column(events, "deleted") else "false",
        deletes="UNION ALL SELECT key, version, 0 FROM e WHERE deleted" if has_column(events, "deleted") else "",
    )
    wrong: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    for row in [*query_all(tables, sql), *_read_revived_rows(lake, stream, tables, keys)]:
        wrong[row["slice"]].append({**describe_sample(row["problem"], Origin.from_row(row)), "key": row["key"]})
    return {key: _build_current_result(decided.get(key), held.get(key), wrong[key]) for key in keys}


def _read_revived_rows(
    lake: Lake, stream: Stream, tables: Mapping[str, DeltaTable], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of `current` that a delete of a higher version should have removed: of the slices, or by their deletes."""
    if not has_column(tables["e"], "deleted"):
        return []
    sql = _REVIVED.format(mine=slice_is_one_of(keys, "b.slice"), updated=slice_is_one_of(keys, "updated_by_slice"))
    rows = query_all(tables, sql)
    # A delete whose slice is not merged yet is merged in its turn.
    merged = lake.list_slice_keys(stream.name, "current") if rows else set()
    return [{**row, "slice": row["group_name"]} for row in rows if row["slice"] in merged]


def _build_event_columns(stream: Stream, tables: Mapping[str, DeltaTable]) -> str:
    """The columns of an event in `current`; a field that was added to the stream counts once both tables have it."""
    fields = select_column_fields(build_evolved_stream(stream, tables["e"]))
    names = ["key", "version", "event_time", *[f.name for f in fields], *ORIGIN, "origin_timestamp_ms"]
    return ", ".join(select_common_columns(tables.values(), names))


# A stream's field may have any name, so a name that is added here is quoted and has a mark that no field has.
_UNLIKE_EVENTS = """
WITH brought AS (SELECT slice, {columns}, {deleted} AS "#deleted" FROM e WHERE {slices}),
     highest AS (SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY slice, key ORDER BY version DESC) AS "#place"
                                FROM brought) WHERE "#place" = 1),
     held AS (SELECT key, max(version) AS version, sum("#live") AS "#rows"
              FROM (SELECT key, version, 1 AS "#live" FROM c {deletes}) c
              LEFT SEMI JOIN highest ON c.key = highest.key GROUP BY key),
     unmatched AS (SELECT updated_by_slice AS slice, {columns} FROM c WHERE {updated}
                 EXCEPT SELECT slice, {columns} FROM brought WHERE NOT "#deleted")
SELECT slice, key, origin_topic, origin_generation, origin_partition, origin_offset,
       'in current, and not an event of the slice' AS problem FROM unmatched
UNION ALL
SELECT DISTINCT w.slice, w.key, w.origin_topic, w.origin_generation, w.origin_partition, w.origin_offset,
       CASE WHEN h.key IS NULL THEN 'the key is not in current' WHEN h."#rows" > 1 THEN 'in current more than once'
            ELSE 'current holds a lower version' END AS problem
FROM highest w LEFT JOIN held h ON w.key = h.key
WHERE h.key IS NULL OR h."#rows" > 1 OR h.version < w.version
ORDER BY slice, key
"""


_REVIVED = f"""
SELECT DISTINCT CASE WHEN {{mine}} THEN b.slice ELSE updated_by_slice END AS group_name, b.slice AS slice, b.key AS key,
       {", ".join(f"b.{name} AS {name}" for name in ORIGIN)},
       'in current, and deleted at a higher version' AS problem
FROM c s JOIN (SELECT slice, key, version, {ORIGIN_SQL}, origin_timestamp_ms FROM e WHERE deleted) b ON s.key = b.key
     AND (s.version < b.version OR (s.version = b.version AND {IS_LATER}))
WHERE {{mine}} OR {{updated}}
"""


def _build_current_result(
    decided: SliceCommit | None, held: CommitRecord | None, wrong: Sequence[Mapping[str, Any]]
) -> CheckResult:
    numbers = {"unlike": len(wrong)}
    texts = []
    if decided is None or held is None:
        texts.append(f"the slice is not in {'events' if decided is None else 'current'}")
    elif decided.attempt != held.attempt:
        texts.append(f"current follows attempt {held.attempt}, events are of attempt {decided.attempt}")
    elif None not in {decided.rows, held.rows} and decided.rows != held.rows:
        texts.append(f"the commit of current took {held.rows:,} events into account, of {decided.rows:,} in events")
    kinds = Counter(str(one["problem"]) for one in wrong)
    texts += [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]
    if texts:
        return CheckResult(passed=False, text="; ".join(texts), numbers=numbers, samples=wrong[:SAMPLES])
    return CheckResult(passed=True, text="current follows the events of the slice", numbers=numbers)
