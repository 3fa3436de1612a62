"""Keys that the version checks look at one by one: a version may be doubled, missing or out of place."""

# Most keys have each version once, lack none, rise along the offsets, and have no state out of place.
# The checks find nothing about such keys, so only the others are read with all of their columns: ten million
# events of a sound stream take 33 s of processor time instead of ten minutes.

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from highwater.resources.delta import run_query

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.orchestration.checking.version_queries import Scope


class CandidateTrait(Enum):
    """The reason why a key is a candidate."""

    ODD = "a version is there twice, or lacking, or came back from the DLQ, or the first state is not the first"
    FALLING = "a version follows a higher one"
    MISPLACED = "a state follows one that it may not follow"


# The events of the keys that are checked, with what the traits rest on.
TOUCHED_KEYS = "touched AS (SELECT DISTINCT key FROM t WHERE {mine} AND {key_range})"
TOUCHED = "LEFT SEMI JOIN touched ON e.key = touched.key"
_SLIM = f"""
WITH {TOUCHED_KEYS},
slim AS (SELECT e.* FROM (SELECT key, version, coalesce(retries, 0) AS retries, origin_topic AS topic,
                                 origin_generation AS generation, origin_partition AS partition,
                                 origin_offset AS "offset", {{state}} AS state
                          FROM t WHERE {{among}} AND {{key_range}}) e {{joined}})
"""
_ODD = """
SELECT key FROM (SELECT key, version, count(*) AS events, max(retries) AS retries,
                        bool_or({begins_otherwise}) AS begins_otherwise
                 FROM slim GROUP BY key, version)
GROUP BY key HAVING max(events) > 1 OR max(retries) > 0 OR bool_or(begins_otherwise) OR {incomplete}
"""
# Where versions count and none lacks, whatever falls has a neighbour that it falls behind: a join finds it in a fifth
# of the time that sorting takes. The keys that lack one, or have one twice, are odd already.
_NEIGHBOURS = """
SELECT DISTINCT key FROM (
  SELECT b.key AS key, a.state AS state_before, b.state AS state,
         b."offset" < a."offset" AND a.partition = b.partition AND a.generation = b.generation AND a.topic = b.topic
           AS falls
  FROM slim a JOIN slim b ON a.key = b.key AND a.version + 1 = b.version) WHERE {wrong}
"""
_SORTED = """
SELECT DISTINCT key FROM (
  SELECT key, version, lag(version) OVER (PARTITION BY key, topic, generation, partition ORDER BY "offset") AS before
  FROM slim) WHERE version < before
"""


class CandidateKeys:
    """The keys of a table of events that have traits, each found when it is first asked for.

    Args:
        events: the table as it was opened.
        stream: the stream, for what its versions are like.
        rules: an event's state, the first version and state, and the allowed pairs of `state_before` and `state`, in
            SQL.
    """

    def __init__(self, events: DeltaTable, stream: Stream, rules: Mapping[str, str]) -> None:
        self._events = events
        self._stream = stream
        self._rules = rules
        self._found: dict[str, pa.Table] = {}
        # A table of its own, since there may be millions of them; it goes with this object.
        self._folder = tempfile.TemporaryDirectory(prefix="highwater-candidates-")
        self._tables = 0

    def load_candidate_keys(self, scope: Scope, traits: Iterable[CandidateTrait]) -> DeltaTable | None:
        """The keys with one of the traits, as a table with the column `key`; None if there are none.

        Raises:
            DependencyUnavailableError: the lake could not be read.
        """
        import pyarrow as pa
        from deltalake import DeltaTable, write_deltalake

        texts = dict.fromkeys(self._build_query(scope, trait) for trait in traits)
        found = pa.concat_tables([self._load_cached(text) for text in texts])
        if not len(found):
            return None
        self._tables += 1
        path = str(Path(self._folder.name) / str(self._tables))
        write_deltalake(path, found)
        return DeltaTable(path)

    def _load_cached(self, text: str) -> pa.Table:
        if text not in self._found:
            self._found[text] = run_query({"t": self._events}, text)
        return self._found[text]

    def _build_query(self, scope: Scope, trait: CandidateTrait) -> str:
        joined = "" if scope.checked is None else TOUCHED
        slim = _SLIM.format(
            mine=scope.mine, among=scope.among, key_range=scope.key_range, joined=joined, state=self._rules["state"]
        )
        if trait is CandidateTrait.ODD:
            return slim + _ODD.format(
                begins_otherwise=self._begins_otherwise, incomplete=self._build_incomplete_condition(scope)
            )
        if self._stream.first_version is None and trait is CandidateTrait.FALLING:
            return slim + _SORTED
        # Both traits in one pass, where one join finds both.
        wrong = f"NOT ({self._rules['allowed']})"
        return slim + _NEIGHBOURS.format(wrong=wrong if self._stream.first_version is None else f"falls OR {wrong}")

    @property
    def _begins_otherwise(self) -> str:
        """The condition of a first version in another state than the first one; a version that is a time has none."""
        if not self._stream.transitions or not self._stream.versions_count:
            return "false"
        return f"version = {self._rules['begin']} AND state <> {self._rules['first']}"

    def _build_incomplete_condition(self, scope: Scope) -> str:
        """The condition of a key that lacks a version; below the lowest one that is looked at nothing is known."""
        first = self._stream.first_version
        if first is None:
            return "false"
        return "count(*) <> max(version) - min(version) + 1" + (f" OR min(version) > {first}" if scope.whole else "")
