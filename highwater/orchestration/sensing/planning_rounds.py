"""The rounds of planner and retries over all streams: they choose the streams with something new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from highwater.declaration import Stream
from highwater.orchestration.asset_keys import list_missing_keys
from highwater.orchestration.dependencies import build_kafka_guard
from highwater.orchestration.sensing.rounds import RoundContext
from highwater.orchestration.sensing.run_history import read_instance_id
from highwater.orchestration.sensing.run_places import read_queue
from highwater.orchestration.sensing.slice_cutting import is_caught_up
from highwater.orchestration.sensing.stream_ticks import (
    Tick,
    plan_retries,
    plan_stream,
    select_tiers_to_plan,
    was_observed,
)
from highwater.orchestration.sensing.topic_planner import PlanAndState
from highwater.plans import Planned
from highwater.resources.dependency_guards import guard_dependencies, is_cooling_down
from highwater.resources.divergence_detection import has_new_leader
from highwater.resources.topic_state import TopicState

# The leader epochs under which a topic was compared with its plan and found sound, by topic ID. Without it a topic that
# nobody writes to would be compared in every tick after a restart of its broker.
_SOUND: dict[str, tuple[int, Mapping[int, int | None]]] = {}

# Keys that a Dagster instance was seen to hold, by its ID and by stream: without it each tick asks for each stream.
# Repair adds a key that somebody deletes.
_HELD: dict[tuple[str, str], frozenset[str]] = {}
MAX_HELD = 20


class _TopicLooks:
    """Plans and topics of all streams, read together.

    Args:
        context: the streams, and their clients.
        topics: by stream the topics to look at.

    Raises:
        TemporaryError: Kafka or the ledger is unavailable.
    """

    lines: Sequence[str] = ()
    begin = ""

    def __init__(self, context: RoundContext, topics: Mapping[str, Sequence[str]]) -> None:
        self._context = context
        self._id = read_instance_id(context.instance)
        self._ledger, kafka = context.resources.ledger.open(), context.resources.kafka.open()
        # The ledger first: a plan made after a look at Kafka could lie beyond what that look saw.
        self._plans: dict[tuple[str, str], Planned] = self._ledger.topics.read_all_planned()
        with guard_dependencies(build_kafka_guard(self._ledger, kafka)):
            every = {one for some in topics.values() for one in some}
            seen = kafka.read_topic_states(every)
        self._states, self._denied = seen.found, seen.denied
        self._changed = {
            name: [topic for topic in some if not self._is_idle(name, topic)] for name, some in topics.items()
        }
        dependencies = self._ledger.breakers.list_dependencies()
        self._resting = {one.name for one in dependencies if is_cooling_down(one, context.now)}

    def look(self, stream: str, topic: str) -> PlanAndState | None:
        """Plan and topic, where the topic was seen."""
        state = self._states.get(topic)
        return None if state is None else (self._plans.get((stream, topic)), state)

    def _is_idle(self, stream: str, topic: str) -> bool:
        planned, state = self._plans.get((stream, topic)), self._states.get(topic)
        if planned is None or state is None:
            return False
        return is_caught_up(planned, state) and (not _has_elected(planned, state) or _is_sound(planned, state))

    def _list_streams_without_keys(self, streams: Sequence[Stream], topics: Mapping[str, Sequence[str]]) -> set[str]:
        """The streams with a topic whose newest slice has no key in Dagster: a tick died between plan and key."""
        missing: dict[str, list[str]] = {}
        for stream in streams:
            plans = [self._plans.get((stream.name, topic)) for topic in topics[stream.name]]
            newest = [one.last.key for one in plans if one is not None and one.last is not None]
            held = _HELD.get((self._id, stream.name), frozenset())
            if {*newest} <= held:
                continue
            if unknown := list_missing_keys(self._context.instance, stream, newest):
                missing[stream.name] = unknown
            else:
                _HELD[self._id, stream.name] = frozenset(newest) if len(held) >= MAX_HELD else held | {*newest}
        retired = self._ledger.retired.list_retired([key for keys in missing.values() for key in keys])
        return {name for name, keys in missing.items() if not {*keys} <= {*retired}}

    def _remember(self, stream: str, topics: Sequence[str]) -> None:
        """Record that topics were compared with their plans, and are sound."""
        for topic in topics:
            planned, state = self._plans.get((stream, topic)), self._states.get(topic)
            if planned is not None and state is not None:
                _SOUND[state.topic_id] = _build_comparison_key(planned, state)


def _has_elected(planned: Planned, state: TopicState) -> bool:
    return any(has_new_leader(was, state.partitions.get(p)) for p, was in planned.recorded.items())


def _is_sound(planned: Planned, state: TopicState) -> bool:
    return _SOUND.get(state.topic_id) == _build_comparison_key(planned, state)


def _build_comparison_key(planned: Planned, state: TopicState) -> tuple[int, Mapping[int, int | None]]:
    return planned.generation.revision, {p: seen.leader_epoch for p, seen in state.partitions.items()}


class PlannerRound(_TopicLooks):
    """The round of the planner: a stream without new records costs two rows of the ledger.

    Args:
        context: the streams, and their clients.

    Raises:
        TemporaryError: Kafka or the ledger is unavailable.
    """

    def __init__(self, context: RoundContext) -> None:
        streams = context.streams
        topics = {stream.name: [stream.topic] for stream in streams}
        super().__init__(context, topics)
        # Ticks of these say why slices wait.
        busy = self._ledger.breakers.list_unclosed_streams() | self._ledger.holds.list_held_streams()
        busy |= {one.name for one in streams if one.lookup is not None and one.lookup.dependency in self._resting}
        idle = [one for one in streams if not self._changed[one.name] and one.name not in busy]
        self._idle = {one.name for one in idle} - self._list_streams_without_keys(idle, topics)
        self._queue = read_queue(context.instance, [one.name for one in streams if one.name not in self._idle])
        self._requested = 0

    def visit(self, stream: Stream, cursor: str | None) -> Tick | None:
        """Plan the stream's topic, unless it holds exactly the plan; raises what `stream_ticks.plan_stream` does."""
        if stream.name in self._idle and cursor is None:
            return None
        own, every = self._queue.counts.get(stream.name, 0), sum(self._queue.counts.values()) + self._requested
        is_full = self._queue.room is not None and self._requested >= self._queue.room
        if is_full and not own and not self.begin and self._changed[stream.name]:
            self.begin = stream.name
        if (own or is_full) and was_observed(cursor, self._context.now):
            return None
        tick = plan_stream(
            self._context.instance,
            self._context.resources,
            stream,
            cursor,
            self.look(stream.name, stream.topic),
            queued_runs=every if is_full else own,
        )
        self._requested += len(tick.requests)
        if tick.idle and not tick.keys:
            self._remember(stream.name, [stream.topic])
        return tick


