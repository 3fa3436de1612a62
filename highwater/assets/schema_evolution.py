"""Columns for new fields of registry schemas, and tables whose columns become wider."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from highwater.added_fields import METADATA, evolve_stream, select_added_fields, to_text, with_added
from highwater.assets.commit import build_target, take_commit_turn
from highwater.assets.compaction import count_rows, ensure_same_rows
from highwater.assets.fields import build_sql_type
from highwater.assets.framing import fetch_referenced_schemas
from highwater.errors import ConfigurationError
from highwater.formats import Avro, Protobuf
from highwater.inference_schemas import build_tree
from highwater.resources.commit_log import read_committed_slices
from highwater.resources.delta import open_table
from highwater.resources.numbered_commits import close_intents, commit_slices
from highwater.resources.spark import delta_errors
from highwater.resources.spark_tables import read_table_version
from highwater.resources.type_widening import (
    convert_value,
    find_common_type,
    format_sql_type,
    has_other_leaves,
    parse_column_types,
)
from highwater.schemas import Kind, describe_other_kind

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame

    from highwater.assets.work import Work
    from highwater.declaration import Field, Stream


# By format the type of schemas whose records are no rejects. A document in JSON is read whatever its schema is.
_KINDS: Mapping[type, Kind] = {Avro: "AVRO", Protobuf: "PROTOBUF"}


def build_evolved_stream(stream: Stream, events: DeltaTable | None) -> Stream:
    """The stream with the fields that schemas of the registry added to its table of events.

    Args:
        stream: as it is declared.
        events: the table of events; None where there is none yet.
    """
    if events is None or stream.unknown_fields.policy != "add":
        return stream
    described = {field.name: field.metadata.get(METADATA) for field in events.schema().fields}
    return with_added(stream, {name: str(text) for name, text in described.items() if text is not None})


def with_added_fields(work: Work) -> Work:
    """The work on the stream with the fields that the table of events has beside the declared ones."""
    if work.stream.unknown_fields.policy != "add":
        return work
    return replace(
        work, stream=build_evolved_stream(work.stream, work.lake.open_stream_table(work.stream.name, "events"))
    )


def evolve(work: Work, read_raw: Callable[[], DataFrame], table: str) -> Work:
    """Add a column for each member that the schemas of some records name; the work on the stream with these fields.

    Each column has its field in its metadata, by which later runs and checks know it.

    Args:
        work: on the stream as it is declared.
        read_raw: reads the records, as rows of raw; not called for a stream that adds no columns.
        table: the table of events.

    Raises:
        ConfigurationError: no registry is configured.
        DependencyUnavailableError: the registry, the ledger or the lake cannot be read.
    """
    known = with_added_fields(work)
    if work.stream.unknown_fields.policy != "add":
        return known
    trees = _read_schema_trees(work, read_raw())
    if _evolve_by_trees(known.stream, work.stream, trees) == known.stream:
        return known
    path = work.lake.build_table_path(work.stream.name, table)
    with take_commit_turn(work, table), delta_errors(path):
        # Another run may have added fields before this one had its turn.
        stream = _evolve_by_trees(with_added_fields(work).stream, work.stream, trees)
        _describe(work, path, select_added_fields(work.stream, stream))
    return replace(work, stream=stream)


def _read_schema_trees(work: Work, raw: DataFrame) -> list[Field]:
    """The schemas of records as fields; one of another format, or that cannot be read, adds no column."""
    found = []
    wanted = _KINDS.get(type(work.stream.value))
    for schema in fetch_referenced_schemas(work, raw):
        if wanted is not None and schema.kind != wanted:
            work.log(f"schema {schema.id} adds no columns: {describe_other_kind(schema, wanted)}")
            continue
        try:
            found.append(build_tree([schema]))
        except (ValueError, KeyError, TypeError) as error:
            work.log(f"schema {schema.id} adds no columns, since it cannot be read: {error}")
    return found


def _evolve_by_trees(stream: Stream, declared: Stream, trees: Sequence[Field]) -> Stream:
    for tree in trees:
        stream = evolve_stream(stream, declared, tree)
    return stream


def _describe(work: Work, path: str, added: Sequence[Field]) -> None:
    """Add a column for each added field, and write the fields into the metadata of their columns."""
    schema = _open_existing_table(path).schema()
    there = {field.name.lower() for field in schema.fields}
    lacking = [f for f in added if f.name.lower() not in there]
    if lacking:
        _add(work, path, {f.name: build_sql_type(f) for f in lacking})
        work.log(f"columns that schemas of the registry added: {', '.join(f.name for f in lacking)}")
    described = {field.name: field.metadata.get(METADATA) for field in schema.fields}
    for f in added:
        if described.get(f.name) != to_text(f):
            comment = f"added by a schema of the registry, as {f.type}"
            _open_existing_table(path).alter.set_column_metadata(f.name, {METADATA: to_text(f), "comment": comment})


def _open_existing_table(path: str) -> DeltaTable:
    opened = open_table(path)
    assert opened is not None, "the caller made the table"
    return opened


def _add(work: Work, path: str, types: Mapping[str, str]) -> None:
    """Add columns, or members of columns, in one commit that adds no row."""
    from pyspark.sql import functions as F

    nothing = [F.lit(None).cast(kind).alias(name) for name, kind in types.items()]
    empty = work.spark.range(0).select(*nothing)
    empty.write.format("delta").mode("append").option("mergeSchema", "true").save(path)


def adapt_types(work: Work, table: str, columns: str) -> None:
    """Let the columns of a table hold the values of a declaration whose types are wider than those of the table.

    Members that structs lack are added. A type that widens has the whole table written again in one commit: Delta's
    own type widening raises the protocol of the table, which other readers then refuse.

    Args:
        work: the connections.
        table: the table's name.
        columns: the columns that are wanted, in SQL.

    Raises:
        ConfigurationError: a type of the table and the wanted one have no common type.
        SupersededAttemptError: another writer was first; nothing was written.
    """
    path = work.lake.build_table_path(work.stream.name, table)
    wanted = parse_column_types(work.spark, columns)
    common = _list_type_changes(work, table, path, wanted)
    if not common:
        return
    with take_commit_turn(work, table) as lease, delta_errors(path):
        stored = _read_types(path)
        common = _list_type_changes(work, table, path, wanted)
        members = {name: kind for name, kind in common.items() if not has_other_leaves(stored[name], kind)}
        if members:
            _add(work, path, {name: format_sql_type(kind) for name, kind in members.items()})
        if len(members) < len(common):
            lease.check()
            _rewrite(work, table, common)


def _read_types(path: str) -> dict[str, Any]:
    opened = open_table(path)
    fields = json.loads(opened.schema().to_json())["fields"] if opened else []
    return {field["name"]: field["type"] for field in fields}


def _list_type_changes(work: Work, table: str, path: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a table that must change, with their new types."""
    names = {name.lower(): kind for name, kind in wanted.items()}
    found = {}
    for name, stored in _read_types(path).items():
        other = names.get(name.lower(), stored)
        if stored == other:
            continue
        common = find_common_type(stored, other)
        if common is None:
            raise ConfigurationError(
                f"column {name!r} of {work.stream.name}/{table} cannot hold the declared type",
                stored=format_sql_type(stored),
                found=format_sql_type(other),
                remedy="declare the column under another name, with the old one as its source; or declare the stored "
                "type again",
            )
        if common != stored:
            found[name] = common
    return found


