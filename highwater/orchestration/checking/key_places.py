"""Keys of the main topic by the partitions that they are in: how many are in several, and who put them there."""

# The order of a key holds within one partition. Offsets give no order to a key in several partitions.

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from highwater.orchestration.checking.check_rules import SAMPLES
from highwater.orchestration.checking.version_queries import read_key_ranges
from highwater.partitioners import (
    KeyPlace,
    KeyPlaceReason,
    PartitionedBy,
    Partitioner,
    Tally,
    count_by_explanation,
    estimate_shares,
    explain_key_spread,
    select_explanations,
)
from highwater.resources.delta import count_logged_rows, query, quote_text, stream_rows

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.partition_counts import PartitionCountPeriod
    from highwater.resources.lake import Lake

# For this many keys in several partitions the reason is looked up: two hashes of one take some microseconds.
KEYS_EXPLAINED = 10_000
# The shares of partitioners are estimated from about this many records: 2 % comes out as 1.8 to 2.2 %.
RECORDS_SAMPLED = 50_000
# Fewer records show no shares, and a smaller share is not reported as a fleet.
MIN_KEYS = 100
MIN_SHARE = 0.01
# Records whose keys one query counts, some 100 bytes each; more are looked at in several ranges of keys.
RECORDS_AT_ONCE = 5_000_000
KEYS_OF_BOUNDS = 20_000


@dataclass(frozen=True)
class KeyPlaces:
    """The partitions of the keys of a stream's main topic.

    Args:
        keys: how many there are, counted again in each generation.
        several: keys in more than one partition of a generation.
        why: the reason for some of these.
        samples: examples of them, as rows of a table.
        shares: choices of a partition that explain the records, with their shares; None is a choice of no known
            partitioner. Empty where the keys are too few, or the topic has one partition.
        sampled: from how many records the shares were estimated.
    """

    keys: int = 0
    several: int = 0
    why: Mapping[KeyPlaceReason, int] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    shares: Mapping[PartitionedBy | None, float] = field(default_factory=dict)
    sampled: int = 0

    @property
    def fleets(self) -> list[Partitioner]:
        """The partitioners that have a share."""
        found = [one.partitioner for one, share in self.shares.items() if one is not None and share >= MIN_SHARE]
        return list(dict.fromkeys(found))

    @property
    def warnings(self) -> list[str]:
        """Advice for the producers, in sentences."""
        found = []
        if len(self.fleets) > 1:
            names = " and ".join(one.value for one in self.fleets)
            found.append(
                f"keys: {len(self.fleets)} fleets of producers hash differently, by {names}: give all of them one "
                "partitioner, murmur2_random in librdkafka"
            )
        others = self.why.get(KeyPlaceReason.FLEETS, 0) + self.why.get(KeyPlaceReason.OTHER, 0)
        if others:
            looked_at = sum(self.why.values())
            of = "" if looked_at == self.several else f", of {looked_at:,} that were looked at"
            found.append(f"keys: {others:,} are in several partitions though none was added for them{of}")
        return found

    @property
    def lines(self) -> list[str]:
        """The findings, in sentences."""
        lines = [f"keys: {self.keys:,}, {self.several:,} of them in several partitions of a generation"]
        if self.why:
            parts = ", ".join(f"{count:,} {one.value}" for one, count in self.why.items())
            lines.append(f"keys in several partitions: {parts}")
        if self.shares:
            parts = ", ".join(f"{share:.1%} {_format_partitioner(one)}" for one, share in self.shares.items())
            lines.append(f"partitioners, estimated from {self.sampled:,} records: {parts}")
        return lines

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "keys": self.keys,
            "several": self.several,
            "why": {one.value: count for one, count in self.why.items()},
            "samples": [dict(row) for row in self.samples],
            "shares": {_format_partitioner(one): share for one, share in self.shares.items()},
            "sampled": self.sampled,
        }


def _format_partitioner(choice: PartitionedBy | None) -> str:
    return "no known partitioner" if choice is None else choice.text


def read_key_places(lake: Lake, stream: Stream, periods: Sequence[PartitionCountPeriod]) -> KeyPlaces:
    """Look where the keys of the main topic are; records without a key are left out.

    Args:
        lake: the tables.
        stream: the stream.
        periods: periods of its main topic; empty if nothing was planned.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    raw = lake.open_stream_table(stream.name, "raw")
    if raw is None or not periods:
        return KeyPlaces()
    queries = _KeyQueries(raw, stream, periods)
    keys, several = queries.count_keys()
    why: Counter[KeyPlaceReason] = Counter()
    samples: list[dict[str, Any]] = []
    for (generation, key), rows in queries.read_multipartition_keys(several):
        counts = queries.counts[generation]
        reason = explain_key_spread(key, [_build_place(row) for row in rows], counts)
        why[reason] += 1
        if len(samples) < SAMPLES:
            samples.append(
                {"key": _format_key(key), "generation": generation, "why": reason.value, "places": _format_places(rows)}
            )
    result = KeyPlaces(keys, several, dict(why.most_common()), samples)
    if keys < MIN_KEYS or max(map(max, queries.counts.values())) == 1:
        return result
    return replace(result, **queries.measure_shares())


def _quote_binary(key: bytes) -> str:
    return f"X'{key.hex()}'"


def _build_place(row: Mapping[str, Any]) -> KeyPlace:
    return KeyPlace(row["partition"], row["partitions"], row["records"])


def _format_key(key: bytes) -> str:
    """A key for people: as text where it is text."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return f"0x{key.hex()}"


