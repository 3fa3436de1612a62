"""Replaced history as the rules see it: fingerprints, epochs and generations, without a broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from assets.streams.orders import STREAM
from highwater.assets import raw
from highwater.declaration import Limits
from highwater.divergence import Divergence, Fingerprint, PlannedFacts, SeenRecord, compute_digest, has_diverged
from highwater.erasing import to_milliseconds, to_moment
from highwater.orchestration.build import build_defs
from highwater.orchestration.operations.acceptance import accept_loss, compute_acceptance
from highwater.orchestration.sensing.slice_cutting import cut_slices
from highwater.plans import Generation, Planned, subtract_losses
from highwater.resources.divergence_detection import locate_divergence
from highwater.resources.kafka import Kafka
from highwater.slices import OffsetRange, Slice
from tests.helpers.replaced_history import FakeReplacedTopic, seen, topic
from tests.helpers.support import make_stream

if TYPE_CHECKING:
    from highwater.resources.ledger import Ledger


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
WAS = PlannedFacts(end=10, epoch=3, fingerprint=Fingerprint(9, "a"))


def record(offset: int, text: str, epoch: int | None) -> SeenRecord:
    return SeenRecord(offset, text, epoch)


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        (WAS, [record(9, "a", 3)], False),
        (WAS, [record(9, "b", 5)], True),
        (WAS, [record(9, "b", None)], True),  # an old format of batches carries no epoch
        (WAS, [record(9, "a", None)], False),
        (WAS, [record(7, "z", 2)], False),  # compaction took the marked one
        (WAS, [record(9, "a", 3), record(9, "c", 5)], True),
        (WAS, [], False),
        (replace(WAS, fingerprint=None), [record(9, "b", 5)], True),
        (replace(WAS, fingerprint=None), [record(9, "b", 3)], False),
        (PlannedFacts(10, None, None), [record(9, "b", 5)], False),
    ],
)
def test_another_record_or_a_later_epoch_reports(was: PlannedFacts, now: list[SeenRecord], expected: bool) -> None:
    assert has_diverged(was, now) is expected


def test_a_digest_reports_null_from_empty_and_key_from_value() -> None:
    contents = [(None, None), (b"", None), (None, b""), (b"", b""), (b"a", b"b"), (b"ab", b"")]
    assert len({compute_digest(1, *content) for content in contents}) == len(contents)
    assert compute_digest(1, b"a", b"b") != compute_digest(2, b"a", b"b")


def test_a_digest_takes_the_milliseconds_as_kafka_has_them() -> None:
    """By a time it took year 1 as replaced history, and there is no time for nanoseconds taken as milliseconds."""
    for ms in (1_767_225_600_000_000_000, 2**63 - 1, -(2**63), -62_135_596_800_000, -1):
        assert compute_digest(ms, b"k", None) == sha256(str(ms).encode() + b"\1k" + b"\0").hexdigest()


@given(st.integers(-(2**63), 2**63 - 1))
@example(2**63 - 1)
@example(253_402_300_800_000)
@example(253_402_300_799_999)
@example(-(2**63))
def test_a_record_of_any_timestamp_is_not_younger_than_the_erasure_that_saw_it(ms: int) -> None:
    """The moment of an erasure is never before a record that it took: else a later read brought the record back."""
    moment = to_moment(ms)
    assert to_milliseconds(moment) >= ms
    if 0 <= ms < 253_402_300_800_000:
        assert moment == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
        assert to_milliseconds(moment) == ms


def generation(number: int, starts: dict[int, int | None]) -> Generation:
    return Generation("orders", "orders", "id", number, starts, NOON)


def test_a_partition_that_went_on_into_a_new_generation_is_still_compared_with_its_past() -> None:
    """Two are replaced; accepting one must not make the other's new records look as if they followed."""
    ranges = {0: OffsetRange(100, 200), 1: OffsetRange(100, 200)}
    last = Slice("orders", "orders", "id", 0, 4, ranges, NOON, epochs={0: 1, 1: 1})
    after = Planned.from_generation(generation(1, {0: 120, 1: 200}), last, [])
    assert after.recorded == {1: PlannedFacts(200, 1)}
    state = topic(seen(0, 260, epoch=3), seen(0, 260, epoch=3))
    result = cut_slices(replace(STREAM, limits=Limits()), after, state, NOON, Divergence({1: 150}))
    assert set(result.errors) == {1}
    assert [slice_.ranges[0] for slice_ in result.slices] == [OffsetRange(120, 260)]
    assert result.slices[0].epochs == {0: 3, 1: 1}, "what was not looked at keeps the epoch of its plan"


