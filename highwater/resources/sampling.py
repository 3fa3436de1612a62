"""Samples of a topic, read without a group and without a commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from highwater.resources.kafka import Kafka
from highwater.sampling import (
    READ_FOR_REPEATS,
    Part,
    build_window,
    compute_shares,
    needs_repeats,
    select_repeats,
    split_share,
)
from highwater.second_reader import KafkaRecord
from highwater.slices import OffsetRange

# Compaction and markers leave offsets without a record. Each further round reads a window four times as wide, so the
# last of six is 4**5 = 1,024 times as wide as the number of records that is wanted.
ROUNDS = 6
WIDER = 4


def sample(kafka: Kafka, topic: str, count: int, only: Part | None = None) -> list[KafkaRecord]:
    """Some committed records of a topic, by partition and offset.

    Args:
        kafka: the cluster.
        topic: the topic.
        count: how many records at most; fewer if the topic holds fewer.
        only: the end of the log to read; None for both.

    Raises:
        TopicAbsentError: there is no such topic.
        OffsetsExpiredError: retention deleted records during the read.
        DependencyUnavailableError: no broker answered in time.
    """
    logs = kafka.read_topic_state(topic).list_offset_ranges()
    found: dict[tuple[int, int], KafkaRecord] = {}
    wanted = compute_shares({partition: len(log) for partition, log in logs.items()}, count)
    for part in ("beginning", "end") if only is None else (only,):
        numbers = {p: share if only else split_share(share)[part] for p, share in wanted.items()}
        found.update(_read_part(kafka, topic, logs, numbers, part))
    return [found[place] for place in sorted(found)]


def sample_repeats(
    kafka: Kafka, topic: str, sampled: Sequence[KafkaRecord], only: Part | None = None
) -> list[KafkaRecord]:
    """Further records with the keys of a sample, where few of its keys occur twice.

    Args:
        kafka: the cluster.
        topic: the topic.
        sampled: the sample.
        only: the end of the log that was sampled; None for both.

    Raises:
        TopicAbsentError, OffsetsExpiredError, DependencyUnavailableError: as for `sample`.
    """
    if not needs_repeats(sampled):
        return []
    logs = kafka.read_topic_state(topic).list_offset_ranges()
    wanted = compute_shares({partition: len(log) for partition, log in logs.items()}, READ_FOR_REPEATS * len(sampled))
    windows = {
        partition: build_window(logs[partition], number, only or "beginning") for partition, number in wanted.items()
    }
    return select_repeats(sampled, map(build_record, kafka.read(topic, windows)))


def _read_part(
    kafka: Kafka, topic: str, logs: Mapping[int, OffsetRange], numbers: Mapping[int, int], part: Part
) -> dict[tuple[int, int], KafkaRecord]:
    """The first or the last records of each partition, as many as are asked for."""
    by_partition: dict[int, list[KafkaRecord]] = {}
    open_ = {partition: number for partition, number in numbers.items() if number}
    for round_ in range(ROUNDS):
        windows = {p: build_window(logs[p], number * WIDER**round_, part) for p, number in open_.items()}
        read = defaultdict(list)
        for message in kafka.read(topic, windows):
            read[message.partition()].append(build_record(message))
        for partition, number in list(open_.items()):
            records = read[partition]
            by_partition[partition] = records[:number] if part == "beginning" else records[-number:]
            if len(records) >= number or windows[partition] == logs[partition]:
                del open_[partition]
        if not open_:
            break
    return {(one.partition, one.offset): one for records in by_partition.values() for one in records}


def build_record(message: Any) -> KafkaRecord:
    """A record as the client read it."""
    return KafkaRecord(
        value=message.value(),
        key=message.key(),
        headers=tuple(message.headers() or ()),
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        timestamp_ms=message.timestamp()[1],
    )
