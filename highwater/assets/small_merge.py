"""A few winners are merged into a small `current` by delta-rs in the run's own process, without a Spark job."""

# Spark's MERGE of a slice of 1,000 records takes 1.9 s, nearly all of it for planning and its jobs. delta-rs follows
# the same rule on the same rows; Spark gets all that the two would do differently.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from highwater.assets import events, small_slices
from highwater.assets.origins import MILLISECONDS
from highwater.assets.small_writes import FIRST_TIME
from highwater.resources.commit_log import ensure_all_rows_seen, read_number
from highwater.resources.delta import add_actions, query, quote_column, run_query, slice_is_one_of
from highwater.resources.delta_rs_writes import merge_rows, takes_writes
from highwater.resources.object_store import has_exclusive_log_store
from highwater.resources.spark import delta_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.assets.work import Work
    from highwater.resources.numbered_commits import Target

# Limits for `current`, and for the files that hold the slices' events: delta-rs merges in memory. Text may be a hundred
# times larger there than in its file.
MAX_BYTES = 32 * 2**20
MAX_TEXT_BYTES = 64 * 2**20

# The columns that decide between two rows of a key, one after the other, and whether the greater value wins.
PRECEDENCE: Sequence[tuple[str, bool]] = (
    ("version", True),
    (MILLISECONDS, False),
    ("origin_partition", False),
    ("origin_offset", False),
    ("origin_generation", False),
)

_TYPES = frozenset({"string", "boolean", "integer", "long", "float", "double", "date", "timestamp", "timestamp_ntz"})

_FIRST = FIRST_TIME - datetime(1970, 1, 1, tzinfo=UTC)
# The names of delta-rs's own columns in a MERGE begin with it.
_OF_DELTA_RS = "__delta_rs_"


def find_winners(work: Work, target: Target, events_version: int, keys: Sequence[str]) -> pa.Table | None:
    """The row of each key that wins among the events of new slices, if delta-rs can merge them; None if Spark must.

    Args:
        work: the connections.
        target: the table `current`.
        events_version: the version of the events that the commit rests on; they hold no deletes.
        keys: slices that `current` does not have yet.

    Raises:
        IncompleteReadError: not all events could be read.
        DependencyUnavailableError: the lake could not be read, or Spark does not answer.
    """
    if not small_slices.are_few(work.slices):
        return None
    with delta_errors(target.path):
        if not has_exclusive_log_store(work.spark, work.lake.root):
            return None
    opened = target.open_table()
    source = work.lake.open_existing_table(work.stream.name, events.TABLE, events_version)
    mine = slice_is_one_of(keys)
    if (names := _list_plain_columns(opened, source)) is None or not takes_writes(opened):
        return None
    if not _is_small(opened, {}) or not _is_small(source, {*keys}):
        return None
    if not _has_plain_values(opened, names, "true") or not _has_plain_values(source, names, mine):
        return None
    order = ", ".join(f"{name} {'DESC' if greater else 'ASC'} NULLS LAST" for name, greater in PRECEDENCE)
    columns = ", ".join(map(quote_column, names))
    ensure_all_rows_seen(source, keys)
    # No field has such a name as the place.
    return run_query(
        {"e": source},
        f"SELECT {columns}, updated_by_slice FROM (SELECT {columns}, slice AS updated_by_slice, "
        f'row_number() OVER (PARTITION BY key ORDER BY {order}) AS "#" FROM e WHERE {mine}) WHERE "#" = 1',
    )


def merge(target: Target, winners: pa.Table, number: int, options: Mapping[str, str]) -> None:
    """Merge winners in one commit; none is made where another numbered commit came since the look at the table.

    Args:
        target: the table `current`.
        winners: one row for each key.
        number: of the last numbered commit at that look.
        options: what the commit carries, as `commit_slices` gives it.

    Raises:
        DependencyUnavailableError: the storage could not be read or written.
    """
    opened = target.open_table()
    if read_number(opened) == number:
        merge_rows(opened, winners, _build_newer(), options)


def _build_newer() -> str:
    """The condition that the row `s` wins over the row `t`; null is less than any value, as in Spark's structs."""
    found = "false"
    for name, greater in reversed(PRECEDENCE):
        wins = f"(s.{name} {'>' if greater else '<'} t.{name}) OR (t.{name} IS NULL AND s.{name} IS NOT NULL)"
        found = f"({wins} OR ((s.{name} IS NOT DISTINCT FROM t.{name}) AND {found}))"
    return found


def _list_plain_columns(opened: DeltaTable, source: DeltaTable) -> list[str] | None:
    """The columns that `current` takes from events; None if one is not there, of another type, or not for delta-rs."""
    wanted, there = _read_types(opened), _read_types(source)
    wanted.pop("updated_by_slice")
    same = all(there.get(name) == kind and (kind in _TYPES or "decimal" in kind) for name, kind in wanted.items())
    return [*wanted] if same and not any(name.startswith(_OF_DELTA_RS) for name in wanted) else None


def _read_types(opened: DeltaTable) -> dict[str, str]:
    """The types of the columns of a table; of those with parts the name of the whole alone."""
    return {field.name: str(field.type.type) for field in opened.schema().fields}


def _is_small(opened: DeltaTable, keys: Collection[str]) -> bool:
    """Whether a table has few bytes and rows by its log; of some slices, whether the files that may hold them have."""
    actions = add_actions(opened)
    files = actions.select(["num_records", "size_bytes"]).to_pylist()
    if keys and {"min.slice", "max.slice"} <= {*actions.column_names}:
        bounds = zip(actions["min.slice"].to_pylist(), actions["max.slice"].to_pylist(), strict=True)
        near = [None in {low, high} or (low <= max(keys) and high >= min(keys)) for low, high in bounds]
        files = [file for file, is_near in zip(files, near, strict=True) if is_near]
    rows = [file["num_records"] for file in files]
    has_few_rows = bool(keys) or (None not in rows and sum(rows) <= small_slices.MAX_ROWS)
    return has_few_rows and sum(file["size_bytes"] for file in files) <= MAX_BYTES


def _has_plain_values(opened: DeltaTable, names: Sequence[str], where: str) -> bool:
    """Whether rows have little text, no NaN, and no time that a reader of delta-rs's file could refuse."""
    kinds = _read_types(opened)
    texts = [f"sum(octet_length({quote_column(name)}))" for name in names if kinds[name] == "string"]
    floats = [quote_column(name) for name in names if kinds[name] in {"float", "double"}]
    nans = [f"count(CASE WHEN isnan({column}) THEN 1 END)" for column in floats]
    days = [f"min(arrow_cast({quote_column(name)}, 'Int32'))" for name in names if kinds[name] == "date"]
    times = [f"min(arrow_cast({quote_column(name)}, 'Int64'))" for name in names if kinds[name].startswith("timestamp")]
    columns = ", ".join(f"{measure} AS m{at}" for at, measure in enumerate([*texts, *nans, *days, *times]))
    [row] = query(opened, f"SELECT {columns} FROM t WHERE {where}")
    found = iter(row.values())
    lengths, numbers = ([next(found) for _ in measures] for measures in (texts, nans))
    units = [timedelta(days=1)] * len(days) + [timedelta(microseconds=1)] * len(times)
    has_plain_times = all(at is None or at >= _FIRST // one for at, one in zip(found, units, strict=True))
    return has_plain_times and not any(numbers) and sum(length or 0 for length in lengths) <= MAX_TEXT_BYTES
