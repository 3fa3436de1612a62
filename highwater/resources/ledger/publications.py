"""Publications: how many rejects of each slice, and accepted events of each topic, are committed in Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, insert, literal, select, tuple_, update

from highwater.plans import PublicationRecord
from highwater.resources.ledger import schema
from highwater.resources.ledger.database import LedgerPart
from highwater.resources.ledger.engine import read_slice_rows


class Publications(LedgerPart):
    """The publications of a ledger."""

    def read_for_slices(self, keys: Sequence[str]) -> dict[str, PublicationRecord]:
        """The publications of these slices' rejects; slices without any are left out."""
        with self._database.reading() as connection:
            rows = read_slice_rows(connection, schema.publications, keys)
            return {row.slice_key: PublicationRecord(row.attempt, row.sent, row.published_at) for row in rows}

    def has_published_rejects(self, stream: str) -> bool:
        """Whether any reject of a stream was ever published."""
        table = schema.publications
        # Marks for the topic of accepted events have that topic's name, which has no @.
        of_slice = table.c.slice_key.contains("@", autoescape=True)
        query = select(table.c.slice_key).where(table.c.stream == stream, of_slice, table.c.sent > 0).limit(1)
        with self._database.reading() as connection:
            return connection.execute(query).first() is not None

    def record(self, stream: str, key: str, publication: PublicationRecord) -> None:
        """Record the committed offset of a slice's rejects; an older or lower one never replaces it."""
        table = schema.publications
        values = {"stream": stream, **vars(publication)}
        less = tuple_(table.c.attempt, table.c.sent) <= tuple_(literal(publication.attempt), literal(publication.sent))
        older = and_(table.c.slice_key == key, less)

        def write(connection: Connection) -> None:
            if connection.execute(update(table).where(older).values(values)).rowcount:
                return
            if connection.execute(select(table.c.attempt).where(table.c.slice_key == key)).first() is None:
                connection.execute(insert(table).values(slice_key=key, **values))

        self._database.write_again(write)
