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

REASONS = (MALFORMED, SCHEMA, INVALID, UNRESOLVED)
PERMANENT = frozenset({MALFORMED, SCHEMA, INVALID})
