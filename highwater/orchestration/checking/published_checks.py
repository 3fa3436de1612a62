"""The check `events_published`: the table `published` against events, origin by origin; the topic is not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.assets import event_json
from highwater.assets.duplicate_events import build_select_list
from highwater.assets.publication_log import TABLE, load_last_published, read_last_published, select_complete
from highwater.envelope import ORIGIN, ORIGIN_SQL, Origin
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.orchestration.checking.origin_checks import describe_sample
from highwater.orchestration.checking.plan_checks import find_plan_difference
from highwater.publishing import EventState
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import count_slice_rows, query, query_all, query_arrow, quote_column, slice_is_one_of
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

PUBLISHED = "events_published"
# Names of the counts in a slice's commit, by the state of its rows.
_COUNTED = {
    EventState.SENT.value: "sent",
    EventState.AGAIN.value: "second_deliveries",
    EventState.RETRACTED.value: "retracted",
}
# Retracted records are no events.
_UNLIKE = f"""
SELECT slice, {ORIGIN_SQL}, sum(e) AS in_events, sum(p) AS in_published, sum(s) AS in_sent
FROM (SELECT slice, {ORIGIN_SQL}, 1 AS e, 0 AS p, 0 AS s FROM events WHERE {{slices}}
      UNION ALL
      SELECT slice, {ORIGIN_SQL}, 0, 1, CASE WHEN state = '{EventState.SENT.value}' THEN 1 ELSE 0 END FROM published
      WHERE state <> '{EventState.RETRACTED.value}' AND {{slices}})
GROUP BY slice, {ORIGIN_SQL} HAVING sum(e) <> 1 OR sum(p) <> 1
ORDER BY slice, origin_partition, origin_offset
"""


def check_events_published(
    ledger: Ledger, lake: Lake, stream: Stream, keys: Sequence[str]
) -> dict[str, dict[str, CheckResult]]:
    """For each slice whether its events were sent or are second deliveries, and nothing else was sent of it.

    A slice that waits for its turn, or was reprocessed since, passes: the sensor sends it later.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    if stream.publishes is None:
        return {}
    events, published = lake.open_stream_table(stream.name, "events"), lake.open_stream_table(stream.name, TABLE)
    if events is None or published is None:
        waits = CheckResult(passed=True, text="nothing is published yet")
        return {PUBLISHED: dict.fromkeys(keys, waits)}
    decided, sent_slice_commits = read_slice_commits(events, keys), read_slice_commits(published, keys)
    sent = select_complete(sent_slice_commits)
    settled = [key for key in keys if key in sent and key in decided and sent[key].attempt == decided[key].attempt]
    wrong: dict[str, list[dict[str, Any]]] = {key: [] for key in settled}
    there: dict[str, Counter[str]] = {key: Counter() for key in settled}
    if settled:
        settled_slices = slice_is_one_of(settled)
        for row in query_all({"events": events, "published": published}, _UNLIKE.format(slices=settled_slices)):
            wrong[row["slice"]].append(describe_sample(_describe_problem(row), Origin.from_row(row)))
        for key in settled:  # one at a time: its values are held
            wrong[key] += [
                describe_sample("sent with another value", origin)
                for origin in _read_altered_origins(stream, events, published, key)
            ]
        for row in query(published, _THERE.format(slices=settled_slices)):
            key, rows = row["slice"], Counter({"rows": row["rows"], _COUNTED.get(row["state"], ""): row["rows"]})
            there[key] += rows + Counter({name: row[name] for name in ("late", "revisions")})
            there[key]["newest"] = max(there[key]["newest"], row["newest"] or 0)
    plans = {slice_.key: slice_ for slice_ in ledger.get(settled)}
    others = {key: _find_commit_problems(plans[key], sent[key], there[key]) for key in settled}
    bare = [key for key in keys if key not in sent_slice_commits]
    waiting = [key for key in keys if key in decided and key not in sent]
    lost = {**_list_skipped_slices(stream, published, waiting), **_list_uncommitted_slices(published, bare)}
    return {
        PUBLISHED: {
            key: _build_settled_result(decided[key], there[key], others[key], wrong[key])
            if key in wrong
            else _build_waiting_result(key in sent, lost.get(key))
            for key in keys
        }
    }


_THERE = """
SELECT slice, state, count(*) AS rows, count(late) AS late, sum(coalesce(revision, 0)) AS revisions,
       max(attempt) AS newest
FROM t WHERE {slices} GROUP BY slice, state
"""


def _list_skipped_slices(stream: Stream, published: DeltaTable, waiting: Sequence[str]) -> dict[str, str]:
    """Slices that are not published though one after them is: those of the main topic are sent in their order.

    A batch that broke off is sent to its end before what comes after it. A slice of a tier may come at any time.
    """
    last = read_last_published(published, stream.topic) if waiting else None
    if last is None:
        return {}
    end = SliceKey.parse(last)
    found = [key for key in waiting if (one := SliceKey.parse(key)).topic == end.topic and one < end]
    return dict.fromkeys(found, f"is not published, and {last} after it is")


