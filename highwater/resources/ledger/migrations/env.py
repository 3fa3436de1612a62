"""Alembic's environment: runs migrations on the connection that `creation.upgrade` passes on."""

from __future__ import annotations

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo

from highwater.resources.ledger import revisions, schema
from highwater.resources.ledger.creation import VERSION_TABLE, record


def _record(ctx: MigrationContext, step: MigrationInfo, heads: object, run_args: object) -> None:
    del heads, run_args
    assert ctx.connection is not None
    record(ctx.connection, tuple(one for one in revisions.REVISIONS if one.number == int(str(step.up_revision_id))))


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite changes a column by copying its table
    on_version_apply=_record,
)
with context.begin_transaction():
    context.run_migrations()
