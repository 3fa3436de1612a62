"""What a tick of a sensor does: planning, retries, requests of runs, repair, publication, the mirror.

Deciding is pure (`cutting`, `due_times`, `requests`, `turns`); the rest carries it out. The sensors themselves are in
`highwater.orchestration.sensors`.
"""
