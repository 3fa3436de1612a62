"""Parked records: what waits is reported, sent back, or discarded by a named person, and each origin has one end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import dagster as dg
import pytest

from highwater import envelope
from highwater.assets import dlq
from highwater.declaration import Accepted, OnReject
from highwater.declaration_parts import ON_REJECT
from highwater.envelope import MAX_COUNT, Envelope, Origin, add_envelope, open_envelope
from highwater.erasing import Erasure, compute_digest
from highwater.errors import ConfigurationError, DeclarationError, RecordTooLargeError
from highwater.orchestration.build import build_defs
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.cli.terminal import EXIT_PERMANENT
from highwater.orchestration.operations import parked, redriving
from highwater.orchestration.operations.erasing import ErasureRequest, erase_key
from highwater.orchestration.operations.parked import (
    Parked,
    ParkedRecord,
    ParkedRequest,
    ParkedSelection,
    _discard,
    read_parked,
    redrive_or_discard,
    select_oldest,
)
from highwater.orchestration.reporting import doctor
from highwater.orchestration.reporting.locating import locate
from highwater.plans import Discard
from highwater.reclaims import Reclaim
from highwater.resources.dlq_topics import TopicShape, ensure_dlq_topics
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.resources.topic_state import PartitionState, TopicState
from tests.conftest import create_topic
from tests.helpers.bench_records import due, ends, published
from tests.helpers.scene import Scene
from tests.helpers.support import Bench, Message, customers, order_message, send
from tests.helpers.world import STREAM

if TYPE_CHECKING:
    from tests.conftest import TopicFactory

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def an_envelope(offset: int, reason: str = "malformed", **changes: Any) -> Envelope:
    sound = Envelope("orders", 0, 0, offset, 1_700_000_000_000, 2, reason, "why", "orders@0000000", NOW)
    return replace(sound, **changes)


OWN: list[tuple[str, bytes | None]] = [("own", b"1"), ("own", None)]


def test_an_envelope_is_read_as_it_was_written() -> None:
    written = an_envelope(7, reclaims=2)
    assert open_envelope(add_envelope(written, OWN)) == written
    assert written.origin == Origin("orders", 0, 0, 7)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (envelope.ORIGIN_TOPIC, b""),
        (envelope.ORIGIN_GENERATION, b"-1"),
        (envelope.ORIGIN_PARTITION, b"first"),
        (envelope.ORIGIN_OFFSET, b""),
        (envelope.ORIGIN_TIMESTAMP, b"today"),
        (envelope.ATTEMPT, b"0"),
        (envelope.ATTEMPT, str(2**31 - 1).encode()),
        (envelope.ORIGIN_GENERATION, str(2**31 - 1).encode()),
        (envelope.RECLAIMS, str(2**31 - 1).encode()),
        (envelope.ORIGIN_PARTITION, str(2**31).encode()),
        (envelope.ORIGIN_TIMESTAMP, str(2**63).encode()),
        (envelope.ORIGIN_TOPIC, b"\xff"),
        (envelope.RECLAIMS, b"-1"),
    ],
)
def test_an_envelope_that_cannot_be_believed_is_none(header: str, value: bytes) -> None:
    sound = an_envelope(7).to_headers()
    assert open_envelope(sound, ["orders"].__contains__) is not None
    assert open_envelope(sound, ["payments"].__contains__) is None
    assert open_envelope([*sound, (header, value)]) is None, "of several headers of a name the last counts"
    without = open_envelope([one for one in sound if one[0] != header])
    # What was published before that header was there carries none.
    assert (without is None) == (header != envelope.RECLAIMS)
    assert without is None or without.reclaims == 0


def test_a_record_that_is_rejected_again_is_always_read_again() -> None:
    """One whose header named the greatest attempt came to the parked topic with one that no reader believed."""
    for retries in (1, MAX_COUNT - 1, MAX_COUNT):
        alike = dlq._build_envelope_template(
            "orders", 0, 0, "invalid", "a_rule", "orders.dlq.1@0000000", NOW, "orders.parked", "", retries, 0, None
        )
        found = open_envelope(alike.envelope.to_headers())
        assert found is not None
        assert found.attempt == min(retries + 1, MAX_COUNT)


def accept(lake: Lake, origins: Sequence[Origin]) -> None:
    """Let records of `orders` are in events, as retries that were accepted."""
    import pyarrow as pa
    from deltalake import write_deltalake

    columns = {
        **{f"origin_{name}": [getattr(o, name) for o in origins] for name in Origin._fields},
        "slice": ["orders.dlq.1@0000000"] * len(origins),
        "retries": [1] * len(origins),
    }
    write_deltalake(lake.build_table_path("orders", "events"), pa.table(columns), partition_by=["slice"])


class Parking:
    """A stream with records on its parked topic."""

    def __init__(self, bootstrap: str, topic: str, folder: Path) -> None:
        self.scene = Scene(bootstrap, topic, folder)
        self.stream = replace(self.scene.stream, tiers=(timedelta(days=1), timedelta(days=2)))
        self.lake = Lake(str(folder / "lake"))
        self.log: list[str] = []
        ensure_dlq_topics(self.scene.kafka, self.stream)

    def envelope(self, offset: int, reason: str = "malformed", **changes: Any) -> Envelope:
        return an_envelope(offset, reason, topic=self.stream.topic, **changes)

    def origin(self, offset: int) -> Origin:
        return self.envelope(offset).origin

    def park(self, *envelopes: Envelope, key: bytes | None = b"o1", value: bytes | None = b"garbled") -> None:
        messages = [
            Message(key, value, 1, [*add_envelope(one, OWN)])  # elsewhere than its origin, as a person may have sent it
            for one in envelopes
        ]
        send(self.scene.bootstrap, self.stream.parked_topic, messages)

    def accepted(self, *origins: Origin) -> None:
        accept(self.lake, origins)

    def waiting(self, choice: ParkedSelection | None = None) -> list[int]:
        found = read_parked(self.scene.ledger, self.scene.kafka, self.lake, self.stream, choice or ParkedSelection())
        return sorted(origin.offset for origin in found.waiting)

    def decide(self, **asked: Any) -> list[int]:
        given = ParkedRequest(**asked)
        found = redrive_or_discard(self.scene.ledger, self.scene.kafka, self.lake, self.stream, given, self.log.append)
        return sorted(origin.offset for origin in found.waiting)


@pytest.fixture
def parking(bootstrap: str, topic: TopicFactory, tmp_path: Path) -> Parking:
    return Parking(bootstrap, topic(partitions=2), tmp_path)


def test_a_limit_takes_those_that_were_parked_first() -> None:
    """Partitions are read one after another, so the first that are found are not the oldest."""
    waiting = {
        Origin("orders", 0, 0, n): ParkedRecord(
            partition, 10 - n, parked_ms, "malformed", "orders@0000000", "why", "o1"
        )
        for n, (partition, parked_ms) in enumerate([(0, 300), (0, 200), (1, 100), (1, 200)])
    }
    found = select_oldest(Parked(waiting, other_causes={"malformed": 1}, ended=0, without_envelope=0, ends={}), 2)
    assert ([origin.offset for origin in found.waiting], found.others) == ([2, 1], 3)


def test_a_selection_that_nothing_matches_shows_the_causes_of_the_others() -> None:
    """A mistyped rule showed `none`, as if nothing waited for a person."""
    record = ParkedRecord(0, 0, 0, "invalid", "orders@0000000", "why", "o1", rule="paid")
    by_origin = {Origin("orders", 0, 0, n): replace(record, offset=n) for n in range(3)}
    malformed = {Origin("orders", 0, 0, 3): replace(record, offset=3, reason="malformed", rule=None)}
    found = select_oldest(Parked({**by_origin, **malformed}, {}, ended=0, without_envelope=0, ends={}), 1)
    assert found.lines == ["1 parked records match: 1 invalid by paid", "3 others wait: 2 invalid by paid, 1 malformed"]
    none = Parked({}, found.other_causes, ended=0, without_envelope=0, ends={})
    assert none.lines == ["0 parked records match: none", "3 others wait: 2 invalid by paid, 1 malformed"]


@dataclass(frozen=True)
class FakeParkedRecord:
    """A record of the parked topic, and the topic itself."""

    at: int
    of: bytes | None
    ms: int
    envelope: Envelope

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes | None:
        return self.of

    def timestamp(self) -> tuple[int, int]:
        return 2, self.ms

    def headers(self) -> list[tuple[str, bytes | None]]:
        return add_envelope(self.envelope, [])


def test_records_of_an_erased_key_wait_no_more(tmp_path: Path) -> None:
    """Those that were published or parked until then; what is published later under the key is new."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    ledger.erasures.add(Erasure("orders", compute_digest(b"o1"), "asked for", "somebody", NOW))
    ms = round(NOW.timestamp() * 1000)
    lying = [
        FakeParkedRecord(0, b"o1", ms, an_envelope(0, timestamp=ms - 5)),
        FakeParkedRecord(1, b"o1", ms + 9, an_envelope(1, timestamp=ms)),  # parked again since
        FakeParkedRecord(2, b"o1", ms + 9, an_envelope(2, timestamp=ms + 1)),
        FakeParkedRecord(3, b"o2", ms, an_envelope(3, timestamp=ms)),
        FakeParkedRecord(4, None, ms, an_envelope(4, timestamp=ms)),
    ]
    there = PartitionState(log_start=0, last_stable=5, high_watermark=5, leader=1)
    state = TopicState("orders.dlq.parked", "A" * 22, {0: there})
    kafka = cast(
        "Any", SimpleNamespace(read_topic_state=lambda _: state, look_again=lambda _: state, read=lambda *_: lying)
    )
    found = read_parked(ledger, kafka, Lake(str(tmp_path / "lake")), STREAM, ParkedSelection())
    assert sorted(origin.offset for origin in found.waiting) == [2, 3, 4]
    assert (found.ended, found.others) == (2, 0)


