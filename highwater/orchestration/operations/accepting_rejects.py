"""The action `accept-rejects`: slices, or a reason, pass the stream's breaker although many records are rejected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.operator_actions import ensure_named
from highwater.orchestration.operations.named_slices import load_slices
from highwater.resources.ledger.breakers import AcceptedReason, AcceptedSlice

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.breakers import Judgement


@dataclass(frozen=True)
class AcceptSlicesRequest:
    """A request to accept the rejects of slices.

    Args:
        slices: the keys.
        dry_run: record nothing.
        by: the person's name.
        because: why.
    """

    slices: Sequence[str]
    dry_run: bool = True
    by: str = ""
    because: str = ""


def accept_slices(
    ledger: Ledger, streams: Collection[str], request: AcceptSlicesRequest, now: datetime, log: Callable[[str], object]
) -> int:
    """Let slices through, or report their judgements; returns how many were not let through before.

    Args:
        ledger: holds plans and judgements.
        streams: the names of those that the slices may be of.
        request: the request.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Raises:
        UnknownSliceError: one of them was never planned.
        ConfigurationError: it is to be recorded and nobody is named, or a slice cannot be let through.
    """
    ensure_named(request.by, "accept-rejects", dry_run=request.dry_run)
    slices = load_slices(ledger, streams, request.slices)
    if not slices:
        raise ConfigurationError("no slice is named", remedy="name the slices whose rejects are accepted")
    judgements, known = (
        ledger.breakers.read_judgements([*request.slices]),
        ledger.breakers.read_accepted_slices([*request.slices]),
    )
    for slice_ in slices:
        log(_describe_judgement(slice_.key, judgements.get(slice_.key)))
    fresh = [slice_.key for slice_ in slices if slice_.key not in known]
    log(f"{len(fresh):,} of {len(slices):,} slices are not let through yet")
    if not request.dry_run:
        # This includes slices that were accepted before: an acceptance covers only the rejects up to its time.
        for name in sorted({slice_.stream for slice_ in slices}):
            keys = [slice_.key for slice_ in slices if slice_.stream == name]
            ledger.breakers.accept(name, [AcceptedSlice(key, request.because, request.by, now) for key in keys])
            log(f"{', '.join(keys)}: recorded; the sensor repair requests incomplete slices, or materialise them")
    return len(fresh)


def _describe_judgement(key: str, judgement: Judgement | None) -> str:
    if judgement is None:
        return f"{key}: never judged; its rejects, however many, would be published"
    state = "refused" if judgement.refused else "not refused"
    return (
        f"{key}: {state} at {judgement.judged_at:%Y-%m-%d %H:%M} UTC, {judgement.rejects:,} of "
        f"{judgement.records:,} records would be rejected; they would be published to the tiers and parked, by "
        "their reasons"
    )


@dataclass(frozen=True)
class AcceptReasonsRequest:
    """A request to accept the rejects of a stream for some reasons.

    Args:
        reasons: the reasons for rejects that are accepted.
        from_slice: the slice of the main topic from which on they are; empty to revoke.
        revoke: end the acceptance.
        dry_run: record nothing.
        by: the person's name.
        because: why.
    """

    reasons: Sequence[str]
    from_slice: str = ""
    revoke: bool = False
    dry_run: bool = True
    by: str = ""
    because: str = ""


def accept_reasons(
    ledger: Ledger, stream: Stream, request: AcceptReasonsRequest, now: datetime, log: Callable[[str], object]
) -> None:
    """Accept or revoke reasons for a stream, or show what that would do.

    Raises:
        UnknownSliceError: the slice was never planned.
        ConfigurationError: nobody is named, or a reason or the slice cannot be accepted.
    """
    known = ledger.breakers.read_accepted_reasons(stream.name)
    for reason in request.reasons:
        log(known[reason].text if reason in known else f"rejects for {reason} are not accepted")
    ensure_named(request.by, "accept-rejects", dry_run=request.dry_run)
    if request.revoke:
        _revoke(ledger, stream, request, now, log)
        return
    allowed = [reason for reason in stream.on_reject if reason not in stream.holding]
    if wrong := [reason for reason in request.reasons if reason not in allowed]:
        raise ConfigurationError(
            f"rejects for {', '.join(wrong)} cannot be accepted for all slices of {stream.name}",
            stored=f"reasons that can be: {', '.join(allowed)}",
            found="a reason that holds slices is released slice by slice" if {*wrong} & stream.holding else None,
            remedy=f"name one of {', '.join(allowed)}",
        )
    if not request.from_slice:
        raise ConfigurationError("no first slice is named", remedy="name it with --from SLICE")
    [slice_] = load_slices(ledger, [stream.name], [request.from_slice])
    if slice_.topic != stream.topic:
        raise ConfigurationError(
            f"{slice_.key} is no slice of {stream.topic}",
            found=f"a slice of {slice_.topic}, which the breaker does not judge",
            remedy=f"name a slice of {stream.topic}",
        )
    refused = [one for one in ledger.breakers.list_refused(stream.name) if one.reasons.keys() & {*request.reasons}]
    log(
        f"from {slice_.key} on, rejects for {', '.join(request.reasons)} would open the breaker no more, however many; "
        f"they go to the tiers and to the parked topic by their reasons; {len(refused):,} refused slices have such"
    )
    if not request.dry_run:
        for reason in request.reasons:
            ledger.breakers.accept_reason(
                stream.name, AcceptedReason(reason, slice_.key, slice_.ordinal, request.because, request.by, now)
            )
        log(f"{', '.join(request.reasons)}: recorded; the sensor repair requests the refused slices")


def _revoke(
    ledger: Ledger, stream: Stream, request: AcceptReasonsRequest, now: datetime, log: Callable[[str], object]
) -> None:
    if request.dry_run:
        log("from the next slice on, such rejects would open the breaker again")
        return
    for reason in request.reasons:
        done = ledger.breakers.revoke_reason(stream.name, reason, request.by, now)
        log(f"{reason}: revoked" if done else f"{reason}: it was not accepted")


def build_accept_command(ledger: Ledger, stream: Stream, refused: Sequence[Judgement]) -> str | None:
    """The command that accepts the most frequent reason of refused slices for the whole stream; None without one."""
    counts = Counter[str]()
    for one in refused:
        counts.update(one.reasons)
    found = [reason for reason, _ in counts.most_common() if reason not in stream.holding]
    if not found:
        return None
    first = min(ledger.get([one.slice_key for one in refused if found[0] in one.reasons]), key=lambda one: one.ordinal)
    return f"highwater accept-rejects {stream.name} --reason {found[0]} --from {first.key}"
