"""The way of a rejected record: published once, retried as a slice of its tier, and at one end for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dev.processes import wait_until
from highwater import envelope
from highwater.assets.garbled_envelopes import DETAIL
from highwater.assets.published import materialise as send_accepted
from highwater.declaration import Accepted
from highwater.envelope import ORIGIN, Origin
from highwater.errors import ConfigurationError, OffsetsExpiredError
from highwater.orchestration.checking.version_checks import check_stream_versions, check_version_gaps, check_versions
from highwater.orchestration.operations.acceptance import accept_loss, build_unread_filter
from highwater.orchestration.reporting.explaining import explain
from highwater.orchestration.reporting.locating import locate
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.sensing.retries import plan_tier
from highwater.plans import Discard, Generation
from highwater.routing import build_stream_of_topic, compute_retry_delay, is_stream_topic
from tests.helpers.bench_records import due, ends, published
from tests.helpers.support import Bench, Message, customers, order_message, read_messages

if TYPE_CHECKING:
    from highwater.slices import Slice

pytestmark = pytest.mark.slow


@pytest.fixture
def retried(bench: Bench) -> Iterator[Bench]:
    """A stream whose records wait one second, then two; in the end every check of what is whole passes."""
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1), timedelta(seconds=2)))
    yield bench
    assert bench.failing() == {}


def test_the_story_of_a_late_customer(retried: Bench) -> None:
    """Placed v1 waits in a tier while paid v2 is accepted; v1, due at last, changes nothing of what is current.

    Readers of accepted events get each once, v1 marked as late.
    """
    bench = retried
    topic = bench.stream.topic
    bench.stream = replace(bench.stream, publishes=Accepted(f"{topic}.accepted"))
    bench.send(order_message("o1", 1, customer_id="late"), order_message("o1", 2), Message(b"o2", b"garbled", 1))
    main = bench.plan(0, p0=(0, 2), p1=(0, 1))
    bench.materialise(main)
    send_accepted(bench.work(main))
    [(partition, key, value, headers)] = published(bench.bootstrap, f"{topic}.dlq.1")
    assert (partition, key) == (0, b"o1")
    assert json.loads(value or b"")["version"] == 1
    reported = dict(headers)
    assert reported[envelope.ORIGIN_TOPIC] == topic.encode()
    assert (reported[envelope.ORIGIN_OFFSET], reported[envelope.ATTEMPT]) == (b"0", b"1")
    assert [(p, v) for p, _, v, _ in published(bench.bootstrap, f"{topic}.parked")] == [(1, b"garbled")]
    assert bench.current()["o1"]["version"] == 2
    missed = check_version_gaps(bench.lake, bench.stream, [main.key])["no_version_missing"][main.key]
    assert (missed.passed, missed.warning, missed.numbers["waits_in_a_tier"]) == (False, True, 1)
    assert f"{topic} partition 0 offset 0, on {topic}.dlq.1, due at " in str(missed.samples[0]["where"])

    customers(bench.lake, ["c1", "late"])
    [slice_] = due(bench)
    assert slice_.key == f"{topic}.dlq.1@0000000"
    bench.materialise(slice_)
    send_accepted(bench.work(slice_))
    messages = [
        (json.loads(value or b"")["version"], dict(found))
        for _, _, value, found in published(bench.bootstrap, f"{topic}.accepted")
    ]
    assert [(version, found.get("highwater.late")) for version, found in messages] == [(2, None), (1, b"retried")]
    assert ends(bench, "events") == Counter({(main.key, 1): 1, (slice_.key, 0): 1})
    [late] = [row for row in bench.rows("events") if row["slice"] == slice_.key]
    assert (late["origin_topic"], late["version"], late["retries"]) == (topic, 1, 1)
    winner = bench.current()["o1"]
    assert (winner["version"], winner["updated_by_slice"]) == (2, main.key)
    keys = [main.key, slice_.key]
    checked = check_versions(bench.lake, bench.stream, keys) | check_version_gaps(bench.lake, bench.stream, keys)
    assert [v.text for by_slice in checked.values() for v in by_slice.values() if not v.passed] == []
    assert checked["versions_along_offsets"][slice_.key].numbers["returns_from_the_DLQ"] == 1
    assert [v.text for v in check_stream_versions(bench.lake, bench.stream).values() if not v.passed] == []
    ensure_located(bench, main, slice_)
    ensure_explained(bench, main)


def ensure_located(bench: Bench, main: Slice, retried: Slice) -> None:
    """Every record can be followed to its end, from each topic that it was on."""
    topic, parked = bench.stream.topic, bench.stream.parked_topic
    asked = [(topic, 0, 0), (topic, 0, 1), (topic, 1, 0), (retried.topic, 0, 0), (retried.topic, 0, 1), (parked, 1, 0)]
    ends = {
        place: locate(bench.ledger, bench.kafka, bench.lake, bench.stream, *place)[0]
        for place in (*asked, (topic, 2, 9))
    }
    assert [ends[place].end for place in asked] == ["accepted", "accepted", "parked", "accepted", "gap", "parked"]
    late = ends[topic, 0, 0]
    assert late.origin == ends[retried.topic, 0, 0].origin == Origin(topic, 0, 0, 0)
    assert (late.text.split(",")[0], late.text.split(", ")[-1]) == (f"in events of {retried.key}", "retries 1")
    assert late.slice_ == main
    assert late.commits == {"raw": 1} | dict.fromkeys(("events", "rejects", "dlq", "current"), 2)
    assert [fact.split(" (")[0] for fact in late.facts] == [f"rejected by {main.key} as unresolved"]
    assert (late.row or {})["key"] == "o1"
    assert ends[parked, 1, 0].origin == ends[topic, 1, 0].origin == Origin(topic, 0, 1, 0)
    assert (ends[topic, 2, 9].end, "no such offset yet" in ends[topic, 2, 9].text) == ("unplanned", True)
    bench.ledger.discards.add("orders", [Discard(Origin(topic, 0, 1, 0), "garbage", "ann", datetime.now(UTC))])
    assert locate(bench.ledger, bench.kafka, bench.lake, bench.stream, parked, 1, 0)[0].end == "discarded"


def ensure_explained(bench: Bench, slice_: Slice) -> None:
    found = explain(bench.ledger, bench.lake, bench.stream, slice_.key, None)
    assert found.lines[-1] == "complete"
    rows = {one.table: one.rows for one in found.commits}
    assert rows == {"raw": 3, "events": 1, "rejects": 2, "dlq": 2, "current": None}
    assert found.publication is not None
    assert found.publication.sent == 2
    assert found.to_plain()["ranges"] == {"0": [0, 2], "1": [0, 1]}


def test_unresolved_records_pass_all_tiers_and_are_parked(retried: Bench) -> None:
    bench = retried
    topic = bench.stream.topic
    sent = replace(order_message("o1", 1, customer_id="never"), headers=[("trace", b"t1"), ("trace", None)])
    bench.send(sent)
    bench.materialise(bench.plan(0, p0=(0, 1)))
    [first] = due(bench, 1)
    bench.materialise(first)
    [second] = due(bench, 2)
    bench.materialise(second)
    names = [f"{topic}.dlq.1", f"{topic}.dlq.2", f"{topic}.parked"]
    found = [published(bench.bootstrap, name) for name in names]
    assert [len(records) for records in found] == [1, 1, 1]
    assert [records[0][3][:2] for records in found] == [sent.headers] * 3, "untouched"
    assert [Counter(name for name, _ in records[0][3]).total() for records in found] == [13] * 3, "they do not grow"
    reported = [dict(records[0][3]) for records in found]
    assert [headers[envelope.ATTEMPT] for headers in reported] == [b"1", b"2", b"3"]
    assert [headers[envelope.SLICE] for headers in reported] == [
        f"{topic}@0000000".encode(),
        first.key.encode(),
        second.key.encode(),
    ]
    assert len({headers[envelope.FIRST_FAILED_AT] for headers in reported}) == 1
    assert {records[0][2] for records in found} == {sent.value}
    assert bench.rows("events") == []


def test_a_slice_of_a_tier_that_is_declared_no_more_is_decided_as_it_would_have_been(retried: Bench) -> None:
    bench = retried
    topic = bench.stream.topic
    bench.send(order_message("o1", 1, customer_id="late"), order_message("o2", 1, customer_id="never"))
    bench.materialise(bench.plan(0, p0=(0, 2)))
    [slice_] = due(bench)
    bench.stream = replace(bench.stream, tiers=())
    assert is_stream_topic(bench.stream, slice_.topic)
    customers(bench.lake, ["c1", "late"])
    bench.materialise(slice_)
    assert ends(bench, "events") == Counter({(slice_.key, 0): 1})
    [(_, key, _, headers)] = published(bench.bootstrap, f"{topic}.parked")
    assert (key, dict(headers)[envelope.ORIGIN_TOPIC], dict(headers)[envelope.ATTEMPT]) == (b"o2", topic.encode(), b"2")


def test_published_rejects_are_left_to_the_dlq_and_not_sent_again(retried: Bench) -> None:
    """A backfill after the customer became known accepts nothing that waits in a tier: it would be there twice."""
    bench = retried
    bench.send(*[order_message(f"o{n}", 1, n % 3, customer_id="late") for n in range(12)], order_message("known", 1))
    main = bench.plan(0, p0=(0, 5), p1=(0, 4), p2=(0, 4))
    bench.materialise(main)
    first = published_at(bench)
    assert len(first) == 12
    customers(bench.lake, ["c1", "late"])
    bench.materialise(main)
    assert ends(bench, "events") == Counter({(main.key, 4): 1})
    rejected = [*((p, o) for p in range(3) for o in range(4))]
    assert sorted((row["origin_partition"], row["origin_offset"]) for row in bench.rows("rejects")) == rejected
    assert len(bench.rows("dlq")) == 12
    again = published_at(bench)
    assert {place: at for place, (_, at) in again.items()} == {place: at for place, (_, at) in first.items()}
    assert all(attempt > first[place][0] for place, (attempt, _) in again.items())
    found = published(bench.bootstrap, bench.stream.tier_topics[0])
    assert Counter(key for _, key, _, _ in found) == Counter({f"o{n}".encode(): 1 for n in range(12)})
    assert {(p, (key or b"")[1:]) for p, key, _, _ in found} == {(n % 3, str(n).encode()) for n in range(12)}
    [slice_] = due(bench)
    bench.materialise(slice_)
    bench.materialise(main)
    assert Counter(row["key"] for row in bench.rows("events")) == Counter(["known", *(f"o{n}" for n in range(12))])
    assert {row["slice"] for row in bench.rows("events") if row["key"] != "known"} == {slice_.key}
    assert len(published(bench.bootstrap, bench.stream.tier_topics[0])) == 12


def published_at(bench: Bench) -> dict[tuple[int, int], tuple[int, datetime]]:
    """By origin, the attempt that its row in `dlq` is of, and when it was published."""
    rows = bench.rows("dlq")
    return {(row["origin_partition"], row["origin_offset"]): (row["attempt"], row["published_at"]) for row in rows}


BAD_ENVELOPES: dict[str, dict[str, Any]] = {
    "none": {},
    "another stream": {envelope.ORIGIN_TOPIC: b"payments"},
    "garbled offset": {envelope.ORIGIN_OFFSET: b"x"},
    "huge offset": {envelope.ORIGIN_OFFSET: b"9" * 40},
    "negative partition": {envelope.ORIGIN_PARTITION: b"-1"},
    "not UTF-8": {envelope.ORIGIN_TOPIC: b"\xff"},
    "no attempt": {envelope.ATTEMPT: None},
    "attempt without a next one": {envelope.ATTEMPT: b"2147483647"},
    "generation without a next one": {envelope.ORIGIN_GENERATION: b"2147483647"},
    "reclaims without a next one": {envelope.RECLAIMS: b"2147483647"},
    "negative reclaims": {envelope.RECLAIMS: b"-1"},
    "time beyond 64 bits": {envelope.ORIGIN_TIMESTAMP: b"9223372036854775808"},
}


def test_records_sent_to_a_tier_by_hand_settle_each_origin_once(retried: Bench) -> None:
    """Copies of what was accepted, corrections of what was parked, and records whose envelope is wrong."""
    bench = retried
    bench.send(order_message("o1", 1, customer_id="late"), order_message("o2", 1, amount="twelve"))
    bench.materialise(bench.plan(0, p0=(0, 2)))
    [(_, key, value, headers)] = published(bench.bootstrap, bench.stream.tier_topics[0])
    [(_, parked_key, _, parked)] = published(bench.bootstrap, bench.stream.parked_topic)
    customers(bench.lake, ["c1", "late"])
    [first] = due(bench)
    bench.materialise(first)

    copy = Message(key, value, 0, [*headers])
    corrected = Message(parked_key, order_message("o2", 1).value, 0, [*parked])
    wrong = Message(parked_key, order_message("o2", 1, amount="ten").value, 0, [*parked])
    tier = replace(bench, stream=replace(bench.stream, topic=bench.stream.tier_topics[0]))
    tier.send(copy, copy, wrong, corrected, corrected)
    sound = order_message("o9", 1).value
    for changes in BAD_ENVELOPES.values():
        stored = [*({**dict(headers), **changes} if changes else {}).items()]
        tier.send(Message(b"o9", sound, 1, stored))
    [second] = due(bench)
    counts = bench.materialise(second)["events"][0].counts
    bad = len(BAD_ENVELOPES)
    assert (counts["raw"], counts["events"], counts["superseded"], counts["rejects"]) == (5 + bad, 1, 2 + 2, bad)
    accepted = {row["key"]: (row["slice"], row["origin_topic"]) for row in bench.rows("events")}
    assert accepted == {"o1": (first.key, bench.stream.topic), "o2": (second.key, bench.stream.topic)}
    assert len(bench.rows("events")) == 2
    rows = [row for row in bench.rows("rejects") if row["slice"] == second.key]
    assert [(row["origin_topic"], row["reason"]) for row in rows] == [(tier.stream.topic, "malformed")] * bad
    assert all("header highwater." in row["detail"] for row in rows)
    assert len(published(bench.bootstrap, bench.stream.parked_topic)) == 1 + bad
    again = bench.rejects_from_raw(second)
    assert sorted(map(reported, again)) == sorted(map(reported, rows)), (
        "classified for the events or from raw, it is the same"
    )


def reported(row: Mapping[str, Any]) -> tuple[object, ...]:
    """What a row of rejects says of its record."""
    names = ("retries", "reclaims", "reason", "permanent", "detail", "key", "value", "next_topic")
    return *(row[name] for name in ORIGIN), *(row[name] for name in names), repr(row["headers"])


# All that it knows is docs/dlq.md: it is run without this folder, and knows nothing of how we name the headers.
STRANGER = """
import json, sys
from confluent_kafka import Consumer, Producer, TopicPartition

