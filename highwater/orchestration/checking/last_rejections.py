"""Records that were rejected and not accepted since: the last rejection of each origin, as SQL over the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from highwater.assets.reclaims import NUMBER
from highwater.envelope import ORIGIN, ORIGIN_SQL
from highwater.resources.delta import has_column, read_count

if TYPE_CHECKING:
    from deltalake import DeltaTable


def build_origin_condition(one: str, other: str) -> str:
    """The SQL condition that rows of two tables are of one origin."""
    return " AND ".join(f"{one}.{name} = {other}.{name}" for name in ORIGIN)


def build_left_over_clause(tables: Mapping[str, DeltaTable], mine: str, *, more: Sequence[str] = ()) -> str:
    """A WITH clause that ends with `left_over`, one row for each origin that was rejected and not accepted since.

    Its columns are the origin, `slice`, `next_topic`, `retries` and `reclaims` of the last rejection, whether it is
    `published`, and `published_at`. The last one is that of the highest number of reclaims; among those
    the one that is not published yet, else the one that was published last.

    An origin that was accepted without a retry, and not reclaimed from the DLQ before, is in two places: it is among
    them, and the ends sum to more than was produced.

    Args:
        tables: by name; `rejects` must be among them.
        mine: which rows count, as a condition.
        more: further columns of the last rejection.
    """
    # Without the table of what was published nothing was.
    sent = "dlq" if "dlq" in tables else "rejects WHERE false"
    at = "published_at" if "dlq" in tables else "CAST(NULL AS TIMESTAMP) AS published_at"
    events = "events" if "events" in tables else "rejects"
    # Bare, so that files are left unread by their statistics; null is no more than 0 to the comparison.
    reclaimed = f"{NUMBER} > 0" if has_column(tables[events], NUMBER) else "false"
    accepted = f"{mine} AND (retries > 0 OR {reclaimed})" if "events" in tables else "false"
    wanted = ", ".join([*ORIGIN, "next_topic", *more])
    number = {name: f"{_build_number(tables, name)} AS {NUMBER}" for name in ("rejects", events, "dlq")}
    return (
        f"WITH sent AS (SELECT slice, {ORIGIN_SQL}, {at}, {number['dlq']} FROM {sent}), "
        "rejected AS (SELECT r.*, sent.published_at, sent.slice IS NOT NULL AS published "
        # Rows from before the column `retries` was there have null.
        f"FROM (SELECT slice, {wanted}, coalesce(retries, 0) AS retries, {number['rejects']} "
        f"FROM rejects WHERE {mine}) r "
        f"LEFT JOIN sent ON r.slice = sent.slice AND r.{NUMBER} = sent.{NUMBER} "
        f"AND {build_origin_condition('r', 'sent')}), "
        f"last AS (SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY {ORIGIN_SQL} ORDER BY {NUMBER} DESC, "
        "published, published_at DESC NULLS LAST, retries DESC) AS place FROM rejected) WHERE place = 1), "
        f"accepted AS (SELECT {ORIGIN_SQL}, coalesce(retries, 0) AS retries, {number[events]} FROM {events} "
        f"WHERE {accepted}), "
        f"left_over AS (SELECT last.* FROM last LEFT ANTI JOIN accepted "
        f"ON {build_origin_condition('last', 'accepted')} "
        f"AND (accepted.retries > 0 OR accepted.{NUMBER} > last.{NUMBER}))"
    )


def _build_number(tables: Mapping[str, DeltaTable], name: str) -> str:
    return read_count(tables[name], NUMBER) if name in tables else "0"