def _rewrite(work: Work, table: str, common: Mapping[str, Any]) -> None:
    """Write a table again with wider types, in one numbered commit; the caller holds the turn of its writers."""
    from pyspark.sql import functions as F

    target = build_target(work, table)
    if work.ledger.intents.list_for_table(work.stream.name, table):
        close_intents(target)
    opened = target.open_table()
    seen, stored = read_committed_slices(opened, []), _read_types(target.path)
    columns = [
        convert_value(F.col(_quote(field.name)), stored[field.name], common.get(field.name, stored[field.name])).alias(
            field.name, metadata=dict(field.metadata)
        )
        for field in opened.schema().fields
    ]
    rows = read_table_version(work.spark, target.path, seen.version).select(*columns)
    before = count_rows(opened)
    version = commit_slices(target, seen, [], work.run, partial(_overwrite, rows, target.path)).version
    ensure_same_rows(work, table, "widening types", before, version)
    changes = [
        f"{name} from {format_sql_type(stored[name])} to {format_sql_type(kind)}" for name, kind in common.items()
    ]
    work.log(f"{table}: widened {', '.join(changes)}")


def _overwrite(rows: DataFrame, path: str, options: Mapping[str, str]) -> None:
    writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer.options(**options).save(path)


def _quote(name: str) -> str:
    return f"`{name}`"
