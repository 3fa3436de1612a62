"""Dagster definitions for `make demo`: the shipped streams, with breakers that cool down within its minutes."""

import os
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import dagster as dg

from dev import demo_burst, shipments
from dev.demo import MAX_RECORDS, MAX_RECORDS_NAME
from highwater import settings
from highwater.orchestration import log_lines
from highwater.orchestration.build import build_defs
from highwater.stream_files import load_streams

if TYPE_CHECKING:
    from highwater.declaration import Stream

# As long as a slice takes from the topic into raw, so that one waits there when the breaker asks for its probe; the
# five minutes that are declared are twice what the demonstration lasts.
COOL_DOWN = timedelta(seconds=20)
# Half of what is declared.
FIRST_TIER_WAITS = timedelta(seconds=5)
# A factor on the seconds between two ticks of the sensors that the demonstration waits for.
PACE = 0.25


def declared(max_offsets: int, *, registry: bool = False) -> "list[Stream]":
    """The shipped streams with shorter waits and other limits, and `shipments` where there is a schema registry.

    Slices of orders have `max_offsets`. Payments have one slice of the burst and one of the records after it.
    """
    streams = load_streams()
    orders, payments = streams["orders"], streams[demo_burst.STREAM]
    fewest = min(orders.limits.min_offsets, max_offsets)
    limits = replace(orders.limits, max_offsets=max_offsets, min_offsets=fewest)
    streams["orders"] = replace(orders, limits=limits, tiers=(FIRST_TIER_WAITS, *orders.tiers[1:]))
    limits = replace(payments.limits, min_offsets=demo_burst.RECORDS)
    streams[demo_burst.STREAM] = replace(payments, limits=limits)
    for name, stream in streams.items():
        streams[name] = replace(stream, breaker=replace(stream.breaker, cool_down=COOL_DOWN))
    if registry:
        # By its name: a person who tried `highwater infer` on the topic has another declaration of it.
        streams[shipments.STREAM.name] = shipments.STREAM
    return [*streams.values()]


@dg.definitions
def defs() -> dg.Definitions:
    """Everything, built when Dagster asks for it."""
    log_lines.install(os.environ)
    registry = bool(os.environ.get(settings.SCHEMA_REGISTRY_URL))
    streams = declared(int(os.environ.get(MAX_RECORDS_NAME, MAX_RECORDS)), registry=registry)
    return build_defs(streams=streams, environment=os.environ, pace=PACE)