def test_nothing_is_abandoned_that_has_another_end_by_now(tmp_path: Path) -> None:
    """The topic takes long to read; a retry may accept what was found, and a person may take it back."""
    ledger, lake = Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite'}"), Lake(str(tmp_path / "lake"))
    later = datetime.now(UTC) + timedelta(minutes=1)  # by a clock that goes ahead
    ledger.discards.add("orders", [Discard(an_envelope(3).origin, "first", "bob", later)])
    waiting = {
        an_envelope(n).origin: ParkedRecord(0, n, 0, "malformed", "orders@0000000", "why", "o1") for n in range(4)
    }
    accept(lake, [an_envelope(0).origin])
    ledger.reclaims.add("orders", [Reclaim(an_envelope(1).origin, "orders@0000000", 1, "fixed", "ann", NOW)])
    asked = ParkedRequest(dry_run=False, by="ann", because="a test")
    assert _discard(ledger, lake, STREAM, Parked(waiting, {}, 0, 0, {}), asked) == (1, 3)
    found = {one.origin.offset: (one.reason, one.discarded_at) for one in ledger.discards.list_for_stream("orders")}
    assert found == {3: ("first", later), 2: ("a test", later + timedelta(microseconds=1))}
    assert ledger.discards.read_last_discard_time("orders") == later + timedelta(microseconds=1)
    assert [one.origin.offset for one in ledger.discards.list_for_stream("orders", within=(3, 9))] == [3]
    assert ledger.discards.read_last_discard_time("payments") is None


