"""The questions that the checks of versions put to the table of events, in SQL, read without a JVM.

What belongs here: the queries, and how their answers are kept small. What does not: which verdict follows
(`orchestration.verdicts`), or where a missing version is (`orchestration.missing_versions`).

Judged are the events of some slices, or all of them. Looked at are all events of the same keys: what contradicts each
other may lie in different slices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from assets.parsing import field_columns
from highwater.slices import SliceKey
from resources.lake import query, sizes, slice_is_one_of, stream_rows

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream, Transitions

# So many examples of each class; the counts are exact.
SAMPLES = 10
# The name of the answers that are of no slice but of the whole stream.
STREAM = ""
# A slice of the main topic is held against so many before and behind it: otherwise the price of a check would grow with
# the table. The whole stream is looked at by the audit.
SLICES_AROUND = 1_000
# Events that one query sorts, some 100 bytes each; more are looked at in several portions of keys.
EVENTS_AT_ONCE = 5_000_000


@dataclass(frozen=True)
class Scope:
    """Which events are judged, and among which.

    Args:
        judged: the slices that are judged; None for the whole stream.
        among: the SQL condition of the events that are looked at.
        whole: whether that is all of them.
        portion: the SQL condition of the keys that are looked at together.
    """

    judged: tuple[str, ...] | None
    among: str = "true"
    whole: bool = True
    portion: str = "true"

    @classmethod
    def of(cls, stream: Stream, keys: Sequence[str] | None) -> Scope:
        """Some slices among those around them, or everything.

        Retries may be of records from long ago, so a slice of a tier is held against everything.
        """
        parsed = [SliceKey.parse(key) for key in keys or ()]
        if keys is None or any(key.topic != stream.topic for key in parsed):
            return cls(None if keys is None else tuple(keys))
        first = max(0, min(key.ordinal for key in parsed) - SLICES_AROUND)
        last = max(key.ordinal for key in parsed) + SLICES_AROUND
        bounds = [text(str(SliceKey(stream.topic, ordinal))) for ordinal in (first, last)]
        main = text(f"{stream.topic}@")
        among = f"(NOT starts_with(slice, {main}) OR slice BETWEEN {bounds[0]} AND {bounds[1]})"
        return cls(tuple(keys), among, whole=first == 0)

    @property
    def mine(self) -> str:
        """The SQL condition of the events that are judged."""
        return "true" if self.judged is None else slice_is_one_of(self.judged)

    @property
    def told(self) -> str:
        """What an answer is told of, in SQL: its slice, or the stream."""
        return text(STREAM) if self.judged is None else "slice"

    def widened(self) -> Scope:
        """The same slices among all events."""
        return replace(self, among="true", whole=True)


@dataclass
class Found:
    """What was found of one slice, or of the stream: exact counts by class, and a few examples."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: list[Mapping[str, Any]] = field(default_factory=list)


