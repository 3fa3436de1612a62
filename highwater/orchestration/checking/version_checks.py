"""Results of the checks of versions: whether they fall, contradict each other, skip a state, or are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from highwater.declaration import Stream
from highwater.envelope import Origin
from highwater.orchestration.checking.check_rules import (
    CheckResult,
    build_content_result,
    build_missing_versions_result,
    build_transition_result,
    build_version_rise_result,
    is_highest,
)
from highwater.orchestration.checking.missing_versions import NOWHERE, read_missing_versions
from highwater.orchestration.checking.slice_status import compare_highest_versions, read_attempts
from highwater.orchestration.checking.version_queries import (
    CONFLICTS,
    FALLS,
    STATES,
    STREAM,
    Questions,
    Scope,
    VersionFindings,
)
from highwater.resources.lake import Lake

ALONG_OFFSETS = "versions_along_offsets"
ONE_CONTENT = "one_content_a_version"
TRANSITIONS = "transitions_allowed"
MISSING = "no_version_missing"
IN_ORDER = "versions_in_order"
FOLLOWS_EVENTS = "current_follows_events"
Totals = Mapping[str, int]
Results = dict[str, dict[str, CheckResult]]


def select_check_names(stream: Stream) -> list[str]:
    """The checks of events alone that a stream has: transitions need a state machine, and versions that count."""
    if not stream.versioned:
        return []
    machine = stream.transitions is not None and stream.versions_count
    return [ALONG_OFFSETS, ONE_CONTENT, *([TRANSITIONS] if machine else [])]


def select_missing_check_names(stream: Stream) -> list[str]:
    """The check of missing versions, where the stream declares that there are no gaps."""
    return [] if stream.first_version is None else [MISSING]


def check_versions(lake: Lake, stream: Stream, keys: Sequence[str]) -> Results:
    """For each check of events alone the result on each slice.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    return _run_checks(lake, stream, keys, select_check_names(stream))


def check_version_gaps(
    lake: Lake, stream: Stream, keys: Sequence[str], reclaim_numbers: Mapping[Origin, int] | None = None
) -> Results:
    """The result of `no_version_missing` on each slice, with how often origins were reclaimed from the DLQ.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    return _run_checks(lake, stream, keys, select_missing_check_names(stream), reclaim_numbers)


def check_stream_versions(
    lake: Lake, stream: Stream, reclaim_numbers: Mapping[Origin, int] | None = None
) -> dict[str, CheckResult]:
    """The result of each check of versions on all that the stream's tables hold; `reclaim_numbers` as above.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    if not stream.versioned:
        return {}
    found = _run_checks(
        lake, stream, None, [*select_check_names(stream), *select_missing_check_names(stream)], reclaim_numbers
    )
    results = {name: by[STREAM] for name, by in found.items()}
    conflicts = bool(results[ONE_CONTENT].numbers.get("conflicts"))
    return {**results, IN_ORDER: _check_current(lake, stream, conflicts=conflicts)}


def _run_checks(
    lake: Lake,
    stream: Stream,
    keys: Sequence[str] | None,
    wanted: Sequence[str],
    reclaim_numbers: Mapping[Origin, int] | None = None,
) -> Results:
    groups = [STREAM] if keys is None else keys
    events = lake.open_stream_table(stream.name, "events")
    if events is None:
        # A stream that was never decided has no slice to fail; a slice that is asked for has.
        nothing = CheckResult(passed=keys is None, text="there is no table of events")
        return {name: dict.fromkeys(groups, nothing) for name in wanted}
    questions = Questions(events, stream, Scope.from_slice_keys(stream, keys))
    totals = questions.count_events()
    found = {name: _ask(lake, stream, questions, name, reclaim_numbers) for name in wanted}
    return {
        name: {
            one: _build_result(stream, name, totals.get(one, Counter()), by.get(one, VersionFindings()))
            for one in groups
        }
        for name, by in found.items()
    }


def _ask(
    lake: Lake, stream: Stream, questions: Questions, name: str, reclaim_numbers: Mapping[Origin, int] | None
) -> dict[str, VersionFindings]:
    if name == MISSING:
        found = read_missing_versions(lake, stream, questions, reclaim_numbers)
        if questions.scope.whole or not any(one.counts[NOWHERE] for one in found.values()):
            return found
        # A version that the neighbouring slices lack may be further away.
        return read_missing_versions(lake, stream, questions.with_all_events(), reclaim_numbers)
    return questions.read_findings({ALONG_OFFSETS: FALLS, ONE_CONTENT: CONFLICTS, TRANSITIONS: STATES}[name])


def _build_result(stream: Stream, name: str, totals: Totals, found: VersionFindings) -> CheckResult:
    counts: Mapping[str, int] = found.counts
    several = sum(counts.values())
    samples: Sequence[Mapping[str, Any]] = found.samples
    if name == ALONG_OFFSETS:
        return build_version_rise_result(totals, counts, samples)
    if name == ONE_CONTENT:
        return build_content_result(totals, several, samples)
    if name == TRANSITIONS:
        return build_transition_result(totals, several, samples)
    return build_missing_versions_result(totals, counts, samples, stream.name)


def _check_current(lake: Lake, stream: Stream, *, conflicts: bool) -> CheckResult:
    compared = compare_highest_versions(lake, stream, read_attempts(lake, stream), conflicts=conflicts)
    return is_highest(compared.keys, compared.found.counts, compared.found.samples)
