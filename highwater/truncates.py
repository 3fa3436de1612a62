"""Debezium's truncates: records that say that a table of the source was emptied, and name none of its rows."""

from __future__ import annotations

from highwater.declaration import Stream

# Debezium's operation for them.
TRUNCATE = "t"
_ROWS = frozenset({"before", "after"})


def find_operation_field(stream: Stream) -> str | None:
    """The field that is read from Debezium's `op`; None where the values are no such envelopes, or no field has it."""
    paths = [(f, one) for f in stream.fields if f.is_read for one in f.sources if isinstance(one, tuple)]
    envelopes = {path[:at] for _, path in paths for at, name in enumerate(path) if name in _ROWS}
    found = (f.name for f, path in paths if f.type == "string" and path[-1] == "op" and path[:-1] in envelopes)
    return next(found, None)


def name_truncate_check(field: str) -> str:
    """The rule in the rejects of truncates."""
    return f"{field}.truncate"


def describe_truncate(stream: Stream) -> str:
    """The detail in the rejects of truncates: what happened, and what a person does."""
    holds, remedy = "events still has its rows", ""
    if stream.versioned:
        holds = "current still has its keys"
        remedy = f"write a delete with this record's version for each of them to {stream.topic}, then "
    return (
        f"the table was truncated in the source (op {TRUNCATE}), and {holds}: {remedy}discard this record with "
        f"highwater discard-parked {stream.name}. With skipped.operations={TRUNCATE} the connector sends no truncates"
    )
