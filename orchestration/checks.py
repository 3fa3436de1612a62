"""The checks of a stream's tables, slice by slice.

What belongs here: telling Dagster what `orchestration.verdicts` decided, for every slice of a run. What does not: the
decision itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dagster as dg

from orchestration import standing
from orchestration.failures import told_to_dagster
from orchestration.partitions import slices_of
from orchestration.stream_assets import table_key

if TYPE_CHECKING:
    from highwater.declaration import Stream
    from orchestration.verdicts import Verdict
    from resources.lake import Lake


@dataclass(frozen=True)
class Check:
    """One check of every stream.

    Args:
        name: the check's name.
        table: the table that it checks.
        needs: the tables that must be there first.
        what: one sentence for the check's page.
        decide: answers for each slice.
    """

    name: str
    table: str
    needs: tuple[str, ...]
    what: str
    decide: Callable[["Lake", "Stream", Sequence[str]], dict[str, "Verdict"]]


CHECKS = (
    Check(
        "offsets_accounted_for",
        "events",
        ("raw", "rejects"),
        "Every record of raw is in exactly one place: raw = events + rejects + tombstones + superseded.",
        standing.conservation,
    ),
    Check(
        "versions_in_order",
        "current",
        ("events",),
        "For every key of the slice, current is at or above the highest version that the slice brought.",
        standing.version_order,
    ),
)


def stream_checks(stream: "Stream") -> list[dg.AssetChecksDefinition]:
    """The checks of a stream."""
    return [_check(stream, check) for check in CHECKS]


def _check(stream: "Stream", check: Check) -> dg.AssetChecksDefinition:
    @dg.multi_asset_check(
        specs=[
            dg.AssetCheckSpec(
                check.name,
                asset=table_key(stream, check.table),
                additional_deps=[table_key(stream, name) for name in check.needs],
                description=check.what,
                partitions_def=slices_of(stream),
            )
        ],
        name=f"{stream.name}_{check.table}_{check.name}",
        required_resource_keys={"lake"},
    )
    def run(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        op = context.op_execution_context
        yield from evaluations(op, stream, check)
        # The result of the step as a whole; Dagster takes the answers above slice by slice.
        yield dg.Output(None, output_name=op.op_def.output_defs[0].name)

    return run


def evaluations(context: dg.OpExecutionContext, stream: "Stream", check: Check) -> Iterator[dg.AssetCheckEvaluation]:
    """One evaluation for each slice of the run: the result of a check over a range has no partition."""
    with told_to_dagster(context.retry_number, lambda: None):
        verdicts = check.decide(context.resources.lake.open(), stream, context.partition_keys)
    for key, verdict in verdicts.items():
        yield evaluation(stream, check, key, verdict)


def evaluation(stream: "Stream", check: Check, key: str, verdict: "Verdict") -> dg.AssetCheckEvaluation:
    """A verdict in Dagster's form."""
    return dg.AssetCheckEvaluation(
        asset_key=table_key(stream, check.table),
        check_name=check.name,
        passed=verdict.passed,
        description=verdict.text,
        metadata={name: dg.MetadataValue.int(number) for name, number in verdict.numbers.items()},
        severity=dg.AssetCheckSeverity.ERROR,
        partition=key,
    )
