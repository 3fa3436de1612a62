"""The gaps of slices, explained by what a second reader sees of them in Kafka (I5)."""

# The evidence vanishes: retention takes the log, and after compaction an aborted record looks like a compacted one. So
# what was seen is kept in the ledger once, with a digest of the places. As long as the gaps are those, nothing is asked
# again. A slice without gaps is kept too: a gap that it has later is none that compaction explains.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from highwater.erasing import compute_digest as compute_key_digest
from highwater.erasing import compute_erasure_times, to_milliseconds
from highwater.errors import DependencyUnavailableError, OffsetsExpiredError, TopicAbsentError
from highwater.foreign import find_publication_time
from highwater.gaps import (
    FORBIDDEN,
    Gaps,
    PartitionOffset,
    Ranges,
    build_reads,
    can_compact,
    clip_gaps,
    compute_digest,
    compute_gaps,
    count_offsets,
    expand_ranges,
    merge_places,
)
from highwater.orchestration.checking.check_rules import SAMPLES, CheckResult
from highwater.orchestration.checking.plan_checks import ABSENT
from highwater.plans import find_overtaking_generation, subtract_losses
from highwater.resources.topic_facts import fetch_topic_settings
from highwater.retention import count_expired_rows
from highwater.slices import OffsetRange

if TYPE_CHECKING:
    from confluent_kafka import Message

    from highwater.declaration import Stream
    from highwater.erasing import ErasedCounts
    from highwater.orchestration.checking.offset_queries import RawRows, RawSlices
    from highwater.resources.kafka import Kafka
    from highwater.resources.ledger import Ledger
    from highwater.slice_commits import SliceCommit
    from highwater.slices import Slice

# Reading this many offsets that nobody asked for takes about as long as another consumer: 0.1 s at 200,000 a second.
APART = 20_000


@dataclass(frozen=True)
class GapAnswer:
    """Kafka's answer for the gaps of a slice.

    Args:
        lacking: records that it serves to readers of committed records, and that raw lacks.
        aborted: offsets that readers of uncommitted records alone see.
        unseen: offsets that Kafka holds no more, or that other records occupy now.
        why: why they were not seen.
    """

    lacking: Sequence[PartitionOffset] = ()
    aborted: int = 0
    unseen: int = 0
    why: str = ""


def check_gaps_explained(ledger: Ledger, kafka: Kafka, stream: Stream, found: RawSlices) -> dict[str, CheckResult]:
    """For each slice whether its offsets are rows of raw and gaps that something explains.

    Raises:
        DependencyUnavailableError: the ledger or, where gaps are met for the first time, Kafka could not be read.
    """
    recorded, erased = (
        ledger.gaps.read_for_slices([*found.slice_commits]),
        ledger.erasures.read_for_slices([*found.slice_commits]),
    )
    return {
        slice_.key: _check_slice_gaps(
            ledger,
            kafka,
            stream,
            slice_,
            found.slice_commits[slice_.key],
            found.rows[slice_.key],
            recorded.get(slice_.key),
            erased.get(slice_.key, ()),
        )
        if slice_.key in found.slice_commits
        else ABSENT
        for slice_ in found.slices
    }


def _check_slice_gaps(
    ledger: Ledger,
    kafka: Kafka,
    stream: Stream,
    slice_: Slice,
    slice_commit: SliceCommit,
    rows: RawRows,
    recorded: Gaps | None,
    erased: Sequence[ErasedCounts],
) -> CheckResult:
    """The recorded gaps without those that an erasure left, or rows that expired: the ledger has both."""
    everything = compute_gaps(slice_.ranges, rows.held)
    # An expiry explains no gap where the rows are there again.
    old = [one for one in erased if one.by_age] if count_expired_rows(slice_commit) else []
    whole = _subtract_ranges(everything, _build_erased_ranges(old))
    gone = count_offsets(everything) - count_offsets(whole)
    if gone < count_expired_rows(slice_commit):
        return _build_unrecorded_result(slice_, everything, count_expired_rows(slice_commit), gone)
    gaps = _subtract_ranges(whole, _build_erased_ranges([one for one in erased if not one.by_age]))
    found, lacking = _explain_gaps(ledger, kafka, slice_, slice_commit, gaps, recorded)
    if lacking and (out := _exclude_erased_records(ledger, kafka, stream, slice_, lacking)):
        gaps = _subtract_ranges(gaps, out)
        found, _ = _explain_gaps(ledger, kafka, slice_, slice_commit, gaps, recorded)
    count = count_offsets(whole) - count_offsets(gaps)
    left_out = [f"{count:,} offsets of erased records"] if count else []
    left_out += [f"{gone:,} of records whose rows have expired"] if gone else []
    numbers = {name: it for name, it in (("erased", count), ("aged", gone)) if it}
    note = f"; {', '.join(left_out)} are left out" if left_out else ""
    return replace(found, text=found.text + note, numbers={**found.numbers, **numbers})


