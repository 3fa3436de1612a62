"""(d) What a slice costs while tables grow: `current` up to 10 million keys, `raw` up to 100,000 slices."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness import Result, Row, Target, measure_seconds
from bench.world import Bed, World, build_last_slices, fill_topic
from highwater.assets import current, events, raw
from highwater.assets.commit import CommittedSlices
from highwater.assets.slice_classification import read_raw_rows
from highwater.commit_records import CommitRecord, to_user_metadata, with_slice_commit
from highwater.resources.commit_log import build_log_path
from highwater.resources.commit_log_writer import add_missing_records, build_row, build_schema
from highwater.resources.spark_tables import create_table, write_slices
from highwater.slice_commits import SliceCommit
from highwater.slices import OffsetRange, Slice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from highwater.declaration import Stream

KEYS = (10_000, 100_000, 1_000_000, 10_000_000)
EVENTS = 50_000
SLICES = 50
MERGES = 3
TOPIC = "bench-d"
# A file system allows 65,000 to one file.
LINKS_PER_FILE = 50_000
# Ordinals of slices whose files are links; all have as many digits.
LINKED = 1_000_000
# Delta writes a checkpoint at each tenth version, so this many commits hold one, wherever they begin.
COMMITS = 12


def measure_growth_of_current(world: World, rounds: int, records: int) -> Result:
    """(d) Slices into `current` at four sizes of the table, beside a plain MERGE."""
    del rounds, records
    stream = fill_topic(world, TOPIC, 1)
    rows = [_measure_at(world, stream, keys) for keys in KEYS]
    by_case = {row.case: row for row in rows}
    at_100k, at_10m = (by_case[_format_case(keys)].mean("Highwater") for keys in (100_000, 10_000_000))
    return Result(
        name="d",
        title="A slice into current while the table grows",
        method=(
            f"{SLICES} slices of {EVENTS:,} events each; half of the keys uniform over the table, half among its "
            f"newest 1 %. MERGE: {MERGES} such slices into a table of one row a key."
        ),
        rows=rows,
        targets=[Target("mean at 10M keys in means at 100k", at_10m / at_100k, 4.0, at_least=False)],
    )


def _format_case(keys: int) -> str:
    return f"{keys:,} keys"


def _measure_at(world: World, stream: Stream, keys: int) -> Row:
    bed = world.fresh(stream)
    _fill(world, bed, keys)
    some_slices = _commit_events(world, bed, keys)
    works = [world.work(bed, [slice_]) for slice_ in some_slices]
    ours = [measure_seconds(lambda work=work: current.materialise(work)) for work in works]  # type: ignore[misc]
    mean = sum(ours) / len(ours)
    print(f"  {_format_case(keys)}: mean {mean:.2f} s, longest {max(ours):.2f} s", flush=True)
    merges = list(_merge(world, bed, some_slices[:MERGES]))
    print(f"  {_format_case(keys)}: MERGE {sum(merges) / len(merges):.2f} s", flush=True)
    bed.remove()
    return Row(_format_case(keys), {"Highwater": ours, "MERGE": merges})


def _build_key_rows(world: World, keys: int) -> DataFrame:
    return world.spark.range(keys).selectExpr(
        "concat('o', id) AS key", "1 AS version", "timestamp'2026-01-01' AS event_time", "concat('o', id) AS order_id",
        "'placed' AS status", "'c1' AS customer_id", "CAST(1.5 AS DECIMAL(12,2)) AS amount",
        f"'{TOPIC}' AS origin_topic", "0 AS origin_generation", "0 AS origin_partition", "id AS origin_offset",
        "timestamp'2026-01-01' AS origin_timestamp", "1767225600000 AS origin_timestamp_ms",
        f"'{TOPIC}@0000000' AS updated_by_slice",
    )  # fmt: skip


def _fill(world: World, bed: Bed, keys: int) -> None:
    """Make a `current` with a given number of keys, and a table with the same keys for the peer."""
    path = bed.lake.build_table_path(bed.stream.name, current.TABLE)
    create_table(world.spark, path, current.build_sql_columns(bed.stream), current.STATISTICS_COLUMNS)
    metadata = to_user_metadata([CommitRecord(f"{TOPIC}@0000000", 1, keys, "filled")], 0)
    _build_key_rows(world, keys).write.format("delta").mode("append").option("userMetadata", metadata).save(path)
    _build_key_rows(world, keys).write.format("delta").save(bed.lake.build_table_path("peer", "current"))


def _commit_events(world: World, bed: Bed, keys: int) -> list[Slice]:
    """Slices whose events are committed: half of the keys uniform, half among the newest 1 %."""
    some_slices = [_build_slice(bed, n) for n in range(1, SLICES + 1)]
    bed.ledger.add(some_slices)
    path = bed.lake.build_table_path(bed.stream.name, events.TABLE)
    create_table(world.spark, path, events.build_sql_columns(bed.stream), events.STATISTICS_COLUMNS)
    newest = max(1, keys // 100)
    # Two seeds: with one, the keys of both halves would be the same wherever `newest` divides `keys`.
    uniform, hot = f"pmod(xxhash64(id, 1), {keys})", f"{keys - newest} + pmod(xxhash64(id, 2), {newest})"
    number = f"CASE WHEN id % 2 = 0 THEN {uniform} ELSE {hot} END"
    rows = world.spark.range(EVENTS * SLICES).selectExpr(
        f"concat('{TOPIC}@', lpad(CAST(id DIV {EVENTS} + 1 AS STRING), 7, '0')) AS slice",
        f"'{TOPIC}' AS origin_topic", "0 AS origin_generation", "0 AS origin_partition",
        f"id + {keys} AS origin_offset",
        "timestamp'2026-01-02' AS origin_timestamp", "1767312000000 AS origin_timestamp_ms",
        "1 AS attempt", f"concat('o', {number}) AS key",
        "CAST(2 + id AS INT) AS version", "timestamp'2026-01-02' AS event_time", f"concat('o', {number}) AS order_id",
        "'paid' AS status", "'c1' AS customer_id", "CAST(2.5 AS DECIMAL(12,2)) AS amount",
    )  # fmt: skip
    base = CommitRecord("", 0, None, "planted")
    records = [with_slice_commit(base, SliceCommit(slice_, 1, EVENTS, {"events": EVENTS})) for slice_ in some_slices]
    options = {"userMetadata": to_user_metadata(records, 0)}
    named = [slice_.key for slice_ in some_slices]
    write_slices(path, rows, named, options, replace=False, files=1, spread="origin_offset")
    add_missing_records(bed.lake.open_existing_table(bed.stream.name, events.TABLE))
    return some_slices


def _build_slice(bed: Bed, ordinal: int) -> Slice:
    offsets = OffsetRange(ordinal * EVENTS, ordinal * EVENTS + EVENTS)
    return Slice(bed.stream.name, TOPIC, "bench", 0, ordinal, {0: offsets}, datetime.now(UTC))


def _merge(world: World, bed: Bed, some_slices: list[Slice]) -> Iterator[float]:
    table = world.spark.read.format("delta").load(bed.lake.build_table_path(bed.stream.name, events.TABLE))
    peer = bed.lake.build_table_path("peer", "current")
    for slice_ in some_slices:
        rows = table.where(f"slice = '{slice_.key}'").selectExpr("*", "slice AS updated_by_slice")
        rows.drop("slice", "attempt").createOrReplaceTempView("newer")
        current.select_winners(world.spark.table("newer"), "key").createOrReplaceTempView("newest")
        yield measure_seconds(
            lambda: world.spark.sql(
                f"MERGE INTO delta.`{peer}` t USING newest s ON t.key = s.key "
                "WHEN MATCHED AND s.version > t.version THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )
        )


def measure_growth_of_raw(world: World, rounds: int, records: int) -> Result:
    """(h) A commit to `raw`, and the read of a slice, while the table holds 100 and 100,000 slices."""
    del records
    commits = max(rounds, COMMITS)
    stream = fill_topic(world, "bench-h", 4 * 250 * (commits + 2))
    rows = [_measure_raw_at(world, stream, slices, commits) for slices in (100, 100_000)]
    few, many = rows
    more = {f"a {name}": many.median(name) - few.median(name) for name in ("commit", "read of a slice")}
    more["a commit, by the means,"] = many.mean("commit") - few.mean("commit")
    return Result(
        name="h",
        title="Raw while its slices grow",
        method=(
            "A slice of 1,000 records is committed, then read back by its key. The slices before it are one file each, "
            "with rows and slice as their only statistics: their checkpoint is smaller than usual. One of "
            f"{commits} commits writes a checkpoint."
        ),
        rows=rows,
        targets=[
            Target(f"more seconds for {name} at 100,000 slices", value, 0.5, at_least=False)
            for name, value in more.items()
        ],
    )


def _measure_raw_at(world: World, stream: Stream, slices: int, commits: int) -> Row:
    bed = world.fresh(stream)
    some_slices = build_last_slices(world, bed, commits + 1, 1000)
    path = Path(bed.lake.build_table_path(stream.name, raw.TABLE))
    raw.materialise(world.work(bed, some_slices[:1]))
    _link_slices(path, slices)
    _record_slices(bed, slices)
    seconds: dict[str, list[float]] = {"commit": [], "read of a slice": []}
    CommittedSlices.read(world.work(bed, some_slices[:1]), raw.TABLE)
    world.spark.read.format("delta").load(str(path)).where("slice = 'x'").count()
    for slice_ in some_slices[1:]:
        work = world.work(bed, [slice_])
        seconds["commit"].append(measure_seconds(lambda work=work: raw.materialise(work)))  # type: ignore[misc]
        version = CommittedSlices.read(work, raw.TABLE).version
        took = measure_seconds(lambda w=work, v=version: read_raw_rows(w, w.slices, v).count())  # type: ignore[misc]
        seconds["read of a slice"].append(took)
    print(f"  {slices:,} slices: {seconds}", flush=True)
    assert [*(path / "_delta_log").glob("*.checkpoint*.parquet")], "no checkpoint was among the commits"
    bed.remove()
    return Row(f"{slices:,} slices", seconds)


def _link_slices(path: Path, slices: int) -> None:
    """Add a number of slices to the table: one commit whose files are links to copies of an existing one."""
    from deltalake import DeltaTable

    [file] = path.rglob("*.parquet")
    log = path / "_delta_log"
    newest = max(int(f.stem) for f in log.glob("*.json"))
    actions = [{"commitInfo": {"operation": "WRITE", "timestamp": 0}}]
    linked = file
    for n in range(LINKED, LINKED + slices):
        name = path / f"part-{n}.parquet"
        if n % LINKS_PER_FILE:
            os.link(linked, name)
        else:
            linked = Path(shutil.copy(file, name))
        actions.append({"add": _build_added_file(n, file.stat().st_size)})
    lines = "\n".join(json.dumps(action) for action in actions)
    (log / f"{newest + 1:020d}.json").write_text(lines + "\n")
    DeltaTable(str(path)).create_checkpoint()  # a table that grew commit by commit has one among the last ten versions


def _record_slices(bed: Bed, slices: int) -> None:
    """Give these slices their commit records."""
    import pyarrow as pa
    from deltalake import write_deltalake

    table = bed.lake.open_existing_table(bed.stream.name, raw.TABLE)
    some_slices = [_build_slice(bed, n) for n in range(LINKED, LINKED + slices)]
    rows = [
        build_row(
            table,
            with_slice_commit(
                CommitRecord("", 0, None, "linked", "", table.version(), one.planned_at), SliceCommit(one, 1, 1000)
            ),
        )
        for one in some_slices
    ]
    write_deltalake(build_log_path(table), pa.Table.from_pylist(rows, build_schema()), mode="append")


def _build_added_file(n: int, size: int) -> dict[str, object]:
    key = f"{TOPIC}@{n}"
    return {
        "path": f"part-{n}.parquet",
        "partitionValues": {},
        "size": size,
        "modificationTime": 0,
        "dataChange": True,
        "stats": json.dumps(
            {"numRecords": 1000, "minValues": {"slice": key}, "maxValues": {"slice": key}, "nullCount": {"slice": 0}}
        ),
    }