@pytest.mark.slow
def test_parked_records_wait_unless_accepted_or_discarded(parking: Parking) -> None:
    assert parking.waiting() == []
    parking.park(*[parking.envelope(n) for n in range(5)], parking.envelope(3, "invalid"))
    send(parking.scene.bootstrap, parking.stream.parked_topic, [Message(b"k", b"no envelope")])
    parking.park(an_envelope(8, topic="of.another.stream"))
    parking.accepted(parking.origin(1), parking.origin(99))
    parking.scene.ledger.discards.add(parking.stream.name, [Discard(parking.origin(2), "test data", "ann", NOW)])
    found = read_parked(
        parking.scene.ledger, parking.scene.kafka, parking.lake, parking.stream, ParkedSelection(reasons=["invalid"])
    )
    assert {origin.offset: one.reason for origin, one in found.waiting.items()} == {3: "invalid"}
    assert (found.others, found.ended, found.without_envelope) == (2, 2, 2)
    assert parking.waiting() == [0, 3, 4]
    assert (
        select_oldest(
            read_parked(parking.scene.ledger, parking.scene.kafka, parking.lake, parking.stream, ParkedSelection()), 2
        ).others
        == 1
    )


def test_a_rule_is_selected_with_no_reason_that_has_none() -> None:
    for reasons in ([], ["invalid"]):
        choice = ParkedSelection(reasons, ["paid"])
        found = [choice.matches("invalid", rule, (), None, 0) for rule in ("paid", "unpaid", None)]
        assert found == [True, False, False]
        assert not choice.matches("unresolved", None, (), None, 0)
    with pytest.raises(ConfigurationError, match="rejected for malformed, schema have no rule"):
        ParkedSelection(["schema", "invalid", "malformed"], ["paid"])


