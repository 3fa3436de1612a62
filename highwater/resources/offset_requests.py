"""Requests for the offsets of partitions, and the meaning of their answers and errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from highwater.resources.time_limits import limit_wait

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

# Before the time-out begins, the client asks a broker for the leaders, and waits 3 s for one that hangs.
LEADERS_SECONDS = 3.0
# `list_offsets` answers so where no record is as young as a timestamp.
NO_SUCH_RECORD = -1


class OffsetQuery(Enum):
    """A question to `list_offsets`, beside that for a timestamp."""

    EARLIEST = "log start offset"
    STABLE = "last stable offset"
    HIGH = "high watermark"


def request_offsets(
    admin: AdminClient, partitions: Sequence[TopicPartition], query: OffsetQuery | int, seconds: float
) -> dict[Any, Any]:
    """Ask for one offset of each partition: a named one, or the first at or after a timestamp in milliseconds.

    Raises:
        KafkaException: the client refused the request.
    """
    from confluent_kafka import IsolationLevel
    from confluent_kafka.admin import OffsetSpec

    specs: Any = OffsetSpec  # its constructors have no types
    if isinstance(query, OffsetQuery):
        spec = specs.earliest() if query is OffsetQuery.EARLIEST else specs.latest()
    else:
        spec = specs.for_timestamp(query)
    level = IsolationLevel.READ_UNCOMMITTED if query is OffsetQuery.HIGH else IsolationLevel.READ_COMMITTED
    wanted = dict.fromkeys(partitions, spec)
    try:
        futures: dict[Any, Any] = admin.list_offsets(wanted, isolation_level=level, request_timeout=seconds)
    finally:
        del admin  # a client that an error's traceback holds would go on connecting
    return futures


def compute_wait_end(seconds: float) -> float:
    """When the answers to a request with this time-out are waited for no longer; a value of `time.monotonic`.

    It is one moment for all partitions: waits that follow each other would add up.
    """
    return time.monotonic() + limit_wait(LEADERS_SECONDS + seconds + 1)


def wait_for_result(future: Any, end: float) -> tuple[Any, int | None]:
    """The answer of a request, or the code of its error."""
    from confluent_kafka import KafkaError, KafkaException

    try:
        return future.result(max(0.0, end - time.monotonic())), None
    except KafkaException as error:
        return None, int(error.args[0].code())
    except TimeoutError:
        return None, int(KafkaError._TIMED_OUT)  # noqa: SLF001 - its public name


def list_timeout_codes() -> set[int]:
    """The errors of a broker that did not answer in time."""
    from confluent_kafka import KafkaError

    errors: Any = KafkaError
    return {errors._TIMED_OUT, errors.REQUEST_TIMED_OUT, errors._TRANSPORT, errors._ALL_BROKERS_DOWN}  # noqa: SLF001 - its public names


def list_no_leader_codes() -> set[int]:
    """The answer of `list_offsets` for a partition that nobody leads, or whose new leader is not sure yet.

    Code 78 is OFFSET_NOT_AVAILABLE (KIP-207), which the Python client does not name: a leader that was just elected
    gives it until its high watermark is sure.
    """
    from confluent_kafka import KafkaError

    errors: Any = KafkaError
    return {
        errors._NOENT,  # noqa: SLF001 - its public name
        errors.LEADER_NOT_AVAILABLE,
        errors.NOT_LEADER_FOR_PARTITION,
        errors.FENCED_LEADER_EPOCH,
        errors.UNKNOWN_LEADER_EPOCH,
        errors.KAFKA_STORAGE_ERROR,
        78,
    }