def _build_unrecorded_result(slice_: Slice, gaps: Ranges, reported: int, known: int) -> CheckResult:
    text = (
        f"by the commit of raw {reported:,} rows have expired, and the ledger knows of {known:,} of them. "
        f"highwater maintain {slice_.stream} --yes learns what the lake knows; else restore the table erasures"
    )
    return CheckResult(
        passed=False, text=text, numbers={**_count_offsets(slice_, gaps), "aged": known}, samples=_build_samples(gaps)
    )


def _build_erased_ranges(erased: Sequence[ErasedCounts]) -> dict[int, list[OffsetRange]]:
    return merge_places({place for one in erased for place in expand_ranges(one.places)})


def _exclude_erased_records(
    ledger: Ledger, kafka: Kafka, stream: Stream, slice_: Slice, lacking: Sequence[PartitionOffset]
) -> dict[int, list[OffsetRange]]:
    """The missing records of raw that were erased before the slice was read; the ledger keeps their places."""
    erasures = ledger.erasures.list_for_stream(slice_.stream)
    gone, wanted = compute_erasure_times(erasures), set(lacking)
    if not gone:
        return {}
    found: dict[str, set[PartitionOffset]] = {}
    for ranges in build_reads(merge_places(wanted), APART):
        for message in kafka.read(slice_.topic, ranges, committed=True):
            place, key = (message.partition() or 0, message.offset() or 0), message.key()
            digest = "" if key is None else compute_key_digest(key if isinstance(key, bytes) else str(key).encode())
            if place not in wanted or digest not in gone:
                continue
            if _find_publication_time(stream, slice_.topic, message) <= to_milliseconds(gone[digest]):
                found.setdefault(digest, set()).add(place)
    for digest, places in found.items():
        number = max(one.number for one in erasures if one.digest == digest)
        ledger.erasures.record_excluded(number, slice_.key, merge_places(places), datetime.now(UTC))
    return merge_places({place for places in found.values() for place in places})


def _find_publication_time(stream: Stream, topic: str, message: Message) -> int:
    kind, timestamp = message.timestamp()
    headers: Any = message.headers()
    # librdkafka numbers the types from 1 on, the protocol from 0 on.
    return find_publication_time(stream, topic, headers or [], timestamp, kind - 1)


def _explain_gaps(
    ledger: Ledger, kafka: Kafka, slice_: Slice, slice_commit: SliceCommit, gaps: Ranges, recorded: Gaps | None
) -> tuple[CheckResult, Sequence[PartitionOffset]]:
    """The answer, and the records that raw lacks though Kafka serves them."""
    if recorded is not None:
        if recorded.digest == compute_digest(gaps):
            return _build_recorded_result(slice_, gaps, recorded), ()
        seen = _look(ledger, kafka, slice_, gaps)
        return _build_changed_result(slice_, gaps, recorded, seen), seen.lacking
    lost = _read_lost_ranges(ledger, slice_, slice_commit, gaps)
    seen = _look(ledger, kafka, slice_, _subtract_ranges(gaps, lost))
    if seen.lacking:
        return _build_missing_result(slice_, gaps, seen), seen.lacking
    first = _build_gaps_record(ledger, kafka, slice_, gaps, count_offsets(lost), seen)
    ledger.gaps.record(slice_, first)
    return _build_recorded_result(slice_, gaps, first, seen.why), ()


