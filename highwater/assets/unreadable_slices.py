"""Slices whose rows in raw stay because Kafka cannot give their records again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from highwater.assets.commit import CommittedSlices
from highwater.assets.work import Work
from highwater.errors import (
    DependencyUnavailableError,
    HighwaterError,
    OffsetsExpiredError,
    TopicAbsentError,
    TopicRecreatedError,
    TopicTruncatedError,
)
from highwater.plans import find_overtaking_generation
from highwater.resources.deleted_topics import read_state
from highwater.resources.divergence_detection import find_divergence
from highwater.routing import format_topic_option
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.plans import Generation
    from highwater.resources.topic_state import TopicState

# Seconds for holding thousands of partitions against their plan after an election; no tick waits for it.
LONGEST_COMPARISON = 300.0


def list_unreadable_slices(work: Work, left: Mapping[str, Slice], committed: CommittedSlices) -> dict[str, str]:
    """Slices whose rows stay because Kafka cannot give them again, with the reason.

    The remedy of a slice that was never read destroys something: two looks agree on its problem, with all leaders.
    """
    generations = {
        topic: work.ledger.topics.list_generations(work.stream.name, topic) for topic in {s.topic for s in work.slices}
    }
    wanted = [slice_ for slice_ in left.values() if slice_.offsets]
    overtaken_ = {
        s.key: problem for s in wanted if (problem := _find_overtaken_problem(work.stream, s, generations[s.topic]))
    }
    sound = [slice_ for slice_ in wanted if slice_.key not in overtaken_]
    states = {topic: _read_state(work, topic) for topic in {slice_.topic for slice_ in wanted}}
    found = _find_problems(work, sound, states)
    unread = [slice_ for slice_ in sound if slice_.key in found and slice_.key not in committed.slice_commits]
    if unread:
        _ensure_all_led(unread, states)
        states |= {
            s.topic: _fetch_state_again(work, s.topic)
            for s in unread
            if not isinstance(states[s.topic], HighwaterError)
        }
        _ensure_all_led(unread, states)
        again = _find_problems(work, sound, states)
        _ensure_agreed(unread, found, again)
        found = again
    problems = {**overtaken_, **found}
    for key, problem in problems.items():
        if key not in committed.slice_commits:
            raise problem
    _ensure_led([slice_ for slice_ in sound if slice_.key not in problems], states)
    return {key: f"rows unchanged: {problem}" for key, problem in problems.items()}


def _find_problems(
    work: Work, slices: Sequence[Slice], states: Mapping[str, TopicState | HighwaterError]
) -> dict[str, HighwaterError]:
    found = {s.key: problem for s in slices if (problem := _find_problem(work.stream, s, states[s.topic])) is not None}
    return found | _find_replaced_slices(work, [slice_ for slice_ in slices if slice_.key not in found], states)


def _ensure_all_led(slices: Sequence[Slice], states: Mapping[str, TopicState | HighwaterError]) -> None:
    """Ensure that all partitions of the slices' topics have a leader.

    Raises:
        DependencyUnavailableError: one has none, so nothing can be called lost.
    """
    for slice_ in slices:
        state = states[slice_.topic]
        if not isinstance(state, HighwaterError) and (leaderless := state.leaderless_partitions):
            raise DependencyUnavailableError(
                f"{slice_.key}: partitions {', '.join(map(str, leaderless))} of {slice_.topic} have no leader",
                remedy="check that every partition has a leader; it is tried again",
            )


def _ensure_agreed(
    slices: Sequence[Slice], first: Mapping[str, HighwaterError], second: Mapping[str, HighwaterError]
) -> None:
    """Ensure that two looks found the same problems.

    Raises:
        DependencyUnavailableError: they did not.
    """
    for slice_ in slices:
        if type(first[slice_.key]) is not type(second.get(slice_.key)):
            raise DependencyUnavailableError(
                f"{slice_.key}: two looks at {slice_.topic} disagree",
                stored=f"first: {first[slice_.key].problem}",
                found=f"then: {second[slice_.key].problem if slice_.key in second else 'nothing is missing'}",
                remedy="nothing was decided; it is tried again",
            )


def _find_replaced_slices(
    work: Work, slices: Sequence[Slice], states: Mapping[str, TopicState | HighwaterError]
) -> dict[str, HighwaterError]:
    """Slices whose offsets hold other records than at planning time (I16).

    A log is replaced from some offset to its end, so of each partition only the slice that reaches farthest is asked.

    Raises:
        DependencyUnavailableError: Kafka holds a later epoch, and could not be asked for its records.
    """
    found: dict[str, HighwaterError] = {}
    for topic in {slice_.topic for slice_ in slices}:
        state, topic_slices = states[topic], [slice_ for slice_ in slices if slice_.topic == topic]
        if isinstance(state, HighwaterError):
            continue
        farthest = {
            p: slice_.recorded[p]
            for slice_ in sorted(topic_slices, key=attrgetter("ordinal"))
            for p, r in slice_.ranges.items()
            if r
        }
        divergence = find_divergence(work.kafka, state, farthest, seconds=LONGEST_COMPARISON)
        if divergence.unsure:
            raise DependencyUnavailableError(
                f"{', '.join(slice_.key for slice_ in topic_slices)}: " + next(iter(divergence.unsure.values())),
                remedy="check that every partition has a leader; it is tried again",
            )
        errors = {slice_.key: _find_divergence(work.stream, slice_, divergence.diverged) for slice_ in topic_slices}
        found.update({key: error for key, error in errors.items() if error is not None})
    return found


def _ensure_led(slices: Sequence[Slice], states: Mapping[str, TopicState | HighwaterError]) -> None:
    """Ensure that every partition that is to be read has a leader.

    Spark would wait for one. An election that is not clean gives it one with other records, and Spark would read these
    without anybody having looked (I16).

    Raises:
        DependencyUnavailableError: one has none; runs of slices that do not need it go on.
    """
    for slice_ in slices:
        state = states[slice_.topic]
        partitions = {} if isinstance(state, HighwaterError) else state.partitions
        leaderless = [
            p for p, r in sorted(slice_.ranges.items()) if len(r) and p in partitions and not partitions[p].known
        ]
        if leaderless:
            # Without `of`: that Kafka were left alone would hold up all other partitions.
            raise DependencyUnavailableError(
                f"{slice_.key}: partitions {', '.join(map(str, leaderless))} of {slice_.topic} have no leader",
                remedy="check that a broker that holds them in sync runs; it is tried again",
            )


def _find_divergence(stream: Stream, slice_: Slice, diverged: Mapping[int, int]) -> HighwaterError | None:
    for partition, at in sorted(diverged.items()):
        offsets = slice_.ranges.get(partition)
        if offsets is not None and len(offsets) and at < offsets.end:
            return TopicTruncatedError(
                f"{slice_.key}: other records occupy planned offsets of {slice_.topic} partition {partition}",
                stored=f"{offsets} in leader epoch {slice_.epochs.get(partition)}",
                found=f"records of a later epoch from offset {at}",
                remedy=f"highwater accept-divergence {_format_target(stream, slice_)} lets the slice take what is left",
            )
    return None


def _format_target(stream: Stream, slice_: Slice) -> str:
    """The slice's stream and topic as a command takes them."""
    return stream.name + format_topic_option(stream, slice_.topic)


