"""A ledger that was lost, rebuilt from the lake: the commits of the slices say what was planned, lost and published."""

# Erasures and discards come from the lake's tables `erasures` and `discards`, retired keys from Dagster and the lake.
#
# A rebuilt ledger lacks:
# - plans of slices that were never read; they are planned again, under the same key where the slices around them exist;
# - who accepted a loss, and why;
# - who reclaimed a record, and reclaims whose slice was not reprocessed since;
# - epochs and fingerprints of commits by older versions.

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from highwater.assets import discards_table, erasures_table, publication_log
from highwater.assets.dlq import SENT
from highwater.assets.dlq_marks import parse_groups
from highwater.assets.reclaims import NUMBER
from highwater.batching import split_by_count
from highwater.declaration import Start
from highwater.envelope import ORIGIN, Origin
from highwater.errors import ConfigurationError, IncompleteReadError, UnknownSliceError
from highwater.maintenance import LiveKey, select_candidates
from highwater.orchestration.checking.slice_status import read_commit_attempts, read_stream_commits
from highwater.orchestration.operations.key_retirement import PAGE
from highwater.plans import Generation, Loss, PublicationRecord
from highwater.reclaims import Reclaim
from highwater.resources.commit_log import ensure_all_records_seen, ensure_all_rows_seen
from highwater.resources.delta import query, read_count
from highwater.resources.ledger.restoring import restore_plans
from highwater.slices import OffsetRange, Slice, SliceKey

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from highwater.divergence import Fingerprint
    from highwater.erasing import RecordedErasure
    from highwater.orchestration.checking.check_rules import SliceAttempts
    from highwater.resources.kafka import Kafka
    from highwater.resources.lake import Lake
    from highwater.resources.ledger import Ledger

BY = "rebuild_ledger"


@dataclass(frozen=True)
class RebuiltPlans:
    """The plans of a stream by the lake.

    Args:
        generations: each topic's generations.
        slices: in the order of their topics and ordinals.
        unread: slices that the lake lacks; the slices around them give their ranges.
        losses: holes between slices that follow each other.
        unknown: facts that cannot be derived, in sentences.
        attempts: for each slice the highest attempt that was seen.
        publications: for each slice what was published of it.
        reclaims: origins that were reclaimed from the DLQ, and reprocessed since.
        erasures: with what they took from these slices.
        retired: slices whose keys were retired, the oldest first.
        discards: how many records a person discarded.
    """

    generations: Sequence[Generation] = ()
    slices: Sequence[Slice] = ()
    unread: Sequence[str] = ()
    losses: Sequence[Loss] = ()
    unknown: Sequence[str] = ()
    attempts: Mapping[str, int] = field(default_factory=dict)
    publications: Mapping[str, PublicationRecord] = field(default_factory=dict)
    reclaims: Sequence[Reclaim] = ()
    erasures: Sequence[RecordedErasure] = ()
    retired: Sequence[str] = ()
    discards: int = 0

    @property
    def lines(self) -> list[str]:
        """The result, in sentences."""
        topics = sorted({generation.topic for generation in self.generations})
        lines = [f"{len(self.slices):,} slices of {', '.join(topics) or 'no topic'}"]
        lines += [
            f"{one.topic}: generation {one.number}, the next ordinal is {one.first_ordinal} or higher"
            for one in self.generations
        ]
        lines += (
            [f"{len(self.unread):,} of them are not in the lake: {', '.join(self.unread[:5])}"] if self.unread else []
        )
        lines += [
            f"a hole in generation {loss.generation}, partition {loss.partition}: {loss.offsets} is recorded as lost"
            for loss in self.losses
        ]
        lines += [f"{len(self.reclaims):,} records were reclaimed from the DLQ"] if self.reclaims else []
        lines += [f"{self.discards:,} records were discarded"] if self.discards else []
        return [*lines, *self._unmarked, *self._erased, *self._retired, *self.unknown]

    @property
    def _unmarked(self) -> list[str]:
        bare = [slice_.key for slice_ in self.slices if not slice_.epochs]
        warning = "the commits hold no leader epochs: other records under their offsets would not be noticed"
        return [f"of {len(bare):,} slices {warning}: {', '.join(bare[:5])}"] if bare else []

    @property
    def _erased(self) -> list[str]:
        keys = [one for one in self.erasures if not one.erasure.by_age]
        taken = [erased for one in keys for erased in one.slices.values()]
        lines = [f"{len(keys):,} erasures of keys, which took records from {len(taken):,} slices"] if taken else []
        lines += [f"{len(keys):,} erasures of keys"] if keys and not taken else []
        old = {key for one in self.erasures if one.erasure.by_age for key in one.slices}
        lines += [f"{len(old):,} slices have expired rows of raw"] if old else []
        open_ = sorted({one.slice_key for one in taken if one.done_at is None})
        return [*lines, *([f"of {', '.join(open_[:5])} they are not done: erase the keys again"] if open_ else [])]

    @property
    def _retired(self) -> list[str]:
        ends = f"{self.retired[0]} .. {self.retired[-1]}" if self.retired else ""
        return [f"{len(self.retired):,} keys are retired: {ends}"] if self.retired else []


