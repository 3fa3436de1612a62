"""Records that a topic does not take: what is sent instead, and that none holds the others up or is lost."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.planted import plant
from highwater import envelope as names
from highwater.assets.dlq_sending import RejectSending, RejectToSend
from highwater.assets.parked_references import (
    OriginalRecord,
    build_original,
    build_originals,
    find_place,
    find_value_reference,
    read_original,
)
from highwater.batching import compute_batch_ranges, split_by_size
from highwater.envelope import (
    MAX_BYTES,
    MAX_DETAIL,
    Envelope,
    KafkaHeader,
    Origin,
    Place,
    ValueReference,
    add_envelope,
    open_envelope,
)
from highwater.errors import (
    DependencyUnavailableError,
    RecordTooLargeError,
    SupersededAttemptError,
    UnbalancedError,
)
from highwater.message_size import SizeLimits, measure_message
from highwater.orchestration.operations import redriving
from highwater.resources.dlq_topics import TopicShape
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.producer_records import Record
from highwater.resources.transactions import PublicationMark, Transactions, _call_client
from tests.conftest import create_topic
from tests.helpers.support import read_topic
from tests.helpers.world import STREAM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.conftest import TopicFactory

NOW = datetime(2026, 3, 1, tzinfo=UTC)
PLACE = Place("orders", 0, 2, 17)
TIER, PARKED = "orders.dlq.1", "orders.parked"


def an_envelope(**changes: Any) -> Envelope:
    sound = Envelope("orders", 0, 2, 17, 1_700_000_000_000, 1, "unresolved", "why", "orders@0000000", NOW)
    return replace(sound, **changes)


HEADERS = st.lists(st.tuples(st.text(max_size=9), st.none() | st.binary(max_size=40)), max_size=4)
OWN = st.none() | st.binary(max_size=90)


@given(OWN, HEADERS, st.integers(0, 900))
def test_a_reference_fits_and_leaves_out_no_more_than_it_must(
    key: bytes | None, own: list[KafkaHeader], most: int
) -> None:
    reported: list[KafkaHeader] = [("highwater.all", b"x" * 300)]
    full, headless, least = (
        measure_message(key, b"", own + reported),
        measure_message(key, b"", reported),
        measure_message(None, b"", reported),
    )
    limits = SizeLimits({PARKED: most}, client=10_000)
    if most < least:
        with pytest.raises(RecordTooLargeError, match=f"max.message.bytes={MAX_BYTES}"):
            limits.select_left_out(PARKED, key, own, reported)
        return
    expected = "value" if full <= most else "value,headers" if headless <= most else "value,headers,key"
    assert ",".join(limits.select_left_out(PARKED, key, own, reported)) == expected


@pytest.mark.parametrize(
    ("size", "client", "compresses", "whole"),
    [(100, 200, False, True), (101, 200, False, False), (101, 200, True, True), (201, 200, True, False)],
)
def test_size_limits_decide_whether_a_record_is_sent_whole(
    size: int, client: int, *, compresses: bool, whole: bool
) -> None:
    """The client counts before compression; what the topic takes after it only the broker knows."""
    assert SizeLimits({TIER: 100}, client, compresses).can_send_whole(TIER, size) is whole


@given(
    st.lists(st.sampled_from(["value", "headers", "key"]), unique=True, max_size=3).filter(lambda p: "value" in p),
    st.integers(0, 2**63 - 1),
)
def test_a_reference_is_read_as_it_was_written(parts: list[str], number: int) -> None:
    written = an_envelope(reference=ValueReference(tuple(parts), Place("ö", 3, 1, number), 5))
    assert open_envelope(add_envelope(written, [("own", b"1")])) == written


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (names.LEFT_OUT, b""),
        (names.LEFT_OUT, b"key"),
        (names.LEFT_OUT, b"value,all"),
        (names.RAW_TOPIC, b""),
        (names.RAW_GENERATION, b"-1"),
        (names.RAW_PARTITION, str(2**31).encode()),
        (names.RAW_OFFSET, b"first"),
        (names.BYTES, b""),
    ],
)
def test_a_reference_that_cannot_be_believed_is_no_record(header: str, value: bytes) -> None:
    """Its empty value must never be taken for the record's."""
    sound = an_envelope(reference=ValueReference(("value",), PLACE, 5)).to_headers()
    assert open_envelope(sound) is not None
    assert open_envelope([*sound, (header, value)]) is None