bootstrap, parked, tier, times = *sys.argv[1:4], int(sys.argv[4])
envelope = [
    "highwater.origin.topic", "highwater.origin.generation", "highwater.origin.partition", "highwater.origin.offset",
    "highwater.origin.timestamp", "highwater.attempt", "highwater.reason", "highwater.detail", "highwater.slice",
    "highwater.first_failed_at", "highwater.reclaims",
]
consumer = Consumer({
    "bootstrap.servers": bootstrap, "group.id": "stranger", "isolation.level": "read_committed",
    "enable.partition.eof": True, "auto.offset.reset": "earliest",
})
partitions = list(consumer.list_topics(parked, timeout=60).topics[parked].partitions)
consumer.assign([TopicPartition(parked, partition, 0) for partition in partitions])
found, ended = [], set()
while len(ended) < len(partitions):
    message = consumer.poll(60)
    if message is None:
        sys.exit("nothing came")
    if message.error():
        ended.add(message.partition())
    else:
        found.append(message)
consumer.close()
producer = Producer({"bootstrap.servers": bootstrap})
for message in found:
    headers = dict(message.headers())
    envelope_headers = {name: headers.pop(name).decode() for name in envelope}
    value = json.loads(message.value())
    value["amount"] = 12.5
    fixed = [*headers.items(), *{**envelope_headers, "highwater.attempt": "1"}.items()]
    for _ in range(times):
        producer.produce(
            tier, json.dumps(value), message.key(), int(envelope_headers["highwater.origin.partition"]), headers=fixed
        )
    print(json.dumps({"own": {name: one.decode() for name, one in headers.items()}, **envelope_headers}))
