"""OpenLineage around a step: START before it, and COMPLETE, FAIL or ABORT after it, sent in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from highwater.resources.lineage import Sender, get_sender

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport, Work
    from highwater.orchestration.asset_keys import Table
    from highwater.orchestration.lineage_events import LineageStep

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@contextmanager
def emit_lineage(work: Work, table: Table, job: str) -> Iterator[Callable[[Sequence[SliceReport]], None]]:
    """Send the events of a step that takes slices through one table; none where no transport is configured.

    The block calls the function that it gets with its reports. No fault of lineage fails or delays the block.

    Args:
        work: the slices and the connections.
        table: the table.
        job: the name of Dagster's job.
    """
    sending = get_sender()
    if sending is None:
        yield lambda _: None
        return
    step = _build_or_warn(lambda: _build_step(work, table, job))
    reported: list[SliceReport] = []
    _send(sending, step, "START")
    try:
        yield reported.extend
    except Exception as error:
        _send(sending, step, "FAIL", error=error)
        raise
    except BaseException as error:  # a person terminated the run
        _send(sending, step, "ABORT", error=error)
        raise
    _send(sending, step, "COMPLETE", reported)


def _build_step(work: Work, table: Table, job: str) -> LineageStep:
    from highwater.orchestration.lineage_events import LineageStep

    return LineageStep.from_work(work, table, job)


def _send(
    sending: Sender,
    step: LineageStep | None,
    state: str,
    reports: Sequence[SliceReport] = (),
    error: BaseException | None = None,
) -> None:
    event = None if step is None else _build_or_warn(lambda: step.build_event(state, reports, error))
    if event is not None:
        sending.send(event)


def _build_or_warn(make: Callable[[], T]) -> T | None:
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no fault of the run
        _LOG.warning("an OpenLineage event could not be made: %s", type(error).__name__)
        return None
