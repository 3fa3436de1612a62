"""One slice explained: its plan, commits, publications, runs and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.errors import IncompleteReadError
from highwater.gaps import count_offsets
from highwater.orchestration.checking.check_results import check_keys
from highwater.orchestration.checking.slice_status import read_commit_attempts, read_stream_commits
from highwater.orchestration.dagster_home import ask_instance
from highwater.orchestration.reporting.publication_status import load_published_slice
from highwater.orchestration.worker_leases import select_worker_leases
from highwater.plans import subtract_losses
from highwater.resources.commit_log import ensure_all_records_seen, ensure_all_rows_seen
from highwater.resources.delta import query, slice_is_one_of
from highwater.retention import count_expired_rows
from highwater.slices import encode_ranges
from highwater.tables import BY_SLICE
from highwater.wording import format_number

if TYPE_CHECKING:
    import dagster as dg

    from highwater.declaration import Stream
    from highwater.errors import HighwaterError
    from highwater.holds import Hold
    from highwater.orchestration.checking.check_rules import SliceAttempts
    from highwater.orchestration.dagster_home import Opened
    from highwater.orchestration.reporting.publication_status import PublishedSlice
    from highwater.plans import Loss, PublicationRecord
    from highwater.reclaims import Reclaim
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger
    from highwater.resources.ledger.exhausted_slices import ExhaustedSlice
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

MAX_RUNS = 10


@dataclass(frozen=True)
class Commit:
    """The commit of the slice in one table; None where there is none."""

    table: str
    attempt: int | None
    rows: int | None = None
    counts: Mapping[str, int] | None = None


@dataclass(frozen=True)
class SliceRun:
    """A run that worked on the slice.

    Args:
        alive_until: while it is started, when the lease of its worker runs out unless it is renewed; None where the
            worker holds none.
    """

    run: str
    status: str
    began: datetime | None
    purpose: str
    alive_until: datetime | None = None

    @property
    def worker(self) -> str:
        """The worker of a run that is started."""
        if self.status != "STARTED":
            return ""
        return "no lease" if self.alive_until is None else f"lease until {self.alive_until:%H:%M:%S}"


@dataclass(frozen=True)
class RejectSummary:
    """Rejects of the slice: their reason and rule, where they go from here, and how many they are."""

    reason: str
    rule: str | None
    next_topic: str
    records: int


@dataclass(frozen=True)
class ExplainedSlice:
    """All that ledger, lake and Dagster hold about a slice.

    Args:
        slice_: its plan.
        lost: recorded losses within its ranges.
        commits: in the order of the tables.
        publication: publication of its rejects; None if none were sent.
        undone: the tables that do not follow the slice's decision yet; empty when it is complete.
        rejects: rows of the slice in the table of rejects.
        exhausted_slice: since when repair requests it no more; None if it does.
        hold: the current or released hold; None if it was never held.
        reclaims: records reclaimed from the DLQ for it to reprocess.
        leases: the held leases of its stream, each with its end unless it is renewed.
        runs: the newest first; None where Dagster was not asked.
        checks: name and status of each check's last execution; None where Dagster was not asked.
        dagster_error: why Dagster could not be asked; None if it was, or was not to be.
        retired: whether its key was retired from Dagster.
        erased: its erased records, in sentences.
        aged: its expired rows, in sentences.
        accepted: the publication of its accepted events; None for a stream that publishes none.
    """

    slice_: Slice
    lost: Sequence[Loss]
    commits: Sequence[Commit]
    publication: PublicationRecord | None
    undone: Sequence[str]
    rejects: Sequence[RejectSummary] = ()
    hold: Hold | None = None
    exhausted_slice: ExhaustedSlice | None = None
    reclaims: Sequence[Reclaim] = ()
    leases: Mapping[str, datetime] = field(default_factory=dict)
    runs: Sequence[SliceRun] | None = None
    checks: Mapping[str, str] | None = None
    dagster_error: HighwaterError | None = None
    retired: bool = False
    erased: Sequence[str] = ()
    aged: Sequence[str] = ()
    accepted: PublishedSlice | None = None

    @property
    def lines(self) -> list[str]:
        """The slice in sentences, without its tables."""
        slice_ = self.slice_
        lag = "" if slice_.lag is None else f", {slice_.lag:,} offsets after it waited"
        lines = [
            f"{slice_.key}: stream {slice_.stream}, topic {slice_.topic}, generation {slice_.generation}",
            f"planned {slice_.planned_at:%Y-%m-%d %H:%M:%S} UTC, {slice_.offsets:,} offsets{lag}",
        ]
        lines += [f"lost: partition {loss.partition} {loss.offsets}: {loss.reason}" for loss in self.lost]
        if self.publication is not None:
            sent = self.publication
            lines.append(
                f"rejects published: {sent.sent:,} of attempt {sent.attempt}, {sent.published_at:%Y-%m-%d %H:%M}"
            )
        lines += [] if self.accepted is None else self.accepted.lines
        lines += [self.hold.text] if self.hold is not None else []
        lines += (
            [f"{self.exhausted_slice.text}; highwater retry-slice {slice_.key} lets it be tried again"]
            if self.exhausted_slice
            else []
        )
        lines += [self._reclaimed] if self.reclaims else []
        lines += [
            f"lease: {name!r} is held until {ends:%H:%M:%S} UTC, or renewed" for name, ends in self.leases.items()
        ]
        lines += [f"erased: {line}" for line in self.erased]
        lines += [f"by age: {line}" for line in self.aged]
        lines += self._not_asked
        recall = f"highwater recall-keys {slice_.stream} {slice_.key} {slice_.key} --yes"
        lines += [f"its key is retired: {recall} brings it back"] if self.retired else []
        lines.append("complete" if not self.undone else f"incomplete: {', '.join(self.undone)} still to be written")
        return lines

    @property
    def _not_asked(self) -> list[str]:
        if self.dagster_error is not None:
            return [f"runs and checks: Dagster could not be asked: {self.dagster_error}"]
        return ["runs and checks: Dagster was not asked, DAGSTER_HOME is not set"] if self.runs is None else []

    @property
    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Ranges, commits, rejects, runs and checks as names of columns and rows."""
        found = [(["partition", "start", "end", "leader epoch"], self._ranges), (_COMMITS, self._commits)]
        if self.rejects:
            rejects = [[one.reason, one.rule or "", f"{one.records:,}", one.next_topic] for one in self.rejects]
            found.append((["rejected because", "rule", "records", "goes to"], rejects))
        if self.runs:
            rows = [
                [r.run, r.status, "" if r.began is None else f"{r.began:%Y-%m-%d %H:%M:%S}", r.purpose, r.worker]
                for r in self.runs
            ]
            found.append((["run", "status", "began (UTC)", "asked by", "worker"], rows))
        if self.checks:
            found.append((["check", "last execution"], [[name, status] for name, status in self.checks.items()]))
        return found

    @property
    def _reclaimed(self) -> str:
        last = self.reclaims[-1]
        by = f"{last.reclaimed_by} at {last.reclaimed_at:%Y-%m-%d %H:%M}: {last.reason}"
        return f"reclaimed from the DLQ: {len({one.origin for one in self.reclaims}):,} records, last by {by}"

    @property
    def _ranges(self) -> list[list[str]]:
        epochs = self.slice_.epochs
        return [
            [str(p), str(r.start), str(r.end), format_number(epochs.get(p))]
            for p, r in sorted(self.slice_.ranges.items())
        ]

    @property
    def _commits(self) -> list[list[str]]:
        return [
            [one.table, *map(format_number, (one.attempt, one.rows)), _format_counts(one.counts)]
            for one in self.commits
        ]

    def to_plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        slice_ = self.slice_
        return {
            "slice": slice_.key,
            "stream": slice_.stream,
            "topic": slice_.topic,
            "topic_id": slice_.topic_id,
            "generation": slice_.generation,
            "planned_at": slice_.planned_at.isoformat(),
            "lag": slice_.lag,
            "ranges": encode_ranges(slice_.ranges),
            "lost": [
                {"partition": loss.partition, "range": str(loss.offsets), "reason": loss.reason} for loss in self.lost
            ],
            "commits": [{**vars(one), "counts": dict(one.counts or {})} for one in self.commits],
            "published": None if self.publication is None else self.publication.sent,
            "undone": [*self.undone],
            "rejects": [vars(one) for one in self.rejects],
            "exhausted_slice": None if self.exhausted_slice is None else self.exhausted_slice.to_plain(),
            "hold": None if self.hold is None else self.hold.to_plain(),
            "reclaimed": len({one.origin for one in self.reclaims}),
            "leases": {name: ends.isoformat() for name, ends in self.leases.items()},
            "runs": None if self.runs is None else [_describe_run(run) for run in self.runs],
            "checks": None if self.checks is None else dict(self.checks),
            "dagster_error": None if self.dagster_error is None else str(self.dagster_error),
            "retired": self.retired,
            "erased": [*self.erased],
            "aged": [*self.aged],
            "accepted": None if self.accepted is None else self.accepted.to_plain(),
        }


