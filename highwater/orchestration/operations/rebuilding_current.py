"""The action `rebuild-current`: reports what it would change, then calls `assets/current_rebuild`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from highwater.assets import current_rebuild

if TYPE_CHECKING:
    from highwater.assets.current_rebuild import Differences
    from highwater.assets.work import Work

NAMES = ("what", "key", "version", "updated_by_slice")


def rebuild_from_events(work: Work, *, dry_run: bool) -> Differences:
    """Report differences between `current` and the events, and replace the table if that is wanted.

    Args:
        work: the connections; its slices do not matter. Its `log` gets the sentences.
        dry_run: write nothing; only report what differs. Where nothing differs nothing is written.

    Raises:
        ConfigurationError: there are no events to compute from.
        SupersededAttemptError: other writers were first again and again; nothing was written.
        DependencyUnavailableError: Spark, the ledger or the lake is unavailable; nothing was written.
    """
    found = current_rebuild.compare_with_events(work, current_rebuild.RebuildSnapshot.take(work))
    for line in found.lines:
        work.log(line)
    if found.none:
        work.log("current equals the events: nothing to do")
    elif not dry_run:
        work.log(f"rebuilt: {current_rebuild.rebuild(work):,} keys")
    else:
        work.log("a dry run: nothing was written")
    return found


def build_difference_table(found: Differences) -> tuple[list[str], list[list[str]]]:
    """Some of what differs, as names of columns and rows."""
    return [*NAMES], [[str(row[name]) for name in NAMES] for row in found.samples]
