"""The time limit of a sensor's tick: no request to Kafka waits beyond it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from highwater.errors import OutOfTimeError

# No request waits for less. Clients count whole milliseconds, so one that the limit cuts short ends a moment before it.
_SHORTEST = 0.1
# A value of `time.monotonic`. Each thread has its own, so that ticks in one process do not share it.
_END: ContextVar[float] = ContextVar("end", default=math.inf)


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Let no request within the block wait longer than this time from now on."""
    token = _END.set(min(_END.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _END.reset(token)


def limit_wait(seconds: float) -> float:
    """The time that a request may wait: this time at most, and not beyond the limit.

    Raises:
        OutOfTimeError: no time is left.
    """
    if is_out_of_time():
        raise build_out_of_time_error()
    return min(seconds, _END.get() - time.monotonic())


def is_out_of_time() -> bool:
    """Whether no time is left."""
    return _END.get() - time.monotonic() < _SHORTEST


def build_out_of_time_error() -> OutOfTimeError:
    """The error of a request for which no time is left."""
    return OutOfTimeError(
        "the time of this tick is over, and Kafka was not asked any further",
        remedy="nothing to do: a later tick asks again; if it repeats, highwater status shows the partitions that "
        "could not be asked, and their leaders",
    )
