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
@as_json_option
@deployment_of
def try_stream(deployment: Deployment, stream: str, most: int, file: Path | None, as_json: bool) -> None:  # noqa: FBT001 - click's flag
    """Classify a sample of STREAM's topic by its declaration, and write nothing.

    The command commits no offset and joins no consumer group. Lookups and transitions are not part of it. The exit
    status is 0 whatever the records are, as long as they can be read.
    """
    from highwater.sample_counts import COUNT_NAMES, count_sample

    declared = deployment.find_stream(stream)
    schemas = deployment.open_schema_finder()
    if getattr(declared.value, "registry", False) and schemas is None:
        raise ConfigurationError(
            f"stream {stream} needs a schema registry, and none is configured",
            stored=f"value={type(declared.value).__name__}",
            remedy=f"set {SCHEMA_REGISTRY_URL} to the registry's address, then repeat the command",
        )
    records = _read_records(deployment, declared, most, file)
    counts = count_sample(declared, records, schemas)
    if as_json:
        print_json({"stream": stream, "topic": declared.topic, **counts.to_plain()})
        return
    where = declared.topic if file is None else file.name
    keys = f", {counts.keys:,} keys" if declared.key else ""
    print_lines([f"{stream}: {counts.records:,} records of {where}{keys}", ""])
    if counts.records:
        print_table(COUNT_NAMES, counts.rows)


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