def rebuild_plans(
    stream: Stream, some_slices: Iterable[Slice], highest: Mapping[str, int], now: datetime
) -> RebuiltPlans:
    """Work out plans from the slices that the lake holds.

    Args:
        stream: the stream.
        slices: the slices of all its topics.
        highest: by topic the highest ordinal that was seen anywhere, also beyond the lake.
        now: in UTC.
    """
    found = RebuiltPlans()
    by_topic: dict[str, list[Slice]] = {}
    for slice_ in some_slices:
        by_topic.setdefault(slice_.topic, []).append(slice_)
    for topic, topic_slices in sorted(by_topic.items()):
        ordered = sorted(topic_slices, key=lambda slice_: slice_.ordinal)
        part = _rebuild_topic_plans(stream, ordered, max(highest.get(topic, 0), ordered[-1].ordinal), now)
        found = RebuiltPlans(
            [*found.generations, *part.generations],
            [*found.slices, *part.slices],
            [*found.unread, *part.unread],
            [*found.losses, *part.losses],
            [*found.unknown, *part.unknown],
        )
    return found


def _rebuild_topic_plans(stream: Stream, some_slices: Sequence[Slice], highest: int, now: datetime) -> RebuiltPlans:
    generations: list[Generation] = []
    slices: list[Slice] = []
    unread: list[str] = []
    unknown: list[str] = []
    losses: list[Loss] = []
    ends: dict[int, int] = {}
    prints: Mapping[int, Fingerprint] = {}
    for slice_ in some_slices:
        before = slices[-1] if slices else None
        skipped = slice_.ordinal > (before.ordinal if before else -1) + 1
        opens = not generations or generations[-1].number != slice_.generation
        if opens:
            generations.append(_build_generation(slice_))
            ends, prints = {}, {}
        if opens and skipped and not _has_zero_start(stream, slice_, before):
            unknown.append(
                f"{slice_.key} is the first of generation {slice_.generation} that was read: what was planned "
                "before it, if anything, is not known"
            )
        # A partition that joins later begins at 0. One that had no leader at first begins where its first slice does.
        zero = skipped and (not opens or _has_zero_start(stream, slice_, before))
        joined = {p: 0 if zero else r.start for p, r in slice_.ranges.items() if p not in ends}
        generations[-1] = replace(generations[-1], starts={**generations[-1].starts, **joined})
        ends |= joined
        holes = {p: OffsetRange(ends[p], r.start) for p, r in slice_.ranges.items() if r.start > ends[p]}
        if holes and skipped:
            # It was planned under one of the ordinals in between, and will be read under the first of them.
            ordinal = before.ordinal + 1 if before else 0
            # It was planned before this one, so nothing in it can be of a later epoch either.
            missing = replace(slice_, ordinal=ordinal, ranges=_build_missing_ranges(slice_, holes), fingerprints=prints)
            slices.append(missing)
            unread.append(missing.key)
        else:
            losses += [
                Loss(stream.name, slice_.topic, slice_.generation, p, hole, f"a hole found by {BY}", BY, now)
                for p, hole in sorted(holes.items())
            ]
        # A slice commit holds the fingerprints of its own records alone, and a plan those from before as well.
        prints = {**prints, **slice_.fingerprints}
        slices.append(replace(slice_, fingerprints=prints))
        ends.update({p: r.end for p, r in slice_.ranges.items()})
    generations[-1] = replace(generations[-1], first_ordinal=highest + 1)
    return RebuiltPlans(generations, slices, unread, losses, unknown)


