"""The stream's breaker around the steps of a run: failures open it, a probe that is committed everywhere closes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from highwater.assets.work import Work
from highwater.breaker import Circuit, complete_probe, record_failure
from highwater.errors import (
    BreakerOpenError,
    HighwaterError,
    PermanentError,
    RejectsOverLimitError,
    RetractionError,
    SliceHeldError,
    TemporaryError,
)
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.orchestration.failures import is_last_try
from highwater.resources.ledger.breakers import Judgement

# Their failures are of a topic or of Kafka, and the breaker does not stop them.
NOT_WATCHED = frozenset({"raw", "published"})


@contextmanager
def report_to_breaker(work: Work, table: str, tries_so_far: int) -> Iterator[None]:
    """Report to the stream's breaker how the block ends, which takes slices through one table.

    If ledger or lake are unavailable, nothing is recorded: the error under way matters more, and a probe without a
    record is tried again.

    Args:
        work: the slices and the connections.
        table: the table.
        tries_so_far: tries of this step that failed before.
    """
    if table in NOT_WATCHED:
        yield
        return
    try:
        yield
    except Exception as error:
        _try_to_record(work, partial(_on_failure, work, error, tries_so_far))
        raise
    _try_to_record(work, partial(_on_success, work))


def is_counted(error: Exception) -> bool:
    """Whether an error says something of the stream.

    A temporary error does not: a dependency is unavailable, or another run was first. A refused slice was counted
    at its refusal. A retraction error shows a fault of the rules, not of new records.
    """
    return not isinstance(error, TemporaryError | RejectsOverLimitError | RetractionError)


def _on_failure(work: Work, error: Exception, tries_so_far: int) -> None:
    last = isinstance(error, PermanentError | SliceHeldError) or is_last_try(tries_so_far)
    if not last or isinstance(error, BreakerOpenError | RejectsOverLimitError):
        return
    probed = work.ledger.breakers.read_circuit(work.stream.name).probe in work.keys
    if probed or is_counted(error):
        _record_failure(work, error, counted=is_counted(error))


def _record_failure(work: Work, error: Exception, *, counted: bool) -> None:
    main = [slice_.key for slice_ in work.slices if slice_.topic == work.stream.topic]
    decided = work.lake.load_slice_commits(work.stream.name, "events", main) if counted else {}
    now, what = datetime.now(UTC), error.problem if isinstance(error, HighwaterError) else type(error).__name__

    def decide(circuit: Circuit, known: Mapping[str, Judgement]) -> tuple[Circuit, Sequence[Judgement]]:
        fresh = [Judgement(key, work.stream.name, work.run, now) for key in main if key not in {*known, *decided}]
        ours = [one for one in known.values() if work.run and one.run == work.run]
        first = [*fresh, *ours] if counted else []
        after = record_failure(circuit, work.stream.breaker, main, {one.slice_key for one in first}, what, now)
        return after, [replace(one, failed=True, judged_at=now) for one in first]

    work.log(f"breaker: {work.ledger.breakers.update(work.stream.name, main, decide).text}")


def _on_success(work: Work) -> None:
    probe = work.ledger.breakers.read_circuit(work.stream.name).probe
    if probe not in work.keys:
        return
    lacking = read_attempts(work.lake, work.stream, [probe]).select_missing_tables(probe)
    # A check that blocks may keep it from downstream tables: that shows nothing about the next slice.
    if "events" in lacking or (lacking and not work.stream.blocks):
        return
    now = datetime.now(UTC)
    circuit = work.ledger.breakers.update(
        work.stream.name, (), lambda circuit, _: (complete_probe(circuit, probe, now), ())
    )
    work.log(f"breaker: {circuit.text}")


def _try_to_record(work: Work, record: Callable[[], None]) -> None:
    try:
        record()
    except HighwaterError as error:
        work.log(
            f"the breaker of {work.stream.name} could not record the result of {', '.join(work.keys)}: {error.problem}"
        )