def test_the_longest_envelope_of_a_reference_has_room() -> None:
    """Topics have room for so much at the least, or nothing is published at all."""
    place, everything = Place("x" * 249, 2**31 - 1, 2**31 - 1, 2**63 - 1), ("value", "headers", "key")
    longest = an_envelope(
        topic="orders.foreign/" + "y" * 249,
        detail="\U0001f600" * MAX_DETAIL,
        slice_key="z" * 260,
        reference=ValueReference(everything, place, 2**40),
    )
    assert measure_message(None, b"", longest.to_headers()) < MAX_BYTES


def test_batches_are_cut_by_number_and_by_size() -> None:
    sizes = [1, 1, 1, 9, 1, 2, 2]
    assert [*split_by_size(sizes, lambda one: one, most=2, most_bytes=4)] == [[1, 1], [1], [9], [1, 2], [2]]
    assert [*compute_batch_ranges(sizes, most=2, most_bytes=4)] == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert [*compute_batch_ranges([], most=2, most_bytes=4)] == []


@given(st.lists(st.integers(0, 9)), st.integers(1, 4), st.integers(1, 20))
def test_one_rule_cuts_what_comes_one_by_one_and_what_only_sizes_are_known_of(
    sizes: list[int], most: int, most_bytes: int
) -> None:
    ranges = compute_batch_ranges(sizes, most, most_bytes)
    assert [*split_by_size(sizes, lambda one: one, most, most_bytes)] == [sizes[start:end] for start, end in ranges]


@given(OWN, OWN, HEADERS, st.integers(0, 2**62), st.integers(-(10**13), 10**14), st.text(max_size=9))
def test_a_reject_says_what_its_envelope_says(
    key: bytes | None, value: bytes | None, own: list[KafkaHeader], offset: int, ms: int, detail: str
) -> None:
    """Also one of many that are alike: what they have in common is written once."""
    envelope, found = an_envelope(offset=offset, timestamp=ms, detail=detail), OriginalRecord(key, value, own)
    other = RejectToSend.from_envelope(an_envelope(detail=detail), TIER, OriginalRecord(b"k", None, [("own", b"1")]))
    for one in (RejectToSend.from_envelope(envelope, TIER, found), other.template.read_reject(offset, ms, found)):
        assert one.headers == add_envelope(envelope, own)
        assert one.size == measure_message(key, value, add_envelope(envelope, own))
        assert (one.envelope, one.topic, one.found) == (envelope, TIER, found)


