"""Highwater takes Kafka topics into Delta tables with Dagster and Spark."""

# Modules of this package are values and pure functions. Its subpackages are layers, and imports point one way:
# `orchestration` (what Dagster loads), `assets` (stages that write tables), `resources` (Kafka, Spark, lake, ledger),
# and then the modules here.
