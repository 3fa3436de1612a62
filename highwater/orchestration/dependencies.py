"""The circuit breakers that a step or tick passes, of Kafka, lake and reference table; whether the lake is there."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from highwater.errors import KAFKA, LAKE, BreakerOpenError, DependencyUnavailableError
from highwater.resources.dependency_guards import Guard, build_open_error, is_cooling_down

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger


def build_kafka_guard(ledger: Ledger, kafka: Kafka) -> Guard:
    """The breaker of the brokers."""
    return Guard(ledger.breakers, KAFKA, kafka.list_topic_names)


def build_lake_guard(ledger: Ledger, lake: Lake, stream: Stream) -> Guard:
    """The breaker of the lake's storage."""

    def probe() -> None:
        ensure_lake_exists(ledger, lake)
        lake.ensure_answering(stream.name)

    return Guard(ledger.breakers, LAKE, probe)


def list_lookup_guards(ledger: Ledger, lake: Lake, stream: Stream) -> list[Guard]:
    """The breaker of the reference table, if the stream has one."""
    from highwater.assets.lookups import ensure_lookup

    lookup = stream.lookup
    return [] if lookup is None else [Guard(ledger.breakers, lookup.dependency, lambda: ensure_lookup(lake, lookup))]


def build_step_guards(table: str, ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream) -> list[Guard]:
    """The breakers of the services that the step of a table uses."""
    lookups = list_lookup_guards(ledger, lake, stream) if table in {"events", "rejects"} else []
    brokers = [build_kafka_guard(ledger, kafka)] if table in {"raw", "dlq", "published"} else []
    return [build_lake_guard(ledger, lake, stream), *lookups, *brokers]


def ensure_kafka_awake(ledger: Ledger, now: datetime) -> None:
    """Ensure that runs which read from Kafka are worth a request.

    Raises:
        BreakerOpenError: Kafka's breaker is open.
    """
    row = ledger.breakers.read_dependency(KAFKA)
    if is_cooling_down(row, now):
        raise build_open_error(row)


def is_lookup_blocked(ledger: Ledger, stream: Stream, now: datetime) -> bool:
    """Whether the breaker of the stream's reference table is open, so that nothing can be decided."""
    return stream.lookup is not None and is_cooling_down(ledger.breakers.read_dependency(stream.lookup.dependency), now)


def is_lookup_unavailable(ledger: Ledger, lake: Lake, stream: Stream) -> bool:
    """Whether the reference table is unavailable now. If its breaker is due for a probe, this is the probe.

    So the return of the table is noticed without a failing slice.
    """
    for guard in list_lookup_guards(ledger, lake, stream):
        try:
            guard.enter()
        except BreakerOpenError:
            return True
        except DependencyUnavailableError as error:
            if error.of != guard.name:
                raise
            return True
    return False


def read_recovery_time(ledger: Ledger, stream: Stream) -> datetime | None:
    """When the breaker of a dependency of the stream last closed; None if none ever opened."""
    names = {KAFKA, LAKE, *([stream.lookup.dependency] if stream.lookup else [])}
    times = [one.closed for one in ledger.breakers.list_dependencies() if one.name in names and one.closed is not None]
    return max(times, default=None)


def ensure_lake_exists(ledger: Ledger, lake: Lake) -> None:
    """Ensure that the lake's folder is there, if anything was ever committed to it: a mount may be gone.

    Without this a lake that was moved away would count as an empty one (I15), and a new one would start in its place.
    Object stores report that by themselves.

    Raises:
        DependencyUnavailableError: it is not.
    """
    if not lake.is_root_missing() or not ledger.has_attempts():
        return
    raise DependencyUnavailableError(
        f"the lake's folder {lake.root} is not there",
        stored="slices were committed to it",
        remedy="mount or restore it; if it is gone for good, make an empty folder there, and its slices are read again "
        "as far as Kafka holds them",
        of=LAKE,
    )
