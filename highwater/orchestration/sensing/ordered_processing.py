"""Turns: slices of a stream that holds are taken one after another, in their order."""

# The step decides for every run; repair orders its requests only so that runs do not fail for nothing.

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

import dagster as dg

from highwater.errors import OutOfTurnError
from highwater.holds import find_obstacle
from highwater.orchestration.asset_keys import build_table_keys
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.orchestration.sensing.run_history import select_materialised_slices
from highwater.orchestration.sensing.run_requests import Request, group_runs_by_slice

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.declaration import Stream
    from highwater.holds import Hold
    from highwater.orchestration.sensing.run_requests import PastRun, RepairRules, SliceRuns
    from highwater.resources.ledger import Ledger

# How many slices before a run's slices are looked at. Each of those followed its own predecessors, so further back
# there are only slices that were left undone before the stream was declared ordered.
LOOK_BACK = 20
# A slice that is held keeps back all others, so it is asked for more often than one that fails by itself.
LONGEST_WAIT = timedelta(minutes=10)


def ensure_in_turn(work: Work, table: str) -> None:
    """Ensure that the slices before those of a run are in the table, or go into it with them.

    Raw is read in any order, so that retention takes nothing. Slices of tiers have no order.

    Raises:
        OutOfTurnError: one does not.
    """
    main = sorted((slice_ for slice_ in work.slices if slice_.topic == work.stream.topic), key=attrgetter("ordinal"))
    if table == "raw" or not main or not work.stream.ordered:
        return
    many = LOOK_BACK + main[-1].ordinal - main[0].ordinal
    order = [
        p.key
        for p in work.ledger.list_preceding_slices(work.stream.name, work.stream.topic, main[-1].ordinal + 1, many + 1)
    ]
    committed = read_attempts(work.lake, work.stream, order)
    done = [key for key in order if table not in committed.select_missing_tables(key)]
    found = find_obstacle(order, done, work.keys)
    if found is not None:
        behind, first = found
        raise OutOfTurnError(
            f"{behind} may not go into {work.stream.name}/{table} before {first}",
            found="; ".join(hold.text for hold in work.ledger.holds.read_open(work.stream.name))
            or f"{first} is not there",
            remedy=f"nothing to do: the sensor repair requests it after {first}; highwater explain {first} shows "
            "why that one is not complete",
        )


@dataclass(frozen=True)
class Turn:
    """The next requests of repair for an ordered stream's main topic.

    Args:
        keys: slices that go on now, in one run; none while the first one is worked on, or its next run not due.
        run_number: number of the next run of the first slice.
        raw_alone: slices after them that are only to be read from Kafka.
        waiting: slices that are in raw and wait for their turn.
        due_at: when the first one is asked for, if it waits for that alone.
    """

    keys: tuple[str, ...] = ()
    run_number: int = 1
    raw_alone: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    due_at: datetime | None = None

    def build_requests(self, now: datetime) -> list[Request]:
        """The run."""
        return [Request(self.keys, self.run_number, "repair", now)] if self.keys else []


def take_turn(
    lacking: Mapping[str, Collection[str]],
    planned_at: Mapping[str, datetime],
    order: Sequence[str],
    runs: Iterable[PastRun],
    held: Collection[str],
    now: datetime,
    rules: RepairRules,
    most: int,
) -> Turn:
    """The slices that go on, and those that wait.

    The first slice is never exhausted, since all others wait for it. A slice that was left undone more than once goes
    alone: in a run with others it would keep them undone, and they would keep it so.

    Args:
        lacking: the main topic's slices that are not done, in the order of their plan, with the tables that they lack.
        planned_at: when each of them was planned, in UTC.
        order: all keys in Dagster's order; a run takes neighbours there.
        runs: runs of the last day that named slices.
        held: the slices that are held.
        now: the time, in UTC.
        rules: the waits.
        most: slices in one run at the most.
    """
    undone = list(lacking)
    if not undone:
        return Turn()
    known = group_runs_by_slice(undone, runs)
    first, due_at = known[undone[0]], _compute_due_time(undone[0], known, planned_at, held, rules)
    goes = not first.in_flight and due_at <= now
    keys = _select_adjacent(undone, order, most) if goes else ()
    fresh = {key for key in keys if _can_share_run(key, known, planned_at, held, now, rules)}
    together = list(takewhile(fresh.__contains__, keys))
    keys = tuple(together or keys[:1])
    rest = [key for key in undone if key not in keys and not known[key].in_flight]
    return Turn(
        keys=keys,
        run_number=first.ended + 1,
        raw_alone=frozenset(key for key in rest if "raw" in lacking[key]),
        waiting=frozenset(key for key in rest if "raw" not in lacking[key]),
        due_at=None if goes or first.in_flight else due_at,
    )


