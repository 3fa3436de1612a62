"""What tests of crashes and faults share: a deployment as processes see it, and what its tables must hold.

The expected rows are worked out here, from the records that were sent and a plain consumer's reading of the topic, by
means of their own; nothing of the pipeline is asked.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dev.processes import wait_until
from highwater import settings
from highwater.declaration import Limits
from highwater.gaps import PartitionOffset
from highwater.resources.lake import Lake
from tests.helpers.support import Message, customers, make_stream, order_message, read_rows, read_topic, send

if TYPE_CHECKING:
    import dagster as dg

    from highwater.declaration import Stream

PARTITIONS = 3
TABLES = ("raw", "events", "rejects", "current")
EVENT, TOMBSTONE = "event", "tombstone"


def build_stream(topic: str) -> Stream:
    """The stream `orders` on another topic, in small slices."""
    stream = make_stream(topic)
    return replace(stream, limits=Limits(max_offsets=120, slices_per_run=5))


def build_faulty_record(number: int) -> tuple[Message, str]:
    """A record, the same for the same number and unique among all, and how it must end."""
    key, version, partition = f"o{number % 40}", number // 40 + 1, number % PARTITIONS
    if number % 19 == 4:
        return Message(key.encode(), None, partition), TOMBSTONE
    changes, end = _fault(number)
    return order_message(key, version, partition, n=number, **changes), end


def _fault(number: int) -> tuple[dict[str, object], str]:
    if number % 11 == 3:
        return {"amount": "twelve"}, "malformed"
    if number % 13 == 5:
        return {"status": "lost"}, "invalid"
    if number % 7 == 6:
        return {"customer_id": "c2"}, "unresolved"
    return {"amount": number + 0.25}, EVENT


@dataclass
class Deployment:
    """A stream on a topic of its own, with a lake, a ledger and a Dagster instance of its own below one folder.

    Args:
        stream: the stream.
        home: everything is below it.
        bootstrap: the broker.
        spark: the variables that say which Spark is used.
        ends: how a record must end, by its value.
    """

    stream: Stream
    home: Path
    bootstrap: str
    spark: Mapping[str, str]
    ends: dict[bytes, str] = field(default_factory=dict)
    sent: int = 0

    @classmethod
    def make(cls, topic: str, home: Path, bootstrap: str, spark: Mapping[str, str]) -> Deployment:
        from dev.dagster_services import prepare_home

        prepare_home(home / "dagster", ours=True)
        made = cls(build_stream(topic), home, bootstrap, spark)
        customers(made.lake, ["c1"])
        return made

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process joins."""
        ours = {
            settings.HOME: str(self.home),
            settings.KAFKA_BOOTSTRAP: self.bootstrap,
            "DAGSTER_HOME": str(self.home / "dagster"),
            "DAGSTER_DISABLE_TELEMETRY": "1",
        }
        # Spark's own variables, which a session of the tests' process leaves there, would make a driver a client.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
        return {**inherited, **ours, **self.spark}

    @property
    def lake(self) -> Lake:
        return Lake(str(self.home / "lake"))

    def path(self, table: str) -> Path:
        return Path(self.lake.build_table_path(self.stream.name, table))

    @contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        """Dagster's instance, opened afresh."""
        import dagster as dg

        with dg.DagsterInstance.from_config(str(self.home / "dagster")) as opened:
            yield opened

    def send(self, records: int) -> None:
        """Send further records, each tenth of them twice."""
        messages = []
        for number in range(self.sent, self.sent + records):
            message, end = build_faulty_record(number)
            if message.value is not None:
                self.ends[message.value] = end
            messages += [message] * (2 if number % 10 == 9 else 1)
        self.sent += records
        send(self.bootstrap, self.stream.topic, messages)

    def abort(self, records: int = 3) -> None:
        """Send records to every partition that are never committed: offsets without a record."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": self.stream.topic})
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(records * PARTITIONS):
            producer.produce(self.stream.topic, value=b"aborted", partition=number % PARTITIONS)
        producer.flush(30)
        producer.abort_transaction(30)
        # The broker answers before each partition has its marker; until then the last stable offset stays.
        wait_until(self._all_stable, 30, "the markers of the aborted transaction")

    def _all_stable(self) -> bool:
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import AdminClient, OffsetSpec

        specs: Any = OffsetSpec  # its constructors have no types
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        asked = {TopicPartition(self.stream.topic, number): specs.latest() for number in range(PARTITIONS)}

        def ends(isolation: IsolationLevel) -> list[int]:
            answers = admin.list_offsets(asked, isolation_level=isolation).values()
            return [answer.result(60).offset for answer in answers]

        return ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED)

    def slices(self) -> dict[str, dict[int, tuple[int, int]]]:
        """The planned ranges by slice, read from the ledger's file by SQL."""
        file = self.home / "ledger.sqlite"
        if not file.exists():
            return {}
        with closing(sqlite3.connect(file)) as database:
            query = "SELECT slice_key, ranges FROM slices WHERE stream = ? ORDER BY ordinal"
            rows = database.execute(query, [self.stream.name]).fetchall()
        return {key: {int(p): (a, b) for p, (a, b) in json.loads(text).items()} for key, text in rows}

    def shuffled(self, seed: int) -> list[str]:
        """The planned slices in another order."""
        keys = [*self.slices()]
        random.Random(seed).shuffle(keys)
        return keys

    def slice_commits(self, table: str) -> dict[str, dict[str, Any]]:
        """What the newest commit of each slice in a table says of it; empty while there is no table."""
        if not [*(self.path(table) / "_delta_log").glob("*.json")]:
            return {}
        return load_committed_slices(str(self.path(table)))

    def materialised(self, table: str) -> set[str]:
        """The slices that Dagster holds as materialised."""
        import dagster as dg

        with self.instance() as instance:
            return set(instance.get_materialized_partitions(dg.AssetKey([self.stream.name, table])))

    def end_dead_runs(self) -> None:
        """What the daemon does of runs whose worker is gone: they fail, and let go of their places in the pools."""
        import dagster as dg

        unfinished = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED])
        with self.instance() as instance:
            for run in instance.get_runs(unfinished):
                instance.report_run_failed(run)
                instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)

    def keys_in_dagster(self) -> list[str]:
        """The partitions that Dagster holds."""
        with self.instance() as instance:
            return list(instance.get_dynamic_partitions(self.stream.partitions_name))

    def check_whole(self, *, late: Collection[str] = ()) -> None:
        """Hold plan and tables against the topic: every record once, in its place, byte by byte.

        Args:
            late: customers that became known meanwhile: their records may be in events or in rejects, never in both.
        """
        topic = read_topic(self.bootstrap, self.stream.topic)
        owner = self._owners()
        assert set(topic) <= set(owner), "committed records that no slice holds"
        raw = Counter(
            (row["slice"], row["partition"], row["offset"], row["key"], row["value"])
            for row in read_rows(str(self.path("raw")))
        )
        assert raw == Counter((owner[place], *place, key, value) for place, (key, value) in topic.items())
        events, rejects = read_rows(str(self.path("events"))), read_rows(str(self.path("rejects")))
        accepted = {origin(row) for row in events if row["customer_id"] in late}
        ensure_events(events, topic, owner, self.ends, accepted)
        ensure_rejects(rejects, topic, owner, self.ends, accepted, self.stream.topic)
        ensure_current(read_rows(str(self.path("current"))), events, owner)
        self._ensure_slice_commits()

    def _owners(self) -> dict[PartitionOffset, str]:
        """The slice of every planned offset; the ranges must tile."""
        owner: dict[PartitionOffset, str] = {}
        position = dict.fromkeys(range(PARTITIONS), 0)
        for key, ranges in self.slices().items():
            for partition, (start, end) in ranges.items():
                assert start == position[partition], f"{key}: partition {partition} leaves a hole or overlaps"
                position[partition] = end
                owner.update({(partition, offset): key for offset in range(start, end)})
        return owner

    def _ensure_slice_commits(self) -> None:
        planned = self.slices()
        slice_commits = {table: self.slice_commits(table) for table in TABLES}
        for table, found in slice_commits.items():
            assert set(found) == set(planned), (
                f"{table}: slices without a slice commit, or slice commits without a plan"
            )
        for key, ranges in planned.items():
            assert slice_commits["raw"][key]["ranges"] == {str(p): list(bounds) for p, bounds in ranges.items()}
            attempts = {table: slice_commits[table][key]["attempt"] for table in TABLES[1:]}
            assert len(set(attempts.values())) == 1, f"{key}: tables of two decisions {attempts}"


