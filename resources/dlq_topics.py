"""The topics of a stream's DLQ, and that of its accepted events: created as they must be, and held against that.

What belongs here: their settings, and why. What does not: what is sent to them (`assets.dlq`, `assets.published`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from highwater.envelope import MOST_BYTES
from highwater.errors import ConfigurationError, TopicAbsentError, TopicDriftError
from highwater.fitting import configure
from highwater.topic_rules import reassignment
from resources.topic_facts import topic_facts, topic_settings

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.errors import TopicVanishedError
    from resources.kafka import Kafka

REQUEST_SECONDS = 10.0
# A retry that fails for a week is found by somebody; a tier must never lose what still waits.
LEAST_RETENTION = timedelta(days=7)
DELAYS_KEPT = 10
FOR_EVER = -1
ROOM = "max.message.bytes"


@dataclass(frozen=True)
class Shape:
    """How a topic is set up.

    Args:
        partitions: how many.
        replicas: replication factor.
        config: the settings that matter here.
    """

    partitions: int
    replicas: int
    config: Mapping[str, str]

    @property
    def room(self) -> int:
        """The largest batch that it takes, in bytes."""
        return int(self.config[ROOM])


# Of an absent topic the error that it is that it is not there; None if it may be created.
Gone = Callable[[str], "TopicVanishedError | None"]


def ensure(kafka: Kafka, stream: Stream, gone: Gone = lambda _: None) -> dict[str, Shape]:
    """Create the tiers and the parked topic where they are absent, and check those that are there.

    Args:
        kafka: is looked at.
        stream: the declaration.
        gone: is asked of each topic that is absent. While there is an error none is created.

    Returns:
        How they are set up, or must be.

    Raises:
        TopicVanishedError: a topic is absent that may not be created.
        TopicDriftError: a topic is set up so that records could be lost or come too early; found, wanted and the
            command that mends it are in the text.
        TopicAbsentError: the main topic is gone.
        ConfigurationError: the cluster forbids reading a topic's settings, or creating one.
        DependencyAwayError: no broker answered in time.
    """
    main = _shape(kafka, stream.topic)
    # Who owns a foreign topic may let it grow: that must not stop what is rejected of the main topic.
    wanted = _wanted(stream, main)
    rooms = _rooms(kafka, wanted)
    _see_none_gone(kafka, wanted.keys() - rooms.keys(), gone)
    if len(rooms) < len(wanted):
        roomy = _wanted(stream, main, _there(kafka, stream.foreign_topics).values())
        for topic in wanted.keys() - rooms.keys():
            _create(kafka, topic, roomy[topic])
            rooms[topic] = roomy[topic].config[ROOM]
    return {topic: replace(shape, config={**shape.config, ROOM: rooms[topic]}) for topic, shape in wanted.items()}


def ensure_accepted(kafka: Kafka, stream: Stream) -> Shape:
    """Create the topic of accepted events where it is absent, and check one that is there.

    How long it keeps records, and whether it compacts them, is its readers' business: it begins as the main topic is.

    Returns:
        How it is set up.

    Raises:
        As `ensure`.
    """
    topic, main, wanted = _accepted(kafka, stream)
    found = _there(kafka, [topic]).get(topic)
    if found is None:
        kept = {name: main.config[name] for name in ("retention.ms", "retention.bytes")}
        wanted = replace(wanted, config={"cleanup.policy": "delete", **kept, **wanted.config})
        _create(kafka, topic, wanted)
        return wanted
    _see_no_drift(kafka, topic, wanted, found)
    return found


def see_accepted(kafka: Kafka, stream: Stream, gone: Gone = lambda _: None) -> str:
    """Check the topic of accepted events, and do not create it; returns what was found, in words.

    Args:
        kafka: is looked at.
        stream: the declaration.
        gone: is asked if it is absent.

    Raises:
        As `ensure`.
    """
    topic, _, wanted = _accepted(kafka, stream)
    found = _there(kafka, [topic]).get(topic)
    if found is None:
        _see_none_gone(kafka, [topic], gone)
        _create(kafka, topic, wanted, only_asked=True)
        return "is not there yet: it is created with the first slice that is published, which is allowed"
    _see_no_drift(kafka, topic, wanted, found)
    return f"{found.partitions} partitions, set up as it must be"


def _accepted(kafka: Kafka, stream: Stream) -> tuple[str, Shape, Shape]:
    """The topic of accepted events, how the main topic is set up, and what of that it must have too."""
    assert stream.publishes is not None, "only streams that publish have the topic"
    main = _shape(kafka, stream.topic)
    needed = {
        ROOM: str(main.room + MOST_BYTES),
        "min.insync.replicas": main.config["min.insync.replicas"],
    }
    return stream.publishes.topic, main, replace(main, config=needed)


def see_no_drift(kafka: Kafka, stream: Stream, gone: Gone = lambda _: None) -> tuple[str, bool]:
    """Check the topics that are there, and create none; returns what was found, in words, and whether it is a warning.

    Whether the others could be created the cluster is asked.
    They should have room for what the stream's foreign topics hold, too; what finds none is parked by reference.

    Raises:
        TopicVanishedError, TopicDriftError, TopicAbsentError, ConfigurationError, DependencyAwayError: as `ensure`.
    """
    others = _there(kafka, stream.foreign_topics).values()
    wanted = _wanted(stream, _shape(kafka, stream.topic), others)
    rooms = _rooms(kafka, wanted)
    _see_none_gone(kafka, wanted.keys() - rooms.keys(), gone)
    for topic in wanted.keys() - rooms.keys():
        _create(kafka, topic, wanted[topic], only_asked=True)
    for topic, room in rooms.items():
        if int(room) < (most := wanted[topic].room):
            text = f"{topic} takes no record above {int(room):,} bytes, the topics that are read hold up to {most:,}"
            return f"{text}: {configure(kafka.bootstrap, topic, f'{ROOM}={most}')}", True
    return f"{len(rooms)} of {len(wanted)} are there, and set up as they must be", False


def _see_none_gone(kafka: Kafka, absent: Collection[str], gone: Gone) -> None:
    for topic in sorted(absent):
        if (error := gone(topic)) is not None:
            with suppress(TopicAbsentError):
                kafka.look_again(topic)
                raise kafka.away(f"one broker did not know topic {topic}, another one does")
            raise error


def _rooms(kafka: Kafka, wanted: Mapping[str, Shape]) -> dict[str, str]:
    """The largest batch that each of the topics takes that are there; these have no drift.

    One that is too small for some records holds nobody up: these are parked, by reference in the end.
    """
    found = _there(kafka, wanted)
    for topic, shape in found.items():
        enough = shape.room >= MOST_BYTES  # it takes a reference
        least = {**wanted[topic].config, **({ROOM: str(MOST_BYTES)} if enough else {})}
        _see_no_drift(kafka, topic, replace(wanted[topic], config=least), shape)
    return {topic: shape.config[ROOM] for topic, shape in found.items()}


def _wanted(stream: Stream, main: Shape, others: Iterable[Shape] = ()) -> dict[str, Shape]:
    sources = [main, *others]
    largest = max(source.room for source in sources)
    kept = [max(LEAST_RETENTION, DELAYS_KEPT * delay) for delay in stream.tiers]
    retention = [int(span.total_seconds() * 1000) for span in kept]
    found = {topic: _like(main, ms, largest) for topic, ms in zip(stream.tier_topics, retention, strict=True)}
    return {**found, stream.parked_topic: _like(main, FOR_EVER, largest)}


def _there(kafka: Kafka, topics: Iterable[str]) -> dict[str, Shape]:
    """How those of the topics are set up that are there."""
    found = {}
    for topic in topics:
        with suppress(TopicAbsentError):
            found[topic] = _shape(kafka, topic)
    return found


def _like(main: Shape, retention_ms: int, largest: int) -> Shape:
    """As many partitions as the main topic, so that a key keeps its order; as safe as the main topic.

    With room for the largest record of what is read, the topics of other systems included, and its envelope.

    The broker's own clock stamps the records: so the timestamps of a partition never fall, and what is due is one
    range of offsets.
    """
    return Shape(
        main.partitions,
        main.replicas,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(retention_ms),
            "retention.bytes": str(FOR_EVER),
            "message.timestamp.type": "LogAppendTime",
            ROOM: str(largest + MOST_BYTES),
            "min.insync.replicas": main.config["min.insync.replicas"],
        },
    )


def _create(kafka: Kafka, topic: str, wanted: Shape, *, only_asked: bool = False) -> None:
    """Create a topic, or only ask whether that would be done (`validate_only` of KIP-4)."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    new = NewTopic(topic, wanted.partitions, wanted.replicas, config=dict(wanted.config))
    admin = kafka.admin()
    try:
        asked = admin.create_topics([new], operation_timeout=REQUEST_SECONDS, validate_only=only_asked)
        asked[topic].result(2 * REQUEST_SECONDS)
    except KafkaException as error:
        if error.args[0].code() in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            raise ConfigurationError(
                f"topic {topic} is not there, and may not be created",
                found=error.args[0].str(),
                remedy=f"allow this user Create on topic {topic}, or have it created as docs/dlq.md says",
            ) from error
        if error.args[0].code() in {KafkaError.POLICY_VIOLATION, KafkaError.INVALID_CONFIG}:
            raise ConfigurationError(
                f"topic {topic} is not there, and the cluster refuses to create it as it must be",
                found=error.args[0].str(),
                remedy="have it created as docs/dlq.md says, or change the cluster's policy",
            ) from error
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another run was first
            raise kafka.away(f"topic {topic} could not be created: {error.args[0].str()}") from error
    except TimeoutError as error:
        raise kafka.away(error) from error
    finally:
        del admin


