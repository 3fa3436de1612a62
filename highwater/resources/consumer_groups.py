"""Consumer groups from outside: their members, reading and setting their offsets, deleting groups."""

# Offsets are read and set by a consumer that is assigned nothing. The admin client's requests to a coordinator were
# seen to abort the process where the coordinator loads or dies meanwhile (confluent-kafka 2.16; librdkafka's issue
# 4605). So the offset mirror makes one only to name the members of a group that refused a commit.

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from highwater.batching import split_by_count
from highwater.errors import ConfigurationError, ForeignMemberError, HighwaterError
from highwater.mirroring import GroupOffset, MirrorMark
from highwater.resources.kafka import REQUEST_SECONDS
from highwater.resources.time_limits import limit_wait

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, TopicPartition

    from highwater.resources.kafka import Kafka

T = TypeVar("T")
TopicAndPartition = tuple[str, int]
# A cluster that was just started makes its coordinators when it is first asked for one: within a second where it was
# seen. A sensor's tick has 60 s.
COORDINATOR_SECONDS = 10.0
PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.02
# A request for thousands of groups would outlast its time-out.
GROUPS_PER_REQUEST = 100
_MOVING = frozenset({"COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "_WAIT_COORD"})
_DENIED = frozenset({"GROUP_AUTHORIZATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"})
_ABSENT = frozenset({"GROUP_ID_NOT_FOUND"})
# Answers to a commit by a non-member while the group has members, by any protocol.
_OCCUPIED = frozenset({"UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS", "STALE_MEMBER_EPOCH"})


@dataclass(frozen=True)
class ConsumerGroup:
    """A consumer group as its coordinator describes it.

    Args:
        members: each as `client id at host`.
        may_commit: whether this user may commit offsets in it; None if the group is not there yet.
    """

    members: tuple[str, ...] = ()
    may_commit: bool | None = None


def read_group(kafka: Kafka, name: str) -> ConsumerGroup:
    """Ask for a group; one that is not there has no members.

    Raises:
        DependencyUnavailableError: its coordinator did not answer in time.
        ConfigurationError: the broker forbids it.
    """
    from confluent_kafka.admin import AclOperation

    found = _with_coordinator(kafka, name, lambda: _request_group(kafka, name))
    if found is None:
        return ConsumerGroup()
    members = tuple(f"{member.client_id} at {member.host.lstrip('/')}" for member in found.members)
    allowed = found.authorized_operations
    return ConsumerGroup(members, None if allowed is None else AclOperation.READ in allowed)


def _with_coordinator(kafka: Kafka, name: str, request: Callable[[], T]) -> T:
    """The answer to a request, which is repeated while the group's coordinator is made or moves.

    Raises:
        ForeignMemberError, DependencyUnavailableError, ConfigurationError: as the coordinator refused it.
    """
    from confluent_kafka import KafkaException

    deadline = time.monotonic() + COORDINATOR_SECONDS
    while True:
        try:
            return request()
        except KafkaException as error:
            fault = error.args[0]
            if fault.name() not in _MOVING or time.monotonic() > deadline:
                raise _translate_error(kafka, name, fault) from error
            time.sleep(PAUSE_SECONDS)


def _request_group(kafka: Kafka, name: str) -> Any:
    """The coordinator's description of a group; None if it does not exist."""
    from confluent_kafka import KafkaException

    admin, seconds = kafka.get_admin(), limit_wait(REQUEST_SECONDS)
    futures = admin.describe_consumer_groups([name], include_authorized_operations=True, request_timeout=seconds)
    try:
        return futures[name].result(seconds + 1)
    except KafkaException as error:
        if error.args[0].name() in _ABSENT:
            return None
        raise
    except TimeoutError as error:
        raise kafka.build_unavailable_error(error) from error
    finally:
        del admin


def ensure_no_member(kafka: Kafka, name: str) -> ConsumerGroup:
    """Ensure that nobody consumes in a group.

    Raises:
        ForeignMemberError: somebody does; each member is named, with its host.
        DependencyUnavailableError: its coordinator did not answer in time.
        ConfigurationError: the broker forbids it.
    """
    found = read_group(kafka, name)
    if found.members:
        raise _build_foreign_error(name, ", ".join(found.members))
    return found


def read_group_offsets(
    kafka: Kafka, name: str, places: Collection[TopicAndPartition]
) -> dict[TopicAndPartition, GroupOffset]:
    """The offsets of a group for these partitions; partitions without an offset are left out.

    Raises:
        DependencyUnavailableError: its coordinator did not answer in time.
        ConfigurationError: the broker forbids it.
    """
    from confluent_kafka import TopicPartition

    if not places:
        return {}
    asked = [TopicPartition(*place) for place in sorted(places)]
    consumer = kafka.open_reader(**{"group.id": name})
    try:
        answers = _with_coordinator(
            kafka, name, lambda: _ensure_no_errors(consumer.committed(asked, limit_wait(REQUEST_SECONDS)))
        )
    finally:
        consumer.close()
    return {
        (answer.topic, answer.partition): GroupOffset(answer.offset, MirrorMark.from_json(answer.metadata))
        for answer in answers
        if answer.offset >= 0
    }


def commit(kafka: Kafka, name: str, offsets: Mapping[TopicAndPartition, tuple[int, MirrorMark]]) -> None:
    """Set offsets of a group that has no members; the broker refuses it where there are some.

    Raises:
        ForeignMemberError: somebody consumes in it; each member is named, with its host.
        DependencyUnavailableError: its coordinator did not answer in time, or a topic is gone meanwhile.
        ConfigurationError: the broker forbids it.
    """
    from confluent_kafka import TopicPartition

    wanted = [
        TopicPartition(topic, partition, offset, metadata=mark.to_json())
        for (topic, partition), (offset, mark) in sorted(offsets.items())
    ]
    try:
        _with_coordinator(kafka, name, lambda: _commit_once(kafka, name, wanted))
    except ForeignMemberError:
        ensure_no_member(kafka, name)
        raise  # it left meanwhile


def _commit_once(kafka: Kafka, name: str, wanted: list[TopicPartition]) -> None:
    """Commit by a consumer of no generation, as one that is assigned by hand does.

    The client's own wait for a commit has no limit, so the answer comes by callback.
    """
    outcomes: list[tuple[KafkaError | None, list[TopicPartition]]] = []
    seconds = limit_wait(REQUEST_SECONDS)
    # A consumer that is closed waits for the answer to its commit for as long as its session lasts: 45 s by default.
    waits = {"session.timeout.ms": max(1, int(1000 * seconds))}
    consumer = kafka.open_reader(**{"group.id": name, "on_commit": lambda *outcome: outcomes.append(outcome), **waits})
    try:
        consumer.commit(offsets=wanted, asynchronous=True)
        deadline = time.monotonic() + seconds
        while not outcomes and time.monotonic() < deadline:
            consumer.poll(POLL_SECONDS)
    finally:
        consumer.close()
    if not outcomes:
        raise kafka.build_unavailable_error(f"group {name}: no answer to a commit in {seconds:.3g} s")
    [(fault, answers), *_] = outcomes
    _ensure_no_errors(answers, fault)


def _ensure_no_errors(answers: list[TopicPartition], fault: KafkaError | None = None) -> list[TopicPartition]:
    """The answers, if none of them is an error.

    Raises:
        KafkaException: the first error of a partition, else that of the whole request.
    """
    from confluent_kafka import KafkaException

    if found := next((answer.error for answer in answers if answer.error is not None), fault):
        raise KafkaException(found)
    return answers


def delete_groups(kafka: Kafka, names: Collection[str]) -> dict[str, str]:
    """Delete groups; returns those that are still there, with the reason. A group that is gone already is deleted.

    Raises:
        DependencyUnavailableError: no broker answered in time.
    """
    from confluent_kafka import KafkaException

    left: dict[str, str] = {}
    admin = kafka.get_admin()
    try:
        for some in split_by_count(sorted(names), GROUPS_PER_REQUEST):
            futures = admin.delete_consumer_groups([*some], request_timeout=REQUEST_SECONDS)
            for name, future in futures.items():
                try:
                    future.result(REQUEST_SECONDS + 1)
                except KafkaException as error:
                    if error.args[0].name() not in _ABSENT:
                        left[name] = error.args[0].name()
    except TimeoutError as error:
        raise kafka.build_unavailable_error(error) from error
    finally:
        del admin
    return left


def _translate_error(kafka: Kafka, name: str, fault: KafkaError) -> HighwaterError:
    if fault.name() in _OCCUPIED:
        return _build_foreign_error(name, fault.str())
    if fault.name() in _DENIED:
        return build_denied_error(name, fault.name())
    return kafka.build_unavailable_error(f"group {name}: {fault.name()}: {fault.str()}")


def build_denied_error(name: str, found: str) -> ConfigurationError:
    """The error for a user who may not keep a group."""
    return ConfigurationError(
        f"the broker does not let this user keep the consumer group {name}",
        found=found,
        remedy="allow it to Read and Describe the group, and the stream's main topic and tiers",
    )


def _build_foreign_error(name: str, found: str) -> ForeignMemberError:
    return ForeignMemberError(
        f"somebody consumes in the group {name}, which only holds offsets of Highwater",
        found=found,
        remedy="stop that consumer, or give it a group.id of its own; nothing was committed, and it is tried again",
    )
