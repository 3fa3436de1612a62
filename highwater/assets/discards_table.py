"""The table `discards`: discarded parked records, synchronised between ledger and lake in both directions."""

# The ledger decides, and the table follows it before a decision of retries rests on it. So no commit ever rests on a
# discard that the table lacks, wherever a process dies. Rows are only added, by who holds the lease of the retries.

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater.envelope import ORIGIN, Origin
from highwater.plans import Discard
from highwater.resources.delta import query
from highwater.resources.delta_rs_writes import append

if TYPE_CHECKING:
    from datetime import datetime

    import pyarrow as pa

    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

TABLE = "discards"


def build_schema() -> pa.Schema:
    """The table's columns: those of the ledger's table of the same name."""
    import pyarrow as pa

    return pa.schema(
        [
            *zip(ORIGIN, (pa.string(), pa.int32(), pa.int32(), pa.int64()), strict=True),
            ("reason", pa.string()),
            ("discarded_by", pa.string()),
            ("discarded_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def sync_with_ledger(ledger: Ledger, lake: Lake, stream: str) -> int:
    """Add to ledger and table the discards that only the other has; returns the number of rows added to the table.

    A ledger lacks discards after it was rebuilt, or restored from a backup.

    Raises:
        DependencyUnavailableError: the ledger or the storage is unavailable.
    """
    if _read_stored_state(lake, stream) == ledger.discards.count_and_last(stream):
        return 0  # both only grow: so a million of them are not read for each slice
    there = read(lake, stream)
    ledger.discards.add(stream, there)
    held = {one.origin for one in there}
    rows = [_build_row(one) for one in ledger.discards.list_for_stream(stream) if one.origin not in held]
    if rows:
        import pyarrow as pa

        append(lake.build_table_path(stream, TABLE), pa.Table.from_pylist(rows, build_schema()))
    return len(rows)


def read(lake: Lake, stream: str) -> list[Discard]:
    """The rows of the table, oldest first.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    table = lake.open_stream_table(stream, TABLE)
    rows = [] if table is None else query(table, "SELECT * FROM t ORDER BY discarded_at")
    found = [
        Discard(Origin.from_row(row), *(row[name] for name in ("reason", "discarded_by", "discarded_at")))
        for row in rows
    ]
    return [*{one.origin: one for one in reversed(found)}.values()][::-1]


def _read_stored_state(lake: Lake, stream: str) -> tuple[int, datetime | None]:
    table = lake.open_stream_table(stream, TABLE)
    if table is None:
        return 0, None
    [row] = query(table, "SELECT count(*) AS many, max(discarded_at) AS last FROM t")
    return row["many"], row["last"]


def _build_row(discard: Discard) -> dict[str, object]:
    details = {"reason": discard.reason, "discarded_by": discard.discarded_by, "discarded_at": discard.discarded_at}
    return {**dict(zip(ORIGIN, discard.origin, strict=True)), **details}
