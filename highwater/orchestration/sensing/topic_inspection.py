"""Two looks at a planned topic before a fault counts, so that one wrong answer of a broker is no loss (I15)."""

from __future__ import annotations

from collections.abc import Mapping

from highwater.declaration import Stream
from highwater.divergence import Divergence
from highwater.errors import DependencyUnavailableError, PermanentError, TopicAbsentError
from highwater.orchestration.sensing.slice_cutting import find_partition_errors
from highwater.plans import Planned
from highwater.resources.divergence_detection import detect_divergence
from highwater.resources.kafka import Kafka
from highwater.resources.topic_state import TopicState

DISAGREE = "two looks at the topic disagree; the next look decides"


def compare_with_plan(
    kafka: Kafka, stream: Stream, planned: Planned, state: TopicState
) -> tuple[TopicState, Divergence]:
    """Compare a topic with its plan, and look a second time where the first look shows a fault.

    Every fault has a remedy that destroys something. So a fault counts only after two looks agree on it, and while all
    partitions of the topic have a leader. A partition with a fault that does not count is unsure.

    Args:
        kafka: is looked at.
        stream: the declaration.
        planned: how far the topic is planned.
        state: the first look; it was taken after `planned`.

    Returns:
        The newest look, and how the topic's past compares with what was recorded.

    Raises:
        DependencyUnavailableError: the topic seems to be recreated, which could not be confirmed, or exists at the
            first look only.
    """
    divergence = detect_divergence(kafka, state, planned)
    first = _select_fault_kinds(stream, planned, state, divergence)
    if not first:
        return state, divergence
    if state.leaderless_partitions:
        return state, _mark_unsure(planned, state, divergence, first, describe_missing_leaders(state))
    again = fetch_topic_again(kafka, state.topic)
    divergence = detect_divergence(kafka, again, planned)
    second = _select_fault_kinds(stream, planned, again, divergence)
    if again.leaderless_partitions:
        return again, _mark_unsure(planned, again, divergence, {**first, **second}, describe_missing_leaders(again))
    doubtful = {p: kind for p, kind in {**first, **second}.items() if first.get(p) != second.get(p)}
    doubtful |= {p: kind for p, kind in second.items() if has_lower_offset(state, again, p)}
    return again, _mark_unsure(planned, again, divergence, doubtful, DISAGREE)


def fetch_topic_again(kafka: Kafka, topic: str) -> TopicState:
    """Look a second time at a topic that existed a moment ago.

    Raises:
        DependencyUnavailableError: now it does not exist, or no broker answered in time.
    """
    try:
        return kafka.look_again(topic)
    except TopicAbsentError:
        raise DependencyUnavailableError(
            f"two looks at topic {topic} disagree",
            stored="first: it exists",
            found="then: no such topic",
            remedy="nothing was decided, and the next look tries again",
        ) from None


def describe_missing_leaders(state: TopicState) -> str:
    """The reason why no fault of a topic counts now."""
    return f"not compared while partitions {', '.join(map(str, state.leaderless_partitions))} have no leader"


def has_lower_offset(first: TopicState, second: TopicState, partition: int) -> bool:
    """Whether a partition showed a lower offset at the second look than at the first."""
    before, after = first.partitions.get(partition), second.partitions.get(partition)
    if before is None or after is None:
        return False
    return (after.log_start or 0) < (before.log_start or 0) or (after.last_stable or 0) < (before.last_stable or 0)


def _select_fault_kinds(
    stream: Stream, planned: Planned, state: TopicState, divergence: Divergence
) -> dict[int, tuple[type[PermanentError] | str, int | None]]:
    """By partition the kind of its fault, and where its records were replaced; of another topic all partitions."""
    if state.topic_id != planned.generation.topic_id:
        return dict.fromkeys(state.partitions, (state.topic_id, None))
    errors = find_partition_errors(stream, planned, state, divergence.diverged)
    return {p: (type(error), divergence.diverged.get(p)) for p, error in errors.items() if p not in divergence.unsure}


def _mark_unsure(
    planned: Planned, state: TopicState, divergence: Divergence, doubtful: Mapping[int, object], reason: str
) -> Divergence:
    if doubtful and state.topic_id != planned.generation.topic_id:
        raise DependencyUnavailableError(
            f"topic {state.topic} seems to be another one than was planned: {reason}",
            stored=f"topic ID {planned.generation.topic_id}",
            found=f"topic ID {state.topic_id}",
            remedy="check that every partition has a leader; nothing was decided, and the next look tries again",
        )
    return Divergence(divergence.diverged, {**dict.fromkeys(doubtful, reason), **divergence.unsure})
