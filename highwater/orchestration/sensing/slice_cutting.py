"""The pure rule of planning: how the waiting offsets of a topic are cut into slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from highwater.declaration import Limits, Stream
from highwater.divergence import SOUND, Divergence
from highwater.errors import (
    OffsetsExpiredError,
    PartitionsRemovedError,
    PermanentError,
    TopicRecreatedError,
    TopicTruncatedError,
)
from highwater.plans import RECORDED_BY_DECLARATION, Loss, Planned
from highwater.resources.topic_state import PartitionState, TopicState
from highwater.routing import format_topic_option
from highwater.slices import OffsetRange, Slice

NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class SlicePlan:
    """The result of one look at a topic.

    Args:
        slices: the new slices, in their order.
        losses: holes that the declaration lets planning record by itself.
        skipped: partitions that could not be looked at now, with the reason; their ranges are empty.
        errors: partitions in which planning stopped until a person acts (I11); their ranges are empty.
        lag: for each partition that could be looked at, the offsets that wait after the new slices.
        waiting: why offsets that wait were not cut; None if they were, or there are none.
    """

    slices: tuple[Slice, ...] = ()
    losses: tuple[Loss, ...] = ()
    skipped: Mapping[int, str] = field(default_factory=dict)
    errors: Mapping[int, PermanentError] = field(default_factory=dict)
    lag: Mapping[int, int] = field(default_factory=dict)
    waiting: str | None = None


def cut_slices(
    stream: Stream,
    planned: Planned,
    state: TopicState,
    now: datetime,
    divergence: Divergence = SOUND,
    *,
    queued_runs: int = 0,
) -> SlicePlan:
    """Cut slices from the stable offsets that have no plan yet.

    A slice names every partition that has a position, those with nothing to read by an empty range: so the newest slice
    alone shows all planned ends.

    Args:
        stream: the declaration, for its limits.
        planned: how far the topic is planned. It was read before `state`: a plan that another planner made in between
            may lie beyond the last stable offset seen here.
        state: the topic's offsets.
        now: the time, in UTC.
        divergence: the comparison of the topic with what was recorded of it (I16).
        queued_runs: runs in Dagster's queue that have to start first; nothing is cut while there are any.

    Raises:
        TopicRecreatedError: the topic is not the one that was planned; nothing of it can be planned.
    """
    ensure_same_topic(stream, planned, state)
    skipped = {**divergence.unsure, **select_skipped_partitions(planned, state)}
    errors = select_sure_errors(stream, planned, state, divergence)
    losses = [_build_expired_loss(planned, state, p, now) for p, error in errors.items() if _may_record(stream, error)]
    errors = {p: error for p, error in errors.items() if not _may_record(stream, error)}
    starts = compute_positions(planned, state) | {loss.partition: loss.offsets.end for loss in losses}
    ready = {
        p: OffsetRange(start, _compute_stable_end(state, p))
        for p, start in sorted(starts.items())
        if p not in skipped and p not in errors
    }
    waiting = _find_wait_reason(stream.limits, planned, sum(map(len, ready.values())), now, queued_runs)
    slices = [] if waiting else _cut(stream, planned, state, starts, ready, now)
    ends = {p: offsets.end for p, offsets in slices[-1].ranges.items()} if slices else starts
    lag = {p: offsets.end - ends[p] for p, offsets in ready.items()}
    return SlicePlan(tuple(slices), tuple(losses), skipped, errors, lag, waiting)


def is_caught_up(planned: Planned, state: TopicState) -> bool:
    """Whether a topic holds exactly its plan, in every partition, so that planning has nothing to do.

    Elections are not looked at: they may have replaced records (`has_new_leader`).

    Args:
        planned: how far the topic is planned; it was read before `state`.
        state: the topic's offsets.
    """
    return (
        state.topic_id == planned.generation.topic_id
        and not planned.undecided
        and state.partitions.keys() == planned.ends.keys()
        and all(
            seen.known and seen.last_stable == planned.ends[p] and not seen.held_back
            for p, seen in state.partitions.items()
        )
    )


def ensure_same_topic(stream: Stream, planned: Planned, state: TopicState) -> None:
    """Ensure that the topic is the one that was planned.

    Raises:
        TopicRecreatedError: it carries another ID.
    """
    if state.topic_id != planned.generation.topic_id:
        raise TopicRecreatedError(
            f"topic {state.topic} of stream {stream.name} was deleted and created again",
            stored=f"topic ID {planned.generation.topic_id}",
            found=f"topic ID {state.topic_id}",
            remedy=(
                f"if that was meant: highwater accept-loss {stream.name}{format_topic_option(stream, state.topic)} "
                "goes on with the new topic as a new generation; else restore the topic"
            ),
        )


def compute_positions(planned: Planned, state: TopicState) -> dict[int, int]:
    """The start of the next slice in each partition; one that joined later starts at 0, so nothing is skipped."""
    joined = {p: 0 for p in state.partitions if p not in planned.ends and p not in planned.undecided}
    return {**planned.ends, **joined}


def select_skipped_partitions(planned: Planned, state: TopicState) -> dict[int, str]:
    """The partitions that cannot be looked at now, with the reason."""
    unknown = {p: seen for p, seen in sorted(state.partitions.items()) if not seen.known}
    found = {p: "no leader" if seen.leader is None else "no leader that answers" for p, seen in unknown.items()}
    open_ = {p: "no start is decided yet" for p in planned.undecided if p in state.partitions and p not in found}
    return found | open_


def find_partition_errors(
    stream: Stream, planned: Planned, state: TopicState, diverged: Mapping[int, int] = NOTHING
) -> dict[int, PermanentError]:
    """The partitions in which planning cannot go on by itself (I11, I16), with the error that says why."""
    found: dict[int, PermanentError] = {}
    for partition, end in sorted(compute_positions(planned, state).items()):
        error = _find_partition_error(stream, planned, partition, end, state.partitions.get(partition))
        if error is None and partition in diverged:
            error = _build_divergence_error(stream, planned, partition, end, diverged[partition])
        if error is not None:
            found[partition] = error
    return found


def select_sure_errors(
    stream: Stream, planned: Planned, state: TopicState, divergence: Divergence
) -> dict[int, PermanentError]:
    """The partitions in which planning cannot go on, without those that could not be compared."""
    errors = find_partition_errors(stream, planned, state, divergence.diverged)
    return {p: error for p, error in errors.items() if p not in divergence.unsure}


def _find_partition_error(
    stream: Stream, planned: Planned, partition: int, end: int, seen: PartitionState | None
) -> PermanentError | None:
    topic = planned.generation.topic
    where = f"topic {topic} partition {partition}"
    accept = f"highwater accept-loss {stream.name} --partition {partition}{format_topic_option(stream, topic)}"
    if seen is None:
        return PartitionsRemovedError(
            f"{where} is gone",
            stored=f"planned to offset {end}",
            found="no such partition",
            remedy=f"restore the topic, or {accept}",
        )
    if seen.log_start is None or seen.last_stable is None:
        return None
    if seen.log_start > end:
        return OffsetsExpiredError(
            f"{where}: {seen.log_start - end} offsets were deleted before they were planned",
            stored=f"planned to offset {end}",
            found=f"log start offset {seen.log_start}",
            remedy=f"{accept} records the loss and goes on; give the topic a longer retention",
        )
    if seen.last_stable < end:
        return TopicTruncatedError(
            f"{where} ends before what was planned",
            stored=f"planned to offset {end}",
            found=f"last stable offset {seen.last_stable}",
            remedy=f"find out which broker lost its log; {accept} goes on from there as a new generation",
        )
    return None


def _build_divergence_error(stream: Stream, planned: Planned, partition: int, end: int, at: int) -> TopicTruncatedError:
    return TopicTruncatedError(
        f"topic {planned.generation.topic} partition {partition}: other records occupy planned offsets",
        stored=f"planned to offset {end} in leader epoch {_find_epoch(planned, partition)}",
        found=f"that epoch now ends at offset {at}",
        remedy=(
            "an unclean leader election replaced acknowledged records; "
            f"highwater accept-divergence {stream.name} --partition {partition}"
            f"{format_topic_option(stream, planned.generation.topic)} goes on from there as a new generation"
        ),
    )


def _find_epoch(planned: Planned, partition: int) -> int | None:
    return planned.last.epochs.get(partition) if planned.last else None


def _may_record(stream: Stream, error: PermanentError) -> bool:
    return stream.on_expired == "record" and isinstance(error, OffsetsExpiredError)


def _build_expired_loss(planned: Planned, state: TopicState, partition: int, now: datetime) -> Loss:
    generation, seen = planned.generation, state.partitions[partition]
    return Loss(
        stream=generation.stream,
        topic=generation.topic,
        generation=generation.number,
        partition=partition,
        offsets=OffsetRange(compute_positions(planned, state)[partition], seen.log_start or 0),
        reason="expired: deleted before it was planned",
        accepted_by=RECORDED_BY_DECLARATION,
        recorded_at=now,
    )


def _compute_stable_end(state: TopicState, partition: int) -> int:
    """The last stable offset, or the log start where retention passed it between the two looks."""
    seen = state.partitions[partition]
    return max(seen.last_stable or 0, seen.log_start or 0)


def _find_wait_reason(limits: Limits, planned: Planned, ready: int, now: datetime, queued_runs: int) -> str | None:
    if ready and queued_runs:
        # Another run would only wait behind them, for slices as small as the time between two ticks.
        return f"{ready} offsets wait for room in the queue, where {queued_runs} runs wait; slices are larger then"
    if ready == 0 or ready >= limits.min_offsets:
        return None
    since = planned.last.planned_at if planned.last else planned.generation.opened_at
    # A plan from before a clock was set back may lie ahead of it: that is no time to wait for.
    left = limits.max_wait - abs(now - since)
    if left.total_seconds() <= 0:
        return None
    return f"{ready} offsets wait for {limits.min_offsets}, {left.total_seconds():.0f} s more at the most"


def _cut(
    stream: Stream,
    planned: Planned,
    state: TopicState,
    starts: Mapping[int, int],
    ready: Mapping[int, OffsetRange],
    now: datetime,
) -> list[Slice]:
    limits, generation = stream.limits, planned.generation
    at = dict(sorted(starts.items()))
    left = {p: len(offsets) for p, offsets in ready.items()}
    rest = sum(left.values())
    # Clocks of two planners may differ, and pages of slices are read in the order of this time.
    planned_at = max(now, planned.last.planned_at) if planned.last else now
    # A partition that was not checked keeps the epoch of its plan, or its divergence would be forgotten.
    looked_at = {p: state.partitions[p].leader_epoch for p in ready}
    epochs = _select_recorded_epochs(planned) | {p: epoch for p, epoch in looked_at.items() if epoch is not None}
    slices: list[Slice] = []
    while rest and len(slices) < limits.slices_per_tick and (not slices or rest >= limits.min_offsets):
        ordinal = planned.next_ordinal + len(slices)
        shares = compute_fair_shares(left, limits.max_offsets, turn=ordinal)
        rest -= sum(shares.values())
        ranges = {p: OffsetRange(start, start + shares.get(p, 0)) for p, start in at.items()}
        slices.append(
            Slice(
                stream=generation.stream,
                topic=generation.topic,
                topic_id=generation.topic_id,
                generation=generation.number,
                ordinal=ordinal,
                ranges=ranges,
                planned_at=planned_at,
                lag=rest,
                epochs=epochs,
                fingerprints={p: was.fingerprint for p, was in planned.recorded.items() if was.fingerprint is not None},
            )
        )
        at = {p: offsets.end for p, offsets in ranges.items()}
        left = {p: waits - shares[p] for p, waits in left.items()}
    return slices


def _select_recorded_epochs(planned: Planned) -> dict[int, int]:
    return {p: was.epoch for p, was in planned.recorded.items() if was.epoch is not None}


def compute_fair_shares(left: Mapping[int, int], most: int, turn: int = 0) -> dict[int, int]:
    """Divide a slice among partitions: equal shares, and what one does not need goes to the others.

    So a partition that holds most of the backlog neither starves the others nor is starved by them.

    Args:
        left: for each partition the offsets that wait.
        most: offsets in the slice at the most.
        turn: number that rotates the partitions which get the remainder of the division; with fewer offsets than
            partitions each gets its turn.
    """
    level = _compute_level(sorted(left.values()), most)
    shares = {p: min(waits, level) for p, waits in left.items()}
    over_quota = sorted(p for p, waits in left.items() if waits > level)
    spare = min(most - sum(shares.values()), len(over_quota))
    for step in range(spare):
        shares[over_quota[(turn * spare + step) % len(over_quota)]] += 1
    return shares


def _compute_level(ascending: Sequence[int], most: int) -> int:
    """The highest level up to which every partition's backlog can be taken."""
    room, level = most, 0
    for done, waits in enumerate(ascending):
        takers = len(ascending) - done
        if (waits - level) * takers > room:
            return level + room // takers
        room -= (waits - level) * takers
        level = waits
    return level
