"""Ticks of sensors: planning, retries, requests of runs, repair, publication, the mirror."""

# Deciding is pure (`slice_cutting`, `run_requests`, `due_times`); the rest carries it out. The sensors are in
# `highwater.orchestration.sensors`.
