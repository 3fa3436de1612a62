"""Counts of classified sample records, and records from a file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from highwater.classifying import Classification, classify
from highwater.declaration import Stream
from highwater.decoding import Schemas
from highwater.errors import ConfigurationError
from highwater.second_reader import KafkaRecord

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
DETAIL_LENGTH = 100


@dataclass(frozen=True)
class RejectGroup:
    """Rejects that are alike, with the first of them.

    Args:
        reason: the reason that the pipeline would record.
        rule: the rule or the check of a field that refused them; None where another reason did.
        count: how many there are.
        detail: the detail of the first one.
        partition, offset: where the first one is.
    """

    reason: str
    rule: str | None
    count: int
    detail: str
    partition: int
    offset: int


@dataclass(frozen=True)
class SampleCounts:
    """The result of the pipeline for a sample.

    Args:
        records: the records of the sample.
        events, deletes, tombstones: how many of each; a tombstone here deletes nothing.
        keys: how many distinct keys the events and deletes have.
        rejects: the rejects, most frequent first.
    """

    records: int
    events: int
    deletes: int
    tombstones: int
    keys: int
    rejects: tuple[RejectGroup, ...]

    @property
    def rejected(self) -> int:
        """The number of rejects."""
        return sum(group.count for group in self.rejects)

    def to_plain(self) -> dict[str, Any]:
        """The numbers for a script."""
        return {**asdict(self), "rejected": self.rejected}

    @property
    def rows(self) -> list[list[object]]:
        """The rows of a table: what, count, share, example, place."""
        counted = {"event": self.events, "delete": self.deletes, "tombstone": self.tombstones}
        found: list[list[object]] = [[what, f"{n:,}", self._format_share(n), "", ""] for what, n in counted.items()]
        for group in self.rejects:
            place = f"{group.partition}:{group.offset}"
            what = f"reject: {group.reason}" + (f", {group.rule}" if group.rule else "")
            found.append([what, f"{group.count:,}", self._format_share(group.count), group.detail, place])
        return found

    def _format_share(self, some: int) -> str:
        return f"{100 * some / self.records:.1f}%" if self.records else ""


COUNT_NAMES = ("classified as", "records", "share", "first example", "at")


def count_sample(stream: Stream, records: Sequence[KafkaRecord], schemas: Schemas | None) -> SampleCounts:
    """Classify each record of a sample, without Spark.

    Raises:
        DependencyUnavailableError: the schema registry gave no usable answer.
    """
    return count_outcomes(records, [classify(stream, record, schemas) for record in records])


def count_outcomes(records: Sequence[KafkaRecord], outcomes: Sequence[Classification]) -> SampleCounts:
    """Count what becomes of the records of a sample; `outcomes` has one for each record, in their order."""
    kinds: Counter[str] = Counter()
    keys: set[str | None] = set()
    first: dict[tuple[str, str | None, str], RejectGroup] = {}
    alike: Counter[tuple[str, str | None, str]] = Counter()
    for record, outcome in zip(records, outcomes, strict=True):
        kinds[outcome.kind] += 1
        if outcome.kind in {"event", "delete"}:
            keys.add(outcome.key)
        if outcome.kind == "reject":
            reason, detail = outcome.reason or "malformed", outcome.detail or ""
            group = reason, outcome.rule, _VARIABLE.sub("", detail)
            alike[group] += 1
            place = record.partition, record.offset
            first.setdefault(group, RejectGroup(reason, outcome.rule, 0, detail[:DETAIL_LENGTH], *place))
    rejects = tuple(replace(first[group], count=number) for group, number in alike.most_common())
    distinct = len(keys - {None})
    return SampleCounts(len(records), kinds["event"], kinds["delete"], kinds["tombstone"], distinct, rejects)


def parse_record_lines(lines: Iterable[str], topic: str) -> list[KafkaRecord]:
    """Records from lines of JSON: `key_hex`, `value_hex`, `headers` as pairs of name and hex, `timestamp_ms`.

    The number of the line, counted from 0, is the offset.

    Raises:
        ConfigurationError: a line is no such object.
    """
    found = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            plain = json.loads(line)
            headers = tuple((name, _decode_hex(value)) for name, value in plain.get("headers") or ())
            value, key = _decode_hex(plain["value_hex"]), _decode_hex(plain.get("key_hex"))
            found.append(KafkaRecord(value, key, headers, topic, 0, number, int(plain.get("timestamp_ms") or 0)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"line {number + 1} of the file is no record",
                found=f"{type(error).__name__}: {error}",
                remedy='write each line as {"key_hex": …, "value_hex": …, "headers": [[name, hex]], "timestamp_ms": …}',
            ) from error
    return found


def _decode_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
