"""Copies of accepted events in their topic before a lake was lost, so that nothing is sent twice."""

# There is a row for each record of the topic: of an origin the one with the highest revision counts, as for its
# readers. An event that is reprocessed with the content that is there is kept under its new slice, and not sent; then
# its row here has done its work.

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from highwater.assets.dlq_copies import Ends, may_have_copies
from highwater.assets.event_json import compute_fingerprint
from highwater.envelope import (
    LATE,
    MAX_COUNT,
    ORIGIN,
    ORIGIN_GENERATION,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    ORIGIN_TIMESTAMP,
    ORIGIN_TOPIC,
    ORIGIN_TYPES,
    RETRACTED,
    REVISION,
    SLICE,
    KafkaHeader,
    Origin,
)
from highwater.erasing import to_moment
from highwater.publishing import EventState, Lateness, RecordedOutcome
from highwater.resources.delta import query, query_all
from highwater.resources.delta_rs_writes import rewrite_table, translate_write_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, Row

    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.slices import Slice

TABLE = "accepted_copies"
# An error names some of at most this many.
MAX_REFUSED = 1_000
# Origins that are named in one condition.
NAMED_AT_ONCE = 1_000
_INT, _LONG = 2**31 - 1, 2**63 - 1
_NUMBERS = {
    ORIGIN_GENERATION: (0, MAX_COUNT),
    ORIGIN_PARTITION: (0, _INT),
    ORIGIN_OFFSET: (0, _LONG),
    ORIGIN_TIMESTAMP: (-_LONG - 1, _LONG),
    REVISION: (0, MAX_COUNT),
}


def build_schema() -> pa.Schema:
    """The table's columns."""
    import pyarrow as pa

    return pa.schema(
        [
            *ORIGIN_TYPES,
            ("revision", pa.int32()),
            ("late", pa.string()),
            ("fingerprint", pa.string()),
            ("published_at", pa.timestamp("us", "UTC")),
        ]
    )


@dataclass(frozen=True)
class AcceptedCopy:
    """One record of the topic of accepted events.

    Args:
        origin: the event's origin.
        ms: when that was published first, in milliseconds since 1970 in UTC.
        slice_key: the slice that accepted it.
        revision: how often it had been sent again, or retracted.
        late: why it is late; None in order.
        fingerprint: the content's fingerprint; None for a retraction.
    """

    origin: Origin
    ms: int
    slice_key: str
    revision: int
    late: Lateness | None
    fingerprint: str | None

    def build_row(self, sent_ms: int) -> dict[str, Any]:
        """The row of the table; `sent_ms` is the record's own time."""
        return {
            **dict(zip(ORIGIN, self.origin, strict=True)),
            "revision": self.revision,
            "late": self.late and self.late.value,
            "fingerprint": self.fingerprint,
            "published_at": to_moment(sent_ms),
        }


def read(headers: Iterable[KafkaHeader], value: bytes | None) -> AcceptedCopy:
    """The fields of a record; of several headers of one name the last counts.

    Raises:
        ValueError: it is none that was sent here: a header is missing or cannot be read, or it has no value.
    """
    texts = {name: (text or b"").decode() for name, text in headers}
    numbers = {name: int(texts.get(name, "0" if name == REVISION else "")) for name in _NUMBERS}
    for name, (least, most) in _NUMBERS.items():
        if not least <= numbers[name] <= most:
            raise ValueError(f"{name} is {numbers[name]}")
    if not texts.get(ORIGIN_TOPIC):
        raise ValueError(f"it has no {ORIGIN_TOPIC}")
    if (value is None) != (RETRACTED in texts):
        raise ValueError(f"{'no' if value is None else 'a'} value, and {RETRACTED} is {texts.get(RETRACTED)}")
    return AcceptedCopy(
        Origin(texts[ORIGIN_TOPIC], *(numbers[name] for name in (ORIGIN_GENERATION, ORIGIN_PARTITION, ORIGIN_OFFSET))),
        numbers[ORIGIN_TIMESTAMP],
        texts.get(SLICE, ""),
        numbers[REVISION],
        Lateness(texts[LATE]) if LATE in texts else None,
        None if value is None else compute_fingerprint(value),
    )


def write(lake: Lake, stream: str, batches: Iterable[Sequence[Mapping[str, Any]]], ends: Ends) -> None:
    """Write the table again, batch by batch; one that was written in part is begun again.

    Args:
        lake: the tables.
        stream: the stream's name.
        batches: rows; one batch is held at a time.
        ends: end offsets of the main topic; no event after them was sent then.

    Raises:
        DependencyUnavailableError: the storage is unavailable.
    """
    rewrite_table(lake.build_table_path(stream, TABLE), build_schema(), batches, json.dumps(ends))