def test_the_headers_of_many_rows_are_those_of_each() -> None:
    import pyarrow as pa

    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    own = [[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, [], [{"key": "ö", "value": b""}]]
    columns = {"key": [b"k", None, b"", b"l"], "value": [None, b"v", b"", b"w"], "headers": pa.array(own, header)}
    rows = pa.table(columns)
    assert [*build_originals(rows)] == [build_original(row) for row in rows.to_pylist()]
    assert [*build_originals(rows.slice(1, 3))] == [build_original(row) for row in rows.to_pylist()[1:]]
    assert [*build_originals(rows.slice(0, 0))] == []


def a_raw(lake: Lake, rows: Sequence[tuple[str, Place, OriginalRecord]]) -> None:
    import pyarrow as pa

    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    plain = [
        {
            "slice": key,
            **place._asdict(),
            "key": one.key,
            "value": one.value,
            "headers": [{"key": name, "value": value} for name, value in one.headers],
        }
        for key, place, one in rows
    ]
    types = [("slice", pa.string()), ("topic", pa.string()), ("generation", pa.int32()), ("partition", pa.int32())]
    types += [("offset", pa.int64()), ("key", pa.binary()), ("value", pa.binary()), ("headers", header)]
    plant(lake.build_table_path("orders", "raw"), pa.Table.from_pylist(plain, pa.schema(types)))


def test_a_record_is_found_in_raw_where_its_slice_read_it(tmp_path: Path) -> None:
    lake, tier = Lake(str(tmp_path)), "orders.dlq.1@0000004"
    on_main = OriginalRecord(b"k", b"wrong", [])
    copies = [OriginalRecord(b"k", value, [("own", None), (names.ATTEMPT, b"1")]) for value in (b"right", b"wrong")]
    places = [Place("orders.dlq.1", 0, 1, offset) for offset in (5, 6)]
    assert read_original(lake, STREAM, PLACE) is None
    a_raw(lake, [("orders@0000000", PLACE, on_main), *[(tier, *pair) for pair in zip(places, copies, strict=True)]])
    assert find_place(lake, STREAM, an_envelope(), on_main) == PLACE
    assert [find_place(lake, STREAM, an_envelope(slice_key=tier), one) for one in copies] == places
    assert read_original(lake, STREAM, places[1]) == copies[1]
    assert read_original(lake, STREAM, places[1]._replace(offset=7)) is None
    with pytest.raises(UnbalancedError, match=r"orders\[2\]@17"):
        find_place(lake, STREAM, an_envelope(slice_key=tier), OriginalRecord(b"k", b"other", []))


@dataclass
class FakeLimitedTransactions:
    """Transactions whose broker takes no more than it says, whatever the topic is said to take."""

    takes: dict[str, int]
    compresses: bool = True
    most_bytes: int = 1_000_000
    committed: list[tuple[list[Record], PublicationMark]] = field(default_factory=list)

    def commit(self, records: Sequence[Record], mark: PublicationMark, meanwhile: Callable[[], object] = list) -> None:
        meanwhile()
        refused = [one for one in records if measure_message(one.key, one.value, one.headers) > self.takes[one.topic]]
        if refused:
            raise RecordTooLargeError("too large", remedy="none", refused=refused)
        self.committed.append(([*records], mark))


class FakeRejectSending(RejectSending):
    """Writes nothing, and remembers what it is asked to."""

    def _record_parked(self, notes: Any) -> None:
        self.__dict__.setdefault("moved", []).append(notes)


def a_sending(lake: Lake, transactions: FakeLimitedTransactions, room: int) -> FakeRejectSending:
    shapes = {topic: TopicShape(2, 1, {"max.message.bytes": str(room)}) for topic in (TIER, PARKED)}
    work = SimpleNamespace(stream=STREAM, lake=lake, log=[].append)
    return FakeRejectSending(
        cast("Any", work), cast("Any", SimpleNamespace(key="s")), 0, shapes, cast("Any", transactions)
    )


BEFORE, AFTER = PublicationMark(1, 4, "plan"), PublicationMark(1, 7, "plan")


def test_records_refused_by_the_broker_end_like_records_known_to_be_too_large(tmp_path: Path) -> None:
    """On the parked topic, by reference in the end; the table of rejects knows of it first, the mark counts it once."""
    lake = Lake(str(tmp_path))
    sizes = {1: 10, 2: 30_000, 3: 60_000}
    found = {
        offset: OriginalRecord(b"k%d" % offset, os.urandom(size), [("own", b"1")]) for offset, size in sizes.items()
    }
    a_raw(lake, [("orders@0000000", PLACE._replace(offset=offset), one) for offset, one in found.items()])
    batch = [RejectToSend.from_envelope(an_envelope(offset=offset), TIER, one) for offset, one in found.items()]
    by_answer = FakeLimitedTransactions({TIER: 20_000, PARKED: 40_000})
    by_size = FakeLimitedTransactions({TIER: 20_000, PARKED: 20_000}, compresses=False)
    for transactions, room in ((by_answer, 20_000), (by_size, 20_000)):
        sending = a_sending(lake, transactions, room)
        sending.send(batch, BEFORE, AFTER)
        moved = [origin.offset for notes in sending.__dict__["moved"] for origin in notes]
        assert sorted(moved) == [2, 3]
        *fences, (records, mark) = transactions.committed
        assert all(fence == ([], BEFORE) for fence in fences)
        assert fences
        assert mark == AFTER
        topics = [one.topic for one in records]
        assert topics == [TIER, PARKED, PARKED]
        whole = [one.value == found[offset].value for offset, one in enumerate(records, 1)]
        assert whole == [True, transactions is by_answer, False]
        last = open_envelope(records[2].headers)
        assert last is not None
        assert (records[2].key, records[2].value, records[2].headers[0]) == (b"k3", b"", ("own", b"1"))
        assert last.reference is not None
        assert (last.reference.left_out, last.reference.place) == (("value",), PLACE._replace(offset=3))
        assert 60_000 < batch[2].size < last.reference.size < 61_000
        assert (last.origin, last.reason, last.attempt) == (Origin("orders", 0, 2, 3), "unresolved", 1)
        assert last.detail.startswith(f"too large for {TIER}, {batch[2].size:,} bytes; why")


def test_a_reject_of_a_tier_that_is_no_longer_declared_is_parked(tmp_path: Path) -> None:
    """Decided before the tier was taken out and sent after it, its slice failed with a KeyError in every run."""
    transactions = FakeLimitedTransactions({PARKED: 20_000})
    sending = a_sending(Lake(str(tmp_path)), transactions, 20_000)
    sending.topics = {PARKED: sending.topics[PARKED]}
    batch = [RejectToSend.from_envelope(an_envelope(), TIER, OriginalRecord(b"k", b"v", []))]
    sending.send(batch, BEFORE, AFTER)
    assert [[*notes] for notes in sending.__dict__["moved"]] == [[batch[0].envelope.origin]]
    [_, ([record], mark)] = transactions.committed
    assert (record.topic, record.value, mark) == (PARKED, b"v", AFTER)
    found = open_envelope(record.headers)
    assert found is not None
    assert found.detail.startswith(f"the stream no longer declares {TIER}; why")


def test_a_reference_that_is_refused_ends_it(tmp_path: Path) -> None:
    """Otherwise the same would be tried for ever."""
    one = OriginalRecord(b"k", b"v" * 50_000, [])
    a_raw(lake := Lake(str(tmp_path)), [("orders@0000000", PLACE, one)])
    with pytest.raises(RecordTooLargeError):
        a_sending(lake, FakeLimitedTransactions({TIER: 20_000, PARKED: 10}), 20_000).send(
            [RejectToSend.from_envelope(an_envelope(), PARKED, one)], BEFORE, AFTER
        )


def test_a_reference_that_somebody_sent_to_a_tier_is_parked_as_what_it_was(tmp_path: Path) -> None:
    written = an_envelope(reference=ValueReference(("value", "headers"), PLACE, 5))
    found = OriginalRecord(b"k", b"", written.to_headers())
    assert find_value_reference(found) == written.reference
    assert find_value_reference(found._replace(value=b"fixed")) is None
    transactions = FakeLimitedTransactions({PARKED: 20_000}, compresses=False)
    again = an_envelope(attempt=2, reference=find_value_reference(found))
    a_sending(Lake(str(tmp_path)), transactions, 20_000).send(
        [RejectToSend.from_envelope(again, PARKED, found)], BEFORE, AFTER
    )
    [([record], _)] = transactions.committed
    assert open_envelope(record.headers) == again


def test_records_refused_by_a_tier_stay_parked_and_others_are_sent_back() -> None:
    transactions, stay = FakeLimitedTransactions({TIER: 1_000}), redriving._NotSent()
    found = [OriginalRecord(b"k%d" % n, b"v" * size, []) for n, size in enumerate([10, 5_000, 20])]
    batch = [
        redriving._build_redrive_record(f"orders[0]@{n}", TIER, an_envelope(), one, 2) for n, one in enumerate(found)
    ]
    assert redriving._send_batch(cast("Any", transactions), batch, stay, before=7) == 2
    [(records, mark)] = transactions.committed
    assert ([record.key for record in records], mark) == ([b"k0", b"k2"], PublicationMark(1, 9))
    with pytest.raises(RecordTooLargeError, match="1 records stay parked") as caught:
        stay.raise_for("orders", TIER, 1_000_000, "broker:9092")
    assert f"orders[0]@1: {batch[1].size:,} bytes" in str(caught.value.found)
    assert f"--entity-name {TIER} --add-config max.message.bytes={MAX_BYTES}" in caught.value.remedy


def test_a_reference_whose_row_raw_lacks_stays_parked_and_is_reported() -> None:
    redriving._NotSent().raise_for("orders", TIER, 1, "broker:9092")
    stay = redriving._NotSent(lost=[("orders[2]@17", PLACE)])
    with pytest.raises(UnbalancedError, match=r"orders\[2\]@17"):
        stay.raise_for("orders", TIER, 1_000, "broker:9092")
    stay.large.append(("orders[0]@1", 2_000))
    with pytest.raises(RecordTooLargeError, match=r"raw does not hold orders\[2\]@17"):
        stay.raise_for("orders", TIER, 1_000, "broker:9092")


@pytest.mark.slow
def test_the_broker_takes_what_fits_and_names_what_it_refuses(
    bootstrap: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a refused transaction is seen, its mark is not set, and the next one goes through.

    A broker's first refusal takes one more producer, with reports; from then on all have them.
    """
    made: list[bool] = []
    restarted = Transactions._open_producer

    def counted(self: Transactions, *, reports_delivery: bool) -> Any:
        made.append(reports_delivery)
        return restarted(self, reports_delivery=reports_delivery)

    monkeypatch.setattr(Transactions, "_open_producer", counted)
    # librdkafka waits for as long as it may before it ends a transaction after a refused record.
    monkeypatch.setattr("highwater.resources.transactions.CALL_SECONDS", 5.0)
    name = topic(partitions=1, **{"max.message.bytes": "20000"})
    create_topic(bootstrap, other := f"{name}.other", 1, {"max.message.bytes": "50000"})
    head: list[KafkaHeader] = [("a", b"1"), ("ö", None), *[("b", b"")] * 1_000]
    exact = Record(name, b"k", b"v" * (20_000 - measure_message(b"k", b"", head)), head)
    assert measure_message(exact.key, exact.value, exact.headers) == 20_000
    large, small = Record(name, b"large", b"v" * 20_000), Record(other, b"small", b"v" * 20_000)
    kafka = Kafka(bootstrap, {"message.max.bytes": "60000"})
    with Transactions(kafka, f"highwater.pub.{name}", name, most_bytes=20_000) as transactions:
        transactions.commit([exact, small], PublicationMark(1, 2))
        local = Record(other, b"local", b"v" * 60_000)
        for refused, topics, producers in ((large, name, 2), (large, name, 1), (local, other, 1)):
            made.clear()
            producer = transactions._producer
            with pytest.raises(RecordTooLargeError) as caught:
                transactions.commit([small, refused, exact, small], PublicationMark(1, 5))
            assert caught.value.refused == [refused]
            assert f"--entity-name {topics} --add-config max.message.bytes=" in caught.value.remedy
            assert ("HIGHWATER_KAFKA_CONFIG" in caught.value.remedy) == (topics == other)
            assert transactions.mark() == PublicationMark(1, 2)
            assert transactions._producer is not producer, "what the old one sends next may be out of order"
            assert made == [True] * producers
        transactions.commit([exact, small], PublicationMark(1, 3))
        assert transactions.mark() == PublicationMark(1, 3)
        with Transactions(kafka, f"highwater.pub.{name}", name, most_bytes=20_000) as another:
            another.commit([exact, small], PublicationMark(1, 4))
        # A run that would go on with another producer finds that somebody else went on.
        with pytest.raises(SupersededAttemptError):
            transactions._renew()
    assert [key for key, _ in read_topic(bootstrap, name).values()] == [b"k"] * 3
    assert [key for key, _ in read_topic(bootstrap, other).values()] == [b"small"] * 3


@pytest.mark.parametrize(
    ("code", "aborts", "size", "again"),
    [
        ("INVALID_TXN_STATE", True, 20_000, True),
        ("MSG_SIZE_TOO_LARGE", False, 20_000, True),
        ("INVALID_TXN_STATE", True, 100, False),
        ("MSG_SIZE_TOO_LARGE", False, 100, False),
        ("_TIMED_OUT", False, 20_000, False),
    ],
)
def test_only_a_transaction_that_failed_with_a_record_alone_in_its_batch_is_sent_again(
    code: str, *, aborts: bool, size: int, again: bool
) -> None:
    """Any other failure is reported at once; who asked for reports after each would slow down all that follows."""
    from confluent_kafka import KafkaError, KafkaException

    transactions = Transactions(Kafka("nowhere:1"), "highwater.pub.orders", "orders", most_bytes=20_000)
    unavailable = DependencyUnavailableError("away", remedy="wait")
    unavailable.__cause__ = KafkaException(KafkaError(getattr(KafkaError, code), "why", False, False, aborts))
    records = [Record("orders", b"k", b"v", []), Record("orders", b"k", b"v" * size, [])]
    assert transactions._may_be_too_large(records, unavailable) is again
    unavailable.__cause__ = ConnectionError("of no client")
    assert not transactions._may_be_too_large(records, unavailable)


def test_an_error_of_the_client_that_hits_a_report_is_reported_as_the_clients() -> None:
    """It was seen as `SystemError: ... returned a result with an exception set`, of a producer that was fenced."""
    from confluent_kafka import KafkaError, KafkaException

    def report(cause: Exception) -> None:
        raise SystemError("returned a result with an exception set") from cause

    fenced = KafkaException(KafkaError(KafkaError._FENCED))
    with pytest.raises(KafkaException) as reported:
        _call_client(lambda: report(fenced))
    assert reported.value is fenced
    with pytest.raises(SystemError):
        _call_client(lambda: report(ValueError("another")))
