"""What follows a decision: its rejects as they were published, its events as they are current (I5, I6).

What belongs here: dlq and current held against the tables that they are made from, row by row. What does not: the split
itself (`orchestration.checking.origin_checks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from assets.parsing import PERMANENT, field_columns
from assets.reclaims import NUMBER
from highwater.envelope import ORIGIN, Origin
from highwater.folding import BASE, RECENT, Fold
from orchestration.checking.origin_checks import told
from orchestration.checking.plan_checks import another_commit, another_plan
from orchestration.checking.verdicts import Verdict
from resources.lake import columns_in_all, count_in, proofs_in, query, query_all, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.plans import Publication
    from highwater.proof import Proof
    from highwater.slices import Slice
    from resources.lake import Lake
    from resources.ledger import Ledger

# So many examples a slice; the counts are exact.
SAMPLES = 10


def rejects_published(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, Verdict]:
    """For each slice whether its rejects are the rows of dlq, and as many as were published.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    rejects, dlq = lake.table(stream.name, "rejects"), lake.table(stream.name, "dlq")
    if rejects is None:
        return dict.fromkeys(keys, Verdict(passed=False, text="the slice is not in rejects"))
    pieces = {piece.key: piece for piece in ledger.get(keys)}
    decided, proofs = proofs_in(rejects, keys), {} if dlq is None else proofs_in(dlq, keys)
    sent = ledger.publications(keys)
    wrong: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    if dlq is not None:
        numbers = {"rejected": count_in(rejects, NUMBER), "sent": count_in(dlq, NUMBER)}
        for row in query_all({"rejects": rejects, "dlq": dlq}, _UNLIKE.format(slices=slice_is_one_of(keys), **numbers)):
            wrong[row["slice"]].append(told(_unlike(row), Origin.of_row(row)))
    return {key: _published(pieces[key], decided.get(key), proofs.get(key), sent.get(key), wrong[key]) for key in keys}


_ORIGIN = ", ".join(ORIGIN)
_AS_PUBLISHED = f"{_ORIGIN}, origin_timestamp_ms, attempt, retries, reason, detail, next_topic, first_failed_at"
# dlq does not keep it: it follows from the reason.
_PERMANENT = "reason IN (" + ", ".join(f"'{reason}'" for reason in sorted(PERMANENT)) + ")"
# One that was altered stands on each side by itself.
_UNLIKE = f"""
SELECT slice, {_ORIGIN}, sum(j) AS in_rejects, sum(d) AS in_dlq
FROM (SELECT slice, {_AS_PUBLISHED}, {{rejected}} AS {NUMBER}, coalesce(permanent, {_PERMANENT}) AS permanent,
             1 AS j, 0 AS d
      FROM rejects WHERE proof IS NULL AND {{slices}}
      UNION ALL
      SELECT slice, {_AS_PUBLISHED}, {{sent}}, {_PERMANENT}, 0, 1 FROM dlq WHERE proof IS NULL AND {{slices}})
GROUP BY slice, {_AS_PUBLISHED}, {NUMBER}, permanent HAVING sum(j) <> 1 OR sum(d) <> 1
ORDER BY slice, origin_partition, origin_offset
"""


def _unlike(row: Mapping[str, Any]) -> str:
    if row["in_rejects"] and row["in_dlq"]:
        return "there twice"
    return "rejected, and not published as such" if row["in_rejects"] else "published, and not rejected as such"


def _published(
    piece: Slice,
    decided: Proof | None,
    proof: Proof | None,
    sent: Publication | None,
    wrong: Sequence[Mapping[str, Any]],
) -> Verdict:
    numbers = {
        "rejects": (decided.rows or 0) if decided else 0,
        "in_dlq": (proof.rows or 0) if proof else 0,
        "sent": sent.sent if sent else 0,
        "unlike": len(wrong),
    }
    problem = _unpublished(piece, decided, proof, sent)
    kinds = Counter(str(one["problem"]) for one in wrong)
    texts = [problem] if problem else []
    texts += [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]
    if texts:
        return Verdict(passed=False, text="; ".join(texts), numbers=numbers, samples=wrong[:SAMPLES])
    text = f"{numbers['rejects']:,} rejects, each published once" if numbers["rejects"] else "nothing was rejected"
    return Verdict(passed=True, text=text, numbers=numbers)


def _unpublished(piece: Slice, decided: Proof | None, proof: Proof | None, sent: Publication | None) -> str | None:
    if decided is None:
        return "the slice is not in rejects"
    if problem := another_plan(piece, decided, "rejects"):
        return problem
    if not decided.rows:
        return None
    if proof is None or sent is None:
        return f"{decided.rows:,} rejects, and " + ("the slice is not in dlq" if proof is None else "none was sent")
    if not decided.attempt == proof.attempt == sent.attempt:
        return f"rejects are of attempt {decided.attempt}, dlq of {proof.attempt}, what was sent of {sent.attempt}"
    # What was published of an earlier decision is in dlq, and was not sent again.
    expected = proof.counts.get("sent", sent.sent)
    if sent.sent != expected or sent.sent > (proof.rows or 0):
        return f"the ledger tells of {sent.sent:,} that were sent, the commit of dlq of {expected:,} of {proof.rows:,}"
    return another_commit(piece, proof, "dlq", decided.rows)


