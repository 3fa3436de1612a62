"""Planning of one topic: compare it with its plan, and record the next offsets to read in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.declaration import Start, Stream
from highwater.divergence import SOUND, Fingerprint
from highwater.envelope import SLICE
from highwater.errors import ConfigurationError, PermanentError, TemporaryError, TopicAbsentError
from highwater.orchestration.sensing.expiring_records import fetch_endangered_ends
from highwater.orchestration.sensing.slice_cutting import SlicePlan, compute_positions, cut_slices, ensure_same_topic
from highwater.orchestration.sensing.topic_inspection import compare_with_plan
from highwater.plans import Generation, Loss, Planned
from highwater.resources.deleted_topics import read_state
from highwater.resources.divergence_detection import read_fingerprints
from highwater.routing import is_stream_topic
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState

# Each time that another planner is first, it has planned for us too; that this happens five times in a row within
# one tick takes more planners than anybody runs.
TRIES = 5
# A tick looks so long at the most for the last records of its slices.
FINGERPRINT_SECONDS = 5.0
# Each look connects again, which takes longer than what it reads.
LOOKS_AT_ONCE = 4
# At the end of each partition this many offsets are searched for sent records: the last are transactions' markers.
TAIL = 100

SelectDue = Callable[["TopicState", Planned], "TopicState"]
# How far a topic is planned, and what it held a moment later.
PlanAndState = tuple[Planned | None, "TopicState"]


@dataclass(frozen=True)
class PlanningResult:
    """The result of planning a topic once.

    Args:
        stream: the planned topic's stream.
        result: the plan, as it is in the ledger.
        state: the topic as it was seen.
        ends: for each partition where the next slice starts.
        generation: the one that was planned.
    """

    stream: Stream
    result: SlicePlan
    state: TopicState
    ends: Mapping[int, int]
    generation: Generation

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices that were planned now, in their order."""
        return self.result.slices

    @property
    def skipped(self) -> Mapping[int, str]:
        """Partitions that could not be looked at, with the reason; the others went on."""
        return self.result.skipped

    @property
    def errors(self) -> Mapping[int, PermanentError]:
        """Partitions in which planning stopped until a person acts; the others went on."""
        return self.result.errors

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Holes that were recorded by the declaration's leave."""
        return self.result.losses

    @property
    def lag(self) -> int:
        """Offsets that wait to be planned, over all partitions that could be looked at."""
        return sum(self.result.lag.values())

    @property
    def lines(self) -> list[str]:
        """The tick in sentences for a log."""
        return [*_format_planned_lines(self), *_format_held_back_lines(self.state), *_format_trouble_lines(self)]


def _format_planned_lines(tick: PlanningResult) -> list[str]:
    result = tick.result
    if result.slices:
        offsets = sum(slice_.offsets for slice_ in result.slices)
        first, last = result.slices[0].key, result.slices[-1].key
        span = first if first == last else f"{first} .. {last}"
        return [f"planned {len(result.slices)} slices, {offsets:,} offsets: {span}; {tick.lag:,} offsets wait"]
    return [result.waiting or f"nothing new in {tick.state.topic}"]


def _format_held_back_lines(state: TopicState) -> list[str]:
    held = sum(seen.held_back for seen in state.partitions.values())
    return [f"{held:,} offsets of {state.topic} follow an open transaction"] if held else []


def _format_trouble_lines(tick: PlanningResult) -> list[str]:
    result = tick.result
    skipped = [f"partition {p} of {tick.state.topic} is left out now: {why}" for p, why in result.skipped.items()]
    losses = [f"recorded as lost: partition {loss.partition}, {loss.offsets}, {loss.reason}" for loss in result.losses]
    return [*skipped, *losses, *[str(error) for error in result.errors.values()]]


