"""Origins that waited on a tier whose records were lost: nothing brings them back by itself."""

# An accepted loss of a tier says which offsets are gone, not whose origins they were. But when every slice of the tier
# is decided that may hold earlier publications, an origin that was published there before, and still waits, is one of
# the lost ones. Reporting it too early does no harm: a reclaimed record is accepted once.

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from highwater.routing import compute_longest_retry_delay

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.plans import Generation, Loss
    from highwater.resources.ledger import Ledger

# Records published just before an acceptance are cut into a slice at most this long after they were due.
PLANNED_WITHIN = timedelta(minutes=2)


def read_loss_times(ledger: Ledger, stream: Stream, decided: Collection[str], now: datetime) -> dict[str, datetime]:
    """For each tier that lost records, and reads no more of what was published before, when that was accepted.

    Args:
        ledger: holds plans and losses.
        stream: the stream.
        decided: the slices that are decided.
        now: the time, in UTC.
    """
    found = {}
    losses = ledger.list_losses(stream.name)
    for topic, delay in zip(stream.tier_topics, stream.tiers, strict=True):
        topic_losses = [loss for loss in losses if loss.topic == topic]
        accepted = _find_last_acceptance(ledger.topics.list_generations(stream.name, topic), topic_losses, delay)
        if accepted is None or accepted[1] > now:
            continue
        moment, until = accepted
        slices = ledger.list_slices(stream.name, topic)
        if all(slice_.key in decided for slice_ in slices if slice_.planned_at <= until):
            found[topic] = moment
    return found


def _find_last_acceptance(
    generations: Sequence[Generation], losses: Sequence[Loss], delay: timedelta
) -> tuple[datetime, datetime] | None:
    """The last acceptance of a loss of a tier, and the end of planning for what was published before it.

    None if no loss was ever accepted. Records from before a topic was recreated are never planned.
    """
    recreated_at = [later.opened_at for one, later in pairwise(generations) if one.topic_id != later.topic_id]
    others = [later.opened_at for one, later in pairwise(generations) if one.topic_id == later.topic_id]
    # The losses of a topic are recorded at the moment of its new generation.
    others += [loss.recorded_at for loss in losses if loss.recorded_at not in recreated_at]
    waits = compute_longest_retry_delay(delay) + PLANNED_WITHIN
    moments = [(at, at) for at in recreated_at] + [(at, at + waits) for at in others]
    return max(moments, default=None)
