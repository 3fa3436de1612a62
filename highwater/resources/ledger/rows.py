"""Conversions between the ledger's rows and slices, generations, losses, discards and gaps."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from highwater.divergence import decode_epochs, decode_fingerprints, encode_epochs, encode_fingerprints
from highwater.envelope import Origin
from highwater.gaps import Gaps
from highwater.plans import Discard, Generation, Loss, decode_starts
from highwater.slices import OffsetRange, Slice, decode_ranges, encode_ranges

if TYPE_CHECKING:
    from sqlalchemy import Row


def build_slice_row(slice_: Slice) -> dict[str, Any]:
    """The row of the table `slices` for a slice."""
    return {
        "slice_key": slice_.key,
        "stream": slice_.stream,
        "topic": slice_.topic,
        "topic_id": slice_.topic_id,
        "generation": slice_.generation,
        "ordinal": slice_.ordinal,
        "ranges": encode_ranges(slice_.ranges),
        "planned_at": slice_.planned_at,
        "lag": slice_.lag,
        "extra": {
            "epochs": encode_epochs(slice_.epochs),
            "fingerprints": encode_fingerprints(slice_.fingerprints),
        },
    }


def build_slice(row: Row[Any]) -> Slice:
    """The slice of a row of the table `slices`."""
    return Slice(
        stream=row.stream,
        topic=row.topic,
        topic_id=row.topic_id,
        generation=row.generation,
        ordinal=row.ordinal,
        ranges=decode_ranges(row.ranges),
        planned_at=row.planned_at,
        lag=row.lag,
        epochs=decode_epochs(row.extra.get("epochs", {})),
        fingerprints=decode_fingerprints(row.extra.get("fingerprints", {})),
    )


def encode_starts(starts: dict[int, int | None]) -> dict[str, int | None]:
    """The first offsets by partition, as JSON has them."""
    return {str(partition): starts[partition] for partition in sorted(starts)}


def build_generation_row(generation: Generation) -> dict[str, Any]:
    """The row of the table `topics` for a generation."""
    return {
        "stream": generation.stream,
        "topic": generation.topic,
        "topic_id": generation.topic_id,
        "generation": generation.number,
        "starts": encode_starts(dict(generation.starts)),
        "opened_at": generation.opened_at,
        "opened_by": generation.opened_by,
        "first_ordinal": generation.first_ordinal,
        "revision": generation.revision,
    }


def build_generation(row: Row[Any]) -> Generation:
    """The generation of a row of the table `topics`."""
    return Generation(
        stream=row.stream,
        topic=row.topic,
        topic_id=row.topic_id,
        number=row.generation,
        starts=decode_starts(row.starts),
        opened_at=row.opened_at,
        opened_by=row.opened_by,
        first_ordinal=row.first_ordinal,
        revision=row.revision,
    )


def build_loss_row(loss: Loss) -> dict[str, Any]:
    """The row of the table `losses` for a loss."""
    return {
        "stream": loss.stream,
        "topic": loss.topic,
        "generation": loss.generation,
        "partition": loss.partition,
        "start": loss.offsets.start,
        "end": loss.offsets.end,
        "reason": loss.reason,
        "accepted_by": loss.accepted_by,
        "recorded_at": loss.recorded_at,
    }


def build_loss(row: Row[Any]) -> Loss:
    """The loss of a row of the table `losses`."""
    return Loss(
        stream=row.stream,
        topic=row.topic,
        generation=row.generation,
        partition=row.partition,
        offsets=OffsetRange(row.start, row.end),
        reason=row.reason,
        accepted_by=row.accepted_by,
        recorded_at=row.recorded_at,
    )


def build_discard_row(stream: str, discard: Discard) -> dict[str, Any]:
    """The row of the table `discards` for a discarded record of a stream."""
    return {
        "stream": stream,
        **{f"origin_{name}": value for name, value in discard.origin._asdict().items()},
        "reason": discard.reason,
        "discarded_by": discard.discarded_by,
        "discarded_at": discard.discarded_at,
    }


def build_discard(row: Row[Any]) -> Discard:
    """The discarded record of a row of the table `discards`."""
    origin = Origin(row.origin_topic, row.origin_generation, row.origin_partition, row.origin_offset)
    return Discard(origin, row.reason, row.discarded_by, row.discarded_at)


def build_gaps_row(slice_: Slice, gaps: Gaps) -> dict[str, Any]:
    """The row of the table `gaps` for the gaps of a slice."""
    return {"slice_key": slice_.key, "stream": slice_.stream, "topic_id": slice_.topic_id, **vars(gaps)}


def build_gaps(row: Row[Any]) -> Gaps:
    """The gaps of a row of the table `gaps`."""
    return Gaps(**{field.name: getattr(row, field.name) for field in fields(Gaps)})
