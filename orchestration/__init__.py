"""What Dagster sees: definitions, partitions, planning, sensors, schedules, jobs, checks.

What belongs here: thin shells over pure functions. What does not: work on data (`assets`).
"""
