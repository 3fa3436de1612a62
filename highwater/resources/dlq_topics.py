"""The DLQ topics and the topic of accepted events: created, grown, and compared with what they must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from highwater.declaration import Stream
from highwater.envelope import MAX_BYTES
from highwater.errors import ConfigurationError, HighwaterError, TopicAbsentError, TopicDriftError, TopicVanishedError
from highwater.message_size import format_config_command
from highwater.resources.kafka import Kafka
from highwater.resources.topic_facts import fetch_topic_facts, fetch_topic_settings
from highwater.topic_rules import build_reassignment

REQUEST_SECONDS = 10.0
LOOK_EVERY = 0.1
# A retry that fails for a week is found by somebody; a tier must never lose what still waits.
MIN_RETENTION = timedelta(days=7)
RETAINED_DELAYS = 10
FOR_EVER = -1
SIZE_SETTING = "max.message.bytes"


@dataclass(frozen=True)
class TopicShape:
    """The partitions, replicas and settings of a topic.

    Args:
        partitions: how many.
        replicas: replication factor.
        config: the settings that matter here.
    """

    partitions: int
    replicas: int
    config: Mapping[str, str]

    @property
    def max_message_bytes(self) -> int:
        """The largest batch that it takes, in bytes."""
        return int(self.config[SIZE_SETTING])


# The error for an absent topic; None if it may be created.
FindVanishedError = Callable[[str], "TopicVanishedError | None"]


def ensure_dlq_topics(
    kafka: Kafka, stream: Stream, find_vanished_error: FindVanishedError = lambda _: None
) -> dict[str, TopicShape]:
    """Create the tiers and the parked topic where they are absent, grow those that are too narrow, check the others.

    Args:
        kafka: is looked at.
        stream: the declaration.
        find_vanished_error: is asked of each topic that is absent. While there is an error none is created.

    Returns:
        How they are set up, or must be.

    Raises:
        TopicVanishedError: a topic is absent that may not be created.
        TopicDriftError: topics are set up so that records could be lost or come too early, or have fewer partitions
            than the main topic and may not be grown; found, wanted and the commands for all of them are in the text.
        TopicAbsentError: the main topic is gone.
        ConfigurationError: the cluster forbids reading a topic's settings, or creating one.
        DependencyUnavailableError: no broker answered in time.
    """
    main = _read_shape(kafka, stream.topic)
    # The owner of a foreign topic may let it grow: that must not stop the rejects of the main topic.
    wanted = _build_wanted_shapes(stream, main)
    size_limits = _validate_batch_limits(kafka, wanted, _grow_narrow_topics(kafka, stream, main, wanted))
    _ensure_none_vanished(kafka, wanted.keys() - size_limits.keys(), find_vanished_error)
    if len(size_limits) < len(wanted):
        enlarged = _build_wanted_shapes(stream, main, _read_existing_shapes(kafka, stream.foreign_topics).values())
        for topic in wanted.keys() - size_limits.keys():
            _create(kafka, topic, enlarged[topic])
            size_limits[topic] = enlarged[topic].config[SIZE_SETTING]
    return {
        topic: replace(shape, config={**shape.config, SIZE_SETTING: size_limits[topic]})
        for topic, shape in wanted.items()
    }


def ensure_accepted(kafka: Kafka, stream: Stream) -> TopicShape:
    """Create the topic of accepted events where it is absent; grow one that is too narrow, and check it.

    How long it keeps records, and whether it compacts them, is its readers' business: it begins as the main topic is.

    Returns:
        How it is set up.

    Raises:
        As `ensure_dlq_topics`.
    """
    topic, main, wanted = _read_accepted_shapes(kafka, stream)
    found = _grow_narrow_topics(kafka, stream, main, [topic]).get(topic)
    if found is None:
        retention = {name: main.config[name] for name in ("retention.ms", "retention.bytes")}
        wanted = replace(wanted, config={"cleanup.policy": "delete", **retention, **wanted.config})
        _create(kafka, topic, wanted)
        return wanted
    _ensure_no_drift(kafka, topic, wanted, found)
    return found


def check_accepted(kafka: Kafka, stream: Stream, find_vanished_error: FindVanishedError = lambda _: None) -> str:
    """Check the topic of accepted events, and do not create it; returns what was found, in words.

    Args:
        kafka: is looked at.
        stream: the declaration.
        find_vanished_error: is asked if it is absent.

    Raises:
        As `ensure_dlq_topics`.
    """
    topic, main, wanted = _read_accepted_shapes(kafka, stream)
    found = _read_existing_shapes(kafka, [topic]).get(topic)
    if found is None:
        _ensure_none_vanished(kafka, [topic], find_vanished_error)
        _create(kafka, topic, wanted, only_asked=True)
        return "is not there yet: it is created with the first slice that is published, which is allowed"
    _ensure_no_drift(kafka, topic, wanted, found)
    if found.partitions < main.partitions:
        add_partitions(kafka, stream, main, [topic], only_asked=True)
        return f"{found.partitions} partitions: it grows to {main.partitions} with the next slice, which is allowed"
    return f"{found.partitions} partitions, safe settings"


def _read_accepted_shapes(kafka: Kafka, stream: Stream) -> tuple[str, TopicShape, TopicShape]:
    """The topic of accepted events, how the main topic is set up, and what of that it must have too."""
    assert stream.publishes is not None, "only streams that publish have the topic"
    main = _read_shape(kafka, stream.topic)
    needed = {
        SIZE_SETTING: str(main.max_message_bytes + MAX_BYTES),
        "min.insync.replicas": main.config["min.insync.replicas"],
    }
    return stream.publishes.topic, main, replace(main, config=needed)


def ensure_no_drift(
    kafka: Kafka, stream: Stream, find_vanished_error: FindVanishedError = lambda _: None
) -> tuple[str, bool]:
    """Check the topics that are there, and change none; returns what was found, in words, and whether it is a warning.

    Whether the others could be created, and narrow ones be grown, the cluster is asked.
    They should have room for what the stream's foreign topics hold, too; what finds none is parked by reference.

    Raises:
        TopicVanishedError, TopicDriftError, TopicAbsentError, ConfigurationError, DependencyUnavailableError: as in
            `ensure_dlq_topics`.
    """
    others = _read_existing_shapes(kafka, stream.foreign_topics).values()
    main = _read_shape(kafka, stream.topic)
    wanted = _build_wanted_shapes(stream, main, others)
    there = _read_existing_shapes(kafka, wanted)
    size_limits = _validate_batch_limits(kafka, wanted, there)
    _ensure_none_vanished(kafka, wanted.keys() - size_limits.keys(), find_vanished_error)
    for topic in wanted.keys() - size_limits.keys():
        _create(kafka, topic, wanted[topic], only_asked=True)
    for topic, limit in size_limits.items():
        if int(limit) < (most := wanted[topic].max_message_bytes):
            text = f"{topic} takes no record above {int(limit):,} bytes, the topics that are read hold up to {most:,}"
            return f"{text}: {format_config_command(kafka.bootstrap, topic, f'{SIZE_SETTING}={most}')}", True
    if narrow := [topic for topic, shape in there.items() if shape.partitions < main.partitions]:
        add_partitions(kafka, stream, main, narrow, only_asked=True)
        grow = f"{', '.join(narrow)} grow to {main.partitions} partitions with the next reject, which is allowed"
        return f"{len(size_limits)} of {len(wanted)} are there; {grow}", False
    return f"{len(size_limits)} of {len(wanted)} are there, and set up as they must be", False


def _ensure_none_vanished(kafka: Kafka, absent: Collection[str], find_vanished_error: FindVanishedError) -> None:
    for topic in sorted(absent):
        if (error := find_vanished_error(topic)) is not None:
            with suppress(TopicAbsentError):
                kafka.look_again(topic)
                raise kafka.build_unavailable_error(f"one broker did not know topic {topic}, another one does")
            raise error


def _validate_batch_limits(
    kafka: Kafka, wanted: Mapping[str, TopicShape], found: Mapping[str, TopicShape]
) -> dict[str, str]:
    """The largest batch that each existing topic takes. Existing topics have no drift.

    A topic whose limit is too small for some records delays no others: those are parked, by reference if necessary.
    """
    drifts: list[TopicDriftError] = []
    for topic, shape in found.items():
        enough = shape.max_message_bytes >= MAX_BYTES  # it takes a reference
        least = {**wanted[topic].config, **({SIZE_SETTING: str(MAX_BYTES)} if enough else {})}
        drifts += _list_drifts(kafka, topic, replace(wanted[topic], config=least), shape)
    _raise_together(drifts)
    return {topic: shape.config[SIZE_SETTING] for topic, shape in found.items()}


def _grow_narrow_topics(
    kafka: Kafka, stream: Stream, main: TopicShape, topics: Collection[str]
) -> dict[str, TopicShape]:
    """The shapes of those of the topics that are there, each with as many partitions as the main topic.

    Raises:
        As `add_partitions`.
    """
    found = _read_existing_shapes(kafka, topics)
    if all(shape.partitions >= main.partitions for shape in found.values()):
        return found
    add_partitions(kafka, stream, main, topics)
    return _read_existing_shapes(kafka, topics)


def add_partitions(
    kafka: Kafka, stream: Stream, main: TopicShape, topics: Collection[str], *, only_asked: bool = False
) -> None:
    """Grow the stream's narrow topics to as many partitions as the main topic, or only ask whether that is allowed.

    Partitions are never removed again, so the main topic is looked at a second time before. All topics that are
    published to grow together, so that one error names every command where that is not allowed.

    Args:
        kafka: the cluster.
        stream: the declaration.
        main: the main topic as it was seen before.
        topics: topics that the caller needs; any other that cannot be read is left out.
        only_asked: change nothing.

    Raises:
        TopicDriftError: the cluster refuses it for some of them.
        DependencyUnavailableError: no broker answered in time, or the main topic changed between the two looks.
    """
    if len(kafka.read_description(stream.topic).partitions) != main.partitions:
        raise kafka.build_unavailable_error(
            f"the number of partitions of {stream.topic} changed while it was looked at"
        )
    narrow = _list_narrow_topics(kafka, stream, main.partitions, topics)
    refused = _request_partitions(kafka, narrow, main.partitions, only_asked=only_asked)
    if refused:
        raise TopicDriftError(
            f"{', '.join(refused)} of stream {stream.name} have fewer partitions than its main topic {stream.topic}, "
            "and may not be grown",
            stored=f"wanted {main.partitions} partitions, as the main topic has",
            found="; ".join(f"{topic}: {narrow[topic]}, {why}" for topic, why in refused.items()),
            remedy="allow this user Alter on these topics, or run "
            + "; ".join(
                f"kafka-topics --bootstrap-server {kafka.bootstrap} --alter --topic {topic} "
                f"--partitions {main.partitions}"
                for topic in refused
            ),
        )
    if not only_asked:
        _await_partitions(kafka, narrow, main.partitions)


def _list_narrow_topics(kafka: Kafka, stream: Stream, wanted: int, topics: Collection[str]) -> dict[str, int]:
    """The topics that are published to and have fewer partitions, with how many each has."""
    found = {}
    for topic in stream.published_topics:
        try:
            found[topic] = len(kafka.read_description(topic).partitions)
        except TopicAbsentError:
            continue
        except HighwaterError:
            if topic in topics:
                raise
    return {topic: many for topic, many in found.items() if many < wanted}


_REFUSED = frozenset({"TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "POLICY_VIOLATION"})


def _request_partitions(kafka: Kafka, narrow: Mapping[str, int], wanted: int, *, only_asked: bool) -> dict[str, str]:
    """Ask the cluster to grow the topics; returns those for which it refuses, with the reason."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import NewPartitions

    if not narrow:
        return {}
    refused: dict[str, str] = {}
    admin = kafka.get_admin()
    try:
        new = [NewPartitions(topic, wanted) for topic in narrow]
        futures = admin.create_partitions(new, operation_timeout=REQUEST_SECONDS, validate_only=only_asked)
        for topic, future in futures.items():
            try:
                future.result(2 * REQUEST_SECONDS)
            except KafkaException as error:
                fault = error.args[0]
                if fault.name() in _REFUSED:
                    refused[topic] = fault.name()
                elif fault.name() != "INVALID_PARTITIONS":  # another run was first; they are looked at afterwards
                    raise kafka.build_unavailable_error(f"topic {topic} could not be grown: {fault.str()}") from error
    except TimeoutError as error:
        raise kafka.build_unavailable_error(error) from error
    finally:
        del admin
    return refused