def load_committed_slices(path: str) -> dict[str, dict[str, Any]]:
    """What the newest commit of a table says of each slice, by the table's own log."""
    from deltalake import DeltaTable

    found: dict[str, dict[str, Any]] = {}
    for entry in reversed(DeltaTable(path).history()):
        if "highwater" not in (entry.get("userMetadata") or ""):
            continue
        metadata = json.loads(entry["userMetadata"])["highwater"]
        for topic, spans in metadata["slices"].items():
            for first, last, attempt in spans:
                found |= {f"{topic}@{ordinal:07d}": {"attempt": attempt} for ordinal in range(first, last + 1)}
        found |= {one["slice"]: one for one in metadata["records"]}
    return found


def origin(row: Mapping[str, Any]) -> PartitionOffset:
    return row["origin_partition"], row["origin_offset"]


Topic = Mapping[PartitionOffset, tuple[bytes | None, bytes | None]]


def ensure_events(
    rows: Sequence[Mapping[str, Any]],
    topic: Topic,
    owner: Mapping[PartitionOffset, str],
    ends: Mapping[bytes, str],
    accepted: Collection[PartitionOffset],
) -> None:
    """Every sound record is an event once, with its own fields."""
    expected = Counter(
        (owner[place], place, *_fields(key, value))
        for place, (key, value) in topic.items()
        if key is not None and value is not None and (ends[value] == EVENT or place in accepted)
    )
    names = ("key", "version", "status", "customer_id", "amount", "event_time")
    found = Counter((row["slice"], origin(row), *(row[name] for name in names)) for row in rows)
    assert found == expected


