"""SQL of the check `versions_in_order`: keys that `current` has at the right version, but from a later origin (I6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from highwater.assets.parsing import select_content_fields
from highwater.assets.schema_evolution import build_evolved_stream
from highwater.envelope import ORIGIN
from highwater.orchestration.checking.check_rules import SAMPLES
from highwater.orchestration.checking.version_queries import STREAM, VersionFindings
from highwater.resources.delta import query_all, quote_text, select_common_columns, slice_is_one_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltalake import DeltaTable

    from highwater.declaration import Stream

CLASS = "of a later origin"
RULE = ("origin_timestamp_ms", "origin_partition", "origin_offset", "origin_generation")


def _is_later(names: Sequence[str] = RULE) -> str:
    first, *others = names
    after = f"s.{first} > b.{first}"
    return f"({after} OR (s.{first} = b.{first} AND {_is_later(others)}))" if others else after


# The condition, in SQL, that the origin of `s` comes after that of `b`; an origin does not come after itself.
IS_LATER = _is_later()


@dataclass(frozen=True)
class ComparedEvents:
    """The events that are compared with `current`, in SQL.

    Args:
        group: the SQL of the group that an answer counts for.
        mine: the condition of the events.
        keys: the query of their keys.
        settled: the condition of the rows of `current` that are checked.
    """

    group: str
    mine: str
    keys: str
    settled: str = "true"

    @classmethod
    def from_slices(cls, slices: Sequence[str]) -> ComparedEvents:
        """The events of some slices."""
        slices_condition = slice_is_one_of(slices)
        return cls("slice", slices_condition, f"SELECT DISTINCT key FROM e WHERE {slices_condition}")

    @classmethod
    def from_key_range(cls, key_range: str, unsettled: str, slices: str) -> ComparedEvents:
        """All keys of the stream that have a version twice.

        Args:
            key_range: the condition of the keys that are looked at together.
            unsettled: that of slices that `current` does not follow yet; their keys are left out.
            slices: the query for the slices of events, see `build_slices_query`.
        """
        keys = (
            f"SELECT key FROM e WHERE {key_range} GROUP BY key "
            f"HAVING NOT bool_or({unsettled}) AND count(*) > count(DISTINCT version)"
        )
        settled = f"updated_by_slice IN (SELECT slice FROM ({slices}) WHERE NOT {unsettled})"
        return cls(quote_text(STREAM), "true", keys, settled)


_RULE = ", ".join(RULE)
_ANOTHER = " OR ".join(f"b.{name} <> s.{name}" for name in ORIGIN)
# The row of `current` beside the events that it should not replace. A second delivery has the content of the first:
# which of the two `current` holds says nothing.
_SQL = f"""
WITH wanted AS ({{keys}}),
     won AS (SELECT * FROM (SELECT {{columns}}, updated_by_slice,
                              row_number() OVER (PARTITION BY key ORDER BY version DESC, {_RULE}) AS "#place"
                            FROM c LEFT SEMI JOIN wanted ON c.key = wanted.key)
             WHERE "#place" = 1 AND {{settled}}),
     late AS (SELECT b."#group" AS group_name, b.key AS key, b.version AS in_events, s.version AS in_current,
                {", ".join(f"b.{name} AS {name}" for name in ORIGIN)},
                row_number() OVER (PARTITION BY b."#group", b.key
                                   ORDER BY {", ".join(f"b.{name}" for name in RULE)}) AS "#place"
              FROM (SELECT {{group}} AS "#group", {{columns}} FROM e WHERE {{mine}}) b
              JOIN won s ON b.key = s.key AND b.version = s.version
              WHERE {IS_LATER} AND ({_ANOTHER}) AND ({{differs}}))
SELECT * FROM (SELECT group_name, key, in_events, in_current, {", ".join(ORIGIN)},
                      count(*) OVER (PARTITION BY group_name) AS found,
                      row_number() OVER (PARTITION BY group_name ORDER BY key) AS rank FROM late WHERE "#place" = 1)
WHERE rank <= {SAMPLES} ORDER BY group_name, key
"""


def read_later_origins(
    tables: Mapping[str, DeltaTable], stream: Stream, among: ComparedEvents
) -> dict[str, VersionFindings]:
    """For each slice, or for the stream, the keys whose content in `current` is not that of the earliest origin.

    Args:
        tables: events as `e`, `current` as `c`, and for the whole stream those of `build_slices_query`.
        stream: the stream.
        among: the events that are compared.

    Raises:
        DependencyUnavailableError: the lake could not be read.
    """
    both = [tables["e"], tables["c"]]
    fields = select_content_fields(build_evolved_stream(stream, tables["e"]))
    contents = select_common_columns(both, ["event_time", *[field.name for field in fields]])
    columns = select_common_columns(both, ["key", "version", *ORIGIN, "origin_timestamp_ms"]) + contents
    sql = _SQL.format(
        group=among.group,
        mine=among.mine,
        keys=among.keys,
        settled=among.settled,
        columns=", ".join(columns),
        differs=" OR ".join(f"(b.{name} IS DISTINCT FROM s.{name})" for name in contents),
    )
    found: dict[str, VersionFindings] = {}
    for row in query_all(tables, sql):
        group = found.setdefault(row.pop("group_name"), VersionFindings())
        count, rank = row.pop("found"), row.pop("rank")
        group.counts[CLASS] += count if rank == 1 else 0
        group.keep({**row, "class": CLASS})
    return found