def _await_partitions(kafka: Kafka, topics: Iterable[str], wanted: int) -> None:
    """Wait until a broker shows the new partitions, each with a leader: brokers hear of them one after another."""
    deadline = time.monotonic() + REQUEST_SECONDS
    for topic in topics:
        while len([p for p in kafka.read_description(topic).partitions if p.leader is not None]) < wanted:
            if time.monotonic() > deadline:
                raise kafka.build_unavailable_error(
                    f"topic {topic} was grown to {wanted} partitions, which are not shown yet"
                )
            time.sleep(LOOK_EVERY)


def _build_wanted_shapes(stream: Stream, main: TopicShape, others: Iterable[TopicShape] = ()) -> dict[str, TopicShape]:
    sources = [main, *others]
    largest = max(source.max_message_bytes for source in sources)
    lifetimes = [max(MIN_RETENTION, RETAINED_DELAYS * delay) for delay in stream.tiers]
    milliseconds = [int(span.total_seconds() * 1000) for span in lifetimes]
    found = {
        topic: _build_dlq_shape(main, ms, largest) for topic, ms in zip(stream.tier_topics, milliseconds, strict=True)
    }
    return {**found, stream.parked_topic: _build_dlq_shape(main, FOR_EVER, largest)}


def _read_existing_shapes(kafka: Kafka, topics: Iterable[str]) -> dict[str, TopicShape]:
    """The shapes of those of the topics that are there."""
    found = {}
    for topic in topics:
        with suppress(TopicAbsentError):
            found[topic] = _read_shape(kafka, topic)
    return found