def _fields(key: bytes, value: bytes) -> tuple[object, ...]:
    plain = json.loads(value, parse_float=Decimal)
    return (
        key.decode(),
        plain["version"],
        plain["status"],
        plain["customer_id"],
        Decimal(plain["amount"]).quantize(Decimal("0.01")),
        datetime.fromisoformat(plain["event_time"]),
    )


def ensure_rejects(
    rows: Sequence[Mapping[str, Any]],
    topic: Topic,
    owner: Mapping[PartitionOffset, str],
    ends: Mapping[bytes, str],
    accepted: Collection[PartitionOffset],
    name: str,
) -> None:
    """Every other record that is no tombstone is a reject once, with its reason and its bytes."""
    expected = Counter(
        (owner[place], place, ends[value], key, value, _goes_to(name, ends[value]))
        for place, (key, value) in topic.items()
        if value is not None and ends[value] != EVENT and place not in accepted
    )
    columns = ("reason", "key", "value", "next_topic")
    assert Counter((row["slice"], origin(row), *(row[c] for c in columns)) for row in rows) == expected


def _goes_to(topic: str, reason: str) -> str:
    return f"{topic}.dlq.1" if reason == "unresolved" else f"{topic}.parked"


def ensure_current(
    rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], owner: Mapping[PartitionOffset, str]
) -> None:
    """The winner of each key is its highest version, and the earliest origin of it."""
    expected: dict[str, tuple[int, PartitionOffset, str]] = {}
    for row in events:
        best = expected.get(row["key"])
        if best is None or (row["version"], [-n for n in origin(row)]) > (best[0], [-n for n in best[1]]):
            expected[row["key"]] = (row["version"], origin(row), owner[origin(row)])
    found: dict[str, tuple[int, PartitionOffset, str]] = {}
    for row in rows:
        best = found.get(row["key"])
        assert best is None, f"current has several rows for {row['key']}"
        found[row["key"]] = (row["version"], origin(row), row["updated_by_slice"])
    assert found == expected