class Planner:
    """Plans topics. Only the ledger says what was planned before (I1).

    Args:
        ledger: holds the plans.
        kafka: is looked at.
    """

    def __init__(self, ledger: Ledger, kafka: Kafka) -> None:
        self._ledger = ledger
        self._kafka = kafka

    def tick(
        self,
        stream: Stream,
        now: datetime,
        *,
        dry_run: bool = False,
        due: SelectDue | None = None,
        look: PlanAndState | None = None,
        queued_runs: int = 0,
    ) -> PlanningResult:
        """Look at the stream's topic, and record the next offsets to read in the ledger.

        Any number of planners may tick at once: each offset is planned by one of them.

        Args:
            stream: the stream.
            now: the time, in UTC.
            dry_run: record nothing; say what would be planned.
            due: gives of what the topic holds what may be planned now; all of it if None.
            look: plan and topic as the caller read them a moment ago; they are read now if None, and whenever another
                planner was first.
            queued_runs: runs in Dagster's queue that have to start first; while there are any, only records that
                retention is about to take are planned.

        Raises:
            TopicVanishedError: the topic was planned, and is not there any more.
            TopicAbsentError: the topic does not exist, and was never planned.
            TopicRecreatedError: the topic is not the one that was planned.
            ConfigurationError: another stream planned the topic, or the stream planned another main topic; or it was
                never planned, and yet its DLQ topics hold records: the ledger was lost.
            DependencyUnavailableError: Kafka or the ledger is unavailable; nothing was planned.
            TemporaryError: other planners were first, again and again.
        """
        for _ in range(TRIES):
            planned, state = look or self._look(stream)
            look, divergence = None, SOUND
            if planned is not None:
                state, divergence = compare_with_plan(self._kafka, stream, planned, state)
            if planned is None and due is None:
                _ensure_same_main_topic(self._ledger, stream)
            if planned is None or _can_decide(planned, state):
                planned = self._begin_planning(stream, planned, state, now, dry_run=dry_run)
            if planned is None:
                continue
            selected = due(state, planned) if due else state
            result = cut_slices(stream, planned, selected, now, divergence, queued_runs=queued_runs)
            if result.waiting and self._is_endangered(stream, planned, state):
                # The tick before retention takes records is no time to wait for more of them.
                at_once = replace(stream, limits=replace(stream.limits, min_offsets=1))
                result = cut_slices(at_once, planned, state, now, divergence)
            if not dry_run:
                if result.losses and not self._can_confirm_losses(stream, state, result.losses):
                    continue
                result = self._with_fingerprints(state, result)
            if dry_run or self._store_plan(planned, result):
                return PlanningResult(stream, result, state, _compute_ends(planned, result), planned.generation)
        _ensure_own(self._ledger, stream)
        raise TemporaryError(
            f"stream {stream.name}: other planners were first {TRIES} times in a row",
            remedy="nothing to do: they planned the same topic, and the next tick looks again",
        )

    def _look(self, stream: Stream) -> PlanAndState:
        # The ledger first: a plan made after a look at Kafka could lie beyond what that look saw.
        planned = self._ledger.topics.read_planned_topic(stream.name, stream.topic)
        return planned, read_state(self._ledger, self._kafka, stream, stream.topic)

    def _is_endangered(self, stream: Stream, planned: Planned, state: TopicState) -> bool:
        """Whether retention takes records within the margin that are not planned."""
        ends = fetch_endangered_ends(self._kafka, stream, stream.topic, state)
        return any(start < ends.get(p, 0) for p, start in compute_positions(planned, state).items())

    def _can_confirm_losses(self, stream: Stream, state: TopicState, losses: Sequence[Loss]) -> bool:
        """Whether a second look, some seconds later, finds the same offsets deleted: a loss is recorded for good."""
        try:
            second = self._kafka.look_again(stream.topic)
        except TopicAbsentError:
            return False
        found = {p: seen.log_start or 0 for p, seen in second.partitions.items() if seen.known}
        same = second.topic_id == state.topic_id
        return same and all(found.get(loss.partition, 0) >= loss.offsets.end for loss in losses)

    def _with_fingerprints(self, state: TopicState, result: SlicePlan) -> SlicePlan:
        """The plan with the fingerprint of the last record of each range."""
        deadline = time.monotonic() + FINGERPRINT_SECONDS

        def look(slice_: Slice) -> Mapping[int, Fingerprint]:
            return read_fingerprints(self._kafka, state.topic, slice_.ranges) if time.monotonic() < deadline else {}

        # The newest slice first: what comes is compared with it. Where time runs out the others go without.
        newest = result.slices[::-1]
        with ThreadPoolExecutor(LOOKS_AT_ONCE) as looks:
            # A thread has the tick's time limit in a context of its own.
            contexts = [copy_context() for _ in newest]
            marked = looks.map(lambda context, slice_: context.run(look, slice_), contexts, newest)
            found = dict(zip((slice_.key for slice_ in newest), marked, strict=True))
        marks: dict[int, Fingerprint] = {}
        slices = []
        for slice_ in result.slices:
            # An older one stays true where no newer one was found.
            marks = {**slice_.fingerprints, **marks, **found[slice_.key]}
            slices.append(replace(slice_, fingerprints=marks))
        return replace(result, slices=tuple(slices))

    def _store_plan(self, planned: Planned, result: SlicePlan) -> bool:
        if not result.slices and not result.losses:
            return True
        return self._ledger.add(result.slices, result.losses, seen=planned.generation)

    def _begin_planning(
        self, stream: Stream, planned: Planned | None, state: TopicState, now: datetime, *, dry_run: bool
    ) -> Planned | None:
        """Pin the topic and decide where its partitions begin; None if another planner did so first."""
        if planned is not None:
            ensure_same_topic(stream, planned, state)
        found = self._compute_starts(stream, planned, state)
        if planned is None:
            _ensure_own(self._ledger, stream)
            _ensure_never_published(self._kafka, stream)
            first = _build_first_generation(stream, state, found, now)
            return (
                Planned.from_generation(first, None, [])
                if dry_run or self._ledger.topics.open_generation(first)
                else None
            )
        if not dry_run and not self._ledger.topics.decide_starts(planned.generation, found):
            return None
        moved = replace(planned.generation, revision=planned.generation.revision + 1)
        return replace(planned, generation=moved, ends={**planned.ends, **found})

    def _compute_starts(self, stream: Stream, planned: Planned | None, state: TopicState) -> dict[int, int]:
        """The start of partitions with a leader: as declared, or as the log of an accepted generation begins."""
        known = {p: seen for p, seen in state.partitions.items() if seen.known}
        if planned is not None:
            known = {p: seen for p, seen in known.items() if p in planned.undecided}
        accepted = planned is not None and planned.generation.number > 0
        if accepted or stream.start == Start.EARLIEST:
            return {p: seen.log_start or 0 for p, seen in known.items()}
        if stream.start == Start.LATEST:
            return {p: seen.last_stable or 0 for p, seen in known.items()}
        since = datetime.fromisoformat(str(stream.start)).astimezone(UTC)
        found = self._kafka.read_offsets_at(stream.topic, int(since.timestamp() * 1000), state)
        return {p: found[p] for p in known if p in found}


