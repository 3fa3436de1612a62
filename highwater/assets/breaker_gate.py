"""The stream's breaker at a decision: which slices are admitted, whether rejects are within limits, a probe's end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING

from highwater.breaker import AttemptResult, Circuit, admit_slices, complete_probe, evaluate_slices
from highwater.errors import BreakerOpenError, RejectsOverLimitError
from highwater.reject_reasons import BY_REASON, format_causes
from highwater.resources.ledger.breakers import Judgement

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.resources.ledger.breakers import AcceptedReason
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# The number of rejects in the numbers of a split.
REJECTS = "rejects"


def ensure_admitted(work: Work, slices: Sequence[Slice], committed: Collection[str] = ()) -> None:
    """Ensure that these slices may be decided now; it may be as the probe.

    Slices that a person accepted always may. Slices of tiers wait until the breaker is closed. Committed slices may:
    a retry or a repetition shows nothing about new records.

    Args:
        work: the connections.
        slices: the slices.
        committed: keys of slices that were decided before.

    Raises:
        BreakerOpenError: they have to wait.
    """
    breakers, now = work.ledger.breakers, datetime.now(UTC)
    if not slices or breakers.read_circuit(work.stream.name).closed:
        return
    accepted = breakers.read_accepted_slices([slice_.key for slice_ in slices])
    undecided = [slice_ for slice_ in slices if slice_.key not in accepted]
    main = [slice_.key for slice_ in undecided if slice_.topic == work.stream.topic and slice_.key not in committed]

    def decide(circuit: Circuit, _: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
        found = None if len(main) < len(undecided) and not circuit.closed else admit_slices(circuit, main, now)
        if found is None:
            raise _build_open_error(work, circuit, undecided)
        return found, ()

    work.log(f"breaker: {breakers.update(work.stream.name, (), decide).text}")


def _build_open_error(work: Work, circuit: Circuit, slices: Sequence[Slice]) -> BreakerOpenError:
    some = slices[0].key if len(slices) == 1 else f"{slices[0].key} .. {slices[-1].key}"
    return BreakerOpenError(
        f"{some} may not be decided: the breaker of {work.stream.name} is {circuit.text}",
        remedy="fix the cause of the rejects; after the cool-down one new slice of the main topic, requested alone, is "
        "the probe, and the sensor repair requests the rest. highwater accept-rejects lets a slice through as it is",
    )


def ensure_within_limit(
    work: Work, slices: Sequence[Slice], committed: Mapping[str, SliceCommit], measured: Mapping[str, Mapping[str, int]]
) -> None:
    """Report to the breaker how slices would be split, before anything of it is committed.

    If a slice is materialised again, only its additional rejects count. Records that are rejected for a reason that a
    person accepted do not count at all: neither as rejects nor as records.

    Args:
        work: the connections.
        slices: the slices that are decided together.
        committed: the commits of the slices in events.
        measured: the numbers of the split, by slice; none of an empty one.

    Raises:
        RejectsOverLimitError: one of them is over the limit; none of them is to be committed.
    """
    main = sorted((p for p in slices if p.topic == work.stream.topic), key=attrgetter("ordinal"))
    accepted = work.ledger.breakers.read_accepted_slices([slice_.key for slice_ in main])
    reasons = work.ledger.breakers.read_accepted_reasons(work.stream.name)
    seen = {p.key: _measure_slice(p, committed, measured.get(p.key, {}), reasons) for p in main}
    cases = [_build_result(key, one) for key, one in seen.items() if key not in accepted]
    if not main:
        return
    refused: tuple[str, ...] = ()
    now = datetime.now(UTC)

    def decide(circuit: Circuit, known: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
        nonlocal refused
        first = {case.key for case in cases if case.key not in known and case.key not in committed}
        circuit, refused = evaluate_slices(circuit, work.stream.breaker, cases, first, now)
        judged_cases = [case for case in cases if not refused or case.key in refused]
        judged_cases += [_build_result(key, seen[key]) for key in accepted]
        return circuit, [
            _build_judgement(work, case, seen[case.key][2], known.get(case.key), now, case.key in refused)
            for case in judged_cases
        ]

    circuit = work.ledger.breakers.update(work.stream.name, [slice_.key for slice_ in main], decide)
    if refused:
        over = {case: seen[case.key][2] for case in cases if case.key in refused}
        raise _build_over_limit_error(work, circuit, over, len(slices), reasons)


def end_probe(
    work: Work, slices: Sequence[Slice], committed: Mapping[str, SliceCommit], measured: Mapping[str, Mapping[str, int]]
) -> None:
    """Let a probe that records hold close the breaker, if the rest of it is within the limit.

    A hold lasts until a person fixes its cause; retries of tiers, which it does not concern, would wait as long.

    Args:
        work: the connections.
        slices: the slices that were to be decided together, one of them held.
        committed: the commits of the slices in events.
        measured: the numbers of the split, without what holds.

    Raises:
        RejectsOverLimitError: the probe is over the limit, and the cool-down begins again.
    """
    probe = work.ledger.breakers.read_circuit(work.stream.name).probe
    if probe is None or probe not in {slice_.key for slice_ in slices}:
        return
    ensure_within_limit(work, slices, committed, measured)
    now = datetime.now(UTC)
    circuit = work.ledger.breakers.update(
        work.stream.name, (), lambda circuit, _: (complete_probe(circuit, probe, now), ())
    )
    work.log(f"breaker: {circuit.text}")


_Counted = tuple[int, int, dict[str, int]]


def _measure_slice(
    slice_: Slice,
    committed: Mapping[str, SliceCommit],
    counts: Mapping[str, int],
    accepted: Mapping[str, AcceptedReason],
) -> _Counted:
    """Records, rejects, and rejects by reason of a slice, as the breaker counts them."""
    before = committed[slice_.key].counts if slice_.key in committed else {}
    left_out = {f"{BY_REASON}{reason}" for reason, one in accepted.items() if slice_.ordinal >= one.from_ordinal}

    def count_rejects(found: Mapping[str, int]) -> int:
        return found.get(REJECTS, 0) - sum(found.get(name, 0) for name in left_out)

    reasons = {
        name.removeprefix(BY_REASON): max(0, count - before.get(name, 0))
        for name, count in counts.items()
        if name.startswith(BY_REASON) and name not in left_out
    }
    records = counts.get("raw", 0) - sum(counts.get(name, 0) for name in left_out)
    return records, max(0, count_rejects(counts) - count_rejects(before)), reasons


def _build_result(key: str, counted: _Counted) -> AttemptResult:
    return AttemptResult(key, counted[0], counted[1])


def _build_judgement(
    work: Work,
    case: AttemptResult,
    reasons: Mapping[str, int],
    known: Judgement | None,
    now: datetime,
    refused: bool,  # noqa: FBT001 - a value, no mode
) -> Judgement:
    before = known or Judgement(case.key, work.stream.name, work.run, now)
    counted = replace(before, records=case.records, rejects=case.rejects, reasons=reasons)
    return replace(counted, refused=refused, judged_at=now)


def _build_over_limit_error(
    work: Work,
    circuit: Circuit,
    refused: Mapping[AttemptResult, Mapping[str, int]],
    together: int,
    accepted: Collection[str],
) -> RejectsOverLimitError:
    shares = "; ".join(
        f"{one.rejects:,} of {one.records:,} records of {one.key} would be rejected ({format_causes(reasons)})"
        for one, reasons in refused.items()
    )
    first = next(iter(refused)).key
    rest = "" if together == 1 else f"; none of the {together} slices of this run was decided"
    return RejectsOverLimitError(
        f"{shares}{rest}",
        stored=f"limit {work.stream.breaker.reject_ratio:.0%}"
        + (f"; records rejected for {', '.join(accepted)} do not count" if accepted else ""),
        found=f"the breaker of {work.stream.name} is {circuit.text}",
        remedy=f"highwater try {work.stream.name} --spark shows why; fix the producer, the "
        "declaration or the reference table, and it is reprocessed; if its rejects are to be parked, highwater "
        f"accept-rejects {first}, or for all slices from it on highwater accept-rejects {work.stream.name} "
        f"--reason REASON --from {first}",
    )