if producer.flush(60):
    sys.exit("not sent")
"""


def test_a_program_that_knows_the_page_alone_fixes_what_was_parked_once(retried: Bench, tmp_path: Path) -> None:
    """However often it is sent; what the producer itself called highwater.something is not passed on."""
    bench, tier = retried, retried.stream.tier_topics[0]
    garbled = order_message("o2", 1, 2, amount="twelve")
    garbled.headers.extend([("trace", b"7"), ("highwater.slice", b"mine"), ("highwater.other", b"mine")])
    bench.send(order_message("o1", 1, 2), garbled)
    main = bench.plan(0, p2=(0, 2))
    bench.materialise(main)

    def fix(times: int) -> dict[str, Any]:
        given = [bench.bootstrap, bench.stream.parked_topic, tier, str(times)]
        command = [sys.executable, "-I", "-c", STRANGER, *given]
        done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    reported = fix(times=3)
    assert reported["own"] == {"trace": "7"}
    names = [f"highwater.{name}" for name in ("origin.topic", "origin.partition", "origin.offset", "reason", "slice")]
    assert [reported[name] for name in names] == [bench.stream.topic, "2", "1", "malformed", main.key]
    [first] = due(bench)
    counts = bench.materialise(first)["events"][0].counts
    assert (counts["raw"], counts["events"], counts["superseded"], counts["rejects"]) == (3, 1, 2, 0)
    fix(times=1)
    [second] = due(bench)
    counts = bench.materialise(second)["events"][0].counts
    assert (counts["raw"], counts["events"], counts["superseded"], counts["rejects"]) == (1, 0, 1, 0)
    [fixed] = [row for row in bench.rows("events") if row["key"] == "o2"]
    origin = [fixed[f"origin_{name}"] for name in Origin._fields]
    assert (fixed["slice"], origin, float(fixed["amount"])) == (first.key, [bench.stream.topic, 0, 2, 1], 12.5)
    [known] = locate(bench.ledger, bench.kafka, bench.lake, bench.stream, bench.stream.topic, 2, 1)
    assert known.end == "accepted"


def test_a_copy_of_what_is_not_decided_yet_is_none(retried: Bench) -> None:
    """A sound envelope of another record's origin: its tier accepted it, and its main slice did so too, later."""
    bench = retried
    topic, tier = bench.stream.topic, bench.stream.tier_topics[0]
    bench.send(order_message("o1", 1, customer_id="late"), order_message("o2", 1), order_message("o3", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    bench.ledger.topics.open_generation(
        Generation("orders", topic, slice_.topic_id, 0, {0: 0, 1: 0, 2: 0}, datetime.now(UTC))
    )
    bench.materialise(slice_)
    waiting = bench.plan(1, p0=(1, 2), p1=(0, 0), p2=(0, 0))
    [(_, _, _, headers)] = published(bench.bootstrap, tier)
    named = {"offset": [b"1", b"2"], "generation": [b"1"], "partition": [b"1", b"7"]}
    garbled = [{f"highwater.origin.{part}": value} for part, values in named.items() for value in values]
    sound = order_message("o2", 1).value
    at = replace(bench, stream=replace(bench.stream, topic=tier))
    at.send(*[Message(b"o2", sound, 1, [*{**dict(headers), **changes}.items()]) for changes in garbled])
    customers(bench.lake, ["c1", "late"])
    [first] = due(bench)
    for _ in range(2):
        counts = bench.materialise(first)["events"][0].counts
        assert (counts["events"], counts["rejects_malformed"], counts["rejects"]) == (1, len(garbled), len(garbled))
        rows = [row for row in bench.rows("rejects") if row["slice"] == first.key]
        assert {(row["origin_topic"], row["reason"], row["detail"]) for row in rows} == {(tier, "malformed", DETAIL)}
        assert locate(bench.ledger, bench.kafka, bench.lake, bench.stream, tier, 1, 0)[0].end == "parked"
        # By now they are decided: what was parked stays so when the tier's slice is materialised again.
        bench.materialise(waiting)
    assert Counter(row["key"] for row in bench.rows("events")) == {"o1": 1, "o2": 1}
    assert len(published(bench.bootstrap, bench.stream.parked_topic)) == len(garbled)


def test_nothing_is_due_before_its_delay(bench: Bench) -> None:
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=6),))
    bench.send(order_message("o1", 1, customer_id="late"))
    tier = bench.stream.tier_topics[0]
    found: list[Slice] = []
    looks: list[datetime] = []
    bench.materialise(bench.plan(0, p0=(0, 1)))

    def due_now() -> bool:
        looks.append(datetime.now(UTC))
        found.extend(plan_tier(bench.ledger, bench.kafka, bench.stream, tier, looks[-1]).slices)
        return bool(found)

    wait_until(due_now, 60, "what is due")
    [sent] = read_messages(bench.bootstrap, tier)
    waited = looks[-1] - datetime.fromtimestamp(sent.timestamp()[1] / 1000, UTC)
    assert waited >= compute_retry_delay(timedelta(seconds=6), found[0].key)


