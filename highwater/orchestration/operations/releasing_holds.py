"""Releases a slice that records hold, and records who did it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import ConfigurationError
from highwater.holds import Release
from highwater.operator_actions import ensure_named
from highwater.orchestration.operations.named_slices import load_slices
from highwater.routing import find_destination

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.holds import Hold
    from highwater.resources.ledger import Ledger


@dataclass(frozen=True)
class ReleaseRequest:
    """A request to release a held slice.

    Args:
        slice_key: the slice.
        park: park the records that hold it, instead of retrying them.
        dry_run: record nothing.
        by: the person's name.
        because: why.
    """

    slice_key: str
    park: bool = False
    dry_run: bool = True
    by: str = ""
    because: str = ""


def release_slice(
    ledger: Ledger, streams: Mapping[str, Stream], request: ReleaseRequest, now: datetime, log: Callable[[str], object]
) -> Hold:
    """Release a slice, or report what holds it; returns its hold as it was.

    Args:
        ledger: holds plans and holds.
        streams: the declared streams, by name.
        request: the request.
        now: the time, in UTC.
        log: gets the findings and actions, in sentences.

    Raises:
        UnknownSliceError: it was never planned.
        ConfigurationError: it is not held, was released before, is of another stream, or nobody is named.
    """
    ensure_named(request.by, "release-hold", dry_run=request.dry_run)
    [slice_] = load_slices(ledger, streams, [request.slice_key])
    hold = ledger.holds.read_for_slices([slice_.key]).get(slice_.key)
    if hold is None or hold.release is not None:
        raise _build_not_held_error(slice_.key, hold)
    log(hold.text)
    stream = streams[slice_.stream]
    # A reason that was declared otherwise since holds no more; its slice is decided when it is asked for.
    goes = {find_destination(stream, reason, 0, park=request.park) for reason in stream.holding or {hold.found.reason}}
    log(f"the records that hold it would go to {', '.join(sorted(goes))}; later slices follow")
    if not request.dry_run:
        if not ledger.holds.release(slice_.key, Release(request.park, request.by, request.because, now)):
            raise _build_not_held_error(slice_.key, ledger.holds.read_for_slices([slice_.key]).get(slice_.key))
        circuit = ledger.breakers.read_circuit(slice_.stream)
        log(f"{slice_.key}: recorded; the sensor repair requests it, or materialise it by hand")
        if not circuit.closed:
            log(f"it waits for the breaker of {slice_.stream} before it is decided, which is {circuit.text}")
    return hold


def _build_not_held_error(key: str, hold: Hold | None) -> ConfigurationError:
    return ConfigurationError(
        f"{key} is not held" if hold is None else f"{key} was released before",
        found=None if hold is None else hold.text,
        remedy="highwater status names the slices that are held",
    )
