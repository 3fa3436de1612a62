"""Missing versions: where the record of each may be, if anywhere."""

# A record whose value cannot be read has no version. Its key is known all the same, by the record's key, so it may be
# the one that is missed.

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from highwater.assets.reclaims import NUMBER
from highwater.envelope import ORIGIN, ORIGIN_SQL, Origin
from highwater.orchestration.checking.version_queries import Questions, VersionFindings
from highwater.reclaims import is_stale
from highwater.resources.commit_log import read_slice_commits_since
from highwater.resources.delta import query_all, read_count

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.slice_commits import SliceCommit

UNDECIDED = "not decided yet"
TO_COME = "may still come"
NOWHERE = "nowhere"
# Gaps whose rejects are looked up together.
GAPS_AT_ONCE = 10_000


@dataclass(frozen=True)
class VersionGap:
    """Versions of a key that no event has, between two that events have, or below the first.

    Args:
        group: the slice, or the stream, that the gap counts for.
        key: the key.
        since, until: the first and the last of them.
        topic, generation, partition, offset: the origin of the event above them.
        after: the offset of the event below them; -1 where there is none in the same partition.
    """

    group: str
    key: str
    since: int
    until: int
    topic: str
    generation: int
    partition: int
    offset: int
    after: int

    def __len__(self) -> int:
        return self.until - self.since + 1


@dataclass(frozen=True)
class OpenReject:
    """A record that was rejected and not accepted since.

    Args:
        version: None where its value cannot be read.
        where: the topic that it was sent to.
        tier: whether it comes back by itself.
        due: when it does, at the earliest; None where it does not, or was not sent yet.
        origin: the record, for people.
        is_reclaimed: whether a person reclaimed it from the DLQ since: its slice reprocesses it, and no copy counts.
    """

    version: int | None
    where: str
    tier: bool
    due: datetime | None
    origin: str
    is_reclaimed: bool = False

    @property
    def kind(self) -> str:
        """The class that it is counted as."""
        if self.is_reclaimed:
            return "may be reclaimed" if self.version is None else "is reclaimed"
        kinds = {
            (True, True): "waits in a tier",
            (True, False): "is parked",
            (False, True): "may wait in a tier",
            (False, False): "may be parked",
        }
        return kinds[self.version is not None, self.tier]

    @property
    def text(self) -> str:
        """The record in words."""
        if self.is_reclaimed:
            may = "may be " if self.version is None else ""
            return f"{may}{self.origin}, which its slice reprocesses when it is materialised again"
        due = "" if self.due is None else f", due at {self.due:%Y-%m-%d %H:%M:%S} UTC or a little later"
        return f"{'may be ' if self.version is None else ''}{self.origin}, on {self.where}{due}"


@dataclass(frozen=True)
class DecidedRange:
    """The decided part of a partition of the main topic.

    Args:
        hole: the end of its last offsets that are in no decided slice, below those that are; 0 if there are none.
        head: where the newest decided slice begins.
        begin: where the first one that is known does.
    """

    hole: int
    head: int
    begin: int = 0


Reaches = Mapping[tuple[str, int, int], DecidedRange]


def build_reaches(decided: Iterable[SliceCommit], topic: str) -> dict[tuple[str, int, int], DecidedRange]:
    """The decided part of each partition of the main topic, by topic, generation and number."""
    ranges: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
    for slice_commit in decided:
        if slice_commit.slice_.topic == topic:
            for partition, offsets in slice_commit.slice_.ranges.items():
                if len(offsets):
                    place = (topic, slice_commit.slice_.generation, partition)
                    ranges.setdefault(place, []).append((offsets.start, offsets.end))
    return {place: _reach(sorted(found)) for place, found in ranges.items()}


def _reach(ordered: Sequence[tuple[int, int]]) -> DecidedRange:
    end = hole = 0
    for start, beyond in ordered:
        hole = start if start > end else hole
        end = max(end, beyond)
    return DecidedRange(hole, ordered[-1][0], ordered[0][0])


