"""Offsets that Kafka no longer holds: their rows stay, or an error names both values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from highwater.assets import (
    raw,
    unreadable_slices,
)
from highwater.errors import (
    OffsetsExpiredError,
    TopicRecreatedError,
)
from tests.helpers.support import (
    Bench,
    order_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.slow


def test_rows_stay_when_kafka_no_longer_holds_them(bench: Bench) -> None:
    bench.send(order_message("o1", 1), order_message("o1", 2), order_message("o1", 3))
    slice_ = bench.plan(0, p0=(0, 3))
    raw.materialise(bench.work(slice_))
    delete_before(bench, 2)
    report = raw.materialise(bench.work(slice_))[0]
    assert "rows unchanged" in str(report.note)
    assert report.rows == 3
    assert len(bench.rows("raw")) == 3


def test_expired_offsets_that_were_never_read_are_an_error_with_both_values(bench: Bench) -> None:
    bench.send(order_message("o1", 1), order_message("o1", 2), order_message("o1", 3))
    slice_ = bench.plan(0, p0=(0, 3))
    delete_before(bench, 2)
    with pytest.raises(OffsetsExpiredError) as caught:
        raw.materialise(bench.work(slice_))
    assert (caught.value.stored, caught.value.found) == ("[0, 3)", "log start offset 2")
    assert "accept-loss" in caught.value.remedy
    assert bench.rows("raw") == []


def after_the_look(patch: pytest.MonkeyPatch, lose: Callable[[], None]) -> None:
    """Let something happen to the topic between the look at it and Spark's read."""
    look: Callable[..., object] = unreadable_slices.list_unreadable_slices

    def looked(*given: object) -> object:
        found = look(*given)
        patch.setattr(raw, "list_unreadable_slices", look)
        lose()
        return found

    patch.setattr(raw, "list_unreadable_slices", looked)


def test_offsets_that_expire_while_they_are_read_are_reported_as_those_before(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark named neither slice nor values, and the command without stream and partition, for good."""
    bench.send(*[order_message("o1", n) for n in range(1, 7)])
    never_read, read_before = bench.plan(0, p0=(0, 3)), bench.plan(1, p0=(3, 6))
    after_the_look(monkeypatch, lambda: delete_before(bench, 2))
    with pytest.raises(OffsetsExpiredError) as caught:
        raw.materialise(bench.work(never_read))
    assert (caught.value.stored, caught.value.found) == ("[0, 3)", "log start offset 2")
    assert never_read.key in str(caught.value)
    assert f"highwater accept-loss {bench.stream.name} --partition 0" in caught.value.remedy
    assert bench.rows("raw") == []
    raw.materialise(bench.work(read_before))
    after_the_look(monkeypatch, lambda: delete_before(bench, 5))
    [report] = raw.materialise(bench.work(read_before))
    assert "rows unchanged" in str(report.note)
    assert len(bench.rows("raw")) == 3


def delete_before(bench: Bench, offset: int) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bench.bootstrap})
    for future in admin.delete_records([TopicPartition(bench.stream.topic, 0, offset)]).values():
        future.result(30)


def test_a_recreated_topic_is_not_read_as_the_planned_one(bench: Bench) -> None:
    bench.send(order_message("o1", 1))
    slice_ = bench.plan(0, p0=(0, 1))
    other = type(slice_)(**{**vars(slice_), "topic_id": "AAAAAAAAAAAAAAAAAAAAAA"})
    with pytest.raises(TopicRecreatedError) as caught:
        raw.materialise(bench.work(other))
    assert caught.value.stored == "AAAAAAAAAAAAAAAAAAAAAA"
    assert caught.value.found == slice_.topic_id