def _list_uncommitted_slices(published: DeltaTable, bare: Sequence[str]) -> dict[str, str]:
    """Slices with rows and no commit: they are only ever written together, also of a batch that broke off."""
    rows = count_slice_rows(published, bare) if bare else {}
    return {
        key: f"has {count:,} rows, and the commit that they came with is gone" for key, count in rows.items() if count
    }


def _find_commit_problems(slice_: Slice, sent: SliceCommit, there: Mapping[str, int]) -> list[str]:
    """Differences of the commit of a slice from its plan or its rows; a count that it lacks is not compared.

    A row keeps the attempt under which it was decided while its event stays the same: only a later one is wrong.
    """
    problem = find_plan_difference(slice_, sent, TABLE)
    found = [problem] if problem else []
    said = {name: count for name, count in (*sent.counts.items(), ("rows", sent.rows)) if count is not None}
    names = [name for name in (*_COUNTED.values(), "late", "revisions", "rows") if name in said]
    if any(said[name] != there[name] for name in names):
        counts = ", ".join(f"{said[name]:,} {name}" for name in names)
        found.append(f"the commit names {counts}, and other numbers are there")
    if there["newest"] > sent.attempt:
        found.append(f"the commit is of attempt {sent.attempt}, and rows are of attempt {there['newest']}")
    return found


_PRINTS = f"""
SELECT {{fields}}, {", ".join(f"e.{name} AS {name}" for name in ORIGIN)}, p."#print" AS "#print"
FROM (SELECT {ORIGIN_SQL}, {{columns}} FROM events WHERE {{slices}}) e
JOIN (SELECT {ORIGIN_SQL}, fingerprint AS "#print" FROM published
      WHERE state <> '{EventState.RETRACTED.value}' AND {{slices}}) p
  ON {" AND ".join(f"e.{name} = p.{name}" for name in ORIGIN)}
"""


def _read_altered_origins(stream: Stream, events: DeltaTable, published: DeltaTable, key: str) -> list[Origin]:
    """Events of a slice whose value is not the one that was decided, by its fingerprint.

    The value is written as the stream is declared now, with null for a field that came later, as the sender wrote it
    then. If no event agrees, the declaration has changed since they were sent.
    """
    fields = ", ".join(f"e.{quote_column(one.name)}" for one in stream.stored_fields)
    sql = _PRINTS.format(fields=fields, columns=build_select_list(stream, events), slices=slice_is_one_of([key]))
    rows = query_arrow({"events": events, "published": published}, sql)
    prints = event_json.compute_fingerprints(event_json.encode_values(stream, rows))
    same = [ours == theirs for ours, theirs in zip(prints, rows["#print"].to_pylist(), strict=True)]
    found = rows.select(list(ORIGIN)).to_pylist() if any(same) else []
    return sorted(Origin.from_row(row) for row, alike in zip(found, same, strict=False) if not alike)


def _describe_problem(row: Mapping[str, Any]) -> str:
    if row["in_events"] and row["in_published"]:
        return "there twice"
    if row["in_events"]:
        return "an event, and neither sent nor a second delivery"
    return "sent, and no event" if row["in_sent"] else "left out as a second delivery, and no event"


def _build_waiting_result(before: bool, lost: str | None) -> CheckResult:  # noqa: FBT001 - a value, no mode
    if lost:
        return CheckResult(passed=False, text=f"the slice {lost}: restore the table")
    text = "was reprocessed since it was published, or what it repeats was" if before else "is not published yet"
    return CheckResult(passed=True, text=f"the slice {text}: its turn comes")


def _build_settled_result(
    decided: SliceCommit, there: Mapping[str, int], others: Sequence[str], wrong: Sequence[Mapping[str, Any]]
) -> CheckResult:
    counts = {name: there[name] for name in _COUNTED.values()}
    numbers = {"events": decided.rows or 0, **counts, "unlike": len(wrong)}
    kinds = Counter(str(one["problem"]) for one in wrong)
    texts = [*(f"{count:,} {kind}" for kind, count in sorted(kinds.items())), *others]
    if texts:
        return CheckResult(passed=False, text="; ".join(texts), numbers=numbers, samples=wrong[:SAMPLES])
    text = (
        f"{numbers['events']:,} events = {numbers['sent']:,} sent + {numbers['second_deliveries']:,} second deliveries"
    )
    return CheckResult(passed=True, text=text, numbers=numbers)


def describe_publication(lake: Lake, stream: Stream) -> str:
    """The offset up to which a stream is published, in a sentence; empty for one that publishes nothing.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    if stream.publishes is None:
        return ""
    last, table = load_last_published(lake, stream), lake.open_stream_table(stream.name, TABLE)
    if last is None or table is None:
        return f"nothing is sent to {stream.publishes.topic} yet"
    sql = "SELECT state, count(*) AS rows FROM t GROUP BY state"
    states = {row["state"]: row["rows"] for row in query(table, sql)}
    counts = ", ".join(f"{states.get(state, 0):,} {state}" for state in _COUNTED)
    return f"sent to {stream.publishes.topic} up to {last}: {counts}"
