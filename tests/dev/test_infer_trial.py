"""The topics of the trial of `infer`, classified without services by what a sample of them gives."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from dev.infer_trial_topics import TOPICS, Account, Topic
from highwater.classifying import classify
from highwater.inference import infer
from highwater.sampling import compute_shares, needs_repeats, select_repeats, split_share
from highwater.schemas import Schema
from highwater.second_reader import KafkaRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from highwater.declaration import Stream

RECORDS = 6_000
SAMPLED = 1_000
PARTITIONS = 3
COMPACTED = "cleanup.policy"


class FakeRegistry:
    """Schemas by their IDs, as a registry counts them."""

    def __init__(self) -> None:
        self._schemas: list[Schema] = []

    def register(self, subject: str, schema: str, kind: Any) -> int:
        del subject
        self._schemas.append(Schema(id=len(self._schemas) + 1, kind=kind, text=schema))
        return len(self._schemas)

    def find(self, named: int | str) -> Schema | None:
        return next((one for one in self._schemas if one.id == named), None)


def written(topic: Topic, account: Account, registry: FakeRegistry) -> list[KafkaRecord]:
    """The records as a topic of three partitions holds them."""
    found, ends = [], [0] * PARTITIONS
    for number, sent in enumerate(topic.write(RECORDS, account, registry.register)):
        partition = (number if sent.key is None else zlib.crc32(sent.key)) % PARTITIONS
        record = KafkaRecord(
            sent.value, sent.key, sent.headers, topic.name, partition, ends[partition], sent.timestamp_ms
        )
        found.append(record)
        ends[partition] += 1
    return found


def sampled(records: Sequence[KafkaRecord]) -> list[KafkaRecord]:
    """The first and the last records of each partition, and repeats of their keys, as the command samples them."""
    logs: Mapping[int, list[KafkaRecord]] = defaultdict(list)
    for record in records:
        logs[record.partition].append(record)
    wanted = compute_shares({partition: len(log) for partition, log in logs.items()}, SAMPLED)
    found = []
    for partition, share in wanted.items():
        parts = split_share(share)
        found += [*logs[partition][: parts["beginning"]], *logs[partition][-parts["end"] :]]
    return [*found, *(select_repeats(found, records) if needs_repeats(found) else [])]


def live(stream: Stream, records: Sequence[KafkaRecord], registry: FakeRegistry) -> tuple[Counter[str], set[str]]:
    """How many records are of each kind, and the keys that the version rule leaves."""
    kinds: Counter[str] = Counter()
    newest: dict[str, tuple[Any, ...]] = {}
    for record in records:
        outcome = classify(stream, record, registry.find)
        kinds[outcome.kind] += 1
        if outcome.kind in {"event", "delete"} and stream.version is not None:
            state = (outcome.version, outcome.kind)
            newest[str(outcome.key)] = max(newest.get(str(outcome.key), state), state, key=lambda one: one[0])
    return kinds, {key for key, (_, kind) in newest.items() if kind == "event"}


@pytest.mark.parametrize("name", TOPICS)
def test_stream_inferred_from_a_sample_classifies_the_whole_topic(name: str) -> None:
    topic, account, registry = TOPICS[name], Account(), FakeRegistry()
    records = written(topic, account, registry)
    schemas = registry.find if topic.registry else None
    compacted = "compact" in topic.config.get(COMPACTED, "")
    inferred = infer(topic.name, sampled(records), schemas=schemas, compacted=compacted)
    assert inferred.stream.name == topic.stream
    kinds, keys = live(inferred.stream, records, registry)
    wanted = (account.events - account.deletes, account.deletes, account.rejects, account.tombstones)
    assert tuple(kinds[kind] for kind in ("event", "delete", "reject", "tombstone")) == wanted
    assert (len(keys) if inferred.stream.version is not None else None) == account.current
