"""The revisions of the ledger's schema, and which of them this code can use."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from highwater.errors import ConfigurationError
from highwater.resources.ledger import schema


class Revision(NamedTuple):
    """One migration in the folder `migrations`.

    Args:
        number: 1 or more, without gaps.
        additive: code of the revision before may go on writing: new tables, new indexes, new columns with a default.
    """

    number: int
    additive: bool


_NUMBER, _ADDITIVE = schema.revisions.c.number, schema.revisions.c.additive
_STORED = sa.select(
    sa.func.coalesce(sa.func.max(_NUMBER), 0),
    sa.func.coalesce(sa.func.max(sa.case((_ADDITIVE.is_(False), _NUMBER))), 0),
)
# In order. Each has a file in `migrations/versions`.
REVISIONS = (Revision(1, additive=True),)


class StoredRevision(NamedTuple):
    """The revision of a database.

    Args:
        head: the newest that was applied; 0 for tables from before there were revisions.
        breaking: the newest that is not additive; 0 without one.
    """

    head: int
    breaking: int


def get_code_revision() -> int:
    """The revision that this code was written for."""
    return REVISIONS[-1].number


def select_missing_revisions(found: StoredRevision) -> list[Revision]:
    """The revisions that a database lacks."""
    return [revision for revision in REVISIONS if revision.number > found.head]


def read_stored_revision(connection: Connection) -> StoredRevision:
    """The revision of a database whose revisions are recorded."""
    return StoredRevision(*connection.execute(_STORED).one())


def ensure_usable(found: StoredRevision, where: str) -> None:
    """Ensure that this code may write into a schema.

    Args:
        found: the database's revision.
        where: the database, without anything secret.

    Raises:
        ConfigurationError: the schema is older than this code, or newer in a way that this code does not know.
    """
    if found.head < get_code_revision():
        raise ConfigurationError(
            f"the schema of the ledger {where} is older than this Highwater",
            stored=f"schema revision {found.head}",
            found=f"this Highwater needs schema revision {get_code_revision()}; nothing was written",
            remedy="run highwater ledger upgrade, after a backup",
        )
    if found.breaking > get_code_revision():
        raise ConfigurationError(
            f"the schema of the ledger {where} was changed by a newer Highwater",
            stored=f"schema revision {found.head}; writers must know revision {found.breaking}",
            found=f"this Highwater knows schema revision {get_code_revision()}; nothing was written",
            remedy="install the newer Highwater, and restart this process",
        )
