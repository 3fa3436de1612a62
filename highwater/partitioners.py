"""Partitioners of Kafka clients, and the recognition of those that chose given partitions."""

# Sources: `Utils.murmur2` and `BuiltInPartitioner` of Kafka's Java client, `rdkafka_msg.c` and `rdfnv1a.c` of
# librdkafka. The hashes are compared with the vectors that these projects' own tests publish
# (`tests/test_partitioners.py`).

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, reduce

_WORD = 0xFFFFFFFF
# The estimate of the shares moves by less than a thousandth long before.
ROUNDS = 200
# Below it a source has no share: it explains by chance what others left over.
MIN_SHARE = 0.0005


def murmur2(key: bytes) -> int:
    """The hash of Java's client, without a sign: what `Utils.murmur2` gives, as 32 bits."""
    scale, hashed = 0x5BD1E995, (0x9747B28C ^ len(key)) & _WORD
    whole = len(key) // 4 * 4
    for at in range(0, whole, 4):
        part = int.from_bytes(key[at : at + 4], "little") * scale & _WORD
        part = (part ^ part >> 24) * scale & _WORD
        hashed = (hashed * scale & _WORD) ^ part
    if whole < len(key):
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * scale & _WORD
    hashed = (hashed ^ hashed >> 13) * scale & _WORD
    return hashed ^ hashed >> 15


def fnv1a(key: bytes) -> int:
    """FNV-1a as librdkafka and Sarama take it: of 32 bits with a sign the absolute value."""
    hashed = reduce(lambda before, byte: (before ^ byte) * 0x01000193 & _WORD, key, 0x811C9DC5)
    return hashed if hashed < 1 << 31 else (1 << 32) - hashed


class Partitioner(Enum):
    """The default partitioners of clients: the choice of a partition for a key."""

    MURMUR2 = "murmur2"
    """Java's clients, and librdkafka's `murmur2` and `murmur2_random`."""
    CRC32 = "CRC32"
    """librdkafka's own default `consistent_random`, and `consistent`."""
    FNV1A = "FNV-1a"
    """Sarama's default, and librdkafka's `fnv1a` and `fnv1a_random`."""

    def choose_partition(self, key: bytes, partitions: int) -> int:
        """The partition of a key in a topic with this many partitions, from 0."""
        return _HASHES[self](key) % partitions


_HASHES: Mapping[Partitioner, Callable[[bytes], int]] = {
    # Java drops the sign bit, where an absolute value would have none of the least number.
    Partitioner.MURMUR2: lambda key: murmur2(key) & 0x7FFFFFFF,
    Partitioner.CRC32: zlib.crc32,
    Partitioner.FNV1A: fnv1a,
}


@dataclass(frozen=True)
class PartitionedBy:
    """A partitioner with a partition count: what may have chosen the partition of a record."""

    partitioner: Partitioner
    partitions: int

    @property
    def text(self) -> str:
        """The choice in words."""
        return f"{self.partitioner.value} over {self.partitions:,} partitions"


@dataclass(frozen=True)
class KeyPlace:
    """Records of a key in one partition.

    Args:
        partition: where they are.
        partitions: how many the topic had when they were planned.
        records: how many they are.
    """

    partition: int
    partitions: int
    records: int = 1


def build_choices(place: KeyPlace, counts: Collection[int]) -> list[PartitionedBy]:
    """The partitioners that may have chosen a place: records may be older than the partitions that the slice knows."""
    return [PartitionedBy(one, count) for one in Partitioner for count in sorted(counts) if count <= place.partitions]


def select_explanations(key: bytes, place: KeyPlace, counts: Collection[int]) -> frozenset[PartitionedBy]:
    """The choices that explain where records of a key are."""
    hashed = _hash_key(key)
    return frozenset(
        one for one in build_choices(place, counts) if hashed[one.partitioner] % one.partitions == place.partition
    )


@lru_cache(maxsize=10_000)  # of a key several places are asked about in a row
def _hash_key(key: bytes) -> Mapping[Partitioner, int]:
    return {one: compute(key) for one, compute in _HASHES.items()}


class KeyPlaceReason(Enum):
    """The reason why the records of a key are in several partitions."""

    ADDED = "partitions were added"
    """One partitioner explains all places, by the numbers of partitions that the topic had."""
    FLEETS = "two producers hash differently"
    """Each place is that of a known partitioner, and they are not the same."""
    OTHER = "no known partitioner"
    """A place is that of none: a producer names partitions itself, or hashes otherwise."""


def explain_key_spread(key: bytes, places: Iterable[KeyPlace], counts: Collection[int]) -> KeyPlaceReason:
    """The reason why a key is in several partitions.

    With few partitions a partition soon matches some partitioner by chance: one key shows only a possibility, many keys
    a certainty.
    """
    explained = [select_explanations(key, place, counts) for place in places]
    if not all(explained):
        return KeyPlaceReason.OTHER
    common = frozenset.intersection(*[frozenset(one.partitioner for one in found) for found in explained])
    return KeyPlaceReason.ADDED if common else KeyPlaceReason.FLEETS


Tally = Counter[tuple[int, frozenset[PartitionedBy]]]


def count_by_explanation(found: Iterable[tuple[bytes, KeyPlace]], counts: Collection[int]) -> Tally:
    """Records by the number of partitions and by what explains where they are."""
    tally: Tally = Counter()
    for key, place in found:
        tally[place.partitions, select_explanations(key, place, counts)] += place.records
    return tally


def estimate_shares(tally: Tally) -> dict[PartitionedBy | None, float]:
    """Each partitioner's share of the records, the greatest first; None for those of no known partitioner.

    A place that one partitioner chose is by chance that of another one in every n-th case, so counting would find
    fleets that are not there. This is the estimate of maximum likelihood of a mixture: a choice that explains a place
    gives it the probability 1, an unknown one 1/n, any other 0 (expectation maximisation; Dempster, Laird and Rubin,
    1977).
    """
    total = tally.total()
    sources: list[PartitionedBy | None] = [
        *sorted({one for _, found in tally for one in found}, key=_compute_order),
        None,
    ]
    held = dict.fromkeys(sources, 1 / len(sources))
    for _ in range(ROUNDS if total else 0):
        gained = dict.fromkeys(sources, 0.0)
        for (partitions, found), records in tally.items():
            weights = {one: held[one] for one in found} | {None: held[None] / partitions}
            # A partitioner that only chance had explained, and no longer does, has no weight.
            whole = sum(weights.values()) or 1.0
            for one, weight in weights.items():
                gained[one] += records * weight / whole
        held = {one: gain / total for one, gain in gained.items()}
    relevant = {one: share for one, share in held.items() if total and share >= MIN_SHARE}
    return dict(sorted(relevant.items(), key=lambda item: -item[1]))


def _compute_order(choice: PartitionedBy) -> tuple[int, int]:
    return list(Partitioner).index(choice.partitioner), choice.partitions
