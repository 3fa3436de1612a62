"""The inputs of a stage, and its report."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from highwater.assets.classified import SharedFrames
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.schemas import Schema
    from highwater.slices import Slice


def do_nothing() -> None:
    """Do nothing."""


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Keep the collector of cycles from walking records on their way, whose hundred thousands of tuples hold none.

    It was seen to take nearly half of the processor's time. Unused objects are freed all the same.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class Work:
    """Slices of one stream, and the connections with which a stage materialises them.

    The slices are taken together: one read, one commit. `log` gets progress as plain sentences. `before_commit` raises
    when what the commit rests on holds no more, such as a lease. `run` is the run's id, empty outside of Dagster.
    `classified` is what the stages of a run share; without it each classifies records by itself. `schemas` finds the
    schemas of the configured registry, by number or GUID; None where none is configured. `open_own_session` opens a
    session for what sets its session up, where another stage uses `spark` at the same time.
    """

    stream: Stream
    slices: Sequence[Slice]
    spark: SparkSession
    lake: Lake
    ledger: Ledger
    kafka: Kafka
    log: Callable[[str], None]
    before_commit: Callable[[], None] = do_nothing
    run: str = ""
    classified: SharedFrames | None = None
    schemas: Callable[[int | str], Schema | None] | None = None
    open_own_session: Callable[[], SparkSession] | None = None

    @property
    def keys(self) -> list[str]:
        """The keys of the slices, in their order."""
        return [slice_.key for slice_ in self.slices]


@dataclass(frozen=True)
class SliceReport:
    """The result of a stage for one slice.

    Args:
        slice_: the slice.
        attempt: the attempt whose commit is in the table now.
        rows: rows of the slice in the stage's table.
        counts: further numbers by name, for example rejects by reason.
        delta_version: version of the table after the commit; without a commit the version that holds the slice; -1
            without a table.
        seconds: seconds by phase; of the whole run where slices are taken together.
        note: a sentence for the operator, when something out of the ordinary was done.
        samples: rows of the table for a person to see, for example its newest.
        plot: a drawing of them, in Markdown.
        measures: further numbers that are no counts; each plots from slice to slice.
    """

    slice_: Slice
    attempt: int
    rows: int
    delta_version: int
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None
    samples: Sequence[Mapping[str, Any]] = ()
    plot: str | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
