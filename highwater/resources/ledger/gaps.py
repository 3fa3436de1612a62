"""Gaps: why offsets of a slice have no record, as it was seen at the first look."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from highwater.gaps import Gaps
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.rows import build_gaps, build_gaps_row
from highwater.slices import Slice


class RecordedGaps(LedgerPart):
    """The explained gaps of a ledger."""

    def read_for_slices(self, keys: Sequence[str]) -> dict[str, Gaps]:
        """The explanation of the gaps of these slices at the first look; slices never looked at are absent."""
        return {row.slice_key: build_gaps(row) for row in self._database.read_slices(schema.gaps, keys)}

    def record(self, slice_: Slice, gaps: Gaps) -> bool:
        """Record the explanation of a slice's gaps; False if one is recorded already: evidence vanishes."""
        try:
            with self._database.writing() as connection:
                connection.execute(insert(schema.gaps).values(build_gaps_row(slice_, gaps)))
                return True
        except IntegrityError:
            return False

    def list_cleanup_policies(self, topic_id: str) -> set[str | None]:
        """The values of `cleanup.policy` that the topic was seen with when gaps of its slices were looked at."""
        table = schema.gaps
        query = select(table.c.cleanup_policy).where(table.c.topic_id == topic_id).distinct()
        with self._database.reading() as connection:
            return set(connection.execute(query).scalars())
