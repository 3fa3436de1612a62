"""The audit of a stream: plans, commits and losses, how every origin ended, and how safe its topic is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from highwater.errors import DependencyUnavailableError, HighwaterError, PermanentError, UnbalancedError
from highwater.orchestration.checking.completeness import compare_with_topic
from highwater.orchestration.checking.key_places import read_key_places
from highwater.orchestration.checking.ledger_comparison import describe_orphan_slices, read_table_slices
from highwater.orchestration.checking.origin_counts import count_ends
from highwater.orchestration.checking.plan_checks import list_all_tiling_faults
from highwater.orchestration.checking.published_checks import describe_publication
from highwater.orchestration.checking.sent_records import compare_sent_records
from highwater.orchestration.checking.slice_status import read_attempts
from highwater.orchestration.checking.topic_audit import check_producers, check_published_topics
from highwater.orchestration.checking.version_checks import check_stream_versions
from highwater.orchestration.reporting.audit_report import Audit, PartitionAudit, VersionResult
from highwater.orchestration.reporting.consumer_lag import RecordAges, measure_unread_ages
from highwater.orchestration.reporting.plan_status import read_stream_status
from highwater.orchestration.reporting.publication_status import find_accepted_vanished_error
from highwater.orchestration.resources import open_schema_finder
from highwater.partition_counts import build_partition_count_periods
from highwater.plans import subtract_losses
from highwater.reclaims import count_reclaims
from highwater.resources.deleted_topics import find_parked_loss
from highwater.resources.topic_facts import fetch_topic_facts
from highwater.topic_rules import Finding, TopicFacts, check_topic, describe_endurance

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.checking.check_rules import SliceAttempts
    from highwater.orchestration.reporting.status_report import StreamStatus
    from highwater.plans import Loss, Planned
    from highwater.producer_rules import ProducerFacts
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice


def audit(
    ledger: Ledger,
    kafka: Kafka,
    lake: Lake,
    stream: Stream,
    failing_checks: Mapping[str, int] | None = None,
    *,
    records_of: int = 0,
    versions: bool = False,
    keys: bool = False,
    others: Sequence[ProducerFacts] = (),
    dagster_error: HighwaterError | None = None,
) -> Audit:
    """Make the page. Kafka that is unavailable is a problem on it; ledger and lake must answer.

    Args:
        ledger, kafka, lake: the connections.
        stream: the stream.
        failing_checks: failing checks by name; None where Dagster was not asked.
        records_of: how many of the newest slices are compared with the topic, record by record, and checked again;
            their sent records are counted in the target topics.
        versions: put the checks of versions to the whole stream too.
        keys: look in which partitions each key of the topic is.
        others: producers that are not ours.
        dagster_error: why Dagster could not be asked.

    Raises:
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    # The lake before the plan: a slice that is committed in between appears at worst as unfinished.
    ends, in_tables = count_ends(ledger, lake, stream), read_attempts(lake, stream)
    there = read_table_slices(lake, stream)
    slices = ledger.list_slices(stream.name)
    newest = slices[-records_of:] if records_of else []
    whole = [slice_.key for slice_ in newest if not in_tables.select_missing_tables(slice_.key)]
    status = read_stream_status(ledger, kafka, stream, {})
    dlq_errors = [one.error for one in status.dlq if one.error is not None]
    dlq_errors += _list_parked_loss_errors(kafka, stream, status, ends.parked)
    ages = _measure_ages(ledger, kafka, stream, status, in_tables.raw)
    findings, facts, problems = _check_main_topic(kafka, stream, ages)
    published_to, unseen = (
        check_published_topics(kafka, stream, partial(find_accepted_vanished_error, ledger, lake, stream), facts)
        if facts
        else ({}, [])
    )
    failing, not_decided = _run_slice_checks(ledger, kafka, lake, stream, whole)
    losses = ledger.list_losses(stream.name)
    lost = _count_lost_offsets(losses, stream.topic)
    waiting = _count_waiting_offsets([slice_ for slice_ in slices if slice_.key not in in_tables.raw], status, losses)
    committed = compute_committed_ends(ledger.topics.read_planned_topic(stream.name, stream.topic), slices, in_tables)
    found_periods = build_partition_count_periods(
        [slice_ for slice_ in slices if slice_.topic == stream.topic],
        ledger.topics.list_generations(stream.name, stream.topic),
    )
    producers, refused = check_producers(kafka, stream, others, facts)
    return Audit(
        stream=stream.name,
        topic=stream.topic,
        at=datetime.now(UTC),
        partitions=[
            PartitionAudit(
                p.partition,
                p.planned,
                committed.get(p.partition),
                p.last_stable,
                ages.by_partition.get(p.partition),
                None if p.lag is None else p.lag + waiting.get(p.partition, 0),
                lost[p.partition],
            )
            for p in status.partitions
        ],
        slices=len(slices),
        unfinished=[slice_.key for slice_ in slices if in_tables.select_missing_tables(slice_.key)],
        losses=losses,
        ends=ends,
        dlq=status.dlq,
        findings=findings,
        endurance="" if facts is None else describe_endurance(facts),
        problems=_deduplicate_errors([*status.errors, *dlq_errors, *problems, *unseen, *refused])
        | not_decided
        | _build_dagster_problems(dagster_error),
        failing_checks=failing_checks,
        has_dagster_error=dagster_error is not None,
        compared=compare_with_topic(ledger, kafka, lake, stream, newest),
        versions=_check_versions(ledger, lake, stream) if versions else {},
        tiling_faults=[fault.text for fault in list_all_tiling_faults(ledger, stream, slices)],
        checked=len(whole),
        failing=failing,
        periods=found_periods,
        producers=producers,
        keys=read_key_places(lake, stream, found_periods) if keys else None,
        published=describe_publication(lake, stream),
        on_topics=compare_sent_records(kafka, lake, stream, newest),
        published_to=published_to,
        orphan_slices=describe_orphan_slices(there, {slice_.key for slice_ in slices}, stream.name),
    )


