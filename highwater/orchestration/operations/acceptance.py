"""Accepting permanent losses: offsets that are gone, and topics that were truncated or recreated (I11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from highwater.assets.commit import LEASE_SECONDS, build_turn_name
from highwater.assets.raw import TABLE as RAW
from highwater.declaration import Stream
from highwater.divergence import Divergence
from highwater.errors import (
    ConfigurationError,
    DependencyUnavailableError,
    OffsetsExpiredError,
    PartitionsRemovedError,
    PermanentError,
    TemporaryError,
    TopicTruncatedError,
)
from highwater.orchestration.sensing.slice_cutting import NOTHING, find_partition_errors
from highwater.orchestration.sensing.topic_inspection import (
    describe_missing_leaders,
    fetch_topic_again,
    has_lower_offset,
)
from highwater.plans import Generation, Loss, Planned, subtract_losses
from highwater.resources.divergence_detection import detect_divergence, locate_divergence
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.topic_state import TopicState

Partitions = Collection[int] | None


@dataclass(frozen=True)
class Acceptance:
    """The records of an acceptance.

    Args:
        seen: the generation that it was made from.
        losses: the holes.
        opened: the generation that it opens; None if planning goes on in the one that was seen.
        reasons: the accepted facts, in sentences.
    """

    seen: Generation
    losses: tuple[Loss, ...] = ()
    opened: Generation | None = None
    reasons: tuple[str, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to accept."""
        return not self.losses and self.opened is None

    @property
    def lines(self) -> list[str]:
        """The recorded facts, in sentences."""
        lost = [
            f"lost: {loss.topic} generation {loss.generation} partition {loss.partition}, "
            f"{loss.offsets}, {len(loss.offsets):,} offsets: {loss.reason}"
            for loss in self.losses
        ]
        if self.opened is None:
            return [*self.reasons, *lost]
        starts = ", ".join(f"{p}: {start}" for p, start in self.opened.starts.items())
        opened = (
            f"opens generation {self.opened.number} of {self.opened.topic}, topic ID {self.opened.topic_id}, "
            f"starting at {starts}"
        )
        return [*self.reasons, *lost, opened]


@dataclass(frozen=True)
class _AcceptanceInputs:
    """The inputs of an acceptance."""

    stream: Stream
    planned: Planned
    state: TopicState
    unread: Sequence[Slice]
    by: str
    now: datetime
    divergence: bool

    def build_loss(self, generation: int, partition: int, offsets: OffsetRange, reason: str) -> Loss:
        return Loss(
            stream=self.stream.name,
            topic=self.state.topic,
            generation=generation,
            partition=partition,
            offsets=offsets,
            reason=reason,
            accepted_by=self.by,
            recorded_at=self.now,
        )

    def build_generation(self, starts: Mapping[int, int | None]) -> Generation:
        return Generation(
            stream=self.stream.name,
            topic=self.state.topic,
            topic_id=self.state.topic_id,
            number=self.planned.generation.number + 1,
            starts=dict(sorted(starts.items())),
            opened_at=self.now,
            opened_by=self.by,
            first_ordinal=self.planned.next_ordinal,
        )