@pytest.mark.slow
def test_a_choice_is_by_reason_slice_key_and_time(parking: Parking) -> None:
    parking.park(parking.envelope(0, slice_key="orders@0000007"), parking.envelope(1, "invalid"))
    parking.park(parking.envelope(2), key="ö".encode())
    parking.park(parking.envelope(3), key=None)
    parking.park(replace(parking.envelope(4, "invalid"), rule="paid"))
    later, earlier = datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) - timedelta(hours=1)
    assert parking.waiting(ParkedSelection(slices=["orders@0000007"])) == [0]
    assert parking.waiting(ParkedSelection(reasons=["invalid", "other"])) == [1, 4]
    assert parking.waiting(ParkedSelection(rules=["paid"])) == [4]
    assert parking.waiting(ParkedSelection(keys=["ö"])) == [2]
    assert parking.waiting(ParkedSelection(since=earlier, until=later)) == [0, 1, 2, 3, 4]
    assert parking.waiting(ParkedSelection(since=later)) == parking.waiting(ParkedSelection(until=earlier)) == []


@pytest.mark.slow
def test_records_are_sent_back_as_they_are(parking: Parking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.orchestration.operations.redriving.RECORDS_PER_TRANSACTION", 2)
    written = [parking.envelope(n, partition=n % 2) for n in range(5)]
    parking.park(*written[:4])
    parking.park(written[4], key=None, value=b"\xff")
    assert parking.decide() == [0, 1, 2, 3, 4]
    assert "nothing was changed" in parking.log[-1]
    tier = parking.stream.tier_topics[0]
    assert published(parking.scene.bootstrap, tier) == []
    parking.decide(dry_run=False, by="ann")
    assert "5 of 5" in parking.log[-1]
    found = published(parking.scene.bootstrap, tier)
    expected: list[tuple[Any, ...]] = [(e.partition, b"o1", b"garbled", add_envelope(e, OWN)) for e in written[:4]]
    expected.append((written[4].partition, None, b"\xff", add_envelope(written[4], OWN)))
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert parking.decide(dry_run=False, by="ann", most=1) == [0], "as often as wanted"
    assert len(published(parking.scene.bootstrap, tier)) == 6


@pytest.mark.slow
def test_discarded_records_stop_waiting_with_their_first_reason(parking: Parking) -> None:
    parking.park(*[parking.envelope(n, "invalid" if n else "malformed") for n in range(3)])
    invalid = ParkedSelection(reasons=["invalid"])
    assert parking.decide(dry_run=False, by="ann", because="a test", choice=invalid) == [1, 2]
    assert "2 discarded by ann: a test" in parking.log[-1]
    assert parking.waiting() == [0]
    ledger = parking.scene.ledger
    assert ledger.discards.add("orders", [Discard(parking.origin(1), "other", "bob", NOW)]) == 0
    assert {(d.origin.offset, d.reason, d.discarded_by) for d in ledger.discards.list_for_stream("orders")} == {
        (1, "a test", "ann"),
        (2, "a test", "ann"),
    }
    assert ledger.discards.list_for_stream("payments") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"dry_run": False}, "--by NAME"),
        ({"dry_run": False, "by": "ann", "because": ""}, "--because TEXT"),
        ({"dry_run": False, "by": "ann"}, "declare one"),
    ],
)
def test_missing_arguments_are_reported_before_any_action(parking: Parking, asked: dict[str, Any], remedy: str) -> None:
    parking.park(parking.envelope(0))
    parking.stream = replace(parking.stream, tiers=())
    with pytest.raises(ConfigurationError) as caught:
        parking.decide(**asked)
    assert remedy in caught.value.remedy
    assert parking.waiting() == [0]


