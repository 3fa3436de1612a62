"""The reasons for which a record is rejected, and which of them are permanent (I9)."""

# A reason is permanent when only the record's own content causes it, and temporary when waiting may help. Order of
# arrival never makes a record invalid: that is for checks.

from __future__ import annotations

# The value, or the record's key, cannot be read as the declaration says.
MALFORMED = "malformed"
# A field has another type in the record's schema.
SCHEMA = "schema"
# A declared rule is broken.
INVALID = "invalid"
# The lookup has no row yet, or the registry does not know the schema yet.
UNRESOLVED = "unresolved"

REASONS = (MALFORMED, SCHEMA, INVALID, UNRESOLVED)
PERMANENT = frozenset({MALFORMED, SCHEMA, INVALID})