def _read_state(work: Work, topic: str) -> TopicState | HighwaterError:
    try:
        return read_state(work.ledger, work.kafka, work.stream, topic)
    except TopicAbsentError as error:
        return error


def _fetch_state_again(work: Work, topic: str) -> TopicState | HighwaterError:
    try:
        return work.kafka.look_again(topic)
    except TopicAbsentError as error:
        return error


def _find_problem(stream: Stream, slice_: Slice, state: TopicState | HighwaterError) -> HighwaterError | None:
    if isinstance(state, HighwaterError):
        text = f"{slice_.key}: {state.problem}"
        return type(state)(text, stored=state.stored, found=state.found, remedy=state.remedy)
    if state.topic_id != slice_.topic_id:
        return TopicRecreatedError(
            f"{slice_.key}: topic {slice_.topic} is not the one that was planned",
            stored=slice_.topic_id,
            found=state.topic_id,
            remedy=f"highwater accept-loss {_format_target(stream, slice_)} opens a new generation for the new topic",
        )
    for partition, offsets in sorted(slice_.ranges.items()):
        problem = _find_range_problem(stream, slice_, partition, offsets, state)
        if problem is not None:
            return problem
    return None


def _find_overtaken_problem(stream: Stream, slice_: Slice, generations: Sequence[Generation]) -> HighwaterError | None:
    found = find_overtaking_generation(slice_, generations)
    if found is None:
        return None
    partition, later = found
    offsets = slice_.ranges[partition]
    return TopicTruncatedError(
        f"{slice_.key}: {slice_.topic} partition {partition} holds other records under these offsets now",
        stored=f"{offsets} of generation {slice_.generation}",
        found=f"generation {later.number} begins at {later.starts[partition]}",
        remedy=(
            f"highwater accept-loss {_format_target(stream, slice_)} lets a slice that was never read take what is left"
        ),
    )


def _find_range_problem(
    stream: Stream, slice_: Slice, partition: int, offsets: OffsetRange, state: TopicState
) -> HighwaterError | None:
    found = state.partitions.get(partition)
    if not len(offsets):
        return None
    where = f"{slice_.key}: {slice_.topic} partition {partition}"
    if found is None or found.last_stable is None:
        return None  # nothing is known; without a leader it is not read, and of one that is gone Spark's read fails
    if found.log_start is not None and found.log_start > offsets.start:
        return OffsetsExpiredError(
            f"{where}: offsets were deleted before they were read",
            stored=f"{offsets}",
            found=f"log start offset {found.log_start}",
            remedy=f"highwater accept-loss {_format_target(stream, slice_)} --partition {partition} records the loss",
        )
    if found.last_stable < offsets.end:
        return TopicTruncatedError(
            f"{where} ends before the planned end",
            stored=offsets.end,
            found=f"last stable offset {found.last_stable}",
            remedy=f"find out which broker lost its log; highwater accept-loss {_format_target(stream, slice_)} "
            f"--partition {partition} records what is gone",
        )
    return None
