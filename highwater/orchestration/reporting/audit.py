"""The audit of a stream: plans, commits and losses, how every origin ended, and how safe its topic is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from highwater.declaration import Severity
from highwater.errors import DependencyAwayError, HighwaterError, PermanentError, TemporaryError, UnbalancedError
from highwater.orchestration.checking.completeness import TopicComparison, compare_with_topic
from highwater.orchestration.checking.key_places import key_places
from highwater.orchestration.checking.origin_counts import Ends, count_ends
from highwater.orchestration.checking.orphan_rows import orphan_slices, slices_there
from highwater.orchestration.checking.plan_checks import all_tiling_faults
from highwater.orchestration.checking.producer_audit import check_producers
from highwater.orchestration.checking.published_checks import publication_line
from highwater.orchestration.checking.slice_status import attempts
from highwater.orchestration.checking.topic_audit import check_published_topics
from highwater.orchestration.checking.topic_counts import OnTopic, held_on_topics
from highwater.orchestration.checking.version_checks import over_the_stream
from highwater.orchestration.reporting.consumer_lag import Ages, unread_ages
from highwater.orchestration.reporting.plan_status import DlqStatus, stream_status, times_plain
from highwater.orchestration.reporting.publication_status import accepted_vanished
from highwater.orchestration.resources import schemas
from highwater.partition_counts import eras
from highwater.plans import left_to_read
from highwater.reclaims import numbers
from highwater.resources.deleted_topics import parked_lost
from highwater.resources.topic_facts import topic_facts
from highwater.topic_rules import Finding, Level, TopicFacts, check_topic, endurance
from highwater.wording import number, span

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.orchestration.checking.check_rules import Attempts, CheckResult
    from highwater.orchestration.checking.key_places import KeyPlaces
    from highwater.orchestration.reporting.plan_status import StreamStatus
    from highwater.partition_counts import Era
    from highwater.plans import Loss, Planned
    from highwater.producer_rules import ProducerFacts
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.slices import Slice

Rows = list[list[str]]


@dataclass(frozen=True)
class PartitionAudit:
    """One partition of the main topic.

    Args:
        partition: its number.
        planned: the end of the planned offsets.
        committed: the end of the contiguous slices that are complete in all tables.
        last_stable: to where it can be read.
        age: of the oldest record that is not in raw; None where there is none, or it was not asked.
        unread: offsets that are not in raw, planned or not; None where that is not known.
        lost: offsets that are recorded as lost, of all generations.
    """

    partition: int
    planned: int | None
    committed: int | None
    last_stable: int | None
    age: timedelta | None
    unread: int | None = None
    lost: int = 0


@dataclass(frozen=True)
class VersionResult:
    """The result of a check on the whole stream, and the severity that the stream declares for it."""

    check: CheckResult
    severity: Severity

    @property
    def result(self) -> str:
        """`passed`, `warning` or `error`."""
        if self.check.passed:
            return "passed"
        return "warning" if self.check.warning or self.severity is Severity.WARN else "error"

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "result": self.result,
            "text": self.check.text,
            "numbers": dict(self.check.numbers),
            "samples": [{name: str(cell) for name, cell in row.items()} for row in self.check.samples],
        }


@dataclass(frozen=True)
class Audit:
    """A stream on one page.

    Args:
        stream, topic: their names.
        at: when it was made, in UTC.
        partitions: of the main topic.
        slices: planned of it.
        unfinished: those that are not complete in all tables, the oldest first.
        losses: recorded holes.
        ends: how the origins ended.
        dlq: the tiers and the parked topic.
        findings: what the rules say of the topic; empty if it could not be asked.
        endurance: how many brokers may fail.
        problems: errors that stop planning or reading, by their subject.
        red: failing checks by name, with the number of slices; None where Dagster was not asked.
        dagster_unasked: whether Dagster was to be asked, and could not be; why is one of the problems.
        compared: slices whose records were compared with the topic.
        versions: by check of versions what it says of the whole stream; empty if they were not asked for.
        tiling_faults: where slices do not tile.
        checked: how many of the complete slices were checked.
        failing: checks of these that fail on the tables as they are now.
        eras: generations of the topic, and when partitions were added.
        producers: by name what the rules say of a producer.
        keys: where the topic's keys are; None if it was not asked for.
        published: how far accepted events are sent; empty of a stream that sends none.
        on_topics: what tiers, parked topic and that of accepted events hold of the slices that were compared.
        published_to: by name of a topic that is published to what the rules say of it.
        orphan_slices: what tables hold of slices that were never planned.
    """

    stream: str
    topic: str
    at: datetime
    partitions: Sequence[PartitionAudit]
    slices: int
    unfinished: Sequence[str]
    losses: Sequence[Loss]
    ends: Ends
    dlq: Sequence[DlqStatus]
    findings: Sequence[Finding]
    endurance: str
    problems: Mapping[str, HighwaterError]
    red: Mapping[str, int] | None = None
    dagster_unasked: bool = False
    compared: Sequence[TopicComparison] = ()
    versions: Mapping[str, VersionResult] = field(default_factory=dict)
    tiling_faults: Sequence[str] = ()
    checked: int = 0
    failing: Sequence[str] = ()
    eras: Sequence[Era] = ()
    producers: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    keys: KeyPlaces | None = None
    published: str = ""
    on_topics: Sequence[OnTopic] = ()
    published_to: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    orphan_slices: Sequence[str] = ()

    @property
    def errors(self) -> list[str]:
        """The faults that need a person."""
        found = [*self.problems]
        found += [self.ends.error] if self.ends.error else []
        found += [
            f"{count:,} records waited on {tier} and were lost with what was on it; remedy: highwater reclaim "
            f"{self.stream} --on {tier} reclaims them, to be reprocessed from raw"
            for tier, count in self.ends.stranded.items()
        ]
        found += _broken("", self.findings)
        for name, findings in self.published_to.items():
            found += _broken(f"{name}: ", findings)
        for name, findings in self.producers.items():
            found += _broken(f"producer {name}: ", findings)
        found += [one.error for one in self.compared if one.error]
        found += [one.error for one in self.on_topics if one.error]
        found += self._checks_with("error")
        found += [*self.tiling_faults, *self.orphan_slices, *self.failing]
        found += [f"check {name} fails in {count:,} slices" for name, count in (self.red or {}).items()]
        return found

    @property
    def away(self) -> list[HighwaterError]:
        """The errors that pass by waiting: something could not be read, no fault was found."""
        return [error for error in self.problems.values() if isinstance(error, TemporaryError)]

    def _checks_with(self, result: str) -> list[str]:
        """The checks of versions with this result, in sentences."""
        return [
            f"{name} over the stream: {one.check.text}" for name, one in self.versions.items() if one.result == result
        ]

    @property
    def head(self) -> list[str]:
        """The page's first sentences."""
        lines = [
            f"{self.stream}: topic {self.topic}, {self.slices:,} slices, {len(self.unfinished):,} not whole yet",
            *[f"error: {text}" for text in self.errors],
        ]
        lines += [f"not whole: {', '.join(islice(self.unfinished, 5))}"] if self.unfinished else []
        lines += [f"warning: {text}" for text in self._checks_with("warning")]
        lines += [f"warning: {text}" for text in (self.keys.warnings if self.keys else [])]
        lines += self.keys.lines if self.keys else []
        lines += [line for line in (self.published, self.endurance) if line]
        lines += self._not_asked
        lines += [one.line for one in self.compared if not one.error]
        return [*lines, *[one.line for one in self.on_topics if not one.error]]

    @property
    def _not_asked(self) -> list[str]:
        if self.red is not None:
            return []
        made = "" if self.checked else ", and none was made here: --records N makes those of the newest N slices"
        why = "could not be asked for their last results" if self.dagster_unasked else _NO_HOME
        return [f"checks of slices: Dagster {why}{made}"]

    @property
    def tables(self) -> list[tuple[str, list[str], Rows]]:
        """The page's tables: title, names of columns, rows."""
        return [
            (
                "Partitions",
                ["partition", "planned to", "committed to", "last stable", "unread", "oldest unread", "lost"],
                self._rows,
            ),
            ("Ends of origins", ["end", "records"], self.ends.rows),
            ("DLQ", ["topic", "waits", "due", "next due", "all due by", "paused"], [_dlq(one) for one in self.dlq]),
            (
                "Losses",
                ["generation", "partition", "offsets", "reason", "accepted by"],
                [_loss(one) for one in self.losses],
            ),
            *self._versions,
            ("Keys in several partitions", ["key", "generation", "why", "places"], self._keys),
            ("Generations", ["generation", "since", "planned at", "partitions", "topic ID", "what"], self._eras),
            ("Topic", _RULES, [_finding(one) for one in self.findings]),
            ("Topics that are published to", ["topic", *_RULES], self._published_to),
            *[(f"Producer: {name}", _RULES, [*map(_finding, found)]) for name, found in self.producers.items()],
        ]

    @property
    def _keys(self) -> Rows:
        return [[str(cell) for cell in row.values()] for row in (self.keys.samples if self.keys else ())]

    @property
    def _eras(self) -> Rows:
        return [
            [
                str(era.generation),
                era.since,
                f"{era.planned_at:%Y-%m-%d %H:%M} UTC",
                f"{era.partitions:,}",
                era.topic_id,
                era.text,
            ]
            for era in self.eras
        ]

    @property
    def _versions(self) -> list[tuple[str, list[str], Rows]]:
        """Results of the checks of versions over the whole stream, and examples of each."""
        lines = [[name, one.result, one.check.text] for name, one in self.versions.items()]
        examples = {name: one.check.samples for name, one in self.versions.items() if one.check.samples}
        return [
            ("Versions over the stream", ["check", "result", "found"], lines),
            *[
                (f"Examples of {name}", [*rows[0]], [[str(cell) for cell in row.values()] for row in rows])
                for name, rows in examples.items()
            ],
        ]

    @property
    def _published_to(self) -> Rows:
        """The violated rules."""
        return [
            [name, *_finding(one)]
            for name, findings in self.published_to.items()
            for one in findings
            if one.level is not Level.OK
        ]

    @property
    def _rows(self) -> Rows:
        return [
            [
                str(p.partition),
                *map(number, (p.planned, p.committed, p.last_stable)),
                number(p.unread),
                "" if p.age is None else span(p.age),
                number(p.lost),
            ]
            for p in self.partitions
        ]

    @property
    def markdown(self) -> str:
        """The page for Dagster."""
        parts = [*[f"- {line}" for line in self.head], ""]
        for title, names, rows in self.tables:
            if rows:
                parts += [f"### {title}", "", _row(names), _row(["---"] * len(names)), *map(_row, rows), ""]
        return "\n".join(parts)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "stream": self.stream,
            "topic": self.topic,
            "at": self.at.isoformat(),
            "errors": self.errors,
            "slices": self.slices,
            "unfinished": [*self.unfinished],
            "partitions": [
                {**vars(p), "age": None if p.age is None else p.age.total_seconds()} for p in self.partitions
            ],
            "ends": {
                **vars(self.ends),
                "waiting": dict(self.ends.waiting),
                "stranded": dict(self.ends.stranded),
                "sum": self.ends.sum,
            },
            "dlq": [
                {
                    "topic": d.topic,
                    "waiting": d.waiting,
                    "due": d.due,
                    "pause": None if d.pause is None else d.pause.to_plain(),
                    **times_plain(d.times),
                }
                for d in self.dlq
            ],
            "losses": [
                dict(zip(("generation", "partition", "offsets", "reason", "by"), _loss(x), strict=True))
                for x in self.losses
            ],
            "topic_rules": [_plain(f) for f in self.findings],
            "published_to_rules": {name: [_plain(f) for f in findings] for name, findings in self.published_to.items()},
            "producers": {name: [_plain(f) for f in findings] for name, findings in self.producers.items()},
            "generations": [{**vars(era), "planned_at": era.planned_at.isoformat()} for era in self.eras],
            "keys": None if self.keys is None else self.keys.to_plain(),
            "endurance": self.endurance,
            "failing_checks": None if self.red is None else dict(self.red),
            "compared_with_topic": [vars(one) for one in self.compared],
            "held_on_topics": [
                {
                    "topic": one.topic,
                    "records": one.records,
                    "error": one.error,
                    "unsure": one.unsure,
                    "skipped": one.skipped,
                }
                for one in self.on_topics
            ],
            "versions": {name: one.to_plain() for name, one in self.versions.items()},
            "tiling_faults": [*self.tiling_faults],
            "orphan_slices": [*self.orphan_slices],
            "failing_now": [*self.failing],
            "published": self.published,
        }


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _dlq(one: DlqStatus) -> list[str]:
    times = ["", ""] if one.times is None else [f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in (one.times.next, one.times.all)]
    return [one.topic, number(one.waiting), number(one.due), *times, "" if one.pause is None else one.pause.text]


