"""Dagster definitions and the `highwater` command: thin shells over the packages below this one."""