def _build_dlq_shape(main: TopicShape, retention_ms: int, largest: int) -> TopicShape:
    """As many partitions as the main topic, so that a key keeps its order; as safe as the main topic.

    With room for the largest source record, including topics of other systems, and its envelope.

    The broker's own clock stamps the records: so the timestamps of a partition never fall, and the due records are one
    range of offsets.
    """
    return TopicShape(
        main.partitions,
        main.replicas,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(retention_ms),
            "retention.bytes": str(FOR_EVER),
            "message.timestamp.type": "LogAppendTime",
            SIZE_SETTING: str(largest + MAX_BYTES),
            "min.insync.replicas": main.config["min.insync.replicas"],
        },
    )


def _create(kafka: Kafka, topic: str, wanted: TopicShape, *, only_asked: bool = False) -> None:
    """Create a topic, or only ask whether that would be done (`validate_only` of KIP-4)."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    new = NewTopic(topic, wanted.partitions, wanted.replicas, config=dict(wanted.config))
    command = _build_create_command(kafka, topic, wanted)
    admin = kafka.get_admin()
    try:
        futures = admin.create_topics([new], operation_timeout=REQUEST_SECONDS, validate_only=only_asked)
        futures[topic].result(2 * REQUEST_SECONDS)
    except KafkaException as error:
        if error.args[0].code() in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED}:
            raise ConfigurationError(
                f"topic {topic} is not there, and may not be created",
                found=error.args[0].str(),
                remedy=f"allow this user Create on topic {topic}, or run {command}",
            ) from error
        if error.args[0].code() == KafkaError.TOPIC_EXCEPTION:
            raise ConfigurationError(
                f"the cluster takes no topic of the name {topic}",
                found=error.args[0].str(),
                remedy="a name has 249 characters at most, and differs from others in more than `.` and `_`: delete "
                "the topic that is in its way, or declare the stream with another topic",
            ) from error
        if error.args[0].code() in {KafkaError.POLICY_VIOLATION, KafkaError.INVALID_CONFIG}:
            raise ConfigurationError(
                f"topic {topic} does not exist, and the cluster refuses to create it with the needed settings",
                found=error.args[0].str(),
                remedy=f"change the cluster's policy, or let its owner run {command}",
            ) from error
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another run was first
            raise kafka.build_unavailable_error(f"topic {topic} could not be created: {error.args[0].str()}") from error
    except TimeoutError as error:
        raise kafka.build_unavailable_error(error) from error
    finally:
        del admin


def _build_create_command(kafka: Kafka, topic: str, wanted: TopicShape) -> str:
    settings = " ".join(f"--config {name}={value}" for name, value in wanted.config.items())
    return (
        f"kafka-topics --bootstrap-server {kafka.bootstrap} --create --topic {topic} --partitions {wanted.partitions} "
        f"--replication-factor {wanted.replicas} {settings}"
    ).rstrip()


def _read_shape(kafka: Kafka, topic: str) -> TopicShape:
    partitions = kafka.read_description(topic).partitions
    if not partitions:
        raise kafka.build_unavailable_error(f"topic {topic} was just created and shows no partition yet")
    settings = fetch_topic_settings(kafka, topic)
    if settings is None:
        raise ConfigurationError(
            f"the settings of topic {topic} may not be read",
            found="the cluster forbids DescribeConfigs",
            remedy="allow this user DescribeConfigs on the main topic and the DLQ's: records are sent to none that "
            "could lose them",
        )
    config = {name: setting.value for name, setting in settings.items()}
    return TopicShape(len(partitions), min(len(p.replicas) for p in partitions), config)


def _ensure_no_drift(kafka: Kafka, topic: str, wanted: TopicShape, found: TopicShape) -> None:
    _raise_together([*_list_drifts(kafka, topic, wanted, found)])


def _raise_together(drifts: Sequence[TopicDriftError]) -> None:
    """One error with every drift, so that a person fixes all of them at once; None without any."""
    if len(drifts) == 1:
        raise drifts[0]
    if drifts:
        raise TopicDriftError(
            "; ".join(dict.fromkeys(error.problem for error in drifts)),
            stored="; ".join(str(error.stored) for error in drifts),
            found="; ".join(str(error.found) for error in drifts),
            remedy="; ".join(error.remedy for error in drifts),
        )


def _list_drifts(kafka: Kafka, topic: str, wanted: TopicShape, found: TopicShape) -> Iterator[TopicDriftError]:
    """The faults of a topic, except its number of partitions (`add_partitions`)."""
    if found.replicas < wanted.replicas:
        yield _build_drift_error(
            topic,
            f"replication factor {wanted.replicas}, as the main topic has",
            f"{found.replicas}",
            build_reassignment(fetch_topic_facts(kafka, topic), wanted.replicas),
        )
    for name, value in wanted.config.items():
        if not _is_safe_setting(name, value, found.config.get(name, "")):
            yield _build_drift_error(
                topic,
                f"{name}={value}" + ("" if name in _EXACT else " or more"),
                f"{name}={found.config.get(name)}",
                format_config_command(kafka.bootstrap, topic, f"{name}={value}"),
            )


_EXACT = frozenset({"cleanup.policy", "message.timestamp.type"})


def _is_safe_setting(name: str, wanted: str, found: str) -> bool:
    if name in _EXACT:
        return wanted == found
    number = int(found)
    if name.startswith("retention."):
        return number == FOR_EVER or (int(wanted) != FOR_EVER and number >= int(wanted))
    return number >= int(wanted)


def _build_drift_error(topic: str, wanted: str, found: str, command: str) -> TopicDriftError:
    return TopicDriftError(f"topic {topic} has unsafe settings", stored=f"wanted {wanted}", found=found, remedy=command)