def _count_offsets(slice_: Slice, gaps: Ranges) -> dict[str, int]:
    return {"offsets": slice_.offsets, "gaps": count_offsets(gaps)}


def _read_lost_ranges(
    ledger: Ledger, slice_: Slice, slice_commit: SliceCommit, gaps: Ranges
) -> dict[int, list[OffsetRange]]:
    """Gaps whose loss was accepted before raw read the slice; the slice commit says how many they were."""
    if not slice_commit.counts.get("lost"):
        return {}
    left = subtract_losses(slice_, ledger.list_losses(slice_.stream, slice_.topic))
    cut = compute_gaps(slice_.ranges, {p: [offsets] for p, offsets in left.ranges.items()})
    found: dict[int, list[OffsetRange]] = {}
    for partition, ranges in cut.items():
        for hole in ranges:
            found.setdefault(partition, []).extend(clip_gaps(gaps, {partition: hole}).get(partition, []))
    return found if count_offsets(found) == slice_commit.counts["lost"] else {}


def _subtract_ranges(gaps: Ranges, taken: Ranges) -> dict[int, list[OffsetRange]]:
    found = {
        p: [rest for gap in ranges for rest in compute_gaps({p: gap}, {p: taken.get(p, ())}).get(p, [])]
        for p, ranges in gaps.items()
    }
    return {p: ranges for p, ranges in found.items() if ranges}


def _build_gaps_record(ledger: Ledger, kafka: Kafka, slice_: Slice, gaps: Ranges, lost: int, seen: GapAnswer) -> Gaps:
    """The result of the first look; compaction is recognised by the topic's settings, now and before."""
    nobody = count_offsets(gaps) - lost - seen.aborted - seen.unseen
    policy = _fetch_cleanup_policy(kafka, slice_.topic) if nobody else None
    unclear = nobody and any(
        can_compact(value) for value in {policy, *ledger.gaps.list_cleanup_policies(slice_.topic_id)}
    )
    return Gaps(
        digest=compute_digest(gaps),
        aborted=seen.aborted,
        markers=0 if unclear else nobody,
        markers_or_compacted=nobody if unclear else 0,
        lost=lost,
        unseen=seen.unseen,
        cleanup_policy=policy,
        looked_at=datetime.now(UTC),
    )


def _fetch_cleanup_policy(kafka: Kafka, topic: str) -> str:
    found = (fetch_topic_settings(kafka, topic) or {}).get("cleanup.policy")
    return FORBIDDEN if found is None else found.value


def _look(ledger: Ledger, kafka: Kafka, slice_: Slice, gaps: Ranges) -> GapAnswer:
    """Look at the gaps, and at nothing that lies far from them.

    Raises:
        DependencyUnavailableError: Kafka did not answer, or a partition has no leader: nothing is known then (I15).
    """
    if not gaps:
        return GapAnswer()
    if find_overtaking_generation(slice_, ledger.topics.list_generations(slice_.stream, slice_.topic)):
        return GapAnswer(unseen=count_offsets(gaps), why="other records occupy its offsets now, which was accepted")
    try:
        state = kafka.read_topic_state(slice_.topic)
    except TopicAbsentError:
        return GapAnswer(unseen=count_offsets(gaps), why="the topic is gone")
    if state.topic_id != slice_.topic_id:
        return GapAnswer(unseen=count_offsets(gaps), why="the topic was recreated since")
    bounds: dict[int, OffsetRange] = {}
    for partition in gaps:
        seen = state.partitions.get(partition)
        if seen is None or seen.log_start is None or seen.last_stable is None:
            raise DependencyUnavailableError(
                f"{slice_.topic} partition {partition} has no leader, so the gaps of {slice_.key} are not checked",
                remedy="bring its broker back; it is tried again",
            )
        bounds[partition] = OffsetRange(seen.log_start, max(seen.last_stable, seen.log_start))
    there = clip_gaps(gaps, bounds)
    gone = count_offsets(gaps) - count_offsets(there)
    why = "Kafka holds them no more" if gone else ""
    return replace(_read_gap_answer(kafka, slice_, there), unseen=gone, why=why)


