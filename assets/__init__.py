"""What is made of data, stage by stage, and the declared streams.

What belongs here: one module a stage (`raw`, `events`, `rejects`, `current`), the rules they share, and
`streams/`. Spark is imported where it is used. What does not: anything that Dagster sees (`orchestration`).
"""
