"""The kernel of Highwater: its words as value types, its errors, its settings.

What belongs here: values and pure functions that know neither Dagster nor Kafka nor Spark.
What does not: anything that connects to something (`resources`), makes data (`assets`), or is
seen by Dagster (`orchestration`). The imports point one way: orchestration → assets → resources → highwater.
"""
