"""The reasons for which a record is rejected, and which of them are permanent (I9)."""

# A reason is permanent when only the record's own content causes it, and temporary when waiting may help. Order of
# arrival never makes a record invalid: that is for checks.

from __future__ import annotations

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