def current_follows_events(ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, Verdict]:
    """For each slice whether what `current` holds of it are the winners among its events, row by row.

    Of a slice that is folded together with others the rows that are left must be events of its own.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    events, current = lake.table(stream.name, "events"), lake.table(stream.name, "current")
    if events is None or current is None:
        return dict.fromkeys(keys, Verdict(passed=False, text="there is no table of events, or none of current"))
    pieces = {piece.key: piece for piece in ledger.get(keys)}
    decided, alone, folds = proofs_in(events, keys), proofs_in(current, keys), _folds(current)
    folded = [key for key in keys if key not in alone and any(fold.attempt_of(key) for fold in folds)]
    tables = {"e": events, "c": current}
    columns = _event_columns(stream, tables)
    wrong: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    for question, of in ((_WINNERS, list(alone)), (_LEFT, folded)):
        sql = question.format(columns=columns, slices=slice_is_one_of(of), folds=slice_is_one_of([BASE, RECENT]))
        for row in query_all(tables, sql) if of else ():
            wrong[row["slice"]].append({**told(_unlike_event(row), Origin.of_row(row)), "key": row["key"]})
    attempts = {key: max((fold.attempt_of(key) for fold in folds), default=0) for key in folded}
    attempts |= {key: proof.attempt for key, proof in alone.items()}
    rows = {key: decision.rows for key, decision in decided.items()}
    others = {key: another_commit(pieces[key], proof, "current", rows.get(key)) for key, proof in alone.items()}
    return {key: _follows(decided.get(key), attempts.get(key), others.get(key), wrong[key]) for key in keys}


def _folds(current: DeltaTable) -> list[Fold]:
    where = f"proof IS NOT NULL AND {slice_is_one_of([BASE, RECENT])}"
    return [Fold.from_json(str(row["proof"])) for row in query(current, f"SELECT proof FROM t WHERE {where}")]


def _event_columns(stream: Stream, tables: Mapping[str, DeltaTable]) -> str:
    """What `current` has of an event; of a field that was added to the stream as soon as both tables have it."""
    names = ["key", "version", "event_time", *[f.name for f in field_columns(stream)], *ORIGIN, "origin_timestamp_ms"]
    return ", ".join(columns_in_all(tables.values(), names))


# A stream's field may have any name that is no word of ours: so what is added here has no name that a field has.
_WINNERS = """
SELECT slice, key, origin_topic, origin_generation, origin_partition, origin_offset,
       sum("#e") AS wanted, sum("#c") AS standing
FROM (SELECT slice, {columns}, 1 AS "#e", 0 AS "#c"
      FROM (SELECT *, row_number() OVER (PARTITION BY slice, key ORDER BY version DESC, origin_timestamp_ms,
                                         origin_partition, origin_offset, origin_generation) AS "#place"
            FROM e WHERE proof IS NULL AND {slices}) WHERE "#place" = 1
      UNION ALL
      SELECT slice, {columns}, 0, 1 FROM c WHERE proof IS NULL AND {slices} AND updated_by_slice = slice
      UNION ALL
      SELECT slice, {columns}, 0, 2 FROM c WHERE proof IS NULL AND {slices} AND updated_by_slice <> slice)
GROUP BY slice, {columns} HAVING sum("#e") <> 1 OR sum("#c") <> 1
ORDER BY slice, key
"""
# Others may have won over a slice's rows since, so none of them must be there.
_LEFT = """
SELECT slice, key, origin_topic, origin_generation, origin_partition, origin_offset,
       sum("#e") AS wanted, sum("#c") AS standing
FROM (SELECT slice, {columns}, 1 AS "#e", 0 AS "#c" FROM e WHERE proof IS NULL AND {slices}
      UNION ALL
      SELECT updated_by_slice AS slice, {columns}, 0, 1
      FROM c WHERE proof IS NULL AND {folds} AND updated_by_{slices})
GROUP BY slice, {columns} HAVING sum("#c") > 1 OR (sum("#c") = 1 AND sum("#e") = 0)
ORDER BY slice, key
"""


def _unlike_event(row: Mapping[str, Any]) -> str:
    if row["standing"] > 1:
        return "in current more than once, or under another slice"
    return "in current, and not the winner among the events" if row["standing"] else "the winner, and not in current"


def _follows(
    decided: Proof | None, attempt: int | None, problem: str | None, wrong: Sequence[Mapping[str, Any]]
) -> Verdict:
    numbers = {"unlike": len(wrong)}
    texts = [problem] if problem else []
    if decided is None or attempt is None:
        texts.append(f"the slice is not in {'events' if decided is None else 'current'}")
    elif decided.attempt != attempt:
        texts.append(f"current follows attempt {attempt}, events are of attempt {decided.attempt}")
    kinds = Counter(str(one["problem"]) for one in wrong)
    texts += [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]
    if texts:
        return Verdict(passed=False, text="; ".join(texts), numbers=numbers, samples=wrong[:SAMPLES])
    return Verdict(passed=True, text="the slice's rows in current are the winners among its events", numbers=numbers)
