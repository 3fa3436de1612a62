"""Dagster's metadata and descriptions: of slices, assets, samples of checks, breakers and holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from highwater.reject_reasons import format_count_name

if TYPE_CHECKING:
    from highwater.assets.work import SliceReport
    from highwater.breaker import Circuit
    from highwater.declaration import Stream
    from highwater.holds import Hold
    from highwater.slices import Slice

Metadata = dict[str, dg.MetadataValue]

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_TIMES = ("first_event_us", "last_event_us")
# Dagster stores all metadata, so a table shows at most this many partitions; `highwater explain` shows all.
MAX_SHOWN = 50


def build_slice_metadata(report: SliceReport, together: int = 1) -> Metadata:
    """The metadata of one slice in one table; never an error, since the slice is committed already.

    An event at the last microsecond of the year 9999 failed this once, and with it the run and every tick of repair.

    Args:
        report: the result of the stage.
        together: slices of the run. Its seconds are shared among them, or they would plot the size of the range.
    """
    try:
        return _build_report_metadata(report, together)
    except Exception as error:  # noqa: BLE001 - whatever a record's content does to a page
        problem = f"the metadata of {report.slice_.key} could not be written: {type(error).__name__}: {error}"
        return {"metadata_error": dg.MetadataValue.text(problem), "attempt": dg.MetadataValue.int(report.attempt)}


def _build_report_metadata(report: SliceReport, together: int) -> Metadata:
    found: Metadata = {
        **_build_offset_metadata(report.slice_),
        "dagster/partition_row_count": dg.MetadataValue.int(report.rows),
        "attempt": dg.MetadataValue.int(report.attempt),
        "planned_at": dg.MetadataValue.timestamp(report.slice_.planned_at),
        **_build_count_metadata(report.counts),
        **_build_event_span(report),
        **{name: dg.MetadataValue.float(number) for name, number in report.measures.items()},
        **_build_duration_metadata(report.seconds, together),
    }
    if report.slice_.lag is not None:
        found["lag_at_planning"] = dg.MetadataValue.int(report.slice_.lag)
    if report.delta_version >= 0:
        found["delta_version"] = dg.MetadataValue.int(report.delta_version)
    if report.note:
        found["note"] = dg.MetadataValue.text(report.note)
    if report.samples:
        found["newest"] = build_sample_table(report.samples)
    if report.plot:
        found["plot"] = dg.MetadataValue.md(report.plot)
    return found


def build_sample_table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Some rows as text, with the columns of the first."""
    records = [
        dg.TableRecord({name: "" if value is None else str(value) for name, value in row.items()}) for row in rows
    ]
    return dg.MetadataValue.table(records, dg.TableSchema([dg.TableColumn(name, "string") for name in rows[0]]))


def build_offset_table(slice_: Slice) -> dg.TableMetadataValue:
    """The ranges of a slice, one row a Kafka partition: of those with most offsets, where there are many."""
    most = sorted(slice_.ranges.items(), key=lambda one: -len(one[1]))[:MAX_SHOWN]
    rows = [
        dg.TableRecord({"partition": p, "start": r.start, "end": r.end, "offsets": len(r)}) for p, r in sorted(most)
    ]
    columns = [dg.TableColumn(name, "int") for name in ("partition", "start", "end", "offsets")]
    return dg.MetadataValue.table(rows, dg.TableSchema(columns))


def _build_offset_metadata(slice_: Slice) -> Metadata:
    """The ranges of a slice, how many there are, and that some are not shown, where that is so."""
    found: Metadata = {"offsets": build_offset_table(slice_), "partitions": dg.MetadataValue.int(len(slice_.ranges))}
    if len(slice_.ranges) > MAX_SHOWN:
        note = f"the {MAX_SHOWN} with most offsets; highwater explain '{slice_.key}' shows all {len(slice_.ranges):,}"
        found["partitions_shown"] = dg.MetadataValue.text(note)
    return found


def _build_duration_metadata(seconds: Mapping[str, float], together: int) -> Metadata:
    if not seconds:
        return {}
    shares = {f"seconds/{phase}": dg.MetadataValue.float(round(took / together, 3)) for phase, took in seconds.items()}
    return {**shares, "slices_in_run": dg.MetadataValue.int(together)}


def _build_count_metadata(counts: Mapping[str, int]) -> Metadata:
    return {
        format_count_name(name): dg.MetadataValue.int(count) for name, count in counts.items() if name not in _TIMES
    }


def _build_event_span(report: SliceReport) -> Metadata:
    if any(name not in report.counts for name in _TIMES):
        return {}
    first, last = (report.counts[name] for name in _TIMES)
    return {
        "first_event": _build_timestamp(first),
        "last_event": _build_timestamp(last),
        "event_span_seconds": dg.MetadataValue.float((last - first) / 1_000_000),
    }


def _build_timestamp(us: int) -> dg.MetadataValue:
    """A time of an event in microseconds since 1970: whole seconds, since Dagster rounds to a float."""
    try:
        return dg.MetadataValue.timestamp(_BEGIN + timedelta(seconds=us // 1_000_000))
    except OverflowError:
        return dg.MetadataValue.text(f"{us} microseconds since 1970")


def build_breaker_metadata(circuit: Circuit) -> Metadata:
    """The state of the stream's breaker."""
    return {"breaker": dg.MetadataValue.text(circuit.text)}


def build_hold_metadata(stream: Stream, holds: Sequence[Hold]) -> Metadata:
    """Metadata of the records that hold the stream, where it may be held."""
    if not stream.ordered:
        return {}
    return {"held": dg.MetadataValue.text("; ".join(hold.text for hold in holds) or "nothing is held")}


def build_stream_metadata(stream: Stream) -> Metadata:
    """The metadata of every asset of a stream: what the declaration says of its records."""
    return {
        "topic": dg.MetadataValue.text(stream.topic),
        "key": dg.MetadataValue.text(stream.key_separator.join(stream.key) or "none"),
        "version": dg.MetadataValue.text(", then ".join(stream.version_fields) or "none: the stream is append-only"),
        "event_time": dg.MetadataValue.text(stream.event_time or "the record's timestamp"),
    }


def describe_asset(stream: Stream, what: str) -> str:
    """The text of an asset's page: what it is, and the stream's three answers."""
    answers = stream.answers
    return (
        f"{what}\n\n{stream.description}\n\n"
        f"- **Does order matter?** {answers.does_order_matter}\n"
        f"- **What about duplicates?** {answers.what_about_duplicates}\n"
        f"- **What on failure?** {answers.what_on_failure}\n"
    )
