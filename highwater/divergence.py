"""Divergence of a partition from its recorded past: other records or leader epochs than at planning (I16)."""

# An unclean leader election replaces acknowledged records under the same offsets and the same topic ID. Two facts
# show it. Each batch carries the leader epoch in which it was written (KIP-320), and no batch before a planned end is
# of a later epoch than the plan's. And the last record before that end has a fingerprint.

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fingerprint:
    """The last record that could be seen before a planned end.

    Args:
        offset: the record's offset.
        digest: SHA-256 of its timestamp, key and value, in hexadecimal.
    """

    offset: int
    digest: str


def encode_epochs(epochs: Mapping[int, int]) -> dict[str, int]:
    """Leader epochs as plain values for JSON, ordered by partition."""
    return {str(p): epochs[p] for p in sorted(epochs)}


def decode_epochs(plain: Mapping[str, int]) -> dict[int, int]:
    """The inverse of `encode_epochs`."""
    return {int(p): epoch for p, epoch in plain.items()}


def encode_fingerprints(prints: Mapping[int, Fingerprint]) -> dict[str, list[int | str]]:
    """Fingerprints as plain values for JSON, `{"partition": [offset, digest]}`, ordered by partition."""
    return {str(p): [prints[p].offset, prints[p].digest] for p in sorted(prints)}


def decode_fingerprints(plain: Mapping[str, Sequence[Any]]) -> dict[int, Fingerprint]:
    """The inverse of `encode_fingerprints`."""
    return {int(p): Fingerprint(*mark) for p, mark in plain.items()}


def compute_digest(timestamp_ms: int, key: bytes | None, value: bytes | None) -> str:
    """The digest of a record; `highwater.assets.raw` computes the same in Spark.

    Args:
        timestamp_ms: milliseconds since 1970 in UTC.
        key: null and empty differ.
        value: likewise.
    """
    return hashlib.sha256(str(timestamp_ms).encode() + _encode_content(key) + _encode_content(value)).hexdigest()


def _encode_content(content: bytes | None) -> bytes:
    return b"\x00" if content is None else b"\x01" + content


@dataclass(frozen=True)
class PlannedFacts:
    """The facts that were recorded of a partition when offsets of it were planned.

    Args:
        end: the planned end.
        epoch: the leader epoch then.
        fingerprint: the last record before the end; None if none could be seen.
    """

    end: int
    epoch: int | None
    fingerprint: Fingerprint | None = None


@dataclass(frozen=True)
class SeenRecord:
    """A record as Kafka gives it now."""

    offset: int
    digest: str
    epoch: int | None


@dataclass(frozen=True)
class Divergence:
    """The comparison of the contents of Kafka with what was recorded.

    Args:
        diverged: partitions whose records were replaced before the planned end, with the offset where that begins.
        unsure: partitions that could not be compared now, with the reason.
    """

    diverged: Mapping[int, int] = field(default_factory=dict)
    unsure: Mapping[int, str] = field(default_factory=dict)


SOUND = Divergence()


def has_diverged(was: PlannedFacts, now: Sequence[SeenRecord]) -> bool:
    """Whether other records are before the planned end than at planning time.

    A record that retention or compaction removed is no divergence: then only a later epoch shows one.

    Args:
        was: the recorded facts.
        now: the records that can be seen from the mark, or the last one before the end where there is no mark.
    """
    mark = was.fingerprint
    if mark is not None and any(seen.offset == mark.offset and seen.digest != mark.digest for seen in now):
        return True
    return was.epoch is not None and any(seen.epoch is not None and seen.epoch > was.epoch for seen in now)
