"""What stays readable after an accepted loss, through Spark: planning goes on, and the prefix of done slices too."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from dev.processes import wait_until
from highwater.assets import raw
from highwater.errors import HighwaterError, OffsetsExpiredError, TopicRecreatedError, TopicTruncatedError
from highwater.orchestration.operations.acceptance import accept_loss, build_unread_filter
from highwater.orchestration.sensing.topic_planner import Planner
from highwater.plans import Generation
from highwater.slices import Slice
from tests.helpers.support import order_message

if TYPE_CHECKING:
    from tests.helpers.support import Bench

pytestmark = pytest.mark.slow


def tick(bench: Bench) -> Slice:
    [slice_] = Planner(bench.ledger, bench.kafka).tick(bench.stream, datetime.now(UTC)).slices
    return slice_


def send(bench: Bench, *versions: int) -> None:
    bench.send(*[order_message("o1", version) for version in versions])


def accept(bench: Bench) -> None:
    unread = build_unread_filter(bench.lake, bench.stream)
    accept_loss(bench.ledger, bench.kafka, bench.stream, unread, by="ann", now=datetime.now(UTC), dry_run=False)


def delete_before(bench: Bench, offset: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    for future in admin.delete_records([TopicPartition(bench.stream.topic, 0, offset)]).values():
        future.result(30)


def recreate(bench: Bench) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin, topic = AdminClient({"bootstrap.servers": bench.bootstrap}), bench.stream.topic
    old = bench.kafka.read_topic_state(topic).topic_id
    admin.delete_topics([topic])[topic].result(30)

    def created() -> bool:
        try:
            admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(30)
            return True
        except Exception:  # noqa: BLE001 - the old one is still being deleted
            return False

    def led() -> bool:
        try:
            state = bench.kafka.read_topic_state(topic)
        except HighwaterError:
            return False
        return state.topic_id != old and all(p.known for p in state.partitions.values())

    wait_until(created, 30, "the topic's second creation")
    wait_until(led, 30, "its leaders")


def offsets(bench: Bench) -> set[tuple[int, int]]:
    return {(row["generation"], row["offset"]) for row in bench.rows("raw")}


def test_a_slice_that_was_never_read_takes_what_is_left(bench: Bench) -> None:
    send(bench, 1, 2)
    read = tick(bench)
    raw.materialise(bench.work(read))
    send(bench, 3, 4, 5)
    unread = tick(bench)
    delete_before(bench, 4)
    with pytest.raises(OffsetsExpiredError):
        raw.materialise(bench.work(unread))
    accept(bench)
    raw.materialise(bench.work(unread))
    reports = bench.materialise(read, unread)["raw"]
    assert offsets(bench) == {(0, 0), (0, 1), (0, 4)}
    assert [report.counts.get("lost", 0) for report in reports] == [0, 2]
    [loss] = bench.ledger.list_losses(bench.stream.name)
    assert (loss.offsets.start, loss.offsets.end) == (2, 4)  # what was read is not lost


def test_a_stream_that_records_losses_goes_on_with_what_is_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what expired before it was planned was recorded: a planned slice failed until a person came."""
    send(bench, 1, 2)
    read = tick(bench)
    raw.materialise(bench.work(read))
    send(bench, 3, 4)
    gone = tick(bench)
    send(bench, 5, 6, 7)
    part = tick(bench)
    delete_before(bench, 5)
    with pytest.raises(OffsetsExpiredError):
        raw.materialise(bench.work(gone, part))
    assert bench.ledger.list_losses(bench.stream.name) == [], "a person decides"
    bench.stream = replace(bench.stream, on_expired="record")
    reports = raw.materialise(bench.work(read, gone, part))
    assert [report.counts.get("lost", 0) for report in reports] == [0, 2, 1]
    assert offsets(bench) == {(0, 0), (0, 1), (0, 5), (0, 6)}, "what was read stays, and the others go on"
    found = bench.ledger.list_losses(bench.stream.name)
    assert {(loss.offsets.start, loss.offsets.end, loss.accepted_by) for loss in found} == {
        (2, 4, "on_expired=record"),
        (4, 5, "on_expired=record"),
    }
    for _ in range(2):
        bench.materialise(read, gone, part)
    assert len(bench.ledger.list_losses(bench.stream.name)) == 2, "once"
    red = {name.split(" of ")[0] for name in bench.failing()}
    assert not red & {"slices_tile", "offsets_as_planned", "gaps_explained", "offsets_accounted_for"}


def test_offsets_that_expire_during_the_read_are_recorded_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.stream = replace(bench.stream, on_expired="record")
    send(bench, 1, 2, 3)
    slice_ = tick(bench)
    commit = vars(raw)["commit_with_retries"]

    def expiring(*given: Any) -> Any:
        if not bench.ledger.list_losses(bench.stream.name):
            delete_before(bench, 2)
        return commit(*given)

    monkeypatch.setattr(raw, "commit_with_retries", expiring)
    [report] = raw.materialise(bench.work(slice_))
    assert (offsets(bench), report.counts["lost"]) == ({(0, 2)}, 2)


def test_a_slice_of_a_topic_that_is_gone_is_done_with_nothing_in_it(bench: Bench) -> None:
    send(bench, 1, 2)
    read = tick(bench)
    raw.materialise(bench.work(read))
    send(bench, 3)
    unread = tick(bench)
    recreate(bench)
    send(bench, 7)
    with pytest.raises(TopicRecreatedError):
        raw.materialise(bench.work(unread))
    accept(bench)
    new = tick(bench)
    bench.materialise(read, unread, new)
    assert offsets(bench) == {(0, 0), (0, 1), (1, 0)}
    assert set(bench.lake.load_slice_commits(bench.stream.name, "raw")) == {read.key, unread.key, new.key}


def test_a_slice_is_not_read_again_where_a_later_generation_counts_its_offsets_again(bench: Bench) -> None:
    """After a truncation the same offsets hold other records: read again, they replaced the true ones."""
    send(bench, 1, 2, 3)
    slice_ = tick(bench)
    raw.materialise(bench.work(slice_))
    planned = bench.ledger.topics.read_planned_topic(bench.stream.name, bench.stream.topic)
    assert planned is not None
    before = planned.generation
    later = Generation(before.stream, before.topic, before.topic_id, 1, {0: 1, 1: 0, 2: 0}, datetime.now(UTC), "ann")
    assert bench.ledger.topics.open_generation(later, seen=before)
    [report] = raw.materialise(bench.work(slice_))
    assert "rows unchanged" in (report.note or "")
    assert "generation 1 begins at 1" in (report.note or "")
    again = tick(bench)
    raw.materialise(bench.work(again))
    assert offsets(bench) == {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)}
    never = Slice(**{**vars(slice_), "ordinal": 9, "planned_at": datetime.now(UTC)})
    bench.ledger.add([never])
    with pytest.raises(TopicTruncatedError) as caught:
        raw.materialise(bench.work(never))
    assert (caught.value.stored, caught.value.found) == ("[0, 3) of generation 0", "generation 1 begins at 1")
