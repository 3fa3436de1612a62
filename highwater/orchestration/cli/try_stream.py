"""The command `try`: how a stream's declaration classifies a sample of its topic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import as_json_option, deployment_of, print_json, print_lines, print_table
from highwater.orchestration.deployment import Deployment
from highwater.settings import SCHEMA_REGISTRY_URL

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.sample_counts import SampleCounts
    from highwater.second_reader import KafkaRecord


@click.command("try")
@click.argument("stream")
@click.option(
    "--records", "most", type=click.IntRange(min=1), default=1000, show_default=True, help="Records to sample."
)
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take records from this file instead: one JSON object a line with key_hex, value_hex, headers, timestamp_ms.",
)
@click.option(
    "--spark/--no-spark",
    "by_spark",
    default=None,
    help="Classify in Spark, as runs do, or without it; by default in Spark where the stream has rules or expressions.",
)
@as_json_option
@deployment_of
def try_stream(
    deployment: Deployment, *, stream: str, most: int, file: Path | None, by_spark: bool | None, as_json: bool
) -> None:
    """Classify a sample of STREAM's topic by its declaration, and write nothing.

    The command commits no offset and joins no consumer group. Without Spark it leaves out rules, expressions and the
    lookup, and says so. The exit status is 0 even if all records are rejected, as long as they can be read.
    """
    from highwater.sample_counts import COUNT_NAMES, count_sample

    declared = deployment.find_stream(stream)
    schemas = deployment.open_schema_finder()
    by_registry = [one for one in (declared.value, declared.key_format) if getattr(one, "registry", False)]
    if by_registry and schemas is None:
        raise ConfigurationError(
            f"stream {stream} needs a schema registry, and none is configured",
            stored=f"format {type(by_registry[0]).__name__}",
            remedy=f"set {SCHEMA_REGISTRY_URL} to the registry's address, then repeat the command",
        )
    records = _read_records(deployment, declared, most, file)
    skipped = _list_needs_of_spark(declared)
    if by_spark or (by_spark is None and (declared.rules or any(f.expression is not None for f in declared.fields))):
        counts, skipped = _count_by_spark(deployment, declared, records), []
    else:
        counts = count_sample(declared, records, schemas)
    if as_json:
        print_json({"stream": stream, "topic": declared.topic, **counts.to_plain(), "left_out": skipped})
        return
    where = declared.topic if file is None else file.name
    keys = f", {counts.keys:,} keys" if declared.key else ""
    left_out = [f"left out: {', '.join(skipped)}; --spark classifies with them"] if skipped else []
    print_lines([f"{stream}: {counts.records:,} records of {where}{keys}", *left_out, ""])
    if counts.records:
        print_table(COUNT_NAMES, counts.rows)


def _list_needs_of_spark(stream: Stream) -> list[str]:
    """The parts of a declaration that only Spark computes."""
    computed = [f"field {f.name}" for f in stream.fields if f.expression is not None]
    lookup = [] if stream.lookup is None else [f"the lookup of {stream.lookup.field}"]
    return [*computed, *(f"rule {name}" for name in stream.rules), *lookup]


def _count_by_spark(deployment: Deployment, stream: Stream, records: list[KafkaRecord]) -> SampleCounts:
    from highwater.assets.sample_classification import classify_records
    from highwater.orchestration.resources import use_session
    from highwater.sample_counts import count_outcomes

    with use_session(deployment.settings) as spark:
        work = deployment.open_work(stream, spark, lambda _: None)
        return count_outcomes(records, classify_records(work, records))


def _read_records(deployment: Deployment, stream: Stream, most: int, file: Path | None) -> list[KafkaRecord]:
    from highwater.resources.sampling import sample
    from highwater.sample_counts import parse_record_lines

    if file is None:
        return sample(deployment.open_kafka(), stream.topic, most)
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file.name} is not text in UTF-8", remedy="write a line of JSON a record") from error
    return parse_record_lines(lines, stream.topic)[:most]
