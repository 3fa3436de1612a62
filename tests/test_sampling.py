"""Samples of a topic: equal shares of its partitions, repeats of its keys, and counts."""

from __future__ import annotations

import pytest

from highwater.classifying import Classification
from highwater.errors import ConfigurationError
from highwater.inference import infer
from highwater.sample_counts import count_outcomes, count_sample, parse_record_lines
from highwater.sampling import compute_shares, needs_repeats, select_repeats
from highwater.second_reader import KafkaRecord
from tests.helpers.inferred import build_records, orders


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ({0: 100, 1: 100}, 10, {0: 5, 1: 5}),
        ({0: 2, 1: 100}, 10, {0: 2, 1: 8}),
        ({0: 0, 1: 3}, 10, {0: 0, 1: 3}),
        ({0: 9, 1: 9, 2: 9}, 2, {0: 1, 1: 1, 2: 0}),
        ({}, 5, {}),
    ],
)
def test_partitions_give_equal_shares_of_a_sample(sizes: dict[int, int], count: int, expected: dict[int, int]) -> None:
    assert compute_shares(sizes, count) == expected


def keyed(*keys: bytes | None, value: bytes = b"{}", first: int = 0) -> list[KafkaRecord]:
    return [KafkaRecord(value, key, (), "t", 0, first + number) for number, key in enumerate(keys)]


def test_repeats_have_the_keys_of_the_sample() -> None:
    """Sensors that send in turn gave a sample with each key once: an append-only stream without a key."""
    sample = keyed(b"a", b"b", b"c", b"d", b"e")
    assert needs_repeats(sample)
    found = select_repeats(sample, keyed(b"a", b"b", b"x", b"y", b"z", b"b", b"x", b"a", b"c"))
    assert [(record.offset, record.key) for record in found] == [(5, b"b"), (7, b"a")]


def test_a_busy_key_alone_is_no_evidence_of_repeats() -> None:
    sample = keyed(*(bytes([one]) for one in range(40)))
    found = select_repeats(sample, keyed(*[b"\0"] * 50, b"\x01", first=40))
    assert [record.key for record in found] == [b"\0"] * 3 + [b"\x01"]


def test_large_records_are_not_read_for_repeats() -> None:
    sample = keyed(*(bytes([one]) for one in range(40)))
    large = keyed(*(bytes([one]) for one in range(40)), value=bytes(20 * 2**20), first=40)
    assert len(select_repeats(sample, large)) == 3


@pytest.mark.parametrize("keys", [(b"a", None), (b"a", b"a"), ()])
def test_repeats_are_not_read_where_they_show_nothing(keys: tuple[bytes | None, ...]) -> None:
    assert not needs_repeats(keyed(*keys))


def test_a_sample_is_counted_with_an_example_of_each_reject() -> None:
    found = infer("orders.v1", build_records(orders()))
    faults = build_records([(b"o-1", b"{"), (b"o-1", b"["), (b"o-1", None), *orders()[:2]])
    counts = count_sample(found.stream, faults, None)
    assert (counts.events, counts.deletes, counts.tombstones, counts.rejected) == (2, 0, 1, 2)
    assert {group.reason for group in counts.rejects} == {"malformed"}
    assert min(group.offset for group in counts.rejects) == 0


def test_rejects_of_a_sample_are_counted_by_rule() -> None:
    """Details that differ in numbers alone are alike, so `amount1` and `amount2` were one row."""
    details = [("amount1", "rule amount1: not amount1 > 0"), ("amount2", "rule amount2: not amount2 > 0")]
    outcomes = [
        Classification("reject", "invalid", detail, rule=rule) for rule, detail in [*details, *details, details[0]]
    ]
    counts = count_outcomes(keyed(*[b"a"] * 5), outcomes)
    assert [(group.reason, group.rule, group.count) for group in counts.rejects] == [
        ("invalid", "amount1", 3),
        ("invalid", "amount2", 2),
    ]
    assert [row[0] for row in counts.rows[3:]] == ["reject: invalid, amount1", "reject: invalid, amount2"]


def test_records_are_read_from_lines() -> None:
    line = '{"key_hex": "61", "value_hex": null, "headers": [["h", "62"]], "timestamp_ms": 5}'
    [record] = parse_record_lines([line, ""], "t")
    assert (record.key, record.value, list(record.headers), record.timestamp_ms) == (b"a", None, [("h", b"b")], 5)
    with pytest.raises(ConfigurationError, match="line 1"):
        parse_record_lines(["{}"], "t")
