"""The mirror of progress: one tick that sets a stream's consumer group to the finished prefix (I12)."""

# Nothing is remembered beside the group itself: a mark beside each offset names the last slice of the prefix, so a tick
# looks only at the slices after it, and costs the same after any number of slices. A group that was deleted, that
# expired, or that somebody else set is worked out again from the first slice on.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from highwater.errors import TopicAbsentError, UnknownSliceError
from highwater.mirroring import GroupOffset, MirrorMark, compute_finished_prefix
from highwater.orchestration.checking import slice_status
from highwater.orchestration.dependencies import build_kafka_guard, build_lake_guard, ensure_lake_exists
from highwater.orchestration.sensing.stream_ticks import Tick
from highwater.resources.consumer_groups import commit, read_group_offsets
from highwater.resources.dependency_guards import guard_dependencies
from highwater.resources.divergence_detection import detect_divergence

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.divergence import Divergence
    from highwater.plans import Planned
    from highwater.resources.consumer_groups import TopicAndPartition
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState
    from highwater.slices import Slice

# Group offsets expire: after seven days by default, after one on clusters that were set up before Kafka 2.0. So daily,
# less an hour in which the broker may be unavailable.
AGAIN = timedelta(hours=23)
# The lake is asked for the first slices after the prefix, and for twice as many while all of them are done: what waits
# after a slice that is stuck costs nothing. A group that restarts passes 100,000 slices in 50 minutes of ticks.
FIRST_LOOK = 20
MAX_PER_TICK = 1_000
# The end of a run is what moves the offsets. One of several slices commits some of them long before.
WORKING_REST = timedelta(minutes=1)
# Longer than a tick lasts, whose requests end by themselves.
LEASE_SECONDS = 60.0

Offsets = Mapping[int, GroupOffset]


@dataclass(frozen=True)
class TopicLook:
    """A topic of the stream as ledger and Kafka show it."""

    topic: str
    planned: Planned
    state: TopicState
    divergence: Divergence

    @property
    def same(self) -> bool:
        """Whether it is the topic that was planned."""
        return self.state.topic_id == self.planned.generation.topic_id


@dataclass(frozen=True)
class OffsetsToMirror:
    """The offsets that the group shall hold of a topic.

    Args:
        offsets: by partition; those that cannot be compared now are left out.
        mark: beside each of them.
        line: the topic in a sentence.
        complete: whether all that is planned is done.
        sure: whether each of its partitions could be compared.
    """

    offsets: Mapping[int, int]
    mark: MirrorMark
    line: str
    complete: bool = False
    sure: bool = False


def mirror(resources: Any, stream: Stream, cursor: str | None = None) -> Tick:
    """A tick of the sensor; it requests no run. Raises what `tick` does."""
    ledger, kafka, lake = resources.ledger.open(), resources.kafka.open(), resources.lake.open()
    with guard_dependencies(build_kafka_guard(ledger, kafka), build_lake_guard(ledger, lake, stream)):
        ensure_lake_exists(ledger, lake)
        return replace(tick(ledger, kafka, lake, stream, datetime.now(UTC)), cursor=cursor)


def tick(ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, now: datetime) -> Tick:
    """Set the group of a stream to its finished prefix, if that changed or was committed a day ago.

    Raises:
        ForeignMemberError: somebody consumes in the group, so the broker refused the commit.
        ConfigurationError: the broker forbids it.
        DependencyUnavailableError: Kafka, the lake or the ledger is unavailable.
        LeaseHeldError: another tick is under way.
    """
    # Without the lease the slower of two ticks could reset an offset that the other one set in a new generation.
    with ledger.lease(stream.group, seconds=LEASE_SECONDS) as lease:
        lines: list[str] = []
        looked = _read_planned_topics(ledger, kafka, stream, lines)
        found = read_group_offsets(
            kafka, stream.group, [(one.topic, p) for one in looked for p in one.state.partitions]
        )
        wanted: dict[TopicAndPartition, tuple[int, MirrorMark]] = {}
        idle = sure = True
        for one in looked:
            has = {p: found[one.topic, p] for p in one.state.partitions if (one.topic, p) in found}
            progress = (
                _measure_progress(ledger, lake, stream, one, has, now) if one.same else _build_withdrawal(one, has, now)
            )
            lines.append(progress.line)
            idle, sure = idle and progress.complete, sure and progress.sure
            wanted.update({(one.topic, p): (offset, progress.mark) for p, offset in progress.offsets.items()})
        stale = {place: want for place, want in wanted.items() if _is_stale(found.get(place), *want)}
        if stale:
            lease.check()
            commit(kafka, stream.group, stale)
        done = f"committed {len(stale)} offsets of {stream.group}" if stale else "nothing changed"
        return Tick(lines=[done, *lines], idle=idle, until=now + WORKING_REST if sure else None)


def _is_stale(has: GroupOffset | None, offset: int, mark: MirrorMark) -> bool:
    if has is None or has.mark is None or has.offset != offset:
        return True
    return replace(has.mark, at=mark.at) != mark or abs(mark.at - has.mark.at) >= AGAIN