def _describe_run(run: SliceRun) -> dict[str, Any]:
    alive = None if run.alive_until is None else run.alive_until.isoformat()
    return {**vars(run), "began": str(run.began), "alive_until": alive}


_COMMITS = ["table", "attempt", "rows", "counts"]


def _format_counts(counts: Mapping[str, int] | None) -> str:
    shown = {name: count for name, count in (counts or {}).items() if count and not name.endswith("_us")}
    return ", ".join(f"{name} {count:,}" for name, count in shown.items())


def explain(ledger: Ledger, lake: Lake, stream: Stream, key: str, dagster: Opened | None = None) -> ExplainedSlice:
    """Gather all facts about a slice.

    Args:
        ledger: the plans.
        lake: the tables.
        stream: the slice's stream.
        key: the slice.
        dagster: opens its instance; None where it is not to be asked.

    Raises:
        UnknownSliceError: it was never planned.
        IncompleteReadError: a table has files of the slice, and a read of the commit records did not return its commit.
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    [slice_] = ledger.get([key])
    # The rows first: a commit between the two reads has its record.
    rows = {table: lake.count_slice_rows(stream.name, table, [key]).get(key) for table in BY_SLICE}
    slice_commits = read_stream_commits(lake, stream, [key])
    for table in BY_SLICE:
        if key not in slice_commits[table]:
            _ensure_not_committed(lake, stream, table, key, rows[table])
    attempts = read_commit_attempts(lake, stream, slice_commits, [key])
    commits = [_commit(table, slice_commits[table].get(key), rows[table]) for table in BY_SLICE]
    lost = [loss for loss in ledger.list_losses(stream.name) if subtract_losses(slice_, [loss]) != slice_]
    leases = ledger.read_leases()
    of_dagster, dagster_error = (
        (None, None)
        if dagster is None
        else ask_instance(dagster, lambda one: _fetch_runs_and_checks(one, stream, key, leases))
    )
    return ExplainedSlice(
        slice_=slice_,
        lost=lost,
        commits=[*commits, *_build_current_commits(attempts, key), *_build_metrics_commits(attempts, key)],
        publication=ledger.publications.read_for_slices([key]).get(key),
        undone=attempts.select_missing_tables(key),
        rejects=_load_rejects(lake, stream, key),
        hold=ledger.holds.read_for_slices([key]).get(key),
        exhausted_slice=next(
            (one for one in ledger.exhausted_slices.read_open(stream.name) if one.slice_key == key), None
        ),
        reclaims=ledger.reclaims.list_for_stream(stream.name, slice_key=key),
        leases={name: ends for name, ends in leases.items() if _is_stream_lease(name, stream)},
        runs=None if of_dagster is None else of_dagster[0],
        checks=None if of_dagster is None else of_dagster[1],
        dagster_error=dagster_error,
        retired=key in ledger.retired.list_retired([key]),
        erased=_describe_erasures(ledger, stream, key, by_age=False),
        aged=_describe_aged_rows(ledger, stream, key, slice_commits["raw"].get(key)),
        accepted=load_published_slice(ledger, lake, stream, slice_),
    )


def _describe_aged_rows(ledger: Ledger, stream: Stream, key: str, slice_commit: SliceCommit | None) -> list[str]:
    erased = _describe_erasures(ledger, stream, key, by_age=True)
    there = (
        ["raw was read again since, and holds its records"]
        if erased and slice_commit and not count_expired_rows(slice_commit)
        else []
    )
    return [*erased, *there]


def _describe_erasures(ledger: Ledger, stream: Stream, key: str, *, by_age: bool) -> list[str]:
    erasures = {one.number: one for one in ledger.erasures.list_for_stream(stream.name)}
    return [
        f"{count_offsets(one.places):,} records, by {erasures[one.number].erased_by} at "
        f"{erasures[one.number].erased_at:%Y-%m-%d %H:%M} UTC: {erasures[one.number].reason}"
        for one in ledger.erasures.read_for_slices([key]).get(key, ())
        if one.by_age is by_age
    ]


def _ensure_not_committed(lake: Lake, stream: Stream, table: str, key: str, rows: int | None) -> None:
    """Validate that a slice without a commit record was never committed.

    Raises:
        IncompleteReadError: it has rows, or not all commit records were read.
    """
    opened = lake.open_stream_table(stream.name, table)
    if opened is not None:
        ensure_all_records_seen(opened)
    if rows:
        raise IncompleteReadError(
            f"a read of {table} of {stream.name} did not return the commit of {key}",
            stored=f"{rows:,} rows of the slice",
            found="no commit of it",
            remedy="nothing was concluded from it; see IncompleteReadError in the runbook",
        )


def _commit(table: str, slice_commit: SliceCommit | None, rows: int | None) -> Commit:
    if slice_commit is None:
        return Commit(table, None)
    return Commit(table, slice_commit.attempt, slice_commit.rows if rows is None else rows, slice_commit.counts)


def _load_rejects(lake: Lake, stream: Stream, key: str) -> list[RejectSummary]:
    table = lake.open_stream_table(stream.name, "rejects")
    if table is None:
        return []
    ensure_all_rows_seen(table, [key])
    found = query(
        table,
        "SELECT reason, rule, next_topic, count(*) AS records FROM t WHERE "
        f"{slice_is_one_of([key])} GROUP BY reason, rule, next_topic ORDER BY reason, rule, next_topic",
    )
    return [RejectSummary(**{name: row[name] for name in ("reason", "rule", "next_topic", "records")}) for row in found]


def _is_stream_lease(lease: str, stream: Stream) -> bool:
    """Whether a lease is one of the stream's: its name is the operation, and the stream or one of its tables."""
    return lease.partition(" ")[2].partition("/")[0] == stream.name