def compute_acceptance(
    stream: Stream,
    planned: Planned,
    state: TopicState,
    unread: Sequence[Slice],
    *,
    by: str,
    now: datetime,
    partitions: Partitions = None,
    diverged: Mapping[int, int] = NOTHING,
    divergence: bool = False,
) -> Acceptance:
    """Compute the records that let planning and reading go on.

    Expired offsets become losses, unless a divergence is accepted. A recreated topic, and one with a partition that was
    cut off, opens a generation, in which offsets may come again. Slices that were never read lose what Kafka does not
    hold any more, and keep the rest.

    Args:
        stream: the declaration.
        planned: how far the topic is planned.
        state: the topic's offsets, read after `planned`.
        unread: slices of the topic that were never read, without recorded losses.
        by: name of the person who accepts.
        now: the time, in UTC.
        partitions: the only ones that are meant; None means all.
        diverged: partitions whose log was replaced before their planned end, with the offset where it was (I16).
        divergence: whether that is accepted, and nothing beside it but what was cut off; else all else is accepted, and
            `diverged` only says where a partition that was cut off is sound.

    Raises:
        ConfigurationError: single partitions are named, and the whole topic was recreated.
    """
    case = _AcceptanceInputs(stream, planned, state, unread, by, now, divergence)
    if state.topic_id != planned.generation.topic_id:
        if partitions is not None:
            raise ConfigurationError(
                f"topic {state.topic} was recreated as a whole",
                stored=f"topic ID {planned.generation.topic_id}",
                found=f"topic ID {state.topic_id}",
                remedy="leave out --partition",
            )
        return _compute_recreated_acceptance(case)
    errors = find_partition_errors(stream, planned, state, diverged if divergence else NOTHING)
    meant = {p: error for p, error in errors.items() if partitions is None or p in partitions}
    if divergence:
        # Offsets that expired are another loss, and are accepted by another command.
        meant = {p: error for p, error in meant.items() if isinstance(error, TopicTruncatedError)}
    return _compute_same_topic_acceptance(case, meant, partitions, diverged)


def _compute_recreated_acceptance(case: _AcceptanceInputs) -> Acceptance:
    """The new topic from its beginning; what was not read of the old one is lost."""
    reason = f"recreated: topic ID {case.planned.generation.topic_id} is gone"
    losses = [
        case.build_loss(slice_.generation, p, offsets, reason)
        for slice_ in case.unread
        for p, offsets in slice_.ranges.items()
        if len(offsets)
    ]
    starts = {p: seen.log_start for p, seen in case.state.partitions.items()}
    cause = f"{reason}; its records beyond the plan are unknown"
    return Acceptance(case.planned.generation, tuple(losses), case.build_generation(starts), (cause,))


def _compute_same_topic_acceptance(
    case: _AcceptanceInputs, errors: Mapping[int, PermanentError], partitions: Partitions, diverged: Mapping[int, int]
) -> Acceptance:
    cut_off = _cut_off(case, errors, diverged)
    removed = {p for p, error in errors.items() if isinstance(error, PartitionsRemovedError)}
    losses = [*_build_unplanned_losses(case, errors), *_build_unread_losses(case, partitions, cut_off, removed)]
    opened = None
    if cut_off or removed:
        remaining = {p: end for p, end in case.planned.ends.items() if p not in removed}
        undecided: dict[int, int | None] = dict.fromkeys(case.planned.undecided)
        skipped = {loss.partition: loss.offsets.end for loss in losses if _is_unplanned(case, loss)}
        opened = case.build_generation(undecided | remaining | skipped | cut_off)
    reasons = tuple(str(error) for error in errors.values())
    return Acceptance(case.planned.generation, tuple(losses), opened, reasons)


def _cut_off(
    case: _AcceptanceInputs, errors: Mapping[int, PermanentError], diverged: Mapping[int, int]
) -> dict[int, int]:
    """For each partition that was cut off where its sound part ends."""
    found: dict[int, int] = {}
    for partition, error in errors.items():
        if isinstance(error, TopicTruncatedError):
            stable = case.state.partitions[partition].last_stable or 0
            found[partition] = min(stable, diverged.get(partition, stable))
    return found


def _build_unplanned_losses(case: _AcceptanceInputs, errors: Mapping[int, PermanentError]) -> list[Loss]:
    """The holes between the planned end and the log start."""
    return [
        case.build_loss(
            case.planned.generation.number,
            partition,
            OffsetRange(case.planned.ends.get(partition, 0), case.state.partitions[partition].log_start or 0),
            "expired: deleted before it was planned",
        )
        for partition, error in errors.items()
        if isinstance(error, OffsetsExpiredError)
    ]


def _is_unplanned(case: _AcceptanceInputs, loss: Loss) -> bool:
    return loss.offsets.start == case.planned.ends.get(loss.partition, 0)


