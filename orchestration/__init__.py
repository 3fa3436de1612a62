"""What Dagster sees: definitions, partitions, assets, sensors, schedules, jobs; and what people ask beside it.

What belongs here: what Dagster loads, as thin shells. What does not: work on data (`assets`), and what the shells carry
out, which is in the packages: `sensing` (ticks: planning, retries, repair), `checking` (checks and audit), `operating`
(decisions of people), `telling` (status, alerts, doctor) and `cli` (the command `highwater`).
"""