def _has_zero_start(stream: Stream, first: Slice, before: Slice | None) -> bool:
    """Whether a generation whose first slices are not there began at offset 0: a new topic, or one read whole."""
    if before is not None:
        return first.topic_id != before.topic_id
    return first.topic != stream.topic or stream.start == Start.EARLIEST


def _build_missing_ranges(slice_: Slice, holes: Mapping[int, OffsetRange]) -> dict[int, OffsetRange]:
    return {p: holes.get(p, OffsetRange(r.start, r.start)) for p, r in slice_.ranges.items()}


def _build_generation(first: Slice) -> Generation:
    return Generation(
        stream=first.stream,
        topic=first.topic,
        topic_id=first.topic_id,
        number=first.generation,
        starts={},
        opened_at=first.planned_at,
        opened_by=BY,
        first_ordinal=first.ordinal,
    )


def read_plans_from_lake(lake: Lake, kafka: Kafka, stream: Stream, known: Sequence[str]) -> RebuiltPlans:
    """Read what the lake holds of a stream, and how far Dagster and Kafka have seen its ordinals.

    Args:
        lake: the tables.
        kafka: its consumer groups hold the marks of publications.
        stream: the stream.
        known: the keys that Dagster holds; empty where it cannot be asked.

    Raises:
        IncompleteReadError: not all rows that the tables' logs count could be read.
        DependencyUnavailableError: the lake or Kafka could not be read.
    """
    slice_commits, now = read_stream_commits(lake, stream), datetime.now(UTC)
    raw, dlq = slice_commits["raw"], slice_commits["dlq"]
    if unread := sorted(lake.list_slices_in_rows(stream.name, "raw") - raw.keys()):
        raise IncompleteReadError(
            f"a read of raw of {stream.name} did not return the commits of all slices that rows name",
            stored=f"{len(unread):,} more slices by their rows",
            found=f"no commit of {unread[0]}",
            remedy="nothing was rebuilt; see IncompleteReadError in the runbook",
        )
    if (table := lake.open_stream_table(stream.name, "raw")) is not None:
        ensure_all_records_seen(table)  # a slice without rows has no file that names it
    marked = [one.slice_key for one in parse_groups(kafka.list_group_names()).values()]
    highest_seen = find_highest_ordinals([*raw, *known, *marked])
    found = rebuild_plans(stream, [slice_commit.slice_ for slice_commit in raw.values()], highest_seen, now)
    attempts = read_commit_attempts(lake, stream, slice_commits)
    tables = attempts.group_by_table().values()
    numbers = {slice_.key: max(table.get(slice_.key, 0) for table in tables) for slice_ in found.slices}
    published = {
        key: PublicationRecord(slice_commit.attempt, slice_commit.counts.get(SENT, slice_commit.rows or 0), now)
        for key, slice_commit in dlq.items()
        if key in numbers
    }
    return replace(
        found,
        attempts=numbers,
        publications=published,
        reclaims=_load_reclaims(lake, stream),
        erasures=_load_erasures(lake, stream, numbers),
        retired=_list_retired_keys(lake, stream, found.slices, attempts, known, now),
        discards=len(discards_table.read(lake, stream.name)),
    )


def _load_erasures(lake: Lake, stream: Stream, slices: Collection[str]) -> list[RecordedErasure]:
    """The erasures that the lake keeps; of slices that are not known any more there is nothing to account for."""
    found = erasures_table.read(lake, stream.name)
    return [replace(one, slices={key: it for key, it in one.slices.items() if key in slices}) for one in found]


