"""Restoring: the plans of a stream that a rebuild found, into a ledger that does not have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from highwater.erasing import RecordedErasure
from highwater.errors import LeaseHeldError
from highwater.plans import Generation, Loss, PublicationRecord, ensure_recordable
from highwater.reclaims import Reclaim
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import Database
from highwater.resources.ledger.erasures import restore
from highwater.resources.ledger.reclaims import build_reclaim_row
from highwater.resources.ledger.rows import build_generation_row, build_loss_row, build_slice_row
from highwater.slices import Slice


def restore_plans(
    database: Database,
    generations: Sequence[Generation],
    slices: Sequence[Slice],
    attempts: Mapping[str, int],
    losses: Sequence[Loss],
    publications: Mapping[str, PublicationRecord],
    reclaims: Sequence[Reclaim] = (),
    erasures: Sequence[RecordedErasure] = (),
    retired: Mapping[str, datetime] | None = None,
) -> None:
    """Write the plans of a stream that the ledger does not hold, all or none.

    Args:
        database: the ledger's.
        generations: its topics' generations.
        slices: its slices.
        attempts: by slice the highest that was seen.
        losses: recorded ones.
        publications: by slice.
        reclaims: records reclaimed from the DLQ.
        erasures: with what they took from these slices.
        retired: slices whose keys are retired, and since when.

    Raises:
        LeaseHeldError: somebody planned the stream meanwhile; nothing was written.
        InconsistentRecordError: no topic can be like that.
    """
    ensure_recordable(generations, losses, None)
    streams = {slice_.key: slice_.stream for slice_ in slices}
    try:
        with database.writing() as connection:
            for table, rows in (
                (schema.topics, [build_generation_row(one) for one in generations]),
                (schema.slices, [{**build_slice_row(p), "attempt": attempts.get(p.key, 0)} for p in slices]),
                (schema.losses, [build_loss_row(loss) for loss in losses]),
                (
                    schema.publications,
                    [{"slice_key": k, "stream": streams[k], **vars(p)} for k, p in publications.items()],
                ),
                (schema.reclaims, [build_reclaim_row(slices[0].stream, 1, one) for one in reclaims]),
                (
                    schema.retired_keys,
                    [{"slice_key": k, "stream": streams[k], "retired_at": at} for k, at in (retired or {}).items()],
                ),
            ):
                if rows:
                    connection.execute(insert(table), rows)
            restore(connection, erasures)
    except IntegrityError:
        raise LeaseHeldError(
            "somebody planned the stream meanwhile; nothing was written",
            remedy="stop the planner's sensor, empty the ledger and try again",
        ) from None
