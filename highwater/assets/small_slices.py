"""Few records go through Spark without what pays for many: generated code, and planning again between shuffles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from highwater.assets.origins import select_tier_slices
from highwater.errors import DependencyUnavailableError
from highwater.resources.delta import add_actions, open_table
from highwater.resources.session_settings import session_settings
from highwater.resources.spark_tables import AS_PLANNED

if TYPE_CHECKING:
    from highwater.assets.work import Work
    from highwater.slices import Slice

# A slice through all tables, in seconds, with generated code and without (2 cores, `orders`, medians): 8.3 and 6.0 of
# 1,000 records, 7.1 and 5.4 of 10,000, 9.3 and 8.3 of 40,000, where classifying alone is slower already. Where the code
# is compiled already: 3.7 and 3.4 of 1,000, 4.4 and 4.7 of 10,000.
MAX_OFFSETS = 20_000
# Limit for the bytes in Kafka of records whose columns a process fetches.
MAX_BYTES = 64 * 2**20
# Limit for a table that is read beside them, such as `current` by its MERGE.
MAX_ROWS = 100_000

# A slice of 1,000 took 8 % longer where Spark planned again between shuffles; without that it needs their number.
SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        **AS_PLANNED,
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
)


def are_few(slices: Sequence[Slice], size: int = 0) -> bool:
    """Whether slices have few records.

    Args:
        slices: the slices.
        size: the bytes of their records in Kafka, where a process fetches them.
    """
    return sum(slice_.offsets for slice_ in slices) <= MAX_OFFSETS and size <= MAX_BYTES


@contextmanager
def small_slice_settings(work: Work, tables: Sequence[str] = ()) -> Iterator[None]:
    """Run the block's queries with settings for few records where they read few.

    Args:
        work: the slices, and the session.
        tables: the paths of the tables that are read beyond the slices' own rows.
    """
    few = are_few(work.slices) and all(map(_has_few_rows, tables))
    with session_settings(work.spark, SETTINGS if few else {}):
        yield


def list_classification_tables(work: Work) -> list[str]:
    """The paths of the tables that classification reads beyond the slices' rows of raw."""
    lookup, tiers = work.stream.lookup, select_tier_slices(work, work.slices)
    return [
        *([work.lake.build_reference_path(lookup.table)] if lookup else []),
        *([work.lake.build_table_path(work.stream.name, "events")] if tiers else []),
    ]


def _has_few_rows(path: str) -> bool:
    """Whether a table has few rows by its log; not where that cannot be read, or does not count them."""
    try:
        table = open_table(path)
        counts = [] if table is None else add_actions(table)["num_records"].to_pylist()
    except DependencyUnavailableError:
        return False
    return None not in counts and sum(counts) <= MAX_ROWS