def determine_gap_class(gap: VersionGap, known: Reaches) -> str:
    """The class of a missing version that is not among the rejects."""
    # Later records of another system's topic are unknown.
    reach = known.get((gap.topic, gap.generation, gap.partition))
    if reach is None or reach.hole > gap.after + 1:
        return UNDECIDED
    # Behind the newest slice nothing is read, and a producer may send what it sends late.
    return TO_COME if gap.offset >= reach.head else NOWHERE


def explain_gap(gap: VersionGap, rejects: Sequence[OpenReject], known: Reaches) -> Iterator[tuple[str, str, str, int]]:
    """The versions of a gap by what became of them: class, versions, where, how many."""
    named = {r.version: r for r in rejects if r.version is not None and gap.since <= r.version <= gap.until}
    for version, reject in sorted(named.items()):
        yield reject.kind, str(version), reject.text, 1
    left = len(gap) - len(named)
    versions = str(gap.since) if len(gap) == 1 else f"{gap.since} to {gap.until}"
    for reject in islice((r for r in rejects if r.version is None), left):
        left -= 1
        yield reject.kind, versions, reject.text, 1
    if left:
        rest = determine_gap_class(gap, known)
        yield rest, versions, _WHERE[rest], left


_WHERE = {
    UNDECIDED: "in offsets of its partition that no slice has decided yet, or that were lost",
    TO_COME: "not read so far; it may follow the newest slice",
    NOWHERE: "nowhere",
}


def read_missing_versions(
    lake: Lake, stream: Stream, questions: Questions, reclaim_numbers: Mapping[Origin, int] | None = None
) -> dict[str, VersionFindings]:
    """The missing versions of each slice that is checked, or of the stream.

    Args:
        lake, stream: the tables.
        questions: the versions to check, and the events to use.
        reclaim_numbers: how often origins were reclaimed from the DLQ.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    # Events as the questions see them: a slice that was decided meanwhile would count as decided, and lack its events.
    opened = {
        "events": questions.events,
        **{name: lake.open_stream_table(stream.name, name) for name in ("rejects", "dlq")},
    }
    tables = {name: table for name, table in opened.items() if table is not None}
    since, known = questions.scope.since, None
    found: dict[str, VersionFindings] = {}
    gaps = (_build_gap(row) for row in questions.read_gaps())
    while batch := list(islice(gaps, GAPS_AT_ONCE)):
        # Most slices have no gap, and no slice commit is read for them.
        known = _read_reaches(tables, stream, since) if known is None else known
        if since is not None and any(_is_before_known(gap, known) for gap in batch):
            since, known = None, _read_reaches(tables, stream, None)
        keys = {gap.key for gap in batch}
        rejects = _read_open_rejects(tables, stream, keys, reclaim_numbers or {}) if "rejects" in tables else {}
        for gap in batch:
            group = found.setdefault(gap.group, VersionFindings())
            for kind, versions, where, count in explain_gap(gap, rejects.get(gap.key, ()), known):
                group.counts[kind] += count
                sample = {"key": gap.key, "versions": versions, "where": where, "above": _format_version_above(gap)}
                group.keep({**sample, "class": kind})
    return found


def _format_version_above(gap: VersionGap) -> str:
    generation = f" of generation {gap.generation}" if gap.generation else ""
    return f"version {gap.until + 1} at {gap.partition}:{gap.offset}{generation}"


def _read_reaches(tables: Mapping[str, DeltaTable], stream: Stream, since: str | None) -> Reaches:
    """The decided parts of the main topic, by the slices from one on or by all: a table may have 100,000 of them."""
    events, rejects = (
        read_slice_commits_since(tables[name], stream.topic, since or "") if name in tables else {}
        for name in ("events", "rejects")
    )
    decided = [
        slice_commit
        for key, slice_commit in events.items()
        if key in rejects and rejects[key].attempt == slice_commit.attempt
    ]
    return build_reaches(decided, stream.topic)


def _is_before_known(gap: VersionGap, known: Reaches) -> bool:
    """Whether a gap begins before the known slices: below them nothing is known to be decided."""
    reach = known.get((gap.topic, gap.generation, gap.partition))
    return reach is None or gap.after + 1 < reach.begin


def _build_gap(row: Mapping[str, Any]) -> VersionGap:
    names = ("group_name", "key", "since", "until", "topic", "generation", "partition", "offset", "after")
    return VersionGap(*[row[name] for name in names])


_OPEN = """
WITH mine AS (SELECT slice, {origin}, arrow_cast(key, 'Binary') AS key, arrow_cast(value, 'Binary') AS value,
                     next_topic, coalesce(retries, 0) AS retries, {number} AS reclaims
              FROM rejects WHERE encode(arrow_cast(key, 'Binary'), 'hex') IN ({keys})),
     sent AS (SELECT slice, {origin}, {at}, {sent_number} AS reclaims FROM {sent}),
     known AS (SELECT m.*, s.published_at, s.slice IS NOT NULL AS published FROM mine m LEFT JOIN sent s
               ON m.slice = s.slice AND m.reclaims = s.reclaims AND {same_sent}),
     last AS (SELECT *, row_number() OVER (PARTITION BY {origin}
                ORDER BY reclaims DESC, published, published_at DESC NULLS LAST, retries DESC) AS place FROM known)