def _list_retired_keys(
    lake: Lake,
    stream: Stream,
    some_slices: Sequence[Slice],
    attempts: SliceAttempts,
    known: Sequence[str],
    now: datetime,
) -> list[str]:
    """The keys that maintenance would retire and Dagster has not: it has retired them, or would have to again."""
    live = {*known}
    wanted = select_candidates(
        [LiveKey(slice_.key, slice_.planned_at) for slice_ in some_slices],
        stream.maintenance.live_slices,
        stream.maintenance.live_for,
        now,
    )
    whole = [key for key in wanted if key not in live and not attempts.select_missing_tables(key)]
    return [
        key
        for some in split_by_count(whole, PAGE)
        for key in publication_log.ensure_unchanged(lake, stream, some, attempts.events)
    ]


def _load_reclaims(lake: Lake, stream: Stream) -> list[Reclaim]:
    """The reclaims that the decisions of the main topic's slices saw: by whom and why is not known."""
    topic = stream.topic.replace("'", "''")
    found: dict[Origin, Reclaim] = {}
    for name in ("events", "rejects"):
        table = lake.open_stream_table(stream.name, name)
        number = "0" if table is None else read_count(table, NUMBER)
        if table is None or number == "0":
            continue  # from before anything could be reclaimed
        ensure_all_rows_seen(table)
        where = f"starts_with(slice, '{topic}@') AND {number} > 0"
        for row in query(table, f"SELECT slice, {', '.join(ORIGIN)}, {number} AS {NUMBER} FROM t WHERE {where}"):
            origin = Origin.from_row(row)
            found[origin] = Reclaim(origin, row["slice"], row[NUMBER], f"found by {BY}", BY, datetime.now(UTC))
    return [*found.values()]


def find_highest_ordinals(keys: Iterable[str]) -> dict[str, int]:
    """By topic the highest ordinal among some slice keys."""
    found: dict[str, int] = {}
    for text in keys:
        try:
            key = SliceKey.parse(text)
        except UnknownSliceError:
            continue  # the mark of something else than a slice
        found[key.topic] = max(found.get(key.topic, 0), key.ordinal)
    return found


def rebuild_from_lake(
    ledger: Ledger,
    lake: Lake,
    kafka: Kafka,
    stream: Stream,
    known: Sequence[str],
    log: Callable[[str], object],
    *,
    dry_run: bool,
) -> RebuiltPlans:
    """Rebuild the ledger of a stream from the lake, or report the result without writing.

    Args:
        ledger: the ledger, without slices of the stream.
        lake: has the commits of the slices.
        kafka: has the topics, whose IDs and offsets are compared with the commits.
        stream: the declared stream.
        known: Dagster's partition keys of the stream.
        log: takes sentences about the result.
        dry_run: write nothing.

    Raises:
        ConfigurationError: the ledger holds slices of the stream: nothing is written over them.
        DependencyUnavailableError: the lake, Kafka or the ledger is unavailable.
    """
    held = sum(count for (name, _), count in ledger.count_slices().items() if name == stream.name)
    if held:
        raise ConfigurationError(
            f"the ledger holds slices of {stream.name}",
            stored=f"{held:,} slices",
            found="a rebuild is for a ledger that was lost",
            remedy="no action needed; if the ledger is damaged, point HIGHWATER_LEDGER_URL at an empty database",
        )
    found = read_plans_from_lake(lake, kafka, stream, known)
    for line in found.lines:
        log(line)
    if not dry_run:
        discards_table.sync_with_ledger(ledger, lake, stream.name)
        restore_plans(
            ledger.database,
            found.generations,
            found.slices,
            found.attempts,
            found.losses,
            found.publications,
            found.reclaims,
            found.erasures,
            dict.fromkeys(found.retired, datetime.now(UTC)),
        )
        log("rebuilt")
    else:
        log("a dry run: nothing was written")
    return found
