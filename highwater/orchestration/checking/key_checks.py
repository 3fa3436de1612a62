"""The check of record keys: whether producers give records the key that their fields give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from highwater.assets.slice_classification import OTHER_KEYS
from highwater.classifying import read_record_key
from highwater.decoding import Schemas, decode_key
from highwater.envelope import ORIGIN_SQL
from highwater.formats import Text
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import query_all, slice_is_one_of, stream_all
from highwater.second_reader import KafkaRecord, MisfitError

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake

AS_DECLARED = "record_keys_as_declared"
# On the main topic a record's place is its origin; a copy on a tier has the key of the original.
_PAIRS = f"""
SELECT e.key AS key, encode(r.key, 'hex') AS record_key_hex, {ORIGIN_SQL}{{headers}}
FROM events e JOIN raw r ON e.slice = r.slice AND origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE {{e_slices}} AND {{r_slices}}
"""
_IN_ORDER = "ORDER BY origin_partition, origin_offset"
_UNLIKE = f"""{_PAIRS} AND arrow_cast(e.key, 'Binary') IS DISTINCT FROM arrow_cast(r.key, 'Binary')
{_IN_ORDER} LIMIT {SAMPLES}
"""


def check_record_keys(
    lake: Lake, stream: Stream, keys: Sequence[str], schemas: Schemas | None = None
) -> dict[str, CheckResult]:
    """For each slice whether the records of its events have the event's key, as it was counted with the decision.

    Args:
        lake: the tables.
        stream: its declaration.
        keys: the slices.
        schemas: those of the registry, for key formats that have them there.

    Raises:
        DependencyUnavailableError: the lake or the registry could not be read.
    """
    raw, events = lake.open_stream_table(stream.name, "raw"), lake.open_stream_table(stream.name, "events")
    if raw is None or events is None:
        return dict.fromkeys(keys, CheckResult(passed=False, text="there is no table of raw, or none of events"))
    decisions = read_slice_commits(events, keys)
    found = {}
    for key in keys:
        if key not in decisions:
            found[key] = CheckResult(passed=False, text="the slice is not in events")
            continue
        counts = decisions[key].counts
        unlike = counts.get(OTHER_KEYS, 0)
        numbers = {"events": counts["events"], "unlike": unlike}
        text = f"{unlike:,} of {counts['events']:,} events have records with another key"
        samples = _read_samples({"raw": raw, "events": events}, stream, key, schemas) if unlike else ()
        found[key] = CheckResult(not unlike, text, numbers, samples)
    return found


def _read_samples(
    tables: Mapping[str, DeltaTable], stream: Stream, key: str, schemas: Schemas | None
) -> list[dict[str, Any]]:
    conditions = {f"{name}_slices": slice_is_one_of([key], f"{name}.slice") for name in "er"}
    if isinstance(stream.key_format, Text):
        return query_all(tables, _UNLIKE.format(headers="", **conditions))
    sql = _PAIRS.format(headers=", r.headers AS headers", **conditions) + _IN_ORDER
    unlike = (row for row in stream_all(tables, sql) if _read_record_key(stream, row, schemas) != row["key"])
    return [{name: row[name] for name in row if name != "headers"} for row in islice(unlike, SAMPLES)]


def _read_record_key(stream: Stream, row: Mapping[str, Any], schemas: Schemas | None) -> str | None:
    """The key that the record's key gives, decoded by the second reader; None without one."""
    if row["record_key_hex"] is None:
        return None
    own, headers = bytes.fromhex(row["record_key_hex"]), [(one["key"], one["value"]) for one in row["headers"] or ()]
    try:
        return read_record_key(stream, decode_key(stream.key_format, own, KafkaRecord(None, own, headers), schemas))
    except MisfitError:
        return None