def _read_gap_answer(kafka: Kafka, slice_: Slice, gaps: Ranges) -> GapAnswer:
    try:
        uncommitted = _read(kafka, slice_.topic, gaps, committed=False)
        # A reader of committed records sees none that the other does not see.
        served = _read(kafka, slice_.topic, merge_places(uncommitted), committed=True)
    except OffsetsExpiredError as error:
        raise DependencyUnavailableError(
            f"retention took offsets of {slice_.key} while its gaps were looked at",
            found=error.found,
            remedy="nothing to do: it is looked again",
        ) from error
    return GapAnswer(lacking=sorted(served), aborted=len(uncommitted) - len(served))


def _read(kafka: Kafka, topic: str, gaps: Ranges, *, committed: bool) -> set[PartitionOffset]:
    """The places among the gaps where a reader of this kind sees a record."""
    wanted = expand_ranges(gaps)
    return {
        place
        for ranges in build_reads(gaps, APART)
        for message in kafka.read(topic, ranges, committed=committed)
        if (place := (message.partition() or 0, message.offset() or 0)) in wanted
    }


def _build_recorded_result(slice_: Slice, gaps: Ranges, recorded: Gaps, why: str = "") -> CheckResult:
    numbers = {**_count_offsets(slice_, gaps), **recorded.counts}
    if not gaps:
        return CheckResult(
            passed=True, text=f"raw has a record for each of {slice_.offsets:,} offsets", numbers=numbers
        )
    note = ", ".join(f"{count:,} {_NAMES[name]}" for name, count in recorded.counts.items() if count)
    text = (
        f"{slice_.offsets:,} offsets, {numbers['gaps']:,} gaps: {note}, as seen {recorded.looked_at:%Y-%m-%d %H:%M} UTC"
    )
    if recorded.unseen:
        reason = why or "Kafka held them no more"
        text += f". Of the unseen nothing is known: {reason} when they were first looked at"
        return CheckResult(passed=False, text=text, numbers=numbers, samples=_build_samples(gaps), warning=True)
    return CheckResult(passed=True, text=text, numbers=numbers)


_NAMES: Mapping[str, str] = {
    "aborted": "aborted",
    "markers": "transaction markers",
    "markers_or_compacted": "markers or compacted",
    "lost": "accepted as lost",
    "unseen": "unseen",
}


def _build_missing_result(slice_: Slice, gaps: Ranges, seen: GapAnswer) -> CheckResult:
    text = (
        f"{len(seen.lacking):,} records that Kafka serves are not in raw. Materialise raw of the slice again, and what "
        "follows it, while Kafka holds them"
    )
    numbers = {**_count_offsets(slice_, gaps), "lacking": len(seen.lacking)}
    return CheckResult(passed=False, text=text, numbers=numbers, samples=_build_samples(merge_places(seen.lacking)))


def _build_changed_result(slice_: Slice, gaps: Ranges, recorded: Gaps, seen: GapAnswer) -> CheckResult:
    """The gaps are others than when they were first looked at: rows came or went since, whatever Kafka shows now."""
    if seen.lacking:
        return _build_missing_result(slice_, gaps, seen)
    before, now = sum(recorded.counts.values()), count_offsets(gaps)
    text = (
        f"{now:,} gaps that are others than the {before:,} of {recorded.looked_at:%Y-%m-%d %H:%M} UTC, and Kafka "
        "serves no record there now: something else than Highwater removed, added or moved rows of raw. Restore raw"
    )
    return CheckResult(
        passed=False,
        text=text,
        numbers={**_count_offsets(slice_, gaps), "before": before},
        samples=_build_samples(gaps),
    )


def _build_samples(gaps: Ranges) -> list[dict[str, int]]:
    found = [{"partition": p, "start": gap.start, "end": gap.end} for p, ranges in gaps.items() for gap in ranges]
    return found[:SAMPLES]
