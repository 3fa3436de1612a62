"""Taking records back from the DLQ, so that a backfill decides them again: `reclaim`, as a command and as a job."""

# A record that was published belongs to the DLQ, and a slice of the main topic that is materialised again leaves it
# there. Reclaimed, it is its slice's again: the copies on the tiers and the parked topic count no more. Nothing is
# sent, and nothing is decided before the slice is materialised again.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.assets.commit import LEASE_SECONDS
from highwater.assets.events import TABLE as EVENTS
from highwater.assets.events import build_retries_lease_name
from highwater.assets.raw import TABLE as RAW
from highwater.assets.reclaims import NUMBER, SEEN
from highwater.batching import split_by_count
from highwater.envelope import MAX_COUNT, ORIGIN, Origin
from highwater.errors import ConfigurationError
from highwater.operator_actions import ensure_named
from highwater.orchestration.checking.last_rejections import build_left_over_clause, build_origin_condition
from highwater.orchestration.operations.parked import ParkedSelection
from highwater.reclaims import Reclaim, count_reclaims, is_stale
from highwater.reject_reasons import count_causes, format_causes
from highwater.resources.commit_log import ensure_all_rows_seen
from highwater.resources.delta import query_all
from highwater.retention import count_expired_rows
from highwater.tables import select_stages

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

SAMPLES = 10
NAMED = 5
# The lake is asked for this many slices at once.
PAGE = 500
_ORIGIN = ", ".join(ORIGIN)


@dataclass(frozen=True, slots=True)
class DlqRecord:
    """A record that belongs to the DLQ.

    Args:
        home: the slice of the main topic that read it first, and published it.
        slice_key: the slice that rejected it the last time.
        next_topic: the topic that this slice published it to.
        reason: reason of that rejection.
        rule: the rule or check that refused the record; None where another reason did.
        key: the record's key.
        published_at: when it was published the last time, in UTC.
        number: how often it was reclaimed before.
    """

    home: str
    slice_key: str
    next_topic: str
    reason: str
    rule: str | None
    key: bytes | None
    published_at: datetime
    number: int


@dataclass(frozen=True)
class RecordsOnDlq:
    """The records of a stream that belong to the DLQ.

    Args:
        meant: the selected records by origin.
        other_causes: how many there are beside them, by cause.
        taken: how many were reclaimed before, and are not reprocessed yet.
        discarded: how many a person discarded.
        aged: how many nothing can be decided of again, since rows of raw of their slices have expired.
    """

    meant: Mapping[Origin, DlqRecord] = field(default_factory=dict)
    other_causes: Mapping[str, int] = field(default_factory=dict)
    taken: int = 0
    discarded: int = 0
    aged: int = 0

    @property
    def others(self) -> int:
        """How many there are beside the selected ones."""
        return sum(self.other_causes.values())

    @property
    def slices(self) -> list[str]:
        """The slices of the main topic that are to be materialised again."""
        return sorted({one.home for one in self.meant.values()})

    @property
    def lines(self) -> list[str]:
        """The findings, in sentences."""
        where = Counter(f"{one.reason} on {one.next_topic}" for one in self.meant.values())
        counts = ", ".join(f"{count:,} {name}" for name, count in where.most_common()) or "none"
        lines = [f"{len(self.meant):,} records of {len(self.slices):,} slices match: {counts}"]
        lines += [f"{self.others:,} others are in the DLQ: {format_causes(self.other_causes)}"] if self.others else []
        lines += [f"{self.taken:,} were reclaimed before, and are not reprocessed yet"] if self.taken else []
        lines += [f"{self.discarded:,} were discarded"] if self.discarded else []
        lines += (
            [f"{self.aged:,} are of slices whose rows of raw have expired: materialise raw of these slices first"]
            if self.aged
            else []
        )
        return lines

    @property
    def table(self) -> tuple[list[str], list[list[str]]]:
        """The first of those that are meant, as names of columns and rows."""
        names = ["origin", "key", "reason", "rule", "on", "slice", "rejected by", "published"]
        shown = sorted(self.meant.items())[:SAMPLES]
        return names, [
            [
                f"{origin.topic}[{origin.partition}]@{origin.offset}",
                (one.key or b"").decode("utf-8", "replace"),
                one.reason,
                one.rule or "",
                one.next_topic,
                one.home,
                one.slice_key,
                f"{one.published_at:%Y-%m-%d %H:%M:%S}",
            ]
            for origin, one in shown
        ]

    def to_plain(self) -> list[dict[str, Any]]:
        """The selected records as plain values for JSON."""
        return [
            {
                "origin": origin._asdict(),
                **asdict(one),
                "key": (one.key or b"").decode("utf-8", "replace"),
                "published_at": one.published_at.isoformat(),
            }
            for origin, one in sorted(self.meant.items())
        ]


