"""The questions that the checks of versions put to the table of events, in SQL, read without a JVM."""

# The checked events are those of some slices, or all. All events of the same keys are read: what contradicts each other
# may lie in different slices.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from highwater.assets.parsing import select_content_fields
from highwater.assets.schema_evolution import build_evolved_stream
from highwater.field_rules import CONTAINERS
from highwater.orchestration.checking.candidate_keys import TOUCHED, TOUCHED_KEYS, CandidateKeys, CandidateTrait
from highwater.orchestration.checking.check_rules import SAMPLES
from highwater.resources.delta import (
    count_logged_rows,
    has_column,
    query,
    query_columns,
    quote_column,
    quote_text,
    slice_is_one_of,
    stream_all,
)
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream

# The name of the answers that are of no slice but of the whole stream.
STREAM = ""
# A slice of the main topic is compared with this many before and after it: otherwise the price of a check would grow
# with the table. The audit looks at the whole stream.
SLICES_AROUND = 1_000
# Events that one query sorts, some 100 bytes each; more are looked at in several ranges of keys.
EVENTS_AT_ONCE = 5_000_000
# Keys from which the bounds of these ranges are taken, about.
KEYS_SAMPLED = 20_000


@dataclass(frozen=True)
class Scope:
    """The checked events, and the events among which they are checked.

    Args:
        checked: the slices that are checked; None for the whole stream.
        among: the SQL condition of the events that are looked at.
        whole: whether that is all of them.
        since: where it is not, the first slice of the main topic that is looked at.
        key_range: the SQL condition of the keys that are looked at together.
    """

    checked: tuple[str, ...] | None
    among: str = "true"
    whole: bool = True
    since: str | None = None
    key_range: str = "true"

    @classmethod
    def from_slice_keys(cls, stream: Stream, keys: Sequence[str] | None) -> Scope:
        """Some slices among those around them, or everything.

        Retries may be of records from long ago, so a slice of a tier is compared with everything.
        """
        parsed = [SliceKey.parse(key) for key in keys or ()]
        if keys is None or any(key.topic != stream.topic for key in parsed):
            return cls(None if keys is None else tuple(keys))
        first = max(0, min(key.ordinal for key in parsed) - SLICES_AROUND)
        last = max(key.ordinal for key in parsed) + SLICES_AROUND
        bounds = [quote_text(str(SliceKey(stream.topic, ordinal))) for ordinal in (first, last)]
        main = quote_text(f"{stream.topic}@")
        among = f"(NOT starts_with(slice, {main}) OR slice BETWEEN {bounds[0]} AND {bounds[1]})"
        whole = first == 0
        return cls(tuple(keys), among, whole, None if whole else str(SliceKey(stream.topic, first)))

    @property
    def mine(self) -> str:
        """The SQL condition of the events that are checked."""
        return "true" if self.checked is None else slice_is_one_of(self.checked)

    @property
    def group(self) -> str:
        """The SQL of the group that an answer counts for: its slice, or the stream."""
        return quote_text(STREAM) if self.checked is None else "slice"

    def with_all_events(self) -> Scope:
        """The scope with the slices among all events."""
        return replace(self, among="true", whole=True, since=None)


@dataclass
class VersionFindings:
    """The findings of one slice, or of the stream: exact counts by class, and a few examples."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[Mapping[str, Any]] = field(default_factory=list)

    def keep(self, sample: Mapping[str, Any]) -> None:
        """Take an example, unless there are enough of its class: several ranges may each bring as many."""
        if sum(one["class"] == sample["class"] for one in self.samples) < SAMPLES:
            self.samples.append(sample)


# A contradiction is between events of one key. The history is that of the candidates among the checked events' keys.
_HISTORY = """
history AS (SELECT slice, e.key AS key, version, event_time, coalesce(retries, 0) AS retries, origin_topic,
                   origin_generation AS generation, origin_partition AS partition, origin_offset AS "offset",
                   origin_timestamp_ms, {content} AS content, {state} AS state, {mine} AS mine, {group} AS group_name,
                   concat(origin_partition, ':', origin_offset, CASE WHEN origin_generation > 0
                          THEN concat(' of generation ', origin_generation) ELSE '' END) AS origin
            FROM (SELECT * FROM t WHERE {among} AND {key_range}) e
            LEFT SEMI JOIN candidates ON e.key = candidates.key)
