"""Translation of our errors into Dagster's failures."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import dagster as dg

from highwater import errors
from highwater.errors import BreakerOpenError, HighwaterError, OutOfTurnError, PermanentError, SliceHeldError
from highwater.orchestration.redaction import redact_error, redact_secrets
from highwater.orchestration.resources import list_known_secrets

# Three more tries, about 5, 10 and 20 s after the one before. A dependency that is unavailable for longer is repair's
# business: a waiting step holds its worker.
TRIES_AGAIN = 3
FIRST_WAIT = 5.0
# These errors last longer than a step should wait.
NOT_TRIED_AGAIN = (PermanentError, BreakerOpenError, SliceHeldError, OutOfTurnError)


def wait_seconds(tries_so_far: int) -> float:
    """The wait before the next try, in seconds.

    Doubled each time, and moved by up to half, so that runs that failed together do not come back together.
    """
    return FIRST_WAIT * 2.0**tries_so_far * random.uniform(0.5, 1.5)  # noqa: S311 - no secret depends on it


def find_runbook_entry(error: HighwaterError) -> str:
    """The entry of the runbook on an error, from the top of the repository; of one of no named kind, its family."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    family = {"PermanentError": "permanent-errors", "TemporaryError": "temporary-errors"}
    return f"docs/runbook.md#{family.get(kind.__name__, kind.__name__.lower())}"


def is_last_try(tries_so_far: int) -> bool:
    """Whether a step that failed so often before is not tried again when it fails now."""
    return tries_so_far >= TRIES_AGAIN


def to_failure(error: HighwaterError, secrets: Collection[str] = ()) -> dg.Failure:
    """The failure that Dagster shows, with the values and the remedy, and without secrets."""
    values = {"problem": error.problem, "stored": error.stored, "found": error.found, "remedy": error.remedy}
    shown = {
        name: dg.MetadataValue.text(redact_secrets(str(value), secrets))
        for name, value in values.items()
        if value is not None
    }
    return dg.Failure(
        # With the name: of a failure that is the cause of a retry, Dagster stores this text alone.
        description=redact_secrets(f"{type(error).__name__}: {error}", secrets),
        metadata={
            "error": dg.MetadataValue.text(type(error).__name__),
            **shown,
            "runbook": dg.MetadataValue.path(find_runbook_entry(error)),
        },
        allow_retries=not isinstance(error, PermanentError),
    )


def format_redacted_error(error: Exception) -> str:
    """The name and the text of an error, without secrets."""
    return redact_secrets(f"{type(error).__name__}: {error}", list_known_secrets())


@contextmanager
def translate_errors(tries_so_far: int, stop: Callable[[], None]) -> Iterator[None]:
    """Say errors in Dagster's words, and end the work outside when the block ends early.

    The step has no retry policy, the retry is asked for here: Dagster 1.13 takes a policy as leave to try a step again
    that a person terminated (`op_execution_error_boundary`: "respect retry policy when interrupts occur"), and the run
    goes on. A termination arrives as an exception that is no `Exception`, and passes unchanged.

    Args:
        tries_so_far: tries of this step that failed before.
        stop: ends the work that goes on elsewhere; called however the block ends early.
    """
    try:
        yield
    except NOT_TRIED_AGAIN as error:
        _stop_or_warn(stop)
        raise to_failure(error, list_known_secrets()) from redact_error(error, list_known_secrets())
    except HighwaterError as error:
        _stop_or_warn(stop)
        failure = to_failure(error, list_known_secrets())
        failure.__cause__ = redact_error(error, list_known_secrets())
        raise _try_again(tries_so_far) from failure
    except Exception as error:  # noqa: BLE001 - it is raised on, as the cause of the retry
        _stop_or_warn(stop)
        raise _try_again(tries_so_far) from redact_error(error, list_known_secrets())
    except BaseException:
        _stop_or_warn(stop)
        raise


def _try_again(tries_so_far: int) -> dg.RetryRequested:
    return dg.RetryRequested(max_retries=TRIES_AGAIN, seconds_to_wait=wait_seconds(tries_so_far))


def _stop_or_warn(stop: Callable[[], None]) -> None:
    """The error under way matters more than one met on the way out."""
    try:
        stop()
    except Exception as error:  # noqa: BLE001 - whatever it is, the first error must not be lost
        dg.get_dagster_logger().warning(
            "the work on Spark could not be stopped: %s", redact_error(error, list_known_secrets())
        )
