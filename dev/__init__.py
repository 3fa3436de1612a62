"""The embedded stack and its set-up: what a developer's machine needs, and no deployment does.

What belongs here: jars, Java, child processes, broker, Spark servers, generator, demo. What does not: anything that
`highwater`, `resources`, `assets` or `orchestration` import.
"""
