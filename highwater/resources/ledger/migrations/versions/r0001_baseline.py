"""The schema as it was before there were migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables that are missing: earlier databases have most of them, and no revision."""
    op.create_table(
        "acceptances",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("because", sa.Text(), nullable=False),
        sa.Column("accepted_by", sa.String(length=249), nullable=False),
        sa.Column("accepted_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_table(
        "accepted_reasons",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=False),
        sa.Column("from_slice", sa.String(length=300), nullable=False),
        sa.Column("from_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("because", sa.Text(), nullable=False),
        sa.Column("accepted_by", sa.String(length=249), nullable=False),
        sa.Column("accepted_at", sa.DateTime(), nullable=False),
        sa.Column("revoked_by", sa.String(length=249), nullable=True),
        sa.Column("revoked_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("stream", "reason"),
        if_not_exists=True,
    )
    op.create_table(
        "alerts",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("what", sa.String(length=100), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("threshold", sa.Text(), nullable=False),
        sa.Column("remedy", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(), nullable=False),
        sa.Column("reported", sa.Boolean(), nullable=False),
        sa.Column("ended", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("stream", "what"),
        if_not_exists=True,
    )
    op.create_table(
        "breakers",
        sa.Column("name", sa.String(length=300), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        if_not_exists=True,
    )
    op.create_table(
        "operator_actions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("asked", sa.JSON(), nullable=False),
        sa.Column("decided_by", sa.String(length=249), nullable=False),
        sa.Column("because", sa.Text(), nullable=False),
        sa.Column("through", sa.String(length=249), nullable=False),
        sa.Column("decided_at", sa.DateTime(), nullable=False),
        sa.Column("outcome", sa.String(length=100), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )
    op.create_index("ix_operator_actions_stream", "operator_actions", ["stream"], unique=False, if_not_exists=True)
    op.create_table(
        "discards",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("origin_topic", sa.String(length=249), nullable=False),
        sa.Column("origin_generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("origin_partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("origin_offset", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("discarded_by", sa.String(length=249), nullable=False),
        sa.Column("discarded_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "origin_topic", "origin_generation", "origin_partition", "origin_offset"),
        if_not_exists=True,
    )
    op.create_table(
        "erased_slices",
        sa.Column("erasure", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False),
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("places", sa.JSON(), nullable=False),
        sa.Column("rows", sa.JSON(), nullable=False),
        sa.Column("done_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("erasure", "slice_key"),
        if_not_exists=True,
    )
    op.create_index("erased_slices_by_slice", "erased_slices", ["slice_key"], unique=False, if_not_exists=True)
    op.create_table(
        "erasures",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("erased_by", sa.String(length=249), nullable=False),
        sa.Column("erased_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )
    op.create_index("erasures_of_stream", "erasures", ["stream", "digest"], unique=False, if_not_exists=True)
    op.create_table(
        "gaps",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("topic_id", sa.String(length=40), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("aborted", sa.BigInteger(), nullable=False),
        sa.Column("markers", sa.BigInteger(), nullable=False),
        sa.Column("markers_or_compacted", sa.BigInteger(), nullable=False),
        sa.Column("lost", sa.BigInteger(), nullable=False),
        sa.Column("unseen", sa.BigInteger(), nullable=False),
        sa.Column("cleanup_policy", sa.String(length=100), nullable=True),
        sa.Column("looked_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_index("gaps_of_topic", "gaps", ["topic_id", "cleanup_policy"], unique=False, if_not_exists=True)
    op.create_table(
        "exhausted_slices",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("since", sa.DateTime(), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("released_at", sa.DateTime(), nullable=True),
        sa.Column("released_by", sa.String(length=249), nullable=True),
        sa.Column("because", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_index(
        "exhausted_slices_open", "exhausted_slices", ["stream", "released_at"], unique=False, if_not_exists=True
    )
    op.create_table(
        "holds",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("since", sa.DateTime(), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("origin_topic", sa.String(length=300), nullable=False),
        sa.Column("origin_generation", sa.Integer(), nullable=False),
        sa.Column("origin_partition", sa.Integer(), nullable=False),
        sa.Column("origin_offset", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("tried_at", sa.DateTime(), nullable=False),
        sa.Column("released_at", sa.DateTime(), nullable=True),
        sa.Column("released_by", sa.String(length=249), nullable=True),
        sa.Column("because", sa.Text(), nullable=True),
        sa.Column("park", sa.Boolean(), nullable=True),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_index("holds_open", "holds", ["stream", "released_at"], unique=False, if_not_exists=True)
    op.create_table(
        "stalled_slices",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("since", sa.DateTime(), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_index(op.f("ix_stalled_slices_stream"), "stalled_slices", ["stream"], unique=False, if_not_exists=True)
    op.create_table(
        "instances",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("instance_id", sa.String(length=100), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("first_seen", sa.DateTime(), nullable=False),
        sa.Column("last_seen", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "instance_id"),
        if_not_exists=True,
    )
    op.create_table(
        "intents",
        sa.Column("batch", sa.String(length=64), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("table_name", sa.String(length=40), nullable=False),
        sa.Column("user_metadata", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("batch"),
        if_not_exists=True,
    )
    op.create_index("intents_of_table", "intents", ["stream", "table_name"], unique=False, if_not_exists=True)
    op.create_table(
        "judged_reasons",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=False),
        sa.Column("rejects", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key", "reason"),
        if_not_exists=True,
    )
    op.create_table(
        "judgements",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("rejects", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("refused", sa.Boolean(), nullable=False),
        sa.Column("judged_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_index("judgements_refused", "judgements", ["stream", "refused"], unique=False, if_not_exists=True)
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=300), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=False),
        sa.Column("until", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        if_not_exists=True,
    )
    op.create_table(
        "ledger_revisions",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("additive", sa.Boolean(), nullable=False),
        sa.Column("applied_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        if_not_exists=True,
    )
    op.create_table(
        "losses",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("topic", sa.String(length=249), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("accepted_by", sa.String(length=249), nullable=False),
        sa.Column("recorded_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("stream", "topic", "generation", "partition", "start", "end"),
        if_not_exists=True,
    )
    op.create_table(
        "paused_topics",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("topic", sa.String(length=249), nullable=False),
        sa.Column("paused_at", sa.DateTime(), nullable=False),
        sa.Column("paused_by", sa.String(length=249), nullable=False),
        sa.Column("because", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "topic"),
        if_not_exists=True,
    )
    op.create_table(
        "publications",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("sent", sa.BigInteger(), nullable=False),
        sa.Column("published_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_table(
        "reclaims",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("origin_topic", sa.String(length=249), nullable=False),
        sa.Column("origin_generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("origin_partition", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("origin_offset", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("act", sa.BigInteger(), nullable=False),
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reclaimed_by", sa.String(length=249), nullable=False),
        sa.Column("reclaimed_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint(
            "stream", "origin_topic", "origin_generation", "origin_partition", "origin_offset", "number"
        ),
        if_not_exists=True,
    )
    op.create_index("reclaims_by_act", "reclaims", ["stream", "act"], unique=False, if_not_exists=True)
    op.create_index("reclaims_of_slice", "reclaims", ["stream", "slice_key"], unique=False, if_not_exists=True)
    op.create_table(
        "retired_keys",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("retired_at", sa.DateTime(), nullable=False),
        sa.Column("recalled_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("slice_key"),
        if_not_exists=True,
    )
    op.create_index(
        "retired_keys_of_stream", "retired_keys", ["stream", "recalled_at"], unique=False, if_not_exists=True
    )
    op.create_table(
        "sensor_faults",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("sensor", sa.String(length=40), nullable=False),
        sa.Column("since", sa.DateTime(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("remedy", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "sensor"),
        if_not_exists=True,
    )
    op.create_table(
        "slices",
        sa.Column("slice_key", sa.String(length=300), nullable=False),
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("topic", sa.String(length=249), nullable=False),
        sa.Column("topic_id", sa.String(length=40), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.BigInteger(), nullable=False),
        sa.Column("ranges", sa.JSON(), nullable=False),
        sa.Column("planned_at", sa.DateTime(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lag", sa.BigInteger(), nullable=True),
        sa.Column("extra", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("slice_key"),
        sa.UniqueConstraint("topic", "topic_id", "ordinal"),
        if_not_exists=True,
    )
    op.create_index(
        "slices_in_order", "slices", ["stream", "planned_at", "topic", "ordinal"], unique=False, if_not_exists=True
    )
    op.create_index("slices_of_topic", "slices", ["stream", "topic", "ordinal"], unique=True, if_not_exists=True)
    op.create_table(
        "topics",
        sa.Column("stream", sa.String(length=249), nullable=False),
        sa.Column("topic", sa.String(length=249), nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("topic_id", sa.String(length=40), nullable=False),
        sa.Column("starts", sa.JSON(), nullable=False),
        sa.Column("opened_at", sa.DateTime(), nullable=False),
        sa.Column("opened_by", sa.String(length=249), nullable=False),
        sa.Column("first_ordinal", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream", "topic", "generation"),
        if_not_exists=True,
    )
    op.create_table(
        "watched",
        sa.Column("name", sa.String(length=249), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        if_not_exists=True,
    )
    op.drop_table("ledger_version", if_exists=True)
