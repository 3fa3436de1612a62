"""The tables of a stream, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from highwater.declaration import Stream

# In these every row names its slice in a column.
BY_SLICE = ("raw", "events", "rejects", "dlq")
# What most streams have.
COMMON = (*BY_SLICE, "current")


def stages_of(stream: Stream) -> tuple[str, ...]:
    """The tables that a run takes its slices through, upstream first."""
    always = COMMON if stream.versioned else BY_SLICE
    return (*always, "metrics") if stream.metrics else always


def tables_of(stream: Stream) -> tuple[str, ...]:
    """All tables of a stream, upstream first: `published` follows the prefix of slices that are done."""
    return (*stages_of(stream), "published") if stream.publishes else stages_of(stream)
