"""The producer of the demonstration's shipments, and the comparison of their tables with what it wrote."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dev.compare import Comparison
from dev.generator import Summary, Target, create_topic
from dev.readings import Row, read_rows
from dev.shipments import ADDED, FIRST_SCHEMA, PARTITIONS, SECOND_SCHEMA, STREAM, first_batch, second_batch
from highwater.errors import ConfigurationError, HighwaterError
from highwater.resources.producer import ReliableProducer
from highwater.resources.producer_properties import build_producer_properties
from highwater.resources.producer_records import Record
from highwater.resources.schema_registry import SchemaRegistry
from highwater.settings import SCHEMA_REGISTRY_URL, Settings

NAME = STREAM.name
COLUMNS = (*(field.name for field in STREAM.fields), ADDED)
# The number of a comparison.
WITH_ADDED = f"events with {ADDED}"


class Shipments:
    """Writes shipments in two batches: the second one by a schema that the tables do not know yet.

    Args:
        target: the brokers.
        registry_url: the schema registry.

    Attributes:
        written: the values of all records, in the order in which they were written.
        is_complete: whether both batches are written.
    """

    def __init__(self, target: Target, registry_url: str) -> None:
        self.written: list[Mapping[str, Any]] = []
        self._target = target
        self._registry_url = registry_url
        self.is_complete = False

    def begin(self) -> Summary:
        """Create the topic and write the first batch."""
        create_topic(self._target, STREAM.topic, PARTITIONS)
        return self._write(FIRST_SCHEMA, first_batch())

    def complete(self) -> Summary:
        """Write the second batch."""
        summary = self._write(SECOND_SCHEMA, second_batch())
        self.is_complete = True
        return summary

    def _write(self, schema: str, batch: Sequence[Mapping[str, Any]]) -> Summary:
        """Write values with the registry's framing, as any producer of Confluent's client does."""
        from confluent_kafka.schema_registry import SchemaRegistryClient
        from confluent_kafka.schema_registry.avro import AvroSerializer
        from confluent_kafka.serialization import MessageField, SerializationContext

        began = time.monotonic()
        serialise = AvroSerializer(SchemaRegistryClient({"url": self._registry_url}), schema)
        context = SerializationContext(STREAM.topic, MessageField.VALUE)
        producer = ReliableProducer(build_producer_properties(self._target.bootstrap, self._target.config))
        for values in batch:
            producer.send(Record(STREAM.topic, values["shipment_id"].encode(), serialise(values, context)))
        producer.close()
        self.written.extend(batch)
        return Summary(len(batch), time.monotonic() - began)


def compare_shipments(written: Sequence[Mapping[str, Any]], lake: str) -> Comparison:
    """Compare `events` and `current` with the written values; rows of the first schema have null in the added column.

    Args:
        written: the values in the order in which they were written, each key's revisions ascending.
        lake: root of the lake, as delta-rs opens it.
    """
    made = Comparison(NAME)
    rows = {table: read_rows(f"{lake}/{NAME}/{table}") for table in ("raw", "events", "rejects", "current")}
    expected = [{name: values.get(name) for name in COLUMNS} for values in written]
    _compare_rows("events", {_revision(row): row for row in expected}, rows["events"], made)
    newest = {row["shipment_id"]: row for row in expected}
    _compare_rows("current", {_revision(row): row for row in newest.values()}, rows["current"], made)
    made.numbers["slices"] = len({row["slice"] for row in rows["raw"]})
    made.numbers["records written"] = len(written)
    made.numbers.update({"rows of raw": len(rows["raw"]), "events": len(rows["events"])})
    made.numbers.update({"rejects": len(rows["rejects"]), "rows of current": len(rows["current"])})
    made.numbers[WITH_ADDED] = sum(row.get(ADDED) is not None for row in rows["events"])
    return made


def _revision(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["shipment_id"], row["revision"]


def _compare_rows(
    table: str, expected: Mapping[tuple[str, int], Mapping[str, Any]], found: Sequence[Row], made: Comparison
) -> None:
    counts = Counter(map(_revision, found))
    for revision in sorted(expected.keys() | counts.keys()):
        number = int(revision in expected)
        made.differences.compare(
            f"{table}: another number of rows than was written", revision, number, counts[revision]
        )
    for row in found:
        revision = _revision(row)
        if revision in expected:
            values = {name: row.get(name) for name in COLUMNS}
            made.differences.compare(f"{table}: other values than were written", revision, expected[revision], values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both batches to the configured broker, for trials beside `make up`."""
    argparse.ArgumentParser(
        prog="python -m dev.demo_shipments", description="Write 400 records of two Avro schemas to the topic shipments."
    ).parse_args(arguments)
    try:
        found = Settings.from_environment(os.environ)
        if found.schema_registry_url is None:
            raise ConfigurationError(
                "no schema registry is configured",
                remedy=f"start `make up ARGS=--registry` and `source .highwater/env`, or set {SCHEMA_REGISTRY_URL}",
            )
        # Highwater's client has the words for a registry that is unavailable; the serializer raises its HTTP client's
        # errors.
        SchemaRegistry(found.schema_registry_url, found.schema_registry_config).list_subjects()
        target = Target(found.kafka_bootstrap, found.home, found.lake, found.kafka_config)
        shipments = Shipments(target, found.schema_registry_url)
        for summary in (shipments.begin(), shipments.complete()):
            print(summary)
    except HighwaterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
