"""The command `infer`: a declaration for a topic that has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from highwater.errors import ConfigurationError
from highwater.orchestration.cli.terminal import as_json_option, deployment_of, print_json, print_lines, print_table
from highwater.orchestration.deployment import Deployment
from highwater.settings import SCHEMA_REGISTRY_URL

if TYPE_CHECKING:
    from highwater.decoding import Schemas
    from highwater.inference import Column, Inferred
    from highwater.sample_counts import SampleCounts
    from highwater.second_reader import KafkaRecord

PARTS = {"earliest": "beginning", "latest": "end"}
_SHOWN_NAMES = 20
CHOICES = {
    "format": "format",
    "envelope": "envelope",
    "key": "key",
    "version": "version",
    "event_time": "event time",
    "deletes": "deletes",
    "record_key": "record key",
    "key_format": "key format",
}


@click.command()
@click.argument("topic")
@click.option(
    "--records", "most", type=click.IntRange(min=1), default=1000, show_default=True, help="Records to sample."
)
@click.option(
    "--from", "part", type=click.Choice([*PARTS]), help="Sample one end of each partition; both ends by default."
)
@click.option("--name", help="The stream's name; made from the topic's by default.")
@click.option("--subject", help="Use the newest schema of this subject instead of records.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The file; <name>.py among the streams.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.option("--print", "only_print", is_flag=True, help="Print the declaration, and write no file.")
@as_json_option
@deployment_of
def infer(
    deployment: Deployment,
    *,
    topic: str,
    most: int,
    part: str | None,
    name: str | None,
    subject: str | None,
    out: Path | None,
    force: bool,
    only_print: bool,
    as_json: bool,
) -> None:
    """Sample TOPIC, infer its declaration, and write it as a stream's file.

    The command commits no offset and joins no consumer group. It shows why each choice was made, and how the pipeline
    would classify the sample.
    """
    from highwater.inference import build_stream_name
    from highwater.sample_counts import count_sample

    file = out or _select_streams_folder() / f"{name or build_stream_name(topic)}.py"
    if not only_print:
        _ensure_writable(file, force=force)
    schemas = deployment.open_schema_finder()
    if subject is None:
        records, further = _sample_topic(deployment, topic, most, part)
        found = _infer_from(deployment, topic, name, [*records, *further], schemas)
    else:
        records, found = [], _infer_subject(deployment, topic, name, subject)
    counts = count_sample(found.stream, records, schemas)
    source = _build_source(found, topic, len(records))
    if not only_print:
        _write(file, source)
    if as_json:
        print_json(_to_plain(found, counts, source, None if only_print else file))
    elif only_print:
        click.echo(source, nl=False)
    else:
        _show(found, counts, file)


def _select_streams_folder() -> Path:
    """The folder of the declared streams that this call of `highwater` uses."""
    from highwater.stream_files import find_streams_folder

    given: Path | None = click.get_current_context().find_root().params.get("declarations")
    return given or find_streams_folder()


def _ensure_writable(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigurationError(
            f"{file} exists",
            remedy="give the stream another name with --name, replace the file with --force, or look with --print",
        )
    if not file.parent.is_dir():
        raise ConfigurationError(f"{file.parent} is no folder", remedy="create it, or name another file with --out")


def _sample_topic(
    deployment: Deployment, topic: str, most: int, part: str | None
) -> tuple[list[KafkaRecord], list[KafkaRecord]]:
    """The sample, and further records with its keys."""
    from highwater.resources.sampling import sample, sample_repeats

    only: Any = None if part is None else PARTS[part]
    records = sample(deployment.open_kafka(), topic, most, only)
    if not records:
        raise ConfigurationError(
            f"topic {topic} has no committed records",
            remedy="wait for the first record, or give a registered schema with --subject",
        )
    return records, sample_repeats(deployment.open_kafka(), topic, records, only)


def _infer_from(
    deployment: Deployment, topic: str, name: str | None, records: list[KafkaRecord], schemas: Schemas | None
) -> Inferred:
    from highwater.inference import infer as infer_stream
    from highwater.resources.topic_facts import fetch_topic_settings

    settings = fetch_topic_settings(deployment.open_kafka(), topic)
    policy = "" if settings is None or "cleanup.policy" not in settings else settings["cleanup.policy"].value
    return infer_stream(topic, records, name=name, schemas=schemas, compacted="compact" in (policy or ""))


def _infer_subject(deployment: Deployment, topic: str, name: str | None, subject: str) -> Inferred:
    from highwater.inference import infer_from_schema
    from highwater.resources.schema_registry import open_registry

    registry = open_registry(deployment.settings)
    if registry is None:
        raise ConfigurationError(
            "--subject needs a schema registry, and none is configured",
            remedy=f"set {SCHEMA_REGISTRY_URL} to the registry's address, then repeat the command",
        )
    try:
        schema = registry.fetch_latest_schema(subject)
        if schema is None:
            raise ConfigurationError(
                f"the schema registry has no subject {subject!r}",
                found=f"subjects: {', '.join(registry.list_subjects()[:20]) or 'none'}",
                remedy="name one of its subjects with --subject",
            )
    finally:
        registry.close()
    return infer_from_schema(topic, schema, name=name)


def _build_source(found: Inferred, topic: str, records: int) -> str:
    from highwater.stream_source import to_source

    of = f"{records:,} sampled records" if records else "a registered schema"
    summary = f"The topic {topic}, as highwater infer declared it by {of}."
    return to_source(found.stream, summary=summary, comments=found.comments, field_comments=found.field_reasons)


def _write(file: Path, source: str) -> None:
    """Write the file; what was there before comes back if it contradicts another file of the streams' folder."""
    from highwater.stream_files import read_streams

    before = file.read_text("utf-8") if file.exists() else None
    file.write_text(source, "utf-8")
    if file.parent.resolve() != _select_streams_folder().resolve():
        return
    fault = read_streams(file.parent).faults.get(file)
    if fault is None:
        return
    if before is None:
        file.unlink()
    else:
        file.write_text(before, "utf-8")
    raise fault


