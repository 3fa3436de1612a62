"""What was sent to the topic of accepted events, held against the events, origin by origin.

What belongs here: the check `events_published`, and how far a stream is published. What does not: sending
(`assets.published`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from assets import event_json
from assets.copies import fields_of
from assets.sent import SENDING, TABLE, complete, last_published
from highwater.envelope import ORIGIN, Origin
from highwater.publishing import State
from orchestration.origin_checks import SAMPLES, told
from orchestration.verdicts import Verdict
from resources.lake import proofs_in, query, query_all, query_arrow, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.proof import Proof
    from resources.lake import Lake

PUBLISHED = "events_published"
_ORIGIN = ", ".join(ORIGIN)
# What was retracted is no event.
_UNLIKE = f"""
SELECT slice, {_ORIGIN}, sum(e) AS in_events, sum(p) AS in_published
FROM (SELECT slice, {_ORIGIN}, 1 AS e, 0 AS p FROM events WHERE proof IS NULL AND {{slices}}
      UNION ALL
      SELECT slice, {_ORIGIN}, 0, 1 FROM published
      WHERE proof IS NULL AND state <> '{State.RETRACTED.value}' AND {{slices}})
GROUP BY slice, {_ORIGIN} HAVING sum(e) <> 1 OR sum(p) <> 1
ORDER BY slice, origin_partition, origin_offset
"""


def names(stream: Stream) -> list[str]:
    """The checks of this table that a stream has."""
    return [PUBLISHED] if stream.publishes else []


def events_published(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, dict[str, Verdict]]:
    """For each slice whether its events were sent or are second deliveries, and nothing else was sent of it.

    A slice that waits for its turn, or was decided anew since, passes: the sensor sends what is to be sent.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    if stream.publishes is None:
        return {}
    events, published = lake.table(stream.name, "events"), lake.table(stream.name, TABLE)
    if events is None or published is None:
        waits = Verdict(passed=True, text="nothing is published yet")
        return {PUBLISHED: dict.fromkeys(keys, waits)}
    decided, sent = proofs_in(events, keys), complete(proofs_in(published, keys))
    settled = [key for key in keys if key in sent and key in decided and sent[key].attempt == decided[key].attempt]
    wrong: dict[str, list[dict[str, Any]]] = {key: [] for key in settled}
    states: dict[str, Counter[str]] = {key: Counter() for key in settled}
    if settled:
        mine = slice_is_one_of(settled)
        for row in query_all({"events": events, "published": published}, _UNLIKE.format(slices=mine)):
            wrong[row["slice"]].append(told(_problem(row), Origin.of_row(row)))
        for key in settled:  # one at a time: its values are held
            wrong[key] += [
                told("sent with another value", origin) for origin in _altered(stream, events, published, key)
            ]
        counted = f"SELECT slice, state, count(*) AS rows FROM t WHERE proof IS NULL AND {mine} GROUP BY slice, state"
        for row in query(published, counted):
            states[row["slice"]][row["state"]] = row["rows"]
    return {
        PUBLISHED: {
            key: _settled(decided[key], sent[key], states[key], wrong[key]) if key in wrong else _waiting(key in sent)
            for key in keys
        }
    }


_PRINTS = f"""
SELECT {{fields}}, {", ".join(f"e.{name} AS {name}" for name in ORIGIN)}, p."#print" AS "#print"
FROM (SELECT {_ORIGIN}, {{columns}} FROM events WHERE proof IS NULL AND {{slices}}) e
JOIN (SELECT {_ORIGIN}, fingerprint AS "#print" FROM published
      WHERE proof IS NULL AND state <> '{State.RETRACTED.value}' AND {{slices}}) p
  ON {" AND ".join(f"e.{name} = p.{name}" for name in ORIGIN)}
"""


def _altered(stream: Stream, events: DeltaTable, published: DeltaTable, key: str) -> list[Origin]:
    """Events of a slice whose value is not the one that was judged, by its fingerprint.

    The value is written as the stream is declared now. Events without a field that came later are left out; and where
    no event agrees, the declaration was another one when they were sent.
    """
    fields = ", ".join('e."' + one.name.replace('"', '""') + '"' for one in stream.fields)
    asked = _PRINTS.format(fields=fields, columns=fields_of(stream, events), slices=slice_is_one_of([key]))
    rows = query_arrow({"events": events, "published": published}, asked)
    for one in stream.fields:
        rows = rows.filter(rows[one.name].is_valid())
    if not len(rows):
        return []
    prints = event_json.fingerprints(event_json.values(stream, rows))
    same = [ours == theirs for ours, theirs in zip(prints, rows["#print"].to_pylist(), strict=True)]
    found = rows.select(list(ORIGIN)).to_pylist() if any(same) else []
    return sorted(Origin.of_row(row) for row, alike in zip(found, same, strict=False) if not alike)


def _problem(row: Mapping[str, Any]) -> str:
    if row["in_events"] and row["in_published"]:
        return "there twice"
    return "an event, and neither sent nor a second delivery" if row["in_events"] else "sent, and no event"


def _waiting(before: bool) -> Verdict:  # noqa: FBT001 - a value, no mode
    text = "was decided anew since it was published" if before else "is not published yet"
    return Verdict(passed=True, text=f"the slice {text}: its turn comes")


def _settled(decided: Proof, sent: Proof, states: Mapping[str, int], wrong: Sequence[Mapping[str, Any]]) -> Verdict:
    numbers = {
        "events": decided.rows or 0,
        "sent": states.get(State.SENT.value, 0),
        "second_deliveries": states.get(State.AGAIN.value, 0),
        "retracted": states.get(State.RETRACTED.value, 0),
        "unlike": len(wrong),
    }
    kinds = Counter(str(one["problem"]) for one in wrong)
    texts = [f"{count:,} {kind}" for kind, count in sorted(kinds.items())]
    if any(numbers[name] != sent.counts[name] for name in ("sent", "second_deliveries", "retracted")):
        told_of = ", ".join(f"{sent.counts[name]:,} {name}" for name in ("sent", "second_deliveries", "retracted"))
        texts.append(f"the commit tells of {told_of}, and other numbers are there")
    if texts:
        return Verdict(passed=False, text="; ".join(texts), numbers=numbers, samples=wrong[:SAMPLES])
    text = (
        f"{numbers['events']:,} events = {numbers['sent']:,} sent + {numbers['second_deliveries']:,} second deliveries"
    )
    return Verdict(passed=True, text=text, numbers=numbers)


def standing_line(lake: Lake, stream: Stream) -> str:
    """How far a stream is published, in a sentence; empty for one that publishes nothing.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    if stream.publishes is None:
        return ""
    last, table = last_published(lake, stream), lake.table(stream.name, TABLE)
    if last is None or table is None:
        return f"nothing is sent to {stream.publishes.topic} yet"
    asked = f"SELECT state, count(*) AS rows FROM t WHERE proof IS NULL AND slice <> '{SENDING}' GROUP BY state"
    states = {row["state"]: row["rows"] for row in query(table, asked)}
    counts = ", ".join(f"{states.get(state.value, 0):,} {state.value}" for state in State)
    return f"sent to {stream.publishes.topic} up to {last}: {counts}"
