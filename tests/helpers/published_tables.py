"""The log of a publication, and the rows of one that was published."""

from __future__ import annotations

from typing import Any

from tests.helpers.accepted import Tables


def read_published_rows(tables: Tables) -> list[dict[str, Any]]:
    from tests.helpers.support import read_rows

    return read_rows(tables.lake.build_table_path("orders", "published"))