def find_audit_error(pages: Sequence[Audit], remedy: str) -> HighwaterError | None:
    """The error that a command or a run ends with that made these pages; None if they have none.

    Only where all that is wrong is that something was unavailable is it a temporary one.
    """
    errors = [f"{page.stream}: {text}" for page in pages for text in page.errors]
    if not errors:
        return None
    unavailable = [error for page in pages for error in page.unavailable]
    if len(unavailable) == len(errors):
        return DependencyUnavailableError(
            "the audit could not look at everything, and found no error in the rest",
            found=errors[0],
            remedy=unavailable[0].remedy,
        )
    return UnbalancedError(f"the audit found {len(errors)} errors", found=errors[0], remedy=remedy)


def _deduplicate_errors(errors: Iterable[HighwaterError]) -> dict[str, HighwaterError]:
    """A failure of several looks is reported once, also where each client has its own words for it."""
    distinct: dict[tuple[type, str], HighwaterError] = {}
    for error in errors:
        same = error.problem if isinstance(error, DependencyUnavailableError) else str(error)
        distinct.setdefault((type(error), same), error)
    return {str(error): error for error in distinct.values()}


def _build_dagster_problems(dagster_error: HighwaterError | None) -> dict[str, HighwaterError]:
    return {} if dagster_error is None else {f"Dagster could not be asked: {dagster_error}": dagster_error}


def _run_slice_checks(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, keys: Sequence[str]
) -> tuple[list[str], dict[str, HighwaterError]]:
    """Failing checks of slices in the tables as they are now, warnings left out; and checks that could not be made."""
    from highwater.orchestration.checking.checks import CHECKS, Sources, select_failures

    found: list[str] = []
    unasked: dict[str, HighwaterError] = {}
    for checks in CHECKS if keys else ():
        try:
            results = checks.check_slices(Sources(ledger, kafka, lake, open_schema_finder()), stream, keys)
        except Exception as error:  # noqa: BLE001 - a table that breaks one check must not hide what the others say
            reported = error if isinstance(error, HighwaterError) else _build_check_error(error)
            unasked[f"{', '.join(checks.select_names(stream))}: {reported}"] = reported
        else:
            failures = select_failures(stream, results, warned=False)
            found += [f"{key}: {name}: {result.text}" for name, key, result in failures]
    return found, unasked