# A contradiction is between events of one key. The history is that of all keys that the judged events have.
_HISTORY = """
touched AS (SELECT DISTINCT key FROM t WHERE proof IS NULL AND {mine} AND {portion}),
history AS (SELECT slice, e.key AS key, version, event_time, coalesce(retries, 0) AS retries, origin_topic,
                   origin_generation AS generation, origin_partition AS partition, origin_offset AS "offset",
                   origin_timestamp, {content} AS content, {state} AS state, {mine} AS mine, {told} AS told,
                   concat(origin_partition, ':', origin_offset, CASE WHEN origin_generation > 0
                          THEN concat(' of generation ', origin_generation) ELSE '' END) AS origin
            FROM (SELECT * FROM t WHERE proof IS NULL AND {among} AND {portion}) e {joined})
"""
# The version rule: of equal versions the earliest origin wins.
_RULE = 'origin_timestamp, partition, "offset", generation'
_PLACE = 'generation, partition, "offset"'
_TOTALS = f"""
WITH {{history}},
     counted AS (SELECT *, row_number() OVER (PARTITION BY key, version, content ORDER BY {_RULE}) AS copy
                 FROM history),
     moved AS (SELECT key, count(DISTINCT partition) AS partitions FROM history GROUP BY key)
SELECT told, count(*) AS events, sum(CASE WHEN copy > 1 THEN 1 ELSE 0 END) AS second_deliveries,
       count(DISTINCT CASE WHEN partitions > 1 THEN c.key END) AS keys_in_several_partitions
FROM counted c JOIN moved ON c.key = moved.key WHERE mine GROUP BY told
"""
# A fall is explained by evidence alone: it came back through a tier, it is the copy of a record before it, it
# contradicts one, or its producer sent it late: it happened before what stands before it. What comes back through a
# tier falls also behind what overtook it.
_FALLS = f"""
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
SELECT told, key, version, higher AS highest, generation, partition, "offset",
       CASE WHEN version < highest THEN behind END AS behind,
       CASE WHEN retries > 0 THEN 'returns from the DLQ' WHEN copy > 1 THEN 'second deliveries'
            WHEN of_version > 1 THEN 'conflicts' WHEN event_time < latest THEN 'reordered by their producer'
            ELSE 'unexplained' END AS class
FROM placed WHERE mine AND version < higher
"""
_CONFLICTS = f"""
WITH {{history}},
     numbered AS (SELECT *, row_number() OVER (PARTITION BY key, version ORDER BY {_RULE}) AS number FROM history),
     several AS (SELECT key, version, count(DISTINCT content) AS contents,
                        string_agg(CASE WHEN number <= {SAMPLES} THEN origin END, ', ') AS origins
                 FROM numbered GROUP BY key, version HAVING count(DISTINCT content) > 1),
     judged AS (SELECT DISTINCT told, key, version FROM history WHERE mine)
SELECT told, s.key AS key, s.version AS version, contents, origins, 'conflicts' AS class
FROM several s JOIN judged j ON s.key = j.key AND s.version = j.version
"""
# One event a version, the one that wins, beside that of the version before it.
_NEIGHBOURS = f"""
     firsts AS (SELECT *, row_number() OVER (PARTITION BY key, version ORDER BY {_RULE}) AS of_version FROM history),
     neighbours AS (SELECT *,
                      lag(version) OVER of_key AS version_before, lag(state) OVER of_key AS state_before,
                      lag(mine) OVER of_key AS mine_before, lag(told) OVER of_key AS told_before,
                      lag(origin) OVER of_key AS origin_before, lag("offset") OVER of_key AS offset_before,
                      lag(partition) OVER of_key AS partition_before,
                      lag(generation) OVER of_key AS generation_before, lag(origin_topic) OVER of_key AS topic_before
                    FROM firsts WHERE of_version = 1 WINDOW of_key AS (PARTITION BY key ORDER BY version))
"""
_STATES = f"""
WITH {{history}}, {_NEIGHBOURS}
SELECT CASE WHEN mine THEN told ELSE told_before END AS told, key, version, state_before, state, origin_before, origin,
       'not allowed' AS class
FROM neighbours WHERE (mine OR mine_before)
  AND ((version = {{begin}} AND state <> {{first}}) OR (version_before = version - 1 AND NOT ({{allowed}})))
"""
_GAPS = f"""
WITH {{history}}, {_NEIGHBOURS}
SELECT CASE WHEN mine THEN told ELSE told_before END AS told, key, version,
       coalesce(version_before, {{floor}}) + 1 AS since, version - 1 AS until, origin_topic AS topic, generation,
       partition, "offset",
       CASE WHEN partition_before = partition AND generation_before = generation AND topic_before = origin_topic
            THEN offset_before ELSE -1 END AS after
FROM neighbours WHERE (mine OR mine_before) AND version > coalesce(version_before, {{floor}}) + 1
ORDER BY told, key, version
"""
_RANKED = f"""
SELECT * FROM (SELECT *, count(*) OVER (PARTITION BY told, class) AS found,
                      row_number() OVER (PARTITION BY told, class ORDER BY key, version) AS rank FROM ({{body}}))
WHERE rank <= {SAMPLES} ORDER BY told, class, rank
"""