SELECT l.* FROM (SELECT * FROM last WHERE place = 1) l LEFT ANTI JOIN
  (SELECT {origin}, coalesce(retries, 0) AS retries, {accepted_number} AS reclaims FROM events
   WHERE (retries > 0 OR {accepted_number} > 0)) a
  ON {same_accepted} AND (a.retries > 0 OR a.reclaims > l.reclaims)
ORDER BY {origin}
"""


def _read_open_rejects(
    tables: Mapping[str, DeltaTable], stream: Stream, keys: Iterable[str], reclaim_numbers: Mapping[Origin, int]
) -> dict[str, list[OpenReject]]:
    """By key the records that were rejected and not accepted since."""
    sql = _OPEN.format(
        origin=ORIGIN_SQL,
        number=read_count(tables["rejects"], NUMBER),
        accepted_number=read_count(tables["events"], NUMBER),
        sent_number=read_count(tables["dlq"], NUMBER) if "dlq" in tables else "0",
        keys=", ".join(f"'{key.encode().hex()}'" for key in keys),
        sent="dlq" if "dlq" in tables else "rejects WHERE false",
        at="published_at" if "dlq" in tables else "CAST(NULL AS TIMESTAMP) AS published_at",
        same_sent=" AND ".join(f"m.{name} = s.{name}" for name in ORIGIN),
        same_accepted=" AND ".join(f"l.{name} = a.{name}" for name in ORIGIN),
    )
    found: dict[str, list[OpenReject]] = {}
    for row in query_all(tables, sql):
        found.setdefault(bytes(row["key"]).decode(), []).append(_build_reject(stream, row, reclaim_numbers))
    return found


def _build_reject(stream: Stream, row: Mapping[str, Any], reclaim_numbers: Mapping[Origin, int]) -> OpenReject:
    topic, published = row["next_topic"], row["published_at"]
    tier = topic in stream.tier_topics
    due = published + stream.tiers[stream.tier_topics.index(topic)] if tier and published is not None else None
    generation = f" of generation {row['origin_generation']}" if row["origin_generation"] else ""
    origin = f"{row['origin_topic']} partition {row['origin_partition']} offset {row['origin_offset']}{generation}"
    again = is_stale(reclaim_numbers, Origin.from_row(row), row["reclaims"])
    return OpenReject(parse_version(row["value"], stream.version_fields[0]), topic, tier, due, origin, again)


def parse_version(value: bytes | None, name: str) -> int | None:
    """The version that a rejected value names; None where it cannot be read."""
    try:
        found = json.loads(value or b"")[name]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return found if type(found) is int else None
