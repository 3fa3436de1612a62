"""Reads the tables `published` and `_sending`: their columns, what was sent of each event, the batch under way."""

# A batch of slices is first written as it will be sent, to the table `_sending`, each record with its number. The mark
# in Kafka counts the records of the batch. So after a crash the records below the mark were sent with the written
# content, and the others were not, whatever the tables or the declaration say by then. `published` holds settled
# records, and its commits name the batch that they settle.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from highwater.envelope import ORIGIN_TYPES
from highwater.errors import DependencyUnavailableError
from highwater.resources.commit_log import get_table_id, read_committed_slices, read_slice_commits
from highwater.resources.delta import open_table, query
from highwater.slice_commits import SliceCommit
from highwater.slices import SliceKey

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake

TABLE = "published"
# The table of the batch that is under way, or was the last one.
SENDING = "_sending"
# In the commit records: the batch that was in `_sending` at the commit, which is settled with it.
BATCH = "batch"
# The attempt of a slice whose first publication is not complete: lower than that of any decision.
INCOMPLETE = 0
# The attempt of a slice that was published, and holds second deliveries of what was retracted or revised since: no
# decision has it, so the slice is published again.
LOOK_AGAIN = -1
FORMAT = 1


def build_schema() -> pa.Schema:
    """The columns of `published`."""
    import pyarrow as pa

    return pa.schema(
        [
            ("slice", pa.string()),
            *ORIGIN_TYPES,
            ("attempt", pa.int32()),
            ("state", pa.string()),
            ("revision", pa.int32()),
            ("late", pa.string()),
            ("fingerprint", pa.string()),
            ("published_at", pa.timestamp("us", "UTC")),
        ]
    )


def build_sending_schema() -> pa.Schema:
    """The columns of `_sending`: those of `published`, the number of the record, and in one row the batch itself."""
    import pyarrow as pa

    return build_schema().append(pa.field("number", pa.int64())).append(pa.field("batch", pa.string()))


@dataclass(frozen=True)
class BatchUnderWay:
    """The batch that is under way, or was the last one: the column `batch` of `_sending`.

    Args:
        attempt: the number of the batch; the mark names it.
        topic: where it goes.
        topic_id: that topic's ID.
        total: records in it.
        slices: for each slice the attempt of its decision, in the order of publication.
        settled: a slice of an earlier batch, with its number. A `published` that lacks this commit is an older version.
    """

    attempt: int
    topic: str
    topic_id: str
    total: int = 0
    slices: Mapping[str, int] = field(default_factory=dict)
    settled: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The written form."""
        return json.dumps({"format": FORMAT, **vars(self)}, separators=(",", ":"), default=dict)

    @classmethod
    def from_json(cls, text: str) -> BatchUnderWay:
        """The inverse of `to_json`."""
        plain = json.loads(text)
        if plain.get("format") != FORMAT:
            raise ValueError(f"batch of format {plain.get('format')!r}; this version reads format {FORMAT}")
        names = ("attempt", "topic", "topic_id", "total", "slices", "settled")
        return cls(*(plain[name] for name in names))


def select_complete(slice_commits: Mapping[str, SliceCommit]) -> dict[str, SliceCommit]:
    """The commits of slices that were published to their end at least once."""
    return {key: slice_commit for key, slice_commit in slice_commits.items() if slice_commit.attempt != INCOMPLETE}


def read_published_commits(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, SliceCommit]:
    """The commits of those of the slices that were published to their end, at the decision that was published last.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    return select_complete(lake.load_slice_commits(stream.name, TABLE, keys))


def ensure_unchanged(lake: Lake, stream: Stream, keys: Sequence[str], decided: Mapping[str, int]) -> Sequence[str]:
    """The slices whose events are sent as they are decided; all of a stream that does not publish.

    Args:
        lake: the tables.
        stream: the stream.
        keys: slice keys.
        decided: the attempt that is in events, by slice.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    if stream.publishes is None:
        return keys
    found = read_published_commits(lake, stream, keys)
    return [key for key in keys if key in found and found[key].attempt == decided.get(key)]


def load_last_published(lake: Lake, stream: Stream) -> str | None:
    """The last slice of the main topic that is published; all before it are too. None if none is.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    table = open_table(lake.build_table_path(stream.name, TABLE))
    return None if table is None else read_last_published(table, stream.topic)


def read_last_published(table: DeltaTable, topic: str) -> str | None:
    """The last slice of the main topic that is published, by the table as it was opened."""
    ended = (key for key, one in read_committed_slices(table, short=True).records.items() if one.attempt != INCOMPLETE)
    main = (key for name in ended if (key := SliceKey.parse(name)).topic == topic)
    return max(map(str, main), key=SliceKey.parse, default=None)


def list_sending_slices(lake: Lake, stream: Stream) -> set[str]:
    """The slices with records in a batch that is written down and not settled: it is being sent, or it broke off.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    batch = load_current_batch(lake, stream)
    if batch is None or not batch.slices:
        return set()
    table = lake.open_existing_table(stream.name, SENDING)
    return {str(row["slice"]) for row in query(table, "SELECT DISTINCT slice FROM t WHERE batch IS NULL")}


def load_current_batch(lake: Lake, stream: Stream) -> BatchUnderWay | None:
    """The batch that is under way, or was the last one: that one has no slices. None if there was none.

    Raises:
        DependencyUnavailableError: the lake could not be read, or `_sending` is gone.
    """
    # In this order: a batch that begins between the two is seen, and one that is settled between them counts as open.
    table, sending = (open_table(lake.build_table_path(stream.name, name)) for name in (TABLE, SENDING))
    if table is None:
        return None
    if batch := read_batch(sending, table):
        return batch
    if last := read_last_settled(table):
        raise DependencyUnavailableError(
            f"the table {SENDING} of {stream.name} is gone, so the records being sent are unknown",
            stored=f"batch {last} is settled in {TABLE}",
            remedy="restore it; or wait for the next publication, which creates it again if Kafka has no later batch",
        )
    return None


def read_batch(sending: DeltaTable | None, table: DeltaTable) -> BatchUnderWay | None:
    """The batch in `_sending`, if that goes with the table: one that was deleted and created again has another ID."""
    if sending is None or sending.metadata().description != get_table_id(table):
        return None
    found = query(sending, "SELECT batch FROM t WHERE batch IS NOT NULL")
    if not found:
        return None
    batch = BatchUnderWay.from_json(str(found[0]["batch"]))
    settled = [
        key for key, one in read_slice_commits(table, [*batch.slices]).items() if one.extra.get(BATCH) == batch.attempt
    ]
    if not settled:
        return batch
    return replace(batch, total=0, slices={}, settled={settled[0]: batch.attempt})


def read_last_settled(table: DeltaTable) -> int:
    """The number of the last batch that the commits of `published` settled; 0 for none."""
    return max((slice_commit.extra.get(BATCH, 0) for slice_commit in read_slice_commits(table).values()), default=0)