def _loss(one: Loss) -> list[str]:
    return [
        str(one.generation),
        str(one.partition),
        str(one.offsets),
        one.reason,
        one.accepted_by,
    ]


def _broken(of: str, findings: Sequence[Finding]) -> list[str]:
    return [f"{of}{one.rule}: {one.value}" for one in findings if one.level is Level.ERROR]


_NO_HOME = "was not asked for their last results, DAGSTER_HOME is not set"
_RULES = ["rule", "level", "found", "set in", "remedy"]


def _plain(one: Finding) -> dict[str, str]:
    return {**vars(one), "level": one.level.value}


def _finding(one: Finding) -> list[str]:
    return [one.rule, one.level.value, one.value, one.where, one.remedy]


def audit(
    ledger: Ledger,
    kafka: Kafka,
    lake: Lake,
    stream: Stream,
    red: Mapping[str, int] | None = None,
    *,
    records_of: int = 0,
    versions: bool = False,
    keys: bool = False,
    others: Sequence[ProducerFacts] = (),
    unasked: HighwaterError | None = None,
) -> Audit:
    """Make the page. Kafka that is away is a problem on it; ledger and lake must answer.

    Args:
        ledger, kafka, lake: the connections.
        stream: the stream.
        red: failing checks by name; None where Dagster was not asked.
        records_of: how many of the newest slices are compared with the topic, record by record, and checked again;
            their sent records are counted in the target topics.
        versions: put the checks of versions to the whole stream too.
        keys: look in which partitions each key of the topic is.
        others: producers that are not ours.
        unasked: why Dagster could not be asked.

    Raises:
        DependencyAwayError: the ledger or the lake could not be read.
    """
    # The lake before the plan: a slice that is committed in between appears at worst as unfinished.
    ends, in_tables = count_ends(ledger, lake, stream), attempts(lake, stream)
    there = slices_there(lake, stream)
    slices = ledger.slices(stream.name)
    newest = slices[-records_of:] if records_of else []
    whole = [slice_.key for slice_ in newest if not in_tables.lacking(slice_.key)]
    status = stream_status(ledger, kafka, stream, {})
    dlq_errors = [one.error for one in status.dlq if one.error is not None]
    dlq_errors += _parked_lost(kafka, stream, status, ends.parked)
    ages = _ages(ledger, kafka, stream, status, in_tables.raw)
    findings, facts, problems = _looked_at(kafka, stream, ages)
    published_to, unseen = (
        check_published_topics(kafka, stream, partial(accepted_vanished, ledger, lake, stream), facts)
        if facts
        else ({}, [])
    )
    failing, not_decided = _failing(ledger, kafka, lake, stream, whole)
    losses = ledger.losses(stream.name)
    lost = _lost(losses, stream.topic)
    waiting = _waiting([slice_ for slice_ in slices if slice_.key not in in_tables.raw], status, losses)
    committed = committed_ends(ledger.planned(stream.name, stream.topic), slices, in_tables)
    found_eras = eras(
        [slice_ for slice_ in slices if slice_.topic == stream.topic], ledger.generations(stream.name, stream.topic)
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
        unfinished=[slice_.key for slice_ in slices if in_tables.lacking(slice_.key)],
        losses=losses,
        ends=ends,
        dlq=status.dlq,
        findings=findings,
        endurance="" if facts is None else endurance(facts),
        problems=_by_text([*status.errors, *dlq_errors, *problems, *unseen, *refused])
        | not_decided
        | _of_dagster(unasked),
        red=red,
        dagster_unasked=unasked is not None,
        compared=compare_with_topic(ledger, kafka, lake, stream, newest),
        versions=_versions(ledger, lake, stream) if versions else {},
        tiling_faults=[fault.text for fault in all_tiling_faults(ledger, stream, slices)],
        checked=len(whole),
        failing=failing,
        eras=found_eras,
        producers=producers,
        keys=key_places(lake, stream, found_eras) if keys else None,
        published=publication_line(lake, stream),
        on_topics=held_on_topics(kafka, lake, stream, newest),
        published_to=published_to,
        orphan_slices=orphan_slices(there, {slice_.key for slice_ in slices}, stream.name),
    )