def test_a_partition_that_was_cut_off_and_grew_again_begins_where_it_is_sound() -> None:
    """Planned to 200, cut off at 100, grown to 150: the records from 100 on are new."""
    last = Slice("orders", "orders", "id", 0, 4, {0: OffsetRange(0, 200)}, NOON, epochs={0: 1})
    planned_ = Planned.from_generation(generation(0, {0: 0}), last, [])
    for divergence in (True, False):
        found = compute_acceptance(
            STREAM,
            planned_,
            topic(seen(0, 150, epoch=3)),
            [last],
            by="ann",
            now=NOON,
            diverged={0: 100},
            divergence=divergence,
        )
        assert found.opened is not None
        assert found.opened.starts == {0: 100}
        assert [loss.offsets for loss in found.losses] == [OffsetRange(100, 200)]


def test_remainder_of_an_earlier_generations_slice_can_be_lost() -> None:
    """It was refused as expired, with a command as the remedy that found nothing to accept."""
    left = Slice("orders", "orders", "id", 0, 4, {0: OffsetRange(40, 100)}, NOON, epochs={0: 1})
    for state, lost in (
        (topic(seen(60, 250, epoch=3)), OffsetRange(40, 60)),
        (topic(seen(120, 250, epoch=3)), OffsetRange(40, 100)),
    ):
        planned_ = Planned.from_generation(generation(1, {0: 130}), left, [])
        found = compute_acceptance(STREAM, planned_, state, [left], by="ann", now=NOON)
        assert [(loss.generation, loss.offsets) for loss in found.losses] == [(0, lost)]
        assert found.opened is None
    after = Planned.from_generation(generation(1, {0: 100}), left, [])
    again = compute_acceptance(STREAM, after, topic(seen(0, 80, epoch=5)), [left], by="ann", now=NOON)
    assert [(loss.generation, loss.offsets) for loss in again.losses] == [(0, OffsetRange(80, 100))]
    assert again.opened is not None
    other = replace(left, topic_id="of the one before")
    assert compute_acceptance(STREAM, after, topic(seen(60, 250, epoch=3)), [other], by="ann", now=NOON).nothing


def test_accepting_a_divergence_leaves_what_expired() -> None:
    """Without partitions to mean, offsets of others that had expired were recorded as lost with it."""
    ranges = {0: OffsetRange(0, 200), 1: OffsetRange(0, 200), 2: OffsetRange(0, 200), 3: OffsetRange(0, 9)}
    last = Slice("orders", "orders", "id", 0, 4, ranges, NOON, epochs=dict.fromkeys(ranges, 1))
    before = Planned.from_generation(generation(0, dict.fromkeys(ranges, 0)), last, [])
    # The first was replaced from 100 on, of the second part of a slice expired, of the third more than was planned.
    state = topic(seen(40, 250, epoch=3), seen(40, 250, epoch=1), seen(230, 250, epoch=1))
    asked = {"by": "ann", "now": NOON, "diverged": {0: 100}}
    found = compute_acceptance(STREAM, before, state, [last], **asked, divergence=True)  # type: ignore[arg-type]
    assert [(loss.partition, loss.offsets) for loss in found.losses] == [(0, OffsetRange(100, 200))]
    assert found.opened is not None
    assert found.opened.starts == {0: 100, 1: 200, 2: 200, 3: 9}
    assert len(found.reasons) == 1
    rest = subtract_losses(last, found.losses)
    later = Planned.from_generation(replace(found.opened, revision=1), None, [])
    more = compute_acceptance(STREAM, later, state, [rest], by="bob", now=NOON)
    assert {(loss.generation, loss.partition, loss.offsets) for loss in more.losses} == {
        (0, 0, OffsetRange(0, 40)),
        (0, 1, OffsetRange(0, 40)),
        (0, 2, OffsetRange(0, 200)),
        (1, 2, OffsetRange(200, 230)),
        (0, 3, OffsetRange(0, 9)),
    }, "and nothing of it is left out by the command that is meant for it"


class FakeKafkaResource(dg.ConfigurableResource[Any]):
    """Replaces the place where runs take their Kafka from."""

    def open(self) -> Kafka:
        return PLAYED


