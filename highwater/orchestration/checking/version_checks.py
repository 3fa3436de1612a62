"""The checks of versions: whether they fall, contradict each other, skip a state, or are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from highwater.orchestration.checking.check_rules import (
    CheckResult,
    allowed_transitions,
    is_highest,
    none_missing,
    one_content,
    versions_rise,
)
from highwater.orchestration.checking.missing_versions import NOWHERE, missing
from highwater.orchestration.checking.slice_status import attempts, highest_versions
from highwater.orchestration.checking.version_questions import STREAM, Questions, Scope, VersionFindings

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.envelope import Origin
    from highwater.resources.lake import Lake

ALONG_OFFSETS = "versions_along_offsets"
ONE_CONTENT = "one_content_a_version"
TRANSITIONS = "transitions_allowed"
MISSING = "no_version_missing"
IN_ORDER = "versions_in_order"
FOLLOWS_EVENTS = "current_follows_events"
Totals = Mapping[str, int]
Results = dict[str, dict[str, CheckResult]]


def names(stream: Stream) -> list[str]:
    """The checks of events alone that a stream has: transitions need a state machine, and versions that count."""
    if not stream.versioned:
        return []
    machine = stream.transitions is not None and stream.versions_count
    return [ALONG_OFFSETS, ONE_CONTENT, *([TRANSITIONS] if machine else [])]


def current_names(stream: Stream) -> list[str]:
    """The checks of `current`, where a stream has it."""
    return [IN_ORDER, FOLLOWS_EVENTS] if stream.versioned else []


def counted_names(stream: Stream) -> list[str]:
    """The check of missing versions, where the stream declares that there are no gaps."""
    return [] if stream.first_version is None else [MISSING]


def version_checks(lake: Lake, stream: Stream, keys: Sequence[str]) -> Results:
    """For each check of events alone the result on each slice.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    return _results(lake, stream, keys, names(stream))


def missing_checks(
    lake: Lake, stream: Stream, keys: Sequence[str], reclaim_numbers: Mapping[Origin, int] | None = None
) -> Results:
    """The result of `no_version_missing` on each slice, with how often origins were reclaimed from the DLQ.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    return _results(lake, stream, keys, counted_names(stream), reclaim_numbers)


def over_the_stream(
    lake: Lake, stream: Stream, reclaim_numbers: Mapping[Origin, int] | None = None
) -> dict[str, CheckResult]:
    """The result of each check of versions on all that the stream's tables hold; `reclaim_numbers` as above.

    Raises:
        DependencyAwayError: the lake could not be read.
    """
    if not stream.versioned:
        return {}
    found = _results(lake, stream, None, [*names(stream), *counted_names(stream)], reclaim_numbers)
    results = {name: by[STREAM] for name, by in found.items()}
    conflicts = bool(results[ONE_CONTENT].numbers.get("conflicts"))
    return {**results, IN_ORDER: _current(lake, stream, conflicts=conflicts)}


def _results(
    lake: Lake,
    stream: Stream,
    keys: Sequence[str] | None,
    wanted: Sequence[str],
    reclaim_numbers: Mapping[Origin, int] | None = None,
) -> Results:
    groups = [STREAM] if keys is None else keys
    events = lake.table(stream.name, "events")
    if events is None:
        # A stream that was never decided has no slice to fail; a slice that is asked for has.
        nothing = CheckResult(passed=keys is None, text="there is no table of events")
        return {name: dict.fromkeys(groups, nothing) for name in wanted}
    questions = Questions(events, stream, Scope.of(stream, keys))
    totals = questions.totals()
    found = {name: _ask(lake, stream, questions, name, reclaim_numbers) for name in wanted}
    return {
        name: {one: _result(stream, name, totals.get(one, Counter()), by.get(one, VersionFindings())) for one in groups}
        for name, by in found.items()
    }


def _ask(
    lake: Lake, stream: Stream, questions: Questions, name: str, reclaim_numbers: Mapping[Origin, int] | None
) -> dict[str, VersionFindings]:
    if name == MISSING:
        found = missing(lake, stream, questions, reclaim_numbers)
        if questions.scope.whole or not any(one.counts[NOWHERE] for one in found.values()):
            return found
        # A version that the neighbouring slices lack may be further away.
        return missing(lake, stream, questions.widened(), reclaim_numbers)
    counters: dict[str, Callable[[], dict[str, VersionFindings]]] = {
        ALONG_OFFSETS: questions.falls,
        ONE_CONTENT: questions.conflicts,
        TRANSITIONS: questions.transitions,
    }
    return counters[name]()


def _result(stream: Stream, name: str, totals: Totals, found: VersionFindings) -> CheckResult:
    counts: Mapping[str, int] = found.counts
    several = sum(counts.values())
    samples: Sequence[Mapping[str, Any]] = found.samples
    if name == ALONG_OFFSETS:
        return versions_rise(totals, counts, samples)
    if name == ONE_CONTENT:
        return one_content(totals, several, samples)
    if name == TRANSITIONS:
        return allowed_transitions(totals, several, samples)
    return none_missing(totals, counts, samples, stream.name)


def _current(lake: Lake, stream: Stream, *, conflicts: bool) -> CheckResult:
    compared = highest_versions(lake, stream, attempts(lake, stream), conflicts=conflicts)
    return is_highest(compared.keys, compared.found.counts, compared.found.samples)
