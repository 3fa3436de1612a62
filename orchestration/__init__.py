"""The Dagster code location of this project."""