class Questions:
    """The questions of a stream's checks within a scope, to the table of events as it was opened."""

    def __init__(self, events: DeltaTable, stream: Stream, scope: Scope) -> None:
        self.events = events
        self._stream = stream
        self._scopes = list(portions(events, scope))
        self.scope = scope

    def widened(self) -> Questions:
        """The same questions among all events."""
        return Questions(self.events, self._stream, self.scope.widened())

    def totals(self) -> dict[str, Counter[str]]:
        """Events, second deliveries, and keys that stand in several partitions."""
        found: dict[str, Counter[str]] = {}
        for scope in self._scopes:
            for row in query(self.events, self._text(_TOTALS, scope)):
                told = found.setdefault(row.pop("told"), Counter())
                told.update({name: int(count) for name, count in row.items()})
        return found

    def falls(self) -> dict[str, Found]:
        """Versions below a higher one before them, by what explains them."""
        return self._ranked(_FALLS)

    def conflicts(self) -> dict[str, Found]:
        """Versions with several contents."""
        return self._ranked(_CONFLICTS)

    def transitions(self) -> dict[str, Found]:
        """States that may not follow the one of the version before."""
        return self._ranked(_STATES)

    def gaps(self) -> Iterator[dict[str, Any]]:
        """Versions between two, or below the first, of which there is no event; ordered by what they are told of."""
        for scope in self._scopes:
            # Below the lowest version that is looked at nothing is known, unless everything is looked at.
            floor = str((self._stream.first_version or 0) - 1) if scope.whole else "version - 1"
            yield from stream_rows(self.events, self._text(_GAPS, scope, floor=floor))

    def _ranked(self, template: str) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for scope in self._scopes:
            for row in query(self.events, _RANKED.format(body=self._text(template, scope))):
                told = found.setdefault(row.pop("told"), Found())
                count, rank = row.pop("found"), row.pop("rank")
                if rank == 1:
                    told.counts[row["class"]] += count
                told.samples.append(row)
        return found

    def _text(self, template: str, scope: Scope, floor: str = "") -> str:
        machine = self._stream.transitions
        first, allowed = _rules(machine) if machine else ("''", "true")
        history = _HISTORY.format(
            content=_content(self._stream),
            state=quoted(machine.field) if machine else "''",
            mine=scope.mine,
            told=scope.told,
            among=scope.among,
            portion=scope.portion,
            joined="" if scope.judged is None else "LEFT SEMI JOIN touched ON e.key = touched.key",
        )
        begin = 1 if self._stream.first_version is None else self._stream.first_version
        return template.format(history=history, first=first, allowed=allowed, floor=floor, begin=begin)


def portions(events: DeltaTable, scope: Scope) -> Iterator[Scope]:
    """The scope, cut by keys so that no query sorts too many events; those of one key stay together."""
    rows = sum(size.rows or 0 for size in sizes(events).values())
    if rows > EVENTS_AT_ONCE and scope.judged is not None:
        sql = (
            f"SELECT count(*) AS rows FROM t LEFT SEMI JOIN (SELECT DISTINCT key FROM t WHERE proof IS NULL AND "
            f"{scope.mine}) touched ON t.key = touched.key WHERE {scope.among}"
        )
        rows = int(query(events, sql)[0]["rows"])
    parts = max(1, math.ceil(rows / EVENTS_AT_ONCE))
    if parts == 1:
        yield scope
        return
    bounds = [f"{16**4 * number // parts:04x}" for number in range(parts)] + ["g"]
    for least, beyond in pairwise(bounds):
        share = "substr(md5(key), 1, 4)"
        yield replace(scope, portion=f"{share} >= '{least}' AND {share} < '{beyond}'")


def _content(stream: Stream) -> str:
    """One value for all that an event says, in SQL."""
    columns = ["event_time", *[f.name for f in field_columns(stream)]]
    listed = ", ".join(f"coalesce(cast({quoted(name)} AS VARCHAR), '')" for name in columns)
    return f"md5(concat_ws(chr(31), {listed}))"


def _rules(machine: Transitions) -> tuple[str, str]:
    """The first state, and the condition under which a state may follow another, in SQL."""
    pairs = [
        f"(state_before = {text(before)} AND state = {text(after)})"
        for before, afters in machine.allowed.items()
        for after in afters
    ]
    return text(machine.first), " OR ".join(pairs) or "false"


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """A text in SQL."""
    return "'" + value.replace("'", "''") + "'"
