"""Kafka: what a topic holds, and how clients of it are configured."""

# Every request has its own short time-out, so that a sensor's tick ends within seconds when the broker is unavailable.
# None of them creates a topic: the admin client asks for all topics and never for one by name, which a broker with
# automatic creation would take as a wish.

from __future__ import annotations

import difflib
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from highwater.errors import KAFKA, ConfigurationError, DependencyUnavailableError, HighwaterError, TopicAbsentError
from highwater.resources.broker_requests import ask_any_broker, describe_topics, list_topics
from highwater.resources.clients import open_client
from highwater.resources.kafka_options import build_spark_options, redact_values, refuse_weakening
from highwater.resources.offset_requests import (
    NO_SUCH_RECORD,
    OffsetQuery,
    compute_wait_end,
    list_no_leader_codes,
    list_timeout_codes,
    request_offsets,
    wait_for_result,
)
from highwater.resources.record_reading import READER, WAITS, list_fetch_waits, read_records
from highwater.resources.time_limits import build_out_of_time_error, is_out_of_time, limit_wait
from highwater.resources.topic_state import (
    TopicState,
    TopicStates,
    build_partition_state,
    find_id_and_leaders,
    is_whole,
)
from highwater.settings import KAFKA_CONFIG
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
    from confluent_kafka.admin import AdminClient, TopicDescription

# For the last broker that is asked; the tick's own limit may leave less.
REQUEST_SECONDS = 4.0
# Between two looks that must agree before anything is called lost. Brokers hear of a new leader, or of a topic, within
# a second of each other.
LOOKS_APART = 3.0
# A token endpoint may answer with a page.
LONGEST_REFUSAL = 300


_OPENING = Lock()


