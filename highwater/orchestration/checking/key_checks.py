"""The check of record keys: whether producers give records the key that their fields give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from highwater.assets.slice_classification import OTHER_KEYS, needs_key_count
from highwater.envelope import ORIGIN
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.resources.commit_log import read_slice_commits
from highwater.resources.delta import query_all, slice_is_one_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from highwater.declaration import Stream
    from highwater.resources.lake import Lake

AS_DECLARED = "record_keys_as_declared"
SAMPLES = 10
_ORIGIN = ", ".join(ORIGIN)
# On the main topic a record's place is its origin; a copy on a tier has the key of the original.
_UNLIKE = f"""
SELECT e.key AS key, encode(r.key, 'hex') AS record_key_hex, {_ORIGIN}
FROM events e JOIN raw r ON e.slice = r.slice AND origin_topic = r.topic AND origin_generation = r.generation
     AND origin_partition = r."partition" AND origin_offset = r."offset"
WHERE {{e_slices}} AND {{r_slices}} AND arrow_cast(e.key, 'Binary') IS DISTINCT FROM arrow_cast(r.key, 'Binary')
ORDER BY origin_partition, origin_offset LIMIT {SAMPLES}
"""


def select_check_names(stream: Stream) -> list[str]:
    """The check, where a stream declares keys and wants to be warned."""
    return [AS_DECLARED] if needs_key_count(stream) else []


def check_record_keys(lake: Lake, stream: Stream, keys: Sequence[str]) -> dict[str, CheckResult]:
    """For each slice whether the records of its events have the event's key, as it was counted with the decision.

    Raises:
        DependencyAwayError: the lake could not be read.
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
        found[key] = CheckResult(not unlike, text, numbers, _read_samples(raw, events, key) if unlike else ())
    return found


def _read_samples(raw: DeltaTable, events: DeltaTable, key: str) -> list[dict[str, Any]]:
    conditions = {f"{name}_slices": slice_is_one_of([key], f"{name}.slice") for name in "er"}
    return query_all({"raw": raw, "events": events}, _UNLIKE.format(**conditions))
