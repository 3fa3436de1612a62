"""The columns that are a stream's version and event time, by the evidence of a sample."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from highwater.declaration import Field
from highwater.inference_fields import split_words
from highwater.inference_keys import KeyChoice, SampledRecord, is_filled
from highwater.inference_names import ColumnDraft
from highwater.sources import Meta

# As `substring_index(file, '.', -1)` has it.
_LOG_NUMBER = re.compile(r"\.([0-9]+)$")
_VERSION_WORDS = frozenset({"version", "revision", "rev", "seq", "sequence", "seqno", "lsn"})
_BESIDE_VERSION = frozenset({"number", "no", "row", "entity", "aggregate", "event", "record", "object", "source"})
_CHANGE_WORDS = frozenset({"updated", "modified", "changed"})
_EVENT_TIME_WORDS = ("event", "occurred", "happened", "ts", "timestamp", "time", "updated", "modified", "created", "at")


@dataclass(frozen=True)
class ChosenColumn:
    """A chosen column, or none, and why."""

    draft: ColumnDraft | None
    reason: str


def choose_version(
    drafts: Sequence[ColumnDraft],
    evidence: Sequence[SampledRecord],
    key: KeyChoice,
    *,
    compacted: bool,
    preferred: Sequence[str] = (),
) -> ChosenColumn:
    """The column that orders the states of a key.

    Args:
        drafts: the columns.
        evidence: the sample.
        key: the key; without one there is no version.
        compacted: whether the topic keeps the newest record of each key, or has tombstones.
        preferred: the wanted names that the envelope gives, best first; no others are considered then.
    """
    if not key.drafts:
        return ChosenColumn(None, "none, since there is no key: each record is an event of its own")
    positions = [drafts.index(one) for one in key.drafts if one in drafts]
    fallen = []
    for at in _select_version_candidates(drafts, evidence, preferred):
        trend = _describe_rise(at, positions, evidence)
        if trend is not None:
            return ChosenColumn(drafts[at], f"{drafts[at].wanted} {trend}")
        fallen.append(drafts[at].wanted)
    tail = f"; {', '.join(fallen)} would contradict the order of the offsets" if fallen else ""
    if not compacted:
        return ChosenColumn(None, f"none, so the table is append-only: no field rises with each change of a key{tail}")
    if not key.from_record:
        return ChosenColumn(None, f"none: the record key cannot be read as the key's columns{tail}")
    if not _has_one_partition_per_key(evidence):
        return ChosenColumn(
            None, f"none: records of one key are in several partitions, so offsets do not order them{tail}"
        )
    draft = ColumnDraft("record_offset", Field("", "long"), (Meta("offset"),), "the record's offset")
    return ChosenColumn(draft, f"the record's offset: all records of a key are in one partition{tail}")


def _select_version_candidates(
    drafts: Sequence[ColumnDraft], evidence: Sequence[SampledRecord], preferred: Sequence[str]
) -> list[int]:
    able = [at for at in range(len(drafts)) if is_filled(at, evidence)]
    if preferred:
        return [at for name in preferred for at in able if drafts[at].wanted == name]
    counts = [at for at in able if drafts[at].field.type in {"integer", "long"} and _is_version(drafts[at].path)]
    times = [
        at
        for at in able
        if drafts[at].field.type == "timestamp" and split_words(_find_last_name(drafts[at])) & _CHANGE_WORDS
    ]
    return sorted(counts, key=lambda at: len(drafts[at].path)) + sorted(times, key=lambda at: len(drafts[at].path))


def _find_last_name(draft: ColumnDraft) -> str:
    return draft.path[-1] if draft.path else draft.wanted


def _is_version(path: Sequence[str]) -> bool:
    name_words = split_words(path[-1]) if path else frozenset()
    return bool(name_words & _VERSION_WORDS) and name_words <= _VERSION_WORDS | _BESIDE_VERSION


def _describe_rise(at: int, positions: Sequence[int], evidence: Sequence[SampledRecord]) -> str | None:
    """The rise of a column along the offsets of each key; None if it falls, or is equal for different values."""
    last: dict[tuple[Any, ...], SampledRecord] = {}
    pairs = 0
    for one in sorted(evidence, key=lambda e: (e.record.partition, e.record.offset)):
        key = (one.record.partition, *(one.values[p] for p in positions))
        before = last.get(key)
        last[key] = one
        if before is None:
            continue
        pairs += 1
        mine, other = one.values[at], before.values[at]
        if mine < other or (mine == other and one.record.value != before.record.value):
            return None
    if not pairs:
        return "orders the states by its name alone: no key occurs twice in the sample"
    return f"rises along the offsets of each key, in {pairs:,} pairs of records"


def choose_log_position(
    drafts: Sequence[ColumnDraft], evidence: Sequence[SampledRecord], key: KeyChoice, position: Sequence[str]
) -> ChosenColumn:
    """The position in MySQL's binary log, which orders changes together with the number of the log's file.

    Args:
        drafts: the columns.
        evidence: the sample.
        key: the key.
        position: the wanted names of file, position and row; empty where the envelope has none.

    Returns:
        The column of the position; none where a record lacks one of them, or they fall along the offsets of a key.
    """
    none = ChosenColumn(None, "none: the changes have no position in a binary log")
    if not position or not key.drafts or not evidence:
        return none
    wanted = [one.wanted for one in drafts]
    file, pos, row = (wanted.index(one) for one in position)
    placed = []
    for one in evidence:
        number = _LOG_NUMBER.search(str(one.values[file]))
        if number is None or one.values[pos] is None or one.values[row] is None:
            return none
        place = int(number[1]), one.values[pos], one.values[row]
        placed.append(replace(one, values=(*one.values, place)))
    positions = [drafts.index(one) for one in key.drafts if one in drafts]
    trend = _describe_rise(len(drafts), positions, placed)
    return none if trend is None else ChosenColumn(drafts[pos], f"the place in MySQL's binary log: it {trend}")


def _has_one_partition_per_key(evidence: Sequence[SampledRecord]) -> bool:
    found: dict[bytes, set[int]] = defaultdict(set)
    for one in evidence:
        if one.key is not None:
            found[one.key.raw].add(one.record.partition)
    return all(len(partitions) == 1 for partitions in found.values())


def choose_event_time(
    drafts: Sequence[ColumnDraft], evidence: Sequence[SampledRecord], *, preferred: Sequence[str] = ()
) -> ChosenColumn:
    """The column that says when an event happened."""
    able = [at for at, one in enumerate(drafts) if one.field.type == "timestamp" and is_filled(at, evidence)]
    for name in preferred:
        for at in able:
            if drafts[at].wanted == name:
                return ChosenColumn(drafts[at], f"{name}: the envelope says when it happened")
    ranked = [(rank, len(drafts[at].path), at) for at in able if (rank := _rank(drafts[at])) is not None]
    if ranked:
        draft = drafts[min(ranked)[2]]
        return ChosenColumn(draft, f"{draft.wanted}: always filled, and named like the time of an event")
    return ChosenColumn(None, "the record's timestamp: no time is always filled and named like the time of an event")


def _rank(draft: ColumnDraft) -> int | None:
    name_words = split_words(_find_last_name(draft))
    return next((rank for rank, word in enumerate(_EVENT_TIME_WORDS) if word in name_words), None)