def _format_places(rows: Sequence[Mapping[str, Any]]) -> str:
    """The places of a key's records: in each partition the first of them, and the partitioners that choose it."""
    places = []
    for row in sorted(rows, key=lambda one: (one["partition"], one["first"])):
        found = sorted({one.text for one in select_explanations(row["key"], _build_place(row), {row["partitions"]})})
        by = f", {' or '.join(found)}" if found else ""
        places.append(f"{row['records']:,} in {row['partition']} from offset {row['first']} ({row['slice']}{by})")
    return "; ".join(places)


GenerationKey = tuple[int, bytes]


class _KeyQueries:
    """SQL queries of the keys in raw, at the version that was opened."""

    def __init__(self, raw: DeltaTable, stream: Stream, periods: Sequence[PartitionCountPeriod]) -> None:
        self._raw = raw
        self.counts: dict[int, set[int]] = {}
        for period in periods:
            self.counts.setdefault(period.generation, set()).add(period.partitions)
        main = quote_text(f"{stream.topic}@")
        self._mine = f"key IS NOT NULL AND starts_with(slice, {main})"
        # The newest period whose first slice is not after the row's; slices of a topic sort by their ordinals.
        newest_first = sorted(periods, key=lambda period: -period.ordinal)
        cases = " ".join(
            f"WHEN slice >= {quote_text(period.since)} THEN {period.partitions}" for period in newest_first
        )
        self._partitions = f"CASE {cases} ELSE {periods[0].partitions} END"
        self._rows = count_logged_rows(raw)
        parts, sampled = max(1, math.ceil(self._rows / RECORDS_AT_ONCE)), self._build_sample_condition(KEYS_OF_BOUNDS)
        self._key_ranges = list(read_key_ranges(raw, sampled, parts, _quote_binary)) if parts > 1 else ["true"]

    def count_keys(self) -> tuple[int, int]:
        """The number of keys, and of those that are in several partitions."""
        keys = several = 0
        for key_range in self._key_ranges:
            sql = (
                "SELECT count(*) AS keys, coalesce(sum(CASE WHEN least <> most THEN 1 ELSE 0 END), 0) AS several FROM "
                '(SELECT min("partition") AS least, max("partition") AS most FROM t '
                f"WHERE {self._mine} AND {key_range} GROUP BY generation, key)"
            )
            [row] = query(self._raw, sql)
            keys, several = keys + int(row["keys"]), several + int(row["several"])
        return keys, several

    def read_multipartition_keys(self, found: int) -> Iterator[tuple[GenerationKey, list[dict[str, Any]]]]:
        """The places of keys that are in several partitions; of some of them if there are too many."""
        each = found if found <= KEYS_EXPLAINED else math.ceil(KEYS_EXPLAINED / len(self._key_ranges))
        for key_range in self._key_ranges if found else ():
            chosen = (
                f"SELECT generation, key FROM t WHERE {self._mine} AND {key_range} GROUP BY generation, key "
                f'HAVING min("partition") <> max("partition") ORDER BY md5(key) LIMIT {each}'
            )
            yield from self._read_grouped_rows(f"{self._mine} AND {key_range}", chosen)

    def sample(self) -> Iterator[tuple[GenerationKey, list[dict[str, Any]]]]:
        """The places of records that are picked by their offsets, which no partitioner looks at."""
        yield from self._read_grouped_rows(self._build_sample_condition(RECORDS_SAMPLED), None)

    def measure_shares(self) -> dict[str, Any]:
        """The explanations of a sample of the records, and the size of the sample."""
        tally: Tally = Counter()
        for (generation, key), rows in self.sample():
            tally.update(count_by_explanation([(key, _build_place(row)) for row in rows], self.counts[generation]))
        return {"shares": estimate_shares(tally), "sampled": tally.total()}

    def _build_sample_condition(self, records: int) -> str:
        """A condition that selects about this many records."""
        return f'{self._mine} AND "offset" % {max(1, self._rows // records)} = 0'

    def _read_grouped_rows(
        self, where: str, chosen: str | None
    ) -> Iterator[tuple[GenerationKey, list[dict[str, Any]]]]:
        joined = "" if chosen is None else "JOIN chosen c ON r.generation = c.generation AND r.key = c.key"
        head = "" if chosen is None else f"WITH chosen AS ({chosen}) "
        sql = (
            f'{head}SELECT r.generation, r.key, "partition", partitions, count(*) AS records, min("offset") AS first, '
            f'min(slice) AS slice FROM (SELECT generation, key, "partition", "offset", slice, {self._partitions} AS '
            f"partitions FROM t WHERE {where}) r {joined} "
            'GROUP BY r.generation, r.key, "partition", partitions ORDER BY r.generation, r.key, "partition", first'
        )
        for key, rows in groupby(stream_rows(self._raw, sql), key=itemgetter("generation", "key")):
            yield key, list(rows)