PLAYED = FakeReplacedTopic("nowhere:1")


def test_the_jobs_do_what_the_commands_do(ledger: Ledger, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One accepts that records were replaced, the other that they expired, and neither what is the other's."""
    monkeypatch.setenv("HIGHWATER_LEDGER_URL", url)
    monkeypatch.setenv("HIGHWATER_LAKE", str(Path(url.removeprefix("sqlite:///")).parent / "lake"))
    ledger.topics.open_generation(generation(0, {0: 0}))
    ledger.add([Slice("orders", "orders", "id", 0, 0, {0: OffsetRange(0, 200)}, NOON, epochs={0: 1})])
    defs = build_defs(streams=[make_stream("orders")], resources={"kafka": FakeKafkaResource()})
    with dg.DagsterInstance.ephemeral() as instance:

        def done(what: str, **asked: object) -> bool:
            job, run = defs.get_job_def(what), {"stream": "orders", **asked}
            return job.execute_in_process(instance=instance, run_config=run, raise_on_error=False).success

        def lost() -> list[tuple[int, int, int, str]]:
            return [(x.generation, x.offsets.start, x.offsets.end, x.accepted_by) for x in ledger.list_losses("orders")]

        assert done("accept_loss", dry_run=False, by="ann")
        assert done("accept_divergence", by="ann", partitions=[0])
        assert not done("accept_divergence", dry_run=False), "needs the name of the person"
        assert lost() == []
        assert done("accept_divergence", dry_run=False, by="ann", partitions=[0])
        assert lost() == [(0, 100, 200, "ann")]
        assert ledger.topics.list_generations("orders", "orders")[-1].starts == {0: 100}
        monkeypatch.setattr(PLAYED, "log_start", 230)
        assert done("accept_divergence", dry_run=False, by="bob")
        assert done("accept_loss", by="bob")
        assert len(lost()) == 1, "what expired is not accepted with what was replaced"
        assert done("accept_loss", dry_run=False, by="bob")
        assert lost()[1:] == [(1, 100, 230, "bob"), (0, 0, 100, "bob")], "what was left of the slice expired as well"


MADE = {n: compute_digest(0, b"k", b"%d" % n) for n in range(250)}


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([(99, MADE[99])], 100),
        ([(49, MADE[49])], 100),  # nothing contradicts the epochs
        ([(99, "other"), (79, "other"), (49, MADE[49]), (19, "other")], 50),
        ([(199, "other"), (99, "other")], 10),  # nothing that it holds agrees
        ([(99, "other"), (5, MADE[5])], 10),  # gone by retention
        ([], 100),
    ],
)
def test_a_log_parts_behind_the_newest_mark_that_agrees(marks: list[tuple[int, str]], expected: int) -> None:
    """Two elections: below the place that epochs show were records that no plan had seen, and they were never read."""
    found = locate_divergence(PLAYED, "orders", 0, OffsetRange(10, 100), [Fingerprint(*mark) for mark in marks])
    assert found == expected


def test_accepted_divergence_begins_where_older_plans_agree(ledger: Ledger) -> None:
    ledger.topics.open_generation(generation(0, {0: 0}))
    for ordinal, end, text in ((0, 40, MADE[39]), (1, 90, "other"), (2, 200, "other")):
        slice_ = Slice("orders", "orders", "id", 0, ordinal, {0: OffsetRange(end - 40, end)}, NOON, epochs={0: 1})
        ledger.add([replace(slice_, fingerprints={0: Fingerprint(end - 1, text)})])
    found = accept_loss(
        ledger, PLAYED, make_stream("orders"), lambda _: [], by="ann", now=NOON, divergence=True, dry_run=True
    )
    assert found.opened.starts == {0: 40}


def test_a_range_without_a_fingerprint_gets_one_before_it_is_read() -> None:
    """Its plan had no answer in time; nothing would have reported other records that came there during the read."""
    ranges = {0: OffsetRange(40, 60), 1: OffsetRange(5, 5)}
    slice_ = Slice("orders", "orders", "id", 0, 0, ranges, NOON, fingerprints={0: Fingerprint(39, MADE[39])})
    work: Any = SimpleNamespace(kafka=PLAYED)
    marked = raw._with_fingerprints(work, slice_)
    assert marked.fingerprints == {0: Fingerprint(59, MADE[59])}
    assert raw._with_fingerprints(work, marked) is marked
