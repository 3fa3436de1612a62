"""A tick of planner or retries for one stream: plans in the ledger, adds keys to Dagster, requests runs (I1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.errors import PermanentError, TemporaryError, TopicAbsentError, TopicVanishedError, UnknownSliceError
from highwater.orchestration import metadata, observation
from highwater.orchestration.asset_keys import (
    build_publish_job_name,
    build_slice_job_name,
    build_table_key,
    build_topic_key,
    list_missing_keys,
)
from highwater.orchestration.dependencies import (
    build_kafka_guard,
    build_lake_guard,
    ensure_lake_exists,
    is_lookup_blocked,
)
from highwater.orchestration.run_tags import MAIN_TAG, PROBE, PUBLISH, RETRY, STREAM_TAG, TIER_TAG
from highwater.orchestration.sensing.expiring_records import list_endangered_slices
from highwater.orchestration.sensing.ordered_processing import format_hold_lines, must_wait_for_earlier
from highwater.orchestration.sensing.run_requests import Request, build_first_requests
from highwater.resources.dependency_guards import guard_dependencies

if TYPE_CHECKING:
    from highwater.breaker import Circuit
    from highwater.declaration import Stream
    from highwater.holds import Hold
    from highwater.orchestration.sensing.topic_planner import PlanAndState, PlanningResult
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

# The planner looks back so far beyond its own plans, and further where Dagster lacks some of these.
LOOK_BACK = 20
# Repair asks the lake for this many slices that Dagster lacks, and for as many of all in turn: 100,000 slices are
# compared in less than two hours of ticks, or in seven while all that is not done is left to runs under way.
PAGE = 500
# The cursor that begins again; Dagster takes an empty one for "as it was".
OLDEST = "oldest"
OBSERVE_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class Tick:
    """The result of a tick.

    Args:
        keys: slice keys that Dagster does not hold yet, in the order of their plan.
        requests: the runs to request.
        lines: sentences for the tick's log.
        events: events for Dagster to record, beside runs.
        cursor: remembered for the next tick: when it observed, or where it looked; nothing true depends on it.
        error: the fault that needs a person; the rest of the tick counts all the same.
        idle: whether everything was checked, and no work is left until something changes.
        until: when to look again unless a run of the stream ends or its plans change before; None for the next tick.
    """

    keys: Sequence[str] = ()
    requests: Sequence[Request] = ()
    lines: Sequence[str] = ()
    events: Sequence[dg.AssetObservation | dg.AssetMaterialization] = field(default_factory=list)
    cursor: str | None = None
    error: PermanentError | None = None
    idle: bool = False
    until: datetime | None = None

    @property
    def message(self) -> str:
        """The tick in one line."""
        return "; ".join(self.lines) or "nothing to do"


def build_run_requests(stream: Stream, requests: Sequence[Request]) -> list[dg.RunRequest]:
    """The requests in Dagster's form, each with the stream's job."""

    def build_tags(request: Request) -> dict[str, str]:
        named = {**request.tags, STREAM_TAG: stream.name}
        if request.purpose in (PROBE, PUBLISH):
            return named
        return named | {TIER_TAG if request.tier else MAIN_TAG: stream.name}

    raw = [build_table_key(stream, "raw")]
    return [
        dg.RunRequest(
            run_key=request.run_key,
            job_name=build_publish_job_name(stream) if request.purpose == PUBLISH else build_slice_job_name(stream),
            tags=build_tags(request),
            asset_selection=raw if request.raw_alone else None,
        )
        for request in requests
    ]


def plan_stream(
    instance: dg.DagsterInstance,
    resources: Any,
    stream: Stream,
    cursor: str | None = None,
    look: PlanAndState | None = None,
    queued_runs: int = 0,
) -> Tick:
    """Plan in the ledger, then name the keys that Dagster lacks and the runs for them.

    The tick's error is that of the partitions that cannot be planned until a person acts. Its text gives both values
    and the remedy.

    Keys of an earlier tick that died between plan and key are among them. A tick that died between key and run leaves
    slices without a run; those are repair's. So are older slices that raw holds: a Dagster instance that is new, or
    that lost keys, gets the keys, and repair reports complete slices and requests the others.

    Args:
        instance: Dagster's.
        resources: open ledger, lake and Kafka.
        stream: the stream.
        cursor: when the topic was observed last with something that waits.
        look: plan and topic as they were read a moment ago; they are read now if None.
        queued_runs: runs in Dagster's queue that have to start before another one of the stream is requested.

    Raises:
        TemporaryError: Kafka or the ledger is unavailable; nothing was decided.
        PermanentError: the topic cannot be planned until a person acts. The text gives both values and the remedy.
    """
    from highwater.orchestration.sensing.topic_planner import Planner

    now = datetime.now(UTC)
    ledger, kafka = resources.ledger.open(), resources.kafka.open()
    with guard_dependencies(build_kafka_guard(ledger, kafka)):
        planned = Planner(ledger, kafka).tick(stream, now, look=look, queued_runs=queued_runs)
    keys = list_keys_to_add(instance, ledger, stream, stream.topic, len(planned.slices))
    requested, known = select_keys_to_request(ledger, resources, stream, keys, planned.slices)
    breaker, rests = ledger.breakers.read_circuit(stream.name), is_lookup_blocked(ledger, stream, now)
    holds = ledger.holds.read_open(stream.name)
    raw_alone = (
        rests
        or not breaker.closed
        or (stream.ordered and must_wait_for_earlier(instance, ledger, stream, requested, holds))
    )
    urgent = list_endangered_slices(kafka, stream, ledger.get(requested), planned.state)
    found = Tick(
        keys=keys,
        requests=build_first_requests(
            keys, requested, stream.limits.slices_per_run, raw_alone=raw_alone, urgent=urgent
        ),
        lines=[*planned.lines, *known, *format_breaker_lines(breaker, rests), *format_hold_lines(holds)],
        error=merge_errors([*planned.errors.values()]) if planned.errors else None,
        idle=not planned.errors and not planned.skipped,
    )
    return _with_observation(found, planned, breaker, holds, now, _parse_time(cursor))


def merge_errors(errors: Sequence[PermanentError]) -> PermanentError:
    """Combine the errors into one; a single error is returned unchanged."""
    first = errors[0]
    if len(errors) == 1:
        return first
    kinds = {type(error) for error in errors}
    kind = type(first) if len(kinds) == 1 else PermanentError
    return kind(
        f"{len(errors)} faults: " + "; ".join(error.problem for error in errors),
        stored="; ".join(str(error.stored) for error in errors),
        found="; ".join(str(error.found) for error in errors),
        remedy="; ".join(dict.fromkeys(error.remedy for error in errors)),
    )


def format_breaker_lines(breaker: Circuit, rests: bool) -> list[str]:  # noqa: FBT001 - a value, no mode
    """Lines of a tick about a breaker that is not closed, and a reference table whose breaker is open."""
    reasons = [] if breaker.closed else [f"the breaker is {breaker.text}"]
    reasons += ["the breaker of the reference table is open"] if rests else []
    return [f"{' and '.join(reasons)}. Slices are taken into raw, and wait there"] if reasons else []


def list_keys_to_add(
    instance: dg.DagsterInstance, ledger: Ledger, stream: Stream, topic: str, planned: int
) -> list[str]:
    """Planned slices of a topic that are no partitions in Dagster yet, oldest first; retired ones are left out.

    Keys are added in the order of their plan: looking back ends where Dagster holds what was looked at, so a tick costs
    the same after any number of slices. An older key that is missing is repair's.

    Args:
        planned: slices that this tick planned, which Dagster cannot hold yet.
    """
    page = planned + LOOK_BACK
    while True:
        newest = [slice_.key for slice_ in ledger.list_slices(stream.name, topic, newest=page)]
        lacking = list_missing_keys(instance, stream, newest)
        retired = ledger.retired.list_retired(lacking)
        unknown = [key for key in lacking if key not in retired]
        if len(newest) < page or not set(unknown) & set(newest[:LOOK_BACK]):
            return unknown
        page *= 2


def select_keys_to_request(
    ledger: Ledger, resources: Any, stream: Stream, keys: Sequence[str], planned: Sequence[Slice]
) -> tuple[list[str], list[str]]:
    """The added keys whose runs a planning tick requests, and what it says of the others.

    It requests the slices that it planned, and older ones that raw does not hold. All others are left to repair, which
    looks at every table: a new Dagster instance would otherwise validate the whole history again, by the reference
    table of today.

    Args:
        ledger: holds the exhausted slices, which a person releases.
        resources: open the lake, which is asked for older slices only.
        stream: the stream.
        keys: planned slices that Dagster lacks, oldest first.
        planned: slices that this tick planned.
    """
    new = {slice_.key for slice_ in planned}
    # Repair looks at the same number in a tick.
    older = [key for key in keys if key not in new][-PAGE:]
    if older:
        lake = resources.lake.open()
        try:
            with guard_dependencies(build_lake_guard(ledger, lake, stream)):
                ensure_lake_exists(ledger, lake)
                begun = {*lake.load_slice_commits(stream.name, "raw", older)}
        except TemporaryError:
            begun = {*older}
        exhausted = {one.slice_key for one in ledger.exhausted_slices.read_open(stream.name)}
        new |= {key for key in older if key not in begun and key not in exhausted}
    requested = [key for key in keys if key in new]
    left = len(keys) - len(requested)
    line = f"Dagster had no key of {left:,} slices: the keys are added, the sensor repair reports or requests them"
    return requested, [line] if left else []


def plan_retries(
    instance: dg.DagsterInstance,
    resources: Any,
    stream: Stream,
    cursor: str | None = None,
    looks: Mapping[str, PlanAndState | None] | None = None,
) -> Tick:
    """Plan the due offsets of the tiers, and name the keys and the runs for them.

    The tick's error is that of the tiers that cannot be planned until a person acts.

    Args:
        instance: Dagster's.
        resources: open ledger, lake and Kafka.
        stream: the stream.
        cursor: returned as it is.
        looks: the topics to plan, with plan and topic as they were read a moment ago, or None where they are read now;
            all topics whose records are retried if None.

    Raises:
        TemporaryError: Kafka or the ledger is unavailable; nothing was planned.
    """
    from highwater.orchestration.sensing.retries import plan_tier

    if waiting := _count_queued_runs(instance, stream):
        reasons = f"{waiting} runs of tiers wait in the queue; records that come due meanwhile go into larger slices"
        return Tick(lines=[reasons], cursor=cursor)
    ledger, kafka = resources.ledger.open(), resources.kafka.open()
    keys: list[str] = []
    requested: list[str] = []
    lines: list[str] = []
    errors: list[PermanentError] = []
    paused = ledger.paused.read_for_stream(stream.name)
    idle = True
    for topic in select_tiers_to_plan(stream, begun=_is_begun(ledger, stream)):
        if looks is not None and topic not in looks and topic not in paused:
            continue
        if topic in paused:
            lines.append(
                f"{paused[topic].text}: nothing of it is planned before highwater resume-tier {stream.name} {topic}"
            )
            continue
        try:
            with guard_dependencies(build_kafka_guard(ledger, kafka)):
                planned = plan_tier(ledger, kafka, stream, topic, datetime.now(UTC), look=(looks or {}).get(topic))
        except TopicVanishedError as error:
            errors.append(error)
            continue
        except TopicAbsentError:
            lines.append(f"nothing was published to {topic} yet")
            continue
        except PermanentError as error:
            errors.append(error)
            continue
        except TemporaryError as error:
            if not keys and not errors:
                raise
            # Slices planned before are passed on; they would wait for repair otherwise.
            lines.append(f"{topic} is planned by a later tick: {error}")
            idle = False
            break
        lacking = list_keys_to_add(instance, ledger, stream, topic, len(planned.slices))
        fresh, known = select_keys_to_request(ledger, resources, stream, lacking, planned.slices)
        keys, requested = [*keys, *lacking], [*requested, *fresh]
        lines += [*planned.lines, *known]
        errors += planned.errors.values()
        idle = idle and not planned.skipped
    breaker, rests = ledger.breakers.read_circuit(stream.name), is_lookup_blocked(ledger, stream, datetime.now(UTC))
    raw_alone = rests or not breaker.closed
    urgent = list_endangered_slices(kafka, stream, ledger.get(requested))
    requests = build_first_requests(
        keys, requested, stream.limits.slices_per_run, RETRY, raw_alone=raw_alone, urgent=urgent
    )
    lines += [*format_breaker_lines(breaker, rests), *[str(error) for error in errors]]
    failed = merge_errors(errors) if errors else None
    return Tick(keys, requests, lines, cursor=cursor, error=failed, idle=idle and not errors)


def select_tiers_to_plan(stream: Stream, *, begun: bool) -> list[str]:
    """The topics whose records are retried; without those of other systems as long as the main topic has no plan.

    Their records name offsets of the main topic, and the plan says whether its own slices take these.

    Args:
        stream: the declaration.
        begun: whether the main topic has a plan.
    """
    return [*stream.delays] if begun or not stream.foreign else [*stream.tier_topics]


def _is_begun(ledger: Ledger, stream: Stream) -> bool:
    return not stream.foreign or ledger.topics.read_planned_topic(stream.name, stream.topic) is not None


def _count_queued_runs(instance: dg.DagsterInstance, stream: Stream) -> int:
    # Not those that a dead daemon created and did not queue: nobody starts them, and planning would wait for ever.
    statuses = [dg.DagsterRunStatus.QUEUED]
    return instance.get_runs_count(dg.RunsFilter(tags={TIER_TAG: stream.name}, statuses=statuses))


def _with_observation(
    tick: Tick, planned: PlanningResult, breaker: Circuit, holds: Sequence[Hold], now: datetime, last: datetime | None
) -> Tick:
    """The tick with the topic's lag as an observation of its asset.

    A topic is observed when something was planned, once a minute while something waits or is left out, and a last time
    when nothing waits any more. A topic that holds exactly its plan costs no write.

    Args:
        tick: the planner's result.
        planned: the plan.
        breaker: the stream's.
        holds: the slices that are held.
        now: the time, in UTC.
        last: when the topic was observed last with something that waits, in UTC.
    """
    left_out = {**planned.skipped, **{p: str(error) for p, error in planned.errors.items()}}
    positions = observation.build_positions(planned.state, planned.ends)
    waits = bool(left_out) or any(one.lag for one in positions)
    is_due = waits and (last is None or now - last >= OBSERVE_EVERY)
    has_ended = last is not None and not waits
    if not tick.keys and not is_due and not has_ended:
        return replace(tick, cursor=None if last is None else last.isoformat())
    found = observation.build_topic_metadata(positions, left_out)
    metadata_ = {
        **found,
        **metadata.build_breaker_metadata(breaker),
        **metadata.build_hold_metadata(planned.stream, holds),
    }
    event = dg.AssetObservation(build_topic_key(planned.stream), metadata=metadata_)
    return replace(tick, events=[*tick.events, event], cursor=now.isoformat() if waits else None)


def read_next_page(ledger: Ledger, stream: Stream, cursor: str | None) -> tuple[list[Slice], str]:
    """The slices after the cursor, and the cursor after them, or OLDEST.

    The cursor says where to look, never what is true: a cursor that means nothing to the ledger begins again.
    """
    after = None if cursor == OLDEST else cursor
    try:
        page = ledger.list_slices(stream.name, after=after, limit=PAGE)
    except UnknownSliceError:
        page = ledger.list_slices(stream.name, limit=PAGE)
    return page, page[-1].key if len(page) == PAGE else OLDEST


def was_observed(cursor: str | None, now: datetime) -> bool:
    """Whether a planner's cursor is that of a topic whose waiting records were observed within the last minute."""
    last = _parse_time(cursor)
    return last is not None and now - last < OBSERVE_EVERY


def _parse_time(cursor: str | None) -> datetime | None:
    """The time in a cursor; one that cannot be read counts as none."""
    try:
        found = datetime.fromisoformat(cursor or "")
    except ValueError:
        return None
    return found if found.tzinfo else None