def open_copies(lake: Lake, stream: Stream) -> RecordsBeforeRestart | None:
    """The copies of events that had been sent; None of a stream that was never restarted, or publishes nothing.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    table = None if stream.publishes is None else lake.open_stream_table(stream.name, TABLE)
    return None if table is None else RecordsBeforeRestart(table, stream.topic)


_SAME = " AND ".join(f"c.{name} = o.{name}" for name in ORIGIN)
_KNOWN = ", ".join(f"c.{name}" for name in (*ORIGIN, "revision", "late", "fingerprint", "published_at"))


@dataclass(frozen=True)
class RecordsBeforeRestart:
    """Records sent when the stream was restarted.

    Args:
        table: `accepted_copies`.
        main: the main topic.
    """

    table: DeltaTable
    main: str

    def may_contain(self, slice_: Slice) -> bool:
        """Whether some of a slice's events may have been sent; a tier's offsets do not show it."""
        return slice_.topic != self.main or may_have_copies([slice_], self._ends)

    @cached_property
    def _ends(self) -> Mapping[str, Mapping[str, int]]:
        found: Mapping[str, Mapping[str, int]] = json.loads(self.table.metadata().description or "{}")
        return found

    def merge_earlier_copies(
        self, known: Mapping[Origin, RecordedOutcome], events: DeltaTable, origins: str
    ) -> dict[Origin, RecordedOutcome]:
        """The known copies of origins, with the earlier publications that a question to `e` gives.

        This lake's publication of an origin counts, unless the topic had a higher revision of the origin.
        """
        sql = f"SELECT {_KNOWN} FROM c LEFT SEMI JOIN ({origins}) o ON {_SAME} ORDER BY c.revision, c.published_at"
        found = {Origin.from_row(row): _build_known(row) for row in query_all({"c": self.table, "e": events}, sql)}
        more = {one: it for one, it in found.items() if one not in known or it.revision > known[one].revision}
        return {**known, **more}

    @cached_property
    def passed(self) -> dict[tuple[str, int, int], int]:
        """By partition the last offset whose event had been sent: lower offsets come late."""
        sql = f"SELECT {', '.join(ORIGIN[:-1])}, max(origin_offset) AS origin_offset FROM t"
        origins = map(Origin.from_row, query(self.table, f"{sql} GROUP BY {', '.join(ORIGIN[:-1])}"))
        return {(one.topic, one.generation, one.partition): one.offset for one in origins}


def _build_known(row: Mapping[str, Any]) -> RecordedOutcome:
    state = EventState.RETRACTED if row["fingerprint"] is None else EventState.SENT
    late = None if row["late"] is None else Lateness(row["late"])
    return RecordedOutcome(state, row["revision"], row["fingerprint"], "", row["published_at"], late)


def list_refused_events(work: Work, keys: Sequence[str], rejected: DataFrame) -> list[Row]:
    """Events that had been sent and are rejected now by slices: the slice, the origin, and when it was sent.

    Args:
        work: the connections.
        keys: slices that are about to be decided.
        rejected: the currently rejected records: slice and origin.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    from pyspark.sql import functions as F

    before = open_copies(work.lake, work.stream)
    concerning = [slice_.key for slice_ in work.slices if before is not None and before.may_contain(slice_)]
    concerned_keys = [key for key in keys if key in concerning]
    if not concerned_keys:
        return []
    copies = work.spark.read.format("delta").load(work.lake.build_table_path(work.stream.name, TABLE))
    copied = rejected.where(F.col("slice").isin(*concerned_keys)).select("slice", *ORIGIN).join(copies, [*ORIGIN])
    content = F.struct(F.col("fingerprint").isNotNull().alias("sent"), F.unix_micros("published_at").alias("us"))
    last = copied.groupBy("slice", *ORIGIN).agg(F.max_by(content, F.struct("revision", "published_at")).alias("last"))
    gone = last.where("last.sent").select("slice", *ORIGIN, "last.us")
    return gone.orderBy(F.col("us").desc()).limit(MAX_REFUSED).collect()


def delete_copies(lake: Lake, stream: Stream, origins: Collection[Origin]) -> None:
    """Remove the copies of origins with erased keys.

    Raises:
        DependencyUnavailableError: the storage is unavailable, or another writer was first; it may be tried again.
    """
    before = open_copies(lake, stream) if origins else None
    if before is None:
        return
    places: dict[tuple[str, int, int], list[int]] = {}
    for one in sorted(origins):
        places.setdefault((one.topic, one.generation, one.partition), []).append(one.offset)
    for (topic, generation, partition), offsets in places.items():
        for start in range(0, len(offsets), NAMED_AT_ONCE):
            named = ", ".join(map(str, offsets[start : start + NAMED_AT_ONCE]))
            with translate_write_errors(str(before.table.table_uri)):
                before.table.delete(
                    f"origin_topic = '{topic}' AND origin_generation = {generation} AND "
                    f"origin_partition = {partition} AND origin_offset IN ({named})"
                )
