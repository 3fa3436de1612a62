"""Circuit breakers of Kafka, the lake and reference tables: ticks and runs wait while a dependency's is open."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pybreaker

from highwater.errors import BreakerOpenError, DependencyUnavailableError, HighwaterError

if TYPE_CHECKING:
    from highwater.resources.ledger.breakers import Breakers, Dependency

# Three looks at a broker that is unavailable are half a minute of one planner's ticks.
FAILURES = 3
# Ticks come every ten seconds, so a recovery is noticed at most 70 seconds later.
COOL_DOWN = timedelta(seconds=60)
# A tick's question. Others may have counted failures while a step, which takes longer, was asking.
SHORT_SECONDS = 5.0


class LedgerStorage(pybreaker.CircuitBreakerStorage):
    """The state of one breaker in the ledger, for one attempt of one process.

    pybreaker lets every caller pass that finds a breaker half-open, and any number of processes may find that it has
    cooled down. Here the one that changes it to half-open first makes the probe; the others see it open, since the
    moment when the probe began. So a probe whose process died is recreated after another cool-down.

    Args:
        breakers: the ledger's.
        name: the dependency.
        why: the failure that is about to be counted; the one that opened it if empty.
    """

    def __init__(self, breakers: Breakers, name: str, why: str = "") -> None:
        super().__init__(name)
        self._breakers = breakers
        self._me = uuid.uuid4().hex
        self.row = breakers.read_dependency(name)
        self._why = why or self.row.why

    def _change(self, change: Callable[[Dependency], Dependency]) -> None:
        self.row = self._breakers.change(self.name, change)

    @property
    def state(self) -> str:
        others = self.row.state == pybreaker.STATE_HALF_OPEN and self.row.probe != self._me
        return pybreaker.STATE_OPEN if others else self.row.state

    @state.setter
    def state(self, state: str) -> None:
        seen = self.row

        def change(row: Dependency) -> Dependency:
            if state == pybreaker.STATE_CLOSED:
                return replace(row, state=state, probe="", why="", closed=datetime.now(UTC))
            if state != pybreaker.STATE_HALF_OPEN:
                return replace(row, state=state, probe="", why=self._why)
            if row != seen:
                raise pybreaker.CircuitBreakerError("another process was first with the probe")
            return replace(row, state=state, probe=self._me, since=datetime.now(UTC))

        self._change(change)

    def increment_counter(self) -> None:
        self._change(lambda row: replace(row, failures=row.failures + 1))

    def reset_counter(self) -> None:
        if self.row.failures:  # every success asks for it
            self._change(lambda row: replace(row, failures=0))

    def increment_success_counter(self) -> None:
        self._change(lambda row: replace(row, successes=row.successes + 1))

    def reset_success_counter(self) -> None:
        if self.row.successes:
            self._change(lambda row: replace(row, successes=0))

    @property
    def counter(self) -> int:
        return self.row.failures

    @property
    def success_counter(self) -> int:
        return self.row.successes

    @property
    def opened_at(self) -> datetime | None:
        return self.row.since

    @opened_at.setter
    def opened_at(self, moment: datetime) -> None:
        self._change(lambda row: replace(row, since=moment))


class Guard:
    """A breaker around one dependency.

    Args:
        breakers: the ledger's.
        name: the dependency, as `DependencyUnavailableError.of` names it.
        probe: one short question, which fails when it is unavailable.
    """

    def __init__(self, breakers: Breakers, name: str, probe: Callable[[], object]) -> None:
        self.name = name
        self._breakers = breakers
        self._probe = probe
        self._sound_at = -SHORT_SECONDS

    def enter(self) -> None:
        """Ensure that the dependency may be asked: it may be by the probe, which is made here.

        Raises:
            BreakerOpenError: it was unavailable, and the cool-down has not passed; it was not asked.
            DependencyUnavailableError: the probe found it still unavailable.
        """
        storage = LedgerStorage(self._breakers, self.name)
        if storage.row.state == pybreaker.STATE_CLOSED:
            self._sound_at = -SHORT_SECONDS if storage.row.failures else time.monotonic()
            return
        try:
            _build_breaker(storage).call(self._probe)
        except pybreaker.CircuitBreakerError:
            raise build_open_error(storage.row) from None

    def record_failure(self, error: DependencyUnavailableError) -> None:
        """Count that it was unavailable."""
        with suppress(pybreaker.CircuitBreakerError, DependencyUnavailableError):
            _build_breaker(LedgerStorage(self._breakers, self.name, error.problem)).call(_raise, error)

    def record_answer(self) -> None:
        """Count that it answered. Where no failure was counted a moment ago, there is none to take back."""
        if time.monotonic() - self._sound_at < SHORT_SECONDS:
            return
        with suppress(pybreaker.CircuitBreakerError):
            _build_breaker(LedgerStorage(self._breakers, self.name)).call(_do_nothing)


def _build_breaker(storage: LedgerStorage) -> Any:
    """A new one each time: the state is the ledger's alone."""
    return pybreaker.CircuitBreaker(
        fail_max=FAILURES,
        reset_timeout=COOL_DOWN.total_seconds(),
        state_storage=storage,
        name=storage.name,
        throw_new_error_on_trip=False,
    )


def _raise(error: Exception) -> NoReturn:
    raise error


def _do_nothing() -> None:
    return None


def is_cooling_down(row: Dependency, now: datetime) -> bool:
    """Whether a dependency is not to be asked at all now."""
    return row.state != pybreaker.STATE_CLOSED and row.since is not None and now < row.since + COOL_DOWN


def describe(row: Dependency) -> str:
    """The state of a dependency's breaker in a sentence."""
    if row.since is None or row.state == pybreaker.STATE_CLOSED:
        return f"the breaker of {row.name} is closed"
    return (
        f"the breaker of {row.name} is {row.state} since {row.since:%Y-%m-%d %H:%M:%S} UTC: {row.why}; it is asked "
        f"again from {row.since + COOL_DOWN:%H:%M:%S} on"
    )


def build_open_error(row: Dependency) -> BreakerOpenError:
    """The error for a dependency whose breaker is open."""
    return BreakerOpenError(
        f"{row.name} is not asked: {describe(row)}",
        remedy="bring it back; the next tick or run after that moment asks it",
    )


@contextmanager
def guard_dependencies(*guards: Guard) -> Iterator[None]:
    """Ask dependencies within the block, and count what became of it.

    A block that fails by another error counts neither way: what it did not reach was not asked.

    Raises:
        BreakerOpenError: one of them is not to be asked now; the block did not begin.
    """
    for guard in guards:
        guard.enter()
    try:
        yield
    except DependencyUnavailableError as error:
        for guard in guards:
            if guard.name == error.of:
                _try_to_record(partial(guard.record_failure, error))
        raise
    for guard in guards:
        _try_to_record(guard.record_answer)


def _try_to_record(record: Callable[[], None]) -> None:
    """A ledger that is unavailable cannot count; what became of the block matters more."""
    with suppress(HighwaterError):
        record()