def _build_check_error(error: Exception) -> PermanentError:
    return PermanentError(
        "the checks failed on the rows of the tables",
        found=f"{type(error).__name__}: {error}",
        remedy="report this as a defect of Highwater, with the output of highwater audit: no row may break a check",
    )


def _check_versions(ledger: Ledger, lake: Lake, stream: Stream) -> dict[str, VersionResult]:
    results = check_stream_versions(lake, stream, count_reclaims(ledger.reclaims.list_for_stream(stream.name)))
    return {name: VersionResult(found, stream.find_severity(name)) for name, found in results.items()}


def compute_committed_ends(
    planned: Planned | None, slices: Sequence[Slice], in_tables: SliceAttempts
) -> dict[int, int]:
    """For each partition the end of the slices, without a gap from the first one on, that are complete in all tables.

    Args:
        planned: how far a topic is planned.
        slices: slices, those of other topics among them.
        in_tables: the attempts in the tables.
    """
    if planned is None:
        return {}
    generation = planned.generation
    generation_slices = [p for p in slices if p.topic == generation.topic and p.generation == generation.number]
    found = {p: start for p, start in generation.starts.items() if start is not None}
    ordered = sorted(generation_slices, key=lambda slice_: slice_.ordinal)
    for slice_ in takewhile(lambda slice_: not in_tables.select_missing_tables(slice_.key), ordered):
        found.update({p: offsets.end for p, offsets in slice_.ranges.items()})
    return found


def _count_waiting_offsets(unread: Sequence[Slice], status: StreamStatus, losses: Sequence[Loss]) -> Counter[int]:
    """For each partition of the main topic the offsets of these slices, without recorded losses."""
    found: Counter[int] = Counter()
    for slice_ in unread:
        if (slice_.topic, slice_.topic_id) == (status.topic, status.topic_id):
            found.update({p: len(offsets) for p, offsets in subtract_losses(slice_, losses).ranges.items()})
    return found


def _list_parked_loss_errors(kafka: Kafka, stream: Stream, status: StreamStatus, waiting: int) -> list[HighwaterError]:
    """The error of a parked topic that is there and holds less than waits there."""
    there = [one for one in status.dlq if one.topic == stream.parked_topic and one.waiting is not None]
    if not there:
        return []
    try:
        found = find_parked_loss(kafka, stream, waiting)
    except HighwaterError as error:
        return [error]
    return [] if found is None else [found]


def _count_lost_offsets(losses: Sequence[Loss], topic: str) -> Counter[int]:
    """For each partition of a topic the offsets that are recorded as lost."""
    found: Counter[int] = Counter()
    for loss in losses:
        found[loss.partition] += len(loss.offsets) if loss.topic == topic else 0
    return found


def _measure_ages(
    ledger: Ledger, kafka: Kafka, stream: Stream, status: StreamStatus, read: Collection[str]
) -> RecordAges:
    """The ages of waiting records; the reason why they could not be asked is in the status."""
    nothing = RecordAges({}, sure=False)
    try:
        # A broker that is unavailable is waited for once.
        return measure_unread_ages(ledger, kafka, stream, stream.topic, read) if status.partitions else nothing
    except HighwaterError:
        return nothing


def _check_main_topic(
    kafka: Kafka, stream: Stream, ages: RecordAges
) -> tuple[list[Finding], TopicFacts | None, list[HighwaterError]]:
    try:
        facts = fetch_topic_facts(kafka, stream.topic, ages.oldest, age_known=ages.sure)
    except HighwaterError as error:
        return [], None, [error]
    return check_topic(facts), facts, []