def _read_planned_topics(ledger: Ledger, kafka: Kafka, stream: Stream, lines: list[str]) -> list[TopicLook]:
    """The planned topics that exist; the others are reported in `lines`."""
    found = []
    for topic in (stream.topic, *stream.delays):
        planned = ledger.topics.read_planned_topic(stream.name, topic)
        if planned is None:
            lines.append(f"{topic}: nothing is planned yet")
            continue
        try:
            state = kafka.read_topic_state(topic)
        except TopicAbsentError:
            lines.append(f"{topic}: is not there")
            continue
        found.append(TopicLook(topic, planned, state, detect_divergence(kafka, state, planned)))
    return found


def _measure_progress(
    ledger: Ledger, lake: Lake, stream: Stream, one: TopicLook, has: Offsets, now: datetime
) -> OffsetsToMirror:
    known = _find_last_known(ledger, one, has)
    # One slice more than are asked for: it is where the prefix ends at the latest.
    behind = ledger.list_slices(
        stream.name,
        one.topic,
        after=known.key if known else None,
        limit=MAX_PER_TICK + 1,
        topic_id=one.state.topic_id,
    )
    done = count_done_prefix(lake, stream, behind[:MAX_PER_TICK])
    generations = ledger.topics.list_generations(stream.name, one.topic)
    last = behind[done - 1] if done else known
    offsets = compute_finished_prefix(behind, {slice_.key for slice_ in behind[:done]}, one.planned, generations)
    sure = not one.state.leaderless_partitions and not one.divergence.unsure
    return OffsetsToMirror(
        _bound_offsets(one, offsets),
        MirrorMark.from_last_slice(one.state.topic_id, last, now),
        _format_progress(one, last, behind[done:], has),
        complete=sure and done == len(behind),
        # All that was asked for is done: the next tick goes on.
        sure=sure and done < MAX_PER_TICK,
    )


def _find_last_known(ledger: Ledger, one: TopicLook, has: Offsets) -> Slice | None:
    """The last slice that the group's own marks vouch for; None if there is none, or another ledger planned it."""
    marks = {(mark.last, mark.identity) for stored in has.values() if (mark := stored.mark) and mark.last}
    # The newest first: it is nearly always the only one. Ordinals have seven digits or more.
    for key, identity in sorted(marks, key=lambda mark: (len(mark[0]), mark), reverse=True):
        try:
            [slice_] = ledger.get([key])
        except UnknownSliceError:
            continue
        if slice_.topic == one.topic and slice_.identity == identity and slice_.topic_id == one.state.topic_id:
            return slice_
    return None


def count_done_prefix(lake: Lake, stream: Stream, slices: Sequence[Slice]) -> int:
    """The number of slices that are done, from the first one on without a gap."""
    count, width = 0, FIRST_LOOK
    while count < len(slices):
        keys = [slice_.key for slice_ in slices[count : count + width]]
        processed = slice_status.list_processed_slices(lake, stream, keys)
        for key in keys:
            if key not in processed:
                return count
            count += 1
        width *= 2
    return count


def _bound_offsets(one: TopicLook, offsets: Mapping[int, int]) -> dict[int, int]:
    """Not beyond what the log still has of what was planned (I16); what cannot be compared now is left out."""
    found = {}
    for p, offset in offsets.items():
        seen = one.state.partitions.get(p)
        if seen is not None and seen.last_stable is not None and p not in one.divergence.unsure:
            found[p] = min(offset, seen.last_stable, one.divergence.diverged.get(p, offset))
    return found


def _build_withdrawal(one: TopicLook, has: Offsets, now: datetime) -> OffsetsToMirror:
    """The withdrawal of offsets of a topic that another one replaced: nothing of the new topic is read.

    A cluster drops a topic's offsets with the topic, but an offset committed at the same moment would stay.
    """
    ours = {
        p: stored for p, stored in has.items() if stored.mark is not None and stored.mark.topic_id != one.state.topic_id
    }
    starts = {p: one.state.partitions[p].log_start for p in ours}
    offsets = {p: start for p, start in starts.items() if start is not None}
    line = (
        f"{one.topic}: is not the topic that was planned; highwater status {one.planned.generation.stream} shows more"
    )
    return OffsetsToMirror(offsets, MirrorMark.from_last_slice(one.state.topic_id, None, now), line)


def _format_progress(one: TopicLook, last: Slice | None, left: Sequence[Slice], has: Offsets) -> str:
    done = f"done up to {last.key}" if last else "no slice is done"
    waits = f", {left[0].key} is not" if left else ""
    foreign = sorted(p for p, stored in has.items() if stored.mark is None)
    note = f"; somebody else had set partitions {', '.join(map(str, foreign))}" if foreign else ""
    unsure = (
        f"; not compared now: partitions {', '.join(map(str, one.divergence.unsure))}" if one.divergence.unsure else ""
    )
    return f"{one.topic}: {done}{waits}{note}{unsure}"