@dataclass(frozen=True)
class ReclaimRequest:
    """A request to reclaim records.

    Args:
        choice: which records; its slices are those that read or rejected them, its times those of their publication.
        most: at most this many matching records, first published first; all if None.
        dry_run: do nothing; only report what would be done.
        by: the person's name.
        because: why.
        on: only what was published to these topics last; all if empty.
    """

    choice: ParkedSelection = field(default_factory=ParkedSelection)
    most: int | None = None
    dry_run: bool = True
    by: str = ""
    because: str = ""
    on: Collection[str] = ()


def reclaim_records(
    ledger: Ledger, lake: Lake, stream: Stream, request: ReclaimRequest, log: Callable[[str], object]
) -> RecordsOnDlq:
    """Look at the records in the DLQ, and reclaim the selected ones; returns what was found.

    Meanwhile no retry is decided: a record that a slice of a tier accepted before is not reclaimed, and no slice of a
    tier accepts a reclaimed record later.

    Raises:
        ConfigurationError: it is to be recorded, and nobody is named or no reason is given; or nothing is published to
            a topic that is meant.
        LeaseHeldError: retries are being decided; nothing was recorded.
        DependencyUnavailableError: the ledger or the lake is unavailable; nothing was recorded.
    """
    ensure_named(request.by, "reclaim", dry_run=request.dry_run)
    if not request.dry_run and not request.because:
        raise ConfigurationError(
            "no reason is given for the reclaim",
            remedy="say why: --because TEXT, or `because` in the run's configuration",
        )
    if request.dry_run:
        found = _log_findings(read_records_on_dlq(ledger, lake, stream, request.choice, request.most, request.on), log)
        _log_retired(ledger, stream, found.slices, log)
        log("a dry run: nothing was recorded")
        return found
    with ledger.lease(build_retries_lease_name(stream), seconds=LEASE_SECONDS, wait=LEASE_SECONDS) as lease:
        found = _log_findings(read_records_on_dlq(ledger, lake, stream, request.choice, request.most, request.on), log)
        lease.check()
        now = datetime.now(UTC)
        meant = [_build_reclaim(origin, one, request, now) for origin, one in found.meant.items()]
        ledger.reclaims.add(stream.name, meant, after=_load_last_reclaim_number(lake, stream, found.slices))
    log(f"{len(found.meant):,} reclaimed by {request.by}: {request.because}")
    _log_retired(ledger, stream, found.slices, log)
    if found.meant:
        log(f"now materialise {', '.join(select_stages(stream)[1:])} of {_format_slice_keys(found.slices)}")
    return found


def _load_last_reclaim_number(lake: Lake, stream: Stream, keys: Sequence[str]) -> int:
    """The last act that a decision of these slices saw."""
    decided = [lake.load_slice_commits(stream.name, EVENTS, some) for some in split_by_count(keys, PAGE)]
    return max(
        (slice_commit.counts.get(SEEN, 0) for slice_commits in decided for slice_commit in slice_commits.values()),
        default=0,
    )


def _log_findings(found: RecordsOnDlq, log: Callable[[str], object]) -> RecordsOnDlq:
    for line in found.lines:
        log(line)
    return found


def _log_retired(ledger: Ledger, stream: Stream, keys: Sequence[str], log: Callable[[str], object]) -> None:
    """Log the slices that have no key in Dagster: without it nobody can materialise them."""
    if retired := sorted(ledger.retired.list_retired(keys)):
        back = f"highwater recall-keys {stream.name} {retired[0]} {retired[-1]} --yes"
        log(f"{len(retired):,} of {len(keys):,} slices have a retired key: first {back}")


def _format_slice_keys(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - NAMED:,} more" if len(keys) > NAMED else ""
    return ", ".join(keys[:NAMED]) + more


def _build_reclaim(origin: Origin, one: DlqRecord, request: ReclaimRequest, now: datetime) -> Reclaim:
    return Reclaim(origin, one.home, one.number + 1, request.because, request.by, now)