def outcome(pages: Sequence[Audit], remedy: str) -> HighwaterError | None:
    """The error that a command or a run ends with that made these pages; None if they have none.

    Only where all that is wrong is that something was away is it a temporary one.
    """
    errors = [f"{page.stream}: {text}" for page in pages for text in page.errors]
    if not errors:
        return None
    away = [error for page in pages for error in page.away]
    if len(away) == len(errors):
        return DependencyAwayError(
            "the audit could not look at everything, and found no error in the rest",
            found=errors[0],
            remedy=away[0].remedy,
        )
    return UnbalancedError(f"the audit found {len(errors)} errors", found=errors[0], remedy=remedy)


def _by_text(errors: Iterable[HighwaterError]) -> dict[str, HighwaterError]:
    """A failure of several looks is reported once, also where each client has its own words for it."""
    distinct: dict[tuple[type, str], HighwaterError] = {}
    for error in errors:
        same = error.problem if isinstance(error, DependencyAwayError) else str(error)
        distinct.setdefault((type(error), same), error)
    return {str(error): error for error in distinct.values()}


def _of_dagster(unasked: HighwaterError | None) -> dict[str, HighwaterError]:
    return {} if unasked is None else {f"Dagster could not be asked: {unasked}": unasked}


def _failing(
    ledger: Ledger, kafka: Kafka, lake: Lake, stream: Stream, keys: Sequence[str]
) -> tuple[list[str], dict[str, HighwaterError]]:
    """Failing checks of slices in the tables as they are now, warnings left out; and checks that could not be made."""
    from highwater.orchestration.checking.checks import CHECKS, Sources, failures

    found: list[str] = []
    unasked: dict[str, HighwaterError] = {}
    for checks in CHECKS if keys else ():
        try:
            results = checks.results(Sources(ledger, kafka, lake, schemas()), stream, keys)
        except Exception as error:  # noqa: BLE001 - a table that breaks one check must not hide what the others say
            reported = error if isinstance(error, HighwaterError) else _broke(error)
            unasked[f"{', '.join(checks.names(stream))}: {reported}"] = reported
        else:
            red = failures(stream, results, warned=False)
            found += [f"{key}: {name}: {result.text}" for name, key, result in red]
    return found, unasked


