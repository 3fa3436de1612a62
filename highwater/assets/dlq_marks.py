"""The consumer groups that count published rejects: their names, and deleting those that nothing needs any more."""

# A mark is needed from the first transaction of a decision until the table `dlq` records that all of its rejects are
# published. The group's name carries the attempt of the decision. So a late deletion, by a process that was stopped for
# a while, removes a mark that the table made redundant, and never the mark of a later decision.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from highwater.assets import rejects
from highwater.assets.origins import DLQ
from highwater.errors import HighwaterError, UnknownSliceError
from highwater.resources.consumer_groups import delete_groups
from highwater.slices import SliceKey

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.resources.kafka import Kafka

PREFIX = "highwater.pub."
# No topic, and so no slice key, has this character.
SEPARATOR = "#"


class MarkGroup(NamedTuple):
    """A group's slice, and the attempt of the decision; None in the names that were used before they carried it."""

    slice_key: str
    attempt: int | None


def build_group_name(slice_key: str, attempt: int) -> str:
    """The group that counts the published rejects of one decision."""
    return f"{PREFIX}{slice_key}{SEPARATOR}{attempt}"


def parse_groups(names: Iterable[str]) -> dict[str, MarkGroup]:
    """The groups that count the rejects of a slice, by name."""
    found = {}
    for name in names:
        if not name.startswith(PREFIX):
            continue
        key, separator, attempt = name.removeprefix(PREFIX).partition(SEPARATOR)
        try:
            SliceKey.parse(key)
            found[name] = MarkGroup(key, int(attempt) if separator else None)
        except (UnknownSliceError, ValueError):
            continue  # the group of an accepted topic, or somebody else's
    return found


def delete_marks(work: Work, attempts: Mapping[str, int]) -> None:
    """Delete the groups of decisions whose publication the table `dlq` records.

    The publication is complete, so an error ends nothing: `highwater maintain` deletes remaining groups.
    """
    left = _delete(work.kafka, [build_group_name(key, attempt) for key, attempt in attempts.items()])
    for name, why in left.items():
        work.log(f"the consumer group {name} was not deleted: {why}; highwater maintain tries again")


def list_needless_groups(work: Work) -> list[str]:
    """The stream's groups that count a publication which is complete by the table `dlq`.

    Raises:
        DependencyUnavailableError: Kafka, the ledger or the lake could not be read.
    """
    ours = parse_groups(work.kafka.list_group_names())
    planned = work.ledger.read_plan_times([one.slice_key for one in ours.values()])
    ours = {
        name: one
        for name, one in ours.items()
        if one.slice_key in planned and SliceKey.parse(one.slice_key).topic in _select_topics(work)
    }
    keys = sorted({one.slice_key for one in ours.values()})
    decided, published = (work.lake.load_slice_commits(work.stream.name, table, keys) for table in (rejects.TABLE, DLQ))

    def is_needless(one: MarkGroup) -> bool:
        if one.slice_key not in published or one.slice_key not in decided:
            return False
        known = published[one.slice_key].attempt
        return known == decided[one.slice_key].attempt if one.attempt is None else known >= one.attempt

    return [name for name, one in sorted(ours.items()) if is_needless(one)]


def clean_up(work: Work, *, dry_run: bool) -> str:
    """Delete the groups that nothing needs any more, or count them; one sentence, empty where there are none."""
    try:
        found = list_needless_groups(work)
    except HighwaterError as error:
        return f"consumer groups of publications were not looked at: {error.problem}"
    if not found:
        return ""
    left = {} if dry_run else _delete(work.kafka, found)
    done = f"{len(found) - len(left):,} consumer groups of complete publications"
    outcome = f"{done} would be deleted" if dry_run else f"{done} were deleted"
    return f"{outcome}; {len(left):,} were not: {next(iter(left.values()))}" if left else outcome


def _delete(kafka: Kafka, names: Collection[str]) -> dict[str, str]:
    try:
        return delete_groups(kafka, names)
    except HighwaterError as error:
        return dict.fromkeys(names, error.problem)


def _select_topics(work: Work) -> frozenset[str]:
    stream = work.stream
    return frozenset((stream.topic, *stream.tier_topics, *stream.foreign_topics))
