"""Asset checks of slices, and the audit's checks of a whole stream."""

# `check_rules` decides over plain values; the other modules look.
