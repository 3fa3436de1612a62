"""The tables of a stream, by name."""

from __future__ import annotations

from highwater.declaration import Stream

# In these every row names its slice in a column.
BY_SLICE = ("raw", "events", "rejects", "dlq")
# Tables of most streams.
COMMON = (*BY_SLICE, "current")

# The comment of each table, in Dagster's pages and in a catalog.
COMMENTS = {
    "raw": "Every record of a slice as Kafka gave it: nothing parsed, nothing dropped.",
    "events": "The records that were parsed, validated and resolved.",
    "rejects": "The records that did not become events, each with its reason and its origin.",
    "dlq": "Which of the rejects were published, and where to: to a tier for a retry, or parked.",
    "current": "One row a key: the event with the highest version.",
    "metrics": "One row a minute of event time: events and amounts by status, and the mean amount over a moving hour.",
    "published": "Which events were sent to the topic of accepted events, each once and in the order of its origin.",
}


def select_stages(stream: Stream) -> tuple[str, ...]:
    """The tables that a run takes its slices through, upstream first."""
    always = COMMON if stream.versioned else BY_SLICE
    return (*always, "metrics") if stream.metrics else always


def select_tables(stream: Stream) -> tuple[str, ...]:
    """All tables of a stream, upstream first: `published` follows the prefix of slices that are done."""
    return (*select_stages(stream), "published") if stream.publishes else select_stages(stream)
