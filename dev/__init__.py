"""The embedded stack and its set-up: what a developer's machine needs, and no deployment does."""