@pytest.mark.slow
def test_the_commands_and_the_jobs(parking: Parking, monkeypatch: pytest.MonkeyPatch) -> None:
    parking.park(parking.envelope(0), parking.envelope(1, "invalid"), parking.envelope(2))
    scene = parking.scene
    shown = scene.run("redrive-parked", "orders", "--reason", "malformed")
    assert shown.exit_code == 0, shown.output
    assert "2 parked records match: 2 malformed" in shown.output
    assert "1 others wait: 1 invalid" in shown.output
    assert "a dry run: nothing was changed\nto do it, add --yes --by NAME\n" in shown.output
    assert "to do it, add --yes --by NAME --because TEXT" in scene.run("discard-parked", "orders").output
    assert scene.run("redrive-parked", "orders", "--yes", "--by", "").exit_code == EXIT_PERMANENT
    assert scene.run("discard-parked", "orders", "--yes", "--by", "ann").exit_code == EXIT_PERMANENT
    discarded = scene.run(
        "discard-parked", "orders", "--key", "o1", "--limit", "1", "--yes", "--by", "ann", "--because", "x"
    )
    assert "1 discarded by ann: x" in discarded.output
    sent = json.loads(scene.run("redrive-parked", "orders", "--yes", "--by", "ann", "--json").output)
    assert [one["origin"]["offset"] for one in sent["meant"]] == [1, 2]

    monkeypatch.setenv("HIGHWATER_HOME", str(scene.folder))
    monkeypatch.setenv("HIGHWATER_KAFKA_BOOTSTRAP", scene.bootstrap)
    defs = build_defs(streams=[parking.stream])
    config = {"dry_run": False, "by": "bob", "because": "y", "until": (datetime.now(UTC) + timedelta(1)).isoformat()}
    run = defs.resolve_job_def("discard_parked").execute_in_process(
        run_config={"stream": "orders", **config}, instance=dg.DagsterInstance.ephemeral()
    )
    assert run.success
    assert parking.waiting() == []
    assert {d.discarded_by for d in scene.ledger.discards.list_for_stream("orders")} == {"ann", "bob"}


@pytest.mark.slow
def test_discarded_records_are_not_accepted_by_copies_under_way(bench: Bench) -> None:
    """Its retry accepted it later, while the ledger named who had given it up."""
    policy = {**ON_REJECT, "unresolved": OnReject.PARK}
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1),), on_reject=policy)
    bench.send(*[order_message(key, 1, customer_id="late") for key in ("o1", "o2")])
    bench.materialise(bench.plan(0, p0=(0, 2)))
    customers(bench.lake, ["c1", "late"])
    where = (bench.ledger, bench.kafka, bench.lake, bench.stream)
    redrive_or_discard(*where, ParkedRequest(dry_run=False, by="ann"), bench.log.append)
    redrive_or_discard(
        *where,
        ParkedRequest(ParkedSelection(keys=["o1"]), dry_run=False, by="ann", because="test data"),
        bench.log.append,
    )
    [slice_] = due(bench)
    counts = bench.materialise(slice_)["events"][0].counts
    assert (counts["events"], counts["superseded"], counts["rejects"]) == (1, 1, 0)
    assert [row["key"] for row in bench.rows("events")] == ["o2"]
    found = count_ends(bench.ledger, bench.lake, bench.stream)
    assert (found.accepted, found.discarded, found.parked, found.error) == (1, 1, 0, None)
    assert [locate(*where, bench.stream.topic, 0, n)[0].end for n in (0, 1)] == ["discarded", "accepted"]
    assert bench.failing() == {}


