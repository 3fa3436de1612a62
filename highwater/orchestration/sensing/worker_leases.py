"""The leases of runs' workers, as whoever looks into the ledger finds them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

# What the names of these leases begin with.
KIND = "run "


def living(leases: Mapping[str, datetime], stream: str = "") -> dict[str, datetime]:
    """Of all leases those of workers, of one stream or of all: by run id when each runs out unless it is renewed."""
    begin = f"{KIND}{stream}/" if stream else KIND
    return {name.rpartition("/")[2]: ends for name, ends in leases.items() if name.startswith(begin)}