def _build_unread_losses(
    case: _AcceptanceInputs, partitions: Partitions, cut_off: Mapping[int, int], removed: Collection[int]
) -> list[Loss]:
    """Losses of slices that were never read.

    Slices of earlier generations of the topic are among them: their remaining records may be lost too.
    """
    return [
        case.build_loss(slice_.generation, p, lost, reason)
        for slice_ in case.unread
        if slice_.topic_id == case.planned.generation.topic_id
        for p, offsets in slice_.ranges.items()
        if partitions is None or p in partitions
        for lost, reason in _select_lost_ranges(case, p, offsets, cut_off, removed)
    ]


def _select_lost_ranges(
    case: _AcceptanceInputs, partition: int, offsets: OffsetRange, cut_off: Mapping[int, int], removed: Collection[int]
) -> Iterable[tuple[OffsetRange, str]]:
    if not len(offsets):
        return
    if partition in removed:
        yield offsets, "removed: the partition is gone"
        return
    seen = case.state.partitions.get(partition)
    log_start = (seen.log_start if seen else None) or 0
    if log_start > offsets.start and not case.divergence:
        yield OffsetRange(offsets.start, min(offsets.end, log_start)), "expired: deleted before its slice was read"
    sound = max(cut_off.get(partition, offsets.end), offsets.start, log_start)
    if sound < offsets.end:
        yield OffsetRange(sound, offsets.end), "truncated: cut off before its slice was read"


SelectUnread = Callable[[Sequence[Slice]], Sequence[Slice]]


def build_unread_filter(lake: Lake, stream: Stream) -> SelectUnread:
    """Returns the slices without a commit in raw; may raise DependencyUnavailableError."""

    def filter_unread(slices: Sequence[Slice]) -> Sequence[Slice]:
        held = lake.load_slice_commits(stream.name, RAW)
        return [slice_ for slice_ in slices if slice_.key not in held]

    return filter_unread


def accept_loss(
    ledger: Ledger,
    kafka: Kafka,
    stream: Stream,
    select_unread: SelectUnread,
    *,
    by: str,
    now: datetime,
    partitions: Partitions = None,
    dry_run: bool = True,
    divergence: bool = False,
    state: TopicState | None = None,
) -> Acceptance:
    """Work out what an acceptance records, and record it unless it is a dry run.

    A record cannot be undone, so two looks at the topic must agree on it, and all its partitions have a leader.

    Args:
        ledger: holds the plans, and takes the record.
        kafka: is looked at.
        stream: the declaration.
        select_unread: returns the slices that were never read.
        by: name of the person who accepts.
        now: the time, in UTC.
        partitions: the only ones that are meant; None means all.
        dry_run: record nothing.
        divergence: whether it is accepted that history was replaced (I16), and not that offsets expired; without it
            partitions in which other records occupy planned offsets stay as they are.
        state: the topic's offsets, for a dry run; read if None.

    Raises:
        ConfigurationError: the topic was never planned, or single partitions of a recreated one are named.
        TopicAbsentError: the topic does not exist.
        DependencyUnavailableError: Kafka, the lake or the ledger is unavailable, a partition has no leader, or two
            looks at the topic do not agree on the loss; nothing was recorded.
        TemporaryError: the topic was planned on in the meantime; nothing was recorded.
        LeaseHeldError: runs committed to raw for too long; nothing was recorded.
    """
    planned = ledger.topics.read_planned_topic(stream.name, stream.topic)
    if planned is None:
        raise ConfigurationError(
            f"topic {stream.topic} of stream {stream.name} was never planned, so nothing of it can be lost",
            remedy=f"highwater plan {stream.name} --yes",
        )
    recorded = ledger.list_losses(stream.name, stream.topic)
    slices = ledger.list_slices(stream.name, stream.topic)

    def select_left() -> list[Slice]:
        return [subtract_losses(slice_, recorded) for slice_ in select_unread(slices)]

    def look(state: TopicState) -> Callable[[Sequence[Slice]], Acceptance]:
        compared = detect_divergence(kafka, state, planned, seconds=math.inf)
        _ensure_sure(stream, compared, partitions)
        diverged = _read_divergence_offsets(kafka, planned, state, slices, compared)
        options: dict[str, Any] = {"by": by, "now": now, "partitions": partitions, "divergence": divergence}
        return lambda left: compute_acceptance(stream, planned, state, left, diverged=diverged, **options)

    left = select_left()
    if state is not None:
        return look(state)(left)
    first = kafka.read_topic_state(stream.topic)
    found = look(first)(left)
    if found.nothing:
        return found
    _ensure_led(first)
    second = fetch_topic_again(kafka, stream.topic)
    _ensure_led(second)
    compute = look(second)
    found = _ensure_acceptances_agree(found, compute(left), first, second)
    return found if dry_run else _record_unread(ledger, stream, lambda: compute(select_left()))