def _build_current_commits(attempts: SliceAttempts, key: str) -> list[Commit]:
    return [] if attempts.current is None else [Commit("current", attempts.current.get(key))]


def _build_metrics_commits(attempts: SliceAttempts, key: str) -> list[Commit]:
    return [] if attempts.metrics is None else [Commit("metrics", attempts.metrics.get(key))]


def _fetch_runs_and_checks(
    instance: dg.DagsterInstance, stream: Stream, key: str, leases: Mapping[str, datetime]
) -> tuple[list[SliceRun], dict[str, str]]:
    return _fetch_runs(instance, stream, key, leases), _fetch_checks(instance, stream, key)


def _fetch_runs(
    instance: dg.DagsterInstance, stream: Stream, key: str, leases: Mapping[str, datetime]
) -> list[SliceRun]:
    """The runs that materialised a table of the slice, and those that were asked for it by name."""
    import dagster as dg

    from highwater.orchestration.asset_keys import build_table_keys
    from highwater.orchestration.run_tags import PARTITION, RANGE_START

    ids: set[str] = set()
    for asset in build_table_keys(stream):
        records_filter = dg.AssetRecordsFilter(asset_key=asset, asset_partitions=[key])
        ids |= {record.run_id for record in instance.fetch_materializations(records_filter, limit=MAX_RUNS).records}
    for tag in (PARTITION, RANGE_START):
        ids |= {run.run_id for run in instance.get_runs(dg.RunsFilter(tags={tag: key}), limit=MAX_RUNS)}
    records = instance.get_run_records(dg.RunsFilter(run_ids=sorted(ids)), limit=MAX_RUNS) if ids else []
    alive = select_worker_leases(leases)
    return [_build_run(record, alive.get(record.dagster_run.run_id)) for record in records]


def _build_run(record: dg.RunRecord, alive_until: datetime | None) -> SliceRun:
    from highwater.orchestration.run_tags import PURPOSE

    run, start = record.dagster_run, record.start_time
    began = None if start is None else datetime.fromtimestamp(start, UTC)
    return SliceRun(run.run_id, run.status.value, began, run.tags.get(PURPOSE, "a person"), alive_until)


def _fetch_checks(instance: dg.DagsterInstance, stream: Stream, key: str) -> dict[str, str]:
    found = instance.event_log_storage.get_asset_check_partition_info(check_keys(stream), partition_keys=[key])
    return {info.check_key.name: info.latest_execution_status.value.lower() for info in found}