def _broke(error: Exception) -> PermanentError:
    return PermanentError(
        "the checks could not be made of what the tables hold",
        found=f"{type(error).__name__}: {error}",
        remedy="look at the rows of the newest slices, and report it: no row may break a check",
    )


def _versions(ledger: Ledger, lake: Lake, stream: Stream) -> dict[str, VersionResult]:
    results = over_the_stream(lake, stream, numbers(ledger.reclaims.of(stream.name)))
    return {name: VersionResult(found, stream.severity(name)) for name, found in results.items()}


def committed_ends(planned: Planned | None, slices: Sequence[Slice], in_tables: Attempts) -> dict[int, int]:
    """For each partition the end of the slices, without a gap from the first one on, that are complete in all tables.

    Args:
        planned: how far a topic is planned.
        slices: slices, those of other topics among them.
        in_tables: the attempts in the tables.
    """
    if planned is None:
        return {}
    generation = planned.generation
    mine = [p for p in slices if p.topic == generation.topic and p.generation == generation.number]
    found = {p: start for p, start in generation.starts.items() if start is not None}
    ordered = sorted(mine, key=lambda slice_: slice_.ordinal)
    for slice_ in takewhile(lambda slice_: not in_tables.lacking(slice_.key), ordered):
        found.update({p: offsets.end for p, offsets in slice_.ranges.items()})
    return found