def _record_unread(ledger: Ledger, stream: Stream, compute: Callable[[], Acceptance]) -> Acceptance:
    """Record what is lost of slices that are still unread: a run may have read some while the topic was compared.

    Meanwhile no run commits to raw, so that no record is read and lost.
    """
    name = build_turn_name(stream.name, RAW)
    with ledger.lease(name, seconds=LEASE_SECONDS, wait=10 * LEASE_SECONDS) as lease:
        found = compute()
        lease.check()
        if not found.nothing:
            _record(ledger, stream, found)
    return found


def _read_divergence_offsets(
    kafka: Kafka, planned: Planned, state: TopicState, slices: Sequence[Slice], compared: Divergence
) -> dict[int, int]:
    """The offsets at which replaced partitions part from their plans, also from the older ones of the generation."""
    found: dict[int, int] = {}
    newest = [slice_ for slice_ in reversed(slices) if slice_.generation == planned.generation.number]
    for p, at in compared.diverged.items():
        sound = OffsetRange(min(state.partitions[p].log_start or 0, at), at)
        prints = (slice_.fingerprints[p] for slice_ in newest if p in slice_.fingerprints and p in slice_.ranges)
        found[p] = locate_divergence(kafka, state.topic, p, sound, prints)
    return found


def _ensure_led(state: TopicState) -> None:
    if state.leaderless_partitions:
        raise DependencyUnavailableError(
            f"topic {state.topic}: a loss cannot be confirmed now",
            found=describe_missing_leaders(state),
            remedy="nothing was recorded; check that every partition has a leader, then try again",
        )


def _ensure_acceptances_agree(
    found: Acceptance, again: Acceptance, first: TopicState, second: TopicState
) -> Acceptance:
    """The newer of two acceptances that were worked out from two looks; offsets may only have grown in between."""

    def build_comparison_key(one: Acceptance) -> tuple[object, ...]:
        # Without the offsets: producers and retention move both ends of a log between the looks.
        lost = sorted((loss.generation, loss.partition, loss.reason) for loss in one.losses)
        return lost, one.opened and (one.opened.topic_id, sorted(one.opened.starts))

    fell = [p for p in first.partitions if has_lower_offset(first, second, p)]
    if fell or build_comparison_key(found) != build_comparison_key(again):
        raise DependencyUnavailableError(
            f"two looks at topic {second.topic} do not agree on the loss",
            stored=f"first: {'; '.join(found.lines) or 'nothing is lost'}",
            found=f"then: {'; '.join(again.lines) or 'nothing is lost'}",
            remedy="nothing was recorded; try again when `highwater status` shows the same twice",
        )
    return again


def _ensure_sure(stream: Stream, compared: Divergence, partitions: Partitions) -> None:
    """Ensure that every partition that is meant could be compared: what was not looked at is not accepted (I15)."""
    for partition, reason in compared.unsure.items():
        if partitions is None or partition in partitions:
            raise DependencyUnavailableError(
                f"topic {stream.topic} partition {partition}: {reason}",
                remedy="nothing was recorded; check that the partition has a leader, then try again",
            )


def _record(ledger: Ledger, stream: Stream, found: Acceptance) -> None:
    if found.opened is None:
        stored = ledger.record_loss(found.losses, seen=found.seen)
    else:
        stored = ledger.topics.open_generation(found.opened, found.losses, seen=found.seen)
    if not stored:
        raise TemporaryError(
            f"topic {stream.topic} was planned on while its loss was worked out",
            remedy="nothing was recorded; repeat the dry run",
        )
