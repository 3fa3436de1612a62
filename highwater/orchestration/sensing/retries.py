"""Planning the tiers: a tier's records that have waited long enough are one more backlog to be cut into slices."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import TopicAbsentError
from highwater.orchestration.sensing.topic_planner import PlanAndState, Planner, PlanningResult
from highwater.resources.deleted_topics import find_vanished_error
from highwater.routing import build_tier_stream, compute_retry_delay
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.plans import Planned
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import PartitionState, TopicState


def plan_tier(
    ledger: Ledger,
    kafka: Kafka,
    stream: Stream,
    topic: str,
    now: datetime,
    *,
    dry_run: bool = False,
    look: PlanAndState | None = None,
) -> PlanningResult:
    """Plan the due offsets of a tier, or of a topic that another system fills.

    Args:
        ledger: holds the plans.
        kafka: is looked at.
        stream: the stream.
        topic: the tier's, or the other system's.
        now: the time, in UTC.
        dry_run: record nothing.
        look: plan and topic as the caller read them a moment ago; they are read now if None.

    Raises:
        TopicVanishedError: it was planned, and is not there any more.
        TopicAbsentError: nothing was published to the tier yet.
        TopicRecreatedError: the tier is not the one that was planned.
        DependencyUnavailableError: Kafka or the ledger is unavailable; nothing was planned.
    """
    tier = build_tier_stream(stream, topic)

    def select_due_offsets(state: TopicState, planned: Planned) -> TopicState:
        key = str(SliceKey(tier.topic, planned.next_ordinal))
        moment = now - compute_retry_delay(stream.delays[topic], key)
        # One question, whatever the tier holds: the broker's clock stamped the records, so those that have waited long
        # enough come before all others. Where producers stamped them, on a topic of another system, what comes before
        # the first that has not is due. The last stable offset was read first, and nothing lies beyond it.
        ends = kafka.read_offsets_at(tier.topic, int(moment.timestamp() * 1000), state)
        return replace(
            state,
            partitions={
                p: _limit_to_due(seen, ends.get(p), planned.ends.get(p, 0)) for p, seen in state.partitions.items()
            },
        )

    try:
        return Planner(ledger, kafka).tick(tier, now, dry_run=dry_run, due=select_due_offsets, look=look)
    except TopicAbsentError as error:
        # To the planner a tier is a main topic, which a person would have to make again.
        raise find_vanished_error(ledger, stream, topic) or error from None


def _limit_to_due(seen: PartitionState, end: int | None, planned: int) -> PartitionState:
    """A partition as if it ended where its records are not due yet.

    Never before the planned end, for the next slice may wait longer than the one before it did; unless its log really
    ends there.
    """
    if end is None or seen.last_stable is None:
        return replace(seen, last_stable=None)  # what could not be asked is left out, not taken for due
    return replace(seen, last_stable=min(seen.last_stable, max(end, planned)))