class Kafka:
    """A Kafka cluster.

    Args:
        bootstrap: `host:port` of some brokers, separated by commas.
        config: further librdkafka properties; secrets are never shown.

    Raises:
        ConfigurationError: a property would weaken a guarantee.
    """

    def __init__(self, bootstrap: str, config: Mapping[str, str] = MappingProxyType({})) -> None:
        refuse_weakening(config)
        self.bootstrap = bootstrap
        self._config = dict(config)
        self._admin: AdminClient | None = None
        self._refusals: deque[str] = deque(maxlen=1)

    def __repr__(self) -> str:
        return f"Kafka({self.bootstrap})"

    def build_client_config(self, **changes: Any) -> dict[str, Any]:
        """The configuration of a librdkafka client; it may hold secrets."""
        ours = {"bootstrap.servers": self.bootstrap, "allow.auto.create.topics": False}
        return {"log_level": 0, **self._config, **ours, **changes}

    def build_spark_options(self) -> dict[str, str]:
        """The options of Spark's Kafka source that say where and how to connect; they may hold secrets.

        Raises:
            ConfigurationError: a property has no equal in the Java client.
        """
        return build_spark_options(self.bootstrap, self._config)

    def list_topic_names(self) -> list[str]:
        """The names of all topics.

        Raises:
            DependencyUnavailableError: no broker answered in time.
        """
        from confluent_kafka import KafkaException

        try:
            return ask_any_broker(self, list_topics, REQUEST_SECONDS)
        except (KafkaException, TimeoutError) as error:
            raise self.build_unavailable_error(error) from error

    def list_group_names(self) -> list[str]:
        """The names of all consumer groups.

        Raises:
            DependencyUnavailableError: no broker answered in time.
        """
        from confluent_kafka import KafkaException

        admin, seconds = self.get_admin(), limit_wait(REQUEST_SECONDS)
        try:
            found: Any = admin.list_consumer_groups(request_timeout=seconds).result(seconds + 1)
        except (KafkaException, TimeoutError) as error:
            raise self.build_unavailable_error(error) from error
        finally:
            del admin
        if found.errors:
            raise self.build_unavailable_error(found.errors[0])
        return sorted(group.group_id for group in found.valid)

    def read_topic_state(self, topic: str) -> TopicState:
        """The current offsets and identity of a topic.

        Raises:
            TopicAbsentError: there is no such topic; the nearest names are given.
            ConfigurationError: this user may not describe it.
            DependencyUnavailableError: no broker answered in time, or the topic was replaced while it was looked at.
        """
        topic_id, leaders = self._read_id_and_leaders(topic)
        led = [p for p, leader in leaders.items() if leader is not None]
        # The high watermark before the last stable offset: a record that arrives in between seems held back by none.
        starts, high, stable = self._read_topic_offsets(
            topic, led, OffsetQuery.EARLIEST, OffsetQuery.HIGH, OffsetQuery.STABLE
        )
        if self._read_id_and_leaders(topic)[0] != topic_id:
            raise self.build_unavailable_error(f"topic {topic} was replaced while it was looked at")
        return TopicState(
            topic,
            topic_id,
            {
                p: build_partition_state(leader, starts.get(p), stable.get(p), high.get(p))
                for p, leader in leaders.items()
            },
        )

    def read_topic_states(self, topics: Collection[str]) -> TopicStates:
        """The states of topics now, with the same five requests for any number of topics.

        Topics that do not exist, may not be read, or were replaced during the look are not among those found; those
        that may not be described are `denied`. A partition whose broker did not answer in time is unknown, as a
        partition without a leader is: a broker that hangs costs its own partitions only.

        Raises:
            DependencyUnavailableError: no broker answered in time.
        """
        described, denied = self._read_leaders_by_topic(topics)
        led = [(topic, p) for topic, (_, leaders) in described.items() for p, at in leaders.items() if at is not None]
        # The high watermark before the last stable offset, as in `read_topic_state`.
        (starts, high, stable), refused = self._read_offsets(
            led, OffsetQuery.EARLIEST, OffsetQuery.HIGH, OffsetQuery.STABLE
        )
        again, _ = self._read_leaders_by_topic(described)
        states = {
            topic: TopicState(
                topic,
                topic_id,
                {
                    p: build_partition_state(
                        leader, starts.get((topic, p)), stable.get((topic, p)), high.get((topic, p))
                    )
                    for p, leader in leaders.items()
                },
            )
            for topic, (topic_id, leaders) in described.items()
            if topic in again and again[topic][0] == topic_id and topic not in refused
        }
        return TopicStates(states, frozenset(denied))

    def _read_leaders_by_topic(
        self, topics: Collection[str]
    ) -> tuple[dict[str, tuple[str, dict[int, int | None]]], set[str]]:
        """ID and leaders of topics, and the topics that may not be described.

        Topics that do not exist or are described in part are left out.

        Raises:
            DependencyUnavailableError: no broker answered in time.
        """
        from confluent_kafka import KafkaError

        found: dict[str, tuple[str, dict[int, int | None]]] = {}
        denied = set[str]()
        for topic, answer in self._describe(topics).items():
            if isinstance(answer, KafkaError):
                if answer.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    denied.add(topic)
            elif is_whole(answer):
                found[topic] = find_id_and_leaders(answer)
        return found, denied

    def _describe(self, topics: Collection[str]) -> dict[str, TopicDescription | KafkaError]:
        """The descriptions of topics, or the errors with which they were refused.

        Raises:
            DependencyUnavailableError: no broker answered in time.
        """
        from confluent_kafka import KafkaException

        if not topics:
            return {}
        try:
            return ask_any_broker(self, partial(describe_topics, topics=topics), REQUEST_SECONDS)
        except (KafkaException, TimeoutError) as error:
            raise self.build_unavailable_error(error) from error

    def _read_offsets(
        self, places: Sequence[tuple[str, int]], *queries: OffsetQuery
    ) -> tuple[list[dict[tuple[str, int], Any]], set[str]]:
        """The answers of `list_offsets` for partitions of any topics, and the topics for which it was refused.

        A partition without a leader, or whose broker did not answer in time, has no answer.

        Raises:
            DependencyUnavailableError: no partition had an answer in time.
        """
        from confluent_kafka import TopicPartition

        found: list[dict[tuple[str, int], Any]] = [{} for _ in queries]
        refused, late = set[str](), list[int]()
        if not places:
            return found, refused
        admin, seconds = self.get_admin(), limit_wait(REQUEST_SECONDS)
        wanted = [TopicPartition(*place) for place in places]
        try:
            by_query = [self._request_offsets(admin, wanted, query, seconds) for query in queries]
            end = compute_wait_end(seconds)
            for answers, futures in zip(found, by_query, strict=True):
                for one, future in futures.items():
                    answer, error = wait_for_result(future, end)
                    if error is None and answer.offset >= 0:
                        answers[one.topic, one.partition] = answer
                    elif error in list_timeout_codes():
                        late.append(error)
                    elif error is not None and error not in list_no_leader_codes():
                        refused.add(one.topic)
        finally:
            del admin
        if late and not any(found):
            raise self.build_unavailable_error("no partition had an answer in time")
        return found, refused

    def look_again(self, topic: str) -> TopicState:
        """Look at a topic a second time, some seconds later and through connections of its own.

        Raises:
            TopicAbsentError: there is no such topic.
            DependencyUnavailableError: no broker answered in time.
        """
        time.sleep(limit_wait(LOOKS_APART))  # where the limit cuts it short, no time is left for a look
        other = copy(self)
        other._admin = None  # noqa: SLF001 - of this very class
        return other.read_topic_state(topic)

    def read_offsets_at(self, topic: str, timestamp_ms: int, state: TopicState | None = None) -> dict[int, int]:
        """For each partition that can be asked the first offset whose timestamp is at or after the given one.

        The last stable offset if no record is that young; never an offset beyond it.

        Args:
            topic: the topic.
            timestamp_ms: milliseconds since 1970 in UTC.
            state: a look at the topic from before; it is looked at first if left out. A last stable offset that is read
                later could lie after records that are older than the timestamp.

        Raises:
            TopicAbsentError: there is no such topic.
            DependencyUnavailableError: no broker answered in time.
        """
        before = state or self.read_topic_state(topic)
        known = {p: seen.last_stable for p, seen in before.partitions.items() if seen.last_stable is not None}
        [found] = self._read_topic_offsets(topic, list(known), timestamp_ms)
        return {
            p: known[p] if at.offset == NO_SUCH_RECORD else min(at.offset, known[p])
            for p, at in sorted(found.items())
            if p in known
        }

    def read(
        self, topic: str, ranges: Mapping[int, OffsetRange], *, seconds: float = 30.0, committed: bool = True
    ) -> Iterator[Message]:
        """The committed records of some ranges, by an assigned consumer that commits nothing.

        With `committed` false also those of transactions that are open or were aborted.

        The record at the end offset may not exist (a marker, or compacted), so the end is reported by the consumer's
        position, never by a record.

        Raises:
            OffsetsExpiredError: a range starts before the log does, or after its end.
            ConfigurationError: the configuration is refused, or this user may not read the topic.
            DependencyUnavailableError: nothing came for this many seconds; a transaction that is open in a range ends
                so too.
        """
        from confluent_kafka import TopicPartition

        open_ = {p: r for p, r in ranges.items() if len(r)}
        positions = {p: r.start for p, r in open_.items()}
        level = {} if committed else {"isolation.level": "read_uncommitted"}
        for waits, patience in list_fetch_waits(self._config, seconds):
            if not open_:
                return
            consumer = self.open_reader(**waits, **level)
            try:
                consumer.assign([TopicPartition(topic, p, positions[p]) for p in open_])
                yield from read_records(
                    consumer, topic, open_, positions, patience, partial(self._translate_error, topic)
                )
            finally:
                consumer.close()
        if open_:
            raise self.build_unavailable_error(f"{topic} gave nothing for {seconds:g} s")

    def _read_id_and_leaders(self, topic: str) -> tuple[str, dict[int, int | None]]:
        return find_id_and_leaders(self.read_description(topic))

    def read_description(self, topic: str) -> TopicDescription:
        """ID, partitions, leaders and replicas of a topic.

        Raises:
            TopicAbsentError: there is no such topic; the nearest names are given.
            ConfigurationError: this user may not describe it.
            DependencyUnavailableError: no broker answered in time, or the answer lacks the ID or a partition.
        """
        from confluent_kafka import KafkaError

        found = self._describe([topic])[topic]
        if isinstance(found, KafkaError):
            if found.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise self._build_absent_error(topic)
            raise self._translate_error(topic, found)
        if not is_whole(found):
            raise self.build_unavailable_error(f"the answer for topic {topic} lacks the topic ID or a partition")
        return found

    def _translate_error(self, topic: str, fault: KafkaError) -> HighwaterError:
        if fault.name() != "TOPIC_AUTHORIZATION_FAILED":
            return self.build_unavailable_error(fault)
        return ConfigurationError(
            f"topic {topic} may not be used by this user at {self.bootstrap}",
            found=fault.str(),
            remedy=f"allow the user of {KAFKA_CONFIG} to describe and to read topic {topic}",
        )

    def _build_absent_error(self, topic: str) -> TopicAbsentError:
        near = difflib.get_close_matches(topic, self.list_topic_names(), n=3, cutoff=0.5)
        return TopicAbsentError(
            f"topic {topic!r} does not exist at {self.bootstrap}",
            found=f"nearest names: {', '.join(near)}" if near else "no similar name",
            remedy="create the topic, or fix the name in the stream's declaration",
        )

    def _read_topic_offsets(
        self, topic: str, partitions: list[int], *queries: OffsetQuery | int
    ) -> list[dict[int, Any]]:
        """The answers of `list_offsets` to several queries at once; a partition that could not be asked is left out."""
        if not partitions:
            return [{} for _ in queries]
        from confluent_kafka import TopicPartition

        admin, seconds = self.get_admin(), limit_wait(REQUEST_SECONDS)
        wanted = [TopicPartition(topic, p) for p in partitions]
        try:
            by_query = [self._request_offsets(admin, wanted, query, seconds) for query in queries]
            end = compute_wait_end(seconds)
            return [
                self._await_answers(futures, 0 if isinstance(query, OffsetQuery) else NO_SUCH_RECORD, end)
                for query, futures in zip(queries, by_query, strict=True)
            ]
        finally:
            del admin

    def _request_offsets(
        self, admin: AdminClient, partitions: Sequence[TopicPartition], query: OffsetQuery | int, seconds: float
    ) -> dict[Any, Any]:
        from confluent_kafka import KafkaException

        try:
            return request_offsets(admin, partitions, query, seconds)
        except KafkaException as error:
            raise self.build_unavailable_error(error) from error
        finally:
            del admin

    def _await_answers(self, futures: Mapping[Any, Any], least: int, end: float) -> dict[int, Any]:
        """The answers, without those for a partition that nobody leads.

        While a leader is down, librdkafka also answers offset -1001 without an error.
        """
        from confluent_kafka import KafkaException

        found: dict[int, Any] = {}
        for partition, future in futures.items():
            try:
                answer = future.result(max(0.0, end - time.monotonic()))
                if answer.offset >= least:
                    found[partition.partition] = answer
            except KafkaException as error:
                if error.args[0].code() not in list_no_leader_codes():
                    raise self._translate_error(partition.topic, error.args[0]) from error
            except TimeoutError as error:
                raise self.build_unavailable_error(error) from error
        return found

    def get_admin(self) -> AdminClient:
        """A client for questions and changes that have no method here.

        All threads share it, until one finds the broker unavailable and drops it. So keep a reference until the answers
        are in: without one its requests end (`_DESTROY`) as if no broker had answered. Drop the reference then: one in
        the traceback of an error would keep the client connecting.

        Raises:
            ConfigurationError: the configuration is refused.
        """
        with _OPENING:  # two threads would each open one, and the later take the earlier one's place
            return self._open_admin()

    def _open_admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        found = self._admin  # read once: another thread may find the broker unavailable, and give it up
        if found is None:
            config = self.build_client_config()
            config.pop("allow.auto.create.topics")  # an admin client has no such property and never creates one
            # To librdkafka it is a producer, and would ask the brokers for the identity of an idempotent one.
            config.pop("enable.idempotence", None)
            self._refusals.clear()
            # No method of this object: the client would hold it, and it holds the client.
            config["error_cb"] = partial(_note_refusal, self._refusals)
            found = self._admin = open_client(AdminClient, config, given=self._config)
        return found

    def drop_admin(self) -> str:
        """Let the next request open a client of its own; returns why a broker refused the login, or nothing.

        A client that knew a controller which is gone waits for that one for minutes; a new one asks who it is now.
        """
        admin, self._admin = self._admin, None
        if admin is not None:
            admin.poll(0)  # only then it says what its connections met
        return "; ".join(self._refusals)

    def open_reader(self, **changes: Any) -> Consumer:
        """A consumer as all of ours are: to be assigned, never subscribed, and committing nothing (I12).

        Raises:
            ConfigurationError: the configuration is refused.
        """
        from confluent_kafka import Consumer

        waits = {} if WAITS.keys() & self._config.keys() else WAITS
        return open_client(Consumer, self.build_client_config(**{**waits, **READER, **changes}), given=self._config)

    def build_unavailable_error(self, error: object) -> DependencyUnavailableError:
        """The error for a broker that gave no answer; what the client said of it is repeated without secrets."""
        if is_out_of_time():
            return build_out_of_time_error()
        refusal = self.drop_admin()
        return DependencyUnavailableError(
            f"Kafka at {self.bootstrap} did not answer",
            found=redact_values("; ".join(filter(None, (str(error), refusal))), self._config) or type(error).__name__,
            remedy=f"correct the login in {KAFKA_CONFIG}, as docs/security.md says; it is tried again"
            if refusal
            # To a listener of another protocol the client gets no answer, and reports nothing else.
            else "check that the brokers of HIGHWATER_KAFKA_BOOTSTRAP run and can be reached, and that "
            f"security.protocol of {KAFKA_CONFIG} is that of their listener; it is tried again",
            of=KAFKA,
        )


def _note_refusal(refusals: deque[str], error: Any) -> None:
    """Remember why a login failed: a request only says that nothing came in time."""
    from confluent_kafka import KafkaError

    if error.code() in {KafkaError._AUTHENTICATION, KafkaError._SSL}:  # noqa: SLF001 - their public names
        refusals.append(error.str()[:LONGEST_REFUSAL])
