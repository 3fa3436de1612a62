"""The report of an audit: its errors, its tables, and its form as Markdown and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from highwater.declaration import Severity
from highwater.errors import HighwaterError, TemporaryError
from highwater.orchestration.checking.completeness import TopicComparison
from highwater.orchestration.checking.origin_counts import OriginEnds
from highwater.orchestration.checking.sent_records import TopicRecords
from highwater.orchestration.reporting.status_report import DlqStatus, to_plain_times
from highwater.topic_rules import Finding, Level
from highwater.wording import format_duration, format_number

if TYPE_CHECKING:
    from highwater.orchestration.checking.check_rules import CheckResult
    from highwater.orchestration.checking.key_places import KeyPlaces
    from highwater.partition_counts import PartitionCountPeriod
    from highwater.plans import Loss

Rows = list[list[str]]


@dataclass(frozen=True)
class PartitionAudit:
    """One partition of the main topic.

    Args:
        partition: its number.
        planned: the end of the planned offsets.
        committed: the end of the contiguous slices that are complete in all tables.
        last_stable: to where it can be read.
        age: age of the oldest record that is not in raw; None if there is none, or it was not read.
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
        partitions: partitions of the main topic.
        slices: planned of it.
        unfinished: slices that some table lacks, the oldest first.
        losses: recorded holes.
        ends: how the origins ended.
        dlq: the tiers and the parked topic.
        findings: results of the topic rules; empty if the topic could not be read.
        endurance: how many brokers may fail.
        problems: errors that stop planning or reading, by their subject.
        failing_checks: failing checks by name, with the number of slices; None where Dagster was not asked.
        has_dagster_error: whether Dagster was to be asked, and could not be; why is one of the problems.
        compared: slices whose records were compared with the topic.
        versions: by check of versions what it says of the whole stream; empty if they were not asked for.
        tiling_faults: where slices do not tile.
        checked: how many of the complete slices were checked.
        failing: checks of these that fail on the tables as they are now.
        periods: generations of the topic, and when partitions were added.
        producers: by name what the rules say of a producer.
        keys: where the topic's keys are; None if it was not asked for.
        published: how far accepted events are sent; empty of a stream that sends none.
        on_topics: records of the compared slices on the tiers, the parked topic and the topic of accepted events.
        published_to: by name of a topic that is published to what the rules say of it.
        orphan_slices: rows of tables whose slices were never planned.
    """

    stream: str
    topic: str
    at: datetime
    partitions: Sequence[PartitionAudit]
    slices: int
    unfinished: Sequence[str]
    losses: Sequence[Loss]
    ends: OriginEnds
    dlq: Sequence[DlqStatus]
    findings: Sequence[Finding]
    endurance: str
    problems: Mapping[str, HighwaterError]
    failing_checks: Mapping[str, int] | None = None
    has_dagster_error: bool = False
    compared: Sequence[TopicComparison] = ()
    versions: Mapping[str, VersionResult] = field(default_factory=dict)
    tiling_faults: Sequence[str] = ()
    checked: int = 0
    failing: Sequence[str] = ()
    periods: Sequence[PartitionCountPeriod] = ()
    producers: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    keys: KeyPlaces | None = None
    published: str = ""
    on_topics: Sequence[TopicRecords] = ()
    published_to: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    orphan_slices: Sequence[str] = ()

    @property
    def errors(self) -> list[str]:
        """The faults that need a person."""
        found = [*self.problems]
        found += [self.ends.error] if self.ends.error else []
        found += [
            f"{count:,} records waited on {tier}, which lost them or is no longer declared; remedy: highwater reclaim "
            f"{self.stream} --on {tier} reclaims them, to be reprocessed from raw"
            for tier, count in self.ends.stranded.items()
        ]
        found += _describe_broken_rules("", self.findings)
        for name, findings in self.published_to.items():
            found += _describe_broken_rules(f"{name}: ", findings)
        for name, findings in self.producers.items():
            found += _describe_broken_rules(f"producer {name}: ", findings)
        found += [one.error for one in self.compared if one.error]
        found += [one.error for one in self.on_topics if one.error]
        found += self._describe_version_checks("error")
        found += [*self.tiling_faults, *self.orphan_slices, *self.failing]
        found += [f"check {name} fails in {count:,} slices" for name, count in (self.failing_checks or {}).items()]
        return found

    @property
    def unavailable(self) -> list[HighwaterError]:
        """The errors that pass by waiting: something could not be read, no fault was found."""
        return [error for error in self.problems.values() if isinstance(error, TemporaryError)]

    def _describe_version_checks(self, result: str) -> list[str]:
        """The checks of versions with this result, in sentences."""
        return [
            f"{name} over the stream: {one.check.text}" for name, one in self.versions.items() if one.result == result
        ]

    @property
    def head(self) -> list[str]:
        """The page's first sentences."""
        lines = [
            f"{self.stream}: topic {self.topic}, {self.slices:,} slices, {len(self.unfinished):,} incomplete",
            *[f"error: {text}" for text in self.errors],
        ]
        lines += [f"incomplete: {', '.join(islice(self.unfinished, 5))}"] if self.unfinished else []
        lines += [f"warning: {text}" for text in self._describe_version_checks("warning")]
        lines += [f"warning: {text}" for text in (self.keys.warnings if self.keys else [])]
        lines += self.keys.lines if self.keys else []
        lines += [line for line in (self.published, self.endurance) if line]
        lines += self._not_asked
        lines += [one.line for one in self.compared if not one.error]
        return [*lines, *[one.line for one in self.on_topics if not one.error]]

    @property
    def _not_asked(self) -> list[str]:
        if self.failing_checks is not None:
            return []
        made = "" if self.checked else ", and none was made here: --slices N makes those of the newest N slices"
        why = "could not be asked for their last results" if self.has_dagster_error else _NO_HOME
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
            (
                "DLQ",
                ["topic", "waits", "due", "next due", "all due by", "paused"],
                [_build_dlq_row(one) for one in self.dlq],
            ),
            (
                "Losses",
                ["generation", "partition", "offsets", "reason", "accepted by"],
                [_build_loss_row(one) for one in self.losses],
            ),
            *self._versions,
            ("Keys in several partitions", ["key", "generation", "why", "places"], self._keys),
            ("Generations", ["generation", "since", "planned at", "partitions", "topic ID", "what"], self._eras),
            ("Topic", _RULES, [_build_finding_row(one) for one in self.findings]),
            ("Topics that are published to", ["topic", *_RULES], self._published_to),
            *[
                (f"Producer: {name}", _RULES, [*map(_build_finding_row, found)])
                for name, found in self.producers.items()
            ],
        ]

    @property
    def _keys(self) -> Rows:
        return [[str(cell) for cell in row.values()] for row in (self.keys.samples if self.keys else ())]

    @property
    def _eras(self) -> Rows:
        return [
            [
                str(period.generation),
                period.since,
                f"{period.planned_at:%Y-%m-%d %H:%M} UTC",
                f"{period.partitions:,}",
                period.topic_id,
                period.text,
            ]
            for period in self.periods
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
            [name, *_build_finding_row(one)]
            for name, findings in self.published_to.items()
            for one in findings
            if one.level is not Level.OK
        ]

    @property
    def _rows(self) -> Rows:
        return [
            [
                str(p.partition),
                *map(format_number, (p.planned, p.committed, p.last_stable)),
                format_number(p.unread),
                "" if p.age is None else format_duration(p.age),
                format_number(p.lost),
            ]
            for p in self.partitions
        ]

    @property
    def markdown(self) -> str:
        """The page for Dagster."""
        parts = [*[f"- {line}" for line in self.head], ""]
        for title, names, rows in self.tables:
            if rows:
                parts += [
                    f"### {title}",
                    "",
                    _format_markdown_row(names),
                    _format_markdown_row(["---"] * len(names)),
                    *map(_format_markdown_row, rows),
                    "",
                ]
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
                    **to_plain_times(d.times),
                }
                for d in self.dlq
            ],
            "losses": [
                dict(zip(("generation", "partition", "offsets", "reason", "by"), _build_loss_row(x), strict=True))
                for x in self.losses
            ],
            "topic_rules": [_to_plain_finding(f) for f in self.findings],
            "published_to_rules": {
                name: [_to_plain_finding(f) for f in findings] for name, findings in self.published_to.items()
            },
            "producers": {name: [_to_plain_finding(f) for f in findings] for name, findings in self.producers.items()},
            "generations": [{**vars(period), "planned_at": period.planned_at.isoformat()} for period in self.periods],
            "keys": None if self.keys is None else self.keys.to_plain(),
            "endurance": self.endurance,
            "failing_checks": None if self.failing_checks is None else dict(self.failing_checks),
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


def _format_markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _build_dlq_row(one: DlqStatus) -> list[str]:
    times = (
        ["", ""]
        if one.times is None
        else [f"{at:%Y-%m-%d %H:%M:%S} UTC" for at in (one.times.next_due, one.times.all_due)]
    )
    return [
        one.topic,
        format_number(one.waiting),
        format_number(one.due),
        *times,
        "" if one.pause is None else one.pause.text,
    ]


def _build_loss_row(one: Loss) -> list[str]:
    return [
        str(one.generation),
        str(one.partition),
        str(one.offsets),
        one.reason,
        one.accepted_by,
    ]


def _describe_broken_rules(of: str, findings: Sequence[Finding]) -> list[str]:
    return [f"{of}{one.rule}: {one.value}" for one in findings if one.level is Level.ERROR]


_NO_HOME = "was not asked for their last results, DAGSTER_HOME is not set"
_RULES = ["rule", "level", "found", "set in", "remedy"]


def _to_plain_finding(one: Finding) -> dict[str, str]:
    return {**vars(one), "level": one.level.value}


def _build_finding_row(one: Finding) -> list[str]:
    return [one.rule, one.level.value, one.value, one.where, one.remedy]