def read_records_on_dlq(
    ledger: Ledger,
    lake: Lake,
    stream: Stream,
    choice: ParkedSelection,
    most: int | None = None,
    on: Collection[str] = (),
) -> RecordsOnDlq:
    """Select records of the DLQ: published, and neither accepted nor discarded since.

    Each record takes 1 KB of memory; no values are held.

    Args:
        ledger: has the discards and the earlier reclaims.
        lake: has the tables with rejects and publications.
        stream: the declared stream.
        choice: the selected reasons, rules, slices, keys and times.
        most: at most this number, oldest first; None means all.
        on: only records last published to these topics; all if empty.

    Raises:
        ConfigurationError: nothing is published to one of the topics.
        DependencyUnavailableError: the ledger or the lake could not be read.
    """
    in_dlq = _read_dlq_records(lake, stream)
    _ensure_published_to(stream, on, {one.next_topic for one in in_dlq.values()})
    discarded = {discard.origin for discard in ledger.discards.list_for_stream(stream.name)}

    def is_selected(one: DlqRecord) -> bool:
        # A header may name any number: beyond the greatest no copy could be believed.
        return one.number < MAX_COUNT and _matches_selection(choice, one) and (not on or one.next_topic in on)

    old = _list_aged_slices(lake, stream, sorted({one.home for one in in_dlq.values()}))
    there = {origin: one for origin, one in in_dlq.items() if one.home not in old}
    found = _select_records(
        there, count_reclaims(ledger.reclaims.list_for_stream(stream.name)), discarded, is_selected, most
    )
    return replace(found, aged=len(in_dlq) - len(there))


def _read_dlq_records(lake: Lake, stream: Stream) -> dict[Origin, DlqRecord]:
    # Downstream first, so that what was decided meanwhile is not taken for what was not.
    tables = {name: lake.open_stream_table(stream.name, name) for name in ("dlq", "rejects", "events")}
    opened = {name: table for name, table in tables.items() if table is not None}
    if not {"dlq", "rejects"} <= opened.keys():
        return {}
    for table in opened.values():
        ensure_all_rows_seen(table)
    topic = stream.topic.replace("'", "''")
    origin_condition = f"origin_topic = '{topic}'"
    homes = f"SELECT slice AS home, {_ORIGIN} FROM rejects WHERE {origin_condition} AND starts_with(slice, '{topic}@')"
    rows = query_all(
        opened,
        f"{build_left_over_clause(opened, origin_condition, more=('reason', 'rule', 'key'))}, homes AS ({homes}) "
        f"SELECT l.*, h.home FROM left_over l JOIN homes h ON {build_origin_condition('l', 'h')} WHERE l.published",
    )
    return {Origin.from_row(row): _build_dlq_record(row) for row in rows}


def _ensure_published_to(stream: Stream, on: Collection[str], lies_on: set[str]) -> None:
    """A name that is no topic of the DLQ is reported; it would mean no record, which looks like success.

    A tier that is no longer declared may still hold records.
    """
    topics = [*stream.dlq_topics]
    topics += sorted(lies_on - set(topics))
    if unknown := sorted(set(on) - set(topics)):
        raise ConfigurationError(
            f"nothing is published to {', '.join(unknown)} by stream {stream.name}",
            found=f"its DLQ topics are {', '.join(topics)}",
            remedy="name one of them",
        )


def _list_aged_slices(lake: Lake, stream: Stream, keys: Sequence[str]) -> set[str]:
    """The slices whose rows of raw have expired."""
    read = [lake.load_slice_commits(stream.name, RAW, some) for some in split_by_count(keys, PAGE)]
    return {
        key for slice_commits in read for key, slice_commit in slice_commits.items() if count_expired_rows(slice_commit)
    }


def _build_dlq_record(row: Mapping[str, Any]) -> DlqRecord:
    key = row["key"]
    return DlqRecord(
        home=row["home"],
        slice_key=row["slice"],
        next_topic=row["next_topic"],
        reason=row["reason"],
        rule=row["rule"],
        key=None if key is None else bytes(key),
        published_at=row["published_at"],
        number=row[NUMBER],
    )


def _select_records(
    in_dlq: Mapping[Origin, DlqRecord],
    reclaim_numbers: Mapping[Origin, int],
    discarded: Collection[Origin],
    takes: Callable[[DlqRecord], bool],
    most: int | None,
) -> RecordsOnDlq:
    """The selected records, and the numbers of the others."""
    remaining = {origin: one for origin, one in in_dlq.items() if origin not in discarded}
    free = {origin: one for origin, one in remaining.items() if not is_stale(reclaim_numbers, origin, one.number)}
    meant = {origin: one for origin, one in free.items() if takes(one)}
    if most is not None:
        first = sorted(meant.items(), key=lambda item: (item[1].published_at, item[0]))[:most]
        meant = dict(first)
    others = count_causes(one for origin, one in free.items() if origin not in meant)
    return RecordsOnDlq(meant, others, len(remaining) - len(free), len(in_dlq) - len(remaining))


def _matches_selection(choice: ParkedSelection, one: DlqRecord) -> bool:
    at_ms = int(one.published_at.timestamp() * 1000)
    return choice.matches(one.reason, one.rule, [one.home, one.slice_key], one.key, at_ms)
