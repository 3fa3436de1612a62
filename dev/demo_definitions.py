"""What Dagster loads under `make demo`: see `demo_workspace.yaml`.

What belongs here: what the demonstration declares otherwise than the shipped streams. What does not: anything else of
them.
"""

import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import dagster as dg

from assets.streams import load_streams
from dev.demo import MOST_RECORDS, MOST_RECORDS_NAME
from orchestration import log_lines
from orchestration.build import build_defs

if TYPE_CHECKING:
    from highwater.declaration import Stream

# As long as a slice takes from the topic into raw, so that one waits there when the breaker asks for its probe; the
# five minutes that are declared are twice what the demonstration lasts.
COOL_DOWN = timedelta(seconds=20)


def declared(most_records: int) -> "list[Stream]":
    """The shipped streams, with a breaker that asks for its probe soon, and orders in slices of so many records."""
    streams = load_streams()
    orders = streams["orders"]
    fewest = min(orders.limits.fewest_records, most_records)
    streams["orders"] = replace(orders, limits=replace(orders.limits, most_records=most_records, fewest_records=fewest))
    return [replace(stream, breaker=replace(stream.breaker, cool_down=COOL_DOWN)) for stream in streams.values()]


@dg.definitions
def defs() -> dg.Definitions:
    """Everything, built when Dagster asks for it."""
    log_lines.install(os.environ)
    return build_defs(streams=declared(int(os.environ.get(MOST_RECORDS_NAME, MOST_RECORDS))), environment=os.environ)
