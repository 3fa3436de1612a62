"""The table `erasures`: erased keys and expired rows, synchronised between ledger and lake in both directions."""

# The ledger decides, and the table follows it before anything that rests on an erasure is committed: rows that are
# removed, and rows that a slice leaves out as it is read. So the table never holds an erasure that the ledger did not
# know, and no commit ever rests on one that the table lacks, wherever a process dies. Facts are only added: of several
# rows of the same erasure and slice one says that it is done, or none does.

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from highwater.erasing import BY_AGE, ErasedCounts, Erasure, RecordedErasure
from highwater.gaps import decode_range_lists, encode_range_lists
from highwater.resources.delta import query

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

TABLE = "erasures"
# Identity of an erasure in every ledger, since each ledger's own numbers restart: the key's digest and the moment.
Name = tuple[str, datetime]


def build_schema() -> pa.Schema:
    """The table's columns."""
    import pyarrow as pa

    time = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [
            ("digest", pa.string()),
            ("erased_at", time),
            ("erased_by", pa.string()),
            ("reason", pa.string()),
            ("slice", pa.string()),
            ("places", pa.string()),
            ("rows", pa.string()),
            ("done_at", time),
        ]
    )


def sync_with_ledger(ledger: Ledger, lake: Lake, stream: str, *, of_keys: bool = False) -> int:
    """Add to ledger and table the erasures that only the other has; returns the number of rows added to the table.

    A ledger lacks erasures after it was restored from a backup.

    Args:
        ledger: the ledger.
        lake: the lake.
        stream: the name of the stream.
        of_keys: erasures of keys alone, for readers of records: records that expired by age may be read again.

    Raises:
        SupersededAttemptError: others added to the table again and again.
        DependencyUnavailableError: the ledger or the storage is unavailable.
    """

    def find_missing(table: DeltaTable | None) -> pa.Table:
        import pyarrow as pa

        there = {_format_name(one.erasure): one for one in _read(table, stream, of_keys=of_keys)}
        known = ledger.erasures.list_recorded(stream, of_keys=of_keys)
        here = {_format_name(one.erasure): one.slices.keys() for one in known}
        if unknown := [one for name, one in there.items() if name not in here or one.slices.keys() - here[name]]:
            ledger.erasures.add_missing(unknown)
            known = ledger.erasures.list_recorded(stream, of_keys=of_keys)
        rows = [row for one in known for row in _build_missing_rows(one, there.get(_format_name(one.erasure)))]
        return pa.Table.from_pylist(rows, build_schema())

    return lake.append_missing(stream, TABLE, find_missing)


def _format_name(erasure: Erasure) -> Name:
    return erasure.digest, erasure.erased_at


def _build_missing_rows(known: RecordedErasure, there: RecordedErasure | None) -> Iterable[dict[str, Any]]:
    erasure = known.erasure
    details = {"digest": erasure.digest, "erased_at": erasure.erased_at}
    details |= {"erased_by": erasure.erased_by, "reason": erasure.reason}
    if there is None:
        yield details
    for key, one in known.slices.items():
        has = None if there is None else there.slices.get(key)
        if has is None or (one.done_at is not None and has.done_at is None):
            places, rows = json.dumps(encode_range_lists(one.places)), json.dumps(dict(one.rows))
            yield {**details, "slice": key, "places": places, "rows": rows, "done_at": one.done_at}


def read(lake: Lake, stream: str, *, of_keys: bool = False) -> list[RecordedErasure]:
    """The rows of the table, of keys alone or all of them, oldest first, without numbers, which each ledger issues.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    return _read(lake.open_stream_table(stream, TABLE), stream, of_keys=of_keys)


def _read(table: DeltaTable | None, stream: str, *, of_keys: bool) -> list[RecordedErasure]:
    which = f"digest <> '{BY_AGE}'" if of_keys else "true"
    return [] if table is None else read_from(stream, query(table, f"SELECT * FROM t WHERE {which}"))


def read_from(stream: str, rows: Sequence[Mapping[str, Any]]) -> list[RecordedErasure]:
    """The erasures in some rows."""
    made: dict[Name, Erasure] = {}
    taken: dict[Name, dict[str, ErasedCounts]] = {}
    for row in rows:
        erasure = Erasure(stream, row["digest"], row["reason"], row["erased_by"], row["erased_at"])
        made.setdefault(_format_name(erasure), erasure)
        slices = taken.setdefault(_format_name(erasure), {})
        if row["slice"] is not None:
            slices[row["slice"]] = _build_erased(row, slices.get(row["slice"]))
    return [RecordedErasure(made[name], taken[name]) for name in sorted(made, key=lambda name: (name[1], name[0]))]


def _build_erased(row: Mapping[str, Any], before: ErasedCounts | None) -> ErasedCounts:
    times = [row["done_at"], None if before is None else before.done_at]
    done = min((time for time in times if time is not None), default=None)
    return ErasedCounts(row["slice"], decode_range_lists(json.loads(row["places"])), json.loads(row["rows"]), done)
