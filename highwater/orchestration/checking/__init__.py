"""What proves the tables: the asset checks of slices, and the audit of a whole stream.

`verdicts` decides over plain values; the other modules look.
"""