@pytest.mark.slow
def test_a_key_that_is_erased_while_it_is_sent_back_stays_erased(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy on the tier is younger than the erasure: it was taken for a new record, and accepted."""
    policy = {**ON_REJECT, "unresolved": OnReject.PARK}
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1),), on_reject=policy)
    bench.send(*[order_message(key, 1, customer_id="late") for key in ("o1", "o2")])
    bench.materialise(bench.plan(0, p0=(0, 2)))
    customers(bench.lake, ["c1", "late"])
    send_back = redriving.redrive

    def erase_first(*arguments: Any) -> Any:
        asked = ErasureRequest(compute_digest(b"o1"), dry_run=False, by="somebody", because="asked for")
        erase_key(bench.work(), None, asked, datetime.now(UTC))
        yield from send_back(*arguments)

    monkeypatch.setattr(parked, "redrive", erase_first)
    redriven(bench)
    assert {key for _, key, *_ in published(bench.bootstrap, bench.stream.tier_topics[0])} == {b"o1", b"o2"}
    [slice_] = due(bench)
    bench.materialise(slice_)
    assert {row["key"] for name in ("events", "current") for row in bench.rows(name)} == {"o2"}
    assert {row["key"] for name in ("raw", "rejects") for row in bench.rows(name)} == {b"o2"}
    assert bench.failing() == {}


def redriven(bench: Bench) -> Parked:
    """Send all parked records back."""
    where = bench.ledger, bench.kafka, bench.lake, bench.stream
    return redrive_or_discard(*where, ParkedRequest(dry_run=False, by="ann"), bench.log.append)


@pytest.mark.slow
def test_a_record_that_is_sent_back_twice_is_accepted_once(bench: Bench) -> None:
    policy = {**ON_REJECT, "unresolved": OnReject.PARK}
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1),), on_reject=policy)
    bench.send(order_message("o1", 1, customer_id="late"))
    bench.materialise(bench.plan(0, p0=(0, 1)))
    customers(bench.lake, ["c1", "late"])
    for _ in range(2):
        redriven(bench)
    [slice_] = due(bench)
    assert slice_.offsets >= 2
    bench.materialise(slice_)
    assert ends(bench, "events") == {(slice_.key, 0): 1}
    slice_commit = bench.lake.load_slice_commits(bench.stream.name, "events", [slice_.key])[slice_.key]
    assert (slice_commit.counts["events"], slice_commit.counts["superseded"], slice_commit.counts["rejects"]) == (
        1,
        1,
        0,
    )
    found = read_parked(bench.ledger, bench.kafka, bench.lake, bench.stream, ParkedSelection())
    assert (len(found.waiting), found.ended) == (0, 1)


def narrow(bench: Bench, topic: str, room: int) -> None:
    """Create a topic of the DLQ as it must be, with room for little."""
    settings = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1", "max.message.bytes": str(room)}
    create_topic(bench.bootstrap, topic, 3, settings)


def widen(bench: Bench, topic: str, room: int) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    entry = ConfigEntry("max.message.bytes", str(room), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    bench.kafka.get_admin().incremental_alter_configs([resource])[resource].result(30)


def check_whole(bench: Bench) -> None:
    """Every check passes, and every origin has one end."""
    assert bench.failing() == {}
    assert count_ends(bench.ledger, bench.lake, bench.stream).error is None


@pytest.mark.slow
def test_a_record_that_no_topic_takes_is_parked_by_reference_and_comes_back_whole(bench: Bench) -> None:
    """It holds up nothing of its slice, and is reported like any parked record.

    The client compresses, so only the broker knows what is too large: random digits shrink to three fifths.
    """
    bench.stream = replace(bench.stream, tiers=(timedelta(seconds=1),))
    bench.kafka = Kafka(bench.bootstrap, {"compression.type": "gzip"})
    tier, parked_topic = bench.stream.tier_topics[0], bench.stream.parked_topic
    narrow(bench, tier, 20_000)
    narrow(bench, parked_topic, 45_000)

    def late(name: str, note: str) -> Message:
        return order_message(name, 1, customer_id="late", note=note)

    sent = [
        order_message("o0", 1),
        late("o1", "x" * 90_000),
        late("o2", os.urandom(30_000).hex()),
        late("o3", os.urandom(60_000).hex()),
        Message(os.urandom(50_000), b"garbled", 0, [("own", os.urandom(50_000))]),
    ]
    bench.send(*sent)
    first = bench.plan(0, p0=(0, 5))
    bench.materialise(first)
    check_whole(bench)
    assert [(key, value) for _, key, value, _ in published(bench.bootstrap, tier)] == [(b"o1", sent[1].value)]
    found = {
        int(dict(headers)[envelope.ORIGIN_OFFSET] or b""): (key, value, dict(headers))
        for _, key, value, headers in published(bench.bootstrap, parked_topic)
    }
    assert {n: (key, value) for n, (key, value, _) in found.items()} == {
        2: (b"o2", sent[2].value),
        3: (b"o3", b""),
        4: (None, b""),
    }
    left_out = [headers.get(envelope.LEFT_OUT) for _, (_, _, headers) in sorted(found.items())]
    assert left_out == [None, b"value", b"value,headers,key"]
    reported = [found[3][2][name] for name in (envelope.RAW_TOPIC, envelope.RAW_PARTITION, envelope.RAW_OFFSET)]
    assert reported == [bench.stream.topic.encode(), b"0", b"3"]
    [located] = locate(bench.ledger, bench.kafka, bench.lake, bench.stream, bench.stream.topic, 0, 3)
    assert located.end == "parked"
    assert count_ends(bench.ledger, bench.lake, bench.stream).parked == 3

    bench.kafka = Kafka(bench.bootstrap)
    with pytest.raises(RecordTooLargeError, match="3 records stay parked") as caught:
        redriven(bench)
    assert f"--entity-name {tier} --add-config max.message.bytes=" in caught.value.remedy
    assert len(published(bench.bootstrap, tier)) == 1
    assert any("2 of them are parked by reference" in line for line in bench.log)
    widen(bench, tier, 500_000)
    redriven(bench)
    whole = {(key, value): headers for _, key, value, headers in published(bench.bootstrap, tier)}
    assert set(whole) == {(one.key, one.value) for one in sent[1:]}
    assert whole[sent[4].key, sent[4].value][0] == sent[4].headers[0]
    assert not [name for headers in whole.values() for name, _ in headers if name == envelope.LEFT_OUT]
    customers(bench.lake, ["c1", "late"])
    # The main slice again: what was parked is left there by it.
    bench.materialise(first, *due(bench))
    assert sorted(row["key"] for row in bench.rows("events")) == ["o0", "o1", "o2", "o3"]
    check_whole(bench)
    found_now = read_parked(bench.ledger, bench.kafka, bench.lake, bench.stream, ParkedSelection())
    assert (len(found_now.waiting), found_now.ended) == (1, 2)


def test_no_transactional_id_of_a_command_can_be_that_of_a_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """`redrive-parked` of `orders` had the ID, and the mark, of a publication to a topic `redrive.orders`."""
    opened: list[str] = []

    def refuse(_: object, name: str, *__: object, **___: object) -> None:
        opened.append(name)
        raise RecordTooLargeError("nothing is sent here", remedy="none")

    for module in (redriving, doctor):
        monkeypatch.setattr(module, "Transactions", refuse)
    shape = TopicShape(1, 1, {"max.message.bytes": "1000"})
    monkeypatch.setattr(redriving, "ensure_dlq_topics", lambda *_: {STREAM.tier_topics[0]: shape})
    nothing = cast("Any", SimpleNamespace(open_kafka=lambda: None))
    with pytest.raises(RecordTooLargeError):
        next(redriving.redrive(nothing, nothing, STREAM, {(0, 0)}, {}, nothing))
    with pytest.raises(RecordTooLargeError):
        doctor._check_transactions(nothing, STREAM)
    for name in opened:
        with pytest.raises(DeclarationError, match="is no topic name"):
            replace(STREAM, publishes=Accepted(name.removeprefix("highwater.pub.")))
    assert len(opened) == 2