def test_status_and_acceptance_know_the_tiers(retried: Bench) -> None:
    """Records that a tier lost before they were tried are accepted as lost like those of the main topic."""
    from confluent_kafka import TopicPartition

    bench = retried
    tier = bench.stream.tier_topics[0]
    reported = read_stream_status(bench.ledger, bench.kafka, bench.stream, {}).lines
    assert f"  {tier}: nothing was published to it yet" in reported
    bench.send(order_message("o1", 1, customer_id="late"), order_message("o2", 1, amount="x"))
    bench.materialise(bench.plan(0, p0=(0, 2)))
    first, parked = (read_stream_status(bench.ledger, bench.kafka, bench.stream, {}).dlq[n] for n in (0, -1))
    # One record, and the marker of its transaction.
    assert (first.topic, first.waiting, parked.waiting, parked.due) == (tier, 2, 2, None)
    [slice_] = due(bench)
    assert read_stream_status(bench.ledger, bench.kafka, bench.stream, {}).dlq[0].waiting == 0

    admin = bench.kafka.get_admin()
    admin.delete_records([TopicPartition(tier, 0, 2)])
    wait_until(lambda: bench.kafka.read_topic_state(tier).partitions[0].log_start == 2, 30, "the deletion")
    with pytest.raises(OffsetsExpiredError) as caught:
        bench.materialise(slice_)
    assert f"highwater accept-loss orders --topic {tier} --partition 0" in caught.value.remedy
    unread = build_unread_filter(bench.lake, bench.stream)
    asked = build_stream_of_topic(bench.stream, tier)
    accepted = accept_loss(bench.ledger, bench.kafka, asked, unread, by="ann", now=datetime.now(UTC), dry_run=False)
    assert [(loss.topic, len(loss.offsets)) for loss in accepted.losses] == [(tier, 2)]
    bench.materialise(slice_)
    with pytest.raises(ConfigurationError, match="no topic that is planned"):
        build_stream_of_topic(bench.stream, bench.stream.parked_topic)


@pytest.mark.long
def test_a_run_may_take_slices_of_the_topic_and_of_tiers_together(retried: Bench) -> None:
    """As a backfill of a range does: with two copies of an origin in two slices, and one that no slice accepts."""
    bench = retried
    bench.send(*[order_message(f"o{n}", 1, customer_id="late") for n in range(3)], order_message("o9", 1))
    main = bench.plan(0, p0=(0, 4))
    bench.materialise(main)
    sent = published(bench.bootstrap, bench.stream.tier_topics[0])
    [first] = due(bench)
    tier = replace(bench, stream=replace(bench.stream, topic=bench.stream.tier_topics[0]))
    tier.send(*[Message(key, value, 0, [*headers]) for _, key, value, headers in sent[:2]])
    [second] = due(bench)
    customers(bench.lake, ["c1"])
    bench.materialise(main, first, second)
    customers(bench.lake, ["c1", "late"])
    bench.materialise(main, first, second)
    assert ends(bench, "events") == Counter({(main.key, 3): 1}), "what waits in the second tier is left to it"
    [*again] = due(bench, 2)
    bench.materialise(*again, main)
    assert Counter(row["key"] for row in bench.rows("events")) == Counter({"o0": 1, "o1": 1, "o2": 1, "o9": 1})
