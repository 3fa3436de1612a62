"""The action `retry-slice`: `repair`, or the publisher, tries a slice again after it had exhausted its retries."""

# The ledger holds slices that repair exhausted. Publication derives it from Dagster's runs, which are not asked here:
# any slice of a stream that publishes may be named, and its earlier runs count no more.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.operator_actions import ensure_named
from highwater.orchestration.operations.named_slices import load_slices

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.exhausted_slices import ExhaustedSlice


@dataclass(frozen=True)
class RetryRequest:
    """A request to release a slice for retries.

    Args:
        slice_key: the slice.
        dry_run: record nothing.
        by: the person's name.
        because: why.
    """

    slice_key: str
    dry_run: bool = True
    by: str = ""
    because: str = ""


def release_for_retries(
    ledger: Ledger, streams: Mapping[str, Stream], request: RetryRequest, now: datetime, log: Callable[[str], object]
) -> ExhaustedSlice | None:
    """Release a slice for retries, or report since when it is exhausted; returns its record in the ledger, or None.

    Args:
        ledger: the plans.
        streams: by name, those that the slice may be of.
        request: the request.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Raises:
        UnknownSliceError: it was never planned.
        ConfigurationError: it is not exhausted and never published, is of another stream, or nobody is named.
    """
    ensure_named(request.by, "retry-slice", dry_run=request.dry_run)
    [slice_] = load_slices(ledger, streams, [request.slice_key])
    found = ledger.exhausted_slices.read_for_slices([slice_.key]).get(slice_.key)
    if found is None or found.released_at is not None:
        _release_for_publication(ledger, streams[slice_.stream], slice_.key, request, now, log)
        return None
    log(found.text)
    if not request.dry_run:
        if not ledger.exhausted_slices.release(slice_.key, by=request.by, because=request.because, now=now):
            raise _build_not_exhausted_error(slice_.key)
        log(f"{slice_.key}: recorded; the sensor repair requests it")
    return found


def _release_for_publication(
    ledger: Ledger, stream: Stream, key: str, request: RetryRequest, now: datetime, log: Callable[[str], object]
) -> None:
    if stream.publishes is None:
        raise _build_not_exhausted_error(key)
    log(f"the sensor repair still retries {key}; whether the sensor publisher still sends it, its ticks show")
    if not request.dry_run:
        ledger.exhausted_slices.release_any(stream.name, key, by=request.by, because=request.because, now=now)
        log(f"{key}: recorded; where it is not sent, the sensor publisher requests it and later ones")


def _build_not_exhausted_error(key: str) -> ConfigurationError:
    return ConfigurationError(
        f"{key} is not exhausted",
        remedy="nothing to do; highwater status names the slices that are, highwater explain its runs",
    )