def _can_decide(planned: Planned, state: TopicState) -> bool:
    return any(p in state.partitions and state.partitions[p].known for p in planned.undecided)


def _build_first_generation(stream: Stream, state: TopicState, starts: Mapping[int, int], now: datetime) -> Generation:
    return Generation(
        stream=stream.name,
        topic=stream.topic,
        topic_id=state.topic_id,
        number=0,
        starts={p: starts.get(p) for p in sorted(state.partitions)},
        opened_at=now,
    )


def _compute_ends(planned: Planned, result: SlicePlan) -> dict[int, int]:
    lost = {loss.partition: loss.offsets.end for loss in result.losses}
    cut = {p: offsets.end for p, offsets in result.slices[-1].ranges.items()} if result.slices else {}
    return {**planned.ends, **lost, **cut}


def _ensure_own(ledger: Ledger, stream: Stream) -> None:
    """Ensure that no other stream planned the topic.

    Slices are named after their topic. So a stream that was given another name could store none, and each tick would
    report that another planner was first.

    Raises:
        ConfigurationError: one did.
    """
    theirs = ledger.read_last_of_other_stream(stream.name, stream.topic)
    if theirs is not None:
        raise ConfigurationError(
            f"topic {stream.topic} is planned by another stream, and stream {stream.name} cannot plan it too",
            stored=f"stream {theirs.stream}, up to {theirs.key}",
            found=f"stream {stream.name}",
            remedy=f"declare it under the name {theirs.stream} again, which has its tables too; where both are "
            f"declared, give {stream.name} a topic of its own",
        )


def _ensure_same_main_topic(ledger: Ledger, stream: Stream) -> None:
    """Ensure that the stream has no slices of another main topic, whose later records no slice would read.

    Raises:
        ConfigurationError: it has.
    """
    topics = sorted(topic for name, topic in ledger.count_slices() if name == stream.name)
    if others := [topic for topic in topics if not is_stream_topic(stream, topic)]:
        raise ConfigurationError(
            f"stream {stream.name} has slices of another main topic, which would be read no further",
            stored=f"topic {', '.join(others)}",
            found=f"topic {stream.topic}",
            remedy="declare the former topic again, and this one as a stream of another name",
        )


def _ensure_never_published(kafka: Kafka, stream: Stream) -> None:
    """Ensure that nothing was published of a stream that is planned for the first time.

    A stream whose ledger was lost looks like a new one. Planned from the beginning, it would publish all of it again.

    Raises:
        ConfigurationError: a tier or the parked topic holds records, or did; the accepted topic ends with ours.
        DependencyUnavailableError: a partition of them could not be asked, which is not the same as empty (I15).
    """
    for topic in stream.dlq_topics:
        if held := sum(offsets.end for offsets in _read_log_if_exists(kafka, topic).values()):
            raise _build_published_error(stream, "its rejects were", f"{held:,} offsets on {topic}")
    if stream.publishes is not None and (key := _read_last_sent_key(kafka, stream.publishes.topic)):
        raise _build_published_error(
            stream, "its accepted events were", f"records of {key} on {stream.publishes.topic}"
        )


def _build_published_error(stream: Stream, what: str, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"the ledger knows nothing of {stream.name}, and {what} published before",
        stored="no plan of any slice",
        found=found,
        remedy="the ledger was lost, or another one plans this topic: restore it, or highwater rebuild-ledger "
        f"{stream.name}; if the lake is lost too, highwater rebuild-all {stream.name}",
    )


def _read_last_sent_key(kafka: Kafka, topic: str) -> str | None:
    """A slice from the end of an accepted topic; others may have written there before Highwater did."""
    log = _read_log_if_exists(kafka, topic)
    tails = {p: OffsetRange(max(held.start, held.end - TAIL), held.end) for p, held in log.items()}
    for message in kafka.read(topic, tails):
        headers: Any = message.headers()
        if key := dict(headers or ()).get(SLICE):
            return str(key, errors="replace")
    return None


def _read_log_if_exists(kafka: Kafka, topic: str) -> Mapping[int, OffsetRange]:
    try:
        return kafka.read_topic_state(topic).list_offset_ranges()
    except TopicAbsentError:
        return {}