def _show(found: Inferred, counts: SampleCounts, file: Path) -> None:
    from highwater.sample_counts import COUNT_NAMES

    print_lines([f"stream {found.stream.name} on topic {found.stream.topic}", ""])
    width = max(map(len, CHOICES.values()))
    print_lines(
        [
            f"{label.ljust(width)}  {found.reasons[choice]}"
            for choice, label in CHOICES.items()
            if choice in found.reasons
        ]
    )
    print_lines([""])
    print_table(["column", "type", "from", "filled", "example"], [_build_row(one) for one in found.columns])
    if found.left_out:
        print_lines(["", f"without a column, since no source can name them: {_list_names(found.left_out)}"])
    if found.headers:
        print_lines(["", f"headers without a column (source=Header(…) adds one): {_list_names(found.headers)}"])
    print_lines([""])
    if counts.records:
        print_table(COUNT_NAMES, counts.rows)
    else:
        print_lines(["no record was sampled, so none was classified"])
    if counts.rejects and not counts.events + counts.deletes:
        print_lines(["", "no sampled record would be an event: mend the declaration, or the producer, first"])
    print_lines(
        [
            "",
            f"wrote {file}",
            f"next: read the file, correct what is wrong, then run `highwater try {found.stream.name}`",
        ]
    )


def _list_names(names: Sequence[str]) -> str:
    """Names in quotation marks: some have spaces or line ends."""
    from highwater.inference import shorten_text

    shown = [shorten_text(json.dumps(name, ensure_ascii=not name.isprintable())) for name in names[:_SHOWN_NAMES]]
    more = [f"and {len(names) - _SHOWN_NAMES} more"] if len(names) > _SHOWN_NAMES else []
    return ", ".join([*shown, *more])


def _build_row(one: Column) -> list[object]:
    from highwater.assets.fields import build_sql_type
    from highwater.inference import shorten_text

    kind = shorten_text(build_sql_type(one.field).replace("`", ""))
    return [one.field.name, kind, one.source, f"{100 * one.share:.0f}%" if one.seen else "", one.example]


def _to_plain(found: Inferred, counts: SampleCounts, source: str, file: Path | None) -> dict[str, Any]:
    stream = found.stream
    return {
        "stream": stream.name,
        "topic": stream.topic,
        "key": list(stream.key),
        "version": ", ".join(stream.version_fields) or None,
        "event_time": stream.event_time,
        "reasons": dict(found.reasons),
        "columns": [
            {
                "name": one.field.name,
                "type": one.field.type,
                "source": one.source,
                "seen": one.seen,
                "share": round(one.share, 4),
                "example": one.example,
                "reason": one.reason,
            }
            for one in found.columns
        ],
        "left_out": list(found.left_out),
        "headers": list(found.headers),
        "classified": counts.to_plain(),
        "file": None if file is None else str(file),
        "source": source,
    }
