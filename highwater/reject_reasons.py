"""The reasons for which a record is rejected, and which of them are permanent (I9)."""

# A reason is permanent when only the record's own content causes it, and temporary when waiting may help. Order of
# arrival never makes a record invalid: that is for checks.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

# The value, the record's key or a field is not as declared.
MALFORMED = "malformed"
# The writer's schema contradicts the declaration, or an unknown field is refused.
SCHEMA = "schema"
# A value violates a declared rule.
INVALID = "invalid"
# The lookup finds no row for it, or the registry does not know its schema yet.
UNRESOLVED = "unresolved"

# Prefixes of the counts of a slice: rejects by reason, and those of `invalid` by the rule that refused them.
BY_REASON = "rejects_"
BY_RULE = "rule_"

REASONS = (MALFORMED, SCHEMA, INVALID, UNRESOLVED)
PERMANENT = frozenset({MALFORMED, SCHEMA, INVALID})


def format_count_name(name: str) -> str:
    """The name of a count for a person: `rejects/invalid` by reason, `rejects/invalid/amount_positive` by rule."""
    if name.startswith(BY_RULE):
        return f"rejects/{INVALID}/{name.removeprefix(BY_RULE)}"
    return f"rejects/{name.removeprefix(BY_REASON)}" if name.startswith(BY_REASON) else name


class Rejection(Protocol):
    """The cause of a record's rejection."""

    @property
    def reason(self) -> str:
        """One of `REASONS`."""

    @property
    def rule(self) -> str | None:
        """The rule or check that refused an invalid record."""


def count_causes(rejections: Iterable[Rejection]) -> Counter[str]:
    """The number of rejections by cause: the reason, with the rule if one refused the record."""
    return Counter(one.reason if one.rule is None else f"{one.reason} by {one.rule}" for one in rejections)


def format_causes(causes: Mapping[str, int]) -> str:
    """The causes with their numbers, the most frequent first."""
    return ", ".join(f"{count:,} {cause}" for cause, count in Counter(causes).most_common() if count) or "none"
