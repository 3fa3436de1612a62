"""Sending accepted events: one tick that requests the slices that are next."""

# The prefix is that of the mirror: slices of the main topic that are done, without a gap from the first one on. The
# table `published` shows its progress; there is no other state.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from highwater.assets.publication_log import load_last_published, read_published_commits
from highwater.orchestration.checking import slice_status
from highwater.orchestration.dependencies import build_lake_guard, ensure_kafka_awake, read_recovery_time
from highwater.orchestration.run_tags import PUBLISH
from highwater.orchestration.sensing.offset_mirror import count_done_prefix
from highwater.orchestration.sensing.run_history import list_dependency_failures, read_past_runs, read_publishing_runs
from highwater.orchestration.sensing.run_requests import (
    RepairRules,
    Request,
    decide_repair,
    filter_counted_runs,
    group_neighbours,
    list_in_flight,
)
from highwater.orchestration.sensing.stream_ticks import OLDEST, PAGE, Tick, read_next_page
from highwater.resources.dependency_guards import guard_dependencies
from highwater.routing import is_stream_topic

if TYPE_CHECKING:
    import dagster as dg

    from highwater.declaration import Stream
    from highwater.orchestration.sensing.run_requests import PastRun, Repair
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

# A run sends what it gets batch by batch, so that its memory does not grow with them.
SLICES_PER_RUN = 100
# A slice that is done needs no grace: nobody else asks for it.
RULES = RepairRules(first_wait=timedelta(minutes=1), grace=timedelta(0))


def publish(instance: dg.DagsterInstance, resources: Any, stream: Stream, cursor: str | None = None) -> Tick:
    """Request one run: of the slices that are next in order, and of those that follow whenever they are done.

    Raises:
        TemporaryError: the lake or the ledger is unavailable, or Kafka's breaker is open; nothing was decided.
    """
    now = datetime.now(UTC)
    ledger, lake = resources.ledger.open(), resources.lake.open()
    ensure_kafka_awake(ledger, now)
    order = list(instance.get_dynamic_partitions(stream.partitions_name))
    runs = read_publishing_runs(instance, stream, order, now)
    if busy := list_in_flight(runs):
        return Tick(lines=[f"a run is sending {len(busy)} slices"], cursor=cursor)
    with guard_dependencies(build_lake_guard(ledger, lake, stream)):
        following = ledger.list_slices(
            stream.name, stream.topic, after=load_last_published(lake, stream), limit=SLICES_PER_RUN + 1
        )
        done = count_done_prefix(lake, stream, following[:SLICES_PER_RUN])
        late, cursor = _read_late_slices(ledger, lake, stream, following[0] if following else None, cursor)
    # A slice that a backfill is classifying again would fail the run, which would find it half done.
    deciding = read_past_runs(instance, stream, order, now) if late or done else []
    moving = list_in_flight(deciding)
    late = [slice_ for slice_ in late if slice_.key not in moving]
    # A slice may be sent before the run ends that classified it for the first time.
    reprocessed = list_in_flight(run for run in deciding if run.by_hand and not run.raw_alone)
    done = next((at for at, slice_ in enumerate(following[:done]) if slice_.key in reprocessed), done)
    main = [slice_.key for slice_ in following[:done]]
    missing = {slice_.key: slice_.planned_at for slice_ in (*following[:done], *late)}
    lost = _recall_missing_keys(ledger, order, [*missing], now)
    order += lost
    found = _decide(instance, missing, _select_counted_runs(ledger, stream, [*missing], runs), now)
    group = select_next_run(order, main, [slice_.key for slice_ in late], found)
    requests = [Request(group, max(found.due[key] for key in group), PUBLISH, now)] if group else []
    lines = [
        *([f"{len(lost)} had no key in Dagster, and get it again: {lost[0]} .. {lost[-1]}"] if lost else []),
        *_format_lines(following, done, len(late), found, group, reprocessed),
    ]
    idle = not following and not late and cursor == OLDEST
    return Tick(keys=lost, requests=requests, lines=lines, cursor=cursor, idle=idle)


def _select_counted_runs(ledger: Ledger, stream: Stream, keys: Sequence[str], runs: Sequence[PastRun]) -> list[PastRun]:
    """The runs that still count: without failures of a dependency that is back, or that a person has since released.

    Slices are sent together and in order, so one slice fails the run for all of its slices. A person who releases one
    of them therefore releases the later ones too.
    """
    times = [read_recovery_time(ledger, stream), *ledger.exhausted_slices.read_release_times(keys).values()]
    floor = max((at for at in times if at is not None), default=None)
    accepted = {key: one.accepted_at for key, one in ledger.breakers.read_accepted_slices(keys).items()}
    return filter_counted_runs(runs, floor, accepted)


