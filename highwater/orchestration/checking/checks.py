"""The checks of a stream's tables, slice by slice."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from highwater.assets.slice_classification import needs_key_count
from highwater.declaration import Severity, Stream
from highwater.orchestration import metadata
from highwater.orchestration.asset_keys import build_partitions_definition, build_table_key
from highwater.orchestration.checking import (
    contents,
    follower_checks,
    gap_checks,
    key_checks,
    metrics_checks,
    origin_checks,
    plan_checks,
    published_checks,
    slice_status,
    version_checks,
)
from highwater.orchestration.checking.check_rules import CheckResult
from highwater.orchestration.checking.offset_queries import read_raw_offsets
from highwater.orchestration.failures import translate_errors
from highwater.orchestration.resources import open_schema_finder
from highwater.reclaims import count_reclaims
from highwater.resources.kafka import Kafka
from highwater.resources.lake import Lake
from highwater.resources.ledger import Ledger
from highwater.schemas import Schema
from highwater.settings import find_docs_url

Results = dict[str, dict[str, "CheckResult"]]


def find_page(name: str) -> str:
    """The page of a check, from the top of the repository."""
    return f"docs/checks/{name}.md"


def build_link(name: str) -> dg.MetadataValue[str]:
    """The page of a check as metadata: a link where it is said where the pages are served."""
    served = find_docs_url(os.environ)
    return (
        dg.MetadataValue.path(find_page(name)) if served is None else dg.MetadataValue.url(f"{served}/checks/{name}.md")
    )


@dataclass(frozen=True)
class Sources:
    """The sources that checks read; schemas by number or GUID, or None where no registry is configured."""

    ledger: "Ledger"
    kafka: "Kafka"
    lake: "Lake"
    schemas: "Callable[[int | str], Schema | None] | None" = None


@dataclass(frozen=True)
class Checks:
    """Checks of one table that are decided together.

    Args:
        table: the table that they check.
        needs: the tables that must be there first.
        what: for each check's name one sentence for its page.
        decide: answers for each check and slice.
        of: selects the checks that a stream has; all of them if None.
    """

    table: str
    needs: tuple[str, ...]
    what: Mapping[str, str]
    decide: Callable[[Sources, "Stream", Sequence[str]], Results]
    of: Callable[["Stream"], list[str]] | None = None

    def select_names(self, stream: "Stream") -> list[str]:
        """The names of those that a stream has."""
        return list(self.what) if self.of is None else self.of(stream)

    def check_slices(self, ask: Sources, stream: "Stream", keys: Sequence[str]) -> Results:
        """For each check that a stream has the result on each slice."""
        return self.decide(ask, stream, keys) if self.select_names(stream) else {}


def _check_raw(ask: Sources, stream: "Stream", keys: Sequence[str]) -> Results:
    found = read_raw_offsets(ask.ledger, ask.lake, stream, keys)
    return {
        "slices_tile": plan_checks.check_slices_tile(ask.ledger, stream, keys),
        "offsets_as_planned": plan_checks.check_offsets_as_planned(found),
        "gaps_explained": gap_checks.check_gaps_explained(ask.ledger, ask.kafka, stream, found),
    }


CHECKS = (
    Checks(
        "raw",
        (),
        {
            "slices_tile": "The slice begins where the one before it ends, or after a recorded loss.",
            "offsets_as_planned": (
                "The commit names the offsets of the plan; every row has one of them, and no two rows the same."
            ),
            "gaps_explained": (
                "Offsets without a row are aborted records, transaction markers, compacted records or accepted losses, "
                "as a second reader saw them when the slice was first read; none is a record that Kafka serves."
            ),
        },
        _check_raw,
    ),
    Checks(
        "events",
        ("raw", "rejects"),
        {
            "offsets_accounted_for": (
                "Every record of raw is in exactly one place, origin by origin: raw = events + rejects + tombstones + "
                "superseded."
            )
        },
        lambda ask, stream, keys: {
            "offsets_accounted_for": origin_checks.check_offsets_accounted(ask.ledger, ask.lake, stream, keys)
        },
    ),
    Checks(
        "events",
        ("raw",),
        {contents.AS_RECORDED: "Every event has the fields that its record in raw has, read by another parser."},
        lambda ask, stream, keys: {
            contents.AS_RECORDED: contents.check_events_as_recorded(ask.ledger, ask.lake, stream, keys, ask.schemas)
        },
    ),
    Checks(
        "dlq",
        ("rejects",),
        {"rejects_published": "The rejects of the slice are the rows of dlq, and as many as were published."},
        lambda ask, stream, keys: {
            "rejects_published": follower_checks.check_rejects_published(ask.ledger, ask.lake, stream, keys)
        },
    ),
    Checks(
        "current",
        ("events",),
        {
            version_checks.IN_ORDER: (
                "For every key of the slice, current is at or above the highest version that the slice brought; where "
                "two events have that version, it has the one of the earlier origin."
            ),
            version_checks.FOLLOWS_EVENTS: (
                "Each row of current that the slice wrote equals the winning event of its key."
            ),
        },
        lambda ask, stream, keys: {
            version_checks.IN_ORDER: slice_status.check_version_order(ask.lake, stream, keys),
            version_checks.FOLLOWS_EVENTS: follower_checks.check_current_follows_events(ask.lake, stream, keys),
        },
        lambda stream: [version_checks.IN_ORDER, version_checks.FOLLOWS_EVENTS] if stream.versioned else [],
    ),
    Checks(
        "events",
        ("raw",),
        {key_checks.AS_DECLARED: "Every record of an event has the key that the fields of `key` give."},
        lambda ask, stream, keys: {
            key_checks.AS_DECLARED: key_checks.check_record_keys(ask.lake, stream, keys, ask.schemas)
        },
        lambda stream: [key_checks.AS_DECLARED] if needs_key_count(stream) else [],
    ),
    Checks(
        "events",
        (),
        {
            version_checks.ALONG_OFFSETS: (
                "Along the offsets of a key its versions rise; each that falls is explained by a retry, a second "
                "delivery, a conflict, or a producer that sent it late. Earlier slices count."
            ),
            version_checks.ONE_CONTENT: "No version of a key has two contents, in one slice or in several.",
            version_checks.TRANSITIONS: "Every state follows one that it may follow, by the declared transitions.",
        },
        lambda ask, stream, keys: version_checks.check_versions(ask.lake, stream, keys),
        version_checks.select_check_names,
    ),
    Checks(
        "events",
        # A missing version may be among the rejects, and on its way back.
        ("rejects", "dlq"),
        {
            version_checks.MISSING: (
                "Below the highest version of a key none is missing; one that waits in a tier or is parked, or may "
                "still come, is a warning."
            )
        },
        lambda ask, stream, keys: version_checks.check_version_gaps(
            ask.lake, stream, keys, count_reclaims(ask.ledger.reclaims.list_for_stream(stream.name))
        ),
        version_checks.select_missing_check_names,
    ),
    Checks(
        "metrics",
        ("events",),
        {
            metrics_checks.FOLLOWS: (
                "The minutes that the slice touches are there once, and are what one query over all events says."
            )
        },
        lambda ask, stream, keys: metrics_checks.check_metrics_follow_events(ask.ledger, ask.lake, stream, keys),
        lambda stream: [metrics_checks.FOLLOWS] if stream.metrics else [],
    ),
    Checks(
        "published",
        ("events",),
        {
            published_checks.PUBLISHED: (
                "Every event of the slice was sent or is a second delivery, and nothing else was sent of it."
            )
        },
        lambda ask, stream, keys: published_checks.check_events_published(ask.ledger, ask.lake, stream, keys),
        lambda stream: [published_checks.PUBLISHED] if stream.publishes else [],
    ),
)


def build_stream_checks(stream: "Stream") -> list[dg.AssetChecksDefinition]:
    """The checks of a stream."""
    return [_build_checks(stream, checks) for checks in CHECKS if checks.select_names(stream)]


def _build_checks(stream: "Stream", checks: Checks) -> dg.AssetChecksDefinition:
    names = checks.select_names(stream)

    @dg.multi_asset_check(
        specs=[
            dg.AssetCheckSpec(
                name,
                asset=build_table_key(stream, checks.table),
                additional_deps=[build_table_key(stream, needed) for needed in checks.needs],
                description=f"{checks.what[name]} If it fails: {find_page(name)}",
                metadata={"page": build_link(name)},
                # Dagster then runs the assets downstream of the table only after this check, in runs that have both.
                blocking=stream.find_severity(name) is Severity.BLOCK,
                partitions_def=build_partitions_definition(stream),
            )
            for name in names
        ],
        name=f"{stream.name}_{checks.table}_{names[0]}",
        required_resource_keys={"kafka", "ledger", "lake"},
    )
    def run(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        op = context.op_execution_context
        yield from evaluate_checks(op, stream, checks)
        # The results of the step as a whole; Dagster takes the answers above slice by slice.
        for output in op.op_def.output_defs:
            yield dg.Output(None, output_name=output.name)

    return run


def evaluate_checks(
    context: dg.OpExecutionContext, stream: "Stream", checks: Checks
) -> Iterator[dg.AssetCheckEvaluation]:
    """One evaluation for each slice of the run: the result of a check over a range has no partition."""
    with translate_errors(context.retry_number, lambda: None):
        made = context.resources
        sources = Sources(made.ledger.open(), made.kafka.open(), made.lake.open(), open_schema_finder())
        results = checks.check_slices(sources, stream, context.partition_keys)
    for name, by_slice in results.items():
        for key, result in by_slice.items():
            yield build_evaluation(stream, checks.table, name, key, result)


def select_failures(stream: "Stream", results: Results, *, warned: bool) -> Iterator[tuple[str, str, "CheckResult"]]:
    """The check, the slice and the result of each that fails; one that is a warning by itself is no failure.

    Args:
        stream: its declaration.
        results: the results of checks on slices.
        warned: whether those count that are warnings because the stream declares their check to be one.
    """
    for name, by_slice in results.items():
        counts = warned or stream.find_severity(name) is not Severity.WARN
        yield from ((name, key, one) for key, one in by_slice.items() if counts and not one.passed and not one.warning)


def build_evaluation(
    stream: "Stream", table: str, name: str, key: str, result: "CheckResult"
) -> dg.AssetCheckEvaluation:
    """A result in Dagster's form; how much weight it has, the stream declares."""
    severity = stream.find_severity(name)
    warns = result.warning or severity is Severity.WARN
    found: dict[str, dg.MetadataValue] = {
        number: dg.MetadataValue.int(count) for number, count in result.numbers.items()
    }
    if not result.passed:
        found["page"] = build_link(name)
    if result.samples:
        found["samples"] = metadata.build_sample_table(result.samples)
    return dg.AssetCheckEvaluation(
        asset_key=build_table_key(stream, table),
        check_name=name,
        passed=result.passed,
        description=result.text,
        metadata=found,
        severity=dg.AssetCheckSeverity.WARN if warns else dg.AssetCheckSeverity.ERROR,
        blocking=severity is Severity.BLOCK,
        partition=key,
    )
