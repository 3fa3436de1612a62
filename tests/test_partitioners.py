"""The hashes of Kafka's clients, and which of them explain where keys are."""

from __future__ import annotations

import random
import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.partitioners import (
    KeyPlace,
    KeyPlaceReason,
    PartitionedBy,
    Partitioner,
    count_by_explanation,
    estimate_shares,
    explain_key_spread,
    fnv1a,
    murmur2,
)

MURMUR2, CRC32, FNV1A = Partitioner

# Kafka, clients/src/test/java/org/apache/kafka/common/utils/UtilsTest.java, testMurmur2.
OF_KAFKA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
# librdkafka, src/rdfnv1a.c, unittest_fnv1a.
OF_SARAMA = {
    b"kafka": 0xD33C4E1,
    b"giberish123456789": 0x77A58295,
    b"1234": 0x23BDD03,
    b"PreAmbleWillBeRemoved,ThePrePartThatIs": 0x65CBD69C,
    b"": 0x7EE3623B,
}
# librdkafka, tests/0048-partitioner.c, do_test_partitioners: the hashes of three keys, taken over 17 partitions.
OF_LIBRDKAFKA = {
    b"23456": (0x058D780F, 0xB1B451D7, 0x27E6F469),
    b"this is another string with more length to it perhaps": (0x4F7703DA, 0xB0150DF7, 0x155E3E5F),
    b"hejsan": (0x5EC19395, 0xD077037E, 0x17B1E27A),
}


@pytest.mark.parametrize(("key", "signed"), OF_KAFKA.items())
def test_murmur2_is_that_of_java(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed % 2**32
    assert MURMUR2.choose_partition(key, 7) == (signed & 0x7FFFFFFF) % 7


@pytest.mark.parametrize(("key", "hashed"), OF_SARAMA.items())
def test_fnv1a_is_that_of_sarama(key: bytes, hashed: int) -> None:
    assert fnv1a(key) == hashed


@pytest.mark.parametrize(("key", "hashes"), OF_LIBRDKAFKA.items())
def test_partitions_are_those_of_librdkafka(key: bytes, hashes: tuple[int, ...]) -> None:
    assert tuple(one.choose_partition(key, 17) for one in Partitioner) == tuple(hashed % 17 for hashed in hashes)


@given(st.binary(max_size=40), st.integers(1, 1000))
def test_a_partition_is_one_of_them(key: bytes, partitions: int) -> None:
    assert all(0 <= one.choose_partition(key, partitions) < partitions for one in Partitioner)


def keys(count: int) -> list[bytes]:
    return [b"order-%d" % number for number in range(count)]


def placed(
    partitioner: Partitioner, some: list[bytes], partitions: int, known: int = 0
) -> list[tuple[bytes, KeyPlace]]:
    return [(key, KeyPlace(partitioner.choose_partition(key, partitions), known or partitions)) for key in some]


@pytest.mark.parametrize("partitions", [2, 3, 12])
def test_two_fleets_have_their_shares(partitions: int) -> None:
    """With two partitions every other key of one fleet lies where the other would have put it."""
    some = keys(20_000)
    found = [*placed(MURMUR2, some[:19_600], partitions), *placed(CRC32, some[19_600:], partitions)]
    reported = estimate_shares(count_by_explanation(found, {partitions}))
    assert reported[PartitionedBy(MURMUR2, partitions)] == pytest.approx(0.98, abs=0.01)
    assert reported[PartitionedBy(CRC32, partitions)] == pytest.approx(0.02, abs=0.01)


def test_a_single_fleet_is_no_mixture() -> None:
    reported = estimate_shares(count_by_explanation(placed(CRC32, keys(5_000), 6), {6}))
    assert reported == {PartitionedBy(CRC32, 6): pytest.approx(1, abs=0.001)}


def test_unhashed_keys_match_no_partitioner() -> None:
    """A producer that names partitions itself puts some keys by chance where a partitioner would have."""
    chosen = random.Random(3)
    found = [(key, KeyPlace(chosen.randrange(4), 4)) for key in keys(20_000)]
    reported = estimate_shares(count_by_explanation(found, {4}))
    assert next(iter(reported)) is None
    assert reported[None] > 0.95


def test_records_from_before_partitions_were_added_are_distinguished() -> None:
    some = keys(10_000)
    found = [*placed(MURMUR2, some[:3_000], 4, known=6), *placed(MURMUR2, some[3_000:], 6)]
    reported = estimate_shares(count_by_explanation(found, {4, 6}))
    assert reported[PartitionedBy(MURMUR2, 4)] == pytest.approx(0.3, abs=0.02)
    assert reported[PartitionedBy(MURMUR2, 6)] == pytest.approx(0.7, abs=0.02)


def test_records_weigh() -> None:
    some = keys(2_000)
    found = [(key, KeyPlace(MURMUR2.choose_partition(key, 8), 8, records=9)) for key in some[:1_000]]
    reported = estimate_shares(count_by_explanation([*found, *placed(CRC32, some[1_000:], 8)], {8}))
    assert reported[PartitionedBy(CRC32, 8)] == pytest.approx(0.1, abs=0.01)


def test_shares_of_no_records_are_empty() -> None:
    assert estimate_shares(Counter()) == {}


def a_key(*unlike: tuple[Partitioner, int]) -> bytes:
    """A key that these choices put into different partitions, none of them into 11."""
    return next(
        key
        for key in keys(10_000)
        if len({one.choose_partition(key, count) for one, count in unlike}) == len(unlike)
        and 11 not in {one.choose_partition(key, count) for one in Partitioner for count in (4, 12)}
    )


def test_why_a_key_is_in_several_partitions() -> None:
    key = a_key((MURMUR2, 4), (MURMUR2, 12), (CRC32, 12), (FNV1A, 12))
    before = KeyPlace(MURMUR2.choose_partition(key, 4), 4)
    after, other = (KeyPlace(one.choose_partition(key, 12), 12) for one in (MURMUR2, CRC32))
    assert explain_key_spread(key, [before, after], {4, 12}) is KeyPlaceReason.ADDED
    assert explain_key_spread(key, [after, other], {12}) is KeyPlaceReason.FLEETS
    assert explain_key_spread(key, [after, KeyPlace(11, 12)], {4, 12}) is KeyPlaceReason.OTHER


def test_a_slice_knows_no_partitions_that_were_added_later() -> None:
    key = a_key((MURMUR2, 4), (MURMUR2, 12))
    assert (
        explain_key_spread(key, [KeyPlace(MURMUR2.choose_partition(key, 12), 4), KeyPlace(11, 12)], {4, 12})
        is KeyPlaceReason.OTHER
    )
    assert zlib.crc32(key) % 12 == CRC32.choose_partition(key, 12)
