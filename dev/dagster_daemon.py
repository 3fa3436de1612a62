"""Dagster's daemon, which looks every few seconds whether a backfill was requested.

Dagster's own looks every 30 s, and none of its settings changes that: a demonstration would hang for half of it.
"""

from __future__ import annotations

from dagster._daemon import cli, controller

LOOK_SECONDS = 3


def main() -> None:
    """The program `dagster-daemon`, with its arguments."""
    # Read by the loop at each start; whatever has a setting of its own does not look at it.
    controller.DEFAULT_DAEMON_INTERVAL_SECONDS = LOOK_SECONDS
    cli.main()


if __name__ == "__main__":
    main()
