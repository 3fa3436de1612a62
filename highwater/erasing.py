"""Erasure: the erased keys, and the counts of a slice without their records."""

# A key is known by its SHA-256 alone. A record counts as erased by its key and by its time: one that was published
# after the erasure is a new one.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from highwater.errors import ConfigurationError, UnbalancedError
from highwater.gaps import Ranges
from highwater.reject_reasons import BY_REASON, BY_RULE

# The digest of an erasure that is none of a key: rows of raw that expired (`highwater.retention`).
BY_AGE = ""
# Among the counts of a slice: rows of raw that expired.
AGED = "aged"
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime.max.replace(tzinfo=UTC)
# Kafka's greatest timestamp.
LATEST = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Erasure:
    """A person's erasure of a key, or maintenance's removal of rows of raw for their age.

    Args:
        number: given by the ledger; 0 before it is recorded.
        stream: the stream.
        digest: SHA-256 of the key's bytes, in hexadecimal; `BY_AGE` of rows that expired.
        reason: why.
        erased_by: who.
        erased_at: when, in UTC; records of the key that are older are never read again.
    """

    stream: str
    digest: str
    reason: str
    erased_by: str
    erased_at: datetime
    number: int = 0

    @property
    def by_age(self) -> bool:
        """Whether it is none of a key."""
        return self.digest == BY_AGE


@dataclass(frozen=True)
class ErasedCounts:
    """The counts that an erasure removes from one slice.

    Args:
        slice_key: the slice.
        places: the offsets of the records in its topic, which raw held or, where they were never read, would have held.
        rows: how many rows of each table; of rows that expired how many these are, as `AGED`.
        done_at: when all of them were gone, in UTC; None while that is under way.
        number: the number of the erasure; 0 before it is recorded.
    """

    slice_key: str
    places: Ranges
    rows: Mapping[str, int] = field(default_factory=dict)
    done_at: datetime | None = None
    number: int = 0

    @property
    def by_age(self) -> bool:
        """Whether these are rows of raw that expired."""
        return AGED in self.rows


@dataclass(frozen=True)
class RecordedErasure:
    """An erasure, and what it took from each slice, by the slice's key."""

    erasure: Erasure
    slices: Mapping[str, ErasedCounts] = field(default_factory=dict)


def compute_digest(key: bytes) -> str:
    """By what an erased key is known."""
    return sha256(key).hexdigest()


def ensure_digest(text: str) -> str:
    """The digest of a key that is to be erased.

    Raises:
        ConfigurationError: it is none.
    """
    if not _DIGEST.fullmatch(text):
        raise ConfigurationError(
            "this is no digest of a key",
            found=text[:80],
            remedy="give the SHA-256 of the key's bytes in lower case hexadecimal: printf %s KEY | sha256sum",
        )
    return text


def compute_erasure_times(erasures: Sequence[Erasure]) -> dict[str, datetime]:
    """For each erased key the moment up to which its records are erased; expired rows may be read again."""
    found: dict[str, datetime] = {}
    for one in (one for one in erasures if not one.by_age):
        found[one.digest] = max(found.get(one.digest, one.erased_at), one.erased_at)
    return found


def to_microseconds(moment: datetime) -> int:
    """A moment in microseconds since 1970, exactly."""
    return (moment - _BEGIN) // timedelta(microseconds=1)


def to_milliseconds(moment: datetime) -> int:
    """The greatest timestamp of a record that is not younger than a moment; of the last moment that there is, any."""
    return LATEST if moment == _END else to_microseconds(moment) // 1000


def to_moment(ms: int) -> datetime:
    """The moment of a timestamp in milliseconds since 1970; the last one that there is for all beyond it."""
    return _END if ms > to_microseconds(_END) // 1000 else _BEGIN + timedelta(milliseconds=max(ms, 0))


def subtract_counts(
    key: str,
    counts: Mapping[str, int],
    raw: int,
    tombstones: int,
    events: int,
    rejects: Mapping[str, int],
    rules: Mapping[str, int],
) -> dict[str, int]:
    """The counts of a decision without some of its records; remaining ones count as superseded.

    Args:
        key: the slice key.
        counts: the numbers of the decision's slice commit.
        raw: removed records.
        tombstones: removed records without a value.
        events: removed records that were accepted.
        rejects: removed records that were rejected, by reason.
        rules: removed rejects that a rule refused, by rule.

    Raises:
        UnbalancedError: fewer would remain than none: the tables do not hold what was decided.
    """
    rejected = sum(rejects.values())
    gone = {
        "raw": raw,
        "tombstones": tombstones,
        "events": events,
        "rejects": rejected,
        "superseded": raw - tombstones - events - rejected,
        **{f"{BY_REASON}{reason}": count for reason, count in rejects.items()},
    }
    found = {**counts, **{name: counts.get(name, 0) - count for name, count in gone.items()}}
    wrong = [name for name in gone if found[name] < 0] + [name for name, count in gone.items() if count < 0]
    if wrong:
        raise UnbalancedError(
            f"{key}: more {wrong[0]} would be erased than its decision has",
            stored=counts.get(wrong[0], 0),
            found=gone[wrong[0]],
            remedy=f"another writer changed {_find_table(wrong[0])}: run highwater audit STREAM, restore that table as "
            "docs/deployment/backup.md describes, then erase again",
        )
    return {**found, **_subtract_rules(counts, rules)}


def _subtract_rules(counts: Mapping[str, int], rules: Mapping[str, int]) -> dict[str, int]:
    """The counts per rule without some rejects.

    A rule that was renamed between decision and rejects has rows without a count, which must not stop an erasure.
    """
    named = {f"{BY_RULE}{rule}": count for rule, count in rules.items()}
    return {name: max(0, counts[name] - count) for name, count in named.items() if name in counts}


def _find_table(count: str) -> str:
    """The table whose rows a count of a decision describes."""
    if count in {"raw", "tombstones", "superseded"}:
        return "raw"
    return "events" if count == "events" else "rejects"