def _decide(
    instance: dg.DagsterInstance, missing: Mapping[str, datetime], runs: Sequence[PastRun], now: datetime
) -> Repair:
    """The slices that are due; slices that only wait for a dependency are not exhausted."""
    found = decide_repair(missing, runs, now, RULES)
    if not found.exhausted_slices:
        return found
    patient = list_dependency_failures(instance, found.exhausted_slices, runs)
    return decide_repair(missing, runs, now, RULES, patient=patient)


def _recall_missing_keys(ledger: Ledger, order: Sequence[str], keys: Sequence[str], now: datetime) -> list[str]:
    """The slices that Dagster has no key of; none of them all stays retired, or is retired half way."""
    if retired := ledger.retired.list_retired(keys):
        ledger.retired.recall(sorted(retired), now)
    known = set(order)
    return [key for key in keys if key not in known]


def select_next_run(order: Sequence[str], main: Sequence[str], late: Sequence[str], found: Repair) -> tuple[str, ...]:
    """The slices of the next run, which are neighbours in Dagster's order; none where nothing is due.

    The next slice of the main topic goes alone: another slice that cannot be sent would stop it with every run.

    Args:
        order: all keys in Dagster's order.
        main: the next slices of the main topic that are done, in their order.
        late: other slices that may go out at any time.
        found: which of all these are due.
    """
    begin = list(takewhile(lambda key: key in found.due, main))
    groups = group_neighbours(order, {*begin} or {key for key in late if key in found.due}, SLICES_PER_RUN)
    if not begin:
        return groups[0] if groups else ()
    group = next((one for one in groups if begin[0] in one), ())
    ours = [key for key in begin if key in group]
    # Keys that were added again have another place in Dagster's order than in ours.
    return group if ours == begin[: len(ours)] else (begin[0],)


def _read_late_slices(
    ledger: Ledger, lake: Lake, stream: Stream, waits: Slice | None, cursor: str | None
) -> tuple[list[Slice], str]:
    """Slices that were reprocessed since they were published, and those of tiers whose turn has come.

    The newest are looked at in every tick, all others page by page in turn.

    Args:
        ledger, lake, stream: as above.
        waits: the first slice of the main topic that is not published.
        cursor: where to look next.
    """
    page, cursor = read_next_page(ledger, stream, cursor)
    newest = ledger.list_slices(stream.name, newest=PAGE)
    slices = {slice_.key: slice_ for slice_ in (*page, *newest) if is_stream_topic(stream, slice_.topic)}
    decided, sent = (
        lake.load_slice_commits(stream.name, "events", [*slices]),
        read_published_commits(lake, stream, [*slices]),
    )

    def is_due(slice_: Slice) -> bool:
        if slice_.key not in decided:
            return False
        if slice_.key in sent:
            return sent[slice_.key].attempt != decided[slice_.key].attempt
        return slice_.topic != stream.topic and (waits is None or slice_.planned_at < waits.planned_at)

    found = [slice_ for slice_ in slices.values() if is_due(slice_)]
    done = slice_status.list_processed_slices(lake, stream, [slice_.key for slice_ in found]) if found else set()
    return [slice_ for slice_ in found if slice_.key in done], cursor


def _format_lines(
    following: Sequence[Slice], done: int, late: int, found: Repair, group: Sequence[str], reprocessed: Collection[str]
) -> list[str]:
    again = f", then highwater retry-slice {found.exhausted_slices[0]}" if found.exhausted_slices else ""
    waits = ""
    if done < len(following):
        first = following[done].key
        waits = f"wait for {first}, which is {'being reprocessed' if first in reprocessed else 'not done'}"
    counts = {
        f"requested: {', '.join(group[:3])}{' ...' if len(group) > 3 else ''}": len(group),
        waits: len(following) - done,
        "changed, or came back through the DLQ, and follow": late,
        "wait for their next attempt": len(found.waiting),
        f"exhausted for a day after {RULES.most_runs} runs, look at them{again}": len(found.exhausted_slices),
    }
    return [f"{count} {what}" for what, count in counts.items() if count and what]