def _compute_due_time(
    key: str,
    known: Mapping[str, SliceRuns],
    planned_at: Mapping[str, datetime],
    held: Collection[str],
    rules: RepairRules,
) -> datetime:
    past = known[key]
    if past.last_end is None:
        return planned_at[key] + rules.grace
    if past.ended == 1 and key not in held:
        return past.last_end  # that run may have been for raw alone
    longest = LONGEST_WAIT if key in held else rules.max_wait
    return past.last_end + min(rules.wait(max(past.ended - 1, 1)), longest)


def _can_share_run(
    key: str,
    known: Mapping[str, SliceRuns],
    planned_at: Mapping[str, datetime],
    held: Collection[str],
    now: datetime,
    rules: RepairRules,
) -> bool:
    """Whether a slice may go on in a run with others: no run works on it, and no run of its own failed."""
    past = known[key]
    awaited = past.last_end is None and now < planned_at[key] + rules.grace
    return key not in held and not past.in_flight and past.ended <= 1 and not awaited


def _select_adjacent(undone: Sequence[str], order: Sequence[str], most: int) -> tuple[str, ...]:
    """The first of the slices, and those that follow it both in their own order and in Dagster's."""
    position = {key: at for at, key in enumerate(order)}
    keys = [undone[0]]
    for key in undone[1:most]:
        if position.get(key) != position.get(keys[-1], -2) + 1:
            break
        keys.append(key)
    return tuple(keys)


def must_wait_for_earlier(
    instance: dg.DagsterInstance, ledger: Ledger, stream: Stream, keys: Sequence[str], holds: Sequence[Hold]
) -> bool:
    """Whether new slices have to wait for one before them, as far as Dagster knows: in raw, where repair takes over."""
    if not keys or holds:
        return bool(holds)
    [first] = ledger.get(keys[:1])
    before = ledger.list_preceding_slices(stream.name, stream.topic, first.ordinal, 1)
    last = build_table_keys(stream)[-1]
    keys = [slice_.key for slice_ in before]
    return len(select_materialised_slices(instance, last, keys)) < len(keys)


def open_holds(ledger: Ledger, stream: Stream, decided: Collection[str]) -> list[Hold]:
    """The slices that are held; of one that was decided, by a run that was killed before it said so, the hold ends."""
    holds = ledger.holds.read_open(stream.name)
    over = [one.slice_key for one in holds if one.slice_key in set(decided)]
    if over:
        ledger.holds.end(over)
    return [one for one in holds if one.slice_key not in over]


def read_release_times(ledger: Ledger, lacking: Collection[str]) -> dict[str, datetime]:
    """Slices that a person released, and when."""
    found = ledger.holds.read_for_slices(list(lacking))
    return {key: one.release.at for key, one in found.items() if one.release is not None}


def format_hold_lines(holds: Sequence[Hold]) -> list[str]:
    """Lines of a tick about slices that are held."""
    return [f"{hold.text}. Later slices are read into raw, and wait there" for hold in holds]


def format_turn_lines(turn: Turn, holds: Sequence[Hold]) -> list[str]:
    """Lines of a tick about slices that repair did not request because slices follow each other."""
    requested = [f"{len(turn.keys)} requested in their turn, from {turn.keys[0]} on"] if turn.keys else []
    waiting = [f"{len(turn.waiting)} wait for their turn"] if turn.waiting else []
    due = [] if turn.due_at is None else [f"the next is asked for at {turn.due_at:%H:%M:%S} UTC"]
    return [*format_hold_lines(holds), *requested, *waiting, *due]
