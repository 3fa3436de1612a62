"""Jobs and commands of operators, and a record of the calls that they make."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from assets.streams.orders import STREAM as ORDERS
from highwater.errors import ConfigurationError

OTHERS = replace(ORDERS, name="others", topic="others", publishes=None)
DIGEST = "0" * 64
BY, BECAUSE = {"by": "ann"}, {"because": "test"}
SLICE, LAST = "orders@0000001", "orders@0000002"

# Job: the module whose function does the work, the run's configuration, and the arguments of the command.
SAME: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "accept_loss": ("accepting_losses", {**BY, "partitions": [1]}, ["orders", "--by", "ann", "--partition", "1"]),
    "accept_divergence": ("accepting_losses", BY, ["orders", "--by", "ann"]),
    "redrive_parked": (
        "parked",
        {**BY, "reasons": ["invalid"], "rules": ["paid"], "since": "2026-03-01", "most": 3},
        ["orders", "--by", "ann", "--reason", "invalid", "--rule", "paid", "--since", "2026-03-01", "--limit", "3"],
    ),
    "discard_parked": (
        "parked",
        {**BY, **BECAUSE, "slices": [SLICE], "keys": ["o1"]},
        ["orders", "--by", "ann", "--because", "test", "--slice", SLICE, "--key", "o1"],
    ),
    "reclaim": (
        "reclaiming",
        {**BY, **BECAUSE, "topics": ["orders.parked"], "until": "2026-03-01T10:00:00"},
        ["orders", "--by", "ann", "--because", "test", "--on", "orders.parked", "--until", "2026-03-01T10:00:00"],
    ),
    "accept_rejects": (
        "accepting_rejects",
        {**BY, **BECAUSE, "slices": [SLICE]},
        [SLICE, "--by", "ann", "--because", "test"],
    ),
    "release_hold": (
        "releasing_holds",
        {**BY, **BECAUSE, "slice": SLICE, "park": True},
        [SLICE, "--park", "--by", "ann", "--because", "test"],
    ),
    "retry_slice": (
        "retrying_slices",
        {**BY, **BECAUSE, "slice": SLICE},
        [SLICE, "--by", "ann", "--because", "test"],
    ),
    "pause_tier": (
        "pausing",
        {**BY, **BECAUSE, "topic": "orders.dlq.1"},
        ["orders", "orders.dlq.1", "--by", "ann", "--because", "test"],
    ),
    "resume_tier": ("pausing", {**BY, "topic": "orders.dlq.1"}, ["orders", "orders.dlq.1", "--by", "ann"]),
    "pause": (
        "pausing",
        {**BY, **BECAUSE, "part": "retries"},
        ["orders", "retries", "--by", "ann", "--because", "test"],
    ),
    "resume": ("pausing", {**BY, "part": "retries"}, ["orders", "retries", "--by", "ann"]),
    "recall_keys": ("key_retirement", {"first": SLICE, "last": LAST}, ["orders", SLICE, LAST]),
    "erase": (
        "erasing",
        {**BY, **BECAUSE, "digest": DIGEST},
        ["orders", "--digest", DIGEST, "--by", "ann", "--because", "test"],
    ),
    "rebuild_ledger": ("rebuilding", {}, ["orders"]),
    "rebuild_current": ("rebuilding_current", {}, ["orders"]),
    "rebuild_all": (
        "rebuilding_all",
        {**BY, "accepted_again": True},
        ["orders", "--by", "ann", "--accepted-again"],
    ),
}
# The function of each module that does the work.
WORK = {
    "accepting_losses": "accept_topic_losses",
    "accepting_rejects": "accept_slices",
    "erasing": "erase_key",
    "key_retirement": "recall",
    "parked": "redrive_or_discard",
    "pausing": "pause_or_resume",
    "rebuilding": "rebuild_from_lake",
    "rebuilding_all": "rebuild_from_kafka",
    "rebuilding_current": "rebuild_from_events",
    "reclaiming": "reclaim_records",
    "releasing_holds": "release_slice",
    "retrying_slices": "release_for_retries",
}


class Calls:
    """Calls of the functions that do the work, with what was asked of them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []

    def __call__(self, *values: Any, **options: Any) -> Any:
        asked = dict(options)
        for at, value in enumerate(values):
            if type(value).__name__.endswith("Request"):
                asked |= asdict(value)
            elif isinstance(value, str):
                asked[str(at)] = value
        # A command has tuples where a job has lists.
        self.seen.append(
            json.loads(json.dumps(asked, default=lambda one: [*one] if isinstance(one, set) else str(one)))
        )
        raise ConfigurationError("called", remedy="none")