class RetriesRound(_TopicLooks):
    """The round of retries: a stream whose tiers have no new records costs two rows of the ledger for each.

    Args:
        context: the streams, and their clients.

    Raises:
        TemporaryError: Kafka or the ledger is unavailable.
    """

    def __init__(self, context: RoundContext) -> None:
        streams = context.streams
        topics = {stream.name: [*stream.delays] for stream in streams}
        super().__init__(context, topics)
        self._paused = self._ledger.paused.read_topics_by_stream()
        for stream in streams:
            begun = (stream.name, stream.topic) in self._plans
            wanted = {*select_tiers_to_plan(stream, begun=begun)} - self._paused.get(stream.name, {}).keys()
            self._changed[stream.name] = [
                one for one in self._changed[stream.name] if one in wanted and self._is_there(stream, one)
            ]
        idle = [one for one in streams if not self._changed[one.name]]
        for name in self._list_streams_without_keys(idle, topics):
            self._changed[name] = [*topics[name]]

    def visit(self, stream: Stream, cursor: str | None) -> Tick | None:
        """Plan the tiers that hold something new; raises what `stream_ticks.plan_retries` does."""
        changed = self._changed[stream.name]
        if not changed:
            paused = [f"{one.text}: nothing of it is planned" for one in self._paused.get(stream.name, {}).values()]
            return Tick(lines=paused, idle=True) if paused else None
        looks = {topic: self.look(stream.name, topic) for topic in changed}
        tick = plan_retries(self._context.instance, self._context.resources, stream, cursor, looks)
        if tick.idle and not tick.keys:
            self._remember(stream.name, changed)
        return tick

    def _is_there(self, stream: Stream, topic: str) -> bool:
        """Whether a tier was ever planned or exists: before the first reject it does neither.

        Another system's topic that may not be described counts as there, so that the visit reports what is forbidden.
        """
        denied = topic in self._denied and topic in stream.foreign_topics
        return denied or (stream.name, topic) in self._plans or topic in self._states