"""
# The version rule: of equal versions the earliest origin wins.
_RULE = 'origin_timestamp_ms, partition, "offset", generation'
_PLACE = 'generation, partition, "offset"'
_TOTALS = f"""
WITH {TOUCHED_KEYS},
     moved AS (SELECT key FROM (SELECT key, origin_partition FROM t WHERE {{among}} AND {{key_range}}) e
               {{joined}} GROUP BY key HAVING min(origin_partition) <> max(origin_partition))
SELECT {{group}} AS group_name, count(*) AS events, count(DISTINCT moved.key) AS keys_in_several_partitions
FROM (SELECT slice, key FROM t WHERE {{mine}} AND {{key_range}}) e LEFT JOIN moved ON e.key = moved.key
GROUP BY group_name
"""
_COPIES = f"""
WITH {{history}},
     counted AS (SELECT *, row_number() OVER (PARTITION BY key, version, content ORDER BY {_RULE}) AS copy
                 FROM history)
SELECT group_name, count(*) AS second_deliveries FROM counted WHERE mine AND copy > 1 GROUP BY group_name
"""
# Only evidence explains a fall: the record came back through a tier, it is the copy of an earlier record, it
# contradicts one, or its producer sent it late: it happened before its predecessor. A record from a tier also
# falls behind the versions that overtook it.
FALLS = f"""
WITH {{history}},
     seen AS (SELECT *,
                max(version) OVER before AS highest, max(event_time) OVER before AS latest,
                max(CASE WHEN retries = 0 THEN version END) OVER (PARTITION BY key, origin_topic, generation, partition)
                  AS untried,
                row_number() OVER (PARTITION BY key, version, content ORDER BY {_PLACE}) AS copy,
                row_number() OVER (PARTITION BY key, version ORDER BY {_PLACE}) AS of_version
              FROM history
              WINDOW before AS (PARTITION BY key, origin_topic, generation, partition ORDER BY "offset"
                                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)),
     placed AS (SELECT *,
                  max(CASE WHEN highest IS NULL OR version > highest THEN "offset" END) OVER before AS behind,
                  CASE WHEN retries > 0 THEN greatest(highest, untried) ELSE highest END AS higher
                FROM seen
                WINDOW before AS (PARTITION BY key, origin_topic, generation, partition ORDER BY "offset"
                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
SELECT group_name, key, version, higher AS highest, generation, partition, "offset",
       CASE WHEN version < highest THEN behind END AS behind,
       CASE WHEN retries > 0 THEN 'returns from the DLQ' WHEN copy > 1 THEN 'second deliveries'
            WHEN of_version > 1 THEN 'conflicts' WHEN event_time < latest THEN 'reordered by their producer'
            ELSE 'unexplained' END AS class
FROM placed WHERE mine AND version < higher
"""
CONFLICTS = f"""
WITH {{history}},
     numbered AS (SELECT *, row_number() OVER (PARTITION BY key, version ORDER BY {_RULE}) AS number FROM history),
     several AS (SELECT key, version, count(DISTINCT content) AS contents,
                        string_agg(CASE WHEN number <= {SAMPLES} THEN origin END, ', ') AS origins
                 FROM numbered GROUP BY key, version HAVING count(DISTINCT content) > 1),
     checked AS (SELECT DISTINCT group_name, key, version FROM history WHERE mine)
SELECT group_name, s.key AS key, s.version AS version, contents, origins, 'conflicts' AS class
FROM several s JOIN checked j ON s.key = j.key AND s.version = j.version
"""
# One event a version, the one that wins, beside that of the version before it.
_NEIGHBOURS = f"""
     firsts AS (SELECT *, row_number() OVER (PARTITION BY key, version ORDER BY {_RULE}) AS of_version FROM history),
     neighbours AS (SELECT *,
                      lag(version) OVER of_key AS version_before, lag(state) OVER of_key AS state_before,
                      lag(mine) OVER of_key AS mine_before, lag(group_name) OVER of_key AS group_before,
                      lag(origin) OVER of_key AS origin_before, lag("offset") OVER of_key AS offset_before,
                      lag(partition) OVER of_key AS partition_before,
                      lag(generation) OVER of_key AS generation_before, lag(origin_topic) OVER of_key AS topic_before
                    FROM firsts WHERE of_version = 1 WINDOW of_key AS (PARTITION BY key ORDER BY version))
"""
STATES = f"""
WITH {{history}}, {_NEIGHBOURS}
SELECT CASE WHEN mine THEN group_name ELSE group_before END AS group_name, key, version, state_before, state,
       origin_before, origin,
       'not allowed' AS class
FROM neighbours WHERE (mine OR mine_before)
  AND ((version = {{begin}} AND state <> {{first}}) OR (version_before = version - 1 AND NOT ({{allowed}})))
"""
_GAPS = f"""
WITH {{history}}, {_NEIGHBOURS}
SELECT CASE WHEN mine THEN group_name ELSE group_before END AS group_name, key, version,
       coalesce(version_before, {{floor}}) + 1 AS since, version - 1 AS until, origin_topic AS topic, generation,
       partition, "offset",
       CASE WHEN partition_before = partition AND generation_before = generation AND topic_before = origin_topic
            THEN offset_before ELSE -1 END AS after
FROM neighbours WHERE (mine OR mine_before) AND version > coalesce(version_before, {{floor}}) + 1
ORDER BY group_name, key, version
"""
_RANKED = f"""
SELECT * FROM (SELECT *, count(*) OVER (PARTITION BY group_name, class) AS found,
                      row_number() OVER (PARTITION BY group_name, class ORDER BY key, version) AS rank FROM ({{body}}))
WHERE rank <= {SAMPLES} ORDER BY group_name, class, rank
"""


# Traits of the keys that a query can report.
_ASKED_ABOUT: Mapping[str, tuple[CandidateTrait, ...]] = {
    _COPIES: (CandidateTrait.ODD,),
    FALLS: (CandidateTrait.ODD, CandidateTrait.FALLING),
    CONFLICTS: (CandidateTrait.ODD,),
    STATES: (CandidateTrait.ODD, CandidateTrait.MISPLACED),
    _GAPS: (CandidateTrait.ODD,),
}


class Questions:
    """The questions of a stream's checks within a scope, to the table of events as it was opened."""

    def __init__(self, events: DeltaTable, stream: Stream, scope: Scope) -> None:
        self.events = events
        self._stream = stream
        self._scopes = list(split_by_keys(events, scope))
        self._candidates = CandidateKeys(events, stream, _build_state_rules(stream))
        self.scope = scope

    def with_all_events(self) -> Questions:
        """The questions asked among all events."""
        return Questions(self.events, self._stream, self.scope.with_all_events())

    def count_events(self) -> dict[str, Counter[str]]:
        """Events, second deliveries, and keys that are in several partitions."""
        found: dict[str, Counter[str]] = {}
        for scope in self._scopes:
            joined = "" if scope.checked is None else TOUCHED
            names = {"mine": scope.mine, "group": scope.group, "among": scope.among, "key_range": scope.key_range}
            counted = query(self.events, _TOTALS.format(joined=joined, **names))
            for row in [*counted, *self._ask(_COPIES, scope)]:
                group = found.setdefault(row.pop("group_name"), Counter())
                group.update({name: int(count) for name, count in row.items()})
        return found

    def read_gaps(self) -> Iterator[dict[str, Any]]:
        """Versions between two events, or below the first, without an event; ordered by group."""
        for scope in self._scopes:
            # Below the lowest version that is looked at nothing is known, unless everything is looked at.
            floor = str((self._stream.first_version or 0) - 1) if scope.whole else "version - 1"
            yield from self._ask(_GAPS, scope, floor=floor)

    def read_findings(self, template: str) -> dict[str, VersionFindings]:
        """The findings of `FALLS`, `CONFLICTS` or `STATES` by group: their classes, and some of each."""
        found: dict[str, VersionFindings] = {}
        for scope in self._scopes:
            for row in self._ask(template, scope, around=_RANKED):
                group = found.setdefault(row.pop("group_name"), VersionFindings())
                count, rank = row.pop("found"), row.pop("rank")
                if rank == 1:
                    group.counts[row["class"]] += count
                group.keep(row)
        return found

    def _ask(self, template: str, scope: Scope, *, around: str = "{body}", floor: str = "") -> Iterator[dict[str, Any]]:
        """The answer about the candidates; there is none about other keys."""
        candidates = self._candidates.load_candidate_keys(scope, _ASKED_ABOUT[template])
        if candidates is None:
            return
        sql = around.format(body=self._build_sql(template, scope, floor))
        yield from stream_all({"t": self.events, "candidates": candidates}, sql)

    def _build_sql(self, template: str, scope: Scope, floor: str) -> str:
        rules = _build_state_rules(self._stream)
        history = _HISTORY.format(
            content=_build_content_hash(self._stream, self.events),
            state=rules["state"],
            mine=scope.mine,
            group=scope.group,
            among=scope.among,
            key_range=scope.key_range,
        )
        return template.format(
            history=history, first=rules["first"], allowed=rules["allowed"], floor=floor, begin=rules["begin"]
        )


def split_by_keys(events: DeltaTable, scope: Scope) -> Iterator[Scope]:
    """The scope, cut by keys so that no query sorts too many events; those of one key stay together."""
    rows = count_logged_rows(events)
    if rows > EVENTS_AT_ONCE and scope.checked is not None:
        sql = (
            f"SELECT count(*) AS rows FROM t LEFT SEMI JOIN (SELECT DISTINCT key FROM t WHERE "
            f"{scope.mine}) touched ON t.key = touched.key WHERE {scope.among}"
        )
        rows = int(query(events, sql)[0]["rows"])
    parts = max(1, math.ceil(rows / EVENTS_AT_ONCE))
    if parts == 1:
        yield scope
        return
    sampled = f"{scope.among} AND origin_offset % {max(1, rows // KEYS_SAMPLED)} = 0"
    for key_range in read_key_ranges(events, sampled, parts, quote_text):
        yield replace(scope, key_range=key_range)


def read_key_ranges(table: DeltaTable, sampled: str, parts: int, written: Callable[[Any], str]) -> Iterator[str]:
    """Conditions that cut the keys of a table into at most this many ranges, each with about as many rows.

    A range costs a comparison a row, where a hash would cost more than the questions. All
    rows of a key are in one range, even if the key has a large part of the table.

    Args:
        table: has the column `key`.
        sampled: the condition of the rows whose keys the bounds are taken from.
        parts: how many ranges.
        written: how a key is written in SQL.
    """
    keys = query_columns({"t": table}, f"SELECT key FROM t WHERE {sampled} ORDER BY key")["key"]
    bounds = [*dict.fromkeys(keys[len(keys) * number // parts] for number in range(1, parts) if keys)]
    bounds = [written(bound) for bound in bounds if bound != keys[0]]
    if not bounds:
        yield "true"
        return
    yield f"key < {bounds[0]}"
    for least, beyond in pairwise(bounds):
        yield f"key >= {least} AND key < {beyond}"
    yield f"key >= {bounds[-1]}"


def _build_content_hash(stream: Stream, events: DeltaTable) -> str:
    """One value for all that a record says, in SQL: a hash, with the nested values beside it, which have no text."""
    columns = select_content_fields(build_evolved_stream(stream, events))
    nested, fields = ([f for f in columns if (f.type in CONTAINERS) is one] for one in (True, False))
    texts = [f"encode({quote_column(f.name)}, 'hex')" if f.type == "binary" else quote_column(f.name) for f in fields]
    shown = ["event_time", *(["deleted"] if has_column(events, "deleted") else []), *texts]
    listed = ", ".join(f"coalesce(cast({name} AS VARCHAR), chr(30))" for name in shown)
    plain = f"md5(concat_ws(chr(31), {listed}))"
    if not nested:
        return plain
    # The order of a map's entries says nothing.
    beside = [
        f"array_sort(map_entries({quote_column(f.name)}))" if f.type == "map" else quote_column(f.name) for f in nested
    ]
    members = ", ".join(f"'c{number}', {value}" for number, value in enumerate([plain, *beside]))
    return f"named_struct({members})"


def _build_state_rules(stream: Stream) -> dict[str, str]:
    """In SQL: an event's state, the first version, the first state, and when a state may follow another."""
    machine = stream.transitions
    begin = 1 if stream.first_version is None else stream.first_version
    if machine is None:
        return {"state": "''", "begin": str(begin), "first": "''", "allowed": "true"}
    pairs = [
        f"(state_before = {quote_text(before)} AND state = {quote_text(after)})"
        for before, afters in machine.allowed.items()
        for after in afters
    ]
    return {
        "state": quote_column(machine.field),
        "begin": str(begin),
        "first": quote_text(machine.first),
        "allowed": " OR ".join(pairs) or "false",
    }