def _waiting(unread: Sequence[Slice], status: StreamStatus, losses: Sequence[Loss]) -> Counter[int]:
    """For each partition of the main topic the offsets of these slices, without recorded losses."""
    found: Counter[int] = Counter()
    for slice_ in unread:
        if (slice_.topic, slice_.topic_id) == (status.topic, status.topic_id):
            found.update({p: len(offsets) for p, offsets in left_to_read(slice_, losses).ranges.items()})
    return found


def _parked_lost(kafka: Kafka, stream: Stream, status: StreamStatus, waiting: int) -> list[HighwaterError]:
    """The error of a parked topic that is there and holds less than waits there."""
    there = [one for one in status.dlq if one.topic == stream.parked_topic and one.waiting is not None]
    if not there:
        return []
    try:
        found = parked_lost(kafka, stream, waiting)
    except HighwaterError as error:
        return [error]
    return [] if found is None else [found]


def _lost(losses: Sequence[Loss], topic: str) -> Counter[int]:
    """For each partition of a topic the offsets that are recorded as lost."""
    found: Counter[int] = Counter()
    for loss in losses:
        found[loss.partition] += len(loss.offsets) if loss.topic == topic else 0
    return found


def _ages(ledger: Ledger, kafka: Kafka, stream: Stream, status: StreamStatus, read: Collection[str]) -> Ages:
    """The ages of waiting records; the reason why they could not be asked is in the status."""
    nothing = Ages({}, sure=False)
    try:
        # A broker that is away is waited for once.
        return unread_ages(ledger, kafka, stream, stream.topic, read) if status.partitions else nothing
    except HighwaterError:
        return nothing


def _looked_at(
    kafka: Kafka, stream: Stream, ages: Ages
) -> tuple[list[Finding], TopicFacts | None, list[HighwaterError]]:
    try:
        facts = topic_facts(kafka, stream.topic, ages.oldest, age_known=ages.sure)
    except HighwaterError as error:
        return [], None, [error]
    return check_topic(facts), facts, []
