"""The ledger's tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A moment in UTC. SQLite forgets the zone, so it is stored without and returned with it."""

    impl = sa.DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.replace(tzinfo=UTC)


metadata = sa.MetaData()

# The revisions of the schema that were applied, for processes that run other code than the one that applied them.
revisions = sa.Table(
    "ledger_revisions",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("additive", sa.Boolean, nullable=False),
    sa.Column("applied_at", UtcDateTime, nullable=False),
)

slices = sa.Table(
    "slices",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("topic", sa.String(249), nullable=False),
    sa.Column("topic_id", sa.String(40), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("ordinal", sa.BigInteger, nullable=False),
    sa.Column("ranges", sa.JSON, nullable=False),
    sa.Column("planned_at", UtcDateTime, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, default=0),
    sa.Column("lag", sa.BigInteger),
    sa.Column("extra", sa.JSON, nullable=False),
    sa.UniqueConstraint("topic", "topic_id", "ordinal"),
    # The newest slice of a topic, and pages of slices in the order of their plan, are found without a scan.
    sa.Index("slices_of_topic", "stream", "topic", "ordinal", unique=True),
    sa.Index("slices_in_order", "stream", "planned_at", "topic", "ordinal"),
)

topics = sa.Table(
    "topics",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("topic", sa.String(249), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("topic_id", sa.String(40), nullable=False),
    sa.Column("starts", sa.JSON, nullable=False),
    sa.Column("opened_at", UtcDateTime, nullable=False),
    sa.Column("opened_by", sa.String(249), nullable=False),
    sa.Column("first_ordinal", sa.BigInteger, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
)

losses = sa.Table(
    "losses",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("topic", sa.String(249), nullable=False),
    sa.Column("generation", sa.Integer, nullable=False),
    sa.Column("partition", sa.Integer, nullable=False),
    sa.Column("start", sa.BigInteger, nullable=False),
    sa.Column("end", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("accepted_by", sa.String(249), nullable=False),
    sa.Column("recorded_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("stream", "topic", "generation", "partition", "start", "end"),
)


def _build_slice_columns() -> list[sa.Column[Any]]:
    """The columns of a table with one row for each slice."""
    return [
        sa.Column("slice_key", sa.String(300), primary_key=True),
        sa.Column("stream", sa.String(249), nullable=False),
    ]


publications = sa.Table(
    "publications",
    metadata,
    *_build_slice_columns(),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("sent", sa.BigInteger, nullable=False),
    sa.Column("published_at", UtcDateTime, nullable=False),
)


def _build_origin_columns() -> list[sa.Column[Any]]:
    """The columns by which a row is of one origin; of a table with nothing more, its key."""
    return [
        sa.Column("stream", sa.String(249), primary_key=True),
        sa.Column("origin_topic", sa.String(249), primary_key=True),
        sa.Column("origin_generation", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("origin_partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("origin_offset", sa.BigInteger, primary_key=True, autoincrement=False),
    ]


discards = sa.Table(
    "discards",
    metadata,
    *_build_origin_columns(),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("discarded_by", sa.String(249), nullable=False),
    sa.Column("discarded_at", UtcDateTime, nullable=False),
)

gaps = sa.Table(
    "gaps",
    metadata,
    *_build_slice_columns(),
    sa.Column("topic_id", sa.String(40), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("aborted", sa.BigInteger, nullable=False),
    sa.Column("markers", sa.BigInteger, nullable=False),
    sa.Column("markers_or_compacted", sa.BigInteger, nullable=False),
    sa.Column("lost", sa.BigInteger, nullable=False),
    sa.Column("unseen", sa.BigInteger, nullable=False),
    sa.Column("cleanup_policy", sa.String(100)),
    sa.Column("looked_at", UtcDateTime, nullable=False),
    sa.Index("gaps_of_topic", "topic_id", "cleanup_policy"),
)

alerts = sa.Table(
    "alerts",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("what", sa.String(100), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("threshold", sa.Text, nullable=False),
    sa.Column("remedy", sa.Text, nullable=False),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Column("reported", sa.Boolean, nullable=False),
    sa.Column("ended", UtcDateTime),
)

# Subjects of alerts, and the time of the last tick that measured each.
watched = sa.Table(
    "watched",
    metadata,
    sa.Column("name", sa.String(249), primary_key=True),
    sa.Column("at", UtcDateTime, nullable=False),
)

breakers = sa.Table(
    "breakers",
    metadata,
    sa.Column("name", sa.String(300), primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("value", sa.JSON, nullable=False),
)

judgements = sa.Table(
    "judgements",
    metadata,
    *_build_slice_columns(),
    sa.Column("run", sa.String(64), nullable=False),
    sa.Column("records", sa.BigInteger, nullable=False),
    sa.Column("rejects", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.Boolean, nullable=False),
    sa.Column("refused", sa.Boolean, nullable=False),
    sa.Column("judged_at", UtcDateTime, nullable=False),
    sa.Index("judgements_refused", "stream", "refused"),
)

acceptances = sa.Table(
    "acceptances",
    metadata,
    *_build_slice_columns(),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("accepted_by", sa.String(249), nullable=False),
    sa.Column("accepted_at", UtcDateTime, nullable=False),
)

# A person's decision that a reason for rejects opens the breaker no more, in the slices of the main topic from one on.
accepted_reasons = sa.Table(
    "accepted_reasons",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("reason", sa.String(40), primary_key=True),
    sa.Column("from_slice", sa.String(300), nullable=False),
    sa.Column("from_ordinal", sa.BigInteger, nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("accepted_by", sa.String(249), nullable=False),
    sa.Column("accepted_at", UtcDateTime, nullable=False),
    sa.Column("revoked_by", sa.String(249)),
    sa.Column("revoked_at", UtcDateTime),
)

# How many records of a judged slice were rejected for each reason that is not accepted.
judged_reasons = sa.Table(
    "judged_reasons",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("reason", sa.String(40), primary_key=True),
    sa.Column("rejects", sa.BigInteger, nullable=False),
)

# Dagster instances whose sensors ticked for a stream.
instances = sa.Table(
    "instances",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("instance_id", sa.String(100), primary_key=True),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("first_seen", UtcDateTime, nullable=False),
    sa.Column("last_seen", UtcDateTime, nullable=False),
)

holds = sa.Table(
    "holds",
    metadata,
    *_build_slice_columns(),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Column("reason", sa.String(40), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("records", sa.BigInteger, nullable=False),
    sa.Column("origin_topic", sa.String(300), nullable=False),
    sa.Column("origin_generation", sa.Integer, nullable=False),
    sa.Column("origin_partition", sa.Integer, nullable=False),
    sa.Column("origin_offset", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("tried_at", UtcDateTime, nullable=False),
    sa.Column("released_at", UtcDateTime),
    sa.Column("released_by", sa.String(249)),
    sa.Column("because", sa.Text),
    sa.Column("park", sa.Boolean),
    sa.Index("holds_open", "stream", "released_at"),
)

exhausted_slices = sa.Table(
    "exhausted_slices",
    metadata,
    *_build_slice_columns(),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Column("runs", sa.Integer, nullable=False),
    sa.Column("released_at", UtcDateTime),
    sa.Column("released_by", sa.String(249)),
    sa.Column("because", sa.Text),
    sa.Index("exhausted_slices_open", "stream", "released_at"),
)

stalled_slices = sa.Table(
    "stalled_slices",
    metadata,
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False, index=True),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Column("runs", sa.Integer, nullable=False),
)

paused_topics = sa.Table(
    "paused_topics",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("topic", sa.String(249), primary_key=True),
    sa.Column("paused_at", UtcDateTime, nullable=False),
    sa.Column("paused_by", sa.String(249), nullable=False),
    sa.Column("because", sa.Text, nullable=False),
)

# Streams that a sensor skips, and why, until a person acts.
sensor_faults = sa.Table(
    "sensor_faults",
    metadata,
    sa.Column("stream", sa.String(249), primary_key=True),
    sa.Column("sensor", sa.String(40), primary_key=True),
    sa.Column("since", UtcDateTime, nullable=False),
    sa.Column("problem", sa.Text, nullable=False),
    sa.Column("remedy", sa.Text, nullable=False),
)

# Actions of operators: who decided them, when and why. The arguments hold no keys of records.
operator_actions = sa.Table(
    "operator_actions",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False, index=True),
    sa.Column("action", sa.String(40), nullable=False),
    sa.Column("asked", sa.JSON, nullable=False),
    sa.Column("decided_by", sa.String(249), nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("through", sa.String(249), nullable=False),
    sa.Column("decided_at", UtcDateTime, nullable=False),
    sa.Column("outcome", sa.String(100)),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String(300), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("until", sa.Float(53), nullable=False),
)

# An origin has a row for each time that it was reclaimed: the next one only after it was published again.
reclaims = sa.Table(
    "reclaims",
    metadata,
    *_build_origin_columns(),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("act", sa.BigInteger, nullable=False),
    sa.Column("slice_key", sa.String(300), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("reclaimed_by", sa.String(249), nullable=False),
    sa.Column("reclaimed_at", UtcDateTime, nullable=False),
    sa.Index("reclaims_of_slice", "stream", "slice_key"),
    sa.Index("reclaims_by_act", "stream", "act"),
)

retired_keys = sa.Table(
    "retired_keys",
    metadata,
    *_build_slice_columns(),
    sa.Column("retired_at", UtcDateTime, nullable=False),
    # A key that was brought back is live, and its row says since when.
    sa.Column("recalled_at", UtcDateTime),
    sa.Index("retired_keys_of_stream", "stream", "recalled_at"),
)

intents = sa.Table(
    "intents",
    metadata,
    sa.Column("batch", sa.String(64), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("table_name", sa.String(40), nullable=False),
    sa.Column("user_metadata", sa.Text, nullable=False),
    sa.Column("opened_at", UtcDateTime, nullable=False),
    sa.Index("intents_of_table", "stream", "table_name"),
)

erasures = sa.Table(
    "erasures",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("stream", sa.String(249), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("erased_by", sa.String(249), nullable=False),
    sa.Column("erased_at", UtcDateTime, nullable=False),
    sa.Index("erasures_of_stream", "stream", "digest"),
)

erased_slices = sa.Table(
    "erased_slices",
    metadata,
    sa.Column("erasure", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
    sa.Column("slice_key", sa.String(300), primary_key=True),
    sa.Column("places", sa.JSON, nullable=False),
    sa.Column("rows", sa.JSON, nullable=False),
    sa.Column("done_at", UtcDateTime),
    sa.Index("erased_slices_by_slice", "slice_key"),
)