def _shape(kafka: Kafka, topic: str) -> Shape:
    partitions = kafka.description(topic).partitions
    if not partitions:
        raise kafka.away(f"topic {topic} was just created and shows no partition yet")
    settings = topic_settings(kafka, topic)
    if settings is None:
        raise ConfigurationError(
            f"the settings of topic {topic} may not be read",
            found="the cluster forbids DescribeConfigs",
            remedy="allow this user DescribeConfigs on the main topic and the DLQ's: records are sent to none that "
            "could lose them",
        )
    config = {name: setting.value for name, setting in settings.items()}
    return Shape(len(partitions), min(len(p.replicas) for p in partitions), config)


def _see_no_drift(kafka: Kafka, topic: str, wanted: Shape, found: Shape) -> None:
    if found.partitions < wanted.partitions:
        raise _drift(
            topic,
            f"{wanted.partitions} partitions, as the main topic has",
            f"{found.partitions}",
            f"kafka-topics --bootstrap-server {kafka.bootstrap} --alter --topic {topic} "
            f"--partitions {wanted.partitions}",
        )
    if found.replicas < wanted.replicas:
        raise _drift(
            topic,
            f"replication factor {wanted.replicas}, as the main topic has",
            f"{found.replicas}",
            reassignment(topic_facts(kafka, topic), wanted.replicas),
        )
    for name, value in wanted.config.items():
        if not _good(name, value, found.config.get(name, "")):
            raise _drift(
                topic,
                f"{name}={value}" + ("" if name in _EXACT else " or more"),
                f"{name}={found.config.get(name)}",
                configure(kafka.bootstrap, topic, f"{name}={value}"),
            )


_EXACT = frozenset({"cleanup.policy", "message.timestamp.type"})


def _good(name: str, wanted: str, found: str) -> bool:
    if name in _EXACT:
        return wanted == found
    number = int(found)
    if name.startswith("retention."):
        return number == FOR_EVER or (int(wanted) != FOR_EVER and number >= int(wanted))
    return number >= int(wanted)


def _drift(topic: str, wanted: str, found: str, command: str) -> TopicDriftError:
    return TopicDriftError(
        f"topic {topic} is not set up as it must be", stored=f"wanted {wanted}", found=found, remedy=command
    )
